//! Transitions of one kernel: checkpoints, restores and suspensions, with the record that decides after a crash.

use std::collections::VecDeque;

use ryokan::core::ids::CheckpointId;
use ryokan::core::kernel::transition::{Claim, Decision, Event, Kind, Record, Recovery, Transition, Transitions};
use ryokan::core::workflow::Options;

use super::Mistake;
use super::disk::{Content, Image, KEPT, Kernel, Name};
use super::host::{Host, Io};

/// A step of a restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Safety,
    Record { target: u64 },
    EndWorker,
    Files,
    Engine,
    Commit,
    RevertFiles,
    RevertEngine,
    Clear,
}

/// The steps from the record on.
const FINISH: [Step; 4] = [Step::EndWorker, Step::Files, Step::Engine, Step::Commit];
const REVERT: [Step; 4] = [Step::EndWorker, Step::RevertFiles, Step::RevertEngine, Step::Clear];

/// What a daemon has in memory of a kernel's transition.
#[derive(Debug, Default)]
pub struct Running {
    transitions: Transitions,
    restore: Option<(Claim, VecDeque<Step>)>,
}

/// A moment as the id of its checkpoint.
fn id(moment: u64) -> CheckpointId {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&moment.to_le_bytes());
    CheckpointId::from_bytes(bytes)
}

fn moment(id: CheckpointId) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&id.as_bytes()[..8]);
    u64::from_le_bytes(bytes)
}

/// The record with this intent.
pub fn record_of(transition: Transition, decision: Decision) -> Record {
    Record { transition, decision, actor: String::new(), at_ms: 0 }
}

impl Host {
    /// The transitions of a kernel, loaded from its record.
    pub fn transitions(&mut self, kernel: Kernel) -> &mut Transitions {
        let record = self.disk.content(kernel).record;
        let load = || {
            let record = record.map(|(transition, decision)| record_of(transition, decision));
            Running { transitions: Transitions::loaded(record), restore: None }
        };
        &mut self.kernels.entry(kernel).or_insert_with(load).transitions
    }

    /// Whether a restore is under way or was interrupted: the kernel is between two states.
    pub fn changes(&self, kernel: Kernel) -> bool {
        if self.mistake == Mistake::RestoreAdmitsWork {
            return false;
        }
        let is_restored = |running: &Running| {
            let kinds = [running.transitions.active(), running.transitions.interrupted()];
            kinds.contains(&Some(Kind::Restore))
        };
        let is_recorded = matches!(self.disk.content(kernel).record, Some((Transition::Restore { .. }, _)));
        is_recorded || self.kernels.get(&kernel).is_some_and(is_restored)
    }

    /// Whether a transition, of any kind, is in the way of another change.
    pub fn is_busy_with_change(&mut self, kernel: Kernel) -> bool {
        self.transitions(kernel).admit().is_err()
    }

    /// Takes a checkpoint; returns whether it is acknowledged.
    pub fn checkpoint(&mut self, kernel: Kernel) -> bool {
        if self.is_full {
            return false;
        }
        self.disk.change_content(Name::Kernel(kernel), |content| {
            content.image.take_checkpoint();
            content.work += 1;
        });
        true
    }

    /// Suspends or resumes a kernel; returns whether it is acknowledged.
    pub fn set_suspended(&mut self, kernel: Kernel, is_suspended: bool) -> bool {
        if self.is_full || self.is_busy_with_change(kernel) {
            return false;
        }
        if self.mistake != Mistake::SuspendIsNotRecorded {
            self.disk.change_content(Name::Kernel(kernel), |content| content.is_suspended = is_suspended);
        }
        true
    }

    /// Begins a restore of one of the newest checkpoints.
    pub fn begin_restore(&mut self, kernel: Kernel, pick: usize) {
        let Image { checkpoints, taken, .. } = self.disk.content(kernel).image;
        let kept = taken.min(KEPT) as usize;
        if kept == 0 {
            return;
        }
        let target = checkpoints[pick % kept];
        let Ok(claim) = self.transitions(kernel).begin(Kind::Restore) else { return };
        let mut steps = VecDeque::from([Step::Safety, Step::Record { target }]);
        steps.extend(FINISH);
        if self.mistake == Mistake::RecordAfterFiles {
            steps = VecDeque::from([Step::Safety, Step::EndWorker, Step::Files, Step::Record { target }]);
            steps.extend(FINISH);
        }
        if let Some(running) = self.kernels.get_mut(&kernel) {
            running.restore = Some((claim, steps));
        }
    }

