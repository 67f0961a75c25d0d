//! Every reachable state of both machines with a network that loses, repeats and delays messages, and hosts that crash
//! between any two actions.

use std::collections::{BTreeSet, HashSet, VecDeque};

use super::{Prepared, Source, SourceAction, SourceEvent, Target, TargetAction, TargetEvent};

/// Connections of one run, and crashes of each host.
const CONNECTIONS: u8 = 3;
const CRASHES: u8 = 2;

/// A message with the number of its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Message {
    Offer,
    Seal,
    Commit,
    Abort,
    Accept,
    Refuse,
    Prepared,
    Live,
    Aborted,
}

/// A deliberate mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mistake {
    None,
    /// The source sends the commit before its departure is durable.
    CommitBeforeRecord,
    /// A prepared target activates the kernel when the connection is lost.
    TargetDecides,
    /// The source resumes the kernel after a departure whose acknowledgement is late.
    SourceResumes,
    /// The target deletes the prepared kernel when the connection is lost.
    TargetForgets,
    /// A seal of an earlier connection is accepted.
    SealOutlivesConnection,
    /// "Prepared" is sent before it is durable.
    PreparedBeforeRecord,
}

/// Both hosts, and every message ever sent: any of them may arrive at any time, any number of times, or never.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct World {
    source: Option<Source>,
    to_do: Vec<SourceAction>,
    /// Durable: the handover's record, and the departure.
    recorded: bool,
    departed: bool,
    connection: u8,
    target: Option<Target>,
    target_to_do: Vec<TargetAction>,
    target_record: Option<Prepared>,
    /// The connection whose objects the target receives.
    session: Option<u8>,
    /// The first connection on which an offer may still arrive: a connection is ordered and ends with its hosts.
    opens: u8,
    sent: BTreeSet<(u8, Message)>,
    crashes: [u8; 2],
}

impl World {
    fn begin() -> World {
        let (source, to_do) = Source::begin();
        World {
            source: Some(source),
            to_do,
            recorded: true,
            departed: false,
            connection: 0,
            target: Some(Target::Gone),
            target_to_do: Vec::new(),
            target_record: None,
            session: None,
            opens: 0,
            sent: BTreeSet::new(),
            crashes: [0; 2],
        }
    }

    fn live(&self) -> usize {
        usize::from(!self.departed) + usize::from(self.target_record == Some(Prepared::Live))
    }

    /// What must hold always.
    fn check(&self) -> Result<(), String> {
        if self.live() > 1 {
            return Err(format!("two live copies: {self:?}"));
        }
        if self.departed && self.target_record.is_none() {
            return Err(format!("no copy is left: {self:?}"));
        }
        Ok(())
    }

    fn feed_source(&mut self, event: SourceEvent, mistake: Mistake) {
        let Some(source) = &mut self.source else { return };
        let mut actions = source.step(event);
        if mistake == Mistake::CommitBeforeRecord && actions.contains(&SourceAction::RecordDeparture) {
            actions.reverse();
        }
        self.to_do.extend(actions);
    }

    fn feed_target(&mut self, event: TargetEvent, mistake: Mistake) {
        let Some(target) = &mut self.target else { return };
        let mut actions = target.step(event);
        if mistake == Mistake::PreparedBeforeRecord && actions.contains(&TargetAction::RecordPrepared) {
            actions.reverse();
        }
        self.target_to_do.extend(actions);
    }

    /// The source performs its next action.
    fn act(&mut self) {
        let send = match self.to_do.remove(0) {
            SourceAction::SendOffer => Some(Message::Offer),
            SourceAction::Seal => Some(Message::Seal),
            SourceAction::SendCommit => Some(Message::Commit),
            SourceAction::SendAbort => Some(Message::Abort),
            SourceAction::RecordDeparture => {
                self.departed = true;
                None
            }
            SourceAction::Forget => {
                self.recorded = false;
                None
            }
            SourceAction::Copy | SourceAction::Resume => None,
        };
        self.sent.extend(send.map(|message| (self.connection, message)));
    }

    /// The target performs its next action.
    fn target_act(&mut self, to: u8) {
        let send = match self.target_to_do.remove(0) {
            TargetAction::RecordPrepared => {
                self.target_record = Some(Prepared::Waiting);
                None
            }
            TargetAction::Activate => {
                self.target_record = Some(Prepared::Live);
                None
            }
            TargetAction::Discard => {
                self.target_record = None;
                None
            }
            TargetAction::SendPrepared => Some(Message::Prepared),
            TargetAction::SendLive => Some(Message::Live),
            TargetAction::SendAborted => Some(Message::Aborted),
            TargetAction::SendRefused => Some(Message::Refuse),
        };
        self.sent.extend(send.map(|message| (to, message)));
    }

