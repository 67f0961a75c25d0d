"""Kernels."""

from __future__ import annotations

from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .. import aio, types
from .._files import Path as FilePath
from .._portal import Portal, portal
from .callbacks import ProgressTaker, Taker, with_callbacks
from .commands import Commands, Pty
from .events import Events
from .files import Files
from .forward import Forward

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

T = TypeVar("T")


class Kernel:
    """One kernel: a durable session that runs code."""

    def __init__(self, kernel: aio.Kernel, runner: Portal) -> None:
        self._kernel, self._portal = kernel, runner
        self.id, self.name, self.engine = kernel.id, kernel.name, kernel.engine
        self.files = Files(kernel.files, runner)
        """The files in the workspace."""
        self.commands = Commands(kernel.commands, runner)
        """Programs beside the engine."""
        self.pty = Pty(kernel.pty, runner)
        """Programs on terminals."""

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
        envs: Mapping[str, str] | None = None,
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
            env: environment for this execution only; `envs` is E2B's name of it.
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
                envs=envs,
                output_limit=output_limit,
                key=key,
                expected_version=expected_version,
            )

        return with_callbacks(self._portal, work, on_stdout, on_stderr)

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

        def work(out: aio.Taker | None, err: aio.Taker | None) -> Coroutine[Any, Any, types.Result]:
            return self._kernel.wait(execution_id, offset=offset, on_stdout=out, on_stderr=err)

        return with_callbacks(self._portal, work, on_stdout, on_stderr)

    def interrupt(self, execution_id: int | None = None) -> None:
        """Interrupts an execution; without an id, those of this object's `run_code` in other threads."""
        self._run(self._kernel.interrupt(execution_id))

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

    def missed(self) -> list[types.Missed]:
        """Values that the kernel holds now and its saved state does not, and why."""
        return self._run(self._kernel.missed())

    def jobs(self) -> list[types.Job]:
        """Jobs of the engine and programs beside it that run in the background."""
        return self._run(self._kernel.jobs())

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

    def find_checkpoint(self, ref: str) -> types.Checkpoint:
        """The checkpoint of a `ref`, as `restore` takes it.

        Raises:
            NotFoundError: there is none.
            ConflictError: there are several.
        """
        return self._run(self._kernel.find_checkpoint(ref))

    def pin(self, ref: str) -> None:
        """Exempts a checkpoint from retention."""
        self._run(self._kernel.pin(ref))

    def unpin(self, ref: str) -> None:
        """Lets retention remove a checkpoint again."""
        self._run(self._kernel.unpin(ref))

    def remove_checkpoint(self, ref: str, *, expected_version: int = 0) -> types.Checkpoint:
        """Removes a checkpoint, for good.

        Raises:
            ConflictError: it is the kernel's current one, or `undo` needs it.
        """
        return self._run(self._kernel.remove_checkpoint(ref, expected_version=expected_version))

    def diff(self, before: str = "latest", after: str = "", *, other: Kernel | None = None) -> list[types.Difference]:
        """Differences from checkpoint `before` to checkpoint `after`; empty: the present state.

        With `other`, a kernel of the same connection, `after` is of that kernel, and an empty `before`
        the present state of this one.
        """
        return self._run(self._kernel.diff(before, after, other=other._kernel if other else None))

    def diff_text(
        self,
        before: str = "latest",
        after: str = "",
        *,
        paths: Iterable[FilePath] = (),
        other: Kernel | None = None,
    ) -> list[types.Patch]:
        """Differences in files as unified diffs; otherwise as `diff`.

        `paths` restricts them to these paths and everything beneath them.
        """
        return self._run(self._kernel.diff_text(before, after, paths=paths, other=other._kernel if other else None))

    def preview(self, ref: str) -> types.Preview:
        """What a restore to a checkpoint would change, end and lose. It changes nothing."""
        return self._run(self._kernel.preview(ref))

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

    def fork(self, name: str, **options: Unpack[types.ForkOptions]) -> list[Kernel]:
        """Creates kernels that start from this kernel's present state, or from checkpoint `ref`.

        Several (`count`) are called `name-1`, `name-2` and so on. Each exists completely or not at
        all: if one fails, its error is raised, and the others exist. `Host.fork` also changes their
        limits, network and paths.

        Args:
            name: the child's name.
            options: see `types.ForkOptions`.
        """
        return [Kernel(child, self._portal) for child in self._run(self._kernel.fork(name, **options))]

    def take(self, fork: Kernel, *, paths: Iterable[FilePath] = (), force: bool = False) -> types.Taken:
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
        return self._run(self._kernel.take(fork._kernel, paths=paths, force=force))

    def thread(self, name: str, *, engine: str = "", key: str = "") -> Kernel:
        """Creates a kernel with an engine and variables of its own in this kernel's workspace."""
        return Kernel(self._run(self._kernel.thread(name, engine=engine, key=key)), self._portal)

    def export(self, path: str | Path, *, refs: Iterable[str] = ()) -> types.Bundle:
        """Writes the kernel and these checkpoints into a new file, for `Host.import_` on any host.

        Without `refs`: all checkpoints, and a new one of the present state.

        Raises:
            FileExistsError: the file exists.
        """
        return self._run(self._kernel.export(path, refs=refs))

    def teleport(
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

        Before the commit, a failure, Ctrl-C or an exception of the callback leaves the kernel here.

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
            on_progress: receives how far the move is, in this thread.

        Raises:
            RefusedError: what it cannot move without, or this object lacks the right `teleport`.
            UnsupportedError: the other host cannot take it.
        """

        def work(taker: aio.ProgressTaker | None) -> Coroutine[Any, Any, types.TeleportReport]:
            return self._kernel.teleport(
                to,
                allow_missing=allow_missing,
                kind=kind,
                limit_rate=limit_rate,
                isolation=isolation,
                since=since,
                key=key,
                on_progress=taker,
            )

        return with_callbacks(self._portal, work, on_progress)

    def abort_teleport(self) -> None:
        """Ends a move of this kernel, also of another client.

        Raises:
            ConflictError: it is committed.
            NotFoundError: the kernel does not move.
        """
        self._run(self._kernel.abort_teleport())

    def journal(self, since: int = 0, limit: int = 0) -> list[types.JournalEntry]:
        """The history after sequence number `since`, oldest first; `limit` 0: all."""
        return self._run(self._kernel.journal(since, limit))

    def message(self, role: str, text: str, *, key: str = "", expected_version: int = 0) -> int:
        """Adds a message of an agent or a person to the journal; returns its sequence number."""
        return self._run(self._kernel.message(role, text, key=key, expected_version=expected_version))

    def events(self, since: int = 0, *, follow: bool = True) -> Events:
        """Events of this kernel after sequence number `since`: first those of the past, then live ones.

        `for event in kernel.events()`. Without `follow`, those of the past only.
        """
        return Events(self._kernel.events(since, follow=follow), self._portal)

    # --- the kernel itself

    def info(self) -> types.KernelInfo:
        """The kernel's present state."""
        return self._run(self._kernel.info())

    def start(self, *, without_memory: bool = False) -> None:
        """Starts the worker now.

        Args:
            without_memory: discard a virtual machine's memory that is kept for this start, and start
                from the saved state.
        """
        self._run(self._kernel.start(without_memory=without_memory))

    def stop(self, *, force: bool = False) -> None:
        """Ends the worker and keeps the state; `force` interrupts the running execution."""
        self._run(self._kernel.stop(force=force))

    def suspend(
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
        self._run(self._kernel.suspend(interrupt=interrupt, release=release, until_start=until_start))

    def resume(self) -> None:
        """Continues after `suspend`; the next use does so, too.

        Raises:
            ConflictError: the kernel has no worker.
        """
        self._run(self._kernel.resume())

    def archive(self, *, expected_version: int = 0) -> types.Checkpoint:
        """Stops the kernel and keeps its files and variables in a checkpoint alone, until `unarchive`."""
        return self._run(self._kernel.archive(expected_version=expected_version))

    def unarchive(self, *, expected_version: int = 0) -> int:
        """Brings an archived kernel back; returns its version."""
        return self._run(self._kernel.unarchive(expected_version=expected_version))

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
        such as `127.0.0.1:0`, which serves programs of this user and of root only; by default a Unix
        socket in a new directory of this user.

        Raises:
            ConflictError: the kernel has no worker.
            UnsupportedError: the kernel uses the host's network.
        """
        return Forward(self._run(self._kernel.forward(port, listen=listen).open()), self._portal)

    def lease(self, holder: str, ttl: float, *, token: bytes = b"") -> Lease:
        """Lets only this lease's holder change the kernel or run code in it; others get `BusyError`.

        `with kernel.lease("editor", 60) as lease:` and then `lease.kernel`; leaving it
        releases the lease. A lost connection does not: `token` resumes it.

        Args:
            holder: the name that others see.
            ttl: seconds until it ends, unless it is renewed.
            token: that of a lease that this resumes; empty: a new one.
        """
        opening = self._kernel.lease(holder, ttl, token=token)
        return Lease(self._run(opening.open()), self._portal)

    def attenuate(self, rights: Collection[str], label: str) -> Kernel:
        """The same kernel with at most these rights; `label` names the holder in the journal.

        Rights: `read`, `execute`, `write`, `checkpoint`, `restore`, `fork`, `teleport`, `admin`.
        """
        return Kernel(self._run(self._kernel.attenuate(rights, label)), self._portal)

    def publish(self, rights: Collection[str], name: str) -> str:
        """The same as a socket for other programs of this user, until `unpublish`; returns its path.

        `PublishedKernel.open` opens it.
        """
        return self._run(self._kernel.publish(rights, name))

    def unpublish(self, name: str) -> None:
        """Removes a published socket."""
        self._run(self._kernel.unpublish(name))


class Lease:
    """The exclusive right to change a kernel, for a limited time."""

    def __init__(self, lease: aio.Lease, runner: Portal) -> None:
        self._lease, self._portal = lease, runner
        self.kernel = Kernel(lease.kernel, runner)
        """The kernel, for the holder of the lease."""
        self.token = lease.token
        """The secret that resumes the lease from another connection."""

    @property
    def expires_at(self) -> datetime | None:
        """When it ends, unless it is renewed."""
        return self._lease.expires_at

    def renew(self, ttl: float) -> None:
        """Lets it end `ttl` seconds from now."""
        self._portal.run(self._lease.renew(ttl))

    def release(self) -> None:
        """Ends it now."""
        self._portal.run(self._lease.release())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class PublishedKernel(Kernel):
    """A kernel behind a socket that `Kernel.publish` made, with a connection of its own."""

    _kernel: aio.PublishedKernel

    @staticmethod
    def open(socket: str | Path) -> PublishedKernel:
        """Opens it; `with` disconnects."""
        runner = portal()
        return PublishedKernel(runner.run(aio.PublishedKernel.open(socket).open()), runner)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection; the kernel stays."""
        self._run(self._kernel.close())
