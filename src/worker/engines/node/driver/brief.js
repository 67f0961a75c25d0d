// Short texts of values: type names, and a bounded form.
//
// Runs no user code: properties are read through their descriptors, getters are named, proxies are
// not touched. Reads no more of a large value than fits.
'use strict';

const { types } = host;
const { prototypes } = host.user;

const DEPTH_MAX = 12;
const KEY = /^[A-Za-z_$][\w$]*$/;
const LONE = /[\ud800-\udfff]/gu;

const call = Function.prototype.call;
const uncurry = (method) => call.bind(method);
const dateValue = uncurry(prototypes.Date.getTime);
const regexpText = uncurry(Object.getOwnPropertyDescriptor(prototypes.RegExp, 'source').get);
const FLAGS = Object.entries({
  hasIndices: 'd', global: 'g', ignoreCase: 'i', multiline: 'm', dotAll: 's', unicode: 'u', unicodeSets: 'v', sticky: 'y',
}).map(([name, letter]) => [Object.getOwnPropertyDescriptor(prototypes.RegExp, name), letter])
  .filter(([found]) => found !== undefined).map(([found, letter]) => [uncurry(found.get), letter]);
const mapEach = uncurry(prototypes.Map.forEach);
const setEach = uncurry(prototypes.Set.forEach);
const mapSize = uncurry(Object.getOwnPropertyDescriptor(prototypes.Map, 'size').get);
const setSize = uncurry(Object.getOwnPropertyDescriptor(prototypes.Set, 'size').get);
const typedTag = uncurry(Object.getOwnPropertyDescriptor(Object.getPrototypeOf(prototypes.Uint8Array), Symbol.toStringTag).get);
const typedLength = uncurry(Object.getOwnPropertyDescriptor(Object.getPrototypeOf(prototypes.Uint8Array), 'length').get);
const bufferLength = uncurry(Object.getOwnPropertyDescriptor(prototypes.ArrayBuffer, 'byteLength').get);
const functionText = uncurry(Function.prototype.toString);
const symbolText = uncurry(Symbol.prototype.toString);

const cut = (text, limit) => (text.length <= limit ? text : text.slice(0, Math.max(limit - 1, 0)) + '…');

const flagsOf = (regexp) => FLAGS.reduce((flags, [get, letter]) => (get(regexp) ? flags + letter : flags), '');

/** The elements of one of Node's arrays, whose methods user code may have changed. */
function list(array) {
  const items = [];
  for (let at = 0; at < array.length; at++) items.push(array[at]);
  return items;
}

/** The value of an own data property; else undefined. */
function own(object, name) {
  const found = Reflect.getOwnPropertyDescriptor(object, name);
  return found !== undefined && Object.hasOwn(found, 'value') ? found.value : undefined;
}

/** The value of an own or inherited data property, without touching proxies or getters. */
function inherited(object, name) {
  for (let at = object, steps = 0; at !== null && steps < 100 && !types.isProxy(at); at = Reflect.getPrototypeOf(at), steps++) {
    const found = Reflect.getOwnPropertyDescriptor(at, name);
    if (found !== undefined) return Object.hasOwn(found, 'value') ? found.value : undefined;
  }
  return undefined;
}

/** `Array`, `Point`, `Object: null prototype`: the type's name. */
function typeName(value) {
  if (value === null) return 'null';
  const kind = typeof value;
  if (kind !== 'object' && kind !== 'function') return kind;
  if (types.isProxy(value)) return 'Proxy';
  if (kind === 'function') return isClass(value) ? 'class' : 'function';
  const maker = inherited(value, 'constructor');
  const name = typeof maker === 'function' && !types.isProxy(maker) ? own(maker, 'name') : undefined;
  if (typeof name === 'string' && name !== '' && name !== 'Object') return cut(name, 200);
  const tag = inherited(value, Symbol.toStringTag);
  return typeof tag === 'string' && tag !== '' ? cut(tag, 200) : 'Object';
}

function isClass(value) {
  try {
    return /^class\b/.test(functionText(value));
  } catch {
    return false;
  }
}

/** `TypeError: no such thing`, from data properties only. */
function headline(error) {
  const name = inherited(error, 'name');
  const message = inherited(error, 'message');
  const shown = typeof name === 'string' && name !== '' ? name : 'Error';
  return typeof message === 'string' && message !== '' ? `${shown}: ${message}` : shown;
}

function quoted(text, limit) {
  const escaped = JSON.stringify(cut(text, limit)).slice(1, -1).replace(/\\"/g, '"').replace(/'/g, "\\'");
  return `'${escaped}'`;
}

class Writer {
  constructor(limit) {
    this.left = limit;
    this.pieces = [];
    this.path = new Set();
  }

  put(text) {
    this.pieces.push(text);
    this.left -= text.length;
  }

