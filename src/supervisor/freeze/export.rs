//! A freeze of a group as a file.
//!
//! The file holds the freeze as it was sealed, the checkpoints of its kernels, and the history of each repository: the
//! freeze itself names only commits. Configuration, hooks, remotes and credentials of repositories stay here.

use std::path::{Path, PathBuf};

use super::objects;
use super::sources::tree_is_whole;
use super::{access, find_freeze, manifest, provenance, recover, scratch, submodules, turn};
use crate::bundle::{self, GroupHead, Head, History};
use crate::core::audit::NewAudit;
use crate::core::checkpoint::CheckpointType;
use crate::core::error::{Error, Result};
use crate::core::freeze::portable::check_portable;
use crate::core::freeze::refs::CommitId;
use crate::core::freeze::{Captured, Freeze, FreezeManifest, Group, Target};
use crate::core::ids::{CheckpointId, Digest, KernelId};
use crate::core::signature::Subject;
use crate::git::Repository;
use crate::store::Store;
use crate::supervisor::checkpoint;
use crate::supervisor::host::Host;
use crate::supervisor::host::actor::Actor;
use crate::supervisor::host::audit::bounded;
use crate::supervisor::registry::Supervisor;
use crate::supervisor::registry::bundle_io::{self, Export, Outlet};

/// Begins to export a freeze of a group; with an empty `reference` the newest that a client took.
///
/// # Errors
/// `notFound` without a freeze, a kernel or a commit; `refused` for a freeze of broken members; `busy` (exports).
pub async fn export(supervisor: &Supervisor, group: &str, reference: &str, actor: &Actor) -> Result<Export> {
    let host = supervisor.host();
    let place = bundle_io::place(supervisor)?;
    let (group, turn) = turn(supervisor, actor.uid, group).await?;
    if group.unfinished {
        recover::unfinished(supervisor, &group).await?;
    }
    // An import that had not ended is withdrawn, and the group with it.
    let group = super::find(supervisor, actor.uid, &group.name).await?;
    let freeze = chosen(host, &group, reference).await?;
    let manifest = manifest(host, &freeze).await?;
    provenance::check(&group, &freeze, &manifest)?;
    check_portable(&freeze, &manifest).map_err(|why| {
        Error::refused(format!("freeze {} of {} cannot live on another host: {why}", freeze.number, group.name))
            .reason("not_portable")
            .hint(format!("take another one: ryokan freeze {}", group.name))
    })?;
    // Until the file is written, the group may be removed.
    let guard = host.store.run(|store| Ok(store.guard())).await?;
    protect(host, &freeze, &manifest).await?;
    let (mut kernels, mut held) = (Vec::new(), Vec::new());
    for part in &manifest.parts {
        let Captured::Kernel { kernel, checkpoint, manifest: Some(named), .. } = &part.captured else { continue };
        let (head, keeps) = kernel_head(supervisor, (*kernel, *checkpoint), *named).await.map_err(|error| {
            let message = format!("member {}: {}", part.name, error.message);
            Error { message, ..error }
        })?;
        kernels.push(head);
        held.push(keeps);
    }
    let folder = scratch(host, group.id).join(".export");
    let histories = histories(supervisor, &group, &manifest, &folder).await;
    let _ = std::fs::remove_dir_all(&folder);
    let histories = histories?;
    drop(turn);
    let key = host.signing_key().await?;
    let head = GroupHead {
        ryokan: env!("CARGO_PKG_VERSION").into(),
        at_ms: host.now_ms(),
        host: host.id(),
        freeze,
        kernels,
        histories,
    };
    let line = host.line(actor, "group.export", None);
    let detail = bounded(format!("{}: {}", group.name, head.freeze.id));
    let audit = NewAudit { owner: Some(group.uid), manifest: Some(head.freeze.manifest), detail, ..line };
    host.write_audit(audit).await;
    let write = move |store: &Store, outlet: Outlet| {
        bundle::write_group(store, &head, |digest| key.sign(Subject::Export, digest), outlet)
    };
    Ok(bundle_io::stream(host, place, write, (guard, held)))
}

async fn chosen(host: &Host, group: &Group, reference: &str) -> Result<Freeze> {
    if !reference.is_empty() {
        return find_freeze(host, group, reference).await;
    }
    let all = host.catalog.freezes(group.id).await?;
    let found = all.into_iter().find(|freeze| freeze.kind != CheckpointType::System);
    found.ok_or_else(|| {
        Error::not_found(format!("group {} was never frozen", group.name))
            .reason("no_freeze")
            .hint(format!("freeze it first: ryokan freeze {}", group.name))
    })
}

