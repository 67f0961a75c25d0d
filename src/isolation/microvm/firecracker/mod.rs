//! Firecracker: its process, its API and its versions.
//!
//! ```text
//!  daemon ── api ──▶ Firecracker ── vsock ─▶ guest      one process for each machine, in a folder of its own
//! ```

mod api;
mod machine;
mod process;
mod version;

#[cfg(test)]
mod fake;
#[cfg(test)]
mod real_tests;
#[cfg(test)]
mod tests;

use std::sync::OnceLock;

pub(super) use machine::Machine;
pub(super) use process::{command, group};
pub(super) use version::{printed, program};

/// The program.
const PROGRAM: &str = "firecracker";
/// The machine type of a kind that Firecracker runs: devices are on a PCI bus, whose drivers the images' kernels have.
pub(super) const MACHINE_TYPE: &str = "firecracker,pci=on";

/// The machine itself, which a template and what is restored from it have in common: snapshots are tied to the
/// processor's model.
pub(super) fn machine() -> Vec<String> {
    static PROCESSOR: OnceLock<String> = OnceLock::new();
    let processor = PROCESSOR.get_or_init(|| model(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default()));
    ["-M", MACHINE_TYPE, "-cpu", processor, "-accel", "kvm"].map(str::to_owned).to_vec()
}

/// The monitor's name with its version.
pub(super) fn name(version: &str) -> String {
    format!("Firecracker v{version}")
}

/// The model of the first processor.
fn model(cpuinfo: &str) -> String {
    let first = cpuinfo.split("\n\n").next().unwrap_or_default();
    let value = |name: &str| {
        let mut lines = first.lines().filter_map(|line| line.split_once(':'));
        lines.find(|(key, _)| key.trim() == name).map_or("?", |(_, value)| value.trim())
    };
    ["vendor_id", "cpu family", "model", "stepping", "model name"].map(value).join(" ")
}
