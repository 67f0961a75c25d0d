//! Storing and reading many objects with a few threads: what a checkpoint and a restore of a file tree need.

use std::io::{self, Read};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::state::Want;
use super::{Batch, Reader, Result, Store, StoreError, limits, lock};
use crate::core::ids::Digest;

/// Bytes that are asked of a source at once.
const PIECE: usize = 256 << 10;

impl Batch {
    /// Stores `count` objects, several at once, each read from what `open` gives for its number; `None` for one that is not to
    /// be stored. Gives address and length of each. The first error ends it all.
    ///
    /// # Errors
    /// Those of `open`, of reading, and of [`Batch::put`].
    pub fn put_parallel<R, E>(
        &self,
        count: usize,
        open: impl Fn(usize) -> Result<Option<R>, E> + Sync,
    ) -> Result<Vec<Option<(Digest, u64)>>, E>
    where
        R: Read,
        E: From<StoreError> + From<io::Error> + Send,
    {
        let stored = Mutex::new(vec![None; count]);
        run_parallel(count, || {
            let mut piece = vec![0; PIECE];
            let (open, stored) = (&open, &stored);
            move |n| -> Result<(), E> {
                let Some(mut source) = open(n)? else { return Ok(()) };
                let mut writer = self.writer(limits::BLOB_BYTES);
                loop {
                    match source.read(&mut piece) {
                        Ok(0) => break,
                        Ok(count) => writer.write(&piece[..count])?,
                        Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                        Err(error) => return Err(error.into()),
                    }
                }
                let named = self.add(writer)?;
                lock(stored)[n] = Some(named);
                Ok(())
            }
        })?;
        Ok(stored.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner))
    }
}

impl Store {
    /// Reads many objects, several at once, in the order in which they are stored; `take` gets each with its place in
    /// `digests`. The first error ends it all.
    ///
    /// # Errors
    /// Those of `take` and of [`Store::open_object`].
    pub fn read_parallel<E>(
        &self,
        digests: &[Digest],
        take: impl Fn(usize, &mut Reader) -> Result<(), E> + Sync,
    ) -> Result<(), E>
    where
        E: From<StoreError> + Send,
    {
        let mut order = Vec::with_capacity(digests.len());
        for (n, digest) in digests.iter().enumerate() {
            let place = self.slots(*digest, Want::Object)?.first().map(super::format::Slot::place);
            order.push((place, n));
        }
        order.sort_unstable();
        run_parallel(order.len(), || {
            |n| {
                let (_, n) = order[n];
                take(n, &mut self.open_object(digests[n])?)
            }
        })
    }
}

/// Does `count` pieces of work on a few threads, each with a worker of its own. The first error ends it; it is given.
fn run_parallel<E: Send, W: FnMut(usize) -> Result<(), E>>(
    count: usize,
    worker: impl Fn() -> W + Sync,
) -> Result<(), E> {
    let next = AtomicUsize::new(0);
    let failed: Mutex<Option<E>> = Mutex::new(None);
    let work = || {
        let mut worker = worker();
        loop {
            let n = next.fetch_add(1, Ordering::Relaxed);
            if n >= count {
                return;
            }
            if let Err(error) = worker(n) {
                // Nobody begins another piece.
                next.store(count, Ordering::Relaxed);
                lock(&failed).get_or_insert(error);
                return;
            }
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(limits::STORE_THREADS).min(count);
    thread::scope(|scope| {
        // The caller is one of them: a host that gives no more threads still gets on.
        for _ in 1..threads {
            let _ = thread::Builder::new().name("store".to_owned()).spawn_scoped(scope, work);
        }
        work();
    });
    match failed.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}
