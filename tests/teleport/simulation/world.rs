//! The hosts, the order of events, and what clients do.

use std::collections::{BTreeMap, BTreeSet};

use ryokan::core::handover::{Source, SourceEvent};
use ryokan::core::pool::SlotId;

use super::Mistake;
use super::check::{Broken, Rule, broken};
use super::disk::{Handover, Image, Kernel, Name, Place, Row};
use super::host::{Host, Io, Message};
use super::network::{Recorded, Wire};
use super::workers::IDLE_MS;

pub const HOSTS: usize = 3;
pub const KERNELS: Kernel = 3;
/// Events while faults happen.
const EVENTS: u64 = 900;
/// Events within which everything ends once faults have ended.
const CALM: u64 = 6_000;
/// Most milliseconds between two events.
const STEP_MS: usize = 1_500;

macro_rules! counts {
    ($($name:ident)*) => {
        /// What happened in a run.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct Counts { $(pub $name: u64),* }

        impl Counts {
            pub fn add(&mut self, other: &Counts) { $(self.$name += other.$name;)* }

            /// Each with its name.
            pub fn all(&self) -> Vec<(&'static str, u64)> { vec![$((stringify!($name), self.$name)),*] }
        }
    };
}

counts! {
    worked moved stayed returned checkpoints restores suspends freezes group_restores granted adopted recycled
    crashes power_losses failed_syncs failed_reads failed_stops refused timeouts
    lost repeated late corrupted full_disks partitions clock_jumps replays
}

/// SplitMix64.
pub struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, most: usize) -> usize {
        (self.next() % most.max(1) as u64) as usize
    }

    pub fn one_in(&mut self, many: u64) -> bool {
        self.next().is_multiple_of(many)
    }
}

/// One possible event.
#[derive(Debug, Clone, Copy)]
enum Event {
    Work(usize, Kernel),
    Begin(usize, Kernel, usize),
    Checkpoint(usize, Kernel),
    Restore(usize, Kernel),
    Suspend(usize, Kernel, bool),
    /// A kernel joins or leaves its host's group.
    Member(usize, Kernel, bool),
    Freeze(usize),
    RestoreGroup(usize),
    Want(usize, Kernel),
    Plan(usize),
    Started(usize, SlotId),
    Idle(usize, Kernel),
    WorkerDies(usize, Kernel),
    Reap(usize),
    Act(usize, Handover),
    Change(usize, Kernel),
    Group(usize),
    Serve(u32),
    ToTarget(u32),
    ToSource(u32),
    /// An end learns that the other one is closed.
    EndOfTarget(u32),
    EndOfSource(u32),
    Repeat(usize, Handover),
    Break(u32),
    Duplicate(u32),
    Corrupt(u32),
    Replay(usize),
    Cut(usize, usize),
    Heal(usize, usize),
    Full(usize, bool),
    ClockJumps(usize),
    Cancel(usize, Handover),
    Kill(usize),
    LosePower(usize),
    Start(usize),
}

pub struct World {
    pub hosts: Vec<Host>,
    pub wires: BTreeMap<u32, Wire>,
    pub cuts: BTreeSet<(usize, usize)>,
    pub recorded: Vec<Recorded>,
    pub random: Random,
    pub last_wire: u32,
    last_handover: Handover,
    last_freeze: u32,
    pub acknowledged: BTreeMap<Kernel, u64>,
    /// Acknowledged work that no loss of power takes.
    pub durable: BTreeMap<Kernel, u64>,
    /// What was admitted, by kernel and work, and when it was the present state.
    pub states: BTreeMap<(Kernel, u64), Image>,
    pub spans: BTreeMap<(Kernel, u64), (u64, u64)>,
    /// The suspended kernels: host and epoch.
    pub suspended: BTreeMap<Kernel, (usize, u64)>,
    /// The members that a group's restore changes: before and after.
    pub restoring: Vec<Option<Vec<(Kernel, u64, u64)>>>,
    pub tick: u64,
    pub now_ms: u64,
    pub has_faults: bool,
    /// Starts may fail to read records: in few seeds, so that the others stay what they were.
    cannot_read: bool,
    /// Reads, stops, resumptions and arrivals may fail, executions end at their time limit: in few seeds, too.
    pub fails_more: bool,
    /// One event in this many is a fault.
    pub fault_rate: u64,
    /// Whether there is more than moves.
    is_whole: bool,
    pub counts: Counts,
}

