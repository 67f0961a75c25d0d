// Parsing without running: the parser of Node's own prompt, loaded when first needed.
//
// `check` distinguishes complete programs from incomplete ones; `parameters` reads a function's. V8 decides what is valid.
'use strict';

const { Script } = host.require('vm');

const ACORN = 'internal/deps/acorn/acorn/dist/acorn';
const OPTIONS = { ecmaVersion: 'latest', sourceType: 'script', allowAwaitOutsideFunction: true, allowImportExportEverywhere: true, allowHashBang: true };

let acorn;

function parser() {
  if (acorn === undefined) {
    const module = { exports: {} };
    const source = host.binding('natives')[ACORN];
    if (typeof source !== 'string') throw new Error('this Node has no parser for its prompt');
    const { context, names, values, compileFunction } = host.realm;
    const compiled = compileFunction(source, ['exports', 'module', ...names], { filename: 'ryokan:acorn', parsingContext: context });
    Reflect.apply(compiled, undefined, [module.exports, module, ...values]);
    acorn = module.exports;
  }
  return acorn;
}

/** The tree of a program, or null. */
function parse(code, more) {
  try {
    return parser().parse(code, { ...OPTIONS, ...more });
  } catch (error) {
    if (error instanceof SyntaxError) return null;
    throw error;
  }
}

/** Every node, parents first; `visit` receives the ancestors, too. */
function walk(tree, visit) {
  const stack = [[tree, []]];
  while (stack.length) {
    const [node, above] = stack.pop();
    visit(node, above);
    const path = [...above, node];
    for (const key of Object.keys(node)) {
      const child = node[key];
      if (Array.isArray(child)) {
        for (const each of child) if (each !== null && typeof each === 'object' && typeof each.type === 'string') stack.push([each, path]);
      } else if (child !== null && typeof child === 'object' && typeof child.type === 'string') stack.push([child, path]);
    }
  }
}

/** {status: complete | incomplete | invalid, indent}, as for a prompt. */
function check(code) {
  if (isScript(code) || isScript(`(${code}\n)`)) return { status: 'complete' };
  try {
    parser().parse(code, OPTIONS);
    return { status: 'complete' };
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
    const inText = /Unterminated (template|comment)/.test(error.message);
    const atEnd = error.pos >= code.trimEnd().length && !/Unterminated (string|regular)/.test(error.message);
    if (!inText && !atEnd && !continued(code)) return { status: 'invalid' };
    return { status: 'incomplete', indent: inText ? '' : indentAfter(code) };
  }
}

/** A string continued on the next line. */
const continued = (code) => /\\\n?$/.test(code);

function isScript(code) {
  try {
    new Script(code, { filename: 'check' });
    return true;
  } catch {
    return false;
  }
}

/** The last line's indentation, plus two blanks after an opening bracket. */
function indentAfter(code) {
  const last = code.split('\n').findLast((line) => line.trim() !== '') ?? '';
  const own = /^[ \t]*/.exec(last)[0];
  return /[{([]\s*(\/\/.*)?$|=>\s*$/.test(last) ? own + '  ' : own;
}

/** The parameters of a function's source as acorn nodes; null if unreadable. */
function parameters(source) {
  for (const text of [`(${source}\n)`, `({${source}\n})`]) {
    const tree = parse(text);
    if (tree === null) continue;
    const found = tree.body[0]?.expression;
    if (found?.type === 'ObjectExpression') return found.properties[0]?.value?.params ?? null;
    if (found?.params) return found.params;
  }
  return null;
}

Object.assign(exports, { parse, parser, walk, check, parameters, isScript });
