//! The order of a freeze, as a pure state machine.
//!
//! ```text
//! suspend each ─▶ lock each ─▶ snapshot each ─▶ confirm each ─▶ resume each ─▶ intent ─▶ store each ─▶ seal: sealed
//!      └───────────────┴──────────────┴───────────────┴ failure ─▶ resume each ─┐    │         │         │
//!                                                                withdraw: failed ◀──┴─────────┴─────────┘
//! ```
//! A freeze whose failure pauses the group records that first: arm ─▶ suspend each. Each failure then pauses every
//! member, also those that were resumed, and is withdrawn.
//!
//! A snapshot pins one moment of its member: what it holds does not change when the member resumes. So the pause does
//! not grow with what is only stored.
//!
//! A member reports its revision three times: when it is locked, with its snapshot, and after every member has its
//! snapshot. Different revisions mean a false report or a change meanwhile: either fails the freeze. Nothing is
//! visible before the seal.
//!
//! Owns the order; never knows kernels, repositories, databases or time.

use super::on_failure::OnFailure;

/// What the driver must do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Record that a new daemon must pause the group.
    Arm,
    /// Stop admission of work in this member.
    Suspend(usize),
    /// Report this member's revision.
    Lock(usize),
    /// Pin this member's content, and report the revision of what was pinned.
    Snapshot(usize),
    /// Report this member's revision again.
    Confirm(usize),
    /// Record what a new daemon must withdraw.
    Intent,
    /// Store what the snapshot of this member holds.
    Store(usize),
    /// Make the freeze visible.
    Seal,
    /// Remove what was made for the freeze, and what was recorded of it.
    Withdraw,
    /// Admit work in this member again.
    Resume(usize),
    /// Keep this member from work until the group is resumed.
    Pause(usize),
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
    /// Whether a snapshot may exist.
    is_pinned: bool,
    /// What a failure leads to.
    on_failure: OnFailure,
    failure: Option<(Option<usize>, String)>,
}

impl Capture {
    /// A freeze of this number of members that suspends them itself.
    pub fn new(members: usize, on_failure: OnFailure) -> Capture {
        let next = match (members, on_failure) {
            (0, _) => Action::End,
            (_, OnFailure::Pause) => Action::Arm,
            (_, OnFailure::Resume) => Action::Suspend(0),
        };
        let failure = (members == 0).then(|| (None, String::from("there is nothing to freeze")));
        Capture { members, next, locked: Vec::new(), suspended: 0, is_pinned: false, on_failure, failure }
    }

    /// A freeze of members that are suspended already and stay so.
    pub fn of_suspended(members: usize) -> Capture {
        let next = if members == 0 { Action::End } else { Action::Lock(0) };
        Capture { next, ..Capture::new(members, OnFailure::Resume) }
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

    /// The first failure so far, and the member concerned.
    pub fn failure(&self) -> Option<(Option<usize>, &str)> {
        self.failure.as_ref().map(|(member, why)| (*member, why.as_str()))
    }

    /// Takes the reply to the next action.
    pub fn reply(&mut self, reply: Reply) {
        let why = match (self.next, reply) {
            (Action::End, _) => return,
            (Action::Arm, Reply::Done) => return self.next = Action::Suspend(0),
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
                self.is_pinned = at + 1 == self.members;
                return self.next = self.after(at, Action::Lock, Action::Snapshot(0));
            }
            (Action::Snapshot(at), Reply::At(revision)) if self.locked[at] == revision => {
                return self.next = self.after(at, Action::Snapshot, Action::Confirm(0));
            }
            (Action::Confirm(at), Reply::At(revision)) if self.locked[at] == revision => {
                return self.next = match self.after(at, Action::Confirm, Action::Intent) {
                    Action::Intent => self.resume_from(0),
                    next => next,
                };
            }
            (Action::Snapshot(_) | Action::Confirm(_), Reply::At(_)) => String::from("it changed during the freeze"),
            // What was pinned holds, or the freeze has failed, whatever this member does.
            (Action::Resume(at) | Action::Pause(at), _) => return self.next = self.resume_from(at + 1),
            (Action::Intent, Reply::Done) => return self.next = Action::Store(0),
            (Action::Store(at), Reply::Done) => return self.next = self.after(at, Action::Store, Action::Seal),
            (Action::Seal, Reply::Done) | (Action::Withdraw, _) => return self.next = Action::End,
            (_, reply) => reply.into_reason(),
        };
        let member = match self.next {
            Action::Suspend(at) | Action::Lock(at) | Action::Snapshot(at) | Action::Confirm(at) | Action::Store(at) => {
                Some(at)
            }
            Action::Arm
            | Action::Resume(_)
            | Action::Pause(_)
            | Action::Intent
            | Action::Seal
            | Action::Withdraw
            | Action::End => None,
        };
        self.failure = Some((member, why));
        self.next = match (self.next, self.on_failure) {
            (Action::Intent | Action::Store(_) | Action::Seal, OnFailure::Resume) => Action::Withdraw,
            _ => self.resume_from(0),
        };
    }

    fn after(&self, at: usize, same: fn(usize) -> Action, then: Action) -> Action {
        if at + 1 < self.members { same(at + 1) } else { then }
    }

    fn resume_from(&self, at: usize) -> Action {
        match (&self.failure, self.on_failure) {
            (Some(_), OnFailure::Pause) if at < self.members => Action::Pause(at),
            _ if at < self.suspended => Action::Resume(at),
            (None, _) => Action::Intent,
            // It is recorded even if its reply was lost.
            (Some(_), OnFailure::Pause) => Action::Withdraw,
            (Some(_), OnFailure::Resume) if self.is_pinned => Action::Withdraw,
            // Nothing was made yet.
            (Some(_), OnFailure::Resume) => Action::End,
        }
    }
}
