"""A port of a kernel without network, on a local socket of this process."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ._connection import Capability, Connection
from ._loopback import peer_uid
from .errors import InvalidArgumentError, RyokanError

if TYPE_CHECKING:
    from typing_extensions import Self

_CHUNK = 64 << 10
"""Largest piece of a connection, of the interface."""


class Forward:
    """An open port. `async with` closes it; it also ends with the kernel's worker."""

    def __init__(self, connection: Connection, port: Capability) -> None:
        self._connection, self._port = connection, port
        self._connections: set[asyncio.Task[None]] = set()
        self._directory: str | None = None
        self._socket: str | None = None
        self._server: asyncio.AbstractServer
        self._watch: asyncio.Task[None]
        self.address = ""
        """The path of the Unix socket, or `127.0.0.1:PORT`."""

    async def _open(self, listen: str) -> Self:
        try:
            if not listen:
                # Its directory is open to this user only.
                self._directory = tempfile.mkdtemp(prefix="ryokan-")
                await self._listen_on_unix(os.path.join(self._directory, "port.sock"))
            elif listen.startswith("unix:"):
                await self._listen_on_unix(os.path.abspath(listen[5:]))
            else:
                host, number = _loopback(listen)
                self._server = await asyncio.start_server(self._take, host, number)
                host, number = self._server.sockets[0].getsockname()[:2]
                self.address = f"[{host}]:{number}" if ":" in host else f"{host}:{number}"
        except OSError as error:
            self._remove()
            raise InvalidArgumentError(f"cannot listen on {listen or 'a new socket'}: {error}") from None
        self._watch = asyncio.ensure_future(self._until_worker_ends())
        return self

    async def _listen_on_unix(self, path: str) -> None:
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # The file gets the descriptor's mode: no other user may connect, at any moment.
            os.fchmod(bound.fileno(), 0o600)
            bound.bind(path)
            self.address = self._socket = path
            bound.setblocking(False)
            self._server = await asyncio.start_unix_server(self._take, sock=bound)
        except BaseException:
            bound.close()
            raise

    async def _until_worker_ends(self) -> None:
        with suppress(RyokanError):
            await self._connection.call(self._port, "closed", deadline=None)
        self._end()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if await _is_admitted(writer):
                await self._splice(reader, writer)
            else:
                writer.transport.abort()
        except (RyokanError, OSError, asyncio.CancelledError):
            # An end in the middle is for the two programs to notice.
            writer.transport.abort()
        finally:
            self._connections.discard(task)
            writer.close()

    async def _splice(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened = await self._connection.call(self._port, "connect")
        stream = Capability(self._connection, opened.stream)
        inwards = asyncio.ensure_future(self._send(stream, reader))
        try:
            await self._receive(stream, writer)
            await inwards
        finally:
            inwards.cancel()

    async def _send(self, stream: Capability, reader: asyncio.StreamReader) -> None:
        while True:
            data = await reader.read(_CHUNK)
            await self._connection.call(stream, "write", data, deadline=None)
            if not data:
                return

    async def _receive(self, stream: Capability, writer: asyncio.StreamWriter) -> None:
        while data := bytes((await self._connection.call(stream, "read", deadline=None)).data):
            writer.write(data)
            await writer.drain()
        with suppress(OSError):
            writer.write_eof()

    def _end(self) -> None:
        self._server.close()
        for task in [*self._connections]:
            task.cancel()
        self._remove()

    def _remove(self) -> None:
        if self._socket is not None:
            with suppress(OSError):
                os.unlink(self._socket)
            self._socket = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def ended(self) -> bool:
        """Whether the port is closed."""
        return self._watch.done()

    async def closed(self) -> None:
        """Returns when the port is closed, also by the end of the kernel's worker."""
        await asyncio.wait([self._watch])

    async def close(self) -> None:
        """Closes the port and its connections."""
        self._watch.cancel()
        self._end()
        await asyncio.wait([self._watch])


async def _is_admitted(writer: asyncio.StreamWriter) -> bool:
    """Whether a connection is of this user or of root, and its program has not closed it."""
    if writer.get_extra_info("socket").family == socket.AF_UNIX:
        return True
    ends = [writer.get_extra_info(name) for name in ("sockname", "peername")]
    # The table is long on a host with many connections.
    return await asyncio.to_thread(peer_uid, *ends) in (0, os.geteuid())


def _loopback(listen: str) -> tuple[str, int]:
    host, _, number = listen.rpartition(":")
    host = host.strip("[]")
    try:
        if ipaddress.ip_address(host).is_loopback and 0 <= int(number) < 1 << 16:
            return host, int(number)
    except ValueError:
        pass
    raise InvalidArgumentError(f"{listen!r} is neither unix:PATH nor 127.0.0.1:PORT")


async def forward(connection: Connection, kernel: Capability, port: Any, listen: str) -> Forward:
    """Opens a port of a kernel."""
    opened = await connection.call(kernel, "openPort", port)
    return await Forward(connection, Capability(connection, opened.port))._open(listen)
