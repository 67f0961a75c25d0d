"""Items between a sink, which the connection holds, and an iterator."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

from .errors import RyokanError

T = TypeVar("T")

_WAITING = 64
"""Items that wait here before the daemon waits."""


class Inbox(Generic[T]):
    """Bounded: a full inbox slows the daemon's stream."""

    def __init__(self) -> None:
        self.ended = False
        self.failure: RyokanError | None = None
        self.items: deque[T] = deque()
        self.arrived, self.room = asyncio.Event(), asyncio.Event()

    async def put(self, item: T) -> None:
        """Adds an item; returns when there is room for another."""
        if not self.ended:
            self.items.append(item)
        self.arrived.set()
        while len(self.items) >= _WAITING and not self.ended:
            self.room.clear()
            await self.room.wait()

    async def next(self) -> T | None:
        """The oldest item; None after the end."""
        while not self.items and not self.ended:
            self.arrived.clear()
            await self.arrived.wait()
        self.room.set()
        if self.items:
            return self.items.popleft()
        if self.failure is not None:
            raise self.failure
        return None

    def end(self, failure: RyokanError | None = None) -> None:
        """Ends the iteration after the items that are here. Only the first end counts."""
        if not self.ended:
            self.failure = failure
        self.ended = True
        self.arrived.set()
        self.room.set()
