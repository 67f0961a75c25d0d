"""Finds the daemon's socket as the command line does, and starts a daemon if none answers."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import socket
import stat
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import RefusedError, UnavailableError

_START = 20.0
"""Deadline for the socket of a started daemon."""
_STOPPING = 75.0
"""Longest stop of an earlier daemon, which still holds its data."""
_POLL = 0.02
_ANOTHER_RUNS = 75
"""Exit code of a daemon that finds another one."""
_SUN_PATH = 108
_LOG_LINES, _LOG_BYTES = 15, 16 << 10
_INSTALL = "install `ryokand`, `ryokan` and `ryokan-worker` into one directory in PATH"

_SET_RUNTIME = "set XDG_RUNTIME_DIR to a directory of your own with mode 0700"
_SYSTEM, _RUN_USER, _TMP = Path("/run/ryokan"), Path("/run/user"), Path("/tmp")


def default_socket(system: bool) -> Path:
    """The socket of the user's daemon, or of the host's.

    Raises:
        UnavailableError: without a runtime directory that only this user can write to.
    """
    owner = None if system else os.geteuid()
    runtime = _SYSTEM if owner is None else _runtime_of(owner)
    if runtime.exists() and (why := _distrust(runtime, owner)):
        raise UnavailableError(f"runtime directory {runtime} {why}", "remove it, or give it to you with mode 0700")
    return runtime / "ryokand.sock"


def _runtime_of(owner: int) -> Path:
    """The daemon's directory in the user's runtime directory.

    Without one, as in containers, a private directory in `/tmp`: other users can take its name but not
    replace it.
    """
    named = _absolute("XDG_RUNTIME_DIR")
    if named is not None:
        if why := _distrust(named, owner):
            raise UnavailableError(f"XDG_RUNTIME_DIR {named} {why}", "set it to a directory of your own with mode 0700")
        return named / "ryokan"
    usual = _RUN_USER / str(owner)
    if os.path.lexists(usual):
        if why := _distrust(usual, owner):
            raise UnavailableError(f"XDG_RUNTIME_DIR is not set and {usual} {why}", _SET_RUNTIME)
        return usual / "ryokan"
    private = _TMP / f"ryokan-{owner}"
    path, why = _TMP, "" if _is_sticky(_TMP) else "is no directory of root with the sticky bit"
    if not why and os.path.lexists(private):
        path, why = private, _distrust(private, owner)
        mode = stat.S_IMODE(private.lstat().st_mode)
        if not why and mode & 0o077:
            why = f"is open to others (mode {mode:04o})"
    if why:
        raise UnavailableError(f"XDG_RUNTIME_DIR is not set, and the directory in its place {path} {why}", _SET_RUNTIME)
    return private


def _is_sticky(path: Path) -> bool:
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == 0 and bool(found.st_mode & stat.S_ISVTX)


def _absolute(variable: str) -> Path | None:
    value = os.environ.get(variable, "")
    return Path(value) if value.startswith("/") else None


def _distrust(path: Path, owner: int | None) -> str:
    """Why others could have put a socket there; empty: they could not."""
    try:
        found = path.lstat()
    except OSError:
        return "does not exist"
    if not stat.S_ISDIR(found.st_mode):
        return "is not a directory"
    if owner is not None and found.st_uid != owner:
        return f"belongs to uid {found.st_uid}, not to uid {owner}"
    if found.st_mode & 0o022:
        return f"can be written to by others (mode {found.st_mode & 0o7777:04o})"
    return ""


async def connect(path: Path, start: bool, timeout: float) -> socket.socket:
    """A connected socket; with `start`, of a new daemon if none answers.

    Raises:
        UnavailableError: no daemon answers, or none could be started.
        RefusedError: the socket belongs to another user.
    """
    try:
        return await _connected(path, timeout)
    except OSError as error:
        if not start or not _unserved(error):
            raise _failure(path, error) from None
    await _start(path)
    try:
        return await _connected(path, timeout)
    except OSError as error:
        raise _failure(path, error) from None


async def _connected(path: Path, timeout: float) -> socket.socket:
    with _short(path) as address:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await asyncio.wait_for(asyncio.get_running_loop().sock_connect(sock, address), timeout)
            if path.parent == _TMP / f"ryokan-{os.geteuid()}":
                _refuse_foreign(sock, path)
            return sock
        except asyncio.TimeoutError:
            sock.close()
            raise TimeoutError(f"it did not accept in {timeout:g} s") from None
        except BaseException:
            sock.close()
            raise


def _refuse_foreign(sock: socket.socket, path: Path) -> None:
    """In `/tmp`, another user may have made the directory since it was looked at."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if uid not in (0, os.geteuid()):
        raise RefusedError(f"the server on {path} runs as uid {uid}", f"remove that directory, or {_SET_RUNTIME}")


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """An address of any path: longer ones than a socket address holds go through their directory."""
    if len(os.fsencode(path)) < _SUN_PATH:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _unserved(error: OSError) -> bool:
    return isinstance(error, (FileNotFoundError, ConnectionRefusedError))


