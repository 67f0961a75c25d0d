"""Groups and the audit log as plain data."""

from __future__ import annotations

from typing import Any

from . import types
from ._wire import _reads, _texts, time


def _seconds(microseconds: int) -> float:
    return microseconds / 1e6


@_reads
def member(reader: Any) -> types.GroupMember:
    return types.GroupMember(reader.name, reader.kind, reader.target)


@_reads
def group(reader: Any) -> types.Group:
    members = [member(one) for one in reader.members]
    return types.Group(
        name=reader.name,
        members=members,
        freezes=reader.freezes,
        created_at=time(reader.createdAtMs),
        unfinished=reader.unfinished,
        on_failure=str(reader.onFailure),
        paused=reader.paused,
    )


def _cost(reader: Any) -> types.FreezeCost:
    members = [
        types.MemberCost(
            one.name,
            one.driver,
            one.growth,
            _seconds(one.pauseUs),
            _seconds(one.storeUs),
            one.interrupted,
            one.parked,
            tuple(one.awaited),
            tuple(one.queued),
        )
        for one in reader.members
    ]
    return types.FreezeCost(
        _seconds(reader.pauseUs), _seconds(reader.admissionUs), _seconds(reader.totalUs), members
    )


@_reads
def freeze(reader: Any, with_cost: bool = False) -> types.Freeze:
    return types.Freeze(
        id=reader.id,
        number=reader.number,
        message=reader.message,
        type=str(reader.type),
        creator=reader.creator,
        at=time(reader.atMs),
        restored_at=time(reader.restoredAtMs),
        is_head=reader.isHead,
        lock=reader.lock,
        cost=_cost(reader.cost) if with_cost else None,
        notes=_texts(reader.notes),
    )


@_reads
def difference(reader: Any) -> types.GroupDifference:
    return types.GroupDifference(
        member=reader.member,
        kind=reader.kind,
        what=reader.what,
        change=str(reader.deed),
        name=reader.name,
        before=reader.before,
        after=reader.after,
        details=_texts(reader.details),
    )


@_reads
def restoration(reader: Any) -> types.GroupRestoration:
    return types.GroupRestoration(freeze(reader.freeze), reader.safety, _texts(reader.notes))


@_reads
def audit_line(reader: Any) -> types.AuditLine:
    return types.AuditLine(
        sequence=reader.sequence,
        at=time(reader.atMs),
        uid=reader.uid,
        client=reader.client,
        action=reader.action,
        kernel=reader.kernel,
        version_before=reader.versionBefore,
        version_after=reader.versionAfter,
        outcome=reader.outcome,
        manifest=reader.manifest,
        detail=reader.detail,
        hash=reader.hash,
    )
