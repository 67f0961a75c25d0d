// Pending handles of the event loop: timers, servers, connections. None can be saved; all are listed.
//
// Counts Node's own list of handles that keep the loop alive. Children are jobs.
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

// Taken before user code can replace it.
const active = process.getActiveResourcesInfo?.bind(process) ?? (() => []);

/** The number of each kind. User code may have replaced array iteration. */
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

/** Adds them to the entries that cannot be saved. */
function name(entries) {
  eachKind(({ kind, key, words }) => entries.push({ key, type: kind, reason: `${words}, which the engine's end ends` }));
  return entries;
}

/** A short summary; empty: nothing is pending. */
function summary() {
  let text = '';
  eachKind(({ words }) => {
    text += text === '' ? words : ', ' + words;
  });
  return text;
}

Object.assign(exports, { name, summary });
