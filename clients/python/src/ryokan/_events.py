"""Events of kernels and of the host, as an iterator."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from . import _wire, types
from ._connection import Capability, Connection, EventItems
from .errors import AFTER_A_LOSS, UnavailableError

if TYPE_CHECKING:
    from typing_extensions import Self

_WAITING = 64
"""Events that wait here before the daemon waits."""


class _Inbox:
    """Events between the sink, which the connection holds, and the iterator."""

    def __init__(self, follow: bool) -> None:
        self.follow, self.ended, self.lost = follow, False, False
        self.events: deque[types.Event] = deque()
        self.arrived, self.room = asyncio.Event(), asyncio.Event()

    async def take(self, event: Any) -> None:
        if event is None:
            self.ended = self.ended or not self.follow
        elif not self.ended:
            self.events.append(_wire.event(event))
        self.arrived.set()
        while len(self.events) >= _WAITING and not self.ended:
            self.room.clear()
            await self.room.wait()

    async def next(self) -> types.Event | None:
        while not self.events and not self.ended:
            self.arrived.clear()
            await self.arrived.wait()
        self.room.set()
        if self.events:
            return self.events.popleft()
        if self.lost:
            raise UnavailableError("the stream of events ended", AFTER_A_LOSS)
        return None

    def end(self, lost: bool = False) -> None:
        self.lost = lost and not self.ended
        self.ended = True
        self.arrived.set()
        self.room.set()


class Events:
    """Events, oldest first. An iterator that `close` or leaving `async with` ends."""

    def __init__(self, connection: Connection, source: Capability, since: int, follow: bool) -> None:
        self._connection, self._source, self._since = connection, source, since
        self._inbox = _Inbox(follow)
        self._subscription: Capability | None = None

    async def _next(self) -> types.Event | None:
        inbox = self._inbox
        if self._subscription is None and not inbox.ended:
            sink = EventItems(inbox.take)
            # Also the end of the connection releases it.
            sink.released.add_done_callback(lambda _: inbox.end(lost=True))
            sent = self._connection.send(self._source, "events", self._since, sink)
            del sink
            answer = await self._connection.answer(sent)
            self._subscription = Capability(self._connection, answer.subscription)
        event = await inbox.next()
        if event is None:
            self._subscription = None
        return event

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> types.Event:
        event = await self._next()
        if event is None:
            raise StopAsyncIteration
        return event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the iteration, also one that waits."""
        self._inbox.events.clear()
        self._inbox.end()
        self._subscription = None

    def __del__(self) -> None:
        self._connection.run_in_loop(self._inbox.end)
