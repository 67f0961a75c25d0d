"""Kernels, asynchronously."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path as LocalPath
from typing import TYPE_CHECKING, Any

from . import _bundles, _connection, _files, _moves, _take, _wire, types
from ._commands import Commands, Pty
from ._connection import Capability, Connection
from ._events import Events
from ._execution import Following, Output, Taker, request
from ._files import Files
from ._forward import Forward, forward
from ._moves import ProgressTaker
from ._opening import Opening
from ._wire import schema
from .errors import RyokanError

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Engines whose code can emit displays, which only the stream of output has.
_PLAIN_ENGINES = ("kaish", "bash")


class Kernel:
    """One kernel: a durable session that runs code."""

    def __init__(self, connection: Connection, capability: Any, info: types.KernelInfo) -> None:
        self._connection = connection
        self._cap = Capability(connection, capability)
        self._running: set[int] = set()
        self._env: Mapping[str, str] = {}
        """Environment of all code and programs that this object runs."""
        self.id, self.name, self.engine = info.id, info.name, info.engine
        self._info = info
        self.files = Files(connection, self._cap)
        """The files in the workspace."""
        self.commands = Commands(self)
        """Programs beside the engine."""
        self.pty = Pty(self)
        """Programs on terminals."""

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
        envs: Mapping[str, str] | None = None,
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
            env: environment for this execution only; `envs` is E2B's name of it.
            output_limit: bytes of output kept in the result and the journal; 0: 4 MiB; at most 48 MiB.
            key: idempotency key: the same key within 24 hours returns the same execution.
            expected_version: the kernel's version known to the caller; 0: any.
        """
        given = {**self._env, **(env or {}), **(envs or {})}
        asked = request(code, timeout, stdin, given, output_limit, key, expected_version)
        started = self._connection.send(self._cap, "run", asked)
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
        asked = request(code, timeout, stdin, {**self._env, **(env or {})}, output_limit, key, expected_version)
        return int((await self._call("run", asked)).execId)

    async def wait(
        self,
        execution_id: int,
        *,
        offset: int = 0,
        on_stdout: Taker | None = None,
        on_stderr: Taker | None = None,
    ) -> types.Result:
        """Waits for an execution's end, also of another client's.

        Callbacks get its output from byte `offset` on, of both streams together; the result has all
        that is kept.

        Raises:
            NotFoundError: the kernel has no such execution.
        """
        answer = await self._call("execution", execution_id)
        execution = Capability(self._connection, answer.execution)
        return await self._follow(execution, on_stdout, on_stderr, offset).result()

    async def interrupt(self, execution_id: int | None = None) -> None:
        """Interrupts an execution; without an id, those of this object's `run_code`."""
        for number in [*self._running] if execution_id is None else [execution_id]:
            await self._call("interrupt", number)

    def _follow(
        self, execution: Capability, on_stdout: Taker | None, on_stderr: Taker | None, offset: int = 0
    ) -> Following:
        streams = on_stdout or on_stderr or self.engine not in _PLAIN_ENGINES
        output = Output(on_stdout, on_stderr, offset=offset) if streams else None
        return Following(self._connection, execution, output)

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

    async def missed(self) -> list[types.Missed]:
        """Values that the kernel holds now and its saved state does not, and why."""
        return [_wire.missed(item) for item in (await self._call("missed")).missed]

    async def jobs(self) -> list[types.Job]:
        """Jobs of the engine and programs beside it that run in the background."""
        return [_wire.job(item) for item in (await self._call("jobs")).jobs]

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
        asked = {
            "name": name,
            "description": description,
            "pinned": pinned,
            "interrupt": interrupt,
            "waitMs": _wire.milliseconds(wait, "wait"),
            "expectedVersion": expected_version,
            "kind": kind,
        }
        return _wire.checkpoint((await self._call("checkpoint", asked, deadline=None)).checkpoint)

    async def log(self, limit: int = 0) -> list[types.Checkpoint]:
        """The checkpoints, newest first; `limit` 0: all."""
        return await self._connection.collect(
            self._cap, "checkpoints", limit, sink=_connection.Checkpoints, convert=_wire.checkpoint
        )

    async def find_checkpoint(self, ref: str) -> types.Checkpoint:
        """The checkpoint of a `ref`, as `restore` takes it.

        Raises:
            NotFoundError: there is none.
            ConflictError: there are several.
        """
        return _wire.checkpoint((await self._call("findCheckpoint", ref)).checkpoint)

    async def pin(self, ref: str) -> None:
        """Exempts a checkpoint from retention."""
        await self._call("pinCheckpoint", ref, True)

    async def unpin(self, ref: str) -> None:
        """Lets retention remove a checkpoint again."""
        await self._call("pinCheckpoint", ref, False)

    async def remove_checkpoint(self, ref: str, *, expected_version: int = 0) -> types.Checkpoint:
        """Removes a checkpoint, for good.

        Raises:
            ConflictError: it is the kernel's current one, or `undo` needs it.
        """
        return _wire.checkpoint((await self._call("removeCheckpoint", ref, expected_version, deadline=None)).checkpoint)

    async def diff(
        self, before: str = "latest", after: str = "", *, other: Kernel | None = None
    ) -> list[types.Difference]:
        """Differences from checkpoint `before` to checkpoint `after`; empty: the present state.

        With `other`, a kernel of the same connection, `after` is of that kernel, and an empty `before`
        the present state of this one.
        """
        return await self._connection.collect(
            self._cap,
            "diff",
            before,
            after,
            sink=_connection.Differences,
            convert=_wire.difference,
            after=self._with(other),
        )

    async def diff_text(
        self,
        before: str = "latest",
        after: str = "",
        *,
        paths: Iterable[_files.Path] = (),
        other: Kernel | None = None,
    ) -> list[types.Patch]:
        """Differences in files as unified diffs; otherwise as `diff`.

        `paths` restricts them to these paths and everything beneath them.
        """
        chosen = [_files.encoded(path) for path in paths]
        parts = await self._connection.collect(
            self._cap,
            "diffText",
            before,
            after,
            chosen,
            sink=_connection.Patches,
            convert=_wire.patch_part,
            after=self._with(other),
        )
        return _wire.patches(parts)

    def _with(self, other: Kernel | None) -> Sequence[Any]:
        return () if other is None else (self._connection.named(other._cap),)

    async def preview(self, ref: str) -> types.Preview:
        """What a restore to a checkpoint would change, end and lose. It changes nothing."""
        found = await self.find_checkpoint(ref)
        since = await self.diff(found.id)
        return _wire.preview(found, since, await self.jobs(), await self.missed())

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

    async def fork(self, name: str, **options: Unpack[types.ForkOptions]) -> list[Kernel]:
        """Creates kernels that start from this kernel's present state, or from checkpoint `ref`.

        Several (`count`) are called `name-1`, `name-2` and so on. Each exists completely or not at
        all: if one fails, its error is raised, and the others exist. `Host.fork` also changes their
        limits, network and paths.

        Args:
            name: the child's name.
            options: see `types.ForkOptions`.
        """
        _wire.known(options, types.ForkOptions, "a fork")
        return forked(self._connection, await self._call("fork", _wire.fork_to_wire(name, options), deadline=None))

    async def take(self, fork: Kernel, *, paths: Iterable[_files.Path] = (), force: bool = False) -> types.Taken:
        """Does to this kernel's files what a fork has done to its own since it was forked from this one.

        A checkpoint is taken first; `restore` of it undoes the whole. Variables stay as they are. If this
        fails on the way, that checkpoint is the newest, and a part may have been taken.

        Args:
            fork: a fork of this kernel, of the same connection.
            paths: only these files and directories; none: all.
            force: also take files that this kernel has changed, too.

        Raises:
            ConflictError: both changed a file; nothing was done.
            NotFoundError: neither kernel has a path, or the fork point was removed.
        """
        return await _take.take(self, fork, paths, force)

    async def thread(self, name: str, *, engine: str = "", key: str = "") -> Kernel:
        """Creates a kernel with an engine and variables of its own in this kernel's workspace."""
        answer = await self._call("thread", name, engine, key, deadline=None)
        return Kernel(self._connection, answer.kernel, _wire.kernel_info(answer.info))

    async def export(self, path: str | LocalPath, *, refs: Iterable[str] = ()) -> types.Bundle:
        """Writes the kernel and these checkpoints into a new file, for `Host.import_` on any host.

        Without `refs`: all checkpoints, and a new one of the present state.

        Raises:
            FileExistsError: the file exists.
        """
        return await _bundles.export(self._connection, self._cap, path, refs)

    async def teleport(
        self,
        to: str,
        *,
        allow_missing: bool | Sequence[str] = False,
        kind: str = "",
        limit_rate: int = 0,
        isolation: str = "",
        since: str = "",
        key: str = "",
        on_progress: ProgressTaker | None = None,
    ) -> types.TeleportReport:
        """Moves the kernel to another host; returns when it lives there. This object is of no use then.

        Before the commit, a failure, a cancelled call or an exception of the callback leaves the kernel here.

        Args:
            to: `ssh://[USER@]HOST[:PORT]`, or `exec:COMMAND`: a shell command whose standard streams lead
                to the other daemon. The daemon of this user runs it.
            allow_missing: move without paths of the host, network, MCP servers and processes; otherwise
                they refuse the move. Or names of what may be missing: `paths`,
                `venv`, `network`, `layers`, `mounts`, `mcp`, `processes`.
            kind: `checkpoint`, `teleport` with a virtual machine's memory, or `auto`.
            limit_rate: bytes a second while the kernel runs; 0: no limit.
            isolation: of the kernel on the other host, `process` or `microvm`; empty: as here.
            since: a checkpoint; older ones stay behind and end with this host's record. Empty: all move.
            key: idempotency key, valid for 24 hours: a repeated call returns the report of the first move.
            on_progress: receives how far the move is.

        Raises:
            RefusedError: what it cannot move without, or this object lacks the right `teleport`.
            UnsupportedError: the other host cannot take it.
        """
        _moves.permitted(await self.info())
        is_all = allow_missing is True
        named = [] if isinstance(allow_missing, bool) else list(allow_missing)
        options = (is_all, kind, limit_rate, isolation, since, key, 0, named)
        return await _moves.teleport(self._connection, self.id, to, options, on_progress)

    async def abort_teleport(self) -> None:
        """Ends a move of this kernel, also of another client.

        Raises:
            ConflictError: it is committed.
            NotFoundError: the kernel does not move.
        """
        _moves.permitted(await self.info())
        await self._connection.call(_moves.host(self._connection), "abortTeleport", self.id)

    async def journal(self, since: int = 0, limit: int = 0) -> list[types.JournalEntry]:
        """The history after sequence number `since`, oldest first; `limit` 0: all."""
        return await self._connection.collect(
            self._cap, "journal", since, limit, sink=_connection.Journal, convert=_wire.journal_entry
        )

    async def message(self, role: str, text: str, *, key: str = "", expected_version: int = 0) -> int:
        """Adds a message of an agent or a person to the journal; returns its sequence number."""
        return int((await self._call("message", role, text, key, expected_version)).sequence)

    def events(self, since: int = 0, *, follow: bool = True) -> Events:
        """Events of this kernel after sequence number `since`: first those of the past, then live ones.

        `async for event in kernel.events()`. Without `follow`, those of the past only.
        """
        return Events(self._connection, self._cap, since, follow)

    # --- the kernel itself

    async def info(self) -> types.KernelInfo:
        """The kernel's present state."""
        return _wire.kernel_info((await self._call("info")).info)

    async def start(self, *, without_memory: bool = False) -> None:
        """Starts the worker now.

        Args:
            without_memory: discard a virtual machine's memory that is kept for this start, and start
                from the saved state.
        """
        await self._call("start", without_memory, deadline=None)

    async def stop(self, *, force: bool = False) -> None:
        """Ends the worker and keeps the state; `force` interrupts the running execution."""
        await self._call("stop", force, deadline=None)

    async def suspend(
        self, *, interrupt: bool = False, release: bool = False, until_start: bool = False
    ) -> None:
        """Pauses everything in the kernel and keeps its memory, until its next use.

        Args:
            interrupt: interrupt the running execution instead of waiting for it.
            release: save a virtual machine's memory on the disk, and free it.
            until_start: start it with the next start of the daemon, if it is stopped before the next use.

        Raises:
            ConflictError: the kernel has no worker.
        """
        await self._call("suspend", interrupt, release, until_start, deadline=None)

    async def resume(self) -> None:
        """Continues after `suspend`; the next use does so, too.

        Raises:
            ConflictError: the kernel has no worker.
        """
        await self._call("resume", deadline=None)

    async def archive(self, *, expected_version: int = 0) -> types.Checkpoint:
        """Stops the kernel and keeps its files and variables in a checkpoint alone, until `unarchive`."""
        return _wire.checkpoint((await self._call("archive", expected_version, deadline=None)).checkpoint)

    async def unarchive(self, *, expected_version: int = 0) -> int:
        """Brings an archived kernel back; returns its version."""
        return int((await self._call("unarchive", expected_version, deadline=None)).version)

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

    def forward(self, port: int, *, listen: str = "") -> Opening[Forward]:
        """Opens a TCP port of a kernel without network on a local socket, while its worker lives.

        `await kernel.forward(8000)`, or `async with kernel.forward(8000) as forward`. `listen` is
        `unix:PATH` or a loopback address such as `127.0.0.1:0`, which serves programs of this user and
        of root only; by default a Unix socket in a new directory of this user.

        Raises:
            ConflictError: the kernel has no worker.
            UnsupportedError: the kernel uses the host's network.
        """
        return Opening(lambda: forward(self._connection, self._cap, port, listen), Forward.close)

    def lease(self, holder: str, ttl: float, *, token: bytes = b"") -> Opening[Lease]:
        """Lets only this lease's holder change the kernel or run code in it; others get `BusyError`.

        `async with kernel.lease("editor", 60) as lease:` and then `lease.kernel`; leaving it
        releases the lease. A lost connection does not: `token` resumes it.

        Args:
            holder: the name that others see.
            ttl: seconds until it ends, unless it is renewed.
            token: that of a lease that this resumes; empty: a new one.
        """
        wanted = _wire.milliseconds(ttl, "ttl")

        async def opening() -> Lease:
            answer = await self._call("lease", holder, wanted, token)
            lease, secret = Capability(self._connection, answer.lease), bytes(answer.token)
            try:
                opened = await self._connection.call(lease, "kernel")
            except BaseException:
                if not token:
                    # Its token would be lost, and the kernel locked until it ends.
                    await self._release(lease)
                raise
            kernel = Kernel(self._connection, opened.kernel, self._info)
            return Lease(self._connection, lease, kernel, secret, answer.expiresAtMs)

        return Opening(opening, Lease.release)

    async def _release(self, lease: Capability) -> None:
        """Ends a lease, also if the caller is cancelled meanwhile."""
        if self._connection.link.closed:
            return
        releasing = self._connection.link.in_background(self._connection.call(lease, "release"))
        with suppress(RyokanError):
            await asyncio.shield(releasing)

    async def attenuate(self, rights: Collection[str], label: str) -> Kernel:
        """The same kernel with at most these rights; `label` names the holder in the journal.

        Rights: `read`, `execute`, `write`, `checkpoint`, `restore`, `fork`, `teleport`, `admin`.
        """
        answer = await self._call("attenuate", [*rights], label)
        return Kernel(self._connection, answer.kernel, self._info)

    async def publish(self, rights: Collection[str], name: str) -> str:
        """The same as a socket for other programs of this user, until `unpublish`; returns its path.

        `PublishedKernel.open` opens it.
        """
        return str((await self._call("publish", [*rights], name)).path)

    async def unpublish(self, name: str) -> None:
        """Removes a published socket."""
        await self._call("unpublish", name)


