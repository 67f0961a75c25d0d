//! Checks every state of small pools and every short sequence of events.

use std::collections::HashSet;
use std::hash::Hash;

use super::world::{self, World};
use super::*;

const NOW_MS: u64 = 1_000_000;
const MAX_IDLE_MS: u64 = 2_000;
const MAX_UPTIME_MS: u64 = 5_000;
const STUCK_MS: u64 = 30_000;

/// All valid rules with at most three slots.
fn all_rules() -> Vec<Rules> {
    let mut all = Vec::new();
    for max_pool_size in 0..=3 {
        for pool_size in 0..=max_pool_size {
            all.extend((0..=pool_size).map(|min_idle| small(min_idle, pool_size, max_pool_size)));
        }
    }
    assert!(all.len() == 20 && all.iter().all(|rules| rules.broken().is_empty()));
    all
}

fn small(min_idle: u32, pool_size: u32, max_pool_size: u32) -> Rules {
    Rules {
        pool_size,
        max_pool_size,
        min_idle,
        max_idle_time_ms: MAX_IDLE_MS,
        max_exec_count: 3,
        max_uptime_ms: MAX_UPTIME_MS,
        maintenance_interval_ms: 1_000,
        creation_ms: STUCK_MS,
    }
}

/// Every kind of slot that a plan distinguishes.
fn kinds() -> Vec<Slot> {
    let idle = |for_ms: u64| Slot {
        id: SlotId(0),
        state: SlotState::Idle { since_ms: NOW_MS - for_ms },
        created_ms: NOW_MS - for_ms,
        executions: 0,
    };
    let creating = |for_ms: u64| Slot { state: SlotState::Creating { since_ms: NOW_MS - for_ms }, ..idle(for_ms) };
    vec![
        creating(100),
        creating(STUCK_MS),
        idle(100),
        idle(MAX_IDLE_MS),
        idle(MAX_UPTIME_MS),
        Slot { executions: 3, ..idle(100) },
        Slot { state: SlotState::Leaving, ..idle(100) },
    ]
}

/// All combinations of at most `most` slots, in the order of `kinds`, which does not affect a plan.
fn all_slots(most: usize) -> Vec<Vec<Slot>> {
    let kinds = kinds();
    let mut all: Vec<(usize, Vec<Slot>)> = vec![(0, Vec::new())];
    let mut at = 0;
    while at < all.len() {
        let (first, slots) = all[at].clone();
        at += 1;
        if slots.len() < most {
            for (kind, slot) in kinds.iter().enumerate().skip(first) {
                let mut more = slots.clone();
                more.push(Slot { id: SlotId(slots.len() as u64 + 1), ..*slot });
                all.push((kind, more));
            }
        }
    }
    all.into_iter().map(|(_, slots)| slots).collect()
}

/// No requests for long; none, but a new pool; a burst of three.
fn demands() -> [Demand; 3] {
    let mut burst = Demand::new(0);
    (0..3).for_each(|_| burst.came(NOW_MS - 500));
    [Demand::new(0), Demand::new(NOW_MS - 100), burst]
}

/// Closed; open; open after its pause.
fn breakers() -> [Breaker; 3] {
    let opened = |at_ms: u64| {
        let mut breaker = Breaker::default();
        (0..3).for_each(|_| breaker.failed("broken", at_ms));
        breaker
    };
    [Breaker::default(), opened(NOW_MS - 100), opened(NOW_MS - 1_000)]
}

