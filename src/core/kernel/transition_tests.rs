//! Every transition × step × decision × event, and random runs against the rules that must always hold.

use proptest::prelude::*;

use super::*;

fn id(n: u8) -> CheckpointId {
    CheckpointId::from_bytes([n; 16])
}

/// An intent of each kind that has a record.
fn intents() -> [Transition; 4] {
    [
        Transition::Restore { target: id(1), safety: id(2), options: Options::default() },
        Transition::Archive { checkpoint: id(3) },
        Transition::Unarchive { checkpoint: id(4) },
        Transition::HandoverOut {
            handover: HandoverId::from_bytes([5; 16]),
            checkpoint: id(6),
            host: HostId::from_bytes([7; 16]),
            epoch: Epoch(2),
        },
    ]
}

const DECISIONS: [Decision; 3] = [Decision::Open, Decision::Committed, Decision::Aborted];
const STEPS: [Step; 6] = [Step::Prepare, Step::Files, Step::EngineState, Step::Commit, Step::Lifecycle, Step::Cleanup];
const CLAIM: Claim = Claim(1);

fn record(transition: Transition, decision: Decision) -> Record {
    Record { decision, ..Record::open(transition, "me".into(), 5) }
}

fn events() -> Vec<Event> {
    let mut events: Vec<Event> = STEPS.into_iter().map(Event::Entered).collect();
    events.extend(intents().map(|one| Event::Recorded(record(one, Decision::Open))));
    let other_safety = Transition::Restore { target: id(1), safety: id(9), options: Options::default() };
    events.push(Event::Recorded(record(other_safety, Decision::Open)));
    events.extend([Decision::Aborted, Decision::Committed].map(|made| Event::Recorded(record(intents()[0], made))));
    events.extend([Event::Committed, Event::Aborted, Event::Cleared, Event::Released]);
    events
}

/// Every phase that has an owner, and the two that have none.
fn phases() -> Vec<Phase> {
    let mut phases = vec![Phase::Idle];
    for kind in Kind::ALL {
        phases.push(Phase::Preparing { claim: CLAIM, kind, interrupted: None });
        phases.push(Phase::Finished { claim: CLAIM, kind });
    }
    for decision in DECISIONS {
        for intent in intents() {
            let record = record(intent, decision);
            phases.push(Phase::Interrupted { record: record.clone() });
            for step in intent.kind().steps() {
                phases.push(Phase::Running { claim: CLAIM, record: record.clone(), step: *step });
            }
        }
        let interrupted = Some(record(intents()[0], decision));
        phases.push(Phase::Preparing { claim: CLAIM, kind: Kind::Restore, interrupted });
    }
    phases
}

fn at(phase: Phase) -> Transitions {
    Transitions { phase, removal: None, last_claim: 1 }
}

#[test]
fn steps_have_one_commit_point() {
    for kind in Kind::ALL {
        let steps = kind.steps();
        assert_eq!(steps[0], Step::Prepare, "{kind:?}");
        assert_eq!(steps.iter().filter(|step| **step == Step::Commit).count(), 1, "{kind:?}");
        for (at, step) in steps.iter().enumerate() {
            assert!(!steps[..at].contains(step), "{kind:?} has {step:?} twice");
        }
    }
}

/// Before the decision a revert loses nothing; after it, finishing loses nothing.
#[test]
fn recovery_follows_record() {
    for intent in intents() {
        for decision in DECISIONS {
            let expected = match (intent.kind(), decision) {
                (_, Decision::Committed) => Recovery::Finish,
                (_, Decision::Aborted) => Recovery::Revert,
                (Kind::Restore, Decision::Open) => Recovery::FinishOrRevert,
                (_, Decision::Open) => Recovery::Revert,
            };
            let record = record(intent, decision);
            assert_eq!(record.recovery(), expected, "{record:?}");
            for step in intent.kind().steps() {
                let mut found = at(Phase::Running { claim: CLAIM, record: record.clone(), step: *step });
                found.apply(CLAIM, Event::Released).expect("the owner leaves");
                assert_eq!(found.recover().map(|(_, found)| found.recovery()), Some(expected), "{record:?} {step:?}");
                let mut loaded = Transitions::loaded(Some(record.clone()));
                assert_eq!(loaded.recover().map(|(_, found)| found), Some(record.clone()), "{step:?}");
            }
        }
    }
}

