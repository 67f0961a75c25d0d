//! The exclusive change that a kernel is in, as a pure state machine.
//!
//! ```text
//!        begin             Recorded           Committed / Cleared           Released
//!  idle ───────▶ preparing ────────▶ running ─────────────────────▶ finished ───────▶ idle
//!                    │ Released         │ Released, crash
//!                    ▼                  ▼            recover
//!                  idle            interrupted ──────────────▶ running
//! ```
//!
//! The record is what `state.db` holds. It is written before anything changes, and goes with the change that makes the
//! outcome visible. What recovery does depends on the record alone ([`Record::recovery`]), so the daemon that finds an
//! interrupted transition does not need the step at which the former one ended.
//!
//! A removal may begin beside a restore, and beside every interrupted transition but a handover: what it removes needs no
//! recovery. It has no record, because its commit point is one transaction of the catalog and nothing changes before that.
//! A freeze has none, because it changes nothing of the kernel.
//!
//! Owns the decisions; never knows databases, workers or files.

use serde::{Deserialize, Serialize};

use crate::core::error::Error;
use crate::core::ids::{CheckpointId, Epoch, HandoverId, HostId};
use crate::core::workflow::Options;

/// A kind of exclusive change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Kind {
    /// The kernel goes back to one of its checkpoints.
    Restore,
    /// The kernel's files and engine state go; a checkpoint holds them.
    Archive,
    /// The files and the engine state of an archived kernel come back.
    Unarchive,
    /// The kernel moves to another host.
    HandoverOut,
    /// The kernel and everything of it is deleted.
    Remove,
    /// The kernel is paused while its group is frozen. Nothing of it changes.
    Freeze,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Kind; 6] =
        [Kind::Restore, Kind::Archive, Kind::Unarchive, Kind::HandoverOut, Kind::Remove, Kind::Freeze];

    /// The kind's name, as in events and in reasons of errors.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::Restore => "restore",
            Kind::Archive => "archive",
            Kind::Unarchive => "unarchive",
            Kind::HandoverOut => "handoverOut",
            Kind::Remove => "remove",
            Kind::Freeze => "freeze",
        }
    }

    /// What happens to the kernel meanwhile.
    const fn participle(self) -> &'static str {
        match self {
            Kind::Restore => "restored",
            Kind::Archive => "archived",
            Kind::Unarchive => "unarchived",
            Kind::HandoverOut => "moved to another host",
            Kind::Remove => "removed",
            Kind::Freeze => "frozen",
        }
    }

    /// The reason of a refusal for want of its end.
    const fn reason(self) -> &'static str {
        match self {
            Kind::Restore => "restoring",
            Kind::Archive => "archiving",
            Kind::Unarchive => "unarchiving",
            Kind::HandoverOut => "teleporting",
            Kind::Remove => "removing",
            Kind::Freeze => "freezing",
        }
    }

    /// The refusal of a file operation that does not wait for the end.
    pub fn busy(self, kernel: &str) -> Error {
        Error::busy(format!("kernel {kernel} is being {}", self.participle()))
            .reason(self.reason())
            .hint("try again when that has ended, or let the call wait for it")
    }

    /// The error of a file operation for which the transition took too long.
    pub fn too_long(self, kernel: &str) -> Error {
        Error::deadline(format!("kernel {kernel} is still being {}", self.participle()))
            .reason(self.reason())
            .hint(format!("try again later; `ryokan events {kernel}` says how it goes on"))
    }

    /// The reason of a refusal for want of recovery.
    const fn unfinished_reason(self) -> &'static str {
        match self {
            Kind::Restore => "restore_unfinished",
            Kind::Archive => "archive_unfinished",
            Kind::Unarchive => "unarchive_unfinished",
            Kind::HandoverOut => "teleport_unfinished",
            Kind::Remove => "remove_unfinished",
            Kind::Freeze => "freeze_unfinished",
        }
    }

    /// The steps, in order.
    pub const fn steps(self) -> &'static [Step] {
        match self {
            Kind::Restore => &[Step::Prepare, Step::Files, Step::EngineState, Step::Commit],
            Kind::Archive | Kind::HandoverOut => &[Step::Prepare, Step::Commit, Step::Lifecycle, Step::Cleanup],
            Kind::Unarchive => &[Step::Prepare, Step::Files, Step::EngineState, Step::Commit, Step::Lifecycle],
            Kind::Remove => &[Step::Prepare, Step::Commit, Step::Cleanup],
            Kind::Freeze => &[Step::Prepare, Step::Commit],
        }
    }
}

