// The listener thread: reads the control socket, so that interrupts are handled whatever the main thread does.
//
// Owns descriptor 3's reading side and the termination of user code. Frames are forwarded unchanged
// and in order; only `interrupt` and `shutdown` are inspected. Received descriptors are reopened
// (libuv's pipe owns the original). Never runs user code, and writes nothing. The cells are those
// of gate.js.
'use strict';

const fs = require('fs');
const { workerData } = require('worker_threads');

const { IDLE, OPEN, STOPPING, STOPPED } = workerData.states;
const { STATE, HANDLED, SEEN, SPAWNING, ORDERED, CHILDREN, EXEC_BYTE } = workerData.constants;
const { port } = workerData;
const cells = new Int32Array(workerData.shared, 0, EXEC_BYTE / 4);
const execCells = new Float64Array(workerData.shared, EXEC_BYTE, 2);

const JSON_MAX = 16 << 20;
const TAIL_MAX = 1 << 20;
// Time for the main thread to handle an interrupt itself: a waiting execution ends without force.
const PATIENCE_MS = 40;
// Longer if no execution has started: then something else hangs.
const IDLE_PATIENCE_MS = 300;
const TICK_MS = 8;
// Then the child that a synchronous call waits for is terminated; after more, killed.
const CHILD_TERM_MS = 60;
const CHILD_KILL_MS = 360;

const decoder = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true });

// ---- frames

let unsure = []; // passed on but not confirmed: sent again after user code was terminated
let number = 0;
let chunks = [];
let held = 0;
const descriptors = [];

function passOn(message) {
  const taken = Atomics.load(cells, SEEN);
  if (unsure.length) unsure = unsure.filter((each) => each.number > taken);
  message.number = ++number;
  unsure.push(message);
  port.postMessage(message);
}

function takeBytes(count) {
  let whole = chunks.length === 1 ? chunks[0] : Buffer.concat(chunks, held);
  chunks = [];
  held -= count;
  const piece = whole.subarray(0, count);
  if (whole.length > count) chunks.push(whole.subarray(count));
  return piece;
}

let header = null;

function take() {
  for (;;) {
    if (header === null) {
      if (held < 8) return;
      const bytes = takeBytes(8);
      header = { json: bytes.readUInt32LE(0), tail: bytes.readUInt32LE(4) };
      if (header.json > JSON_MAX || header.tail > TAIL_MAX) {
        malformed(`frame of ${header.json} + ${header.tail} bytes breaks the limits`);
        return;
      }
    }
    const size = header.json + header.tail;
    if (held < size) return;
    const body = size ? takeBytes(size) : Buffer.alloc(0);
    const { json } = header;
    header = null;
    let text;
    try {
      text = decoder.decode(body.subarray(0, json));
    } catch {
      malformed('the JSON part is not UTF-8');
      return;
    }
    const tail = size > json ? new Uint8Array(body.subarray(json)) : null;
    if (text.length < 256 && /"op"\s*:\s*"(interrupt|shutdown)"/.test(text) && heard(text)) continue;
    passOn({ kind: 'frame', text, tail, fds: descriptors.splice(0) });
  }
}

function malformed(why) {
  port.postMessage({ kind: 'malformed', why });
  pipe.readStop();
}

/** Inspects a frame that may be for this thread. True if it is for this thread alone. */
function heard(text) {
  let frame;
  try {
    frame = JSON.parse(text);
  } catch {
    return false;
  }
  if (frame.op === 'interrupt') {
    if (typeof frame.exec !== 'number') return false;
    interrupt(frame.exec);
    return true;
  }
  if (frame.op === 'shutdown') interrupt(null);
  return false;
}

// ---- ending user code

let session = null;
let interrupts = 0;
let wanted = null; // {exec, number, since}: an interrupt not yet handled by the main thread

function interrupt(exec) {
  const watched = wanted !== null;
  wanted = { exec, number: ++interrupts, since: Date.now() };
  port.postMessage({ kind: 'interrupt', exec, number: interrupts });
  if (!watched) setTimeout(watch, TICK_MS);
}

