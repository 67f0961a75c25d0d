//! Copies of the engine that stand still, one for each of the newest checkpoints: a restore wakes one, and it is the engine.
//!
//! ```text
//!  keep:  engine ◀─ keep + a socket ── init        engine forks; the copy says so on its own socket, and stands still
//!  wake:  copy ◀─ wake ── init ── everything else ends ──▶ the copy is the engine ── keep ──▶ one more copy, for the next restore
//! ```
//!
//! Every copy has a control socket of its own from its first moment: no two processes ever read the same one, so no frame is
//! lost or read twice. Which process it is, init takes from the host kernel alone. A copy can be gone at any moment; then
//! this says why, and the saved state is what a restore uses.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::task::Context;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use serde::Deserialize;
use tokio::io::Interest;
use tokio::time::Instant;

use super::Worker;
use super::control::Control;
use super::engine_frames::{EngineEvent, cut};
use super::loading::missed_json;
use super::requests::By;
use crate::core::error::{Error, Result};
use crate::core::kernel::CrashCause;
use crate::core::limits;
use crate::link::guest::{Answer, Revision};
use crate::sys::pidfd;
use crate::sys::watched::watch;

/// Longest words of an engine on why there is no copy, bytes.
const WORDS_BYTES: usize = 500;
/// Reason of an error that says that there is no copy: nothing was touched.
const GONE: &str = "no_copy";

/// A copy that stands still.
struct ForkedSnapshot {
    /// Of which checkpoint.
    of: String,
    control: Control,
    pid: i32,
    process: OwnedFd,
}

impl ForkedSnapshot {
    fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(self.process.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO) != Ok(0)
    }

    fn end(self) {
        // One that is gone already needs nothing.
        let _ = pidfd::signal(self.process.as_fd(), Signal::SIGKILL);
    }
}

/// A copy that the engine is making.
struct PendingSnapshot {
    of: String,
    /// Another copy that does not go for this one.
    spare: String,
    control: Control,
    /// Gets why there is none; empty: there is.
    answer: Option<Answer<String>>,
}

/// A copy that was told to wake and has not answered.
struct Waking {
    copy: ForkedSnapshot,
    id: u64,
    until: Instant,
    answer: Answer<Vec<u8>>,
}

/// The copies of one worker.
#[derive(Default)]
pub(super) struct ForkedSnapshots {
    /// Oldest first.
    kept: VecDeque<ForkedSnapshot>,
    pending: Option<PendingSnapshot>,
    waking: Option<Waking>,
    /// Those that are gone, and why; oldest first.
    gone: VecDeque<(String, String)>,
    /// Calls that want everything stopped and wait for a copy to be made.
    freezes: Vec<Answer<()>>,
    /// The last list of dynamic tools: a woken copy knows a former one.
    tools: Option<Vec<u8>>,
}

impl ForkedSnapshots {
    /// Whether the engine is being exchanged.
    pub(super) fn is_waking(&self) -> bool {
        self.waking.is_some()
    }

    /// When a copy must have woken.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.waking.as_ref().map(|waking| waking.until)
    }

    /// Remembers what the engine was told of dynamic tools.
    pub(super) fn note_tools(&mut self, frame: &[u8]) {
        self.tools = Some(frame.to_vec());
    }

    fn pids(&self) -> Vec<i32> {
        self.kept.iter().map(|copy| copy.pid).collect()
    }

    fn note_gone(&mut self, of: String, why: impl Into<String>) {
        self.gone.retain(|(known, _)| *known != of);
        self.gone.push_back((of, why.into()));
        if self.gone.len() > limits::LOST_SNAPSHOTS {
            self.gone.pop_front();
        }
    }

    fn drop_at(&mut self, at: usize, why: impl Into<String>) {
        if let Some(copy) = self.kept.remove(at) {
            self.note_gone(copy.of.clone(), why);
            copy.end();
        }
    }

    /// Makes room for one more. A copy of the same checkpoint gives way to the new one.
    fn make_room(&mut self, of: &str, spare: &str) {
        if let Some(at) = self.kept.iter().position(|copy| copy.of == of) {
            self.drop_at(at, "there is a newer one");
        }
        while self.kept.len() >= limits::FORKED_SNAPSHOTS {
            let Some(at) = self.kept.iter().position(|copy| copy.of != spare) else { return };
            self.drop_at(at, format!("copies of {} newer checkpoints took its place", limits::FORKED_SNAPSHOTS));
        }
    }
}

