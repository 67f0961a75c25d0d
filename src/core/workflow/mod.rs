//! The work that goes on in a kernel: steps, the agent who works, decisions, artifacts.
//!
//! ```text
//! change ─▶ one entry of the journal and one row; the completed step, the locked decision, the hand-over: a checkpoint too
//! restore ─▶ steps and agent as they were (part); decisions and artifacts only if asked (restore_effects)
//! ```
//! Pure: what is asked for ([`Change`]), what is recorded, and what a checkpoint holds of it ([`WorkflowPart`]).

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

/// One step of the work.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// Counts the steps from 1.
    pub index: u32,
    /// What is done in it.
    pub name: String,
    /// Who worked when it was begun; empty: nobody was named.
    pub agent: String,
    /// Milliseconds since 1970.
    pub begun_at_ms: i64,
    /// Milliseconds since 1970; none: it is the current step.
    pub completed_at_ms: Option<i64>,
}

/// Steps and the current agent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Workflow {
    /// The newest last; at most that one is not completed.
    pub steps: Vec<Step>,
    /// Who works; empty: nobody was named.
    pub agent: String,
}

/// A decision: what was decided, and whether it still holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decision {
    /// Counts the kernel's decisions from 1.
    pub id: u64,
    /// In one line.
    pub title: String,
    /// In as many as it takes.
    pub text: String,
    /// Whether it is open, locked or superseded.
    pub state: DecisionState,
    /// Who worked when it was opened; empty: nobody was named.
    pub agent: String,
    /// The newest step then; 0: there was none.
    pub step: u32,
    /// Who opened it.
    pub opened_by: String,
    /// Milliseconds since 1970.
    pub opened_at_ms: i64,
    /// Who locked it; empty: nobody.
    pub locked_by: String,
    /// Milliseconds since 1970.
    pub locked_at_ms: Option<i64>,
    /// Who superseded it; empty: nobody.
    pub superseded_by: String,
    /// Milliseconds since 1970.
    pub superseded_at_ms: Option<i64>,
    /// The checkpoint that was taken before the restore which last changed it, if one did.
    #[serde(skip)]
    pub restored: Option<CheckpointId>,
}

/// One version of an artifact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Artifact {
    /// What it is called.
    pub name: String,
    /// Counts its versions from 1.
    pub version: u32,
    /// Its content; none: withdrawn, for a restore led to where it did not exist.
    pub hash: Option<Digest>,
    /// Of the content.
    pub bytes: u64,
    /// A media type; empty: nobody said.
    pub content_type: String,
    /// Who put it.
    pub put_by: String,
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// The version whose content it brought back; 0: its content is its own.
    pub reverts_to: u32,
    /// The checkpoint that was taken before the restore which made it, if one did.
    #[serde(skip)]
    pub restored: Option<CheckpointId>,
}

/// What a restore is asked to do beside bringing back engine state, files, steps and agent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    /// Mark decisions made after the checkpoint superseded.
    pub supersede_decisions: bool,
    /// Bring artifacts to their versions at the checkpoint, as new versions.
    pub with_artifacts: bool,
}
