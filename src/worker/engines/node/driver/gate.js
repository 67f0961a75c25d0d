// Interrupts: decides when a running piece of user code may be ended from outside.
//
// Owns the cells of memory that this thread shares with the listener (listener.js). The listener ends user code by asking V8 to
// terminate whatever JavaScript runs here; the state says whether that is user code. The driver's own code is never hit: who
// wants to leave user code while the listener is ending it waits here until that has happened.
//
//   IDLE ──enter──▶ BUSY ──leave──▶ OPEN (an execution runs or waits) ──enter──▶ BUSY …
//   IDLE, OPEN ──listener──▶ STOPPING ──terminated──▶ STOPPED ──▶ BUSY
//
// IDLE is user code as well: what timers and sockets run between executions.
'use strict';

const IDLE = 0;
const OPEN = 1;
const BUSY = 2;
const STOPPING = 3;
const STOPPED = 4;
const EXITING = 5;

const STATE = 0;
const HANDLED = 2; // the last interrupt that was looked at here
const SEEN = 3; // the last frame that was taken
const SPAWNING = 4; // inside child_process.spawnSync and its like
const PAD = 5; // nobody writes here: to wait on
const ORDERED = 6; // the order to terminate is on its way
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
 * From user code into the driver. Returns the state that was. Code that is being ended does not get past here; STOPPED is what code
 * gets that began after the other was ended and before `stopped` came.
 */
function enter() {
  for (;;) {
    const was = look(cells, STATE);
    if (was === BUSY || was === STOPPED) return was;
    if (was === STOPPING || was === EXITING) wait(cells, PAD, 0, 5);
    else if (compareExchange(cells, STATE, was, BUSY) === was) return was;
  }
}

/** Out of the driver: to the code of an execution, or to what runs between them. */
function leave(state) {
  store(cells, STATE, state);
}

/** Runs a driver function that must be whole, from user code or from the driver. */
function held(inner, ...args) {
  const was = enter();
  try {
    return inner(...args);
  } finally {
    if (was !== BUSY && was !== STOPPED) store(cells, STATE, was);
  }
}

/** Runs user code from the driver; it may be ended there and never return. */
function open(inner, ...args) {
  store(cells, STATE, OPEN);
  try {
    return inner(...args);
  } finally {
    enter();
  }
}

/** Ends the user code that runs now. Does not return. */
function exitNow(ask) {
  const was = enter();
  store(cells, STATE, EXITING);
  ask(was);
  for (;;) wait(cells, PAD, 0, 20);
}

/**
 * Inside an interruption of user code: returns when the order to terminate it is sure to be the next thing that happens. The
 * listener is about to give it. Spins, because the code may be inside Atomics.wait, which a thread can be in only once.
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
