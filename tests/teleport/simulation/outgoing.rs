//! The source's side of a move, in the small steps that the daemon performs.

use std::collections::VecDeque;

use ryokan::core::handover::{Source, SourceAction, SourceEvent};
use ryokan::core::ids::{CheckpointId, Epoch, HandoverId, HostId};
use ryokan::core::kernel::transition::{self, Claim, Decision, Kind, Recovery, Transition};

use super::Mistake;
use super::disk::{Handover, Kernel, Name, Place, Row};
use super::host::{Effects, Host, Io, Message};
use super::kernel::record_of;

/// A step of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Out {
    Record,
    Offer,
    Copy,
    SyncRecord,
    Seal,
    Decide,
    SyncDeparture,
    /// That of an earlier daemon.
    SyncDepartureAgain,
    Commit,
    Cleanup,
    Resume,
    Abort,
    Forget,
}

/// An outgoing move in memory.
#[derive(Debug, Clone)]
pub struct Outgoing {
    pub machine: Source,
    to_do: VecDeque<Out>,
    pub kernel: Kernel,
    pub to: usize,
    pub epoch: u64,
    /// The present connection.
    pub wire: Option<u32>,
    /// Work that the target has of this connection.
    sent: u64,
    /// The kernel's transition, until the move fails or has departed.
    claim: Option<Claim>,
}

/// The small steps of an action of the source.
fn steps(action: SourceAction, mistake: Mistake) -> Vec<Out> {
    match (action, mistake) {
        (SourceAction::SendOffer, _) => vec![Out::Record, Out::Offer],
        (SourceAction::Copy, _) => vec![Out::Copy],
        (SourceAction::Seal, Mistake::RecordIsNotSynced) => vec![Out::Seal],
        (SourceAction::Seal, _) => vec![Out::SyncRecord, Out::Seal],
        (SourceAction::RecordDeparture, Mistake::CommitBeforeSync) => vec![Out::Decide],
        (SourceAction::RecordDeparture, Mistake::CleanupBeforeSync) => {
            vec![Out::Decide, Out::Cleanup, Out::SyncDeparture]
        }
        (SourceAction::RecordDeparture, _) => vec![Out::Decide, Out::SyncDeparture],
        (SourceAction::SendCommit, _) => vec![Out::Commit, Out::Cleanup],
        (SourceAction::Resume, _) => vec![Out::Resume],
        (SourceAction::SendAbort, _) => vec![Out::Abort],
        (SourceAction::Forget, _) => vec![Out::Forget],
    }
}

fn transition_of(handover: Handover, epoch: u64) -> Transition {
    let mut id = [0; 16];
    id[..4].copy_from_slice(&handover.to_le_bytes());
    Transition::HandoverOut {
        handover: HandoverId::from_bytes(id),
        checkpoint: CheckpointId::from_bytes([0; 16]),
        host: HostId::from_bytes([0; 16]),
        epoch: Epoch(epoch),
    }
}

impl Host {
    /// Begins a move, unless the kernel is in another transition or in a group.
    pub fn begin(&mut self, handover: Handover, kernel: Kernel, to: usize, epoch: u64) {
        let claim = match self.mistake {
            Mistake::MoveIsNoTransition => None,
            _ => match self.transitions(kernel).begin(Kind::HandoverOut) {
                Ok(claim) => Some(claim),
                Err(_) => return,
            },
        };
        let (machine, actions) = Source::begin();
        let to_do = actions.into_iter().flat_map(|action| steps(action, self.mistake)).collect();
        self.moves.insert(handover, Outgoing { machine, to_do, kernel, to, epoch, wire: None, sent: 0, claim });
    }

    /// Continues the moves that the catalog lists, after a start.
    pub(super) fn restart_moves(&mut self) {
        for (handover, row) in self.disk.catalog().rows.clone() {
            let Row::Out { kernel, to, epoch } = row else { continue };
            let is_unreadable = self.unreadable.contains(&kernel);
            if is_unreadable && self.mistake != Mistake::DamageAborts {
                // Nothing is decided before a start that can read the record.
                continue;
            }
            let departed =
                !is_unreadable && self.has_departed(kernel, handover) && self.mistake != Mistake::SourceForgets;
            let (machine, actions) = Source::restarted(departed);
            let mut to_do: VecDeque<Out> = actions.into_iter().flat_map(|action| steps(action, self.mistake)).collect();
            if departed {
                to_do.extend([Out::SyncDepartureAgain, Out::Cleanup]);
            }
            let moving = Outgoing { machine, to_do, kernel, to, epoch, wire: None, sent: 0, claim: None };
            self.moves.insert(handover, moving);
        }
    }

