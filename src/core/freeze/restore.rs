//! The order of a group's restore, as a pure state machine.
//!
//! ```text
//! validate each ─▶ gate ─▶ suspend all ─▶ safety freeze ─▶ intent ─▶ prepare each ─▶ switch each ─▶ discard each
//!     ─▶ commit ─▶ resume all: restored
//!
//! failure before the intent:   resume all: as before
//! failure from the intent on:  revert each that was switched, backwards ─▶ discard each ─▶ clear ─▶ resume all: as before
//! a member that cannot be reverted: unfinished; nothing is resumed, recovery reverts again
//! ```
//! Prepared copies are inactive: only a switch changes a member. The intent stays recorded until every member is at one
//! of the two states. "All" are the members of the group: the restored ones come first, the others are held until the end.
//!
//! Owns the order; never knows kernels, repositories, databases or time.

use super::capture::Reply;
use crate::core::limits;

/// What the driver must do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Read everything of this member that will be needed.
    Validate(usize),
    /// Check that code and data fit.
    Gate,
    /// Stop admission of work in this member.
    Suspend(usize),
    /// Freeze the present state of all members.
    Safety,
    /// Record what a new daemon must revert.
    Intent,
    /// Make an inactive copy for this member.
    Prepare(usize),
    /// Make that copy the active one. It may be repeated.
    Switch(usize),
    /// Bring this member back to the safety freeze. It may be repeated.
    Revert(usize),
    /// Remove this member's inactive copy, if there is one.
    Discard(usize),
    /// Record that the restore holds, if the members that are not restored still fit; the intent goes with that.
    Commit,
    /// Delete the intent.
    Clear,
    /// Admit work in this member again.
    Resume(usize),
    /// Nothing is left to do.
    End,
}

/// How a restore ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Every member is at the freeze.
    Restored,
    /// Every member is as it was.
    AsBefore {
        /// The member that failed.
        member: Option<usize>,
        /// Why.
        why: String,
    },
    /// The intent stays, and nothing is resumed: recovery reverts.
    Unfinished {
        /// The member that could not be reverted.
        member: Option<usize>,
        /// Why.
        why: String,
    },
}

/// A restore of some members.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Restore {
    members: usize,
    /// The restored members, and the others of their group.
    all: usize,
    next: Action,
    /// Members from 0 to here are suspended; the last one perhaps.
    suspended: usize,
    /// The same for prepared and for switched ones.
    prepared: usize,
    switched: usize,
    attempts: u32,
    failure: Option<(Option<usize>, String)>,
    stuck: Option<(Option<usize>, String)>,
}

impl Restore {
    /// A restore of this number of members, in a group with `others`.
    pub fn new(members: usize, others: usize) -> Restore {
        let next = if members == 0 { Action::End } else { Action::Validate(0) };
        let failure = (members == 0).then(|| (None, String::from("there is nothing to restore")));
        Restore {
            members,
            all: members + others,
            next,
            suspended: 0,
            prepared: 0,
            switched: 0,
            attempts: 0,
            failure,
            stuck: None,
        }
    }

    /// The recovery of a restore that a former daemon left: the first `reached` members may have been switched.
    pub fn recovery(members: usize, reached: usize) -> Restore {
        let failure = Some((None, String::from("the daemon ended during the restore")));
        let next = if members == 0 { Action::Clear } else { Action::Suspend(0) };
        Restore { next, failure, prepared: members, switched: reached.min(members), ..Restore::new(members, 0) }
    }

    /// The next action.
    pub fn next(&self) -> Action {
        self.next
    }

    /// How it ended.
    pub fn outcome(&self) -> Option<Outcome> {
        if self.next != Action::End {
            return None;
        }
        Some(match (&self.stuck, &self.failure) {
            (Some((member, why)), _) => Outcome::Unfinished { member: *member, why: why.clone() },
            (None, Some((member, why))) => Outcome::AsBefore { member: *member, why: why.clone() },
            (None, None) => Outcome::Restored,
        })
    }

    fn is_recovery(&self) -> bool {
        // Only a recovery suspends after a failure.
        self.failure.is_some()
    }

    /// Takes the reply to the next action.
    pub fn reply(&mut self, reply: Reply) {
        let done = reply == Reply::Done;
        self.next = match self.next {
            Action::End => Action::End,
            Action::Suspend(at) => {
                self.suspended = at + 1;
                match (done, self.is_recovery()) {
                    (true, _) if at + 1 < self.all => Action::Suspend(at + 1),
                    (true, false) => Action::Safety,
                    (true, true) => self.revert_from(self.switched),
                    (false, true) => self.stop(Some(at), reply),
                    (false, false) => self.fail(Some(at), reply),
                }
            }
            Action::Revert(at) if done => {
                self.attempts = 0;
                self.revert_from(at)
            }
            Action::Revert(at) if self.attempts + 1 < limits::REVERT_ATTEMPTS => {
                self.attempts += 1;
                Action::Revert(at)
            }
            Action::Revert(at) => self.stop(Some(at), reply),
            // An inactive copy that stays is swept later.
            Action::Discard(at) => self.discard_from(at + 1),
            Action::Clear if done => self.resume_from(0),
            Action::Clear => self.stop(None, reply),
            Action::Resume(at) => self.resume_from(at + 1),
            Action::Validate(at) if done => self.after(at, Action::Validate, Action::Gate),
            Action::Gate if done => Action::Suspend(0),
            Action::Safety if done => Action::Intent,
            Action::Intent if done => Action::Prepare(0),
            Action::Prepare(at) => {
                self.prepared = at + 1;
                if done { self.after(at, Action::Prepare, Action::Switch(0)) } else { self.fail(Some(at), reply) }
            }
            Action::Switch(at) => {
                self.switched = at + 1;
                if !done {
                    self.fail(Some(at), reply)
                } else if at + 1 < self.members {
                    Action::Switch(at + 1)
                } else {
                    self.discard_from(0)
                }
            }
            Action::Commit if done => self.resume_from(0),
            Action::Validate(at) => self.fail(Some(at), reply),
            Action::Gate | Action::Safety | Action::Intent | Action::Commit => self.fail(None, reply),
        };
    }

    fn fail(&mut self, member: Option<usize>, reply: Reply) -> Action {
        let is_recorded = matches!(
            self.next,
            // The record may exist although its reply was an error.
            Action::Intent | Action::Prepare(_) | Action::Switch(_) | Action::Commit
        );
        self.failure = Some((member, reply.into_reason()));
        if is_recorded { self.revert_from(self.switched) } else { self.resume_from(0) }
    }

    fn stop(&mut self, member: Option<usize>, reply: Reply) -> Action {
        self.stuck = Some((member, reply.into_reason()));
        Action::End
    }

    fn after(&self, at: usize, same: fn(usize) -> Action, then: Action) -> Action {
        if at + 1 < self.members { same(at + 1) } else { then }
    }

    fn revert_from(&self, at: usize) -> Action {
        at.checked_sub(1).map_or_else(|| self.discard_from(0), Action::Revert)
    }

    fn discard_from(&self, at: usize) -> Action {
        match (at < self.prepared, &self.failure) {
            (true, _) => Action::Discard(at),
            (false, None) => Action::Commit,
            (false, Some(_)) => Action::Clear,
        }
    }

    fn resume_from(&self, at: usize) -> Action {
        if at < self.suspended { Action::Resume(at) } else { Action::End }
    }
}
