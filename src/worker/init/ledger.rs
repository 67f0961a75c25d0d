//! Init's record of executions: their output, events and ends, in order, until the daemon has
//! confirmed them.
//!
//! Pure: no I/O, no clock. Each execution has a log and a cursor to the next unsent item. The first
//! bytes are kept until the end is acknowledged, so that a returning daemon receives them again;
//! later ones are dropped once sent.

use std::collections::{BTreeMap, VecDeque};

use crate::core::exec::Stream;
use crate::core::ids::ExecId;
use crate::core::limits;
use crate::link::guest::{Chunks, Finish};

/// Adjacent sent chunks of one stream are joined up to this size, bytes, so that many small writes
/// do not cost more in bookkeeping than in bytes.
const JOINED_BYTES: usize = 64 << 10;
/// Limit of kept items per execution: output that alternates between the streams cannot be joined.
const KEPT_ITEMS: usize = 16 << 10;

/// An item of an execution's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Item {
    /// Bytes of output.
    Output {
        /// Offset, counting both streams.
        offset: u64,
        /// The stream.
        stream: Stream,
        /// The bytes.
        data: Vec<u8>,
    },
    /// A `display` or `structured` frame.
    Event {
        /// The frame.
        json: Vec<u8>,
        /// Its tail.
        tail: Vec<u8>,
    },
    /// The end.
    Ended(Finish),
}

impl Item {
    fn bytes(&self) -> usize {
        match self {
            Item::Output { data, .. } => data.len(),
            Item::Event { json, tail } => json.len() + tail.len(),
            Item::Ended(_) => 0,
        }
    }
}

#[derive(Debug)]
struct Entry {
    item: Item,
    keep: bool,
}

/// An execution's log.
#[derive(Debug)]
struct Known {
    ended: bool,
    log: VecDeque<Entry>,
    /// The first item not yet sent to the current daemon.
    next: usize,
    kept_limit: usize,
    kept_bytes: usize,
    unsent_bytes: usize,
    written: u64,
}

/// All executions known to init.
#[derive(Debug, Default)]
pub struct Ledger {
    known: BTreeMap<ExecId, Known>,
}

impl Ledger {
    /// Whether that execution runs or is unacknowledged.
    pub fn knows(&self, exec: ExecId) -> bool {
        self.known.contains_key(&exec)
    }

    /// Whether the ledger is full.
    pub fn is_full(&self) -> bool {
        self.known.len() >= limits::EXECUTIONS_UNACKNOWLEDGED
    }

    /// Adds a starting execution.
    pub fn begin(&mut self, exec: ExecId, kept_limit: usize) {
        let known = Known {
            ended: false,
            log: VecDeque::new(),
            next: 0,
            kept_limit,
            kept_bytes: 0,
            unsent_bytes: 0,
            written: 0,
        };
        self.known.insert(exec, known);
    }

    /// Adds output. Bytes beyond the kept limit are dropped once sent.
    pub fn output(&mut self, exec: ExecId, stream: Stream, data: &[u8]) {
        let Some(known) = self.known.get_mut(&exec) else { return };
        let room = match known.log.len() < KEPT_ITEMS {
            true => known.kept_limit.saturating_sub(known.kept_bytes),
            false => 0,
        };
        let (kept, rest) = data.split_at(room.min(data.len()));
        for (piece, keep) in [(kept, true), (rest, false)] {
            if !piece.is_empty() {
                let item = Item::Output { offset: known.written, stream, data: piece.to_vec() };
                known.written += piece.len() as u64;
                known.push(item, keep);
            }
        }
    }

    /// Adds an event.
    pub fn event(&mut self, exec: ExecId, json: Vec<u8>, tail: Vec<u8>) {
        let Some(known) = self.known.get_mut(&exec) else { return };
        let fits = known.kept_bytes + json.len() + tail.len() <= known.kept_limit && known.log.len() < KEPT_ITEMS;
        known.push(Item::Event { json, tail }, fits);
    }

    /// Adds the end.
    pub fn end(&mut self, exec: ExecId, finish: Finish) {
        let Some(known) = self.known.get_mut(&exec) else { return };
        let finish = Finish { output_bytes: known.written, ..finish };
        known.ended = true;
        known.push(Item::Ended(finish), true);
    }

    /// The next unsent item and its execution, oldest first.
    pub fn next(&self) -> Option<(ExecId, &Item)> {
        self.known.iter().find_map(|(exec, known)| Some((*exec, &known.log.get(known.next)?.item)))
    }

    /// Marks the item returned by [`Ledger::next`] as sent.
    pub fn sent(&mut self) {
        let unsent = self.known.values_mut().find(|known| known.next < known.log.len());
        if let Some(known) = unsent {
            known.sent();
        }
    }

    /// Whether nothing of the execution was sent and its output fits one message.
    pub fn is_small(&self, exec: ExecId) -> bool {
        let gathers = |known: &Known| {
            let only_output = known.log.iter().all(|entry| !matches!(entry.item, Item::Event { .. }));
            known.next == 0 && only_output && known.written <= limits::OUTPUT_BATCH_BYTES
        };
        self.known.get(&exec).is_some_and(gathers)
    }

