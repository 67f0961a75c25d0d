//! Tables for rules, targets, choices and plans; demand and breaker against simple models.

use proptest::prelude::*;

use super::world::World;
use super::*;

const NOW_MS: u64 = 10_000_000;
const MINUTE_MS: u64 = 60_000;

fn idle(id: u64, age_ms: u64) -> Slot {
    let since_ms = NOW_MS - age_ms;
    Slot { id: SlotId(id), state: SlotState::Idle { since_ms }, created_ms: since_ms, executions: 0 }
}

fn creating(id: u64, age_ms: u64) -> Slot {
    Slot { state: SlotState::Creating { since_ms: NOW_MS - age_ms }, ..idle(id, age_ms) }
}

fn worn(slot: Slot) -> Slot {
    Slot { executions: 100, ..slot }
}

fn world(slots: &[Slot]) -> World {
    World { slots: slots.to_vec(), ..World::new(Rules::default(), NOW_MS) }
}

/// Returns what the plan does: the number of creations, and the destroyed slots with their reasons.
fn planned(world: &World) -> (usize, Vec<(u64, Why)>) {
    let plan = plan(&world.view(), world.now_ms);
    world::check(&world.view(), world.now_ms, &plan);
    let mut done = (0, Vec::new());
    for action in plan.actions {
        match action {
            Action::Create => done.0 += 1,
            Action::Destroy { slot, why } => done.1.push((slot.0, why)),
        }
    }
    done
}

#[test]
fn pool_rules_are_validated() {
    let rules = Rules::default();
    assert_eq!((rules.pool_size, rules.max_pool_size, rules.min_idle, rules.max_exec_count), (3, 10, 2, 100));
    let times_ms = (rules.max_idle_time_ms, rules.max_uptime_ms, rules.maintenance_interval_ms);
    assert_eq!(times_ms, (5 * MINUTE_MS, 30 * MINUTE_MS, 30_000));
    let off = Rules { pool_size: 0, min_idle: 0, ..rules };
    for good in [rules, off, Rules { max_pool_size: 0, ..off }, Rules { max_pool_size: 256, ..rules }] {
        assert_eq!(good.broken(), [], "{good:?}");
    }
    let short = |rule| RulesError::Short { rule };
    let many = |rule, slots| RulesError::TooMany { rule, slots };
    let table = [
        (Rules { min_idle: 4, ..rules }, RulesError::MinIdle { min_idle: 4, pool_size: 3 }),
        (Rules { pool_size: 0, ..rules }, RulesError::MinIdle { min_idle: 2, pool_size: 0 }),
        (Rules { pool_size: 11, ..rules }, RulesError::PoolSize { pool_size: 11, max_pool_size: 10 }),
        (Rules { max_pool_size: 257, ..rules }, many("max_pool_size", 257)),
        (Rules { pool_size: 257, ..rules }, many("pool_size", 257)),
        (Rules { max_exec_count: 0, ..rules }, RulesError::MaxExecCount),
        (Rules { max_idle_time_ms: 999, ..rules }, short("max_idle_time")),
        (Rules { max_uptime_ms: 999, ..rules }, short("max_uptime")),
        (Rules { maintenance_interval_ms: 0, ..rules }, short("maintenance_interval")),
    ];
    for (wrong, error) in table {
        assert_eq!(wrong.broken(), [error]);
    }
    let all = Rules { min_idle: 4, max_exec_count: 0, max_uptime_ms: 0, ..rules };
    assert_eq!(all.broken().len(), 3, "every violation is reported");
    assert_eq!(RulesError::MinIdle { min_idle: 4, pool_size: 3 }.to_string(), "min_idle 4 is more than pool_size 3");
    assert_eq!(short("max_uptime").to_string(), "max_uptime is at least a second");
}

#[test]
fn pool_target_follows_demand() {
    let rules = Rules::default();
    let came = |many: u32| {
        let mut demand = Demand::new(0);
        (0..many).for_each(|_| demand.came(NOW_MS));
        demand
    };
    let quiet_ms = NOW_MS + rules.max_idle_time_ms;
    for (many, target) in [(1, 3), (3, 3), (4, 4), (10, 10), (11, 10), (1000, 10)] {
        assert_eq!(rules.target(&came(many), NOW_MS), target, "{many} requests now");
        assert_eq!(rules.target(&came(many), quiet_ms - 1), target, "{many} recent requests");
        assert_eq!(rules.target(&came(many), quiet_ms), 2, "{many} old requests");
    }
    let new = Demand::new(NOW_MS);
    assert_eq!((rules.target(&new, NOW_MS), rules.target(&new, quiet_ms)), (3, 2), "target of a new pool");
    let off = Rules { pool_size: 0, min_idle: 0, ..rules };
    assert_eq!(off.target(&came(1000), NOW_MS), 0);
}

