"""Descriptors of a forked snapshot: open files of its own, or dead ends.

A fork shares open file descriptions. The engine would move the snapshot's file offsets, and a snapshot holding the end of a
pipe or connection would keep the other end from seeing it closed. So a snapshot reopens files, recreates pipes and socket
pairs that are entirely its own together with their unread data, and replaces descriptors that lead to other processes.
Records how to reopen files when the snapshot is woken: a restore may have replaced them.
"""
import _socket
import fcntl
import os
from stat import S_ISFIFO, S_ISREG

from _ryokan import streams

_F_SETPIPE_SZ, _F_GETPIPE_SZ, _FIONREAD = 1031, 1032, 0x541B
_MAKES = os.O_CREAT | os.O_EXCL | os.O_TRUNC | os.O_NOCTTY
_SOCKET, _PIPE = "socket:[", "pipe:["
_TRIES = 8  # for a pair whose ends have consecutive numbers

_files = {}
_missed = []
_cwd = None


def detach(spared, engine):
    """Makes this process's descriptors its own. `engine`: the process that it was forked from, which is waiting."""
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
        except OSError:  # the descriptor of the listing itself
            continue
        if S_ISREG(found.st_mode):
            _open_again(fd, target, found)
        elif target.startswith(_PIPE):
            pipes.setdefault(target, []).append(fd)
        elif target.startswith(_SOCKET):
            sockets.setdefault(target, []).append(fd)
        elif S_ISFIFO(found.st_mode):
            _replace_dead(fd, "pipe", "a named pipe: other processes may hold its other end")
        elif target == "anon_inode:[eventpoll]":
            polls.append(fd)
        elif target.startswith("anon_inode:"):
            _miss(fd, target[11:].strip("[]"), "its state is in the host kernel and shared by all snapshots: it is unchanged")
    elsewhere = _targets_elsewhere(engine) if pipes or sockets else ()
    for target, fds in pipes.items():
        _own_pipe(fds, target in elsewhere)
    _own_sockets(sockets, elsewhere)
    for fd in polls:
        _own_poll(fd)


def attach():
    """Reopens files that were replaced meanwhile. Returns all differences, as the reply's `missed`."""
    for fd, (path, flags, found) in _files.items():
        try:
            now = os.stat(path)
            if (now.st_dev, now.st_ino) == (found.st_dev, found.st_ino):
                continue
            at = os.lseek(fd, 0, os.SEEK_CUR)
            _replace(fd, os.open(path, flags | os.O_CLOEXEC))
            os.lseek(fd, at, os.SEEK_SET)
        except OSError as error:
            reason = f"it was open and cannot be reopened: {error.strerror}"
            _missed.append({"key": f"open/{path}", "type": "file", "reason": reason})
    _files.clear()
    if _cwd is not None:
        try:
            os.chdir(_cwd)
        except OSError as error:
            _missed.append({"key": "cwd", "type": "path", "reason": f"{_cwd}: {error.strerror}"})
    for path in _shared_mappings():
        reason = "memory shared with a file or other processes is unchanged"
        _missed.append({"key": f"mapping/{path}", "type": "memory", "reason": reason})
    missed = list(_missed)
    _missed.clear()
    return missed


def _miss(fd, kind, reason):
    _missed.append({"key": f"descriptor/{fd}", "type": kind, "reason": reason})


def _replace(fd, new):
    """Replaces `fd` by `new`."""
    os.dup2(new, fd, os.get_inheritable(fd))
    os.close(new)


def _replace_dead(fd, kind, reason):
    """Replaces the descriptor by a dead one: every use fails, and reaches no other process."""
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
        return _replace_dead(fd, "file", f"{path} could not be reopened: {error.strerror}")
    if found.st_nlink:
        _files[fd] = (path, flags, found)
    else:
        _miss(fd, "file", "it is unnamed: its content is unchanged")


def _targets_elsewhere(engine):
    """Targets of other processes' pipes and sockets; contains everything if a process cannot be inspected."""
    own = {1, engine, os.getpid(), os.getppid()}
    found = set()
    for process in os.listdir("/proc"):
        if not process.isdigit() or int(process) in own:
            continue
        try:
            names = os.listdir(f"/proc/{process}/fd")
        except (FileNotFoundError, ProcessLookupError):  # the process has ended
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
    """Number of readable bytes."""
    return int.from_bytes(fcntl.ioctl(fd, _FIONREAD, bytes(4)), "little")