/// A simple reference model of the phase that follows each pair.
fn expected(phase: &Phase, event: &Event) -> Option<Phase> {
    let finished = |kind| Some(Phase::Finished { claim: CLAIM, kind });
    match (phase, event) {
        (Phase::Idle | Phase::Interrupted { .. }, _) => None,
        (Phase::Preparing { interrupted: None, .. } | Phase::Finished { .. }, Event::Released) => Some(Phase::Idle),
        (Phase::Preparing { interrupted: Some(record), .. } | Phase::Running { record, .. }, Event::Released) => {
            Some(Phase::Interrupted { record: record.clone() })
        }
        (Phase::Preparing { kind, interrupted, .. }, Event::Recorded(record)) => {
            // In place of an interrupted restore, only one with the same safety checkpoint.
            let is_safe = interrupted.is_none()
                || matches!(record.transition, Transition::Restore { safety, .. } if safety == id(2));
            (record.transition.kind() == *kind && record.decision == Decision::Open && is_safe)
                .then(|| Phase::Running { claim: CLAIM, record: record.clone(), step: Step::Prepare })
        }
        (Phase::Preparing { .. } | Phase::Finished { .. }, _) => None,
        (Phase::Running { record, step, .. }, event) => {
            let kind = record.transition.kind();
            let set = |decision, step| {
                Some(Phase::Running { claim: CLAIM, record: Record { decision, ..record.clone() }, step })
            };
            match (event, record.decision) {
                (Event::Committed, Decision::Open) if kind == Kind::Restore => finished(kind),
                (Event::Committed, Decision::Open) => set(Decision::Committed, Step::Commit),
                (Event::Aborted, Decision::Open) => set(Decision::Aborted, Step::Prepare),
                (Event::Cleared, Decision::Open) if kind == Kind::Restore => None,
                (Event::Cleared, _) => finished(kind),
                (Event::Entered(next), decision) => {
                    let order = kind.steps();
                    let after_commit = [Step::Lifecycle, Step::Cleanup].contains(next);
                    let place = |step| order.iter().position(|one| one == step);
                    let is_due = place(next) >= place(step) && order.contains(next);
                    (is_due && (!after_commit || decision == Decision::Committed)).then(|| set(decision, *next))?
                }
                _ => None,
            }
        }
    }
}

#[test]
fn every_phase_takes_every_event() {
    let mut pairs = 0;
    for phase in phases() {
        for event in events() {
            let mut state = at(phase.clone());
            let done = state.apply(CLAIM, event.clone());
            match expected(&phase, &event) {
                Some(after) => assert_eq!((done, &state.phase), (Ok(()), &after), "{phase:?} {event:?}"),
                None => assert_eq!(
                    (done, &state.phase),
                    (Err(Refusal::OutOfOrder), &phase),
                    "{phase:?} {event:?}: a refused event changes nothing"
                ),
            }
            let mut others = at(phase.clone());
            assert_eq!(others.apply(Claim(9), event), Err(Refusal::OutOfOrder), "only the owner may apply events");
            assert_eq!(others.phase, phase);
            pairs += 1;
        }
    }
    assert!(pairs > 500, "{pairs}");
}

/// Every transition × every phase: a second one is refused and names the first.
#[test]
fn second_transition_is_refused() {
    for phase in phases() {
        for kind in Kind::ALL {
            let mut state = at(phase.clone());
            let (active, interrupted) = (state.active(), state.interrupted());
            let begun = state.begin(kind);
            let wanted = match (active, interrupted) {
                (None, None) => Ok(()),
                (None, Some(Kind::HandoverOut)) if kind == Kind::Remove => Err(Refusal::Interrupted(Kind::HandoverOut)),
                (None, Some(_)) | (Some(Kind::Restore), _) if kind == Kind::Remove => Ok(()),
                (None, Some(Kind::Restore)) if kind == Kind::Restore => Ok(()),
                (Some(active), _) => Err(Refusal::UnderWay(active)),
                (None, Some(found)) => Err(Refusal::Interrupted(found)),
            };
            assert_eq!(begun.map(drop), wanted, "{kind:?} in {phase:?}");
            if let Err(refusal) = wanted {
                let error = refusal.of_kernel("k");
                let (Refusal::UnderWay(first) | Refusal::Interrupted(first)) = refusal else { panic!("{refusal:?}") };
                assert_eq!(error.code, crate::core::error::ErrorCode::Conflict);
                assert!(error.message.contains(first.participle()) || error.message.contains(first.name()), "{error}");
                assert!(!error.reason.is_empty() && !error.hint.is_empty(), "{error}");
                assert_eq!(state, at(phase.clone()), "a refusal changes nothing");
            } else {
                assert_eq!(state.active(), Some(kind));
                for next in Kind::ALL {
                    let may = next == Kind::Remove && kind == Kind::Restore;
                    assert_eq!(state.clone().begin(next).is_ok(), may, "{next:?} beside {kind:?}");
                }
            }
        }
    }
}

