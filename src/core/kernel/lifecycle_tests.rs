//! Every state × every event, and random lives against the rules that must always hold.

use proptest::prelude::*;

use super::*;

const NOW: i64 = 1_000_000;
const EXEC: ExecId = ExecId(7);
const HELD_BY: CheckpointId = CheckpointId::from_bytes([7; 16]);
const THERE: HostId = HostId::from_bytes([8; 16]);
const MOVE: HandoverId = HandoverId::from_bytes([9; 16]);
const DEPARTED: State = State::Departed { host: THERE, epoch: Epoch(2), handover: MOVE };

fn states() -> Vec<State> {
    vec![
        State::Created,
        State::Starting,
        State::Ready,
        State::Busy { exec: EXEC },
        State::Stopping { reason: StopReason::Asked, exec: None },
        State::Stopping { reason: StopReason::Asked, exec: Some(EXEC) },
        State::Stopped { reason: StopReason::Idle },
        State::Crashed { cause: CrashCause::Killed, restart: Restart::At(NOW + 100) },
        State::Crashed { cause: CrashCause::Killed, restart: Restart::Breaker { until_ms: NOW + 100 } },
        State::Archived { checkpoint: HELD_BY },
        DEPARTED,
        State::Suspended,
    ]
}

fn life(state: State) -> Life {
    Life { state, attempt: 3, crashes: Vec::new() }
}

fn after(state: State, event: Event) -> (State, Vec<Action>) {
    let mut life = life(state);
    let actions = life.step(event, NOW);
    (life.state, actions)
}

