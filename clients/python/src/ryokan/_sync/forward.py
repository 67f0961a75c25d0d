"""Ports of kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import aio
from .._portal import Portal

if TYPE_CHECKING:
    from typing_extensions import Self


class Forward:
    """An open port. `with` closes it; it also ends with the kernel's worker."""

    def __init__(self, forward: aio.Forward, runner: Portal) -> None:
        self._forward, self._portal = forward, runner
        self.address = forward.address
        """The path of the Unix socket, or `127.0.0.1:PORT`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ended(self) -> bool:
        """Whether the port is closed."""
        return self._forward.ended

    def closed(self) -> None:
        """Returns when the port is closed, also by the end of the kernel's worker."""
        self._portal.run(self._forward.closed())

    def close(self) -> None:
        """Closes the port and its connections."""
        self._portal.run(self._forward.close())
