"""The files of a kernel, asynchronously."""

from __future__ import annotations

import builtins
import os
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Any, Literal, overload

from . import _connection, _copies, _wire, types
from ._connection import Capability, Connection
from ._source import CHUNK, AsyncContent, async_pieces
from ._watch import Watch
from ._watch_dir import EventTaker, ExitTaker, WatchHandle
from .errors import InvalidArgumentError, NotFoundError

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]
"""`/workspace`, a path below it, or relative to it."""

WORKSPACE = "/workspace"
READ_BYTES = 100 << 20
"""Default limit of `read`: code inside decides how large a file is."""


def encoded(path: Path) -> bytes:
    return os.fsencode(path)


class Writing:
    """A file that is not there yet."""

    def __init__(self, connection: Connection, writer: Capability) -> None:
        self._connection, self._writer = connection, writer

    async def write(self, piece: bytes) -> None:
        await self._connection.call(self._writer, "write", piece, deadline=None)

    async def finish(self) -> types.FileInfo:
        """The file appears."""
        return _wire.file_info((await self._connection.call(self._writer, "finish", deadline=None)).info)

    def end(self) -> None:
        """Without `finish`, nothing was written. An exception would keep this object for long."""
        self._connection.run_in_loop(self._connection.link.capabilities.pop, self._writer.key, None)


