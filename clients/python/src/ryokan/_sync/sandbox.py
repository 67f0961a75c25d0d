"""Kernels under the names of E2B's SDK."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, overload

from .. import aio, types
from .._portal import Portal, portal
from .kernel import Kernel

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class _Kill:
    """A method of an object, and of the class with an id."""

    @overload
    def __get__(self, sandbox: None, owner: type[Sandbox]) -> Callable[[str], bool]: ...

    @overload
    def __get__(self, sandbox: Sandbox, owner: type[Sandbox]) -> Callable[[], bool]: ...

    def __get__(self, sandbox: Sandbox | None, owner: type[Sandbox]) -> Callable[..., bool]:
        return _kill if sandbox is None else sandbox._end


class Sandbox(Kernel):
    """A kernel with a connection of its own, under the names of E2B's SDK.

    `with Sandbox.create() as sandbox` kills it at the end; after `connect`, `with` only disconnects.
    """

    def __init__(self, sandbox: aio.Sandbox, runner: Portal, kills: bool) -> None:
        super().__init__(sandbox, runner)
        self._sandbox, self._kills = sandbox, kills
        self.sandbox_id = sandbox.sandbox_id

    @classmethod
    def create(
        cls,
        name: str | None = None,
        *,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
        envs: Mapping[str, str] | None = None,
        **options: Unpack[types.KernelOptions],
    ) -> Self:
        """Creates a kernel on the daemon of this user; the engine is `python` unless named.

        Args:
            name: the kernel's name; None: a random one.
            timeout: E2B's name of `idle_timeout`.
            metadata: E2B's name of `labels`.
            envs: environment of all code and programs that this object runs; another connection has none.
            options: see `types.KernelOptions`.
        """
        runner = portal()
        opening = aio.Sandbox.create(name, timeout=timeout, metadata=metadata, envs=envs, **options)
        return cls(runner.run(opening.open()), runner, True)

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

    @staticmethod
    def list(
        *, prefix: str = "", labels: Mapping[str, str] | None = None, states: Collection[str] = ()
    ) -> builtins.list[types.KernelInfo]:
        """The kernels of the daemon of this user that match; each has a `sandbox_id`."""
        return portal().run(aio.Sandbox.list(prefix=prefix, labels=labels, states=states))

    def is_running(self) -> bool:
        """Whether the sandbox exists; one without a worker starts it at its next use."""
        return self._run(self._sandbox.is_running())

    def get_info(self) -> types.KernelInfo:
        """The same as `info`."""
        return self.info()

    def pause(self) -> bool:
        """Pauses everything in it and keeps its memory; the next use resumes it. Returns whether it ran.

        Unlike a paused sandbox of E2B it keeps files and variables only, if this host stops.
        """
        return self._run(self._sandbox.pause())

    def set_timeout(self, timeout: float) -> None:
        """Lets it stop after so many seconds without use. Unlike a sandbox of E2B it keeps its state."""
        self._run(self._sandbox.set_timeout(timeout))

    def get_host(self, port: int) -> str:
        """The address of one of its TCP ports, `127.0.0.1:PORT`, for programs of this user and of root.

        With the host's network it is the port itself, which every user of this host reaches.
        `forward` opens it, and closes it with this connection or the kernel's worker: ask for it again.
        """
        return self._run(self._sandbox.get_host(port))

    def create_snapshot(self, name: str = "") -> types.Checkpoint:
        """The same as `checkpoint`; `fork(name, ref=snapshot.snapshot_id)` starts another sandbox from it."""
        return self.checkpoint(name)

    kill = _Kill()
    """`sandbox.kill()` removes the kernel and ends the connection; `Sandbox.kill(sandbox_id)` removes a
    kernel by id or name. Both return whether there was one."""

    def close(self) -> None:
        """Ends the connection; the kernel stays."""
        self._run(self._sandbox.close())

    def _end(self) -> bool:
        return self._run(self._sandbox.kill())


def _kill(sandbox_id: str) -> bool:
    return portal().run(aio.Sandbox.kill(sandbox_id))
