"""Callbacks in the thread of the caller."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from .. import types
from .._portal import Portal

T = TypeVar("T")

Taker = Callable[[str], object]
"""Receives pieces of output."""
DataTaker = Callable[[bytes], object]
"""The same for bytes, of a terminal."""
ProgressTaker = Callable[[types.TeleportProgress], object]
"""Receives how far a move is."""


def with_callbacks(
    runner: Portal, work: Callable[..., Coroutine[Any, Any, T]], *callbacks: Taker | DataTaker | ProgressTaker | None
) -> T:
    """Runs a coroutine that takes callbacks, which this thread calls."""
    if not any(callbacks):
        return runner.run(work(*callbacks))
    return runner.run_with_callbacks(work, [*callbacks])
