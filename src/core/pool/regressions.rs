//! One test for each known failure of comparable pools, and for requirements of their users, as far
//! as the policy decides them.
//!
//! Failures outside the policy are in other places. A failed refresh that stamped the time:
//! `refresh.rs` and, with virtual machines, tests/microvm/regressions.rs. There, too: dead and hung
//! machines that counted as idle, a failed reset that still pooled a dirty machine, orphans that
//! were never reaped, snapshots that were empty files, and, again with machines, cancelled requests,
//! a second stop, the maximum and falling totals. Recycling cannot be seen there: a pool of machines
//! has no `min_idle`.

use super::world::World;
use super::*;

const NOW_MS: u64 = 10_000_000;
const MINUTE_MS: u64 = 60_000;

fn creates(plan: &Plan) -> usize {
    plan.actions.iter().filter(|action| **action == Action::Create).count()
}

/// Another pool refilled with a cancelled context.
#[test]
fn paused_pool_is_not_refilled() {
    let mut world = World::full(Rules::default(), NOW_MS);
    (0..5).for_each(|_| _ = world.come());
    assert_eq!(creates(&world.step()), 4);
    world.paused = true;
    world.waiting += 3;
    let under_way: Vec<SlotId> = world.creating().collect();
    for (n, id) in under_way.into_iter().enumerate() {
        assert_eq!(creates(&world.step()), 0);
        world.waiting = 0;
        // Slots that become ready after the stop are destroyed; failed ones are not retried.
        if n % 2 == 0 { world.succeed(id) } else { world.fail(id) }
    }
    world.step();
    assert_eq!((world.idle().count(), world.creating().count()), (0, 0));
    world.end_leaving();
    for _ in 0..100 {
        let plan = world.step();
        assert_eq!(plan, Plan { actions: vec![], look_again_at_ms: None });
        world.now_ms += MINUTE_MS;
    }
}

/// Another pool panicked when it was closed twice.
#[test]
fn second_pool_stop_is_noop() {
    let mut world = World::full(Rules::default(), NOW_MS);
    world.paused = true;
    assert_eq!(world.step().actions.len(), 3);
    assert_eq!(world.step().actions, [], "a leaving slot is destroyed once");
    world.end_leaving();
    assert_eq!(world.step().actions, []);
}

/// Another pool recycled every slot that was idle for long, and ended up empty.
#[test]
fn recycling_idle_slots_leaves_min_idle() {
    let mut world = World::full(Rules::default(), NOW_MS);
    for _ in 0..(24 * 60) {
        world.now_ms += MINUTE_MS;
        world.settle();
        assert!(world.idle().count() >= 2);
    }
    assert_eq!(world.idle().count(), 2);
    // Two slots twice an hour, and the three initial ones.
    assert!(world.counters.total_created <= 2 * 48 + 3, "{:?}", world.counters);
}

/// A slot in creation cannot be granted.
#[test]
fn min_idle_counts_idle_slots_only() {
    let old_ms = NOW_MS - 30 * MINUTE_MS;
    let rules = Rules { pool_size: 2, ..Rules::default() };
    let mut world = World::full(rules, old_ms);
    world.now_ms = NOW_MS;
    assert_eq!(creates(&world.step()), 2);
    assert_eq!(world.idle().count(), 2, "slots are kept until their replacements are ready");
    let id = world.creating().next().expect("two slots are in creation");
    world.succeed(id);
    world.step();
    assert_eq!(world.idle().count(), 2, "one ready replacement replaces one slot");
}

/// Another pool exceeded its maximum because slots in creation did not count.
#[test]
fn creating_slots_count_to_max() {
    let mut world = World::full(Rules::default(), NOW_MS);
    (0..50).for_each(|_| _ = world.come());
    let mut most = 0;
    for n in 0..200 {
        world.step();
        let all = world.idle().count() + world.creating().count();
        most = most.max(all);
        assert!(all <= 10 && world.creating().count() <= 4, "{world:#?}");
        let first = world.creating().next();
        if let Some(id) = first.filter(|_| n % 3 == 0) {
            world.succeed(id);
        }
    }
    assert!(most == 10 && world.waiting == 0);
}

