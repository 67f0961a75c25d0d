// Executions: `exec` and `call`, from request to `end`.
//
// Owns the context of an execution (environment, standard input) and the order of its end: output
// is written already, then state changes, jobs and `end` are sent. `stopped` finishes a terminated
// execution.
'use strict';

const gate = load('gate');
const wire = load('wire');
const streams = load('streams');
const stdin = load('stdin');
const trace = load('trace');
const values = load('values');
const brief = load('brief');
const evaluator = load('evaluate');
const awaited = load('awaited');
const { process } = host;
const { awaitCall } = host.user;

const TEXT_MAX = 64 << 10;
const INSPECT = { depth: 8, maxArrayLength: 1000, maxStringLength: TEXT_MAX, breakLength: 100 };
const { inspect } = host.require('util');
const INTERRUPTED = 130;
const SETTLING = 'the execution is over';

/** The running or waiting execution, created by `begin`. */
let run = null;
let freed = () => {};
let stray = false;

const running = () => run !== null;
const currentExec = () => (run === null ? null : run.exec);

function begin(frame, fds) {
  const setting = {
    id: wire.number(frame, 'id'), exec: wire.number(frame, 'exec'), env: [], exit: null, abandoned: false, changed: false, text: undefined,
  };
  run = setting;
  streams.renew();
  load('process').renew();
  load('globals').renew();
  gate.running(run.exec);
  for (const pair of Array.isArray(frame.env) ? frame.env : []) {
    if (!Array.isArray(pair) || typeof pair[0] !== 'string' || typeof pair[1] !== 'string') continue;
    const [name, value] = pair;
    if (name === '' || name.includes('=') || name.includes('\0') || value.includes('\0')) continue;
    run.env.push([name, value, process.env[name]]);
    process.env[name] = value;
  }
  try {
    if (frame.stdin === true) stdin.give(fds);
    else {
      stdin.renew();
      stdin.closeAll(fds);
    }
  } catch (error) {
    if (!(error instanceof stdin.NoInput)) throw error;
    refuse(error.message);
    return false;
  }
  if (gate.isDoomed(run.exec)) {
    finish({ status: 'interrupted', code: INTERRUPTED, err: 'interrupted' });
    return false;
  }
  return true;
}

