// Saving: after an execution, the entries whose bytes changed, and the list of what cannot be saved.
//
// Owns a record per variable: its last sent form. Runs no user code.
'use strict';

const brief = load('brief');
const effects = load('effects');
const settings = load('settings');
const variables = load('variables');
const wire = load('wire');
const { Encoder, Missed } = load('encode');
const { digest, joined, sizeOf, Writer } = load('bytes');
const { FORMAT, DECLARED, ATTRIBUTE } = load('format');
const modules = load('modules');
const pending = load('pending');
const { types } = host;
const { global, intrinsics } = host.user;

const CHUNK = wire.TAIL_MAX;
const NAME_MAX = 256;
// From this size on, computing an execution's effects pays off.
const LARGE = 1 << 15;
const OBJECT_COST = 32;
const MISSED_COST = 256;
const NONE = new Set();
const LONE = /[\ud800-\udfff]/u;

const records = new Map(); // name to {key, digest, value, kind}
const settingsSent = new Map(); // key to body text
const missed = new Map(); // name to the entry of the list
let missedSent = '[]';
let cost = 0;

function forget() {
  records.clear();
  settingsSent.clear();
  missed.clear();
  missedSent = '[]';
}

/** Posts the changes. `text` is the code that ran, as far as known. */
const afterExecution = (text) => update({ resend: false, adopt: false, text });
/** Posts every entry. */
const everything = () => update({ resend: true, adopt: false });
/** Treats the current state as saved, as after a load. */
const adopt = () => update({ resend: false, adopt: true });

function update(how) {
  const names = variables.names();
  let reached = null;
  if (how.text === undefined || how.resend || cost < LARGE) {
    if (how.text !== undefined) effects.heard(how.text);
    effects.unknown();
  } else reached = effects.touched(how.text, records);
  const known = survey(names);
  const items = [];
  const replaced = reached === null ? [] : replacedOnes();
  withoutHooks(() => {
    for (const name of names) {
      if (reached !== null && !reached.has(name) && isKept(name, replaced)) continue;
      const item = itemOf(name, how);
      if (item === null) continue;
      items.push(item);
      encode(item, known);
    }
    missNeeding(items);
    join(items, known);
  });
  for (const item of items) finish(item, how);
  cost = 0;
  for (const [name, record] of records) {
    cost += record.cost ?? 0;
    if (names.has(name)) continue;
    records.delete(name);
    missed.delete(name);
    if (record.digest !== null && !how.adopt) wire.post({ ev: 'del', key: record.key });
  }
  sendSettings(how);
  tellMissed(how);
}

/** Whether a variable that the code did not reach is unchanged, including what it refers to by name. */
function isKept(name, replaced) {
  const record = records.get(name);
  if (record === undefined || record.isAlways || !Object.is(record.value, variables.read(name))) return false;
  for (const each of replaced) if (record.needs.has(each)) return false;
  return true;
}

/** Functions and classes that were redeclared or are gone. */
function replacedOnes() {
  return [...records].filter(([name, { value }]) => typeof value === 'function' && variables.read(name) !== value).map(([name]) => name);
}

/** The top-level names of functions and classes, and the known prototypes. */
function survey(names) {
  const found = { names: new Map(), classes: new Map() };
  for (const name of names) {
    const value = variables.read(name);
    if (typeof name !== 'string' || typeof value !== 'function' || types.isProxy(value) || modules.find(value) !== undefined) continue;
    if (found.names.has(value) && brief.own(value, 'name') !== name) continue;
    found.names.set(value, name);
    const prototype = brief.own(value, 'prototype');
    if (typeof prototype === 'object' && prototype !== null) found.classes.set(prototype, name);
  }
  return found;
}

/** Formatting a stack could run user code. */
function withoutHooks(inner) {
  const hook = Reflect.getOwnPropertyDescriptor(intrinsics.Error, 'prepareStackTrace');
  if (hook === undefined || !hook.configurable) return inner();
  Reflect.deleteProperty(intrinsics.Error, 'prepareStackTrace');
  try {
    return inner();
  } finally {
    Reflect.defineProperty(intrinsics.Error, 'prepareStackTrace', hook);
  }
}

