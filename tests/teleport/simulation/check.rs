//! What must hold after every step.

use std::fmt;

use super::disk::{Content, Copy, Intent, Kernel, Name, Row};
use super::host::Host;
use super::world::{HOSTS, KERNELS, World};

/// A rule of every run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// At most one copy of a kernel lives, whatever loses power now.
    OneLiveCopy,
    /// Acknowledged work, checkpoints among it, is in a copy, with the content that was acknowledged.
    NoLostWork,
    /// What admits work is wholly before or wholly after each restore.
    NoHalfRestore,
    /// Visible freezes are sealed, whole and of one moment; nothing of another one is visible.
    NoUnsealedFreeze,
    /// A worker serves one kernel, once, at the kernel's present epoch; no worker is orphaned.
    OneKernelAWorker,
    /// A suspended kernel does nothing.
    SuspendHolds,
    /// The members of a group are on its host.
    GroupStays,
    /// A clock that jumps ends nothing early.
    ClockHolds,
    /// Without further faults everything comes to an end.
    Ends,
}

impl Rule {
    pub const ALL: [Rule; 9] = [
        Rule::OneLiveCopy,
        Rule::NoLostWork,
        Rule::NoHalfRestore,
        Rule::NoUnsealedFreeze,
        Rule::OneKernelAWorker,
        Rule::SuspendHolds,
        Rule::GroupStays,
        Rule::ClockHolds,
        Rule::Ends,
    ];
}

/// A broken rule.
#[derive(Debug, Clone)]
pub struct Broken {
    pub rule: Rule,
    pub what: String,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.rule, self.what)
    }
}

pub fn broken<T>(rule: Rule, what: impl Into<String>) -> Result<T, Broken> {
    Err(Broken { rule, what: what.into() })
}

impl World {
    pub(super) fn check(&mut self) -> Result<(), Broken> {
        for kernel in 0..KERNELS {
            let is_live = |host: &Host| host.disk.views().iter().any(|view| view.live(kernel).is_some());
            let live: Vec<usize> = (0..HOSTS).filter(|at| is_live(&self.hosts[*at])).collect();
            if live.len() > 1 {
                return broken(Rule::OneLiveCopy, format!("kernel {kernel} lives on hosts {live:?}"));
            }
            let acknowledged = self.acknowledged[&kernel];
            if !self.hosts.iter().any(|host| self.holds(host, kernel, acknowledged)) {
                let what = format!("no copy of kernel {kernel} has all acknowledged work ({acknowledged})");
                return broken(Rule::NoLostWork, what);
            }
        }
        for at in 0..HOSTS {
            self.check_departed(at)?;
            self.check_admitted(at)?;
            self.check_freezes(at)?;
            if self.hosts[at].is_up {
                self.check_workers(at)?;
            }
        }
        Ok(())
    }

    /// Whether this host has a copy with that work: the live one, or a prepared one whose source has departed.
    fn holds(&self, host: &Host, kernel: Kernel, work: u64) -> bool {
        let now = host.view();
        let is_enough = |copy: Copy| copy.has_files && copy.content.work >= work && self.is_known(host, kernel, &copy);
        if now.live(kernel).is_some_and(is_enough) {
            return true;
        }
        now.catalog.rows.iter().any(|(handover, row)| {
            let is_prepared = matches!(row, Row::In { kernel: of, live: false, .. } if *of == kernel);
            let is_committed = self.hosts.iter().any(|source| source.view().has_departed(kernel, *handover));
            // A renamed directory is found by a repeated activation.
            let copy = now.copy(Name::Received(*handover)).or_else(|| now.copy(Name::Kernel(kernel)));
            is_prepared && is_committed && copy.is_some_and(is_enough)
        })
    }

    /// Whether the content is what was admitted after that much work.
    fn is_known(&self, host: &Host, kernel: Kernel, copy: &Copy) -> bool {
        let Content { work, image, record, .. } = copy.content;
        // Half a restore is another rule's.
        let is_half = image.files != image.engine;
        let changes = is_half || record.is_some() || host.disk.catalog().intent.is_some();
        changes || self.states.get(&(kernel, work)).is_none_or(|state| *state == image)
    }

    /// The code of a departed kernel stands still, also while its host has no daemon.
    fn check_departed(&self, at: usize) -> Result<(), Broken> {
        let host = &self.hosts[at];
        for (id, worker) in host.workers.processes.iter().filter(|(id, _)| !host.workers.leaving.contains(id)) {
            if let Some((kernel, _)) = worker.serves
                && !worker.is_stopped
                && host.view().live(kernel).is_none()
            {
                return broken(Rule::OneLiveCopy, format!("worker {id} of host {at} runs departed kernel {kernel}"));
            }
        }
        Ok(())
    }

