//! Every failure at every step of a freeze.

use super::capture::{Action, Capture, Outcome, Reply};
use super::on_failure::OnFailure;

const MEMBERS: usize = 3;

/// What a freeze has done.
#[derive(Debug, Default, PartialEq, Eq)]
struct World {
    suspended: [bool; MEMBERS],
    pinned: [bool; MEMBERS],
    stored: [bool; MEMBERS],
    intent: bool,
    visible: bool,
    /// Without the seal, a new daemon pauses the group.
    armed: bool,
    paused: [bool; MEMBERS],
}

impl World {
    fn perform(&mut self, action: Action) -> Reply {
        match action {
            Action::Arm => self.armed = true,
            Action::Suspend(at) => self.suspended[at] = true,
            Action::Lock(at) | Action::Confirm(at) => return Reply::At(format!("r{at}")),
            Action::Snapshot(at) => {
                self.pinned[at] = true;
                return Reply::At(format!("r{at}"));
            }
            Action::Intent => self.intent = true,
            Action::Store(at) => self.stored[at] = true,
            Action::Seal => (self.visible, self.intent, self.armed) = (true, false, false),
            Action::Withdraw => {
                let World { suspended, paused, .. } = *self;
                *self = World { suspended, paused, ..World::default() };
            }
            Action::Resume(at) => self.suspended[at] = false,
            Action::Pause(at) => (self.suspended[at], self.paused[at]) = (false, true),
            Action::End => {}
        }
        Reply::Done
    }
}

/// Runs a freeze; the action number `at` gets `fault` in place of its reply. `acts`: whether it is carried out anyway.
fn run(at: usize, fault: Option<&Reply>, acts: bool) -> (Vec<Action>, World, Outcome) {
    run_with(OnFailure::Resume, at, fault, acts)
}

fn run_with(on_failure: OnFailure, at: usize, fault: Option<&Reply>, acts: bool) -> (Vec<Action>, World, Outcome) {
    let (mut machine, mut world, mut actions) = (Capture::new(MEMBERS, on_failure), World::default(), Vec::new());
    while machine.next() != Action::End {
        assert!(actions.len() < 100, "it does not end: {actions:?}");
        let action = machine.next();
        let is_hit = fault.is_some() && actions.len() == at;
        let reply = if is_hit && !acts { Reply::Done } else { world.perform(action) };
        actions.push(action);
        machine.reply(if is_hit { fault.cloned().unwrap_or(reply) } else { reply });
    }
    let outcome = machine.outcome().expect("it has ended");
    (actions, world, outcome)
}

#[test]
fn freeze_seals_after_every_member() {
    let (actions, world, outcome) = run(0, None, true);
    assert_eq!(outcome, Outcome::Sealed);
    let all = [true; MEMBERS];
    assert_eq!(world, World { pinned: all, stored: all, visible: true, ..World::default() });
    let place = |wanted: Action| actions.iter().position(|action| *action == wanted).expect("it happens");
    for at in 0..MEMBERS {
        // All are suspended before the first is locked, and all confirmed before the first is resumed.
        assert!(place(Action::Suspend(at)) < place(Action::Lock(0)));
        assert!(place(Action::Snapshot(at)) < place(Action::Confirm(0)));
        assert!(place(Action::Confirm(at)) < place(Action::Resume(0)));
        // All are resumed before anything is written, and all stored before the seal.
        assert!(place(Action::Resume(at)) < place(Action::Intent));
        assert!(place(Action::Intent) < place(Action::Store(at)));
        assert!(place(Action::Store(at)) < place(Action::Seal));
    }
}

