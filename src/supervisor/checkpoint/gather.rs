//! What a kernel is at one moment, in the store: the engine's state and the files. One wait for the device makes all of it durable.

use std::rc::Rc;
use std::sync::Arc;

use super::files::{CapturedFiles, Files};
use super::memory::{self, Copy, Keep};
use super::quiesce::Quiesced;
use super::state;
use crate::core::checkpoint::StateParts;
use crate::core::error::Result;
use crate::core::ids::{CheckpointId, Digest};
use crate::link::host::WorkerLink;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::workspace::SharedBatch;

/// What a kernel is. Nothing names it yet.
pub(super) struct Gathered {
    /// What it will be called if it becomes a checkpoint.
    pub id: CheckpointId,
    /// The engine's memory.
    pub copy: Copy,
    pub parts: StateParts,
    /// Their list.
    pub state: Digest,
    pub files: CapturedFiles,
    pub objects: Objects,
}

/// Objects on their way into the store. Until this is dropped, they are kept from garbage collection, and nobody else captures the
/// same files: he would count on what may yet fail.
pub(super) struct Objects {
    pub together: Arc<SharedBatch>,
    files: Files,
    are_durable: bool,
}

impl Objects {
    /// Makes everything durable, and one object more.
    ///
    /// # Errors
    /// The store's: nothing may count on what was gathered.
    pub async fn settle(&mut self, host: &Host, last: Option<Vec<u8>>) -> Result<Option<Digest>> {
        let together = Arc::clone(&self.together);
        let settled = host.store.run_beside(move |_| {
            let last = last.map(|last| together.put(&last)).transpose()?;
            together.sync()?;
            Ok(last)
        });
        let last = settled.await?;
        self.are_durable = true;
        Ok(last)
    }
}

impl Drop for Objects {
    fn drop(&mut self) {
        if !self.are_durable {
            self.files.doubt();
        }
    }
}

/// Gathers what the kernel is now: the caller holds the worker. With `keep`, the engine keeps a copy of itself in memory.
///
/// # Errors
/// Whatever keeps a part from being captured; the kernel is as it was.
pub(super) async fn gather(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    link: &Rc<WorkerLink>,
    keep: Option<Keep>,
) -> Result<Gathered> {
    let together = host.store.run_beside(|store| Ok(Arc::new(SharedBatch::begin(store)))).await?;
    let files = Files::of(host, kernel).await?;
    let mut objects = Objects { together: Arc::clone(&together), files, are_durable: false };
    // What changed since the last time, for the most part: the less is left to do while everything stands still.
    let prepared = objects.files.prepare(&together);
    let (prepared, saved) = futures::join!(prepared, state::capture(link, &host.store, &together));
    prepared?;
    let (parts, state) = saved?;
    let id = CheckpointId::from_bytes(host.random());
    let copy = memory::keep(host, link, kernel.spec.engine, id, keep).await?;
    let still = Quiesced::of(kernel, Some(link)).await?;
    let collected = objects.files.collect(&together).await;
    // Whatever came of it, the code inside goes on.
    still.end().await?;
    let files = objects.files.finish(collected?).await?;
    Ok(Gathered { id, copy, parts, state, files, objects })
}
