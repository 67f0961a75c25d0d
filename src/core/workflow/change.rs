//! Requests to change a kernel's workflow records.

use super::{Artifact, Decision, Step};
use crate::core::error::{Error, Result};
use crate::core::ids::Digest;
use crate::core::limits;

/// One change of the workflow records.
///
/// Each change has an entry in the journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Begins a step.
    BeginStep {
        /// Name of the step.
        name: String,
    },
    /// Completes the current step and takes a checkpoint with it completed.
    CompleteStep,
    /// Hands the work over to another agent and takes a checkpoint of that.
    HandOver {
        /// The agent.
        agent: String,
        /// A note for the agent; may be empty.
        note: String,
    },
    /// Records a decision.
    OpenDecision {
        /// Title in one line.
        title: String,
        /// Full text.
        text: String,
    },
    /// Locks a decision, after a checkpoint.
    LockDecision {
        /// Number of the decision.
        id: u64,
    },
    /// Supersedes a decision.
    SupersedeDecision {
        /// Number of the decision.
        id: u64,
    },
    /// Adds a version of an artifact.
    PutArtifact {
        /// Name of the artifact.
        name: String,
        /// Content of the new version.
        content: Content,
    },
    /// Adds a version of an artifact with the content of an earlier one.
    RevertArtifact {
        /// Name of the artifact.
        name: String,
        /// The earlier version.
        version: u32,
    },
}

/// Content of an artifact.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Content {
    /// Content address.
    pub hash: Digest,
    /// Length in bytes.
    pub bytes: u64,
    /// Media type; empty: unknown.
    pub content_type: String,
}

/// Source of an artifact's content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A blob that the kernel may read.
    Blob(Digest),
    /// The present content of a workspace file, by its path.
    File(Vec<u8>),
}

/// A change with its requester.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The change.
    pub change: Change,
    /// The requester.
    pub actor: String,
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// Idempotency key; empty: none.
    pub key: String,
}

/// The result of a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The step that was begun or completed.
    Step(Step),
    /// The current agent.
    Agent(String),
    /// The changed decision.
    Decision(Decision),
    /// The newest version of the artifact.
    Artifact(Artifact),
}

impl Change {
    /// Checks the fields that do not depend on the kernel's state.
    ///
    /// # Errors
    /// `invalidArgument`.
    pub fn check(&self) -> Result<()> {
        match self {
            Change::BeginStep { name } => line("a step's name", name),
            Change::HandOver { agent, note } => {
                line("an agent's name", agent)?;
                text("the note of a hand-over", note)
            }
            Change::OpenDecision { title, text: words } => {
                line("a decision's title", title)?;
                text("a decision's text", words)
            }
            Change::PutArtifact { name, content } => {
                line("an artifact's name", name)?;
                media_type(&content.content_type)
            }
            Change::RevertArtifact { name, version } => {
                line("an artifact's name", name)?;
                match version {
                    0 => Err(Error::invalid("versions of an artifact count from 1")),
                    1.. => Ok(()),
                }
            }
            Change::CompleteStep | Change::LockDecision { .. } | Change::SupersedeDecision { .. } => Ok(()),
        }
    }

    /// Names of the change: past tense for events, and the action for the audit log.
    pub const fn names(&self) -> (&'static str, &'static str) {
        match self {
            Change::BeginStep { .. } => ("step_begun", "step.begin"),
            Change::CompleteStep => ("step_completed", "step.complete"),
            Change::HandOver { .. } => ("handed_over", "agent.hand_over"),
            Change::OpenDecision { .. } => ("decision_opened", "decision.open"),
            Change::LockDecision { .. } => ("decision_locked", "decision.lock"),
            Change::SupersedeDecision { .. } => ("decision_superseded", "decision.supersede"),
            Change::PutArtifact { .. } => ("artifact_put", "artifact.put"),
            Change::RevertArtifact { .. } => ("artifact_reverted", "artifact.revert"),
        }
    }
}

/// Checks that a name is one line.
fn line(what: &str, name: &str) -> Result<()> {
    let most = limits::RECORD_NAME_BYTES;
    if name.trim().is_empty() || name.len() > most || name.chars().any(char::is_control) {
        return Err(Error::invalid(format!("{what} is one line of 1 to {most} bytes")));
    }
    Ok(())
}

fn text(what: &str, text: &str) -> Result<()> {
    let most = limits::RECORD_TEXT_BYTES;
    match text.len() <= most {
        true => Ok(()),
        false => Err(Error::invalid(format!("{what} has at most {most} bytes")).hint("put the rest into an artifact")),
    }
}

fn media_type(text: &str) -> Result<()> {
    let most = limits::MEDIA_TYPE_BYTES;
    match text.len() <= most && text.chars().all(|c| c.is_ascii_graphic() || c == ' ') {
        true => Ok(()),
        false => Err(Error::invalid(format!("a content type is printable ASCII of at most {most} bytes"))
            .hint("as text/plain or application/json")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_change_is_refused() {
        let long = "x".repeat(limits::RECORD_NAME_BYTES + 1);
        for name in ["", "  ", "two\nlines", "\u{1b}[31mred", &long] {
            assert!(Change::BeginStep { name: name.into() }.check().is_err(), "{name:?}");
            assert!(Change::HandOver { agent: name.into(), note: String::new() }.check().is_err(), "{name:?}");
            assert!(Change::OpenDecision { title: name.into(), text: String::new() }.check().is_err(), "{name:?}");
            assert!(Change::RevertArtifact { name: name.into(), version: 1 }.check().is_err(), "{name:?}");
        }
        let content = |content_type: &str| Content {
            hash: Digest::from_bytes([0; 32]),
            bytes: 0,
            content_type: content_type.into(),
        };
        let put = |content_type: &str| Change::PutArtifact { name: "a".into(), content: content(content_type) };
        assert!(put("text/plain; charset=utf-8").check().is_ok() && put("").check().is_ok());
        assert!(put("text/plain\r\n").check().is_err() && put("é").check().is_err());
        assert!(Change::RevertArtifact { name: "a".into(), version: 0 }.check().is_err());
        let text = "x".repeat(limits::RECORD_TEXT_BYTES + 1);
        assert!(Change::OpenDecision { title: "t".into(), text }.check().is_err());
    }
}