    /// What admits work is whole, and what it was.
    fn check_admitted(&mut self, at: usize) -> Result<(), Broken> {
        let host = &self.hosts[at];
        let intent = host.disk.catalog().intent.as_ref();
        for kernel in (0..KERNELS).filter(|kernel| host.view().live(*kernel).is_some()) {
            let Content { work, image, .. } = host.disk.content(kernel);
            let span = self.spans.entry((kernel, work)).or_insert((self.tick, self.tick));
            span.1 = self.tick;
            if !host.may_work(kernel) {
                continue;
            }
            if image.files != image.engine {
                let what =
                    format!("kernel {kernel} on host {at} has files of {}, state of {}", image.files, image.engine);
                return broken(Rule::NoHalfRestore, what);
            }
            if matches!(intent, Some(Intent::Restore { members, .. }) if members.contains(&kernel)) {
                let what = format!("member {kernel} on host {at} works while its group is restored");
                return broken(Rule::NoHalfRestore, what);
            }
            let known = self.states.entry((kernel, work)).or_insert(image);
            if *known != image {
                let what = format!("work {work} of kernel {kernel} on host {at} is {image:?} and was {known:?}");
                return broken(Rule::NoLostWork, what);
            }
        }
        let is_here = |kernel: &Kernel| host.view().live(*kernel).is_some();
        match host.disk.catalog().group.iter().find(|kernel| !is_here(kernel)) {
            Some(kernel) if host.is_up => {
                broken(Rule::GroupStays, format!("member {kernel} of host {at}'s group is not there"))
            }
            _ => Ok(()),
        }
    }

    fn check_freezes(&self, at: usize) -> Result<(), Broken> {
        let catalog = self.hosts[at].disk.catalog();
        for (id, members) in &catalog.freezes {
            if let Some(kernel) = members.iter().find(|kernel| !catalog.parts.contains_key(&(*id, **kernel))) {
                let what = format!("freeze {id} of host {at} is visible without its member {kernel}");
                return broken(Rule::NoUnsealedFreeze, what);
            }
        }
        let is_open = matches!(catalog.intent, Some(Intent::Freeze { .. }));
        let is_left = |id: &u32| !is_open && !catalog.freezes.contains_key(id);
        match catalog.parts.keys().find(|(id, _)| is_left(id)) {
            Some((id, kernel)) if self.hosts[at].is_up => {
                let what = format!("part {kernel} of freeze {id}, never sealed, is visible on host {at}");
                broken(Rule::NoUnsealedFreeze, what)
            }
            _ => Ok(()),
        }
    }

    /// The parts of a new freeze existed at one moment.
    pub(super) fn check_moment(&self, at: usize, id: u32) -> Result<(), Broken> {
        let parts = self.hosts[at].disk.catalog().parts.iter().filter(|((freeze, _), _)| *freeze == id);
        let spans: Vec<(u64, u64)> =
            parts.filter_map(|((_, kernel), (work, _))| self.spans.get(&(*kernel, *work)).copied()).collect();
        let begun = spans.iter().map(|span| span.0).max().unwrap_or(0);
        let ended = spans.iter().map(|span| span.1).min().unwrap_or(u64::MAX);
        match begun <= ended {
            true => Ok(()),
            false => broken(Rule::NoUnsealedFreeze, format!("freeze {id} of host {at} is of no moment")),
        }
    }

    fn check_workers(&self, at: usize) -> Result<(), Broken> {
        let (host, rule) = (&self.hosts[at], Rule::OneKernelAWorker);
        let workers = &host.workers;
        for (kernel, id) in &workers.leases {
            let Some(worker) = workers.processes.get(id) else {
                return broken(rule, format!("the worker of kernel {kernel} on host {at} was ended"));
            };
            if worker.serves != host.epoch(*kernel).map(|epoch| (*kernel, epoch)) {
                let what =
                    format!("a worker on host {at} serves {:?}, and kernel {kernel} is elsewhere", worker.serves);
                return broken(rule, what);
            }
        }
        for (id, worker) in &workers.processes {
            if worker.served.len() > 1 {
                return broken(rule, format!("worker {id} of host {at} served kernels {:?}", worker.served));
            }
            let is_slot = workers.slots.iter().any(|slot| slot.id.0 == *id);
            let is_lease = workers.leases.values().any(|lease| lease == id);
            if !is_slot && !is_lease && !workers.leaving.contains(id) {
                return broken(rule, format!("worker {id} of host {at} is orphaned"));
            }
        }
        Ok(())
    }

    /// Without faults every move and change has ended, and every kernel can be used.
    pub(super) fn ended(&self) -> Result<(), Broken> {
        for (at, host) in self.hosts.iter().enumerate() {
            let is_open = |row: &&Row| !matches!(row, Row::In { live: true, .. });
            if let Some(row) = host.disk.catalog().rows.values().find(is_open) {
                return broken(Rule::Ends, format!("host {at} waits for ever: {row:?}"));
            }
            if host.disk.catalog().intent.is_some() || host.operation.is_some() {
                return broken(Rule::Ends, format!("host {at} waits for its group for ever"));
            }
        }
        for kernel in 0..KERNELS {
            let usable = self.hosts.iter().filter(|host| host.is_usable(kernel)).count();
            if usable != 1 {
                let state = |host: &Host| {
                    let (frozen, record) = (host.frozen.contains(&kernel), host.disk.content(kernel).record);
                    let transitions = host.kernels.get(&kernel);
                    format!("{:?}, frozen {frozen}, {record:?}, {transitions:?}", host.epoch(kernel))
                };
                let states: Vec<String> = self.hosts.iter().map(state).collect();
                return broken(Rule::Ends, format!("kernel {kernel} can be used on {usable} hosts: {states:#?}"));
            }
        }
        Ok(())
    }
}
