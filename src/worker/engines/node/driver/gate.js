// Interrupts: decides when running user code may be terminated from outside.
//
// Owns the memory cells shared with the listener (listener.js). The listener makes V8 terminate
// whatever JavaScript runs here; the state says whether that is user code. Driver code is never
// hit: a transition into the driver waits here while the listener is terminating user code.
//
//   IDLE ──enter──▶ BUSY ──leave──▶ OPEN (an execution runs or waits) ──enter──▶ BUSY …
//   IDLE, OPEN ──listener──▶ STOPPING ──terminated──▶ STOPPED ──▶ BUSY
//
// Code run by timers and sockets between executions (IDLE) is user code as well.
'use strict';

const IDLE = 0;
const OPEN = 1;
const BUSY = 2;
const STOPPING = 3;
const STOPPED = 4;
const EXITING = 5;

const STATE = 0;
const HANDLED = 2; // the last interrupt handled by the main thread
const SEEN = 3; // the last frame taken
const SPAWNING = 4; // inside child_process.spawnSync and its like
const PAD = 5; // never written: only to wait on
const ORDERED = 6; // termination was requested
const CHILDREN = 7; // how many of the following are known children
const CHILDREN_MAX = 256;
const EXEC_BYTE = 8 * Math.ceil((4 * (CHILDREN + 1 + CHILDREN_MAX)) / 8);

const shared = new SharedArrayBuffer(EXEC_BYTE + 16);
const cells = new Int32Array(shared, 0, EXEC_BYTE / 4);
const execCells = new Float64Array(shared, EXEC_BYTE, 2); // the execution that runs; one that is not to begin
const { load: look, store, wait, compareExchange } = Atomics;
cells[STATE] = BUSY;
execCells.fill(-1);

/**
 * Enters the driver from user code and returns the previous state. Code being terminated does not pass. STOPPED is returned to
 * code that started after a termination and before `stopped` was handled.
 */
function enter() {
  for (;;) {
    const was = look(cells, STATE);
    if (was === BUSY || was === STOPPED) return was;
    if (was === STOPPING || was === EXITING) wait(cells, PAD, 0, 5);
    else if (compareExchange(cells, STATE, was, BUSY) === was) return was;
  }
}

/** Leaves the driver: to an execution's code, or to code between executions. */
function leave(state) {
  store(cells, STATE, state);
}

/** Runs a driver function that must not be interrupted, from user code or from the driver. */
function held(inner, ...args) {
  const was = enter();
  try {
    return inner(...args);
  } finally {
    if (was !== BUSY && was !== STOPPED) store(cells, STATE, was);
  }
}

/** Runs user code from the driver; it may be terminated and never return. */
function open(inner, ...args) {
  store(cells, STATE, OPEN);
  try {
    return inner(...args);
  } finally {
    enter();
  }
}

/** Terminates the running user code. Does not return. */
function exitNow(ask) {
  const was = enter();
  store(cells, STATE, EXITING);
  ask(was);
  for (;;) wait(cells, PAD, 0, 20);
}

/**
 * Inside an interruption of user code: returns once the listener has certainly ordered its termination. Spins, because the code
 * may be inside Atomics.wait, which a thread cannot enter twice.
 */
function untilOrdered() {
  while (look(cells, ORDERED) === 0);
}

/** Lets other threads run. */
function pause(ms) {
  wait(cells, PAD, 0, ms);
}

Object.assign(exports, {
  IDLE, OPEN, BUSY, STOPPING, STOPPED, EXITING, shared, enter, leave, held, open, exitNow, untilOrdered, pause,
  constants: { STATE, HANDLED, SEEN, SPAWNING, ORDERED, CHILDREN, CHILDREN_MAX, EXEC_BYTE },
  state: () => look(cells, STATE),
  running: (exec) => { execCells[0] = exec; },
  isDoomed: (exec) => execCells[1] === exec,
  handled: (number) => store(cells, HANDLED, number),
  seen: (number) => store(cells, SEEN, number),
  spawning: (whether) => store(cells, SPAWNING, whether ? 1 : 0),
  children: (pids) => {
    const count = Math.min(pids.length, CHILDREN_MAX);
    for (let at = 0; at < count; at++) store(cells, CHILDREN + 1 + at, pids[at]);
    store(cells, CHILDREN, count);
  },
});