/// Keeps the freeze's objects from garbage collection until the guard of the export is dropped.
async fn protect(host: &Host, freeze: &Freeze, manifest: &FreezeManifest) -> Result<()> {
    let objects: Vec<Digest> = std::iter::once(freeze.manifest).chain(manifest.objects()).collect();
    let missing = host.store.run(move |store| Ok(objects.into_iter().find(|digest| !store.claim(*digest)))).await?;
    if let Some(digest) = missing {
        return Err(Error::corrupt(format!("object {digest} of freeze {} is missing", freeze.number)));
    }
    for tree in manifest.trees() {
        tree_is_whole(host, tree, "freeze").await?;
    }
    Ok(())
}

/// The head of a kernel with one checkpoint, and what keeps both.
async fn kernel_head(
    supervisor: &Supervisor,
    (id, at): (KernelId, CheckpointId),
    named: Digest,
) -> Result<(Head, impl Sized + 'static)> {
    let host = supervisor.host();
    let kernel = supervisor.get(id).ok_or_else(|| Error::not_found(format!("kernel {id} of the freeze is gone")))?;
    let source = kernel.lock_as_source()?;
    let gone = || Error::not_found(format!("checkpoint {at} of kernel {} is gone", kernel.spec().name));
    let found = kernel.records.checkpoint(at).await?.ok_or_else(gone)?;
    let (found, pin) = checkpoint::pin_for_read(&kernel, found).await?;
    if found.manifest != named {
        return Err(Error::corrupt(format!("checkpoint {at} is not what the freeze captured")).reason("signature"));
    }
    let head = bundle_io::head(host, &kernel, &found, std::slice::from_ref(&found)).await?;
    Ok((head, (source, pin)))
}

/// Packs the history of each repository in the freeze, from where the member is now.
pub(super) async fn histories(
    supervisor: &Supervisor,
    group: &Group,
    manifest: &FreezeManifest,
    folder: &Path,
) -> Result<Vec<History>> {
    let host = supervisor.host();
    let mut packed = Vec::new();
    for part in &manifest.parts {
        let Captured::Repository { path, part: captured } = &part.captured else { continue };
        let now = group.members.iter().find_map(|member| match &member.target {
            Target::Repository { path } if member.name == part.name => Some(path),
            _ => None,
        });
        let path = Path::new(now.unwrap_or(path));
        let packing = async {
            access::recheck(host, group.uid, path)?;
            let repository = Repository::open(&access::git(host).await?, path)?;
            access::trusted_repository(supervisor, group.uid, &repository).await?;
            let mut made = Vec::new();
            // In the same order.
            let names = captured.with_submodules().into_iter().map(|(name, _)| name);
            for (submodule, (repository, _, part)) in names.zip(submodules::steps(&repository, folder, captured)?) {
                repository.check_settings().await?;
                let pack = history(host, &repository, &part.head.commit, folder).await?;
                made.push((submodule, objects::put(host, pack).await?.0));
            }
            Ok::<_, Error>(made)
        };
        let made = packing.await.map_err(|error| {
            let message = format!("member {}: {}", part.name, error.message);
            Error { message, ..error }
        })?;
        let of = |(submodule, pack)| History { member: part.name.clone(), submodule, pack };
        packed.extend(made.into_iter().map(of));
    }
    Ok(packed)
}

async fn history(host: &Host, repository: &Repository, commit: &CommitId, folder: &Path) -> Result<PathBuf> {
    // Of the submodule before.
    let _ = std::fs::remove_dir_all(folder);
    let path = repository.path();
    let failed = |error: std::io::Error| Error::unavailable(format!("{}: {error}", folder.display()));
    std::fs::create_dir_all(folder).map_err(failed)?;
    let pack = folder.join("history");
    let packing = async {
        repository.pack_history(commit, &pack).await?;
        repository.check_history(&pack, &folder.join("check")).await
    };
    match tokio::time::timeout(host.config.limits.freeze_store, packing).await {
        Ok(done) => done.map(|()| pack),
        Err(_) => Err(Error::deadline(format!(
            "the history of {} was not packed within {:?}",
            path.display(),
            host.config.limits.freeze_store
        ))
        .reason("member_late")),
    }
}
