"""Kernels as files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any

from . import _wire, types
from ._connection import Capability, Connection
from .errors import InternalError

LocalPath = str | os.PathLike[str]

_CHUNK = 1 << 20


async def export(connection: Connection, kernel: Capability, path: LocalPath, refs: Iterable[str]) -> types.Bundle:
    """Writes a kernel into a new file; after a failure there is none."""
    opened = await connection.call(kernel, "export", [*refs], deadline=None)
    reader = Capability(connection, opened.file)
    with await asyncio.to_thread(open, path, "xb") as file:
        try:
            while True:
                part = await connection.call(reader, "read", deadline=None)
                if part.end:
                    return types.Bundle(part.digest, part.bytes)
                data = bytes(part.data)
                if not data:
                    raise InternalError("the daemon sent an empty part of the file")
                await asyncio.to_thread(file.write, data)
        except BaseException:
            with suppress(OSError):
                os.unlink(path)
            raise


async def _sent(connection: Connection, host: Capability, path: LocalPath, name: str, without_host: bool) -> Capability:
    """The writer of a file, which has all of it."""
    with await asyncio.to_thread(open, path, "rb") as file:
        opened = await connection.call(host, "importKernel", name, without_host)
        writer = Capability(connection, opened.file)
        while data := await asyncio.to_thread(file.read, _CHUNK):
            await connection.call(writer, "write", data, deadline=None)
    return writer


async def review(connection: Connection, host: Capability, path: LocalPath) -> types.Review:
    """What a file requests; no kernel is created."""
    writer = await _sent(connection, host, path, "", False)
    return _wire.review(await connection.call(writer, "review", deadline=None))


async def import_kernel(
    connection: Connection,
    host: Capability,
    path: LocalPath,
    name: str,
    grant: Collection[types.HostResource],
    without_host: bool,
) -> Any:
    """Creates the kernel of a file; the interface's answer."""
    writer = await _sent(connection, host, path, name, without_host)
    granted = [_wire.resource_to_wire(resource) for resource in grant]
    return await connection.call(writer, "finish", granted, deadline=None)