    /// Gives an event to a move.
    pub fn feed(&mut self, handover: Handover, event: SourceEvent) {
        let Some(mut moving) = self.moves.remove(&handover) else { return };
        if event == SourceEvent::Failed {
            // A step that depends on the connection fails; a decision does not.
            moving.wire = None;
            moving.to_do.retain(|step| match step {
                Out::Decide
                | Out::SyncDeparture
                | Out::SyncDepartureAgain
                | Out::Cleanup
                | Out::Resume
                | Out::Forget => true,
                Out::Record | Out::Offer | Out::Copy | Out::SyncRecord | Out::Seal | Out::Commit | Out::Abort => false,
            });
        }
        let actions = moving.machine.step(event);
        moving.to_do.extend(actions.into_iter().flat_map(|action| steps(action, self.mistake)));
        self.moves.insert(handover, moving);
    }

    pub fn is_busy(&self, handover: Handover) -> bool {
        self.moves.get(&handover).is_some_and(|moving| !moving.to_do.is_empty())
    }

    /// Ends the kernel's transition without a departure.
    fn end_transition(&mut self, kernel: Kernel, claim: Option<Claim>) {
        let is_ours =
            matches!(self.disk.content(kernel).record, Some((Transition::HandoverOut { .. }, Decision::Open)));
        if is_ours {
            self.disk.change_content(Name::Kernel(kernel), |content| content.record = None);
        }
        let transitions = self.transitions(kernel);
        let is_interrupted = transitions.interrupted() == Some(Kind::HandoverOut);
        let recovered = if is_interrupted { transitions.recover() } else { None };
        let recovered = recovered.filter(|(_, record)| record.recovery() == Recovery::Revert);
        for claim in claim.into_iter().chain(recovered.map(|(claim, _)| claim)) {
            // Out of order before the record: then there is nothing to clear.
            let _ = transitions.apply(claim, transition::Event::Cleared);
            let _ = transitions.apply(claim, transition::Event::Released);
        }
    }

    /// Performs the next step of a move.
    pub fn act(&mut self, handover: Handover, io: Io) -> Effects {
        let mut effects = Effects::default();
        let Some(mut moving) = self.moves.remove(&handover) else { return effects };
        let Some(step) = moving.to_do.pop_front() else {
            self.moves.insert(handover, moving);
            return effects;
        };
        let kernel = moving.kernel;
        let is_lost = match step {
            // The record also follows what an earlier daemon wrote.
            Out::SyncRecord | Out::SyncDepartureAgain => !self.sync(Some(kernel), true, io),
            Out::SyncDeparture => !self.sync(Some(kernel), false, io),
            Out::Copy => !io.reads,
            Out::Seal => !io.writes || !io.reads || (!io.stops && self.mistake != Mistake::FailedStopIsIgnored),
            Out::Record | Out::Decide => !io.writes,
            _ => false,
        };
        if is_lost {
            self.fail_step(handover, moving, step, &mut effects);
            return effects;
        }
        let mut send = |message| effects.sent.extend(moving.wire.map(|wire| (wire, true, message)));
        match step {
            Out::Record => self.disk.change_catalog(|catalog| {
                catalog.rows.insert(handover, Row::Out { kernel, to: moving.to, epoch: moving.epoch });
            }),
            Out::Offer => effects.connect.push(handover),
            Out::Copy => {
                let work = self.disk.content(kernel).work;
                moving.sent = work;
                if self.mistake == Mistake::CopyOutlivesConnection {
                    let before = self.remembered.insert((kernel, moving.to), work);
                    moving.sent = before.unwrap_or(work).max(work);
                    if before.is_some() {
                        send(Message::objects(0));
                        self.moves.insert(handover, moving);
                        return effects;
                    }
                }
                send(Message::objects(work));
            }
            Out::SyncRecord | Out::SyncDeparture | Out::SyncDepartureAgain => effects.synced = true,
            Out::Seal => {
                if self.mistake != Mistake::SealWithoutFreeze && io.stops {
                    self.frozen.insert(kernel);
                }
                self.stop_worker(kernel, true);
                let intent = transition_of(handover, moving.epoch);
                if let Some(claim) = moving.claim {
                    let recorded = transition::Event::Recorded(record_of(intent, Decision::Open));
                    self.transitions(kernel).apply(claim, recorded).expect("it was begun");
                    self.disk.change_content(Name::Kernel(kernel), |content| {
                        content.record = Some((intent, Decision::Open));
                    });
                }
                let content = self.disk.content(kernel);
                send(Message::seal(moving.sent, content.work, content.image));
            }
            Out::Decide => {
                self.frozen.remove(&kernel);
                if let Some(claim) = moving.claim {
                    self.transitions(kernel).apply(claim, transition::Event::Committed).expect("it was recorded");
                }
                let intent = transition_of(handover, moving.epoch);
                self.disk.change_content(Name::Kernel(kernel), |content| {
                    content.departed_by = Some(handover);
                    content.record = Some((intent, Decision::Committed));
                });
            }
            Out::Commit => send(Message::Commit { handover, kernel, epoch: moving.epoch }),
            Out::Cleanup => {
                let (epoch, by) = (moving.epoch, handover);
                self.open.remove(&kernel);
                self.kernels.remove(&kernel);
                self.end_worker(kernel);
                self.disk.change_content(Name::Kernel(kernel), |content| content.record = None);
                self.disk.change_catalog(|catalog| {
                    catalog.kernels.insert(kernel, Place::Departed { epoch, by });
                });
                self.disk.clear_files(Name::Kernel(kernel));
            }
            Out::Resume => {
                if io.stops {
                    self.stop_worker(kernel, false);
                } else {
                    // The next request starts another one, from the saved state.
                    self.end_worker(kernel);
                }
                if io.stops || self.mistake != Mistake::FailedResumeStays {
                    self.frozen.remove(&kernel);
                }
                self.end_transition(kernel, moving.claim.take());
            }
            Out::Abort => send(Message::Abort { handover }),
            Out::Forget => {
                self.disk.change_catalog(|catalog| {
                    catalog.rows.remove(&handover);
                });
                effects.closed.extend(moving.wire);
                return effects;
            }
        }
        self.moves.insert(handover, moving);
        effects
    }

