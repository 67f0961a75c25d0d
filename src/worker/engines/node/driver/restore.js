// Loading: builds the variables from their entries.
//
// Owns the entries during a load. Modules are loaded first, which may take a while. Entries that
// fail for a missing dependency are retried as long as any succeeds. A bad entry does not affect
// the others.
'use strict';

const brief = load('brief');
const gate = load('gate');
const modules = load('modules');
const settings = load('settings');
const variables = load('variables');
const wire = load('wire');
const { Decoder, BadEntry, Absent } = load('decode');
const { Reader, joined } = load('bytes');
const { FORMAT, DECLARED, ATTRIBUTE } = load('format');
const { createRequire } = host.require('module');
const { global } = host.user;

const IMPORT_MS = 30000;
const setTimer = host.user.global.setTimeout;
const clearTimer = host.user.global.clearTimeout;

const ORDER = ['env', 'cwd', 'import', 'fn', 'class', 'var'];

const entries = new Map(); // key to pieces
let openKey = null;
let pending = false;
const loaded = new Map(); // "specifier\0base" to {value} or {failure}

/** Clears the current state. */
function begin() {
  load('globals').forgetHistory();
  variables.forgetAll();
  load('state').forget();
  load('trace').forget();
  modules.forget();
  settings.reset();
  entries.clear();
  loaded.clear();
}

/** One chunk of an entry. */
function take(frame, tail) {
  const { key } = frame;
  if (typeof key !== 'string') throw new wire.Malformed('an entry without a key');
  if (key !== openKey) entries.set(key, []);
  if (tail !== null) entries.get(key).push(tail);
  openKey = frame.more === true ? key : null;
}

/** Builds the state; `done` receives the entries that could not be built, as the reply's `missed`. */
function finish(done) {
  const plans = [];
  const failures = new Map();
  for (const [key, pieces] of entries) {
    try {
      plans.push(plan(key, joined(pieces.length ? pieces : [new Uint8Array(0)])));
    } catch (error) {
      failures.set(key, error);
    }
  }
  entries.clear();
  memberships = new Set(plans.filter((each) => each.decoder === null).map(({ key, leader }) => `${key}\0${leader}`));
  plans.sort((one, other) => rank(one.key) - rank(other.key) || (one.key < other.key ? -1 : 1));
  for (const each of plans.filter(({ setting }) => setting !== undefined)) {
    try {
      settings.apply(each.key, each.setting);
    } catch (error) {
      failures.set(each.key, error);
    }
  }
  pending = true;
  loadModules(plans, () => {
    pending = false;
    build(plans.filter(({ setting }) => setting === undefined), failures);
    load('state').adopt();
    done([...failures].map(([key, error]) => ({ key, type: key.split('/', 1)[0], reason: reasonOf(error) })));
  });
}

const rank = (key) => {
  const at = ORDER.indexOf(key.split('/', 1)[0]);
  return at < 0 ? ORDER.length : at;
};

/** Decodes an entry's bytes. */
function plan(key, bytes) {
  if (bytes.length < 2 || bytes[0] !== FORMAT) throw new BadEntry(`unknown format ${bytes.length ? bytes[0] : 'of an empty entry'}`);
  const tag = String.fromCharCode(bytes[1]);
  if (tag === 's') {
    if (!settings.isSetting(key)) throw new BadEntry('unknown setting');
    return { key, setting: JSON.parse(new Reader(bytes, 2).text()) };
  }
  if (tag === 'R') return { key, leader: new Reader(bytes, 2).text(), members: [], decoder: null };
  if (tag !== 'v' && tag !== 'G') throw new BadEntry(`unknown tag ${JSON.stringify(tag)}`);
  const decoder = new Decoder(bytes, 2);
  const members = [];
  const count = tag === 'G' ? decoder.in.count() : 1;
  for (let at = 0; at < count; at++) {
    const memberKey = tag === 'G' ? decoder.in.text() : key;
    const kind = DECLARED[decoder.in.byte()];
    if (kind === undefined) throw new BadEntry('unknown declaration');
    const attributes = kind === 'property' ? decoder.in.byte() : 0;
    const name = memberKey.slice(memberKey.indexOf('/') + 1);
    if (kind !== 'property' && !variables.IDENTIFIER.test(name)) throw new BadEntry('not a name');
    const token = decoder.token();
    decoder.roots.set(name, token);
    members.push({ key: memberKey, name, kind, attributes, token });
  }
  decoder.read();
  return { key, members, decoder, isGroup: tag === 'G' };
}

// ---- modules

const keyOf = (specifier, base) => `${specifier}\0${base ?? ''}`;

function loadModules(plans, then) {
  const wanted = new Map();
  for (const { decoder } of plans) {
    for (const form of decoder ? decoder.modules() : []) wanted.set(keyOf(form.specifier, form.base), form);
  }
  let left = 1;
  const one = () => {
    left -= 1;
    if (left === 0) then();
  };
  for (const [key, { how, specifier, base }] of wanted) {
    if (how !== 'import') {
      try {
        keep(key, createRequire((base ?? settings.start()) + '/')(specifier), how, specifier, base);
      } catch (error) {
        loaded.set(key, { failure: error });
      }
      continue;
    }
    left += 1;
    importOne(key, specifier, base, one);
  }
  one();
}

