//! Stores and reads many objects on a few threads.

use std::io::{self, Read};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::state::Want;
use super::{Batch, Reader, Result, Store, StoreError, limits, lock};
use crate::core::ids::Digest;

/// Read size, bytes.
const PIECE: usize = 256 << 10;

impl Batch {
    /// Stores `count` objects in parallel, each read from `open(n)`; `None` skips one. Returns their addresses and
    /// lengths.
    ///
    /// The first error ends it.
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
    /// Reads many objects in parallel, in storage order; calls `take` with the index in `digests`. The first error ends
    /// it.
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

/// Runs `count` jobs on a few threads, each with its own worker closure. Returns the first error and ends there.
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
                // Start no further job.
                next.store(count, Ordering::Relaxed);
                lock(&failed).get_or_insert(error);
                return;
            }
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(limits::STORE_THREADS).min(count);
    thread::scope(|scope| {
        // The calling thread works too: it suffices if no other can be started.
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
