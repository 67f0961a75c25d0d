//! Figures of disk usage.

use super::text::{bounded, malformed, read_text};
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::core::usage::{CheckpointDisk, DiskFigures, DiskPart, DiskUsage, KernelDisk};
use crate::rpc::schema::ryokan_capnp as wire;

fn parsed<T: std::str::FromStr<Err: std::fmt::Display>>(text: &str) -> Result<T> {
    text.parse().map_err(|error: T::Err| Error::invalid(error.to_string()))
}

type Parts<'a> = capnp::struct_list::Reader<'a, wire::disk_part::Owned>;

fn read_parts(list: capnp::Result<Parts<'_>>) -> Result<Vec<DiskPart>> {
    let list = list.map_err(|error| malformed("parts", error))?;
    bounded(list.len(), "parts", limits::VALUE_ITEMS)?;
    let part = |part: wire::disk_part::Reader<'_>| {
        let (what, why) = (read_text(part.get_what(), "what")?, read_text(part.get_why(), "why")?);
        Ok(DiskPart { what, bytes: part.get_bytes(), why })
    };
    list.iter().map(part).collect()
}

fn write_parts(mut list: capnp::struct_list::Builder<'_, wire::disk_part::Owned>, parts: &[DiskPart]) {
    for (i, part) in parts.iter().enumerate() {
        let mut one = list.reborrow().get(i as u32);
        one.set_what(part.what.as_str());
        one.set_bytes(part.bytes);
        one.set_why(part.why.as_str());
    }
}

/// Reads a kernel's figures; `None` before the first measurement, and from an older daemon.
pub(super) fn read_disk_figures(reader: wire::disk_figures::Reader<'_>) -> Option<DiskFigures> {
    (reader.get_measured_at_ms() != 0).then(|| DiskFigures {
        workspace_bytes: reader.get_workspace_bytes(),
        history_bytes: reader.get_history_bytes(),
        saved_memory_bytes: reader.get_saved_memory_bytes(),
        other_bytes: reader.get_other_bytes(),
        measured_at_ms: reader.get_measured_at_ms(),
    })
}

/// Writes a kernel's figures.
pub(super) fn write_disk_figures(mut builder: wire::disk_figures::Builder<'_>, disk: &DiskFigures) {
    builder.set_workspace_bytes(disk.workspace_bytes);
    builder.set_history_bytes(disk.history_bytes);
    builder.set_saved_memory_bytes(disk.saved_memory_bytes);
    builder.set_other_bytes(disk.other_bytes);
    builder.set_measured_at_ms(disk.measured_at_ms);
}

/// Reads figures of disk usage.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_disk_usage(reader: wire::disk_usage::Reader<'_>) -> Result<DiskUsage> {
    let kernels = reader.get_kernels().map_err(|error| malformed("kernels", error))?;
    bounded(kernels.len(), "kernels", limits::VALUE_ITEMS)?;
    Ok(DiskUsage {
        kernels: kernels.iter().map(read_kernel).collect::<Result<_>>()?,
        host: read_parts(reader.get_host())?,
        store: read_parts(reader.get_store())?,
    })
}

fn read_kernel(reader: wire::kernel_disk::Reader<'_>) -> Result<KernelDisk> {
    let each = reader.get_each().map_err(|error| malformed("each", error))?;
    bounded(each.len(), "each", limits::VALUE_ITEMS)?;
    let checkpoint = |one: wire::checkpoint_disk::Reader<'_>| {
        Ok(CheckpointDisk {
            id: parsed(&read_text(one.get_id(), "id")?)?,
            name: read_text(one.get_name(), "name")?,
            stored_bytes: one.get_stored_bytes(),
            freed_bytes: one.get_freed_bytes(),
            machine_bytes: one.get_machine_bytes(),
            why: read_text(one.get_why(), "why")?,
        })
    };
    Ok(KernelDisk {
        id: parsed(&read_text(reader.get_id(), "id")?)?,
        name: read_text(reader.get_name(), "name")?,
        parts: read_parts(reader.get_parts())?,
        checkpoints: reader.get_checkpoints(),
        stored_bytes: reader.get_stored_bytes(),
        freed_bytes: reader.get_freed_bytes(),
        kept: read_parts(reader.get_kept())?,
        each: each.iter().map(checkpoint).collect::<Result<_>>()?,
        incomplete: read_text(reader.get_incomplete(), "incomplete")?,
    })
}

/// Writes figures of disk usage.
pub fn write_disk_usage(mut builder: wire::disk_usage::Builder<'_>, usage: &DiskUsage) {
    write_parts(builder.reborrow().init_host(usage.host.len() as u32), &usage.host);
    write_parts(builder.reborrow().init_store(usage.store.len() as u32), &usage.store);
    let mut kernels = builder.init_kernels(usage.kernels.len() as u32);
    for (i, kernel) in usage.kernels.iter().enumerate() {
        let mut one = kernels.reborrow().get(i as u32);
        one.set_id(kernel.id.to_string());
        one.set_name(kernel.name.as_str());
        one.set_checkpoints(kernel.checkpoints);
        one.set_stored_bytes(kernel.stored_bytes);
        one.set_freed_bytes(kernel.freed_bytes);
        one.set_incomplete(kernel.incomplete.as_str());
        write_parts(one.reborrow().init_parts(kernel.parts.len() as u32), &kernel.parts);
        write_parts(one.reborrow().init_kept(kernel.kept.len() as u32), &kernel.kept);
        let mut each = one.init_each(kernel.each.len() as u32);
        for (j, checkpoint) in kernel.each.iter().enumerate() {
            let mut one = each.reborrow().get(j as u32);
            one.set_id(checkpoint.id.to_string());
            one.set_name(checkpoint.name.as_str());
            one.set_stored_bytes(checkpoint.stored_bytes);
            one.set_freed_bytes(checkpoint.freed_bytes);
            one.set_machine_bytes(checkpoint.machine_bytes);
            one.set_why(checkpoint.why.as_str());
        }
    }
}
