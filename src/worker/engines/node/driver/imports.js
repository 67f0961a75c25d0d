// `require`, `import()` and `import` statements in executions: all of them resolve from the working directory.
//
// An execution's code is a script, and V8 does not let a console script import. So `import(` is
// renamed to a function of the same length, and an `import` statement becomes an `await` of it on
// the same lines. A parser finds the places.
'use strict';

const modules = load('modules');
const settings = load('settings');
const { createRequire } = host.require('module');
const { pathToFileURL } = host.require('url');
const { global, expose, exposeAsync, error: makeError } = host.user;

// As long as `import`, so that columns stay the same.
const NAME = '$mport';
const RELATIVE = /^\.{1,2}(\/|$)/;

const requires = new Map();
let requireFunction;

/** Node's `require` for the working directory. */
function requireHere() {
  const at = settings.directory() ?? settings.start();
  if (!requires.has(at)) requires.set(at, createRequire(at.endsWith('/') ? at : at + '/'));
  return requires.get(at);
}

function requireModule(specifier) {
  const found = requireHere()(specifier);
  modules.note(found, 'require', specifier, settings.directory());
  return found;
}

async function importModule(specifier, options, from) {
  const base = from ?? settings.directory() ?? settings.start();
  const asked = String(specifier);
  const found = await host.importModule(resolve(asked, base), options);
  modules.note(found, 'import', asked, base);
  return found;
}

/** Specifiers that Node resolves from the engine's start directory are made absolute for other directories. */
function resolve(specifier, base) {
  if (RELATIVE.test(specifier)) return new host.user.intrinsics.URL(specifier, pathToFileURL(base + '/')).href;
  if (specifier.startsWith('/')) return pathToFileURL(specifier).href;
  if (base === settings.start() || /^[a-z]+:/i.test(specifier) || modules.builtins.has(specifier)) return specifier;
  try {
    const path = createRequire(base + '/').resolve(specifier);
    return path.startsWith('/') ? pathToFileURL(path).href : specifier;
  } catch {
    return specifier; // Node's own error is the best description
  }
}

/** The bindings of an `import` statement; a missing export is an error, as in a module. */
function pick(found, specifier, ...names) {
  const taken = host.user.object();
  for (const name of names) {
    const holder = Reflect.has(found, name) ? found : found.default;
    if (name !== 'default' && (holder === undefined || holder === null || !Reflect.has(Object(holder), name))) {
      throw makeError('SyntaxError', `The requested module '${specifier}' does not provide an export named '${name}'`);
    }
    Object.defineProperty(taken, name, { value: holder === found ? found[name] : name === 'default' ? found : holder[name], enumerable: true });
  }
  return taken;
}

function install() {
  const asked = exposeAsync('import', 1, (specifier, options) => importModule(specifier, options));
  Object.defineProperty(asked, 'pick', { value: expose('pick', 2, pick) });
  Object.defineProperty(asked, 'leave', { value: expose('leave', 0, load('awaited').beforeTermination) });
  Object.defineProperty(global, NAME, { value: asked, writable: false, configurable: false, enumerable: false });
  requireFunction = expose('require', 1, requireModule);
  for (const name of ['resolve', 'cache', 'extensions', 'main']) {
    Object.defineProperty(requireFunction, name, { get: expose('get ' + name, 0, () => requireHere()[name]), configurable: true, enumerable: true });
  }
  put();
}

const put = () => Object.defineProperty(global, 'require', { value: requireFunction, writable: true, configurable: true, enumerable: false });

function renew() {
  if (Reflect.getOwnPropertyDescriptor(global, 'require')?.value === undefined) put();
}

/** The code in evaluable form: unchanged if it imports nothing or cannot be parsed. */
function rewrite(code) {
  if (!/\bimport\b/.test(code)) return code;
  const syntax = load('syntax');
  const tree = syntax.parse(code);
  if (tree === null) return code;
  const edits = [];
  syntax.walk(tree, (node) => {
    if (node.type === 'ImportExpression') edits.push({ start: node.start, end: node.start + NAME.length, text: NAME });
    else if (node.type === 'ImportDeclaration') edits.push({ start: node.start, end: node.end, text: awaited(node, code) });
  });
  edits.sort((one, other) => other.start - one.start);
  return edits.reduce((text, edit) => text.slice(0, edit.start) + edit.text + text.slice(edit.end), code);
}

/** An `import` statement as a declaration with as many lines. */
function awaited(node, code) {
  const specifier = JSON.stringify(node.source.value);
  const attributes = (node.attributes ?? []).map((each) => `${code.slice(each.start, each.end)}`);
  const options = attributes.length ? `, {with: {${attributes.join(', ')}}}` : '';
  const asked = `await ${NAME}(${specifier}${options})`;
  const names = [];
  const pattern = [];
  let namespace = null;
  for (const each of node.specifiers) {
    if (each.type === 'ImportNamespaceSpecifier') {
      namespace = each.local.name;
      continue;
    }
    const name = each.type === 'ImportDefaultSpecifier' ? 'default' : each.imported.name ?? each.imported.value;
    names.push(JSON.stringify(name));
    pattern.push(`${JSON.stringify(name)}: ${each.local.name}`);
  }
  const picked = (from) => `{${pattern.join(', ')}} = ${NAME}.pick(${[from, specifier, ...names].join(', ')})`;
  let text = asked;
  if (namespace !== null) text = `const ${namespace} = ${asked}${names.length ? `, ${picked(namespace)}` : ''}`;
  else if (names.length) text = `const ${picked(asked)}`;
  return `${text};${'\n'.repeat(code.slice(node.start, node.end).split('\n').length - 1)}`;
}

/** A hint for a syntax error that comes from treating an execution as a module or a new program. */
function hintFor(error) {
  const message = load('brief').own(error, 'message');
  if (typeof message !== 'string') return undefined;
  if (/Unexpected token 'export'/.test(message)) return 'an execution is a script, not a module: leave out `export`';
  if (/import\.meta/.test(message)) return 'an execution is a script, not a module: use process.cwd() and require.resolve()';
  if (/has already been declared/.test(message)) {
    return 'declare it again in the same way (const, let or class, var or function), assign to it, or use another name';
  }
  return undefined;
}

Object.assign(exports, { NAME, install, renew, rewrite, hintFor, requireHere, requireModule, importModule });
