//! Freezes and restores of a host's group, by the machines that the daemon drives.

use std::collections::BTreeMap;

use ryokan::core::freeze::capture::{self, Capture, Reply};
use ryokan::core::freeze::on_failure::OnFailure;
use ryokan::core::freeze::restore::{self, Restore};
use ryokan::core::kernel::transition::{Claim, Event, Kind};

use super::Mistake;
use super::disk::{Image, Intent, Kernel, Name};
use super::host::{Host, Io};

/// The work and the image that a freeze pinned of each member.
type Pins = BTreeMap<Kernel, (u64, Image)>;

/// What is done with the group.
#[derive(Debug)]
pub struct Operation {
    pub members: Vec<Kernel>,
    claims: BTreeMap<Kernel, Claim>,
    machine: Machine,
}

#[derive(Debug)]
enum Machine {
    Freeze {
        machine: Capture,
        id: u32,
        pins: Pins,
    },
    Restore {
        machine: Restore,
        target: BTreeMap<Kernel, Image>,
        safety: Vec<Image>,
        /// The files of the member that is switched or reverted are replaced, its engine state is not.
        is_half: bool,
    },
}

/// How an operation ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// A freeze is visible.
    Sealed(u32),
    /// The members are at the freeze.
    Restored,
    /// Everything is as before, or recovery is due.
    Failed,
}

impl Host {
    /// Takes a member's place, or adds it.
    pub fn change_group(&mut self, kernel: Kernel, joins: bool) {
        let is_moving = self.moves.values().any(|moving| moving.kernel == kernel);
        if self.is_full || self.operation.is_some() || self.disk.catalog().intent.is_some() || (joins && is_moving) {
            return;
        }
        self.disk.change_catalog(|catalog| {
            match joins {
                true => catalog.group.insert(kernel),
                false => catalog.group.remove(&kernel),
            };
        });
    }

    /// The contents that a restore under way leads to.
    pub fn restore_targets(&self) -> Option<Vec<(Kernel, u64)>> {
        match &self.operation.as_ref()?.machine {
            Machine::Restore { target, .. } if !target.is_empty() => {
                Some(target.iter().map(|(kernel, image)| (*kernel, image.files)).collect())
            }
            Machine::Restore { .. } | Machine::Freeze { .. } => None,
        }
    }

    /// Whether a restore, or its recovery, may still change members.
    pub fn is_switching(&self) -> bool {
        let switches = |operation: &Operation| match &operation.machine {
            // Members that were resumed go on.
            Machine::Restore { machine, .. } => !matches!(machine.next(), restore::Action::Resume(_)),
            Machine::Freeze { .. } => false,
        };
        self.operation.as_ref().is_some_and(switches)
    }

    fn members(&self) -> Vec<Kernel> {
        self.disk.catalog().group.iter().copied().collect()
    }

    pub fn begin_freeze(&mut self, id: u32) {
        let members = self.members();
        let machine =
            Machine::Freeze { machine: Capture::new(members.len(), OnFailure::Resume), id, pins: BTreeMap::new() };
        self.operation = Some(Operation { members, claims: BTreeMap::new(), machine });
    }

    /// Begins a restore of the members to one of the visible freezes.
    pub fn begin_group_restore(&mut self, pick: usize) {
        let (catalog, all) = (self.disk.catalog(), self.members());
        let Some((id, frozen)) = catalog.freezes.iter().nth(pick % catalog.freezes.len().max(1)) else { return };
        // A member that came later, or left, is not restored.
        let members: Vec<Kernel> = all.iter().copied().filter(|kernel| frozen.contains(kernel)).collect();
        let part = |kernel: &Kernel| Some((*kernel, catalog.parts.get(&(*id, *kernel))?.1));
        let target: BTreeMap<Kernel, Image> = members.iter().filter_map(part).collect();
        if members.is_empty() || target.len() != members.len() {
            return;
        }
        let safety = Vec::new();
        let machine = Machine::Restore { machine: Restore::new(members.len(), 0), target, safety, is_half: false };
        self.operation = Some(Operation { members, claims: BTreeMap::new(), machine });
    }

