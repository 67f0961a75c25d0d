// Decoding: the bytes of a state entry to values of the user's realm.
//
// Every object is created first and filled afterwards, so that references resolve. The format is
// defined in format.js.
'use strict';

const functions = load('functions');
const modules = load('modules');
const wellknown = load('wellknown');
const variables = load('variables');
const { standIn } = load('values');
const { Reader } = load('bytes');
const { TOKEN, KIND, PROTO, ATTRIBUTE } = load('format');
const { intrinsics, prototypes, object: makeObject, array: makeArray } = host.user;

/** The entry is malformed. */
class BadEntry extends Error {}
/** The entry needs something that is absent, perhaps not yet built. */
class Absent extends Error {}

/** A reference to an object inside a token. */
class Reference {
  constructor(number) {
    this.number = number;
  }
}

const mapSet = Function.prototype.call.bind(prototypes.Map.set);
const setAdd = Function.prototype.call.bind(prototypes.Set.add);
const define = Reflect.defineProperty;

class Decoder {
  constructor(bytes, at) {
    this.in = new Reader(bytes, at);
    this.roots = new Map(); // names that this entry defines, to tokens
    this.records = [];
    this.made = [];
  }

  token() {
    const { in: input } = this;
    const tag = input.byte();
    switch (tag) {
      case TOKEN.UNDEFINED: return undefined;
      case TOKEN.NULL: return null;
      case TOKEN.TRUE: return true;
      case TOKEN.FALSE: return false;
      case TOKEN.INT: return input.count();
      case TOKEN.NEGATIVE: return -input.count();
      case TOKEN.FLOAT: return input.float();
      case TOKEN.TEXT: return input.text();
      case TOKEN.BIGINT: return bigOf(input.text());
      case TOKEN.SYMBOL_FOR: return Symbol.for(input.text());
      case TOKEN.WELLKNOWN_SYMBOL: return symbolOf(input.text());
      case TOKEN.OBJECT: return new Reference(input.count());
      default: throw new BadEntry(`unknown token ${tag}`);
    }
  }

  /** Reads all remaining objects. */
  read() {
    while (this.in.at < this.in.bytes.length) this.records.push(this.record());
  }

  /** The needed modules. */
  modules() {
    return this.records.filter(({ kind }) => kind === KIND.MODULE).map(({ form }) => form);
  }

  hasFunctions() {
    return this.records.some(({ kind }) => kind === KIND.FUNCTION);
  }

  /** The top-level functions and classes that it refers to. */
  needs() {
    return this.records.filter(({ kind, text }) => (kind === KIND.VARIABLE || kind === KIND.PROTOTYPE) && !this.roots.has(text)).map(({ text }) => text);
  }

  isReady() {
    return this.needs().every((name) => variables.isDeclared(name));
  }

  /** Creates the objects and fills them. Throws Absent before creating any if another entry is needed first. */
  build() {
    this.made = [];
    for (const name of this.needs()) variableOf(name);
    for (let at = 0; at < this.records.length; at++) this.make(at);
    for (let at = 0; at < this.records.length; at++) this.fill(this.made[at], this.records[at]);
    for (let at = 0; at < this.records.length; at++) {
      if (this.records[at].closed) Reflect.preventExtensions(this.made[at]);
    }
  }

  resolve(token) {
    if (!(token instanceof Reference)) return token;
    if (token.number >= this.records.length) throw new BadEntry('an object that is not there');
    return this.make(token.number);
  }

