//! What takes room on the disk.

use super::plain;
use super::table::Table;
use crate::cli::paint::Paint;
use crate::core::quantity::format_size;
use crate::core::snapshot::PortableKind;
use crate::core::usage::{DiskPart, DiskUsage};

/// All kernels, and the parts of the data folder.
pub fn disk_usage(usage: &DiskUsage, paint: Paint) -> String {
    let mut table =
        Table::new(&["KERNEL", "FOLDER", "WORKSPACE", "STATE", "JOURNAL", "CHECKPOINTS", "STORED", "FREED"]);
    for kernel in &usage.kernels {
        let part = |what: &str| kernel.parts.iter().find(|part| part.what == what).map_or(0, |part| part.bytes);
        table.row(&[
            kernel.name.clone(),
            format_size(kernel.folder_bytes()),
            format_size(part("workspace")),
            format_size(part("engine state")),
            format_size(part("journal")),
            kernel.checkpoints.to_string(),
            format_size(kernel.stored_bytes),
            format_size(kernel.freed_bytes),
        ]);
    }
    let mut text = table.text("no kernels", paint);
    if !usage.host.is_empty() {
        text.push('\n');
        text.push_str(&parts("PART", &usage.host, paint));
        text.push('\n');
        text.push_str(&parts("OBJECTS FOR", &usage.store, paint));
    }
    text + &incomplete(usage, paint)
}

/// One kernel, with its checkpoints.
pub fn kernel_disk(usage: &DiskUsage, paint: Paint) -> String {
    let mut text = String::new();
    for kernel in &usage.kernels {
        text.push_str(&parts("PART", &kernel.parts, paint));
        text.push('\n');
        text.push_str(&parts("OBJECTS FOR", &kernel.kept, paint));
        let mut table = Table::new(&["CHECKPOINT", "KIND", "STORED", "FREED", "KEPT", "NAME"]);
        for one in &kernel.each {
            let short: String = one.id.to_string().chars().take(10).collect();
            let kind = if one.machine_bytes > 0 { PortableKind::Teleport } else { PortableKind::Checkpoint };
            let [stored, freed] = [one.stored_bytes, one.freed_bytes].map(format_size);
            table.row(&[short, kind.name().to_owned(), stored, freed, one.why.clone(), one.name.clone()]);
        }
        text.push('\n');
        text.push_str(&table.text("no checkpoints", paint));
        let (stored, freed) = (format_size(kernel.stored_bytes), format_size(kernel.freed_bytes));
        text.push_str(&format!("\nin the store: {stored}, of which only this kernel needs {freed}\n"));
    }
    text + &incomplete(usage, paint)
}

fn parts(head: &'static str, parts: &[DiskPart], paint: Paint) -> String {
    let mut table = Table::new(&[head, "SIZE", ""]);
    for part in parts.iter().filter(|part| part.bytes > 0) {
        table.row(&[part.what.as_str(), &format_size(part.bytes), &part.why]);
    }
    let total: u64 = parts.iter().map(|part| part.bytes).sum();
    table.row(&["total", &format_size(total), ""]);
    table.text("", paint)
}

fn incomplete(usage: &DiskUsage, paint: Paint) -> String {
    let damaged = usage.kernels.iter().filter(|kernel| !kernel.incomplete.is_empty());
    let line = |kernel: &crate::core::usage::KernelDisk| {
        let (name, why) = (plain(&kernel.name), plain(&kernel.incomplete));
        format!("{} objects of {name} are not counted: {why}\n", paint.warn("warning:"))
    };
    damaged.map(line).collect()
}
