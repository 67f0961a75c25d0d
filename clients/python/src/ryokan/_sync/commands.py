"""Programs beside a kernel's engine."""

from __future__ import annotations

import builtins
import signal as signals
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from .. import aio, types
from .._commands import SHELL, Command
from .._portal import Portal
from .callbacks import DataTaker, Taker, with_callbacks

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")


class CommandHandle:
    """A program that runs, or ran, without this program waiting for it."""

    def __init__(
        self,
        handle: aio.CommandHandle,
        runner: Portal,
        on_stdout: Taker | None = None,
        on_stderr: Taker | None = None,
        on_pty: DataTaker | None = None,
    ) -> None:
        self._handle, self._portal = handle, runner
        self._takers = (on_stdout, on_stderr, on_pty)
        self.execution_id = self.pid = handle.execution_id
        """The program's number in the kernel and its journal, also under E2B's name."""
        self.offset = handle.offset
        """Bytes of output before the next that `wait` delivers; `connect` continues from there."""

    def __repr__(self) -> str:
        return repr(self._handle)

    def wait(
        self,
        *,
        on_stdout: Taker | None = None,
        on_stderr: Taker | None = None,
        on_pty: DataTaker | None = None,
    ) -> types.Result:
        """Waits for the program's end; callbacks get its output from `offset` on, in this thread.

        Ctrl-C, and an exception of a callback, leave the program running. `on_pty` gets a terminal's
        bytes. Without callbacks those of `run` or `connect` are called.
        """
        takers = (on_stdout, on_stderr, on_pty)
        if not any(takers):
            takers = self._takers

        def work(out: Any, err: Any, data: Any) -> Coroutine[Any, Any, types.Result]:
            return self._handle.wait(on_stdout=out, on_stderr=err, on_pty=data)

        try:
            return with_callbacks(self._portal, work, *takers)
        finally:
            self.offset = self._handle.offset

    def send_stdin(self, data: str | bytes) -> None:
        """Sends standard input, or what is typed into a terminal."""
        self._portal.run(self._handle.send_stdin(data))

    def close_stdin(self) -> None:
        """Ends its standard input."""
        self._portal.run(self._handle.close_stdin())

    def send_signal(self, signal: int = signals.SIGTERM) -> None:
        """Sends a signal to the program, not to what it started."""
        self._portal.run(self._handle.send_signal(signal))

    def kill(self) -> bool:
        """Ends the program with all that it started; returns whether it ran."""
        return self._portal.run(self._handle.kill())


class Commands:
    """Programs beside the engine, in its sandbox and limits, also while code runs."""

    def __init__(self, commands: aio.Commands, runner: Portal) -> None:
        self._commands, self._portal = commands, runner

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._portal.run(work)

    @overload
    def run(
        self,
        command: Command,
        *,
        background: Literal[False] = False,
        on_stdout: Taker | None = None,
        on_stderr: Taker | None = None,
        **options: Unpack[types.CommandOptions],
    ) -> types.Result: ...

    @overload
    def run(
        self,
        command: Command,
        *,
        background: Literal[True],
        on_stdout: Taker | None = None,
        on_stderr: Taker | None = None,
        **options: Unpack[types.CommandOptions],
    ) -> CommandHandle: ...

    def run(
        self,
        command: Command,
        *,
        background: bool = False,
        on_stdout: Taker | None = None,
        on_stderr: Taker | None = None,
        **options: Unpack[types.CommandOptions],
    ) -> types.Result | CommandHandle:
        """Runs a program and waits for its end. A program that fails is a result, not an exception.

        The exit code is the program's, or 128 and the number of the signal that ended it. Ctrl-C, an
        exception of a callback and a lost connection end it with all that it started.

        Args:
            command: a text for `sh -c`, or a list: the program and its arguments.
            background: return its handle at once. Unless `detached` is False, it continues without
                this client, until its kernel's worker or the daemon ends.
            on_stdout, on_stderr: receive the output while it runs, in this thread; with `background`
                while the handle's `wait` runs.
            options: see `types.CommandOptions`: `cwd`, `env`, `stdin`, `timeout`, `output_limit`.
        """
        if background:
            handle = self._run(self._commands.run(command, background=True, **options))
            return CommandHandle(handle, self._portal, on_stdout, on_stderr)

        def work(out: aio.Taker | None, err: aio.Taker | None) -> Coroutine[Any, Any, types.Result]:
            return self._commands.run(command, on_stdout=out, on_stderr=err, **options)

        return with_callbacks(self._portal, work, on_stdout, on_stderr)

    def connect(
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
        handle = self._run(self._commands.connect(execution_id, offset=offset))
        return CommandHandle(handle, self._portal, on_stdout, on_stderr, on_pty)

    def list(self) -> builtins.list[types.Process]:
        """The programs that run."""
        return self._run(self._commands.list())

    def kill(self, execution_id: int) -> bool:
        """Ends a program with all that it started; returns whether it ran."""
        return self._run(self._commands.kill(execution_id))

    def send_signal(self, execution_id: int, signal: int = signals.SIGTERM) -> None:
        """Sends a signal to the program, not to what it started."""
        self._run(self._commands.send_signal(execution_id, signal))

    def send_stdin(self, execution_id: int, data: str | bytes) -> None:
        """Sends standard input to a program that was started with `stdin=True`."""
        self._run(self._commands.send_stdin(execution_id, data))

    def close_stdin(self, execution_id: int) -> None:
        """Ends a program's standard input."""
        self._run(self._commands.close_stdin(execution_id))


class Pty:
    """Programs on terminals."""

    def __init__(self, pty: aio.Pty, runner: Portal) -> None:
        self._pty, self._portal = pty, runner

    def create(
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
        handle = self._portal.run(self._pty.create(size, command=command, **options))
        return CommandHandle(handle, self._portal, on_pty=on_data)

    def connect(self, execution_id: int, *, offset: int = 0, on_data: DataTaker | None = None) -> CommandHandle:
        """The handle of a program on a terminal that another client started; see `Commands.connect`."""
        handle = self._portal.run(self._pty.connect(execution_id, offset=offset))
        return CommandHandle(handle, self._portal, on_pty=on_data)

    def resize(self, execution_id: int, size: types.PtySize) -> None:
        """Sets the size of a program's terminal."""
        self._portal.run(self._pty.resize(execution_id, size))

    def send_stdin(self, execution_id: int, data: str | bytes) -> None:
        """Types into a program's terminal."""
        self._portal.run(self._pty.send_stdin(execution_id, data))

    def kill(self, execution_id: int) -> bool:
        """Ends a program with all that it started; returns whether it ran."""
        return self._portal.run(self._pty.kill(execution_id))