/** Runs code. */
function exec(frame, tail, fds) {
  const { code } = frame;
  if (typeof code !== 'string') throw new wire.Malformed('exec without code');
  if (!begin(frame, fds)) return;
  trace.remember(run.exec, code);
  run.changed = true;
  run.text = code;
  const imports = load('imports');
  const rewritten = imports.rewrite(code);
  // Code that begins with a brace is tried as an object first.
  const asObject = /^\s*\{/.test(rewritten) && !/;\s*$/.test(rewritten) ? `(${rewritten}\n)` : null;
  if (asObject !== null && attempt(asObject, true)) return;
  attempt(rewritten, false);
}

/** Evaluates; false if it does not compile and another form should be tried. */
function attempt(text, tentative) {
  const mine = run;
  let answer = null;
  let sync = true;
  const settled = (outcome) => {
    if (run !== mine) return; // it was ended meanwhile
    if (outcome.ended) {
      answer = outcome;
      return; // `stopped` comes
    }
    if (gate.enter() === gate.STOPPED) return;
    if (sync) {
      answer = outcome;
      return;
    }
    load('main').again(conclude, outcome);
  };
  gate.leave(gate.OPEN);
  awaited.within(mine, () => evaluator.evaluate(`${text}\n//# sourceURL=${trace.fileName(mine.exec)}`, settled));
  sync = false;
  if (answer === null || answer.ended) return true;
  if (answer.refused && tentative) return false;
  conclude(answer);
  return true;
}

function conclude(outcome) {
  if (outcome.refused) {
    const error = outcome.refused();
    const hint = load('imports').hintFor(error);
    const { text, last } = trace.describeRefusal(error, run.exec, outcome.line, outcome.column, hint);
    streams.writeErr(text);
    run.changed = false;
    finish({ status: 'refused', code: 1, err: last });
  } else if (outcome.thrown) {
    const error = outcome.thrown();
    fail(error);
  } else {
    succeed(outcome.value(), false);
  }
}

function fail(error) {
  const { text, last } = gate.open(trace.describe, error);
  streams.writeErr(`Uncaught ${text}`);
  finish({ status: 'failed', code: 1, err: last });
}

function succeed(value, isCall) {
  const outcome = { status: 'done', code: 0, err: '' };
  if (value !== undefined || isCall) {
    outcome.value = value === undefined ? null : values.encodeOrOpaque(value);
  }
  if (value !== undefined && !isCall) {
    load('globals').remember(value);
    load('rich').displayResult(value);
    outcome.text = brief.cutBytes(wire.wellFormed(gate.open(shown, value)), TEXT_MAX);
  }
  finish(outcome);
}

function shown(value) {
  try {
    const text = inspect(value, INSPECT);
    return typeof text === 'string' ? text : String(text);
  } catch (error) {
    return `${brief.line(value, 2000)} (inspect failed: ${brief.line(error, 200)})`; // its hook is anyone's code
  }
}

/** Calls a function by name, without parsing. */
function call(frame, tail, fds) {
  if (!begin(frame, fds)) return;
  const mine = run;
  let callee;
  let args;
  try {
    ({ callee, args } = load('calls').prepare(frame.name, frame.args));
  } catch (error) {
    if (!(error instanceof load('calls').Refused) && !(error instanceof values.BadValue)) throw error;
    refuse(error.message);
    return;
  }
  run.changed = true;
  run.text = frame.name;
  const settled = (failed, value) => {
    if (run !== mine || gate.enter() === gate.STOPPED) return;
    load('main').again(() => (failed ? fail(value) : succeed(value, true)));
  };
  gate.leave(gate.OPEN);
  awaited.within(mine, () => awaitCall(callee, args, settled));
}

function refuse(message) {
  streams.writeErr(message + '\n');
  finish({ status: 'refused', code: 1, err: brief.cut(message, 1000) });
}

/** Ends the execution and starts the next one. */
function finish(outcome) {
  const { id, exec: number, env, changed, text } = run;
  load('tools').settle(SETTLING);
  stdin.take();
  for (const [name, value, was] of env) {
    if (process.env[name] !== value) continue; // the code set it: its change stays
    if (was === undefined) delete process.env[name];
    else process.env[name] = was;
  }
  evaluator.release();
  awaited.over();
  if (changed) load('state').afterExecution(text);
  load('jobs').report();
  const end = { ev: 'end', id, exec: number, status: outcome.status, code: outcome.code, err: outcome.err };
  if (Object.hasOwn(outcome, 'value')) end.value = outcome.value;
  if (Object.hasOwn(outcome, 'text')) {
    end.output = { headers: [], root: [{ name: '', type: 'text', text: outcome.text, cells: [], children: [] }] };
  }
  run = null;
  gate.running(-1);
  wire.send(end);
  freed();
}

/** Handles an interrupt that arrived while the execution waits. */
function interrupt(exec) {
  if (run === null || (exec !== null && run.exec !== exec)) return;
  awaited.abandon(run);
  streams.writeErr('Interrupted while it waited\n');
  finish({ status: 'interrupted', code: INTERRUPTED, err: 'interrupted' });
}

/** Handles user code that was terminated from outside or ended itself. */
function stopped() {
  const wasStray = stray;
  stray = false;
  if (run === null || wasStray) return;
  awaited.abandon(run);
  run.text = undefined; // the effects of partly executed code are unknown
  if (run.exit !== null) {
    const code = run.exit;
    finish(code === 0 ? { status: 'done', code: 0, err: '' } : { status: 'failed', code, err: `process.exit(${code})` });
  } else {
    streams.writeErr('Interrupted\n');
    finish({ status: 'interrupted', code: INTERRUPTED, err: 'interrupted' });
  }
}

/** Handles `process.exit`. */
function exits(code) {
  if (run !== null) run.exit = code;
}

/** Handles terminated code of an earlier execution. */
function strays() {
  stray = true;
}

Object.assign(exports, { exec, call, running, currentExec, interrupt, stopped, exits, strays, onFree: (then) => { freed = then; } });
