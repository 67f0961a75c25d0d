//! The locks of kernels and groups, and their comparison with what is there.

use super::members;
use super::run_freeze::pairings;
use super::run_restore::judge;
use super::{manifest, turn};
use crate::core::error::{Error, Result};
use crate::core::freeze::Freeze;
use crate::core::freeze::lock::Lock;
use crate::supervisor::checkpoint::manifest_of;
use crate::supervisor::host::actor::Actor;
use crate::supervisor::registry::Supervisor;

/// The lock of a group's present state, or of a kernel's newest checkpoint.
///
/// # Errors
/// `notFound`, and errors of members.
pub async fn lock(supervisor: &Supervisor, name: &str, actor: &Actor) -> Result<Lock> {
    let host = supervisor.host();
    if let Ok(kernel) = supervisor.find(actor.uid, name) {
        let newest = kernel.records.all_checkpoints().await?.into_iter().next();
        let newest = newest.ok_or_else(|| {
            Error::not_found(format!("kernel {name} has no checkpoint"))
                .hint(format!("take one: ryokan checkpoint {name}; each carries the lock"))
        })?;
        let manifest = manifest_of(host, &newest).await?;
        return Ok(Lock::of_kernel(kernel.spec.name.as_str(), &newest.id.to_string(), &manifest.repositories));
    }
    let _turn = turn(host).await?;
    let group = super::find(supervisor, actor.uid, name).await?;
    let mut parts = Vec::new();
    for mut live in members::open(supervisor, &group, |_| true).await? {
        parts.extend(live.present_part().await?);
    }
    Ok(Lock::of_group(&group.name, &parts))
}

/// The lock of a freeze.
///
/// # Errors
/// `corrupt`, `unsupported`.
pub async fn lock_of(supervisor: &Supervisor, group: &str, freeze: &Freeze) -> Result<Lock> {
    Ok(Lock::of_group(group, &manifest(supervisor.host(), freeze).await?.parts))
}

/// How a group differs from its newest freeze.
///
/// # Errors
/// `refused` (`data_newer`) if its data needs newer code; `notFound` without a freeze; `unsupported` for a kernel.
pub async fn check(supervisor: &Supervisor, name: &str, actor: &Actor) -> Result<Vec<String>> {
    let host = supervisor.host();
    if supervisor.find(actor.uid, name).is_ok() {
        return Err(Error::unsupported("the lock of a single kernel cannot be checked yet")
            .reason("lock_check")
            .hint("add the kernel to a group"));
    }
    let _turn = turn(host).await?;
    let group = super::find(supervisor, actor.uid, name).await?;
    let freezes = host.catalog.freezes(group.id).await?;
    let newest = freezes.first().ok_or_else(|| {
        Error::not_found(format!("group {name} was never frozen")).hint(format!("freeze it: ryokan freeze {name}"))
    })?;
    let mut live = members::open(supervisor, &group, |_| true).await?;
    let mut parts = Vec::new();
    for one in &mut live {
        parts.extend(one.present_part().await?);
    }
    let recorded = host.catalog.pairings(group.id).await?;
    judge(&pairings(&parts), &recorded, live.iter()).await?;
    let mut before = manifest(host, newest).await?.parts;
    // What is in a workspace now is known at its next checkpoint only.
    before.retain(|part| parts.iter().any(|now| now.name == part.name));
    Ok(Lock::of_group(name, &parts).differences(&Lock::of_group(name, &before)))
}
