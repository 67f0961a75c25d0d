"""The asynchronous face: the names of `ryokan` as coroutines, for asyncio.

Use each object in the event loop in which it was made.
"""

from __future__ import annotations

import codecs
import uuid
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from . import _connection, _daemon, _wire, types
from ._commands import Commands
from ._connection import Capability, Connection
from ._files import Files
from ._forward import Forward, forward
from ._version import __version__
from ._wire import schema
from .errors import AFTER_A_LOSS, InvalidArgumentError, RyokanError, UnavailableError

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

__all__ = ["Files", "Forward", "Host", "Kernel", "Sandbox"]

Taker = Callable[[str], "Awaitable[None] | None"]
"""Receives pieces of output; a coroutine function is awaited, and slows the code."""

CLIENT = f"ryokan-python {__version__}"
HELLO = 10.0
# Engines whose code can emit displays, which only the stream of output has.
_PLAIN_ENGINES = ("kaish", "bash")

T = TypeVar("T")


class _Opening(Awaitable[T]):
    """`await` it for an open object, or use it with `async with`, which closes the object."""

    def __init__(self, opening: Callable[[], Awaitable[T]], closing: Callable[[T], Awaitable[None]]) -> None:
        self._opening, self._closing = opening, closing

    async def open(self) -> T:
        return await self._opening()

    def __await__(self) -> Generator[Any, Any, T]:
        return self.open().__await__()

    async def __aenter__(self) -> T:
        self._opened = await self.open()
        return self._opened

    async def __aexit__(self, *_: object) -> None:
        await self._closing(self._opened)


class Host:
    """A connection to a daemon."""

    def __init__(self, connection: Connection, capability: Capability, info: types.HostInfo) -> None:
        self._connection, self._cap = connection, capability
        self.info = info
        """The host's answer to the greeting."""

    @staticmethod
    def connect(
        socket: str | Path | None = None,
        *,
        system: bool = False,
        start: bool = True,
        client: str = CLIENT,
        timeout: float = HELLO,
    ) -> _Opening[Host]:
        """Connects to the daemon of this user, and starts `ryokand` if none answers.

        `await Host.connect()`, or `async with Host.connect() as host`.

        Args:
            socket: another daemon's socket; none is started.
            system: the host's daemon; none is started.
            start: whether to start a daemon.
            client: this program's name in journals and the audit log.
            timeout: seconds for the daemon's greeting.

        Raises:
            UnavailableError: no daemon answers, or `ryokand` is not installed or does not start.
        """

        async def opening() -> Host:
            path = Path(socket) if socket is not None else _daemon.default_socket(system)
            may_start = start and socket is None and not system
            connection = await Connection.open(path, may_start, timeout)
            try:
                capability = Capability(connection, connection.link.host)
                answer = await connection.call(capability, "hello", schema.wireVersion, client, deadline=timeout)
                return Host(connection, capability, _wire.host_info(answer.host))
            except BaseException:
                await connection.close()
                raise

        return _Opening(opening, Host.close)

    async def close(self) -> None:
        """Ends the connection; its ephemeral kernels are removed."""
        await self._connection.close()

    async def ping(self) -> datetime | None:
        """Asks the daemon for its time."""
        answer = await self._connection.call(self._cap, "ping")
        return _wire.time(answer.serverTimeMs)

    async def abilities(self) -> list[types.Ability]:
        """What this host can do."""
        answer = await self._connection.call(self._cap, "abilities")
        return [_wire.ability(item) for item in answer.abilities]

    async def create(self, name: str | None = None, **options: Unpack[types.KernelOptions]) -> Kernel:
        """Creates a kernel; its worker starts at first use. Without a name it gets a random one.

        Raises:
            AlreadyExistsError: the name is taken.
            InvalidArgumentError, UnsupportedError, RefusedError: the options.
        """
        spec = _wire.spec_to_wire(name or f"py-{uuid.uuid4().hex[:12]}", options)
        # Copying `from_dir` has no bound on its duration.
        answer = await self._connection.call(self._cap, "createKernel", spec, options.get("key") or "", deadline=None)
        return Kernel(self._connection, answer.kernel, _wire.kernel_info(answer.info))

    async def get(self, name: str) -> Kernel:
        """Opens a kernel by name or id.

        Raises:
            NotFoundError: there is none.
        """
        answer = await self._connection.call(self._cap, "openKernel", name)
        return Kernel(self._connection, answer.kernel, _wire.kernel_info(answer.info))

    async def list(
        self, *, prefix: str = "", labels: Mapping[str, str] | None = None, states: Collection[str] = ()
    ) -> list[types.KernelInfo]:
        """The kernels that match, in order of name."""
        query = {"prefix": prefix, "labels": _wire.pairs(labels or {}), "states": [*states]}
        return await self._connection.collect(
            self._cap, "listKernels", query, sink=_connection.KernelInfos, convert=_wire.kernel_info
        )

    async def remove(self, name: str, *, expected_version: int = 0, with_threads: bool = False) -> None:
        """Ends a kernel's worker and deletes its files, journal and checkpoints."""
        await self._connection.call(self._cap, "removeKernel", name, expected_version, with_threads, deadline=None)

    async def du(self, kernel: str = "") -> types.DiskUsage:
        """What takes room on the disk: of all kernels and the host, or of one kernel and its checkpoints."""
        answer = await self._connection.call(self._cap, "diskUsage", kernel, deadline=None)
        return _wire.disk_usage(answer.usage)


