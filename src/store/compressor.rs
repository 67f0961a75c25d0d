//! Compresses the entries of a batch on a few threads, beside the caller that reads and hashes.
//!
//! Items wait in a bounded queue until a thread has compressed and appended them. A caller that finds the queue full,
//! or drains it, does part of the work itself.
//!
//! ```text
//! put ─▶ hash ─▶ [queue] ─▶ compress, append     by threads, started once there is much to do
//!                   └─────▶ compress, append     by a caller that finds the queue full, or drains it
//! ```
//! Lists of chunks are appended after their chunks: a list never precedes what it lists.

use std::collections::{HashSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};

use super::format::{Kind, List};
use super::{Result, Store, StoreError, limits, lock};
use crate::core::ids::Digest;

/// An entry to write.
#[derive(Debug)]
pub(super) struct Item {
    pub digest: Digest,
    pub plain: Vec<u8>,
    pub kind: ItemKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum ItemKind {
    /// A chunk of an object.
    Part,
    /// An object of one chunk.
    Whole,
}

#[derive(Debug, Default)]
struct Queue {
    items: VecDeque<Item>,
    bytes: usize,
    /// Items that are queued or being written; duplicates are skipped.
    known: HashSet<(Digest, ItemKind)>,
    lists: Vec<(Digest, List)>,
    working: usize,
    state: Progress,
}

#[derive(Debug, Default)]
enum Progress {
    #[default]
    Well,
    /// The first error, returned to the first caller.
    Failed(Option<StoreError>),
    Closed,
}

#[derive(Debug)]
struct Shared {
    store: Store,
    queue: Mutex<Queue>,
    changed: Condvar,
}

/// The entries that a batch has to write. Dropping it discards the queued ones.
#[derive(Debug)]
pub(super) struct Compressor {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Compressor {
    pub(super) fn new(store: &Store) -> Compressor {
        let shared = Shared { store: store.clone(), queue: Mutex::default(), changed: Condvar::new() };
        Compressor { shared: Arc::new(shared), threads: Mutex::default() }
    }

    /// Queues an item.
    pub(super) fn add(&self, item: Item) -> Result<()> {
        let mut queue = lock(&self.shared.queue);
        queue.check()?;
        if !queue.known.insert((item.digest, item.kind)) {
            return Ok(());
        }
        queue.bytes += item.plain.len();
        queue.items.push_back(item);
        let (is_much, is_full) = (queue.bytes > limits::STORE_PARALLEL_BYTES, queue.bytes > limits::STORE_QUEUE_BYTES);
        drop(queue);
        if is_much {
            self.begin_threads();
            self.shared.changed.notify_all();
        }
        if is_full { self.shared.run_one().map(drop) } else { Ok(()) }
    }

    /// Queues the list of an object whose chunks were added before.
    pub(super) fn add_list(&self, digest: Digest, list: List) -> Result<()> {
        let mut queue = lock(&self.shared.queue);
        queue.check()?;
        queue.lists.push((digest, list));
        let is_full = queue.lists.len() >= limits::STORE_PENDING_LISTS;
        drop(queue);
        if is_full { self.drain() } else { Ok(()) }
    }

    /// Blocks until everything queued is appended, and helps.
    pub(super) fn drain(&self) -> Result<()> {
        while self.shared.run_one()? {}
        let mut queue = lock(&self.shared.queue);
        while queue.working > 0 {
            queue = self.shared.wait(queue);
        }
        queue.check()?;
        let lists = std::mem::take(&mut queue.lists);
        drop(queue);
        lists.iter().try_for_each(|(digest, list)| self.shared.store.add(Kind::List, *digest, list.size, &list.write()))
    }

    fn begin_threads(&self) {
        let mut threads = lock(&self.threads);
        let wanted = thread::available_parallelism().map_or(1, usize::from).min(limits::STORE_THREADS) - 1;
        while threads.len() < wanted {
            let shared = Arc::clone(&self.shared);
            let begun = thread::Builder::new().name("store".to_owned()).spawn(move || shared.run_thread());
            // Without more threads, the callers do all the work.
            let Ok(begun) = begun else { return };
            threads.push(begun);
        }
    }
}

impl Drop for Compressor {
    fn drop(&mut self) {
        let mut queue = lock(&self.shared.queue);
        queue.state = Progress::Closed;
        queue.items.clear();
        drop(queue);
        self.shared.changed.notify_all();
        for thread in lock(&self.threads).drain(..) {
            // The caller that waited for the thread reports its panic.
            let _ = thread.join();
        }
    }
}

impl Queue {
    fn check(&mut self) -> Result<()> {
        match &mut self.state {
            Progress::Well => Ok(()),
            Progress::Failed(error) => Err(error.take().unwrap_or(StoreError::Unsynced)),
            Progress::Closed => Err(StoreError::Stopped),
        }
    }
}

/// Counts an item as being written; also if a panic ends the write.
struct Working<'a> {
    shared: &'a Shared,
    item: Item,
    done: Result<()>,
}

impl Drop for Working<'_> {
    fn drop(&mut self) {
        let mut queue = lock(&self.shared.queue);
        queue.working -= 1;
        queue.known.remove(&(self.item.digest, self.item.kind));
        if let Err(error) = std::mem::replace(&mut self.done, Ok(()))
            && matches!(queue.state, Progress::Well)
        {
            queue.state = Progress::Failed(Some(error));
            queue.items.clear();
            queue.known.clear();
            queue.bytes = 0;
        }
        drop(queue);
        self.shared.changed.notify_all();
    }
}

