//! Workflow records in a checkpoint: a part of its manifest with its own format.

use serde::{Deserialize, Serialize};

use super::{Artifact, Change, Decision, DecisionState, Step, Workflow, step};
use crate::core::error::{Error, Result};
use crate::core::ids::Digest;
use crate::core::limits;

/// Format of the parts that this release writes.
pub const PART_FORMAT: u32 = 1;

/// The workflow records at a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkflowPart {
    /// [`PART_FORMAT`].
    pub format: u32,
    /// Steps and agent.
    #[serde(flatten)]
    pub workflow: Workflow,
    /// The recorded decisions.
    pub decisions: Vec<DecisionPart>,
    /// The newest version of each artifact that is not withdrawn.
    pub artifacts: Vec<ArtifactPart>,
}

/// A decision at a checkpoint.
///
/// Its text never changes and is not repeated here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecisionPart {
    /// Its number.
    pub id: u64,
    /// Its title.
    pub title: String,
    /// Its state at the checkpoint.
    pub state: DecisionState,
}

/// An artifact at a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArtifactPart {
    /// Its name.
    pub name: String,
    /// Its newest version at the checkpoint.
    pub version: u32,
    /// That version's content.
    pub hash: Digest,
    /// Length of the content in bytes.
    pub bytes: u64,
    /// Its media type.
    pub content_type: String,
}

impl Default for WorkflowPart {
    /// The records of a kernel without workflow.
    fn default() -> WorkflowPart {
        WorkflowPart {
            format: PART_FORMAT,
            workflow: Workflow::default(),
            decisions: Vec::new(),
            artifacts: Vec::new(),
        }
    }
}

impl WorkflowPart {
    /// Checks the limits that a kernel's own records satisfy, for parts from other hosts.
    ///
    /// # Errors
    /// `invalidArgument` names what is too numerous or too long.
    pub fn check(&self) -> Result<()> {
        let too = |what: &str| Err(Error::invalid(format!("the work in it: {what}")));
        if self.format != PART_FORMAT {
            return Err(Error::unsupported(format!("the work in it has format {}", self.format)));
        }
        let counts = [
            (self.workflow.steps.len() as u64, u64::from(limits::STEPS)),
            (self.decisions.len() as u64, limits::DECISIONS),
            (self.artifacts.len() as u64, limits::ARTIFACTS),
        ];
        if counts.iter().any(|(count, most)| count > most) {
            return too("more steps, decisions or artifacts than may be");
        }
        let steps = self.workflow.steps.iter().flat_map(|step| [&step.name, &step.agent]);
        let decisions = self.decisions.iter().map(|decision| &decision.title);
        let artifacts = self.artifacts.iter().flat_map(|artifact| [&artifact.name, &artifact.content_type]);
        let mut names = steps.chain(decisions).chain(artifacts).chain([&self.workflow.agent]);
        if names.any(|name| name.len() > limits::RECORD_NAME_BYTES || name.chars().any(char::is_control)) {
            return too("a name that is too long or has control characters");
        }
        let mut seen = std::collections::HashSet::new();
        if !self.decisions.iter().all(|one| (1..=limits::DECISIONS).contains(&one.id) && seen.insert(one.id)) {
            return too("a decision's number that is none, or is there twice");
        }
        let mut seen = std::collections::HashSet::new();
        let is_version = |one: &ArtifactPart| (1..=limits::ARTIFACT_VERSIONS).contains(&one.version);
        if !self.artifacts.iter().all(|one| is_version(one) && seen.insert(&one.name)) {
            return too("an artifact's version that is none, or a name that is there twice");
        }
        if !self.workflow.steps.iter().zip(1..).all(|(step, number)| step.index == number) {
            return too("steps that are not numbered one after the other");
        }
        Ok(())
    }

    /// Builds the part from the present records; `artifacts` holds the newest version of each.
    pub fn of(workflow: Workflow, decisions: &[Decision], artifacts: &[Artifact]) -> WorkflowPart {
        let decision = |one: &Decision| DecisionPart { id: one.id, title: one.title.clone(), state: one.state };
        let artifact = |one: &Artifact| {
            let (name, content_type) = (one.name.clone(), one.content_type.clone());
            one.hash.map(|hash| ArtifactPart { name, version: one.version, hash, bytes: one.bytes, content_type })
        };
        WorkflowPart {
            format: PART_FORMAT,
            workflow,
            decisions: decisions.iter().map(decision).collect(),
            artifacts: artifacts.iter().filter_map(artifact).collect(),
        }
    }

    /// Returns what a checkpoint's row shows: number and name of the newest step, and the agent.
    pub fn shown(&self) -> (u32, &str, &str) {
        let (number, name) = self.newest_step().map_or((0, ""), |step| (step.index, step.name.as_str()));
        (number, name, &self.workflow.agent)
    }

    /// The newest step, completed or not.
    pub fn newest_step(&self) -> Option<&Step> {
        self.workflow.steps.last()
    }

    /// Returns the records after `change`, for a checkpoint that holds a completed step or a
    /// hand-over.
    ///
    /// # Errors
    /// Those of the change itself.
    pub fn after(mut self, change: &Change, at_ms: i64) -> Result<WorkflowPart> {
        match change {
            Change::CompleteStep => {
                let completed = step::complete(self.newest_step(), at_ms)?;
                self.workflow.steps.pop();
                self.workflow.steps.push(completed);
            }
            Change::HandOver { agent, .. } => {
                step::hand_over(&self.workflow.agent, agent)?;
                self.workflow.agent.clone_from(agent);
            }
            Change::LockDecision { id } => {
                let found = self.decisions.iter().find(|decision| decision.id == *id);
                let found = found.ok_or_else(|| Error::not_found(format!("there is no decision {id}")))?;
                found.state.step(*id, super::DecisionEvent::Lock)?;
            }
            Change::BeginStep { .. }
            | Change::OpenDecision { .. }
            | Change::SupersedeDecision { .. }
            | Change::PutArtifact { .. }
            | Change::RevertArtifact { .. } => {}
        }
        Ok(self)
    }
}
