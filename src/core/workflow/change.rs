//! What can be asked of a kernel's records of its work.

use super::{Artifact, Decision, Step};
use crate::core::error::{Error, Result};
use crate::core::ids::Digest;
use crate::core::limits;

/// One change. Each has its entry in the journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A step begins.
    BeginStep {
        /// What is done in it.
        name: String,
    },
    /// The current step is completed; with a checkpoint that holds it completed.
    CompleteStep,
    /// Another agent works from now on; with a checkpoint that holds that.
    HandOver {
        /// Who.
        agent: String,
        /// What is to be known; empty: nothing.
        note: String,
    },
    /// A decision is put down.
    OpenDecision {
        /// In one line.
        title: String,
        /// In as many as it takes.
        text: String,
    },
    /// A decision holds from now on; with a checkpoint from just before.
    LockDecision {
        /// Which.
        id: u64,
    },
    /// A decision no longer holds.
    SupersedeDecision {
        /// Which.
        id: u64,
    },
    /// An artifact has one more version.
    PutArtifact {
        /// Its name.
        name: String,
        /// What it is from now on.
        content: Content,
    },
    /// An artifact has one more version: an earlier one again.
    RevertArtifact {
        /// Its name.
        name: String,
        /// Which earlier one.
        version: u32,
    },
}

/// What an artifact is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Content {
    /// The bytes, by their address.
    pub hash: Digest,
    /// How many.
    pub bytes: u64,
    /// Their media type; empty: nobody said.
    pub content_type: String,
}

/// What an artifact is put from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A blob that the kernel may read.
    Blob(Digest),
    /// A file of the workspace, by its path there, as it is now.
    File(Vec<u8>),
}

/// A change with who asks for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// What.
    pub change: Change,
    /// Who.
    pub actor: String,
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// Idempotency key; empty: none.
    pub key: String,
}

/// What a change gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The step that was begun or completed.
    Step(Step),
    /// Who works now.
    Agent(String),
    /// The decision as it is now.
    Decision(Decision),
    /// The artifact's newest version.
    Artifact(Artifact),
}

impl Change {
    /// Checks what it says, whatever the state.
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

    /// What events and the audit log call it: past tense, and the deed.
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

/// Checks a name: one line.
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