    /// Ends what a former daemon, or a failed restore, left: nothing of it is used until then.
    pub fn recover_group(&mut self) {
        let Some(Intent::Restore { members, safety, reached }) = self.disk.catalog().intent.clone() else { return };
        self.frozen.extend(&members);
        let machine = Restore::recovery(members.len(), reached);
        let machine = Machine::Restore { machine, target: BTreeMap::new(), safety, is_half: false };
        self.operation = Some(Operation { members, claims: BTreeMap::new(), machine });
    }

    /// Removes everything of a freeze that is not sealed.
    pub fn withdraw(&mut self, id: u32) {
        let is_kept = self.mistake == Mistake::NoWithdrawal;
        self.disk.change_catalog(|catalog| {
            catalog.intent = None;
            if !is_kept {
                catalog.parts.retain(|(freeze, _), _| *freeze != id);
            }
        });
    }

    fn suspend_member(&mut self, kernel: Kernel, claims: &mut BTreeMap<Kernel, Claim>, holds: bool) -> Reply {
        match self.transitions(kernel).begin(Kind::Freeze) {
            Ok(claim) => {
                claims.insert(kernel, claim);
                if holds {
                    self.frozen.insert(kernel);
                }
                Reply::Done
            }
            Err(refusal) => Reply::Failed(refusal.to_string()),
        }
    }

    fn resume_member(&mut self, kernel: Kernel, claims: &mut BTreeMap<Kernel, Claim>) -> Reply {
        if let Some(claim) = claims.remove(&kernel) {
            self.frozen.remove(&kernel);
            self.transitions(kernel).apply(claim, Event::Released).expect("it was begun");
        }
        Reply::Done
    }

    /// Performs one action of the group's operation.
    pub fn step_group(&mut self, io: Io) -> Option<Ended> {
        let Some(Operation { members, mut claims, machine }) = self.operation.take() else {
            match self.disk.catalog().intent.clone()? {
                Intent::Freeze { id } => self.withdraw(id),
                Intent::Restore { .. } => self.recover_group(),
            }
            return None;
        };
        let (machine, ended) = match machine {
            Machine::Freeze { mut machine, id, mut pins } => {
                let reply = self.captured(machine.next(), (&members, id), (&mut claims, &mut pins), io);
                machine.reply(reply);
                let ended = machine.outcome().map(|outcome| match outcome {
                    capture::Outcome::Sealed => Ended::Sealed(id),
                    capture::Outcome::Failed { .. } => Ended::Failed,
                });
                (Machine::Freeze { machine, id, pins }, ended)
            }
            Machine::Restore { mut machine, target, mut safety, mut is_half } => {
                let action = machine.next();
                let reply = self.restored(action, (&members, &target), (&mut claims, &mut safety, &mut is_half), io);
                if let Some(reply) = reply {
                    machine.reply(reply);
                }
                let ended = machine.outcome().map(|outcome| match outcome {
                    restore::Outcome::Restored => Ended::Restored,
                    restore::Outcome::AsBefore { .. } => Ended::Failed,
                    restore::Outcome::Unfinished { .. } => {
                        self.leave_unfinished(&members, &mut claims);
                        Ended::Failed
                    }
                });
                (Machine::Restore { machine, target, safety, is_half }, ended)
            }
        };
        if ended.is_none() {
            self.operation = Some(Operation { members, claims, machine });
        }
        ended
    }

    /// The members stay without admission until recovery.
    fn leave_unfinished(&mut self, members: &[Kernel], claims: &mut BTreeMap<Kernel, Claim>) {
        for kernel in members {
            let _ = self.resume_member(*kernel, claims);
            if self.mistake != Mistake::UnfinishedIsResumed {
                self.frozen.insert(*kernel);
            }
        }
    }

