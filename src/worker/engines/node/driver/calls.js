// Functions callable by name: resolving names, passing arguments, listing tools.
//
// An array of arguments is positional. An object is matched with the parameters' names; a function
// with a single object parameter receives it unchanged.
'use strict';

const brief = load('brief');
const values = load('values');
const variables = load('variables');
const syntax = load('syntax');
const { types } = host;

const DESCRIPTION_MAX = 500;

/** The call cannot be made; nothing ran. */
class Refused extends Error {}

/** {callee, args} of a `call` request. */
function prepare(name, form) {
  const { callee, self } = resolve(name);
  const isTool = callee === load('tools').callee(name);
  if (form === undefined || form === null) return { callee, args: [] };
  if (Array.isArray(form)) return { callee: bound(callee, self), args: form.map((each) => values.decode(each)) };
  if (typeof form !== 'object' || !Object.hasOwn(form, 'o')) throw new Refused('arguments are an object (named) or an array (positional)');
  const named = values.decode(form);
  return { callee: bound(callee, self), args: isTool ? [named] : arrange(callee, named, name) };
}

const bound = (callee, self) => (self === undefined ? callee : (...args) => Reflect.apply(callee, self, args));

function resolve(name) {
  if (typeof name !== 'string' || name === '') throw new Refused(`there is no function ${brief.line(name, 100)} to call`);
  const tool = load('tools').callee(name);
  const [first, ...rest] = name.split('.');
  let self;
  let at = variables.read(first);
  if (at === undefined && tool !== undefined) return { callee: tool };
  if (at === undefined) at = load('wellknown').follow([first]) ?? module(first);
  for (const part of rest) {
    self = at;
    at = at === undefined || at === null || types.isProxy(at) ? undefined : brief.inherited(Object(at), part);
  }
  if (typeof at !== 'function' || brief.isClass(at)) {
    throw new Refused(`there is no function ${brief.line(name, 100)} to call; define it first, or use module.function`);
  }
  return { callee: at, self };
}

function module(name) {
  const { builtins } = load('modules');
  return builtins.has(name) && !name.startsWith('_') ? host.require(name) : undefined;
}

/** Named arguments in the order of the parameters. */
function arrange(callee, named, name) {
  const keys = Reflect.ownKeys(named);
  const params = syntax.parameters(brief.functionText(callee)) ?? [];
  const names = params.map(nameOf);
  if (params.length === 1 && (names[0] === null || !keys.includes(names[0])) && params[0].type !== 'RestElement') return [named];
  if (params.length && patternOf(params[0]) !== null) return [named];
  const unknown = keys.filter((key) => !names.includes(key));
  if (unknown.length) throw new Refused(`${name} has no parameter ${unknown.join(', ')}; it has: ${names.filter(Boolean).join(', ') || 'none'}`);
  const last = names.findLastIndex((each) => keys.includes(each));
  return names.slice(0, last + 1).map((each) => brief.own(named, each));
}

function nameOf(param) {
  if (param.type === 'Identifier') return param.name;
  if (param.type === 'AssignmentPattern') return nameOf(param.left);
  return null;
}

function patternOf(param) {
  const inner = param.type === 'AssignmentPattern' ? param.left : param;
  return inner.type === 'ObjectPattern' ? inner : null;
}

/** The user's functions, as tools; a leading underscore hides one. */
function listTools() {
  const listed = [];
  for (const name of [...variables.names()].filter((each) => typeof each === 'string').sort()) {
    if (name.startsWith('_')) continue;
    const value = variables.read(name);
    if (typeof value !== 'function' || types.isProxy(value) || brief.isClass(value) || load('modules').find(value) !== undefined) continue;
    const source = brief.functionText(value);
    if (/\{\s*\[native code\]\s*\}$/.test(source)) continue;
    const comment = load('functions').comment(value);
    listed.push({ name, description: brief.cut(firstLine(comment), DESCRIPTION_MAX), source: 'user', schema: schemaOf(source, comment) });
  }
  return listed;
}

function firstLine(comment) {
  const lines = comment.split('\n').map((line) => line.replace(/^[\s*]+/, '').trim());
  return lines.find((line) => line !== '' && !line.startsWith('@')) ?? '';
}

/** JSON schema of a function's named arguments; types come from default values and JSDoc. */
function schemaOf(source, comment) {
  const params = syntax.parameters(source);
  if (params === null) return null;
  const first = params.length === 1 ? patternOf(params[0]) : null;
  const described = jsdoc(comment);
  const properties = {};
  const required = [];
  let more = false;
  const put = (name, fallback) => {
    const literal = fallback === undefined ? undefined : literalOf(fallback);
    properties[name] = { ...(described.get(name) ?? typeOf(literal)) };
    if (fallback === undefined) required.push(name);
    else if (literal !== undefined) properties[name].default = literal;
  };
  if (first !== null) {
    for (const each of first.properties) {
      if (each.type === 'RestElement') more = true;
      else if (!each.computed) put(each.key.name ?? String(each.key.value), each.value.type === 'AssignmentPattern' ? each.value.right : undefined);
    }
  } else {
    for (const each of params) {
      const name = nameOf(each);
      if (name !== null) put(name, each.type === 'AssignmentPattern' ? each.right : undefined);
    }
  }
  return { type: 'object', properties, required, additionalProperties: more };
}

function literalOf(node) {
  if (node.type === 'Literal' && !node.regex && !node.bigint) return node.value;
  if (node.type === 'UnaryExpression' && node.operator === '-' && typeof node.argument.value === 'number') return -node.argument.value;
  if (node.type === 'ArrayExpression' && node.elements.length === 0) return [];
  if (node.type === 'ObjectExpression' && node.properties.length === 0) return {};
  return undefined;
}

function typeOf(literal) {
  if (literal === undefined || literal === null) return {};
  return { type: Array.isArray(literal) ? 'array' : typeof literal };
}

const TYPES = { number: 'number', string: 'string', boolean: 'boolean', object: 'object', integer: 'integer', array: 'array' };

/** `@param {type} name - text` lines: Map of name to schema. */
function jsdoc(comment) {
  const found = new Map();
  for (const [, type, name, text] of comment.matchAll(/@param\s+(?:\{([^}]*)\}\s*)?\[?([\w$.]+)(?:=[^\]]*)?\]?[ \t]*(?:-[ \t]*)?([^\n]*)/g)) {
    const plain = (type ?? '').trim().toLowerCase();
    const schema = {};
    if (Object.hasOwn(TYPES, plain)) schema.type = TYPES[plain];
    else if (/\[\]$|^array</.test(plain)) schema.type = 'array';
    const description = text.replace(/\s*\*\/?\s*$/, '').trim();
    if (description) schema.description = brief.cut(description, DESCRIPTION_MAX);
    found.set(name.split('.').at(-1), schema);
  }
  return found;
}

Object.assign(exports, { Refused, prepare, listTools });
