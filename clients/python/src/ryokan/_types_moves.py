"""Data of moves between hosts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True)
class TeleportProgress:
    """How far a move is."""

    phase: str
    sent_bytes: int
    """On the connection, compressed."""
    reused_bytes: int
    """Content that the other host had."""


@dataclass(frozen=True)
class TeleportReport:
    """What a move did."""

    handover: str
    host: str
    """The id of the other host."""
    epoch: int
    """Of the kernel there."""
    objects: int
    """That the kernel consists of."""
    bytes: int
    sent_objects: int
    """That the other host lacked."""
    sent_bytes: int
    pause: float
    """Seconds from the last moment here to the commit."""
    missing: list[str]
    """What the kernel moved without."""
    acknowledged: bool
    """Whether the other host has confirmed that the kernel lives there."""
    kind: str
    """Of the snapshot: `checkpoint`, or `teleport` with a virtual machine's memory."""
    kind_reason: str
    """Why this kind."""
    elapsed: float
    """Seconds of the whole move."""
    wire_bytes: int
    """Sent on the connection, compressed."""
    stays: list[str]
    """Of a group: what stays here as it is."""


@dataclass(frozen=True)
class Handover:
    """A move in progress, one without an acknowledgement, or a received kernel."""

    id: str
    kernel: str
    """Its id."""
    name: str
    state: str
    """`moving`, `committing`, `aborting`, `undecided`; `prepared`, `arriving` (a group), `live`;
    `damaged`."""
    peer: str
    """Outgoing: the way to the other host; incoming: the id of the source host."""
    epoch: int
    """Incoming: of the kernel here."""
    at: datetime | None
    problem: str
    """Why it is not acknowledged yet, or what is wrong with its record."""
