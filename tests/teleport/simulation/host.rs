//! A simulated host: its disk, its daemon's memory, its worker processes, and what a start recovers.

use std::collections::{BTreeMap, BTreeSet};

use ryokan::core::kernel::transition::{Decision, Transition};

use super::Mistake;
use super::disk::{Disk, Handover, Image, Intent, Kernel, Name, Place, Row, View};
use super::groups::Operation;
use super::incoming::Serving;
use super::kernel::Running;
use super::outgoing::Outgoing;
use super::workers::Workers;

/// A message of the handover protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message {
    Offer {
        handover: Handover,
        kernel: Kernel,
        epoch: u64,
    },
    Accept,
    /// The kernel's work up to here.
    Objects {
        work: u64,
        digest: u64,
    },
    Flushed,
    /// What was done after `base`.
    Seal {
        base: u64,
        work: u64,
        image: Image,
        digest: u64,
    },
    Prepared,
    Commit {
        handover: Handover,
        kernel: Kernel,
        epoch: u64,
    },
    Live,
    Abort {
        handover: Handover,
    },
    Aborted,
    Refused,
}

impl Message {
    pub fn objects(work: u64) -> Message {
        Message::Objects { work, digest: Image::default().digest(work) }
    }

    pub fn seal(base: u64, work: u64, image: Image) -> Message {
        Message::Seal { base, work, image, digest: image.digest(work) }
    }

    /// Whether its bytes have their digest.
    pub fn is_whole(&self) -> bool {
        match *self {
            Message::Objects { work, digest } => Image::default().digest(work) == digest,
            Message::Seal { work, image, digest, .. } => image.digest(work) == digest,
            _ => true,
        }
    }

    /// The message with changed bytes; `None`: it cannot be read any more.
    pub fn corrupted(self) -> Option<Message> {
        match self {
            Message::Objects { work, digest } => Some(Message::Objects { work: work ^ 1, digest }),
            Message::Seal { base, work, image, digest } => {
                let image = Image { files: image.files ^ 1, engine: image.engine ^ 1, ..image };
                Some(Message::Seal { base, work, image, digest })
            }
            _ => None,
        }
    }
}

/// Whether the host's disk does what is asked of it.
#[derive(Debug, Clone, Copy)]
pub struct Io {
    pub syncs: bool,
    /// There is room. Deletions, and what removes more than it adds, have a reserve.
    pub writes: bool,
    /// Stored objects can be read.
    pub reads: bool,
    /// Workers stop and resume.
    pub stops: bool,
    /// No rule of the host, such as a limit, refuses what arrives.
    pub admits: bool,
}

impl Io {
    /// A host without faults.
    pub const WORKS: Io = Io { syncs: true, writes: true, reads: true, stops: true, admits: true };
}

/// What happened while a step was performed.
#[derive(Debug, Default)]
pub struct Effects {
    /// Messages on a connection: `true` leads to the target.
    pub sent: Vec<(u32, bool, Message)>,
    /// Connections that this host closes.
    pub closed: Vec<u32>,
    /// Connections that a move needs: handover.
    pub connect: Vec<Handover>,
    /// Everything was synced.
    pub synced: bool,
}

/// A host.
#[derive(Debug)]
pub struct Host {
    pub disk: Disk,
    /// Its disk has no room.
    pub is_full: bool,
    /// How far its clock of the time of day is off, milliseconds.
    pub clock_offset_ms: i64,
    pub is_up: bool,
    pub moves: BTreeMap<Handover, Outgoing>,
    pub serving: BTreeMap<u32, Serving>,
    /// Kernels that are open for use.
    pub open: BTreeSet<Kernel>,
    /// Kernels whose records this daemon could not read when it started.
    pub unreadable: BTreeSet<Kernel>,
    /// Kernels without admission of work.
    pub frozen: BTreeSet<Kernel>,
    pub kernels: BTreeMap<Kernel, Running>,
    pub workers: Workers,
    pub operation: Option<Operation>,
    /// Work that an earlier connection carried: only a mistaken source relies on it.
    pub(super) remembered: BTreeMap<(Kernel, usize), u64>,
    /// Syncs that failed since the daemon's start.
    pub failed_syncs: u64,
    pub mistake: Mistake,
}

impl Host {
    pub fn new(mistake: Mistake) -> Host {
        Host {
            disk: Disk::new(),
            is_full: false,
            clock_offset_ms: 0,
            is_up: true,
            moves: BTreeMap::new(),
            serving: BTreeMap::new(),
            open: BTreeSet::new(),
            unreadable: BTreeSet::new(),
            frozen: BTreeSet::new(),
            kernels: BTreeMap::new(),
            workers: Workers::new(0),
            operation: None,
            remembered: BTreeMap::new(),
            failed_syncs: 0,
            mistake,
        }
    }

