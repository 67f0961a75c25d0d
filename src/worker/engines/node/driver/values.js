// Values: the user's values to the tagged JSON form of docs/engine-contract.md and back.
//
// No type is lost: an object without a value form becomes an opaque value with a short text. Runs
// no user code: getters are not called, proxies not touched.
'use strict';

const brief = load('brief');
const { types } = host;
const { intrinsics, prototypes, object: makeObject, fromArray } = host.user;

const DEPTH_MAX = 95; // the core refuses 100
const BYTES_MAX = 8 << 20;
const REPR_MAX = 4096;
const INT64 = 1n << 63n;
// Decimal digits of an integer take quadratic time.
const BIG_MAX = 1n << 400000n;
const LONE = /[\ud800-\udfff]/u;

const toBase64 = (() => {
  const { from } = intrinsics.Buffer;
  const slice = brief.uncurry(prototypes.Buffer.base64Slice);
  return (buffer, start, length) => slice(Reflect.apply(from, intrinsics.Buffer, [buffer, start, length]));
})();
const typedPart = (name) => brief.uncurry(Object.getOwnPropertyDescriptor(Object.getPrototypeOf(prototypes.Uint8Array), name).get);
const typedBuffer = typedPart('buffer');
const typedOffset = typedPart('byteOffset');
const typedBytes = typedPart('byteLength');
const typedLength = typedPart('length');
const bufferBytes = brief.uncurry(Object.getOwnPropertyDescriptor(prototypes.ArrayBuffer, 'byteLength').get);

/** The value's JSON form is beyond its limit. */
class TooLarge extends Error {}
/** The JSON is no value. */
class BadValue extends Error {}

const foreign = new WeakMap();

/** A stand-in for another engine's value or a stored blob, of which only the form is known. */
function standIn(form, name) {
  const made = makeObject();
  const content = form.O ?? form.b;
  for (const [key, value] of Object.entries(content)) {
    Object.defineProperty(made, key, { value, enumerable: true, writable: false, configurable: false });
  }
  Object.defineProperty(made, Symbol.toStringTag, { value: name, enumerable: false, configurable: false, writable: false });
  Object.preventExtensions(made);
  foreign.set(made, form);
  return made;
}

const opaque = (value) => {
  const type = brief.typeName(value);
  return { O: { type, repr: brief.cutBytes(brief.text(value, REPR_MAX - 4), REPR_MAX - 4) } };
};

class Encoder {
  constructor(budget, lenient) {
    this.left = budget;
    this.lenient = lenient;
    this.path = new Set();
  }

  spend(size) {
    this.left -= size;
    if (this.left < 0) throw new TooLarge();
  }

  value(value, depth) {
    switch (typeof value) {
      case 'string': return this.text(value);
      case 'number': return this.number(value);
      case 'bigint': return this.integer(value);
      case 'boolean': this.spend(5); return value;
      case 'object': if (value !== null) return this.object(value, depth);
        this.spend(5);
        return null;
      default: return this.opaque(value);
    }
  }

  text(value) {
    this.spend(value.length + 3);
    if (LONE.test(value)) return { O: { type: 'string', repr: brief.cutBytes(JSON.stringify(value.slice(0, REPR_MAX)), REPR_MAX - 4) } };
    return value;
  }

  number(value) {
    this.spend(25);
    if (Number.isSafeInteger(value) && !Object.is(value, -0)) return { i: String(value) };
    if (Number.isFinite(value)) return { f: Object.is(value, -0) ? '-0.0' : String(value) };
    return { f: Number.isNaN(value) ? 'NaN' : value > 0 ? 'inf' : '-inf' };
  }

  integer(value) {
    if (value >= BIG_MAX || value <= -BIG_MAX) return this.opaque(value);
    const digits = String(value);
    this.spend(digits.length + 9);
    return value >= -INT64 && value < INT64 ? { i: digits } : { I: digits };
  }

  opaque(value) {
    if (this.lenient && value === undefined) return null;
    const form = opaque(value);
    this.spend(form.O.repr.length + 40);
    return form;
  }

  object(value, depth) {
    if (types.isProxy(value)) return this.opaque(value);
    if (foreign.has(value)) return foreign.get(value);
    if (types.isArrayBuffer(value) && isDetached(value)) return this.opaque(value);
    if (types.isUint8Array(value)) return this.bytes(typedBuffer(value), typedOffset(value), typedBytes(value));
    if (types.isArrayBuffer(value)) return this.bytes(value, 0, bufferBytes(value));
    if (this.path.has(value) || depth > DEPTH_MAX) return this.opaque(value);
    const above = Reflect.getPrototypeOf(value);
    const encode = Array.isArray(value) ? this.array : types.isTypedArray(value) ? this.numbers
      : (above === null || above === prototypes.Object) && !isExotic(value) ? this.plain : null;
    if (encode === null) return this.opaque(value);
    this.path.add(value);
    const form = Reflect.apply(encode, this, [value, depth + 1]);
    this.path.delete(value);
    return form;
  }

  bytes(buffer, start, length) {
    if (length === 0) return { x: '' };
    this.spend(Math.ceil(length / 3) * 4 + 9);
    return { x: toBase64(buffer, start, length) };
  }

