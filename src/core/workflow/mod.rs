//! Workflow records of a kernel: steps, the current agent, decisions and artifacts.
//!
//! ```text
//! change ─▶ one entry of the journal and one row; the completed step, the locked decision, the hand-over: a checkpoint too
//! restore ─▶ steps and agent as they were (part); decisions and artifacts only if asked (restore_effects)
//! ```
//! Pure: requested changes ([`Change`]), records, and their form in a checkpoint
//! ([`WorkflowPart`]).

mod change;
mod decision;
mod part;
pub mod restore_effects;
mod step;

use serde::{Deserialize, Serialize};

use super::ids::{CheckpointId, Digest};

pub use change::{Change, Content, Outcome, Request, Source};
pub use decision::{DecisionEvent, DecisionState};
pub use part::{ArtifactPart, DecisionPart, PART_FORMAT, WorkflowPart};
pub use step::{begin, complete, hand_over};

/// One step of the workflow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// Number of the step, from 1.
    pub index: u32,
    /// Name of the step.
    pub name: String,
    /// Agent at the beginning of the step; may be empty.
    pub agent: String,
    /// Milliseconds since 1970.
    pub begun_at_ms: i64,
    /// Milliseconds since 1970; `None` for the current step.
    pub completed_at_ms: Option<i64>,
}

/// The steps and the current agent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Workflow {
    /// The steps, newest last; only the newest may be incomplete.
    pub steps: Vec<Step>,
    /// The current agent; may be empty.
    pub agent: String,
}

/// A recorded decision and its state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    /// Number of the decision within its kernel, from 1.
    pub id: u64,
    /// Title in one line.
    pub title: String,
    /// Full text.
    pub text: String,
    /// Whether it is open, locked or superseded.
    pub state: DecisionState,
    /// Agent when the decision was opened; may be empty.
    pub agent: String,
    /// Newest step when the decision was opened; 0: none.
    pub step: u32,
    /// The client that opened it.
    pub opened_by: String,
    /// Milliseconds since 1970.
    pub opened_at_ms: i64,
    /// The client that locked it; empty: none.
    pub locked_by: String,
    /// Milliseconds since 1970.
    pub locked_at_ms: Option<i64>,
    /// The client that superseded it; empty: none.
    pub superseded_by: String,
    /// Milliseconds since 1970.
    pub superseded_at_ms: Option<i64>,
    /// The safety checkpoint of the restore that last changed the decision, if any.
    #[serde(skip)]
    pub restored: Option<CheckpointId>,
}

/// One version of an artifact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Artifact {
    /// The name.
    pub name: String,
    /// Number of the version, from 1.
    pub version: u32,
    /// Content address; `None`: withdrawn by a restore to a state without the artifact.
    pub hash: Option<Digest>,
    /// Length of the content in bytes.
    pub bytes: u64,
    /// Media type; empty: unknown.
    pub content_type: String,
    /// The client that put it.
    pub put_by: String,
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// The version whose content it restored; 0: none.
    pub reverts_to: u32,
    /// The safety checkpoint of the restore that created this version, if any.
    #[serde(skip)]
    pub restored: Option<CheckpointId>,
}

/// Optional effects of a restore, beside engine state, files, steps and agent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    /// Mark decisions made after the checkpoint superseded.
    pub supersede_decisions: bool,
    /// Restore the artifacts of the checkpoint, as new versions.
    pub with_artifacts: bool,
    /// Continue the memory of the checkpoint's virtual machine.
    #[serde(default)]
    pub with_memory: bool,
}