class Kernel:
    """One kernel: a durable session that runs code."""

    def __init__(self, connection: Connection, capability: Any, info: types.KernelInfo) -> None:
        self._connection = connection
        self._cap = Capability(connection, capability)
        self._running: set[int] = set()
        self.id, self.name, self.engine = info.id, info.name, info.engine
        self.files = Files(connection, self._cap)
        """The files in the workspace."""
        self.commands = Commands(self)
        """Programs beside the engine."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} ({self.engine})>"

    async def _call(self, method: str, *args: Any, deadline: float | None = _connection.CALL) -> Any:
        return await self._connection.call(self._cap, method, *args, deadline=deadline)

    # --- code

    async def run_code(
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

        Cancelling this call, and an exception of a callback, interrupt the code. A lost connection
        does not.

        Args:
            code: a program in the kernel's language.
            timeout: seconds after which the code is interrupted; the status is then `timeout`.
            on_stdout, on_stderr: receive the output while the code runs.
            stdin: the code's standard input.
            env: environment for this execution only.
            output_limit: bytes of output kept in the result and the journal; 0: 4 MiB; at most 48 MiB.
            key: idempotency key: the same key within 24 hours returns the same execution.
            expected_version: the kernel's version known to the caller; 0: any.
        """
        request = _request(code, timeout, stdin, env, output_limit, key, expected_version)
        started = self._connection.send(self._cap, "run", request)
        execution = Capability(self._connection, started.execution)
        # Sent before the first answer: one round trip.
        following = self._follow(execution, on_stdout, on_stderr)
        try:
            number = (await self._connection.answer(started)).execId
            self._running.add(number)
            try:
                return await following.result()
            finally:
                self._running.discard(number)
        except RyokanError:
            raise
        except BaseException:
            self._abandon(execution)
            raise

    async def submit(
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
        request = _request(code, timeout, stdin, env, output_limit, key, expected_version)
        return int((await self._call("run", request)).execId)

    async def wait(
        self, execution_id: int, *, on_stdout: Taker | None = None, on_stderr: Taker | None = None
    ) -> types.Result:
        """Waits for an execution's end, also of another client's; callbacks get its output from the start.

        Raises:
            NotFoundError: the kernel has no such execution.
        """
        answer = await self._call("execution", execution_id)
        execution = Capability(self._connection, answer.execution)
        return await self._follow(execution, on_stdout, on_stderr).result()

    async def interrupt(self, execution_id: int | None = None) -> None:
        """Interrupts an execution; without an id, those of this object's `run_code`."""
        for number in [*self._running] if execution_id is None else [execution_id]:
            await self._call("interrupt", number)

    def _follow(self, execution: Capability, on_stdout: Taker | None, on_stderr: Taker | None) -> _Following:
        streams = on_stdout or on_stderr or self.engine not in _PLAIN_ENGINES
        return _Following(self._connection, execution, _Output(on_stdout, on_stderr) if streams else None)

    def _abandon(self, execution: Capability) -> None:
        """Interrupts an execution, without waiting for it."""
        with suppress(Exception):
            self._connection.link.in_background(self._connection.call(execution, "cancel"))

    # --- variables

    async def get_var(self, name: str) -> Any:
        """A variable's value; objects without a value form are an `Opaque`.

        Raises:
            NotFoundError: there is none.
        """
        return _wire.value_from_wire((await self._call("getVar", name)).value)

    async def set_var(self, name: str, value: Any, *, expected_version: int = 0) -> None:
        """Sets a variable to None, a bool, int, float, str, bytes, list or dict."""
        await self._call("setVar", name, _wire.value_to_wire(value), expected_version)

    async def list_vars(self) -> list[types.Variable]:
        """The variables with type and summary."""
        return [_wire.variable(item) for item in (await self._call("describeVars")).vars]

    # --- history

    async def checkpoint(
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
        request = {
            "name": name,
            "description": description,
            "pinned": pinned,
            "interrupt": interrupt,
            "waitMs": _wire.milliseconds(wait, "wait"),
            "expectedVersion": expected_version,
            "kind": kind,
        }
        return _wire.checkpoint((await self._call("checkpoint", request, deadline=None)).checkpoint)

    async def log(self, limit: int = 0) -> list[types.Checkpoint]:
        """The checkpoints, newest first; `limit` 0: all."""
        return await self._connection.collect(
            self._cap, "checkpoints", limit, sink=_connection.Checkpoints, convert=_wire.checkpoint
        )

    async def diff(self, before: str = "latest", after: str = "") -> list[types.Difference]:
        """Differences from checkpoint `before` to checkpoint `after`; empty: the present state."""
        return await self._connection.collect(
            self._cap, "diff", before, after, sink=_connection.Differences, convert=_wire.difference
        )

    async def restore(self, ref: str, *, expected_version: int = 0, kind: str = "") -> types.Restoration:
        """Brings files and engine state back to a checkpoint, all or nothing.

        `ref` is the beginning of an id, a name, `~N` (N before the newest) or `latest`. `kind`: `teleport`
        continues a virtual machine's memory, `checkpoint` leaves it out, `auto` does the first where this
        host can; empty: the checkpoint's own.
        """
        answer = await self._call("restoreCheckpoint", ref, expected_version, False, False, kind, deadline=None)
        return _wire.restoration(answer.restoration)

    async def undo(self, *, expected_version: int = 0) -> types.Restoration:
        """Returns to the state before the last restore.

        Raises:
            NotFoundError: nothing was restored.
        """
        return _wire.restoration((await self._call("undo", expected_version, deadline=None)).restoration)

    async def fork(
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
        request = {
            "name": name,
            "from": ref,
            "count": count,
            "interrupt": interrupt,
            "waitMs": _wire.milliseconds(wait, "wait"),
            "key": key,
            "expectedVersion": expected_version,
            "isolation": isolation,
            "image": image,
        }
        answer = await self._call("fork", request, deadline=None)
        kernels = []
        for child in answer.children:
            if child.which() == "failed":
                raise _wire.error(child.failed)
            kernels.append(Kernel(self._connection, child.forked.kernel, _wire.kernel_info(child.forked.info)))
        return kernels

    async def journal(self, since: int = 0, limit: int = 0) -> list[types.JournalEntry]:
        """The history after sequence number `since`, oldest first; `limit` 0: all."""
        return await self._connection.collect(
            self._cap, "journal", since, limit, sink=_connection.Journal, convert=_wire.journal_entry
        )

    async def message(self, role: str, text: str, *, key: str = "", expected_version: int = 0) -> int:
        """Adds a message of an agent or a person to the journal; returns its sequence number."""
        return int((await self._call("message", role, text, key, expected_version)).sequence)

    # --- the kernel itself

    async def info(self) -> types.KernelInfo:
        """The kernel's present state."""
        return _wire.kernel_info((await self._call("info")).info)

    async def start(self) -> None:
        """Starts the worker now."""
        await self._call("start", deadline=None)

    async def stop(self, *, force: bool = False) -> None:
        """Ends the worker and keeps the state; `force` interrupts the running execution."""
        await self._call("stop", force, deadline=None)

    async def remove(self, *, expected_version: int = 0, with_threads: bool = False) -> None:
        """Removes the kernel with its files, journal and checkpoints."""
        await self._call("remove", expected_version, with_threads, deadline=None)

    async def mount(self, path: str, source: str, *, writable: bool = False, expected_version: int = 0) -> None:
        """Makes the host's directory or file `source` visible inside at `path`."""
        await self._call("mount", path, source, writable, expected_version)

    async def unmount(self, path: str, *, expected_version: int = 0) -> None:
        """Removes a mount."""
        await self._call("unmount", path, expected_version)

    async def mounts(self) -> list[types.Mount]:
        """The mounts."""
        return [_wire.mount(item) for item in (await self._call("listMounts")).mounts]

    def forward(self, port: int, *, listen: str = "") -> _Opening[Forward]:
        """Opens a TCP port of a kernel without network on a local socket, while its worker lives.

        `await kernel.forward(8000)`, or `async with kernel.forward(8000) as forward`. `listen` is
        `unix:PATH` or a loopback address such as `127.0.0.1:0`, to which every user of this host can
        connect; by default a Unix socket in a new directory of this user.

        Raises:
            ConflictError: the kernel has no worker.
            UnsupportedError: the kernel uses the host's network.
        """
        return _Opening(lambda: forward(self._connection, self._cap, port, listen), Forward.close)

    async def attenuate(self, rights: Collection[str], label: str) -> Kernel:
        """The same kernel with at most these rights; `label` names the holder in the journal.

        Rights: `read`, `execute`, `write`, `checkpoint`, `restore`, `fork`, `teleport`, `admin`.
        """
        answer = await self._call("attenuate", [*rights], label)
        info = await self.info()
        return Kernel(self._connection, answer.kernel, info)


class Sandbox(Kernel):
    """A kernel with a connection of its own, under the names of E2B's SDK."""

    def __init__(self, host: Host, connection: Connection, capability: Any, info: types.KernelInfo) -> None:
        super().__init__(connection, capability, info)
        self._host = host
        self.sandbox_id = info.id

    @classmethod
    def create(cls, name: str | None = None, **options: Unpack[types.KernelOptions]) -> _Opening[Self]:
        """Creates a kernel on the daemon of this user; the engine is `python` unless named.

        `await Sandbox.create()`, or `async with Sandbox.create() as sandbox`, which kills it.
        """
        options.setdefault("engine", "python")
        return _Opening(lambda: cls._open(lambda host: host.create(name, **options)), cls.kill)

    @classmethod
    def connect(cls, sandbox_id: str) -> _Opening[Self]:
        """Opens a kernel by id or name on the daemon of this user; `async with` only disconnects."""
        return _Opening(lambda: cls._open(lambda host: host.get(sandbox_id)), cls.close)

    @classmethod
    async def _open(cls, opened: Callable[[Host], Awaitable[Kernel]]) -> Self:
        host = await Host.connect()
        try:
            kernel = await opened(host)
            capability = host._connection.link.capabilities[kernel._cap.key]
            return cls(host, host._connection, capability, await kernel.info())
        except BaseException:
            await host.close()
            raise

    async def is_running(self) -> bool:
        """Whether the sandbox exists; one without a worker starts it at its next use."""
        return any(info.id == self.id for info in await self._host.list(prefix=self.name))

    async def get_info(self) -> types.KernelInfo:
        """The same as `info`."""
        return await self.info()

    async def kill(self) -> None:
        """Removes the kernel and ends the connection."""
        try:
            await self.remove(with_threads=True)
        finally:
            await self.close()

    async def close(self) -> None:
        """Ends the connection; the kernel stays."""
        await self._host.close()


class _Following:
    """The result of an execution and, on the way, its output."""

    def __init__(self, connection: Connection, execution: Capability, output: _Output | None) -> None:
        self._connection, self._output = connection, output
        self._result = connection.send(execution, "result")
        if output is not None:
            sink = _connection.Output(output.take)
            self._released = sink.released
            self._delivered = connection.send(execution, "output", 0, sink)

    async def result(self) -> types.Result:
        output = self._output
        if output is not None:
            try:
                await self._connection.answer(self._delivered, None)
                await self._connection.released(self._released)
            except RyokanError:
                # The exception of a callback ends the delivery.
                if output.error is None:
                    raise
            if output.error is not None:
                raise output.error
            if not output.ended:
                raise UnavailableError("not all output arrived", AFTER_A_LOSS)
            await output.end()
        answer = await self._connection.answer(self._result, None)
        return _wire.result(answer.result, output.displays if output is not None else [])


class _Output:
    """Distributes output events: text to callbacks, displays to a list."""

    def __init__(self, on_stdout: Taker | None, on_stderr: Taker | None) -> None:
        self.takers = {"stdout": on_stdout, "stderr": on_stderr}
        decoder = codecs.getincrementaldecoder("utf-8")
        self.decoders = {name: decoder("replace") for name in self.takers}
        self.displays: list[types.Display] = []
        self.ended = False
        self.error: BaseException | None = None

    async def take(self, event: Any) -> None:
        kind = event.which()
        if kind == "display":
            self.displays.append(types.Display(event.display.mime, bytes(event.display.data)))
        elif kind == "exitCode":
            self.ended = True
        elif kind in self.takers:
            await self._give(kind, bytes(getattr(event, kind)), False)

    async def end(self) -> None:
        """Passes on an incomplete character at the end."""
        for kind in self.takers:
            await self._give(kind, b"", True)

    async def _give(self, kind: str, data: bytes, end: bool) -> None:
        taker = self.takers[kind]
        if taker is None or self.error is not None:
            return
        text = self.decoders[kind].decode(data, end)
        if not text:
            return
        try:
            taken = taker(text)
            if taken is not None:
                await taken
        except BaseException as error:
            self.error = error
            raise


def _request(
    code: str,
    timeout: float | None,
    stdin: str | bytes,
    env: Mapping[str, str] | None,
    output_limit: int,
    key: str,
    expected_version: int,
) -> dict[str, Any]:
    if not isinstance(code, str):
        raise InvalidArgumentError(f"code is a str, not {type(code).__name__}")
    return {
        "code": code,
        "stdin": stdin.encode() if isinstance(stdin, str) else bytes(stdin),
        "env": _wire.pairs(env or {}),
        "timeoutMs": _wire.milliseconds(timeout, "timeout"),
        "outputLimitBytes": output_limit,
        "key": key,
        "expectedVersion": expected_version,
    }
