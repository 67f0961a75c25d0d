//! Work in flight in a group that is captured.

use std::time::Duration;

use serde::Serialize;

use crate::core::limits;

/// What happens to the running execution of a kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum InFlight {
    /// Its end is awaited.
    #[default]
    Drain,
    /// It stands still for the pause, and goes on: the kernel is captured as before it, with the files of the moment.
    Park,
    /// It is interrupted.
    Abandon,
}

impl InFlight {
    /// What a client asks for; `None`: both at once.
    pub const fn asked(interrupt: bool, park: bool) -> Option<InFlight> {
        match (interrupt, park) {
            (false, false) => Some(InFlight::Drain),
            (false, true) => Some(InFlight::Park),
            (true, false) => Some(InFlight::Abandon),
            (true, true) => None,
        }
    }
}

/// What happens to work in flight before a kernel of a group is captured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drain {
    /// What happens to the running execution.
    pub running: InFlight,
    /// How long to wait for the kernel.
    pub wait: Duration,
}

impl Default for Drain {
    fn default() -> Self {
        Drain { running: InFlight::Drain, wait: limits::CHECKPOINT_WAIT }
    }
}

/// What became of the executions of a kernel that was captured.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Executions {
    /// The one that was interrupted; 0: none.
    pub interrupted: u64,
    /// The one that stood still for the pause and went on; 0: none.
    pub parked: u64,
    /// Those whose end was awaited.
    pub awaited: Vec<u64>,
    /// Those that wait in the queue until the kernel starts executions again.
    pub queued: Vec<u64>,
}

impl Executions {
    /// What became of each, for people.
    pub fn named(&self) -> Vec<String> {
        let one = |exec: u64, what: &str| (exec != 0).then(|| format!("execution {exec} {what}"));
        let several = |execs: &[u64], what: &str| match execs {
            [] => None,
            [exec] => Some(format!("execution {exec} {what}")),
            [first, .., last] => Some(format!("{} executions from {first} to {last}: each {what}", execs.len())),
        };
        let named = [
            one(self.interrupted, "was interrupted"),
            one(self.parked, "was under way: a restore goes back to its beginning, with the files of that moment"),
            several(&self.awaited, "was awaited"),
            several(&self.queued, "waits in the queue"),
        ];
        named.into_iter().flatten().collect()
    }
}

/// Whether no execution has this number.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
pub(super) fn is_none(exec: &u64) -> bool {
    *exec == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executions_are_named() {
        assert!(Executions::default().named().is_empty());
        let all = Executions { interrupted: 0, parked: 3, awaited: vec![1, 2], queued: vec![4] };
        let named = all.named();
        assert!(named[0].starts_with("execution 3 was under way: "), "{named:?}");
        assert_eq!(named[1..], ["2 executions from 1 to 2: each was awaited", "execution 4 waits in the queue"]);
    }

    #[test]
    fn work_is_asked_for_once() {
        assert_eq!(InFlight::asked(true, true), None);
        assert_eq!(InFlight::asked(false, true), Some(InFlight::Park));
    }
}