/// A crash of one host before one event, and no other fault.
#[derive(Debug, Clone, Copy)]
pub struct Crash {
    pub event: u64,
    pub host: usize,
    pub loses_power: bool,
}

/// Runs a seed; returns what happened, or what did not hold.
pub fn run(seed: u64, mistake: Mistake) -> Result<Counts, Broken> {
    let mut world = World::new(seed, mistake);
    for at in 0..EVENTS {
        world.step().map_err(|error| error.at(at))?;
    }
    world.end()
}

/// Runs a seed with that crash only, within that many events.
pub fn run_with_crash(seed: u64, events: u64, crash: Crash) -> Result<Counts, Broken> {
    let mut world = World::new(seed, Mistake::None);
    world.fault_rate = u64::MAX;
    for at in 0..events {
        if at == crash.event {
            world.happen(if crash.loses_power { Event::LosePower(crash.host) } else { Event::Kill(crash.host) })?;
            world.happen(Event::Start(crash.host))?;
        }
        world.step().map_err(|error| error.at(at))?;
    }
    world.end()
}

impl Broken {
    fn at(self, event: u64) -> Broken {
        Broken { what: format!("event {event}: {}", self.what), ..self }
    }
}

impl World {
    fn new(seed: u64, mistake: Mistake) -> World {
        let mut hosts: Vec<Host> = (0..HOSTS).map(|_| Host::new(mistake)).collect();
        let is_whole = !seed.is_multiple_of(3);
        for kernel in 0..KERNELS {
            // Two of them can be members of one group from the beginning.
            let host = &mut hosts[usize::from(kernel / 2)];
            host.disk.create(Name::Kernel(kernel), 0, Image::default());
            host.disk.change_catalog(|catalog| {
                catalog.kernels.insert(kernel, Place::Here { epoch: 1 });
                if is_whole && kernel < 2 {
                    catalog.group.insert(kernel);
                }
            });
            host.disk.sync();
            host.open.insert(kernel);
        }
        let mut random = Random(seed);
        World {
            hosts,
            wires: BTreeMap::new(),
            cuts: BTreeSet::new(),
            recorded: Vec::new(),
            fault_rate: 8 + random.below(60) as u64,
            random,
            last_wire: 0,
            last_handover: 0,
            last_freeze: 0,
            acknowledged: (0..KERNELS).map(|kernel| (kernel, 0)).collect(),
            durable: (0..KERNELS).map(|kernel| (kernel, 0)).collect(),
            states: BTreeMap::new(),
            spans: BTreeMap::new(),
            suspended: BTreeMap::new(),
            restoring: vec![None; HOSTS],
            tick: 0,
            now_ms: 1_000_000_000,
            has_faults: true,
            cannot_read: seed.is_multiple_of(19),
            fails_more: seed.is_multiple_of(23),
            is_whole,
            counts: Counts::default(),
        }
    }

    /// Ends the faults, and waits for everything to end.
    fn end(mut self) -> Result<Counts, Broken> {
        self.has_faults = false;
        self.cuts.clear();
        for at in 0..HOSTS {
            self.hosts[at].is_full = false;
            if !self.hosts[at].unreadable.is_empty() {
                self.hosts[at].crash();
                self.close_wires_of(at);
            }
            if !self.hosts[at].is_up {
                self.start(at)?;
            }
        }
        for at in 0..CALM {
            if !self.step().map_err(|error| error.at(EVENTS + at))? {
                for host in &self.hosts {
                    self.counts.granted += host.workers.granted;
                    self.counts.adopted += host.workers.adopted;
                    self.counts.recycled += host.workers.recycled;
                }
                return self.ended().map(|()| self.counts);
            }
        }
        let open: Vec<_> = self.hosts.iter().map(|host| (&host.moves, &host.disk.catalog().rows)).collect();
        broken(Rule::Ends, format!("moves do not end: {open:?}"))
    }