/// Runs a freeze with each wrong reply to each of its actions.
fn with_each_failure(on_failure: OnFailure, mut check: impl FnMut(&str, Action, Vec<Action>, World)) {
    let whole = run_with(on_failure, 0, None, true).0;
    let lies = [Reply::Failed("no".into()), Reply::Late, Reply::At("other".into()), Reply::Done];
    let mut failures = 0;
    for (at, action) in whole.iter().enumerate() {
        for fault in &lies {
            let is_right = match action {
                Action::Lock(_) => matches!(fault, Reply::At(_)),
                Action::Snapshot(_) | Action::Confirm(_) => false,
                Action::Arm | Action::Suspend(_) | Action::Intent | Action::Store(_) | Action::Seal => {
                    *fault == Reply::Done
                }
                // What was pinned holds.
                Action::Resume(_) => true,
                Action::Pause(_) | Action::Withdraw | Action::End => unreachable!("not in a run without failures"),
            };
            for acts in [true, false] {
                // A seal whose reply is lost is undone by its owner's transaction; the model has no such seal.
                if is_right || (*action == Action::Seal && acts) {
                    continue;
                }
                let (actions, world, outcome) = run_with(on_failure, at, Some(fault), acts);
                let what = format!("{fault:?} at {action:?}, carried out: {acts}: {actions:?}");
                assert!(matches!(outcome, Outcome::Failed { .. }), "{what}");
                assert!(!actions.contains(&Action::Seal) || *action == Action::Seal, "{what}");
                check(&what, *action, actions, world);
                failures += 1;
            }
        }
    }
    assert!(failures > 60, "{failures}");
}

#[test]
fn every_failure_leaves_nothing() {
    with_each_failure(OnFailure::Resume, |what, _, _, world| assert_eq!(world, World::default(), "{what}"));
}

/// Nothing is left, and every member is paused before the record of the freeze goes.
#[test]
fn every_failure_pauses() {
    let paused = World { paused: [true; MEMBERS], ..World::default() };
    with_each_failure(OnFailure::Pause, |what, failed, actions, world| {
        assert_eq!(world, paused, "{what}");
        assert_eq!((actions[0], actions.last()), (Action::Arm, Some(&Action::Withdraw)), "{what}");
        let is_late = matches!(failed, Action::Intent | Action::Store(_) | Action::Seal);
        assert_eq!(actions.contains(&Action::Resume(0)), is_late, "{what}");
    });
    let (actions, world, outcome) = run_with(OnFailure::Pause, 0, None, true);
    assert!(outcome == Outcome::Sealed && world.visible && !world.armed && world.paused == [false; MEMBERS]);
    assert_eq!(actions[..2], [Action::Arm, Action::Suspend(0)]);
}

/// A different revision in the lock is found by the snapshot.
#[test]
fn lie_in_lock_is_found() {
    let lock = MEMBERS;
    let (_, world, outcome) = run(lock, Some(&Reply::At("other".into())), true);
    assert!(matches!(outcome, Outcome::Failed { member: Some(0), .. }), "{outcome:?}");
    assert!(!world.visible);
}

#[test]
fn suspended_members_stay_suspended() {
    let mut machine = Capture::of_suspended(MEMBERS);
    let mut world = World { suspended: [true; MEMBERS], ..World::default() };
    while machine.next() != Action::End {
        let action = machine.next();
        assert!(!matches!(action, Action::Suspend(_) | Action::Resume(_)));
        let reply = world.perform(action);
        machine.reply(reply);
    }
    assert!(world.visible && world.suspended == [true; MEMBERS] && world.stored == [true; MEMBERS]);
}

/// A member whose resumption fails changes nothing: its content was pinned.
#[test]
fn failed_resumption_is_sealed() {
    let (whole, _, _) = run(0, None, true);
    let resumed = whole.iter().position(|action| *action == Action::Resume(1)).expect("it happens");
    let (_, world, outcome) = run(resumed, Some(&Reply::Failed("gone".into())), true);
    assert!(outcome == Outcome::Sealed && world.visible);
}

/// A failure resumes the members before anything is withdrawn.
#[test]
fn failure_resumes_first() {
    for at in MEMBERS..4 * MEMBERS {
        let (actions, _, _) = run(at, Some(&Reply::Late), true);
        let withdrawn = actions.iter().position(|action| *action == Action::Withdraw);
        assert_eq!(withdrawn.is_some(), at >= 2 * MEMBERS, "{actions:?}");
        assert!(withdrawn.is_none_or(|at| matches!(actions[at - 1], Action::Resume(2)) && at + 1 == actions.len()));
    }
}

#[test]
fn empty_freeze_fails() {
    assert!(matches!(Capture::new(0, OnFailure::Pause).outcome(), Some(Outcome::Failed { .. })));
}
