// Dynamic tools: the global `tools`, through which code calls the tools of the kernel's MCP servers.
//
// Owns init's list of tools and the pending calls. A call is a promise, allowed only during an
// execution; a call without an answer at the execution's end is rejected. Late answers are dropped.
'use strict';

const gate = load('gate');
const wire = load('wire');
const values = load('values');
const { global, object, fromArray, toolError, ToolError, deferred, expose, exposeAsync, proxy } = host.user;

const announced = new Map();
const waiting = new Map();
let lastCall = 0;

/** Sets the current tools from init's list. */
function announce(listed) {
  announced.clear();
  for (const tool of Array.isArray(listed) ? listed : []) {
    if (tool !== null && typeof tool === 'object' && typeof tool.name === 'string') announced.set(tool.name, tool);
  }
}

const servers = () => [...new Set([...announced.keys()].filter((name) => name.includes('__')).map((name) => name.split('__', 1)[0]))].sort();
const ofServer = (server) => [...announced.keys()].filter((name) => name.startsWith(server + '__')).map((name) => name.slice(server.length + 2)).sort();

function callTool(name, positional) {
  if (positional.length > 1) throw toolError(`${name} takes one object of named arguments`);
  const exec = load('execute').currentExec();
  if (exec === null) throw toolError('tools can be called only while an execution runs');
  if (!announced.has(name)) throw toolError(`there is no tool ${name} any more`);
  let args;
  try {
    args = positional.length === 0 || positional[0] === undefined ? { o: [] } : values.encodeArguments(positional[0]);
  } catch (error) {
    if (!(error instanceof values.TooLarge)) throw error;
    throw toolError(`the arguments are beyond ${values.BYTES_MAX} bytes`);
  }
  if (args === null || !Object.hasOwn(args, 'o')) throw toolError(`${name} takes one object of named arguments`);
  const answer = deferred();
  gate.held(() => {
    lastCall += 1;
    waiting.set(lastCall, answer);
    wire.send({ ev: 'tool_call', call: lastCall, exec, name, args });
  });
  return answer.promise;
}

/** Passes a `tool_result` to its call, or drops it if the call has ended. */
function take(frame) {
  const answer = waiting.get(frame.call);
  if (answer === undefined) return;
  waiting.delete(frame.call);
  if (frame.ok !== true) {
    answer.reject(toolError(typeof frame.message === 'string' && frame.message ? frame.message : 'the tool failed'));
    return;
  }
  try {
    const value = frame.value === undefined || frame.value === null ? null : values.decode(frame.value);
    answer.resolve(value === null ? frame.text || null : value);
  } catch (error) {
    answer.reject(toolError(`the tool's answer is no value: ${error.message}`));
  }
}

/** Rejects pending calls at the execution's end. */
function settle() {
  for (const answer of waiting.values()) {
    host.user.then(answer.promise, undefined, () => {}); // prevents an unhandled rejection if no code awaits the call
    answer.reject(toolError('the execution ended before the tool answered'));
  }
  waiting.clear();
}

const listTools = () => fromArray([...announced.values()].map((tool) => {
  const made = object();
  for (const name of ['name', 'description', 'schema']) made[name] = name === 'schema' ? plain(tool.schema ?? null) : tool[name] ?? '';
  return made;
}));

/** JSON as values of the user's realm. */
function plain(value) {
  if (Array.isArray(value)) return fromArray(value.map(plain));
  if (value === null || typeof value !== 'object') return value;
  const made = object();
  for (const [key, each] of Object.entries(value)) {
    Object.defineProperty(made, key, { value: plain(each), writable: true, enumerable: true, configurable: true });
  }
  return made;
}

/** An object with lazily created properties; an unknown name is an error that lists the known ones. */
function namespace(describe, names, make) {
  const target = object();
  const handler = {
    get(_, name) {
      if (typeof name === 'symbol') return name === Symbol.toStringTag ? describe() : undefined;
      const made = make(name);
      if (made !== undefined) return made;
      if (name === 'then' || name === 'toJSON' || name === 'constructor' || name === 'inspect') return undefined;
      throw toolError(`there is no ${name} in ${describe()}; there are: ${names().slice(0, 20).join(', ') || 'none'}`);
    },
    has: (_, name) => typeof name === 'string' && names().includes(name),
    ownKeys: () => fromArray(names()),
    getOwnPropertyDescriptor(_, name) {
      const value = typeof name === 'string' && names().includes(name) ? make(name) : undefined;
      if (value === undefined) return undefined;
      const found = object();
      return Object.assign(found, { value, enumerable: true, configurable: true, writable: false });
    },
    set: () => false,
    defineProperty: () => false,
    deleteProperty: () => false,
    getPrototypeOf: () => null,
  };
  return proxy(Object.setPrototypeOf(target, null), handler);
}

const callees = new Map();

function callee(name) {
  if (!announced.has(name)) return undefined;
  if (!callees.has(name)) callees.set(name, exposeAsync(name, 1, (...args) => callTool(name, args)));
  return callees.get(name);
}

const namespaces = new Map();

function server(name) {
  if (ofServer(name).length === 0) return undefined;
  if (!namespaces.has(name)) {
    namespaces.set(name, namespace(() => `tools.${name}`, () => ofServer(name), (tool) => callee(`${name}__${tool}`)));
  }
  return namespaces.get(name);
}

const list = expose('list', 0, listTools);
const tools = namespace(() => 'tools', () => [...servers(), 'list'], (name) => (name === 'list' ? list : server(name) ?? callee(name)));

function install() {
  Object.defineProperty(global, 'ToolError', { value: ToolError, writable: true, configurable: true, enumerable: false });
  Object.defineProperty(global, 'tools', { value: tools, writable: true, configurable: true, enumerable: false });
}

Object.assign(exports, { install, announce, take, settle, callee, tools });