/// A part of a transition. Each may be repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Checks, and for a restore the safety checkpoint. Nothing of the kernel changes; the record ends this step.
    Prepare,
    /// The files become those of the checkpoint.
    Files,
    /// The engine's state becomes that of the checkpoint.
    EngineState,
    /// One transaction decides: from then on the outcome holds.
    Commit,
    /// The lifecycle state in the catalog follows.
    Lifecycle,
    /// What the outcome no longer needs is deleted.
    Cleanup,
}

/// The intent, with what recovery needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum Transition {
    /// See [`Kind::Restore`].
    Restore {
        /// The checkpoint to be at.
        target: CheckpointId,
        /// The checkpoint that holds the state before.
        safety: CheckpointId,
        /// What else the restore changes.
        options: Options,
    },
    /// See [`Kind::Archive`].
    Archive {
        /// The checkpoint that holds the kernel.
        checkpoint: CheckpointId,
    },
    /// See [`Kind::Unarchive`].
    Unarchive {
        /// The checkpoint that holds the kernel.
        checkpoint: CheckpointId,
    },
    /// See [`Kind::HandoverOut`].
    HandoverOut {
        /// The handover.
        handover: HandoverId,
        /// The checkpoint that is moved.
        checkpoint: CheckpointId,
        /// The other host.
        host: HostId,
        /// The kernel's epoch there.
        epoch: Epoch,
    },
}

impl Transition {
    /// Its kind.
    pub const fn kind(&self) -> Kind {
        match self {
            Transition::Restore { .. } => Kind::Restore,
            Transition::Archive { .. } => Kind::Archive,
            Transition::Unarchive { .. } => Kind::Unarchive,
            Transition::HandoverOut { .. } => Kind::HandoverOut,
        }
    }

    /// The checkpoints that must stay until it has ended.
    pub fn checkpoints(&self) -> Vec<CheckpointId> {
        match self {
            Transition::Restore { target, safety, .. } => vec![*target, *safety],
            Transition::Archive { checkpoint }
            | Transition::Unarchive { checkpoint }
            | Transition::HandoverOut { checkpoint, .. } => vec![*checkpoint],
        }
    }
}

/// Whether the outcome is certain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Decision {
    /// Either outcome is possible.
    Open,
    /// The outcome holds; only cleaning up is left.
    Committed,
    /// The kernel goes back to what it was.
    Aborted,
}

/// The row of `state.db`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// The intent.
    pub transition: Transition,
    /// Whether the outcome is certain.
    pub decision: Decision,
    /// Who asked for it.
    pub actor: String,
    /// Milliseconds since 1970.
    pub at_ms: i64,
}

/// What ends an interrupted transition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recovery {
    /// The remaining steps.
    Finish,
    /// The remaining steps; if they are impossible, an abort and a revert.
    FinishOrRevert,
    /// Going back to the state before.
    Revert,
}

impl Record {
    /// A record of an intent without a decision.
    pub fn open(transition: Transition, actor: String, at_ms: i64) -> Record {
        Record { transition, decision: Decision::Open, actor, at_ms }
    }

    /// What ends this transition, at whatever step it was interrupted.
    pub const fn recovery(&self) -> Recovery {
        match (self.transition.kind(), self.decision) {
            (_, Decision::Committed) => Recovery::Finish,
            (_, Decision::Aborted) => Recovery::Revert,
            (Kind::Restore, Decision::Open) => Recovery::FinishOrRevert,
            // The kernel is still where it was; only copies are affected.
            (Kind::Archive | Kind::Unarchive | Kind::HandoverOut | Kind::Remove | Kind::Freeze, Decision::Open) => {
                Recovery::Revert
            }
        }
    }
}

/// A refused request or an event out of order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A transition of this kind is under way.
    #[error("a transition is under way: {}", .0.name())]
    UnderWay(Kind),
    /// A transition of this kind was interrupted and awaits recovery.
    #[error("a transition was interrupted: {}", .0.name())]
    Interrupted(Kind),
    /// The caller does not own the transition, or the event does not follow from its state.
    #[error("an event out of order")]
    OutOfOrder,
}

impl Refusal {
    /// The transition whose end a file operation awaits. A removal leaves no files; recovery may fail.
    pub const fn awaited(self) -> Option<Kind> {
        match self {
            Refusal::UnderWay(
                kind @ (Kind::Restore | Kind::Archive | Kind::Unarchive | Kind::HandoverOut | Kind::Freeze),
            ) => Some(kind),
            Refusal::UnderWay(Kind::Remove) | Refusal::Interrupted(_) | Refusal::OutOfOrder => None,
        }
    }

