//! The target's side of a move, in the small steps that the daemon performs.

use std::collections::VecDeque;

use ryokan::core::handover::{Prepared, Target, TargetAction, TargetEvent};

use super::Mistake;
use super::disk::{Catalog, Handover, Image, Kernel, Name, Place, Row};
use super::host::{Effects, Host, Io, Message};

/// A step of the target on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum In {
    Fill {
        handover: Handover,
        work: u64,
        image: Image,
    },
    /// Files, then the record. A failure refuses what arrived.
    SyncPrepared {
        handover: Handover,
        is_record: bool,
    },
    Record {
        handover: Handover,
        kernel: Kernel,
        epoch: u64,
    },
    Activate {
        handover: Handover,
    },
    /// `again`: an earlier attempt or daemon made the decision.
    Sync {
        again: bool,
    },
    Adopt {
        handover: Handover,
    },
    Discard {
        handover: Handover,
    },
    Send(Message),
}

/// The target's end of a connection.
#[derive(Debug, Clone, Default)]
pub struct Serving {
    to_do: VecDeque<In>,
    offered: Option<(Handover, Kernel, u64)>,
    received: u64,
    is_aborted: bool,
    /// Syncs that had failed when it began.
    failed_syncs: u64,
}

impl Host {
    /// The recorded state of a handover at the target.
    fn recorded(&self, handover: Handover, known: Option<(Kernel, u64)>) -> Target {
        match (self.disk.catalog().rows.get(&handover), known) {
            (Some(Row::In { live, .. }), _) => {
                Target::restarted(Some(if *live { Prepared::Live } else { Prepared::Waiting }))
            }
            (_, Some((kernel, epoch))) => match self.disk.catalog().kernels.get(&kernel) {
                Some(Place::Here { epoch: here } | Place::Departed { epoch: here, .. }) if *here >= epoch => {
                    Target::Live
                }
                _ => Target::Gone,
            },
            (_, None) => Target::Gone,
        }
    }

    /// Whether an offered kernel may come here.
    fn has_place(&self, kernel: Kernel, epoch: u64) -> bool {
        let Catalog { kernels, rows, .. } = self.disk.catalog();
        let waits = rows.values().any(|row| matches!(row, Row::In { kernel: of, live: false, .. } if *of == kernel));
        !waits
            && match kernels.get(&kernel) {
                None => true,
                Some(Place::Departed { .. }) if self.mistake == Mistake::OldEpochIsTaken => true,
                Some(Place::Departed { epoch: left, .. }) => *left < epoch,
                Some(Place::Here { .. }) => false,
            }
    }

    /// A message of the source.
    pub fn receive(&mut self, wire: u32, message: Message) -> Vec<(u32, bool, Message)> {
        let mut serving = self.serving.remove(&wire).unwrap_or_default();
        let mut answer = None;
        match message {
            Message::Offer { handover, kernel, epoch } => {
                let is_offered = self.serving.values().any(|one| one.offered.is_some_and(|(id, ..)| id == handover));
                match self.has_place(kernel, epoch) && !is_offered && serving.offered.is_none() {
                    true => {
                        serving.offered = Some((handover, kernel, epoch));
                        serving.failed_syncs = self.failed_syncs;
                        // No record of this move follows lost writes of an earlier daemon.
                        self.disk.write_anew(None);
                        answer = Some(Message::Accept);
                    }
                    false => answer = Some(Message::Refused),
                }
            }
            Message::Objects { work, .. } if message.is_whole() || self.mistake == Mistake::NoDigests => {
                serving.received = work;
                answer = Some(Message::Flushed);
            }
            Message::Seal { base, work, image, .. } => {
                let is_whole = base == serving.received || self.mistake == Mistake::CopyOutlivesConnection;
                let is_whole = is_whole && (message.is_whole() || self.mistake == Mistake::NoDigests);
                let place = serving.offered.filter(|(_, kernel, epoch)| self.has_place(*kernel, *epoch));
                match place.filter(|_| is_whole && !serving.is_aborted) {
                    Some((handover, kernel, epoch)) => {
                        let got = if base == serving.received { work } else { serving.received + work - base };
                        let mut machine = Target::Receiving;
                        let actions = machine.step(TargetEvent::Sealed);
                        serving.to_do.push_back(In::Fill { handover, work: got, image });
                        for action in actions {
                            self.plan_step(&mut serving, action, handover, Some((kernel, epoch)));
                        }
                        if self.mistake == Mistake::PreparedBeforeRecord {
                            serving.to_do.make_contiguous().reverse();
                            serving.to_do.rotate_right(1);
                        }
                    }
                    None => answer = Some(Message::Refused),
                }
            }
            Message::Commit { handover, kernel, epoch } => {
                serving.offered = None;
                let mut machine = self.recorded(handover, Some((kernel, epoch)));
                for action in machine.step(TargetEvent::Commit) {
                    self.plan_step(&mut serving, action, handover, Some((kernel, epoch)));
                }
            }
            Message::Abort { handover } => {
                serving.offered = None;
                if self.mistake != Mistake::AbortSparesSession {
                    // Waits for what a session is recording, and ends it.
                    for other in self.serving.values_mut().filter(|one| one.offered.is_some_and(|it| it.0 == handover))
                    {
                        other.is_aborted = true;
                    }
                }
                let mut machine = match self.recorded(handover, None) {
                    Target::Gone => Target::Receiving,
                    state => state,
                };
                for action in machine.step(TargetEvent::Abort) {
                    self.plan_step(&mut serving, action, handover, None);
                }
            }
            // Bytes with another digest than was asked for.
            _ => answer = Some(Message::Refused),
        }
        self.serving.insert(wire, serving);
        answer.map(|message| (wire, false, message)).into_iter().collect()
    }

