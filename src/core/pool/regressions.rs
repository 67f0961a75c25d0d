//! What went wrong in the system that the pool's seed comes from, and what users of such pools ask for, as far as a policy can do it
//! wrong: one test for each.
//!
//! Not here, because no policy can do them: snapshots that were empty files, a failed refresh that stamped the time, orphans that
//! nobody reaped.

use super::world::World;
use super::*;

const NOW_MS: u64 = 10_000_000;
const MINUTE_MS: u64 = 60_000;

fn creates(plan: &Plan) -> usize {
    plan.actions.iter().filter(|action| **action == Action::Create).count()
}

/// Theirs refilled with a context that was already cancelled.
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
        // What was under way and becomes ready goes too; what fails is not tried again.
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

/// Theirs panicked when it was closed twice.
#[test]
fn second_pool_stop_is_noop() {
    let mut world = World::full(Rules::default(), NOW_MS);
    world.paused = true;
    assert_eq!(world.step().actions.len(), 3);
    assert_eq!(world.step().actions, [], "what leaves is not destroyed again");
    world.end_leaving();
    assert_eq!(world.step().actions, []);
}

/// Theirs recycled whatever was idle for long, down to nothing.
#[test]
fn recycling_idle_slots_leaves_min_idle() {
    let mut world = World::full(Rules::default(), NOW_MS);
    for _ in 0..(24 * 60) {
        world.now_ms += MINUTE_MS;
        world.settle();
        assert!(world.idle().count() >= 2);
    }
    assert_eq!(world.idle().count(), 2);
    // Two, twice an hour, and the three of the beginning.
    assert!(world.counters.total_created <= 2 * 48 + 3, "{:?}", world.counters);
}

/// What is only on its way is nothing that could be given.
#[test]
fn min_idle_counts_idle_slots_only() {
    let old_ms = NOW_MS - 30 * MINUTE_MS;
    let rules = Rules { pool_size: 2, ..Rules::default() };
    let mut world = World::full(rules, old_ms);
    world.now_ms = NOW_MS;
    assert_eq!(creates(&world.step()), 2);
    assert_eq!(world.idle().count(), 2, "replacements that are only in creation replace nothing");
    let id = world.creating().next().expect("two are");
    world.succeed(id);
    world.step();
    assert_eq!(world.idle().count(), 2, "one for one");
}

/// Theirs raced over the maximum: what was being created did not count.
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

/// Theirs only ever grew.
#[test]
fn pool_totals_can_fall() {
    let mut world = World::full(Rules::default(), NOW_MS);
    let seen = |world: &World| (world.stats().total, world.stats().idle, world.stats().active);
    assert_eq!(seen(&world), (3, 3, 0));
    world.come();
    assert_eq!(seen(&world), (3, 2, 1));
    world.step();
    assert_eq!(seen(&world), (4, 2, 1), "the one in creation is there already");
    world.settle();
    world.end_kernel(world.given[0]);
    assert_eq!(seen(&world), (3, 3, 0));
    world.paused = true;
    world.step();
    assert_eq!(seen(&world), (0, 0, 0));
    let Counters { total_created, total_destroyed, taken, missed, .. } = world.stats().counters;
    assert_eq!((total_created, total_destroyed, taken, missed), (4, 4, 1, 0));
}

/// Theirs put a VM back whose reset had failed. Ours puts none back: each is given once, and then it is in no view any more.
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
    assert_eq!(given.len(), 500, "each kernel got one of its own");
}

/// Their wait for health fell through as healthy when it had waited long enough.
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
    assert!(matches!(world.breaker.gate(world.now_ms), Gate::Shut { .. }), "that is a failure like any other");
}

/// An image that fails is tried less and less often, whoever waits.
#[test]
fn failing_image_backs_off() {
    let mut world = World::new(Rules::default(), NOW_MS);
    world.come();
    while world.now_ms < NOW_MS + 60 * MINUTE_MS {
        let plan = world.step();
        let failed: Vec<SlotId> = world.creating().collect();
        if failed.is_empty() {
            world.now_ms = plan.look_again_at_ms.expect("somebody waits");
        }
        for id in failed {
            world.now_ms += 5;
            world.fail(id);
        }
    }
    // Four at once, nine on the way to a minute, one a minute then.
    assert!((60..=75).contains(&world.counters.creation_errors), "{:?}", world.counters);
    assert_eq!(world.breaker.reason(), Some("no such image"));
}

/// Theirs, and rightly, gave up at the start only if every warm VM failed.
#[test]
fn one_failure_spares_others() {
    let mut world = World::new(Rules::default(), NOW_MS);
    world.step();
    let first = world.creating().next().expect("three are");
    world.fail(first);
    world.settle();
    assert_eq!(world.idle().count(), 3);
}

/// The seed itself names it as a risk.
#[test]
fn bursts_do_not_thrash_pool() {
    let mut world = World::full(Rules::default(), NOW_MS);
    // Six at once, every four minutes, for a day.
    for _ in 0..360 {
        (0..6).for_each(|_| _ = world.come());
        for _ in 0..8 {
            world.settle();
            world.now_ms += MINUTE_MS / 2;
        }
        world.given.clone().into_iter().for_each(|id| world.end_kernel(id));
    }
    let Counters { taken, missed, total_created, .. } = world.counters;
    assert_eq!((taken, missed), (6 * 360, 3), "the first burst alone finds too few");
    assert_eq!(total_created, taken + 6, "not one that nobody took");
}

/// Theirs counted dead idle slots as idle ones. A view has none, so the next plan replaces each.
#[test]
fn dead_slot_is_replaced() {
    let mut world = World::full(Rules::default(), NOW_MS);
    let first = world.idle().next().expect("three are");
    world.die(first);
    assert_eq!(creates(&world.step()), 1);
}
