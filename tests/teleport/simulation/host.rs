//! A simulated host: performs the actions of the machines in small steps, as the daemon does.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use ryokan::core::handover::{Prepared, Source, SourceAction, SourceEvent, Target, TargetAction, TargetEvent};

use super::Mistake;
use super::disk::{Catalog, Disk, Handover, Kernel, Name, Place, Row};

/// A message of the handover protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message {
    Offer {
        handover: Handover,
        kernel: Kernel,
        epoch: u64,
    },
    Accept,
    /// The kernel's work up to here.
    Objects {
        work: u64,
    },
    Flushed,
    /// What was done after `base`.
    Seal {
        base: u64,
        work: u64,
    },
    Prepared,
    Commit {
        handover: Handover,
        kernel: Kernel,
        epoch: u64,
    },
    Live,
    Abort {
        handover: Handover,
    },
    Aborted,
    Refused,
}

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
    Commit,
    Cleanup,
    Resume,
    Abort,
    Forget,
}

/// A step of the target on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum In {
    Fill {
        handover: Handover,
        work: u64,
    },
    /// A failure refuses what arrived.
    SyncPrepared {
        handover: Handover,
    },
    Record {
        handover: Handover,
        kernel: Kernel,
        epoch: u64,
    },
    Activate {
        handover: Handover,
    },
    Sync,
    Adopt {
        handover: Handover,
    },
    Discard {
        handover: Handover,
    },
    Send(Message),
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
}

/// The target's end of a connection.
#[derive(Debug, Clone, Default)]
pub struct Serving {
    to_do: VecDeque<In>,
    offered: Option<(Handover, Kernel, u64)>,
    received: u64,
    is_aborted: bool,
}

/// What happened while a step was performed.
#[derive(Debug, Default)]
pub struct Effects {
    /// Messages on a connection: `true` leads to the target.
    pub sent: Vec<(u32, bool, Message)>,
    /// Connections that this host closes.
    pub closed: Vec<u32>,
    /// Connections that a move needs: handover.
    pub connect: Vec<Handover>,
    /// Everything was synced.
    pub synced: bool,
}

/// A host.
#[derive(Debug, Clone)]
pub struct Host {
    pub disk: Disk,
    pub is_up: bool,
    pub moves: BTreeMap<Handover, Outgoing>,
    pub serving: BTreeMap<u32, Serving>,
    /// Kernels that are open for use.
    pub open: BTreeSet<Kernel>,
    pub frozen: BTreeSet<Kernel>,
    /// Work that an earlier connection carried: only a mistaken source relies on it.
    remembered: BTreeMap<(Kernel, usize), u64>,
    pub mistake: Mistake,
}

impl Host {
    pub fn new(mistake: Mistake) -> Host {
        Host {
            disk: Disk::new(),
            is_up: true,
            moves: BTreeMap::new(),
            serving: BTreeMap::new(),
            open: BTreeSet::new(),
            frozen: BTreeSet::new(),
            remembered: BTreeMap::new(),
            mistake,
        }
    }

    fn has_departed(&self, kernel: Kernel, by: Handover) -> bool {
        let view = *self.disk.views().last().expect("a state");
        match self.mistake {
            Mistake::AnyDepartureCommits => view.live(kernel).is_none(),
            _ => view.has_departed(kernel, by),
        }
    }

    pub fn may_work(&self, kernel: Kernel) -> bool {
        let is_live = self.disk.views().last().is_some_and(|view| view.live(kernel).is_some());
        self.is_up && is_live && self.open.contains(&kernel) && !self.frozen.contains(&kernel)
    }

    /// Ends the daemon; the disk stays.
    pub fn crash(&mut self) {
        self.is_up = false;
        self.moves.clear();
        self.serving.clear();
        self.open.clear();
        self.frozen.clear();
    }

    /// Recovery at the start of a daemon.
    pub fn start(&mut self) {
        self.is_up = true;
        let Catalog { kernels, rows } = self.disk.catalog().clone();
        if self.mistake != Mistake::StartAdoptsBeforeSync {
            // An activation that is not durable yet must not lose its directory to the next start.
            self.disk.sync();
        }
        for (handover, row) in &rows {
            if let Row::In { kernel, live: true, .. } = row {
                self.disk.adopt(*handover, *kernel);
            }
        }
        for name in self.disk.names() {
            let is_known = match name {
                Name::Kernel(kernel) => kernels.contains_key(&kernel),
                Name::Received(handover) => matches!(rows.get(&handover), Some(Row::In { live: false, .. })),
            };
            if !is_known {
                self.disk.remove(name);
            }
        }
        self.open = kernels.keys().copied().collect();
        for (handover, row) in rows {
            if let Row::Out { kernel, to, epoch } = row {
                let departed = self.has_departed(kernel, handover) && self.mistake != Mistake::SourceForgets;
                let (machine, actions) = Source::restarted(departed);
                let mut moving = Outgoing { machine, to_do: VecDeque::new(), kernel, to, epoch, wire: None, sent: 0 };
                moving.to_do.extend(actions.into_iter().flat_map(|action| self.steps(action)));
                if departed {
                    moving.to_do.extend([Out::SyncDeparture, Out::Cleanup]);
                }
                self.moves.insert(handover, moving);
            }
        }
    }

