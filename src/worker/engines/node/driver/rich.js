// Rich forms of values as `display` frames: explicit ones, and those that objects offer.
//
// `display(mime, data)` sends one form. `display(value, …)` sends the forms of a value's
// `_repr_html_` and similar methods, as in Python, or writes it on stdout. A form above 1 MiB is
// mentioned on stderr, not sent.
'use strict';

const gate = load('gate');
const wire = load('wire');
const streams = load('streams');
const brief = load('brief');
const { types } = host;
const { inspect } = host.require('util');
const { global, intrinsics, prototypes, expose } = host.user;

const METHODS = [
  ['_repr_html_', 'text/html'], ['_repr_markdown_', 'text/markdown'], ['_repr_svg_', 'image/svg+xml'], ['_repr_png_', 'image/png'],
  ['_repr_jpeg_', 'image/jpeg'], ['_repr_latex_', 'text/latex'], ['_repr_json_', 'application/json'],
];
const BASE64 = new Set(['image/png', 'image/jpeg', 'image/gif', 'image/webp', 'application/pdf']);
const MIME = /^[a-z]+\/[a-z0-9][a-z0-9.+-]*(;.*)?$/i;

const stringify = global.JSON.stringify;

function display(...items) {
  if (items.length === 2 && typeof items[0] === 'string' && MIME.test(items[0])) {
    send(items[0], items[1]);
    return;
  }
  for (const item of items) {
    const forms = formsOf(item);
    if (forms.size === 0) streams.writeOut((typeof item === 'string' ? item : inspect(item)) + '\n');
    for (const [mime, data] of forms) send(mime, data);
  }
}

/** The rich forms of an execution's result; its text is sent separately. Called by the driver. */
function displayResult(value) {
  if (typeof value !== 'object' || value === null || types.isProxy(value)) return;
  if (![...METHODS.map(([name]) => name), '_repr_mimebundle_'].some((name) => hasMethod(value, name))) return;
  gate.open(() => {
    for (const [mime, data] of formsOf(value)) if (mime !== 'text/plain') send(mime, data);
  });
}

const hasMethod = (value, name) => typeof brief.inherited(value, name) === 'function';

/** Map of MIME type to data. Runs the value's own methods. */
function formsOf(value) {
  const forms = new Map();
  if (typeof value !== 'object' || value === null || types.isProxy(value)) return forms;
  if (hasMethod(value, '_repr_mimebundle_')) {
    const bundle = tried(value, '_repr_mimebundle_');
    if (typeof bundle === 'object' && bundle !== null) {
      for (const [mime, data] of Object.entries(bundle)) forms.set(mime, data);
    }
  }
  for (const [name, mime] of METHODS) {
    if (forms.has(mime) || !hasMethod(value, name)) continue;
    const made = tried(value, name);
    if (made !== undefined && made !== null) forms.set(mime, made);
  }
  return forms;
}

function tried(value, name) {
  try {
    return Reflect.apply(brief.inherited(value, name), value, []);
  } catch (error) {
    streams.writeErr(`display: ${name} failed: ${load('trace').describe(error).text}`);
    return undefined;
  }
}

function send(mime, data) {
  const exec = load('execute').currentExec();
  if (exec === null) {
    streams.writeErr(`display: ${mime} left out: no execution runs\n`);
    return;
  }
  let tail;
  try {
    tail = bytesOf(mime, data);
  } catch (error) {
    streams.writeErr(`display: ${mime} left out: ${brief.headline(error)}\n`);
    return;
  }
  if (tail.length > wire.TAIL_MAX) {
    streams.writeErr(`display: ${mime} of ${tail.length} bytes left out: at most ${wire.TAIL_MAX}\n`);
    return;
  }
  wire.send({ ev: 'display', exec, mime: brief.cut(mime, 200) }, tail);
}

function bytesOf(mime, data) {
  if (ArrayBuffer.isView(data)) return new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
  if (types.isAnyArrayBuffer(data)) return new Uint8Array(data);
  if (/[/+]json$/.test(mime) && typeof data !== 'string') {
    const text = stringify(data);
    if (text === undefined) throw new TypeError(`${brief.typeName(data)} is no JSON`);
    return wire.encodeText(text);
  }
  if (typeof data !== 'string') throw new TypeError(`${brief.typeName(data)} instead of text`);
  if (!BASE64.has(mime)) return wire.encodeText(wire.wellFormed(data));
  const made = Reflect.apply(intrinsics.Buffer.from, intrinsics.Buffer, [data, 'base64']);
  return new Uint8Array(made.buffer, made.byteOffset, made.byteLength);
}

function install() {
  const value = expose('display', 2, display);
  Object.defineProperty(global, 'display', { value, writable: true, configurable: true, enumerable: false });
}

Object.assign(exports, { install, displayResult, prototypes });
