//! Connections between the hosts, and what goes wrong on them: loss, repetition, delay, changed bytes, partitions,
//! replays.
//!
//! A connection is ordered, as TCP is; messages of different connections overtake each other, and any of them may be
//! delayed as long as anything else happens.

use std::collections::VecDeque;

use ryokan::core::handover::{Source, SourceEvent};

use super::Mistake;
use super::disk::{Handover, Kernel, Place};
use super::host::{Effects, Message};
use super::world::World;

/// A connection: ordered in each direction. Its ends close independently.
#[derive(Debug)]
pub struct Wire {
    pub handover: Handover,
    pub from: usize,
    pub to: usize,
    pub to_target: VecDeque<Message>,
    pub to_source: VecDeque<Message>,
    pub source_open: bool,
    pub target_open: bool,
}

/// What once was sent to a host in a move.
#[derive(Debug, Clone)]
pub struct Recorded {
    pub from: usize,
    pub to: usize,
    pub handover: Handover,
    pub kernel: Kernel,
    pub epoch: u64,
    pub seal: Message,
    pub is_committed: bool,
}

impl World {
    /// Whether messages between the two hosts are stuck.
    pub fn is_cut(&self, a: usize, b: usize) -> bool {
        self.cuts.contains(&(a.min(b), a.max(b)))
    }

    pub(super) fn deliver_to_target(&mut self, id: u32, again: bool) {
        let Some(wire) = self.wires.get_mut(&id) else { return };
        let Some(message) = wire.to_target.front().copied() else { return };
        if again {
            self.counts.repeated += 1;
        } else {
            wire.to_target.pop_front();
        }
        self.counts.late += u64::from(!wire.source_open);
        let to = wire.to;
        let sent = self.hosts[to].receive(id, message);
        self.apply(to, Effects { sent, ..Effects::default() });
    }

    pub(super) fn deliver_to_source(&mut self, id: u32) {
        let Some(wire) = self.wires.get_mut(&id) else { return };
        let Some(message) = wire.to_source.pop_front() else { return };
        let (at, handover) = (wire.from, wire.handover);
        match message {
            Message::Live => self.counts.moved += 1,
            Message::Aborted => self.counts.stayed += 1,
            _ => {}
        }
        self.hosts[at].answered(handover, message);
    }

    pub(super) fn apply(&mut self, at: usize, effects: Effects) {
        if effects.synced {
            self.note_durable(at);
        }
        for (id, is_to_target, message) in effects.sent {
            if is_to_target {
                self.record(id, message);
            }
            if let Some(wire) = self.wires.get_mut(&id) {
                match is_to_target {
                    true if wire.target_open => wire.to_target.push_back(message),
                    false if wire.source_open => wire.to_source.push_back(message),
                    true | false => self.counts.lost += 1,
                }
            }
        }
        for id in effects.closed {
            if let Some(wire) = self.wires.get_mut(&id) {
                match wire.to == at {
                    true => {
                        wire.target_open = false;
                        wire.to_target.clear();
                        self.hosts[at].lose(id);
                    }
                    false => wire.source_open = false,
                }
            }
        }
        for handover in effects.connect {
            self.connect(at, handover);
        }
    }

    /// Keeps what is sent, for replays.
    fn record(&mut self, id: u32, message: Message) {
        let Some(Wire { from, to, handover, .. }) = self.wires.get(&id) else { return };
        match message {
            Message::Seal { .. } => {
                let Some(moving) = self.hosts[*from].moves.get(handover) else { return };
                let (from, to, handover, kernel, epoch) = (*from, *to, *handover, moving.kernel, moving.epoch);
                self.recorded.push(Recorded { from, to, handover, kernel, epoch, seal: message, is_committed: false });
            }
            Message::Commit { handover, .. } => {
                let sealed = self.recorded.iter_mut().filter(|one| one.handover == handover);
                sealed.for_each(|one| one.is_committed = true);
            }
            _ => {}
        }
    }

    /// Whether a host knows that the epoch of a recorded move has come to an end, or is the present one.
    pub(super) fn is_old(&self, one: &Recorded) -> bool {
        match self.hosts[one.to].disk.catalog().kernels.get(&one.kernel) {
            Some(Place::Here { epoch } | Place::Departed { epoch, .. }) => *epoch >= one.epoch,
            None => false,
        }
    }

