//! Engine state written ahead, for a kernel that arrives.
//!
//! ```text
//!  preview ─▶ a database of no kernel ─▶ last checkpoint: made equal, entry by entry ─▶ renamed to the kernel's engine.db
//!                                        └─ a failure: removed, and all of the state is written anew
//! ```
//! It is beside the prepared copies of files: a start of the daemon removes what an earlier one left.

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use super::state::{engine_info, load_engine};
use crate::catalog::{Applied, EntryHead};
use crate::core::checkpoint::StateParts;
use crate::core::engine::EngineName;
use crate::core::error::{Error, Result};
use crate::core::ids::KernelId;
use crate::core::limits;
use crate::core::spec::Isolation;
use crate::isolation::KernelHome;
use crate::supervisor::host::Host;

/// Engine state in a folder of its own.
pub(crate) struct StagedState(Option<Arc<Folder>>);

/// Removed with its last user: a write that was abandoned may still be under way.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        match crate::sys::fs::remove_tree(&self.0) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::warn!(path = %self.0.display(), %error, "engine state that was written ahead is left");
            }
            Ok(()) | Err(_) => {}
        }
    }
}

impl Drop for StagedState {
    fn drop(&mut self) {
        if let (Some(folder), Ok(runtime)) = (self.0.take(), tokio::runtime::Handle::try_current()) {
            runtime.spawn_blocking(move || drop(folder));
        }
    }
}

impl StagedState {
    /// An empty folder on the kernels' file system.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn new(host: &Rc<Host>, kernel: KernelId) -> Result<StagedState> {
        let path = host.prepared.place(host, kernel)?;
        let made = std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700).create(&path);
        made.map_err(|error| Error::internal(format!("{}: {error}", path.display())))?;
        Ok(StagedState(Some(Arc::new(Folder(path)))))
    }

    fn folder(&self) -> Result<&Arc<Folder>> {
        self.0.as_ref().ok_or_else(|| Error::internal("engine state was dropped"))
    }

    fn home(&self) -> Result<KernelHome> {
        let dir = self.folder()?.0.clone();
        let (engine_db, own_workspace) = (dir.join("engine.db"), dir.join("workspace"));
        Ok(KernelHome { dir, engine_db, own_workspace, shared_workspace: None })
    }

    /// Makes it equal to a list, of which only what differs is read and written. Each body is checked against the list's
    /// digest when it is written, and what stays has that digest.
    ///
    /// # Errors
    /// Missing or damaged objects, and those of writing.
    pub async fn revise(
        &self,
        host: &Host,
        (isolation, engine): (Isolation, EngineName),
        parts: StateParts,
    ) -> Result<Applied> {
        let (state, folder) = (host.drivers.of(isolation)?.engine_state(&self.home()?), Arc::clone(self.folder()?));
        let revised = host.store.run_beside(move |store| {
            let head = |part: crate::core::checkpoint::StatePart| {
                let (meta_json, digest, size) = (part.meta.to_string(), part.body, part.bytes);
                EntryHead { key: part.key, meta_json, digest, size, exec: 0 }
            };
            let wanted: Vec<EntryHead> = parts.entries.into_iter().map(head).collect();
            let mut body = |head: &EntryHead| Ok(store.get(head.digest, limits::STATE_BYTES)?);
            let revised = state.revise(&engine_info(engine), &wanted, &mut body);
            drop(folder);
            Ok(revised)
        });
        revised.await?
    }

    /// Makes it equal to a list, and then the state of a kernel that has none.
    async fn publish(
        self,
        host: &Host,
        id: KernelId,
        of: (Isolation, EngineName),
        parts: StateParts,
    ) -> Result<Applied> {
        let applied = self.revise(host, of, parts).await?;
        host.catalog.adopt_engine_db(id, self.home()?.engine_db).await?;
        Ok(applied)
    }
}

/// Writes the engine's state for the first worker of an arriving kernel, from what was written ahead if there is any.
///
/// # Errors
/// As [`load_engine`].
pub(crate) async fn load_engine_from(
    host: &Host,
    id: KernelId,
    of: (Isolation, EngineName),
    parts: StateParts,
    ahead: Option<StagedState>,
) -> Result<()> {
    if let Some(ahead) = ahead.filter(|_| !parts.entries.is_empty()) {
        match ahead.publish(host, id, of, parts.clone()).await {
            Ok(Applied { puts, dels, .. }) => {
                tracing::info!(kernel = %id, written = puts, removed = dels, "engine state is completed in the pause");
                return Ok(());
            }
            Err(error) => tracing::warn!(kernel = %id, %error, "engine state that was written ahead is not used"),
        }
    }
    load_engine(host, id, of.0, of.1, parts).await
}
