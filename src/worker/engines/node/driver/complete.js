// Completion. Runs no getters and touches no proxies.
'use strict';

const brief = load('brief');
const variables = load('variables');
const wire = load('wire');
const { types } = host;
const { builtinModules } = host.require('module');
const { readdirSync } = host.require('fs');
const { global, intrinsics, prototypes } = host.user;

const MATCHES_MAX = 200;
const KEYWORDS = ('async await break case catch class const continue debugger default delete do else export extends false finally for function '
  + 'if import in instanceof let new null of return static super switch this throw true try typeof undefined var void while with yield').split(' ');
const WORD = /[\p{ID_Continue}$\u200c\u200d]*$/u;
const NAME = /^[\p{ID_Start}$_][\p{ID_Continue}$]*$/u;

const decoder = new intrinsics.TextDecoder();

/** {start: byte offset of the replaced text, matches}. */
function complete(code, cursor) {
  const bytes = wire.encodeText(wire.wellFormed(code));
  const before = decoder.decode(bytes.subarray(0, Math.max(cursor, 0)));
  const line = before.slice(before.lastIndexOf('\n') + 1);
  const specifier = /(?:\brequire\s*\(\s*|\bimport\s*\(\s*|\bfrom\s+|\bimport\s+)(['"])([^'"]*)$/.exec(line);
  if (specifier !== null) return answer(before, specifier[2], specifiers());
  const word = WORD.exec(line)[0];
  const head = line.slice(0, line.length - word.length);
  if (!/\.$/.test(head)) return answer(before, word, names());
  const chain = chainOf(head.replace(/\?\.$|\.$/, ''));
  return answer(before, word, chain === null ? [] : members(chain));
}

function answer(before, word, found) {
  const start = wire.encodeText(before.slice(0, before.length - word.length)).length;
  const isHidden = (name) => name.startsWith('_') && !word.startsWith('_');
  const matches = [...new Set(found)].filter((name) => name.startsWith(word) && !isHidden(name) && wire.wellFormed(name) === name).sort();
  return { start, matches: matches.slice(0, MATCHES_MAX) };
}

function names() {
  const found = [...variables.names()].filter((name) => typeof name === 'string' && NAME.test(name));
  return [...found, ...Object.getOwnPropertyNames(global).filter((name) => NAME.test(name) && !name.startsWith('$mport')), ...KEYWORDS];
}

function specifiers() {
  const found = brief.list(builtinModules).filter((name) => !name.startsWith('_'));
  try {
    found.push(...brief.list(readdirSync('node_modules')).filter((name) => !name.startsWith('.')));
  } catch {
    return found; // nothing is installed
  }
  return found;
}

/** The dotted names at the end of `head`; null if it ends otherwise, with an unknown value. */
function chainOf(head) {
  const found = /(?:^|[^\p{ID_Continue}$.\])'"`?])((?:[\p{ID_Start}$_][\p{ID_Continue}$]*(?:\?\.|\.))*[\p{ID_Start}$_][\p{ID_Continue}$]*)$/u.exec(head);
  return found === null ? null : found[1].split(/\?\.|\./);
}

function members(chain) {
  const [first, ...rest] = chain;
  variables.refresh();
  let value = variables.isDeclared(first) ? variables.read(first) : first === 'globalThis' ? global : load('wellknown').follow([first]);
  if (value === undefined) value = Reflect.getOwnPropertyDescriptor(global, first)?.value;
  for (const name of rest) value = value === undefined || value === null ? undefined : brief.inherited(boxed(value), name);
  if (value === undefined || value === null) return [];
  const found = [];
  for (let at = boxed(value), steps = 0; at !== null && steps < 50 && !types.isProxy(at); at = Reflect.getPrototypeOf(at), steps++) {
    if (at === prototypes.Object && steps > 0 && found.length > 0) break;
    for (const name of Reflect.ownKeys(at).slice(0, 5000)) if (typeof name === 'string' && NAME.test(name)) found.push(name);
  }
  return found;
}

/** An object with a prototype of the user's realm. */
const boxed = (value) => intrinsics.Object(value);

Object.assign(exports, { complete });
