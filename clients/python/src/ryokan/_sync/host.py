"""A daemon and its kernels."""

from __future__ import annotations

import builtins
from collections.abc import Collection, Coroutine, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .. import aio, types
from .._connection import HELLO
from .._portal import Portal, portal
from .events import Events
from .groups import Groups
from .kernel import Kernel

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

T = TypeVar("T")


class Host:
    """A connection to a daemon."""

    def __init__(self, host: aio.Host, runner: Portal) -> None:
        self._host, self._portal = host, runner
        self.info = host.info
        """The host's answer to the greeting."""
        self.groups = Groups(host.groups, runner)
        """Kernels and data that are frozen and restored as one."""

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._portal.run(work)

    @staticmethod
    def connect(
        socket: str | Path | None = None,
        *,
        system: bool = False,
        start: bool = True,
        client: str = aio.CLIENT,
        timeout: float = HELLO,
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

    def update(self, name: str, *, expected_version: int = 0, **change: Unpack[types.KernelChange]) -> types.Update:
        """Changes a kernel's limits, network and paths, by its name or id.

        Paths and the idle timeout change at once; `at_next_start` of the answer names the rest.

        Args:
            name: the kernel.
            expected_version: the kernel's version known to the caller; 0: any.
            change: see `types.KernelChange`.
        """
        return self._run(self._host.update(name, expected_version=expected_version, **change))

    def rename(self, name: str, to: str, *, expected_version: int = 0) -> int:
        """Gives a kernel another name; returns its version. Its id and its history stay, open objects work on."""
        return self._run(self._host.rename(name, to, expected_version=expected_version))

    def fork(self, kernel: str, name: str, **options: Unpack[types.ForkChange]) -> builtins.list[Kernel]:
        """As `Kernel.fork`, of a kernel by its name or id; the children may get another specification.

        Args:
            kernel: the kernel to fork.
            name: the child's name.
            options: see `types.ForkOptions` and `types.KernelChange`.
        """
        return [Kernel(child, self._portal) for child in self._run(self._host.fork(kernel, name, **options))]

    def handovers(self) -> builtins.list[types.Handover]:
        """Moves in progress, those without an acknowledgement, and received kernels."""
        return self._run(self._host.handovers())

    def import_(
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
        imported = self._run(self._host.import_(path, name=name, grant=grant, without_host=without_host))
        return types.Imported(Kernel(imported.kernel, self._portal), imported.granted, imported.withheld)

    def review(self, path: str | Path) -> types.Review:
        """What a file that `Kernel.export` wrote requests of this host, and who signed it."""
        return self._run(self._host.review(path))

    def audit(self, kernel: str = "", since: int = 0, limit: int = 1000) -> builtins.list[types.AuditLine]:
        """Lines of the audit log after number `since`, oldest first.

        Args:
            kernel: a name or an id, also of a removed kernel; empty: all lines visible to this user.
            since: the number of the last line that is known.
            limit: at most so many lines; 0: all.
        """
        return self._run(self._host.audit(kernel, since, limit))

    def verify_audit(self, known: str = "") -> types.AuditProof:
        """Verifies the chain of the audit log's hashes.

        `known`: an earlier `head`, kept elsewhere: it is verified that the log still goes through it.
        """
        return self._run(self._host.verify_audit(known))

    def events(self, since: int = 0, *, follow: bool = True) -> Events:
        """Events of the host and its kernels after sequence number `since`, then live ones.

        `for event in host.events()`. Without `follow`, those of the past only.
        """
        return Events(self._host.events(since, follow=follow), self._portal)
