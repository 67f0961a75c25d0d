//! Spares: copies of kernels' files that are made ahead. A kernel that was forked is likely to be forked again, and where files
//! share no blocks with others, to copy them is what a fork costs.
//!
//! ```text
//!  fork ─▶ children are there ─▶ made in the background, one at a time ─▶ kept ─▶ the next fork takes it
//!                                                                          └─ the kernel goes, the disk fills, an hour passes: gone
//! ```
//! Only this process knows of them: what a former one left is removed at start. Nothing depends on one.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use tokio::time::Instant;

use crate::core::error::{Error, Result};
use crate::core::ids::{Digest, KernelId};
use crate::core::limits;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::workspace::{Donor, PreparedWorkspace, TreeId};

/// The spares of a host.
pub(crate) struct Spares {
    folder: PathBuf,
    kept: RefCell<VecDeque<Kept>>,
    /// What one is being made from.
    making: RefCell<Option<Arc<Donor>>>,
    /// One at a time removes them all: whoever comes second finds the room that there is then.
    discarding: tokio::sync::Mutex<()>,
    /// When one could not be made.
    failed: Cell<Option<Instant>>,
}

struct Kept {
    kernel: KernelId,
    spare: PreparedWorkspace,
    made: Instant,
}

impl Spares {
    /// Keeps them in that folder, which need not be there.
    pub fn new(folder: PathBuf) -> Spares {
        let (kept, making, discarding) = Default::default();
        Spares { folder, kept, making, discarding, failed: Cell::new(None) }
    }

    /// The one of that kernel's files, if there is one.
    pub fn take(&self, kernel: KernelId) -> Option<PreparedWorkspace> {
        self.take_if(|kept| kept.kernel == kernel).map(|kept| kept.spare)
    }

    fn take_if(&self, is_it: impl Fn(&Kept) -> bool) -> Option<Kept> {
        let mut kept = self.kept.borrow_mut();
        let at = kept.iter().position(is_it)?;
        kept.remove(at)
    }

    fn has(&self, kernel: KernelId) -> bool {
        self.kept.borrow().iter().any(|kept| kept.kernel == kernel)
    }

    /// Removes the one of that kernel's files.
    pub async fn discard_of(&self, kernel: KernelId) {
        if let Some(spare) = self.take(kernel) {
            discard(spare).await;
        }
    }

    /// Removes all, and what is being made; whether there were any.
    pub async fn discard_all(&self) -> bool {
        let _turn = self.discarding.lock().await;
        if let Some(donor) = self.making.borrow().as_ref() {
            donor.cancel();
        }
        let all = self.kept.take();
        let any = !all.is_empty();
        for kept in all {
            discard(kept.spare).await;
        }
        any
    }

    /// Removes what a former daemon left, in the background. Before the first is made.
    pub fn sweep(&self) {
        let left = self.folder.read_dir().into_iter().flatten().flatten().map(|entry| entry.path()).collect::<Vec<_>>();
        tokio::task::spawn_blocking(move || {
            for path in left {
                if let Err(error) = crate::sys::fs::remove_tree(&path) {
                    tracing::warn!(path = %path.display(), %error, "a spare workspace could not be removed");
                }
            }
        });
    }

    /// A folder for a new one: on the file system of the kernels' own, or it could not take the place of one.
    fn place(&self, host: &Host, kernel: KernelId) -> Result<PathBuf> {
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.folder);
        let kernels = host.catalog.kernel_files(kernel).dir;
        let device = |path: &std::path::Path| path.metadata().map(|found| found.dev());
        match made.and_then(|()| Ok(device(&self.folder)? == device(&kernels)?)) {
            Ok(true) => Ok(self.folder.join(format!("{kernel}-{:016x}", u64::from_le_bytes(host.random())))),
            Ok(false) => Err(Error::internal("the folder of spares is on another file system than the kernels")),
            Err(error) => Err(Error::internal(format!("{}: {error}", self.folder.display()))),
        }
    }
}

async fn discard(spare: PreparedWorkspace) {
    // Its end says itself what could not be removed.
    let _ = tokio::task::spawn_blocking(move || drop(spare)).await;
}

