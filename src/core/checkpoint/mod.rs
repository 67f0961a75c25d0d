//! Checkpoints: their records, their content and their names.
//!
//! A [`Checkpoint`] is the database row that makes a checkpoint visible; its [`Manifest`], an
//! object of the store, lists the content by address. Without the row there is no checkpoint.

mod manifest;
mod reference;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::error::{Error, Result};
use super::ids::{CheckpointId, Digest};
use super::info::Job;
use super::limits;
use super::missed::MissedEntry;
use super::snapshot::{KindRequest, PortableKind};

pub use manifest::{
    FORMAT, ImagePart, MachinePart, Manifest, ManifestError, McpPart, Names, StatePart, StateParts, ToolPart,
    WorkspacePart,
};
pub use reference::{Named, RefError, Reference};

/// Reason of an error for a reference that fits several checkpoints or freezes.
pub const AMBIGUOUS: &str = "ambiguous";

/// Why a checkpoint was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckpointType {
    /// Taken by ryokan at a boundary of the work: a step, a hand-over, an idle stop.
    Auto,
    /// Taken by a client.
    Manual,
    /// Taken by ryokan before a restore, as the target of undo.
    System,
    /// Taken before a conflict is resolved.
    Conflict,
}

impl CheckpointType {
    /// Every type, in the order of its number in the database.
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

    /// The type with this name.
    pub fn from_name(name: &str) -> Option<CheckpointType> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// A checkpoint as it is recorded and shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkpoint {
    /// Its identity.
    pub id: CheckpointId,
    /// Number of the checkpoint within its kernel, from 1, in the order of creation.
    pub number: u64,
    /// The client's name for it; may be empty.
    pub name: String,
    /// A longer description.
    pub description: String,
    /// Why it was taken.
    #[serde(rename = "type")]
    pub kind: CheckpointType,
    /// The client that took it.
    pub creator: String,
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// The kernel's checkpoint before it: the one taken or restored last.
    pub parent: Option<CheckpointId>,
    /// Whether retention never removes it.
    pub pinned: bool,
    /// Whether it can be restored.
    pub restore_point: bool,
    /// When it was last restored, milliseconds since 1970.
    pub restored_at_ms: Option<i64>,
    /// The kernel's version at the checkpoint.
    pub version: u64,
    /// Address of its [`Manifest`].
    pub manifest: Digest,
    /// Number of files, folders and links of the workspace.
    pub files: u64,
    /// Size of the engine's state, bytes.
    pub state_bytes: u64,
    /// Newest step at the checkpoint; 0: none.
    pub step: u32,
    /// Name of that step.
    pub step_name: String,
    /// Agent at the checkpoint; may be empty.
    pub agent: String,
    /// Summary that the journal shows instead of the compacted messages.
    pub summary: String,
    /// Number of compacted messages.
    pub compacted: u64,
    /// Bytes of the virtual machine's memory, state and disk; 0: it is of kind checkpoint.
    pub machine_bytes: u64,
}

/// A range of sequence numbers in a journal, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The first.
    pub first: u64,
    /// The last.
    pub last: u64,
}

impl Checkpoint {
    /// Returns the displayed form of its id.
    pub fn short_id(&self) -> String {
        self.id.short()
    }

    /// Returns the kind of its snapshot.
    pub fn snapshot_kind(&self) -> PortableKind {
        if self.machine_bytes > 0 { PortableKind::Teleport } else { PortableKind::Checkpoint }
    }
}

/// A request for a checkpoint.
#[derive(Debug, Clone)]
pub struct CheckpointRequest {
    /// Its name; empty: none.
    pub name: String,
    /// A longer description.
    pub description: String,
    /// Why the checkpoint is taken.
    pub kind: CheckpointType,
    /// Whether retention must never remove it.
    pub pinned: bool,
    /// Interrupt running code instead of waiting for it.
    pub interrupt: bool,
    /// How long to wait for the safe point.
    pub wait: Duration,
    /// The kernel version that the client expects; 0: any.
    pub expected_version: u64,
    /// Summary that the journal shows instead of the compacted messages.
    pub summary: String,
    /// The messages to compact.
    pub compact: Vec<Span>,
    /// The kind of snapshot.
    pub snapshot: KindRequest,
}

impl CheckpointRequest {
    /// Creates a request with defaults: it waits for running code and has no description.
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
            snapshot: KindRequest::Auto,
        }
    }

    /// Shortens a text to a valid name.
    pub fn name_of(words: &str) -> String {
        let end = words.floor_char_boundary(limits::CHECKPOINT_NAME_BYTES);
        words[..end].chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
    }

    /// Checks the texts of the request.
    ///
    /// # Errors
    /// `invalidArgument`.
    pub fn check(&self) -> Result<()> {
        if self.name.len() > limits::CHECKPOINT_NAME_BYTES || self.name.chars().any(char::is_control) {
            let most = limits::CHECKPOINT_NAME_BYTES;
            return Err(Error::invalid(format!("a checkpoint's name is one line of at most {most} bytes"))
                .hint("put more words into its description"));
        }
        if !self.name.is_empty() && self.name.trim().is_empty() {
            return Err(Error::invalid("a checkpoint's name is not blank").hint("leave it empty for none"));
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

/// The result of a restore.
#[derive(Debug, Clone, Serialize)]
pub struct Restoration {
    /// The restored checkpoint.
    pub checkpoint: Checkpoint,
    /// The safety checkpoint, taken before the restore: the target of undo.
    pub safety: CheckpointId,
    /// The kernel's version after the restore.
    pub version: u64,
    /// Parts that could not be restored, and parts that the checkpoint does not hold.
    pub missed: Vec<MissedEntry>,
    /// Number of changed files and folders.
    pub files_changed: u64,
    /// Source of the engine's state.
    #[serde(flatten)]
    pub engine: RestoredFrom,
    /// Number of decisions marked superseded, or returned to their former state.
    pub decisions_changed: u32,
    /// Number of artifacts with a new version.
    pub artifacts_changed: u32,
    /// Background work that the restore ended: jobs of the engine, and processes beside it.
    #[serde(default)]
    pub ended: Vec<Job>,
}

/// The source from which a restore rebuilt the engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "engine_from", rename_all = "lowercase")]
pub enum RestoredFrom {
    /// Its complete memory: a copy of the process, suspended since the checkpoint, or the checkpoint's virtual machine.
    Memory,
    /// The saved state.
    Saved {
        /// Why the memory copy was not used; empty for engines without memory copies.
        why_not_memory: String,
    },
}
