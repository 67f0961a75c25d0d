//! What a kernel is at one moment, in the store: the engine's state and the files. One wait for the device makes all of it durable.

use std::rc::Rc;
use std::sync::Arc;

use super::files::{CapturedFiles, Files};
use super::{Still, state};
use crate::core::checkpoint::StateParts;
use crate::core::error::Result;
use crate::core::ids::Digest;
use crate::rpc::worker_link::WorkerLink;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::workspace::Together;

/// What a kernel is. Nothing names it yet; until it is dropped, it is kept from garbage collection.
pub(super) struct Gathered {
    pub parts: StateParts,
    /// Their list.
    pub state: Digest,
    pub files: CapturedFiles,
    pub objects: Objects,
}

/// Objects on their way into the store.
pub(super) struct Objects {
    kernel: Rc<Kernel>,
    pub together: Arc<Together>,
    are_durable: bool,
}

impl Objects {
    /// Makes everything durable, and one object more.
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
            // The tracker believes that they are there.
            self.kernel.doubt_files();
        }
    }
}

/// Gathers what the kernel is now: the caller holds the worker.
pub(super) async fn gather(host: &Rc<Host>, kernel: &Rc<Kernel>, link: &Rc<WorkerLink>) -> Result<Gathered> {
    let together = host.store.run_beside(|store| Ok(Arc::new(Together::begin(store)))).await?;
    let objects = Objects { kernel: Rc::clone(kernel), together: Arc::clone(&together), are_durable: false };
    let mut files = Files::of(host, kernel).await?;
    // What changed since the last time, for the most part: the less is left to do while everything stands still.
    let (prepared, saved) = futures::join!(files.prepare(&together), state::capture(link, &host.store, &together));
    prepared?;
    let (parts, state) = saved?;
    let still = Still::of(kernel, link).await?;
    let collected = files.collect(&together).await;
    // Whatever came of it, the code inside goes on.
    still.end().await?;
    let files = files.finish(collected?).await?;
    Ok(Gathered { parts, state, files, objects })
}
