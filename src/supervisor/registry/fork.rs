//! Forks: kernels that begin as another one is, or was at a checkpoint.
//!
//! ```text
//! names reserved ─▶ fork point: one checkpoint for all ─▶ each child on its own, a few at once ─▶ a mark in the parent's journal
//! ```
//! Nothing of the parent changes but that checkpoint and those two marks. A child shares content with it through the store, and
//! nothing else: what happens to one is no matter to the other.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Instant;

use futures::StreamExt as _;

use super::supervisor::Reserved;
use crate::core::checkpoint::{Checkpoint, CheckpointRequest, CheckpointType};
use crate::core::error::{Error, Result};
use crate::core::fork::Forking;
use crate::core::limits;
use crate::core::origin::{ForkPoint, Origin};
use crate::supervisor::checkpoint;
use crate::supervisor::checkpoint::prepared_copies;
use crate::supervisor::host::metrics::Stage;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::Actor;
use crate::supervisor::registry::Supervisor;
use crate::supervisor::registry::create_from::{Seed, Words};
use crate::supervisor::registry::idempotency::{KeyTurn, key_used, made_as};

/// What became of a fork.
pub struct Forked {
    /// The fork point, if one was needed.
    pub checkpoint: Option<Checkpoint>,
    /// Each child that was asked for, by name.
    pub children: Vec<(String, Result<Rc<Kernel>>)>,
}

/// One child on its way.
enum Child {
    /// It is settled: there since an earlier call with the same key, or it cannot be.
    Settled(Result<Rc<Kernel>>),
    /// It is to be made, and the key to remember it by.
    Due(Reserved, Option<KeyTurn>),
}

/// Makes kernels that begin as this one. What fails of one child is that child's result.
///
/// # Errors
/// `invalidArgument`, `conflict`, `notFound` (checkpoint), and what keeps the fork point from being taken: then there is no child.
pub async fn fork(supervisor: &Supervisor, kernel: &Rc<Kernel>, wanted: Forking, actor: Actor) -> Result<Forked> {
    wanted.check()?;
    let (supervisor, kernel) = (supervisor.clone(), Rc::clone(kernel));
    // In a task of its own: a client that leaves meanwhile leaves nothing half made.
    let forking = tokio::task::spawn_local(async move {
        let begun = Instant::now();
        let forked = perform(&supervisor, &kernel, &wanted, &actor).await?;
        supervisor.host().metrics.since(Stage::Fork, kernel.spec.engine, begun);
        Ok(forked)
    });
    forking.await.map_err(|error| Error::internal(error.to_string()))?
}

async fn perform(supervisor: &Supervisor, kernel: &Rc<Kernel>, wanted: &Forking, actor: &Actor) -> Result<Forked> {
    let host = supervisor.host();
    let _source = kernel.lend()?;
    kernel.admit(actor, wanted.expected_version).await?;
    let version = kernel.view().version;
    let mut children = Vec::new();
    for (number, name) in wanted.names().into_iter().enumerate() {
        let child = settle(supervisor, kernel, wanted, (number, &name), actor).await;
        children.push((name, child));
    }
    if children.iter().all(|(_, child)| matches!(child, Child::Settled(_))) {
        let checkpoint = before(kernel, &children).await?;
        let settled = |(name, child)| match child {
            Child::Settled(result) => (name, result),
            Child::Due(..) => (name, Err(Error::internal("a child that was to be made was not"))),
        };
        return Ok(Forked { checkpoint, children: children.into_iter().map(settled).collect() });
    }
    // Until the children's rows name what is stored, nothing else may.
    let _held = host.store.run(|store| Ok(store.guard())).await?;
    // Its row keeps what the children are to name.
    let (point, _point_held) = checkpoint::hold(kernel, fork_point(supervisor, kernel, wanted, actor).await?).await?;
    let seed = seed(supervisor, kernel, &point).await?;
    let making = children.into_iter().map(async |(name, child)| {
        let made = match child {
            Child::Settled(result) => result,
            Child::Due(reserved, turn) => {
                let key = turn.as_ref().map(KeyTurn::parts);
                let words = words(kernel, &point);
                let made = supervisor.begin_from(&reserved, &seed, key, words, actor).await;
                if let Err(error) = &made {
                    host.audit_refusal(actor, "kernel.fork", Some(kernel), error).await;
                }
                made
            }
        };
        (name, made)
    });
    let children: Vec<_> = futures::stream::iter(making).buffered(limits::FORKS_CONCURRENT).collect().await;
    if let Some(files) = seed.made.take() {
        prepared_copies::prepare(host, kernel.files().id, files, seed.manifest.workspace.tree);
    }
    if let Err(error) = tell(supervisor, kernel, &point, &children, (version, actor)).await {
        // The children are there, and say themselves where they come from.
        tracing::warn!(kernel = %kernel.spec.name, %error, "a fork could not be noted in the journal of its parent");
        let detail = serde_json::json!({ "checkpoint": point.id, "error": error.message });
        host.events.publish(&kernel.event_name, "fork_not_recorded", detail);
    }
    Ok(Forked { checkpoint: Some(point), children })
}

/// What can be said of a child before anything is done.
async fn settle(
    supervisor: &Supervisor,
    kernel: &Kernel,
    wanted: &Forking,
    (number, name): (usize, &str),
    actor: &Actor,
) -> Child {
    let settle = async {
        let mut turn = None;
        if !wanted.key.is_empty() {
            let scope = format!("fork/{}/{}/{number}", actor.uid, kernel.id);
            let (known, waited) = supervisor.recall(scope, &wanted.key).await?;
            if let Some(known) = known {
                return Ok(Child::Settled(same_fork(kernel, known, wanted, name).await));
            }
            turn = Some(waited);
        }
        let name = name.parse().map_err(|error: crate::core::name::NameError| Error::invalid(error.to_string()))?;
        Ok(Child::Due(supervisor.reserve(actor.uid, name)?, turn))
    };
    settle.await.unwrap_or_else(|error| Child::Settled(Err(error)))
}