    /// Sends an old move again, as it was sent.
    pub(super) fn replay(&mut self, one: &Recorded) {
        let Recorded { from, to, handover, kernel, epoch, seal, is_committed } = one.clone();
        let Message::Seal { work, image, .. } = seal else { return };
        let mut to_target = VecDeque::from([Message::Offer { handover, kernel, epoch }]);
        to_target.extend([Message::objects(work), Message::seal(work, work, image)]);
        to_target.extend(is_committed.then_some(Message::Commit { handover, kernel, epoch }));
        self.last_wire += 1;
        let (source_open, target_open) = (false, true);
        let wire = Wire { handover, from, to, to_target, to_source: VecDeque::new(), source_open, target_open };
        self.wires.insert(self.last_wire, wire);
        self.counts.replays += 1;
    }

    fn connect(&mut self, at: usize, handover: Handover) {
        let Some((to, machine, kernel, epoch)) =
            self.hosts[at].moves.get(&handover).map(|it| (it.to, it.machine, it.kernel, it.epoch))
        else {
            return;
        };
        let fails = self.is_cut(at, to) || (self.has_faults && self.random.one_in(self.fault_rate));
        if !self.hosts[to].is_up || fails {
            self.hosts[at].feed(handover, SourceEvent::Failed);
            return;
        }
        self.last_wire += 1;
        let id = self.last_wire;
        let mut to_target = VecDeque::new();
        if machine == Source::Offering {
            to_target.push_back(Message::Offer { handover, kernel, epoch });
        }
        let to_source = VecDeque::new();
        let wire = Wire { handover, from: at, to, to_target, to_source, source_open: true, target_open: true };
        self.wires.insert(id, wire);
        if let Some(moving) = self.hosts[at].moves.get_mut(&handover) {
            moving.wire = Some(id);
        }
        if machine != Source::Offering {
            self.hosts[at].feed(handover, SourceEvent::Reconnected);
        }
    }

    /// Changes bytes of the next message. What cannot be read ends the connection.
    pub(super) fn corrupt(&mut self, id: u32) {
        self.counts.corrupted += 1;
        let Some(wire) = self.wires.get_mut(&id) else { return };
        match wire.to_target.front_mut().and_then(|next| next.corrupted().map(|changed| (next, changed))) {
            Some((next, changed)) => *next = changed,
            None => self.break_wire(id),
        }
    }

    /// A connection ends; of what is under way, a part still arrives.
    pub(super) fn break_wire(&mut self, id: u32) {
        let Some(wire) = self.wires.get_mut(&id) else { return };
        let (to_target, to_source) = (wire.to_target.len(), wire.to_source.len());
        wire.to_target.truncate(self.random.below(to_target + 1));
        wire.to_source.truncate(self.random.below(to_source + 1));
        self.counts.lost += (to_target - wire.to_target.len() + to_source - wire.to_source.len()) as u64;
        match self.random.below(3) {
            // The source learns it first, the target, or both at once.
            0 => wire.source_open = false,
            1 => {
                wire.target_open = false;
                let to = wire.to;
                self.hosts[to].lose(id);
            }
            _ => {
                (wire.source_open, wire.target_open) = (false, false);
                let to = wire.to;
                self.hosts[to].lose(id);
            }
        }
        let Wire { from, handover, source_open, .. } = self.wires[&id];
        if !source_open && self.hosts[from].moves.get(&handover).is_some_and(|moving| moving.wire == Some(id)) {
            self.hosts[from].feed(handover, SourceEvent::Failed);
        }
    }

    /// The connections of a host whose daemon has ended.
    pub(super) fn close_wires_of(&mut self, at: usize) {
        for wire in self.wires.values_mut() {
            if wire.from == at {
                wire.source_open = false;
            }
            if wire.to == at {
                self.counts.lost += wire.to_target.len() as u64;
                wire.target_open = false;
                wire.to_target.clear();
            }
        }
    }

    /// Removes connections without ends, and closes the source's end of those that no move uses.
    pub(super) fn close_ends(&mut self) {
        for (id, wire) in &mut self.wires {
            let used = self.hosts[wire.from].moves.get(&wire.handover).is_some_and(|moving| moving.wire == Some(*id));
            wire.source_open &= used;
        }
        self.wires.retain(|_, wire| wire.source_open || wire.target_open);
    }

    /// Whether a kernel may begin a move: not while another one is before its decision, and not as a member of a group.
    pub(super) fn may_begin(&self, at: usize, kernel: Kernel) -> bool {
        let host = &self.hosts[at];
        let is_member = host.disk.catalog().group.contains(&kernel) && host.mistake != Mistake::MemberMoves;
        let is_here = host.open.contains(&kernel) && host.view().live(kernel).is_some();
        is_here
            && !is_member
            && host
                .moves
                .iter()
                .filter(|(_, moving)| moving.kernel == kernel)
                .all(|(id, moving)| moving.machine == Source::Aborting && !host.is_busy(*id))
    }
}
