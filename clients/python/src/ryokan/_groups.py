"""Groups of kernels, repositories and databases, asynchronously."""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import _moves, _wire, _wire_groups, errors, types
from ._connection import Capability, Connection
from ._moves import ProgressTaker


class Groups:
    """Kernels and data of this host that are frozen and restored as one.

    A `ref` is a freeze's number, the beginning of its id, its message, `latest` or `~N`.
    """

    def __init__(self, connection: Connection, host: Capability) -> None:
        self._connection, self._host = connection, host
        self._opened: Capability | None = None

    async def _call(self, method: str, *args: Any) -> Any:
        if self._opened is None:
            answer = await self._connection.call(self._host, "groups")
            self._opened = Capability(self._connection, answer.groups)
        # What a group holds decides how long it takes.
        return await self._connection.call(self._opened, method, *args, deadline=None)

    async def new(self, name: str) -> None:
        """Makes an empty group.

        Raises:
            AlreadyExistsError: a group or a kernel has this name.
        """
        await self._call("create", name)

    async def add(self, group: str, kind: str, target: str, *, name: str = "") -> types.GroupMember:
        """Adds a member.

        Args:
            group: the group.
            kind: `kernel`, `repository`, `database`, `directory`, `command`, `postgres` or `server`.
            target: the kernel's name, the path, the name in the daemon's configuration, or
                `dbname=… host=… port=… user=…`.
            name: the member's name; empty: derived from the target.
        """
        return _wire_groups.member((await self._call("add", group, kind, target, name)).member)

    async def remove(self, group: str, member: str = "", *, abandon: bool = False) -> None:
        """Removes a member, or without one the group with its freezes; the data stays as it is.

        `abandon`: although a freeze or a restore of it has not ended.
        """
        await self._call("remove", group, member, abandon)

    async def remove_freeze(self, group: str, ref: str) -> None:
        """Removes one freeze; the members and the other freezes stay as they are."""
        if not ref:
            raise errors.InvalidArgumentError("a freeze is named by a `ref`")
        await self._call("remove", group, "", False, ref)

    async def list(self) -> builtins.list[types.Group]:
        """The groups of this user."""
        return [_wire_groups.group(one) for one in (await self._call("list")).groups]

    async def show(self, group: str) -> types.Group:
        """A group with its members."""
        return _wire_groups.group((await self._call("show", group)).group)

    async def freeze(
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
        wait_ms = _wire.milliseconds(wait, "wait")
        answer = await self._call("freeze", group, message, interrupt, wait_ms, on_failure, park)
        return _wire_groups.freeze(answer.freeze, True)

    async def configure(self, group: str, *, on_failure: str) -> None:
        """Sets what a freeze does with the kernels if it fails: `resume` or `pause`."""
        await self._call("configure", group, on_failure)

    async def resume(self, group: str) -> None:
        """Lets the kernels of a group go on that a failed freeze paused."""
        await self._call("resume", group)

    async def log(self, group: str, limit: int = 0) -> builtins.list[types.Freeze]:
        """The freezes of a group, newest first; `limit` 0: all."""
        return [_wire_groups.freeze(one) for one in (await self._call("freezes", group, limit)).freezes]

    async def diff(self, group: str, before: str = "", after: str = "") -> types.GroupDiff:
        """Differences from freeze `before` (empty: the newest) to freeze `after` (empty: the present state)."""
        answer = await self._call("diff", group, before, after)
        return types.GroupDiff([_wire_groups.difference(one) for one in answer.differences], answer.omitted)

    async def restore(
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
        answer = await self._call("restore", group, ref, [*members], interrupt, _wire.milliseconds(wait, "wait"))
        return _wire_groups.restoration(answer.restoration)

    async def undo(
        self, group: str, *, interrupt: bool = False, wait: float | None = None
    ) -> types.GroupRestoration:
        """Returns to the state before the last restore; `interrupt` and `wait` as in `restore`."""
        answer = await self._call("undo", group, interrupt, _wire.milliseconds(wait, "wait"))
        return _wire_groups.restoration(answer.restoration)

    async def lock(self, name: str) -> str:
        """The lock of the present state of a group or a kernel, as text."""
        return str((await self._call("lock", name)).lock)

    async def check(self, name: str, ref: str = "") -> builtins.list[str]:
        """How the present state differs from a freeze of a group or a checkpoint of a kernel; empty: the newest."""
        return [str(one) for one in (await self._call("check", name, ref)).differences]

    async def teleport(
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

        Before the decision a failure, a cancelled call or an exception of the callback leaves everything here.
        The other host must trust this host's key.

        Args:
            group: the group.
            to: as of `Kernel.teleport`.
            places: where repositories, databases and directories come to be there, by member.
            allow_missing: as of `Kernel.teleport`, for each kernel.
            limit_rate: bytes a second of each kernel while it runs; 0: no limit.
            on_progress: receives how far the move is.

        Raises:
            RefusedError: a member has no place, or a kernel cannot move without what the other host lacks.
            UnsupportedError: a member of another kind, or the other host cannot take it.
        """
        named = [] if isinstance(allow_missing, bool) else list(allow_missing)
        after = ("", limit_rate, "", "", "", 0, named, _wire.pairs(places or {}))
        return await _moves.teleport(self._connection, group, to, (allow_missing is True, *after), on_progress)

    async def abort_teleport(self, group: str) -> None:
        """Ends a move of the group before its decision, also of another client.

        Raises:
            ConflictError: it is committed.
            NotFoundError: the group does not move.
        """
        await self._connection.call(self._host, "abortTeleport", group, deadline=None)