    /// A message arrives.
    fn deliver(&mut self, (connection, message): (u8, Message), mistake: Mistake) {
        let is_current = connection == self.connection;
        match message {
            Message::Offer => {
                // A record is not overwritten.
                if self.target == Some(Target::Gone) && self.target_record.is_none() && connection >= self.opens {
                    (self.target, self.session) = (Some(Target::Receiving), Some(connection));
                    self.opens = connection + 1;
                    self.sent.insert((connection, Message::Accept));
                }
            }
            Message::Seal => match self.target {
                Some(Target::Receiving) if self.session == Some(connection) => {
                    self.feed_target(TargetEvent::Sealed, mistake);
                }
                Some(Target::Gone) if mistake == Mistake::SealOutlivesConnection && self.target_record.is_none() => {
                    self.target = Some(Target::Receiving);
                    self.feed_target(TargetEvent::Sealed, mistake);
                }
                _ => {}
            },
            Message::Commit => self.feed_target(TargetEvent::Commit, mistake),
            Message::Abort => {
                // An abort on another connection ends the session.
                self.feed_target(TargetEvent::Abort, mistake);
                self.session = None;
            }
            Message::Accept if is_current => self.feed_source(SourceEvent::Accepted, mistake),
            Message::Refuse if is_current => self.feed_source(SourceEvent::Refused, mistake),
            Message::Prepared if is_current => self.feed_source(SourceEvent::Prepared, mistake),
            Message::Live if is_current => self.feed_source(SourceEvent::Live, mistake),
            Message::Aborted if is_current => self.feed_source(SourceEvent::Aborted, mistake),
            Message::Accept | Message::Refuse | Message::Prepared | Message::Live | Message::Aborted => {}
        }
    }

    fn reconnect(&mut self, mistake: Mistake) {
        self.connection += 1;
        self.feed_source(SourceEvent::Reconnected, mistake);
    }

    fn lose_session(&mut self, mistake: Mistake) {
        self.session = None;
        match (mistake, self.target) {
            (Mistake::TargetDecides, Some(Target::Prepared)) => self.feed_target(TargetEvent::Commit, mistake),
            (Mistake::TargetForgets, Some(Target::Prepared)) => self.target_to_do.push(TargetAction::Discard),
            _ => self.feed_target(TargetEvent::Lost, mistake),
        }
    }

    fn restart_source(&mut self) {
        if self.recorded {
            let (source, to_do) = Source::restarted(self.departed);
            (self.source, self.to_do) = (Some(source), to_do);
        } else {
            self.source = Some(if self.departed { Source::Moved } else { Source::Stayed });
        }
    }

    /// Every state that one step leads to.
    fn next(&self, mistake: Mistake) -> Vec<World> {
        let mut next = Vec::new();
        let mut add = |change: &mut dyn FnMut(&mut World)| {
            let mut world = self.clone();
            change(&mut world);
            next.push(world);
        };
        match self.source {
            None => add(&mut World::restart_source),
            Some(source) => {
                if self.crashes[0] < CRASHES {
                    add(&mut |world| {
                        (world.source, world.to_do) = (None, Vec::new());
                        world.crashes[0] += 1;
                    });
                }
                if self.to_do.is_empty() {
                    if source == Source::Copying {
                        add(&mut |world| world.feed_source(SourceEvent::Copied, mistake));
                    }
                    add(&mut |world| world.feed_source(SourceEvent::Failed, mistake));
                    if mistake == Mistake::SourceResumes && source == Source::Departed {
                        add(&mut |world| world.departed = false);
                    }
                    if self.connection + 1 < CONNECTIONS {
                        add(&mut |world| world.reconnect(mistake));
                    }
                } else {
                    add(&mut World::act);
                }
            }
        }
        match self.target {
            None => add(&mut |world| world.target = Some(Target::restarted(world.target_record))),
            Some(_) => {
                if self.crashes[1] < CRASHES {
                    add(&mut |world| {
                        (world.target, world.target_to_do, world.session) = (None, Vec::new(), None);
                        world.opens = world.connection + 1;
                        world.crashes[1] += 1;
                    });
                }
                if self.target_to_do.is_empty() {
                    add(&mut |world| world.lose_session(mistake));
                } else {
                    for to in 0..=self.connection {
                        add(&mut |world| world.target_act(to));
                    }
                }
            }
        }
        for message in &self.sent {
            let at_target = matches!(message.1, Message::Offer | Message::Seal | Message::Commit | Message::Abort);
            // A host takes the next message after the actions of the last.
            let is_idle = if at_target { self.target_to_do.is_empty() } else { self.to_do.is_empty() };
            if is_idle {
                add(&mut |world| world.deliver(*message, mistake));
            }
        }
        next
    }

