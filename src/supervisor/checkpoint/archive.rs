//! Archives a kernel: its files and its engine's state exist in the store only, packed and deduplicated.
//!
//! ```text
//! archive:    stop ─▶ verify a complete checkpoint ─▶ intent ─▶ commit ─▶ "archived" ─▶ files removed
//! unarchive:  intent ─▶ new files, filled from the checkpoint ─▶ commit ─▶ "stopped"
//! ```
//! Intent and commit are in `state.db`, the lifecycle state is in the catalog. At the next start or before the next
//! use, an interrupted transition is finished if it was committed, else reverted ([`carry_out`]).

use std::rc::Rc;

use super::{contents, fill, pin_for_read, take, verify};
use crate::core::checkpoint::{Checkpoint, CheckpointRequest, CheckpointType, Manifest};
use crate::core::error::{Error, Result};
use crate::core::ids::CheckpointId;
use crate::core::kernel::State;
use crate::core::kernel::transition::{Kind, Step, Transition};
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::{Actor, Change, StopMode};
use crate::supervisor::kernel::transition::ExclusiveTransition;
use crate::workspace::Reason;

/// Files named in a refusal.
const NAMED: usize = 5;

impl Kernel {
    /// Refuses operations that an archived kernel does not support.
    pub(crate) fn check_available(&self) -> Result<()> {
        self.check_here()?;
        let name = &self.spec().name;
        match self.archived_in() {
            Some(_) => Err(Error::conflict(format!("kernel {name} is archived"))
                .reason("archived")
                .hint(format!("`ryokan unarchive {name}` brings it back"))),
            None => Ok(()),
        }
    }

    /// The checkpoint that holds an archived kernel.
    pub(crate) fn archived_in(&self) -> Option<CheckpointId> {
        match self.view.borrow().state {
            State::Archived { checkpoint } => Some(checkpoint),
            _ => None,
        }
    }
}

/// Archives a kernel; returns the checkpoint that holds it, and the new version.
///
/// # Errors
/// `conflict` (version, threads, used meanwhile, already archived), `busy` (leased), `refused` (a thread, an ephemeral
/// kernel, files that no checkpoint can hold), `deadline` if the kernel did not become idle, and capture errors;
/// nothing was removed then.
pub async fn archive(host: &Rc<Host>, kernel: &Rc<Kernel>, change: Change) -> Result<(Checkpoint, u64)> {
    let (host, kernel) = (Rc::clone(host), Rc::clone(kernel));
    // In its own task: a client that disconnects does not leave the transition half done.
    let archiving = tokio::task::spawn_local(async move { put_away(&host, &kernel, change).await });
    archiving.await.map_err(|error| Error::internal(error.to_string()))?
}

async fn put_away(host: &Rc<Host>, kernel: &Rc<Kernel>, change: Change) -> Result<(Checkpoint, u64)> {
    let (name, actor) = (&kernel.spec().name, &change.actor);
    kernel.admit(actor, change.expected_version).await?;
    if kernel.archived_in().is_some() {
        return Err(Error::conflict(format!("kernel {name} is archived already")).reason("archived"));
    }
    if kernel.thread_of.is_some() {
        return Err(Error::refused(format!("{name} works in the workspace of {}", kernel.files().spec().name))
            .reason("thread")
            .hint("archive the kernel whose files they are, without threads"));
    }
    if kernel.spec().ephemeral {
        return Err(Error::refused(format!("kernel {name} is ephemeral: it is removed with its client's connection"))
            .reason("ephemeral"));
    }
    let threads: Vec<String> = kernel.threads().iter().map(|thread| thread.spec().name.to_string()).collect();
    if !threads.is_empty() {
        return Err(Error::conflict(format!("{} works in the workspace of {name}", threads.join(", ")))
            .reason("threads")
            .hint("remove that first: `ryokan rm`; its state and its journal go with it"));
    }
    match kernel.interrupted() {
        Some(Kind::Restore) => kernel.recovered().await?,
        Some(Kind::Archive | Kind::Unarchive | Kind::HandoverOut | Kind::Remove | Kind::Freeze) => {
            kernel.settle().await?
        }
        None => {}
    }
    let transition = Rc::new(ExclusiveTransition::begin(kernel, Kind::Archive)?);
    let id = stop_with_checkpoint(host, kernel, actor).await?;
    let (checkpoint, _held) = pin_for_read(kernel, kernel.recorded(id).await?).await?;
    let (manifest, parts) = contents(host, &checkpoint).await?;
    nothing_is_left_out(kernel, &manifest)?;
    verify::readable(&host.store, &manifest, &parts).await?;
    // The lock keeps readers out while the files are removed, and keeps later work from starting on them.
    let _turn = kernel.lock_files().await?;
    transition.record(Transition::Archive { checkpoint: id }, actor.to_string(), host.now_ms()).await?;
    let archived = kernel.archive(actor.clone(), id, transition).await;
    host.prepared.discard_of(kernel.id).await;
    Ok((checkpoint, archived?))
}

