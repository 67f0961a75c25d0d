"""The files of a kernel, asynchronously."""

from __future__ import annotations

import builtins
import os
from typing import Any, Literal, overload

from . import _connection, _wire, types
from ._connection import Capability, Connection
from .errors import InvalidArgumentError, NotFoundError

Path = str | bytes | os.PathLike[str] | os.PathLike[bytes]
"""`/workspace`, a path below it, or relative to it."""

WORKSPACE = "/workspace"
READ_BYTES = 100 << 20
"""Default limit of `read`: code inside decides how large a file is."""
_CHUNK = 1 << 20


class Files:
    """The files in a kernel's workspace, whether the kernel runs or not.

    Errors say why in `reason`: `not_found`, `is_directory`, `not_directory`, `not_regular`,
    `permission`, `too_large`, `outside`, `exists`, `not_empty`, `mount`.
    """

    def __init__(self, connection: Connection, kernel: Capability) -> None:
        self._connection, self._kernel = connection, kernel
        self._opened: Capability | None = None

    async def _call(self, method: str, *args: Any) -> Any:
        return await self._connection.call(await self._files(), method, *args, deadline=None)

    async def _files(self) -> Capability:
        if self._opened is None:
            answer = await self._connection.call(self._kernel, "files")
            self._opened = Capability(self._connection, answer.files)
        return self._opened

    @overload
    async def read(self, path: Path, format: Literal["text"] = "text", *, limit: int = READ_BYTES) -> str: ...

    @overload
    async def read(self, path: Path, format: Literal["bytes"], *, limit: int = READ_BYTES) -> bytes: ...

    async def read(
        self, path: Path, format: Literal["text", "bytes"] = "text", *, limit: int = READ_BYTES
    ) -> str | bytes:
        """Reads a file of at most `limit` bytes."""
        opened = await self._call("open", os.fsencode(path))
        reader, data, end = Capability(self._connection, opened.file), bytearray(), opened.info.bytes > limit
        while not end:
            part = await self._connection.call(reader, "read", len(data), _CHUNK)
            data += part.data
            end = part.end or len(data) > limit
        if opened.info.bytes > limit or len(data) > limit:
            name = os.fsdecode(path)
            raise InvalidArgumentError(f"{name} has more than {limit} bytes", "raise `limit`", "too_large")
        if format == "bytes":
            return bytes(data)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            wrong = InvalidArgumentError(f"{os.fsdecode(path)} is not text: {error}", 'read it with format="bytes"')
        raise wrong

    async def write(self, path: Path, data: str | bytes, *, expected_version: int = 0) -> types.FileInfo:
        """Creates or replaces a file, and the directories on the way; it appears complete."""
        content = data.encode() if isinstance(data, str) else bytes(data)
        opened = await self._call("write", os.fsencode(path), {}, True, expected_version)
        writer = Capability(self._connection, opened.file)
        for start in range(0, len(content), _CHUNK):
            await self._connection.call(writer, "write", content[start : start + _CHUNK], deadline=None)
        return _wire.file_info((await self._connection.call(writer, "finish", deadline=None)).info)

    async def list(self, path: Path = WORKSPACE) -> builtins.list[types.FileInfo]:
        """The entries of a directory, in order of name."""
        entries = await self._connection.collect(
            await self._files(), "list", os.fsencode(path), sink=_connection.FileInfos, convert=_wire.file_info
        )
        return sorted(entries, key=lambda entry: entry.name)

    async def stat(self, path: Path, *, follow: bool = True) -> types.FileInfo:
        """A file's attributes; with `follow`, of what a link leads to."""
        return _wire.file_info((await self._call("stat", os.fsencode(path), follow)).info)

    async def exists(self, path: Path) -> bool:
        """Whether there is something at this path."""
        try:
            await self.stat(path)
        except NotFoundError:
            return False
        return True

    async def make_dir(self, path: Path, *, mode: int = 0o755, expected_version: int = 0) -> None:
        """Makes a directory and those on the way; an existing one is no error."""
        await self._call("makeDir", os.fsencode(path), mode, True, expected_version)

    async def rename(self, path: Path, new_path: Path, *, replace: bool = False, expected_version: int = 0) -> None:
        """Renames a file or directory."""
        await self._call("rename", os.fsencode(path), os.fsencode(new_path), replace, expected_version)

    async def remove(self, path: Path, *, recursive: bool = False, expected_version: int = 0) -> None:
        """Removes a file or an empty directory; with `recursive`, also a directory's content."""
        await self._call("remove", os.fsencode(path), recursive, expected_version)