#[test]
fn isolations_have_own_costs() {
    let [process, machine] = [Isolation::Process, Isolation::Microvm].map(Costs::of);
    assert!(machine.creation > process.creation && machine.reservation > process.reservation);
    let rules = Rules::default();
    let of = |costs: Costs, rules| {
        let Rules { pool_size, min_idle, max_pool_size, creation_ms, .. } = costs.rules_on_demand(rules);
        (pool_size, min_idle, max_pool_size, creation_ms)
    };
    assert_eq!((of(process, rules), of(machine, rules)), ((1, 0, 10, 30_000), (2, 0, 10, 180_000)));
    let one = Rules { pool_size: 1, min_idle: 1, ..rules };
    assert_eq!(of(machine, one).0, 1, "fewer are configured");
    assert_eq!(process.rules(rules), rules);
}

#[test]
fn creation_deadline_is_a_rule() {
    let slow = Costs::of(Isolation::Microvm).rules(Rules::default());
    let slots = [creating(1, 179_999), creating(2, 180_000)];
    let stuck = |rules| {
        let is_stuck = |action: &&Action| matches!(action, Action::Destroy { why: Why::Stuck, .. });
        let world = World { rules, ..world(&slots) };
        plan(&world.view(), NOW_MS).actions.iter().filter(is_stuck).count()
    };
    assert_eq!((stuck(slow), stuck(Rules::default())), (1, 2));
}

#[test]
fn oldest_fresh_slot_is_chosen() {
    let leaving = Slot { state: SlotState::Leaving, ..idle(9, 9_000) };
    let old_ms = 30 * MINUTE_MS;
    let table: &[(&[Slot], Option<u64>)] = &[
        (&[], None),
        (&[creating(1, 5_000), leaving], None),
        (&[idle(1, 1_000), idle(2, 2_000), leaving, creating(3, 20_000)], Some(2)),
        (&[idle(2, 1_000), idle(1, 1_000)], Some(1)),
        (&[idle(1, old_ms), idle(2, 2_000), worn(idle(3, 3_000))], Some(2)),
        (&[idle(1, old_ms), idle(2, old_ms - 1)], Some(2)),
        (&[idle(1, old_ms), worn(idle(2, 2_000)), idle(3, old_ms + 1)], Some(3)),
    ];
    for (slots, given) in table {
        assert_eq!(choose(&Rules::default(), slots, NOW_MS), given.map(SlotId), "{slots:#?}");
    }
}