function watch() {
  if (wanted === null) return;
  if (Atomics.load(cells, HANDLED) >= wanted.number) {
    wanted = null;
    return;
  }
  const waited = Date.now() - wanted.since;
  const state = Atomics.load(cells, STATE);
  const runs = state === OPEN && (wanted.exec === null || execCells[0] === wanted.exec);
  if ((runs && waited >= PATIENCE_MS) || (state === IDLE && waited >= IDLE_PATIENCE_MS)) {
    if (Atomics.compareExchange(cells, STATE, state, STOPPING) === state) {
      if (state === IDLE && wanted.exec !== null) execCells[1] = wanted.exec;
      terminate();
      return;
    }
  }
  setTimeout(watch, TICK_MS);
}

function terminate() {
  let over = false;
  const since = Date.now();
  const asked = new Set();
  const children = setInterval(() => {
    const spent = Date.now() - since;
    if (!Atomics.load(cells, SPAWNING) || spent < CHILD_TERM_MS) return;
    for (const pid of awaited()) {
      const signal = spent < CHILD_KILL_MS ? 'SIGTERM' : 'SIGKILL';
      if (asked.has(signal + pid)) continue;
      asked.add(signal + pid);
      try {
        process.kill(pid, signal);
      } catch {
        continue; // it has ended
      }
    }
  }, 20);
  const main = attached();
  Atomics.store(cells, ORDERED, 0);
  main.post('Runtime.evaluate', { expression: '$mport.leave()', silent: true });
  main.post('Runtime.terminateExecution', () => {
    if (over) return;
    over = true;
    clearInterval(children);
    Atomics.store(cells, STATE, STOPPED);
    const taken = Atomics.load(cells, SEEN);
    wanted = null;
    port.postMessage({ kind: 'stopped' });
    for (const message of unsure) if (message.number > taken) port.postMessage(message);
  });
  Atomics.store(cells, ORDERED, 1);
  // Something must run there to be terminated, where all code waits for events.
  port.postMessage({ kind: 'spin' });
}

function attached() {
  if (session === null) {
    const { Session } = require('inspector');
    session = new Session();
    session.connectToMainThread();
  }
  return session;
}

/** The children that the main thread waits for, and their descendants: those without a ChildProcess object. */
function awaited() {
  const known = new Set();
  for (let at = 0; at < Atomics.load(cells, CHILDREN); at++) known.add(Atomics.load(cells, CHILDREN + 1 + at));
  const found = childrenOf(process.pid, process.pid).filter((pid) => !known.has(pid));
  for (let at = 0; at < found.length; at++) {
    let tasks = [];
    try {
      tasks = fs.readdirSync(`/proc/${found[at]}/task`);
    } catch {
      continue; // it has ended
    }
    for (const task of tasks) found.push(...childrenOf(found[at], task));
  }
  return found;
}

function childrenOf(pid, task) {
  try {
    return fs.readFileSync(`/proc/${pid}/task/${task}/children`, 'latin1').split(' ').filter(Boolean).map(Number);
  } catch {
    return [];
  }
}

port.on('message', (message) => {
  if (message === 'exit') terminate(); // the main thread terminates its own code
});

// ---- the socket

const { Pipe, constants } = process.binding('pipe_wrap');
const pipe = new Pipe(constants.IPC);
pipe.open(3);
pipe.onread = function onread(piece) {
  const handle = pipe.pendingHandle;
  if (handle) {
    pipe.pendingHandle = null;
    try {
      descriptors.push(fs.openSync(`/proc/self/fd/${handle.fd}`, 'r'));
    } catch (error) {
      descriptors.push(-1);
    }
    handle.close();
  }
  if (!piece) {
    if (held || header) malformed('the control socket ended inside a frame');
    else port.postMessage({ kind: 'gone' });
    pipe.readStop();
    return;
  }
  chunks.push(Buffer.from(piece));
  held += piece.byteLength;
  take();
};
pipe.readStart();
setImmediate(attached); // beforehand, because the main thread has to agree to it
