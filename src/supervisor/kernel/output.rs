//! Output of a running execution, between its worker and any number of readers.
//!
//! ```text
//! worker ─ push (waits) ─▶ [ kept prefix, ≤ limit | window, ≤ WINDOW_BYTES ] ─ read ─▶ each reader, at its own pace
//! ```
//!
//! The prefix is kept for the journal and for replay. Beyond the prefix, a chunk lives until every reader has taken it,
//! and `push` waits while the window is full: a slow reader slows the code, and memory is bounded in every case.
//! The newest chunks, up to [`Tail::limit`], stay also then, for the journal and for later readers; what was written
//! between prefix and tail is counted and dropped. Never does I/O; lives on the daemon's one event loop.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use tokio::sync::Notify;

use crate::core::exec::{Display, ExecEnd, OutputEvent, Stream, Tail};
use crate::core::limits;

/// Size of the window beyond the kept prefix, bytes.
const WINDOW_BYTES: usize = 2 << 20;

/// Minimum cost of a rich output, bytes.
const EVENT_BYTES: usize = 128;

/// One execution's output.
#[derive(Debug)]
pub struct Output {
    inner: RefCell<Inner>,
    changed: Notify,
}

/// Items are numbered from 0: first the kept items, then those that pass through the window.
#[derive(Debug)]
struct Inner {
    kept: Vec<Item>,
    kept_bytes: u64,
    keep_limit: u64,
    /// Set once an item went to the window: the kept part has no gaps.
    kept_closed: bool,
    window: VecDeque<Item>,
    window_bytes: usize,
    /// Window items that were dropped.
    shed: u64,
    /// Bytes of both streams so far.
    written: u64,
    /// Each reader's next item.
    readers: BTreeMap<u64, u64>,
    next_reader: u64,
    /// Whether slow readers lose output instead of slowing its writer.
    released: bool,
    end: Option<ExecEnd>,
}

#[derive(Debug)]
struct Item {
    /// Bytes of both streams before this item.
    offset: u64,
    event: OutputEvent,
}

impl Item {
    fn bytes(&self) -> usize {
        match &self.event {
            OutputEvent::Stdout(data) | OutputEvent::Stderr(data) => data.len(),
            // The memory they occupy, so that no item is free.
            OutputEvent::Display { mime, data } => EVENT_BYTES + mime.len() + data.len(),
            OutputEvent::Structured(output) => EVENT_BYTES + output.memory_bytes(),
            OutputEvent::Truncated(_) | OutputEvent::ExitCode(_) => 0,
        }
    }

    /// Bytes that count toward the offset.
    fn stream_bytes(&self) -> u64 {
        match &self.event {
            OutputEvent::Stdout(data) | OutputEvent::Stderr(data) => data.len() as u64,
            OutputEvent::Display { .. }
            | OutputEvent::Structured(_)
            | OutputEvent::Truncated(_)
            | OutputEvent::ExitCode(_) => 0,
        }
    }
}

/// Kept output of an execution, for the journal.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Kept {
    /// Chunks of both streams in order of arrival.
    pub chunks: Vec<(Stream, Vec<u8>)>,
    /// Bytes written beyond the chunks.
    pub truncated_bytes: u64,
    /// The newest of those bytes, in order of arrival.
    pub tail: Vec<(Stream, Vec<u8>)>,
    /// Rich forms, in order of arrival.
    pub displays: Vec<Display>,
}

impl Output {
    /// An empty output that keeps the first `keep_limit` bytes.
    pub fn new(keep_limit: u64) -> Rc<Self> {
        Rc::new(Output {
            inner: RefCell::new(Inner {
                kept: Vec::new(),
                kept_bytes: 0,
                keep_limit,
                kept_closed: false,
                window: VecDeque::new(),
                window_bytes: 0,
                shed: 0,
                written: 0,
                readers: BTreeMap::new(),
                next_reader: 0,
                released: false,
                end: None,
            }),
            changed: Notify::new(),
        })
    }

