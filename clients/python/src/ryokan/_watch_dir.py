"""A watch of a directory under E2B's names, asynchronously."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable

from . import types
from ._connection import Connection
from ._watch import Watch
from .errors import AFTER_A_LOSS, ConflictError, UnavailableError

EventTaker = Callable[[types.FilesystemEvent], Awaitable[object] | object]
ExitTaker = Callable[[Exception], Awaitable[object] | object]

_MOST = 1 << 16
"""Events that wait for `get_new_events`."""

_TYPES = {
    "created": types.FilesystemEventType.CREATE,
    "written": types.FilesystemEventType.WRITE,
    "changed": types.FilesystemEventType.CHMOD,
    "removed": types.FilesystemEventType.REMOVE,
}


class WatchHandle:
    """A watch in the background, until `stop` or the end of the connection."""

    def __init__(self, watch: Watch, on_event: EventTaker | None, on_exit: ExitTaker | None) -> None:
        self._watch, self._on_event, self._on_exit = watch, on_event, on_exit
        self._events: list[types.FilesystemEvent] = []
        self._failure: Exception | None = None
        self._running: asyncio.Future[None] | None = None

    async def _begin(self, connection: Connection) -> WatchHandle:
        await self._watch._begin()
        self._running = connection.link.in_background(self._follow())
        self._running.add_done_callback(self._ended)
        return self

    def _ended(self, _: object) -> None:
        # Not in `_follow`: a connection that ends at once cancels it before its first step.
        if self._failure is None:
            self._failure = UnavailableError("the watch ended", AFTER_A_LOSS)

    async def _follow(self) -> None:
        try:
            async for event in self._watch:
                if event.kind == "overflow" or event.kind == "ended" or len(self._events) == _MOST:
                    reason = "ended" if event.kind == "ended" else "overflow"
                    why = "it was removed or replaced" if reason == "ended" else "events are missing"
                    raise ConflictError(f"the watch ended: {why}", "list the directory, and watch it anew", reason)
                if event.kind in _TYPES:
                    await self._take(types.FilesystemEvent(event.path, _TYPES[event.kind]))
        except Exception as error:
            self._failure = error.with_traceback(None)
        await self._watch.close()
        if self._on_exit is not None and self._failure is not None:
            await _called(self._on_exit(self._failure))

    async def _take(self, event: types.FilesystemEvent) -> None:
        if self._on_event is None:
            self._events.append(event)
        else:
            await _called(self._on_event(event))

    async def get_new_events(self) -> list[types.FilesystemEvent]:
        """The events since the last call, unless `on_event` gets them.

        Raises:
            ConflictError: the watch has ended; reason `overflow` if events are missing, or `ended` if the
                directory was removed or replaced.
        """
        events, self._events = self._events, []
        if not events and self._failure is not None:
            raise self._failure
        return events

    async def stop(self) -> None:
        """Ends the watch."""
        if self._failure is None:
            self._failure = ConflictError("the watch was stopped")
        if self._running is not None:
            self._running.cancel()
        await self._watch.close()


async def _called(result: Awaitable[object] | object) -> None:
    if inspect.isawaitable(result):
        await result
