//! Restores of the simulated group, while others change its members.

use super::super::capture::Reply;
use super::super::gate;
use super::super::refs::CommitId;
use super::super::restore::{self, Restore};
use super::{CODE, Content, DATA, Ended, Frozen, Intent, KERNEL, MEMBERS, Mistake, World, pairing};

impl World {
    /// A restore of some members.
    pub(super) fn restore(&mut self) -> Result<(), Ended> {
        let whole: Vec<Frozen> = self.freezes.iter().filter(|one| !one.partial).cloned().collect();
        if whole.is_empty() {
            return Ok(());
        }
        let target = whole[self.random.below(whole.len() as u64) as usize].pinned;
        let members: Vec<usize> = match self.random.below(3) {
            0 => vec![CODE],
            1 => vec![DATA],
            _ => vec![KERNEL, CODE, DATA],
        };
        let machine = Restore::new(members.len(), MEMBERS - members.len());
        self.drive(machine, &members, target, None)
    }

    pub(super) fn drive(
        &mut self,
        mut machine: Restore,
        members: &[usize],
        target: Content,
        recovered: Option<Content>,
    ) -> Result<(), Ended> {
        use restore::Action;
        let is_recovery = recovered.is_some();
        let mut safety = recovered.unwrap_or(self.now);
        // First those that change.
        let kept = (0..MEMBERS).filter(|at| !members.contains(at));
        let order: Vec<usize> = members.iter().copied().chain(kept).collect();
        let (mut switched, mut is_committed) = (0, false);
        self.loaded = self.now[CODE];
        while machine.next() != Action::End {
            let action = machine.next();
            if !is_recovery && !is_committed {
                let mut open = [true; MEMBERS];
                members[..switched].iter().for_each(|at| open[*at] = false);
                // A restored database is locked from its suspension on.
                open[DATA] &= !members.contains(&DATA) || !self.suspended[DATA];
                self.meanwhile_restored(open);
            }
            let last = action == Action::Switch(members.len() - 1);
            if last && self.mistake == Mistake::CommitFirst {
                self.intent = None;
                self.ends()?;
            }
            let reply = match action {
                Action::Commit if !self.judged_late(members, target, safety) => Reply::Failed("data is newer".into()),
                // One transaction.
                Action::Commit | Action::Clear => {
                    self.ends()?;
                    self.intent = None;
                    self.ends()?;
                    is_committed |= action == Action::Commit;
                    Reply::Done
                }
                Action::Gate => gated(self.gate(members, target, self.now, &[self.now])),
                Action::Safety => {
                    (safety, self.loaded) = (self.now, self.now[CODE]);
                    let taken =
                        self.faulty(false, |world| world.restored(action, &order, target, safety, members.len()))?;
                    match taken {
                        // Again, with what the members have that are not restored.
                        Reply::Done => gated(self.gate(members, target, safety, &[safety])),
                        failed => failed,
                    }
                }
                action => {
                    if let Action::Switch(at) = action {
                        switched = at + 1;
                    }
                    let lasting = matches!(action, Action::Resume(_));
                    self.faulty(lasting, |world| world.restored(action, &order, target, safety, members.len()))?
                }
            };
            machine.reply(reply);
        }
        if let Some(restore::Outcome::Unfinished { .. }) = machine.outcome()
            && self.mistake == Mistake::ResumeUnfinished
        {
            self.suspended = [false; MEMBERS];
        }
        Ok(())
    }

    /// Judges what is not restored as it is before the commit.
    fn judged_late(&self, members: &[usize], target: Content, safety: Content) -> bool {
        // What was made of the data meanwhile belongs to the code before the restore.
        let mut without = self.now;
        members.iter().for_each(|at| without[*at] = safety[*at]);
        let known = if self.mistake == Mistake::LateSchemaUnknown { &[safety][..] } else { &[safety, without] };
        self.mistake == Mistake::JudgeOnce || self.gate(members, target, self.now, known)
    }