/// Another pool's totals never decreased.
#[test]
fn pool_totals_can_fall() {
    let mut world = World::full(Rules::default(), NOW_MS);
    let seen = |world: &World| (world.stats().total, world.stats().idle, world.stats().active);
    assert_eq!(seen(&world), (3, 3, 0));
    world.come();
    assert_eq!(seen(&world), (3, 2, 1));
    world.step();
    assert_eq!(seen(&world), (4, 2, 1), "the slot in creation counts");
    world.settle();
    world.end_kernel(world.given[0]);
    assert_eq!(seen(&world), (3, 3, 0));
    world.paused = true;
    world.step();
    assert_eq!(seen(&world), (0, 0, 0));
    let Counters { total_created, total_destroyed, taken, missed, .. } = world.stats().counters;
    assert_eq!((total_created, total_destroyed, taken, missed), (4, 4, 1, 0));
}

/// Another pool reused a VM whose reset had failed. Here each slot is granted once and never
/// returns.
#[test]
fn slot_is_assigned_once() {
    let mut world = World::full(Rules::default(), NOW_MS);
    let mut given: Vec<SlotId> = Vec::new();
    for n in 0..500 {
        world.now_ms += 700;
        world.come();
        world.settle();
        given.extend(world.given.iter().filter(|id| !given.contains(id)).copied().collect::<Vec<_>>());
        if n % 2 == 0 {
            world.end_kernel(world.given[0]);
        }
    }
    assert_eq!(given.len(), 500, "each kernel has its own slot");
}

/// Another pool treated a timed-out health check as healthy.
#[test]
fn stuck_slot_is_abandoned() {
    let mut world = World::new(Rules::default(), NOW_MS);
    assert!(!world.come());
    let plan = world.step();
    assert_eq!((creates(&plan), choose(&world.rules, &world.slots, NOW_MS)), (4, None));
    world.now_ms = NOW_MS + 29_999;
    assert_eq!(world.step().look_again_at_ms, Some(NOW_MS + 30_000));
    world.now_ms += 1;
    assert_eq!(choose(&world.rules, &world.slots, world.now_ms), None);
    let plan = world.step();
    assert_eq!(
        plan.actions.iter().filter(|action| matches!(action, Action::Destroy { why: Why::Stuck, .. })).count(),
        4
    );
    assert_eq!((world.counters.creation_errors, world.counters.taken, world.waiting), (4, 0, 1));
    assert!(matches!(world.breaker.gate(world.now_ms), Gate::Shut { .. }), "a stuck creation counts as a failure");
}

/// A failing image is tried at growing intervals, regardless of waiting requests.
#[test]
fn failing_image_backs_off() {
    let mut world = World::new(Rules::default(), NOW_MS);
    world.come();
    while world.now_ms < NOW_MS + 60 * MINUTE_MS {
        let plan = world.step();
        let failed: Vec<SlotId> = world.creating().collect();
        if failed.is_empty() {
            world.now_ms = plan.look_again_at_ms.expect("a request waits");
        }
        for id in failed {
            world.now_ms += 5;
            world.fail(id);
        }
    }
    // Four at once, nine until the pause reaches a minute, then one a minute.
    assert!((60..=75).contains(&world.counters.creation_errors), "{:?}", world.counters);
    assert_eq!(world.breaker.reason(), Some("no such image"));
}

/// A single failure at start does not stop the pool.
#[test]
fn one_failure_spares_others() {
    let mut world = World::new(Rules::default(), NOW_MS);
    world.step();
    let first = world.creating().next().expect("three slots are in creation");
    world.fail(first);
    world.settle();
    assert_eq!(world.idle().count(), 3);
}

/// The pool adapts to regular bursts.
#[test]
fn bursts_do_not_thrash_pool() {
    let mut world = World::full(Rules::default(), NOW_MS);
    // Six requests at once, every four minutes, for a day.
    for _ in 0..360 {
        (0..6).for_each(|_| _ = world.come());
        for _ in 0..8 {
            world.settle();
            world.now_ms += MINUTE_MS / 2;
        }
        world.given.clone().into_iter().for_each(|id| world.end_kernel(id));
    }
    let Counters { taken, missed, total_created, .. } = world.counters;
    assert_eq!((taken, missed), (6 * 360, 3), "only the first burst finds too few slots");
    assert_eq!(total_created, taken + 6, "no slot is created in vain");
}

/// Another pool counted dead slots as idle. Here dead slots are in no view, so the next plan
/// replaces them.
#[test]
fn dead_slot_is_replaced() {
    let mut world = World::full(Rules::default(), NOW_MS);
    let first = world.idle().next().expect("three slots are idle");
    world.die(first);
    assert_eq!(creates(&world.step()), 1);
}
