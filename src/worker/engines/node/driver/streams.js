// Standard output and error of user code: process.stdout, process.stderr and the console.
//
// Every write is immediate and complete: a writer to a full pipe waits. Code may replace the
// streams but not close them, and every execution finds them restored.
'use strict';

const gate = load('gate');
const { wellFormed } = load('wire');
const { writeSync } = host.require('fs');
const { intrinsics, prototypes, global, expose } = host.user;
const { process } = host;

const encode = intrinsics.TextEncoder.prototype.encode.bind(new intrinsics.TextEncoder());
const bufferFrom = intrinsics.Buffer.from.bind(intrinsics.Buffer);
const isEncoding = intrinsics.Buffer.isEncoding.bind(intrinsics.Buffer);
const byteLength = Object.getOwnPropertyDescriptor(Object.getPrototypeOf(prototypes.Uint8Array), 'byteLength').get;
const nextTick = process.nextTick.bind(process);
// A longer write would delay an interrupt behind a slow reader.
const PIECE_BYTES = 1 << 16;
const EAGAIN_PAUSE_MS = 0.5;

function writeAll(fd, bytes) {
  const size = Reflect.apply(byteLength, bytes, []);
  let at = 0;
  while (at < size) {
    try {
      at += writeSync(fd, bytes, at, Math.min(size - at, PIECE_BYTES));
    } catch (error) {
      if (error.code !== 'EAGAIN') throw error; // a child may have made the pipe non-blocking
      gate.pause(EAGAIN_PAUSE_MS);
    }
  }
}

function bytesOf(chunk, encoding) {
  if (typeof chunk !== 'string') {
    if (!ArrayBuffer.isView(chunk)) return null;
    return chunk instanceof intrinsics.Uint8Array ? chunk : new intrinsics.Uint8Array(chunk.buffer, chunk.byteOffset, chunk.byteLength);
  }
  if (encoding === undefined || encoding === 'utf8' || encoding === 'utf-8' || !isEncoding(encoding)) return encode(chunk);
  return bufferFrom(chunk, encoding);
}

function makeStream(fd) {
  const { Writable } = host.require('stream');
  const stream = new Writable({
    decodeStrings: false,
    write(chunk, encoding, done) {
      stream.write(chunk, encoding, done);
    },
  });
  const write = (chunk, encoding, done) => {
    if (typeof encoding === 'function') {
      done = encoding;
      encoding = undefined;
    }
    const bytes = bytesOf(chunk, encoding);
    if (bytes === null) {
      const error = host.user.error('TypeError', 'The "chunk" argument must be a string, a Buffer, a TypedArray or a DataView');
      error.code = 'ERR_INVALID_ARG_TYPE';
      throw error;
    }
    let failure = null;
    try {
      writeAll(fd, bytes);
    } catch (error) {
      failure = error;
    }
    if (typeof done === 'function') nextTick(done, failure);
    return true;
  };
  const end = (chunk, encoding, done) => {
    const last = [chunk, encoding, done].find((each) => typeof each === 'function');
    if (chunk !== undefined && chunk !== null && typeof chunk !== 'function') write(chunk, typeof encoding === 'string' ? encoding : undefined);
    if (last) nextTick(last);
    return stream;
  };
  const own = {
    fd: [fd], _type: ['pipe'], write: [expose('write', 3, write)], end: [expose('end', 3, end)],
    destroy: [expose('destroy', 1, () => stream)], destroySoon: [expose('destroySoon', 0, () => stream)],
  };
  for (const [name, [value]] of Object.entries(own)) {
    Object.defineProperty(stream, name, { value, writable: true, configurable: true, enumerable: false });
  }
  return stream;
}

let out;
let err;
let streamsConsole;
const getters = {};

/** Takes over the streams, once. */
function install() {
  out = makeStream(1);
  err = makeStream(2);
  const wasConsole = global.console;
  const { Console } = wasConsole;
  streamsConsole = new Console({ stdout: out, stderr: err, ignoreErrors: true });
  for (const name of Object.getOwnPropertyNames(wasConsole)) {
    if (!Object.hasOwn(streamsConsole, name)) {
      Object.defineProperty(streamsConsole, name, Object.getOwnPropertyDescriptor(wasConsole, name));
    }
  }
  for (const [name, stream] of [['stdout', out], ['stderr', err]]) {
    getters[name] = expose('get ' + name, 0, () => stream);
  }
  renew();
}

/** Restores the streams and the console after earlier code changed them. */
function renew() {
  for (const name of ['stdout', 'stderr']) {
    const found = Object.getOwnPropertyDescriptor(process, name);
    if (found === undefined || found.get !== getters[name]) {
      Object.defineProperty(process, name, { get: getters[name], set: undefined, configurable: true, enumerable: true });
    }
  }
  const found = Object.getOwnPropertyDescriptor(global, 'console');
  if (found === undefined || found.value !== streamsConsole) {
    Object.defineProperty(global, 'console', { value: streamsConsole, writable: true, configurable: true, enumerable: false });
  }
}

/** Writes to the execution's stdout or stderr, whatever the streams are. */
function writeText(fd, text) {
  try {
    writeAll(fd, encode(wellFormed(text)));
  } catch {
    // No reader is left, or code closed the descriptor.
  }
}

Object.assign(exports, {
  install,
  renew,
  writeOut: (text) => writeText(1, text),
  writeErr: (text) => writeText(2, text),
});