fn every_state(slots_most: usize, mut with: impl FnMut(&View<'_>)) {
    let (all_slots, demands, breakers) = (all_slots(slots_most), demands(), breakers());
    for rules in &all_rules() {
        for slots in &all_slots {
            for demand in &demands {
                for breaker in &breakers {
                    for (waiting, room) in [(0, 9), (3, 9), (1, 1), (3, 1), (0, 0), (1, 0)] {
                        let calm =
                            View { rules, slots, waiting, room, pressure: false, paused: false, demand, breaker };
                        with(&calm);
                        // Neither depends on demand, nor a pause on the breaker: one value of each
                        // suffices.
                        if std::ptr::eq(demand, &raw const demands[0]) {
                            with(&View { pressure: true, ..calm });
                            if std::ptr::eq(breaker, &raw const breakers[0]) {
                                with(&View { paused: true, pressure: waiting == 1, ..calm });
                            }
                        }
                    }
                }
            }
        }
    }
}

fn every_plan(keeps_to: impl Fn(&View<'_>, u64, &Plan)) {
    every_state(3, |view| keeps_to(view, NOW_MS, &plan(view, NOW_MS)));
}

#[test]
fn busy_slots_are_never_destroyed() {
    every_plan(world::only_idle_or_stuck_slots_are_destroyed);
}

#[test]
fn never_below_min_idle_by_recycling() {
    every_plan(world::never_below_min_idle_by_recycling);
}

#[test]
fn never_above_max() {
    every_plan(world::never_above_max);
}

#[test]
fn every_reason_is_true() {
    every_plan(world::every_reason_is_true);
}

#[test]
fn open_breaker_blocks_creation() {
    every_plan(world::open_breaker_blocks_creation);
}

#[test]
fn creatable_slots_are_not_deferred() {
    every_plan(world::creatable_slots_are_not_deferred);
}

#[test]
fn next_check_is_due_in_time() {
    every_plan(world::next_check_is_due_in_time);
}

/// An event between two plans.
#[derive(Debug, Clone, Copy)]
enum Happens {
    KernelWanted,
    SomebodyGivesUp,
    CreationSucceeds,
    CreationFails,
    SlotDies,
    SlotsAreGone,
    Passes { ms: u64 },
    PressureTurns,
    RoomTurns,
}

const ALL: [Happens; 11] = [
    Happens::KernelWanted,
    Happens::SomebodyGivesUp,
    Happens::CreationSucceeds,
    Happens::CreationFails,
    Happens::SlotDies,
    Happens::SlotsAreGone,
    Happens::Passes { ms: 300 },
    Happens::Passes { ms: MAX_IDLE_MS },
    Happens::Passes { ms: STUCK_MS },
    Happens::PressureTurns,
    Happens::RoomTurns,
];

/// Applies an event; returns whether it was possible.
fn happen(world: &mut World, what: Happens) -> bool {
    match what {
        Happens::KernelWanted => {
            world.come();
            // More waiting requests differ only in number.
            world.waiting <= 2
        }
        Happens::SomebodyGivesUp => {
            world.give_up_waiting();
            true
        }
        Happens::CreationSucceeds => {
            let first = world.creating().next();
            first.map(|id| world.succeed(id)).is_some()
        }
        Happens::CreationFails => {
            let first = world.creating().next();
            first.map(|id| world.fail(id)).is_some()
        }
        Happens::SlotDies => {
            let first = world.idle().next();
            first.map(|id| world.die(id)).is_some()
        }
        Happens::SlotsAreGone => {
            world.end_leaving();
            true
        }
        Happens::Passes { ms } => {
            world.now_ms += ms;
            true
        }
        Happens::PressureTurns => {
            world.pressure = !world.pressure;
            true
        }
        Happens::RoomTurns => {
            world.room = if world.room == 0 { 9 } else { 0 };
            true
        }
    }
}

/// Two worlds with the same key have the same future.
fn key(world: &World) -> impl Hash + Eq + use<> {
    let mut slots: Vec<_> = world.slots.iter().map(|slot| (slot.created_ms, slot.state, slot.executions)).collect();
    slots.sort_by_key(|(created_ms, state, _)| (*created_ms, format!("{state:?}")));
    let outside = (world.waiting, world.room, world.pressure, world.now_ms);
    (slots, outside, world.demand.clone(), world.breaker.clone())
}

/// Visits every world reachable by `depth` events from a new and from a full pool, with a plan
/// after each event.
fn every_world(rules: Rules, depth: usize, mut with: impl FnMut(&World)) {
    let mut seen = HashSet::new();
    let mut worlds =
        vec![World { room: 9, ..World::new(rules, NOW_MS) }, World { room: 9, ..World::full(rules, NOW_MS) }];
    for _ in 0..=depth {
        let mut next = Vec::new();
        for mut world in std::mem::take(&mut worlds) {
            world.step();
            if seen.insert(key(&world)) {
                with(&world);
                for what in ALL {
                    let mut after = world.clone();
                    if happen(&mut after, what) {
                        next.push(after);
                    }
                }
            }
        }
        worlds = next;
    }
}

#[test]
fn event_sequences_keep_rules() {
    // `step` checks each plan on the way.
    let mut worlds = 0;
    all_rules().into_iter().for_each(|rules| every_world(rules, 3, |_| worlds += 1));
    for rules in [small(0, 0, 1), small(0, 1, 2), small(2, 2, 2), small(3, 3, 3)] {
        every_world(rules, 4, |_| worlds += 1);
    }
    every_world(small(1, 2, 3), 5, |_| worlds += 1);
    assert!(worlds > 40_000, "{worlds}");
}

#[test]
fn pool_plan_is_idempotent() {
    for rules in all_rules() {
        every_world(rules, 3, |world| assert_eq!(world.clone().step().actions, [], "{world:#?}"));
    }
}

#[test]
fn nothing_due_before_next_check() {
    for mut rules in all_rules() {
        // A short interval would hide a missing due time.
        rules.maintenance_interval_ms = 10 * STUCK_MS;
        every_world(rules, 3, |world| {
            let mut world = world.clone();
            for _ in 0..3 {
                let mut plan_now = world.step();
                if plan_now.actions.iter().any(|action| matches!(action, Action::Destroy { why: Why::Stuck, .. })) {
                    // Performing the plan reported the failure to the breaker, an event that
                    // requires another plan.
                    plan_now = world.step();
                }
                let again_ms = plan_now.look_again_at_ms.unwrap_or(world.now_ms + 2 * STUCK_MS);
                // Due actions stay due, so the last moment before the check covers all earlier
                // ones.
                for now_ms in [world.now_ms.midpoint(again_ms), again_ms - 1] {
                    assert_eq!(plan(&world.view(), now_ms).actions, [], "at {now_ms} in {world:#?}");
                }
                world.now_ms = again_ms;
            }
        });
    }
}

/// Completes all operations and lets time pass as the pool requests; returns how many slots were
/// created.
fn calm_down(world: &mut World, until_ms: u64) -> u32 {
    (world.pressure, world.paused, world.room) = (false, false, 9);
    let mut created = 0;
    loop {
        created += world.settle();
        match world.step().look_again_at_ms {
            Some(at_ms) if at_ms <= until_ms => world.now_ms = at_ms,
            Some(_) | None => break,
        }
    }
    world.now_ms = until_ms;
    created
}

fn is_as_it_should_be(world: &World) {
    let Rules { min_idle, max_pool_size, .. } = world.rules;
    let idle: Vec<&Slot> = world.slots.iter().filter(|slot| matches!(slot.state, SlotState::Idle { .. })).collect();
    let want = world.rules.target(&world.demand, world.now_ms).min(max_pool_size);
    assert!(idle.len() as u32 >= want && idle.len() == world.slots.len(), "{world:#?}");
    assert!(world.waiting == 0 || max_pool_size == 0, "a request still waits: {world:#?}");
    let stale = idle.iter().any(|slot| slot.stale(&world.rules, world.now_ms).is_some());
    assert!(!stale || min_idle == max_pool_size, "a stale slot was not replaced: {world:#?}");
}

#[test]
fn pool_converges_after_events() {
    for rules in all_rules() {
        every_world(rules, 3, |world| {
            let mut world = world.clone();
            (world.pressure, world.room) = (false, 9);
            world.settle();
            // With an open breaker the pool cannot fill yet.
            if world.breaker.tries_again_at_ms().is_none() {
                is_as_it_should_be(&world);
            }
            let soon_ms = world.now_ms + 1_000;
            calm_down(&mut world, soon_ms);
            world.settle();
            is_as_it_should_be(&world);
        });
    }
}

#[test]
fn pool_converges_from_any_state() {
    let mut at = 0u32;
    every_state(3, |view| {
        // Every seventh state still covers each pair of conditions.
        at += 1;
        if at.is_multiple_of(7) {
            let mut world = World::of(view, NOW_MS);
            world.settle();
            if view.room == 9 && !view.pressure && !view.paused && world.breaker.tries_again_at_ms().is_none() {
                is_as_it_should_be(&world);
            }
        }
    });
}

#[test]
fn idle_pool_does_not_oscillate() {
    for rules in all_rules() {
        every_world(rules, 2, |world| {
            let mut world = world.clone();
            // Twice the time until the pool is quiet: only `min_idle` slots are left.
            let quiet_ms = world.now_ms + 2 * MAX_IDLE_MS + 500;
            calm_down(&mut world, quiet_ms);
            let left = world.idle().count() as u32;
            assert!(left == rules.min_idle, "{left} idle slots left in {world:#?}");
            // From then on each slot is replaced at its maximum age, and nothing else happens.
            let lives = 10;
            let later_ms = world.now_ms + lives * MAX_UPTIME_MS;
            let created = calm_down(&mut world, later_ms);
            let most = if rules.min_idle == rules.max_pool_size { 0 } else { rules.min_idle * lives as u32 };
            assert!(created <= most, "{created} slots created, {most} expected: {world:#?}");
            assert!(created + rules.min_idle >= most, "{created} of {most} slots replaced: {world:#?}");
        });
    }
}
