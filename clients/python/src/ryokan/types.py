"""What calls return and take: plain data, without a connection."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, Literal, NamedTuple, TypedDict, TypeVar

from ._source import Content
from ._types_e2b import ErrorText as ErrorText
from ._types_e2b import FilesystemEvent as FilesystemEvent
from ._types_e2b import FilesystemEventType as FilesystemEventType
from ._types_e2b import Logs as Logs
from ._types_e2b import ShownResult as ShownResult
from ._types_groups import AuditLine as AuditLine
from ._types_groups import AuditProof as AuditProof
from ._types_groups import Freeze as Freeze
from ._types_groups import FreezeCost as FreezeCost
from ._types_groups import Group as Group
from ._types_groups import GroupDiff as GroupDiff
from ._types_groups import GroupDifference as GroupDifference
from ._types_groups import GroupMember as GroupMember
from ._types_groups import GroupRestoration as GroupRestoration
from ._types_groups import MemberCost as MemberCost
from ._types_moves import Handover as Handover
from ._types_moves import TeleportProgress as TeleportProgress
from ._types_moves import TeleportReport as TeleportReport
from .errors import ExecutionError

K = TypeVar("K")


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
    venv: str | None
    """A virtual environment whose Python runs it; read-only unless `paths` has it."""
    key: str
    """Idempotency key: the same key within 24 hours returns the same kernel."""


class KernelChange(TypedDict, total=False):
    """What `Host.update` changes, and `Host.fork` for the children. What is absent or None stays."""

    net: str | None
    """`none` or `host`."""
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
    """Seconds without use after which it stops; `math.inf`: never."""
    paths: Sequence[Mount]
    """Paths of the host to add, or to give another `writable`."""
    remove_paths: Sequence[str]
    """Paths to remove."""
    venv: str | None
    """The virtual environment from the next start; `none`: the host's Python."""


class ForkOptions(TypedDict, total=False):
    """Options of a fork."""

    count: int
    """Number of children; several are called `name-1`, `name-2` and so on."""
    ref: str
    """The checkpoint from which they start; empty: the present state."""
    interrupt: bool
    """Interrupt the running execution instead of waiting for it."""
    wait: float | None
    """Seconds to wait for the running execution; None: a minute."""
    key: str
    """Idempotency key: the same key within 24 hours returns the same children."""
    expected_version: int
    """The kernel's version known to the caller; 0: any."""
    isolation: str
    """Of the children: `process` or `microvm`; empty: that of the forked kernel."""
    image: str
    """Of the children, for isolations that have images."""


class ForkChange(ForkOptions, KernelChange, total=False):
    """Options of a fork whose children get another specification."""


class CommandOptions(TypedDict, total=False):
    """Options of a program."""

    cwd: str
    """The working directory; empty: `/workspace`."""
    env: Mapping[str, str] | None
    """Variables beside those of every engine."""
    envs: Mapping[str, str] | None
    """The same, under E2B's name."""
    stdin: str | bytes | bool
    """Its standard input; True: `send_stdin` sends it."""
    timeout: float | None
    """Seconds after which it is killed; the status is then `timeout`."""
    output_limit: int
    """Bytes of output kept in the result and the journal; 0: the default."""
    detached: bool
    """With `background`: whether it continues without its handle and this client; True unless given."""


class PtySize(NamedTuple):
    """The size of a terminal."""

    rows: int = 24
    cols: int = 80


class WriteEntry(TypedDict):
    """A file for `write_files`."""

    path: str
    data: Content


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
    terminal: bool = False
    """Whether it runs on a terminal."""

    @property
    def pid(self) -> int:
        """The same as `execution_id`, under E2B's name."""
        return self.execution_id


@dataclass(frozen=True)
class Job:
    """What runs in a kernel's background: a job of its engine, or a program beside it."""

    id: str
    command: str


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
class Limits:
    """A kernel's limits; 0: the default of the daemon's configuration."""

    memory_bytes: int
    cpus: float
    pids: int
    open_files: int
    workspace_bytes: int
    idle_timeout: float
    """Seconds; `math.inf`: never."""


@dataclass(frozen=True)
class Update:
    """What `Host.update` did."""

    version: int
    at_next_start: list[str]
    """Changes that the present worker does not have."""


@dataclass(frozen=True)
class DiskFigures:
    """What a kernel takes on the disk, as last measured."""

    workspace_bytes: int
    """Files of its code; of a virtual machine its disk; 0 for a thread."""
    history_bytes: int
    """The journal, and what only this kernel needs of checkpoints, blobs and kept output.

    Without all rights, the journal alone.
    """
    saved_memory_bytes: int
    """Saved memory of a virtual machine, and its share of copies' common memory."""
    other_bytes: int
    """Engine state, index of the files, staging."""
    measured_at: datetime | None

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.workspace_bytes + self.history_bytes + self.saved_memory_bytes + self.other_bytes


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
    isolation: str
    image: str
    paths: list[Mount]
    limits: Limits
    capture: str
    """The driver that captures its files, and why no better one is used."""
    at_next_start: list[str]
    """Changes of its specification that the present worker does not have."""
    disk: DiskFigures | None = None
    """None: not measured yet. The daemon measures in the background after clients ask for it."""
    venv: str = ""
    """The virtual environment whose Python runs it; empty: the configured interpreter."""

    @property
    def sandbox_id(self) -> str:
        """The same as `id`, under E2B's name."""
        return self.id

    @property
    def metadata(self) -> dict[str, str]:
        """The same as `labels`, under E2B's name."""
        return self.labels


