//! Steps, hand-overs, decisions and artifacts of a kernel: changes with a checkpoint, and changes without.
//!
//! ```text
//! step completed, handed over ─▶ safe point ─▶ capture ─▶ { change, checkpoint } in one transaction
//! decision locked             ─▶ safe point ─▶ capture ─▶ { checkpoint, change } in one transaction
//! everything else             ─▶ the task itself: one transaction, no worker
//! ```

use std::path::Path;
use std::rc::Rc;

use crate::catalog::state::{Done, Together};
use crate::core::checkpoint::{Checkpoint, CheckpointRequest, CheckpointType};
use crate::core::error::{Error, Result};
use crate::core::ids::Digest;
use crate::core::workflow::{
    self, Artifact, Content, Decision, Outcome, Request, Source, Step, Workflow, WorkflowPart,
};
use crate::supervisor::checkpoint;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::Change;
use crate::supervisor::kernel::journal::Records;
use crate::workspace;

/// Begins a step.
///
/// # Errors
/// `conflict` (version, or a step is open), `invalidArgument`, `refused` (too many).
pub async fn begin_step(kernel: &Kernel, change: Change, name: String) -> Result<Step> {
    step(plain(kernel, change, workflow::Change::BeginStep { name }, String::new()).await?)
}

/// Completes the current step, with a checkpoint that holds the completion.
///
/// # Errors
/// `conflict` (version, or no step is open), and errors of taking a checkpoint.
pub async fn complete_step(host: &Rc<Host>, kernel: &Rc<Kernel>, change: Change) -> Result<(Step, Checkpoint)> {
    let (outcome, checkpoint) = with_checkpoint(host, kernel, change, workflow::Change::CompleteStep).await?;
    Ok((step(outcome)?, checkpoint))
}

/// Hands the work over to another agent, with a checkpoint that holds the hand-over.
///
/// # Errors
/// `conflict` (version, or that agent already works), and errors of taking a checkpoint.
pub async fn hand_over(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    change: Change,
    agent: String,
    note: String,
) -> Result<Checkpoint> {
    Ok(with_checkpoint(host, kernel, change, workflow::Change::HandOver { agent, note }).await?.1)
}

/// Opens a decision.
///
/// # Errors
/// `conflict` (version), `invalidArgument`.
pub async fn open_decision(
    kernel: &Kernel,
    change: Change,
    title: String,
    text: String,
    key: String,
) -> Result<Decision> {
    decision(plain(kernel, change, workflow::Change::OpenDecision { title, text }, key).await?)
}

/// Locks a decision, with a checkpoint of the state just before.
///
/// # Errors
/// `notFound`, `conflict` (version, or not open), and errors of taking a checkpoint.
pub async fn lock_decision(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    change: Change,
    id: u64,
) -> Result<(Decision, Checkpoint)> {
    let (outcome, checkpoint) = with_checkpoint(host, kernel, change, workflow::Change::LockDecision { id }).await?;
    Ok((decision(outcome)?, checkpoint))
}

/// Supersedes a decision.
///
/// # Errors
/// `notFound`, `conflict` (version, or already superseded).
pub async fn supersede_decision(kernel: &Kernel, change: Change, id: u64) -> Result<Decision> {
    decision(plain(kernel, change, workflow::Change::SupersedeDecision { id }, String::new()).await?)
}

/// Adds a version to an artifact.
///
/// # Errors
/// `notFound` (the blob or the file), `conflict` (version), `invalidArgument`, and store errors.
pub async fn put_artifact(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    change: Change,
    name: String,
    (source, content_type): (Source, String),
    key: String,
) -> Result<Artifact> {
    // Until the row refers to the stored content, only this guard protects it.
    let _held = host.store.run(|store| Ok(store.guard())).await?;
    let (hash, bytes) = match source {
        Source::Blob(hash) => {
            let store = kernel.records.readable(hash).await?;
            (hash, store.run(move |store| store.size(hash)).await?)
        }
        Source::File(path) => store_file(host, kernel, path).await?,
    };
    let content = Content { hash, bytes, content_type };
    artifact(plain(kernel, change, workflow::Change::PutArtifact { name, content }, key).await?)
}

/// Adds a version to an artifact with the content of an earlier version.
///
/// # Errors
/// `notFound`, `conflict` (version, or already equal).
pub async fn revert_artifact(kernel: &Kernel, change: Change, name: String, version: u32) -> Result<Artifact> {
    artifact(plain(kernel, change, workflow::Change::RevertArtifact { name, version }, String::new()).await?)
}

/// Stores a file of the workspace with its present content.
async fn store_file(host: &Rc<Host>, kernel: &Rc<Kernel>, path: Vec<u8>) -> Result<(Digest, u64)> {
    // Another kernel owns a thread's workspace.
    let root = host.catalog.kernel_files(kernel.files().id).workspace;
    if !host.drivers.of(kernel.files().spec().isolation)?.has_local_files() {
        super::files::refresh(host, kernel).await?;
    }
    let read = host.store.run_beside(move |store| Ok(workspace::read_file(&root, Path::new(as_os(&path)), store)));
    Ok(read.await??)
}

fn as_os(path: &[u8]) -> &std::ffi::OsStr {
    std::os::unix::ffi::OsStrExt::from_bytes(path)
}

/// A change without a checkpoint.
async fn plain(kernel: &Kernel, change: Change, what: workflow::Change, key: String) -> Result<Outcome> {
    what.check()?;
    kernel.work(change, what, key).await
}

