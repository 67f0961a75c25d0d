//! Forks: kernels created from another kernel's current state or from one of its checkpoints.
//!
//! ```text
//! names reserved ─▶ one fork point for all ─▶ children, a few at once ─▶ a mark in the parent's journal
//!                    └▶ running virtual machine: one copy of it for all
//! ```
//! The parent changes only by that checkpoint and the two marks. A child shares content with it through the store and
//! nothing else; the kernels are independent.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;
use std::time::Instant;

use futures::StreamExt as _;

use super::supervisor::ReservedName;
use crate::core::checkpoint::{Checkpoint, CheckpointRequest, CheckpointType, Manifest};
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::fork::{ForkWay, Forking};
use crate::core::limits;
use crate::core::origin::{ForkPoint, Origin};
use crate::core::spec_update::SpecUpdate;
use crate::isolation::MachineCopy;
use crate::supervisor::checkpoint;
use crate::supervisor::host::Host;
use crate::supervisor::host::metrics::Stage;
use crate::supervisor::host::prepared_copies;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::Actor;
use crate::supervisor::registry::Supervisor;
use crate::supervisor::registry::create_from::{CreationRecord, KernelSource};
use crate::supervisor::registry::idempotency::{KeyLock, key_used, made_as};
use crate::supervisor::workers::admission::check_host_limits;

/// The outcome of a fork.
pub struct Forked {
    /// The fork point, if one was needed.
    pub checkpoint: Option<Checkpoint>,
    /// Each requested child, by name.
    pub children: Vec<(String, Result<Rc<Kernel>>)>,
    /// How the children began; `None` if an earlier call made all of them.
    pub way: Option<ForkWay>,
}

/// A requested child.
enum Child {
    /// Settled before any work: created by an earlier call with the same key, or impossible.
    Settled(Result<Rc<Kernel>>),
    /// To be created, with the lock of its key.
    Due(ReservedName, Option<KeyLock>),
}

/// Forks a kernel. The failure of one child is that child's result.
///
/// # Errors
/// `invalidArgument`, `conflict`, `notFound` (checkpoint), and the errors of the fork point: no child is created then.
pub async fn fork(supervisor: &Supervisor, kernel: &Rc<Kernel>, wanted: Forking, actor: Actor) -> Result<Forked> {
    wanted.check()?;
    let (supervisor, kernel) = (supervisor.clone(), Rc::clone(kernel));
    // A separate task, so that a client's disconnect leaves nothing half done.
    let forking = tokio::task::spawn_local(async move {
        let begun = Instant::now();
        let forked = perform(&supervisor, &kernel, &wanted, &actor).await?;
        supervisor.host().metrics.since(Stage::Fork, kernel.spec().engine, begun);
        Ok(forked)
    });
    forking.await.map_err(|error| Error::internal(error.to_string()))?
}

