// The engine's main thread: start, incoming frames, end.
//
// Owns the inbox. Frames are handled in order; during an execution only tool answers and
// `shutdown`. `ready` is sent before the other modules load, because a worker waits for it.
'use strict';

const gate = load('gate');
const wire = load('wire');
const { list } = load('brief');

const STATUS_MALFORMED = 70;
// Requests allowed during an execution.
const DURING = new Set(['tool_result', 'shutdown', 'dynamic_tools']);

let handlers;
let execute;
let jobs;
let port;
let seen = 0;
let pumping = false;
const inbox = [];

function start() {
  const { process } = host;
  wire.send({ ev: 'ready', engine: 'node', version: process.version.slice(1), interrupt: 'frame' });
  try {
    prepare();
  } catch (error) {
    give(`defect: ${error && error.stack}`);
  }
}

/** Loads the other modules and installs the globals. */
function prepare() {
  startListener();
  load('streams').install();
  load('stdin').install();
  load('process').install();
  execute = load('execute');
  jobs = load('jobs');
  jobs.install();
  handlers = { ...load('answers').handlers, exec: execute.exec, call: execute.call, shutdown: () => leave(0) };
  execute.onFree(() => pump());
  load('settings').install();
  load('globals').install();
  load('effects').install();
  // Before user code can change the parts of Node that the driver uses.
  for (const name of Object.keys(host.sources)) if (name !== 'listener') load(name);
  gate.leave(gate.IDLE);
}

function startListener() {
  const { MessageChannel, Worker } = host.require('worker_threads');
  const channel = new MessageChannel();
  port = channel.port1;
  const { IDLE, OPEN, STOPPING, STOPPED } = gate;
  const listener = new Worker(host.sources.listener, {
    eval: true,
    workerData: { shared: gate.shared, constants: gate.constants, states: { IDLE, OPEN, STOPPING, STOPPED }, port: channel.port2 },
    transferList: [channel.port2],
    argv: [],
    execArgv: [],
    env: {},
    stdin: false,
    stdout: true,
    stderr: true,
    trackUnmanagedFds: false,
    resourceLimits: { maxOldGenerationSizeMb: 96, maxYoungGenerationSizeMb: 4, stackSizeMb: 1 },
  });
  // Its `online` may arrive when user code has replaced the prototype's `emit`.
  Object.defineProperty(listener, 'emit', { value: listener.emit });
  listener.on('error', (error) => give(`the listener ended: ${error && error.message}`));
  listener.unref();
  port.on('message', onMessage);
}

/** Reports a fatal error on the execution's stderr and ends the engine. */
function give(why) {
  load('streams').writeErr(`ryokan node engine: ${why}\n`);
  host.exit(STATUS_MALFORMED);
}

function onMessage(message) {
  const { kind } = message;
  if (kind === 'frame') {
    if (message.number <= seen) return;
    inbox.push(message);
    seen = message.number;
    gate.seen(seen);
  }
  if (gate.enter() === gate.STOPPED) {
    if (kind !== 'stopped') return; // a frame stays in the inbox until `stopped` arrives
    gate.leave(gate.BUSY);
    pumping = false; // the terminated code may have run from the pump
  }
  try {
    if (kind === 'stopped') execute.stopped();
    else if (kind === 'interrupt') {
      execute.interrupt(message.exec);
      gate.handled(message.number);
    } else if (kind === 'malformed') throw new wire.Malformed(message.why);
    else if (kind === 'gone') leave(0);
    pump();
  } catch (error) {
    broken(error);
  }
  settle();
}

/** An unusable frame, or a defect of the driver. */
function broken(error) {
  if (error instanceof wire.Malformed) give(`malformed frame: ${error.message}`);
  give(`defect: ${error && error.stack}`);
}

/** The driver's work in a microtask or a timer, already inside the gate. */
function again(work, ...args) {
  try {
    work(...args);
    pump();
  } catch (error) {
    broken(error);
  }
  settle();
}

/** Returns to the running or waiting code, unless user code was terminated below: then the listener owns the state. */
function settle() {
  if (gate.state() === gate.BUSY) gate.leave(execute.running() ? gate.OPEN : gate.IDLE);
}

function pump() {
  if (pumping) return;
  pumping = true;
  try {
    for (;;) {
      const state = gate.state();
      if (state !== gate.BUSY || inbox.length === 0) return;
      if (restore().isPending()) return;
      if (!execute.running()) handle(take(inbox.shift()));
      else {
        const at = inbox.findIndex((each) => DURING.has(take(each).frame.op));
        if (at < 0) return;
        handle(inbox.splice(at, 1)[0]);
      }
    }
  } finally {
    pumping = false;
  }
}

function take(message) {
  if (message.frame === undefined) message.frame = wire.parse(message.text);
  return message;
}

function handle({ frame, tail, fds: came }) {
  const fds = list(came);
  const { op } = frame;
  const handler = typeof op === 'string' && Object.hasOwn(handlers, op) ? handlers[op] : undefined;
  if (handler === undefined) throw new wire.Malformed(`unknown request ${String(op).slice(0, 60)}`);
  handler(frame, tail, fds);
  if (op !== 'exec' && op !== 'call') load('stdin').closeAll(fds);
}

/** Ends background jobs and the process, regardless of exit listeners. */
function leave(status) {
  try {
    jobs.endAll();
  } finally {
    host.exit(status);
  }
}

/** Not loaded before it is needed. */
const restore = () => load('restore');

Object.assign(exports, { start, again, askToExit: () => port.postMessage('exit') });
