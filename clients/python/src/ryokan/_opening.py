"""Objects that are awaited, or opened and closed by `async with`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")


class Opening(Awaitable[T]):
    """`await` it for an open object, or use it with `async with`, which closes the object."""

    def __init__(self, opening: Callable[[], Awaitable[T]], closing: Callable[[T], Awaitable[object]]) -> None:
        self._opening, self._closing = opening, closing

    async def open(self) -> T:
        return await self._opening()

    def __await__(self) -> Generator[Any, Any, T]:
        return self.open().__await__()

    async def __aenter__(self) -> T:
        self._opened = await self.open()
        return self._opened

    async def __aexit__(self, *_: object) -> None:
        await self._closing(self._opened)
