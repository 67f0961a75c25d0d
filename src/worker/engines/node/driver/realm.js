// Compiled in the user's realm: its intrinsics as they were before any user code, and makers of things that belong there.
// The driver uses these and never a property that user code may have replaced. Knows nothing of what they are for.
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

/** A promise with its two ends, of the user's realm. */
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

/** As `expose`, for functions that return a promise: what `inner` throws is a rejection. */
exports.exposeAsync = (name, length, inner) => {
  const outer = { method: async (...args) => apply(inner, undefined, args) }.method;
  defineProperty(outer, 'name', { value: name, configurable: true });
  defineProperty(outer, 'length', { value: length, configurable: true });
  return outer;
};

/** Awaits what a call returns; `settled(failed, value)` is told once. */
exports.awaitCall = (callee, args, settled) => {
  const awaited = async () => await apply(callee, undefined, args);
  promiseThen(awaited(), (value) => settled(false, value), (error) => settled(true, error));
};
exports.proxy = (target, handler) => new intrinsics.Proxy(target, handler);
/** Has V8 make the globals that it makes when they are first looked at: it can only from this realm. */
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