    /// The refusal as clients of this kernel see it.
    pub fn of_kernel(self, kernel: &str) -> Error {
        match self {
            Refusal::UnderWay(kind) => Error::conflict(format!("kernel {kernel} is being {}", kind.participle()))
                .reason(kind.reason())
                .hint("wait for that to end, then look at where the kernel is"),
            Refusal::Interrupted(kind) => Error::conflict(format!(
                "{} of kernel {kernel} was begun and could not be ended",
                kind.name()
            ))
            .reason(kind.unfinished_reason())
            .hint(match kind {
                Kind::Restore => format!(
                    "`ryokan events {kernel}` says why; it is tried again by itself, and by `ryokan start {kernel}`"
                ),
                Kind::Archive | Kind::Unarchive | Kind::HandoverOut | Kind::Remove | Kind::Freeze => {
                    format!("`ryokan events {kernel}` says why; the next use tries again")
                }
            }),
            Refusal::OutOfOrder => Error::internal(format!("a transition of kernel {kernel} is out of order")),
        }
    }
}

/// The owner of a transition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim(u64);

/// What the owner of a transition reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The intent is in `state.db`.
    Recorded(Record),
    /// A step begins.
    Entered(Step),
    /// The outcome is certain. A restore's record is gone with that.
    Committed,
    /// The record says that the kernel goes back.
    Aborted,
    /// The record is gone.
    Cleared,
    /// The owner is gone.
    Released,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Idle,
    /// Nothing changes yet. `interrupted`: the record that this restore takes over.
    Preparing {
        claim: Claim,
        kind: Kind,
        interrupted: Option<Record>,
    },
    Running {
        claim: Claim,
        record: Record,
        step: Step,
    },
    /// No record is left.
    Finished {
        claim: Claim,
        kind: Kind,
    },
    /// No owner.
    Interrupted {
        record: Record,
    },
}

/// The transition that a kernel is in, if any.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Transitions {
    phase: Phase,
    removal: Option<Claim>,
    last_claim: u64,
}

impl Transitions {
    /// A kernel that was loaded with this record.
    pub fn loaded(record: Option<Record>) -> Transitions {
        let phase = record.map_or(Phase::Idle, |record| Phase::Interrupted { record });
        Transitions { phase, ..Transitions::default() }
    }

    /// The kind that has an owner now.
    pub fn active(&self) -> Option<Kind> {
        match &self.phase {
            _ if self.removal.is_some() => Some(Kind::Remove),
            Phase::Preparing { kind, .. } | Phase::Finished { kind, .. } => Some(*kind),
            Phase::Running { record, .. } => Some(record.transition.kind()),
            Phase::Idle | Phase::Interrupted { .. } => None,
        }
    }

    /// The record in `state.db`: while there is one, the kernel is between two states.
    pub fn record(&self) -> Option<&Record> {
        match &self.phase {
            Phase::Running { record, .. }
            | Phase::Interrupted { record }
            | Phase::Preparing { interrupted: Some(record), .. } => Some(record),
            Phase::Idle | Phase::Preparing { interrupted: None, .. } | Phase::Finished { .. } => None,
        }
    }

    /// Whether this owner's transition is recorded and has not ended.
    pub fn is_running(&self, claim: Claim) -> bool {
        matches!(&self.phase, Phase::Running { claim: owner, .. } if *owner == claim)
    }

    /// The kind of an interrupted transition without an owner.
    pub fn interrupted(&self) -> Option<Kind> {
        match &self.phase {
            Phase::Interrupted { record } => Some(record.transition.kind()),
            Phase::Idle | Phase::Preparing { .. } | Phase::Running { .. } | Phase::Finished { .. } => None,
        }
    }

    /// Refuses a change of the kernel beside a transition.
    ///
    /// # Errors
    /// The transition in the way.
    pub fn admit(&self) -> Result<(), Refusal> {
        match (self.active(), self.interrupted()) {
            (Some(kind), _) => Err(Refusal::UnderWay(kind)),
            (None, Some(kind)) => Err(Refusal::Interrupted(kind)),
            (None, None) => Ok(()),
        }
    }

    /// Begins a transition.
    ///
    /// # Errors
    /// The transition in the way.
    pub fn begin(&mut self, kind: Kind) -> Result<Claim, Refusal> {
        let interrupted = match (&self.phase, kind, self.active()) {
            // A commit that is not carried out yet must reach the other host.
            (Phase::Interrupted { record }, Kind::Remove, None) if record.transition.kind() == Kind::HandoverOut => {
                return Err(Refusal::Interrupted(Kind::HandoverOut));
            }
            (_, Kind::Remove, None | Some(Kind::Restore)) => {
                let claim = self.claim();
                self.removal = Some(claim);
                return Ok(claim);
            }
            (_, _, Some(active)) => return Err(Refusal::UnderWay(active)),
            (Phase::Interrupted { record }, Kind::Restore, None) if record.transition.kind() == Kind::Restore => {
                Some(record.clone())
            }
            (Phase::Interrupted { record }, _, None) => return Err(Refusal::Interrupted(record.transition.kind())),
            (_, _, None) => None,
        };
        let claim = self.claim();
        self.phase = Phase::Preparing { claim, kind, interrupted };
        Ok(claim)
    }