/// A change combined atomically with a checkpoint of type `auto`.
async fn with_checkpoint(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    change: Change,
    what: workflow::Change,
) -> Result<(Outcome, Checkpoint)> {
    what.check()?;
    let at_ms = host.now_ms();
    // Validated before any wait; validated again in the transaction.
    let part = kernel.records.workflow_part().await?;
    let name = name_of(&part, &what);
    part.after(&what, at_ms)?;
    let holds_it_done = !matches!(what, workflow::Change::LockDecision { .. });
    let request = Request { change: what, actor: change.actor.to_string(), at_ms, key: String::new() };
    let with = if holds_it_done { Together::Before(request) } else { Together::After(request) };
    let taking = CheckpointRequest {
        expected_version: change.expected_version,
        ..CheckpointRequest::new(CheckpointType::Auto, &CheckpointRequest::name_of(&name))
    };
    let (checkpoint, outcome) = checkpoint::take_with(host, kernel, taking, change.actor, Some(with)).await?;
    let outcome = outcome.ok_or_else(|| Error::internal("a change that went with a checkpoint gave nothing"))?;
    Ok((outcome, checkpoint))
}

/// Name of the checkpoint of a change.
fn name_of(part: &WorkflowPart, what: &workflow::Change) -> String {
    match what {
        workflow::Change::CompleteStep => match part.newest_step() {
            Some(step) => format!("step {} completed: {}", step.index, step.name),
            None => String::new(),
        },
        workflow::Change::HandOver { agent, .. } => format!("handed over to {agent}"),
        workflow::Change::LockDecision { id } => {
            let title = part.decisions.iter().find(|one| one.id == *id).map_or("", |one| &one.title);
            format!("before decision {id} is locked: {title}")
        }
        workflow::Change::BeginStep { .. }
        | workflow::Change::OpenDecision { .. }
        | workflow::Change::SupersedeDecision { .. }
        | workflow::Change::PutArtifact { .. }
        | workflow::Change::RevertArtifact { .. } => String::new(),
    }
}

fn step(outcome: Outcome) -> Result<Step> {
    match outcome {
        Outcome::Step(step) => Ok(step),
        Outcome::Agent(_) | Outcome::Decision(_) | Outcome::Artifact(_) => Err(other()),
    }
}

fn decision(outcome: Outcome) -> Result<Decision> {
    match outcome {
        Outcome::Decision(decision) => Ok(decision),
        Outcome::Step(_) | Outcome::Agent(_) | Outcome::Artifact(_) => Err(other()),
    }
}

fn artifact(outcome: Outcome) -> Result<Artifact> {
    match outcome {
        Outcome::Artifact(artifact) => Ok(artifact),
        Outcome::Step(_) | Outcome::Agent(_) | Outcome::Decision(_) => Err(other()),
    }
}

fn other() -> Error {
    Error::internal("a record is not of the kind that was asked for")
}

impl Records {
    /// Steps and agent.
    ///
    /// # Errors
    /// Database errors.
    pub async fn workflow(&self) -> Result<Workflow> {
        Ok(self.state.workflow().await?)
    }

    /// The workflow part of a checkpoint.
    ///
    /// # Errors
    /// Database errors.
    pub(crate) async fn workflow_part(&self) -> Result<WorkflowPart> {
        Ok(self.state.workflow_part().await?)
    }

    /// The outcome recorded for a key, while keys are remembered.
    ///
    /// # Errors
    /// `alreadyExists` if the key belongs to another request.
    pub(crate) async fn changed_by_key(&self, request: &Request) -> Result<Option<Outcome>> {
        match request.key.is_empty() {
            true => Ok(None),
            false => Ok(self.state.changed_by_key(request.clone()).await?),
        }
    }

    /// Changes the workflow records.
    ///
    /// # Errors
    /// Errors of the change.
    pub(crate) async fn change_workflow(&self, request: Request) -> Result<Done> {
        Ok(self.state.change_workflow(request).await?)
    }

    /// A page of decisions after a number, oldest first.
    ///
    /// # Errors
    /// Database errors.
    pub async fn decisions(&self, after: u64) -> Result<Vec<Decision>> {
        Ok(self.state.decisions(after).await?)
    }

    /// Every decision.
    ///
    /// # Errors
    /// Database errors.
    pub(crate) async fn all_decisions(&self) -> Result<Vec<Decision>> {
        let mut all: Vec<Decision> = Vec::new();
        loop {
            let page = self.decisions(all.last().map_or(0, |last| last.id)).await?;
            if page.is_empty() {
                return Ok(all);
            }
            all.extend(page);
        }
    }

    /// A page of artifacts after a name, each in its newest version.
    ///
    /// # Errors
    /// Database errors.
    pub async fn artifacts(&self, after: String) -> Result<Vec<Artifact>> {
        Ok(self.state.artifacts(after).await?)
    }

    /// A page of one artifact's versions before a number, newest first.
    ///
    /// # Errors
    /// Database errors.
    pub async fn artifact_versions(&self, name: String, before: u32) -> Result<Vec<Artifact>> {
        Ok(self.state.artifact_versions(name, before).await?)
    }

    /// One version of an artifact; 0: the newest.
    ///
    /// # Errors
    /// `notFound`.
    pub async fn artifact(&self, name: &str, version: u32) -> Result<Artifact> {
        let found = self.state.artifact(name.to_owned(), version).await?;
        found.ok_or_else(|| match version {
            0 => Error::not_found(format!("the kernel has no artifact {name:?}")),
            1.. => Error::not_found(format!("artifact {name:?} has no version {version}")),
        })
    }
}
