//! Worker processes of a host and its warm pool, by the plans of the policy.

use std::collections::{BTreeMap, BTreeSet};

use ryokan::core::kernel::transition::Transition;
use ryokan::core::pool::{Action, Breaker, Demand, Rules, Slot, SlotId, SlotState, View, choose, plan};

use super::Mistake;
use super::disk::Kernel;
use super::host::Host;

/// Time without use after which a worker ends.
pub const IDLE_MS: u64 = 60_000;

/// The rules of every pool: short lives, so that workers are recycled often.
pub const fn rules() -> Rules {
    Rules {
        pool_size: 2,
        max_pool_size: 3,
        min_idle: 1,
        max_idle_time_ms: 40_000,
        max_exec_count: 3,
        max_uptime_ms: 60_000,
        maintenance_interval_ms: 5_000,
        creation_ms: 20_000,
    }
}

/// A worker process: it outlives the daemon.
#[derive(Debug, Clone, Default)]
pub struct Worker {
    /// The kernel that it serves, at this epoch.
    pub serves: Option<(Kernel, u64)>,
    /// The engine state in its memory.
    pub memory: u64,
    /// Every kernel that it ever served.
    pub served: Vec<Kernel>,
    /// Its last use, by the clock that the daemon reads, and in truth.
    used_ms: u64,
    pub truly_used_ms: u64,
    /// Its code stands still, whatever becomes of the daemon.
    pub is_stopped: bool,
}

/// Processes, and what the daemon knows of them.
#[derive(Debug)]
pub struct Workers {
    pub processes: BTreeMap<u64, Worker>,
    /// The worker of each kernel.
    pub leases: BTreeMap<Kernel, u64>,
    pub slots: Vec<Slot>,
    /// Processes that were killed, and may not have ended yet.
    pub leaving: BTreeSet<u64>,
    demand: Demand,
    breaker: Breaker,
    last: u64,
    /// Requests that found no worker.
    waiting: u32,
    pub granted: u64,
    pub adopted: u64,
    pub recycled: u64,
}

impl Workers {
    pub fn new(now_ms: u64) -> Workers {
        Workers {
            processes: BTreeMap::new(),
            leases: BTreeMap::new(),
            slots: Vec::new(),
            leaving: BTreeSet::new(),
            demand: Demand::new(now_ms),
            breaker: Breaker::default(),
            last: 0,
            waiting: 0,
            granted: 0,
            adopted: 0,
            recycled: 0,
        }
    }

    /// The daemon has ended: its memory is gone, the processes are not.
    pub fn forget(&mut self) {
        self.leases.clear();
        self.slots.clear();
        self.leaving.clear();
        self.waiting = 0;
    }

    pub fn creating(&self) -> impl Iterator<Item = SlotId> {
        self.slots.iter().filter(|slot| matches!(slot.state, SlotState::Creating { .. })).map(|slot| slot.id)
    }

    pub fn of(&self, kernel: Kernel) -> Option<&Worker> {
        self.leases.get(&kernel).and_then(|id| self.processes.get(id))
    }
}

impl Host {
    /// The clock that decides about idle workers.
    fn clock(&self, now_ms: u64) -> u64 {
        match self.mistake {
            Mistake::IdleByTimeOfDay => now_ms.saturating_add_signed(self.clock_offset_ms),
            _ => now_ms,
        }
    }

    /// Requests a worker for a kernel; returns whether it has one.
    pub fn want_worker(&mut self, kernel: Kernel, now_ms: u64) -> bool {
        let Some(epoch) = self.epoch(kernel).filter(|_| !self.is_full) else { return false };
        if self.workers.leases.contains_key(&kernel) {
            return true;
        }
        self.workers.demand.came(now_ms);
        let slot = match choose(&rules(), &self.workers.slots, now_ms) {
            Some(slot) => slot,
            // A cold start, at the second request.
            None if self.workers.waiting > 0 => {
                self.workers.last += 1;
                SlotId(self.workers.last)
            }
            None => {
                self.workers.waiting = 1;
                return false;
            }
        };
        self.workers.waiting = 0;
        if self.mistake != Mistake::GrantedStaysPooled {
            self.workers.slots.retain(|one| one.id != slot);
        }
        // Recorded before its first use.
        self.disk.change_catalog(|catalog| {
            catalog.leases.insert(slot.0, (kernel, epoch));
        });
        let (memory, used_ms) = (self.disk.content(kernel).image.engine, self.clock(now_ms));
        let worker = self.workers.processes.entry(slot.0).or_default();
        worker.serves = Some((kernel, epoch));
        if self.mistake != Mistake::DirtyIsPooled || worker.served.is_empty() {
            worker.memory = memory;
        }
        worker.served.push(kernel);
        (worker.used_ms, worker.truly_used_ms) = (used_ms, now_ms);
        self.workers.leases.insert(kernel, slot.0);
        self.workers.granted += 1;
        true
    }

    /// The worker of a kernel has executed: its memory is at this moment.
    pub fn used_worker(&mut self, kernel: Kernel, memory: u64, now_ms: u64) {
        let used_ms = self.clock(now_ms);
        let id = self.workers.leases.get(&kernel).copied();
        if let Some(worker) = id.and_then(|id| self.workers.processes.get_mut(&id)) {
            (worker.memory, worker.used_ms, worker.truly_used_ms) = (memory, used_ms, now_ms);
        }
    }

