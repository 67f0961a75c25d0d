"""What happens to files of a directory, as an iterator."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from . import _wire, types
from ._connection import Capability, Connection, FileEvents
from ._inbox import Inbox
from .errors import AFTER_A_LOSS, RyokanError, UnavailableError

if TYPE_CHECKING:
    from typing_extensions import Self


class _Call:
    """The pending call of a watch; its end ends the watch. Holds no iterator, so that one can be dropped."""

    def __init__(self) -> None:
        self.inbox: Inbox[types.FileEvent] = Inbox()
        self.ready = asyncio.Event()
        self.running: asyncio.Future[Any] | None = None

    def begin(self, connection: Connection, files: Capability, path: bytes, recursive: bool) -> None:
        sink = FileEvents(self.taker())
        released = sink.released
        promise = connection.send(files, "watch", path, recursive, sink)
        del sink
        self.running = connection.link.in_background(self.follow(connection, promise, released))

    def taker(self) -> Callable[[Any], Awaitable[None]]:
        inbox, ready = self.inbox, self.ready

        async def take(event: Any) -> None:
            read = _wire.file_event(event)
            if read is None:
                ready.set()
            else:
                await inbox.put(read)

        return take

    async def follow(self, connection: Connection, promise: Awaitable[Any], released: asyncio.Future[None]) -> None:
        failure: RyokanError | None = None
        try:
            await connection.answer(promise, None)
            await connection.released(released)
        except RyokanError as error:
            error.__traceback__ = None
            failure = error
        except asyncio.CancelledError:
            # Counts unless `end` was first: the connection was closed.
            failure = UnavailableError("the watch ended", AFTER_A_LOSS)
            raise
        finally:
            self.inbox.end(failure)
            self.ready.set()

    def end(self) -> None:
        self.inbox.items.clear()
        self.inbox.end()
        self.ready.set()
        if self.running is not None:
            self.running.cancel()


class Watch:
    """What happens to files of a directory. An iterator that `close` or leaving `async with` ends.

    It begins with `async with`, or with the first event that is asked for; nothing is missed after
    that. An event may come twice. `overflow`: events are missing, so list the directory again.
    `ended`: the last event; the directory was removed or replaced, has more in it than is watched, or its
    virtual machine starts or ends.
    """

    def __init__(
        self, connection: Connection, opening: Callable[[], Awaitable[Capability]], path: bytes, recursive: bool
    ) -> None:
        self._connection, self._opening, self._path, self._recursive = connection, opening, path, recursive
        self._watched = _Call()

    async def _begin(self) -> None:
        watched = self._watched
        if watched.running is None and not watched.inbox.ended:
            watched.begin(self._connection, await self._opening(), self._path, self._recursive)
        await watched.ready.wait()
        if watched.inbox.failure is not None and not watched.inbox.items:
            raise watched.inbox.failure

    async def _next(self) -> types.FileEvent | None:
        if self._watched.running is None:
            await self._begin()
        return await self._watched.inbox.next()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> types.FileEvent:
        event = await self._next()
        if event is None:
            raise StopAsyncIteration
        return event

    async def __aenter__(self) -> Self:
        await self._begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the watch, also while an event is awaited."""
        self._watched.end()

    def __del__(self) -> None:
        self._connection.run_in_loop(self._watched.end)
