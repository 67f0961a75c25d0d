"""What calls return and take: plain data, without a connection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypedDict

from .errors import ExecutionError


@dataclass(frozen=True)
class Opaque:
    """A live object of the engine without a value form: its type and its repr."""

    type: str
    repr: str


@dataclass(frozen=True)
class BlobRef:
    """A reference to a blob in the host's store."""

    id: str
    size: int
    content_type: str
    hash: bytes


@dataclass(frozen=True)
class Mount:
    """A path of the host, visible inside at `path`."""

    path: str
    source: str = ""
    writable: bool = False


class KernelOptions(TypedDict, total=False):
    """Options of a new kernel. What is absent or None is decided by the daemon's configuration."""

    engine: str | None
    """`kaish`, `python`, `bash` or `node`."""
    memory_bytes: int | None
    """Memory of all its processes."""
    cpus: float | None
    """Processors; fractions are possible."""
    pids: int | None
    """Processes and threads."""
    open_files: int | None
    """Open files of one process."""
    workspace_bytes: int | None
    """Size of its workspace."""
    idle_timeout: float | None
    """Seconds without use after which it stops and keeps its state; `math.inf`: never."""
    net: str | None
    """`none` or `host`."""
    paths: Sequence[Mount]
    """Paths of the host that it may use."""
    from_dir: str | None
    """A directory of the host, copied into the new workspace."""
    labels: Mapping[str, str]
    """Labels, for `Host.list`."""
    ephemeral: bool
    """Removed when the connection that created it ends."""
    allow_degraded: Sequence[str]
    """Layers of the sandbox that may be missing on this host."""
    isolation: str | None
    """`process` or `microvm`."""
    image: str | None
    """An image, for isolations that have them."""
    key: str
    """Idempotency key: the same key within 24 hours returns the same kernel."""


@dataclass(frozen=True)
class HostInfo:
    """A host."""

    id: str
    name: str
    version: str
    arch: str
    engines: list[str]


@dataclass(frozen=True)
class Process:
    """A running program beside the engine."""

    execution_id: int
    argv: list[str]
    started_at: datetime | None
    detached: bool
    """Whether it continues without the client that started it."""


@dataclass(frozen=True)
class Ability:
    """Something that a host can or cannot do, with a hint how to add it."""

    name: str
    present: bool
    detail: str
    hint: str
    required: bool


@dataclass(frozen=True)
class Origin:
    """Where a kernel's state comes from: `original`, `restored` or `forked`, and from what."""

    kind: str
    kernel: str
    name: str
    checkpoint: str
    restored: str


@dataclass(frozen=True)
class KernelInfo:
    """A kernel at one moment."""

    id: str
    name: str
    engine: str
    state: str
    state_reason: str
    version: int
    epoch: int
    generation: int
    created_at: datetime | None
    last_used_at: datetime | None
    executions: int
    checkpoints: int
    memory_bytes: int
    labels: dict[str, str]
    ephemeral: bool
    net: str
    sandbox: list[str]
    uid: int
    rights: list[str]
    origin: Origin
    thread_of: str


@dataclass(frozen=True)
class Display:
    """A rich form of an object, such as an image."""

    mime: str
    data: bytes

    @property
    def text(self) -> str:
        """The data as text."""
        return self.data.decode(errors="replace")


