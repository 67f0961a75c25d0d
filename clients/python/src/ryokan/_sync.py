"""The synchronous face: the names of `ryokan.aio`, for any thread.

Callbacks are called in the thread that called `run_code`.
"""

from __future__ import annotations

import builtins
import pathlib
import signal as signals
from collections.abc import Callable, Collection, Coroutine, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from . import aio, types
from ._commands import Command
from ._files import READ_BYTES, WORKSPACE, Path
from ._portal import Portal, portal

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

T = TypeVar("T")
Taker = Callable[[str], object]


class Host:
    """A connection to a daemon."""

    def __init__(self, host: aio.Host, runner: Portal) -> None:
        self._host, self._portal = host, runner
        self.info = host.info
        """The host's answer to the greeting."""

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._portal.run(work)

    @staticmethod
    def connect(
        socket: str | pathlib.Path | None = None,
        *,
        system: bool = False,
        start: bool = True,
        client: str = aio.CLIENT,
        timeout: float = aio.HELLO,
    ) -> Host:
        """Connects to the daemon of this user, and starts `ryokand` if none answers.

        Args:
            socket: another daemon's socket; none is started.
            system: the host's daemon; none is started.
            start: whether to start a daemon.
            client: this program's name in journals and the audit log.
            timeout: seconds for the daemon's greeting.

        Raises:
            UnavailableError: no daemon answers, or `ryokand` is not installed or does not start.
        """
        runner = portal()
        opening = aio.Host.connect(socket, system=system, start=start, client=client, timeout=timeout)
        return Host(runner.run(opening.open()), runner)

    def close(self) -> None:
        """Ends the connection; its ephemeral kernels are removed."""
        self._run(self._host.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ping(self) -> datetime | None:
        """Asks the daemon for its time."""
        return self._run(self._host.ping())

    def abilities(self) -> list[types.Ability]:
        """What this host can do."""
        return self._run(self._host.abilities())

    def create(self, name: str | None = None, **options: Unpack[types.KernelOptions]) -> Kernel:
        """Creates a kernel; its worker starts at first use. Without a name it gets a random one.

        Raises:
            AlreadyExistsError: the name is taken.
            InvalidArgumentError, UnsupportedError, RefusedError: the options.
        """
        return Kernel(self._run(self._host.create(name, **options)), self._portal)

    def get(self, name: str) -> Kernel:
        """Opens a kernel by name or id.

        Raises:
            NotFoundError: there is none.
        """
        return Kernel(self._run(self._host.get(name)), self._portal)

    def list(
        self, *, prefix: str = "", labels: Mapping[str, str] | None = None, states: Collection[str] = ()
    ) -> list[types.KernelInfo]:
        """The kernels that match, in order of name."""
        return self._run(self._host.list(prefix=prefix, labels=labels, states=states))

    def remove(self, name: str, *, expected_version: int = 0, with_threads: bool = False) -> None:
        """Ends a kernel's worker and deletes its files, journal and checkpoints."""
        self._run(self._host.remove(name, expected_version=expected_version, with_threads=with_threads))

    def du(self, kernel: str = "") -> types.DiskUsage:
        """What takes room on the disk: of all kernels and the host, or of one kernel and its checkpoints."""
        return self._run(self._host.du(kernel))


class Kernel:
    """One kernel: a durable session that runs code."""

    def __init__(self, kernel: aio.Kernel, runner: Portal) -> None:
        self._kernel, self._portal = kernel, runner
        self.id, self.name, self.engine = kernel.id, kernel.name, kernel.engine
        self.files = Files(kernel.files, runner)
        """The files in the workspace."""
        self.commands = Commands(self)
        """Programs beside the engine."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} ({self.engine})>"

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._portal.run(work)

    # --- code

    def run_code(
        self,
        code: str,
        *,
        timeout: float | None = None,
        on_stdout: Taker | None = None,
        on_stderr: Taker | None = None,
        stdin: str | bytes = b"",
        env: Mapping[str, str] | None = None,
        output_limit: int = 0,
        key: str = "",
        expected_version: int = 0,
    ) -> types.Result:
        """Runs code and waits for its end. Code that fails is a result, not an exception.

        Ctrl-C, and an exception of a callback, interrupt the code. A lost connection does not.

        Args:
            code: a program in the kernel's language.
            timeout: seconds after which the code is interrupted; the status is then `timeout`.
            on_stdout, on_stderr: receive the output while the code runs, in this thread.
            stdin: the code's standard input.
            env: environment for this execution only.
            output_limit: bytes of output kept in the result and the journal; 0: 4 MiB; at most 48 MiB.
            key: idempotency key: the same key within 24 hours returns the same execution.
            expected_version: the kernel's version known to the caller; 0: any.
        """

        def work(out: aio.Taker | None, err: aio.Taker | None) -> Coroutine[Any, Any, types.Result]:
            return self._kernel.run_code(
                code,
                timeout=timeout,
                on_stdout=out,
                on_stderr=err,
                stdin=stdin,
                env=env,
                output_limit=output_limit,
                key=key,
                expected_version=expected_version,
            )

        return self._with_output(work, on_stdout, on_stderr)

    def submit(
        self,
        code: str,
        *,
        timeout: float | None = None,
        stdin: str | bytes = b"",
        env: Mapping[str, str] | None = None,
        output_limit: int = 0,
        key: str = "",
        expected_version: int = 0,
    ) -> int:
        """Starts code, which continues independently of this client; returns the execution's id.

        The execution is in the journal when this returns.
        """
        return self._run(
            self._kernel.submit(
                code,
                timeout=timeout,
                stdin=stdin,
                env=env,
                output_limit=output_limit,
                key=key,
                expected_version=expected_version,
            )
        )

    def wait(
        self, execution_id: int, *, on_stdout: Taker | None = None, on_stderr: Taker | None = None
    ) -> types.Result:
        """Waits for an execution's end, also of another client's; callbacks get its output from the start.

        Raises:
            NotFoundError: the kernel has no such execution.
        """
        return self._with_output(
            lambda out, err: self._kernel.wait(execution_id, on_stdout=out, on_stderr=err), on_stdout, on_stderr
        )

    def interrupt(self, execution_id: int | None = None) -> None:
        """Interrupts an execution; without an id, those of this object's `run_code` in other threads."""
        self._run(self._kernel.interrupt(execution_id))

    def _with_output(
        self, work: Callable[..., Coroutine[Any, Any, T]], on_stdout: Taker | None, on_stderr: Taker | None
    ) -> T:
        if on_stdout is None and on_stderr is None:
            return self._run(work(None, None))
        return self._portal.run_with_callbacks(work, [on_stdout, on_stderr])

    # --- variables

    def get_var(self, name: str) -> Any:
        """A variable's value; objects without a value form are an `Opaque`.

        Raises:
            NotFoundError: there is none.
        """
        return self._run(self._kernel.get_var(name))

    def set_var(self, name: str, value: Any, *, expected_version: int = 0) -> None:
        """Sets a variable to None, a bool, int, float, str, bytes, list or dict."""
        self._run(self._kernel.set_var(name, value, expected_version=expected_version))

    def list_vars(self) -> list[types.Variable]:
        """The variables with type and summary."""
        return self._run(self._kernel.list_vars())

    # --- history

    def checkpoint(
        self,
        name: str = "",
        *,
        description: str = "",
        pinned: bool = False,
        interrupt: bool = False,
        wait: float | None = None,
        expected_version: int = 0,
        kind: str = "",
    ) -> types.Checkpoint:
        """Captures engine state, files, mounts and MCP servers, after the running execution.

        Args:
            name, description: for people, and to find it again.
            pinned: exempt from retention.
            interrupt: interrupt the running execution instead of waiting for it.
            wait: seconds to wait for it; None: a minute.
            expected_version: the kernel's version known to the caller; 0: any.
            kind: `teleport`: also the memory of the kernel's virtual machine; empty: `checkpoint`.

        Raises:
            DeadlineError: the running execution did not end in time; nothing was done.
            UnsupportedError: its memory cannot be captured in this kind.
        """
        return self._run(
            self._kernel.checkpoint(
                name,
                description=description,
                pinned=pinned,
                interrupt=interrupt,
                wait=wait,
                expected_version=expected_version,
                kind=kind,
            )
        )

    def log(self, limit: int = 0) -> list[types.Checkpoint]:
        """The checkpoints, newest first; `limit` 0: all."""
        return self._run(self._kernel.log(limit))

    def diff(self, before: str = "latest", after: str = "") -> list[types.Difference]:
        """Differences from checkpoint `before` to checkpoint `after`; empty: the present state."""
        return self._run(self._kernel.diff(before, after))

    def restore(self, ref: str, *, expected_version: int = 0, kind: str = "") -> types.Restoration:
        """Brings files and engine state back to a checkpoint, all or nothing.

        `ref` is the beginning of an id, a name, `~N` (N before the newest) or `latest`. `kind`: `teleport`
        continues a virtual machine's memory, `checkpoint` leaves it out, `auto` does the first where this
        host can; empty: the checkpoint's own.
        """
        return self._run(self._kernel.restore(ref, expected_version=expected_version, kind=kind))

    def undo(self, *, expected_version: int = 0) -> types.Restoration:
        """Returns to the state before the last restore.

        Raises:
            NotFoundError: nothing was restored.
        """
        return self._run(self._kernel.undo(expected_version=expected_version))

    def fork(
        self,
        name: str,
        *,
        count: int = 1,
        ref: str = "",
        interrupt: bool = False,
        wait: float | None = None,
        key: str = "",
        expected_version: int = 0,
        isolation: str = "",
        image: str = "",
    ) -> list[Kernel]:
        """Creates kernels that start from this kernel's present state, or from checkpoint `ref`.

        Several are called `name-1`, `name-2` and so on. Each exists completely or not at all: if one
        fails, its error is raised, and the others exist. `isolation`: `process` or `microvm`; empty:
        that of this kernel.
        """
        forks = self._kernel.fork(
            name,
            count=count,
            ref=ref,
            interrupt=interrupt,
            wait=wait,
            key=key,
            expected_version=expected_version,
            isolation=isolation,
            image=image,
        )
        return [Kernel(kernel, self._portal) for kernel in self._run(forks)]

    def journal(self, since: int = 0, limit: int = 0) -> list[types.JournalEntry]:
        """The history after sequence number `since`, oldest first; `limit` 0: all."""
        return self._run(self._kernel.journal(since, limit))

    def message(self, role: str, text: str, *, key: str = "", expected_version: int = 0) -> int:
        """Adds a message of an agent or a person to the journal; returns its sequence number."""
        return self._run(self._kernel.message(role, text, key=key, expected_version=expected_version))

    # --- the kernel itself

    def info(self) -> types.KernelInfo:
        """The kernel's present state."""
        return self._run(self._kernel.info())

    def start(self) -> None:
        """Starts the worker now."""
        self._run(self._kernel.start())

    def stop(self, *, force: bool = False) -> None:
        """Ends the worker and keeps the state; `force` interrupts the running execution."""
        self._run(self._kernel.stop(force=force))

    def remove(self, *, expected_version: int = 0, with_threads: bool = False) -> None:
        """Removes the kernel with its files, journal and checkpoints."""
        self._run(self._kernel.remove(expected_version=expected_version, with_threads=with_threads))

    def mount(self, path: str, source: str, *, writable: bool = False, expected_version: int = 0) -> None:
        """Makes the host's directory or file `source` visible inside at `path`."""
        self._run(self._kernel.mount(path, source, writable=writable, expected_version=expected_version))

    def unmount(self, path: str, *, expected_version: int = 0) -> None:
        """Removes a mount."""
        self._run(self._kernel.unmount(path, expected_version=expected_version))

    def mounts(self) -> list[types.Mount]:
        """The mounts."""
        return self._run(self._kernel.mounts())

    def forward(self, port: int, *, listen: str = "") -> Forward:
        """Opens a TCP port of a kernel without network on a local socket, while its worker lives.

        `with kernel.forward(8000) as forward` closes it. `listen` is `unix:PATH` or a loopback address
        such as `127.0.0.1:0`, to which every user of this host can connect; by default a Unix socket in
        a new directory of this user.

        Raises:
            ConflictError: the kernel has no worker.
            UnsupportedError: the kernel uses the host's network.
        """
        return Forward(self._run(self._kernel.forward(port, listen=listen).open()), self._portal)

    def attenuate(self, rights: Collection[str], label: str) -> Kernel:
        """The same kernel with at most these rights; `label` names the holder in the journal.

        Rights: `read`, `execute`, `write`, `checkpoint`, `restore`, `fork`, `teleport`, `admin`.
        """
        return Kernel(self._run(self._kernel.attenuate(rights, label)), self._portal)


class Files:
    """The files in a kernel's workspace, whether the kernel runs or not.

    Errors say why in `reason`: `not_found`, `is_directory`, `not_directory`, `not_regular`,
    `permission`, `too_large`, `outside`, `exists`, `not_empty`, `mount`.
    """

    def __init__(self, files: aio.Files, runner: Portal) -> None:
        self._files, self._portal = files, runner

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._portal.run(work)

    @overload
    def read(self, path: Path, format: Literal["text"] = "text", *, limit: int = READ_BYTES) -> str: ...

    @overload
    def read(self, path: Path, format: Literal["bytes"], *, limit: int = READ_BYTES) -> bytes: ...

    def read(self, path: Path, format: Literal["text", "bytes"] = "text", *, limit: int = READ_BYTES) -> str | bytes:
        """Reads a file of at most `limit` bytes."""
        if format == "bytes":
            return self._run(self._files.read(path, "bytes", limit=limit))
        return self._run(self._files.read(path, limit=limit))

    def write(self, path: Path, data: str | bytes, *, expected_version: int = 0) -> types.FileInfo:
        """Creates or replaces a file, and the directories on the way; it appears complete."""
        return self._run(self._files.write(path, data, expected_version=expected_version))

    def list(self, path: Path = WORKSPACE) -> builtins.list[types.FileInfo]:
        """The entries of a directory, in order of name."""
        return self._run(self._files.list(path))

    def stat(self, path: Path, *, follow: bool = True) -> types.FileInfo:
        """A file's attributes; with `follow`, of what a link leads to."""
        return self._run(self._files.stat(path, follow=follow))

    def exists(self, path: Path) -> bool:
        """Whether there is something at this path."""
        return self._run(self._files.exists(path))

    def make_dir(self, path: Path, *, mode: int = 0o755, expected_version: int = 0) -> None:
        """Makes a directory and those on the way; an existing one is no error."""
        self._run(self._files.make_dir(path, mode=mode, expected_version=expected_version))

    def rename(self, path: Path, new_path: Path, *, replace: bool = False, expected_version: int = 0) -> None:
        """Renames a file or directory."""
        self._run(self._files.rename(path, new_path, replace=replace, expected_version=expected_version))

    def remove(self, path: Path, *, recursive: bool = False, expected_version: int = 0) -> None:
        """Removes a file or an empty directory; with `recursive`, also a directory's content."""
        self._run(self._files.remove(path, recursive=recursive, expected_version=expected_version))


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

    def closed(self) -> None:
        """Returns when the port is closed, also by the end of the kernel's worker."""
        self._portal.run(self._forward.closed())

    def close(self) -> None:
        """Closes the port and its connections."""
        self._portal.run(self._forward.close())


class Commands:
    """Programs beside the engine, in its sandbox and limits, also while code runs."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel, self._commands = kernel, kernel._kernel.commands

    def run(
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

        The exit code is the program's, or 128 and the number of the signal that ended it. Ctrl-C, an
        exception of a callback and a lost connection end it with all that it started.

        Args:
            command: a text for `sh -c`, or a list: the program and its arguments.
            cwd: the working directory; empty: `/workspace`.
            env: variables beside those of every engine.
            stdin: its standard input.
            timeout: seconds after which it is killed; the status is then `timeout`.
            on_stdout, on_stderr: receive the output while it runs, in this thread.
            output_limit: bytes of output kept in the result and the journal; 0: the default.
        """

        def work(out: aio.Taker | None, err: aio.Taker | None) -> Coroutine[Any, Any, types.Result]:
            return self._commands.run(
                command,
                cwd=cwd,
                env=env,
                stdin=stdin,
                timeout=timeout,
                on_stdout=out,
                on_stderr=err,
                output_limit=output_limit,
            )

        return self._kernel._with_output(work, on_stdout, on_stderr)

    def list(self) -> builtins.list[types.Process]:
        """The programs that run."""
        return self._kernel._run(self._commands.list())

    def kill(self, execution_id: int) -> None:
        """Ends a program with all that it started.

        Raises:
            NotFoundError: there is no such execution.
        """
        self._kernel._run(self._commands.kill(execution_id))

    def send_signal(self, execution_id: int, signal: int = signals.SIGTERM) -> None:
        """Sends a signal to the program, not to what it started."""
        self._kernel._run(self._commands.send_signal(execution_id, signal))


class Sandbox(Kernel):
    """A kernel with a connection of its own, under the names of E2B's SDK.

    `with Sandbox.create() as sandbox` kills it at the end; after `connect`, `with` only disconnects.
    """

    def __init__(self, sandbox: aio.Sandbox, runner: Portal, kills: bool) -> None:
        super().__init__(sandbox, runner)
        self._sandbox, self._kills = sandbox, kills
        self.sandbox_id = sandbox.sandbox_id

    @classmethod
    def create(cls, name: str | None = None, **options: Unpack[types.KernelOptions]) -> Self:
        """Creates a kernel on the daemon of this user; the engine is `python` unless named."""
        runner = portal()
        return cls(runner.run(aio.Sandbox.create(name, **options).open()), runner, True)

    @classmethod
    def connect(cls, sandbox_id: str) -> Self:
        """Opens a kernel by id or name on the daemon of this user."""
        runner = portal()
        return cls(runner.run(aio.Sandbox.connect(sandbox_id).open()), runner, False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._kills:
            self.kill()
        else:
            self.close()

    def is_running(self) -> bool:
        """Whether the sandbox exists; one without a worker starts it at its next use."""
        return self._run(self._sandbox.is_running())

    def get_info(self) -> types.KernelInfo:
        """The same as `info`."""
        return self.info()

    def kill(self) -> None:
        """Removes the kernel and ends the connection."""
        self._run(self._sandbox.kill())

    def close(self) -> None:
        """Ends the connection; the kernel stays."""
        self._run(self._sandbox.close())
