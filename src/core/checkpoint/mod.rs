//! Checkpoints: what is recorded of one, what it holds, and how people name one.
//!
//! A [`Checkpoint`] is the row that makes a checkpoint visible; its [`Manifest`], an object of the store, lists what it holds
//! by content address. Without the row there is no checkpoint.

mod manifest;
mod reference;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::error::{Error, Result};
use super::ids::{CheckpointId, Digest};
use super::limits;
use super::missed::MissedEntry;

pub use manifest::{FORMAT, Manifest, ManifestError, McpPart, Names, StatePart, StateParts, ToolPart, WorkspacePart};
pub use reference::{Named, RefError, Reference};

/// Why a checkpoint was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckpointType {
    /// By ryokan at a boundary of the work: a step, a hand-over, an idle stop.
    Auto,
    /// By somebody, to come back to.
    Manual,
    /// By ryokan before a restore: what undo goes back to.
    System,
    /// Before a conflict is resolved.
    Conflict,
}

impl CheckpointType {
    /// Every type, in the order in which the database numbers them.
    pub const ALL: [CheckpointType; 4] =
        [CheckpointType::Auto, CheckpointType::Manual, CheckpointType::System, CheckpointType::Conflict];

    /// The type in one word.
    pub const fn name(self) -> &'static str {
        match self {
            CheckpointType::Auto => "auto",
            CheckpointType::Manual => "manual",
            CheckpointType::System => "system",
            CheckpointType::Conflict => "conflict",
        }
    }

    /// The type of that word.
    pub fn from_name(name: &str) -> Option<CheckpointType> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// One checkpoint as it is recorded and shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// Its identity.
    pub id: CheckpointId,
    /// Counts the kernel's checkpoints from 1, in the order in which they were taken.
    pub number: u64,
    /// What its maker called it; empty: nothing.
    pub name: String,
    /// More words about it.
    pub description: String,
    /// Why it was taken.
    #[serde(rename = "type")]
    pub kind: CheckpointType,
    /// Who took it.
    pub creator: String,
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// The checkpoint that the kernel was at before: taken or restored last.
    pub parent: Option<CheckpointId>,
    /// Never removed by retention.
    pub pinned: bool,
    /// Whether it can be restored.
    pub restore_point: bool,
    /// When it was last restored, milliseconds since 1970.
    pub restored_at_ms: Option<i64>,
    /// The kernel's version with it.
    pub version: u64,
    /// Its [`Manifest`].
    pub manifest: Digest,
    /// Files, folders and links of the workspace.
    pub files: u64,
    /// Bytes of the engine's state.
    pub state_bytes: u64,
    /// The newest step then; 0: there was none.
    pub step: u32,
    /// What that step was.
    pub step_name: String,
    /// Who worked then; empty: nobody was named.
    pub agent: String,
    /// What the journal shows in place of the messages that it compacted.
    pub summary: String,
    /// How many those are.
    pub compacted: u64,
}

/// Sequence numbers of a journal, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The first.
    pub first: u64,
    /// The last.
    pub last: u64,
}

impl Checkpoint {
    /// What people see of its identity.
    pub fn short_id(&self) -> String {
        self.id.short()
    }
}

/// A request for a checkpoint.
#[derive(Debug, Clone)]
pub struct CheckpointRequest {
    /// Its name; empty: none.
    pub name: String,
    /// More words about it.
    pub description: String,
    /// Why.
    pub kind: CheckpointType,
    /// Never to be removed by retention.
    pub pinned: bool,
    /// Interrupt what runs now rather than wait for it.
    pub interrupt: bool,
    /// How long to wait for the safe point.
    pub wait: Duration,
    /// The version that the caller knows; 0: any.
    pub expected_version: u64,
    /// What the journal is to show in place of the messages that it compacts.
    pub summary: String,
    /// Those messages.
    pub compact: Vec<Span>,
}

impl CheckpointRequest {
    /// A request with defaults: it waits for running code, without a description.
    pub fn new(kind: CheckpointType, name: &str) -> CheckpointRequest {
        CheckpointRequest {
            name: name.to_owned(),
            description: String::new(),
            kind,
            pinned: false,
            interrupt: false,
            wait: limits::CHECKPOINT_WAIT,
            expected_version: 0,
            summary: String::new(),
            compact: Vec::new(),
        }
    }

    /// A name that fits, of words that may be longer.
    pub fn name_of(words: &str) -> String {
        let end = words.floor_char_boundary(limits::CHECKPOINT_NAME_BYTES);
        words[..end].chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
    }

    /// Checks what its maker called it.
    ///
    /// # Errors
    /// `invalidArgument`.
    pub fn check(&self) -> Result<()> {
        if self.name.len() > limits::CHECKPOINT_NAME_BYTES || self.name.chars().any(char::is_control) {
            let most = limits::CHECKPOINT_NAME_BYTES;
            return Err(Error::invalid(format!("a checkpoint's name is one line of at most {most} bytes"))
                .hint("put more words into its description"));
        }
        if self.name == "latest" || self.name.starts_with('~') {
            return Err(Error::invalid(format!("{:?} means something else where a checkpoint is named", self.name))
                .hint("take another name"));
        }
        if self.description.len() > limits::CHECKPOINT_DESCRIPTION_BYTES {
            let most = limits::CHECKPOINT_DESCRIPTION_BYTES;
            return Err(Error::invalid(format!("a description has at most {most} bytes")));
        }
        if self.summary.len() > limits::RECORD_TEXT_BYTES {
            let most = limits::RECORD_TEXT_BYTES;
            return Err(Error::invalid(format!("a summary has at most {most} bytes")));
        }
        if !self.compact.is_empty() && self.summary.trim().is_empty() {
            return Err(Error::invalid("what compacts messages needs a summary to show in their place"));
        }
        if self.compact.len() > limits::COMPACTED_SPANS {
            let most = limits::COMPACTED_SPANS;
            return Err(Error::invalid(format!("a checkpoint compacts at most {most} ranges of messages")));
        }
        if let Some(Span { first, last }) = self.compact.iter().find(|span| span.first > span.last) {
            return Err(Error::invalid(format!("{first}..{last} is no range of the journal")));
        }
        Ok(())
    }
}

/// What a restore did.
#[derive(Debug, Clone, Serialize)]
pub struct Restoration {
    /// What was restored.
    pub checkpoint: Checkpoint,
    /// Taken just before: what undo goes back to.
    pub safety: CheckpointId,
    /// The kernel's version now.
    pub version: u64,
    /// What could not be built again, and what the checkpoint never held.
    pub missed: Vec<MissedEntry>,
    /// Files and folders that were changed.
    pub files_changed: u64,
    /// From what the engine was brought back.
    #[serde(flatten)]
    pub engine: RestoredFrom,
    /// Decisions that were marked superseded, or that mark taken back.
    pub decisions_changed: u32,
    /// Artifacts that have one more version.
    pub artifacts_changed: u32,
}

/// From what a restore brought the engine back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "engine_from", rename_all = "lowercase")]
pub enum RestoredFrom {
    /// From a copy of its process that stood still since the checkpoint: everything that it held is there.
    Memory,
    /// From its saved state.
    Saved {
        /// Why not from memory; empty: such an engine never is.
        why_not_memory: String,
    },
}
