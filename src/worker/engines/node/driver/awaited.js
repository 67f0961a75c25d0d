// Continuations left by an execution: after an interrupt, its pending `await`s never continue.
//
// A promise cannot be cancelled, and code that waits in a loop would otherwise run forever behind
// later executions. Every promise created by an execution is marked, and so are those created by
// its continuations. After an interrupt, a marked promise's continuation is terminated as soon as
// it would run. Promises started by timers and sockets are not marked: a server stays a server.
'use strict';

const gate = load('gate');
const { promiseHooks } = host.require('v8');
const { clearAsyncIdStack } = host.internal('async_wrap');

const createHook = promiseHooks.createHook;
const marks = new WeakMap();

let current = null; // the execution whose code runs
let first = null; // the first promise since `firstOf` began
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

/** The first promise created by `inner`. */
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

/** Ends the execution; its pending continuations are dropped. */
function abandon(run) {
  run.abandoned = true;
  current = null;
}

/** Ends the execution; its pending continuations may run. */
function over() {
  active = null;
}

/** Whether anything outside the running execution ran since the last call. */
function takeStray() {
  const was = stray;
  stray = false;
  return was;
}

/**
 * Runs as an interruption of user code before its termination. Node keeps a stack of async contexts, which terminated code
 * does not leave, and ends the process when it finds them.
 */
function beforeTermination() {
  gate.untilOrdered();
  clearAsyncIdStack();
}

Object.assign(exports, { firstOf, within, abandon, over, takeStray, beforeTermination });
