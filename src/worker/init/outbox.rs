//! Messages to the daemon: the ledger's items in order, the latest list of each kind, and the
//! engine's tool calls. Runs in init.
//!
//! Owns the attached daemon and all messages in flight. At most one chunk of output waits for room,
//! one list of each kind is in flight, and [`limits::TOOL_CALLS`] tool calls are open: a slow or
//! absent daemon costs bounded memory.

use std::collections::{HashMap, VecDeque};
use std::task::{Context, Poll, ready};

use futures::FutureExt;
use futures::future::{AbortHandle, abortable};
use futures::stream::{FuturesUnordered, StreamExt};

use super::ledger::{Item, Ledger};
use crate::core::exec::Stream;
use crate::core::ids::ExecId;
use crate::core::kernel::CrashCause;
use crate::core::limits;
use crate::link::guest::{Daemon, Delivered, Delivery, ToolAnswer};

/// A list of which only the latest value matters.
#[derive(Debug, Default)]
struct Latest {
    json: Vec<u8>,
    changed: bool,
    under_way: bool,
}

/// The final notice to the daemon.
#[derive(Debug)]
struct LastWord {
    cause: CrashCause,
    sent: bool,
}

/// All messages to the daemon.
#[derive(Default)]
pub struct Outbox {
    attached: Option<(u64, Daemon)>,
    under_way: FuturesUnordered<Delivery>,
    /// Output was sent and the daemon has no room for more yet.
    output_waits: bool,
    background_waits: bool,
    background: VecDeque<(Stream, Vec<u8>)>,
    background_bytes: usize,
    jobs: Latest,
    missed: Latest,
    /// Open calls of dynamic tools, with their execution and cancellation.
    tools: HashMap<u64, (u64, AbortHandle)>,
    last_word: Option<LastWord>,
    /// Unconfirmed ends and final notice.
    notices: usize,
}

impl Outbox {
    /// A daemon attached: messages in flight to the previous one are abandoned. Returns the lost
    /// tool calls.
    pub fn attach(&mut self, connection: u64, daemon: Daemon, ledger: &mut Ledger) -> Vec<u64> {
        let lost = self.detach();
        self.attached = Some((connection, daemon));
        ledger.rewind();
        // The attach report contains the lists.
        (self.jobs.changed, self.missed.changed) = (false, false);
        lost
    }

    /// The daemon is gone. Returns the lost tool calls.
    pub fn detach(&mut self) -> Vec<u64> {
        self.attached = None;
        self.under_way = FuturesUnordered::new();
        (self.output_waits, self.background_waits) = (false, false);
        (self.jobs.under_way, self.missed.under_way) = (false, false);
        self.notices = 0;
        if let Some(word) = &mut self.last_word {
            word.sent = false;
        }
        self.tools.drain().map(|(call, _)| call).collect()
    }

    /// The attached connection's number.
    pub fn connection(&self) -> Option<u64> {
        self.attached.as_ref().map(|(connection, _)| *connection)
    }

    /// Whether more output of an execution may be read: it can be sent now, or held for an absent
    /// daemon.
    pub fn takes_output(&self, ledger: &Ledger, held_bytes: usize, gathers: bool) -> bool {
        match self.attached {
            Some(_) if gathers => true,
            Some(_) => !self.output_waits && ledger.next().is_none(),
            None => ledger.unsent_bytes() < held_bytes,
        }
    }

    /// Whether more output of jobs may be read.
    pub fn takes_background(&self) -> bool {
        self.background_bytes < limits::BACKGROUND_BUFFER_BYTES
    }

    /// Takes output of a job while no execution runs. When the buffer is full, the oldest bytes are
    /// dropped.
    pub fn background(&mut self, stream: Stream, data: &[u8]) {
        for piece in data.chunks(limits::BACKGROUND_BUFFER_BYTES / 4) {
            self.background_bytes += piece.len();
            self.background.push_back((stream, piece.to_vec()));
        }
        while self.background_bytes > 2 * limits::BACKGROUND_BUFFER_BYTES {
            let Some((_, oldest)) = self.background.pop_front() else { break };
            self.background_bytes -= oldest.len();
        }
    }

    /// The list of jobs changed.
    pub fn set_jobs(&mut self, json: Vec<u8>) {
        self.jobs = Latest { json, changed: true, under_way: self.jobs.under_way };
    }

    /// The list of unsaved entries changed.
    pub fn set_missed(&mut self, json: Vec<u8>) {
        self.missed = Latest { json, changed: true, under_way: self.missed.under_way };
    }

