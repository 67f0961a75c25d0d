// Growing byte buffers for state entries (numbers, texts, large uncopied pieces), and their digest.
'use strict';

const { prototypes } = host.user;
const { uncurry } = load('brief');

const latin1Write = uncurry(prototypes.Buffer.latin1Write);
const ucs2Write = uncurry(prototypes.Buffer.ucs2Write);
const latin1Slice = uncurry(prototypes.Buffer.latin1Slice);
const ucs2Slice = uncurry(prototypes.Buffer.ucs2Slice);
const WIDE = /[^\x00-\xff]/;
const SHORT = 24;
const COPIED_MAX = 4096;
const floats = new Float64Array(1);
const floatBytes = new Uint8Array(floats.buffer);

class Writer {
  constructor() {
    this.pieces = [];
    this.bytes = new Uint8Array(256);
    this.at = 0;
  }

  room(size) {
    if (this.at + size <= this.bytes.length) return;
    const more = new Uint8Array(Math.max(this.bytes.length * 2, this.at + size));
    more.set(this.bytes.subarray(0, this.at));
    this.bytes = more;
  }

  byte(value) {
    this.room(1);
    this.bytes[this.at++] = value;
  }

  /** An integer from 0 to 2^53. */
  count(value) {
    this.room(10);
    let left = value;
    while (left > 127) {
      this.bytes[this.at++] = (left % 128) | 128;
      left = Math.floor(left / 128);
    }
    this.bytes[this.at++] = left;
  }

  float(value) {
    floats[0] = value;
    this.room(8);
    this.bytes.set(floatBytes, this.at);
    this.at += 8;
  }

  /** A text, lone surrogates included: twice its length, with the last bit set for two bytes per character. */
  text(value) {
    const wide = WIDE.test(value);
    this.count(value.length * 2 + (wide ? 1 : 0));
    const size = wide ? value.length * 2 : value.length;
    this.room(size);
    if (wide) ucs2Write(this.bytes, value, this.at, size);
    else if (size > SHORT) latin1Write(this.bytes, value, this.at, size);
    else for (let at = 0; at < size; at++) this.bytes[this.at + at] = value.charCodeAt(at);
    this.at += size;
  }

  /** Raw bytes; large ones are not copied before they are sent. */
  raw(value) {
    this.count(value.length);
    if (value.length <= COPIED_MAX) {
      this.room(value.length);
      this.bytes.set(value, this.at);
      this.at += value.length;
      return;
    }
    this.cut();
    this.pieces.push(value);
  }

  cut() {
    if (this.at) this.pieces.push(this.bytes.subarray(0, this.at));
    this.bytes = new Uint8Array(256);
    this.at = 0;
  }

  /** Everything written, as pieces. */
  whole() {
    this.cut();
    return this.pieces;
  }
}

class Reader {
  constructor(bytes, at = 0) {
    this.bytes = bytes;
    this.at = at;
  }

  need(size) {
    if (!(size <= this.bytes.length - this.at)) throw new RangeError('the entry is torn');
  }

  byte() {
    this.need(1);
    return this.bytes[this.at++];
  }

  count() {
    let value = 0;
    for (let scale = 1; ; scale *= 128) {
      const byte = this.byte();
      value += (byte & 127) * scale;
      if (byte < 128) return value;
      if (scale > 2 ** 49) throw new RangeError('the entry is torn');
    }
  }

  float() {
    this.need(8);
    floatBytes.set(this.bytes.subarray(this.at, this.at + 8));
    this.at += 8;
    return floats[0];
  }

  text() {
    const length = this.count();
    const wide = length % 2 === 1;
    const size = wide ? length - 1 : length / 2;
    this.need(size);
    const made = wide ? ucs2Slice(this.bytes, this.at, this.at + size) : latin1Slice(this.bytes, this.at, this.at + size);
    this.at += size;
    return made;
  }

  raw() {
    const size = this.count();
    this.need(size);
    const made = this.bytes.slice(this.at, this.at + size);
    this.at += size;
    return made;
  }
}

const sums = new Int32Array(4);

/** Feeds words to four sums; each word changes every sum. */
function mix(words, count) {
  let [a, b, c, d] = sums;
  for (let at = 0; at < count; at++) {
    const word = words[at];
    a = Math.imul(a ^ word, 0x2c1b3c6d);
    a = (a << 13) | (a >>> 19);
    b = Math.imul((b + word) | 0, 0x297a2d39) ^ a;
    b = (b << 17) | (b >>> 15);
    c = (Math.imul(c ^ b, 0x1b56c4e9) + word) | 0;
    c = (c << 11) | (c >>> 21);
    d = (Math.imul(d ^ word, 0x735a2d97) + c) | 0;
    d = (d << 7) | (d >>> 25);
  }
  sums[0] = a;
  sums[1] = b;
  sums[2] = c;
  sums[3] = d;
}

/** A 128-bit digest of some pieces, as text: to detect a changed entry. */
function digest(pieces) {
  sums.set([0x9e3779b9, 0x85ebca6b, 0xc2b2ae35, 0x27d4eb2f]);
  for (const piece of pieces) {
    const count = piece.length >>> 2;
    const start = piece.byteOffset;
    // Words need alignment: a misaligned piece is moved.
    const words = start % 4 === 0 ? new Int32Array(piece.buffer, start, count) : new Int32Array(piece.slice(0, count * 4).buffer, 0, count);
    mix(words, count);
    const rest = new Int32Array(4);
    for (let at = count * 4; at < piece.length; at++) rest[at - count * 4] = piece[at] + 1;
    rest[3] = piece.length;
    mix(rest, 4);
  }
  mix(new Int32Array(8), 8);
  return [...sums].map((each) => (each >>> 0).toString(16).padStart(8, '0')).join('');
}

const sizeOf = (pieces) => pieces.reduce((sum, piece) => sum + piece.length, 0);

function joined(pieces) {
  if (pieces.length === 1) return pieces[0];
  const whole = new Uint8Array(sizeOf(pieces));
  let at = 0;
  for (const piece of pieces) {
    whole.set(piece, at);
    at += piece.length;
  }
  return whole;
}

Object.assign(exports, { Writer, Reader, digest, sizeOf, joined });
