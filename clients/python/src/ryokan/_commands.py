"""Programs beside a kernel's engine, asynchronously."""

from __future__ import annotations

import asyncio
import builtins
import signal as signals
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, overload

from . import _wire, types
from ._connection import Capability
from ._execution import DataTaker, Following, Output, Taker
from .errors import InvalidArgumentError, RyokanError

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._kernel import Kernel

Command = str | Sequence[str]
"""A text for `sh -c`, or a program with its arguments."""

SHELL = "if command -v bash >/dev/null; then exec bash; else exec sh; fi"
"""The best shell of the host."""
_CHUNK = 1 << 20


def _argv(command: Command) -> list[str]:
    return ["sh", "-c", command] if isinstance(command, str) else [*command]


class CommandHandle:
    """A program that runs, or ran, without this program waiting for it."""

    def __init__(
        self,
        kernel: Kernel,
        execution: Capability,
        execution_id: int,
        *,
        process: Capability | None = None,
        offset: int = 0,
        on_stdout: Taker | None = None,
        on_stderr: Taker | None = None,
        on_pty: DataTaker | None = None,
    ) -> None:
        self._kernel, self._execution = kernel, execution
        # Dropping it ends a program that is not detached.
        self._process = process
        self._takers = (on_stdout, on_stderr, on_pty)
        self.execution_id = self.pid = execution_id
        """The program's number in the kernel and its journal, also under E2B's name."""
        self.offset = offset
        """Bytes of output before the next that `wait` delivers; `connect` continues from there."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.execution_id} of {self._kernel.name}>"

    async def wait(
        self,
        *,
        on_stdout: Taker | None = None,
        on_stderr: Taker | None = None,
        on_pty: DataTaker | None = None,
    ) -> types.Result:
        """Waits for the program's end; callbacks get its output from `offset` on.

        Cancelling this call, and an exception of a callback, leave the program running. `on_pty` gets
        a terminal's bytes. Without callbacks those of `run` or `connect` are called.
        """
        takers = (on_stdout, on_stderr, on_pty)
        out, err, data = takers if any(takers) else self._takers
        output = Output(out, err, data, self.offset) if out or err or data else None
        try:
            return await Following(self._kernel._connection, self._execution, output).result()
        finally:
            if output is not None:
                self.offset = output.offset

    async def send_stdin(self, data: str | bytes) -> None:
        """Sends standard input, or what is typed into a terminal."""
        await _send(self._kernel, self._execution, data)

    async def close_stdin(self) -> None:
        """Ends its standard input."""
        await self._kernel._connection.call(self._execution, "closeStdin", deadline=None)

    async def send_signal(self, signal: int = signals.SIGTERM) -> None:
        """Sends a signal to the program, not to what it started."""
        await self._kernel.commands.send_signal(self.execution_id, signal)

    async def kill(self) -> bool:
        """Ends the program with all that it started; returns whether it ran."""
        return await self._kernel.commands.kill(self.execution_id)


async def _send(kernel: Kernel, execution: Capability, data: str | bytes) -> None:
    content = data.encode() if isinstance(data, str) else bytes(data)
    for at in range(0, len(content), _CHUNK):
        await kernel._connection.call(execution, "stdin", content[at : at + _CHUNK], deadline=None)


class Commands:
    """Programs beside the engine, in its sandbox and limits, also while code runs."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    @overload
    async def run(
        self,
        command: Command,
        *,
        background: Literal[False] = False,
        on_stdout: Taker | None = None,
        on_stderr: Taker | None = None,
        **options: Unpack[types.CommandOptions],
    ) -> types.Result: ...

    @overload
    async def run(
        self,
        command: Command,
        *,
        background: Literal[True],
        on_stdout: Taker | None = None,
        on_stderr: Taker | None = None,
        **options: Unpack[types.CommandOptions],
    ) -> CommandHandle: ...

    async def run(
        self,
        command: Command,
        *,
        background: bool = False,
        on_stdout: Taker | None = None,
        on_stderr: Taker | None = None,
        **options: Unpack[types.CommandOptions],
    ) -> types.Result | CommandHandle:
        """Runs a program and waits for its end. A program that fails is a result, not an exception.

        The exit code is the program's, or 128 and the number of the signal that ended it. Cancelling
        this call, an exception of a callback and a lost connection end it with all that it started.

        Args:
            command: a text for `sh -c`, or a list: the program and its arguments.
            background: return its handle at once. Unless `detached` is False, it continues without
                this client, until its kernel's worker or the daemon ends.
            on_stdout, on_stderr: receive the output while it runs; with `background` while the
                handle's `wait` runs.
            options: see `types.CommandOptions`: `cwd`, `env`, `stdin`, `timeout`, `output_limit`.
        """
        _wire.known(options, types.CommandOptions, "a program")
        stdin = options.get("stdin", b"")
        if not background and stdin is True:
            raise InvalidArgumentError("nothing could send input to this program", "run it with `background`")
        data = stdin if not isinstance(stdin, bool) else b""
        request = self._request(_argv(command), options)
        request["stdinOpen"] = bool(stdin)
        if background:
            request["detached"] = options.get("detached", True)
            handle = await self._start(request, on_stdout, on_stderr)
            if data:
                self._kernel._connection.link.in_background(self._feed(handle._execution, data))
            return handle
        return await self._run(request, data, on_stdout, on_stderr)

    def _request(self, argv: builtins.list[str], options: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "argv": argv,
            "cwd": options.get("cwd", ""),
            "env": _wire.environment({**self._kernel._env, **(options.get("env") or {})}, options.get("envs")),
            "timeoutMs": _wire.milliseconds(options.get("timeout"), "timeout"),
            "outputLimitBytes": options.get("output_limit", 0),
        }

    async def _start(self, request: dict[str, Any], *takers: Any) -> CommandHandle:
        kernel = self._kernel
        started = await kernel._call("spawn", request, deadline=None)
        execution = Capability(kernel._connection, started.execution)
        process = Capability(kernel._connection, started.process)
        out, err, *data = takers
        return CommandHandle(
            kernel,
            execution,
            started.execId,
            process=process,
            on_stdout=out,
            on_stderr=err,
            on_pty=data[0] if data else None,
        )

    async def _run(
        self, request: dict[str, Any], data: str | bytes, on_stdout: Taker | None, on_stderr: Taker | None
    ) -> types.Result:
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

    async def _feed(self, execution: Capability, data: str | bytes) -> None:
        # A program that ends or closes its input needs no more of it.
        with suppress(RyokanError):
            await _send(self._kernel, execution, data)
            await self._kernel._connection.call(execution, "closeStdin", deadline=None)

    async def connect(
        self,
        execution_id: int,
        *,
        offset: int = 0,
        on_stdout: Taker | None = None,
        on_stderr: Taker | None = None,
        on_pty: DataTaker | None = None,
    ) -> CommandHandle:
        """The handle of a program that another client or an earlier program started.

        `offset`: bytes of output, of both streams together, that `wait` does not deliver again.

        Raises:
            NotFoundError: the kernel has no such execution.
        """
        kernel = self._kernel
        answer = await kernel._call("execution", execution_id)
        execution = Capability(kernel._connection, answer.execution)
        return CommandHandle(
            kernel, execution, execution_id, offset=offset, on_stdout=on_stdout, on_stderr=on_stderr, on_pty=on_pty
        )

    async def list(self) -> builtins.list[types.Process]:
        """The programs that run."""
        return [_wire.process(item) for item in (await self._kernel._call("processes")).processes]

    async def kill(self, execution_id: int) -> bool:
        """Ends a program with all that it started; returns whether it ran."""
        if all(process.execution_id != execution_id for process in await self.list()):
            return False
        await self._kernel._call("interrupt", execution_id)
        return True

    async def send_signal(self, execution_id: int, signal: int = signals.SIGTERM) -> None:
        """Sends a signal to the program, not to what it started."""
        await self._kernel._call("signalProcess", execution_id, int(signal))

    async def send_stdin(self, execution_id: int, data: str | bytes) -> None:
        """Sends standard input to a program that was started with `stdin=True`."""
        await (await self.connect(execution_id)).send_stdin(data)

    async def close_stdin(self, execution_id: int) -> None:
        """Ends a program's standard input."""
        await (await self.connect(execution_id)).close_stdin()


