//! Simulates days of a pool from a seed: single, regular, burst and storm requests; creations that
//! take time, fail for a while or hang; dying slots; a host that is full or short of memory. Each
//! plan is checked. Processes and virtual machines differ in their rules and in how long things
//! take.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet, VecDeque};

use super::world::{Planner, World};
use super::*;

const SECOND_MS: u64 = 1_000;
const MINUTE_MS: u64 = 60 * SECOND_MS;
const HOUR_MS: u64 = 60 * MINUTE_MS;
/// Workers that fit on the host.
const ROOM: u32 = 120;
/// How long a request waits.
const WAIT_MS: u64 = 30 * SECOND_MS;

/// How long things take, milliseconds.
#[derive(Debug, Clone, Copy)]
struct Pace {
    /// The creation of a slot, least and most.
    creation: (u64, u64),
    /// One creation in that many takes another time: a machine that boots, since there is no template.
    slow: Option<(u64, (u64, u64))>,
    /// One creation in that many never ends.
    hangs: u64,
    /// The end of a slot.
    end: (u64, u64),
    /// The mean time between requests under regular load, in bursts, and in a storm.
    gaps: [u64; 3],
}

const PROCESSES: Pace = Pace {
    creation: (20, 200),
    slow: None,
    hangs: 500,
    end: (5, 50),
    gaps: [12 * SECOND_MS, MINUTE_MS, SECOND_MS / 5],
};

/// As measured with software emulation: restores take seconds, and boots tens of seconds. A host without KVM has fewer
/// requests, too.
const MACHINES: Pace = Pace {
    creation: (1_500, 9_000),
    slow: Some((60, (15 * SECOND_MS, 120 * SECOND_MS))),
    hangs: 500,
    end: (50, 500),
    gaps: [40 * SECOND_MS, 3 * MINUTE_MS, 2 * SECOND_MS],
};

/// Marsaglia's xorshift64; the same seed yields the same days.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn within(&mut self, least: u64, most: u64) -> u64 {
        least + self.next() % (most - least + 1)
    }

    fn one_in(&mut self, many: u64) -> bool {
        self.next().is_multiple_of(many)
    }

    /// An exponentially distributed gap with this mean, as between independent events.
    fn gap(&mut self, mean_ms: u64) -> u64 {
        let uniform = ((self.next() >> 11) as f64 + 1.0) / (1u64 << 53) as f64;
        (-uniform.ln() * mean_ms as f64) as u64
    }
}

/// The pattern in which requests arrive for some time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Load {
    Nobody,
    NowAndThen,
    Regularly,
    InBursts,
    Storm,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Happens {
    LoadTurns,
    SomeCome { load: u64 },
    KernelWanted,
    WaitingEnds,
    CreationEnds { slot: SlotId },
    SlotsAreGone,
    KernelEnds { slot: SlotId },
    SlotDies,
    SlotRuns,
    FailuresBegin,
    FailuresEnd,
    PressureTurns,
    Look,
}

struct Days {
    world: World,
    pace: Pace,
    random: Random,
    /// Scheduled events: time, order among those of the same time, event.
    ahead: BinaryHeap<Reverse<(u64, u64, Happens)>>,
    reported: u64,
    load: Load,
    /// Number of load changes; arrivals scheduled under an earlier load are dropped.
    loads: u64,
    /// Arrival times of the waiting requests.
    waiting: VecDeque<u64>,
    /// The newest slot whose creation has a scheduled end.
    newest: u64,
    failing: bool,
    episodes: u64,
    /// The last time at which failures, pressure or a full host were in effect.
    wrong_ms: u64,
    look_ms: u64,
    /// The reasons for which slots were destroyed.
    whys: HashSet<Why>,
    /// Requests more than ten minutes after the last fault, and those of them that found a slot.
    fair: (u64, u64),
    came: u64,
}

