//! The lifecycle of a decision: open, locked, superseded.
//!
//! ```text
//! open ──lock──▶ locked
//!   └──supersede──┴──▶ superseded ──(undo of the restore that did it)──▶ open | locked
//! ```

use serde::{Deserialize, Serialize};

use crate::core::error::{Error, Result};

/// The state of a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DecisionState {
    /// Not yet binding.
    Open,
    /// Binding.
    Locked,
    /// No longer binding.
    Superseded,
}

/// An event in the life of a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DecisionEvent {
    /// A client locks the decision.
    Lock,
    /// A client, or a restore with that option, supersedes the decision.
    Supersede,
    /// The restore that changed the decision is undone, and its former state returns.
    Return(DecisionState),
}

impl DecisionState {
    /// Every state, in the order of its number in the database.
    pub const ALL: [DecisionState; 3] = [DecisionState::Open, DecisionState::Locked, DecisionState::Superseded];

    /// The state in one word.
    pub const fn name(self) -> &'static str {
        match self {
            DecisionState::Open => "open",
            DecisionState::Locked => "locked",
            DecisionState::Superseded => "superseded",
        }
    }

    /// The state with this name.
    pub fn from_name(name: &str) -> Option<DecisionState> {
        Self::ALL.into_iter().find(|state| state.name() == name)
    }

    /// Applies an event to decision `id` in this state.
    ///
    /// # Errors
    /// `conflict` with reason `decision_state` if the event is not permitted in this state.
    pub fn step(self, id: u64, event: DecisionEvent) -> Result<DecisionState> {
        match (self, event) {
            (DecisionState::Open, DecisionEvent::Lock) => Ok(DecisionState::Locked),
            (DecisionState::Open | DecisionState::Locked, DecisionEvent::Supersede) => Ok(DecisionState::Superseded),
            (_, DecisionEvent::Return(state)) => Ok(state),
            (DecisionState::Locked | DecisionState::Superseded, DecisionEvent::Lock)
            | (DecisionState::Superseded, DecisionEvent::Supersede) => {
                Err(Error::conflict(format!("decision {id} is {} already", self.name()))
                    .reason("decision_state")
                    .hint("open another one in its place"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_decision_state_and_event() {
        use DecisionEvent::{Lock, Return, Supersede};
        use DecisionState::{Locked, Open, Superseded};
        let table = [
            (Open, Lock, Some(Locked)),
            (Open, Supersede, Some(Superseded)),
            (Locked, Lock, None),
            (Locked, Supersede, Some(Superseded)),
            (Superseded, Lock, None),
            (Superseded, Supersede, None),
            (Superseded, Return(Open), Some(Open)),
            (Superseded, Return(Locked), Some(Locked)),
            (Open, Return(Superseded), Some(Superseded)),
        ];
        for (state, event, expected) in table {
            assert_eq!(state.step(1, event).ok(), expected, "{state:?} {event:?}");
        }
        for state in DecisionState::ALL {
            assert_eq!(DecisionState::from_name(state.name()), Some(state));
        }
    }

    proptest! {
        /// Without an undo, a decision never returns to an earlier state, and a refused event
        /// changes nothing.
        #[test]
        fn decision_states_only_advance(events in proptest::collection::vec(any::<bool>(), 0..20)) {
            let mut state = DecisionState::Open;
            let mut taken = Vec::new();
            for lock in events {
                let event = if lock { DecisionEvent::Lock } else { DecisionEvent::Supersede };
                if let Ok(next) = state.step(7, event) {
                    prop_assert!(next > state);
                    taken.push(event);
                    state = next;
                }
            }
            prop_assert!(taken.len() <= 2);
            prop_assert_eq!(state == DecisionState::Superseded, taken.contains(&DecisionEvent::Supersede));
        }
    }
}