/// Refuses if the checkpoint omits a file that it names. Sockets are exempt: they are useless without their process.
fn nothing_is_left_out(kernel: &Kernel, manifest: &Manifest) -> Result<()> {
    let goes = [Reason::Unreadable, Reason::Device, Reason::Mount].map(|reason| reason.to_string());
    let left_out =
        manifest.missed.iter().filter(|missed| missed.key.starts_with("file/") && goes.contains(&missed.reason));
    let named: Vec<String> =
        left_out.map(|missed| format!("{} ({})", missed.key.trim_start_matches("file/"), missed.reason)).collect();
    if named.is_empty() {
        return Ok(());
    }
    let more = if named.len() > NAMED { format!(" and {} more", named.len() - NAMED) } else { String::new() };
    let named = named.into_iter().take(NAMED).collect::<Vec<_>>().join(", ");
    Err(Error::refused(format!("files of kernel {} cannot be kept in a checkpoint: {named}{more}", kernel.spec().name))
        .reason("not_captured")
        .hint("make them readable (chmod u+r), or remove them, then archive again"))
}

/// Stops the worker; returns a checkpoint that holds the complete kernel.
async fn stop_with_checkpoint(host: &Rc<Host>, kernel: &Rc<Kernel>, actor: &Actor) -> Result<CheckpointId> {
    // The checkpoint before the stop, if there is one, already holds it.
    for is_last in [false, true] {
        kernel.stop(actor.clone(), StopMode::WhenIdle).await?;
        let head = kernel.records.head().await?.checkpoint;
        match head {
            Some(head) if !kernel.records.changed_since_head().await? => return Ok(head),
            _ if is_last => break,
            _ => {
                drop(take(host, kernel, CheckpointRequest::new(CheckpointType::Auto, "archive"), actor.clone()).await?)
            }
        }
    }
    Err(kernel.used_meanwhile())
}

/// Unarchives a kernel; returns its version.
///
/// # Errors
/// `conflict` (version, not archived), `busy` (leased, no room on the disk), `corrupt`; the kernel stays archived.
pub async fn unarchive(host: &Rc<Host>, kernel: &Rc<Kernel>, change: Change) -> Result<u64> {
    let (host, kernel) = (Rc::clone(host), Rc::clone(kernel));
    let taking = tokio::task::spawn_local(async move { take_out(&host, &kernel, change).await });
    taking.await.map_err(|error| Error::internal(error.to_string()))?
}

async fn take_out(host: &Rc<Host>, kernel: &Rc<Kernel>, change: Change) -> Result<u64> {
    kernel.admit(&change.actor, change.expected_version).await?;
    kernel.settle().await?;
    let transition = Rc::new(ExclusiveTransition::begin(kernel, Kind::Unarchive)?);
    let id = kernel.archived_in().ok_or_else(|| {
        Error::conflict(format!("kernel {} is not archived", kernel.spec().name)).reason("not_archived")
    })?;
    let (checkpoint, _held) = pin_for_read(kernel, kernel.recorded(id).await?).await?;
    let (manifest, parts) = contents(host, &checkpoint).await?;
    let _turn = kernel.lock_files().await?;
    let intent = Transition::Unarchive { checkpoint: id };
    transition.record(intent, change.actor.to_string(), host.now_ms()).await?;
    let made = async {
        transition.enter(Step::Files)?;
        host.catalog.recreate_kernel_files(kernel.id).await?;
        fill(host, kernel.id, manifest.workspace.tree, None, None).await?;
        transition.enter(Step::EngineState)?;
        super::state::load_engine(host, kernel.id, kernel.spec().isolation, manifest.engine, parts).await?;
        kernel.unarchive(change.actor.clone(), Rc::clone(&transition)).await
    };
    let made = made.await;
    transition.release();
    // If the transition was not committed, the files were removed.
    if made.is_err()
        && let Err(error) = kernel.settle().await
    {
        tracing::warn!(kernel = %kernel.spec().name, %error, "what was made of an archived kernel's files is left");
    }
    made
}
