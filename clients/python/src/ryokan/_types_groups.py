"""Groups and the audit log, as `ryokan.types` has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True)
class GroupMember:
    """A member of a group."""

    name: str
    kind: str
    """`kernel`, `repository`, `database`, `directory`, `command`, `postgres` or `server`."""
    target: str
    """A kernel's name, a path, the name of a source, or a connection."""


@dataclass(frozen=True)
class Group:
    """Kernels and data that are frozen and restored as one."""

    name: str
    members: list[GroupMember]
    freezes: int
    created_at: datetime | None
    unfinished: bool
    """Whether a restore was interrupted and awaits recovery."""
    on_failure: str = "resume"
    """What a failed freeze does with its kernels: `resume` or `pause`."""
    paused: str = ""
    """Why its kernels are paused; empty: they are not."""


@dataclass(frozen=True)
class MemberCost:
    """What the freeze of one member took."""

    name: str
    driver: str
    """How its content was held, such as `reflink` or `transaction`."""
    growth: str
    """What its pause grows with: `constant`, `changes` or `size`."""
    pause: float
    """Seconds."""
    store: float
    """Seconds after the pause."""
    interrupted: int
    """The execution that was interrupted for it; 0: none."""
    parked: int
    """The execution that was under way and went on; 0: none."""
    awaited: tuple[int, ...]
    """Executions whose end was awaited."""
    queued: tuple[int, ...]
    """Executions in the queue, which are in no freeze."""


@dataclass(frozen=True)
class FreezeCost:
    """What a freeze took, in seconds."""

    pause: float
    """Until everything ran again."""
    admission: float
    """Until every kernel started executions again."""
    total: float
    members: list[MemberCost]


@dataclass(frozen=True)
class Freeze:
    """A state of all members of a group at one moment."""

    id: str
    number: int
    message: str
    type: str
    creator: str
    at: datetime | None
    restored_at: datetime | None
    is_head: bool
    """Whether it is the last taken or restored."""
    lock: str
    cost: FreezeCost | None = None
    """Only of the freeze that was just taken."""
    notes: list[str] = field(default_factory=list)
    """Also: members that do not work again, and what is not captured."""


@dataclass(frozen=True)
class GroupDifference:
    """One difference between two states of a group."""

    member: str
    kind: str
    """The member's."""
    what: str
    """An area of a kernel; `head`, `commit`, `file`, `table`, `rows` and so on."""
    change: str
    """`added`, `removed`, `changed`, `renamed`, or `unknown`: not compared, and `details` say why."""
    name: str
    before: str
    after: str
    details: list[str]


@dataclass(frozen=True)
class GroupDiff:
    """Differences between two states of a group, member by member."""

    differences: list[GroupDifference]
    omitted: int
    """Number of further differences."""


@dataclass(frozen=True)
class GroupRestoration:
    """What the restore of a group did."""

    freeze: Freeze
    safety: str
    """The freeze taken just before, to which `undo` returns."""
    notes: list[str]
    """What could not be checked."""


@dataclass(frozen=True)
class AuditLine:
    """A line of the audit log."""

    sequence: int
    at: datetime | None
    uid: int
    """The caller."""
    client: str
    """The client's own name, followed by `/` and the label of an attenuated capability."""
    action: str
    """Such as `checkpoint.restore`."""
    kernel: str
    """Its id; empty: the host."""
    version_before: int
    version_after: int
    outcome: str
    """`done`, or the code of an error."""
    manifest: str
    """Of the checkpoint concerned."""
    detail: str
    hash: str
    """Over this line and all before it."""


@dataclass(frozen=True)
class AuditProof:
    """The result of a verification of the audit log."""

    head: str
    """Its present end, `LINE:HASH`."""
    broken_at: int
    """The first line that does not fit, or that records lost lines; 0: none."""
    why: str
