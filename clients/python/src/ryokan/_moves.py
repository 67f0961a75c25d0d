"""Moves of kernels to other hosts, asynchronously."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from . import _connection, _wire_moves, types
from ._connection import Capability, Connection
from .errors import RefusedError, UnsupportedError

ProgressTaker = Callable[[types.TeleportProgress], Awaitable[object] | object]
"""Receives how far a move is."""


def host(connection: Connection) -> Capability:
    """The host of a connection: only a host moves kernels."""
    root = connection.link.root
    if root is not None and not hasattr(root, "teleport"):
        raise UnsupportedError("a published kernel cannot move itself", "connect to its host")
    return Capability(connection, root)


def permitted(info: types.KernelInfo) -> None:
    """Refuses an object with fewer rights: the host would move its kernel all the same."""
    if "teleport" not in info.rights:
        raise RefusedError(f"this object of kernel {info.name} lacks the right `teleport`", "", "right")


async def teleport(
    connection: Connection, kernel: str, to: str, options: tuple[Any, ...], on_progress: ProgressTaker | None
) -> types.TeleportReport:
    """Moves a kernel; the options are the parameters before and after the sink."""
    allow_missing, *after = options
    failure: BaseException | None = None

    async def take(progress: types.TeleportProgress) -> None:
        nonlocal failure
        if on_progress is None or failure is not None:
            return
        try:
            result = on_progress(progress)
            if inspect.isawaitable(result):
                await result
        except BaseException as error:
            failure = error
            moving.cancel()

    sink = _connection.TeleportProgress(take)
    promise = connection.send(host(connection), "teleport", kernel, to, allow_missing, sink, *after)
    del sink
    moving = asyncio.ensure_future(connection.answer(promise, None))
    try:
        return _wire_moves.report((await moving).report)
    except asyncio.CancelledError:
        if failure is None:
            raise
    finally:
        moving.cancel()
    raise failure
