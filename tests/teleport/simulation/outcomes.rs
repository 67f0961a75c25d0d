//! What events lead to: acknowledged work, ends of group operations, and what a loss of power leaves.

use super::check::{Broken, Rule, broken};
use super::disk::{Content, Intent, Kernel, Name, Place};
use super::groups::Ended;
use super::world::{KERNELS, World};

impl World {
    pub(super) fn work(&mut self, at: usize, kernel: Kernel) -> Result<(), Broken> {
        let host = &mut self.hosts[at];
        let Content { work, image, .. } = host.disk.content(kernel);
        if host.is_full {
            return Ok(());
        }
        if let Some(worker) = host.workers.of(kernel)
            && worker.memory != image.engine
        {
            let what = format!("the worker of kernel {kernel} continues at {}, not {}", worker.memory, image.engine);
            return broken(Rule::NoLostWork, what);
        }
        if self.suspended.get(&kernel).is_some_and(|(on, epoch)| *on == at && host.epoch(kernel) == Some(*epoch)) {
            return broken(Rule::SuspendHolds, format!("kernel {kernel} works on host {at}"));
        }
        host.disk.change_content(Name::Kernel(kernel), |content| {
            content.work += 1;
            (content.image.files, content.image.engine) = (work + 1, work + 1);
        });
        host.used_worker(kernel, work + 1, self.now_ms);
        if self.has_faults && self.fails_more && self.random.one_in(4) {
            // It ended at its time limit, after it changed the kernel: nothing is acknowledged.
            self.counts.timeouts += 1;
            return Ok(());
        }
        self.counts.worked += 1;
        self.acknowledge(at, kernel);
        Ok(())
    }

    /// The kernel's state is acknowledged to a client.
    pub(super) fn acknowledge(&mut self, at: usize, kernel: Kernel) {
        let work = self.hosts[at].disk.content(kernel).work;
        let acknowledged = self.acknowledged.entry(kernel).or_default();
        *acknowledged = (*acknowledged).max(work);
    }

    pub(super) fn step_group(&mut self, at: usize) -> Result<(), Broken> {
        let io = self.io(at);
        let ended = self.hosts[at].step_group(io);
        self.note_group_restore(at)?;
        match ended {
            Some(Ended::Sealed(id)) => {
                self.counts.freezes += 1;
                return self.check_moment(at, id);
            }
            Some(Ended::Restored) => {
                self.counts.group_restores += 1;
                for kernel in 0..KERNELS {
                    self.acknowledge_if_here(at, kernel);
                }
            }
            Some(Ended::Failed) | None => {}
        }
        Ok(())
    }

    pub(super) fn acknowledge_if_here(&mut self, at: usize, kernel: Kernel) {
        if self.hosts[at].disk.catalog().group.contains(&kernel) {
            self.acknowledge(at, kernel);
        }
    }

    /// Both halves or none: once the intent is gone, all members are as before or as the freeze.
    pub(super) fn note_group_restore(&mut self, at: usize) -> Result<(), Broken> {
        let host = &self.hosts[at];
        let intent = host.disk.catalog().intent.as_ref();
        let files = |kernel: Kernel| host.disk.content(kernel).image.files;
        if let Some(targets) = host.restore_targets()
            && self.restoring[at].is_none()
            && matches!(intent, Some(Intent::Restore { .. }))
        {
            self.restoring[at] = Some(targets.into_iter().map(|(kernel, to)| (kernel, files(kernel), to)).collect());
        }
        if intent.is_some() || host.is_switching() {
            return Ok(());
        }
        let Some(members) = self.restoring[at].take() else { return Ok(()) };
        let is_before = members.iter().all(|(kernel, before, _)| files(*kernel) == *before);
        let is_after = members.iter().all(|(kernel, _, after)| files(*kernel) == *after);
        match is_before || is_after {
            true => Ok(()),
            false => broken(Rule::NoHalfRestore, format!("the members of host {at}'s group are {members:?}")),
        }
    }

    pub(super) fn tombstones(&self, at: usize) -> usize {
        let kernels = &self.hosts[at].disk.catalog().kernels;
        kernels.values().filter(|place| matches!(place, Place::Departed { .. })).count()
    }

    pub(super) fn lose_power(&mut self, at: usize) {
        self.counts.power_losses += 1;
        for kernel in 0..KERNELS {
            // Work that reached no device yet may be lost, as in one host alone.
            if self.hosts[at].disk.views().iter().any(|view| view.live(kernel).is_some()) {
                self.acknowledged.insert(kernel, self.durable[&kernel]);
            }
        }
        self.hosts[at].crash();
        self.hosts[at].workers.processes.clear();
        self.close_wires_of(at);
        let random = &mut self.random;
        self.hosts[at].disk.lose_power(|count| random.below(count));
        // What a start reads stays.
        self.hosts[at].disk.sync();
        self.suspended.retain(|_, (on, _)| *on != at);
        // Numbers of lost work are used again.
        for kernel in 0..KERNELS {
            let Some(copy) = self.hosts[at].view().live(kernel) else { continue };
            let newest = copy.content.work;
            self.states.retain(|(of, work), _| *of != kernel || *work <= newest);
            self.spans.retain(|(of, work), _| *of != kernel || *work <= newest);
        }
    }

    pub(super) fn note_durable(&mut self, at: usize) {
        for kernel in 0..KERNELS {
            if let Some(copy) = self.hosts[at].view().own(kernel)
                && !self.hosts[at].disk.has_lost(kernel)
            {
                let durable = self.durable.entry(kernel).or_default();
                *durable = (*durable).max(copy.content.work).min(self.acknowledged[&kernel]);
            }
        }
    }
}
