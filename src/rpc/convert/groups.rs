//! Groups and their freezes.

use super::checkpoint::{deed_from_wire, deed_to_wire, type_from_wire, type_to_wire};
use super::provenance::{read_signer, write_signer};
use super::text::{bounded, count, malformed, unknown};
use super::{read_name, read_text, read_text_list, write_text_list};
use crate::core::error::Result;
use crate::core::freeze::cost::{FreezeCost, MemberCost};
use crate::core::freeze::difference::GroupDifference;
use crate::core::freeze::drain::Executions;
use crate::core::freeze::on_failure::OnFailure;
use crate::core::freeze::portable::PackedGroup;
use crate::core::freeze::{FreezeInfo, GroupInfo, MemberInfo};
use crate::core::limits;
use crate::rpc::schema::ryokan_capnp as wire;

/// Reads a member.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_member(reader: wire::group_member::Reader<'_>) -> Result<MemberInfo> {
    Ok(MemberInfo {
        name: read_name(reader.get_name(), "name of a member")?,
        kind: read_name(reader.get_kind(), "kind of a member")?,
        target: read_name(reader.get_target(), "target of a member")?,
    })
}

/// Writes a member.
pub fn write_member(mut builder: wire::group_member::Builder<'_>, member: &MemberInfo) {
    builder.set_name(member.name.as_str());
    builder.set_kind(member.kind.as_str());
    builder.set_target(member.target.as_str());
}

/// Reads a group.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_group(reader: wire::group::Reader<'_>) -> Result<GroupInfo> {
    let members = reader.get_members().map_err(|e| malformed("members", e))?;
    bounded(members.len(), "members", limits::VALUE_ITEMS)?;
    Ok(GroupInfo {
        name: read_name(reader.get_name(), "name of a group")?,
        members: members.iter().map(read_member).collect::<Result<_>>()?,
        freezes: reader.get_freezes(),
        created_at_ms: reader.get_created_at_ms(),
        unfinished: reader.get_unfinished(),
        on_failure: on_failure_from_wire(reader.get_on_failure().map_err(|n| unknown("on_failure", n))?)
            .unwrap_or_default(),
        paused: read_text(reader.get_paused(), "reason of a pause")?,
    })
}

/// What a failed freeze does; `None`: as the group is configured.
pub fn on_failure_from_wire(value: wire::OnFailure) -> Option<OnFailure> {
    match value {
        wire::OnFailure::Group => None,
        wire::OnFailure::Resume => Some(OnFailure::Resume),
        wire::OnFailure::Pause => Some(OnFailure::Pause),
    }
}

/// As [`on_failure_from_wire`], the other way.
pub fn on_failure_to_wire(value: Option<OnFailure>) -> wire::OnFailure {
    match value {
        None => wire::OnFailure::Group,
        Some(OnFailure::Resume) => wire::OnFailure::Resume,
        Some(OnFailure::Pause) => wire::OnFailure::Pause,
    }
}

/// Writes a group.
pub fn write_group(mut builder: wire::group::Builder<'_>, group: &GroupInfo) {
    builder.set_name(group.name.as_str());
    builder.set_freezes(group.freezes);
    builder.set_created_at_ms(group.created_at_ms);
    builder.set_unfinished(group.unfinished);
    builder.set_on_failure(on_failure_to_wire(Some(group.on_failure)));
    builder.set_paused(group.paused.as_str());
    let mut members = builder.init_members(count(group.members.len()));
    for (at, member) in group.members.iter().enumerate() {
        write_member(members.reborrow().get(count(at)), member);
    }
}

/// Reads the group of a file.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_packed_group(reader: wire::packed_group::Reader<'_>) -> Result<PackedGroup> {
    let members = reader.get_members().map_err(|e| malformed("members", e))?;
    bounded(members.len(), "members", limits::VALUE_ITEMS)?;
    Ok(PackedGroup {
        name: read_name(reader.get_name(), "name of a group")?,
        freeze: read_freeze(reader.get_freeze().map_err(|e| malformed("freeze", e))?)?,
        members: members.iter().map(read_member).collect::<Result<_>>()?,
        sealer: read_signer(reader.get_sealer().map_err(|e| malformed("sealer", e))?)?,
    })
}

/// Writes the group of a file.
pub fn write_packed_group(mut builder: wire::packed_group::Builder<'_>, group: &PackedGroup) {
    builder.set_name(group.name.as_str());
    write_freeze(builder.reborrow().init_freeze(), &group.freeze);
    write_signer(builder.reborrow().init_sealer(), &group.sealer);
    let mut members = builder.init_members(count(group.members.len()));
    for (at, member) in group.members.iter().enumerate() {
        write_member(members.reborrow().get(count(at)), member);
    }
}

/// Reads a freeze.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_freeze(reader: wire::freeze::Reader<'_>) -> Result<FreezeInfo> {
    Ok(FreezeInfo {
        id: read_name(reader.get_id(), "id of a freeze")?,
        number: reader.get_number(),
        message: read_text(reader.get_message(), "message of a freeze")?,
        kind: type_from_wire(reader.get_type().map_err(|n| unknown("type of a freeze", n))?),
        creator: read_text(reader.get_creator(), "creator of a freeze")?,
        at_ms: reader.get_at_ms(),
        restored_at_ms: reader.get_restored_at_ms(),
        is_head: reader.get_is_head(),
        lock: read_text(reader.get_lock(), "lock of a freeze")?,
        cost: if reader.has_cost() {
            Some(read_cost(reader.get_cost().map_err(|e| malformed("cost of a freeze", e))?)?)
        } else {
            None
        },
        notes: read_text_list(reader.get_notes(), "notes of a freeze", limits::VALUE_ITEMS)?,
    })
}

