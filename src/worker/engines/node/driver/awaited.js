// What an execution left waiting: when it is interrupted, its pending `await`s never go on.
//
// A promise cannot be cancelled, and code that waits in a loop would run for ever behind later executions. Every promise that an
// execution makes is marked as its own, and so is what is made when one of these goes on. After an interrupt, a continuation of
// a marked promise is ended the moment it is to run. What timers and sockets begin is not marked: a server that was started
// stays one.
'use strict';

const gate = load('gate');
const { promiseHooks } = host.require('v8');
const { clearAsyncIdStack } = host.internal('async_wrap');

const createHook = promiseHooks.createHook;
const marks = new WeakMap();

let current = null; // the execution whose code runs
let first = null; // the first promise since it was asked for
let isHooked = false;
let active = null; // the execution that is not over
let stray = false; // something of no execution, or of an earlier one, went on

const hooks = {
  init(promise) {
    if (first === null) first = promise;
    if (current !== null) marks.set(promise, current);
  },
  before(promise) {
    const owner = marks.get(promise);
    current = owner === undefined ? null : owner;
    if (current === null || current !== active) stray = true;
    if (current !== null && current.abandoned) load('process').endStray();
  },
  after() {
    current = null;
  },
};

/** The first promise that `inner` makes. */
function firstOf(inner) {
  if (!isHooked) createHook(hooks);
  isHooked = true;
  first = null;
  inner();
  return first;
}

/** Runs `inner` as code of an execution. */
function within(run, inner) {
  current = active = run;
  inner();
  current = null;
}

/** The execution is over, whatever still waits. */
function abandon(run) {
  run.abandoned = true;
  current = null;
}

/** The execution is over; what it left may go on. */
function over() {
  active = null;
}

/** Whether anything went on since the last time that was not the execution's that runs. */
function takeStray() {
  const was = stray;
  stray = false;
  return was;
}

/**
 * The listener interrupts user code with this before it has it terminated. Node keeps a stack of contexts where code asked for
 * them, which terminated code does not leave, and ends the process when it finds that.
 */
function beforeTermination() {
  gate.untilOrdered();
  clearAsyncIdStack();
}

Object.assign(exports, { firstOf, within, abandon, over, takeStray, beforeTermination });
