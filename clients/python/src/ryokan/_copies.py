"""Files and folders between this host and a kernel's workspace, with the rules of `ryokan cp`.

What comes from a kernel is not trusted: every name is one name, and everything is made relative to an
open directory, without following a link of the destination. What goes into one comes from below the
named path only: links in it stay links.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _wire, types
from ._connection import Capability
from ._source import async_pieces
from .errors import ConflictError, InvalidArgumentError, NotFoundError

if TYPE_CHECKING:
    from ._files import Files

_DEPTH = 1024
"""How deep directories may be nested, of `ryokan cp`."""
_SENT_BITS, _RECEIVED_BITS = 0o1777, 0o777
"""Permission bits that a file has in a kernel, and that one from a kernel may have."""
_NONE = -1
"""No open directory: the name is a path of this host."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY


class _Spot(NamedTuple):
    """A name in an open directory of this host."""

    folder: int
    name: bytes
    shown: bytes
    """For messages."""

    def open(self, flags: int, mode: int = 0) -> int:
        """Opens it; only a path that the user chose may be, or lead through, a link."""
        if self.folder == _NONE:
            return os.open(self.name, flags | os.O_CLOEXEC)
        return os.open(self.name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode, dir_fd=self.folder)


class _Enter(NamedTuple):
    spot: _Spot
    path: bytes
    """In the kernel."""
    info: types.FileInfo | None
    """Of a directory of the kernel."""
    depth: int


class _Leave(NamedTuple):
    """All of a directory is copied: mode and time last, because each entry changes the time."""

    folder: int
    path: bytes
    attributes: dict[str, Any]
    info: types.FileInfo | None
    shown: bytes


class _Walk:
    """Steps of the walk through a directory, and the directories of this host that it has open."""

    def __init__(self) -> None:
        self.steps: list[_Enter | _Leave] = []
        self.files = self.bytes = 0
        self.skipped: list[str] = []

    def enter(self, spot: _Spot, path: bytes, info: types.FileInfo | None, depth: int) -> None:
        if depth > _DEPTH:
            raise InvalidArgumentError(
                f"{os.fsdecode(spot.shown)} is nested more than {_DEPTH} deep", "copy the inner directories one by one"
            )
        self.steps.append(_Enter(spot, path, info, depth))

    def end(self) -> None:
        for step in self.steps:
            if isinstance(step, _Leave):
                os.close(step.folder)
        self.steps.clear()

    def skip(self, path: bytes) -> None:
        self.skipped.append(os.fsdecode(path))

    def done(self) -> types.Copied:
        return types.Copied(self.files, self.bytes, self.skipped)


@contextmanager
def _on(shown: bytes) -> Iterator[None]:
    """Errors of this host name the whole path."""
    try:
        yield
    except OSError as error:
        named = OSError(error.errno, error.strerror, os.fsdecode(shown))
    else:
        return
    raise named


def _below(folder: bytes, name: bytes) -> bytes:
    return folder + b"/" + name


# --- into a kernel


async def upload(files: Files, local: bytes, remote: bytes) -> types.Copied:
    """Copies a file or directory of this host."""
    with _on(local):
        # The user chose the path; links in it are followed.
        found = os.stat(local)
    if await _is_directory(files, remote):
        name = os.path.basename(local.rstrip(b"/"))
        if name in (b"", b".", b".."):
            name = os.path.basename(os.path.realpath(local))
        remote = _below(remote, name) if name else remote
    walk = _Walk()
    root = _Spot(_NONE, local, local)
    try:
        if not stat.S_ISDIR(found.st_mode):
            await _send(files, walk, root, found, remote)
            return walk.done()
        walk.enter(root, remote, None, 0)
        while walk.steps:
            step = walk.steps.pop()
            if isinstance(step, _Enter):
                await _send_directory(files, walk, step)
            else:
                os.close(step.folder)
                await files._call("setAttributes", step.path, step.attributes, 0)
        return walk.done()
    finally:
        walk.end()


async def _is_directory(files: Files, path: bytes) -> bool:
    try:
        return (await files.stat(path)).kind == "directory"
    except NotFoundError:
        return False


async def _send_directory(files: Files, walk: _Walk, step: _Enter) -> None:
    spot, path, _, depth = step
    with _on(spot.shown):
        folder = spot.open(_DIRECTORY)
        attributes = _attributes(os.fstat(folder))
        walk.steps.append(_Leave(folder, path, attributes, None, spot.shown))
        with os.scandir(folder) as scanned:
            entries = [os.fsencode(entry.name) for entry in scanned]
    # Open to its owner until everything is in it.
    opened = attributes["mode"] | 0o700
    await files.make_dir(path, mode=opened)
    if opened != attributes["mode"]:
        # One of an earlier copy keeps its mode.
        await files._call("setAttributes", path, {"mode": opened}, 0)
    for name in entries:
        inner, to = _Spot(folder, name, _below(spot.shown, name)), _below(path, name)
        with _on(inner.shown):
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(found.st_mode):
            walk.enter(inner, to, None, depth + 1)
        else:
            await _send(files, walk, inner, found, to)


