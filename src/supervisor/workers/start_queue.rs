//! The start queue: bounds concurrent worker starts, since more would only slow each other.
//!
//! Further starts wait in order of arrival for a start grant or a warm worker of their shape, up to a deadline.

use std::cell::RefCell;
use std::collections::HashMap;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::pool::Active;
use crate::core::error::{Error, Result};
use crate::isolation::Shape;
use crate::supervisor::workers::Workers;
use crate::supervisor::workers::warm_worker::WarmWorker;

/// Reason of the error when no start was granted in time.
pub(crate) const STARTS: &str = "worker_starts";

/// Number of users whose semaphores are kept although they start nothing.
const SHARES_KEPT: usize = 64;

/// Grants worker starts.
#[derive(Debug)]
pub(crate) struct StartQueue {
    places: Arc<Semaphore>,
    at_once: usize,
    /// Semaphore per user: one user's hanging starts do not block other users.
    shares: RefCell<HashMap<u32, Arc<Semaphore>>>,
    share: usize,
    wait: Duration,
}

/// The outcome of a wait in the queue.
pub(crate) enum StartGrant {
    /// A warm worker is ready.
    Warm(Box<(WarmWorker, Active)>),
    /// A worker may be started while these permits are held.
    Start([OwnedSemaphorePermit; 2]),
}

impl StartQueue {
    /// Allows `at_once` concurrent starts, `share` per user; a start that waits longer than `wait` is refused.
    pub(crate) fn new(at_once: usize, share: usize, wait: Duration) -> StartQueue {
        StartQueue { places: Arc::new(Semaphore::new(at_once)), at_once, shares: RefCell::default(), share, wait }
    }

    /// Stops granting starts.
    pub(crate) fn close(&self) {
        self.places.close();
    }

    /// Grants a start, if one is free now.
    fn now(&self, uid: u32) -> Option<[OwnedSemaphorePermit; 2]> {
        let share = self.share_of(uid).try_acquire_owned().ok()?;
        Some([share, Arc::clone(&self.places).try_acquire_owned().ok()?])
    }

    fn share_of(&self, uid: u32) -> Arc<Semaphore> {
        let mut shares = self.shares.borrow_mut();
        if shares.len() > SHARES_KEPT {
            shares.retain(|_, share| Arc::strong_count(share) > 1);
        }
        Arc::clone(shares.entry(uid).or_insert_with(|| Arc::new(Semaphore::new(self.share))))
    }

    /// Waits for a start grant or, with a shape, for a warm worker of it.
    ///
    /// # Errors
    /// `busy` if neither comes in time, `unavailable` if the daemon stops or the start is no longer wanted.
    pub(crate) async fn next(
        &self,
        workers: &Workers,
        uid: u32,
        shape: Option<&Shape>,
        given_up: &mut (impl Future + Unpin),
    ) -> Result<StartGrant> {
        let unwanted = || Error::unavailable("the kernel was stopped while it waited for a worker");
        if (&mut *given_up).now_or_never().is_some() {
            return Err(unwanted());
        }
        if let Some(grant) = self.now(uid) {
            return Ok(StartGrant::Start(grant));
        }
        let (share, places) = (self.share_of(uid), Arc::clone(&self.places));
        let stopping = |_| Error::unavailable("the daemon is stopping");
        let grant = async {
            let share = share.acquire_owned().await.map_err(stopping)?;
            Ok(StartGrant::Start([share, places.acquire_owned().await.map_err(stopping)?]))
        };
        let waiting = shape.and_then(|shape| workers.pool.wait(shape));
        let slot = async {
            match waiting {
                // The pool has closed; no warm worker will come.
                Some(waiting) => match waiting.await {
                    Ok(slot) => slot,
                    Err(_) => pending().await,
                },
                None => pending().await,
            }
        };
        tokio::select! {
            biased;
            // First in order: a worker that was just handed over must not be lost.
            slot = slot => Ok(StartGrant::Warm(Box::new(slot))),
            _ = given_up => Err(unwanted()),
            grant = grant => grant,
            () = tokio::time::sleep(self.wait) => Err(self.refusal()),
        }
    }

    fn refusal(&self) -> Error {
        Error::busy(format!(
            "{} workers are being started, and none of them was ready within {:?}",
            self.at_once, self.wait
        ))
        .reason(STARTS)
        .hint("try again when fewer kernels start; limits.worker_starts and limits.worker_wait are the bounds")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_share_blocks_no_other() {
        let turns = StartQueue::new(3, 2, Duration::ZERO);
        let held: Vec<_> = (0..2).map(|_| turns.now(1).expect("his share")).collect();
        assert!(turns.now(1).is_none(), "one place is free, and not his");
        let other = turns.now(2).expect("another's");
        assert!(turns.now(2).is_none(), "no place is free");
        drop(held);
        assert!(turns.now(2).is_some() && turns.now(1).is_some(), "what was given back is there");
        drop(other);
        turns.close();
        assert!(turns.now(1).is_none(), "the daemon stops");
    }

    #[test]
    fn unused_start_shares_are_dropped() {
        let turns = StartQueue::new(1000, 2, Duration::ZERO);
        let held = turns.now(0).expect("a turn");
        (1..1000).for_each(|uid| drop(turns.now(uid).expect("a turn")));
        assert!(turns.shares.borrow().len() <= SHARES_KEPT + 1);
        assert!(turns.shares.borrow()[&0].available_permits() == 1, "what is held counts");
        drop(held);
    }
}
