// State beside the variables: working directory and environment. Each is a separate entry if it differs from the start.
'use strict';

const { process } = host;
const chdir = process.chdir.bind(process);
const cwd = process.cwd.bind(process);

let startCwd;
let startEnv;

function install() {
  startCwd = cwd();
  startEnv = { ...process.env };
}

/** Binds a warm engine: it enters the workspace and gets its kernel's variables. */
function bind(env) {
  chdir(startCwd);
  for (const [name, value] of env) process.env[name] = value;
  startEnv = { ...process.env };
}

/** Restores the initial settings, for a load. */
function reset() {
  try {
    chdir(startCwd);
  } catch {
    // The folder is gone; the following entry sets the new one.
  }
  for (const name of Object.keys(process.env)) if (!Object.hasOwn(startEnv, name)) delete process.env[name];
  for (const [name, value] of Object.entries(startEnv)) if (process.env[name] !== value) process.env[name] = value;
}

function directory() {
  try {
    return cwd();
  } catch {
    return null; // it was removed
  }
}

/** Map of key to {value, type} of all differences from the start. */
function current() {
  const found = new Map();
  const at = directory();
  if (at !== null && at !== startCwd) found.set('cwd', { value: at, type: 'path' });
  const env = { ...process.env };
  for (const name of new Set([...Object.keys(env), ...Object.keys(startEnv)])) {
    if (env[name] !== startEnv[name]) found.set('env/' + name, { value: env[name] ?? null, type: 'text' });
  }
  return found;
}

const isSetting = (key) => key === 'cwd' || key.startsWith('env/');

/** Restores one setting; throws on failure. */
function apply(key, value) {
  if (key === 'cwd') {
    if (typeof value !== 'string') throw new TypeError('not a path');
    chdir(value);
  } else if (value === null) delete process.env[key.slice(4)];
  else if (typeof value === 'string') process.env[key.slice(4)] = value;
  else throw new TypeError('not a text');
}

Object.assign(exports, { install, bind, reset, current, isSetting, apply, directory, start: () => startCwd });