class Pty:
    """Programs on terminals."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    async def create(
        self,
        size: types.PtySize = types.PtySize(),  # noqa: B008 - immutable
        *,
        command: Command = SHELL,
        on_data: DataTaker | None = None,
        **options: Unpack[types.CommandOptions],
    ) -> CommandHandle:
        """Starts a shell, or another program, on a terminal of its own.

        `on_data` gets the terminal's bytes while the handle's `wait` runs. Unless `detached` is False,
        the program continues without this client.
        """
        _wire.known(options, types.CommandOptions, "a program")
        if options.get("stdin"):
            raise InvalidArgumentError("a terminal's input is what `send_stdin` types")
        commands = self._kernel.commands
        # The program may be any; this terminal is in no other way special.
        env = {"TERM": "xterm-256color", **(options.get("env") or {})}
        request = commands._request(_argv(command), {**options, "env": env})
        rows, columns = size
        request |= {"rows": rows, "columns": columns, "stdinOpen": True, "detached": options.get("detached", True)}
        return await commands._start(request, None, None, on_data)

    async def connect(self, execution_id: int, *, offset: int = 0, on_data: DataTaker | None = None) -> CommandHandle:
        """The handle of a program on a terminal that another client started; see `Commands.connect`."""
        return await self._kernel.commands.connect(execution_id, offset=offset, on_pty=on_data)

    async def resize(self, execution_id: int, size: types.PtySize) -> None:
        """Sets the size of a program's terminal."""
        rows, columns = size
        await self._kernel._call("resizeTerminal", execution_id, rows, columns)

    async def send_stdin(self, execution_id: int, data: str | bytes) -> None:
        """Types into a program's terminal."""
        await self._kernel.commands.send_stdin(execution_id, data)

    async def kill(self, execution_id: int) -> bool:
        """Ends a program with all that it started; returns whether it ran."""
        return await self._kernel.commands.kill(execution_id)
