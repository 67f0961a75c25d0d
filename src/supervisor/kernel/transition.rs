//! The exclusive transition of a kernel: its owner, and its record in `state.db`.
//!
//! `core::kernel::transition` decides; this module writes each decision to `state.db` before it takes effect.

use std::rc::Rc;

use super::Kernel;
use crate::catalog::state::NewEntry;
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::ids::HandoverId;
use crate::core::kernel::State;
use crate::core::kernel::transition::{Claim, Decision, Event, Kind, Record, Refusal, Step, Transition};
use crate::supervisor::host::Host;

/// Ownership of a kernel's transition. If dropped before the end, recovery takes the transition over.
pub struct ExclusiveTransition {
    kernel: Rc<Kernel>,
    claim: Claim,
}

impl Drop for ExclusiveTransition {
    fn drop(&mut self) {
        self.release();
    }
}

impl ExclusiveTransition {
    /// Begins a transition. Nothing is recorded yet.
    ///
    /// # Errors
    /// `conflict` names the transition in the way, or says that a copy of the kernel is being made.
    pub(crate) fn begin(kernel: &Rc<Kernel>, kind: Kind) -> Result<ExclusiveTransition> {
        if matches!(kind, Kind::Archive | Kind::HandoverOut | Kind::Remove) {
            kernel.not_a_source()?;
        }
        let begun = kernel.transitions.borrow_mut().begin(kind);
        let claim = begun.map_err(|refusal| kernel.refused(refusal))?;
        Ok(ExclusiveTransition { kernel: Rc::clone(kernel), claim })
    }

    /// Begins the recovery of an interrupted transition, if there is one.
    pub(crate) fn recover(kernel: &Rc<Kernel>) -> Option<(ExclusiveTransition, Record)> {
        let (claim, record) = kernel.transitions.borrow_mut().recover()?;
        Some((ExclusiveTransition { kernel: Rc::clone(kernel), claim }, record))
    }

    /// Records the intent: from here on the kernel may change.
    ///
    /// # Errors
    /// Database errors; nothing is recorded then.
    pub(crate) async fn record(&self, transition: Transition, actor: String, at_ms: i64) -> Result<()> {
        let record = Record::open(transition, actor, at_ms);
        let event = Event::Recorded(record.clone());
        self.check(&event)?;
        self.kernel.records.begin_transition(record).await?;
        self.apply(event)
    }

    /// Whether this transition is recorded and has not ended.
    pub(crate) fn is_recorded(&self) -> bool {
        self.kernel.transitions.borrow().is_running(self.claim)
    }

    /// Begins a step.
    ///
    /// # Errors
    /// `internal` if the step is out of order.
    pub(crate) fn enter(&self, step: Step) -> Result<()> {
        self.apply(Event::Entered(step))
    }

    /// Records that the outcome holds; returns the number of the journal entry.
    ///
    /// # Errors
    /// Database errors; the decision stays open then.
    pub(crate) async fn commit(&self, entry: NewEntry) -> Result<u64> {
        self.check(&Event::Committed)?;
        let sequence = self.kernel.records.commit_transition(entry).await?;
        self.apply(Event::Committed)?;
        Ok(sequence)
    }

    /// Marks the transition as ended: the transaction that ended a restore was its commit, or the end of its revert.
    ///
    /// # Errors
    /// `internal` if the step is out of order.
    pub(crate) fn ended(&self) -> Result<()> {
        let decision = self.kernel.transitions.borrow().record().map(|record| record.decision);
        self.apply(match decision {
            Some(Decision::Aborted) => Event::Cleared,
            Some(Decision::Open | Decision::Committed) | None => Event::Committed,
        })
    }

    /// Records that the transition is reverted. Idempotent.
    ///
    /// # Errors
    /// Database errors; the decision stays open then.
    pub(crate) async fn abort(&self, host: &Host) -> Result<()> {
        // Checked first: the database must not hold a decision that this owner cannot take.
        if !self.is_recorded() {
            return Err(self.kernel.refused(Refusal::OutOfOrder));
        }
        let decision = self.kernel.transitions.borrow().record().map(|record| record.decision);
        if decision == Some(Decision::Aborted) {
            return Ok(());
        }
        host.making_room(async || self.kernel.records.abort_transition().await).await?;
        self.apply(Event::Aborted)
    }