/// One row for each event, with the name of the state that follows each state of `states`.
fn table() -> Vec<(Event, [&'static str; 12])> {
    let killed = || CrashCause::Killed;
    vec![
        //                                        created      starting    ready       busy       stopping   stopping+x  stopped     crashed     breaker    archived   departed   suspended
        (
            Event::Used,
            [
                "starting", "starting", "ready", "busy", "stopping", "stopping", "starting", "crashed", "crashed",
                "archived", "departed", "starting",
            ],
        ),
        (
            Event::StartAsked,
            [
                "starting", "starting", "ready", "busy", "stopping", "stopping", "starting", "starting", "starting",
                "archived", "departed", "starting",
            ],
        ),
        (
            Event::WorkerReady { attempt: 3 },
            [
                "created",
                "ready",
                "ready",
                "busy",
                "stopping",
                "stopping",
                "stopped",
                "crashed",
                "crashed",
                "archived",
                "departed",
                "suspended",
            ],
        ),
        (
            Event::WorkerReady { attempt: 2 },
            [
                "created",
                "starting",
                "ready",
                "busy",
                "stopping",
                "stopping",
                "stopped",
                "crashed",
                "crashed",
                "archived",
                "departed",
                "suspended",
            ],
        ),
        (
            Event::WorkerEnded { attempt: 3, cause: killed() },
            [
                "created", "crashed", "crashed", "crashed", "stopped", "stopped", "stopped", "crashed", "crashed",
                "archived", "departed", "stopped",
            ],
        ),
        (
            Event::WorkerEnded { attempt: 2, cause: killed() },
            [
                "created",
                "starting",
                "ready",
                "busy",
                "stopping",
                "stopping",
                "stopped",
                "crashed",
                "crashed",
                "archived",
                "departed",
                "suspended",
            ],
        ),
        (
            Event::WorkerRefused { attempt: 3, why: StopReason::NoPlace },
            [
                "created", "stopped", "crashed", "crashed", "stopped", "stopped", "stopped", "crashed", "crashed",
                "archived", "departed", "stopped",
            ],
        ),
        (
            Event::WorkerRefused { attempt: 2, why: StopReason::NoPlace },
            [
                "created",
                "starting",
                "ready",
                "busy",
                "stopping",
                "stopping",
                "stopped",
                "crashed",
                "crashed",
                "archived",
                "departed",
                "suspended",
            ],
        ),
        (
            Event::ExecutionStarted { exec: EXEC },
            [
                "created",
                "starting",
                "busy",
                "busy",
                "stopping",
                "stopping",
                "stopped",
                "crashed",
                "crashed",
                "archived",
                "departed",
                "suspended",
            ],
        ),
        (
            Event::ExecutionEnded { exec: EXEC },
            [
                "created",
                "starting",
                "ready",
                "ready",
                "stopping",
                "stopping",
                "stopped",
                "crashed",
                "crashed",
                "archived",
                "departed",
                "suspended",
            ],
        ),
        (
            Event::ExecutionEnded { exec: ExecId(1) },
            [
                "created",
                "starting",
                "ready",
                "busy",
                "stopping",
                "stopping",
                "stopped",
                "crashed",
                "crashed",
                "archived",
                "departed",
                "suspended",
            ],
        ),
        (
            Event::IdleElapsed,
            [
                "created",
                "starting",
                "stopping",
                "busy",
                "stopping",
                "stopping",
                "stopped",
                "crashed",
                "crashed",
                "archived",
                "departed",
                "suspended",
            ],
        ),
        (
            Event::StopAsked { reason: StopReason::Asked, force: false },
            [
                "created", "stopping", "stopping", "stopping", "stopping", "stopping", "stopped", "stopped", "stopped",
                "archived", "departed", "stopping",
            ],
        ),
        (
            Event::StopAsked { reason: StopReason::Daemon, force: true },
            [
                "created", "stopping", "stopping", "stopping", "stopping", "stopping", "stopped", "stopped", "stopped",
                "archived", "departed", "stopping",
            ],
        ),
        (
            Event::BackoffElapsed,
            [
                "created",
                "starting",
                "ready",
                "busy",
                "stopping",
                "stopping",
                "stopped",
                "starting",
                "crashed",
                "archived",
                "departed",
                "suspended",
            ],
        ),
        (
            Event::ArchiveAsked { checkpoint: HELD_BY },
            [
                "archived",
                "starting",
                "ready",
                "busy",
                "stopping",
                "stopping",
                "archived",
                "archived",
                "archived",
                "archived",
                "departed",
                "suspended",
            ],
        ),
        (
            Event::Unarchived,
            [
                "created",
                "starting",
                "ready",
                "busy",
                "stopping",
                "stopping",
                "stopped",
                "crashed",
                "crashed",
                "stopped",
                "departed",
                "suspended",
            ],
        ),
        (
            Event::DepartureCommitted { host: THERE, epoch: Epoch(2), handover: MOVE },
            [
                "departed",
                "starting",
                "ready",
                "busy",
                "stopping",
                "stopping",
                "departed",
                "departed",
                "departed",
                "departed",
                "departed",
                "suspended",
            ],
        ),
        (
            Event::Suspended,
            [
                "created",
                "starting",
                "suspended",
                "busy",
                "stopping",
                "stopping",
                "stopped",
                "crashed",
                "crashed",
                "archived",
                "departed",
                "suspended",
            ],
        ),
        (Event::SuspendedAdopted, ["suspended"; 12]),
        (Event::WorkerAdopted { running: None }, ["ready"; 12]),
        (Event::WorkerAdopted { running: Some(EXEC) }, ["busy"; 12]),
    ]
}

#[test]
fn every_state_and_event() {
    for (event, expected) in table() {
        for (state, name) in states().into_iter().zip(expected) {
            let from = state.clone();
            let (to, _) = after(state, event.clone());
            assert_eq!(to.name(), name, "{event:?} in {from:?}");
        }
    }
}

#[test]
fn suspended_worker_end_is_no_crash() {
    let mut life = life(State::Suspended);
    let actions = life.step(Event::WorkerEnded { attempt: 3, cause: CrashCause::Killed }, NOW);
    assert_eq!(life.state, State::Stopped { reason: StopReason::Suspended });
    assert!(life.crashes.is_empty() && actions.contains(&Action::Dispatch), "{actions:?}");
}

#[test]
fn suspended_worker_resumes_before_stop() {
    let (_, actions) = after(State::Suspended, Event::StopAsked { reason: StopReason::Asked, force: true });
    let at = |wanted: &Action| actions.iter().position(|action| action == wanted);
    assert!(at(&Action::ResumeWorker { attempt: 3 }) < at(&Action::StopWorker), "{actions:?}");
    assert!(at(&Action::StopWorker).is_some());
}

#[test]
fn lost_execution_is_reported() {
    for state in [State::Busy { exec: EXEC }, State::Stopping { reason: StopReason::Asked, exec: Some(EXEC) }] {
        let (_, actions) = after(state, Event::WorkerEnded { attempt: 3, cause: CrashCause::OutOfMemory });
        assert!(actions.contains(&Action::EndAsLost { exec: EXEC, cause: CrashCause::OutOfMemory }));
    }
}

#[test]
fn refused_start_is_no_crash() {
    let mut life = Life::default();
    for _ in 0..5 {
        let _ = life.step(Event::StartAsked, NOW);
        let _ = life.step(Event::WorkerRefused { attempt: life.attempt, why: StopReason::NoPlace }, NOW);
        assert_eq!(life.state, State::Stopped { reason: StopReason::NoPlace });
        assert!(life.crashes.is_empty() && !life.breaker_is_open(NOW));
    }
}

#[test]
fn three_crashes_open_breaker() {
    let mut life = Life::default();
    let _ = life.step(Event::Used, NOW);
    for n in 0..3 {
        let at = NOW + n * 1000;
        let _ = life.step(Event::BackoffElapsed, at);
        let actions = life.step(Event::WorkerEnded { attempt: life.attempt, cause: CrashCause::Exited(1) }, at);
        let opened = actions.contains(&Action::Publish("kernel_breaker_opened"));
        assert_eq!(opened, n == 2, "crash {n}");
    }
    assert!(life.breaker_is_open(NOW + 2000));
    let queued = life.step(Event::Used, NOW + 3000);
    assert!(matches!(queued[..], [Action::FailQueued { .. }]));
    let asked = life.clone().step(Event::StartAsked, NOW + 3000);
    assert!(matches!(asked[0], Action::StartWorker { .. }), "asking closes it");
    let later = life.step(Event::Used, NOW + 2000 + 60_000);
    assert!(matches!(later[0], Action::StartWorker { .. }), "so does time");
}

#[test]
fn distant_crashes_only_back_off() {
    let mut life = Life::default();
    let _ = life.step(Event::Used, NOW);
    for n in 0..10 {
        let at = NOW + n * 61_000;
        let _ = life.step(Event::BackoffElapsed, at);
        let _ = life.step(Event::WorkerReady { attempt: life.attempt }, at);
        let actions = life.step(Event::WorkerEnded { attempt: life.attempt, cause: CrashCause::Killed }, at);
        assert!(actions.contains(&Action::ArmBackoff { delay_ms: 100 }), "{actions:?}");
    }
}

#[test]
fn slow_failing_starts_open_breaker() {
    let mut life = Life::default();
    let _ = life.step(Event::Used, NOW);
    for n in 0..3 {
        let at = NOW + n * 90_000;
        let _ = life.step(Event::BackoffElapsed, at);
        let cause = CrashCause::NotStarted(String::from("its guest does not answer"));
        let _ = life.step(Event::WorkerEnded { attempt: life.attempt, cause }, at);
        // The pause has a beginning only: the next start takes long.
        assert_eq!(life.breaker_is_open(at), n == 2, "start {n}");
    }
}

#[test]
fn backoff_doubles_to_limit() {
    let pauses: Vec<u64> = (1..=9).map(backoff_ms).collect();
    assert_eq!(pauses, [100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
}

#[test]
fn worker_end_dispatches_queue() {
    let (_, actions) = after(
        State::Stopping { reason: StopReason::Idle, exec: None },
        Event::WorkerEnded { attempt: 3, cause: CrashCause::Exited(0) },
    );
    assert_eq!(actions.last(), Some(&Action::Dispatch));
}

#[test]
fn restart_clears_missing_worker() {
    for state in states() {
        let life = life(state).without_worker();
        assert!(!life.has_worker(), "{:?}", life.state);
    }
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        Just(Event::Used),
        Just(Event::StartAsked),
        (0u64..6).prop_map(|attempt| Event::WorkerReady { attempt }),
        (0u64..6).prop_map(|attempt| Event::WorkerEnded { attempt, cause: CrashCause::Killed }),
        (0u64..3).prop_map(|e| Event::ExecutionStarted { exec: ExecId(e) }),
        (0u64..3).prop_map(|e| Event::ExecutionEnded { exec: ExecId(e) }),
        Just(Event::IdleElapsed),
        Just(Event::Suspended),
        any::<bool>().prop_map(|force| Event::StopAsked { reason: StopReason::Asked, force }),
        Just(Event::BackoffElapsed),
        Just(Event::ArchiveAsked { checkpoint: HELD_BY }),
        Just(Event::Unarchived),
        Just(Event::DepartureCommitted { host: THERE, epoch: Epoch(2), handover: MOVE }),
    ]
}

proptest! {
    /// At most one worker is starting or running, and every started worker is ended by an event or
    /// an action.
    #[test]
    fn one_worker_at_a_time(events in prop::collection::vec((any_event(), 0i64..20_000), 0..200)) {
        let mut life = Life::default();
        let mut now = NOW;
        let mut alive: Option<u64> = None;
        for (event, pause) in events {
            now += pause;
            if let Event::WorkerEnded { attempt, .. } = event && alive == Some(attempt) {
                alive = None;
            }
            let busy_before = match life.state { State::Busy { exec } => Some(exec), _ => None };
            let was_ending = matches!(&event, Event::WorkerEnded { attempt, .. } if *attempt == life.attempt);
            for action in life.step(event.clone(), now) {
                match action {
                    Action::StartWorker { attempt } => {
                        prop_assert_eq!(alive, None, "a second worker was started on {:?}", event);
                        alive = Some(attempt);
                    }
                    Action::EndAsLost { exec, .. } => prop_assert!(was_ending && busy_before.is_none_or(|b| b == exec)),
                    Action::Dispatch => prop_assert_ne!(life.state.name(), "busy"),
                    _ => {}
                }
            }
            prop_assert_eq!(life.has_worker(), alive.is_some(), "{:?} after {:?}", life.state, event);
            prop_assert!(life.crashes.len() <= limits::BREAKER_CRASHES);
        }
    }

    #[test]
    fn life_round_trips(events in prop::collection::vec(any_event(), 0..30)) {
        let mut life = Life::default();
        for event in events {
            let _ = life.step(event, NOW);
            let stored = serde_json::to_string(&life).map_err(|e| TestCaseError::fail(e.to_string()))?;
            let back: Life = serde_json::from_str(&stored).map_err(|e| TestCaseError::fail(e.to_string()))?;
            prop_assert_eq!(&back, &life);
        }
    }
}