  numbers(value, depth) {
    const length = typedLength(value);
    this.spend(length * 2);
    const items = new Array(length);
    for (let at = 0; at < length; at++) items[at] = this.value(Reflect.getOwnPropertyDescriptor(value, at).value, depth);
    return items;
  }

  array(value, depth) {
    const length = brief.own(value, 'length');
    this.spend(length * 2);
    const items = new Array(length);
    for (let at = 0; at < length; at++) items[at] = this.property(Reflect.getOwnPropertyDescriptor(value, at), depth);
    return items;
  }

  plain(value, depth) {
    const pairs = [];
    for (const key of Reflect.ownKeys(value)) {
      const found = Reflect.getOwnPropertyDescriptor(value, key);
      if (typeof key !== 'string' || !found.enumerable) continue;
      if (this.lenient && Object.hasOwn(found, 'value') && found.value === undefined) continue;
      if (LONE.test(key)) return this.opaque(value);
      this.spend(key.length + 6);
      pairs.push([key, this.property(found, depth)]);
    }
    return { o: pairs };
  }

  property(found, depth) {
    if (found === undefined) return this.opaque(undefined);
    if (Object.hasOwn(found, 'value')) return this.value(found.value, depth);
    return { O: { type: 'getter', repr: '[Getter]' } };
  }
}

/** A buffer whose bytes went elsewhere. */
function isDetached(buffer) {
  try {
    return new Uint8Array(buffer).length !== bufferBytes(buffer);
  } catch {
    return true;
  }
}

/** Objects whose state is not in their properties, though they may look plain. */
function isExotic(value) {
  return types.isMap(value) || types.isSet(value) || types.isDate(value) || types.isRegExp(value) || types.isPromise(value)
    || types.isBoxedPrimitive(value) || types.isNativeError(value) || types.isWeakMap(value) || types.isWeakSet(value)
    || types.isAnyArrayBuffer(value) || types.isDataView(value) || types.isModuleNamespaceObject(value) || types.isExternal(value)
    || types.isGeneratorObject(value) || types.isArgumentsObject(value) || types.isMapIterator(value) || types.isSetIterator(value);
}

/** The tagged form. Throws TooLarge as soon as it exceeds its limit. */
const encode = (value) => new Encoder(BYTES_MAX, false).value(value, 1);

/** As `encode`, for the arguments of a tool: undefined values are omitted. */
const encodeArguments = (value) => new Encoder(BYTES_MAX, true).value(value, 1);

/** As `encode`, for the result of an execution: a value that is too large becomes opaque. */
function encodeOrOpaque(value) {
  try {
    return encode(value);
  } catch (error) {
    if (error instanceof TooLarge) return opaque(value);
    throw error;
  }
}

/** The value of a tagged form. Throws BadValue. */
function decode(form, depth = 0) {
  if (form === null || typeof form === 'boolean' || typeof form === 'string') return form;
  if (depth > DEPTH_MAX + 5) throw new BadValue('value nested too deep');
  if (Array.isArray(form)) return fromArray(form.map((each) => decode(each, depth + 1)));
  if (typeof form !== 'object' || Object.keys(form).length !== 1) throw new BadValue('not a tagged value');
  const [[tag, content]] = Object.entries(form);
  if (Object.hasOwn(DECODERS, tag)) {
    const made = DECODERS[tag](content, depth, form);
    if (made !== undefined) return made;
    throw new BadValue(`malformed content of value tag '${tag}'`);
  }
  throw new BadValue(`unknown value tag '${tag}'`);
}

const isText = (...all) => all.every((each) => typeof each === 'string');

const DECODERS = {
  i(content) {
    if (!isText(content) || !/^-?\d+$/.test(content)) return undefined;
    const number = Number(content);
    return Number.isSafeInteger(number) ? number : BigInt(content);
  },
  I: (content) => (isText(content) && /^-?\d+$/.test(content) ? BigInt(content) : undefined),
  f(content) {
    if (content === 'NaN') return NaN;
    if (content === 'inf' || content === '-inf') return content === 'inf' ? Infinity : -Infinity;
    return isText(content) && /^-?\d+(\.\d+)?([eE][+-]?\d+)?$/.test(content) ? Number(content) : undefined;
  },
  o(content, depth) {
    if (!Array.isArray(content)) return undefined;
    const made = makeObject();
    for (const pair of content) {
      if (!Array.isArray(pair) || pair.length !== 2 || !isText(pair[0])) return undefined;
      const value = decode(pair[1], depth + 1);
      Object.defineProperty(made, pair[0], { value, writable: true, enumerable: true, configurable: true });
    }
    return made;
  },
  x(content) {
    if (!isText(content)) return undefined;
    const made = Reflect.apply(intrinsics.Buffer.from, intrinsics.Buffer, [content, 'base64']);
    return toBase64(typedBuffer(made), typedOffset(made), typedBytes(made)) === content ? made : undefined;
  },
  b(content, _, form) {
    const { id, size, contentType, hash } = content ?? {};
    return isText(id, size, contentType, hash) && /^\d+$/.test(size) ? standIn(form, 'Blob reference') : undefined;
  },
  O: (content, _, form) => (isText(content?.type, content?.repr) ? standIn(form, 'Opaque') : undefined),
};

Object.assign(exports, {
  BYTES_MAX, TooLarge, BadValue, encode, encodeArguments, encodeOrOpaque, decode, isExotic, isDetached, standIn,
  formOf: (value) => foreign.get(value),
});
