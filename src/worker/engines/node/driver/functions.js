// Functions and classes as source: which are complete in their source, and rebuilding them.
//
// A function that uses variables of its surrounding scope cannot be rebuilt from its source. The
// inspector reports the scopes: a self-contained function has only global ones.
'use strict';

const brief = load('brief');
const evaluator = load('evaluate');
const syntax = load('syntax');
const { Script } = host.require('vm');
const { types } = host;

const runHere = brief.uncurry(Script.prototype.runInThisContext);
const NATIVE = /\{\s*\[native code\]\s*\}$/;
const GLOBAL_SCOPES = /^(Script|Global)$/;
// What an arrow function captures without a variable.
const IMPLICIT = /\b(this|arguments|super|new\s*\.\s*target)\b/;
const COMMENT_BEFORE = /\/\*\*((?:[^*]|\*(?!\/))*)\*\/\s*(?:(?:const|let|var|async|export|default)\s+)*(?:[\w$]+\s*=\s*)?(?:async\s+)?$/;

const known = new WeakMap();
const comments = new WeakMap();
// Functions that were built from their source alone.
const whole = new WeakSet();

/** {source, form, strict} or {reason}. */
function analyse(value) {
  let found = known.get(value);
  if (found === undefined) {
    found = look(value);
    known.set(value, found);
  }
  return found;
}

function look(value) {
  const source = brief.functionText(value);
  if (NATIVE.test(source)) return { reason: `${nameOf(value)} is native code` };
  const outer = whole.has(value) ? [] : scopesOf(value);
  if (outer.length) return { reason: `${nameOf(value)} uses variables of the place where it was made (${outer.join(', ')})` };
  const form = formOf(source);
  if (form === null) return { reason: `the source of ${nameOf(value)} does not stand alone` };
  if (form !== 'class' && /\bsuper\b/.test(source)) return { reason: `${nameOf(value)} uses super outside of a class` };
  if (isArrow(source) && IMPLICIT.test(source) && !whole.has(value) && !isTopLevelArrow(value, source)) {
    return { reason: `${nameOf(value)} may use \`this\` of the place where it was made` };
  }
  return { source, form, strict: form === 'expression' && isStrict(value, source) };
}

const nameOf = (value) => {
  const name = brief.own(value, 'name');
  return typeof name === 'string' && name !== '' ? `the function ${brief.cut(name, 100)}` : 'a function';
};

/** Names of the non-global variables around a function. */
function scopesOf(value) {
  const { objectId } = evaluator.remoteOf(value);
  const { internalProperties = [] } = evaluator.ask('Runtime.getProperties', { objectId, ownProperties: true });
  const list = brief.list(internalProperties).find((each) => each.name === '[[Scopes]]');
  if (list === undefined) return [];
  const scopes = evaluator.ask('Runtime.getProperties', { objectId: list.value.objectId, ownProperties: true });
  const names = [];
  for (const { name, value: scope } of brief.list(scopes.result)) {
    if (!/^\d+$/.test(name) || GLOBAL_SCOPES.test(scope.description)) continue;
    const inside = evaluator.ask('Runtime.getProperties', { objectId: scope.objectId, ownProperties: true });
    if (inside.result.length === 1 && isOwnName(inside.result[0], value)) continue;
    names.push(...brief.list(inside.result).slice(0, 5).map((each) => each.name));
    if (names.length === 0) names.push(scope.description);
  }
  return names.slice(0, 8);
}

/** The name of a class or function expression inside itself: part of the source. */
function isOwnName({ name, value: remote }, value) {
  const named = /^(?:class|(?:async\s+)?function\s*\*?)\s+([\p{ID_Start}$_][\p{ID_Continue}$]*)/u.exec(brief.functionText(value));
  return named !== null && named[1] === name && remote !== undefined && evaluator.valueOf(remote) === value;
}

/** The start of a function in the evaluated text: {line, column}. */
function locationOf(value) {
  const { objectId } = evaluator.remoteOf(value);
  const { internalProperties = [] } = evaluator.ask('Runtime.getProperties', { objectId, ownProperties: true });
  const found = brief.list(internalProperties).find((each) => each.name === '[[FunctionLocation]]')?.value?.value;
  return found === undefined ? null : { line: found.lineNumber, column: found.columnNumber };
}

