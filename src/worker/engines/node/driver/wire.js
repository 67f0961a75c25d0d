// Frames to init on the control socket: the framing of docs/engine-contract.md.
//
// Owns the writing side of descriptor 3 (the listener reads). A frame is sent whole: user code is
// not terminated meanwhile (see gate).
'use strict';

const gate = load('gate');
const { writeSync } = host.require('fs');
const { intrinsics } = host.user;

const JSON_MAX = 16 << 20;
const TAIL_MAX = 1 << 20;
const FLUSH_BYTES = 1 << 18;

const encoder = new intrinsics.TextEncoder();
const encodeText = intrinsics.TextEncoder.prototype.encode.bind(encoder);
const LONE = /[\ud800-\udfff]/gu;

/** A malformed frame. The position of the next one is then unknown. */
class Malformed extends Error {}

let posted = [];
let postedBytes = 0;

/** Text that is UTF-8: a lone surrogate is not. */
function wellFormed(text) {
  return LONE.test(text) ? text.replace(LONE, '\ufffd') : text;
}

function stringify(frame) {
  const text = JSON.stringify(frame);
  return text.includes('\\ud') ? JSON.stringify(frame, (_, each) => (typeof each === 'string' ? wellFormed(each) : each)) : text;
}

function pieceOf(frame, tail) {
  const body = encodeText(typeof frame === 'string' ? frame : stringify(frame));
  const size = tail === undefined ? 0 : tail.length;
  if (body.length > JSON_MAX || size > TAIL_MAX) throw new RangeError(`frame of ${body.length} + ${size} bytes breaks the limits`);
  const piece = new Uint8Array(8 + body.length + size);
  const view = new DataView(piece.buffer);
  view.setUint32(0, body.length, true);
  view.setUint32(4, size, true);
  piece.set(body, 8);
  if (size) piece.set(tail, 8 + body.length);
  return piece;
}

function writeAll(piece) {
  let at = 0;
  while (at < piece.length) {
    try {
      at += writeSync(3, piece, at, piece.length - at);
    } catch (error) {
      if (error.code === 'EPIPE') host.exit(0);
      if (error.code !== 'EAGAIN') throw error;
      gate.pause(0.2); // the listener's side made the socket non-blocking
    }
  }
}

/** Queues a frame; `send` and `flush` send queued frames first. For driver code only. */
function post(frame, tail) {
  const piece = pieceOf(frame, tail);
  posted.push(piece);
  postedBytes += piece.length;
  if (postedBytes > FLUSH_BYTES) flush();
}

function flush() {
  if (posted.length === 0) return;
  const pieces = posted;
  posted = [];
  if (pieces.length === 1) writeAll(pieces[0]);
  else {
    const whole = new Uint8Array(postedBytes);
    let at = 0;
    for (const piece of pieces) {
      whole.set(piece, at);
      at += piece.length;
    }
    writeAll(whole);
  }
  postedBytes = 0;
}

/** Sends one frame now (an object, or its JSON text); from anywhere. */
function send(frame, tail) {
  const piece = pieceOf(frame, tail);
  gate.held(() => {
    posted.push(piece);
    postedBytes += piece.length;
    flush();
  });
}

/** A field that must be an integer. */
function number(frame, name) {
  const found = frame[name];
  if (!Number.isSafeInteger(found)) throw new Malformed(`${name} is no number`);
  return found;
}

/** The frame of a JSON text. */
function parse(text) {
  let frame;
  try {
    frame = JSON.parse(text);
  } catch (error) {
    throw new Malformed(`not a JSON object: ${error.message}`);
  }
  if (typeof frame !== 'object' || frame === null || Array.isArray(frame)) throw new Malformed('not one JSON object');
  return frame;
}

Object.assign(exports, { TAIL_MAX, Malformed, wellFormed, encodeText, post, flush, send, number, parse, writeAll });