fn days((rules, pace, planner): (Rules, Pace, Planner), seed: u64, hours: u64) -> Days {
    let mut world = World::new(rules, HOUR_MS);
    (world.room, world.planner) = (ROOM, planner);
    let mut days = Days {
        world,
        pace,
        random: Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1),
        ahead: BinaryHeap::new(),
        reported: 0,
        load: Load::Regularly,
        loads: 0,
        waiting: VecDeque::new(),
        newest: 0,
        failing: false,
        episodes: 0,
        wrong_ms: 0,
        look_ms: 0,
        whys: HashSet::new(),
        fair: (0, 0),
        came: 0,
    };
    for (after_ms, what) in [
        (0, Happens::Look),
        (SECOND_MS, Happens::LoadTurns),
        (2 * HOUR_MS, Happens::FailuresBegin),
        (3 * HOUR_MS, Happens::PressureTurns),
        (10 * MINUTE_MS, Happens::SlotDies),
        (MINUTE_MS, Happens::SlotRuns),
    ] {
        days.tell(after_ms, what);
    }
    let end_ms = days.world.now_ms + hours * HOUR_MS;
    while let Some(Reverse((at_ms, _, what))) = days.ahead.pop() {
        if at_ms > end_ms {
            break;
        }
        days.world.now_ms = at_ms;
        if days.happens(what) {
            days.plan();
        }
    }
    days
}

impl Days {
    fn tell(&mut self, after_ms: u64, what: Happens) {
        self.reported += 1;
        self.ahead.push(Reverse((self.world.now_ms + after_ms, self.reported, what)));
    }

    /// Acts as the pool's driver: performs the plan and schedules the next one.
    fn plan(&mut self) {
        let plan = self.world.step();
        self.whys.extend(plan.actions.iter().filter_map(|action| match action {
            Action::Create => None,
            Action::Destroy { why, .. } => Some(*why),
        }));
        for number in self.newest + 1..=self.world.last {
            let takes_ms = self.creation_ms();
            self.tell(takes_ms, Happens::CreationEnds { slot: SlotId(number) });
        }
        self.newest = self.world.last;
        if plan.actions.iter().any(|action| *action != Action::Create) {
            let takes_ms = self.random.within(self.pace.end.0, self.pace.end.1);
            self.tell(takes_ms, Happens::SlotsAreGone);
        }
        if let Some(at_ms) = plan.look_again_at_ms
            && (self.look_ms <= self.world.now_ms || at_ms < self.look_ms)
        {
            self.look_ms = at_ms;
            self.tell(at_ms - self.world.now_ms, Happens::Look);
        }
        self.is_sound();
    }

    fn creation_ms(&mut self) -> u64 {
        let Pace { creation, slow, hangs, .. } = self.pace;
        if self.random.one_in(hangs) {
            return 10 * MINUTE_MS;
        }
        let (least, most) = match slow {
            Some((many, slow)) if self.random.one_in(many) => slow,
            Some(_) | None => creation,
        };
        self.random.within(least, most)
    }

    fn is_sound(&self) {
        let (idle, creating) = (self.world.idle().count(), self.world.creating().count());
        assert!(idle + creating <= self.world.rules.max_pool_size as usize, "{:#?}", self.world);
        let Counters { total_created, total_destroyed, .. } = self.world.counters;
        assert_eq!(total_created - total_destroyed, (idle + self.world.given.len()) as u64, "a slot was lost");
        assert_eq!(self.world.room as usize + self.world.slots.len() + self.world.given.len(), ROOM as usize);
    }