const isArrow = (source) => !/^(async\s+)?function\b|^class\b/.test(source) && /^(async\s*)?(\(|[\p{ID_Start}$_][\p{ID_Continue}$]*\s*=>)/u.test(source);

/** Whether an arrow function is in no other function: then `this` is the global object. */
function isTopLevelArrow(value, source) {
  const nested = placesOf(value, source).map(({ text, start }) => {
    const tree = syntax.parse(text);
    let inside = null;
    if (tree !== null) {
      syntax.walk(tree, (node, above) => {
        if (node.start !== start || node.type !== 'ArrowFunctionExpression') return;
        inside = above.some((each) => (/Function/.test(each.type) && each.type !== 'ArrowFunctionExpression') || /^Class|PropertyDefinition|StaticBlock/.test(each.type));
      });
    }
    return inside;
  });
  return nested.length > 0 && nested.every((each) => each === false);
}

/** The occurrences of that function in the sources of executions: [{text, start}]. */
function placesOf(value, source) {
  const at = locationOf(value);
  if (at === null) return [];
  const found = [];
  for (const text of load('trace').known()) {
    const rewritten = load('imports').rewrite(text);
    const start = offsetOf(rewritten, at);
    for (const shift of [0, -1]) { // an object was evaluated in parentheses
      if (rewritten.startsWith(source, start + shift)) found.push({ text: rewritten, start: start + shift });
    }
    if (found.length) break;
  }
  // The location of a method or an arrow is that of its parameters; the source may start before.
  if (found.length === 0) {
    for (const text of load('trace').known()) {
      const rewritten = load('imports').rewrite(text);
      const start = rewritten.indexOf(source);
      if (start >= 0 && rewritten.indexOf(source, start + 1) < 0) found.push({ text: rewritten, start });
    }
  }
  return found;
}

function offsetOf(text, { line, column }) {
  let at = 0;
  for (let each = 0; each < line; each++) {
    at = text.indexOf('\n', at) + 1;
    if (at === 0) return text.length;
  }
  return at + column;
}

/** How a source becomes an expression again. */
function formOf(source) {
  if (/^class\b/.test(source)) return compiles(`(${source}\n)`) ? 'class' : null;
  if (compiles(`(${source}\n)`)) return 'expression';
  return compiles(`({${source}\n})`) ? 'member' : null;
}

const compiles = (text) => syntax.isScript(text);

/** Whether a plain function is strict without its source saying so. */
function isStrict(value, source) {
  return /^function\b/.test(source) && !/^function\*/.test(source) && Reflect.getOwnPropertyDescriptor(value, 'caller') === undefined;
}

/** Builds a function from its source. `name` is for traces. */
function make({ source, form, strict }, name) {
  const text = form === 'member' ? `({${source}\n})` : `(${source}\n)`;
  const filename = `<${brief.cut(name, 100)}>`;
  const script = new Script(strict ? `'use strict'; ${text}` : text, { filename, importModuleDynamically: undefined });
  const made = runHere(script);
  if (form !== 'member') {
    whole.add(made);
    return made;
  }
  const found = Reflect.getOwnPropertyDescriptor(made, Reflect.ownKeys(made)[0]);
  const member = found.value ?? found.get ?? found.set;
  whole.add(member);
  return member;
}

/** The JSDoc comment before a function, or an empty text. */
function comment(value) {
  if (!comments.has(value)) {
    const source = brief.functionText(value);
    const place = load('trace').known().some((text) => text.includes('/**')) ? placesOf(value, source)[0] : undefined;
    comments.set(value, (place === undefined ? null : COMMENT_BEFORE.exec(place.text.slice(0, place.start)))?.[1] ?? '');
  }
  return comments.get(value);
}

/** Whether an object has private members; checked only where its class mentions some. */
function hasPrivate(value) {
  const { objectId } = evaluator.remoteOf(value);
  const { privateProperties = [] } = evaluator.ask('Runtime.getProperties', { objectId, ownProperties: true });
  return privateProperties.length > 0;
}

Object.assign(exports, {
  analyse, make, comment, hasPrivate, isFunction: (value) => typeof value === 'function' && !types.isProxy(value),
  rememberComment: (value, text) => comments.set(value, text),
});
