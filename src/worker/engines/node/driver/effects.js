// Effects: the variables that an execution can have changed, so that a large state need not be
// inspected as a whole.
//
// Works on words: code can change only what its text names, what the functions with these names
// name, and whatever shares objects with that. Other ways (eval, modules with state, delayed code,
// modified built-ins) make the answer "everything". A needless "everything" costs time, a missing
// name costs state; in doubt the answer is "everything".
'use strict';

const awaited = load('awaited');
const modules = load('modules');
const wellknown = load('wellknown');
const { process } = host;
const { list } = load('brief');

const activeResources = process.getActiveResourcesInfo === undefined ? null : process.getActiveResourcesInfo.bind(process);

const WORD = /[\p{ID_Start}$_][\p{ID_Continue}$\u200c\u200d]*/gu;
// `constructor` leads to Function, unless it is a class's own.
const CONSTRUCTOR = /(?:\.\s*|['"`[]\s*)constructor|constructor\s*[^\s(\w$]/;
// Through these, code reaches anything.
const ANYTHING = ['eval', 'Function', 'process', 'module', '_', '__', '___', 'vm', 'inspector', 'repl', 'v8', 'worker_threads', 'async_hooks',
  'domain', 'require', 'import', '$mport'];
// Through these, properties of the global object.
const GLOBAL = ['this', 'globalThis', 'global'];
// After these, code may run at any time without notice.
const LATER = ['unref', 'ref', 'AbortSignal', 'PerformanceObserver', 'persistent', 'BroadcastChannel', 'FinalizationRegistry', 'Worker'];
const LISTENING = ['on', 'once', 'addListener', 'prependListener', 'prependOnceListener'];
// After these, code may run right after the execution's end.
const SOON = ['nextTick', 'queueMicrotask'];
const TEXTS_MAX = 5000;

const wordsOf = new Map();
let idle = '';
let isLater = false; // permanently
let isSoon = false; // code may be pending that runs before the next execution
let wasQuiet = false; // only the driver's own handles were active at the last check of the state

/** Remembers the pending handles of an engine in which no code has run. */
function install() {
  idle = resources();
  wasQuiet = activeResources !== null;
}

const resources = () => (activeResources === null ? '' : list(activeResources()).sort().join());
const isQuiet = () => activeResources !== null && resources() === idle;

/** The words of a text; cached, since sources repeat. */
function words(text) {
  let found = wordsOf.get(text);
  if (found === undefined) {
    found = new Set(text.match(WORD));
    if (text.includes('\\u') || CONSTRUCTOR.test(text)) found.add('eval');
    if (wordsOf.size > TEXTS_MAX) wordsOf.clear();
    wordsOf.set(text, found);
  }
  return found;
}

/** Records code that may run now or later. */
function heard(text) {
  const found = words(text);
  isLater = isLater || LATER.some((word) => found.has(word)) || (found.has('process') && LISTENING.some((word) => found.has(word)));
}

/**
 * The names that code with this text can have changed since the last look, or null for everything. `records` are the
 * per-variable records of state.js.
 */
function touched(text, records) {
  heard(text);
  const reached = reach(text, records);
  const isAlone = wasQuiet && !isSoon && !awaited.takeStray() && !isLater && !modules.hasForeign();
  isSoon = reached === null || SOON.some((word) => reached.words.has(word));
  wasQuiet = isQuiet();
  return reached !== null && isAlone && wasQuiet && wellknown.isPristine() ? reached.names : null;
}

/** The names and words that a text leads to; null if unknown. */
function reach(text, records) {
  const seen = new Set();
  const names = new Set();
  const pending = [words(text)];
  const add = (name) => {
    const record = records.get(name);
    if (record === undefined || names.has(name)) return true;
    if (record.reason !== null || record.isForeign) return false;
    names.add(name);
    for (const source of record.sources) pending.push(words(source));
    pending.push(record.needs);
    return record.group.every(add);
  };
  while (pending.length) {
    for (const word of pending.pop()) {
      if (seen.has(word)) continue;
      seen.add(word);
      if (!add(word)) return null;
    }
    if (!GLOBAL.some((word) => seen.has(word))) continue;
    for (const [name, { kind }] of records) if (kind !== 'let' && kind !== 'const' && !add(name)) return null;
  }
  return ANYTHING.some((word) => seen.has(word)) ? null : { names, words: seen };
}

/** Forgets everything: unknown changes happened, and unknown leftovers exist. */
function unknown() {
  isSoon = true;
  awaited.takeStray();
  wasQuiet = isQuiet();
}

Object.assign(exports, { install, heard, touched, unknown });