    /// Takes the end of a finished [small](Ledger::is_small) execution with its whole output, and
    /// marks it as sent.
    pub fn take_whole(&mut self, exec: ExecId) -> Option<(Finish, Chunks)> {
        let small = self.is_small(exec);
        let known = self.known.get_mut(&exec).filter(|known| small && known.ended)?;
        let mut finish = None;
        let mut output = Chunks::new();
        while let Some(entry) = known.log.get(known.next) {
            match (&entry.item, output.last_mut()) {
                (Item::Output { stream, data, .. }, Some((last, joined))) if last == stream => {
                    joined.extend_from_slice(data);
                }
                (Item::Output { stream, data, .. }, _) => output.push((*stream, data.clone())),
                (Item::Ended(end), _) => finish = Some(end.clone()),
                (Item::Event { .. }, _) => {}
            }
            known.sent();
        }
        finish.map(|finish| (finish, output))
    }

    /// For a new daemon: everything kept will be sent again.
    pub fn rewind(&mut self) {
        for known in self.known.values_mut() {
            known.next = 0;
            known.unsent_bytes = known.log.iter().map(|entry| entry.item.bytes()).sum();
        }
    }

    /// Forgets an ended execution; returns whether it was known.
    pub fn acknowledge(&mut self, exec: ExecId) -> bool {
        match self.known.get(&exec) {
            Some(known) if known.ended => self.known.remove(&exec).is_some(),
            Some(_) | None => false,
        }
    }

    /// Unsent bytes.
    pub fn unsent_bytes(&self) -> usize {
        self.known.values().map(|known| known.unsent_bytes).sum()
    }

    /// Every execution, and whether it runs.
    pub fn list(&self) -> Vec<(ExecId, bool)> {
        self.known.iter().map(|(exec, known)| (*exec, !known.ended)).collect()
    }

    /// Whether the ledger is empty: no end waits for its acknowledgement.
    pub fn is_empty(&self) -> bool {
        self.known.is_empty()
    }
}

impl Known {
    fn push(&mut self, item: Item, keep: bool) {
        self.unsent_bytes += item.bytes();
        if keep {
            self.kept_bytes += item.bytes();
        }
        self.log.push_back(Entry { item, keep });
    }

    fn sent(&mut self) {
        let Some(entry) = self.log.get(self.next) else { return };
        self.unsent_bytes = self.unsent_bytes.saturating_sub(entry.item.bytes());
        if !entry.keep {
            self.log.remove(self.next);
            return;
        }
        if self.joined().is_none() {
            self.next += 1;
        }
    }

