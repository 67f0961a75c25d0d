"""The schema, and its conversion from and to plain data. Everything here runs in the loop's thread."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast, get_type_hints

import capnp

from . import types
from .errors import InternalError, InvalidArgumentError, RyokanError, made

P = ParamSpec("P")
T = TypeVar("T")

_VALUE_DEPTH = 100
NESTING = 4 * _VALUE_DEPTH
"""Levels of a message: a level of a value has several."""
_INT64 = range(-(2**63), 2**63)
_NEVER = 2**64 - 1


def _schema_file() -> Path:
    packaged = Path(__file__).with_name("ryokan.capnp")
    # In a checkout there is one schema, and no copy.
    return packaged if packaged.exists() else Path(__file__).parents[4] / "schema" / "ryokan.capnp"


# A parser of its own: the program may load another version of this schema. Imports: pycapnp has `/capnp/stream.capnp`.
schema: Any = capnp.SchemaParser().load(str(_schema_file()), imports=[str(Path(capnp.__file__).parents[1])])


def _reads(read: Callable[P, T]) -> Callable[P, T]:
    """Reports malformed data in an answer as the daemon's fault."""

    @functools.wraps(read)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return read(*args, **kwargs)
        except (capnp.KjException, ValueError, RecursionError) as error:
            wrong = str(error).splitlines()[0]
        raise InternalError(f"the daemon's answer is malformed: {wrong}")

    return checked


def milliseconds(seconds: float | None, name: str) -> int:
    """A duration on the wire; None is 0."""
    if seconds is None:
        return 0
    # 0 means "none" on the wire.
    if not 0 < seconds < 2**53:
        raise InvalidArgumentError(f"{name} is not a positive number of seconds: {seconds}")
    return max(1, math.ceil(seconds * 1000))


def pairs(items: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in items.items()]


def value_to_wire(value: Any, depth: int = _VALUE_DEPTH) -> dict[str, Any]:
    """A value as pycapnp sets it."""
    if depth == 0:
        raise InvalidArgumentError(f"value nested deeper than {_VALUE_DEPTH} levels", "pass it as a file")
    match value:
        case None:
            return {"null": None}
        case bool():
            return {"bool": value}
        case int():
            return {"int": value} if value in _INT64 else {"bigInt": _digits(value)}
        case float():
            return {"float": value}
        case str():
            return {"string": value}
        case bytes() | bytearray() | memoryview():
            return {"bytes": bytes(value)}
        case list() | tuple():
            return {"array": [value_to_wire(item, depth - 1) for item in value]}
        case Mapping():
            for key in value:
                if not isinstance(key, str):
                    raise InvalidArgumentError(f"keys of a value are strings, not {type(key).__name__}")
            return {"object": [{"key": key, "value": value_to_wire(item, depth - 1)} for key, item in value.items()]}
        case types.BlobRef():
            fields = {"id": value.id, "size": value.size, "contentType": value.content_type, "hash": value.hash}
            return {"blob": fields}
    raise InvalidArgumentError(
        f"a {type(value).__name__} has no value form", "pass None, bool, int, float, str, bytes, list or dict"
    )


@_reads
def value_from_wire(reader: Any) -> Any:
    """A value as plain Python data."""
    return _value(reader)


def _value(reader: Any) -> Any:
    kind = reader.which()
    match kind:
        case "null":
            return None
        case "array":
            return [_value(item) for item in reader.array]
        case "object":
            return {field.key: _value(field.value) for field in reader.object}
        case "bytes":
            return bytes(reader.bytes)
        case "bigInt":
            return _big_int(reader.bigInt)
        case "opaque":
            return types.Opaque(reader.opaque.type, reader.opaque.repr)
        case "blob":
            blob = reader.blob
            return types.BlobRef(blob.id, blob.size, blob.contentType, bytes(blob.hash))
    return getattr(reader, str(kind))


def _big_int(digits: str) -> Any:
    try:
        return int(digits)
    except ValueError:  # Longer than Python converts: `sys.set_int_max_str_digits`.
        return types.Opaque("int", digits)


def _digits(value: int) -> str:
    try:
        return str(value)
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from None