    /// The output of an execution that ended earlier: its kept chunks and its end.
    pub fn ended(kept: Kept, end: ExecEnd) -> Rc<Self> {
        let output = Output::new(u64::MAX);
        {
            let mut inner = output.inner.borrow_mut();
            for (stream, data) in kept.chunks {
                inner.append(stream_event(stream, data));
            }
            for Display { mime, data } in kept.displays {
                inner.append(OutputEvent::Display { mime, data });
            }
            inner.kept_closed = true;
            let tail: usize = kept.tail.iter().map(|(_, data)| data.len()).sum();
            inner.written += kept.truncated_bytes.saturating_sub(tail as u64);
            for (stream, data) in kept.tail {
                inner.append(stream_event(stream, data));
            }
            inner.end = Some(end);
        }
        output
    }

    /// Appends a chunk that begins at byte `offset` of both streams together.
    ///
    /// Skips bytes that are already there: a worker repeats itself to a new daemon. Returns once the window has room
    /// for more.
    pub async fn push(&self, offset: u64, stream: Stream, mut data: Vec<u8>) {
        {
            let mut inner = self.inner.borrow_mut();
            let known = inner.written.saturating_sub(offset).min(data.len() as u64) as usize;
            if known > 0 {
                data.drain(..known);
            }
            if data.is_empty() || inner.end.is_some() {
                return;
            }
            // A worker buffers a limited amount for a new daemon: the gap counts as truncated and ends the kept part.
            inner.kept_closed |= offset > inner.written;
            inner.written = inner.written.max(offset + known as u64);
            inner.append(stream_event(stream, data));
        }
        self.changed.notify_waiters();
        self.room().await;
    }

    /// Appends a rich or structured output.
    pub async fn push_event(&self, event: OutputEvent) {
        if self.inner.borrow().end.is_some() {
            return;
        }
        self.inner.borrow_mut().append(event);
        self.changed.notify_waiters();
        self.room().await;
    }

    async fn room(&self) {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            {
                let inner = self.inner.borrow();
                if inner.window_bytes <= WINDOW_BYTES || inner.released || inner.end.is_some() {
                    return;
                }
            }
            changed.await;
        }
    }

    /// From now on a slow reader loses output: the end must not wait for it.
    pub fn release(&self) {
        self.inner.borrow_mut().released = true;
        self.changed.notify_waiters();
    }

    /// Ends the output.
    pub fn close(&self, end: ExecEnd) {
        self.inner.borrow_mut().end.get_or_insert(end);
        self.changed.notify_waiters();
    }

    /// The end, once there is one.
    pub fn end(&self) -> Option<ExecEnd> {
        self.inner.borrow().end.clone()
    }

    /// Bytes of both streams so far.
    pub fn written(&self) -> u64 {
        self.inner.borrow().written
    }

    /// A copy of the kept output.
    pub fn kept(&self) -> Kept {
        let inner = self.inner.borrow();
        let mut kept = Kept::default();
        let (mut bytes, mut displayed) = (0, 0);
        for item in &inner.kept {
            let (stream, data) = match &item.event {
                OutputEvent::Stdout(data) => (Stream::Stdout, data),
                OutputEvent::Stderr(data) => (Stream::Stderr, data),
                OutputEvent::Display { mime, data } => {
                    displayed += (mime.len() + data.len()) as u64;
                    if displayed <= inner.keep_limit {
                        kept.displays.push(Display { mime: mime.clone(), data: data.clone() });
                    }
                    continue;
                }
                OutputEvent::Structured(_) | OutputEvent::Truncated(_) | OutputEvent::ExitCode(_) => continue,
            };
            bytes += data.len() as u64;
            match kept.chunks.last_mut() {
                Some((last, joined)) if *last == stream => joined.extend_from_slice(data),
                _ => kept.chunks.push((stream, data.clone())),
            }
        }
        kept.truncated_bytes = inner.written - bytes;
        kept.tail = inner.tail();
        kept
    }

    /// Reads from byte `from` of both streams together.
    pub fn reader(self: &Rc<Self>, from: u64) -> Reader {
        let mut inner = self.inner.borrow_mut();
        let id = inner.next_reader;
        inner.next_reader += 1;
        let next = inner.number_at(from);
        inner.readers.insert(id, next);
        Reader { output: Rc::clone(self), id, at: from }
    }
}