    /// The small steps of an action of the source.
    fn steps(&self, action: SourceAction) -> Vec<Out> {
        match (action, self.mistake) {
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

    /// Begins a move.
    pub fn begin(&mut self, handover: Handover, kernel: Kernel, to: usize, epoch: u64) {
        let (machine, actions) = Source::begin();
        let to_do = actions.into_iter().flat_map(|action| self.steps(action)).collect();
        self.moves.insert(handover, Outgoing { machine, to_do, kernel, to, epoch, wire: None, sent: 0 });
    }

    /// Gives an event to a move.
    pub fn feed(&mut self, handover: Handover, event: SourceEvent) {
        let Some(mut moving) = self.moves.remove(&handover) else { return };
        if event == SourceEvent::Failed {
            // A step that depends on the connection fails; a decision does not.
            moving.wire = None;
            moving.to_do.retain(|step| match step {
                Out::Decide | Out::SyncDeparture | Out::Cleanup | Out::Resume | Out::Forget => true,
                Out::Record | Out::Offer | Out::Copy | Out::SyncRecord | Out::Seal | Out::Commit | Out::Abort => false,
            });
        }
        let actions = moving.machine.step(event);
        moving.to_do.extend(actions.into_iter().flat_map(|action| self.steps(action)));
        self.moves.insert(handover, moving);
    }

    pub fn is_busy(&self, handover: Handover) -> bool {
        self.moves.get(&handover).is_some_and(|moving| !moving.to_do.is_empty())
    }

    /// Performs the next step of a move. `syncs`: whether a sync succeeds.
    pub fn act(&mut self, handover: Handover, syncs: bool) -> Effects {
        let mut effects = Effects::default();
        let Some(mut moving) = self.moves.remove(&handover) else { return effects };
        let Some(step) = moving.to_do.pop_front() else {
            self.moves.insert(handover, moving);
            return effects;
        };
        let kernel = moving.kernel;
        let mut send = |message| effects.sent.extend(moving.wire.map(|wire| (wire, true, message)));
        match step {
            Out::Record => self.disk.change_catalog(|catalog| {
                catalog.rows.insert(handover, Row::Out { kernel, to: moving.to, epoch: moving.epoch });
            }),
            Out::Offer => effects.connect.push(handover),
            Out::Copy => {
                let work = self.disk.copy(Name::Kernel(kernel)).map_or(0, |copy| copy.work);
                moving.sent = work;
                if self.mistake == Mistake::CopyOutlivesConnection {
                    let before = self.remembered.insert((kernel, moving.to), work);
                    moving.sent = before.unwrap_or(work).max(work);
                    if before.is_some() {
                        send(Message::Objects { work: 0 });
                        self.moves.insert(handover, moving);
                        return effects;
                    }
                }
                send(Message::Objects { work });
            }
            Out::SyncRecord | Out::SyncDeparture if !syncs => {
                // The machine goes on from the record: before the decision the move fails, after it the sync is repeated.
                if step == Out::SyncRecord {
                    self.moves.insert(handover, moving);
                    effects.closed.extend(self.moves.get(&handover).and_then(|moving| moving.wire));
                    self.feed(handover, SourceEvent::Failed);
                    return effects;
                }
                effects.closed.extend(moving.wire.take());
                moving.to_do.clear();
            }
            Out::SyncRecord | Out::SyncDeparture => {
                self.disk.sync();
                effects.synced = true;
            }
            Out::Seal => {
                if self.mistake != Mistake::SealWithoutFreeze {
                    self.frozen.insert(kernel);
                }
                let work = self.disk.copy(Name::Kernel(kernel)).map_or(0, |copy| copy.work);
                send(Message::Seal { base: moving.sent, work });
            }
            Out::Decide => {
                self.frozen.remove(&kernel);
                self.disk.change_content(Name::Kernel(kernel), |content| content.departed_by = Some(handover));
            }
            Out::Commit => send(Message::Commit { handover, kernel, epoch: moving.epoch }),
            Out::Cleanup => {
                let (epoch, by) = (moving.epoch, handover);
                self.open.remove(&kernel);
                self.disk.change_catalog(|catalog| {
                    catalog.kernels.insert(kernel, Place::Departed { epoch, by });
                });
                self.disk.clear_files(Name::Kernel(kernel));
            }
            Out::Resume => {
                self.frozen.remove(&kernel);
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

    /// Repeats an unacknowledged decision; `false` if it cannot be repeated now.
    pub fn repeats(&mut self, handover: Handover, syncs: bool) -> Option<Effects> {
        let moving = self.moves.get_mut(&handover)?;
        let is_decided = matches!(moving.machine, Source::Departed | Source::Aborting);
        if !is_decided || moving.wire.is_some() || !moving.to_do.is_empty() {
            return None;
        }
        let mut effects = Effects::default();
        if moving.machine == Source::Departed && self.mistake != Mistake::CommitBeforeSync {
            if !syncs {
                return None;
            }
            self.disk.sync();
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
        let Catalog { kernels, rows } = self.disk.catalog();
        let waits = rows.values().any(|row| matches!(row, Row::In { kernel: of, live: false, .. } if *of == kernel));
        !waits
            && match kernels.get(&kernel) {
                None => true,
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
                        answer = Some(Message::Accept);
                    }
                    false => answer = Some(Message::Refused),
                }
            }
            Message::Objects { work } => {
                serving.received = work;
                answer = Some(Message::Flushed);
            }
            Message::Seal { base, work } => {
                let is_whole = base == serving.received || self.mistake == Mistake::CopyOutlivesConnection;
                let place = serving.offered.filter(|(_, kernel, epoch)| self.has_place(*kernel, *epoch));
                match place.filter(|_| is_whole && !serving.is_aborted) {
                    Some((handover, kernel, epoch)) => {
                        let got = if base == serving.received { work } else { serving.received + work - base };
                        let mut machine = Target::Receiving;
                        let actions = machine.step(TargetEvent::Sealed);
                        serving.to_do.push_back(In::Fill { handover, work: got });
                        for action in actions {
                            self.plan(&mut serving, action, handover, Some((kernel, epoch)));
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
                    self.plan(&mut serving, action, handover, Some((kernel, epoch)));
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
                    self.plan(&mut serving, action, handover, None);
                }
            }
            _ => {}
        }
        self.serving.insert(wire, serving);
        answer.map(|message| (wire, false, message)).into_iter().collect()
    }

    /// Plans the small steps of an action of the target.
    fn plan(&self, serving: &mut Serving, action: TargetAction, handover: Handover, known: Option<(Kernel, u64)>) {
        let steps = match (action, known) {
            (TargetAction::RecordPrepared, Some((kernel, epoch))) => vec![
                In::SyncPrepared { handover },
                In::Record { handover, kernel, epoch },
                In::SyncPrepared { handover },
            ],
            (TargetAction::SendPrepared, _) => vec![In::Send(Message::Prepared)],
            (TargetAction::Activate, _) => match self.mistake {
                Mistake::AdoptBeforeSync => vec![In::Activate { handover }, In::Adopt { handover }, In::Sync],
                Mistake::LiveBeforeSync => vec![In::Activate { handover }, In::Adopt { handover }],
                _ => vec![In::Activate { handover }, In::Sync, In::Adopt { handover }],
            },
            (TargetAction::SendLive, _) => vec![In::Send(Message::Live)],
            (TargetAction::Discard, _) => match self.mistake {
                Mistake::DiscardIsNotSynced => vec![In::Discard { handover }],
                _ => vec![In::Discard { handover }, In::Sync],
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
    pub fn serve(&mut self, wire: u32, syncs: bool) -> Effects {
        let mut effects = Effects::default();
        let Some(mut serving) = self.serving.remove(&wire) else { return effects };
        match serving.to_do.pop_front() {
            Some(In::Fill { handover, work }) => self.disk.create(Name::Received(handover), work),
            Some(In::SyncPrepared { handover }) if !syncs => {
                self.disk.change_catalog(|catalog| {
                    catalog.rows.remove(&handover);
                });
                self.disk.remove(Name::Received(handover));
                serving.to_do.clear();
                effects.sent.push((wire, false, Message::Refused));
            }
            Some(In::Sync) if !syncs => {
                // The connection ends: the source repeats its decision.
                effects.closed.push(wire);
                return effects;
            }
            Some(In::SyncPrepared { .. } | In::Sync) => {
                self.disk.sync();
                effects.synced = true;
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
