"""The thread whose event loop serves the synchronous face."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import itertools
import os
import queue
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from . import _connection
from .errors import UnavailableError

T = TypeVar("T")


class Portal:
    """Runs coroutines in its own thread and waits for them."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._numbers = itertools.count()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._serve, args=(ready,), name="ryokan", daemon=True)
        self._thread.start()
        ready.result()

    def _serve(self, ready: concurrent.futures.Future[None]) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._stopping = asyncio.Event()
            ready.set_result(None)
            await self._stopping.wait()
            await _connection.close_all()

        asyncio.run(serve())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine; an interrupt of this thread cancels it."""
        number, outcome = self._submit(work)
        del work
        try:
            return outcome.result()
        except BaseException:
            self._cancel(number)
            raise

    def run_with_callbacks(
        self, work: Callable[..., Coroutine[Any, Any, T]], callbacks: list[Callable[[Any], object] | None]
    ) -> T:
        """As `run`; `work` takes callbacks, which are called in this thread, one at a time."""
        calls: queue.SimpleQueue[tuple[Callable[[Any], object], Any, asyncio.Future[None]] | None] = queue.SimpleQueue()

        def relay(callback: Callable[[Any], object]) -> Callable[[Any], asyncio.Future[None]]:
            def take(piece: Any) -> asyncio.Future[None]:
                taken = self._loop.create_future()
                calls.put((callback, piece, taken))
                return taken

            return take

        number, outcome = self._submit(work(*[relay(callback) if callback else None for callback in callbacks]))
        outcome.add_done_callback(lambda _: calls.put(None))
        try:
            while (call := calls.get()) is not None:
                callback, piece, taken = call
                callback(piece)
                self._loop.call_soon_threadsafe(_resolve, taken)
            return outcome.result()
        except BaseException:
            self._cancel(number)
            raise

    def _submit(self, work: Coroutine[Any, Any, T]) -> tuple[int, concurrent.futures.Future[T]]:
        wrong = None
        if os.getpid() != self._process:
            wrong = UnavailableError("this connection belongs to the parent process", "connect in this process")
        elif threading.current_thread() is self._thread or not self._thread.is_alive():
            wrong = UnavailableError("the client's thread cannot be used here or has ended")
        if wrong is not None:
            work.close()
            raise wrong
        number, outcome = next(self._numbers), concurrent.futures.Future[T]()
        self._loop.call_soon_threadsafe(self._begin, number, work, outcome)
        return number, outcome

    # Tasks stay in this thread: their frames and exceptions hold the protocol's objects.

    def _begin(self, number: int, work: Coroutine[Any, Any, T], outcome: concurrent.futures.Future[T]) -> None:
        task = self._tasks[number] = self._loop.create_task(_settle(work, outcome))

        def ended(_: asyncio.Task[None]) -> None:
            del self._tasks[number]
            # Neither happened if the task was cancelled before its first step.
            work.close()
            if not outcome.done():
                outcome.set_exception(UnavailableError("the call was cancelled"))

        task.add_done_callback(ended)

    def _end(self, number: int) -> None:
        if number in self._tasks:
            self._tasks[number].cancel()

    def _cancel(self, number: int) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end, number)

    def stop(self) -> None:
        """Closes all connections and ends the thread."""
        if os.getpid() == self._process and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(5)


async def _settle(work: Coroutine[Any, Any, T], outcome: concurrent.futures.Future[T]) -> None:
    try:
        outcome.set_result(await work)
    except asyncio.CancelledError:
        outcome.set_exception(UnavailableError("the call was cancelled"))
    except BaseException as error:
        error.__cause__ = error.__context__ = None
        outcome.set_exception(error.with_traceback(None))


def _resolve(taken: asyncio.Future[None]) -> None:
    if not taken.done():
        taken.set_result(None)


_portal: Portal | None = None
_starting = threading.Lock()


def portal() -> Portal:
    """The process's portal; a forked child gets its own."""
    global _portal
    with _starting:
        if _portal is None:
            _portal = Portal()
            atexit.register(_portal.stop)
        return _portal


def _forget() -> None:
    """In a forked child: the parent's thread is not here, and its objects must not be released."""
    global _portal, _starting
    _starting = threading.Lock()
    if _portal is not None:
        _inherited.append(_portal)
        _portal = None


_inherited: list[Portal] = []
os.register_at_fork(after_in_child=_forget)