    /// Applies an event; returns whether it requires a new plan.
    fn happens(&mut self, what: Happens) -> bool {
        let given = self.world.given.len();
        match what {
            Happens::LoadTurns => self.load_turns(),
            Happens::SomeCome { load } => {
                if load == self.loads {
                    self.some_come();
                }
                return false;
            }
            Happens::KernelWanted => self.kernel_wanted(),
            Happens::WaitingEnds => {
                while self.waiting.front().is_some_and(|since_ms| self.world.now_ms - since_ms >= WAIT_MS) {
                    self.waiting.pop_front();
                    self.world.give_up_waiting();
                }
            }
            Happens::CreationEnds { slot } => {
                if !self.world.creating().any(|id| id == slot) {
                    // The pool abandoned this creation.
                    return false;
                }
                if self.failing && !self.random.one_in(10) { self.world.fail(slot) } else { self.world.succeed(slot) }
            }
            Happens::SlotsAreGone => self.world.end_leaving(),
            Happens::KernelEnds { slot } => self.world.end_kernel(slot),
            Happens::SlotDies => {
                if let Some(id) = self.world.idle().last() {
                    self.world.die(id);
                }
                let after_ms = self.random.gap(2 * HOUR_MS);
                self.tell(after_ms, Happens::SlotDies);
            }
            Happens::SlotRuns => {
                let counters = &mut self.world.counters;
                for slot in self.world.slots.iter_mut().filter(|slot| matches!(slot.state, SlotState::Idle { .. })) {
                    slot.executions += 1;
                    counters.apply(Event::Executed);
                }
                self.tell(MINUTE_MS, Happens::SlotRuns);
            }
            Happens::FailuresBegin => {
                (self.failing, self.episodes) = (true, self.episodes + 1);
                let lasts_ms = self.random.within(SECOND_MS, 10 * MINUTE_MS);
                self.tell(lasts_ms, Happens::FailuresEnd);
            }
            Happens::FailuresEnd => {
                self.failing = false;
                let after_ms = self.random.gap(6 * HOUR_MS);
                self.tell(after_ms, Happens::FailuresBegin);
            }
            Happens::PressureTurns => {
                self.world.pressure = !self.world.pressure;
                let mean_ms = if self.world.pressure { 3 * MINUTE_MS } else { 8 * HOUR_MS };
                let after_ms = self.random.gap(mean_ms);
                self.tell(after_ms, Happens::PressureTurns);
            }
            Happens::Look => {}
        }
        // Requests are served in order of arrival.
        while self.waiting.len() > self.world.waiting as usize {
            self.waiting.pop_front();
        }
        if self.failing || self.world.pressure || self.world.room == 0 {
            self.wrong_ms = self.world.now_ms;
        }
        for at in given..self.world.given.len() {
            let slot = self.world.given[at];
            let lives_ms = self.random.gap(40 * SECOND_MS);
            self.tell(lives_ms, Happens::KernelEnds { slot });
        }
        true
    }

    fn load_turns(&mut self) {
        self.loads += 1;
        let (load, lasts_ms) = match self.random.within(0, 9) {
            0 | 1 => (Load::Nobody, self.random.within(5, 120) * MINUTE_MS),
            2 | 3 => (Load::NowAndThen, self.random.within(30, 180) * MINUTE_MS),
            4..=6 => (Load::Regularly, self.random.within(10, 60) * MINUTE_MS),
            7 | 8 => (Load::InBursts, self.random.within(10, 60) * MINUTE_MS),
            _ => (Load::Storm, self.random.within(5, 40) * SECOND_MS),
        };
        self.load = load;
        self.next_come();
        self.tell(lasts_ms, Happens::LoadTurns);
    }

    fn mean_ms(&self) -> Option<u64> {
        match self.load {
            Load::Nobody => None,
            Load::NowAndThen => Some(10 * MINUTE_MS),
            Load::Regularly => Some(self.pace.gaps[0]),
            Load::InBursts => Some(self.pace.gaps[1]),
            Load::Storm => Some(self.pace.gaps[2]),
        }
    }

    fn next_come(&mut self) {
        if let Some(mean_ms) = self.mean_ms() {
            let after_ms = self.random.gap(mean_ms);
            self.tell(after_ms, Happens::SomeCome { load: self.loads });
        }
    }

    fn some_come(&mut self) {
        let many = if self.load == Load::InBursts { self.random.within(2, 9) } else { 1 };
        for _ in 0..many {
            let within_ms = self.random.within(0, SECOND_MS / 10);
            self.tell(within_ms, Happens::KernelWanted);
        }
        self.next_come();
    }