impl Shared {
    fn wait<'a>(&'a self, queue: MutexGuard<'a, Queue>) -> MutexGuard<'a, Queue> {
        self.changed.wait(queue).unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The loop of a thread.
    fn run_thread(&self) {
        loop {
            let mut queue = lock(&self.queue);
            while queue.items.is_empty() {
                if matches!(queue.state, Progress::Closed) {
                    return;
                }
                queue = self.wait(queue);
            }
            drop(queue);
            // `drain` returns the error.
            let _ = self.write_next();
        }
    }

    /// Writes one item; false if the queue is empty. An error fails the batch.
    fn run_one(&self) -> Result<bool> {
        let did = self.write_next();
        lock(&self.queue).check().map(|()| did)
    }

    fn write_next(&self) -> bool {
        let mut queue = lock(&self.queue);
        let Some(item) = queue.items.pop_front() else { return false };
        queue.bytes -= item.plain.len();
        queue.working += 1;
        drop(queue);
        let mut working = Working { shared: self, item, done: Err(StoreError::Stopped) };
        working.done = self.store.write(&working.item);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::format::digest_of;
    use super::*;
    use crate::sys::fault::tests::{crash_dir, with_fault};

    /// Unique bytes, half of them compressible.
    fn bytes(n: usize, length: usize) -> Vec<u8> {
        let mut bytes = vec![7; length];
        blake3::Hasher::new().update(&n.to_le_bytes()).finalize_xof().fill(&mut bytes[..length / 2]);
        bytes
    }

    #[test]
    fn batch_appears_at_commit() {
        let dir = crash_dir();
        let store = Store::open(&dir.path().join("store")).expect("opened");
        let lengths = [0, 100, 70_000, 600_000, limits::STORE_UNCHUNKED_BYTES, 3_000_000];
        // Each twice, and one that equals a chunk of another: more than the queue holds, so that several threads write.
        let mut contents: Vec<Vec<u8>> = (0..60).map(|n| bytes(n, lengths[n % lengths.len()])).collect();
        contents.extend(contents.clone());
        let batch = store.batch();
        let digests: Vec<Digest> = contents.iter().map(|content| batch.put(content).expect("taken")).collect();
        for (digest, content) in digests.iter().zip(&contents) {
            assert_eq!(*digest, digest_of(content));
            assert!(!store.contains(*digest), "nothing is there before it is durable");
        }
        for at in [1, 2, 3, 5] {
            assert_eq!(batch.get(digests[at], u64::MAX).expect("its own"), contents[at]);
        }
        batch.commit().expect("durable");
        drop(store);
        let store = Store::open(&dir.path().join("store")).expect("opened");
        for (digest, content) in digests.iter().zip(&contents) {
            assert_eq!(store.get(*digest, u64::MAX).expect("whole"), *content);
        }
        assert!(store.verify(|_| ()).expect("readable").damaged.is_empty());
    }

    #[test]
    fn batch_error_is_isolated() {
        let dir = crash_dir();
        let store = Store::open(&dir.path().join("store")).expect("opened");
        let (batch, other) = (store.batch(), store.batch());
        let kept = other.put(&bytes(1, 1000)).expect("taken");
        let lost = batch.put(&bytes(2, 1000)).expect("taken");
        let failed = with_fault("store.pack.write=enospc", || batch.sync().expect_err("armed"));
        assert!(matches!(failed, StoreError::Full { .. }), "{failed:?}");
        assert!(batch.put(&bytes(3, 1000)).is_err() && batch.commit().is_err(), "it cannot be whole any more");
        other.commit().expect("durable");
        assert!(store.contains(kept) && !store.contains(lost));
        store.put(&bytes(2, 1000)).expect("another time");
        assert!(store.contains(lost));
    }

    #[test]
    fn dropped_batch_leaves_nothing() {
        let dir = crash_dir();
        let store = Store::open(&dir.path().join("store")).expect("opened");
        let batch = store.batch();
        let digests: Vec<Digest> = (0..40).map(|n| batch.put(&bytes(n, 300_000)).expect("taken")).collect();
        drop(batch);
        assert!(digests.iter().all(|digest| !store.contains(*digest)));
    }
}