    fn captured(
        &mut self,
        action: capture::Action,
        (members, id): (&[Kernel], u32),
        (claims, pins): (&mut BTreeMap<Kernel, Claim>, &mut Pins),
        io: Io,
    ) -> Reply {
        use capture::Action;
        let full = || Reply::Failed("no room".into());
        match action {
            Action::Suspend(at) => {
                return self.suspend_member(members[at], claims, self.mistake != Mistake::FreezeAdmitsWork);
            }
            Action::Resume(at) => return self.resume_member(members[at], claims),
            Action::Lock(at) | Action::Confirm(at) => return Reply::At(self.revision(members[at]).to_string()),
            Action::Snapshot(at) => {
                let content = self.disk.content(members[at]);
                pins.insert(members[at], (content.work, content.image));
                return Reply::At(self.revision(members[at]).to_string());
            }
            Action::Intent if !io.writes => return full(),
            Action::Intent => self.disk.change_catalog(|catalog| {
                catalog.intent = Some(Intent::Freeze { id });
                if self.mistake == Mistake::SealBeforeStore {
                    catalog.freezes.insert(id, members.to_vec());
                }
            }),
            Action::Store(_) if !io.writes => return full(),
            Action::Store(at) => {
                if let Some(part) = pins.get(&members[at]).copied() {
                    self.disk.change_catalog(|catalog| {
                        catalog.parts.insert((id, members[at]), part);
                    });
                }
            }
            Action::Seal if !io.writes => return full(),
            Action::Seal => self.disk.change_catalog(|catalog| {
                catalog.freezes.insert(id, members.to_vec());
                catalog.intent = None;
            }),
            Action::Withdraw => self.withdraw(id),
            Action::End => {}
            // For groups that a failed freeze leaves paused; these resume.
            Action::Arm | Action::Pause(_) => return full(),
        }
        Reply::Done
    }

    /// The revision of a member. Who does not stop work does not look at it either.
    fn revision(&self, kernel: Kernel) -> u64 {
        let is_blind = self.mistake == Mistake::FreezeAdmitsWork;
        if is_blind { 0 } else { self.disk.content(kernel).work }
    }

    fn restored(
        &mut self,
        action: restore::Action,
        (members, target): (&[Kernel], &BTreeMap<Kernel, Image>),
        (claims, safety, is_half): (&mut BTreeMap<Kernel, Claim>, &mut Vec<Image>, &mut bool),
        io: Io,
    ) -> Option<Reply> {
        use restore::Action;
        let full = || Some(Reply::Failed("no room".into()));
        match action {
            Action::Suspend(at) => {
                let reply = self.suspend_member(members[at], claims, true);
                self.end_worker(members[at]);
                return Some(reply);
            }
            Action::Resume(at) => return Some(self.resume_member(members[at], claims)),
            Action::Safety => *safety = members.iter().map(|kernel| self.disk.content(*kernel).image).collect(),
            Action::Intent | Action::Switch(_) | Action::Revert(_) if !io.writes => {
                *is_half = false;
                return full();
            }
            Action::Intent => {
                let intent = Intent::Restore { members: members.to_vec(), safety: safety.clone(), reached: 0 };
                self.disk.change_catalog(|catalog| catalog.intent = Some(intent));
                self.disk.sync_whole();
            }
            Action::Switch(at) => {
                let late = self.mistake == Mistake::ReachedLate;
                // Before the first change of the member.
                if *is_half == late {
                    self.reach(at + 1);
                }
                let is_last = at + 1 == members.len();
                if is_last && self.mistake == Mistake::CommitBeforeSwitch {
                    self.disk.change_catalog(|catalog| catalog.intent = None);
                }
                return self.put(members[at], *target.get(&members[at])?, is_half);
            }
            Action::Revert(at) => return self.put(members[at], *safety.get(at)?, is_half),
            Action::Commit | Action::Clear => {
                // The members are durable before the intent goes.
                self.disk.sync_whole();
                self.disk.change_catalog(|catalog| catalog.intent = None);
            }
            Action::Validate(_) | Action::Gate | Action::Prepare(_) | Action::Discard(_) | Action::End => {}
        }
        Some(Reply::Done)
    }

    fn reach(&mut self, count: usize) {
        self.disk.change_catalog(|catalog| {
            if let Some(Intent::Restore { reached, .. }) = &mut catalog.intent {
                *reached = count;
            }
        });
        self.disk.sync_whole();
    }

    /// Replaces files first, then engine state.
    fn put(&mut self, kernel: Kernel, image: Image, is_half: &mut bool) -> Option<Reply> {
        let replaces_engine = std::mem::take(is_half);
        self.disk.change_content(Name::Kernel(kernel), |content| match replaces_engine {
            false => content.image.files = image.files,
            true => {
                content.image.engine = image.engine;
                content.work += 1;
            }
        });
        *is_half = !replaces_engine;
        replaces_engine.then_some(Reply::Done)
    }
}
