// Effects: which variables an execution can have changed, so that a large state is not looked at as a whole each time.
//
// Goes by words: code can change only what its text names, what the functions that these names lead to name, and what shares
// objects with that. Whatever goes another way (eval, modules with a memory, things that run later, built-in objects that were
// changed) makes the answer "everything". A wrong "everything" costs time, a wrong answer the other way costs state: in doubt
// it is everything.
'use strict';

const awaited = load('awaited');
const modules = load('modules');
const wellknown = load('wellknown');
const { process } = host;
const { list } = load('brief');

const activeResources = process.getActiveResourcesInfo === undefined ? null : process.getActiveResourcesInfo.bind(process);

const WORD = /[\p{ID_Start}$_][\p{ID_Continue}$\u200c\u200d]*/gu;
// `constructor` leads to Function, unless it is the one of a class.
const CONSTRUCTOR = /(?:\.\s*|['"`[]\s*)constructor|constructor\s*[^\s(\w$]/;
// Through these, code reaches anything.
const ANYTHING = ['eval', 'Function', 'process', 'module', '_', '__', '___', 'vm', 'inspector', 'repl', 'v8', 'worker_threads', 'async_hooks',
  'domain', 'require', 'import', '$mport'];
// Through these, properties of the global object.
const GLOBAL = ['this', 'globalThis', 'global'];
// After these, something may run at any time that nothing tells of.
const LATER = ['unref', 'ref', 'AbortSignal', 'PerformanceObserver', 'persistent', 'BroadcastChannel', 'FinalizationRegistry', 'Worker'];
const LISTENING = ['on', 'once', 'addListener', 'prependListener', 'prependOnceListener'];
// After these, something may run right after the execution's end.
const SOON = ['nextTick', 'queueMicrotask'];
const TEXTS_MAX = 5000;

const wordsOf = new Map();
let idle = '';
let isLater = false; // for good
let isSoon = false; // something may have been left that runs before the next execution
let wasQuiet = false; // nothing but the driver's own was waited for when the state was last looked at

/** Remembers what an engine waits for in which no code has run. */
function install() {
  idle = resources();
  wasQuiet = activeResources !== null;
}

const resources = () => (activeResources === null ? '' : list(activeResources()).sort().join());
const isQuiet = () => activeResources !== null && resources() === idle;

/** The words of a text; sources come again and again. */
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

/** Code came into the engine that may be run now or later. */
function heard(text) {
  const found = words(text);
  isLater = isLater || LATER.some((word) => found.has(word)) || (found.has('process') && LISTENING.some((word) => found.has(word)));
}

/**
 * The names that code with that text can have changed since the state was last looked at, or null for everything. `records` are
 * those of state.js: what is known of each variable.
 */
function touched(text, records) {
  heard(text);
  const reached = reach(text, records);
  const isAlone = wasQuiet && !isSoon && !awaited.takeStray() && !isLater && !modules.hasForeign();
  isSoon = reached === null || SOON.some((word) => reached.words.has(word));
  wasQuiet = isQuiet();
  return reached !== null && isAlone && wasQuiet && wellknown.isPristine() ? reached.names : null;
}

/** What a text leads to: {names, words}; null if that cannot be told. */
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

/** Nothing is known of what happened, and what was left behind by it. */
function unknown() {
  isSoon = true;
  awaited.takeStray();
  wasQuiet = isQuiet();
}

Object.assign(exports, { install, heard, touched, unknown });
