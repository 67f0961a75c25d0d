//! What runs the instructions of virtual machines.

use serde::{Deserialize, Serialize};

/// What runs the instructions of virtual machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    /// KVM where it serves, else software.
    Auto,
    /// KVM: without it no machine starts.
    Kvm,
    /// QEMU's software emulation.
    Tcg,
}