    /// Joins the item just sent to the previous one, if both are adjacent output of one stream.
    fn joined(&mut self) -> Option<()> {
        let before = self.next.checked_sub(1)?;
        let (Item::Output { offset, stream, data }, true) =
            (&self.log.get(self.next)?.item, self.log.get(before)?.keep)
        else {
            return None;
        };
        let Item::Output { offset: first, stream: same, data: joined } = &self.log.get(before)?.item else {
            return None;
        };
        let follows = same == stream && first + joined.len() as u64 == *offset;
        if !follows || joined.len() + data.len() > JOINED_BYTES {
            return None;
        }
        let Item::Output { data, .. } = self.log.remove(self.next)?.item else { return None };
        let Item::Output { data: joined, .. } = &mut self.log.get_mut(before)?.item else { return None };
        joined.extend_from_slice(&data);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::exec::ExecStatus;
    use proptest::prelude::*;

    fn finish() -> Finish {
        Finish {
            status: ExecStatus::Done,
            code: 0,
            err: String::new(),
            frame_json: Vec::new(),
            duration_us: 1,
            output_bytes: 0,
            last: false,
        }
    }

    fn take_all(ledger: &mut Ledger) -> Vec<(ExecId, Item)> {
        let mut all = Vec::new();
        while let Some((exec, item)) = ledger.next() {
            all.push((exec, item.clone()));
            ledger.sent();
        }
        all
    }

    fn bytes_of(items: &[(ExecId, Item)], wanted: Stream) -> Vec<u8> {
        let of = |item: &Item| match item {
            Item::Output { stream, data, .. } if *stream == wanted => data.clone(),
            Item::Output { .. } | Item::Event { .. } | Item::Ended(_) => Vec::new(),
        };
        items.iter().flat_map(|(_, item)| of(item)).collect()
    }

    #[test]
    fn rewind_resends_kept_prefix() {
        let mut ledger = Ledger::default();
        let exec = ExecId(1);
        ledger.begin(exec, 4);
        ledger.output(exec, Stream::Stdout, b"abcdef");
        ledger.end(exec, finish());
        assert_eq!(ledger.unsent_bytes(), 6);
        assert_eq!(bytes_of(&take_all(&mut ledger), Stream::Stdout), b"abcdef");
        assert_eq!(ledger.unsent_bytes(), 0);
        ledger.rewind();
        let again = take_all(&mut ledger);
        assert_eq!(bytes_of(&again, Stream::Stdout), b"abcd");
        assert!(matches!(&again.last(), Some((_, Item::Ended(f))) if f.output_bytes == 6));
        assert!(ledger.acknowledge(exec));
        assert!(!ledger.acknowledge(exec));
        assert!(ledger.is_empty());
    }

    #[test]
    fn small_execution_sent_whole() {
        let mut ledger = Ledger::default();
        ledger.begin(ExecId(1), 3);
        ledger.output(ExecId(1), Stream::Stdout, b"ab");
        ledger.output(ExecId(1), Stream::Stdout, b"cd");
        ledger.output(ExecId(1), Stream::Stderr, b"e");
        assert!(ledger.is_small(ExecId(1)));
        assert_eq!(ledger.take_whole(ExecId(1)), None, "it still runs");
        ledger.end(ExecId(1), finish());
        let (end, output) = ledger.take_whole(ExecId(1)).expect("whole");
        assert_eq!(end.output_bytes, 5);
        assert_eq!(output, [(Stream::Stdout, b"abcd".to_vec()), (Stream::Stderr, b"e".to_vec())]);
        assert_eq!((ledger.next(), ledger.unsent_bytes()), (None, 0));
        ledger.rewind();
        let again = take_all(&mut ledger);
        assert_eq!(bytes_of(&again, Stream::Stdout), b"abc");
        assert!(matches!(&again.last(), Some((_, Item::Ended(f))) if f.output_bytes == 5));
    }

    #[test]
    fn large_execution_sent_in_parts() {
        let mut ledger = Ledger::default();
        for exec in 1..=3 {
            ledger.begin(ExecId(exec), 1 << 20);
        }
        ledger.output(ExecId(1), Stream::Stdout, &vec![0; limits::OUTPUT_BATCH_BYTES as usize + 1]);
        ledger.event(ExecId(2), b"{}".to_vec(), Vec::new());
        ledger.output(ExecId(3), Stream::Stdout, b"x");
        while ledger.next().is_some() {
            ledger.sent();
        }
        ledger.rewind();
        while ledger.next().is_some_and(|(exec, _)| exec != ExecId(3)) {
            ledger.sent();
        }
        assert!(ledger.is_small(ExecId(3)), "to the new daemon nothing was sent");
        ledger.sent();
        for exec in 1..=3 {
            ledger.end(ExecId(exec), finish());
            assert_eq!((ledger.is_small(ExecId(exec)), ledger.take_whole(ExecId(exec))), (false, None), "{exec}");
        }
        assert_eq!(take_all(&mut ledger).len(), 3, "the ends are still to be sent");
    }

    #[test]
    fn running_execution_is_kept() {
        let mut ledger = Ledger::default();
        ledger.begin(ExecId(1), 4);
        assert!(!ledger.acknowledge(ExecId(1)));
        assert_eq!(ledger.list(), [(ExecId(1), true)]);
    }

    #[test]
    fn small_writes_are_merged() {
        let mut ledger = Ledger::default();
        ledger.begin(ExecId(1), 1 << 20);
        for _ in 0..100_000 {
            ledger.output(ExecId(1), Stream::Stdout, b"x");
            ledger.sent();
        }
        assert!(ledger.known[&ExecId(1)].log.len() < 8);
        for _ in 0..100_000 {
            ledger.output(ExecId(1), Stream::Stdout, b"x");
            ledger.output(ExecId(1), Stream::Stderr, b"x");
            ledger.sent();
            ledger.sent();
        }
        assert!(ledger.known[&ExecId(1)].log.len() <= KEPT_ITEMS);
        assert_eq!(ledger.unsent_bytes(), 0);
    }

    proptest! {
        #[test]
        fn ledger_sends_bytes_in_order(
            writes in prop::collection::vec((any::<bool>(), prop::collection::vec(any::<u8>(), 0..40), 0usize..4), 0..60),
            kept in 0usize..500,
        ) {
            let (mut ledger, mut sent, mut all) = (Ledger::default(), Vec::new(), Vec::new());
            ledger.begin(ExecId(7), kept);
            for (err, data, takes) in &writes {
                let stream = if *err { Stream::Stderr } else { Stream::Stdout };
                ledger.output(ExecId(7), stream, data);
                all.extend(data.iter().map(|byte| (stream, *byte)));
                for _ in 0..*takes {
                    if let Some((_, item)) = ledger.next() {
                        sent.push(item.clone());
                        ledger.sent();
                    }
                }
            }
            sent.extend(take_all(&mut ledger).into_iter().map(|(_, item)| item));
            let flat = |items: &[Item]| {
                let mut bytes = Vec::new();
                for item in items {
                    if let Item::Output { offset, stream, data } = item {
                        assert_eq!(*offset, bytes.len() as u64);
                        bytes.extend(data.iter().map(|byte| (*stream, *byte)));
                    }
                }
                bytes
            };
            prop_assert_eq!(&flat(&sent), &all);
            ledger.rewind();
            let again: Vec<Item> = take_all(&mut ledger).into_iter().map(|(_, item)| item).collect();
            prop_assert_eq!(&flat(&again)[..], &all[..kept.min(all.len())]);
        }
    }
}