    /// Plans the small steps of an action of the target.
    fn plan_step(&self, serving: &mut Serving, action: TargetAction, handover: Handover, known: Option<(Kernel, u64)>) {
        let is_prepared = matches!(self.disk.catalog().rows.get(&handover), Some(Row::In { live: false, .. }));
        let steps = match (action, known) {
            (TargetAction::RecordPrepared, Some((kernel, epoch))) => vec![
                In::SyncPrepared { handover, is_record: false },
                In::Record { handover, kernel, epoch },
                In::SyncPrepared { handover, is_record: true },
            ],
            (TargetAction::SendPrepared, _) => vec![In::Send(Message::Prepared)],
            (TargetAction::Activate, _) => {
                let sync = In::Sync { again: !is_prepared };
                match self.mistake {
                    Mistake::AdoptBeforeSync => vec![In::Activate { handover }, In::Adopt { handover }, sync],
                    Mistake::LiveBeforeSync => vec![In::Activate { handover }, In::Adopt { handover }],
                    _ => vec![In::Activate { handover }, sync, In::Adopt { handover }],
                }
            }
            (TargetAction::SendLive, _) => vec![In::Send(Message::Live)],
            (TargetAction::Discard, _) => match self.mistake {
                Mistake::DiscardIsNotSynced => vec![In::Discard { handover }],
                _ => vec![In::Discard { handover }, In::Sync { again: !is_prepared }],
            },
            (TargetAction::SendAborted, _) => vec![In::Send(Message::Aborted)],
            (TargetAction::SendRefused, _) | (TargetAction::RecordPrepared, None) => vec![In::Send(Message::Refused)],
        };
        serving.to_do.extend(steps);
    }

    /// Whether the next message of a connection has to wait: for its own steps, or an abort for the session it ends.
    pub fn is_serving(&self, wire: u32, next: Message) -> bool {
        let own = self.serving.get(&wire).is_some_and(|serving| !serving.to_do.is_empty());
        let decides = matches!(next, Message::Abort { .. } | Message::Commit { .. });
        own || (decides && self.serving.values().any(|serving| !serving.to_do.is_empty()))
    }

    pub fn has_steps(&self, wire: u32) -> bool {
        self.serving.get(&wire).is_some_and(|serving| !serving.to_do.is_empty())
    }

