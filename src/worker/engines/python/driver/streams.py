"""Standard streams: sys.stdout, sys.stderr and sys.stdin of user code.

Owns fds 0 to 2 and safe copies of them. Every write goes out at once, so output is live; every execution finds the
streams restored.
"""
import io
import os
import sys

_copies = {}
_COPY_MIN = 100


class StdinNotGiven(RuntimeError):
    """Code asked for input in an execution without any."""

    __module__ = "builtins"


_WHY = (
    "this execution was given no standard input; pass the input along with the execution"
    " (`ryokan exec --stdin`, or `stdin` in the API), or put the answer into the code"
)


class _Out(io.RawIOBase):
    """An unbuffered writer that writes everything, even when a signal cuts a write short."""

    def __init__(self, fd):
        self._fd = fd
        self.name = "<stdout>" if fd == 1 else "<stderr>"
        self.mode = "wb"

    def writable(self):
        return True

    def fileno(self):
        return self._fd

    def isatty(self):
        return False

    def write(self, data, _write=os.write):
        size = data.nbytes if type(data) is memoryview else len(data)
        done = _write(self._fd, data)
        if done < size:
            view = memoryview(data).cast("B")
            while done < size:
                done += _write(self._fd, view[done:])
        return size

    def __reduce_ex__(self, protocol):
        raise TypeError("cannot pickle a standard stream")


class _NoInput(io.TextIOBase):
    """sys.stdin of an execution without input: reading explains what to do. Its descriptor is /dev/null."""

    name = "<stdin>"
    encoding = "utf-8"
    errors = "strict"

    def readable(self):
        return True

    def fileno(self):
        return 0

    def isatty(self):
        return False

    def _refuse(self, *_):
        raise StdinNotGiven(_WHY)

    read = readline = readlines = __next__ = _refuse

    @property
    def buffer(self):
        return io.BufferedReader(io.FileIO(0, "r", closefd=False))


class _Asking(_NoInput):
    """sys.stdin of an execution whose client asks a person for each line. Its descriptor is /dev/null."""

    def __init__(self, fd, ask):
        import fcntl

        safe = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _COPY_MIN)
        os.close(fd)
        self._ask = ask
        self._lines = io.TextIOWrapper(io.FileIO(safe, "r"), encoding="utf-8", errors="surrogateescape")

    def readline(self, size=-1):
        flush()
        self._ask()
        return self._lines.readline(size)

    def __next__(self):
        line = self.readline()
        if not line:
            raise StopIteration
        return line

    def end(self):
        self._lines.close()


def _writer(fd):
    stream = io.TextIOWrapper(_Out(fd), encoding="utf-8", errors="backslashreplace", newline="\n", write_through=True)
    stream.mode = "w"
    return stream


out = err = no_input = None


def install():
    """Takes over the streams, once."""
    global no_input
    import fcntl

    for fd in (0, 1, 2):
        try:
            _copies[fd] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _COPY_MIN)
        except OSError:
            null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
            _copies[fd] = fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, _COPY_MIN)
            os.close(null)
            os.dup2(_copies[fd], fd)
    no_input = _NoInput()
    renew()


def copies():
    """The descriptors of the safe copies."""
    return _copies.values()


def renew():
    """Restores objects and descriptors that user code closed or replaced."""
    global out, err, no_input
    os.dup2(_copies[1], 1)
    os.dup2(_copies[2], 2)
    if not _is_usable(out):
        out = _writer(1)
    if not _is_usable(err):
        err = _writer(2)
    if no_input.closed:
        no_input = _NoInput()
    sys.stdout = sys.__stdout__ = out
    sys.stderr = sys.__stderr__ = err
    sys.stdin = sys.__stdin__ = no_input


def _is_usable(stream):
    try:
        return not stream.closed and not stream.buffer.closed
    except (AttributeError, ValueError):  # not created yet, or detached
        return False


def flush():
    """Flushes the streams of user code, and our own, which it may have made buffered."""
    for name, own in (("stdout", out), ("stderr", err)):
        found = getattr(sys, name, None)
        for stream in (own,) if found is own else (found, own):
            try:
                stream.flush()
            except Exception:
                pass


def give_input(fd, ask=None):
    """Makes `fd` the standard input, and closes it. With `ask`, which is called before each line, only of sys.stdin."""
    if ask is not None:
        sys.stdin = sys.__stdin__ = _Asking(fd, ask)
        return
    os.dup2(fd, 0)
    os.close(fd)
    raw = io.FileIO(0, "r", closefd=False)
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8", errors="surrogateescape")


def take_input():
    """Restores /dev/null."""
    if type(sys.__stdin__) is _Asking:
        sys.__stdin__.end()
    os.dup2(_copies[0], 0)
    sys.stdin = sys.__stdin__ = no_input


def write_err(text):
    """Writes to the execution's stderr, whatever sys.stderr is."""
    data = memoryview(text.encode("utf-8", "backslashreplace"))
    try:
        while data:
            data = data[os.write(2, data) :]
    except OSError:
        pass


class Silence:
    """Discards output of code that runs on the driver's behalf, such as a `__reduce__` while saving."""

    class _Sink(io.TextIOBase):
        def writable(self):
            return True

        def write(self, text):
            return len(text)

    def __enter__(self):
        self.was = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = self._Sink()

    def __exit__(self, *_):
        sys.stdout, sys.stderr = self.was
