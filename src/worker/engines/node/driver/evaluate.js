// Evaluating code in the user's realm, as a console does: declarations stay, may be repeated, and `await` is allowed.
//
// Owns the inspector session of this thread; no port is opened, and the debugger stays off. Values
// leave the inspector through `sink`, an object that it knows by id.
'use strict';

const { Session } = host.require('inspector');
const { global, object } = host.user;

const awaited = load('awaited');
const { list } = load('brief');

const session = new Session();
session.connect();
const post = session.post.bind(session);

const GROUP = 'execution';
const TERMINATED = 'Execution was terminated';
const OURS = Symbol.for('ryokan.sink');
const sink = object();
let sinkId;
// Promises of evaluations. Some versions of V8 crash when one is collected before it is settled.
const waiting = new Set();

/** A protocol call with an immediate answer. */
function ask(method, params) {
  let answer;
  post(method, params, (error, result) => { answer = error ? { failure: error } : { result }; });
  if (answer === undefined) throw new Error(`${method} was not answered`);
  if (answer.failure) throw new Error(`${method}: ${answer.failure.message}`);
  return answer.result;
}

function open() {
  Object.defineProperty(sink, 'v', { value: undefined, writable: true, configurable: true, enumerable: true });
  Object.defineProperty(global, OURS, { value: sink, configurable: true });
  sinkId = ask('Runtime.evaluate', { expression: 'globalThis[Symbol.for("ryokan.sink")]', objectGroup: 'driver' }).result.objectId;
  Reflect.deleteProperty(global, OURS);
}

/** The value of a RemoteObject. */
function valueOf(remote) {
  if (Object.hasOwn(remote, 'objectId')) {
    ask('Runtime.callFunctionOn', {
      objectId: sinkId, functionDeclaration: 'function(v){this.v=v}', arguments: [{ objectId: remote.objectId }], silent: true,
    });
    const value = sink.v;
    sink.v = undefined;
    return value;
  }
  if (Object.hasOwn(remote, 'unserializableValue')) return unserializable(remote.unserializableValue);
  return remote.type === 'undefined' ? undefined : remote.subtype === 'null' ? null : remote.value;
}

function unserializable(text) {
  if (text.endsWith('n')) return BigInt(text.slice(0, -1));
  return text === '-0' ? -0 : Number(text);
}

/** The RemoteObject of a value. */
function remoteOf(value) {
  sink.v = value;
  const { result } = ask('Runtime.callFunctionOn', {
    objectId: sinkId, functionDeclaration: 'function(){return this.v}', objectGroup: GROUP, silent: true,
  });
  sink.v = undefined;
  return result;
}

/**
 * Evaluates code. `settled(outcome)` is called once: {refused: error} if it does not compile and nothing ran, {ended: true} if
 * it was terminated, {thrown} or {value}, functions that return the value. At once, or from a microtask.
 */
function evaluate(expression, settled) {
  let sync = true;
  let promise = null;
  let isAnswered = false;
  const params = { expression, replMode: true, objectGroup: GROUP, silent: false, generatePreview: false };
  const answered = (error, answer) => {
    isAnswered = true;
    waiting.delete(promise);
    if (error) {
      // Otherwise its promise is lost: it waits until an interrupt.
      if (error.message.includes(TERMINATED)) settled({ ended: true });
    } else if (Object.hasOwn(answer, 'exceptionDetails')) {
      const details = answer.exceptionDetails;
      const got = () => (Object.hasOwn(details, 'exception') ? valueOf(details.exception) : new Error(details.text));
      settled(sync ? { refused: got, line: details.lineNumber, column: details.columnNumber } : { thrown: got });
    } else {
      settled({ value: () => valueOf(answer.result) });
    }
  };
  promise = awaited.firstOf(() => post('Runtime.evaluate', params, answered));
  if (!isAnswered && promise !== null) waiting.add(promise);
  sync = false;
}

/** Names of top-level `let`, `const` and `class`. */
function lexicalNames() {
  return new Set(list(ask('Runtime.globalLexicalScopeNames', {}).names));
}

/** Releases the inspector's objects of the last execution. */
function release() {
  post('Runtime.releaseObjectGroup', { objectGroup: GROUP });
}

Object.assign(exports, { open, ask, evaluate, lexicalNames, release, remoteOf, valueOf });