    /// One event; `false` if nothing is left to happen.
    fn step(&mut self) -> Result<bool, Broken> {
        self.tick += 1;
        self.now_ms += self.random.below(STEP_MS) as u64;
        let mut events = self.progress();
        if self.has_faults {
            let is_idle = events.is_empty();
            // What matters in a freeze is the work meanwhile.
            let is_grouping = self.hosts.iter().any(|host| host.operation.is_some());
            let clients = if is_grouping {
                2
            } else if self.is_whole {
                3
            } else {
                6
            };
            let others = match () {
                () if self.random.one_in(self.fault_rate) => self.faults(),
                () if is_idle || self.random.one_in(clients) => self.clients(),
                () => Vec::new(),
            };
            if !others.is_empty() {
                events = others;
            }
        }
        if events.is_empty() {
            return Ok(self.has_faults);
        }
        let event = events[self.random.below(events.len())];
        let happened = self.happen(event);
        self.close_ends();
        let checked = happened.and_then(|()| self.check());
        checked.map_err(|error| Broken { what: format!("{event:?}: {}", error.what), ..error })?;
        Ok(true)
    }

    /// What goes on by itself.
    fn progress(&self) -> Vec<Event> {
        let mut events = Vec::new();
        for (at, host) in self.hosts.iter().enumerate().filter(|(_, host)| host.is_up) {
            for (id, moving) in &host.moves {
                match host.is_busy(*id) {
                    true => events.push(Event::Act(at, *id)),
                    false if moving.wire.is_none() => events.push(Event::Repeat(at, *id)),
                    false => {}
                }
            }
            let changes = host.kernels.keys().copied();
            let changes = changes.filter(|one| host.has_change(*one) && host.view().live(*one).is_some());
            events.extend(changes.map(|kernel| Event::Change(at, kernel)));
            if host.operation.is_some() || host.disk.catalog().intent.is_some() {
                events.push(Event::Group(at));
            }
        }
        for (id, wire) in self.wires.iter().filter(|(_, wire)| !self.is_cut(wire.from, wire.to)) {
            let target = &self.hosts[wire.to];
            if wire.target_open && target.has_steps(*id) {
                events.push(Event::Serve(*id));
            } else if wire.target_open {
                match wire.to_target.front() {
                    Some(next) if !target.is_serving(*id, *next) => events.push(Event::ToTarget(*id)),
                    None if !wire.source_open => events.push(Event::EndOfSource(*id)),
                    Some(_) | None => {}
                }
            }
            if wire.source_open && !self.hosts[wire.from].is_busy(wire.handover) {
                match wire.to_source.is_empty() {
                    false => events.push(Event::ToSource(*id)),
                    true if !wire.target_open => events.push(Event::EndOfTarget(*id)),
                    true => {}
                }
            }
        }
        if self.has_faults {
            let down = self.hosts.iter().enumerate().filter(|(_, host)| !host.is_up);
            events.extend(down.map(|(at, _)| Event::Start(at)));
        }
        events
    }

    /// What clients do, and what the daemon does by the clock.
    fn clients(&mut self) -> Vec<Event> {
        let (mut moves, mut work, mut changes) = (Vec::new(), Vec::new(), Vec::new());
        let (mut pool, mut group) = (Vec::new(), Vec::new());
        for (at, host) in self.hosts.iter().enumerate().filter(|(_, host)| host.is_up) {
            for kernel in 0..KERNELS {
                let has_worker = !self.is_whole || host.workers.leases.contains_key(&kernel);
                if host.may_work(kernel) {
                    work.push(if has_worker { Event::Work(at, kernel) } else { Event::Want(at, kernel) });
                    changes.extend([Event::Checkpoint(at, kernel), Event::Restore(at, kernel)]);
                }
                if host.is_usable(kernel) {
                    changes.push(Event::Suspend(at, kernel, !host.disk.content(kernel).is_suspended));
                    group.push(Event::Member(at, kernel, !host.disk.catalog().group.contains(&kernel)));
                }
                if self.may_begin(at, kernel) {
                    moves.extend((0..HOSTS).filter(|to| *to != at).map(|to| Event::Begin(at, kernel, to)));
                }
                if host.is_idle(kernel, self.now_ms) {
                    pool.push(Event::Idle(at, kernel));
                }
                pool.extend(has_worker.then_some(Event::WorkerDies(at, kernel)));
            }
            pool.extend([Event::Plan(at), Event::Plan(at), Event::Reap(at)]);
            pool.extend(host.workers.creating().map(|slot| Event::Started(at, slot)));
            let catalog = host.disk.catalog();
            if host.operation.is_none() && catalog.intent.is_none() && !catalog.group.is_empty() {
                group.extend([Event::Freeze(at), Event::Freeze(at), Event::RestoreGroup(at), Event::RestoreGroup(at)]);
            }
        }
        if !self.is_whole {
            work.append(&mut moves);
            return work;
        }
        if self.hosts.iter().any(|host| host.operation.is_some()) && !self.random.one_in(3) {
            return work;
        }
        let mut kinds = [moves, work.clone(), work, changes, pool.clone(), pool, group];
        let kind = self.random.below(kinds.len());
        std::mem::take(&mut kinds[kind])
    }