    fn kernel_wanted(&mut self) {
        let is_fair = self.world.now_ms - self.wrong_ms > 10 * MINUTE_MS;
        let found = self.world.come();
        self.came += 1;
        if is_fair {
            self.fair.0 += 1;
            self.fair.1 += u64::from(found);
        }
        if !found {
            self.waiting.push_back(self.world.now_ms);
            self.tell(WAIT_MS, Happens::WaitingEnds);
        }
    }
}

/// What a run must show.
struct Bounds {
    /// Requests in fault-free times that find a slot at once, of a thousand.
    found_least: u64,
    /// Slots created for a thousand grants.
    created_most: u64,
    /// Requests, at least.
    came_least: u64,
}

/// Runs three days from each seed, then a stop.
fn hold(setup: (Rules, Pace, Planner), seeds: [u64; 2], bounds: &Bounds, whys: &[Why]) {
    let Bounds { found_least, created_most, came_least } = *bounds;
    for seed in seeds {
        let mut days = days(setup, seed, 72);
        let Counters { total_created, taken, missed, refused, creation_errors, .. } = days.world.counters;
        assert!(
            days.came > came_least && days.fair.0 > days.came / 2 && days.episodes > 3,
            "seed {seed}: too few requests or faults"
        );
        let found = days.fair.1 * 1_000 / days.fair.0;
        assert!(found >= found_least, "seed {seed}: {found} of 1000 requests found a slot");
        let created = total_created * 1_000 / taken;
        assert!(created <= created_most, "seed {seed}: {created} slots created for 1000 grants");
        assert!(creation_errors <= 30 * days.episodes, "seed {seed}: {creation_errors} in {} episodes", days.episodes);
        assert_eq!(taken + refused + u64::from(days.world.waiting), days.came, "seed {seed}: a request was lost");
        assert!(missed >= refused, "seed {seed}");
        for why in [Why::Surplus, Why::Pressure, Why::Stuck].iter().chain(whys) {
            assert!(days.whys.contains(why), "seed {seed}: no slot was {}", why.name());
        }
        days.world.paused = true;
        days.world.step();
        assert_eq!(days.world.idle().count(), 0, "seed {seed}");
    }
}

#[test]
fn days_with_default_rules() {
    let bounds = Bounds { found_least: 960, created_most: 1_100, came_least: 5_000 };
    hold((Rules::default(), PROCESSES, plan), [1, 2], &bounds, &[Why::Old, Why::Unused]);
}

#[test]
fn days_with_worn_slots() {
    let rules = Rules { min_idle: 0, pool_size: 1, max_pool_size: 4, max_exec_count: 4, ..Rules::default() };
    let bounds = Bounds { found_least: 820, created_most: 1_100, came_least: 5_000 };
    hold((rules, PROCESSES, plan), [3, 4], &bounds, &[Why::Worn]);
}

const VM: Costs = Costs::of(Isolation::Microvm);

#[test]
fn days_with_machines() {
    let bounds = Bounds { found_least: 830, created_most: 1_250, came_least: 2_000 };
    hold((VM.rules(Rules::default()), MACHINES, plan), [5, 6], &bounds, &[Why::Old, Why::Unused]);
}

#[test]
fn days_with_machines_on_demand() {
    let bounds = Bounds { found_least: 740, created_most: 1_320, came_least: 2_000 };
    hold((VM.rules_on_demand(Rules::default()), MACHINES, plan), [7, 8], &bounds, &[Why::Unused]);
}

/// A mistake: a creation gets the time of a process.
fn hasty(view: &View<'_>, now_ms: u64) -> Plan {
    let rules = Rules { creation_ms: Costs::of(Isolation::Process).rules(*view.rules).creation_ms, ..*view.rules };
    plan(&View { rules: &rules, ..*view }, now_ms)
}

#[test]
#[should_panic(expected = "Stuck in View")]
fn hasty_end_of_creations_is_found() {
    days((VM.rules(Rules::default()), MACHINES, hasty), 5, 72);
}
