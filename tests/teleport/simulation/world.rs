//! The hosts, the connections between them, the order of events, and what must hold.

use std::collections::{BTreeMap, VecDeque};

use ryokan::core::handover::{Source, SourceEvent};

use super::Mistake;
use super::disk::{Handover, Kernel, Name, Place, Row};
use super::host::{Effects, Host, Message};

const HOSTS: usize = 3;
const KERNELS: Kernel = 2;
/// Events while faults happen.
const EVENTS: u64 = 900;
/// Events within which everything ends once faults have ended.
const CALM: u64 = 4_000;

/// What happened in a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    pub worked: u64,
    pub moved: u64,
    pub stayed: u64,
    pub returned: u64,
    pub crashes: u64,
    pub power_losses: u64,
    pub failed_syncs: u64,
    pub lost: u64,
    pub repeated: u64,
    pub late: u64,
}

impl Counts {
    pub fn add(&mut self, other: &Counts) {
        self.worked += other.worked;
        self.moved += other.moved;
        self.stayed += other.stayed;
        self.returned += other.returned;
        self.crashes += other.crashes;
        self.power_losses += other.power_losses;
        self.failed_syncs += other.failed_syncs;
        self.lost += other.lost;
        self.repeated += other.repeated;
        self.late += other.late;
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, most: usize) -> usize {
        (self.next() % most.max(1) as u64) as usize
    }

    fn one_in(&mut self, many: u64) -> bool {
        self.next().is_multiple_of(many)
    }
}

/// A connection: ordered in each direction. Its ends close independently.
#[derive(Debug)]
struct Wire {
    handover: Handover,
    from: usize,
    to: usize,
    to_target: VecDeque<Message>,
    to_source: VecDeque<Message>,
    source_open: bool,
    target_open: bool,
}

/// One possible event.
#[derive(Debug, Clone, Copy)]
enum Event {
    Work(usize, Kernel),
    Begin(usize, Kernel, usize),
    Act(usize, Handover),
    Serve(u32),
    ToTarget(u32),
    ToSource(u32),
    /// An end learns that the other one is closed.
    EndOfTarget(u32),
    EndOfSource(u32),
    Repeat(usize, Handover),
    Break(u32),
    Duplicate(u32),
    Cancel(usize, Handover),
    Kill(usize),
    LosePower(usize),
    Start(usize),
}

struct World {
    hosts: Vec<Host>,
    wires: BTreeMap<u32, Wire>,
    random: Random,
    last_wire: u32,
    last_handover: Handover,
    acknowledged: BTreeMap<Kernel, u64>,
    /// Acknowledged work that no loss of power takes.
    durable: BTreeMap<Kernel, u64>,
    has_faults: bool,
    /// One event in this many is a fault.
    fault_rate: u64,
    counts: Counts,
}

/// Runs a seed; returns what happened, or what did not hold.
pub fn run(seed: u64, mistake: Mistake) -> Result<Counts, String> {
    let mut world = World::new(seed, mistake);
    for at in 0..EVENTS {
        world.step().map_err(|error| format!("event {at}: {error}"))?;
    }
    world.has_faults = false;
    for host in world.hosts.iter_mut().filter(|host| !host.is_up) {
        host.start();
    }
    for at in 0..CALM {
        if !world.step().map_err(|error| format!("calm event {at}: {error}"))? {
            return world.ended().map(|()| world.counts);
        }
    }
    let open: Vec<_> = world.hosts.iter().map(|host| (&host.moves, &host.disk.catalog().rows)).collect();
    Err(format!("moves do not end: {open:?}"))
}

