// The user's variables: top-level `let`, `const`, `class`, `var`, functions, and properties of the global object.
//
// Reads and writes them by name. JavaScript cannot delete a declared binding; after a load it
// becomes undefined and a ghost, which is no variable until code assigns it again.
'use strict';

const evaluator = load('evaluate');
const globals = load('globals');
const { Script } = host.require('vm');
const { global } = host.user;

const runHere = load('brief').uncurry(Script.prototype.runInThisContext);

const IDENTIFIER = /^[\p{ID_Start}$_][\p{ID_Continue}$\u200c\u200d]*$/u;

const accessors = new Map();
const ghosts = new Set();
let lexical = new Set();

/** Looks at what is declared now. */
function refresh() {
  lexical = evaluator.lexicalNames();
}

/** Names of the user's variables. Strings and symbols. */
function names() {
  refresh();
  const found = new Set(lexical);
  for (const name of Reflect.ownKeys(global)) {
    if (!globals.isInitial(name) && !globals.isHistory(name)) found.add(name);
  }
  for (const name of ghosts) {
    if (!found.has(name)) ghosts.delete(name);
    else if (read(name) === undefined) found.delete(name);
    else ghosts.delete(name);
  }
  return found;
}

function accessor(name) {
  let found = accessors.get(name);
  if (found === undefined) {
    found = runHere(new Script(`'use strict'; ({ get: () => ${name}, set: ($value) => { ${name} = $value; } })`, { filename: 'ryokan:variable' }));
    accessors.set(name, found);
  }
  return found;
}

/** The value, or undefined; getters are not run. */
function read(name) {
  if (lexical.has(name)) {
    try {
      return accessor(name).get();
    } catch {
      return undefined; // declared but never initialised
    }
  }
  const found = Reflect.getOwnPropertyDescriptor(global, name);
  return found !== undefined && Object.hasOwn(found, 'value') ? found.value : undefined;
}

/** Whether the name has a value at all. */
function isDeclared(name) {
  if (ghosts.has(name) && read(name) === undefined) return false;
  if (lexical.has(name)) return true;
  return Reflect.getOwnPropertyDescriptor(global, name) !== undefined && !globals.isInitial(name) && !globals.isHistory(name);
}

/** How a name is declared: let, const, var (cannot be deleted), or a plain property with its attributes. */
function kindOf(name) {
  if (lexical.has(name)) return isConst(name) ? 'const' : 'let';
  const found = Reflect.getOwnPropertyDescriptor(global, name);
  if (found.configurable || !found.enumerable || !found.writable) return 'property';
  return 'var';
}

const constness = new Map();

function isConst(name) {
  // Constness is permanent: a name cannot change between const and not const.
  if (!constness.has(name)) {
    try {
      const { get, set } = accessor(name);
      set(get());
      constness.set(name, false);
    } catch (error) {
      if (/Assignment to constant/.test(error.message)) constness.set(name, true);
      else return false;
    }
  }
  return constness.get(name);
}

/** Declares a name in the given way and sets its value. Throws V8's error if that is invalid. */
function declare(name, kind, value) {
  ghosts.delete(name);
  if (kind === 'property' || !IDENTIFIER.test(String(name))) {
    Object.defineProperty(global, name, { value, writable: true, enumerable: true, configurable: true });
    return;
  }
  refresh();
  if (lexical.has(name) ? kind !== 'const' || !isConst(name) : false) {
    if (!isConst(name)) {
      accessor(name).set(value);
      return;
    }
  }
  if (kind === 'var' && !lexical.has(name)) {
    run(`var ${name};`);
    global[name] = value;
    return;
  }
  const holder = '$ryokan';
  Object.defineProperty(global, holder, { value, configurable: true });
  try {
    run(`${lexical.has(name) && isConst(name) ? 'const' : kind} ${name} = globalThis.${holder};`);
  } finally {
    Reflect.deleteProperty(global, holder);
  }
  lexical.add(name);
}

function run(statement) {
  let failure;
  evaluator.evaluate(statement, (outcome) => {
    if (outcome.refused) failure = outcome.refused();
  });
  if (failure !== undefined) throw failure;
}

/** Sets a variable from outside; a new one is declared with `let`. */
function set(name, value) {
  refresh();
  if (lexical.has(name)) declare(name, isConst(name) ? 'const' : 'let', value);
  else if (Reflect.getOwnPropertyDescriptor(global, name) !== undefined) global[name] = value;
  else declare(name, 'let', value);
  ghosts.delete(name);
}

/** Forgets every variable, as far as the language lets it. */
function forgetAll() {
  for (const name of names()) {
    if (lexical.has(name)) {
      declare(name, isConst(name) ? 'const' : 'let', undefined);
      ghosts.add(name);
    } else if (!Reflect.deleteProperty(global, name)) {
      Reflect.set(global, name, undefined);
      ghosts.add(name);
    }
  }
}

Object.assign(exports, { IDENTIFIER, names, read, isDeclared, isLexical: (name) => lexical.has(name), kindOf, declare, set, forgetAll, refresh });