async fn perform(supervisor: &Supervisor, kernel: &Rc<Kernel>, wanted: &Forking, actor: &Actor) -> Result<Forked> {
    let host = supervisor.host();
    let _source = kernel.lock_as_source()?;
    kernel.admit(actor, wanted.expected_version).await?;
    let (version, is_live) = (kernel.view().version, kernel.link.borrow().is_some());
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
        return Ok(Forked { checkpoint, children: children.into_iter().map(settled).collect(), way: None });
    }
    let (present, mut requested) = (kernel.spec_now(), kernel.spec_now());
    wanted.adapt(&mut requested)?;
    if requested.limits != present.limits {
        check_host_limits(&requested.limits, &host.config.defaults.limits())?;
    }
    // Nothing else names the stored objects until the children's rows do.
    let _held = host.store.run(|store| Ok(store.guard())).await?;
    // The pinned row keeps the objects that the children will name.
    let (point, _point_held) =
        checkpoint::pin_for_read(kernel, fork_point(supervisor, kernel, wanted, actor).await?).await?;
    let mut seed = seed(supervisor, kernel, &point).await?;
    // The present permissions and limits: an older checkpoint must not bring back revoked ones.
    seed.manifest.spec = kernel.spec_now();
    let (machine, way) = match is_live {
        true => copied_machine(host, kernel, wanted).await?,
        false => (None, ForkWay::checkpoint()),
    };
    seed.machine = machine.map(Rc::new);
    wanted.adapt(&mut seed.manifest.spec)?;
    check_added_paths(&seed.manifest)?;
    let driver = host.drivers.of(seed.manifest.spec.isolation)?;
    let own_dir = host.home(kernel.id, None).dir;
    seed.manifest.base_image_version = driver.image_version(&seed.manifest.spec, &own_dir);
    let making = children.into_iter().map(async |(name, child)| {
        let made = match child {
            Child::Settled(result) => result,
            Child::Due(reserved, key_lock) => {
                let key = key_lock.as_ref().map(KeyLock::parts);
                let words = words(kernel, &point);
                let made = supervisor.create_from(&reserved, &seed, key, words, actor).await;
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
        let owner = Rc::downgrade(&kernel.files_owner());
        let has_use = move || {
            let owner = owner.upgrade().filter(|owner| !owner.is_gone() && owner.archived_in().is_none())?;
            Some(owner.event_name())
        };
        prepared_copies::prepare(host, kernel.files().id, files, seed.manifest.workspace.tree, has_use);
    }
    // Each child has its own part of the machine now.
    seed.machine = None;
    if let Err(error) = record(supervisor, kernel, (&point, &way), &children, (version, actor)).await {
        // The children exist, and record their origin themselves.
        tracing::warn!(kernel = %kernel.spec().name, %error, "a fork could not be noted in the journal of its parent");
        let detail = serde_json::json!({ "checkpoint": point.id, "error": error.message });
        host.events.publish(&kernel.event_name(), "fork_not_recorded", detail);
    }
    Ok(Forked { checkpoint: Some(point), children, way: Some(way) })
}

/// Refuses a path of the children where the source has a mount.
fn check_added_paths(manifest: &Manifest) -> Result<()> {
    if manifest.mounts.len() + manifest.spec.paths.len() > limits::MOUNTS {
        return Err(Error::busy(format!("a kernel has at most {} mounts", limits::MOUNTS)));
    }
    let is_mounted = |path: &Path| manifest.mounts.iter().any(|given| Path::new(&given.mount.path) == path);
    match manifest.spec.paths.iter().find(|allowed| is_mounted(&allowed.path)) {
        Some(allowed) => {
            Err(Error::already_exists(format!("something is mounted at {} already", allowed.path.display()))
                .hint("unmount it first, or allow another path"))
        }
        None => Ok(()),
    }
}

/// Copies the kernel's running machine if the children are to be like it. Otherwise the fork point is their beginning.
async fn copied_machine(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    wanted: &Forking,
) -> Result<(Option<MachineCopy>, ForkWay)> {
    let copied = match wanted.copies_machine(&kernel.spec()) {
        Ok(false) => return Ok((None, ForkWay::checkpoint())),
        Ok(true) if !kernel.at_next_start().is_empty() => {
            Err(Error::unsupported("changes of the kernel's limits apply at its next start"))
        }
        Ok(true) => checkpoint::copy_machine(host, kernel, wanted.wait).await,
        Err(why) => Err(Error::unsupported(why)),
    };
    match copied {
        Ok((machine, pause)) => Ok((Some(machine), ForkWay::Machine { pause })),
        Err(error) if error.code == ErrorCode::Unsupported => Ok((None, ForkWay::Checkpoint { reason: error.message })),
        Err(error) => Err(error),
    }
}

/// Settles a child as far as possible before any work.
async fn settle(
    supervisor: &Supervisor,
    kernel: &Kernel,
    wanted: &Forking,
    (number, name): (usize, &str),
    actor: &Actor,
) -> Child {
    let settle = async {
        let mut key_lock = None;
        if !wanted.key.is_empty() {
            let scope = format!("fork/{}/{}/{number}", actor.uid, kernel.id);
            let (known, waited) = supervisor.recall(scope, &wanted.key).await?;
            if let Some(known) = known {
                return Ok(Child::Settled(same_fork(kernel, known, wanted, name).await));
            }
            key_lock = Some(waited);
        }
        let name = name.parse().map_err(|error: crate::core::name::NameError| Error::invalid(error.to_string()))?;
        Ok(Child::Due(supervisor.reserve(actor.uid, name)?, key_lock))
    };
    settle.await.unwrap_or_else(|error| Child::Settled(Err(error)))
}

/// The child created earlier with the same key, if the request matches it.
async fn same_fork(kernel: &Kernel, known: Rc<Kernel>, wanted: &Forking, name: &str) -> Result<Rc<Kernel>> {
    let known = made_as(known, name, kernel.spec().engine)?;
    let made_from = known.view().origin.from.map(|point| point.checkpoint);
    let mut expected = (*known.spec()).clone();
    // Its network, limits and paths may have changed since.
    Forking { update: SpecUpdate::default(), ..wanted.clone() }.adapt(&mut expected)?;
    if wanted.isolation.is_some() && expected.isolation != known.spec().isolation
        || wanted.image.as_ref().is_some_and(|image| !known.spec().image.starts_with(image))
    {
        return Err(key_used(&known));
    }
    // A removed checkpoint cannot be compared.
    let asked = if wanted.from.is_empty() { None } else { checkpoint::find(kernel, &wanted.from).await.ok() };
    match asked.zip(made_from) {
        Some((asked, made_from)) if asked.id != made_from => Err(key_used(&known)),
        _ => Ok(known),
    }
}

/// The fork point of children created by an earlier call, if the kernel still has it.
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
    // An archived kernel's state is its archive checkpoint.
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

async fn seed(supervisor: &Supervisor, kernel: &Rc<Kernel>, point: &Checkpoint) -> Result<KernelSource> {
    let (mut manifest, mut parts) = checkpoint::contents(supervisor.host(), point).await?;
    // A child begins with files and state; a running machine is copied, not restored.
    manifest.leave_out_machine();
    if manifest.kernel != kernel.id || manifest.id != point.id {
        let short = point.short_id();
        return Err(Error::corrupt(format!("the manifest of checkpoint {short} is another checkpoint's")));
    }
    // Each child begins with fresh random state; otherwise all would draw the same numbers.
    parts.leave_out_random();
    let blobs = kernel.records.blobs_granted_until(point.at_ms).await?;
    let from = ForkPoint { kernel: kernel.id, name: kernel.spec().name.to_string(), checkpoint: point.id };
    let origin = Origin::of_fork(kernel.view().origin.generation, from);
    let called = format!("fork of {}", kernel.spec().name);
    let giving = match kernel.archived_in() {
        Some(_) => None,
        None => checkpoint::donor(supervisor.host(), kernel).await?,
    };
    let (like, made) = (Some(kernel.files().id), RefCell::default());
    let decisions = kernel.records.all_decisions().await?;
    let (parent, machine) = (Some(point.id), None);
    Ok(KernelSource { manifest, parts, blobs, origin, parent, called, decisions, giving, like, made, machine })
}

fn words(kernel: &Kernel, point: &Checkpoint) -> CreationRecord<'static> {
    let (name, short) = (&kernel.spec().name, point.short_id());
    CreationRecord {
        mark: format!("forked from {name} at checkpoint {short}"),
        action: "kernel.fork",
        outcome: format!("from {} at {} manifest {}", kernel.id, point.id, point.manifest),
        detail: serde_json::json!({ "forked_from": kernel.id, "name": name, "checkpoint": point.id }),
    }
}

/// Records the fork in the parent's journal and the audit log, and publishes an event.
async fn record(
    supervisor: &Supervisor,
    kernel: &Rc<Kernel>,
    (point, way): (&Checkpoint, &ForkWay),
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
    let mut detail = serde_json::json!({ "checkpoint": point.id, "children": made, "kind": way.name() });
    match way {
        ForkWay::Machine { pause } => detail["pause_us"] = u64::try_from(pause.as_micros()).unwrap_or(u64::MAX).into(),
        ForkWay::Checkpoint { reason } if reason.is_empty() => {}
        ForkWay::Checkpoint { reason } => detail["reason"] = reason.as_str().into(),
    }
    host.events.publish(&kernel.event_name(), "kernel_forked", detail);
    let outcome = format!("{} to {}", point.id, made.join(" "));
    host.audit(actor, "kernel.forked", kernel, (Some(before), Some(version)), outcome).await;
    Ok(())
}
