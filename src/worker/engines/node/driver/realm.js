// Compiled in the user's realm: its original intrinsics, and constructors of objects there. The
// driver uses these, never a property that user code may have replaced. Contains no policy.
'use strict';

const NAMES = [
  'Object', 'Function', 'Array', 'String', 'Number', 'Boolean', 'Symbol', 'BigInt', 'Date', 'RegExp', 'Map', 'Set', 'WeakMap',
  'WeakSet', 'Promise', 'Error', 'AggregateError', 'EvalError', 'RangeError', 'ReferenceError', 'SyntaxError', 'TypeError',
  'URIError', 'ArrayBuffer', 'SharedArrayBuffer', 'DataView', 'Int8Array', 'Uint8Array', 'Uint8ClampedArray', 'Int16Array',
  'Uint16Array', 'Int32Array', 'Uint32Array', 'Float16Array', 'Float32Array', 'Float64Array', 'BigInt64Array', 'BigUint64Array',
  'Buffer', 'URL', 'URLSearchParams', 'TextEncoder', 'TextDecoder', 'Proxy',
];

const intrinsics = Object.create(null);
const prototypes = Object.create(null);
for (const name of NAMES) {
  const found = globalThis[name];
  if (typeof found === 'function') {
    intrinsics[name] = found;
    if (found.prototype) prototypes[name] = found.prototype;
  }
}

const { apply } = Reflect;
const { defineProperty } = Object;
const promiseThen = Function.prototype.call.bind(Promise.prototype.then);

class ToolError extends Error {}
Object.defineProperty(ToolError.prototype, 'name', { value: 'ToolError', configurable: true, writable: true });

exports.global = globalThis;
exports.intrinsics = intrinsics;
exports.prototypes = prototypes;
exports.ToolError = ToolError;
exports.object = () => ({});
exports.array = () => [];
exports.error = (kind, message) => new intrinsics[kind](message);
exports.toolError = (message) => new ToolError(message);
exports.then = (promise, done, failed) => promiseThen(promise, done, failed);

/** A promise of the user's realm with its two resolvers. */
exports.deferred = () => {
  const made = {};
  made.promise = new intrinsics.Promise((resolve, reject) => {
    made.resolve = resolve;
    made.reject = reject;
  });
  return made;
};

/** A function of the user's realm that calls one of the driver's. */
exports.expose = (name, length, inner) => {
  const outer = { method: (...args) => apply(inner, undefined, args) }.method;
  defineProperty(outer, 'name', { value: name, configurable: true });
  defineProperty(outer, 'length', { value: length, configurable: true });
  return outer;
};

/** As `expose`, for functions that return a promise: an exception of `inner` becomes a rejection. */
exports.exposeAsync = (name, length, inner) => {
  const outer = { method: async (...args) => apply(inner, undefined, args) }.method;
  defineProperty(outer, 'name', { value: name, configurable: true });
  defineProperty(outer, 'length', { value: length, configurable: true });
  return outer;
};

/** Awaits a call's result; `settled(failed, value)` is called once. */
exports.awaitCall = (callee, args, settled) => {
  const awaited = async () => await apply(callee, undefined, args);
  promiseThen(awaited(), (value) => settled(false, value), (error) => settled(true, error));
};
exports.proxy = (target, handler) => new intrinsics.Proxy(target, handler);
/** Makes V8 create its lazy globals, which only this realm can trigger. */
exports.makeGlobals = () => {
  Object.getOwnPropertyDescriptors(globalThis);
};

exports.fromArray = (items) => {
  const made = [];
  for (let at = 0; at < items.length; at++) {
    defineProperty(made, at, { value: items[at], writable: true, enumerable: true, configurable: true });
  }
  return made;
};
