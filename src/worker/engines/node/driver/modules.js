// Modules requested by code, and how to request each again.
//
// Records the results of `require` and `import`. A module or one of its exports is saved by
// reference.
'use strict';

const { types } = host;
const { builtinModules } = host.require('module');
const brief = load('brief');

const builtins = new Set(builtinModules);
const PARTS = ['promises', 'posix', 'win32', 'strict', 'webcrypto'];
const records = new Map(); // module to {how, specifier, base}
const found = new WeakMap(); // exported value to {record, path}, or null as long as no module was added

let negatives = new WeakSet();

const isReferable = (value) => (typeof value === 'object' && value !== null) || typeof value === 'function';

/** Records the target of a specifier. `base` is the directory of resolution; none for Node's own modules. */
function note(value, how, specifier, base) {
  if (!isReferable(value) || records.has(value)) return;
  const plain = specifier.startsWith('node:') ? specifier.slice(5) : specifier;
  if (builtins.has(plain)) notePartsOf(value, how, specifier);
  records.set(value, builtins.has(plain) ? { how, specifier, base: null } : { how, specifier, base });
  negatives = new WeakSet();
}

/** Objects held by Node's modules that are more than data; a getter of Node creates some. */
function notePartsOf(module, how, specifier) {
  for (const key of PARTS) {
    const part = Reflect.has(module, key) ? module[key] : undefined;
    if (isReferable(part) && !records.has(part)) records.set(part, { how, specifier, base: null, inside: [key] });
  }
}

/** {how, specifier, base, path} of a module or one of its exports; undefined for anything else. */
function find(value) {
  if (!isReferable(value) || negatives.has(value)) return undefined;
  if (records.has(value)) return formOf(records.get(value), []);
  const known = found.get(value);
  if (known !== undefined) return known;
  noteGlobals();
  for (const [module, record] of records) {
    const path = pathTo(module, value);
    if (path !== undefined) {
      const made = formOf(record, path);
      found.set(value, made);
      return made;
    }
  }
  negatives.add(value);
  return undefined;
}

/** Node's modules that code uses without requesting them, as at its prompt: those in use. */
function noteGlobals() {
  for (const name of builtins) {
    // Reading `process` creates its streams in some versions; code does not request it as a module.
    if (name === 'process' || name === 'console') continue;
    const value = Reflect.getOwnPropertyDescriptor(host.user.global, name)?.value;
    if (isReferable(value) && !records.has(value) && value === host.require(name)) note(value, 'require', name, null);
  }
}

const formOf = ({ how, specifier, base, inside = [] }, path) => ({ how, specifier, base, path: [...inside, ...path] });

function pathTo(module, value) {
  if (types.isProxy(module)) return undefined;
  const name = typeof value === 'function' ? brief.own(value, 'name') : undefined;
  if (typeof name === 'string' && name !== '' && member(module, name) === value) return [name];
  for (const key of Reflect.ownKeys(module)) {
    if (typeof key === 'string' && member(module, key) === value) return [key];
  }
  for (const key of ['default']) {
    const inner = member(module, key);
    if (!isReferable(inner) || types.isProxy(inner)) continue;
    for (const each of Reflect.ownKeys(inner)) {
      if (typeof each === 'string' && member(inner, each) === value) return [key, each];
    }
  }
  return undefined;
}

/** A data property or a namespace's export; getters are not run. */
function member(module, key) {
  try {
    return brief.own(module, key);
  } catch {
    return undefined; // an export that is not initialised
  }
}

/** Follows a path from a module. */
function follow(value, path) {
  let at = value;
  for (const key of path) {
    if (!isReferable(at)) throw new TypeError(`it has no ${key}`);
    at = at[key];
  }
  if (path.length && at === undefined) throw new TypeError(`it has no ${path.join('.')}`);
  return at;
}

/** Whether code other than Node's was loaded. */
function hasForeign() {
  for (const { base } of records.values()) if (base !== null) return true;
  return false;
}

function forget() {
  for (const [module, record] of records) if (record.base !== null) records.delete(module);
}

Object.assign(exports, { note, find, hasForeign, follow, forget, builtins, isModule: (value) => records.has(value) });