impl Worker {
    /// Has the engine make a copy of itself.
    pub(super) fn keep(&mut self, of: String, spare: String, answer: Answer<String>) {
        if let Err(busy) = self.check_idle() {
            let _ = answer.send(Err(busy));
            return;
        }
        self.begin_keep(of, spare, Some(answer));
    }

    fn begin_keep(&mut self, of: String, spare: String, answer: Option<Answer<String>>) {
        let not = |answer: Option<Answer<String>>, why: String| {
            if let Some(answer) = answer {
                let _ = answer.send(Ok(why));
            }
        };
        if self.settings.rollback_bytes == 0 {
            return not(answer, "this host's configuration wants none".into());
        }
        if self.snapshots.pending.is_some() {
            self.snapshots.note_gone(of, "another copy was being made");
            return not(answer, "another is being made".into());
        }
        let made = UnixStream::pair().and_then(|(ours, theirs)| Ok((Control::noting_sender(ours)?, theirs)));
        let (control, theirs) = match made {
            Ok(made) => made,
            Err(error) => return not(answer, format!("no socket for it: {error}")),
        };
        self.snapshots.pending = Some(PendingSnapshot { of, spare, control, answer });
        // A failure kills the engine, and with it what is being made.
        let _ = self.ask_with(br#"{"op":"keep"}"#, Some(theirs.into()), By::Keep);
    }

    /// The engine says whether it made a copy; the copy itself has spoken before.
    pub(super) fn on_snapshot_made(&mut self, ok: bool, json: &[u8]) {
        let Some(PendingSnapshot { of, spare, mut control, answer }) = self.snapshots.pending.take() else { return };
        control.read_rest();
        let spoke =
            matches!(control.next(), Ok(Some(frame)) if matches!(frame.event, EngineEvent::Reply { ok: true, .. }));
        let made_of = of.clone();
        let taken = match (ok, control.sender()) {
            (false, _) => Err(words(json)),
            (true, Some(pid)) if spoke => {
                self.enclosure.adopt_snapshot(pid).map(|process| (pid, process)).map_err(|error| error.message)
            }
            (true, _) => Err("it ended before it stood".into()),
        };
        let why = match taken {
            Ok((pid, process)) if !self.snapshots.pids().contains(&pid) => {
                self.snapshots.make_room(&of, &spare);
                self.snapshots.kept.push_back(ForkedSnapshot { of, control, pid, process });
                String::new()
            }
            Ok((pid, _)) => format!("process {pid} is another's copy"),
            Err(why) => why,
        };
        if !why.is_empty() {
            tracing::debug!(why, "no copy of the engine is kept");
            self.snapshots.note_gone(made_of, why.clone());
        }
        self.bound_snapshots();
        match answer {
            Some(answer) => drop(answer.send(Ok(why))),
            None if why.is_empty() => {}
            None => tracing::info!(why, "a restored checkpoint has no copy in memory any more"),
        }
        for held in std::mem::take(&mut self.snapshots.freezes) {
            let _ = held.send(self.freeze(false));
        }
    }

    /// Stops everything inside; between executions only once no copy is being made.
    pub(super) fn freeze_after_snapshot(&mut self, at_work: bool, answer: Answer<()>) {
        match self.snapshots.pending {
            Some(_) if !at_work => self.snapshots.freezes.push(answer),
            Some(_) | None => drop(answer.send(self.freeze(at_work))),
        }
    }

    /// Makes the copy of a checkpoint the engine.
    pub(super) fn wake(&mut self, of: &str, answer: Answer<Vec<u8>>) {
        let refused = self.check_idle().and_then(|()| match self.asked.is_empty() {
            true => Ok(()),
            false => Err(Error::busy("the engine is answering a request")),
        });
        if let Err(error) = refused {
            let _ = answer.send(Err(error));
            return;
        }
        let Some(at) = self.snapshots.kept.iter().position(|copy| copy.of == of) else {
            let why = self.snapshots.gone.iter().find(|(gone, _)| gone == of).map(|(_, why)| why.clone());
            let _ = answer.send(Err(gone(&why.unwrap_or_else(|| "this worker was started after it was made".into()))));
            return;
        };
        let Some(mut copy) = self.snapshots.kept.remove(at) else { return };
        let id = self.next_id();
        if let Err(why) = copy.control.request(id, br#"{"op":"wake"}"#, None) {
            return self.fail_wake(copy, answer, &why);
        }
        let until = Instant::now() + limits::SNAPSHOT_WAKE;
        self.snapshots.waking = Some(Waking { copy, id, until, answer });
    }

    fn fail_wake(&mut self, copy: ForkedSnapshot, answer: Answer<Vec<u8>>, why: &str) {
        self.snapshots.note_gone(copy.of.clone(), why);
        copy.end();
        let _ = answer.send(Err(gone(why)));
    }

    /// Hears copies; whether one spoke.
    pub(super) fn poll_snapshots(&mut self, cx: &mut Context<'_>) -> bool {
        let mut progressed = false;
        let mut at = 0;
        while at < self.snapshots.kept.len() {
            let control = &mut self.snapshots.kept[at].control;
            let spoke = control.poll_read(cx).is_ready();
            match (spoke, control.has_ended()) {
                (false, false) => at += 1,
                (_, true) => self.snapshots.drop_at(at, "its process ended"),
                (true, false) => self.snapshots.drop_at(at, "it did not stand still"),
            }
            progressed |= spoke;
        }
        let Some(waking) = &mut self.snapshots.waking else { return progressed };
        waking.copy.control.poll_flush(cx);
        let heard = match waking.copy.control.next() {
            Ok(None) => match waking.copy.control.poll_read(cx).is_ready() {
                true => waking.copy.control.next(),
                false => Ok(None),
            },
            heard => heard,
        };
        let outcome = match heard {
            Ok(None) if waking.copy.control.has_ended() => Err("its process ended when it was to wake".to_owned()),
            Ok(None) => return progressed,
            Ok(Some(frame)) => match frame.event {
                EngineEvent::Reply { id, ok: true } if id == waking.id => Ok(frame.json),
                _ => Err("it answered something else when it was to wake".to_owned()),
            },
            Err(why) => Err(why),
        };
        if let Some(Waking { copy, answer, .. }) = self.snapshots.waking.take() {
            match outcome {
                Ok(json) => self.on_woken(copy, &json, answer),
                Err(why) => self.fail_wake(copy, answer, &why),
            }
        }
        true
    }

    /// A copy that does not wake in time is none.
    pub(super) fn on_snapshot_deadline(&mut self, now: Instant) {
        if let Some(Waking { copy, answer, .. }) = self.snapshots.waking.take_if(|waking| waking.until <= now) {
            self.fail_wake(copy, answer, "it did not wake in time");
        }
    }

    /// The worker is to end: the engine stays the one that it is.
    pub(super) fn stop_waking(&mut self) {
        if let Some(Waking { copy, answer, .. }) = self.snapshots.waking.take() {
            self.fail_wake(copy, answer, "the worker was stopped");
        }
    }

    /// The copy runs: everything else ends, and it is the engine.
    fn on_woken(&mut self, copy: ForkedSnapshot, json: &[u8], answer: Answer<Vec<u8>>) {
        // It may have been collected already; its number would be another's then.
        if copy.has_ended() {
            return self.fail_wake(copy, answer, "its process ended when it was to wake");
        }
        let ForkedSnapshot { of, control, pid, process } = copy;
        let exchanged = self.enclosure.replace_engine(pid, &self.snapshots.pids());
        let watched = watch(process, Interest::READABLE);
        let (ended, exit) = match (exchanged, watched) {
            (Ok(ended), Ok(exit)) => (ended, exit),
            (Err(error), _) => return self.break_exchange(&error, answer),
            (_, Err(error)) => return self.break_exchange(&Error::internal(error.to_string()), answer),
        };
        (self.control, self.exit, self.hung_up_at) = (control, exit, None);
        self.state.discard();
        if let Some(ended) = ended {
            let _ = answer.send(Err(Error::lost("the copy ended as soon as it was the engine")));
            return self.on_engine_exit(ended);
        }
        if let Some(tools) = &self.snapshots.tools
            && let Err(why) = self.control.send(tools, &[], None)
        {
            self.kill(CrashCause::Protocol(why));
        }
        let _ = answer.send(Ok(missed_json(json)));
        self.begin_keep(of.clone(), of, None);
    }

    /// Neither the one nor the other is surely the engine: both go.
    fn break_exchange(&mut self, error: &Error, answer: Answer<Vec<u8>>) {
        let _ = answer.send(Err(Error::lost(format!("the engine could not be exchanged: {}", error.message))));
        self.kill(CrashCause::Unresponsive);
    }

    /// Ends the oldest copies while all of them cost more than the budget, or more than half of what would be free without them.
    pub(super) fn bound_snapshots(&mut self) {
        while !self.snapshots.kept.is_empty() {
            let budget = self.settings.rollback_bytes;
            let memory = self.enclosure.snapshots_memory(&self.snapshots.pids(), budget);
            let most = budget.min((memory.used_bytes + memory.free_bytes) / 2);
            if memory.used_bytes <= most {
                return;
            }
            let (used, most) = (memory.used_bytes >> 20, most >> 20);
            self.snapshots
                .drop_at(0, format!("memory is short: all copies used {used} MiB, and may use {most} MiB now"));
        }
    }

    /// Ends the oldest copy because a limit is broken; whether there was one.
    pub(super) fn drop_oldest_snapshot(&mut self) -> bool {
        let there = !self.snapshots.kept.is_empty();
        self.snapshots.drop_at(0, "memory was short");
        there
    }

    /// Whoever waits for a copy learns that there is none any more.
    pub(super) fn forget_snapshots(&mut self, error: &Error) {
        let snapshots = std::mem::take(&mut self.snapshots);
        if let Some(PendingSnapshot { answer: Some(answer), .. }) = snapshots.pending {
            let _ = answer.send(Err(error.clone()));
        }
        if let Some(Waking { answer, .. }) = snapshots.waking {
            let _ = answer.send(Err(error.clone()));
        }
        for answer in snapshots.freezes {
            let _ = answer.send(Err(error.clone()));
        }
    }

    /// Takes one change of the stored state; the last one stores them all.
    pub(super) fn revise(&mut self, revision: Revision) -> Result<()> {
        self.check_idle()?;
        let Revision { key, meta_json, data, more, gone, last } = revision;
        if data.len() > limits::FRAME_TAIL_BYTES {
            return Err(Error::invalid("a chunk of state is too large"));
        }
        let meta = String::from_utf8(meta_json).map_err(|_| Error::invalid("meta data that is no text"));
        let taken = meta.and_then(|meta| {
            let taken = match (key.is_empty(), gone) {
                (true, _) => Ok(()),
                (false, true) => self.state.del(key),
                (false, false) => self.state.put(key, meta, &data, more),
            };
            taken.map_err(Error::invalid)
        });
        let stored = taken.and_then(|()| match last {
            true => self.state.commit(None).map_err(Error::from),
            false => Ok(()),
        });
        if stored.is_err() {
            self.state.discard();
        }
        stored
    }
}

/// Nothing was touched: the engine is the one that it was.
fn gone(why: &str) -> Error {
    Error::not_found(why).reason(GONE)
}

/// Why the engine made no copy, in its own words.
fn words(json: &[u8]) -> String {
    #[derive(Deserialize, Default)]
    struct Reply {
        #[serde(default)]
        message: String,
    }
    let mut message = serde_json::from_slice::<Reply>(json).unwrap_or_default().message;
    cut(&mut message, WORDS_BYTES);
    if message.is_empty() { "the engine made none".into() } else { message }
}
