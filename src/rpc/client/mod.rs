//! The client's side of the public interface: plain Rust types outside, Cap'n Proto inside.
//!
//! - [`HostClient`]: a connection to a daemon; creates, opens, lists and removes kernels.
//! - [`KernelClient`]: one kernel, every method of the interface; also a [`Session`](crate::session::Session).
//! - [`ExecutionClient`]: one execution: its output, its result, its input.
//!
//! Everything here is `!Send` and runs on a [`tokio::task::LocalSet`]; [`run_local`] creates one.
//! Data that arrives through a callback is acknowledged when it was taken, so a slow consumer slows
//! the daemon and, in the end, the code. After a lost connection every call fails with
//! [`ErrorCode::Unavailable`](crate::core::error::ErrorCode::Unavailable). Reconnecting is the
//! caller's decision: only the caller knows which calls may be repeated.

mod blob;
mod checkpoint;
mod connection;
mod execution;
mod feed;
mod files;
mod fork;
mod groups;
mod host;
mod images;
mod kernel;
mod lease;
mod portable;
mod ports;
mod processes;
mod provenance;
mod session;
mod state;
mod teleport;
mod upkeep;
mod workflow;

pub use blob::{BlobDownload, BlobUpload};
pub use connection::{connect_stream, run_local};
pub use execution::ExecutionClient;
pub use feed::Events;
pub use files::{FileDownload, FileUpload, FilesClient};
pub use fork::Forks;
pub use host::HostClient;
pub use kernel::{JournalSeen, KernelClient};
pub use lease::LeaseClient;
pub use portable::{BundleDownload, BundleReview, BundleUpload, ImportedKernel};
pub use ports::{PortClient, PortStream};
pub use processes::ProcessClient;
pub use state::{CheckedCode, Completions};
