// Background jobs: child processes that outlive the execution which started them, and what else keeps Node's loop alive, as one.
//
// Owns the list of children that ChildProcess objects stand for; libuv reaps them. Only looks and tells; ends them at shutdown.
// The listener has their numbers, so that it ends another one when a synchronous call is interrupted.
'use strict';

const gate = load('gate');
const wire = load('wire');
const brief = load('brief');
const pending = load('pending');
const { process } = host;
const { expose } = host.user;
// Before any user code: it may replace it.
const { setInterval, clearInterval } = host.user.global;

const kill = process.kill.bind(process);
const { readFileSync } = host.require('fs');

const COMMAND_MAX = 200;
const TERM_MS = 1000;
const KILL_MS = 250;
const LOOK_MS = 250;

const children = new Map();
let told = '[]';
let looking = null;

function install() {
  const { Process } = host.binding('process_wrap');
  const spawn = Process.prototype.spawn;
  const onlyOwn = (name, inner) => Object.defineProperty(Process.prototype, name, { value: inner, writable: true, configurable: true });
  onlyOwn('spawn', methodOf('spawn', (self, ...args) => {
    const failed = Reflect.apply(spawn, self, args);
    if (!failed) began(self, args);
    return failed;
  }));
  const synchronous = host.binding('spawn_sync');
  const spawnSync = synchronous.spawn;
  synchronous.spawn = expose('spawn', 1, (...args) => {
    gate.spawning(true);
    try {
      return Reflect.apply(spawnSync, synchronous, args);
    } finally {
      gate.spawning(false);
    }
  });
}

/** A method whose `this` is given to the driver's function as its first argument. */
function methodOf(name, inner) {
  return function method(...args) {
    return inner(this, ...args);
  };
}

/** `args` are those of Node's own `spawn`: one object of options, or file, arguments and more. */
function began(handle, [first, second]) {
  const { pid } = handle;
  const words = typeof first === 'string' ? second ?? [first] : first.args ?? [first.file];
  children.set(pid, brief.cut(brief.list(words).join(' '), COMMAND_MAX));
  share();
  const ended = handle.onexit;
  handle.onexit = function onexit(...args) {
    children.delete(pid);
    gate.held(() => {
      share();
      if (!load('execute').running()) report();
      wire.flush();
    });
    return Reflect.apply(ended, this, args);
  };
}

const share = () => gate.children([...children.keys()]);

/** Posts a `jobs` event if the jobs changed. */
function report() {
  const loop = pending.summary();
  if (children.size === 0 && loop === '' && told === '[]') return;
  for (const pid of children.keys()) if (!isAlive(pid)) children.delete(pid);
  const jobs = [...children].map(([pid, command]) => ({ id: String(pid), command: wire.wellFormed(command) }));
  if (loop !== '') jobs.push({ id: 'loop', command: loop });
  lookAgain(loop !== '');
  const now = JSON.stringify(jobs);
  if (now === told) return;
  told = now;
  wire.post(`{"ev":"jobs","jobs":${now}}`);
}

/** Nothing tells when the last timer or server goes: it is looked for, by a timer that keeps nothing alive. */
function lookAgain(wanted) {
  if (wanted === (looking !== null)) return;
  if (!wanted) {
    clearInterval(looking);
    looking = null;
    return;
  }
  looking = setInterval(() => {
    gate.held(() => {
      if (!load('execute').running()) report();
      wire.flush();
    });
  }, LOOK_MS);
  looking.unref();
}

/** Whether it still runs: one that has ended is not reaped before the loop gets to it. */
function isAlive(pid) {
  try {
    const stat = readFileSync(`/proc/${pid}/stat`, 'latin1');
    return !/^[ZX]/.test(stat.slice(stat.lastIndexOf(')') + 2));
  } catch {
    return false;
  }
}

/** Asks child processes to end, and makes them after a second. */
function endAll() {
  for (const [signal, patience] of [['SIGTERM', TERM_MS], ['SIGKILL', KILL_MS]]) {
    const left = [...children.keys()].filter(isAlive);
    for (const pid of left) {
      try {
        kill(pid, signal);
      } catch {
        continue; // it is gone
      }
    }
    for (let waited = 0; waited < patience && left.some(isAlive); waited += 10) gate.pause(10);
  }
}

Object.assign(exports, { install, report, endAll });