@dataclass(frozen=True)
class Result:
    """How an execution ended.

    `stdout` and `stderr` are the kept part: `truncated_bytes` counts what was written beyond
    `output_limit`.
    """

    execution_id: int
    status: str
    """`done`, `failed`, `timeout`, `interrupted`, `lost` or `refused`."""
    exit_code: int
    error: str
    """Why it did not end well; empty: it did, or the engine said nothing."""
    stdout_bytes: bytes
    stderr_bytes: bytes
    value: Any
    """The value of the last expression."""
    has_value: bool
    """Distinguishes a value of None from no value."""
    text: str | None
    """The value as the engine prints it."""
    displays: list[Display]
    """Rich forms of values, of engines that have them."""
    duration: float
    """Seconds."""
    truncated_bytes: int

    @property
    def ok(self) -> bool:
        """Whether the code ended well."""
        return self.status == "done"

    @property
    def stdout(self) -> str:
        """Standard output as text; invalid UTF-8 is replaced."""
        return self.stdout_bytes.decode(errors="replace")

    @property
    def stderr(self) -> str:
        """Standard error as text; invalid UTF-8 is replaced."""
        return self.stderr_bytes.decode(errors="replace")

    def check(self) -> Result:
        """Returns itself, or raises `ExecutionError` if the code did not end well."""
        if not self.ok:
            raise ExecutionError(self)
        return self


@dataclass(frozen=True)
class FileInfo:
    """A file's attributes. A name that is not UTF-8 has surrogates, as `os.fsdecode` makes them."""

    name: str
    kind: str
    """`file`, `directory`, `symlink` or `other`."""
    size: int
    mode: int
    modified: datetime | None
    target: str
    """Of a symbolic link."""


@dataclass(frozen=True)
class Variable:
    """A variable of a kernel."""

    name: str
    type: str
    summary: str


@dataclass(frozen=True)
class Missed:
    """A value that saved state does not hold, and why."""

    key: str
    type: str
    reason: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint; `id`, `name`, `latest` and `~N` are what other calls take as `ref`."""

    id: str
    number: int
    name: str
    description: str
    type: str
    creator: str
    at: datetime | None
    parent: str
    pinned: bool
    is_head: bool
    version: int
    manifest: str
    files: int
    state_bytes: int
    kind: str = "checkpoint"
    """`checkpoint`, or `teleport`: with a virtual machine's memory."""
    machine_bytes: int = 0
    """Of memory, state and disk of the virtual machine."""


@dataclass(frozen=True)
class Difference:
    """One difference between two checkpoints."""

    area: str
    """`state`, `file`, `mount`, `mcp`, `journal`, …"""
    change: str
    """`added`, `removed`, `changed` or `renamed`."""
    name: str
    before: str
    after: str
    what: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Restoration:
    """What a restore did; `safety` is the checkpoint to which `undo` returns."""

    checkpoint: Checkpoint
    safety: str
    version: int
    missed: list[Missed]
    files_changed: int
    from_memory: bool
    why_not_memory: str


@dataclass(frozen=True)
class JournalEntry:
    """One entry of a kernel's history."""

    sequence: int
    at: datetime | None
    kind: str
    """`execution`, `message`, `mark` or `checkpoint`."""
    actor: str
    execution_id: int
    """0 unless it is an execution."""
    text: str
    status: str
    exit_code: int
    error: str
    duration: float
    output_bytes: int
    truncated_bytes: int


@dataclass(frozen=True)
class DiskPart:
    """A part of what is on the disk."""

    what: str
    bytes: int
    why: str
    """What it is for, and how to free it."""


@dataclass(frozen=True)
class CheckpointDisk:
    """What a checkpoint takes in the store."""

    id: str
    name: str
    stored_bytes: int
    freed_bytes: int
    """Of these, what no other checkpoint, kernel or record needs."""


@dataclass(frozen=True)
class KernelDisk:
    """What a kernel takes on the disk."""

    id: str
    name: str
    parts: Sequence[DiskPart]
    """Of its folder; they add up to it."""
    checkpoints: int
    stored_bytes: int
    """Of the store's objects that its checkpoints, blobs and kept output need."""
    freed_bytes: int
    """Of these, what only this kernel needs."""
    each: Sequence[CheckpointDisk]
    """Newest first; only of a kernel that `du` names."""
    incomplete: str
    """Why objects are missing in the figures; empty: none is."""


@dataclass(frozen=True)
class DiskUsage:
    """What takes room on the disk."""

    kernels: Sequence[KernelDisk]
    host: Sequence[DiskPart]
    """Of the data folder; they add up to it. Empty for a single kernel."""
