//! MicroVM isolation: a worker is a process tree in a virtual machine of its own.
//!
//! ```text
//!  driver ── launch ─▶ monitor ┬ boot ─────────┬▶ control: seed, disk, files, state, start ─▶ the worker serves
//!     QEMU or Firecracker      └ template, restore ┘                       a warm one is stopped until a kernel has it
//!  disk.ext4        the truth while a machine exists and after its crash: workspace and engine.db
//!  workspace/,      a mirror on this host, brought up to date before a capture and at the worker's end; the truth
//!  engine.db        while there is no disk
//! ```
//!
//! No file system of a guest is ever mounted or parsed here: the guest lists and streams files, within limits.

mod accelerator;
mod base;
mod builder;
mod changes;
mod client;
mod copy;
mod description;
mod disk;
mod document;
mod driver;
mod files;
mod firecracker;
mod guest_error;
mod halt;
mod handle;
mod held_write;
mod image;
mod images;
mod installed;
mod launch;
mod machine;
mod monitor;
mod notes;
mod pages;
mod qemu;
mod qmp;
mod saved;
mod saved_pages;
mod seed;
mod sockets;
mod stamp;
mod stream;
mod suspend;
mod template;
mod template_folder;
mod templates;
mod verified;
mod vmm;
mod watches;
mod workspace;

pub use copy::{MachineCopy, MachineFiles, SavedMachine};
pub use driver::{MicrovmDriver, MicrovmSettings, abilities};

/// A kernel's disk, beside its workspace.
const DISK: &str = "disk.ext4";
/// A disk that is being filled.
const NEW_DISK: &str = "disk.new.ext4";
/// A disk with which no machine could be started, put aside by a restore. It is kept until the next one or the kernel's
/// removal.
const LOST_DISK: &str = "disk.lost.ext4";
