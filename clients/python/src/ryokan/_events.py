"""Events of kernels and of the host, as an iterator."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from . import _wire, types
from ._connection import Capability, Connection, EventItems
from ._inbox import Inbox
from .errors import AFTER_A_LOSS, UnavailableError

if TYPE_CHECKING:
    from typing_extensions import Self

def _taker(inbox: Inbox[types.Event], follow: bool) -> Callable[[Any], Awaitable[None]]:
    """What the sink calls. It must not hold the iterator, which ends the stream when it is dropped."""

    async def take(event: Any) -> None:
        if event is not None:
            await inbox.put(_wire.event(event))
        elif not follow:
            inbox.end()

    return take


class Events:
    """Events, oldest first. An iterator that `close` or leaving `async with` ends."""

    def __init__(self, connection: Connection, source: Capability, since: int, follow: bool) -> None:
        self._connection, self._source, self._since = connection, source, since
        self._follow = follow
        self._inbox: Inbox[types.Event] = Inbox()
        self._subscription: Capability | None = None

    async def _next(self) -> types.Event | None:
        inbox = self._inbox
        if self._subscription is None and not inbox.ended:
            sink = EventItems(_taker(inbox, self._follow))
            # Also the end of the connection releases it.
            lost = UnavailableError("the stream of events ended", AFTER_A_LOSS)
            sink.released.add_done_callback(lambda _: inbox.end(lost))
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
        self._inbox.items.clear()
        self._inbox.end()
        self._subscription = None

    def __del__(self) -> None:
        self._connection.run_in_loop(self._inbox.end)
