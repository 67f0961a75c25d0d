//! What the model is told, and what it wants done.

use super::key::Key;
use super::layout::Size;
use crate::core::error::Error;
use crate::core::ids::KernelId;
use crate::core::info::{Event, HostInfo, Job, JournalEntry, KernelInfo, PoolInfo};

/// What a kernel can be told to do.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Deed {
    /// Start its worker.
    Start,
    /// End its worker.
    Stop {
        /// Interrupt what runs.
        force: bool,
    },
    /// Take a checkpoint of this name; empty: none.
    Checkpoint(String),
    /// Interrupt what runs.
    Interrupt,
}

impl Deed {
    /// What is being done.
    pub const fn under_way(&self) -> &'static str {
        match self {
            Deed::Start => "starting",
            Deed::Stop { .. } => "stopping",
            Deed::Checkpoint(_) => "taking a checkpoint of",
            Deed::Interrupt => "interrupting",
        }
    }
}

/// All there is to know of one kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct Inspection {
    /// Background jobs.
    pub jobs: Vec<Job>,
    /// The newest entries, oldest first.
    pub journal: Vec<JournalEntry>,
}

/// What a look at one kernel showed.
#[derive(Debug, Clone, PartialEq)]
pub struct Look {
    /// The kernel as it is.
    pub info: KernelInfo,
    /// Its worker was asked what it uses.
    pub with_usage: bool,
    /// Background jobs.
    pub jobs: usize,
}

/// What happened.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// A second went by.
    Ticked,
    /// A key was pressed.
    Pressed(Key),
    /// Text was pasted.
    Pasted(String),
    /// The terminal has another size.
    Resized(Size),
    /// The daemon greeted.
    Connected(HostInfo),
    /// No daemon answered.
    NotConnected(String),
    /// The connection is gone.
    Lost(String),
    /// The answer to [`Action::List`].
    Listed(Vec<KernelInfo>),
    /// The answer to [`Action::Pools`].
    PoolsTold(Vec<PoolInfo>),
    /// The answer to [`Action::Look`]; `gone`: what was asked for and is not there.
    Looked { looks: Vec<Look>, gone: Vec<String> },
    /// The answer to [`Action::Inspect`].
    Inspected(KernelId, Result<Inspection, Error>),
    /// An event came; or comes again, for it is past.
    Happened { event: Event, past: bool },
    /// Every event of the past was told.
    CaughtUp,
    /// A question that the daemon could not answer.
    Failed(Question, Error),
    /// A deed was done, and what is to be said of it.
    Done { id: KernelId, deed: Deed, result: Result<String, Error> },
}

/// What the daemon is asked again and again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Question {
    /// [`Action::List`].
    List,
    /// [`Action::Pools`].
    Pools,
    /// [`Action::Look`].
    Look,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Try to reach the daemon.
    Connect,
    /// Ask for all kernels.
    List,
    /// Ask for the pools.
    Pools,
    /// Ask for these kernels, by id or name; `with_usage`: also what their workers use.
    Look { kernels: Vec<String>, with_usage: bool },
    /// Ask for all there is to know of one.
    Inspect(KernelId),
    /// Tell a kernel to do something.
    Do(KernelId, Deed),
    /// Give the terminal back until somebody wants us again.
    Suspend,
    /// Draw every cell anew.
    Redraw,
    /// Leave.
    Quit,
}
