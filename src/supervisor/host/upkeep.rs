//! State that maintenance shares with kernels and checkpoints.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use tokio::sync::{RwLock, Semaphore};
use tokio::time::Instant;

use crate::core::limits;

/// Maintenance state between runs, and the locks shared with writers that add or remove rows.
#[derive(Debug)]
pub struct Upkeep {
    /// Read-locked by operations that remove a row naming an object or copy such a name to another row; write-locked
    /// while all rows are listed.
    pub names: RwLock<()>,
    /// Permits for checkpoints before a stop.
    pub(crate) rests: Semaphore,
    pub(crate) running: Cell<bool>,
    /// Whether a client has the disk measured.
    pub(crate) measuring: Cell<bool>,
    /// One measurement of the disk at a time.
    pub(crate) measure_turn: Arc<Semaphore>,
    /// When the figures of kernels are old; `None`: they were never measured.
    pub(crate) figures_due: Cell<Option<Instant>>,
    /// `gone` at the last measurement of all kernels.
    pub(crate) figures_gone: Cell<u64>,
    /// The number of runs skipped because code ran.
    pub(crate) put_off: Cell<u32>,
    /// The store's counters when a run last found nothing left to do.
    pub(crate) at_rest: Cell<Option<(u64, u64)>>,
    /// The number of removed rows that named an object.
    pub(crate) gone: Cell<u64>,
    pub(crate) failed: RefCell<String>,
}

impl Default for Upkeep {
    fn default() -> Self {
        Upkeep {
            names: RwLock::default(),
            rests: Semaphore::new(limits::STOP_CHECKPOINTS),
            running: Cell::default(),
            measuring: Cell::default(),
            measure_turn: Arc::new(Semaphore::new(1)),
            figures_due: Cell::default(),
            figures_gone: Cell::default(),
            put_off: Cell::default(),
            at_rest: Cell::default(),
            gone: Cell::default(),
            failed: RefCell::default(),
        }
    }
}