function importOne(key, specifier, base, then) {
  let settled = false;
  const settle = (result) => {
    if (settled) return;
    settled = true;
    clearTimer(timer);
    gate.enter();
    load('main').again(() => {
      if (Object.hasOwn(result, 'value')) keep(key, result.value, 'import', specifier, base);
      else loaded.set(key, result);
      then();
    });
  };
  const timer = setTimer(() => settle({ failure: new Error(`importing ${specifier} takes more than ${IMPORT_MS} ms`) }), IMPORT_MS);
  const { importModule } = load('imports');
  host.user.then(importModule(specifier, undefined, base ?? undefined), (value) => settle({ value }), (failure) => settle({ failure }));
}

function keep(key, value, how, specifier, base) {
  loaded.set(key, { value });
  modules.note(value, how, specifier, base);
}

/** The module of a specifier, already loaded; see decode.js. */
function loadedModule(specifier, base) {
  const found = loaded.get(keyOf(specifier, base));
  if (found === undefined) throw new BadEntry(`module ${specifier} was not loaded`);
  if (Object.hasOwn(found, 'failure')) throw new Absent(`module ${specifier} cannot be loaded: ${headOf(found.failure)}`);
  return found.value;
}

const headOf = (error) => brief.cut((typeof error === 'object' && error !== null ? brief.headline(error) : brief.line(error)).split('\n')[0], 200);

// ---- values

function build(plans, failures) {
  const done = new Set();
  let left = plans;
  for (;;) {
    const again = [];
    for (const each of left) {
      try {
        if (each.decoder === null) resolveMember(each, done, plans);
        else place(each);
        done.add(each.key);
        failures.delete(each.key);
      } catch (error) {
        failures.set(each.key, error);
        again.push(each);
      }
    }
    if (again.length === 0) return;
    left = again.length < left.length ? again : untie(again, done, failures);
    if (left === null) return;
  }
}

/**
 * Builds one entry with a class whose source needs a value that needs the class: missing names are
 * placeholders during its evaluation, and its attributes follow. Returns the remaining entries; null if none can be built so.
 */
function untie(left, done, failures) {
  for (const each of left) {
    if (each.decoder === null || !each.decoder.hasFunctions() || !each.decoder.isReady()) continue;
    const absent = left.flatMap(({ members }) => members.map(({ name }) => name)).filter((name) => !variables.isDeclared(name));
    for (const name of absent) Object.defineProperty(global, name, { value: nothing, configurable: true, writable: true });
    let failure;
    try {
      each.decoder.build();
    } catch (error) {
      failure = error;
    }
    for (const name of absent) Reflect.deleteProperty(global, name);
    if (failure !== undefined) continue;
    giveNames(each);
    done.add(each.key);
    failures.delete(each.key);
    return left.filter((other) => other !== each);
  }
  return null;
}

/** Stands in for a value that is not built yet: every operation returns the stand-in. It is no class. */
const nothing = host.user.proxy(() => {}, {
  get: (target, key) => (typeof key === 'symbol' || key === 'prototype' ? undefined : nothing),
  apply: () => nothing,
  set: () => true,
});

/** A member of a group is built with the group. */
function resolveMember({ key, leader }, done, plans) {
  const group = plans.find((each) => each.key === leader);
  if (group === undefined || !group.isGroup || !group.members.some((each) => each.key === key)) throw new BadEntry('the entry that holds it is missing');
  if (!done.has(leader)) throw new Absent('the entry that holds it could not be loaded');
}

/** Builds an entry's values and binds their names. */
function place(each) {
  each.decoder.build();
  giveNames(each);
}

function giveNames({ key, members, decoder, isGroup }) {
  for (const member of members) {
    // A member deleted or changed after the group was saved has no entry that refers to the group.
    if (isGroup && member.key !== key && !isMember(member.key, key)) continue;
    const value = decoder.resolve(member.token);
    variables.declare(member.name, member.kind, value);
    if (member.kind === 'property' && member.attributes !== 7) {
      const { attributes } = member;
      Reflect.defineProperty(global, member.name, {
        enumerable: (attributes & ATTRIBUTE.ENUMERABLE) !== 0,
        configurable: (attributes & ATTRIBUTE.CONFIGURABLE) !== 0,
        writable: (attributes & ATTRIBUTE.WRITABLE) !== 0,
      });
    }
  }
}

let memberships = new Set();
const isMember = (key, leader) => memberships.has(`${key}\0${leader}`);

function reasonOf(error) {
  const isOurs = error instanceof BadEntry || error instanceof Absent || error instanceof RangeError;
  return brief.cut(isOurs ? error.message : `loading it raised ${headOf(error)}`, 400);
}

Object.assign(exports, { begin, take, finish, loadedModule, isPending: () => pending });
