"""What `Files.write` takes: the content of a file, in pieces of bounded size."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Iterable, Iterator
from typing import Any, Protocol

CHUNK = 1 << 20
"""Largest piece of a file, of the interface."""


class Readable(Protocol):
    """A file object, such as `open` returns; text is written as UTF-8."""

    def read(self, size: int, /) -> bytes | str: ...


class AsyncReadable(Protocol):
    """A file object whose `read` is a coroutine function."""

    def read(self, size: int, /) -> Awaitable[bytes | str]: ...


Whole = str | bytes | bytearray | memoryview
Content = Whole | Readable | Iterable[bytes]
"""A text or bytes, a file object, or an iterator of bytes."""
AsyncContent = Content | AsyncReadable | AsyncIterable[bytes]
"""Also what is read with `await` or `async for`."""


def _bytes(piece: Any) -> memoryview:
    if isinstance(piece, str):
        return memoryview(piece.encode())
    if isinstance(piece, bytes | bytearray | memoryview):
        return memoryview(piece).cast("B")
    # `bytes(3)` would be three zeros.
    raise TypeError(f"the content of a file is bytes or text, not {type(piece).__name__}")


class _Gathering:
    """Makes pieces of at most `CHUNK` bytes, and none much smaller, of pieces of any size."""

    def __init__(self) -> None:
        self._begun = bytearray()

    def add(self, piece: Any) -> Iterator[bytes]:
        """The pieces that are full with this one."""
        rest = _bytes(piece)
        while len(self._begun) + len(rest) >= CHUNK:
            taken = CHUNK - len(self._begun)
            full = bytes(self._begun) + bytes(rest[:taken]) if self._begun else bytes(rest[:taken])
            self._begun.clear()
            rest = rest[taken:]
            yield full
        self._begun += rest

    def end(self) -> Iterator[bytes]:
        if self._begun:
            yield bytes(self._begun)


def _unsuitable(content: object) -> TypeError:
    name = type(content).__name__
    return TypeError(f"the content of a file is str, bytes, a file object or an iterator of bytes, not {name}")


def pieces(content: Content) -> Iterator[bytes]:
    """The content, read in this thread."""
    gathering = _Gathering()
    if isinstance(content, Whole):
        yield from gathering.add(content)
    elif hasattr(content, "read"):
        while piece := content.read(CHUNK):
            yield from gathering.add(piece)
        if piece is None:
            raise BlockingIOError("the file object does not wait for data")
    elif isinstance(content, Iterable):
        for piece in content:
            yield from gathering.add(piece)
    else:
        raise _unsuitable(content)
    yield from gathering.end()


async def async_pieces(content: AsyncContent) -> AsyncIterator[bytes]:
    """The content. A file object is read in another thread, an iterator in the event loop."""
    gathering = _Gathering()
    if isinstance(content, AsyncIterable) and not hasattr(content, "read"):
        async for piece in content:
            for full in gathering.add(piece):
                yield full
    elif hasattr(content, "read") and not isinstance(content, Whole):
        while piece := await _read(content):
            for full in gathering.add(piece):
                yield full
        if piece is None:
            raise BlockingIOError("the file object does not wait for data")
    else:
        for full in pieces(content):
            yield full
        return
    for full in gathering.end():
        yield full


async def _read(content: Any) -> Any:
    if inspect.iscoroutinefunction(content.read):
        return await content.read(CHUNK)
    read = await asyncio.to_thread(content.read, CHUNK)
    return await read if inspect.isawaitable(read) else read
