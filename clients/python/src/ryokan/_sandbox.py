"""Kernels under the names of E2B's SDK, asynchronously."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, overload

from . import types
from ._connection import Connection
from ._forward import Forward
from ._host import Host
from ._kernel import Kernel
from ._opening import Opening
from .errors import ConflictError, NotFoundError

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class _Kill:
    """A method of an object, and of the class with an id."""

    @overload
    def __get__(self, sandbox: None, owner: type[Sandbox]) -> Callable[[str], Coroutine[Any, Any, bool]]: ...

    @overload
    def __get__(self, sandbox: Sandbox, owner: type[Sandbox]) -> Callable[[], Coroutine[Any, Any, bool]]: ...

    def __get__(self, sandbox: Sandbox | None, owner: type[Sandbox]) -> Callable[..., Coroutine[Any, Any, bool]]:
        return _kill if sandbox is None else sandbox._end


class Sandbox(Kernel):
    """A kernel with a connection of its own, under the names of E2B's SDK."""

    def __init__(self, host: Host, connection: Connection, capability: Any, info: types.KernelInfo) -> None:
        super().__init__(connection, capability, info)
        self._host = host
        self.sandbox_id = info.id
        self._forwards: dict[int, Forward] = {}
        self._opening = asyncio.Lock()

    @classmethod
    def create(
        cls,
        name: str | None = None,
        *,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
        envs: Mapping[str, str] | None = None,
        **options: Unpack[types.KernelOptions],
    ) -> Opening[Self]:
        """Creates a kernel on the daemon of this user; the engine is `python` unless named.

        `await Sandbox.create()`, or `async with Sandbox.create() as sandbox`, which kills it.

        Args:
            name: the kernel's name; None: a random one.
            timeout: E2B's name of `idle_timeout`.
            metadata: E2B's name of `labels`.
            envs: environment of all code and programs that this object runs; another connection has none.
            options: see `types.KernelOptions`.
        """
        if timeout is not None:
            options["idle_timeout"] = timeout
        if metadata:
            options["labels"] = {**options.get("labels", {}), **metadata}
        options.setdefault("engine", "python")

        async def opening() -> Self:
            sandbox = await cls._open(lambda host: host.create(name, **options))
            sandbox._env = dict(envs or {})
            return sandbox

        return Opening(opening, cls._end)

    @classmethod
    def connect(cls, sandbox_id: str) -> Opening[Self]:
        """Opens a kernel by id or name on the daemon of this user; `async with` only disconnects."""
        return Opening(lambda: cls._open(lambda host: host.get(sandbox_id)), cls.close)

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

    @staticmethod
    async def list(
        *, prefix: str = "", labels: Mapping[str, str] | None = None, states: Collection[str] = ()
    ) -> builtins.list[types.KernelInfo]:
        """The kernels of the daemon of this user that match; each has a `sandbox_id`."""
        async with Host.connect() as host:
            return await host.list(prefix=prefix, labels=labels, states=states)

    async def is_running(self) -> bool:
        """Whether the sandbox exists; one without a worker starts it at its next use."""
        # By id: it may have another name by now.
        return any(info.id == self.id for info in await self._host.list())

    async def get_info(self) -> types.KernelInfo:
        """The same as `info`."""
        return await self.info()

    async def pause(self) -> bool:
        """Pauses everything in it and keeps its memory; the next use resumes it. Returns whether it ran.

        Unlike a paused sandbox of E2B it keeps files and variables only, if this host stops.
        """
        try:
            await self.suspend()
        except ConflictError as error:
            if error.reason != "no_worker":
                raise
            return False
        return True

    async def set_timeout(self, timeout: float) -> None:
        """Lets it stop after so many seconds without use. Unlike a sandbox of E2B it keeps its state."""
        await self._host.update(self.id, idle_timeout=timeout)

    async def get_host(self, port: int) -> str:
        """The address of one of its TCP ports, `127.0.0.1:PORT`, for programs of this user and of root.

        With the host's network it is the port itself, which every user of this host reaches.
        `forward` opens it, and closes it with this connection or the kernel's worker: ask for it again.
        """
        if (await self.info()).net == "host":
            return f"127.0.0.1:{port}"
        async with self._opening:
            forward = self._forwards.get(port)
            if forward is None or forward.ended:
                await self.start()
                forward = self._forwards[port] = await self.forward(port, listen="127.0.0.1:0")
            return forward.address

    async def create_snapshot(self, name: str = "") -> types.Checkpoint:
        """The same as `checkpoint`; `fork(name, ref=snapshot.snapshot_id)` starts another sandbox from it."""
        return await self.checkpoint(name)

    kill = _Kill()
    """`await sandbox.kill()` removes the kernel and ends the connection; `await Sandbox.kill(sandbox_id)`
    removes a kernel by id or name. Both return whether there was one."""

    async def close(self) -> None:
        """Ends the connection; the kernel stays."""
        forwards, self._forwards = self._forwards, {}
        for forward in forwards.values():
            await forward.close()
        await self._host.close()

    async def _end(self) -> bool:
        try:
            await self.remove(with_threads=True)
            return True
        except NotFoundError:
            return False
        finally:
            await self.close()


async def _kill(sandbox_id: str) -> bool:
    async with Host.connect() as host:
        try:
            await host.remove(sandbox_id, with_threads=True)
            return True
        except NotFoundError:
            return False