    /// Performs the next step of a connection.
    pub fn serve(&mut self, wire: u32, io: Io) -> Effects {
        let mut effects = Effects::default();
        let Some(mut serving) = self.serving.remove(&wire) else { return effects };
        match serving.to_do.pop_front() {
            // Only what is written fails; the rest of the steps goes on.
            Some(In::Fill { .. }) if !io.writes && self.mistake == Mistake::FullDiskIsIgnored => {}
            Some(In::SyncPrepared { handover, is_record }) => {
                let synced = match is_record {
                    true => self.sync(None, false, io),
                    // What was lost of the files is not written again.
                    false if self.failed_syncs != serving.failed_syncs => false,
                    false if io.syncs => {
                        self.disk.sync();
                        true
                    }
                    false => {
                        self.fail_sync();
                        false
                    }
                };
                effects.synced = synced;
                if !synced {
                    self.refuse_arrival(&mut serving, handover);
                    effects.sent.push((wire, false, Message::Refused));
                }
            }
            Some(In::Fill { handover, .. }) if !io.writes || !io.reads || !io.admits => {
                self.refuse_arrival(&mut serving, handover);
                effects.sent.push((wire, false, Message::Refused));
            }
            Some(In::Record { handover, .. }) if !io.writes => {
                self.refuse_arrival(&mut serving, handover);
                effects.sent.push((wire, false, Message::Refused));
            }
            Some(In::Fill { handover, work, image }) => self.disk.create(Name::Received(handover), work, image),
            Some(In::Sync { again }) => {
                effects.synced = self.sync(None, again, io);
                if !effects.synced {
                    // The connection ends: the source repeats its decision.
                    effects.closed.push(wire);
                    return effects;
                }
            }
            Some(In::Record { handover, kernel, epoch }) => self.disk.change_catalog(|catalog| {
                catalog.rows.insert(handover, Row::In { kernel, epoch, live: false });
            }),
            Some(In::Activate { handover }) => self.activate(handover),
            Some(In::Adopt { handover }) => {
                // A late commit of an earlier move does not open the kernel of a later one.
                if let Some(Row::In { kernel, live: true, epoch }) = self.disk.catalog().rows.get(&handover).copied()
                    && self.disk.catalog().kernels.get(&kernel) == Some(&Place::Here { epoch })
                    && !self.open.contains(&kernel)
                {
                    self.disk.adopt(handover, kernel);
                    self.open.insert(kernel);
                }
            }
            Some(In::Discard { handover }) => {
                if let Some(Row::In { live: false, .. }) = self.disk.catalog().rows.get(&handover) {
                    self.disk.change_catalog(|catalog| {
                        catalog.rows.remove(&handover);
                    });
                    self.disk.remove(Name::Received(handover));
                }
            }
            Some(In::Send(message)) => effects.sent.push((wire, false, message)),
            None => {}
        }
        self.serving.insert(wire, serving);
        effects
    }

    /// Removes what arrived of a kernel that is not prepared.
    fn refuse_arrival(&mut self, serving: &mut Serving, handover: Handover) {
        self.disk.change_catalog(|catalog| {
            catalog.rows.remove(&handover);
        });
        self.disk.remove(Name::Received(handover));
        serving.to_do.clear();
    }

    /// One transaction: the kernel is here, and its tombstone and the move by which it left are gone.
    fn activate(&mut self, handover: Handover) {
        let Some(Row::In { kernel, epoch, live: false }) = self.disk.catalog().rows.get(&handover).copied() else {
            return;
        };
        let left_by = match self.disk.catalog().kernels.get(&kernel) {
            Some(Place::Departed { by, .. }) if self.mistake != Mistake::ReturnKeepsRow => Some(*by),
            _ => None,
        };
        self.open.remove(&kernel);
        self.kernels.remove(&kernel);
        self.disk.change_catalog(|catalog| {
            catalog.rows.insert(handover, Row::In { kernel, epoch, live: true });
            catalog.kernels.insert(kernel, Place::Here { epoch });
            if let Some(by) = left_by {
                catalog.rows.remove(&by);
            }
        });
        if let Some(by) = left_by {
            self.moves.remove(&by);
        }
    }

    /// The connection has ended.
    pub fn lose(&mut self, wire: u32) {
        let serving = self.serving.remove(&wire);
        if self.mistake == Mistake::TargetDecides
            && let Some((handover, ..)) = serving.and_then(|serving| serving.offered)
        {
            self.activate(handover);
        }
    }
}
