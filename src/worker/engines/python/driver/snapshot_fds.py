"""Descriptors of a copy of the engine (see keep): what is behind them must be its own, or nobody's.

A fork shares what is behind a descriptor. The engine would move a copy's place in a file; and a copy that holds the end of a
pipe or of a connection would keep its other end from seeing it closed. So a copy opens files again, makes pipes and
pairs of sockets whose ends are all its own anew with what waits in them, and lets go of what leads to somebody else.
Owns what is needed to find files again when the copy is woken, for a restore may have replaced them.
"""
import _socket
import fcntl
import os
from stat import S_ISFIFO, S_ISREG

from _ryokan import streams

_F_SETPIPE_SZ, _F_GETPIPE_SZ, _FIONREAD = 1031, 1032, 0x541B
_MAKES = os.O_CREAT | os.O_EXCL | os.O_TRUNC | os.O_NOCTTY
_SOCKET, _PIPE = "socket:[", "pipe:["
_TRIES = 8  # for a pair whose ends are numbered one after the other

_files = {}
_missed = []
_cwd = None


def detach(spared, engine):
    """Makes this process's descriptors its own. `engine`: the process that it was forked from, which does nothing now."""
    global _cwd
    _files.clear()
    _missed.clear()
    try:
        _cwd = os.getcwd()
    except OSError:
        _cwd = None
    spared = {0, 1, 2, *streams.copies(), *spared}
    pipes, sockets, polls = {}, {}, []
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd in spared:
            continue
        try:
            target, found = os.readlink("/proc/self/fd/" + name), os.fstat(fd)
        except OSError:  # the listing's own
            continue
        if S_ISREG(found.st_mode):
            _open_again(fd, target, found)
        elif target.startswith(_PIPE):
            pipes.setdefault(target, []).append(fd)
        elif target.startswith(_SOCKET):
            sockets.setdefault(target, []).append(fd)
        elif S_ISFIFO(found.st_mode):
            _let_go(fd, "pipe", "it has a name: others may hold its other end")
        elif target == "anon_inode:[eventpoll]":
            polls.append(fd)
        elif target.startswith("anon_inode:"):
            _miss(fd, target[11:].strip("[]"), "the host kernel keeps it, once for all copies: it is as it is now")
    elsewhere = _held_elsewhere(engine) if pipes or sockets else ()
    for target, fds in pipes.items():
        _own_pipe(fds, target in elsewhere)
    _own_sockets(sockets, elsewhere)
    for fd in polls:
        _own_poll(fd)


def attach():
    """Finds files again that were replaced meanwhile. Returns all that is not as it was, as the reply's `missed`."""
    for fd, (path, flags, found) in _files.items():
        try:
            now = os.stat(path)
            if (now.st_dev, now.st_ino) == (found.st_dev, found.st_ino):
                continue
            at = os.lseek(fd, 0, os.SEEK_CUR)
            _replace(fd, os.open(path, flags | os.O_CLOEXEC))
            os.lseek(fd, at, os.SEEK_SET)
        except OSError as error:
            reason = f"it was open, and cannot be opened again: {error.strerror}"
            _missed.append({"key": f"open/{path}", "type": "file", "reason": reason})
    _files.clear()
    if _cwd is not None:
        try:
            os.chdir(_cwd)
        except OSError as error:
            _missed.append({"key": "cwd", "type": "path", "reason": f"{_cwd}: {error.strerror}"})
    for path in _shared_mappings():
        reason = "memory that is shared with a file or other processes is as it is now"
        _missed.append({"key": f"mapping/{path}", "type": "memory", "reason": reason})
    missed = list(_missed)
    _missed.clear()
    return missed


def _miss(fd, kind, reason):
    _missed.append({"key": f"descriptor/{fd}", "type": kind, "reason": reason})


def _replace(fd, new):
    """Puts `new` where `fd` is."""
    os.dup2(new, fd, os.get_inheritable(fd))
    os.close(new)


