"""One connection: the loop, calls with typed errors, and capabilities that any thread may drop.

pycapnp's objects belong to the thread of their event loop, and crash the process elsewhere. So
`Link`, which lives in that thread, owns every one of them, and `Connection` and `Capability` only
name them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any, TypeVar

import capnp

from . import _daemon, types
from ._wire import NESTING, schema
from .errors import DeadlineError, InvalidArgumentError, RyokanError, UnavailableError, from_exception

T = TypeVar("T")

CALL = 120.0
"""Seconds for a call that does not depend on code or files."""
HELLO = 10.0
"""Seconds for a connection and its greeting."""
_MESSAGE_WORDS = 8 << 20
"""Largest message: the interface's 64 MiB."""

_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Loop] = weakref.WeakKeyDictionary()


class _Loop:
    """Cap'n Proto in one asyncio loop, while it has connections."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.links: weakref.WeakSet[Link] = weakref.WeakSet()
        self.connections = 0
        self.running: AbstractAsyncContextManager[None] | None = None

    @staticmethod
    async def enter() -> None:
        entry = _loops.setdefault(asyncio.get_running_loop(), _Loop())
        async with entry.lock:
            if entry.connections == 0:
                running = capnp.kj_loop()
                # It fails if the program runs one itself, which then is used.
                with suppress(RuntimeError):
                    await running.__aenter__()
                    entry.running = running
            entry.connections += 1

    @staticmethod
    async def leave() -> None:
        entry = _loops[asyncio.get_running_loop()]
        async with entry.lock:
            entry.connections -= 1
            if entry.connections == 0 and entry.running is not None:
                running, entry.running = entry.running, None
                await running.__aexit__(None, None, None)


class Link:
    """The protocol's objects of one connection, in the loop's thread."""

    def __init__(self, client: Any, root: Any) -> None:
        self.client = client
        self.root = client.bootstrap().cast_as(root)
        """What the socket serves: a host, or a published kernel."""
        self.capabilities: dict[int, Any] = {}
        self.background: set[asyncio.Future[Any]] = set()
        self.loop = asyncio.get_running_loop()
        self.left: asyncio.Task[None] | None = None

    @property
    def closed(self) -> bool:
        return self.left is not None

    def in_background(self, work: Awaitable[Any]) -> asyncio.Future[Any]:
        """Lets a task of its own finish this work, without its result."""
        task = asyncio.ensure_future(work)
        self.background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Future[Any]) -> None:
        self.background.discard(task)
        if not task.cancelled():
            task.exception()

    def close(self) -> None:
        """Ends the connection; pending calls fail."""
        if self.closed:
            return
        self.capabilities.clear()
        client, self.client, self.root = self.client, None, None
        client.close()
        for task in list(self.background):
            task.cancel()
        self.left = self.loop.create_task(_Loop.leave())


async def close_all() -> None:
    """Ends all connections of this loop."""
    entry = _loops.get(asyncio.get_running_loop())
    for link in [*entry.links] if entry is not None else []:
        link.close()
        if link.left is not None:
            await link.left


class Connection:
    """A connection, named from any thread. Dropping it closes it."""

    _numbers = itertools.count()

    def __init__(self, link: Link) -> None:
        self.link = link
        self.loop = link.loop
        self._thread = threading.get_ident()
        self._process = os.getpid()

    @staticmethod
    async def open(path: Path, start: bool, timeout: float, root: Any = schema.Host) -> Connection:
        """Connects to a socket that serves this interface."""
        sock = await _daemon.connect(path, start, timeout)
        await _Loop.enter()
        try:
            stream = await capnp.AsyncIoStream.create_unix_connection(sock=sock)
            client = capnp.TwoPartyClient(stream, _MESSAGE_WORDS, NESTING)
        except BaseException:
            sock.close()
            await _Loop.leave()
            raise
        link = Link(client, root)
        _loops[link.loop].links.add(link)
        return Connection(link)

    async def call(self, capability: Capability, method: str, *args: Any, deadline: float | None = CALL) -> Any:
        """Calls a method; its response must not leave this thread.

        `deadline` None: for calls whose duration depends on code or files.
        """
        return await self.answer(self.send(capability, method, *args), deadline)

    def send(self, capability: Capability, method: str, *args: Any) -> Any:
        """Sends a request; returns the promise of its response."""
        target = self.link.capabilities.get(capability.key)
        if target is None:
            raise _closed()
        try:
            return getattr(target, method)(*args)
        except (capnp.KjException, TypeError, ValueError, OverflowError) as error:
            wrong = InvalidArgumentError(f"{method}: {error}".splitlines()[0])
        raise wrong

    async def answer(self, promise: Awaitable[T], deadline: float | None = CALL) -> T:
        """Waits for a response."""
        failure: RyokanError
        try:
            return await (promise if deadline is None else asyncio.wait_for(promise, deadline))
        except asyncio.TimeoutError:
            failure = DeadlineError(f"the daemon gave no answer in {deadline:g} s", "it is overloaded: see its log")
        except capnp.KjException as error:
            failure = self._failure(error)
        raise failure

    def _failure(self, error: Any) -> RyokanError:
        if self.link.closed:
            return _closed()
        return from_exception(str(error.type or "FAILED"), str(error.description))

    def named(self, capability: Capability) -> Any:
        """A capability as a parameter of a call of this connection."""
        if capability.connection.link is not self.link:
            raise InvalidArgumentError("both kernels must be of one connection", "open both with one `Host`")
        target = self.link.capabilities.get(capability.key)
        if target is None:
            raise _closed()
        return target

    async def collect(
        self,
        capability: Capability,
        method: str,
        *before: Any,
        sink: type,
        convert: Callable[[Any], T],
        after: Sequence[Any] = (),
    ) -> list[T]:
        """Calls a method that streams items into a sink, a parameter between these; returns all items."""
        items: list[T] = []
        receiver = sink(lambda item: items.append(convert(item)))
        released = receiver.released
        promise = self.send(capability, method, *before, receiver, *after)
        del receiver
        await self.answer(promise, None)
        await self.released(released)
        # A lost connection releases the sink as well, and then fails this call.
        root = self.link.root
        if root is None:
            raise _closed()
        await self.answer(root.info() if hasattr(root, "info") else root.ping())
        return items

    async def released(self, released: asyncio.Future[None]) -> None:
        """Waits until every item of a sink was taken: the response overtakes them."""
        try:
            await asyncio.wait_for(released, CALL)
        except asyncio.TimeoutError:
            raise DeadlineError("the daemon answered and keeps the callback") from None

    def run_in_loop(self, work: Callable[..., Any], *args: Any) -> None:
        """Runs this in the loop's thread, now or soon; nothing if the loop has ended."""
        if threading.get_ident() == self._thread:
            work(*args)
        elif os.getpid() == self._process:
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(work, *args)

    async def close(self) -> None:
        """Ends the connection."""
        self.link.close()
        if self.link.left is not None:
            await asyncio.shield(self.link.left)

    def __del__(self) -> None:
        if not self.link.closed and not self.loop.is_closed():
            self.run_in_loop(self.link.close)


