//! Checkpoints: requests, rows and results of a restore.

use std::time::Duration;

use capnp::struct_list;

use super::listing::{read_jobs, read_missed, write_jobs, write_missed};
use super::text::{bounded, count, malformed, read_data, read_text, read_text_list, unknown, write_text_list};
use crate::core::checkpoint::{Checkpoint, CheckpointRequest, CheckpointType, Restoration, RestoredFrom, Span};
use crate::core::diff::{Area, Deed, Difference, Patch};
use crate::core::error::{Error, Result};
use crate::core::ids::CheckpointId;
use crate::core::limits;
use crate::core::snapshot::KindRequest;
use crate::rpc::schema::ryokan_capnp as wire;

/// Limit of words that say which aspects of an item changed.
const WHATS: usize = 16;

/// Reads a request.
///
/// # Errors
/// `invalidArgument`; `unsupported` for another kind of snapshot.
pub fn read_request(reader: wire::checkpoint_request::Reader<'_>) -> Result<CheckpointRequest> {
    let snapshot = read_kind(reader.get_kind())?;
    let wait = match reader.get_wait_ms() {
        0 => limits::CHECKPOINT_WAIT,
        ms => Duration::from_millis(ms),
    };
    Ok(CheckpointRequest {
        name: read_text(reader.get_name(), "name of a checkpoint")?,
        description: read_text(reader.get_description(), "description of a checkpoint")?,
        kind: type_from_wire(reader.get_type().map_err(|n| unknown("type of a checkpoint", n))?),
        pinned: reader.get_pinned(),
        interrupt: reader.get_interrupt(),
        wait,
        expected_version: reader.get_expected_version(),
        summary: read_text(reader.get_summary(), "summary of a checkpoint")?,
        compact: read_spans(reader.get_compact())?,
        snapshot,
    })
}

/// Reads a requested kind of snapshot.
///
/// # Errors
/// `unsupported` for kind suspend, and for an unknown one.
pub fn read_kind(reader: capnp::Result<capnp::text::Reader<'_>>) -> Result<KindRequest> {
    Ok(KindRequest::for_checkpoint(&read_text(reader, "kind of a snapshot")?)?)
}

fn read_spans(reader: capnp::Result<struct_list::Reader<'_, wire::span::Owned>>) -> Result<Vec<Span>> {
    let list = reader.map_err(|e| malformed("ranges of messages", e))?;
    bounded(list.len(), "ranges of messages", limits::COMPACTED_SPANS)?;
    Ok(list.iter().map(|span| Span { first: span.get_first(), last: span.get_last() }).collect())
}

/// Writes a request.
pub fn write_request(mut builder: wire::checkpoint_request::Builder<'_>, request: &CheckpointRequest) {
    builder.set_name(request.name.as_str());
    builder.set_description(request.description.as_str());
    builder.set_type(type_to_wire(request.kind));
    builder.set_pinned(request.pinned);
    builder.set_interrupt(request.interrupt);
    builder.set_wait_ms(u64::try_from(request.wait.as_millis()).unwrap_or(u64::MAX).max(1));
    builder.set_expected_version(request.expected_version);
    builder.set_summary(request.summary.as_str());
    builder.set_kind(request.snapshot.name());
    let mut spans = builder.reborrow().init_compact(count(request.compact.len()));
    for (i, span) in request.compact.iter().enumerate() {
        let mut one = spans.reborrow().get(count(i));
        one.set_first(span.first);
        one.set_last(span.last);
    }
}

/// Reads a checkpoint, and whether it is the kernel's current one.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_checkpoint(reader: wire::checkpoint::Reader<'_>) -> Result<(Checkpoint, bool)> {
    let parent = read_text(reader.get_parent(), "parent of a checkpoint")?;
    let restored_at_ms = reader.get_restored_at_ms();
    let checkpoint = Checkpoint {
        id: read_id(reader.get_id())?,
        number: reader.get_number(),
        name: read_text(reader.get_name(), "name of a checkpoint")?,
        description: read_text(reader.get_description(), "description of a checkpoint")?,
        kind: type_from_wire(reader.get_type().map_err(|n| unknown("type of a checkpoint", n))?),
        creator: read_text(reader.get_creator(), "creator of a checkpoint")?,
        at_ms: reader.get_at_ms(),
        parent: if parent.is_empty() { None } else { Some(parsed(&parent)?) },
        pinned: reader.get_pinned(),
        restore_point: reader.get_restore_point(),
        restored_at_ms: (restored_at_ms != 0).then_some(restored_at_ms),
        version: reader.get_version(),
        manifest: parsed(&read_text(reader.get_manifest(), "manifest of a checkpoint")?)?,
        files: reader.get_files(),
        state_bytes: reader.get_state_bytes(),
        step: reader.get_step(),
        step_name: read_text(reader.get_step_name(), "step of a checkpoint")?,
        agent: read_text(reader.get_agent(), "agent of a checkpoint")?,
        summary: read_text(reader.get_summary(), "summary of a checkpoint")?,
        compacted: reader.get_compacted(),
        machine_bytes: reader.get_machine_bytes(),
    };
    Ok((checkpoint, reader.get_is_head()))
}

