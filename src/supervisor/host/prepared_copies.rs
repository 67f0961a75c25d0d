//! Prepared copies: kernels' files copied ahead of the next fork.
//!
//! A forked kernel is likely to be forked again, and where files share no blocks, the copy is most of a fork's cost.
//!
//! ```text
//!  fork ─▶ children exist ─▶ copied in the background, one at a time ─▶ kept ─▶ the next fork takes the copy
//!                                                                        └─ kernel removed, disk full, or expired
//! ```
//! Only this process knows the copies; leftovers of a former daemon are removed at start. Nothing depends on a copy.

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
use crate::workspace::{Donor, PreparedWorkspace, TreeId};

/// The prepared copies of a host.
pub(crate) struct PreparedCopies {
    folder: PathBuf,
    kept: RefCell<VecDeque<Kept>>,
    /// The source of the copy in progress.
    making: RefCell<Option<Arc<Donor>>>,
    /// Held while all are removed: a concurrent caller then finds the freed room.
    discarding: tokio::sync::Mutex<()>,
    /// The time of the last failure.
    failed: Cell<Option<Instant>>,
}

struct Kept {
    kernel: KernelId,
    spare: PreparedWorkspace,
    made: Instant,
}

impl PreparedCopies {
    /// Uses that folder for the copies; the folder need not exist.
    pub fn new(folder: PathBuf) -> PreparedCopies {
        let (kept, making, discarding) = Default::default();
        PreparedCopies { folder, kept, making, discarding, failed: Cell::new(None) }
    }

    /// Takes the copy of that kernel's files, if there is one.
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

    /// Removes the copy of that kernel's files.
    pub async fn discard_of(&self, kernel: KernelId) {
        if let Some(spare) = self.take(kernel) {
            discard(spare).await;
        }
    }

    /// Removes all copies and cancels the one in progress; returns whether there were any.
    pub async fn discard_all(&self) -> bool {
        let _exclusive = self.discarding.lock().await;
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

    /// Removes leftovers of a former daemon in the background. Called before the first copy is made.
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

    /// A path for a new copy. It must be on the kernels' file system, so that the copy can be renamed into place.
    pub fn place(&self, host: &Host, kernel: KernelId) -> Result<PathBuf> {
        let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.folder);
        let own = host.catalog.kernel_files(kernel).dir;
        let kernels = own.parent().unwrap_or(&own);
        let device = |path: &std::path::Path| path.metadata().map(|found| found.dev());
        match made.and_then(|()| Ok(device(&self.folder)? == device(kernels)?)) {
            Ok(true) => Ok(self.folder.join(format!("{kernel}-{:016x}", u64::from_le_bytes(host.random())))),
            Ok(false) => Err(Error::internal("the folder of spares is on another file system than the kernels")),
            Err(error) => Err(Error::internal(format!("{}: {error}", self.folder.display()))),
        }
    }
}

async fn discard(spare: PreparedWorkspace) {
    // Dropping logs what could not be removed.
    let _ = tokio::task::spawn_blocking(move || drop(spare)).await;
}

/// Copies a child's files in the background for the kernel's next fork, if the copy is worth its room.
///
/// `has_use` returns the kernel's name in events while the kernel can be forked.
pub(crate) fn prepare(
    host: &Rc<Host>,
    kernel: KernelId,
    donor: Donor,
    tree: Digest,
    has_use: impl Fn() -> Option<String> + 'static,
) {
    let spares = &host.prepared;
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
    host.prepared.making.replace(Some(Arc::clone(&donor)));
    tokio::task::spawn_local(async move {
        let made = async {
            // The guard keeps the source's objects until the copy is made.
            let _held = host.store.run(|store| Ok(store.guard())).await?;
            let place = host.prepared.place(&host, kernel)?;
            let made = host
                .store
                .run_beside(move |store| Ok(PreparedWorkspace::make(&place, Some(&donor), TreeId(tree), store)));
            Ok::<_, Error>(made.await??)
        };
        let made = made.await;
        host.prepared.making.replace(None);
        match made {
            Ok(spare) => keep(&host, kernel, spare, entries, has_use).await,
            Err(error) => {
                host.prepared.failed.set(Some(Instant::now()));
                tracing::info!(%kernel, %error, "the next fork copies: no spare workspace was made");
            }
        }
    });
}

/// Writes a tree of the store for a kernel that is not here yet.
///
/// # Errors
/// As [`PreparedWorkspace::make`].
pub(crate) async fn write(host: &Rc<Host>, kernel: KernelId, tree: Digest) -> Result<PreparedWorkspace> {
    let place = host.prepared.place(host, kernel)?;
    Ok(host.store.run_beside(move |store| Ok(PreparedWorkspace::make(&place, None, TreeId(tree), store))).await??)
}

/// Whether the disk has `times` the needed room.
fn has_room(host: &Host, bytes: u64, entries: u64, times: u64) -> bool {
    let fits = |needed: u64, free: Option<u64>| free.is_some_and(|free| needed.saturating_mul(times) <= free);
    // A file system that does not count files has room for any number.
    fits(bytes, host.free_bytes()) && host.free_files().is_none_or(|free| fits(entries, Some(free)))
}

/// Keeps a copy until it is taken, expires, or must make room.
async fn keep(
    host: &Rc<Host>,
    kernel: KernelId,
    spare: PreparedWorkspace,
    entries: u64,
    has_use: impl Fn() -> Option<String>,
) {
    let (made, bytes) = (Instant::now(), spare.bytes());
    let of = has_use().filter(|_| !host.is_stopping() && has_room(host, bytes, entries, limits::PREPARED_EVICT_FACTOR));
    let Some(event_name) = of else { return discard(spare).await };
    host.events.publish(&event_name, "copy_prepared", serde_json::json!({ "bytes": bytes }));
    host.prepared.kept.borrow_mut().push_back(Kept { kernel, spare, made });
    let surplus = host.prepared.kept.borrow().len().saturating_sub(host.config.upkeep.prepared_copies);
    for _ in 0..surplus {
        let oldest = host.prepared.kept.borrow_mut().pop_front();
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
        if !host.prepared.kept.borrow().iter().any(is_this) {
            return;
        }
        if Instant::now() >= until || !has_room(&host, bytes, entries, limits::PREPARED_EVICT_FACTOR) {
            if let Some(kept) = host.prepared.take_if(is_this) {
                discard(kept.spare).await;
            }
            return;
        }
    }
}
