//! The order of a freeze, as a pure state machine.
//!
//! ```text
//! suspend each ─▶ lock each ─▶ snapshot each ─▶ confirm each ─▶ intent ─▶ seal ─▶ resume each: sealed
//!      └───────────────┴──────────── failure, time-out  ────────────┴─▶ withdraw ─▶ resume each: failed
//! ```
//! A member reports its revision three times: when it is locked, with its snapshot, and after every member has its
//! snapshot. Different revisions mean a false report or a change meanwhile: either fails the freeze. Nothing is
//! visible before the seal.
//!
//! Owns the order; never knows kernels, repositories, databases or time.

/// What the driver must do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Stop admission of work in this member.
    Suspend(usize),
    /// Report this member's revision.
    Lock(usize),
    /// Capture this member, and report the revision of what was captured.
    Snapshot(usize),
    /// Report this member's revision again.
    Confirm(usize),
    /// Record what a new daemon must withdraw.
    Intent,
    /// Make the freeze visible.
    Seal,
    /// Remove what was made for the freeze.
    Withdraw,
    /// Admit work in this member again.
    Resume(usize),
    /// Nothing is left to do.
    End,
}

/// What an action led to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// It is done.
    Done,
    /// It is done, at this revision.
    At(String),
    /// It failed.
    Failed(String),
    /// It did not end in time.
    Late,
}

impl Reply {
    /// Why the action did not succeed.
    pub(super) fn into_reason(self) -> String {
        match self {
            Reply::Failed(why) => why,
            Reply::Late => "it did not answer in time".into(),
            Reply::Done | Reply::At(_) => "it answered something else than asked".into(),
        }
    }
}

/// How a freeze ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It is visible.
    Sealed,
    /// Nothing of it is visible; why, and the member concerned.
    Failed {
        /// The member.
        member: Option<usize>,
        /// Why.
        why: String,
    },
}

/// A freeze of some members.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capture {
    members: usize,
    next: Action,
    locked: Vec<String>,
    /// Members from 0 to here are suspended; the last one perhaps.
    suspended: usize,
    failure: Option<(Option<usize>, String)>,
}

impl Capture {
    /// A freeze of this number of members that suspends them itself.
    pub fn new(members: usize) -> Capture {
        let next = if members == 0 { Action::End } else { Action::Suspend(0) };
        let failure = (members == 0).then(|| (None, String::from("there is nothing to freeze")));
        Capture { members, next, locked: Vec::new(), suspended: 0, failure }
    }

    /// A freeze of members that are suspended already and stay so.
    pub fn of_suspended(members: usize) -> Capture {
        let next = if members == 0 { Action::End } else { Action::Lock(0) };
        Capture { next, ..Capture::new(members) }
    }

    /// The next action.
    pub fn next(&self) -> Action {
        self.next
    }

    /// How it ended.
    pub fn outcome(&self) -> Option<Outcome> {
        match (self.next, &self.failure) {
            (Action::End, None) => Some(Outcome::Sealed),
            (Action::End, Some((member, why))) => Some(Outcome::Failed { member: *member, why: why.clone() }),
            _ => None,
        }
    }

    /// Takes the reply to the next action.
    pub fn reply(&mut self, reply: Reply) {
        let why = match (self.next, reply) {
            (Action::End, _) => return,
            (Action::Suspend(at), reply) => {
                // Also after a failure: it may be suspended although its reply was lost.
                self.suspended = at + 1;
                match reply {
                    Reply::Done => return self.next = self.after(at, Action::Suspend, Action::Lock(0)),
                    reply => reply.into_reason(),
                }
            }
            (Action::Lock(at), Reply::At(revision)) => {
                self.locked.push(revision);
                return self.next = self.after(at, Action::Lock, Action::Snapshot(0));
            }
            (Action::Snapshot(at), Reply::At(revision)) if self.locked[at] == revision => {
                return self.next = self.after(at, Action::Snapshot, Action::Confirm(0));
            }
            (Action::Confirm(at), Reply::At(revision)) if self.locked[at] == revision => {
                return self.next = self.after(at, Action::Confirm, Action::Intent);
            }
            (Action::Snapshot(_) | Action::Confirm(_), Reply::At(_)) => String::from("it changed during the freeze"),
            (Action::Intent, Reply::Done) => return self.next = Action::Seal,
            (Action::Seal, Reply::Done) | (Action::Withdraw, _) => return self.next = self.resume_from(0),
            // The freeze holds, or has failed, whatever this member does.
            (Action::Resume(at), _) => return self.next = self.resume_from(at + 1),
            (_, reply) => reply.into_reason(),
        };
        let member = match self.next {
            Action::Suspend(at) | Action::Lock(at) | Action::Snapshot(at) | Action::Confirm(at) => Some(at),
            _ => None,
        };
        self.failure = Some((member, why));
        self.next = match self.next {
            // Nothing was made yet.
            Action::Suspend(_) | Action::Lock(_) => self.resume_from(0),
            _ => Action::Withdraw,
        };
    }

    fn after(&self, at: usize, same: fn(usize) -> Action, then: Action) -> Action {
        if at + 1 < self.members { same(at + 1) } else { then }
    }

    fn resume_from(&self, at: usize) -> Action {
        if at < self.suspended { Action::Resume(at) } else { Action::End }
    }
}