/// Writes a checkpoint.
pub fn write_checkpoint(mut builder: wire::checkpoint::Builder<'_>, checkpoint: &Checkpoint, is_head: bool) {
    builder.set_id(checkpoint.id.to_string());
    builder.set_number(checkpoint.number);
    builder.set_name(checkpoint.name.as_str());
    builder.set_description(checkpoint.description.as_str());
    builder.set_type(type_to_wire(checkpoint.kind));
    builder.set_creator(checkpoint.creator.as_str());
    builder.set_at_ms(checkpoint.at_ms);
    builder.set_parent(checkpoint.parent.map(|id| id.to_string()).unwrap_or_default());
    builder.set_pinned(checkpoint.pinned);
    builder.set_restore_point(checkpoint.restore_point);
    builder.set_restored_at_ms(checkpoint.restored_at_ms.unwrap_or(0));
    builder.set_version(checkpoint.version);
    builder.set_manifest(checkpoint.manifest.to_string());
    builder.set_files(checkpoint.files);
    builder.set_state_bytes(checkpoint.state_bytes);
    builder.set_is_head(is_head);
    builder.set_step(checkpoint.step);
    builder.set_step_name(checkpoint.step_name.as_str());
    builder.set_agent(checkpoint.agent.as_str());
    builder.set_summary(checkpoint.summary.as_str());
    builder.set_compacted(checkpoint.compacted);
    builder.set_kind(checkpoint.snapshot_kind().name());
    builder.set_machine_bytes(checkpoint.machine_bytes);
}

/// Reads the result of a restore.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_restoration(reader: wire::restoration::Reader<'_>) -> Result<Restoration> {
    let checkpoint = reader.get_checkpoint().map_err(|e| malformed("checkpoint", e))?;
    Ok(Restoration {
        checkpoint: read_checkpoint(checkpoint)?.0,
        safety: read_id(reader.get_safety())?,
        version: reader.get_version(),
        missed: read_missed(reader.get_missed())?,
        files_changed: reader.get_files_changed(),
        engine: match reader.get_from_memory() {
            true => RestoredFrom::Memory,
            false => {
                RestoredFrom::Saved { why_not_memory: read_text(reader.get_why_not_memory(), "why not from memory")? }
            }
        },
        decisions_changed: reader.get_decisions_changed(),
        artifacts_changed: reader.get_artifacts_changed(),
        ended: read_jobs(reader.get_ended())?,
    })
}

/// Writes the result of a restore.
pub fn write_restoration(mut builder: wire::restoration::Builder<'_>, done: &Restoration) {
    write_checkpoint(builder.reborrow().init_checkpoint(), &done.checkpoint, true);
    builder.set_safety(done.safety.to_string());
    builder.set_version(done.version);
    write_missed(builder.reborrow().init_missed(count(done.missed.len())), &done.missed);
    builder.set_files_changed(done.files_changed);
    match &done.engine {
        RestoredFrom::Memory => builder.set_from_memory(true),
        RestoredFrom::Saved { why_not_memory } => builder.set_why_not_memory(why_not_memory.as_str()),
    }
    builder.set_decisions_changed(done.decisions_changed);
    builder.set_artifacts_changed(done.artifacts_changed);
    write_jobs(builder.init_ended(count(done.ended.len())), &done.ended);
}

/// Reads a difference.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_difference(reader: wire::difference::Reader<'_>) -> Result<Difference> {
    let area = reader.get_area().map_err(|n| unknown("area", n))?;
    let deed = reader.get_deed().map_err(|n| unknown("deed", n))?;
    Ok(Difference {
        area: match area {
            wire::Area::State => Area::State,
            wire::Area::File => Area::File,
            wire::Area::Mount => Area::Mount,
            wire::Area::Mcp => Area::Mcp,
            wire::Area::Journal => Area::Journal,
            wire::Area::Step => Area::Step,
            wire::Area::Agent => Area::Agent,
            wire::Area::Decision => Area::Decision,
            wire::Area::Artifact => Area::Artifact,
            wire::Area::Tool => Area::Tool,
            wire::Area::Limit => Area::Limit,
            wire::Area::Size => Area::Size,
        },
        deed: deed_from_wire(deed),
        name: read_text(reader.get_name(), "name of a difference")?,
        before: read_text(reader.get_before(), "what was")?,
        after: read_text(reader.get_after(), "what is")?,
        what: read_text_list(reader.get_what(), "what changed", WHATS)?,
    })
}

