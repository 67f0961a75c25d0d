//! Threads: kernels with their own engine and state that share another kernel's workspace and mounts.
//!
//! A thread of a thread shares the same workspace: threads are not nested. The owner of the workspace is removed last.

use std::rc::Rc;

use crate::core::engine::EngineName;
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::core::name::KernelName;
use crate::core::spec::KernelSpec;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::Actor;
use crate::supervisor::registry::Supervisor;
use crate::supervisor::registry::create_from::CreationRecord;
use crate::supervisor::registry::idempotency::{KeyLock, made_as};

/// The request for a thread.
#[derive(Debug, Clone)]
pub struct Threading {
    /// Its name.
    pub name: KernelName,
    /// Its engine, if it differs from the kernel's.
    pub engine: Option<EngineName>,
    /// Idempotency key, valid for a day; empty if none.
    pub key: String,
}

/// Creates a kernel that works in this kernel's workspace.
///
/// # Errors
/// `alreadyExists`, `busy` (limits, leased), `refused`, `conflict` (removal in progress), and those of the databases.
pub async fn thread(
    supervisor: &Supervisor,
    kernel: &Rc<Kernel>,
    wanted: Threading,
    actor: Actor,
) -> Result<Rc<Kernel>> {
    if wanted.key.len() > limits::KEY_BYTES {
        return Err(Error::invalid(format!("the key has more than {} bytes", limits::KEY_BYTES)));
    }
    let (supervisor, kernel) = (supervisor.clone(), Rc::clone(kernel));
    // A separate task, so that a client's disconnect leaves nothing half done.
    let making = tokio::task::spawn_local(async move { make(&supervisor, &kernel, wanted, &actor).await });
    making.await.map_err(|error| Error::internal(error.to_string()))?
}

async fn make(supervisor: &Supervisor, kernel: &Rc<Kernel>, wanted: Threading, actor: &Actor) -> Result<Rc<Kernel>> {
    let host = supervisor.host();
    let mut key_lock = None;
    if !wanted.key.is_empty() {
        let scope = format!("thread/{}/{}", actor.uid, kernel.id);
        let (known, waited) = supervisor.recall(scope, &wanted.key).await?;
        if let Some(known) = known {
            return made_as(known, wanted.name.as_str(), wanted.engine.unwrap_or(kernel.spec().engine));
        }
        key_lock = Some(waited);
    }
    let owner = kernel.files_owner();
    if owner.spec().ephemeral {
        return Err(Error::refused(format!(
            "kernel {} is ephemeral: it is removed with its client's connection",
            owner.spec().name
        ))
        .reason("ephemeral")
        .hint("make a thread of one that stays"));
    }
    if !host.drivers.of(owner.spec().isolation)?.has_local_files() {
        return Err(Error::unsupported("a kernel in a virtual machine shares its workspace with no other")
            .reason("thread")
            .hint("fork it, or use --isolation process"));
    }
    let _source = owner.lock_as_source()?;
    owner.check_available()?;
    kernel.admit(actor, 0).await?;
    let reserved = supervisor.reserve(actor.uid, wanted.name)?;
    let engine = wanted.engine.unwrap_or(kernel.spec().engine);
    let mut spec = KernelSpec { name: reserved.name().clone(), engine, ..kernel.spec_now() };
    spec.venv = spec.venv.filter(|_| engine == EngineName::Python);
    let (mounts, _) = kernel.records.grants().await?;
    let validated = supervisor.validate_spec(spec, &mounts, Vec::new(), actor)?;
    let name = &owner.spec().name;
    let words = CreationRecord {
        mark: format!("made as a thread of {name}"),
        action: "kernel.thread",
        outcome: format!("of {}", owner.id),
        detail: serde_json::json!({ "thread_of": owner.id, "name": name }),
    };
    // The thread may write into the owner's workspace before the owner's first use, so a reserved worker must end.
    supervisor.workers().reserved.release(supervisor.workers(), owner.id).await;
    let key = key_lock.as_ref().map(KeyLock::parts);
    let thread = supervisor.create_shared(&owner, validated, key, words, actor).await?;
    let before = owner.view().version;
    let text = format!("{} works in this workspace as a thread", thread.spec().name);
    match owner.records.mark(actor, &text, host.now_ms()).await {
        Ok(version) => {
            owner.advance(version);
            let versions = (Some(before), Some(version));
            host.audit(actor, "kernel.threaded", &owner, versions, thread.id.to_string()).await;
        }
        Err(error) => {
            // The thread exists, and records its owner itself.
            tracing::warn!(kernel = %owner.spec().name, %error, "a thread could not be noted in the journal of its owner");
            let detail = serde_json::json!({ "thread": thread.id, "error": error.message });
            host.events.publish(&owner.event_name(), "thread_not_recorded", detail);
        }
    }
    Ok(thread)
}