def _let_go(fd, kind, reason):
    """Whatever is done with it afterwards fails, and reaches nobody."""
    dead = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    _replace(fd, dead.detach())
    _miss(fd, kind, reason)


def _open_again(fd, path, found):
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~_MAKES
        at = os.lseek(fd, 0, os.SEEK_CUR)
        _replace(fd, os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC))
        os.lseek(fd, at, os.SEEK_SET)
    except OSError as error:
        return _let_go(fd, "file", f"{path} could not be opened once more: {error.strerror}")
    if found.st_nlink:
        _files[fd] = (path, flags, found)
    else:
        _miss(fd, "file", "it has no name: what is in it is as it is now")


def _held_elsewhere(engine):
    """The pipes and sockets that other processes hold, by what their descriptors lead to; all, if one of them cannot be asked."""
    own = {1, engine, os.getpid(), os.getppid()}
    found = set()
    for process in os.listdir("/proc"):
        if not process.isdigit() or int(process) in own:
            continue
        try:
            names = os.listdir(f"/proc/{process}/fd")
        except (FileNotFoundError, ProcessLookupError):  # it is gone
            continue
        except OSError:
            return _All()
        for name in names:
            try:
                target = os.readlink(f"/proc/{process}/fd/{name}")
            except OSError:  # closed meanwhile
                continue
            if target.startswith((_PIPE, _SOCKET)):
                found.add(target)
    return found


class _All:
    def __contains__(self, _):
        return True


def _waiting(fd):
    """Bytes that can be read."""
    return int.from_bytes(fcntl.ioctl(fd, _FIONREAD, bytes(4)), "little")


def _own_pipe(fds, elsewhere):
    flags = {fd: fcntl.fcntl(fd, fcntl.F_GETFL) for fd in fds}
    readers = [fd for fd in fds if flags[fd] & os.O_ACCMODE == os.O_RDONLY]
    writers = [fd for fd in fds if flags[fd] & os.O_ACCMODE == os.O_WRONLY]
    if elsewhere or not readers or not writers:
        for fd in fds:
            _let_go(fd, "pipe", "its other end was another process's")
        return
    reader, writer = os.pipe()
    size, waiting = fcntl.fcntl(readers[0], _F_GETPIPE_SZ), _waiting(readers[0])
    try:
        fcntl.fcntl(writer, _F_SETPIPE_SZ, size)
    except OSError:  # the account has many pipes, and the host gives it small ones from then on
        given = fcntl.fcntl(writer, _F_GETPIPE_SZ)
        if waiting > given:
            os.close(reader)
            os.close(writer)
            for fd in fds:
                _let_go(fd, "pipe", "the host gave no pipe large enough for what waited in it")
            return
        if given < size:
            _miss(readers[0], "pipe", f"it has room for {given} bytes, not for {size} as before")
    if waiting:  # taken out and put back: nobody else looks at it; if somebody does, this must not wait for him
        for end in (readers[0], writers[0]):
            fcntl.fcntl(end, fcntl.F_SETFL, flags[end] | os.O_NONBLOCK)
        try:
            data = os.read(readers[0], waiting)
            if os.write(writers[0], data) + os.write(writer, data) < 2 * waiting:
                raise BlockingIOError
        except BlockingIOError:
            _miss(readers[0], "pipe", "somebody used it while it was copied: what waited in it may not be there")
        finally:
            for end in (readers[0], writers[0]):
                fcntl.fcntl(end, fcntl.F_SETFL, flags[end])
    for end, ours in ((reader, readers), (writer, writers)):
        fcntl.fcntl(end, fcntl.F_SETFL, flags[ours[0]])
        for fd in ours:
            os.dup2(end, fd, os.get_inheritable(fd))
        os.close(end)


