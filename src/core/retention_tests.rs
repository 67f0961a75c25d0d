//! Checks the guarantees of `plan` over every small tree and many random ones.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::*;
use crate::core::ids::Digest;

const DAY_MS: i64 = 86_400_000;
const NOW_MS: i64 = 1000 * DAY_MS;

fn id(number: u64) -> CheckpointId {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    CheckpointId::from_bytes(bytes)
}

fn checkpoint(number: u64, kind: CheckpointType, age_days: i64, parent: Option<u64>) -> Checkpoint {
    Checkpoint {
        id: id(number),
        number,
        name: String::new(),
        description: String::new(),
        kind,
        creator: String::new(),
        at_ms: NOW_MS - age_days * DAY_MS,
        parent: parent.map(id),
        pinned: false,
        restore_point: true,
        restored_at_ms: None,
        version: number,
        manifest: Digest::from_bytes([0; 32]),
        files: 0,
        state_bytes: 0,
        machine_bytes: 0,
        step: 0,
        step_name: String::new(),
        agent: String::new(),
        summary: String::new(),
        compacted: 0,
    }
}

fn line(count: u64, kind: CheckpointType) -> Standing {
    let one = |n: u64| checkpoint(n, kind, 0, n.checked_sub(1).filter(|parent| *parent > 0));
    Standing { checkpoints: (1..=count).rev().map(one).collect(), needed: vec![(id(count), Use::Head)] }
}

fn kept(policy: &Retention, standing: &Standing, now_ms: i64) -> HashSet<CheckpointId> {
    plan(policy, standing, now_ms).into_iter().filter(|(_, fate)| fate.stays()).map(|(id, _)| id).collect()
}

#[test]
fn default_keeps_newest_twenty() {
    let policy = Retention::default();
    let all = line(50, CheckpointType::Auto);
    assert_eq!(kept(&policy, &all, NOW_MS), (31..=50).map(id).collect());
    // One day before and one day after the maximum age.
    let stays = |days: i64| kept(&policy, &all, NOW_MS + days * DAY_MS).len();
    assert_eq!((stays(90), stays(91)), (20, 1), "the current checkpoint is kept at any age");
    for kind in [CheckpointType::System, CheckpointType::Conflict] {
        assert_eq!(kept(&policy, &line(50, kind), NOW_MS).len(), 20, "{kind:?}");
    }
    assert_eq!(kept(&policy, &line(50, CheckpointType::Manual), NOW_MS + 5000 * DAY_MS).len(), 50);
}

#[test]
fn manual_checkpoints_uncounted() {
    let mut all = line(60, CheckpointType::Auto);
    all.checkpoints.iter_mut().filter(|one| one.number % 2 == 0).for_each(|one| one.kind = CheckpointType::Manual);
    let stay = kept(&Retention::default(), &all, NOW_MS);
    assert_eq!(stay.len(), 30 + 20);
    assert!(!stay.contains(&id(19)) && stay.contains(&id(21)));
}

#[test]
fn unbounded_policy_keeps_all() {
    let policy = Retention { newest: None, keep_for_ms: None };
    assert_eq!(kept(&policy, &line(500, CheckpointType::Auto), i64::MAX).len(), 500);
    assert_eq!(policy.to_string(), "all, for ever");
    assert_eq!(Retention::default().to_string(), "newest 20, for 90d");
    assert!(Retention { newest: Some(0), keep_for_ms: None }.check().is_err());
    assert!(Retention { newest: None, keep_for_ms: Some(999) }.check().is_err());
    assert!(policy.check().is_ok());
}

#[test]
fn branch_point_is_kept() {
    // 1 ─ 2 ─ 3 ─ 4 (manual)
    //      └─ 5 ─ 6 (the kernel is here)
    let kind = |n| if n == 4 { CheckpointType::Manual } else { CheckpointType::Auto };
    let parents = [(1, None), (2, Some(1)), (3, Some(2)), (4, Some(3)), (5, Some(2)), (6, Some(5))];
    let checkpoints = parents.iter().rev().map(|(n, parent)| checkpoint(*n, kind(*n), 100, *parent)).collect();
    let standing = Standing { checkpoints, needed: vec![(id(6), Use::Head)] };
    let fates: HashMap<_, _> = plan(&Retention::default(), &standing, NOW_MS).into_iter().collect();
    assert_eq!(fates[&id(2)], Fate::Stays(Stays::Parting));
    assert_eq!(fates[&id(4)], Fate::Stays(Stays::Manual));
    assert!([1, 3, 5].iter().all(|n| !fates[&id(*n)].stays()), "{fates:?}");
}

/// Returns the parents after removed checkpoints handed over their children, as the database does
/// it.
fn thinned(standing: &Standing, stay: &HashSet<CheckpointId>) -> HashMap<CheckpointId, Option<CheckpointId>> {
    let parents: HashMap<_, _> = standing.checkpoints.iter().map(|one| (one.id, one.parent)).collect();
    let nearest = |mut at: Option<CheckpointId>| {
        while let Some(parent) = at.filter(|parent| !stay.contains(parent)) {
            at = parents.get(&parent).copied().flatten();
        }
        at
    };
    stay.iter().map(|one| (*one, nearest(parents[one]))).collect()
}

fn ancestors(from: CheckpointId, parents: &HashMap<CheckpointId, Option<CheckpointId>>) -> Vec<CheckpointId> {
    std::iter::successors(Some(from), |at| parents.get(at).copied().flatten()).collect()
}

