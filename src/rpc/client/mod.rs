//! The client's side of the public interface: plain Rust types outside, Cap'n Proto inside.
//!
//! - [`HostClient`]: a connection to a daemon; makes, opens, lists and removes kernels.
//! - [`KernelClient`]: one kernel, every method of the interface; also a [`Session`](crate::session::Session).
//! - [`ExecutionClient`]: one execution: its output, its result, its input.
//!
//! Everything here is `!Send` and runs on a [`tokio::task::LocalSet`]; [`run_local`] makes one. What arrives through a
//! callback is acknowledged when it was taken, so a slow taker slows the daemon and in the end the code. A connection
//! that is lost makes every call fail with [`ErrorCode::Unavailable`](crate::core::error::ErrorCode::Unavailable);
//! connecting again is the caller's decision, because only the caller knows what may be said twice.

mod blob;
mod checkpoint;
mod connection;
mod execution;
mod feed;
mod fork;
mod host;
mod kernel;
mod lease;
mod portable;
mod session;
mod state;
mod upkeep;
mod workflow;

pub use blob::{BlobDownload, BlobUpload};
pub use connection::{connect_stream, run_local};
pub use execution::ExecutionClient;
pub use feed::Events;
pub use fork::Forks;
pub use host::HostClient;
pub use kernel::{JournalSeen, KernelClient};
pub use lease::LeaseClient;
pub use portable::{BundleDownload, BundleUpload};
pub use state::{CheckedCode, Completions};
