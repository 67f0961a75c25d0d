//! The target's machine.

/// Phase of the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Target {
    /// Objects arrive; nothing is recorded.
    Receiving,
    /// Everything is verified and recorded; the kernel waits for the source's decision.
    Prepared,
    /// The kernel lives here.
    Live,
    /// Nothing of this handover is here.
    Gone,
}

/// The record of a handover at the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Prepared {
    /// Prepared.
    Waiting,
    /// Activated.
    Live,
}

/// An event at the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetEvent {
    /// Everything has arrived and is verified.
    Sealed,
    /// What arrived is not valid, or has no room.
    Invalid,
    /// The connection is lost.
    Lost,
    /// The source's commit.
    Commit,
    /// The source's abort.
    Abort,
}

/// An action of the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TargetAction {
    /// Record durably that the kernel is prepared.
    RecordPrepared,
    /// Send "prepared".
    SendPrepared,
    /// Record durably that the kernel lives here, and open it. Idempotent.
    Activate,
    /// Acknowledge the commit.
    SendLive,
    /// Delete what was received, and the record.
    Discard,
    /// Acknowledge the abort.
    SendAborted,
    /// Refuse: invalid content, or a decision about an unknown handover.
    SendRefused,
}

impl Target {
    /// The machine for a handover with this record.
    pub const fn restarted(record: Option<Prepared>) -> Target {
        match record {
            None => Target::Gone,
            Some(Prepared::Waiting) => Target::Prepared,
            Some(Prepared::Live) => Target::Live,
        }
    }

    /// Takes an event. Total.
    #[must_use]
    pub fn step(&mut self, event: TargetEvent) -> Vec<TargetAction> {
        use TargetAction as Act;
        use TargetEvent as On;
        let (next, actions) = match (*self, event) {
            (Target::Receiving, On::Sealed) => (Target::Prepared, vec![Act::RecordPrepared, Act::SendPrepared]),
            (Target::Receiving, On::Invalid) => (Target::Gone, vec![Act::Discard, Act::SendRefused]),
            (Target::Receiving, On::Lost) => (Target::Gone, vec![Act::Discard]),
            (Target::Receiving | Target::Prepared, On::Abort) => (Target::Gone, vec![Act::Discard, Act::SendAborted]),
            // A repetition may follow an activation that was not complete: it is completed before the acknowledgement.
            (Target::Prepared | Target::Live, On::Commit) => (Target::Live, vec![Act::Activate, Act::SendLive]),
            // An operator resolved the handover.
            (Target::Live, On::Abort) => (Target::Live, vec![Act::SendRefused]),
            (Target::Gone, On::Abort) => (Target::Gone, vec![Act::SendAborted]),
            (Target::Receiving | Target::Gone, On::Commit) => (*self, vec![Act::SendRefused]),
            (phase, On::Sealed | On::Invalid | On::Lost) => (phase, Vec::new()),
        };
        *self = next;
        actions
    }

    /// Whether the kernel may act at the target in this phase.
    pub const fn may_act(self) -> bool {
        matches!(self, Target::Live)
    }
}
