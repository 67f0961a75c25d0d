//! The model's inputs and actions.

use super::key::Key;
use super::layout::Size;
use crate::core::error::Error;
use crate::core::ids::KernelId;
use crate::core::info::{Event, HostInfo, Job, JournalEntry, KernelInfo, PoolInfo};

/// An operation on a kernel.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Deed {
    /// Start its worker.
    Start,
    /// End its worker.
    Stop {
        /// Interrupt the running execution.
        force: bool,
    },
    /// Take a checkpoint with this name; empty: no name.
    Checkpoint(String),
    /// Interrupt the running execution.
    Interrupt,
}

impl Deed {
    /// The text shown during the operation.
    pub const fn under_way(&self) -> &'static str {
        match self {
            Deed::Start => "starting",
            Deed::Stop { .. } => "stopping",
            Deed::Checkpoint(_) => "taking a checkpoint of",
            Deed::Interrupt => "interrupting",
        }
    }
}

/// Details of one kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct Inspection {
    /// Background jobs.
    pub jobs: Vec<Job>,
    /// The newest entries, oldest first.
    pub journal: Vec<JournalEntry>,
}

/// The result of querying one kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct Look {
    /// The kernel's present state.
    pub info: KernelInfo,
    /// Whether the worker's resource usage is included.
    pub with_usage: bool,
    /// Background jobs.
    pub jobs: usize,
}

/// An input of the model.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// One second has passed.
    Ticked,
    /// A key was pressed.
    Pressed(Key),
    /// Text was pasted.
    Pasted(String),
    /// The terminal's size has changed.
    Resized(Size),
    /// A connection was established.
    Connected(HostInfo),
    /// A connection attempt failed.
    NotConnected(String),
    /// The connection was lost.
    Lost(String),
    /// The answer to [`Action::List`].
    Listed(Vec<KernelInfo>),
    /// The answer to [`Action::Pools`].
    PoolsTold(Vec<PoolInfo>),
    /// The answer to [`Action::Look`]; `gone`: the requested kernels that do not exist.
    Looked { looks: Vec<Look>, gone: Vec<String> },
    /// The answer to [`Action::Inspect`].
    Inspected(KernelId, Result<Inspection, Error>),
    /// An event; `past`: it precedes the subscription.
    Happened { event: Event, past: bool },
    /// All past events were delivered.
    CaughtUp,
    /// A periodic request failed.
    Failed(Question, Error),
    /// An operation has completed; `result` is the text to show.
    Done { id: KernelId, deed: Deed, result: Result<String, Error> },
}

/// A request that is repeated periodically.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Question {
    /// [`Action::List`].
    List,
    /// [`Action::Pools`].
    Pools,
    /// [`Action::Look`].
    Look,
}

/// An action that the model requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Connect to the daemon.
    Connect,
    /// List all kernels.
    List,
    /// List the pools.
    Pools,
    /// Query these kernels, by id or name; `with_usage`: with their workers' resource usage.
    Look { kernels: Vec<String>, with_usage: bool },
    /// Query the details of one kernel.
    Inspect(KernelId),
    /// Execute an operation on a kernel.
    Do(KernelId, Deed),
    /// Release the terminal and stop until continued.
    Suspend,
    /// Redraw every cell.
    Redraw,
    /// End the program.
    Quit,
}
