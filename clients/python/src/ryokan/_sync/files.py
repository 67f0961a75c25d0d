"""The files of a kernel."""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from datetime import datetime
from typing import Any, Literal, TypeVar, overload

from .. import aio, types
from .._files import READ_BYTES, WORKSPACE, Path
from .._portal import Portal
from .._source import Content, pieces
from .watch import Watch, WatchHandle

T = TypeVar("T")


class Files:
    """The files in a kernel's workspace, whether the kernel runs or not.

    Errors say why in `reason`: `not_found`, `is_directory`, `not_directory`, `not_regular`,
    `permission`, `too_large`, `outside`, `exists`, `not_empty`, `mount`.
    """

    def __init__(self, files: aio.Files, runner: Portal) -> None:
        self._files, self._portal = files, runner

    @property
    def no_wait(self) -> Files:
        """The same files, whose calls raise `BusyError` during a restore, archive, move or checkpoint.

        Otherwise calls wait for its end; a checkpoint delays changes only. `reason` names it:
        `restoring`, `archiving`, `unarchiving`, `teleporting`, `freezing` or `checkpointing`.
        """
        return Files(self._files.no_wait, self._portal)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._portal.run(work)

    @overload
    def read(
        self,
        path: Path,
        format: Literal["text"] = "text",
        *,
        offset: int = 0,
        length: int | None = None,
        limit: int = READ_BYTES,
    ) -> str: ...

    @overload
    def read(
        self,
        path: Path,
        format: Literal["bytes"],
        *,
        offset: int = 0,
        length: int | None = None,
        limit: int = READ_BYTES,
    ) -> bytes: ...

    @overload
    def read(
        self,
        path: Path,
        format: Literal["stream"],
        *,
        offset: int = 0,
        length: int | None = None,
        limit: int = READ_BYTES,
    ) -> Iterator[bytes]: ...

    def read(
        self,
        path: Path,
        format: Literal["text", "bytes", "stream"] = "text",
        *,
        offset: int = 0,
        length: int | None = None,
        limit: int = READ_BYTES,
    ) -> str | bytes | Iterator[bytes]:
        """Reads a file, or `length` bytes of it from `offset` on; less if it ends before.

        Refuses to return more than `limit` bytes, except as a `stream`: an iterator of pieces.
        """
        if format == "stream":
            work = self._files.read(path, "stream", offset=offset, length=length, limit=limit)
            return self._stream(self._run(work))
        if format == "bytes":
            return self._run(self._files.read(path, "bytes", offset=offset, length=length, limit=limit))
        return self._run(self._files.read(path, offset=offset, length=length, limit=limit))

    def _stream(self, pieces: AsyncIterator[bytes]) -> Iterator[bytes]:
        async def next_piece() -> bytes:
            # Empty at the end: no piece is.
            return await anext(pieces, b"")

        while piece := self._run(next_piece()):
            yield piece

    def write(self, path: Path, data: Content, *, mode: int | None = None, expected_version: int = 0) -> types.FileInfo:
        """Creates or replaces a file, and the directories on the way; it appears complete.

        Args:
            path: the file.
            data: a text or bytes; or a file object or an iterator of bytes, of any size, which this thread
                reads. If it raises an exception, nothing changes.
            mode: permission bits; None: those of the replaced file, or the usual ones.
            expected_version: the kernel's version known to the caller; 0: any.
        """
        if isinstance(data, str | bytes | bytearray | memoryview):
            return self._run(self._files.write(path, data, mode=mode, expected_version=expected_version))
        # Here and not in the connection's thread: the source may use this package, too.
        writing = self._run(self._files._create(path, {} if mode is None else {"mode": mode}, expected_version))
        try:
            for piece in pieces(data):
                self._run(writing.write(piece))
            return self._run(writing.finish())
        finally:
            writing.end()

    def write_files(self, files: Sequence[types.WriteEntry]) -> builtins.list[types.FileInfo]:
        """Writes files one after the other: each `{"path": …, "data": …}` as `write` does."""
        return [self.write(file["path"], file["data"]) for file in files]

    def upload(self, local: Path, remote: Path = WORKSPACE) -> types.Copied:
        """Copies a file or directory of this host, with all in it; modes and times are kept.

        Links in a directory stay links. A destination that is a directory receives the source under its
        own name; files are replaced, each at once.

        Raises:
            FileNotFoundError, PermissionError: what is read here.
            ConflictError: a file and a directory have the same path.
        """
        return self._run(self._files.upload(local, remote))

    def download(self, remote: Path, local: Path) -> types.Copied:
        """Copies a file or directory to this host; otherwise as `upload`.

        Nothing is written outside of the destination: links in it are not followed. The files get no
        special permission bits.

        Raises:
            FileNotFoundError, PermissionError: what is written here.
            ConflictError: a file and a directory have the same path.
        """
        return self._run(self._files.download(remote, local))

    def list(self, path: Path = WORKSPACE) -> builtins.list[types.FileInfo]:
        """The entries of a directory, in order of name."""
        return self._run(self._files.list(path))

    def stat(self, path: Path, *, follow: bool = True) -> types.FileInfo:
        """A file's attributes; with `follow`, of what a link leads to."""
        return self._run(self._files.stat(path, follow=follow))

    def get_info(self, path: Path) -> types.FileInfo:
        """The same as `stat`, under E2B's name."""
        return self.stat(path)

    def set_attributes(
        self,
        path: Path,
        *,
        mode: int | None = None,
        modified: datetime | None = None,
        expected_version: int = 0,
    ) -> None:
        """Sets permission bits and the time of the last change; None: as it is."""
        self._run(self._files.set_attributes(path, mode=mode, modified=modified, expected_version=expected_version))

    def make_link(self, path: Path, target: str | bytes, *, expected_version: int = 0) -> None:
        """Makes a symbolic link, or replaces a link or file by it. The target is not checked."""
        self._run(self._files.make_link(path, target, expected_version=expected_version))

    def exists(self, path: Path) -> bool:
        """Whether there is something at this path."""
        return self._run(self._files.exists(path))

    def make_dir(self, path: Path, *, mode: int = 0o755, expected_version: int = 0) -> None:
        """Makes a directory and those on the way; an existing one is no error."""
        self._run(self._files.make_dir(path, mode=mode, expected_version=expected_version))

    def rename(self, path: Path, new_path: Path, *, replace: bool = False, expected_version: int = 0) -> None:
        """Renames a file or directory."""
        self._run(self._files.rename(path, new_path, replace=replace, expected_version=expected_version))

    def remove(self, path: Path, *, recursive: bool = False, expected_version: int = 0) -> None:
        """Removes a file or an empty directory; with `recursive`, also a directory's content."""
        self._run(self._files.remove(path, recursive=recursive, expected_version=expected_version))

    def watch(self, path: Path = WORKSPACE, *, recursive: bool = False) -> Watch:
        """What happens in a directory, with `recursive` also below it, as an iterator.

        `with files.watch("src") as watch:`, then `for event in watch:`. Raises `BusyError` for too many
        watches.
        """
        return Watch(self._files.watch(path, recursive=recursive), self._portal)

    def watch_dir(self, path: Path, *, recursive: bool = False) -> WatchHandle:
        """As `watch`, under E2B's name: in the background; `get_new_events` of the handle returns the events."""
        return WatchHandle(self._run(self._files.watch_dir(path, recursive=recursive)), self._portal)
