// Background jobs: child processes that outlive their execution; everything else that keeps Node's loop alive counts as one.
//
// Owns the list of children with ChildProcess objects; libuv reaps them. Observes and reports them; ends them at shutdown.
// The listener knows their ids, so that it ends only others when a synchronous call is interrupted.
'use strict';

const gate = load('gate');
const wire = load('wire');
const brief = load('brief');
const pending = load('pending');
const { process } = host;
const { expose } = host.user;
// Taken before user code can replace it.
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

/** A method that passes `this` to the driver's function as its first argument. */
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

/** Posts a `jobs` event if the list changed. */
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

/** Polls for the end of the last timer or server, for which there is no event, with an unreferenced timer. */
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

/** Whether it still runs: an ended child is not reaped before the loop reaches it. */
function isAlive(pid) {
  try {
    const stat = readFileSync(`/proc/${pid}/stat`, 'latin1');
    return !/^[ZX]/.test(stat.slice(stat.lastIndexOf(')') + 2));
  } catch {
    return false;
  }
}

/** Terminates child processes; kills them after a second. */
function endAll() {
  for (const [signal, patience] of [['SIGTERM', TERM_MS], ['SIGKILL', KILL_MS]]) {
    const left = [...children.keys()].filter(isAlive);
    for (const pid of left) {
      try {
        kill(pid, signal);
      } catch {
        continue; // it has ended
      }
    }
    for (let waited = 0; waited < patience && left.some(isAlive); waited += 10) gate.pause(10);
  }
}

Object.assign(exports, { install, report, endAll });