    /// Stops the code of a kernel, or lets it go on.
    pub fn stop_worker(&mut self, kernel: Kernel, is_stopped: bool) {
        let id = self.workers.leases.get(&kernel).copied();
        if let Some(worker) = id.and_then(|id| self.workers.processes.get_mut(&id)) {
            worker.is_stopped = is_stopped;
        }
    }

    /// Ends the worker of a kernel. It served, so it is no slot again.
    pub fn end_worker(&mut self, kernel: Kernel) {
        let Some(id) = self.workers.leases.remove(&kernel) else { return };
        self.disk.change_catalog(|catalog| {
            catalog.leases.remove(&id);
        });
        match (self.mistake, self.workers.processes.get_mut(&id)) {
            (Mistake::DirtyIsPooled, Some(worker)) => {
                worker.serves = None;
                let state = SlotState::Idle { since_ms: 0 };
                self.workers.slots.push(Slot { id: SlotId(id), state, created_ms: u64::MAX, executions: 0 });
            }
            (_, process) => {
                // A killed process runs nothing, even while it has not ended.
                process.into_iter().for_each(|worker| worker.is_stopped = true);
                self.workers.leaving.insert(id);
            }
        }
    }

    /// The killed processes end.
    pub fn reap_workers(&mut self) {
        let Workers { leaving, processes, .. } = &mut self.workers;
        processes.retain(|id, _| !leaving.contains(id));
        leaving.clear();
    }

    /// Whether the worker of a kernel ends for want of use.
    pub fn is_idle(&self, kernel: Kernel, now_ms: u64) -> bool {
        let clock = self.clock(now_ms);
        self.workers.of(kernel).is_some_and(|worker| clock.saturating_sub(worker.used_ms) >= IDLE_MS)
    }

    /// Performs the plan of this moment.
    pub fn plan_pool(&mut self, now_ms: u64) {
        let Workers { slots, demand, breaker, waiting, .. } = &self.workers;
        let (rules, waiting) = (rules(), *waiting);
        let (pressure, paused) = (false, false);
        let view = View { rules: &rules, slots, waiting, room: 8, pressure, paused, demand, breaker };
        for action in plan(&view, now_ms).actions {
            match action {
                Action::Create => {
                    self.workers.last += 1;
                    let state = SlotState::Creating { since_ms: now_ms };
                    let id = SlotId(self.workers.last);
                    self.workers.slots.push(Slot { id, state, created_ms: now_ms, executions: 0 });
                }
                Action::Destroy { slot, .. } => {
                    self.workers.slots.retain(|one| one.id != slot);
                    self.workers.processes.remove(&slot.0);
                    self.workers.recycled += 1;
                }
            }
        }
    }

    /// A worker has started, or failed to.
    pub fn started_worker(&mut self, id: SlotId, starts: bool, now_ms: u64) {
        if !starts {
            self.workers.slots.retain(|slot| slot.id != id);
            return self.workers.breaker.failed("no room", now_ms);
        }
        if let Some(slot) = self.workers.slots.iter_mut().find(|slot| slot.id == id) {
            (slot.state, slot.created_ms) = (SlotState::Idle { since_ms: now_ms }, now_ms);
            self.workers.breaker.succeeded();
            self.workers.processes.insert(id.0, Worker::default());
        }
    }

    /// After a start: a worker that serves a kernel which lives here at its epoch goes on, any other one ends.
    pub(super) fn adopt_workers(&mut self, now_ms: u64) {
        let leases = self.disk.catalog().leases.clone();
        for (id, worker) in self.workers.processes.clone() {
            let kernel = worker.serves.map(|(kernel, _)| kernel);
            let is_recorded = worker.serves.is_some() && leases.get(&id) == worker.serves.as_ref();
            let is_present = worker.serves.is_some_and(|(kernel, epoch)| {
                let content = self.disk.content(kernel);
                // A restore ends it before it changes anything, and a departed kernel's never acts again.
                self.epoch(kernel) == Some(epoch)
                    && content.departed_by.is_none()
                    && !matches!(content.record, Some((Transition::Restore { .. }, _)))
            });
            match kernel {
                Some(kernel) if (is_recorded && is_present) || self.mistake == Mistake::AnyWorkerIsAdopted => {
                    self.workers.leases.insert(kernel, id);
                    self.workers.adopted += 1;
                    self.stop_worker(kernel, false);
                }
                _ if self.mistake == Mistake::OrphansStay => {}
                _ => drop(self.workers.processes.remove(&id)),
            }
        }
        let adopted: Vec<u64> = self.workers.leases.values().copied().collect();
        self.disk.change_catalog(|catalog| catalog.leases.retain(|id, _| adopted.contains(id)));
        let last = self.workers.processes.keys().next_back().copied().unwrap_or(0);
        self.workers.last = self.workers.last.max(last);
        (self.workers.demand, self.workers.breaker) = (Demand::new(now_ms), Breaker::default());
    }
}