fn any_standing() -> impl Strategy<Value = Standing> {
    let one = (0..4usize, any::<bool>(), -20..200i64, any::<prop::sample::Index>(), 0..10u8);
    let uses = prop::collection::vec((any::<prop::sample::Index>(), 0..4usize), 0..4);
    (prop::collection::vec(one, 1..60), uses).prop_map(|(rows, uses)| {
        let mut checkpoints: Vec<Checkpoint> = Vec::new();
        for (n, (kind, pinned, age, parent, rare)) in (1u64..).zip(rows) {
            // Mostly a line, sometimes a branch from an older checkpoint, seldom a new root.
            let parent = match rare {
                0 => None,
                1..=3 if n > 1 => Some(parent.index(n as usize - 1) as u64 + 1),
                _ => n.checked_sub(1).filter(|before| *before > 0),
            };
            let mut made = checkpoint(n, CheckpointType::ALL[kind], age, parent);
            made.pinned = pinned && rare == 5;
            checkpoints.push(made);
        }
        let all = [Use::Head, Use::Undo, Use::Restore, Use::Reading];
        let needed = uses.into_iter().map(|(at, kind)| (at.get(&checkpoints).id, all[kind])).collect();
        checkpoints.reverse();
        Standing { checkpoints, needed }
    })
}

fn any_policy() -> impl Strategy<Value = Retention> {
    let days = prop::option::of(1..150u64);
    (prop::option::of(1..40u32), days)
        .prop_map(|(newest, days)| Retention { newest, keep_for_ms: days.map(|days| days * DAY_MS as u64) })
}

proptest! {
    #[test]
    fn protected_checkpoints_stay(policy in any_policy(), standing in any_standing(), late in -500..5000i64) {
        let fates = plan(&policy, &standing, NOW_MS + late * DAY_MS);
        prop_assert_eq!(fates.len(), standing.checkpoints.len());
        for ((id, fate), one) in fates.iter().zip(&standing.checkpoints) {
            prop_assert_eq!(*id, one.id);
            let wanted = one.pinned || one.kind == CheckpointType::Manual;
            let needed = standing.needed.iter().any(|(needed, _)| needed == id);
            prop_assert!(fate.stays() || !(wanted || needed), "{one:?}: {fate:?}");
        }
    }

    #[test]
    fn newest_rule_keeps_only_recent(policy in any_policy(), standing in any_standing()) {
        let stay = kept(&policy, &standing, NOW_MS);
        let mut place = 0;
        for ((id, fate), one) in plan(&policy, &standing, NOW_MS).into_iter().zip(&standing.checkpoints) {
            place += u32::from(is_automatic(one));
            if let Fate::Stays(Stays::Newest { place: reported }) = fate {
                prop_assert_eq!(reported, place);
                prop_assert!(policy.newest.is_none_or(|newest| place <= newest));
                prop_assert!(policy.keep_for_ms.is_none_or(|ms| NOW_MS - one.at_ms <= ms as i64));
            }
            // Conversely, no recent checkpoint is removed.
            let is_new = policy.newest.is_none_or(|newest| place <= newest);
            let is_young = policy.keep_for_ms.is_none_or(|ms| NOW_MS - one.at_ms <= ms as i64);
            prop_assert!(stay.contains(&id) || !(is_new && is_young));
        }
    }

    #[test]
    fn backward_clock_drops_nothing(policy in any_policy(), standing in any_standing(), back in 0..2000i64) {
        let (before, after) = (kept(&policy, &standing, NOW_MS), kept(&policy, &standing, NOW_MS - back * DAY_MS));
        let lost: Vec<_> = before.difference(&after).filter(|id| {
            // A branch point may become kept for another reason, but is never lost.
            !after.contains(id)
        }).collect();
        prop_assert!(lost.is_empty(), "{lost:?}");
    }

    #[test]
    fn thinning_preserves_ancestry(policy in any_policy(), standing in any_standing()) {
        let stay = kept(&policy, &standing, NOW_MS);
        let before: HashMap<_, _> = standing.checkpoints.iter().map(|one| (one.id, one.parent)).collect();
        let after = thinned(&standing, &stay);
        for one in &stay {
            let (was, is) = (ancestors(*one, &before), ancestors(*one, &after));
            prop_assert!(is.iter().all(|at| stay.contains(at)));
            let expected: Vec<_> = was.into_iter().filter(|at| stay.contains(at)).collect();
            prop_assert_eq!(is, expected);
            // The branch point of two kept checkpoints still exists.
            for other in &stay {
                let others = ancestors(*other, &before);
                let parted = ancestors(*one, &before).into_iter().find(|at| others.contains(at));
                prop_assert!(parted.is_none_or(|at| stay.contains(&at)));
            }
        }
    }

    #[test]
    fn retention_plan_is_idempotent(policy in any_policy(), standing in any_standing()) {
        let stay = kept(&policy, &standing, NOW_MS);
        let parents = thinned(&standing, &stay);
        let left: Vec<Checkpoint> = standing.checkpoints.iter().filter(|one| stay.contains(&one.id)).cloned()
            .map(|one| Checkpoint { parent: parents[&one.id], ..one }).collect();
        let again = Standing { checkpoints: left, needed: standing.needed.clone() };
        // A branch point that is now among the newest is the only difference, and it is kept.
        prop_assert_eq!(kept(&policy, &again, NOW_MS), stay);
    }
}