fn stream_event(stream: Stream, data: Vec<u8>) -> OutputEvent {
    match stream {
        Stream::Stdout => OutputEvent::Stdout(data),
        Stream::Stderr => OutputEvent::Stderr(data),
    }
}

impl Inner {
    fn append(&mut self, event: OutputEvent) {
        let item = Item { offset: self.written, event };
        self.written += item.stream_bytes();
        let room = self.keep_limit - self.kept_bytes;
        if self.kept_closed || room == 0 || self.kept.len() >= limits::OUTPUT_KEPT_ITEMS {
            return self.append_to_window(item);
        }
        let (kept, rest) = split(item, room);
        self.kept_bytes += (kept.bytes() as u64).min(room);
        self.kept.push(kept);
        if let Some(rest) = rest {
            self.append_to_window(rest);
        }
    }

    fn append_to_window(&mut self, item: Item) {
        self.kept_closed = true;
        self.window_bytes += item.bytes();
        self.window.push_back(item);
        self.shed();
    }

    /// Drops the window items that every reader has taken and that are older than the tail.
    fn shed(&mut self) {
        let needed = self.readers.values().copied().min().unwrap_or(u64::MAX);
        while let Some(oldest) = self.window.front() {
            let is_taken = self.first_in_window() < needed;
            let is_in_tail = ((self.window_bytes - oldest.bytes()) as u64) < Tail::limit(self.keep_limit);
            let is_lost = self.released && self.window_bytes > WINDOW_BYTES;
            if !is_lost && (!is_taken || is_in_tail) {
                break;
            }
            let Some(item) = self.window.pop_front() else { break };
            self.window_bytes -= item.bytes();
            self.shed += 1;
        }
        let over = self.window_bytes.saturating_sub(Tail::limit(self.keep_limit) as usize);
        if over > 0
            && self.first_in_window() < needed
            && let Some(oldest) = self.window.front_mut()
            && let OutputEvent::Stdout(data) | OutputEvent::Stderr(data) = &mut oldest.event
        {
            let cut = over.min(data.len());
            data.drain(..cut);
            oldest.offset += cut as u64;
            self.window_bytes -= cut;
        }
    }

    /// The newest bytes beyond the prefix, without gaps.
    fn tail(&self) -> Vec<(Stream, Vec<u8>)> {
        let mut tail = Tail::beside(self.keep_limit);
        let mut end = 0;
        for item in &self.window {
            let (stream, data) = match &item.event {
                OutputEvent::Stdout(data) => (Stream::Stdout, data),
                OutputEvent::Stderr(data) => (Stream::Stderr, data),
                OutputEvent::Display { .. }
                | OutputEvent::Structured(_)
                | OutputEvent::Truncated(_)
                | OutputEvent::ExitCode(_) => continue,
            };
            if item.offset != end {
                tail = Tail::beside(self.keep_limit);
            }
            tail.push(stream, data);
            end = item.offset + data.len() as u64;
        }
        tail.into_chunks()
    }

    fn first_in_window(&self) -> u64 {
        self.kept.len() as u64 + self.shed
    }

    fn item(&self, number: u64) -> Option<&Item> {
        match self.kept.get(number as usize) {
            Some(item) => Some(item),
            None => self.window.get(number.checked_sub(self.first_in_window())? as usize),
        }
    }