/// The child that a key has made, if it is the one which is asked for by the same key.
async fn same_fork(kernel: &Kernel, known: Rc<Kernel>, wanted: &Forking, name: &str) -> Result<Rc<Kernel>> {
    let known = made_as(known, name, kernel.spec.engine)?;
    let made_from = known.view().origin.from.map(|point| point.checkpoint);
    // One that is gone cannot be compared.
    let asked = if wanted.from.is_empty() { None } else { checkpoint::find(kernel, &wanted.from).await.ok() };
    match asked.zip(made_from) {
        Some((asked, made_from)) if asked.id != made_from => Err(key_used(&known)),
        _ => Ok(known),
    }
}

/// The fork point of children that were made by an earlier call, while the kernel still has it.
async fn before(kernel: &Kernel, children: &[(String, Child)]) -> Result<Option<Checkpoint>> {
    let made = children.iter().find_map(|(_, child)| match child {
        Child::Settled(Ok(child)) => child.view().origin.from,
        Child::Settled(Err(_)) | Child::Due(..) => None,
    });
    match made {
        Some(point) => kernel.records.checkpoint(point.checkpoint).await,
        None => Ok(None),
    }
}

async fn fork_point(
    supervisor: &Supervisor,
    kernel: &Rc<Kernel>,
    wanted: &Forking,
    actor: &Actor,
) -> Result<Checkpoint> {
    // One that is put away is what that checkpoint holds.
    let archived = kernel.archived_in().map(|id| id.to_string()).unwrap_or_default();
    let from = if wanted.from.is_empty() { &archived } else { &wanted.from };
    if !from.is_empty() {
        let found = checkpoint::find(kernel, from).await?;
        return match found.restore_point {
            true => Ok(found),
            false => Err(Error::refused(format!("checkpoint {} is not one to begin from", found.short_id()))
                .reason("no_restore_point")),
        };
    }
    let name = format!("fork to {}", wanted.name);
    let taking = CheckpointRequest {
        name: name.chars().take(limits::CHECKPOINT_NAME_BYTES / 4).collect(),
        interrupt: wanted.interrupt,
        wait: wanted.wait,
        expected_version: wanted.expected_version,
        ..CheckpointRequest::new(CheckpointType::Auto, "")
    };
    checkpoint::take(supervisor.host(), kernel, taking, actor.clone()).await
}

async fn seed(supervisor: &Supervisor, kernel: &Rc<Kernel>, point: &Checkpoint) -> Result<Seed> {
    let (manifest, mut parts) = checkpoint::contents(supervisor.host(), point).await?;
    if manifest.kernel != kernel.id || manifest.id != point.id {
        let short = point.short_id();
        return Err(Error::corrupt(format!("the manifest of checkpoint {short} is another checkpoint's")));
    }
    // Children that all draw the same numbers are no use: each begins with fresh ones.
    parts.leave_out_random();
    let blobs = kernel.records.blobs_granted_until(point.at_ms).await?;
    let from = ForkPoint { kernel: kernel.id, name: kernel.spec.name.to_string(), checkpoint: point.id };
    let origin = Origin::of_fork(kernel.view().origin.generation, from);
    let called = format!("fork of {}", kernel.spec.name);
    let giving = match kernel.archived_in() {
        Some(_) => None,
        None => checkpoint::donor(supervisor.host(), kernel).await?,
    };
    let (like, made) = (Some(kernel.files().id), RefCell::default());
    let decisions = kernel.records.all_decisions().await?;
    Ok(Seed { manifest, parts, blobs, origin, parent: Some(point.id), called, decisions, giving, like, made })
}

fn words(kernel: &Kernel, point: &Checkpoint) -> Words<'static> {
    let (name, short) = (&kernel.spec.name, point.short_id());
    Words {
        mark: format!("forked from {name} at checkpoint {short}"),
        action: "kernel.fork",
        outcome: format!("from {} at {} manifest {}", kernel.id, point.id, point.manifest),
        detail: serde_json::json!({ "forked_from": kernel.id, "name": name, "checkpoint": point.id }),
    }
}

/// Tells the parent's journal, the audit log and whoever listens.
async fn tell(
    supervisor: &Supervisor,
    kernel: &Rc<Kernel>,
    point: &Checkpoint,
    children: &[(String, Result<Rc<Kernel>>)],
    (before, actor): (u64, &Actor),
) -> Result<()> {
    let host = supervisor.host();
    let made: Vec<&str> = children.iter().filter(|(_, made)| made.is_ok()).map(|(name, _)| name.as_str()).collect();
    if made.is_empty() {
        return Ok(());
    }
    let text = format!("forked to {} at checkpoint {}", made.join(", "), point.short_id());
    let version = kernel.records.mark(actor, &text, host.now_ms()).await?;
    kernel.advance(version);
    let detail = serde_json::json!({ "checkpoint": point.id, "children": made });
    host.events.publish(&kernel.event_name, "kernel_forked", detail);
    let outcome = format!("{} to {}", point.id, made.join(" "));
    host.audit(actor, "kernel.forked", kernel, (Some(before), Some(version)), outcome).await;
    Ok(())
}