/// Writes a freeze.
pub fn write_freeze(mut builder: wire::freeze::Builder<'_>, freeze: &FreezeInfo) {
    builder.set_id(freeze.id.as_str());
    builder.set_number(freeze.number);
    builder.set_message(freeze.message.as_str());
    builder.set_type(type_to_wire(freeze.kind));
    builder.set_creator(freeze.creator.as_str());
    builder.set_at_ms(freeze.at_ms);
    builder.set_restored_at_ms(freeze.restored_at_ms);
    builder.set_is_head(freeze.is_head);
    builder.set_lock(freeze.lock.as_str());
    if let Some(cost) = &freeze.cost {
        write_cost(builder.reborrow().init_cost(), cost);
    }
    if !freeze.notes.is_empty() {
        write_text_list(builder.init_notes(count(freeze.notes.len())), &freeze.notes);
    }
}

fn read_cost(reader: wire::freeze_cost::Reader<'_>) -> Result<FreezeCost> {
    let members = reader.get_members().map_err(|e| malformed("members", e))?;
    bounded(members.len(), "members", limits::VALUE_ITEMS)?;
    let read = |member: wire::member_cost::Reader<'_>| {
        Ok(MemberCost {
            name: read_name(member.get_name(), "name of a member")?,
            driver: read_name(member.get_driver(), "driver of a member")?,
            growth: read_name(member.get_growth(), "growth of a member")?,
            pause_us: member.get_pause_us(),
            store_us: member.get_store_us(),
            executions: Executions {
                interrupted: member.get_interrupted(),
                parked: member.get_parked(),
                awaited: read_numbers(member.get_awaited(), "awaited")?,
                queued: read_numbers(member.get_queued(), "queued")?,
            },
        })
    };
    Ok(FreezeCost {
        pause_us: reader.get_pause_us(),
        admission_us: reader.get_admission_us(),
        total_us: reader.get_total_us(),
        members: members.iter().map(read).collect::<Result<_>>()?,
    })
}

fn read_numbers(list: capnp::Result<capnp::primitive_list::Reader<'_, u64>>, what: &'static str) -> Result<Vec<u64>> {
    let list = list.map_err(|e| malformed(what, e))?;
    bounded(list.len(), what, limits::VALUE_ITEMS)?;
    Ok(list.iter().collect())
}

fn write_numbers(mut list: capnp::primitive_list::Builder<'_, u64>, numbers: &[u64]) {
    for (at, number) in numbers.iter().enumerate() {
        list.set(count(at), *number);
    }
}

fn write_cost(mut builder: wire::freeze_cost::Builder<'_>, cost: &FreezeCost) {
    builder.set_pause_us(cost.pause_us);
    builder.set_admission_us(cost.admission_us);
    builder.set_total_us(cost.total_us);
    let mut members = builder.init_members(count(cost.members.len()));
    for (at, member) in cost.members.iter().enumerate() {
        let mut builder = members.reborrow().get(count(at));
        builder.set_name(member.name.as_str());
        builder.set_driver(member.driver.as_str());
        builder.set_growth(member.growth.as_str());
        builder.set_pause_us(member.pause_us);
        builder.set_store_us(member.store_us);
        let Executions { interrupted, parked, awaited, queued } = &member.executions;
        builder.set_interrupted(*interrupted);
        builder.set_parked(*parked);
        write_numbers(builder.reborrow().init_awaited(count(awaited.len())), awaited);
        write_numbers(builder.init_queued(count(queued.len())), queued);
    }
}

/// Reads a difference between two states of a group.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_group_difference(reader: wire::group_difference::Reader<'_>) -> Result<GroupDifference> {
    Ok(GroupDifference {
        member: read_name(reader.get_member(), "name of a member")?,
        kind: read_name(reader.get_kind(), "kind of a member")?,
        what: read_name(reader.get_what(), "what differs")?,
        deed: deed_from_wire(reader.get_deed().map_err(|n| unknown("deed", n))?),
        name: read_text(reader.get_name(), "name of a difference")?,
        before: read_text(reader.get_before(), "what was")?,
        after: read_text(reader.get_after(), "what is")?,
        details: read_text_list(reader.get_details(), "what changed", limits::VALUE_ITEMS)?,
    })
}

/// Writes a difference between two states of a group.
pub fn write_group_difference(mut builder: wire::group_difference::Builder<'_>, difference: &GroupDifference) {
    builder.set_member(difference.member.as_str());
    builder.set_kind(difference.kind.as_str());
    builder.set_what(difference.what.as_str());
    builder.set_deed(deed_to_wire(difference.deed));
    builder.set_name(difference.name.as_str());
    builder.set_before(difference.before.as_str());
    builder.set_after(difference.after.as_str());
    write_text_list(builder.reborrow().init_details(count(difference.details.len())), &difference.details);
}
