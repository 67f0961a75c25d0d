// Errors for people: the stack without the driver's frames, the source line, bounded.
//
// Owns the source texts of executions. Runs user code (inspect's hooks, getters of errors), never throws.
'use strict';

const brief = load('brief');
const { inspect } = host.require('util');
const { isNativeError } = host.types;

const TEXT_MAX = 64 << 10;
const ERR_MAX = 1000;
const SOURCES_MAX = 16 << 20;
const LINE_MAX = 200;
const DRIVER_FRAME = /^\s+at .*(?:ryokan:|node:inspector:|node:async_hooks:|node:internal\/)/;
const EXEC_FRAME = /^\s+at .*?<exec:(\d+)>:(\d+):(\d+)/m;

const sources = new Map();
let held = 0;

const fileName = (exec) => `<exec:${exec}>`;

/** Stores the source of an execution; evicts the oldest beyond the limit. */
function remember(exec, source) {
  held += source.length;
  sources.set(exec, source);
  for (const [oldest, text] of sources) {
    if (held <= SOURCES_MAX || oldest === exec) break;
    sources.delete(oldest);
    held -= text.length;
  }
}

/** {text: for stderr, last: one line}. */
function describe(error) {
  let text;
  let last;
  try {
    text = inspect(error, { depth: 4, maxArrayLength: 100, maxStringLength: TEXT_MAX, breakLength: 100 });
    if (typeof text !== 'string') text = String(text);
    if (isNativeError(error)) {
      text = pointer(text) + withoutDriver(text);
      last = brief.headline(error);
    } else {
      last = text;
    }
  } catch {
    text = last = brief.line(error, ERR_MAX); // an inspect hook is anyone's code
  }
  return { text: cutMiddle(text) + '\n', last: brief.cut(last.replace(/\s+/g, ' ').trim(), ERR_MAX) };
}

/** For source that does not compile: the place instead of a stack. */
function describeRefusal(error, exec, line, column, hint) {
  const last = brief.cut(brief.headline(error).replace(/\s+/g, ' '), ERR_MAX);
  const where = place(exec, line, column);
  return { text: `${where}${last}\n${hint ? hint + '\n' : ''}`, last };
}

function withoutDriver(text) {
  return text.split('\n').filter((line) => !DRIVER_FRAME.test(line)).join('\n');
}

/** The source line of an execution's topmost frame. */
function pointer(text) {
  const found = EXEC_FRAME.exec(text);
  return found === null ? '' : place(Number(found[1]), Number(found[2]) - 1, Number(found[3]) - 1) + '\n';
}

function place(exec, line, column) {
  const source = sources.get(exec);
  const lines = source === undefined ? [] : source.split('\n');
  if (source !== undefined && line >= lines.length) return place(exec, lines.length - 1, lines.at(-1).length);
  const text = lines[line];
  if (text === undefined || text.length > LINE_MAX) return `${fileName(exec)}:${line + 1}\n`;
  const blank = text.slice(0, column).replace(/[^\t]/g, ' ');
  return `${fileName(exec)}:${line + 1}\n${text}\n${blank}^\n`;
}

function cutMiddle(text) {
  return text.length > TEXT_MAX ? `${text.slice(0, TEXT_MAX / 2)}\n…\n${text.slice(-TEXT_MAX / 2)}` : text;
}

/** The source texts that are known, newest first. */
const known = () => [...sources.values()].reverse();

Object.assign(exports, { fileName, remember, describe, describeRefusal, known, forget: () => { sources.clear(); held = 0; } });
