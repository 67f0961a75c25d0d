"""Events of kernels and of the host, as an iterator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import aio, types
from .._portal import Portal

if TYPE_CHECKING:
    from typing_extensions import Self


class Events:
    """Events, oldest first. An iterator that `close`, also from another thread, or leaving `with` ends."""

    def __init__(self, events: aio.Events, runner: Portal) -> None:
        self._events, self._portal = events, runner

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> types.Event:
        event = self._portal.run(self._events._next())
        if event is None:
            raise StopIteration
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the iteration, also one that waits."""
        self._portal.run(self._events.close())
