"""Programs beside a kernel's engine, asynchronously."""

from __future__ import annotations

import asyncio
import builtins
import signal as signals
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from . import _wire, types
from ._connection import Capability
from .errors import RyokanError

if TYPE_CHECKING:
    from .aio import Kernel, Taker

Command = str | Sequence[str]
"""A text for `sh -c`, or a program with its arguments."""

_CHUNK = 1 << 20


class Commands:
    """Programs beside the engine, in its sandbox and limits, also while code runs."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    async def run(
        self,
        command: Command,
        *,
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        stdin: str | bytes = b"",
        timeout: float | None = None,
        on_stdout: Taker | None = None,
        on_stderr: Taker | None = None,
        output_limit: int = 0,
    ) -> types.Result:
        """Runs a program and waits for its end. A program that fails is a result, not an exception.

        The exit code is the program's, or 128 and the number of the signal that ended it. Cancelling
        this call, an exception of a callback and a lost connection end it with all that it started.

        Args:
            command: a text for `sh -c`, or a list: the program and its arguments.
            cwd: the working directory; empty: `/workspace`.
            env: variables beside those of every engine.
            stdin: its standard input.
            timeout: seconds after which it is killed; the status is then `timeout`.
            on_stdout, on_stderr: receive the output while it runs.
            output_limit: bytes of output kept in the result and the journal; 0: the default.
        """
        argv = ["sh", "-c", command] if isinstance(command, str) else [*command]
        data = stdin.encode() if isinstance(stdin, str) else bytes(stdin)
        request = {
            "argv": argv,
            "cwd": cwd,
            "env": _wire.pairs(env or {}),
            "stdinOpen": bool(data),
            "timeoutMs": _wire.milliseconds(timeout, "timeout"),
            "outputLimitBytes": output_limit,
        }
        kernel, connection = self._kernel, self._kernel._connection
        started = connection.send(kernel._cap, "spawn", request)
        execution = Capability(connection, started.execution)
        # Dropping it ends the process.
        process = Capability(connection, started.process)
        following = kernel._follow(execution, on_stdout, on_stderr)
        try:
            await connection.answer(started)
            feeding = asyncio.ensure_future(self._feed(execution, data)) if data else None
            try:
                return await following.result()
            finally:
                if feeding is not None:
                    feeding.cancel()
                    with suppress(asyncio.CancelledError):
                        await feeding
        except RyokanError:
            raise
        except BaseException:
            kernel._abandon(execution)
            raise
        finally:
            del process

    async def _feed(self, execution: Capability, data: bytes) -> None:
        # A program that ends or closes its input needs no more of it.
        with suppress(RyokanError):
            for at in range(0, len(data), _CHUNK):
                await self._kernel._connection.call(execution, "stdin", data[at : at + _CHUNK], deadline=None)
            await self._kernel._connection.call(execution, "closeStdin", deadline=None)

    async def list(self) -> builtins.list[types.Process]:
        """The programs that run."""
        return [_wire.process(item) for item in (await self._kernel._call("processes")).processes]

    async def kill(self, execution_id: int) -> None:
        """Ends a program with all that it started.

        Raises:
            NotFoundError: there is no such execution.
        """
        await self._kernel._call("interrupt", execution_id)

    async def send_signal(self, execution_id: int, signal: int = signals.SIGTERM) -> None:
        """Sends a signal to the program, not to what it started."""
        await self._kernel._call("signalProcess", execution_id, int(signal))