/// A failed removal keeps the transition beside which it began.
#[test]
fn removal_leaves_transition() {
    for phase in phases() {
        let mut state = at(phase.clone());
        let Ok(removal) = state.begin(Kind::Remove) else { continue };
        assert_eq!(state.active(), Some(Kind::Remove));
        assert_eq!(state.recover(), None, "what is removed is not recovered");
        for event in events().into_iter().filter(|event| *event != Event::Released) {
            assert_eq!(state.apply(removal, event), Err(Refusal::OutOfOrder));
        }
        state.apply(removal, Event::Released).expect("it fails");
        assert_eq!(state.phase, phase);
    }
}

#[test]
fn record_survives_storage() {
    for intent in intents() {
        for decision in DECISIONS {
            let record = record(intent, decision);
            let text = serde_json::to_string(&record).expect("JSON");
            assert!(text.contains(intent.kind().name()), "{text}");
            assert_eq!(serde_json::from_str::<Record>(&text).expect("read back"), record);
        }
    }
}

/// One move of a random run.
#[derive(Debug, Clone)]
enum Move {
    Begin(Kind),
    Recover,
    /// By the newest owner or the oldest; with a crash between the database's write and memory.
    Apply {
        newest: bool,
        event: usize,
        crash: bool,
    },
    Crash,
}

fn moves() -> impl Strategy<Value = Move> {
    prop_oneof![
        (0..Kind::ALL.len()).prop_map(|kind| Move::Begin(Kind::ALL[kind])),
        Just(Move::Recover),
        (any::<bool>(), 0..events().len(), proptest::bool::weighted(0.1))
            .prop_map(|(newest, event, crash)| Move::Apply { newest, event, crash }),
        Just(Move::Crash),
    ]
}

/// The record in the database after an event.
fn written(stored: Option<Record>, event: Event) -> Option<Record> {
    match event {
        Event::Recorded(record) => Some(record),
        Event::Committed => stored
            .filter(|record| record.transition.kind() != Kind::Restore)
            .map(|record| Record { decision: Decision::Committed, ..record }),
        Event::Aborted => stored.map(|record| Record { decision: Decision::Aborted, ..record }),
        Event::Cleared => None,
        Event::Entered(_) | Event::Released => stored,
    }
}

proptest! {
    /// The content of `state.db` and the state of the machine agree after any sequence of events.
    #[test]
    fn memory_agrees_with_storage(moves in proptest::collection::vec(moves(), 0..60)) {
        let mut state = Transitions::default();
        let mut stored: Option<Record> = None;
        let mut claims: Vec<Claim> = Vec::new();
        for one in moves {
            match one {
                Move::Begin(kind) => claims.extend(state.begin(kind)),
                Move::Recover => claims.extend(state.recover().map(|(claim, _)| claim)),
                Move::Crash => {
                    state = Transitions::loaded(stored.clone());
                    claims.clear();
                }
                Move::Apply { newest, event, crash } => {
                    let claim = if newest { claims.last() } else { claims.first() };
                    let (Some(claim), event) = (claim.copied(), events()[event].clone()) else { continue };
                    let mut after = state.clone();
                    if after.apply(claim, event.clone()).is_err() {
                        continue;
                    }
                    stored = written(stored, event);
                    if crash {
                        after = Transitions::loaded(stored.clone());
                        claims.clear();
                    }
                    state = after;
                }
            }
            prop_assert_eq!(state.record(), stored.as_ref());
            prop_assert!(state.interrupted().is_none() || stored.is_some());
        }
    }
}
