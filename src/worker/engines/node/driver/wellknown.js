// Objects and functions that every engine has (Math, Array.prototype.map, Symbol.iterator), saved
// by their path.
//
// Collected once before any user code: the globals, three levels deep.
'use strict';

const globals = load('globals');
const { types } = host;

const DEPTH_MAX = 3;
const HIDDEN = {
  '%TypedArray%': () => Object.getPrototypeOf(host.user.intrinsics.Uint8Array),
};

const kept = []; // [object, keys, the original content of each]
const paths = new Map();
const roots = new Map();

function install() {
  for (const [name, found] of Object.entries(globals.initial())) if (Object.hasOwn(found, 'value')) enter(name, found.value);
  for (const [name, make] of Object.entries(HIDDEN)) enter(name, make());
  for (const name of Object.getOwnPropertyNames(Symbol)) if (typeof Symbol[name] === 'symbol') paths.set(Symbol[name], ['Symbol', name]);
}

function enter(name, value) {
  roots.set(name, value);
  // The global object is one of its own properties. Of `process` only the object itself: its properties change.
  note(value, [name], value === host.user.global || value === host.process || name === 'require' || name === 'module' ? DEPTH_MAX : 1);
}

function note(value, path, depth) {
  if ((typeof value !== 'object' || value === null) && typeof value !== 'function') return;
  if (types.isProxy(value) ? depth > 1 : paths.has(value)) return;
  paths.set(value, path);
  if (depth >= DEPTH_MAX || types.isProxy(value)) return;
  const keys = Reflect.ownKeys(value);
  kept.push([value, keys, keys.map((key) => contentOf(value, key))]);
  for (const key of keys) {
    if (typeof key !== 'string') continue;
    const found = Reflect.getOwnPropertyDescriptor(value, key);
    if (Object.hasOwn(found, 'value')) note(found.value, [...path, key], depth + 1);
  }
}

/** The content of a property; for an accessor, its getter. Primitive data may change by itself and is ignored. */
function contentOf(object, key) {
  const found = Reflect.getOwnPropertyDescriptor(object, key);
  if (found === undefined) return kept;
  const content = Object.hasOwn(found, 'value') ? found.value : found.get;
  return typeof content === 'function' || (typeof content === 'object' && content !== null) ? content : undefined;
}

/** Whether these objects have no added and no replaced properties. */
function isPristine() {
  for (const [object, keys, contents] of kept) {
    if (Reflect.ownKeys(object).length !== keys.length) return false;
    for (let at = 0; at < keys.length; at++) {
      if (contents[at] !== undefined && contentOf(object, keys[at]) !== contents[at]) return false;
    }
  }
  return true;
}

/** The path of a value that every engine has, or undefined. */
const find = (value) => paths.get(value);

/** The value at a path, or undefined. */
function follow(path) {
  let at = roots.get(path[0]);
  for (const key of path.slice(1)) {
    if ((typeof at !== 'object' || at === null) && typeof at !== 'function') return undefined;
    at = Reflect.getOwnPropertyDescriptor(at, key)?.value;
  }
  return at;
}

Object.assign(exports, { install, find, follow, isPristine });