@dataclass(frozen=True)
class Display:
    """A rich form of an object, such as an image."""

    mime: str
    data: bytes

    @property
    def text(self) -> str:
        """The data as text."""
        return self.data.decode(errors="replace")

    @property
    def encoded(self) -> str:
        """The data as text, or in base64 if it is none, as notebooks and E2B have it."""
        is_text = self.mime.startswith("text/") or self.mime.endswith(("json", "xml", "javascript"))
        return self.text if is_text else base64.b64encode(self.data).decode()


@dataclass(frozen=True)
class Result:
    """How an execution ended.

    `stdout` and `stderr` are the kept beginning: `truncated_bytes` counts what was written beyond
    `output_limit`. The newest of that is in `stdout_tail_bytes` and `stderr_tail_bytes`: a quarter of
    the limit, at most 64 KiB.
    """

    execution_id: int
    status: str
    """`done`, `failed`, `timeout`, `interrupted`, `lost` or `refused`."""
    exit_code: int
    error: ErrorText
    """Why it did not end well, a text; empty: it did, or the engine said nothing."""
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
    stdout_tail_bytes: bytes = b""
    stderr_tail_bytes: bytes = b""

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

    @property
    def logs(self) -> Logs:
        """Both streams, under E2B's name."""
        return Logs([self.stdout] if self.stdout else [], [self.stderr] if self.stderr else [])

    @property
    def results(self) -> list[ShownResult]:
        """`displays`, each as a result of its own, and the last expression's `text`, under E2B's names."""
        shown = [ShownResult({display.mime: display.encoded}, False) for display in self.displays]
        return shown if self.text is None else [*shown, ShownResult({"text/plain": self.text}, True)]

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
    modified_ns: int = 0
    """As `modified`, exactly: nanoseconds since 1970."""


@dataclass(frozen=True)
class Copied:
    """What `Files.upload` or `Files.download` copied."""

    files: int
    """Files and symbolic links."""
    bytes: int
    skipped: list[str]
    """Paths of pipes, sockets and devices."""


FileEventKind = Literal["created", "written", "closed", "changed", "removed", "overflow", "ended"]


@dataclass(frozen=True)
class FileEvent:
    """Something that happened to a file of a watched directory."""

    kind: FileEventKind
    """`created` or `removed` (also moved), `written`, `closed` after it was open for writing, `changed`
    (mode, owner or times); `overflow`: events are missing; `ended`: the last event."""
    path: str
    """Relative to the watched directory; empty: that itself."""


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

    @property
    def snapshot_id(self) -> str:
        """The same as `id`, under E2B's name."""
        return self.id


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
class Taken:
    """What `Kernel.take` took from a fork."""

    safety: Checkpoint | None
    """The checkpoint before it; None: there was nothing to take."""
    changes: list[Difference]
    skipped: list[str] = field(default_factory=list)
    """Pipes, sockets and devices, which are not taken."""


@dataclass(frozen=True)
class Patch:
    """The text difference of one file."""

    path: str
    change: str
    """`added`, `removed`, `changed` or `renamed`."""
    before: str
    """Its previous name, if it was renamed."""
    note: str
    """Why there is no text: `binary`, `too large`, or what it is instead of a file."""
    text: bytes
    """A unified diff, with the file's bytes as they are: not safe to print to a terminal."""


@dataclass(frozen=True)
class Preview:
    """What a restore would do."""

    checkpoint: Checkpoint
    changes: list[Difference]
    """From the present state to the checkpoint; only what a restore brings back."""
    ends: list[Job]
    """Jobs and programs that would end."""
    lost: list[Missed]
    """Parts of the present state that no checkpoint holds: `undo` does not bring them back."""


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
    ended: list[Job]
    """Jobs of the engine, and programs beside it, that the restore ended."""


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
class Event:
    """Something that happened to a kernel or to the host; kind `gap` stands for discarded events."""

    sequence: int
    at: datetime | None
    kernel: str
    """Its name; empty: the host."""
    kind: str
    detail: dict[str, Any]


@dataclass(frozen=True)
class Bundle:
    """A file that `Kernel.export` wrote."""

    digest: str
    size: int


@dataclass(frozen=True)
class HostResource:
    """A resource of the host that an exported kernel requests."""

    kind: str
    """`path`, `mount`, `net`, `mcp` or `layer`."""
    name: str
    source: str
    """The host's path; a server's command line or address."""
    writable: bool


@dataclass(frozen=True)
class Signer:
    """Who signed an exported kernel."""

    standing: str
    """`own`, `trusted`, `former`, `unknown` or `missing`."""
    name: str
    key: str


@dataclass(frozen=True)
class Review:
    """What an exported kernel requests, and who signed it."""

    requested: list[HostResource]
    signer: Signer


@dataclass(frozen=True)
class Imported(Generic[K]):
    """An imported kernel, and which of the requested resources of the host it has."""

    kernel: K
    granted: list[HostResource]
    withheld: list[HostResource]


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
    why: str
    """Why it is kept."""


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
    kept: Sequence[DiskPart]
    """What it needs `stored_bytes` for; they add up to them."""
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
    store: Sequence[DiskPart]
    """What the `objects` of `host` are kept for; they add up to them. Empty for a single kernel."""