class Files:
    """The files in a kernel's workspace, whether the kernel runs or not.

    Errors say why in `reason`: `not_found`, `is_directory`, `not_directory`, `not_regular`,
    `permission`, `too_large`, `outside`, `exists`, `not_empty`, `mount`.
    """

    def __init__(self, connection: Connection, kernel: Capability, no_wait: bool = False) -> None:
        self._connection, self._kernel, self._no_wait = connection, kernel, no_wait
        self._opened: Capability | None = None

    @property
    def no_wait(self) -> Files:
        """The same files, whose calls raise `BusyError` during a restore, archive, move or checkpoint.

        Otherwise calls wait for its end; a checkpoint delays changes only. `reason` names it:
        `restoring`, `archiving`, `unarchiving`, `teleporting`, `freezing` or `checkpointing`.
        """
        return Files(self._connection, self._kernel, True)

    async def _call(self, method: str, *args: Any) -> Any:
        return await self._connection.call(await self._files(), method, *args, deadline=None)

    async def _files(self) -> Capability:
        if self._opened is None:
            answer = await self._connection.call(self._kernel, "files", self._no_wait)
            self._opened = Capability(self._connection, answer.files)
        return self._opened

    @overload
    async def read(
        self,
        path: Path,
        format: Literal["text"] = "text",
        *,
        offset: int = 0,
        length: int | None = None,
        limit: int = READ_BYTES,
    ) -> str: ...

    @overload
    async def read(
        self,
        path: Path,
        format: Literal["bytes"],
        *,
        offset: int = 0,
        length: int | None = None,
        limit: int = READ_BYTES,
    ) -> bytes: ...

    @overload
    async def read(
        self,
        path: Path,
        format: Literal["stream"],
        *,
        offset: int = 0,
        length: int | None = None,
        limit: int = READ_BYTES,
    ) -> AsyncIterator[bytes]: ...

    async def read(
        self,
        path: Path,
        format: Literal["text", "bytes", "stream"] = "text",
        *,
        offset: int = 0,
        length: int | None = None,
        limit: int = READ_BYTES,
    ) -> str | bytes | AsyncIterator[bytes]:
        """Reads a file, or `length` bytes of it from `offset` on; less if it ends before.

        Refuses to return more than `limit` bytes, except as a `stream`: an iterator of pieces.
        """
        if offset < 0 or (length is not None and length < 0):
            raise InvalidArgumentError(f"not a range of a file: offset {offset}, length {length}")
        opened = await self._call("open", encoded(path))
        reader = Capability(self._connection, opened.file)
        pieces = self._pieces(reader, offset, length)
        if format == "stream":
            return pieces
        wanted = max(0, opened.info.bytes - offset)
        if length is not None:
            wanted = min(wanted, length)
        data = bytearray()
        if wanted <= limit:
            async for piece in pieces:
                data += piece
                if len(data) > limit:
                    break
        if wanted > limit or len(data) > limit:
            name = os.fsdecode(path)
            raise InvalidArgumentError(f"{name} has more than {limit} bytes", "raise `limit`", "too_large")
        if format == "bytes":
            return bytes(data)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            wrong = InvalidArgumentError(f"{os.fsdecode(path)} is not text: {error}", 'read it with format="bytes"')
        raise wrong

    async def _pieces(self, reader: Capability, offset: int, length: int | None) -> AsyncIterator[bytes]:
        end = None if length is None else offset + length
        while end is None or offset < end:
            most = CHUNK if end is None else min(CHUNK, end - offset)
            part = await self._connection.call(reader, "read", offset, most)
            data, last = bytes(part.data), part.end
            offset += len(data)
            if data:
                yield data
            if last:
                return

    async def write(
        self, path: Path, data: AsyncContent, *, mode: int | None = None, expected_version: int = 0
    ) -> types.FileInfo:
        """Creates or replaces a file, and the directories on the way; it appears complete.

        Args:
            path: the file.
            data: a text or bytes; or a file object or an iterator of bytes, which may be asynchronous and
                of any size. If it raises an exception, nothing changes.
            mode: permission bits; None: those of the replaced file, or the usual ones.
            expected_version: the kernel's version known to the caller; 0: any.
        """
        writing = await self._create(path, {} if mode is None else {"mode": mode}, expected_version)
        try:
            async for piece in async_pieces(data):
                await writing.write(piece)
            return await writing.finish()
        finally:
            writing.end()

    async def _create(self, path: Path, attributes: dict[str, Any], expected_version: int = 0) -> Writing:
        opened = await self._call("write", encoded(path), attributes, True, expected_version)
        return Writing(self._connection, Capability(self._connection, opened.file))

    async def write_files(self, files: Sequence[types.WriteEntry]) -> builtins.list[types.FileInfo]:
        """Writes files one after the other: each `{"path": …, "data": …}` as `write` does."""
        return [await self.write(file["path"], file["data"]) for file in files]

    async def upload(self, local: Path, remote: Path = WORKSPACE) -> types.Copied:
        """Copies a file or directory of this host, with all in it; modes and times are kept.

        Links in a directory stay links. A destination that is a directory receives the source under its
        own name; files are replaced, each at once.

        Raises:
            FileNotFoundError, PermissionError: what is read here.
            ConflictError: a file and a directory have the same path.
        """
        return await _copies.upload(self, os.fsencode(local), encoded(remote))

    async def download(self, remote: Path, local: Path) -> types.Copied:
        """Copies a file or directory to this host; otherwise as `upload`.

        Nothing is written outside of the destination: links in it are not followed. The files get no
        special permission bits.

        Raises:
            FileNotFoundError, PermissionError: what is written here.
            ConflictError: a file and a directory have the same path.
        """
        return await _copies.download(self, encoded(remote), os.fsencode(local))

    async def list(self, path: Path = WORKSPACE) -> builtins.list[types.FileInfo]:
        """The entries of a directory, in order of name."""
        entries = await self._connection.collect(
            await self._files(), "list", encoded(path), sink=_connection.FileInfos, convert=_wire.file_info
        )
        return sorted(entries, key=lambda entry: entry.name)

    async def stat(self, path: Path, *, follow: bool = True) -> types.FileInfo:
        """A file's attributes; with `follow`, of what a link leads to."""
        return _wire.file_info((await self._call("stat", encoded(path), follow)).info)

    async def get_info(self, path: Path) -> types.FileInfo:
        """The same as `stat`, under E2B's name."""
        return await self.stat(path)

    async def set_attributes(
        self,
        path: Path,
        *,
        mode: int | None = None,
        modified: datetime | None = None,
        expected_version: int = 0,
    ) -> None:
        """Sets permission bits and the time of the last change; None: as it is."""
        attributes: dict[str, Any] = {} if mode is None else {"mode": mode}
        if modified is not None:
            attributes |= {"setModified": True, "modifiedNs": _wire.nanoseconds(modified)}
        await self._call("setAttributes", encoded(path), attributes, expected_version)

    async def make_link(self, path: Path, target: str | bytes, *, expected_version: int = 0) -> None:
        """Makes a symbolic link, or replaces a link or file by it. The target is not checked."""
        await self._call("makeLink", encoded(path), os.fsencode(target), {}, True, expected_version)

    async def exists(self, path: Path) -> bool:
        """Whether there is something at this path."""
        try:
            await self.stat(path)
        except NotFoundError:
            return False
        return True

    async def make_dir(self, path: Path, *, mode: int = 0o755, expected_version: int = 0) -> None:
        """Makes a directory and those on the way; an existing one is no error."""
        await self._call("makeDir", encoded(path), mode, True, expected_version)

    async def rename(self, path: Path, new_path: Path, *, replace: bool = False, expected_version: int = 0) -> None:
        """Renames a file or directory."""
        await self._call("rename", encoded(path), os.fsencode(new_path), replace, expected_version)

    async def remove(self, path: Path, *, recursive: bool = False, expected_version: int = 0) -> None:
        """Removes a file or an empty directory; with `recursive`, also a directory's content."""
        await self._call("remove", encoded(path), recursive, expected_version)

    def watch(self, path: Path = WORKSPACE, *, recursive: bool = False) -> Watch:
        """What happens in a directory, with `recursive` also below it, as an iterator.

        `async with files.watch("src") as watch:`, then `async for event in watch:`. Raises `BusyError`
        for too many watches.
        """
        return Watch(self._connection, self._files, encoded(path), recursive)

    async def watch_dir(
        self,
        path: Path,
        on_event: EventTaker | None = None,
        on_exit: ExitTaker | None = None,
        *,
        recursive: bool = False,
    ) -> WatchHandle:
        """As `watch`, under E2B's name: in the background.

        Args:
            path: the directory.
            on_event: receives each event; without it, `get_new_events` of the handle returns them.
            on_exit: receives the error with which the watch ended.
            recursive: also what happens below it.
        """
        handle = WatchHandle(self.watch(path, recursive=recursive), on_event, on_exit)
        return await handle._begin(self._connection)