    /// Number of the first item with data at or after byte `from`.
    fn number_at(&self, from: u64) -> u64 {
        let ends_before = |item: &Item| item.offset + item.stream_bytes() <= from && item.stream_bytes() > 0;
        let passed = |items: &mut dyn Iterator<Item = &Item>| {
            let mut last = 0;
            for (i, item) in items.enumerate() {
                if item.offset > from {
                    break;
                }
                if ends_before(item) {
                    last = i + 1;
                }
            }
            last as u64
        };
        let kept = passed(&mut self.kept.iter());
        if kept < self.kept.len() as u64 {
            return kept;
        }
        self.first_in_window() + passed(&mut self.window.iter())
    }
}

/// Splits an item so that its first part has at most `room` bytes.
fn split(item: Item, room: u64) -> (Item, Option<Item>) {
    let Item { offset, event } = item;
    let cut = |mut data: Vec<u8>, make: fn(Vec<u8>) -> OutputEvent| {
        let rest = (data.len() as u64 > room).then(|| data.split_off(room as usize));
        let rest = rest.map(|rest| Item { offset: offset + data.len() as u64, event: make(rest) });
        (Item { offset, event: make(data) }, rest)
    };
    match event {
        OutputEvent::Stdout(data) => cut(data, OutputEvent::Stdout),
        OutputEvent::Stderr(data) => cut(data, OutputEvent::Stderr),
        other => (Item { offset, event: other }, None),
    }
}

/// Read position in an output. A dropped reader no longer delays the output.
#[derive(Debug)]
pub struct Reader {
    output: Rc<Output>,
    id: u64,
    /// Delivered bytes of both streams.
    at: u64,
}

impl Reader {
    /// Waits for the next event. `ExitCode` is the last event, then `None`. Dropped bytes are reported as `Truncated`.
    pub async fn next(&mut self) -> Option<OutputEvent> {
        loop {
            let output = Rc::clone(&self.output);
            let mut changed = std::pin::pin!(output.changed.notified());
            changed.as_mut().enable();
            match self.try_next() {
                Next::Event(event) => return Some(event),
                Next::Over => return None,
                Next::NotYet => changed.await,
            }
        }
    }

    fn try_next(&mut self) -> Next {
        let output = Rc::clone(&self.output);
        let mut inner = output.inner.borrow_mut();
        let Some(next) = inner.readers.get(&self.id).copied() else {
            return Next::Over;
        };
        let kept = inner.kept.len() as u64;
        let number = if next >= kept { next.max(inner.first_in_window()) } else { next };
        let Some(item) = inner.item(number) else {
            return self.at_the_tail(inner);
        };
        if item.offset > self.at {
            let gap = item.offset - self.at;
            self.at = item.offset;
            return Next::Event(OutputEvent::Truncated(gap));
        }
        let skip = (self.at - item.offset).min(item.stream_bytes());
        self.at = self.at.max(item.offset + item.stream_bytes());
        let event = tail_of(&item.event, skip as usize);
        inner.readers.insert(self.id, number + 1);
        inner.shed();
        drop(inner);
        self.output.changed.notify_waiters();
        Next::Event(event)
    }

    fn at_the_tail(&mut self, mut inner: std::cell::RefMut<'_, Inner>) -> Next {
        let Some(end) = &inner.end else {
            return Next::NotYet;
        };
        let code = end.code;
        if inner.written > self.at {
            let gap = inner.written - self.at;
            self.at = inner.written;
            return Next::Event(OutputEvent::Truncated(gap));
        }
        inner.readers.remove(&self.id);
        Next::Event(OutputEvent::ExitCode(code))
    }
}

fn tail_of(event: &OutputEvent, skip: usize) -> OutputEvent {
    match event {
        OutputEvent::Stdout(data) => OutputEvent::Stdout(data[skip..].to_vec()),
        OutputEvent::Stderr(data) => OutputEvent::Stderr(data[skip..].to_vec()),
        other => other.clone(),
    }
}

enum Next {
    Event(OutputEvent),
    NotYet,
    Over,
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut inner = self.output.inner.borrow_mut();
        inner.readers.remove(&self.id);
        inner.shed();
        drop(inner);
        self.output.changed.notify_waiters();
    }
}

#[cfg(test)]
#[path = "output_tests.rs"]
mod tests;