    /// Whether a step of a restore, or its recovery, is due.
    pub fn has_change(&self, kernel: Kernel) -> bool {
        let is_due = |running: &Running| running.restore.is_some() || running.transitions.interrupted().is_some();
        self.kernels.get(&kernel).is_some_and(is_due)
    }

    /// Performs a step of a restore, or begins its recovery; `true` when its outcome is acknowledged.
    pub fn step_restore(&mut self, kernel: Kernel, io: Io) -> bool {
        let Some(running) = self.kernels.get_mut(&kernel) else { return false };
        let Some((claim, mut steps)) = running.restore.take() else {
            self.recover_restore(kernel);
            return false;
        };
        let Some(step) = steps.pop_front() else { return false };
        let writes = io.writes || matches!(step, Step::EndWorker | Step::Commit | Step::Clear);
        if !writes || (!io.reads && matches!(step, Step::Files | Step::Engine)) {
            self.fail_restore(kernel, claim, step);
            return false;
        }
        let record = self.disk.content(kernel).record;
        let change = |host: &mut Host, change: &mut dyn FnMut(&mut Content)| {
            host.disk.change_content(Name::Kernel(kernel), |content| change(content));
        };
        let (target, safety) = match record {
            Some((Transition::Restore { target, safety, .. }, _)) => (moment(target), moment(safety)),
            _ => match steps.iter().find(|step| matches!(step, Step::Record { .. })) {
                Some(Step::Record { target }) => (*target, self.disk.content(kernel).image.files),
                _ => (0, 0),
            },
        };
        let transitions = |host: &mut Host, event: Event| {
            host.transitions(kernel).apply(claim, event).expect("in order");
        };
        match step {
            Step::Safety => change(self, &mut |content| {
                content.image.take_checkpoint();
                content.work += 1;
            }),
            Step::Record { target } => {
                let safety = id(self.disk.content(kernel).image.engine);
                let intent = Transition::Restore { target: id(target), safety, options: Options::default() };
                change(self, &mut |content| content.record = Some((intent, Decision::Open)));
                transitions(self, Event::Recorded(record_of(intent, Decision::Open)));
            }
            Step::EndWorker => self.end_worker(kernel),
            Step::Files => change(self, &mut |content| content.image.files = target),
            Step::Engine => change(self, &mut |content| content.image.engine = target),
            Step::RevertFiles => change(self, &mut |content| content.image.files = safety),
            Step::RevertEngine => change(self, &mut |content| content.image.engine = safety),
            Step::Commit | Step::Clear => {
                change(self, &mut |content| {
                    content.record = None;
                    content.work += 1;
                });
                transitions(self, if step == Step::Commit { Event::Committed } else { Event::Cleared });
                transitions(self, Event::Released);
                return true;
            }
        }
        if let Some(running) = self.kernels.get_mut(&kernel) {
            running.restore = Some((claim, steps));
        }
        false
    }

    /// A step had no room: before the record nothing has changed, after it the kernel goes back.
    fn fail_restore(&mut self, kernel: Kernel, claim: Claim, step: Step) {
        let Some((transition, Decision::Open)) = self.disk.content(kernel).record else {
            let _ = self.transitions(kernel).apply(claim, Event::Released);
            return;
        };
        if matches!(step, Step::Files | Step::Engine) {
            let aborted = Some((transition, Decision::Aborted));
            self.disk.change_content(Name::Kernel(kernel), |content| content.record = aborted);
            let _ = self.transitions(kernel).apply(claim, Event::Aborted);
        }
        let _ = self.transitions(kernel).apply(claim, Event::Released);
    }

    fn recover_restore(&mut self, kernel: Kernel) {
        let Some((claim, record)) = self.transitions(kernel).recover() else { return };
        let steps = match (record.transition, record.recovery()) {
            (Transition::Restore { .. }, Recovery::Revert) => VecDeque::from(REVERT),
            (Transition::Restore { .. }, Recovery::Finish | Recovery::FinishOrRevert) => VecDeque::from(FINISH),
            // Of a departed kernel, which nothing uses.
            _ => {
                let _ = self.transitions(kernel).apply(claim, Event::Released);
                return;
            }
        };
        if let Some(running) = self.kernels.get_mut(&kernel) {
            running.restore = Some((claim, steps));
        }
    }
}