    /// Begins the recovery of an interrupted transition.
    pub fn recover(&mut self) -> Option<(Claim, Record)> {
        let Phase::Interrupted { record } = &self.phase else { return None };
        if self.removal.is_some() {
            return None;
        }
        let (record, claim) = (record.clone(), self.claim());
        self.phase = Phase::Running { claim, record: record.clone(), step: Step::Prepare };
        Some((claim, record))
    }

    /// Takes an event of the owner.
    ///
    /// # Errors
    /// [`Refusal::OutOfOrder`]: nothing has changed then.
    pub fn apply(&mut self, claim: Claim, event: Event) -> Result<(), Refusal> {
        if self.removal == Some(claim) {
            return match event {
                Event::Released => {
                    self.removal = None;
                    Ok(())
                }
                Event::Recorded(_) | Event::Entered(_) | Event::Committed | Event::Aborted | Event::Cleared => {
                    Err(Refusal::OutOfOrder)
                }
            };
        }
        let phase = match &self.phase {
            Phase::Preparing { claim: owner, kind, interrupted } if *owner == claim => {
                preparing(claim, *kind, interrupted.as_ref(), event)
            }
            Phase::Running { claim: owner, record, step } if *owner == claim => running(claim, record, *step, event),
            Phase::Finished { claim: owner, .. } if *owner == claim && event == Event::Released => Some(Phase::Idle),
            Phase::Idle
            | Phase::Preparing { .. }
            | Phase::Running { .. }
            | Phase::Finished { .. }
            | Phase::Interrupted { .. } => None,
        };
        self.phase = phase.ok_or(Refusal::OutOfOrder)?;
        Ok(())
    }

    fn claim(&mut self) -> Claim {
        self.last_claim += 1;
        Claim(self.last_claim)
    }
}

fn preparing(claim: Claim, kind: Kind, interrupted: Option<&Record>, event: Event) -> Option<Phase> {
    match event {
        Event::Recorded(record) if record.transition.kind() == kind && takes_over(interrupted, &record) => {
            Some(Phase::Running { claim, record, step: Step::Prepare })
        }
        Event::Released => Some(match interrupted {
            Some(record) => Phase::Interrupted { record: record.clone() },
            None => Phase::Idle,
        }),
        Event::Recorded(_) | Event::Entered(_) | Event::Committed | Event::Aborted | Event::Cleared => None,
    }
}

/// Whether a record may take the place of an interrupted one: only with the same way back.
fn takes_over(interrupted: Option<&Record>, record: &Record) -> bool {
    let safety = |record: &Record| match record.transition {
        Transition::Restore { safety, .. } => Some(safety),
        Transition::Archive { .. } | Transition::Unarchive { .. } | Transition::HandoverOut { .. } => None,
    };
    record.decision == Decision::Open && interrupted.is_none_or(|before| safety(before) == safety(record))
}

fn running(claim: Claim, record: &Record, step: Step, event: Event) -> Option<Phase> {
    let (kind, decision) = (record.transition.kind(), record.decision);
    let at = |decision, step| Some(Phase::Running { claim, record: Record { decision, ..record.clone() }, step });
    match (event, decision) {
        (Event::Entered(next), Decision::Open | Decision::Aborted | Decision::Committed) => {
            let place = |step| kind.steps().iter().position(|one| *one == step);
            let (before, after, commit) = (place(step)?, place(next)?, place(Step::Commit)?);
            // What follows the commit point follows the decision.
            let decided = after <= commit || decision == Decision::Committed;
            if after >= before && decided { at(decision, next) } else { None }
        }
        (Event::Committed, Decision::Open) => match kind {
            Kind::Restore => Some(Phase::Finished { claim, kind }),
            Kind::Archive | Kind::Unarchive | Kind::HandoverOut | Kind::Remove | Kind::Freeze => {
                at(Decision::Committed, Step::Commit)
            }
        },
        (Event::Aborted, Decision::Open) => at(Decision::Aborted, Step::Prepare),
        (Event::Cleared, Decision::Committed | Decision::Aborted) => Some(Phase::Finished { claim, kind }),
        (Event::Cleared, Decision::Open) if record.recovery() == Recovery::Revert => {
            Some(Phase::Finished { claim, kind })
        }
        (Event::Released, _) => Some(Phase::Interrupted { record: record.clone() }),
        (Event::Recorded(_) | Event::Committed | Event::Aborted | Event::Cleared, _) => None,
    }
}

#[cfg(test)]
#[path = "transition_tests.rs"]
mod tests;
