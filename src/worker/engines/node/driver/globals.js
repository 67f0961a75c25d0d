// The predefined globals: require, display, tools, and the results of earlier executions as `_`, `__` and `___`.
//
// Owns the list of names that are not the user's: every global before the first execution.
'use strict';

const { global, makeGlobals } = host.user;
const builtinModules = new Set(host.require('module').builtinModules);
// Globals before they are modules; reading the first creates its streams in some versions.
builtinModules.delete('process');
builtinModules.delete('console');

const HISTORY = ['_', '__', '___'];
const kept = [undefined, undefined, undefined];

let initial;
let initialNames;

function install() {
  makeGlobals();
  load('evaluate').open();
  load('imports').install();
  load('rich').install();
  load('tools').install();
  initial = Object.getOwnPropertyDescriptors(global);
  initialNames = new Set(Reflect.ownKeys(global));
  load('wellknown').install();
}

/** Restores what the driver needs before each execution. */
function renew() {
  load('imports').renew();
}

/** Whether a property of the global object is not the user's. */
function isInitial(name) {
  if (!initialNames.has(name)) return false;
  const was = initial[name];
  const now = Reflect.getOwnPropertyDescriptor(global, name);
  if (now === undefined) return true;
  // Node's `-e` installs some of its modules, one of them only after the driver's start.
  if (builtinModules.has(name) && Object.hasOwn(now, 'value') && now.value === host.require(name)) return true;
  if (Object.hasOwn(was, 'value')) return Object.hasOwn(now, 'value') && Object.is(now.value, was.value);
  return now.get === was.get || isLoaded(name, now);
}

/** Whether the object is one that Node installs at its first use. */
function isLoaded(name, now) {
  if (!Object.hasOwn(now, 'value')) return false;
  if (builtinModules.has(name)) return false;
  return Object.is(now.value, Reflect.apply(initial[name].get, global, []));
}

/** Updates `_`, `__` and `___`, unless the code uses one itself. */
function remember(value) {
  if (HISTORY.some((name, at) => !isHistory(name) && Reflect.getOwnPropertyDescriptor(global, name) !== undefined)) return;
  kept.unshift(value);
  kept.length = HISTORY.length;
  HISTORY.forEach((name, at) => {
    Object.defineProperty(global, name, { value: kept[at], writable: true, configurable: true, enumerable: false });
  });
}

/** Whether the name belongs to the result history and is not used by the code itself. */
function isHistory(name) {
  const at = HISTORY.indexOf(name);
  const found = at < 0 ? undefined : Reflect.getOwnPropertyDescriptor(global, name);
  return found !== undefined && Object.hasOwn(found, 'value') && Object.is(found.value, kept[at]) && !found.enumerable;
}

function forgetHistory() {
  for (const name of HISTORY) if (isHistory(name)) Reflect.deleteProperty(global, name);
  kept.fill(undefined);
}

Object.assign(exports, { install, renew, isInitial, isHistory, remember, forgetHistory, initial: () => initial });