  record() {
    const { in: input } = this;
    const kind = input.byte();
    const record = { kind, keys: [], closed: false, above: PROTO.DEFAULT };
    switch (kind) {
      case KIND.SYMBOL:
        record.text = input.byte() ? input.text() : undefined;
        return record;
      case KIND.VARIABLE: case KIND.PROTOTYPE: case KIND.URL: case KIND.SEARCH:
        record.text = input.text();
        return record;
      case KIND.WELLKNOWN: case KIND.MODULE: case KIND.STANDIN:
        record.form = JSON.parse(input.text());
        return record;
      case KIND.FUNCTION:
        record.form = JSON.parse(input.text());
        this.rest(record);
        record.hasPrototype = input.byte();
        if (record.hasPrototype === 2) record.aboveInner = this.token();
        record.inner = record.hasPrototype ? this.properties() : null;
        return record;
      case KIND.PLAIN: break;
      case KIND.ARRAY:
        record.length = input.count();
        record.items = this.elements(input.count());
        break;
      case KIND.DATE: record.time = input.float(); break;
      case KIND.REGEXP:
        record.text = input.text();
        record.flags = input.text();
        record.last = this.token();
        break;
      case KIND.MAP: case KIND.SET: record.items = this.tokens(input.count()); break;
      case KIND.BOXED: case KIND.ERROR: record.inner = this.token(); break;
      case KIND.BUFFER: {
        record.flags = input.byte();
        if (record.flags & 2) record.most = input.count();
        record.bytes = input.raw();
        break;
      }
      case KIND.POOLED: record.bytes = input.raw(); break;
      case KIND.TYPED: case KIND.VIEW:
        if (kind === KIND.TYPED) record.text = input.text();
        record.buffer = this.token();
        record.offset = input.count();
        record.length = input.count();
        break;
      default: throw new BadEntry(`unknown kind of object ${kind}`);
    }
    this.rest(record);
    return record;
  }

  /** Tokens of an array; absent elements stay absent. */
  elements(count) {
    const items = [];
    for (let at = 0; at < count; at++) {
      this.in.need(1);
      if (this.in.bytes[this.in.at] === TOKEN.HOLE) this.in.at += 1;
      else items[at] = this.token();
    }
    return items;
  }

  tokens(count) {
    const items = [];
    for (let at = 0; at < count; at++) items.push(this.token());
    return items;
  }

  rest(record) {
    record.above = this.in.byte();
    if (record.above === PROTO.OBJECT) record.prototype = this.token();
    record.closed = this.in.byte() === 0;
    record.keys = this.properties();
  }

  properties() {
    const count = this.in.count();
    const found = [];
    for (let at = 0; at < count; at++) {
      const attributes = this.in.byte();
      const key = attributes & ATTRIBUTE.SYMBOL_KEY ? this.token() : this.in.text();
      if (attributes & ATTRIBUTE.ACCESSOR) found.push([attributes, key, this.token(), this.token()]);
      else found.push([attributes, key, this.token()]);
    }
    return found;
  }

  make(at) {
    if (!Object.hasOwn(this.made, at)) this.made[at] = this.making(this.records[at]);
    return this.made[at];
  }

  making(record) {
    switch (record.kind) {
      case KIND.PLAIN: return makeObject();
      case KIND.ARRAY: {
        const made = makeArray();
        made.length = record.length;
        return made;
      }
      case KIND.DATE: return new intrinsics.Date(record.time);
      case KIND.REGEXP: {
        const made = new intrinsics.RegExp(record.text, record.flags);
        made.lastIndex = record.last;
        return made;
      }
      case KIND.MAP: return new intrinsics.Map();
      case KIND.SET: return new intrinsics.Set();
      case KIND.BOXED: return intrinsics.Object(this.resolve(record.inner));
      case KIND.BUFFER: return bufferOf(record);
      case KIND.POOLED: return Reflect.apply(intrinsics.Buffer.from, intrinsics.Buffer, [record.bytes]);
      case KIND.TYPED: {
        const buffer = this.resolve(record.buffer);
        if (record.text === 'Buffer') return Reflect.apply(intrinsics.Buffer.from, intrinsics.Buffer, [buffer, record.offset, record.length]);
        if (!/^(Big)?(U?[iI]nt|Float)\d+(Clamped)?Array$/.test(record.text) || !intrinsics[record.text]) throw new BadEntry(`unknown array ${record.text}`);
        return new intrinsics[record.text](buffer, record.offset, record.length);
      }
      case KIND.VIEW: return new intrinsics.DataView(this.resolve(record.buffer), record.offset, record.length);
      case KIND.ERROR: return errorOf(record);
      case KIND.FUNCTION: return functionOf(record);
      case KIND.VARIABLE: return variableOf(record.text);
      case KIND.PROTOTYPE:
        return (this.roots.has(record.text) ? this.resolve(this.roots.get(record.text)) : variableOf(record.text)).prototype;
      case KIND.WELLKNOWN: return wellknownOf(record.form);
      case KIND.MODULE: return moduleOf(record.form);
      case KIND.SYMBOL: return Symbol(record.text);
      case KIND.URL: return new intrinsics.URL(record.text);
      case KIND.SEARCH: return new intrinsics.URLSearchParams(record.text);
      case KIND.STANDIN: return standIn(record.form, record.form.O ? 'Opaque' : 'Blob reference');
      default: throw new BadEntry('unknown kind of object');
    }
  }

