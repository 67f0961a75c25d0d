//! Reads all objects that a restore needs before it changes anything: damage is found while nothing was done.
//!
//! Only differences are read: directories, files and state that stay unchanged need nothing of the store. The cost
//! grows with the changes.

use std::sync::Arc;

use super::gather::Gathered;
use crate::core::checkpoint::{Manifest, StateParts};
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::ids::Digest;
use crate::store::{Store, StoreError, StoreHandle};
use crate::supervisor::kernel::Kernel;
use crate::workspace::{self, CountingObjects, SharedBatch, TreeId, WorkspaceError};

/// Read size during verification, bytes.
const READ_BYTES: usize = 256 << 10;
/// Number of objects that are read together.
const TOGETHER: usize = 4096;

/// A kernel's recent state, as far as a restore changes it.
pub(super) struct Present {
    parts: StateParts,
    tree: Digest,
    /// Holds the objects, durable or not.
    objects: Arc<SharedBatch>,
    /// Whether the kernel owns its files: another kernel's files are not restored.
    owns_files: bool,
    /// The engine holds data that no entry includes.
    holds_more: bool,
}

impl Present {
    pub(super) fn of(gathered: &Gathered, kernel: &Kernel) -> Present {
        let Gathered { parts, files, objects, .. } = gathered;
        let (parts, objects) = (parts.clone(), Arc::clone(&objects.together));
        let (owns_files, holds_more) = (kernel.thread_of.is_none(), !kernel.view().missed.is_empty());
        Present { parts, tree: files.part.tree, objects, owns_files, holds_more }
    }

    /// Whether the engine already has exactly this state and nothing else.
    pub(super) fn is_state(&self, parts: &StateParts) -> bool {
        !self.holds_more && self.parts == *parts
    }
}

/// Reads the objects that a restore from the present state to a checkpoint needs. Returns their number.
///
/// # Errors
/// `corrupt` names the first damaged or missing object.
pub(super) async fn difference(
    store: &StoreHandle,
    present: &Present,
    manifest: &Manifest,
    parts: &StateParts,
) -> Result<u64> {
    let state = if present.is_state(parts) { 0 } else { bodies(store, parts).await? };
    if !present.owns_files {
        return Ok(state);
    }
    let (objects, before, after) =
        (Arc::clone(&present.objects), TreeId(present.tree), TreeId(manifest.workspace.tree));
    let files = store.run_beside(move |store| Ok(files(store, &objects, before, after))).await?;
    Ok(state + files.map_err(Error::from).map_err(of_files)?)
}

/// Reads the objects that the files need.
fn files(
    store: &Store,
    objects: &SharedBatch,
    present: TreeId,
    target: TreeId,
) -> std::result::Result<u64, WorkspaceError> {
    let counted = CountingObjects::new(objects);
    let (mut contents, mut read) = (Vec::new(), 0);
    workspace::needs(&counted, present, target, &mut |content| {
        contents.push(content);
        if contents.len() == TOGETHER {
            read += contents.len() as u64;
            look_through(store, &contents)?;
            contents.clear();
        }
        Ok(())
    })?;
    look_through(store, &contents)?;
    Ok(counted.read() + read + contents.len() as u64)
}

/// Reads objects completely.
fn look_through(store: &Store, objects: &[Digest]) -> std::result::Result<(), StoreError> {
    store.read_parallel(objects, |_, reader| {
        let mut room = vec![0; READ_BYTES.min(usize::try_from(reader.size()).unwrap_or(READ_BYTES)).max(1)];
        while reader.read_some(&mut room)? > 0 {}
        Ok::<(), StoreError>(())
    })
}

/// Verifies a whole checkpoint, regardless of the present state: its state is read, its files' objects must exist.
///
/// # Errors
/// As [`difference`].
pub(super) async fn whole(store: &StoreHandle, manifest: &Manifest, parts: &StateParts) -> Result<()> {
    bodies(store, parts).await?;
    let tree = manifest.workspace.tree;
    let missing = store.run_beside(move |store| {
        let (mut seen, mut missing) = (workspace::Seen::default(), None);
        let walked = workspace::reach(store, TreeId(tree), &mut seen, &mut |object| {
            if !store.contains(object) {
                missing = Some(object);
            }
            Ok(())
        });
        Ok(walked.map(|()| missing))
    });
    match missing.await?.map_err(Error::from).map_err(of_files)? {
        Some(object) => Err(of_files(Error::corrupt(format!("the files' tree {tree} lacks object {object}")))),
        None => Ok(()),
    }
}

/// Reads a whole checkpoint, which is about to be the only copy.
///
/// # Errors
/// As [`difference`].
pub(super) async fn readable(store: &StoreHandle, manifest: &Manifest, parts: &StateParts) -> Result<()> {
    bodies(store, parts).await?;
    let tree = TreeId(manifest.workspace.tree);
    let read = store.run_beside(move |store| {
        let read = || {
            let (mut seen, mut objects) = (workspace::Seen::default(), Vec::new());
            workspace::reach(store, tree, &mut seen, &mut |object| {
                objects.push(object);
                if objects.len() == TOGETHER {
                    look_through(store, &objects)?;
                    objects.clear();
                }
                Ok(())
            })?;
            Ok(look_through(store, &objects)?)
        };
        Ok(read())
    });
    read.await?.map_err(|error: WorkspaceError| of_files(error.into()))
}

fn of_files(error: Error) -> Error {
    let message = format!("the files in this checkpoint: {}", error.message);
    match error.code {
        // No object of a checkpoint may be missing.
        ErrorCode::NotFound => Error::corrupt(message).hint("ryokan verify names everything that is damaged"),
        _ => Error { message, ..error },
    }
}

/// Reads the body of every entry of the engine's state; returns their number.
async fn bodies(store: &StoreHandle, parts: &StateParts) -> Result<u64> {
    let addresses: Vec<Digest> = parts.entries.iter().map(|part| part.body).collect();
    let count = addresses.len() as u64;
    let read = store.run_beside(move |store| look_through(store, &addresses)).await;
    read.map_err(|error| Error::corrupt(format!("the engine's state in this checkpoint: {error}")))?;
    Ok(count)
}