/// Makes one for the next fork of a kernel, in the background, if it is worth its room: from the files of a child.
pub(crate) fn prepare(host: &Rc<Host>, kernel: KernelId, donor: Donor, tree: Digest) {
    let spares = &host.spares;
    if host.config.upkeep.prepared_copies == 0 || host.is_stopping() || !donor.copies() || spares.has(kernel) {
        return;
    }
    let (bytes, entries) = (donor.bytes(), donor.entries());
    let is_worth_it = entries >= limits::PREPARED_MIN_ENTRIES || bytes >= limits::PREPARED_MIN_BYTES;
    let failed_lately = spares.failed.get().is_some_and(|at| at.elapsed() < limits::PREPARED_RETRY_DELAY);
    let is_small = entries <= limits::PREPARED_MAX_ENTRIES;
    let has_room = has_room(host, bytes, entries, limits::PREPARED_FREE_FACTOR);
    if !is_worth_it || !is_small || failed_lately || !has_room || spares.making.borrow().is_some() {
        return;
    }
    let (host, donor) = (Rc::clone(host), Arc::new(donor));
    host.spares.making.replace(Some(Arc::clone(&donor)));
    tokio::task::spawn_local(async move {
        let made = async {
            // Until it is made, what it is made from must be there.
            let _held = host.store.run(|store| Ok(store.guard())).await?;
            let place = host.spares.place(&host, kernel)?;
            let made =
                host.store.run_beside(move |store| Ok(PreparedWorkspace::make(&place, &donor, TreeId(tree), store)));
            Ok::<_, Error>(made.await??)
        };
        let made = made.await;
        host.spares.making.replace(None);
        match made {
            Ok(spare) => keep(&host, kernel, spare, entries).await,
            Err(error) => {
                host.spares.failed.set(Some(Instant::now()));
                tracing::info!(%kernel, %error, "the next fork copies: no spare workspace was made");
            }
        }
    });
}

/// Whether so many times as much is free on the disk.
fn has_room(host: &Host, bytes: u64, entries: u64, times: u64) -> bool {
    let fits = |needed: u64, free: Option<u64>| free.is_some_and(|free| needed.saturating_mul(times) <= free);
    // A file system that counts no files has room for any number.
    fits(bytes, host.free_bytes()) && host.free_files().is_none_or(|free| fits(entries, Some(free)))
}

/// Keeps one until it is taken, or has no place here any more.
async fn keep(host: &Rc<Host>, kernel: KernelId, spare: PreparedWorkspace, entries: u64) {
    let (made, bytes) = (Instant::now(), spare.bytes());
    let has_place = |of: &Rc<Kernel>| of.archived_in().is_none() && !host.is_stopping();
    let of = host.by_id.borrow().get(&kernel).cloned().filter(has_place);
    let Some(of) = of.filter(|_| has_room(host, bytes, entries, limits::PREPARED_EVICT_FACTOR)) else {
        return discard(spare).await;
    };
    host.events.publish(&of.event_name, "copy_prepared", serde_json::json!({ "bytes": bytes }));
    drop(of);
    host.spares.kept.borrow_mut().push_back(Kept { kernel, spare, made });
    let surplus = host.spares.kept.borrow().len().saturating_sub(host.config.upkeep.prepared_copies);
    for _ in 0..surplus {
        let oldest = host.spares.kept.borrow_mut().pop_front();
        if let Some(oldest) = oldest {
            discard(oldest.spare).await;
        }
    }
    let host = Rc::downgrade(host);
    let until = made + limits::PREPARED_LIFETIME;
    loop {
        tokio::time::sleep(limits::PREPARED_CHECK_INTERVAL).await;
        let Some(host) = host.upgrade() else { return };
        let is_this = |kept: &Kept| kept.kernel == kernel && kept.made == made;
        if !host.spares.kept.borrow().iter().any(is_this) {
            return;
        }
        if Instant::now() >= until || !has_room(&host, bytes, entries, limits::PREPARED_EVICT_FACTOR) {
            if let Some(kept) = host.spares.take_if(is_this) {
                discard(kept.spare).await;
            }
            return;
        }
    }
}
