// What waits in the event loop and is no variable's: timers, servers, connections. None of it can be saved; all of it is named.
//
// Only counts, by Node's own list of what keeps the loop alive. Children are jobs.
'use strict';

const { process } = host;

/** Kinds of Node's list. */
const KINDS = new Map(Object.entries({
  Timeout: { key: 'timers/pending', one: 'timer', many: 'timers' },
  Immediate: { key: 'timers/immediate', one: 'immediate', many: 'immediates' },
  TCPServerWrap: { key: 'sockets/servers', one: 'server', many: 'servers' },
  PipeServerWrap: { key: 'sockets/local', one: 'server on a local socket', many: 'servers on local sockets' },
  TCPSocketWrap: { key: 'sockets/connections', one: 'connection', many: 'connections' },
  UDPWrap: { key: 'sockets/udp', one: 'UDP socket', many: 'UDP sockets' },
}));

// Before any user code: it may replace it.
const active = process.getActiveResourcesInfo?.bind(process) ?? (() => []);

/** How many there are of each kind. User code may have replaced the ways to iterate over arrays. */
function counted() {
  const found = active();
  const counts = new Map();
  for (let at = 0; at < found.length; at++) counts.set(found[at], (counts.get(found[at]) ?? 0) + 1);
  return counts;
}

function eachKind(inner) {
  const counts = counted();
  for (const kind of KINDS.keys()) {
    const count = counts.get(kind);
    if (count === undefined) continue;
    const { key, one, many } = KINDS.get(kind);
    inner({ kind, key, words: `${count} ${count === 1 ? one : many}` });
  }
}

/** Adds to the entries of what cannot be saved. */
function name(entries) {
  eachKind(({ kind, key, words }) => entries.push({ key, type: kind, reason: `${words}, which the engine's end ends` }));
  return entries;
}

/** All of it in a few words; empty: nothing waits. */
function summary() {
  let text = '';
  eachKind(({ words }) => {
    text += text === '' ? words : ', ' + words;
  });
  return text;
}

Object.assign(exports, { name, summary });
