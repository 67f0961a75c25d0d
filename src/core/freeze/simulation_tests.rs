//! A group under random freezes, restores, faults and ends of the daemon, driven from a seed through the machines and the
//! gate.
//!
//! Whenever work is admitted: every visible freeze is whole and of one moment, every visible checkpoint belongs to one, the
//! members are all before or all after a restore, and no data is under older code. Each [`Mistake`] breaks one rule of the
//! driver and must be found.

use super::SchemaRevision;
use super::capture::{self, Capture, Reply};
use super::gate::{self, Pairing};
use super::on_failure::OnFailure;
use super::restore::{self, Restore};

/// The kernel, the code (a commit) and the data (the commit that its schema was made by).
const MEMBERS: usize = 3;
const KERNEL: usize = 0;
const CODE: usize = 1;
const DATA: usize = 2;

type Content = [u64; MEMBERS];

/// A rule that is broken deliberately.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mistake {
    None,
    /// A changed revision is not reported after the snapshots.
    NoConfirmation,
    /// The freeze is visible before its members are stored.
    SealFirst,
    /// A new daemon leaves the checkpoints of an unsealed freeze.
    NoWithdrawal,
    /// A new daemon does not pause the group of an unsealed freeze.
    NoPause,
    /// The gate admits everything.
    NoGate,
    /// The intent names a member only after it was switched.
    ReachedLate,
    /// The restore is committed before its last switch.
    CommitFirst,
    /// A member is not brought back.
    RevertSkips,
    /// An unfinished restore admits work.
    ResumeUnfinished,
}

struct Random(u64);