    /// Whether the target and the other members of `present` may live together. `known`: states that may be recorded.
    fn gate(&self, members: &[usize], target: Content, present: Content, known: &[Content]) -> bool {
        let mut would_be = present;
        members.iter().for_each(|at| would_be[*at] = target[*at]);
        let is_ancestor = |_: &str, a: &CommitId, b: &CommitId| a.as_str() <= b.as_str();
        let mut recorded = self.pairings.clone();
        for state in known.iter().map(|state| pairing(*state)) {
            if gate::check(std::slice::from_ref(&state), &recorded, is_ancestor).is_ok() {
                recorded.push(state);
            }
        }
        self.mistake == Mistake::NoGate || gate::check(&[pairing(would_be)], &recorded, is_ancestor).is_ok()
    }

    fn restored(
        &mut self,
        action: restore::Action,
        members: &[usize],
        target: Content,
        safety: Content,
        restored: usize,
    ) -> Result<Reply, Ended> {
        use restore::Action;
        match action {
            Action::Suspend(at) => self.suspended[members[at]] = true,
            Action::Resume(at) => self.suspended[members[at]] = false,
            Action::Safety => {
                let checkpoint = self.number();
                self.checkpoints.push(checkpoint);
                self.freezes.push(Frozen {
                    reported: self.now,
                    pinned: self.now,
                    stored: [true; MEMBERS],
                    partial: true,
                    checkpoint,
                });
            }
            Action::Intent => {
                let members = members[..restored].to_vec();
                self.intent = Some(Intent::Restore { members, safety, reached: 0 });
            }
            Action::Switch(at) => {
                let reach = |world: &mut World| {
                    if let Some(Intent::Restore { reached, .. }) = &mut world.intent {
                        *reached = at + 1;
                    }
                };
                if self.mistake != Mistake::ReachedLate {
                    reach(self);
                    self.ends()?;
                }
                if self.now[members[at]] != safety[members[at]] && self.mistake != Mistake::SwitchBlindly {
                    return Ok(Reply::Failed("it was changed during the restore".into()));
                }
                self.now[members[at]] = target[members[at]];
                self.ends()?;
                reach(self);
            }
            Action::Revert(at) if self.mistake != Mistake::RevertSkips || at > 0 => {
                let member = members[at];
                // What others made of it is kept apart.
                (self.now[member], self.before[member]) = (safety[member], safety[member]);
            }
            _ => {}
        }
        Ok(Reply::Done)
    }

    /// Work during a restore. `open`: members that it has not changed and will not, or not yet. The locked data is neither.
    fn meanwhile_restored(&mut self, open: [bool; MEMBERS]) {
        if open[KERNEL] && !self.suspended[KERNEL] && self.random.one_in(12) {
            self.change(KERNEL, |world| world.number());
        }
        if open[CODE] && self.random.one_in(15) {
            self.change(CODE, |world| world.number());
        }
        // The user checks out older code that fits the data which is there.
        if open[CODE] && self.random.one_in(15) {
            self.change(CODE, |world| {
                let (least, most) = (world.before[DATA].max(world.now[DATA]), world.before[CODE]);
                let fits: Vec<u64> =
                    world.moments.iter().map(|one| one[CODE]).filter(|code| (least..=most).contains(code)).collect();
                if fits.is_empty() { most } else { fits[world.random.below(fits.len() as u64) as usize] }
            });
        }
        // The code that was loaded before goes on, and migrates its data.
        let may_migrate = (self.before[DATA]..=self.before[CODE]).contains(&self.loaded);
        if open[DATA] && may_migrate && self.random.one_in(8) {
            self.change(DATA, |world| world.loaded);
        }
    }

    fn change(&mut self, member: usize, to: impl FnOnce(&mut World) -> u64) {
        let to = to(self);
        (self.now[member], self.before[member]) = (to, to);
        self.moments.push(self.before);
    }
}

fn gated(fits: bool) -> Reply {
    if fits { Reply::Done } else { Reply::Failed("data is newer".into()) }
}
