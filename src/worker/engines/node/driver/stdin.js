// Standard input: descriptor 0 and process.stdin, per execution.
//
// Node cannot duplicate a descriptor. The listener has reopened the received one; here descriptor 0
// is closed and that one reopened, which takes the lowest free number. /dev/null is restored the
// same way.
'use strict';

const { closeSync, openSync } = host.require('fs');
const { expose } = host.user;
const { process } = host;

let stream = null;
let given = false;
let getter;

class NoInput extends Error {}

function install() {
  getter = expose('get stdin', 0, current);
  renew();
}

function renew() {
  const found = Object.getOwnPropertyDescriptor(process, 'stdin');
  if (found === undefined || found.get !== getter) {
    Object.defineProperty(process, 'stdin', { get: getter, configurable: true, enumerable: true });
  }
}

function current() {
  if (stream !== null) return stream;
  if (given) {
    const { Socket } = host.require('net');
    stream = new Socket({ fd: 0, readable: true, writable: false });
  } else {
    const { Readable } = host.require('stream');
    stream = new Readable({ read() {} });
    stream.push(null);
  }
  Object.defineProperty(stream, 'fd', { value: 0, configurable: true, writable: true });
  return stream;
}

/** Opens `path` as descriptor 0. */
function place(path) {
  try {
    closeSync(0);
  } catch (error) {
    if (error.code !== 'EBADF') throw error;
  }
  const got = openSync(path, 'r');
  if (got !== 0) {
    closeSync(got); // another thread opened something in between and has the number now
    throw new NoInput('descriptor 0 was taken meanwhile');
  }
}

/** Makes the received descriptor the standard input, and closes it. Throws NoInput if that fails. */
function give(fds) {
  renew();
  const fd = fds.length ? fds.shift() : -1;
  closeAll(fds);
  if (fd < 0) throw new NoInput('no descriptor came along that can be opened: a pipe is needed');
  try {
    place('/proc/self/fd/' + fd);
    given = true;
  } catch (error) {
    throw new NoInput(`standard input cannot be put in its place: ${error.message}`);
  } finally {
    closeAll([fd]);
  }
}

/** Restores /dev/null. */
function take() {
  if (stream !== null) {
    const was = stream;
    stream = null;
    was.destroy();
  }
  if (given) {
    given = false;
    place('/dev/null');
  }
}

function closeAll(fds) {
  for (const fd of fds) {
    if (fd < 0) continue;
    try {
      closeSync(fd);
    } catch {
      continue;
    }
  }
}

Object.assign(exports, { NoInput, install, renew, give, take, closeAll });