impl Random {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % most
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

#[derive(Debug, Clone)]
struct Frozen {
    /// The revisions that the snapshots reported.
    reported: Content,
    pinned: Content,
    stored: [bool; MEMBERS],
    /// Whether it was taken before a restore of some members.
    partial: bool,
    checkpoint: u64,
}

#[derive(Debug, Clone)]
enum Intent {
    Freeze { checkpoint: u64, pauses: bool },
    Restore { members: Vec<usize>, safety: Content, reached: usize },
}

/// The daemon has ended.
struct Ended;

struct World {
    random: Random,
    mistake: Mistake,
    /// Faults are over.
    is_calm: bool,
    now: Content,
    /// Every state while work was admitted.
    moments: Vec<Content>,
    suspended: [bool; MEMBERS],
    freezes: Vec<Frozen>,
    /// Visible checkpoints of the kernel.
    checkpoints: Vec<u64>,
    pairings: Vec<Pairing>,
    intent: Option<Intent>,
    /// Whether the catalog says that the kernel is paused.
    paused: bool,
    /// The freeze without whose seal it must be.
    armed: Option<u64>,
    next: u64,
}

fn pairing(content: Content) -> Pairing {
    Pairing {
        database: "data".into(),
        revision: SchemaRevision { user_version: content[DATA].cast_signed(), schema: String::new() },
        repository: "code".into(),
        commit: format!("{:040x}", content[CODE]).parse().expect("a commit id"),
    }
}

impl World {
    fn new(seed: u64, mistake: Mistake) -> World {
        let (now, freezes) = ([1, 1, 1], Vec::new());
        World {
            random: Random(seed),
            mistake,
            is_calm: false,
            now,
            moments: vec![now],
            suspended: [false; MEMBERS],
            freezes,
            checkpoints: Vec::new(),
            pairings: Vec::new(),
            intent: None,
            paused: false,
            armed: None,
            next: 1,
        }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Work between operations: the code goes on, and migrates the data.
    fn work(&mut self) {
        for _ in 0..self.random.below(4) {
            match self.random.below(3) {
                0 => self.now[KERNEL] = self.number(),
                1 => self.now[CODE] = self.number(),
                _ => self.now[DATA] = self.now[CODE],
            }
            self.moments.push(self.now);
        }
    }

    /// Work during a freeze: what is not suspended goes on, and nothing stops the user's editor and programs.
    fn meanwhile(&mut self) {
        if self.random.one_in(12) && !self.suspended[KERNEL] {
            self.now[KERNEL] = self.number();
            self.moments.push(self.now);
        }
        if self.random.one_in(25) {
            self.now[CODE] = self.number();
            self.moments.push(self.now);
        }
        if self.random.one_in(25) {
            self.now[DATA] = self.now[CODE];
            self.moments.push(self.now);
        }
    }

    fn ends(&mut self) -> Result<(), Ended> {
        if !self.is_calm && self.random.one_in(40) { Err(Ended) } else { Ok(()) }
    }

    /// The reply to an action, perhaps with a fault. `act`: carries it out. `lasting`: the driver repeats it until it works.
    fn faulty(&mut self, lasting: bool, act: impl FnOnce(&mut World) -> Result<Reply, Ended>) -> Result<Reply, Ended> {
        self.ends()?;
        let fault = if self.is_calm { 99 } else { self.random.below(30) };
        let reply = match fault {
            0 if !lasting => Reply::Failed("no".into()),
            1 => act(self).map(|_| Reply::Late)?,
            _ => act(self)?,
        };
        self.ends()?;
        Ok(reply)
    }

    fn freeze(&mut self) -> Result<(), Ended> {
        let on_failure = if self.random.one_in(2) { OnFailure::Pause } else { OnFailure::Resume };
        let mut machine = Capture::new(MEMBERS, on_failure);
        let checkpoint = self.number();
        let mut taken = Frozen {
            reported: [0; MEMBERS],
            pinned: [0; MEMBERS],
            stored: [false; MEMBERS],
            partial: false,
            checkpoint,
        };
        while machine.next() != capture::Action::End {
            let action = machine.next();
            self.meanwhile();
            let is_row = matches!(action, capture::Action::Seal | capture::Action::Withdraw);
            let reply = match is_row {
                // One transaction: its reply and its effect are the same. A withdrawal is repeated until it works.
                true => {
                    self.ends()?;
                    self.captured(action, &mut taken)
                }
                false => {
                    let lasting = matches!(action, capture::Action::Resume(_) | capture::Action::Pause(_));
                    self.faulty(lasting, |world| Ok(world.captured(action, &mut taken)))?
                }
            };
            machine.reply(reply);
        }
        Ok(())
    }

    fn captured(&mut self, action: capture::Action, taken: &mut Frozen) -> Reply {
        use capture::Action;
        let pauses = self.armed == Some(taken.checkpoint);
        match action {
            Action::Arm => {
                self.armed = Some(taken.checkpoint);
                self.intent = Some(Intent::Freeze { checkpoint: taken.checkpoint, pauses: true });
            }
            Action::Suspend(at) => self.suspended[at] = true,
            Action::Resume(at) => self.suspended[at] = false,
            // Data goes on.
            Action::Pause(at) => self.suspended[at] = at == KERNEL,
            Action::Lock(at) => return Reply::At(self.now[at].to_string()),
            Action::Snapshot(at) => {
                // Not one step: the content may be a later one than the revision.
                taken.reported[at] = self.now[at];
                self.meanwhile();
                taken.pinned[at] = self.now[at];
                return Reply::At(taken.reported[at].to_string());
            }
            Action::Confirm(at) => {
                let honest = self.mistake != Mistake::NoConfirmation;
                return Reply::At(if honest { self.now[at] } else { taken.reported[at] }.to_string());
            }
            Action::Intent => {
                self.intent = Some(Intent::Freeze { checkpoint: taken.checkpoint, pauses });
                if self.mistake == Mistake::SealFirst {
                    self.seal(taken);
                }
            }
            Action::Store(at) => {
                taken.stored[at] = true;
                if at == KERNEL {
                    self.checkpoints.push(taken.checkpoint);
                }
            }
            Action::Seal => self.seal(taken),
            Action::Withdraw => {
                self.checkpoints.retain(|one| *one != taken.checkpoint);
                self.intent = None;
                self.paused |= self.suspended[KERNEL];
            }
            Action::End => {}
        }
        Reply::Done
    }

    fn seal(&mut self, taken: &Frozen) {
        self.freezes.retain(|one| one.checkpoint != taken.checkpoint);
        self.freezes.push(taken.clone());
        self.pairings.push(pairing(taken.pinned));
        if self.mistake != Mistake::SealFirst {
            self.intent = None;
        }
    }

    /// A restore of some members.
    fn restore(&mut self) -> Result<(), Ended> {
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
        let machine = Restore::new(members.len(), 0);
        self.drive(machine, &members, target, None)
    }

    fn drive(
        &mut self,
        mut machine: Restore,
        members: &[usize],
        target: Content,
        safety: Option<Content>,
    ) -> Result<(), Ended> {
        use restore::Action;
        let safety = safety.unwrap_or(self.now);
        while machine.next() != Action::End {
            let action = machine.next();
            let last = action == Action::Switch(members.len() - 1);
            if last && self.mistake == Mistake::CommitFirst {
                self.intent = None;
                self.ends()?;
            }
            let reply = match action {
                // One transaction.
                Action::Commit | Action::Clear => {
                    self.ends()?;
                    self.intent = None;
                    self.ends()?;
                    Reply::Done
                }
                Action::Gate => {
                    let done = self.gate(members, target);
                    if done { Reply::Done } else { Reply::Failed("data is newer".into()) }
                }
                action => {
                    let lasting = matches!(action, Action::Resume(_));
                    self.faulty(lasting, |world| world.restored(action, members, target, safety))?
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

    fn gate(&self, members: &[usize], target: Content) -> bool {
        let mut would_be = self.now;
        members.iter().for_each(|at| would_be[*at] = target[*at]);
        let recorded = [self.pairings.clone(), vec![pairing(self.now)]].concat();
        let is_ancestor = |_: &str, a: &super::refs::CommitId, b: &super::refs::CommitId| a.as_str() <= b.as_str();
        self.mistake == Mistake::NoGate || gate::check(&[pairing(would_be)], &recorded, is_ancestor).is_ok()
    }

    fn restored(
        &mut self,
        action: restore::Action,
        members: &[usize],
        target: Content,
        safety: Content,
    ) -> Result<Reply, Ended> {
        use restore::Action;
        match action {
            Action::Suspend(at) => self.suspended[members[at]] = true,
            Action::Resume(at) => self.suspended[members[at]] = false,
            Action::Safety => {
                let checkpoint = self.number();
                if members.contains(&KERNEL) {
                    self.checkpoints.push(checkpoint);
                }
                self.freezes.push(Frozen {
                    reported: self.now,
                    pinned: self.now,
                    stored: [true; MEMBERS],
                    partial: true,
                    checkpoint,
                });
            }
            Action::Intent => {
                self.intent = Some(Intent::Restore { members: members.to_vec(), safety, reached: 0 });
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
                self.now[members[at]] = target[members[at]];
                self.ends()?;
                reach(self);
            }
            Action::Revert(at) if self.mistake != Mistake::RevertSkips || at > 0 => {
                self.now[members[at]] = safety[members[at]];
            }
            _ => {}
        }
        Ok(Reply::Done)
    }

    /// A new daemon ends what the former one, or a failed restore, left. It may end itself.
    fn recover(&mut self, is_new: bool) -> Result<(), Ended> {
        if is_new {
            self.suspended = [self.paused, false, false];
        }
        match self.intent.clone() {
            Some(Intent::Freeze { checkpoint, pauses }) => {
                self.ends()?;
                if self.mistake != Mistake::NoWithdrawal {
                    self.checkpoints.retain(|one| *one != checkpoint);
                }
                self.intent = None;
                if pauses && self.mistake != Mistake::NoPause {
                    (self.paused, self.suspended[KERNEL]) = (true, true);
                }
                Ok(())
            }
            Some(Intent::Restore { members, safety, reached }) => {
                // Until the end, nothing runs.
                members.iter().for_each(|at| self.suspended[*at] = true);
                self.drive(Restore::recovery(members.len(), reached), &members, self.now, Some(safety))
            }
            None => Ok(()),
        }
    }

    /// Checks that a freeze left the kernel as configured; a client resumes it then.
    fn resume(&mut self) -> Result<(), String> {
        if let Some(armed) = self.armed.take() {
            let is_sealed = self.freezes.iter().any(|one| one.checkpoint == armed);
            if is_sealed == self.paused || is_sealed == self.suspended[KERNEL] {
                return Err(format!("sealed: {is_sealed}, paused: {}", self.paused));
            }
        }
        if std::mem::take(&mut self.paused) {
            self.suspended[KERNEL] = false;
        }
        Ok(())
    }

    /// What must hold whenever work is admitted.
    fn check(&self, before: Content) -> Result<(), String> {
        if let Some(Intent::Restore { members, .. }) = &self.intent {
            let admitted = members.iter().find(|at| !self.suspended[**at]);
            return admitted.map_or(Ok(()), |at| Err(format!("member {at} works between two states")));
        }
        for one in &self.freezes {
            if one.stored != [true; MEMBERS] {
                return Err(format!("a freeze is visible and not whole: {one:?}"));
            }
            if !one.partial && !self.moments.contains(&one.pinned) {
                return Err(format!("a freeze is of no moment: {one:?}"));
            }
        }
        let unsealed = self.checkpoints.iter().find(|id| !self.freezes.iter().any(|one| one.checkpoint == **id));
        if let Some(id) = unsealed {
            return Err(format!("checkpoint {id} belongs to no freeze"));
        }
        if self.now[DATA] > self.now[CODE] {
            return Err(format!("newer data under older code: {:?}", self.now));
        }
        let is_target = |members: &[usize]| {
            self.freezes.iter().any(|one| {
                (0..MEMBERS).all(|at| self.now[at] == if members.contains(&at) { one.pinned[at] } else { before[at] })
            })
        };
        match self.now == before || [&[CODE][..], &[DATA], &[KERNEL, CODE, DATA]].into_iter().any(is_target) {
            true => Ok(()),
            false => Err(format!("half a restore: {:?}, before {before:?}", self.now)),
        }
    }
}

/// Runs one seed; an error is a broken rule.
fn run(seed: u64, mistake: Mistake) -> Result<(usize, usize), String> {
    let mut world = World::new(seed, mistake);
    let (mut restores, mut ends) = (0, 0);
    for round in 0..30 {
        world.is_calm = round >= 25;
        world.work();
        let mut before = world.now;
        let is_freeze = world.random.one_in(2);
        let mut done = if is_freeze { world.freeze() } else { world.restore() };
        // A freeze lets work go on.
        if is_freeze {
            before = world.now;
        }
        restores += usize::from(!is_freeze && done.is_ok());
        loop {
            ends += usize::from(done.is_err());
            if done.is_ok() {
                world.check(before).map_err(|why| format!("seed {seed}, round {round}: {why}"))?;
                if world.intent.is_none() {
                    break;
                }
            }
            done = world.recover(done.is_err());
        }
        world.resume().map_err(|why| format!("seed {seed}, round {round}: {why}"))?;
        if world.suspended != [false; MEMBERS] {
            return Err(format!("seed {seed}, round {round}: a member stays suspended"));
        }
        world.moments.push(world.now);
    }
    Ok((restores, ends))
}

#[test]
fn groups_survive_random_faults() {
    let (mut restores, mut ends) = (0, 0);
    for seed in 0..1500 {
        let (done, ended) = run(seed, Mistake::None).unwrap_or_else(|why| panic!("{why}"));
        (restores, ends) = (restores + done, ends + ended);
    }
    assert!(restores > 1000 && ends > 1000, "{restores} restores, {ends} ends of the daemon");
}

#[test]
fn every_mistake_is_found() {
    for mistake in [
        Mistake::NoConfirmation,
        Mistake::SealFirst,
        Mistake::NoWithdrawal,
        Mistake::NoPause,
        Mistake::NoGate,
        Mistake::ReachedLate,
        Mistake::CommitFirst,
        Mistake::RevertSkips,
        Mistake::ResumeUnfinished,
    ] {
        assert!((0..1500).any(|seed| run(seed, mistake).is_err()), "{mistake:?} was not found");
    }
}