impl World {
    fn new(seed: u64, mistake: Mistake) -> World {
        let mut hosts: Vec<Host> = (0..HOSTS).map(|_| Host::new(mistake)).collect();
        for kernel in 0..KERNELS {
            let host = &mut hosts[usize::from(kernel) % HOSTS];
            host.disk.create(Name::Kernel(kernel), 0);
            host.disk.change_catalog(|catalog| {
                catalog.kernels.insert(kernel, Place::Here { epoch: 1 });
            });
            host.disk.sync();
            host.open.insert(kernel);
        }
        let mut random = Random(seed);
        World {
            hosts,
            wires: BTreeMap::new(),
            fault_rate: 8 + random.below(60) as u64,
            random,
            last_wire: 0,
            last_handover: 0,
            acknowledged: (0..KERNELS).map(|kernel| (kernel, 0)).collect(),
            durable: (0..KERNELS).map(|kernel| (kernel, 0)).collect(),
            has_faults: true,
            counts: Counts::default(),
        }
    }

    /// One event; `false` if nothing is left to happen.
    fn step(&mut self) -> Result<bool, String> {
        let mut events = self.progress();
        if self.has_faults {
            let is_idle = events.is_empty();
            let others = match () {
                () if self.random.one_in(self.fault_rate) => self.faults(),
                () if is_idle || self.random.one_in(6) => self.clients(),
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
        self.happen(event);
        self.close_ends();
        self.check().map_err(|error| format!("{event:?}: {error}"))?;
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
        }
        for (id, wire) in &self.wires {
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
            for (at, _) in self.hosts.iter().enumerate().filter(|(_, host)| !host.is_up) {
                events.push(Event::Start(at));
            }
        }
        events
    }

    /// What clients do.
    fn clients(&self) -> Vec<Event> {
        let mut events = Vec::new();
        for (at, host) in self.hosts.iter().enumerate().filter(|(_, host)| host.is_up) {
            for kernel in (0..KERNELS).filter(|kernel| host.may_work(*kernel)) {
                events.push(Event::Work(at, kernel));
                let may_begin = host
                    .moves
                    .iter()
                    .filter(|(_, moving)| moving.kernel == kernel)
                    .all(|(id, moving)| moving.machine == Source::Aborting && !host.is_busy(*id));
                if may_begin {
                    events.extend((0..HOSTS).filter(|to| *to != at).map(|to| Event::Begin(at, kernel, to)));
                }
            }
        }
        events
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
                events.push(Event::Duplicate(*id));
            }
        }
        events
    }

    fn tombstones(&self, at: usize) -> usize {
        let kernels = &self.hosts[at].disk.catalog().kernels;
        kernels.values().filter(|place| matches!(place, Place::Departed { .. })).count()
    }

    fn syncs(&mut self) -> bool {
        let fails = self.has_faults && self.random.one_in(self.fault_rate);
        self.counts.failed_syncs += u64::from(fails);
        !fails
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Work(at, kernel) => {
                self.hosts[at].disk.change_content(Name::Kernel(kernel), |content| content.work += 1);
                *self.acknowledged.entry(kernel).or_default() += 1;
                self.counts.worked += 1;
            }
            Event::Begin(at, kernel, to) => {
                let Some(Place::Here { epoch }) = self.hosts[at].disk.catalog().kernels.get(&kernel).copied() else {
                    return;
                };
                self.last_handover += 1;
                self.hosts[at].begin(self.last_handover, kernel, to, epoch + 1);
            }
            Event::Act(at, handover) => {
                let syncs = self.syncs();
                let effects = self.hosts[at].act(handover, syncs);
                self.apply(at, effects);
            }
            Event::Serve(id) => {
                let at = self.wires[&id].to;
                let syncs = self.syncs();
                let tombstones = self.tombstones(at);
                let effects = self.hosts[at].serve(id, syncs);
                self.counts.returned += u64::from(self.tombstones(at) < tombstones);
                self.apply(at, effects);
            }
            Event::ToTarget(id) => self.send_to_target(id, false),
            Event::Duplicate(id) => {
                let wire = &self.wires[&id];
                let may = wire.target_open
                    && wire.to_target.front().is_some_and(|next| !self.hosts[wire.to].is_serving(id, *next));
                if may {
                    self.send_to_target(id, true);
                }
            }
            Event::ToSource(id) => {
                let Some(wire) = self.wires.get_mut(&id) else { return };
                let Some(message) = wire.to_source.pop_front() else { return };
                let (at, handover) = (wire.from, wire.handover);
                match message {
                    Message::Live => self.counts.moved += 1,
                    Message::Aborted => self.counts.stayed += 1,
                    _ => {}
                }
                self.hosts[at].answered(handover, message);
            }
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
                let syncs = self.syncs();
                if let Some(effects) = self.hosts[at].repeats(handover, syncs) {
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
            Event::Kill(at) => {
                self.counts.crashes += 1;
                self.end(at);
            }
            Event::LosePower(at) => self.lose_power(at),
            Event::Start(at) => self.hosts[at].start(),
        }
    }

    fn send_to_target(&mut self, id: u32, again: bool) {
        let Some(wire) = self.wires.get_mut(&id) else { return };
        let Some(message) = wire.to_target.front().copied() else { return };
        if again {
            self.counts.repeated += 1;
        } else {
            wire.to_target.pop_front();
        }
        self.counts.late += u64::from(!wire.source_open);
        let to = wire.to;
        let sent = self.hosts[to].receive(id, message);
        self.apply(to, Effects { sent, ..Effects::default() });
    }

    fn apply(&mut self, at: usize, effects: Effects) {
        if effects.synced {
            self.note_durable(at);
        }
        for (id, is_to_target, message) in effects.sent {
            if let Some(wire) = self.wires.get_mut(&id) {
                match is_to_target {
                    true if wire.target_open => wire.to_target.push_back(message),
                    false if wire.source_open => wire.to_source.push_back(message),
                    true | false => self.counts.lost += 1,
                }
            }
        }
        for id in effects.closed {
            if let Some(wire) = self.wires.get_mut(&id) {
                match wire.to == at {
                    true => {
                        wire.target_open = false;
                        wire.to_target.clear();
                        self.hosts[at].lose(id);
                    }
                    false => wire.source_open = false,
                }
            }
        }
        for handover in effects.connect {
            self.connect(at, handover);
        }
    }

    fn connect(&mut self, at: usize, handover: Handover) {
        let Some((to, machine, kernel, epoch)) =
            self.hosts[at].moves.get(&handover).map(|it| (it.to, it.machine, it.kernel, it.epoch))
        else {
            return;
        };
        if !self.hosts[to].is_up || (self.has_faults && self.random.one_in(self.fault_rate)) {
            self.hosts[at].feed(handover, SourceEvent::Failed);
            return;
        }
        self.last_wire += 1;
        let id = self.last_wire;
        let mut to_target = VecDeque::new();
        if machine == Source::Offering {
            to_target.push_back(Message::Offer { handover, kernel, epoch });
        }
        let to_source = VecDeque::new();
        let wire = Wire { handover, from: at, to, to_target, to_source, source_open: true, target_open: true };
        self.wires.insert(id, wire);
        if let Some(moving) = self.hosts[at].moves.get_mut(&handover) {
            moving.wire = Some(id);
        }
        if machine != Source::Offering {
            self.hosts[at].feed(handover, SourceEvent::Reconnected);
        }
    }

    /// A connection ends; of what is under way, a part still arrives.
    fn break_wire(&mut self, id: u32) {
        let Some(wire) = self.wires.get_mut(&id) else { return };
        let (to_target, to_source) = (wire.to_target.len(), wire.to_source.len());
        wire.to_target.truncate(self.random.below(to_target + 1));
        wire.to_source.truncate(self.random.below(to_source + 1));
        self.counts.lost += (to_target - wire.to_target.len() + to_source - wire.to_source.len()) as u64;
        match self.random.below(3) {
            // The source learns it first, the target, or both at once.
            0 => wire.source_open = false,
            1 => {
                wire.target_open = false;
                let to = wire.to;
                self.hosts[to].lose(id);
            }
            _ => {
                (wire.source_open, wire.target_open) = (false, false);
                let to = wire.to;
                self.hosts[to].lose(id);
            }
        }
        let Wire { from, handover, source_open, .. } = self.wires[&id];
        if !source_open && self.hosts[from].moves.get(&handover).is_some_and(|moving| moving.wire == Some(id)) {
            self.hosts[from].feed(handover, SourceEvent::Failed);
        }
    }

    fn end(&mut self, at: usize) {
        self.hosts[at].crash();
        for wire in self.wires.values_mut() {
            if wire.from == at {
                wire.source_open = false;
            }
            if wire.to == at {
                self.counts.lost += wire.to_target.len() as u64;
                wire.target_open = false;
                wire.to_target.clear();
            }
        }
    }

    fn lose_power(&mut self, at: usize) {
        self.counts.power_losses += 1;
        for kernel in 0..KERNELS {
            // Work that reached no device yet may be lost, as in one host alone.
            if self.hosts[at].disk.views().iter().any(|view| view.live(kernel).is_some()) {
                self.acknowledged.insert(kernel, self.durable[&kernel]);
            }
        }
        self.end(at);
        let random = &mut self.random;
        self.hosts[at].disk.lose_power(|count| random.below(count));
        // What a start reads stays.
        self.hosts[at].disk.sync();
    }

    fn note_durable(&mut self, at: usize) {
        for kernel in 0..KERNELS {
            let view = *self.hosts[at].disk.views().last().expect("a state");
            if let Some(copy) = view.own(kernel) {
                let durable = self.durable.entry(kernel).or_default();
                *durable = (*durable).max(copy.work).min(self.acknowledged[&kernel]);
            }
        }
    }

    /// Removes connections without ends, and closes the source's end of those that no move uses.
    fn close_ends(&mut self) {
        for (id, wire) in &mut self.wires {
            let used = self.hosts[wire.from].moves.get(&wire.handover).is_some_and(|moving| moving.wire == Some(*id));
            wire.source_open &= used;
        }
        self.wires.retain(|_, wire| wire.source_open || wire.target_open);
    }

    /// At most one live copy, whatever loses power now; and a copy with all acknowledged work.
    fn check(&self) -> Result<(), String> {
        for kernel in 0..KERNELS {
            let is_live = |host: &Host| host.disk.views().iter().any(|view| view.live(kernel).is_some());
            let live: Vec<usize> = (0..HOSTS).filter(|at| is_live(&self.hosts[*at])).collect();
            if live.len() > 1 {
                return Err(format!("kernel {kernel} lives on hosts {live:?}"));
            }
            let acknowledged = self.acknowledged[&kernel];
            if !self.hosts.iter().any(|host| self.holds(host, kernel, acknowledged)) {
                return Err(format!("no copy of kernel {kernel} has all acknowledged work ({acknowledged})"));
            }
        }
        Ok(())
    }

    /// Whether this host has a copy with that work: the live one, or a prepared one whose source has departed.
    fn holds(&self, host: &Host, kernel: Kernel, work: u64) -> bool {
        let views = host.disk.views();
        let now = views.last().expect("a state");
        if now.live(kernel).is_some_and(|copy| copy.has_files && copy.work >= work) {
            return true;
        }
        now.catalog.rows.iter().any(|(handover, row)| {
            let is_prepared = matches!(row, Row::In { kernel: of, live: false, .. } if *of == kernel);
            let is_committed = self
                .hosts
                .iter()
                .any(|source| source.disk.views().last().is_some_and(|view| view.has_departed(kernel, *handover)));
            // A renamed directory is found by a repeated activation.
            let copy = now.copy(Name::Received(*handover)).or_else(|| now.copy(Name::Kernel(kernel)));
            is_prepared && is_committed && copy.is_some_and(|copy| copy.has_files && copy.work >= work)
        })
    }

    /// Without faults every move has ended, and every kernel can be used.
    fn ended(&self) -> Result<(), String> {
        for (at, host) in self.hosts.iter().enumerate() {
            let is_open = |row: &&Row| !matches!(row, Row::In { live: true, .. });
            if let Some(row) = host.disk.catalog().rows.values().find(is_open) {
                return Err(format!("host {at} waits for ever: {row:?}"));
            }
        }
        for kernel in 0..KERNELS {
            let usable = self.hosts.iter().filter(|host| host.may_work(kernel)).count();
            if usable != 1 {
                return Err(format!("kernel {kernel} can be used on {usable} hosts"));
            }
        }
        Ok(())
    }
}