    /// Both hosts come back, and from then on every message arrives once.
    fn settle(mut self) -> World {
        if self.source.is_none() {
            self.restart_source();
        }
        self.target.get_or_insert(Target::restarted(self.target_record));
        let none = Mistake::None;
        for _ in 0..20 {
            while !self.to_do.is_empty() {
                self.act();
            }
            while !self.target_to_do.is_empty() {
                self.target_act(self.connection);
            }
            match self.source {
                Some(Source::Offering | Source::Copying | Source::Sealing) => {
                    self.feed_source(SourceEvent::Failed, none);
                }
                Some(Source::Departed | Source::Aborting) => {
                    self.reconnect(none);
                    let now = self.connection;
                    while !self.to_do.is_empty() {
                        self.act();
                    }
                    self.lose_session(none);
                    for at_source in [false, true] {
                        while !self.target_to_do.is_empty() {
                            self.target_act(now);
                        }
                        let arrived: Vec<_> = self.sent.iter().copied().filter(|message| message.0 == now).collect();
                        for message in arrived {
                            let is_answer = matches!(message.1, Message::Live | Message::Aborted);
                            if is_answer == at_source {
                                self.deliver(message, none);
                            }
                        }
                    }
                }
                Some(Source::Moved | Source::Stayed) | None => break,
            }
        }
        self
    }
}

/// Visits every reachable state; returns their number, or the first violation.
fn explore(mistake: Mistake) -> Result<usize, String> {
    let mut seen = HashSet::from([World::begin()]);
    let mut open = VecDeque::from([World::begin()]);
    while let Some(world) = open.pop_front() {
        world.check()?;
        let settled = world.clone().settle();
        let ended = matches!(settled.source, Some(Source::Moved | Source::Stayed));
        let is_whole = settled.live() == 1 && settled.target_record != Some(Prepared::Waiting);
        if !ended || !is_whole || settled.recorded {
            return Err(format!("it does not end: {settled:?} after {world:?}"));
        }
        for next in world.next(mistake) {
            if !seen.contains(&next) {
                seen.insert(next.clone());
                open.push_back(next);
            }
        }
    }
    Ok(seen.len())
}

#[test]
fn handover_has_one_live_copy() {
    let states = explore(Mistake::None).unwrap_or_else(|error| panic!("{error}"));
    assert!(states > 2_000, "{states}");
}

#[test]
fn mistakes_are_found() {
    for mistake in [
        Mistake::CommitBeforeRecord,
        Mistake::TargetDecides,
        Mistake::SourceResumes,
        Mistake::TargetForgets,
        Mistake::SealOutlivesConnection,
        Mistake::PreparedBeforeRecord,
    ] {
        let found = explore(mistake);
        assert!(found.is_err(), "{mistake:?} was not found in {found:?} states");
    }
}

#[test]
fn every_phase_takes_every_event() {
    use Source::{Aborting, Copying, Departed, Moved, Offering, Sealing, Stayed};
    use SourceEvent as On;
    let sources = [Offering, Copying, Sealing, Departed, Aborting, Moved, Stayed];
    let table = [
        (On::Accepted, [Copying, Copying, Sealing, Departed, Aborting, Moved, Stayed]),
        (On::Refused, [Stayed, Aborting, Aborting, Departed, Aborting, Moved, Stayed]),
        (On::Copied, [Offering, Sealing, Sealing, Departed, Aborting, Moved, Stayed]),
        (On::Prepared, [Offering, Copying, Departed, Departed, Aborting, Moved, Stayed]),
        (On::Failed, [Aborting, Aborting, Aborting, Departed, Aborting, Moved, Stayed]),
        (On::Reconnected, [Offering, Copying, Sealing, Departed, Aborting, Moved, Stayed]),
        (On::Live, [Offering, Copying, Sealing, Moved, Aborting, Moved, Stayed]),
        (On::Aborted, [Offering, Copying, Sealing, Departed, Stayed, Moved, Stayed]),
    ];
    for (event, expected) in table {
        for (from, to) in sources.into_iter().zip(expected) {
            let mut source = from;
            let actions = source.step(event);
            assert_eq!(source, to, "{event:?} in {from:?}");
            let departs = actions.contains(&SourceAction::RecordDeparture);
            assert_eq!(departs, from == Sealing && to == Departed, "{event:?} in {from:?}");
            assert!(!actions.contains(&SourceAction::Resume) || to.may_act(), "{event:?} in {from:?}");
        }
    }
    let targets = [Target::Receiving, Target::Prepared, Target::Live, Target::Gone];
    use Target::{Gone, Live, Prepared as Ready, Receiving};
    let table = [
        (TargetEvent::Sealed, [Ready, Ready, Live, Gone]),
        (TargetEvent::Invalid, [Gone, Ready, Live, Gone]),
        (TargetEvent::Lost, [Gone, Ready, Live, Gone]),
        (TargetEvent::Commit, [Receiving, Live, Live, Gone]),
        (TargetEvent::Abort, [Gone, Gone, Live, Gone]),
    ];
    for (event, expected) in table {
        for (from, to) in targets.into_iter().zip(expected) {
            let mut target = from;
            let actions = target.step(event);
            assert_eq!(target, to, "{event:?} in {from:?}");
            let is_commit = event == TargetEvent::Commit && to == Live;
            assert_eq!(actions.contains(&TargetAction::Activate), is_commit, "{event:?} in {from:?}");
            assert!(to.may_act() || !actions.contains(&TargetAction::SendLive));
        }
    }
}