def environment(env: Mapping[str, str] | None, envs: Mapping[str, str] | None) -> list[dict[str, str]]:
    """Variables of a program, also under E2B's name."""
    return pairs({**(env or {}), **(envs or {})})


def known(options: Mapping[str, Any], shape: Any, what: str) -> None:
    """Refuses options that a `TypedDict` does not have."""
    unknown = options.keys() - set(get_type_hints(shape))
    if unknown:
        raise TypeError(f"unknown options of {what}: {', '.join(sorted(unknown))}")


def _limits(options: Mapping[str, Any]) -> dict[str, Any]:
    idle = options.get("idle_timeout")
    paths = options.get("paths") or ()
    return {
        "paths": [{"path": one.path, "source": one.source, "writable": one.writable} for one in paths],
        "memoryBytes": options.get("memory_bytes") or 0,
        "cpuMilli": round((options.get("cpus") or 0) * 1000),
        "pids": options.get("pids") or 0,
        "openFiles": options.get("open_files") or 0,
        "workspaceBytes": options.get("workspace_bytes") or 0,
        "idleTimeoutMs": _NEVER if idle == math.inf else milliseconds(idle, "idle_timeout"),
        "net": options.get("net") or "",
        "venv": options.get("venv") or "",
    }


def spec_to_wire(name: str, options: types.KernelOptions) -> dict[str, Any]:
    """A `KernelSpec` as pycapnp sets it."""
    known(options, types.KernelOptions, "a kernel")
    return _limits(options) | {
        "name": name,
        "engine": options.get("engine") or "",
        "isolation": options.get("isolation") or "",
        "image": options.get("image") or "",
        "labels": pairs(options.get("labels", {})),
        "allowDegraded": list(options.get("allow_degraded", ())),
        "fromDir": options.get("from_dir") or "",
        "ephemeral": options.get("ephemeral", False),
    }


def change_to_wire(change: Mapping[str, Any]) -> dict[str, Any]:
    """A `KernelUpdate` as pycapnp sets it."""
    return _limits(change) | {"removePaths": list(change.get("remove_paths") or ())}