def _closed() -> UnavailableError:
    return UnavailableError("the connection is closed", "connect again")


class Capability:
    """A capability of a connection, named from any thread. Dropping it releases it."""

    def __init__(self, connection: Connection, capability: Any) -> None:
        self.connection = connection
        self.key = next(Connection._numbers)
        connection.link.capabilities[self.key] = capability

    def __del__(self) -> None:
        self.connection.run_in_loop(self.connection.link.capabilities.pop, self.key, None)


class _Sink:
    """Takes the items of one stream; `released` resolves when the daemon sends no more."""

    def __init__(self, take: Callable[[Any], Any]) -> None:
        self.take = take
        self.released: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __del__(self) -> None:
        if not self.released.done() and not self.released.get_loop().is_closed():
            self.released.set_result(None)


class KernelInfos(_Sink, schema.KernelInfoSink.Server):  # type: ignore[misc]
    async def next(self, info: Any, **_: Any) -> None:
        self.take(info)


class Checkpoints(_Sink, schema.CheckpointSink.Server):  # type: ignore[misc]
    async def next(self, checkpoint: Any, **_: Any) -> None:
        self.take(checkpoint)


class Differences(_Sink, schema.DifferenceSink.Server):  # type: ignore[misc]
    async def next(self, difference: Any, **_: Any) -> None:
        self.take(difference)


class Journal(_Sink, schema.JournalSink.Server):  # type: ignore[misc]
    async def entry(self, entry: Any, **_: Any) -> None:
        self.take(entry)


class FileInfos(_Sink, schema.FileInfoSink.Server):  # type: ignore[misc]
    async def next(self, info: Any, **_: Any) -> None:
        self.take(info)


class FileEvents(_Sink, schema.FileEventSink.Server):  # type: ignore[misc]
    """Events of files; `take` is a coroutine function, and slows the stream."""

    async def next(self, event: Any, **_: Any) -> None:
        await self.take(event)


class TeleportProgress(_Sink, schema.TeleportSink.Server):  # type: ignore[misc]
    """How far a move is; `take` is a coroutine function."""

    async def progress(self, phase: str, sentBytes: int, reusedBytes: int, **_: Any) -> None:
        await self.take(types.TeleportProgress(phase, sentBytes, reusedBytes))


class AuditLines(_Sink, schema.AuditSink.Server):  # type: ignore[misc]
    async def next(self, line: Any, **_: Any) -> None:
        self.take(line)


class Patches(_Sink, schema.PatchSink.Server):  # type: ignore[misc]
    async def next(self, patch: Any, **_: Any) -> None:
        self.take(patch)


class EventItems(_Sink, schema.EventSink.Server):  # type: ignore[misc]
    """Events; `take` is a coroutine function, and slows the stream. It gets None after those of the past."""

    async def event(self, event: Any, **_: Any) -> None:
        await self.take(event)

    async def caughtUp(self, **_: Any) -> None:
        await self.take(None)


class Output(_Sink, schema.OutputCallback.Server):  # type: ignore[misc]
    """Output events; `take` may be a coroutine function, and slows the code."""

    async def onOutput(self, execId: int, event: Any, **_: Any) -> None:
        await self.take(event)
