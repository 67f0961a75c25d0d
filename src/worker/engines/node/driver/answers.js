// Requests between executions: variables, tools, completion, state. Every answer is a `reply` with the request's number.
'use strict';

const brief = load('brief');
const wire = load('wire');

const reply = (number, fields) => wire.send({ ev: 'reply', id: number, ok: true, ...fields });
const fail = (number, code, message, hint = '') => wire.send({ ev: 'reply', id: number, ok: false, code, message: wire.wellFormed(message), hint });

const RESERVED = new Set(('arguments await break case catch class const continue debugger default delete do else enum eval export extends false '
  + 'finally for function if implements import in instanceof interface let new null package private protected public return static super '
  + 'switch this throw true try typeof undefined var void while with yield NaN Infinity globalThis').split(' '));

function get(frame) {
  const number = wire.number(frame, 'id');
  const variables = load('variables');
  const values = load('values');
  const { name } = frame;
  variables.refresh();
  if (typeof name !== 'string' || !variables.isDeclared(name)) {
    fail(number, 'notFound', `there is no variable ${brief.line(name, 100)}`, 'list the variables to see what there is');
    return;
  }
  try {
    reply(number, { value: values.encode(variables.read(name)) });
  } catch (error) {
    if (!(error instanceof values.TooLarge)) throw error;
    const hint = 'write it to a file or a blob and pass the reference, or get a part of it';
    fail(number, 'invalidArgument', `${name} is beyond ${values.BYTES_MAX} bytes as a value`, hint);
  }
}

function set(frame) {
  const number = wire.number(frame, 'id');
  const variables = load('variables');
  const values = load('values');
  const { name } = frame;
  if (typeof name !== 'string' || !variables.IDENTIFIER.test(name) || RESERVED.has(name)) {
    fail(number, 'invalidArgument', `${brief.line(name, 100)} is no variable name`, 'use letters, digits, _ and $, no keyword');
    return;
  }
  try {
    variables.set(name, values.decode(frame.value));
  } catch (error) {
    fail(number, 'invalidArgument', error instanceof values.BadValue ? error.message : brief.headline(error));
    return;
  }
  load('state').afterExecution(name);
  wire.flush();
  reply(number);
}

function vars(frame) {
  const number = wire.number(frame, 'id');
  const variables = load('variables');
  const modules = load('modules');
  const listed = [];
  for (const name of [...variables.names()].filter((each) => typeof each === 'string').sort()) {
    const value = variables.read(name);
    if (modules.isModule(value)) continue;
    listed.push({ name: wire.wellFormed(name), type: brief.typeName(value), summary: brief.line(value) });
  }
  reply(number, { vars: listed });
}

function tools(frame) {
  const number = wire.number(frame, 'id');
  load('variables').refresh();
  reply(number, { tools: load('calls').listTools() });
}

function complete(frame) {
  const number = wire.number(frame, 'id');
  if (typeof frame.code !== 'string' || !Number.isSafeInteger(frame.cursor)) fail(number, 'invalidArgument', 'code and cursor are needed');
  else reply(number, load('complete').complete(frame.code, frame.cursor));
}

function check(frame) {
  const number = wire.number(frame, 'id');
  if (typeof frame.code !== 'string') fail(number, 'invalidArgument', 'code is needed');
  else reply(number, load('syntax').check(frame.code));
}

function save(frame) {
  const number = wire.number(frame, 'id');
  if (frame.changed === true) load('state').afterExecution('');
  else load('state').everything();
  wire.flush();
  reply(number);
}

function loaded(frame) {
  const number = wire.number(frame, 'id');
  load('restore').finish((missed) => reply(number, { missed }));
}

function bind(frame) {
  const number = wire.number(frame, 'id');
  const env = (Array.isArray(frame.env) ? frame.env : []).filter((pair) => Array.isArray(pair) && pair.every((each) => typeof each === 'string'));
  try {
    load('settings').bind(env);
  } catch (error) {
    fail(number, 'internal', `cannot enter the workspace: ${error.message}`);
    return;
  }
  reply(number);
}

/** Rehearses a first execution, so that its code is in memory; user data stays untouched. */
function preload(frame) {
  const number = wire.number(frame, 'id');
  for (const name of ['execute', 'evaluate', 'trace', 'rich', 'variables', 'values', 'state', 'encode', 'modules', 'brief']) load(name);
  reply(number, { missed: [] });
}

/** Requests that only the Python engine supports. */
const unsupported = (frame) => fail(wire.number(frame, 'id'), 'unsupported', `the node engine has no ${frame.op}`);

exports.handlers = {
  get,
  set,
  vars,
  tools,
  complete,
  check,
  save,
  loaded,
  bind,
  keep: unsupported,
  wake: unsupported,
  reseed: unsupported,
  preload,
  interrupt() {}, // handled by the listener thread; an interrupt without an execution has no effect
  dynamic_tools: (frame) => load('tools').announce(frame.tools),
  tool_result: (frame) => load('tools').take(frame),
  load: () => load('restore').begin(),
  entry: (frame, tail) => load('restore').take(frame, tail),
};
