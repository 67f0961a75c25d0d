//! Moves of kernels between hosts.

use super::{read_text, read_text_list, write_text_list};
use crate::core::error::{Error, Result};
use crate::core::ids::{Epoch, ParseIdError};
use crate::core::info::{HandoverInfo, TeleportReport};
use crate::core::limits;
use crate::core::snapshot::PortableKind;
use crate::rpc::schema::ryokan_capnp::{handover, teleport_report};

fn id<T: std::str::FromStr<Err = ParseIdError>>(text: &str) -> Result<T> {
    text.parse().map_err(|error: ParseIdError| Error::invalid(error.to_string()))
}

/// Writes the report of a completed move.
pub fn write_report(mut to: teleport_report::Builder<'_>, report: &TeleportReport) {
    to.set_handover(report.handover.to_string());
    to.set_host(report.host.to_string());
    to.set_epoch(report.epoch.0);
    to.set_objects(report.objects);
    to.set_bytes(report.bytes);
    to.set_sent_objects(report.sent_objects);
    to.set_sent_bytes(report.sent_bytes);
    to.set_pause_ms(report.pause_ms);
    to.set_acknowledged(report.acknowledged);
    to.set_kind(report.kind.name());
    to.set_kind_reason(&report.kind_reason);
    to.set_elapsed_ms(report.elapsed_ms);
    to.set_wire_bytes(report.wire_bytes);
    write_text_list(to.reborrow().init_stays(report.stays.len() as u32), &report.stays);
    write_text_list(to.init_missing(report.missing.len() as u32), &report.missing);
}

/// Reads the report of a completed move.
///
/// # Errors
/// `invalidArgument` for malformed fields.
pub fn read_report(from: teleport_report::Reader<'_>) -> Result<TeleportReport> {
    Ok(TeleportReport {
        handover: id(&read_text(from.get_handover(), "handover")?)?,
        host: id(&read_text(from.get_host(), "host")?)?,
        epoch: Epoch(from.get_epoch()),
        objects: from.get_objects(),
        bytes: from.get_bytes(),
        sent_objects: from.get_sent_objects(),
        sent_bytes: from.get_sent_bytes(),
        pause_ms: from.get_pause_ms(),
        missing: read_text_list(from.get_missing(), "missing", limits::VALUE_ITEMS)?,
        acknowledged: from.get_acknowledged(),
        kind: PortableKind::from_name(&read_text(from.get_kind(), "kind")?)
            .ok_or_else(|| Error::invalid("an unknown kind of snapshot"))?,
        kind_reason: read_text(from.get_kind_reason(), "kindReason")?,
        elapsed_ms: from.get_elapsed_ms(),
        wire_bytes: from.get_wire_bytes(),
        stays: read_text_list(from.get_stays(), "stays", limits::VALUE_ITEMS)?,
    })
}

/// Writes a list of handovers.
pub fn write_handovers(mut to: capnp::struct_list::Builder<'_, handover::Owned>, handovers: &[HandoverInfo]) {
    for (at, info) in handovers.iter().enumerate() {
        let mut to = to.reborrow().get(at as u32);
        to.set_id(info.id.to_string());
        to.set_kernel(info.kernel.to_string());
        to.set_name(&info.name);
        to.set_state(&info.state);
        to.set_peer(&info.peer);
        to.set_epoch(info.epoch.0);
        to.set_at_ms(info.at_ms);
        to.set_problem(&info.problem);
    }
}

/// Reads a handover.
///
/// # Errors
/// `invalidArgument` for malformed fields.
pub fn read_handover(from: handover::Reader<'_>) -> Result<HandoverInfo> {
    Ok(HandoverInfo {
        id: id(&read_text(from.get_id(), "id")?)?,
        kernel: id(&read_text(from.get_kernel(), "kernel")?)?,
        name: read_text(from.get_name(), "name")?,
        state: read_text(from.get_state(), "state")?,
        peer: read_text(from.get_peer(), "peer")?,
        epoch: Epoch(from.get_epoch()),
        at_ms: from.get_at_ms(),
        problem: read_text(from.get_problem(), "problem")?,
    })
}