def _own_pipe(fds, elsewhere):
    flags = {fd: fcntl.fcntl(fd, fcntl.F_GETFL) for fd in fds}
    readers = [fd for fd in fds if flags[fd] & os.O_ACCMODE == os.O_RDONLY]
    writers = [fd for fd in fds if flags[fd] & os.O_ACCMODE == os.O_WRONLY]
    if elsewhere or not readers or not writers:
        for fd in fds:
            _replace_dead(fd, "pipe", "its other end belonged to another process")
        return
    reader, writer = os.pipe()
    size, waiting = fcntl.fcntl(readers[0], _F_GETPIPE_SZ), _waiting(readers[0])
    try:
        fcntl.fcntl(writer, _F_SETPIPE_SZ, size)
    except OSError:  # the account has many pipes, so the host kernel grants only small ones
        given = fcntl.fcntl(writer, _F_GETPIPE_SZ)
        if waiting > given:
            os.close(reader)
            os.close(writer)
            for fd in fds:
                _replace_dead(fd, "pipe", "the host granted no pipe large enough for its unread data")
            return
        if given < size:
            _miss(readers[0], "pipe", f"its size is {given} bytes, not {size} as before")
    if waiting:  # read and written back: normally no other process uses it; if one does, this must not block
        for end in (readers[0], writers[0]):
            fcntl.fcntl(end, fcntl.F_SETFL, flags[end] | os.O_NONBLOCK)
        try:
            data = os.read(readers[0], waiting)
            if os.write(writers[0], data) + os.write(writer, data) < 2 * waiting:
                raise BlockingIOError
        except BlockingIOError:
            _miss(readers[0], "pipe", "it was used during the copy: its unread data may be lost")
        finally:
            for end in (readers[0], writers[0]):
                fcntl.fcntl(end, fcntl.F_SETFL, flags[end])
    for end, ours in ((reader, readers), (writer, writers)):
        fcntl.fcntl(end, fcntl.F_SETFL, flags[ours[0]])
        for fd in ours:
            os.dup2(end, fd, os.get_inheritable(fd))
        os.close(end)


def _own_sockets(sockets, elsewhere):
    """Recreates socket pairs, whose ends have consecutive inode numbers. A chain of numbers that could be paired in two ways
    is given up: testing it would risk data of the code."""
    inside = {}
    for target, fds in sockets.items():
        if target not in elsewhere and _is_of_pair(fds[0]):
            inside[int(target[len(_SOCKET) : -1])] = fds
        else:
            for fd in fds:
                _replace_dead(fd, "socket", "it was connected to another process or host, or listening")
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
                _replace_dead(fd, "socket", "its other end was not in this process")


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
        # A default timeout of the code makes sockets non-blocking.
        fcntl.fcntl(self.socket.detach(), fcntl.F_SETFL, self.flags)


def _own_pair(ones, others):
    with _Borrowed(ones[0]) as one, _Borrowed(others[0]) as other:
        kind = one.type
        data = _peek(one), _peek(other)
    new = _pair(kind)
    for end, peer, ours, waits in ((new[0], new[1], ones, data[0]), (new[1], new[0], others, data[1])):
        if waits is None or not _send(peer, waits):
            _miss(ours[0], "socket", "its unread data is lost")
    for end, ours in zip(new, (ones, others)):
        fcntl.fcntl(end.fileno(), fcntl.F_SETFL, fcntl.fcntl(ours[0], fcntl.F_GETFL))
        for fd in ours:
            os.dup2(end.fileno(), fd, os.get_inheritable(fd))
        end.close()


def _pair(kind):
    """A new pair with consecutive inode numbers, so that a snapshot of this snapshot finds it. Retries, because another
    process may create a socket in between."""
    for _ in range(_TRIES):
        new = _socket.socketpair(_socket.AF_UNIX, kind)
        one, other = (os.fstat(end.fileno()).st_ino for end in new)
        if other == one + 1:
            break
    return new


def _peek(socket):
    """The readable bytes; `None` if they cannot be known without consuming them."""
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
        _miss(fd, "eventpoll", "its watched descriptors are unknown: it is unchanged")
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