def _own_sockets(sockets, elsewhere):
    """Both ends of a pair are made one after the other, and numbered so. A chain of numbers that could be paired in two ways
    is not: no byte of the code's is risked to find out."""
    inside = {}
    for target, fds in sockets.items():
        if target not in elsewhere and _is_of_pair(fds[0]):
            inside[int(target[len(_SOCKET) : -1])] = fds
        else:
            for fd in fds:
                _let_go(fd, "socket", "it led to another process or host, or was waiting for one")
    chain = []
    for number in sorted(inside):
        if chain and number != chain[-1] + 1:
            _own_chain(chain, inside)
            chain = []
        chain.append(number)
    _own_chain(chain, inside)


def _own_chain(chain, inside):
    pairs = list(zip(chain[::2], chain[1::2])) if len(chain) % 2 == 0 else []
    for one, other in pairs:
        _own_pair(inside[one], inside[other])
    if not pairs:
        for number in chain:
            for fd in inside[number]:
                _let_go(fd, "socket", "its other end was not here")


def _is_of_pair(fd):
    with _Borrowed(fd) as socket:
        try:
            return socket.family == _socket.AF_UNIX and not socket.getsockname() and not socket.getpeername()
        except OSError:
            return False


class _Borrowed:
    """A socket object for a descriptor that stays open."""

    def __init__(self, fd):
        self.flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        self.socket = _socket.socket(fileno=fd)

    def __enter__(self):
        return self.socket

    def __exit__(self, *_):
        # A default timeout of the code's makes sockets non-blocking.
        fcntl.fcntl(self.socket.detach(), fcntl.F_SETFL, self.flags)


def _own_pair(ones, others):
    with _Borrowed(ones[0]) as one, _Borrowed(others[0]) as other:
        kind = one.type
        data = _peek(one), _peek(other)
    new = _pair(kind)
    for end, peer, ours, waits in ((new[0], new[1], ones, data[0]), (new[1], new[0], others, data[1])):
        if waits is None or not _send(peer, waits):
            _miss(ours[0], "socket", "what waited in it is not there again")
    for end, ours in zip(new, (ones, others)):
        fcntl.fcntl(end.fileno(), fcntl.F_SETFL, fcntl.fcntl(ours[0], fcntl.F_GETFL))
        for fd in ours:
            os.dup2(end.fileno(), fd, os.get_inheritable(fd))
        end.close()


def _pair(kind):
    """A new pair whose ends are numbered one after the other, as the copy of this copy will want to find them: another process
    that makes a socket in between is in the way of that, now and then."""
    for _ in range(_TRIES):
        new = _socket.socketpair(_socket.AF_UNIX, kind)
        one, other = (os.fstat(end.fileno()).st_ino for end in new)
        if other == one + 1:
            break
    return new


def _peek(socket):
    """What waits to be read; `None` if that cannot be told without taking it."""
    waiting = _waiting(socket.fileno())
    if not waiting:
        return b""
    if socket.type != _socket.SOCK_STREAM:
        return None
    found = socket.recv(waiting, _socket.MSG_PEEK | _socket.MSG_DONTWAIT)
    return found if len(found) == waiting else None


def _send(socket, data):
    try:
        return not data or socket.send(data, _socket.MSG_DONTWAIT) == len(data)
    except OSError:
        return False


def _own_poll(fd):
    import select

    own = select.epoll()
    try:
        with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
            entries = [line.split() for line in file if line.startswith(b"tfd:")]
        for entry in entries:
            watched, events, data = int(entry[1]), int(entry[3], 16), int(entry[5], 16)
            if data & 0xFFFFFFFF != watched:
                raise ValueError
            own.register(watched, events)
    except (OSError, ValueError, IndexError):
        _miss(fd, "eventpoll", "what it watches could not be found out: it is as it is now")
    else:
        os.dup2(own.fileno(), fd, os.get_inheritable(fd))
    own.close()


def _shared_mappings():
    found = set()
    with open("/proc/self/maps", "rb") as file:
        for line in file:
            fields = line.split(None, 5)
            if fields[1][1:2] == b"w" and fields[1][3:4] == b"s":
                found.add(fields[5].strip().decode("utf-8", "replace") if len(fields) > 5 else "anonymous")
    return sorted(found)
