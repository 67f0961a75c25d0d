//! Why a worker ended, or why a kernel has none.

use serde::{Deserialize, Serialize};

/// Cause of an unexpected end of a worker; also serialized on the link and in `state.db`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "kind", content = "detail")]
pub enum CrashCause {
    /// The engine exited with this status.
    Exited(i32),
    /// A signal of this number ended the engine.
    Signalled(i32),
    /// The kernel's memory limit was reached.
    OutOfMemory,
    /// The workspace's size limit was reached.
    DiskFull,
    /// The engine did not answer, or did not stop when interrupted.
    Unresponsive,
    /// The engine broke the engine contract.
    Protocol(String),
    /// The worker's init itself was killed, or its link broke.
    Killed,
    /// The worker did not start.
    NotStarted(String),
}

impl std::fmt::Display for CrashCause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            CrashCause::Exited(code) => write!(f, "the engine exited with status {code}"),
            CrashCause::Signalled(signal) => write!(f, "signal {signal} ended the engine"),
            CrashCause::OutOfMemory => f.write_str("the kernel's memory limit was reached"),
            CrashCause::DiskFull => f.write_str("the workspace size limit was reached"),
            CrashCause::Unresponsive => f.write_str("the engine did not respond"),
            CrashCause::Protocol(what) => write!(f, "the engine broke its contract: {what}"),
            CrashCause::Killed => f.write_str("the worker was killed"),
            CrashCause::NotStarted(why) => write!(f, "the worker did not start: {why}"),
        }
    }
}

/// Reason why a kernel has no worker although it is healthy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum StopReason {
    /// No client used the kernel for its idle time.
    Idle,
    /// A client requested the stop.
    Asked,
    /// The daemon stopped.
    Daemon,
    /// The host had no room for its worker.
    NoPlace,
    /// A granted resource does not exist, or may not be granted any more.
    NotGiven,
    /// The kernel was idle, and memory was short on the host.
    Memory,
    /// The memory that is kept in its folder cannot continue now.
    MemoryKept,
    /// The worker of the suspended kernel ended, perhaps with the host.
    Suspended,
}

impl StopReason {
    /// The reason in a few words.
    pub const fn name(self) -> &'static str {
        match self {
            StopReason::Idle => "idle",
            StopReason::Asked => "asked",
            StopReason::Daemon => "daemon stopped",
            StopReason::NoPlace => "no place for a worker",
            StopReason::NotGiven => "a granted resource is missing",
            StopReason::Memory => "memory was short",
            StopReason::MemoryKept => "its memory cannot continue now",
            StopReason::Suspended => "its suspended worker ended",
        }
    }
}