    /// Deletes the record: the transition needs no recovery.
    ///
    /// # Errors
    /// Database errors; recovery retries then.
    pub(crate) async fn clear(&self, host: &Host) -> Result<()> {
        self.check(&Event::Cleared)?;
        host.making_room(async || self.kernel.records.clear_transition().await).await?;
        self.apply(Event::Cleared)
    }

    /// Refuses an event out of order before the database stores it.
    fn check(&self, event: &Event) -> Result<()> {
        let mut next = self.kernel.transitions.borrow().clone();
        next.apply(self.claim, event.clone()).map_err(|refusal| self.kernel.refused(refusal))
    }

    /// Releases the ownership; recovery ends an unfinished transition. Idempotent.
    pub(crate) fn release(&self) {
        // Fails only if it was released before.
        if self.apply(Event::Released).is_ok() {
            self.kernel.wake_sharers();
            self.kernel.transition_released();
        }
    }

    fn apply(&self, event: Event) -> Result<()> {
        self.kernel.transitions.borrow_mut().apply(self.claim, event).map_err(|refusal| self.kernel.refused(refusal))
    }
}

/// What is known of a kernel's departure by a handover.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Departure {
    /// It has departed.
    Decided,
    /// It is here.
    Undecided,
    /// Its record cannot be read.
    Unknown,
}

impl Kernel {
    /// Refuses a change during a transition.
    ///
    /// # Errors
    /// `conflict` names the transition.
    pub(crate) fn not_in_transition(&self) -> Result<()> {
        self.refuse_unfinished_group()?;
        self.transitions.borrow().admit().map_err(|refusal| self.refused(refusal))
    }

    /// Refuses every use of a kernel that moved to another host.
    ///
    /// # Errors
    /// `departed` names the host.
    pub(crate) fn check_here(&self) -> Result<()> {
        match self.view.borrow().state {
            State::Departed { host, epoch, .. } => Err(Error::new(
                ErrorCode::Departed,
                format!("kernel {} moved to host {host}, where it has epoch {}", self.spec().name, epoch.0),
            )
            .reason(host.to_string())
            .hint(format!("use it there; `ryokan rm {}` deletes what is left here", self.spec().name))),
            _ => Ok(()),
        }
    }

    /// Refuses a record that the kernel would not take along: what moves was read, or the kernel has moved.
    ///
    /// # Errors
    /// `conflict` during the move, `departed` after it.
    pub(crate) fn not_leaving(&self) -> Result<()> {
        self.check_here()?;
        match self.transitions.borrow().record() {
            Some(Record {
                transition: Transition::HandoverOut { .. },
                decision: Decision::Open | Decision::Committed,
                ..
            }) => Err(self.refused(Refusal::UnderWay(Kind::HandoverOut))),
            _ => Ok(()),
        }
    }

    /// Whether the record of this handover has not ended.
    pub(crate) fn leaves_by(&self, handover: HandoverId) -> bool {
        let is_its = |record: &Record| matches!(record.transition, Transition::HandoverOut { handover: by, .. } if by == handover);
        self.transitions.borrow().record().is_some_and(is_its)
    }

    /// Whether the kernel's departure by this handover is certain.
    pub(crate) fn has_departed(&self, handover: HandoverId) -> bool {
        self.departure(handover) == Departure::Decided
    }

    /// What is known here of the kernel's departure by this handover.
    pub(crate) fn departure(&self, handover: HandoverId) -> Departure {
        let transitions = self.transitions.borrow();
        let is_committed = |record: &Record| {
            record.decision == Decision::Committed
                && matches!(record.transition, Transition::HandoverOut { handover: by, .. } if by == handover)
        };
        match self.view.borrow().state {
            State::Departed { handover: by, .. } if by == handover => Departure::Decided,
            _ if transitions.record().is_some_and(is_committed) => Departure::Decided,
            _ if self.is_unreadable => Departure::Unknown,
            _ => Departure::Undecided,
        }
    }

    /// Whether a transition has begun to change the kernel and has not ended.
    pub(crate) fn is_changing(&self) -> bool {
        self.transitions.borrow().record().is_some()
    }

    /// The kind of a transition that awaits recovery.
    pub(crate) fn interrupted(&self) -> Option<Kind> {
        self.transitions.borrow().interrupted()
    }

    /// The refusal of an operation that requires an interrupted transition to end first.
    pub(crate) fn unfinished(&self, kind: Kind) -> Error {
        self.refused(Refusal::Interrupted(kind))
    }

    pub(super) fn refused(&self, refusal: Refusal) -> Error {
        refusal.of_kernel(self.spec().name.as_str())
    }
}