async def _send(files: Files, walk: _Walk, spot: _Spot, found: os.stat_result, to: bytes) -> None:
    """Copies anything but a directory."""
    if stat.S_ISLNK(found.st_mode):
        with _on(spot.shown):
            target = os.readlink(spot.name, dir_fd=spot.folder)
        await files._call("makeLink", to, target, _attributes(found), True, 0)
        walk.files += 1
        return
    if not stat.S_ISREG(found.st_mode):
        walk.skip(spot.shown)
        return
    # It may be another one by now: a link, or a pipe without a writer.
    with _on(spot.shown), open(spot.open(os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as source:
        found = os.fstat(source.fileno())
        if not stat.S_ISREG(found.st_mode):
            walk.skip(spot.shown)
            return
        writing = await files._create(to, _attributes(found))
        try:
            async for piece in async_pieces(source):
                await writing.write(piece)
                walk.bytes += len(piece)
            await writing.finish()
        finally:
            writing.end()
    walk.files += 1


def _attributes(found: os.stat_result) -> dict[str, Any]:
    return {"mode": found.st_mode & _SENT_BITS, "setModified": True, "modifiedNs": found.st_mtime_ns}


# --- out of a kernel


async def download(files: Files, remote: bytes, local: bytes) -> types.Copied:
    """Copies a file or directory of a kernel."""
    info = await files.stat(remote)
    # The user chose the destination; links in its own path are followed.
    if os.path.isdir(local):
        parent, name = local, _one_name(info) if info.name else b"workspace"
    else:
        whole = local.rstrip(b"/")
        parent, name = os.path.dirname(whole) or b".", os.path.basename(whole)
        if name in (b"", b".", b".."):
            raise InvalidArgumentError(f"{os.fsdecode(local)} is no file name", "name a file")
    walk = _Walk()
    with _on(parent):
        folder = _Spot(_NONE, parent, parent).open(_DIRECTORY)
    try:
        root = _Spot(folder, name, os.path.join(parent, name))
        if info.kind != "directory":
            await _receive(files, walk, root, info, remote)
            return walk.done()
        walk.enter(root, remote, info, 0)
        while walk.steps:
            step = walk.steps.pop()
            if isinstance(step, _Enter):
                await _receive_directory(files, walk, step)
                continue
            try:
                with _on(step.shown):
                    assert step.info is not None
                    os.fchmod(step.folder, step.info.mode & _RECEIVED_BITS)
                    os.utime(step.folder, ns=_times(os.fstat(step.folder), step.info))
            finally:
                os.close(step.folder)
        return walk.done()
    finally:
        walk.end()
        os.close(folder)


async def _receive_directory(files: Files, walk: _Walk, step: _Enter) -> None:
    spot, path, info, depth = step
    with _on(spot.shown):
        with suppress(FileExistsError):
            os.mkdir(spot.name, 0o700, dir_fd=spot.folder)
        try:
            folder = spot.open(_DIRECTORY)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            raise _conflict(spot, "is not a directory", "not_directory") from None
    walk.steps.append(_Leave(folder, path, {}, info, spot.shown))
    for entry in await files.list(path):
        name = _one_name(entry)
        inner, source = _Spot(folder, name, _below(spot.shown, name)), _below(path, name)
        if entry.kind == "directory":
            walk.enter(inner, source, entry, depth + 1)
        else:
            await _receive(files, walk, inner, entry, source)


async def _receive(files: Files, walk: _Walk, spot: _Spot, info: types.FileInfo, source: bytes) -> None:
    """Copies anything but a directory. It appears complete, and replaces a file or link."""
    if info.kind == "other":
        walk.skip(source)
        return
    with suppress(FileNotFoundError), _on(spot.shown):
        mode = os.stat(spot.name, dir_fd=spot.folder, follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            raise _conflict(spot, "is a directory", "is_directory")
        if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
            raise _conflict(spot, "is a device, a pipe or a socket", "not_a_file")
    temporary = f".ryokan-{secrets.token_hex(8)}".encode()
    try:
        if info.kind == "symlink":
            with _on(spot.shown):
                os.symlink(os.fsencode(info.target), temporary, dir_fd=spot.folder)
                made = os.stat(temporary, dir_fd=spot.folder, follow_symlinks=False)
                os.utime(temporary, ns=_times(made, info), dir_fd=spot.folder, follow_symlinks=False)
        else:
            await _receive_file(files, walk, spot, temporary, source)
        with _on(spot.shown):
            os.rename(temporary, spot.name, src_dir_fd=spot.folder, dst_dir_fd=spot.folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=spot.folder)
        raise
    walk.files += 1


async def _receive_file(files: Files, walk: _Walk, spot: _Spot, temporary: bytes, source: bytes) -> None:
    info, pieces = await _open(files, source)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    with _on(spot.shown), open(spot._replace(name=temporary).open(flags, 0o600), "wb") as made:
        async for piece in pieces:
            await asyncio.to_thread(made.write, piece)
            walk.bytes += len(piece)
        made.flush()
        os.fchmod(made.fileno(), info.mode & _RECEIVED_BITS)
        os.utime(made.fileno(), ns=_times(os.fstat(made.fileno()), info))


async def _open(files: Files, source: bytes) -> tuple[types.FileInfo, AsyncIterator[bytes]]:
    opened = await files._call("open", source)
    reader = Capability(files._connection, opened.file)
    return _wire.file_info(opened.info), files._pieces(reader, 0, None)


def _one_name(info: types.FileInfo) -> bytes:
    name = os.fsencode(info.name)
    if name in (b"", b".", b"..") or b"/" in name or b"\0" in name:
        raise InvalidArgumentError(f"{info.name!r} is not one file name")
    return name


def _times(present: os.stat_result, info: types.FileInfo) -> tuple[int, int]:
    return present.st_atime_ns, info.modified_ns


def _conflict(spot: _Spot, what: str, reason: str) -> ConflictError:
    return ConflictError(f"{os.fsdecode(spot.shown)} {what}", "", reason)