  fill(made, record) {
    if (record.above === PROTO.NULL) Reflect.setPrototypeOf(made, null);
    else if (record.above === PROTO.OBJECT) Reflect.setPrototypeOf(made, this.resolve(record.prototype));
    if (record.kind === KIND.ARRAY) {
      for (const at of record.items.keys()) if (at in record.items) this.element(made, at, record.items[at]);
    } else if (record.kind === KIND.MAP) {
      for (let at = 0; at < record.items.length; at += 2) mapSet(made, this.resolve(record.items[at]), this.resolve(record.items[at + 1]));
    } else if (record.kind === KIND.SET) {
      for (const item of record.items) setAdd(made, this.resolve(item));
    }
    this.put(made, record.keys);
    if (record.kind === KIND.FUNCTION && record.inner) {
      if (record.hasPrototype === 2) {
        Reflect.deleteProperty(made.prototype, 'constructor');
        Reflect.setPrototypeOf(made.prototype, this.resolve(record.aboveInner));
      }
      this.put(made.prototype, record.inner);
    }
  }

  element(made, at, token) {
    define(made, at, { value: this.resolve(token), writable: true, enumerable: true, configurable: true });
  }

  put(made, properties) {
    for (const [attributes, key, first, second] of properties) {
      const descriptor = {
        enumerable: (attributes & ATTRIBUTE.ENUMERABLE) !== 0,
        configurable: (attributes & ATTRIBUTE.CONFIGURABLE) !== 0,
      };
      if (attributes & ATTRIBUTE.ACCESSOR) {
        descriptor.get = this.resolve(first);
        descriptor.set = this.resolve(second);
      } else {
        descriptor.value = this.resolve(first);
        descriptor.writable = (attributes & ATTRIBUTE.WRITABLE) !== 0;
      }
      if (!define(made, this.resolve(key), descriptor)) throw new BadEntry(`a property ${String(this.resolve(key))} that cannot be`);
    }
  }
}

function bigOf(text) {
  const isNegative = text.startsWith('-');
  const value = BigInt('0x' + (isNegative ? text.slice(1) : text));
  return isNegative ? -value : value;
}

function symbolOf(name) {
  const found = Symbol[name];
  if (typeof found !== 'symbol') throw new Absent(`there is no Symbol.${name}`);
  return found;
}

function bufferOf({ flags, most, bytes }) {
  const Maker = flags & 1 ? intrinsics.SharedArrayBuffer : intrinsics.ArrayBuffer;
  const made = flags & 2 ? new Maker(bytes.length, { maxByteLength: most }) : new Maker(bytes.length);
  new Uint8Array(made).set(bytes);
  return made;
}

function errorOf(record) {
  const made = new intrinsics.Error();
  Reflect.deleteProperty(made, 'stack');
  if (typeof record.inner === 'string') define(made, 'stack', { value: record.inner, writable: true, configurable: true, enumerable: false });
  return made;
}

function functionOf({ form }) {
  const made = functions.make(form, form.name || 'restored');
  if (form.comment) functions.rememberComment(made, form.comment);
  if (Reflect.getOwnPropertyDescriptor(made, 'name')?.value !== form.name) {
    define(made, 'name', { value: form.name, configurable: true, enumerable: false, writable: false });
  }
  return made;
}

function variableOf(name) {
  const value = variables.isDeclared(name) ? variables.read(name) : undefined;
  if (typeof value !== 'function') throw new Absent(`${name} is not there`);
  return value;
}

function wellknownOf(path) {
  const value = wellknown.follow(path);
  if (value === undefined) throw new Absent(`this Node has no ${path.join('.')}`);
  return value;
}

/** Needed modules are loaded before; see restore.js. */
function moduleOf({ specifier, base, path }) {
  const value = load('restore').loadedModule(specifier, base);
  return modules.follow(value, path);
}

Object.assign(exports, { Decoder, BadEntry, Absent });
