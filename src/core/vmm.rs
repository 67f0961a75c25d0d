//! What runs virtual machines.

use serde::{Deserialize, Serialize};

/// The virtual machine monitor that the configuration names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WantedVmm {
    /// Firecracker where this host has it and KVM serves, else QEMU.
    Auto,
    /// QEMU.
    Qemu,
    /// Firecracker: without it, or without KVM, no machine starts.
    Firecracker,
}
