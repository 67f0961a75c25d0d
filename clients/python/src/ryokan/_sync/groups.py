"""Groups of kernels, repositories and databases."""

from __future__ import annotations

import builtins
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from .. import aio, types
from .._portal import Portal
from .callbacks import ProgressTaker, with_callbacks

T = TypeVar("T")


class Groups:
    """Kernels and data of this host that are frozen and restored as one.

    A `ref` is a freeze's number, the beginning of its id, its message, `latest` or `~N`.
    """

    def __init__(self, groups: aio.Groups, runner: Portal) -> None:
        self._groups, self._portal = groups, runner

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._portal.run(work)

    def new(self, name: str) -> None:
        """Makes an empty group.

        Raises:
            AlreadyExistsError: a group or a kernel has this name.
        """
        self._run(self._groups.new(name))

    def add(self, group: str, kind: str, target: str, *, name: str = "") -> types.GroupMember:
        """Adds a member.

        Args:
            group: the group.
            kind: `kernel`, `repository`, `database`, `directory`, `command`, `postgres` or `server`.
            target: the kernel's name, the path, the name in the daemon's configuration, or
                `dbname=… host=… port=… user=…`.
            name: the member's name; empty: derived from the target.
        """
        return self._run(self._groups.add(group, kind, target, name=name))

    def remove(self, group: str, member: str = "", *, abandon: bool = False) -> None:
        """Removes a member, or without one the group with its freezes; the data stays as it is.

        `abandon`: although a freeze or a restore of it has not ended.
        """
        self._run(self._groups.remove(group, member, abandon=abandon))

    def remove_freeze(self, group: str, ref: str) -> None:
        """Removes one freeze; the members and the other freezes stay as they are."""
        self._run(self._groups.remove_freeze(group, ref))

    def list(self) -> builtins.list[types.Group]:
        """The groups of this user."""
        return self._run(self._groups.list())

    def show(self, group: str) -> types.Group:
        """A group with its members."""
        return self._run(self._groups.show(group))

    def freeze(
        self,
        group: str,
        message: str = "",
        *,
        interrupt: bool = False,
        park: bool = False,
        wait: float | None = None,
        on_failure: str = "group",
    ) -> types.Freeze:
        """Captures every member within one pause, all or nothing.

        Args:
            group: the group.
            message: what the state is, for `restore`.
            interrupt: interrupt running executions instead of waiting for them.
            park: let them go on after the pause; the freeze holds the variables from before them.
            wait: seconds to wait for them, at most an hour; None: a minute.
            on_failure: `resume`, `pause` (the kernels start nothing until `resume`), or `group`: as `configure` said.
        """
        frozen = self._groups.freeze(
            group, message, interrupt=interrupt, park=park, wait=wait, on_failure=on_failure
        )
        return self._run(frozen)

    def configure(self, group: str, *, on_failure: str) -> None:
        """Sets what a freeze does with the kernels if it fails: `resume` or `pause`."""
        self._run(self._groups.configure(group, on_failure=on_failure))

    def resume(self, group: str) -> None:
        """Lets the kernels of a group go on that a failed freeze paused."""
        self._run(self._groups.resume(group))

    def log(self, group: str, limit: int = 0) -> builtins.list[types.Freeze]:
        """The freezes of a group, newest first; `limit` 0: all."""
        return self._run(self._groups.log(group, limit))

    def diff(self, group: str, before: str = "", after: str = "") -> types.GroupDiff:
        """Differences from freeze `before` (empty: the newest) to freeze `after` (empty: the present state)."""
        return self._run(self._groups.diff(group, before, after))

    def restore(
        self,
        group: str,
        ref: str,
        *,
        members: Iterable[str] = (),
        interrupt: bool = False,
        wait: float | None = None,
    ) -> types.GroupRestoration:
        """Brings all members back to a freeze, or only these; all or nothing.

        The present state is frozen just before, and `undo` returns to it.

        Args:
            group: the group.
            ref: the freeze.
            members: only these; empty: all.
            interrupt: interrupt running executions instead of waiting for them.
            wait: seconds to wait for them, at most an hour; None: a minute.
        """
        return self._run(self._groups.restore(group, ref, members=members, interrupt=interrupt, wait=wait))

    def undo(self, group: str, *, interrupt: bool = False, wait: float | None = None) -> types.GroupRestoration:
        """Returns to the state before the last restore; `interrupt` and `wait` as in `restore`."""
        return self._run(self._groups.undo(group, interrupt=interrupt, wait=wait))

    def lock(self, name: str) -> str:
        """The lock of the present state of a group or a kernel, as text."""
        return self._run(self._groups.lock(name))

    def check(self, name: str, ref: str = "") -> builtins.list[str]:
        """How the present state differs from a freeze of a group or a checkpoint of a kernel; empty: the newest."""
        return self._run(self._groups.check(name, ref))

    def teleport(
        self,
        group: str,
        to: str,
        *,
        places: Mapping[str, str] | None = None,
        allow_missing: bool | Sequence[str] = False,
        limit_rate: int = 0,
        on_progress: ProgressTaker | None = None,
    ) -> types.TeleportReport:
        """Moves the group to another host: its kernels live there, its other members are copied to their places.

        Before the decision a failure, Ctrl-C or an exception of the callback leaves everything here.
        The other host must trust this host's key.

        Args:
            group: the group.
            to: as of `Kernel.teleport`.
            places: where repositories, databases and directories come to be there, by member.
            allow_missing: as of `Kernel.teleport`, for each kernel.
            limit_rate: bytes a second of each kernel while it runs; 0: no limit.
            on_progress: receives how far the move is, in this thread.

        Raises:
            RefusedError: a member has no place, or a kernel cannot move without what the other host lacks.
            UnsupportedError: a member of another kind, or the other host cannot take it.
        """

        def work(taker: aio.ProgressTaker | None) -> Coroutine[Any, Any, types.TeleportReport]:
            return self._groups.teleport(
                group, to, places=places, allow_missing=allow_missing, limit_rate=limit_rate, on_progress=taker
            )

        return with_callbacks(self._portal, work, on_progress)

    def abort_teleport(self, group: str) -> None:
        """Ends a move of the group before its decision, also of another client.

        Raises:
            ConflictError: it is committed.
            NotFoundError: the group does not move.
        """
        self._run(self._groups.abort_teleport(group))
