//! The source's machine.

/// Phase of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// The offer is sent.
    Offering,
    /// Objects are copied while the kernel runs.
    Copying,
    /// The kernel is quiesced; the rest is copied and sealed.
    Sealing,
    /// The departure is recorded: the kernel never acts here again.
    Departed,
    /// The kernel stays; the target does not know yet.
    Aborting,
    /// The kernel lives on the target.
    Moved,
    /// The kernel lives here, and the target has nothing of it.
    Stayed,
}

/// An event at the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceEvent {
    /// The target accepts the offer.
    Accepted,
    /// The target refuses.
    Refused,
    /// The copy while the kernel runs is complete.
    Copied,
    /// The target has everything, verified and durable.
    Prepared,
    /// The connection is lost, a step failed, or a client cancels.
    Failed,
    /// There is a new connection to the target.
    Reconnected,
    /// The target acknowledges the commit.
    Live,
    /// The target acknowledges the abort.
    Aborted,
}

/// An action of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SourceAction {
    /// Send the offer.
    SendOffer,
    /// Copy objects while the kernel runs.
    Copy,
    /// Quiesce the kernel, send the rest and the seal.
    Seal,
    /// Record the departure durably.
    RecordDeparture,
    /// Send the commit.
    SendCommit,
    /// The kernel resumes here.
    Resume,
    /// Send the abort.
    SendAbort,
    /// Delete the record of the handover.
    Forget,
}

impl Source {
    /// A new handover, whose record is durable.
    pub fn begin() -> (Source, Vec<SourceAction>) {
        (Source::Offering, vec![SourceAction::SendOffer])
    }

    /// The machine after a restart that found the record of a handover, with or without the departure.
    pub fn restarted(has_departed: bool) -> (Source, Vec<SourceAction>) {
        match has_departed {
            true => (Source::Departed, Vec::new()),
            false => (Source::Aborting, vec![SourceAction::Resume]),
        }
    }

    /// Takes an event. Total: an event without meaning in a phase changes nothing.
    #[must_use]
    pub fn step(&mut self, event: SourceEvent) -> Vec<SourceAction> {
        use SourceAction as Act;
        use SourceEvent as On;
        let (next, actions) = match (*self, event) {
            (Source::Offering, On::Accepted) => (Source::Copying, vec![Act::Copy]),
            // The target keeps nothing of a refused offer.
            (Source::Offering, On::Refused) => (Source::Stayed, vec![Act::Resume, Act::Forget]),
            (Source::Copying, On::Copied) => (Source::Sealing, vec![Act::Seal]),
            (Source::Sealing, On::Prepared) => (Source::Departed, vec![Act::RecordDeparture, Act::SendCommit]),
            (Source::Offering | Source::Copying | Source::Sealing, On::Failed)
            | (Source::Copying | Source::Sealing, On::Refused) => (Source::Aborting, vec![Act::Resume, Act::SendAbort]),
            (Source::Departed, On::Reconnected) => (Source::Departed, vec![Act::SendCommit]),
            (Source::Departed, On::Live) => (Source::Moved, vec![Act::Forget]),
            (Source::Aborting, On::Reconnected) => (Source::Aborting, vec![Act::SendAbort]),
            (Source::Aborting, On::Aborted) => (Source::Stayed, vec![Act::Forget]),
            (phase, _) => (phase, Vec::new()),
        };
        *self = next;
        actions
    }

    /// Whether the kernel may act at the source in this phase.
    pub const fn may_act(self) -> bool {
        match self {
            Source::Offering | Source::Copying | Source::Aborting | Source::Stayed => true,
            Source::Sealing | Source::Departed | Source::Moved => false,
        }
    }
}