const isAtom = (value) => (typeof value !== 'object' || value === null) && typeof value !== 'function' && typeof value !== 'symbol';

/** The item to inspect, or null if it cannot have changed. */
function itemOf(name, how) {
  const value = variables.read(name);
  const record = records.get(name);
  const kind = variables.kindOf(name);
  if (!how.resend && record !== undefined && record.atom && isAtom(value) && Object.is(value, record.value) && kind === record.kind) return null;
  return { name, value, kind, key: keyOf(name, value), pieces: null, reason: null, encoder: null, member: false };
}

function keyOf(name, value) {
  if (typeof name !== 'string' || name.length > NAME_MAX || LONE.test(name)) return 'var/' + brief.line(name, 80);
  if ((typeof value === 'object' && value !== null && modules.isModule(value)) || (typeof value === 'function' && modules.find(value) !== undefined)) return 'import/' + name;
  if (typeof value === 'function' && !types.isProxy(value)) return (brief.isClass(value) ? 'class/' : 'fn/') + name;
  return 'var/' + name;
}

function encode(item, known) {
  const { name, value } = item;
  try {
    if (typeof name !== 'string' || name.length > NAME_MAX || LONE.test(name)) throw new Missed('the name is too long or not text');
    const found = variables.isLexical(name) ? undefined : Reflect.getOwnPropertyDescriptor(global, name);
    if (found !== undefined && !Object.hasOwn(found, 'value')) throw new Missed('a getter of the global object');
    const encoder = new Encoder(known, [name]);
    encoder.out.byte(FORMAT);
    encoder.out.byte(0x76); // v
    declare(encoder.out, item, found);
    encoder.token(value);
    item.pieces = encoder.objects();
    item.encoder = encoder;
  } catch (error) {
    item.reason = reasonOf(error);
  }
}

function declare(out, { kind }, found) {
  out.byte(DECLARED.indexOf(kind));
  if (kind === 'property') {
    out.byte((found.enumerable ? ATTRIBUTE.ENUMERABLE : 0) | (found.configurable ? ATTRIBUTE.CONFIGURABLE : 0) | (found.writable ? ATTRIBUTE.WRITABLE : 0));
  }
}

function reasonOf(error) {
  if (error instanceof Missed) return brief.cut(error.message, 400);
  return brief.cut(`saving it raised ${error && error.name}: ${error && error.message}`.replace(/\s+/g, ' '), 400);
}

/** A value that refers to a missed function or class is missed, too. */
function missNeeding(items) {
  const lost = new Set([...missed.keys()].filter((name) => !items.some((item) => item.name === name)));
  for (const item of items) if (item.reason !== null) lost.add(item.name);
  for (let again = true; again;) {
    again = false;
    for (const item of items) {
      const need = item.encoder === null ? undefined : [...item.encoder.needs].find((name) => lost.has(name));
      if (need === undefined) continue;
      item.encoder = item.pieces = null;
      item.reason = `it needs ${need}, which cannot be captured`;
      lost.add(item.name);
      again = true;
    }
  }
}

/** Entries that share an object become one group: the first contains all, the others refer to it. */
function join(items, known) {
  const owner = new Map();
  const parent = new Map();
  const root = (item) => {
    let at = item;
    while (parent.has(at)) at = parent.get(at);
    return at;
  };
  for (const item of items) {
    if (item.encoder === null) continue;
    for (const object of item.encoder.shared) {
      const first = owner.get(object);
      if (first === undefined) owner.set(object, item);
      else if (root(first) !== root(item)) parent.set(root(item), root(first));
    }
  }
  joinPools(items, root, parent);
  if (parent.size === 0) return;
  const groups = new Map();
  for (const item of items) {
    if (item.encoder === null) continue;
    const at = root(item);
    if (!groups.has(at)) groups.set(at, []);
    groups.get(at).push(item);
  }
  for (const members of groups.values()) if (members.length > 1) encodeGroup(members, known);
}

