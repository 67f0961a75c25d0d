// Internal slots of built-in objects, read with the language's original methods.
'use strict';

const { uncurry } = load('brief');
const { types } = host;
const { prototypes } = host.user;

/** A getter as a function; undefined for one that this version lacks. */
const getter = (prototype, name) => {
  const found = Object.getOwnPropertyDescriptor(prototype, name);
  return found === undefined ? () => undefined : uncurry(found.get);
};
const TypedArray = Object.getPrototypeOf(prototypes.Uint8Array);
const typed = {
  buffer: getter(TypedArray, 'buffer'),
  offset: getter(TypedArray, 'byteOffset'),
  bytes: getter(TypedArray, 'byteLength'),
  length: getter(TypedArray, 'length'),
  tag: getter(TypedArray, Symbol.toStringTag),
};
const view = {
  buffer: getter(prototypes.DataView, 'buffer'),
  offset: getter(prototypes.DataView, 'byteOffset'),
  bytes: getter(prototypes.DataView, 'byteLength'),
};
const arrayBuffer = {
  bytes: getter(prototypes.ArrayBuffer, 'byteLength'),
  most: getter(prototypes.ArrayBuffer, 'maxByteLength'),
  resizable: getter(prototypes.ArrayBuffer, 'resizable'),
};
const sharedBuffer = {
  bytes: getter(prototypes.SharedArrayBuffer, 'byteLength'),
  most: getter(prototypes.SharedArrayBuffer, 'maxByteLength'),
  growable: getter(prototypes.SharedArrayBuffer, 'growable'),
};
const href = getter(prototypes.URL, 'href');
const searchText = uncurry(prototypes.URLSearchParams.toString);
const mapEach = uncurry(prototypes.Map.forEach);
const setEach = uncurry(prototypes.Set.forEach);
const valueOfDate = uncurry(prototypes.Date.getTime);
const unbox = ['Number', 'String', 'Boolean', 'Symbol', 'BigInt'].map((name) => [name, uncurry(prototypes[name].valueOf), types[`is${name}Object`]]);

Object.assign(exports, { typed, view, arrayBuffer, sharedBuffer, href, searchText, mapEach, setEach, valueOfDate, unbox });