    /// Whether a changed list may not have reached the daemon.
    pub fn has_news(&self) -> bool {
        [&self.jobs, &self.missed].iter().any(|list| list.changed || list.under_way)
    }

    /// The last lists, for a report.
    pub fn lists(&self) -> (&[u8], &[u8]) {
        (&self.jobs.json, &self.missed.json)
    }

    /// The final notice, after everything else.
    pub fn dying(&mut self, cause: CrashCause) {
        self.last_word = Some(LastWord { cause, sent: false });
    }

    /// Whether the daemon has received everything, including the final notice.
    pub fn is_done(&self, ledger: &Ledger) -> bool {
        let reported = self.last_word.as_ref().is_none_or(|word| word.sent);
        reported && self.notices == 0 && ledger.next().is_none()
    }

    /// Calls a dynamic tool.
    ///
    /// # Errors
    /// What the engine did wrong; `Ok(Some(…))` is an immediate answer.
    pub fn call_tool(&mut self, call: u64, exec: u64, json: &[u8]) -> Result<Option<ToolAnswer>, String> {
        if self.tools.contains_key(&call) {
            return Err(format!("tool call {call} twice"));
        }
        if self.tools.len() >= limits::TOOL_CALLS {
            return Err(format!("more than {} tool calls at once", limits::TOOL_CALLS));
        }
        let Some((_, daemon)) = &self.attached else {
            return Ok(Some(ToolAnswer::Failed("no daemon is there to call the tool".into())));
        };
        let (delivery, cancel) = abortable(daemon.tool_call(ExecId(exec), call, json));
        let interrupted = move |_| Delivered::Tool { call, answer: ToolAnswer::Failed("interrupted".into()) };
        self.under_way.push(delivery.map(move |done| done.unwrap_or_else(interrupted)).boxed_local());
        self.tools.insert(call, (exec, cancel));
        Ok(None)
    }

    /// Cancels the tool calls of an execution; they return as failed.
    pub fn cancel_tools(&mut self, exec: u64) {
        for (of, cancel) in self.tools.values() {
            if *of == exec {
                cancel.abort();
            }
        }
    }

    /// Sends as much as possible. `gathers`: items of an execution are held back for the answer to
    /// its start.
    pub fn push(&mut self, ledger: &mut Ledger, gathers: bool) {
        let Some((_, daemon)) = &self.attached else { return };
        // A reader of an end finds the lists in the state after it.
        if self.jobs.changed && !self.jobs.under_way {
            (self.jobs.changed, self.jobs.under_way) = (false, true);
            self.under_way.push(daemon.jobs(&self.jobs.json));
        }
        if self.missed.changed && !self.missed.under_way {
            (self.missed.changed, self.missed.under_way) = (false, true);
            self.under_way.push(daemon.missed(&self.missed.json));
        }
        while !self.output_waits && !gathers {
            let Some((exec, item)) = ledger.next() else { break };
            let waits = match item {
                Item::Output { offset, stream, data } => daemon.output(exec, *offset, *stream, data),
                Item::Event { json, tail } => daemon.event(exec, json, tail),
                Item::Ended(finish) => {
                    self.notices += 1;
                    self.under_way.push(daemon.ended(exec, finish));
                    None
                }
            };
            ledger.sent();
            if let Some(delivery) = waits {
                self.output_waits = true;
                self.under_way.push(delivery);
            }
        }
        while !self.background_waits
            && let Some((stream, data)) = self.background.pop_front()
        {
            self.background_bytes -= data.len();
            self.background_waits = true;
            self.under_way.push(daemon.background(stream, &data));
        }
        if let Some(word) = &mut self.last_word
            && !word.sent
            && !gathers
            && ledger.next().is_none()
        {
            word.sent = true;
            self.notices += 1;
            self.under_way.push(daemon.dying(&word.cause));
        }
    }

    /// Waits for a delivery. Returns a tool's answer if it was one.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<(u64, ToolAnswer)>> {
        if self.under_way.is_empty() {
            return Poll::Pending;
        }
        let Some(delivered) = ready!(self.under_way.poll_next_unpin(cx)) else { return Poll::Pending };
        match delivered {
            // A broken link stays blocked; the connection's end follows.
            Delivered::Output(arrived) => self.output_waits = !arrived,
            Delivered::Background => self.background_waits = false,
            Delivered::Jobs => self.jobs.under_way = false,
            Delivered::Missed => self.missed.under_way = false,
            Delivered::Notice => self.notices = self.notices.saturating_sub(1),
            Delivered::Tool { call, answer } => {
                self.tools.remove(&call);
                return Poll::Ready(Some((call, answer)));
            }
        }
        Poll::Ready(None)
    }
}
