//! The locks of kernels and groups, and their comparison with what is there.

use std::rc::Rc;

use super::gate::judge;
use super::members::{self, Live};
use super::pairings::{omitted, pairings};
use super::{find_freeze, manifest, turn};
use crate::core::error::{Error, Result};
use crate::core::freeze::lock::Lock;
use crate::core::freeze::{Freeze, FreezeManifest, Group, KernelRevision, Part};
use crate::supervisor::checkpoint::{find, manifest_of, revisions_now};
use crate::supervisor::host::Host;
use crate::supervisor::host::actor::Actor;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::registry::Supervisor;

/// The lock of the present state of a kernel or a group.
///
/// # Errors
/// `notFound`, and errors of members.
pub async fn lock(supervisor: &Supervisor, name: &str, actor: &Actor) -> Result<Lock> {
    let host = supervisor.host();
    if let Ok(kernel) = supervisor.find(actor.uid, name) {
        return of_kernel_now(host, &kernel).await;
    }
    let (group, _turn) = turn(supervisor, actor.uid, name).await?;
    let mut live = members::open(supervisor, &group, |_| true).await?;
    Ok(of_group_now(host, &group, &mut live).await?.0)
}

async fn of_kernel_now(host: &Rc<Host>, kernel: &Rc<Kernel>) -> Result<Lock> {
    let name = &kernel.spec().name;
    let mut lock = Lock::new(name.as_str(), "kernel");
    let (found, revision) = revisions_now(host, kernel).await?;
    lock.add_kernel(name.as_str(), String::new(), &found.repositories, &revision);
    Ok(lock)
}

/// The lock of the present state, and the parts of which the gate judges.
async fn of_group_now(host: &Rc<Host>, group: &Group, live: &mut [Live]) -> Result<(Lock, Vec<Part>)> {
    let (mut lock, mut parts) = (Lock::new(&group.name, "group"), Vec::new());
    (lock.configuration, lock.sections) = (host.config.digest(), Some(host.config.sections()));
    for one in live {
        if let Some(kernel) = one.kernel() {
            let (found, revision) = revisions_now(host, kernel).await?;
            lock.add_kernel(&one.name, String::new(), &found.repositories, &revision);
            parts.push(one.present_kernel(found.repositories, revision));
        }
        if let Some(part) = one.present_part().await? {
            lock.add(&part);
            parts.push(part);
        }
    }
    Ok((lock, parts))
}

/// The lock of a freeze.
///
/// # Errors
/// `corrupt`, `unsupported`.
pub async fn lock_of(supervisor: &Supervisor, group: &str, freeze: &Freeze) -> Result<Lock> {
    of_freeze(supervisor.host(), group, freeze).await
}

async fn of_freeze(host: &Host, group: &str, freeze: &Freeze) -> Result<Lock> {
    let manifest = manifest(host, freeze).await?;
    let FreezeManifest { configuration, sections, parts, .. } = manifest;
    Ok(Lock { configuration, sections, ..Lock::of_group(group, &parts) })
}

/// How the present state of a kernel or a group differs from one of its checkpoints or freezes; `reference` empty: from
/// the newest.
///
/// # Errors
/// `refused` (`data_newer`) if the data needs newer code; `notFound` without a checkpoint or a freeze.
pub async fn check(supervisor: &Supervisor, name: &str, reference: &str, actor: &Actor) -> Result<Vec<String>> {
    let host = supervisor.host();
    let reference = if reference.is_empty() { "latest" } else { reference };
    if let Ok(kernel) = supervisor.find(actor.uid, name) {
        let checkpoint = find(&kernel, reference).await?;
        let manifest = manifest_of(host, &checkpoint).await?;
        let mut before = Lock::new(name, "kernel");
        let revision = KernelRevision::from(&manifest);
        before.add_kernel(kernel.spec().name.as_str(), checkpoint.id.to_string(), &manifest.repositories, &revision);
        return Ok(of_kernel_now(host, &kernel).await?.differences(&before));
    }
    let (group, _turn) = turn(supervisor, actor.uid, name).await?;
    let freezes = host.catalog.freezes(group.id).await?;
    if freezes.is_empty() {
        return Err(
            Error::not_found(format!("group {name} was never frozen")).hint(format!("freeze it: ryokan freeze {name}"))
        );
    }
    let freeze = find_freeze(host, &group, reference).await?;
    let mut live = members::open(supervisor, &group, |_| true).await?;
    let (now, parts) = of_group_now(host, &group, &mut live).await?;
    let recorded = host.catalog.pairings(group.id).await?;
    judge(&pairings(&parts), &recorded, live.iter()).await?;
    let mut differences = now.differences(&of_freeze(host, name, &freeze).await?);
    differences.extend(omitted(&parts));
    Ok(differences)
}