def forked(connection: Connection, answer: Any) -> list[Kernel]:
    """The children of a fork; the first error, if there is one."""
    kernels = []
    for child in answer.children:
        if child.which() == "failed":
            raise _wire.error(child.failed)
        kernels.append(Kernel(connection, child.forked.kernel, _wire.kernel_info(child.forked.info)))
    return kernels


class Lease:
    """The exclusive right to change a kernel, for a limited time."""

    def __init__(
        self, connection: Connection, capability: Capability, kernel: Kernel, token: bytes, expires_ms: int
    ) -> None:
        self._connection, self._cap = connection, capability
        self.kernel = kernel
        """The kernel, for the holder of the lease."""
        self.token = token
        """The secret that resumes the lease from another connection."""
        self._expires_ms = expires_ms

    @property
    def expires_at(self) -> datetime | None:
        """When it ends, unless it is renewed."""
        return _wire.time(self._expires_ms)

    async def renew(self, ttl: float) -> None:
        """Lets it end `ttl` seconds from now."""
        answer = await self._connection.call(self._cap, "renew", _wire.milliseconds(ttl, "ttl"))
        self._expires_ms = int(answer.expiresAtMs)

    async def release(self) -> None:
        """Ends it now."""
        await self._connection.call(self._cap, "release")


class PublishedKernel(Kernel):
    """A kernel behind a socket that `Kernel.publish` made, with a connection of its own."""

    @staticmethod
    def open(socket: str | LocalPath) -> Opening[PublishedKernel]:
        """Opens it: `await PublishedKernel.open(path)`, or with `async with`, which disconnects."""

        async def opening() -> PublishedKernel:
            connection = await Connection.open(LocalPath(socket), False, _connection.HELLO, schema.Kernel)
            try:
                answer = await connection.answer(connection.link.root.info())
                return PublishedKernel(connection, connection.link.root, _wire.kernel_info(answer.info))
            except BaseException:
                await connection.close()
                raise

        return Opening(opening, PublishedKernel.close)

    async def close(self) -> None:
        """Ends the connection; the kernel stays."""
        await self._connection.close()
