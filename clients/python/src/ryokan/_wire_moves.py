"""Moves between hosts as plain data."""

from __future__ import annotations

from typing import Any

from . import types
from ._wire import _reads, _texts, time


@_reads
def report(reader: Any) -> types.TeleportReport:
    return types.TeleportReport(
        handover=reader.handover,
        host=reader.host,
        epoch=reader.epoch,
        objects=reader.objects,
        bytes=reader.bytes,
        sent_objects=reader.sentObjects,
        sent_bytes=reader.sentBytes,
        pause=reader.pauseMs / 1000,
        missing=_texts(reader.missing),
        acknowledged=reader.acknowledged,
        kind=reader.kind,
        kind_reason=reader.kindReason,
        elapsed=reader.elapsedMs / 1000,
        wire_bytes=reader.wireBytes,
        stays=_texts(reader.stays),
    )


@_reads
def handover(reader: Any) -> types.Handover:
    return types.Handover(
        id=reader.id,
        kernel=reader.kernel,
        name=reader.name,
        state=reader.state,
        peer=reader.peer,
        epoch=reader.epoch,
        at=time(reader.atMs),
        problem=reader.problem,
    )
