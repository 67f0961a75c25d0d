//! State that maintenance shares with kernels and checkpoints.

use std::cell::{Cell, RefCell};

use tokio::sync::{RwLock, Semaphore};

use crate::core::limits;

/// What maintenance remembers between its turns, and the locks that it shares with whatever adds or removes rows.
#[derive(Debug)]
pub struct Upkeep {
    /// Taken to read by whoever makes a row go that names an object, or copies what one names into another; to write by whoever
    /// lists them all.
    pub names: RwLock<()>,
    /// Places for checkpoints before a stop.
    pub(crate) rests: Semaphore,
    pub(crate) running: Cell<bool>,
    /// Turns that were left out because code ran.
    pub(crate) put_off: Cell<u32>,
    /// What the store had done when a turn found nothing left to do.
    pub(crate) at_rest: Cell<Option<(u64, u64)>>,
    /// Rows that named something and went.
    pub(crate) gone: Cell<u64>,
    pub(crate) failed: RefCell<String>,
}

impl Default for Upkeep {
    fn default() -> Self {
        Upkeep {
            names: RwLock::default(),
            rests: Semaphore::new(limits::STOP_CHECKPOINTS),
            running: Cell::default(),
            put_off: Cell::default(),
            at_rest: Cell::default(),
            gone: Cell::default(),
            failed: RefCell::default(),
        }
    }
}