def _failure(path: Path, error: OSError) -> Exception:
    if isinstance(error, PermissionError):
        return RefusedError(f"may not connect to {path}: {error.strerror}", "the socket belongs to another user")
    return UnavailableError(
        f"no daemon answers on {path}: {error.strerror or error}", "start ryokand, or name its socket"
    )


async def _start(path: Path) -> None:
    program = shutil.which("ryokand")
    if program is None:
        raise UnavailableError("no daemon answers and `ryokand` is not installed", _INSTALL)
    async with _Lock(path.parent):
        if await _serves(path):
            return  # Another process started it.
        deadline, stopping = time.monotonic() + _START, time.monotonic() + _STOPPING
        daemon = _Daemon(program)
        while not await _serves(path):
            code = daemon.process.poll()
            if code == _ANOTHER_RUNS and time.monotonic() < stopping:
                await asyncio.sleep(0.25)
                daemon, deadline = _Daemon(program), time.monotonic() + _START
            elif code is not None:
                raise daemon.failure(f"it exited with status {code}")
            elif time.monotonic() >= deadline:
                raise daemon.failure(f"no socket after {_START:g} s")
            await asyncio.sleep(_POLL)


async def _serves(path: Path) -> bool:
    try:
        (await _connected(path, _START)).close()
    except OSError as error:
        return not _unserved(error)
    return True


class _Lock:
    """One process at a time starts a daemon; the lock is that of the command line."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "autostart.lock"

    async def __aenter__(self) -> None:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.file = os.open(self.path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UnavailableError(f"could not prepare {self.path.parent}: {error.strerror}") from None
        if why := _distrust(self.path.parent, os.geteuid()):
            os.close(self.file)
            raise UnavailableError(f"could not prepare {self.path.parent}: it {why}")
        deadline = time.monotonic() + _START
        while True:
            try:
                return fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(self.file)
                    hint = "check whether that process hangs while it starts ryokand"
                    raise UnavailableError(f"another process holds {self.path} for too long", hint) from None
            try:
                await asyncio.sleep(_POLL)
            except BaseException:
                os.close(self.file)
                raise

    async def __aexit__(self, *_: object) -> None:
        os.close(self.file)


class _Daemon:
    """A started daemon; it ends by itself when it has had no work for a while."""

    def __init__(self, program: str) -> None:
        state = _absolute("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        self.log = state / "ryokan" / "ryokand.log"
        try:
            self.log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Inherited only as standard error.
            log = os.open(self.log, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UnavailableError(f"could not open the log {self.log}: {error.strerror}") from None
        try:
            self.log_start = os.fstat(log).st_size
            # A session of its own: a signal from the terminal does not reach it.
            self.process = subprocess.Popen(
                [program, "--on-demand"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            raise UnavailableError(f"could not start {program}: {error.strerror}", _INSTALL) from None
        finally:
            os.close(log)
        # Reaps it if it ends before this process.
        threading.Thread(target=self.process.wait, name="ryokand", daemon=True).start()

    def failure(self, why: str) -> UnavailableError:
        lines: list[str] = []
        with suppress(OSError), self.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self.log_start, size - _LOG_BYTES))
            lines = log.read(_LOG_BYTES).decode(errors="replace").splitlines()[-_LOG_LINES:]
        shown = "; its log says:\n" + "\n".join(f"  {line}" for line in lines) if lines else ""
        hint = f"read the full log {self.log}, or check the host with `ryokan doctor`"
        return UnavailableError(f"ryokand did not start: {why}{shown}", hint)
