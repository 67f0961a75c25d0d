//! Every failure, and every end of the daemon, at every step of a restore.

use super::capture::Reply;
use super::restore::{Action, Outcome, Restore};
use crate::core::limits;

const MEMBERS: usize = 3;
/// Members of the group that are not restored.
const OTHERS: usize = 2;
const ALL: usize = MEMBERS + OTHERS;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Before,
    Between,
    Target,
}

/// What a restore has done.
#[derive(Debug, Clone, PartialEq, Eq)]
struct World {
    members: [At; MEMBERS],
    inactive: [bool; MEMBERS],
    suspended: [bool; ALL],
    safety: bool,
    /// Members that may have been changed, if the intent is recorded.
    intent: Option<usize>,
    committed: bool,
}

impl World {
    fn new() -> World {
        World {
            members: [At::Before; MEMBERS],
            inactive: [false; MEMBERS],
            suspended: [false; ALL],
            safety: false,
            intent: None,
            committed: false,
        }
    }

    /// Carries out an action, perhaps in part.
    fn perform(&mut self, action: Action, whole: bool) {
        match action {
            Action::Suspend(at) => self.suspended[at] = true,
            Action::Safety if whole => {
                assert_eq!(self.suspended, [true; ALL], "a safety freeze of a part");
                self.safety = true;
            }
            Action::Intent if whole => self.intent = Some(0),
            Action::Prepare(at) => self.inactive[at] = true,
            Action::Switch(at) => {
                assert!(self.safety && self.suspended == [true; ALL], "unsafe switch");
                self.intent = Some(at + 1);
                self.members[at] = if whole { At::Target } else { At::Between };
            }
            Action::Revert(at) => self.members[at] = if whole { At::Before } else { At::Between },
            Action::Discard(at) => self.inactive[at] = false,
            Action::Commit if whole => (self.committed, self.intent) = (true, None),
            Action::Clear if whole => self.intent = None,
            Action::Resume(at) => self.suspended[at] = false,
            _ => {}
        }
    }

    fn is_clean(&self) -> bool {
        self.inactive == [false; MEMBERS] && self.suspended == [false; ALL] && self.intent.is_none()
    }
}

/// Runs a machine; each pair of `faults` is the number of an action and whether it is carried out, in part, before it
/// fails.
fn run(machine: &mut Restore, world: &mut World, faults: &[(usize, bool)]) -> (Vec<Action>, Outcome) {
    let mut actions = Vec::new();
    while machine.next() != Action::End {
        assert!(actions.len() < 200, "it does not end: {actions:?}");
        let action = machine.next();
        let fault = faults.iter().find(|(at, _)| *at == actions.len());
        match fault {
            Some((_, acts)) => {
                if *acts {
                    world.perform(action, false);
                }
                machine.reply(if *acts { Reply::Late } else { Reply::Failed("no".into()) });
            }
            None => {
                world.perform(action, true);
                machine.reply(Reply::Done);
            }
        }
        actions.push(action);
    }
    (actions, machine.outcome().expect("it has ended"))
}

fn whole() -> Vec<Action> {
    run(&mut Restore::new(MEMBERS, OTHERS), &mut World::new(), &[]).0
}

#[test]
fn restore_switches_every_member() {
    let mut world = World::new();
    let (_, outcome) = run(&mut Restore::new(MEMBERS, OTHERS), &mut world, &[]);
    assert_eq!(outcome, Outcome::Restored);
    assert!(world.is_clean() && world.committed && world.members == [At::Target; MEMBERS], "{world:?}");
}

#[test]
fn every_failure_is_reverted() {
    let actions = whole();
    for (at, action) in actions.iter().enumerate() {
        for acts in [true, false] {
            let mut world = World::new();
            let (taken, outcome) = run(&mut Restore::new(MEMBERS, OTHERS), &mut world, &[(at, acts)]);
            let what = format!("{action:?}, in part: {acts}: {taken:?}");
            match action {
                // What is not removed is swept; what is not resumed is over.
                Action::Discard(_) | Action::Resume(_) => assert_eq!(outcome, Outcome::Restored, "{what}"),
                _ => {
                    assert!(matches!(outcome, Outcome::AsBefore { .. }), "{what}");
                    assert_eq!(world.members, [At::Before; MEMBERS], "{what}");
                    assert!(world.is_clean() && !world.committed, "{what}: {world:?}");
                }
            }
        }
    }
}

/// A second failure, at any action of the way back: the outcome is certain, or the intent stays.
#[test]
fn second_failure_is_recovered() {
    let mut unfinished = 0;
    for at in 0..whole().len() {
        for next in at + 1..at + 20 {
            for repeated in [1, limits::REVERT_ATTEMPTS as usize] {
                let mut world = World::new();
                let mut faults = vec![(at, true)];
                faults.extend((0..repeated).map(|n| (next + n, true)));
                let (taken, outcome) = run(&mut Restore::new(MEMBERS, OTHERS), &mut world, &faults);
                match outcome {
                    Outcome::Restored => assert_eq!(world.members, [At::Target; MEMBERS], "{taken:?}"),
                    Outcome::AsBefore { .. } => assert_eq!(world.members, [At::Before; MEMBERS], "{taken:?}"),
                    Outcome::Unfinished { .. } => {
                        unfinished += 1;
                        let Some(reached) = world.intent else {
                            assert_eq!(world.members, [At::Before; MEMBERS], "{taken:?}");
                            continue;
                        };
                        // The recovery holds anew what it needs.
                        world.suspended = [false; ALL];
                        assert!(!taken.contains(&Action::Clear) || world.members == [At::Before; MEMBERS], "{taken:?}");
                        let (_, outcome) = run(&mut Restore::recovery(MEMBERS, reached), &mut world, &[]);
                        assert!(matches!(outcome, Outcome::AsBefore { .. }));
                        assert!(world.is_clean() && world.members == [At::Before; MEMBERS], "{taken:?}: {world:?}");
                    }
                }
            }
        }
    }
    assert!(unfinished > 5, "{unfinished}");
}

/// The daemon ends before, in or after any action; the next one has the intent only.
#[test]
fn daemon_end_is_recovered() {
    for at in 0..whole().len() {
        for part in [None, Some(false), Some(true)] {
            let (mut machine, mut world) = (Restore::new(MEMBERS, OTHERS), World::new());
            for _ in 0..at {
                world.perform(machine.next(), true);
                machine.reply(Reply::Done);
            }
            let action = machine.next();
            if let Some(whole) = part {
                world.perform(action, whole);
            }
            // A new daemon holds nothing.
            world.suspended = [false; ALL];
            let Some(reached) = world.intent else {
                let outcome = if world.committed { At::Target } else { At::Before };
                assert_eq!(world.members, [outcome; MEMBERS], "{action:?} {part:?}");
                continue;
            };
            let (_, outcome) = run(&mut Restore::recovery(MEMBERS, reached), &mut world, &[]);
            assert!(matches!(outcome, Outcome::AsBefore { .. }), "{action:?} {part:?}");
            assert!(world.is_clean() && world.members == [At::Before; MEMBERS], "{action:?} {part:?}: {world:?}");
        }
    }
}
