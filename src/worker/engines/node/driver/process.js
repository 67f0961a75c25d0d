// The `process` object of user code: exits end the execution, and uncaught errors are reported.
//
// `process.exit` ends the running code, never the engine. Uncaught errors of timers and unhandled
// rejections are reported on stderr; the engine continues.
'use strict';

const gate = load('gate');
const streams = load('streams');
const { expose, global } = host.user;
const { process } = host;

const setCapture = process.setUncaughtExceptionCaptureCallback.bind(process);
let userCapture = null;

function install() {
  for (const name of ['exit', 'reallyExit']) {
    const value = expose(name, 1, exit);
    Object.defineProperty(process, name, { value, writable: true, configurable: true, enumerable: true });
  }
  renew();
  process.execArgv = [];
  // Children of `fork` must not run the driver.
  Reflect.defineProperty(process, '_eval', { value: undefined, writable: true, configurable: true });
  setCapture(expose('captured', 1, captured));
  const replaced = expose('setUncaughtExceptionCaptureCallback', 1, (callback) => {
    if (callback !== null && typeof callback !== 'function') throw host.user.error('TypeError', 'The "fn" argument must be of type function or null');
    userCapture = callback;
  });
  const value = { value: replaced, writable: true, configurable: true, enumerable: true };
  Object.defineProperty(process, 'setUncaughtExceptionCaptureCallback', value);
  Object.defineProperty(process, 'hasUncaughtExceptionCaptureCallback', {
    value: expose('hasUncaughtExceptionCaptureCallback', 0, () => userCapture !== null), writable: true, configurable: true, enumerable: true,
  });
}

function exit(code) {
  const chosen = code ?? process.exitCode ?? 0;
  gate.exitNow(() => {
    load('execute').exits(toStatus(chosen));
    load('main').askToExit();
  });
}

/** Ends the code about to run, without an execution. */
function endStray() {
  gate.exitNow(() => {
    load('execute').strays();
    load('main').askToExit();
  });
}

function toStatus(code) {
  const number = typeof code === 'string' && /^-?\d+$/.test(code) ? Number(code) : code;
  if (!Number.isInteger(number)) return number ? 1 : 0;
  return number >= -(2 ** 31) && number < 2 ** 31 ? number : Number(BigInt.asUintN(8, BigInt(number)));
}

/** Handles an uncaught error, unless user code has a listener. */
function captured(error) {
  if (userCapture !== null) return userCapture(error);
  if (process.listenerCount('uncaughtException') > 0) {
    process.emit('uncaughtException', error, 'uncaughtException');
    return undefined;
  }
  streams.writeErr(`Uncaught ${load('trace').describe(error).text}`);
  return undefined;
}

/** Restores the object before each execution. */
function renew() {
  process.exitCode = undefined;
  const found = Object.getOwnPropertyDescriptor(global, 'process');
  if (found === undefined || found.value !== process) {
    Object.defineProperty(global, 'process', { value: process, writable: true, configurable: true, enumerable: false });
  }
}

Object.assign(exports, { install, renew, endStray });