  value(value, depth) {
    if (this.left < 0) return;
    switch (typeof value) {
      case 'string': return this.put(quoted(value, this.left + 1));
      case 'number': return this.put(Object.is(value, -0) ? '-0' : String(value));
      case 'bigint': return this.put(value < 1n << 4000n && value > -(1n << 4000n) ? `${value}n` : '[large BigInt]');
      case 'symbol': return this.put(cut(symbolText(value), 200));
      case 'function': return this.put(types.isProxy(value) ? '[Proxy]' : this.callee(value));
      case 'object': return value === null ? this.put('null') : this.object(value, depth);
      default: return this.put(String(value));
    }
  }

  callee(value) {
    const name = own(value, 'name');
    const shown = typeof name === 'string' && name !== '' ? cut(name, 100) : '(anonymous)';
    return `[${isClass(value) ? 'class' : 'Function'}: ${shown}]`;
  }

  object(value, depth) {
    if (types.isProxy(value)) return this.put('[Proxy]');
    if (this.path.has(value)) return this.put('[Circular]');
    if (depth > DEPTH_MAX) return this.put('[…]');
    this.path.add(value);
    this.inner(value, depth + 1);
    this.path.delete(value);
    return undefined;
  }

  inner(value, depth) {
    const name = typeName(value);
    if (Array.isArray(value)) return this.array(value, own(value, 'length'), depth, name === 'Array' ? '' : name + ' ');
    if (types.isDate(value)) {
      const time = dateValue(value);
      return this.put(Number.isNaN(time) ? 'Invalid Date' : new Date(time).toISOString());
    }
    if (types.isRegExp(value)) return this.put(`/${cut(regexpText(value), Math.max(this.left, 1))}/${flagsOf(value)}`);
    if (types.isNativeError(value)) return this.put(`[${cut(headline(value), Math.max(this.left, 1))}]`);
    if (types.isMap(value)) return this.map(value, name, depth);
    if (types.isSet(value)) return this.set(value, name, depth);
    if (types.isTypedArray(value)) {
      const length = typedLength(value);
      const tag = name === 'Buffer' ? name : typedTag(value);
      return this.array(value, length, depth, `${tag}(${length}) `);
    }
    if (types.isAnyArrayBuffer(value)) return this.put(types.isArrayBuffer(value) ? `ArrayBuffer(${bufferLength(value)})` : 'SharedArrayBuffer');
    if (types.isPromise(value) || types.isWeakMap(value) || types.isWeakSet(value) || types.isGeneratorObject(value)) return this.put(`[${name}]`);
    return this.plain(value, name, depth);
  }

  array(value, length, depth, prefix) {
    this.put(prefix + '[');
    for (let at = 0; at < length && this.left > 0; at++) {
      if (at) this.put(', ');
      const found = Reflect.getOwnPropertyDescriptor(value, at);
      if (found === undefined) this.put('<empty>');
      else if (Object.hasOwn(found, 'value')) this.value(found.value, depth);
      else this.put('[Getter]');
    }
    this.put(']');
  }

  map(value, name, depth) {
    this.put(`${name}(${mapSize(value)}) {`);
    let first = true;
    mapEach(value, (item, key) => {
      if (this.left < 0) return;
      if (!first) this.put(', ');
      first = false;
      this.value(key, depth);
      this.put(' => ');
      this.value(item, depth);
    });
    this.put('}');
  }

  set(value, name, depth) {
    this.put(`${name}(${setSize(value)}) {`);
    let first = true;
    setEach(value, (item) => {
      if (this.left < 0) return;
      if (!first) this.put(', ');
      first = false;
      this.value(item, depth);
    });
    this.put('}');
  }

  plain(value, name, depth) {
    this.put(name === 'Object' ? '{' : `${name} {`);
    let first = true;
    for (const key of Reflect.ownKeys(value)) {
      if (this.left < 0) break;
      if (typeof key !== 'string') continue;
      const found = Reflect.getOwnPropertyDescriptor(value, key);
      if (!found.enumerable) continue;
      this.put(first ? '' : ', ');
      first = false;
      this.put(`${KEY.test(key) ? cut(key, 200) : quoted(key, 200)}: `);
      if (Object.hasOwn(found, 'value')) this.value(found.value, depth);
      else this.put('[Getter]');
    }
    this.put('}');
  }
}

/** The value's form, at most `limit` characters. */
function text(value, limit) {
  const writer = new Writer(limit);
  writer.value(value, 0);
  return cut(writer.pieces.join('').replace(LONE, '\ufffd'), limit);
}

/** One line, at most `limit` characters. */
const line = (value, limit = 200) => cut(text(value, limit).replace(/\s+/g, ' '), limit);

/** At most `limit` bytes of UTF-8. */
function cutBytes(whole, limit) {
  if (whole.length * 3 <= limit) return whole;
  const bytes = load('wire').encodeText(whole);
  if (bytes.length <= limit) return whole;
  let at = limit - 3;
  while (at > 0 && (bytes[at] & 0xc0) === 0x80) at--;
  return new host.user.intrinsics.TextDecoder().decode(bytes.subarray(0, at)) + '…';
}

Object.assign(exports, { list, cut, cutBytes, own, inherited, typeName, isClass, headline, text, line, flagsOf, uncurry, functionText, regexpText });