/// Description, pool, number of creations, destroyed slots with their reasons.
type Case = (&'static str, World, usize, Vec<(u64, Why)>);

#[test]
fn pool_plan_table() {
    let full = [idle(1, 3_000), idle(2, 2_000), idle(3, 1_000)];
    let minutes = |age| age * MINUTE_MS;
    let mut burst = Demand::new(NOW_MS);
    (0..8).for_each(|_| burst.came(NOW_MS));
    let mut shut = Breaker::default();
    (0..3).for_each(|_| shut.failed("broken", NOW_MS));
    let table: Vec<Case> = vec![
        ("new pool is filled", world(&[]), 3, vec![]),
        ("full pool is unchanged", world(&full), 0, vec![]),
        ("slot in creation counts", world(&[idle(1, 1_000), creating(2, 10)]), 1, vec![]),
        ("leaving slot does not count", world(&[Slot { state: SlotState::Leaving, ..idle(1, 0) }]), 3, vec![]),
        ("concurrent creations are limited", World { demand: burst.clone(), ..world(&full) }, 4, vec![]),
        ("pool fills to the last burst", World { demand: burst.clone(), ..world(&[creating(1, 10)]) }, 3, vec![]),
        ("creations fit into the host's room", World { room: 1, ..world(&[]) }, 1, vec![]),
        ("waiting request adds a slot", World { waiting: 1, ..world(&full) }, 1, vec![]),
        ("open breaker blocks creation", World { breaker: shut.clone(), ..world(&[]) }, 0, vec![]),
        ("trial after the pause", World { breaker: shut.clone(), now_ms: NOW_MS + 200, ..world(&[]) }, 1, vec![]),
        ("a single trial", World { breaker: shut, now_ms: NOW_MS + 200, ..world(&[creating(1, 0)]) }, 0, vec![]),
        (
            "pressure empties the pool",
            World { pressure: true, ..world(&full) },
            0,
            [1, 2, 3].map(|n| (n, Why::Pressure)).into(),
        ),
        ("pressure, request", World { pressure: true, waiting: 1, ..world(&full[1..]) }, 0, vec![(2, Why::Pressure)]),
        ("creation under pressure", World { pressure: true, waiting: 2, ..world(&[]) }, 2, vec![]),
        ("stopping pool", World { paused: true, ..world(&full) }, 0, [1, 2, 3].map(|n| (n, Why::Stopping)).into()),
        ("stopping pool, request", World { paused: true, waiting: 1, ..world(&[creating(1, 10)]) }, 0, vec![]),
        ("stuck creation is abandoned", world(&[creating(1, 30_000), creating(2, 29_999)]), 2, vec![(1, Why::Stuck)]),
        ("replacement is created first", world(&[full[0], full[1], idle(3, minutes(30))]), 1, vec![]),
        ("then the old slot", world(&[full[0], full[1], full[2], idle(4, minutes(30))]), 0, vec![(4, Why::Old)]),
        ("or the worn slot", world(&[full[0], full[1], full[2], worn(idle(4, 0))]), 0, vec![(4, Why::Worn)]),
        (
            "stale slots first, then the surplus, oldest first",
            world(&[idle(1, 40_000), worn(idle(2, 0)), idle(3, 50_000), idle(4, 0), idle(5, 30_000)]),
            0,
            vec![(2, Why::Worn), (3, Why::Surplus)],
        ),
        ("recent surplus is kept", world(&[full[0], full[1], full[2], idle(4, 29_999)]), 0, vec![]),
        (
            "quiet pool shrinks to min_idle by slots that were idle long enough",
            World {
                demand: Demand::new(0),
                ..world(&[idle(1, minutes(5) - 1), idle(2, minutes(6)), idle(3, minutes(7))])
            },
            0,
            vec![(3, Why::Unused)],
        ),
        (
            "slots beyond a lowered maximum are destroyed at once",
            World {
                rules: Rules { max_pool_size: 3, ..Rules::default() },
                ..world(&[full[0], full[1], full[2], idle(4, 1)])
            },
            0,
            vec![(1, Why::Surplus)],
        ),
    ];
    for (case, world, created, gone) in table {
        assert_eq!(planned(&world), (created, gone), "{case}");
    }
}

#[test]
fn full_pool_drops_old_first() {
    let old_ms = 30 * MINUTE_MS;
    let old = [idle(1, old_ms + 2), idle(2, old_ms + 1), idle(3, old_ms)];
    let at_most = |max_pool_size, min_idle, room| {
        let rules = Rules { pool_size: 3, max_pool_size, min_idle, ..Rules::default() };
        planned(&World { rules, room, ..world(&old) })
    };
    assert_eq!(at_most(10, 2, 9), (3, vec![]), "room for three replacements");
    assert_eq!(at_most(4, 2, 9), (1, vec![]), "room for one replacement");
    assert_eq!(at_most(3, 2, 9), (1, vec![(1, Why::Old)]), "no room in the pool");
    assert_eq!(at_most(10, 2, 0), (0, vec![(1, Why::Old)]), "no room on the host");
    assert_eq!(at_most(10, 3, 0), (0, vec![]), "no room on the host, min_idle reached");
    assert_eq!(at_most(3, 3, 9), (0, vec![]), "no room in the pool, min_idle reached");
    // While the breaker is open, an old slot is better than none.
    let mut breaker = Breaker::default();
    (0..3).for_each(|_| breaker.failed("broken", NOW_MS));
    let mut failing = World { breaker, ..world(&old) };
    assert_eq!(planned(&failing), (0, vec![]));
    failing.now_ms += 200;
    assert_eq!(planned(&failing), (1, vec![]));
    failing.room = 0;
    assert_eq!(planned(&failing), (0, vec![]));
}

#[test]
fn burst_size_is_remembered() {
    let mut world = World::full(Rules::default(), NOW_MS);
    let burst = |world: &mut World| (0..8).filter(|_| world.come()).count();
    assert_eq!(burst(&mut world), 3);
    world.settle();
    assert_eq!((world.waiting, world.idle().count()), (0, 8));
    world.now_ms += 4 * MINUTE_MS;
    assert_eq!(burst(&mut world), 8);
    world.settle();
    // Six minutes with single requests, but no burst.
    for _ in 0..6 {
        world.now_ms += MINUTE_MS;
        world.come();
        world.settle();
    }
    assert_eq!(world.idle().count(), 3, "an old burst no longer counts");
}

/// Reference model: the most requests within any two-second window that ends recently enough.
fn peak_of(times_ms: &[u64], now_ms: u64, within_ms: u64) -> u32 {
    let ends = times_ms.iter().filter(|at_ms| now_ms - **at_ms < within_ms);
    let count = |end_ms: u64| times_ms.iter().filter(|at_ms| **at_ms <= end_ms && end_ms - **at_ms < 2_000).count();
    ends.map(|end_ms| count(*end_ms) as u32).max().unwrap_or(0)
}

proptest! {
    #[test]
    fn demand_matches_model(
        gaps_ms in prop::collection::vec(prop_oneof![Just(0), 0..600u64, 1_990..2_010u64, 0..20_000u64], 0..60),
        later_ms in 0..12_000u64,
        within_ms in 1_000..15_000u64,
    ) {
        let (mut now_ms, mut times_ms, mut demand) = (NOW_MS, Vec::new(), Demand::new(NOW_MS));
        for gap_ms in gaps_ms {
            now_ms += gap_ms;
            demand.came(now_ms);
            times_ms.push(now_ms);
            prop_assert_eq!(demand.peak(now_ms, within_ms), peak_of(&times_ms, now_ms, within_ms));
        }
        now_ms += later_ms;
        let seen = |at_ms| (demand.peak(at_ms, within_ms), demand.is_quiet(at_ms, within_ms));
        let last_ms = times_ms.last().copied().unwrap_or(NOW_MS);
        prop_assert_eq!(seen(now_ms), (peak_of(&times_ms, now_ms, within_ms), now_ms - last_ms >= within_ms));
        // The values change exactly at the returned time.
        match demand.changes_at_ms(now_ms, within_ms) {
            Some(at_ms) => prop_assert!(at_ms > now_ms && seen(at_ms - 1) == seen(now_ms) && seen(at_ms) != seen(now_ms)),
            None => prop_assert_eq!(seen(now_ms), (0, true)),
        }
    }

    #[test]
    fn three_failures_open_breaker(
        steps in prop::collection::vec((0..3u8, 0..70_000u64), 0..60),
    ) {
        let (mut now_ms, mut breaker, mut in_a_row) = (NOW_MS, Breaker::default(), 0u32);
        for (what, gap_ms) in steps {
            now_ms += gap_ms;
            match (what, breaker.gate(now_ms)) {
                // No creation is permitted, so none has an outcome.
                (_, Gate::Shut { .. }) => continue,
                (0, _) => {
                    breaker.succeeded();
                    in_a_row = 0;
                }
                (_, _) => {
                    breaker.failed("broken", now_ms);
                    in_a_row += 1;
                }
            }
            match breaker.gate(now_ms) {
                Gate::Free => prop_assert!(in_a_row < 3),
                Gate::Trial => prop_assert!(false, "trial without a pause"),
                Gate::Shut { until_ms } => {
                    let pause_ms = (0..in_a_row - 3).fold(200, |ms, _| (2 * ms).min(60_000));
                    prop_assert_eq!(until_ms, now_ms + pause_ms);
                    prop_assert_eq!(breaker.gate(until_ms), Gate::Trial);
                }
            }
        }
    }
}

#[test]
fn breaker_pause_doubles() {
    let (mut breaker, mut now_ms, mut pauses_ms) = (Breaker::default(), NOW_MS, Vec::new());
    for _ in 0..13 {
        breaker.failed("broken", now_ms);
        let until_ms = breaker.tries_again_at_ms().unwrap_or(now_ms);
        pauses_ms.push(until_ms - now_ms);
        now_ms = until_ms;
    }
    assert_eq!(pauses_ms, [0, 0, 200, 400, 800, 1_600, 3_200, 6_400, 12_800, 25_600, 51_200, 60_000, 60_000]);
    // Without creations for hours: still one trial at a time.
    now_ms += 5 * 60 * MINUTE_MS;
    assert_eq!(breaker.gate(now_ms), Gate::Trial);
    breaker.succeeded();
    assert_eq!((breaker.gate(now_ms), breaker.reason(), breaker.tries_again_at_ms()), (Gate::Free, None, None));
    breaker.failed("broken", now_ms);
    assert_eq!(breaker.gate(now_ms), Gate::Free, "a success resets the count");
}

#[test]
fn late_failures_keep_pause() {
    let mut breaker = Breaker::default();
    // Four creations began at once; the fourth fails while the breaker is open.
    for (reason, after_ms) in [("one", 0), ("two", 1), ("three", 2), ("four", 50)] {
        breaker.failed(reason, NOW_MS + after_ms);
    }
    assert_eq!((breaker.tries_again_at_ms(), breaker.reason()), (Some(NOW_MS + 202), Some("four")));
}

#[test]
fn breaker_reason_is_truncated() {
    for (reason, length) in
        [("x".repeat(500), 500), ("x".repeat(501), 500), ("€".repeat(1000), 498), (String::new(), 0)]
    {
        let mut breaker = Breaker::default();
        breaker.failed(&reason, NOW_MS);
        let kept = breaker.reason().expect("it failed");
        assert!(kept.len() == length && reason.starts_with(kept), "{kept:?}");
    }
}

#[test]
fn early_deaths_open_breaker() {
    let mut world = World::new(Rules::default(), NOW_MS);
    let mut created = 0;
    let until_ms = NOW_MS + 10 * MINUTE_MS;
    while world.now_ms < until_ms {
        let plan = world.step();
        let ready: Vec<SlotId> = world.creating().collect();
        created += ready.len();
        if ready.is_empty() {
            world.now_ms = plan.look_again_at_ms.expect("something is wanted").max(world.now_ms + 1);
        }
        for id in ready {
            world.now_ms += 20;
            world.succeed(id);
        }
        let idle: Vec<SlotId> = world.idle().collect();
        idle.into_iter().for_each(|id| world.die(id));
        world.end_leaving();
    }
    // Without a breaker there would be tens of thousands.
    assert!((10..100).contains(&created), "{created}");
    // Occasional deaths do not open the breaker.
    let mut breaker = Breaker::default();
    for n in 0..100 {
        let now_ms = NOW_MS + n * 2 * MINUTE_MS;
        breaker.died("killed", now_ms);
        assert_eq!((breaker.gate(now_ms), breaker.reason()), (Gate::Free, Some("killed")));
        breaker.succeeded();
    }
}

#[test]
fn pool_counters_saturate() {
    let mut counters = Counters { taken: u64::MAX, ..Counters::default() };
    for event in [Event::Created, Event::CreationFailed, Event::Destroyed, Event::Executed] {
        counters.apply(event);
    }
    for event in [Event::Taken, Event::Missed, Event::Missed, Event::Refused] {
        counters.apply(event);
    }
    let expected = Counters {
        total_created: 1,
        total_destroyed: 1,
        total_executions: 1,
        creation_errors: 1,
        taken: u64::MAX,
        missed: 2,
        refused: 1,
    };
    assert_eq!(counters, expected);
}

#[test]
fn recent_pool_is_not_evicted() {
    let stays_ms = crate::core::limits::POOL_EVICTION_AGE.as_millis() as u64;
    let now_ms = NOW_MS + stays_ms;
    for (came, goes) in [
        (&[][..], None),
        (&[None, None], None),
        (&[None, Some(NOW_MS + 1), Some(now_ms)], None),
        (&[None, Some(NOW_MS), Some(now_ms)], Some(1)),
        (&[Some(NOW_MS), Some(NOW_MS - 1), None], Some(1)),
    ] {
        assert_eq!(evicted_pool(came.iter().copied(), now_ms), goes, "{came:?}");
    }
    assert_eq!(evicted_pool([Some(0)], stays_ms - 1), None, "a daemon that just started");
}
