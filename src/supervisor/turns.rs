//! Turns: only so many workers are started at once, for more would only make each other slow. Who comes beyond that waits, first come first
//! served, until it is his turn, or until a slot of the shape that he wants is ready; and not for ever.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::host::Host;
use super::pool::Active;
use super::slot::Slot;
use super::worker::Shape;
use crate::core::error::{Error, Result};

/// The reason of an error where it was not anybody's turn in time.
pub(super) const STARTS: &str = "worker_starts";

/// Whose turn it is to start a worker.
#[derive(Debug)]
pub(super) struct Turns {
    places: Arc<Semaphore>,
    at_once: usize,
    wait: Duration,
}

/// What became of waiting.
pub(super) enum Turn {
    /// A slot is ready.
    Slot(Box<(Slot, Active)>),
    /// A worker may be started, while this is held.
    Start(OwnedSemaphorePermit),
}

impl Turns {
    /// So many at once; who waits longer is refused.
    pub(super) fn new(at_once: usize, wait: Duration) -> Turns {
        Turns { places: Arc::new(Semaphore::new(at_once)), at_once, wait }
    }

    /// Waits for a turn. With a shape: or for a slot of it.
    ///
    /// # Errors
    /// `busy` if neither comes in time.
    pub(super) async fn next(&self, host: &Host, shape: Option<&Shape>) -> Result<Turn> {
        if let Ok(place) = Arc::clone(&self.places).try_acquire_owned() {
            return Ok(Turn::Start(place));
        }
        let waiting = shape.and_then(|shape| host.pool.wait(shape));
        let slot = async {
            match waiting {
                // Its pool has ended: then it is never ready.
                Some(waiting) => match waiting.await {
                    Ok(slot) => slot,
                    Err(_) => pending().await,
                },
                None => pending().await,
            }
        };
        tokio::select! {
            biased;
            // First: who is given one in the same moment must not lose it.
            slot = slot => Ok(Turn::Slot(Box::new(slot))),
            place = Arc::clone(&self.places).acquire_owned() => {
                place.map(Turn::Start).map_err(|_| Error::unavailable("the daemon is stopping"))
            }
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