/** Small Buffers in different entries may share bytes, too. */
function joinPools(items, root, parent) {
  const ranges = [];
  for (const item of items) for (const range of item.encoder?.pools ?? []) ranges.push({ ...range, item });
  ranges.sort((one, other) => one.start - other.start);
  for (let at = 0; at < ranges.length; at++) {
    for (let next = at + 1; next < ranges.length && ranges[next].start < ranges[at].end; next++) {
      const [one, other] = [ranges[at], ranges[next]];
      if (one.buffer === other.buffer && root(one.item) !== root(other.item)) parent.set(root(other.item), root(one.item));
    }
  }
}

function encodeGroup(members, known) {
  const group = members.map((item) => item.name);
  for (const item of members) item.group = group;
  members.sort((one, other) => (one.key < other.key ? -1 : 1));
  const [leader] = members;
  try {
    const encoder = new Encoder(known, members.map((item) => item.name));
    const { out } = encoder;
    out.byte(FORMAT);
    out.byte(0x47); // G
    out.count(members.length);
    for (const item of members) {
      out.text(item.key);
      declare(out, item, Reflect.getOwnPropertyDescriptor(global, item.name));
      encoder.token(item.value);
    }
    leader.pieces = encoder.objects();
    const sum = digest(leader.pieces);
    for (const item of members.slice(1)) {
      const named = new Writer();
      named.byte(FORMAT);
      named.byte(0x52); // R
      named.text(leader.key);
      named.text(sum);
      item.pieces = named.whole();
    }
  } catch (error) {
    for (const item of members) {
      item.pieces = null;
      item.reason = reasonOf(error);
    }
  }
}

/** Posts the entry if its bytes changed, and updates the record. */
function finish(item, how) {
  let record = records.get(item.name);
  if (record === undefined) {
    record = { key: item.key, digest: null };
    records.set(item.name, record);
  }
  const drop = () => {
    if (record.digest !== null && !how.adopt) wire.post({ ev: 'del', key: record.key });
    record.digest = null;
  };
  if (record.key !== item.key) drop();
  record.key = item.key;
  record.kind = item.kind;
  record.atom = item.pieces !== null && isAtom(item.value);
  record.value = item.value;
  record.reason = item.reason;
  const { encoder } = item;
  record.sources = encoder?.sources ?? [];
  record.needs = encoder?.needs ?? NONE;
  record.isForeign = encoder?.isForeign ?? false;
  record.isAlways = encoder?.isAlways ?? false;
  record.group = item.group ?? [];
  record.cost = (encoder === null ? MISSED_COST : encoder.numbers.size * OBJECT_COST) + (item.pieces === null ? 0 : sizeOf(item.pieces));
  if (item.reason !== null) {
    drop();
    missed.set(item.name, { key: item.key, type: brief.typeName(item.value), reason: item.reason });
    return;
  }
  missed.delete(item.name);
  const sum = digest(item.pieces);
  if (sum === record.digest && !how.resend) return;
  record.digest = sum;
  if (!how.adopt) send(item.key, { type: brief.typeName(item.value), summary: brief.line(item.value) }, item.pieces);
}

/** Posts an entry in chunks. */
function send(key, meta, pieces) {
  const whole = joined(pieces);
  for (let at = 0; at === 0 || at < whole.length; at += CHUNK) {
    wire.post({ ev: 'put', key, meta, more: at + CHUNK < whole.length }, whole.subarray(at, at + CHUNK));
  }
}

function sendSettings({ resend, adopt: adopting }) {
  const found = settings.current();
  for (const [key, { value, type }] of found) {
    const text = JSON.stringify(value);
    if (settingsSent.get(key) === text && !resend) continue;
    settingsSent.set(key, text);
    if (adopting) continue;
    const out = new Writer();
    out.byte(FORMAT);
    out.byte(0x73); // s
    out.text(text);
    send(key, { type, summary: brief.line(value) }, out.whole());
  }
  for (const key of settingsSent.keys()) {
    if (found.has(key)) continue;
    settingsSent.delete(key);
    if (!adopting) wire.post({ ev: 'del', key });
  }
}

function tellMissed({ adopt: adopting }) {
  const entries = pending.name([...missed.values()]);
  const text = JSON.stringify(entries);
  if (text === missedSent) return;
  missedSent = text;
  if (!adopting) wire.post({ ev: 'missed', entries });
}

Object.assign(exports, { afterExecution, everything, adopt, forget });