/// Writes a difference.
pub fn write_difference(mut builder: wire::difference::Builder<'_>, difference: &Difference) {
    builder.set_area(match difference.area {
        Area::State => wire::Area::State,
        Area::File => wire::Area::File,
        Area::Mount => wire::Area::Mount,
        Area::Mcp => wire::Area::Mcp,
        Area::Journal => wire::Area::Journal,
        Area::Step => wire::Area::Step,
        Area::Agent => wire::Area::Agent,
        Area::Decision => wire::Area::Decision,
        Area::Artifact => wire::Area::Artifact,
        Area::Tool => wire::Area::Tool,
        Area::Limit => wire::Area::Limit,
        Area::Size => wire::Area::Size,
    });
    builder.set_deed(deed_to_wire(difference.deed));
    builder.set_name(difference.name.as_str());
    builder.set_before(difference.before.as_str());
    builder.set_after(difference.after.as_str());
    write_text_list(builder.reborrow().init_what(count(difference.what.len())), &difference.what);
}

/// Reads a part of a unified diff.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_patch(reader: wire::patch::Reader<'_>) -> Result<Patch> {
    Ok(Patch {
        path: read_data(reader.get_path(), "path of a file", limits::PATCH_PATH_BYTES)?,
        deed: deed_from_wire(reader.get_deed().map_err(|n| unknown("deed", n))?),
        before: read_data(reader.get_before(), "former path of a file", limits::PATCH_PATH_BYTES)?,
        note: read_text(reader.get_note(), "note on a file")?,
        text: read_data(reader.get_text(), "text of a difference", limits::CHUNK_BYTES)?,
        more: reader.get_more(),
    })
}

/// Writes a part of a unified diff.
pub fn write_patch(mut builder: wire::patch::Builder<'_>, patch: &Patch) {
    builder.set_path(&patch.path);
    builder.set_deed(deed_to_wire(patch.deed));
    builder.set_before(&patch.before);
    builder.set_note(patch.note.as_str());
    builder.set_text(&patch.text);
    builder.set_more(patch.more);
}

pub(super) fn deed_from_wire(deed: wire::Deed) -> Deed {
    match deed {
        wire::Deed::Added => Deed::Added,
        wire::Deed::Removed => Deed::Removed,
        wire::Deed::Changed => Deed::Changed,
        wire::Deed::Renamed => Deed::Renamed,
        wire::Deed::Unknown => Deed::Unknown,
    }
}

pub(super) fn deed_to_wire(deed: Deed) -> wire::Deed {
    match deed {
        Deed::Added => wire::Deed::Added,
        Deed::Removed => wire::Deed::Removed,
        Deed::Changed => wire::Deed::Changed,
        Deed::Renamed => wire::Deed::Renamed,
        Deed::Unknown => wire::Deed::Unknown,
    }
}

fn read_id(text: capnp::Result<capnp::text::Reader<'_>>) -> Result<CheckpointId> {
    parsed(&read_text(text, "id of a checkpoint")?)
}

fn parsed<T: std::str::FromStr<Err: std::fmt::Display>>(text: &str) -> Result<T> {
    text.parse().map_err(|error: T::Err| Error::invalid(error.to_string()))
}

pub(super) fn type_to_wire(kind: CheckpointType) -> wire::CheckpointType {
    match kind {
        CheckpointType::Auto => wire::CheckpointType::Auto,
        CheckpointType::Manual => wire::CheckpointType::Manual,
        CheckpointType::System => wire::CheckpointType::System,
        CheckpointType::Conflict => wire::CheckpointType::Conflict,
    }
}

pub(super) fn type_from_wire(kind: wire::CheckpointType) -> CheckpointType {
    match kind {
        wire::CheckpointType::Auto => CheckpointType::Auto,
        wire::CheckpointType::Manual => CheckpointType::Manual,
        wire::CheckpointType::System => CheckpointType::System,
        wire::CheckpointType::Conflict => CheckpointType::Conflict,
    }
}