    pub fn view(&self) -> View<'_> {
        self.disk.now()
    }

    pub(super) fn has_departed(&self, kernel: Kernel, by: Handover) -> bool {
        match self.mistake {
            Mistake::AnyDepartureCommits => self.view().live(kernel).is_none(),
            _ => self.view().has_departed(kernel, by),
        }
    }

    /// The epoch of a kernel that lives here.
    pub fn epoch(&self, kernel: Kernel) -> Option<u64> {
        match self.disk.catalog().kernels.get(&kernel) {
            Some(Place::Here { epoch }) => Some(*epoch),
            Some(Place::Departed { .. }) | None => None,
        }
    }

    /// Whether the kernel admits work; it may need a worker first.
    pub fn may_work(&self, kernel: Kernel) -> bool {
        self.is_up
            && self.open.contains(&kernel)
            && !self.frozen.contains(&kernel)
            && self.view().live(kernel).is_some()
            && !self.changes(kernel)
            && (!self.disk.content(kernel).is_suspended || self.mistake == Mistake::SuspendedAdmitsWork)
    }

    /// Whether the kernel can be used, perhaps after it was resumed.
    pub fn is_usable(&self, kernel: Kernel) -> bool {
        self.is_up
            && self.open.contains(&kernel)
            && !self.frozen.contains(&kernel)
            && self.view().live(kernel).is_some()
            && !self.changes(kernel)
    }

    /// Ends the daemon; disk and worker processes stay.
    pub fn crash(&mut self) {
        self.is_up = false;
        self.moves.clear();
        self.serving.clear();
        self.open.clear();
        self.frozen.clear();
        self.kernels.clear();
        self.operation = None;
        self.failed_syncs = 0;
        if self.mistake == Mistake::StoppedWorkerGoesOn {
            self.workers.processes.values_mut().for_each(|worker| worker.is_stopped = false);
        }
        self.workers.forget();
    }

    /// Makes decisions durable, `kernel`'s record among them; `again`: an earlier attempt or daemon made them. Returns
    /// whether it succeeded.
    pub(super) fn sync(&mut self, kernel: Option<Kernel>, again: bool, io: Io) -> bool {
        if again || self.failed_syncs > 0 {
            if !io.writes {
                return false;
            }
            if self.mistake != Mistake::SyncIsRepeated {
                self.disk.write_anew(kernel);
            }
        }
        if io.syncs {
            self.disk.sync();
        } else {
            self.fail_sync();
        }
        io.syncs
    }

    pub(super) fn fail_sync(&mut self) {
        self.disk.fail_sync();
        self.failed_syncs += 1;
    }

    /// Recovery at the start of a daemon.
    pub fn start(&mut self, now_ms: u64) {
        self.is_up = true;
        let rows = self.disk.catalog().rows.clone();
        let awaits_rename = |(handover, row): (&Handover, &Row)| {
            matches!(row, Row::In { live: true, .. }) && self.disk.names().contains(&Name::Received(*handover))
        };
        if rows.iter().any(awaits_rename) && self.mistake != Mistake::StartAdoptsBeforeSync {
            // An activation that is not durable yet must not lose its directory to the next start.
            self.sync(None, true, Io::WORKS);
        }
        for (handover, row) in &rows {
            if let Row::In { kernel, live: true, .. } = row {
                self.disk.adopt(*handover, *kernel);
            }
        }
        let kernels = self.disk.catalog().kernels.clone();
        for name in self.disk.names() {
            let is_known = match name {
                Name::Kernel(kernel) => kernels.contains_key(&kernel),
                Name::Received(handover) => matches!(rows.get(&handover), Some(Row::In { live: false, .. })),
            };
            if !is_known {
                self.disk.remove(name);
            }
        }
        self.open = kernels.keys().filter(|kernel| !self.unreadable.contains(kernel)).copied().collect();
        for kernel in self.unreadable.clone() {
            self.end_worker(kernel);
        }
        self.restart_group();
        self.restart_moves();
        for kernel in kernels.into_keys().filter(|kernel| self.open.contains(kernel)).collect::<Vec<_>>() {
            self.restart_kernel(kernel);
        }
        self.adopt_workers(now_ms);
    }

    /// Before any code runs, a move without a departure is reverted; a restore waits for its recovery.
    fn restart_kernel(&mut self, kernel: Kernel) {
        let record = self.disk.content(kernel).record;
        let is_reverted = match record {
            Some((Transition::HandoverOut { .. }, Decision::Open)) => true,
            Some((Transition::Restore { .. }, _)) => self.mistake == Mistake::RestoreIsForgotten,
            _ => false,
        };
        if is_reverted {
            self.disk.change_content(Name::Kernel(kernel), |content| content.record = None);
            self.kernels.remove(&kernel);
        }
        let _loaded = self.transitions(kernel);
    }

    /// What a new daemon does about its group.
    fn restart_group(&mut self) {
        match self.disk.catalog().intent.clone() {
            Some(Intent::Freeze { id }) => self.withdraw(id),
            Some(Intent::Restore { .. }) => self.recover_group(),
            None => {}
        }
    }
}