    fn faults(&self) -> Vec<Event> {
        let mut events = Vec::new();
        for (at, host) in self.hosts.iter().enumerate().filter(|(_, host)| host.is_up) {
            events.extend(host.moves.keys().map(|id| Event::Cancel(at, *id)));
            events.extend([Event::Kill(at), Event::LosePower(at)]);
        }
        for (id, wire) in &self.wires {
            events.push(Event::Break(*id));
            if matches!(wire.to_target.front(), Some(Message::Commit { .. } | Message::Abort { .. })) {
                events.extend([Event::Duplicate(*id); 4]);
            }
            if !wire.to_target.is_empty() {
                events.push(Event::Corrupt(*id));
            }
        }
        if !self.is_whole {
            return events;
        }
        events.extend((0..HOSTS).map(|at| Event::Full(at, !self.hosts[at].is_full)));
        events.extend((0..HOSTS).map(Event::ClockJumps));
        for (a, b) in [(0, 1), (0, 2), (1, 2)] {
            events.push(if self.is_cut(a, b) { Event::Heal(a, b) } else { Event::Cut(a, b) });
        }
        let old = (0..self.recorded.len()).filter(|one| self.is_old(&self.recorded[*one]));
        events.extend(old.rev().take(3).map(Event::Replay));
        events
    }

    pub(super) fn io(&mut self, at: usize) -> Io {
        let fails = self.has_faults && self.random.one_in(self.fault_rate);
        self.counts.failed_syncs += u64::from(fails);
        let works = Io { syncs: !fails, writes: !self.hosts[at].is_full, ..Io::WORKS };
        match self.has_faults && self.fails_more {
            true => self.more_failures(works),
            false => works,
        }
    }

    fn more_failures(&mut self, io: Io) -> Io {
        let [reads, stops, admits] = std::array::from_fn(|_| !self.random.one_in(5));
        self.counts.failed_reads += u64::from(!reads);
        self.counts.failed_stops += u64::from(!stops);
        self.counts.refused += u64::from(!admits);
        Io { reads, stops, admits, ..io }
    }

