//! A group under random freezes, restores, faults and ends of the daemon, driven from a seed through the machines and the
//! gate.
//!
//! Whenever work is admitted: every visible freeze is whole and of one moment, every visible checkpoint belongs to one, the
//! members are all before or all after a restore, what it replaced is in a freeze, and no data is under older code. A second
//! group has the kernel and the data, too. Editors, git and running code change members also during a restore, each as is
//! legal without the restore. Each [`Mistake`] breaks one rule of the driver and must be found. Not modelled: changes of a
//! member after its switch.

use super::SchemaRevision;
use super::capture::{self, Capture, Reply};
use super::gate::Pairing;
use super::on_failure::OnFailure;
use super::restore::Restore;

mod restores;

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
    /// Members that are not restored are judged before the first change only.
    JudgeOnce,
    /// A schema that appears during a restore belongs to no code.
    LateSchemaUnknown,
    /// A member is replaced whatever another program has made of it.
    SwitchBlindly,
    /// Another group freezes members that an unfinished restore may have changed.
    SharedUnfinished,
    /// The end of another group's operation admits work in them.
    SharedAdmission,
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
    /// What would be there without the restore under way.
    before: Content,
    /// The code that runs.
    loaded: u64,
    /// Every state while work was admitted.
    moments: Vec<Content>,
    /// The kernel and the data in the freezes of the other group.
    others: Vec<[u64; 2]>,
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
            before: now,
            loaded: 1,
            moments: vec![now],
            others: Vec::new(),
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

    /// The other group freezes, or ends a freeze that had failed. A restore that has not ended refuses the first, and keeps
    /// the kernel from work after the second.
    fn other_group(&mut self) {
        let is_half = matches!(self.intent, Some(Intent::Restore { .. }));
        match self.random.below(4) {
            0 if !is_half || self.mistake == Mistake::SharedUnfinished => {
                self.others.push([self.now[KERNEL], self.now[DATA]]);
            }
            1 if is_half && self.mistake == Mistake::SharedAdmission => self.suspended[KERNEL] = false,
            _ => {}
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
                // A new attempt releases what a failed one held. Until the end, nothing runs in what it changes.
                self.suspended = [self.paused, false, false];
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
    fn check(&self) -> Result<(), String> {
        let before = self.before;
        let is_moment = |[kernel, data]: &[u64; 2]| {
            self.moments.iter().chain([&self.now]).any(|one| (one[KERNEL], one[DATA]) == (*kernel, *data))
        };
        if let Some(one) = self.others.iter().find(|one| !is_moment(one)) {
            return Err(format!("a freeze of the other group is of no moment: {one:?}"));
        }
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
        let is_held =
            |at: usize| self.now[at] == before[at] || self.freezes.iter().any(|one| one.pinned[at] == before[at]);
        if let Some(at) = (0..MEMBERS).find(|at| !is_held(*at)) {
            return Err(format!("what was written to member {at} is lost: {before:?}, now {:?}", self.now));
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
        world.before = world.now;
        let is_freeze = world.random.one_in(2);
        let mut done = if is_freeze { world.freeze() } else { world.restore() };
        // A freeze lets work go on.
        if is_freeze {
            world.before = world.now;
        }
        restores += usize::from(!is_freeze && done.is_ok());
        loop {
            ends += usize::from(done.is_err());
            if done.is_ok() {
                world.other_group();
                world.check().map_err(|why| format!("seed {seed}, round {round}: {why}"))?;
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
        Mistake::JudgeOnce,
        Mistake::LateSchemaUnknown,
        Mistake::SwitchBlindly,
        Mistake::SharedUnfinished,
        Mistake::SharedAdmission,
    ] {
        assert!((0..1500).any(|seed| run(seed, mistake).is_err()), "{mistake:?} was not found");
    }
}
