"""A daemon and its kernels, asynchronously."""

from __future__ import annotations

import builtins
import uuid
from collections.abc import Collection, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from . import _bundles, _connection, _daemon, _wire, _wire_groups, _wire_moves, types
from ._connection import HELLO, Capability, Connection
from ._events import Events
from ._groups import Groups
from ._kernel import Kernel, forked
from ._opening import Opening
from ._version import __version__
from ._wire import schema

if TYPE_CHECKING:
    from typing_extensions import Unpack

CLIENT = f"ryokan-python {__version__}"


class Host:
    """A connection to a daemon."""

    def __init__(self, connection: Connection, capability: Capability, info: types.HostInfo) -> None:
        self._connection, self._cap = connection, capability
        self.info = info
        """The host's answer to the greeting."""
        self.groups = Groups(connection, capability)
        """Kernels and data that are frozen and restored as one."""

    @staticmethod
    def connect(
        socket: str | Path | None = None,
        *,
        system: bool = False,
        start: bool = True,
        client: str = CLIENT,
        timeout: float = HELLO,
    ) -> Opening[Host]:
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
                capability = Capability(connection, connection.link.root)
                answer = await connection.call(capability, "hello", schema.wireVersion, client, deadline=timeout)
                return Host(connection, capability, _wire.host_info(answer.host))
            except BaseException:
                await connection.close()
                raise

        return Opening(opening, Host.close)

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

    async def update(
        self, name: str, *, expected_version: int = 0, **change: Unpack[types.KernelChange]
    ) -> types.Update:
        """Changes a kernel's limits, network and paths, by its name or id.

        Paths and the idle timeout change at once; `at_next_start` of the answer names the rest.

        Args:
            name: the kernel.
            expected_version: the kernel's version known to the caller; 0: any.
            change: see `types.KernelChange`.
        """
        _wire.known(change, types.KernelChange, "an update")
        wanted = _wire.change_to_wire(change)
        answer = await self._connection.call(self._cap, "updateKernel", name, wanted, expected_version, deadline=None)
        return types.Update(answer.version, [str(what) for what in answer.atNextStart])

    async def rename(self, name: str, to: str, *, expected_version: int = 0) -> int:
        """Gives a kernel another name; returns its version. Its id and its history stay, open objects work on."""
        return int((await self._connection.call(self._cap, "renameKernel", name, to, expected_version)).version)

    async def fork(self, kernel: str, name: str, **options: Unpack[types.ForkChange]) -> builtins.list[Kernel]:
        """As `Kernel.fork`, of a kernel by its name or id; the children may get another specification.

        Args:
            kernel: the kernel to fork.
            name: the child's name.
            options: see `types.ForkOptions` and `types.KernelChange`.
        """
        _wire.known(options, types.ForkChange, "a fork")
        request = _wire.fork_to_wire(name, options) | {"change": _wire.change_to_wire(options)}
        answer = await self._connection.call(self._cap, "forkKernel", kernel, request, deadline=None)
        return forked(self._connection, answer)

    async def handovers(self) -> builtins.list[types.Handover]:
        """Moves in progress, those without an acknowledgement, and received kernels."""
        answer = await self._connection.call(self._cap, "handovers")
        return [_wire_moves.handover(one) for one in answer.handovers]

    async def import_(
        self,
        path: str | Path,
        *,
        name: str = "",
        grant: Collection[types.HostResource] = (),
        without_host: bool = False,
    ) -> types.Imported[Kernel]:
        """Creates a kernel from a file that `Kernel.export` wrote, on any host.

        It has no path, network or server of this host, except those in `grant`.

        Args:
            path: the file.
            name: the kernel's name; empty: that in the file.
            grant: resources that it gets, of those that `review` returns.
            without_host: refuse every `grant`.
        """
        answer = await _bundles.import_kernel(self._connection, self._cap, path, name, grant, without_host)
        kernel = Kernel(self._connection, answer.kernel, _wire.kernel_info(answer.info))
        return types.Imported(kernel, _wire.resources(answer.granted), _wire.resources(answer.withheld))

    async def review(self, path: str | Path) -> types.Review:
        """What a file that `Kernel.export` wrote requests of this host, and who signed it."""
        return await _bundles.review(self._connection, self._cap, path)

    async def audit(self, kernel: str = "", since: int = 0, limit: int = 1000) -> builtins.list[types.AuditLine]:
        """Lines of the audit log after number `since`, oldest first.

        Args:
            kernel: a name or an id, also of a removed kernel; empty: all lines visible to this user.
            since: the number of the last line that is known.
            limit: at most so many lines; 0: all.
        """
        return await self._connection.collect(
            self._cap, "audit", kernel, since, limit, sink=_connection.AuditLines, convert=_wire_groups.audit_line
        )

    async def verify_audit(self, known: str = "") -> types.AuditProof:
        """Verifies the chain of the audit log's hashes.

        `known`: an earlier `head`, kept elsewhere: it is verified that the log still goes through it.
        """
        answer = await self._connection.call(self._cap, "verifyAudit", known, deadline=None)
        return types.AuditProof(answer.head, answer.brokenAt, answer.why)

    def events(self, since: int = 0, *, follow: bool = True) -> Events:
        """Events of the host and its kernels after sequence number `since`, then live ones.

        `async for event in host.events()`. Without `follow`, those of the past only.
        """
        return Events(self._connection, self._cap, since, follow)