def fork_to_wire(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A `ForkRequest` as pycapnp sets it."""
    return {
        "name": name,
        "from": options.get("ref", ""),
        "count": options.get("count", 1),
        "interrupt": options.get("interrupt", False),
        "waitMs": milliseconds(options.get("wait"), "wait"),
        "key": options.get("key", ""),
        "expectedVersion": options.get("expected_version", 0),
        "isolation": options.get("isolation", ""),
        "image": options.get("image", ""),
    }


def resource_to_wire(resource: types.HostResource) -> dict[str, Any]:
    return {
        "kind": resource.kind,
        "name": resource.name,
        "source": resource.source,
        "writable": resource.writable,
    }


def nanoseconds(at: datetime) -> int:
    """A time on the wire; one without a zone is local."""
    since = at.astimezone(timezone.utc) - datetime(1970, 1, 1, tzinfo=timezone.utc)
    return (since.days * 86400 + since.seconds) * 10**9 + since.microseconds * 1000


def time(ms: int) -> datetime | None:
    return datetime.fromtimestamp(ms / 1000, timezone.utc) if ms else None


def _texts(items: Iterable[Any]) -> list[str]:
    return [str(item) for item in items]


@_reads
def error(reader: Any) -> RyokanError:
    return made(str(reader.code), reader.message, reader.hint, reader.reason)


@_reads
def host_info(reader: Any) -> types.HostInfo:
    return types.HostInfo(reader.id, reader.name, reader.version, reader.arch, _texts(reader.engines))


@_reads
def process(reader: Any) -> types.Process:
    started = time(reader.startedAtMs)
    return types.Process(reader.execId, _texts(reader.argv), started, reader.detached, reader.terminal)


@_reads
def ability(reader: Any) -> types.Ability:
    return types.Ability(reader.name, reader.present, reader.detail, reader.hint, reader.required)


def _disk_figures(reader: Any) -> types.DiskFigures | None:
    if not reader.measuredAtMs:
        return None
    return types.DiskFigures(
        workspace_bytes=reader.workspaceBytes,
        history_bytes=reader.historyBytes,
        saved_memory_bytes=reader.savedMemoryBytes,
        other_bytes=reader.otherBytes,
        measured_at=time(reader.measuredAtMs),
    )


@_reads
def kernel_info(reader: Any) -> types.KernelInfo:
    spec, origin = reader.spec, reader.origin
    return types.KernelInfo(
        id=reader.id,
        name=spec.name,
        engine=spec.engine,
        state=reader.state,
        state_reason=reader.stateReason,
        version=reader.version,
        epoch=reader.epoch,
        generation=reader.generation,
        created_at=time(reader.createdAtMs),
        last_used_at=time(reader.lastUsedAtMs),
        executions=reader.executions,
        checkpoints=reader.checkpoints,
        memory_bytes=reader.memoryBytes,
        labels={label.key: label.value for label in spec.labels},
        ephemeral=spec.ephemeral,
        net=spec.net,
        sandbox=_texts(reader.sandbox),
        uid=reader.uid,
        rights=_texts(reader.rights),
        origin=types.Origin(origin.kind, origin.kernel, origin.name, origin.checkpoint, origin.restored),
        thread_of=reader.threadOf,
        isolation=spec.isolation,
        image=spec.image,
        paths=[mount(one) for one in spec.paths],
        limits=types.Limits(
            memory_bytes=spec.memoryBytes,
            cpus=spec.cpuMilli / 1000,
            pids=spec.pids,
            open_files=spec.openFiles,
            workspace_bytes=spec.workspaceBytes,
            idle_timeout=math.inf if spec.idleTimeoutMs == _NEVER else spec.idleTimeoutMs / 1000,
        ),
        capture=reader.capture,
        at_next_start=_texts(reader.atNextStart),
        disk=_disk_figures(reader.disk),
        venv=spec.venv,
    )


@_reads
def result(reader: Any, displays: list[types.Display]) -> types.Result:
    root = reader.output.root
    text = root[0].text if len(root) == 1 and root[0].entryType == "text" and not root[0].name else None
    return types.Result(
        execution_id=reader.execId,
        status=str(reader.status),
        exit_code=reader.code,
        error=types.ErrorText(reader.err, bytes(reader.stderr).decode(errors="replace")),
        stdout_bytes=bytes(reader.stdout),
        stderr_bytes=bytes(reader.stderr),
        value=value_from_wire(reader.data) if reader.hasData else None,
        has_value=reader.hasData,
        text=text,
        displays=displays,
        duration=reader.durationUs / 1e6,
        truncated_bytes=reader.truncatedBytes,
        stdout_tail_bytes=bytes(reader.stdoutTail),
        stderr_tail_bytes=bytes(reader.stderrTail),
    )


@_reads
def mount(reader: Any) -> types.Mount:
    return types.Mount(reader.path, reader.source, reader.writable)


@_reads
def file_info(reader: Any) -> types.FileInfo:
    return types.FileInfo(
        name=os.fsdecode(bytes(reader.name)),
        kind=str(reader.kind),
        size=reader.bytes,
        mode=reader.mode,
        modified=time(reader.modifiedNs // 1_000_000),
        target=os.fsdecode(bytes(reader.target)),
        modified_ns=reader.modifiedNs,
    )


@_reads
def file_event(reader: Any) -> types.FileEvent | None:
    """An event of a file; None: the watch has begun."""
    kind = str(reader.kind)
    if kind == "ready":
        return None
    return types.FileEvent(cast(types.FileEventKind, kind), os.fsdecode(bytes(reader.path)))


def _disk_parts(readers: Iterable[Any]) -> list[types.DiskPart]:
    return [types.DiskPart(part.what, part.bytes, part.why) for part in readers]


def _kernel_disk(reader: Any) -> types.KernelDisk:
    each = [types.CheckpointDisk(one.id, one.name, one.storedBytes, one.freedBytes, one.why) for one in reader.each]
    return types.KernelDisk(
        id=reader.id,
        name=reader.name,
        parts=_disk_parts(reader.parts),
        checkpoints=reader.checkpoints,
        stored_bytes=reader.storedBytes,
        freed_bytes=reader.freedBytes,
        kept=_disk_parts(reader.kept),
        each=each,
        incomplete=reader.incomplete,
    )


@_reads
def disk_usage(reader: Any) -> types.DiskUsage:
    kernels = [_kernel_disk(kernel) for kernel in reader.kernels]
    return types.DiskUsage(kernels, _disk_parts(reader.host), _disk_parts(reader.store))


@_reads
def variable(reader: Any) -> types.Variable:
    return types.Variable(reader.name, reader.type, reader.summary)


@_reads
def missed(reader: Any) -> types.Missed:
    return types.Missed(reader.key, reader.type, reader.reason)


@_reads
def checkpoint(reader: Any) -> types.Checkpoint:
    return types.Checkpoint(
        id=reader.id,
        number=reader.number,
        name=reader.name,
        description=reader.description,
        type=str(reader.type),
        creator=reader.creator,
        at=time(reader.atMs),
        parent=reader.parent,
        pinned=reader.pinned,
        is_head=reader.isHead,
        version=reader.version,
        manifest=reader.manifest,
        files=reader.files,
        state_bytes=reader.stateBytes,
        kind=reader.kind,
        machine_bytes=reader.machineBytes,
    )


@_reads
def difference(reader: Any) -> types.Difference:
    return types.Difference(
        str(reader.area), str(reader.deed), reader.name, reader.before, reader.after, _texts(reader.what)
    )


_REVERSED = {"added": "removed", "removed": "added"}
_RESTORED = ("state", "file", "mount", "mcp")


def preview(
    found: types.Checkpoint, since: Iterable[types.Difference], ends: list[types.Job], lost: list[types.Missed]
) -> types.Preview:
    """What a restore would do, from the differences since its checkpoint."""
    changes = []
    for one in since:
        # Other areas are never restored, or follow from these.
        if one.area in _RESTORED:
            name, before, after = one.name, one.after, one.before
            if one.change == "renamed":
                name, before, after = one.before, one.name, one.after
            change = _REVERSED.get(one.change, one.change)
            changes.append(types.Difference(one.area, change, name, before, after, one.what))
    return types.Preview(found, changes, ends, lost)


@_reads
def patch_part(reader: Any) -> tuple[types.Patch, bool]:
    """A part of a text difference, and whether more follow."""
    path, before = (os.fsdecode(bytes(name)) for name in (reader.path, reader.before))
    return types.Patch(path, str(reader.deed), before, reader.note, bytes(reader.text)), reader.more


def patches(parts: Iterable[tuple[types.Patch, bool]]) -> list[types.Patch]:
    """The text differences of whole files."""
    whole: list[types.Patch] = []
    continues = False
    for part, more in parts:
        if continues:
            whole[-1] = replace(whole[-1], text=whole[-1].text + part.text)
        else:
            whole.append(part)
        continues = more
    return whole


@_reads
def event(reader: Any) -> types.Event:
    detail = json.loads(reader.detailJson) if reader.detailJson else {}
    return types.Event(reader.sequence, time(reader.atMs), reader.kernel, reader.kind, detail)


@_reads
def job(reader: Any) -> types.Job:
    return types.Job(reader.id, reader.command)


@_reads
def resources(readers: Iterable[Any]) -> list[types.HostResource]:
    return [types.HostResource(one.kind, one.name, one.source, one.writable) for one in readers]


@_reads
def review(reader: Any) -> types.Review:
    signer = reader.signer
    return types.Review(resources(reader.requested), types.Signer(str(signer.standing), signer.name, signer.key))


@_reads
def restoration(reader: Any) -> types.Restoration:
    return types.Restoration(
        checkpoint=checkpoint(reader.checkpoint),
        safety=reader.safety,
        version=reader.version,
        missed=[missed(entry) for entry in reader.missed],
        files_changed=reader.filesChanged,
        from_memory=reader.fromMemory,
        why_not_memory=reader.whyNotMemory,
        ended=[job(item) for item in reader.ended],
    )


@_reads
def journal_entry(reader: Any) -> types.JournalEntry:
    return types.JournalEntry(
        sequence=reader.sequence,
        at=time(reader.atMs),
        kind=reader.kind,
        actor=reader.actor,
        execution_id=reader.execId,
        text=reader.text,
        status=reader.status,
        exit_code=reader.code,
        error=reader.err,
        duration=reader.durationUs / 1e6,
        output_bytes=reader.outputBytes,
        truncated_bytes=reader.truncatedBytes,
    )
