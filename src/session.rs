//! The library's trait for working with one kernel, wherever it runs.
//!
//! `rpc::client::KernelClient` implements it over a socket, `worker::embedded::EmbeddedKernel` in this very process (no
//! sandbox: for tests and for programs that trust their code). One test suite runs against both.

use crate::core::error::Result;
use crate::core::exec::{ExecRequest, ExecResult, OutputEvent};
use crate::core::ids::{Digest, ExecId};
use crate::core::info::{MountInfo, ToolInfo, VarInfo};
use crate::core::missed::MissedEntry;
use crate::core::value::Value;

/// Takes output while an execution runs. The execution goes on only as fast as `take` returns.
#[async_trait::async_trait(?Send)]
pub trait OutputSink {
    /// Takes one event. An error detaches the sink; the execution goes on.
    async fn take(&self, exec: ExecId, event: OutputEvent) -> Result<()>;
}

/// Engine state as opaque, versioned bytes, and what it does not hold.
#[derive(Debug, Clone, PartialEq)]
pub struct StateSnapshot {
    /// To be given to [`Session::restore`]; begins with a magic and a format version.
    pub data: Vec<u8>,
    /// What could not be captured, by name.
    pub missed: Vec<MissedEntry>,
}

/// One kernel.
#[async_trait::async_trait(?Send)]
pub trait Session {
    /// Runs code to its end.
    async fn execute(&self, request: ExecRequest) -> Result<ExecResult>;
    /// Runs code to its end and passes on its output meanwhile.
    async fn execute_streaming(&self, request: ExecRequest, sink: &dyn OutputSink) -> Result<ExecResult>;
    /// Interrupts that execution if it runs or waits; `NotFound` if there is none of that number.
    async fn interrupt(&self, exec: ExecId) -> Result<()>;
    /// A variable; `NotFound` if there is none of that name.
    async fn get_var(&self, name: &str) -> Result<Value>;
    /// Sets a variable.
    async fn set_var(&self, name: &str, value: Value) -> Result<()>;
    /// The user's variables.
    async fn list_vars(&self) -> Result<Vec<VarInfo>>;
    /// Makes the host's `source` visible at `path`.
    async fn mount(&self, path: &str, source: &str, writable: bool) -> Result<()>;
    /// Takes a mount away.
    async fn unmount(&self, path: &str) -> Result<()>;
    /// The mounts.
    async fn list_mounts(&self) -> Result<Vec<MountInfo>>;
    /// The tools.
    async fn list_tools(&self) -> Result<Vec<ToolInfo>>;
    /// Calls a tool.
    async fn call_tool(&self, name: &str, args: Value) -> Result<ExecResult>;
    /// The engine's state.
    async fn snapshot(&self) -> Result<StateSnapshot>;
    /// Puts an engine's state back; gives what could not be.
    async fn restore(&self, data: &[u8]) -> Result<Vec<MissedEntry>>;
    /// A blob's content; `NotFound` also for one that this kernel was never given.
    async fn read_blob(&self, hash: Digest) -> Result<Vec<u8>>;
    /// Stores a blob.
    async fn write_blob(&self, data: &[u8]) -> Result<Digest>;
}