    /// A write or a sync failed: the machine goes on from what is recorded.
    fn fail_step(&mut self, handover: Handover, mut moving: Outgoing, step: Out, effects: &mut Effects) {
        effects.closed.extend(moving.wire);
        let event = match step {
            // The target knows nothing of the move.
            Out::Record => {
                moving.to_do.clear();
                SourceEvent::Refused
            }
            Out::Decide => {
                let (machine, actions) = Source::restarted(false);
                (moving.machine, moving.wire) = (machine, None);
                moving.to_do = actions.into_iter().flat_map(|action| steps(action, self.mistake)).collect();
                self.moves.insert(handover, moving);
                return;
            }
            // After the decision the sync is repeated with it.
            Out::SyncDeparture | Out::SyncDepartureAgain => {
                moving.wire = None;
                moving.to_do.clear();
                self.moves.insert(handover, moving);
                return;
            }
            _ => SourceEvent::Failed,
        };
        self.moves.insert(handover, moving);
        self.feed(handover, event);
    }

    /// Repeats an unacknowledged decision; `None` if it cannot be repeated now.
    pub fn repeats(&mut self, handover: Handover, io: Io) -> Option<Effects> {
        let moving = self.moves.get(&handover)?;
        let (machine, kernel) = (moving.machine, moving.kernel);
        let is_decided = matches!(machine, Source::Departed | Source::Aborting);
        if !is_decided || moving.wire.is_some() || !moving.to_do.is_empty() {
            return None;
        }
        let mut effects = Effects::default();
        if machine == Source::Departed && self.mistake != Mistake::CommitBeforeSync {
            if !self.sync(Some(kernel), true, io) {
                return None;
            }
            effects.synced = true;
        }
        effects.connect.push(handover);
        Some(effects)
    }

    /// A message of the target.
    pub fn answered(&mut self, handover: Handover, message: Message) {
        let event = match message {
            Message::Accept => SourceEvent::Accepted,
            Message::Flushed => SourceEvent::Copied,
            Message::Prepared => SourceEvent::Prepared,
            Message::Live => SourceEvent::Live,
            Message::Aborted => SourceEvent::Aborted,
            _ => match self.moves.get(&handover).map(|moving| moving.machine) {
                // A decision that is refused is repeated later.
                Some(Source::Departed | Source::Aborting) => SourceEvent::Failed,
                _ => SourceEvent::Refused,
            },
        };
        self.feed(handover, event);
    }
}