    fn happen(&mut self, event: Event) -> Result<(), Broken> {
        match event {
            Event::Work(at, kernel) => return self.work(at, kernel),
            Event::Begin(at, kernel, to) => {
                let Some(epoch) = self.hosts[at].epoch(kernel) else { return Ok(()) };
                self.last_handover += 1;
                self.hosts[at].begin(self.last_handover, kernel, to, epoch + 1);
            }
            Event::Checkpoint(at, kernel) => {
                if self.hosts[at].checkpoint(kernel) {
                    self.counts.checkpoints += 1;
                    self.acknowledge(at, kernel);
                }
            }
            Event::Restore(at, kernel) => {
                let pick = self.random.below(64);
                self.hosts[at].begin_restore(kernel, pick);
            }
            Event::Suspend(at, kernel, is_suspended) => {
                if self.hosts[at].set_suspended(kernel, is_suspended) {
                    self.suspended.remove(&kernel);
                    self.counts.suspends += u64::from(is_suspended);
                    let place = self.hosts[at].epoch(kernel).filter(|_| is_suspended);
                    self.suspended.extend(place.map(|epoch| (kernel, (at, epoch))));
                }
            }
            Event::Member(at, kernel, joins) => self.hosts[at].change_group(kernel, joins),
            Event::Freeze(at) => {
                self.last_freeze += 1;
                self.hosts[at].begin_freeze(self.last_freeze);
            }
            Event::RestoreGroup(at) => {
                let pick = self.random.below(64);
                self.hosts[at].begin_group_restore(pick);
            }
            Event::Want(at, kernel) => drop(self.hosts[at].want_worker(kernel, self.now_ms)),
            Event::Plan(at) => self.hosts[at].plan_pool(self.now_ms),
            Event::Started(at, slot) => {
                let starts = !self.random.one_in(10);
                self.hosts[at].started_worker(slot, starts, self.now_ms);
            }
            Event::Idle(at, kernel) => {
                let used_ms = self.hosts[at].workers.of(kernel).map_or(0, |worker| worker.truly_used_ms);
                self.hosts[at].end_worker(kernel);
                let idle_ms = self.now_ms - used_ms;
                if idle_ms < IDLE_MS {
                    let what = format!("kernel {kernel} on host {at} was stopped after {idle_ms} ms");
                    return broken(Rule::ClockHolds, what);
                }
            }
            Event::WorkerDies(at, kernel) => self.hosts[at].end_worker(kernel),
            Event::Reap(at) => self.hosts[at].reap_workers(),
            Event::Change(at, kernel) => {
                let io = self.io(at);
                if self.hosts[at].step_restore(kernel, io) {
                    self.counts.restores += 1;
                    self.acknowledge(at, kernel);
                }
            }
            Event::Group(at) => return self.step_group(at),
            Event::Act(at, handover) => {
                let io = self.io(at);
                let effects = self.hosts[at].act(handover, io);
                self.apply(at, effects);
            }
            Event::Serve(id) => {
                let at = self.wires[&id].to;
                let io = self.io(at);
                let tombstones = self.tombstones(at);
                let effects = self.hosts[at].serve(id, io);
                self.counts.returned += u64::from(self.tombstones(at) < tombstones);
                self.apply(at, effects);
            }
            Event::ToTarget(id) => self.deliver_to_target(id, false),
            Event::Duplicate(id) => {
                let wire = &self.wires[&id];
                let may = wire.target_open
                    && wire.to_target.front().is_some_and(|next| !self.hosts[wire.to].is_serving(id, *next));
                if may {
                    self.deliver_to_target(id, true);
                }
            }
            Event::ToSource(id) => self.deliver_to_source(id),
            Event::EndOfTarget(id) => {
                let Wire { from, handover, .. } = self.wires[&id];
                self.hosts[from].feed(handover, SourceEvent::Failed);
            }
            Event::EndOfSource(id) => {
                let to = self.wires[&id].to;
                self.hosts[to].lose(id);
                self.wires.remove(&id);
            }
            Event::Repeat(at, handover) => {
                let io = self.io(at);
                if let Some(effects) = self.hosts[at].repeats(handover, io) {
                    self.apply(at, effects);
                }
            }
            Event::Cancel(at, handover) => {
                let decided = self.hosts[at].moves.get(&handover).is_none_or(|moving| {
                    matches!(moving.machine, Source::Departed | Source::Aborting | Source::Moved | Source::Stayed)
                });
                if !decided {
                    self.hosts[at].feed(handover, SourceEvent::Failed);
                }
            }
            Event::Break(id) => self.break_wire(id),
            Event::Corrupt(id) => self.corrupt(id),
            Event::Replay(one) => {
                let one = self.recorded[one].clone();
                self.replay(&one);
            }
            Event::Cut(a, b) => {
                self.counts.partitions += 1;
                self.cuts.insert((a, b));
            }
            Event::Heal(a, b) => drop(self.cuts.remove(&(a, b))),
            Event::Full(at, is_full) => {
                self.counts.full_disks += u64::from(is_full);
                self.hosts[at].is_full = is_full;
            }
            Event::ClockJumps(at) => {
                self.counts.clock_jumps += 1;
                self.hosts[at].clock_offset_ms = self.random.below(7_200_000) as i64 - 3_600_000;
            }
            Event::Kill(at) => {
                self.counts.crashes += 1;
                self.hosts[at].crash();
                self.close_wires_of(at);
            }
            Event::LosePower(at) => self.lose_power(at),
            Event::Start(at) => return self.start(at),
        }
        Ok(())
    }

    /// Starts a daemon. Now and then it cannot read the records of kernels that were moving.
    fn start(&mut self, at: usize) -> Result<(), Broken> {
        let catalog = self.hosts[at].disk.catalog();
        let moving = catalog.rows.values().filter_map(|row| match row {
            Row::Out { kernel, .. } => Some(*kernel),
            Row::In { .. } => None,
        });
        let fails = self.has_faults && self.cannot_read && catalog.intent.is_none() && self.tick.is_multiple_of(2);
        self.hosts[at].unreadable = if fails { moving.collect() } else { Default::default() };
        self.hosts[at].start(self.now_ms);
        self.note_group_restore(at)
    }
}
