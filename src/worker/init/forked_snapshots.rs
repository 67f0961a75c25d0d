//! Forked snapshots of the engine, one for each of the newest checkpoints; a restore wakes one as
//! the new engine. Runs in init.
//!
//! ```text
//!  keep:  engine ◀─ keep + a socket ── init        engine forks; the snapshot reports on its own socket and waits
//!  wake:  snapshot ◀─ wake ── init ── all else ends ──▶ the snapshot is the engine ── keep ──▶ another snapshot
//! ```
//!
//! Every snapshot has its own control socket from the start: no two processes read the same one, so
//! no frame is lost or read twice. Init identifies the process by the host kernel's facts alone. A
//! snapshot can disappear at any moment; the reason is recorded, and a restore uses the saved
//! state.

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

/// Longest engine message about a missing snapshot, bytes.
const WORDS_BYTES: usize = 500;
/// Error reason for a missing snapshot; nothing has changed then.
const GONE: &str = "no_copy";

/// A waiting snapshot.
struct ForkedSnapshot {
    /// Its checkpoint.
    of: String,
    /// Of a safety checkpoint: it never evicts the snapshot of a requested one.
    transient: bool,
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
        // A snapshot that is gone already needs nothing.
        let _ = pidfd::signal(self.process.as_fd(), Signal::SIGKILL);
    }
}

/// A snapshot being made.
struct PendingSnapshot {
    of: String,
    /// The checkpoint whose snapshot must not be evicted for this one.
    spare: String,
    transient: bool,
    control: Control,
    /// Receives the reason if there is no snapshot; else an empty text.
    answer: Option<Answer<String>>,
}

/// A snapshot that was asked to wake and has not answered.
struct Waking {
    copy: ForkedSnapshot,
    id: u64,
    until: Instant,
    answer: Answer<Vec<u8>>,
}

/// Why every process inside is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hold {
    /// Files are captured; with `at_work` those of other sessions, also during an execution.
    Capture { at_work: bool },
    /// The kernel is suspended.
    Suspension { copied: bool },
}

/// The snapshots of one worker.
#[derive(Default)]
pub(super) struct ForkedSnapshots {
    /// Oldest first.
    kept: VecDeque<ForkedSnapshot>,
    pending: Option<PendingSnapshot>,
    waking: Option<Waking>,
    /// Checkpoints whose snapshot is gone, and why; oldest first.
    gone: VecDeque<(String, String)>,
    /// Calls to stop every process that wait for a snapshot to be made.
    holds: Vec<(Hold, Answer<()>)>,
    /// The current list of dynamic tools; a woken snapshot has an older one.
    tools: Option<Vec<u8>>,
}

impl ForkedSnapshots {
    /// Whether the engine is being replaced.
    pub(super) fn is_waking(&self) -> bool {
        self.waking.is_some()
    }

    /// Deadline of a waking snapshot.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.waking.as_ref().map(|waking| waking.until)
    }

    /// Remembers the engine's list of dynamic tools.
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

    /// Makes room for one more. A new snapshot replaces the one of the same checkpoint.
    fn make_room(&mut self, of: &str, spare: &str, transient: bool) {
        if let Some(at) = self.kept.iter().position(|copy| copy.of == of) {
            self.drop_at(at, "a newer snapshot replaced it");
        }
        let most = if transient { limits::TRANSIENT_SNAPSHOTS } else { limits::FORKED_SNAPSHOTS };
        while self.kept.iter().filter(|copy| copy.transient == transient).count() >= most {
            let oldest = self.kept.iter().position(|copy| copy.transient == transient && copy.of != spare);
            let Some(at) = oldest else { return };
            self.drop_at(at, format!("snapshots of {most} newer checkpoints replaced it"));
        }
    }

    /// The snapshot that ends first when memory is short: the oldest transient one, else the oldest.
    fn first_to_end(&self) -> usize {
        self.kept.iter().position(|copy| copy.transient).unwrap_or(0)
    }
}

impl Worker {
    /// Makes the engine fork a snapshot of itself.
    pub(super) fn keep(&mut self, of: String, spare: String, transient: bool, answer: Answer<String>) {
        if let Err(busy) = self.check_idle() {
            let _ = answer.send(Err(busy));
            return;
        }
        self.begin_keep(of, spare, transient, Some(answer));
    }

    fn begin_keep(&mut self, of: String, spare: String, transient: bool, answer: Option<Answer<String>>) {
        let not = |answer: Option<Answer<String>>, why: String| {
            if let Some(answer) = answer {
                let _ = answer.send(Ok(why));
            }
        };
        if self.settings.rollback_bytes == 0 {
            return not(answer, "disabled by this host's configuration".into());
        }
        if self.snapshots.pending.is_some() {
            self.snapshots.note_gone(of, "another snapshot was being made");
            return not(answer, "another snapshot is being made".into());
        }
        let made = UnixStream::pair().and_then(|(ours, theirs)| Ok((Control::noting_sender(ours)?, theirs)));
        let (control, theirs) = match made {
            Ok(made) => made,
            Err(error) => return not(answer, format!("no socket for it: {error}")),
        };
        self.snapshots.pending = Some(PendingSnapshot { of, spare, transient, control, answer });
        // A failure kills the engine, and with it the pending snapshot.
        let _ = self.ask_with(br#"{"op":"keep"}"#, Some(theirs.into()), By::Keep);
    }

    /// Handles the engine's reply to `keep`; the snapshot has replied before.
    pub(super) fn on_snapshot_made(&mut self, ok: bool, json: &[u8]) {
        let Some(PendingSnapshot { of, spare, transient, mut control, answer }) = self.snapshots.pending.take() else {
            return;
        };
        control.read_rest();
        let spoke =
            matches!(control.next(), Ok(Some(frame)) if matches!(frame.event, EngineEvent::Reply { ok: true, .. }));
        let made_of = of.clone();
        let taken = match (ok, control.sender()) {
            (false, _) => Err(words(json)),
            (true, Some(pid)) if spoke => {
                self.enclosure.adopt_snapshot(pid).map(|process| (pid, process)).map_err(|error| error.message)
            }
            (true, _) => Err("it ended before it was ready".into()),
        };
        let why = match taken {
            Ok((pid, process)) if !self.snapshots.pids().contains(&pid) => {
                self.snapshots.make_room(&of, &spare, transient);
                self.snapshots.kept.push_back(ForkedSnapshot { of, transient, control, pid, process });
                String::new()
            }
            Ok((pid, _)) => format!("process {pid} is another snapshot"),
            Err(why) => why,
        };
        if !why.is_empty() {
            tracing::debug!(why, "no snapshot of the engine was made");
            self.snapshots.note_gone(made_of, why.clone());
        }
        self.bound_snapshots();
        match answer {
            Some(answer) => drop(answer.send(Ok(why))),
            None if why.is_empty() => {}
            None => tracing::info!(why, "a restored checkpoint has no forked snapshot any more"),
        }
        for (hold, held) in std::mem::take(&mut self.snapshots.holds) {
            let _ = held.send(self.hold(hold));
        }
    }

    /// Stops every process inside; between executions only after a pending snapshot is made.
    pub(super) fn hold_after_snapshot(&mut self, hold: Hold, answer: Answer<()>) {
        let waits = !matches!(hold, Hold::Capture { at_work: true });
        match self.snapshots.pending {
            Some(_) if waits => self.snapshots.holds.push((hold, answer)),
            Some(_) | None => drop(answer.send(self.hold(hold))),
        }
    }

    /// Makes a checkpoint's snapshot the engine.
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

    /// Polls the snapshots; returns whether one sent something.
    pub(super) fn poll_snapshots(&mut self, cx: &mut Context<'_>) -> bool {
        let mut progressed = false;
        let mut at = 0;
        while at < self.snapshots.kept.len() {
            let control = &mut self.snapshots.kept[at].control;
            let spoke = control.poll_read(cx).is_ready();
            match (spoke, control.has_ended()) {
                (false, false) => at += 1,
                (_, true) => self.snapshots.drop_at(at, "its process ended"),
                (true, false) => self.snapshots.drop_at(at, "it did not keep waiting"),
            }
            progressed |= spoke;
        }
        let Some(waking) = &mut self.snapshots.waking else { return progressed };
        waking.copy.control.poll_flush(cx);
        let received = match waking.copy.control.next() {
            Ok(None) => match waking.copy.control.poll_read(cx).is_ready() {
                true => waking.copy.control.next(),
                false => Ok(None),
            },
            received => received,
        };
        let outcome = match received {
            Ok(None) if waking.copy.control.has_ended() => Err("its process ended while waking".to_owned()),
            Ok(None) => return progressed,
            Ok(Some(frame)) => match frame.event {
                EngineEvent::Reply { id, ok: true } if id == waking.id => Ok(frame.json),
                _ => Err("it did not answer the wake request".to_owned()),
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

    /// Gives up a snapshot that does not wake in time.
    pub(super) fn on_snapshot_deadline(&mut self, now: Instant) {
        if let Some(Waking { copy, answer, .. }) = self.snapshots.waking.take_if(|waking| waking.until <= now) {
            self.fail_wake(copy, answer, "it did not wake in time");
        }
    }

    /// The worker is stopping: the engine stays the same.
    pub(super) fn stop_waking(&mut self) {
        if let Some(Waking { copy, answer, .. }) = self.snapshots.waking.take() {
            self.fail_wake(copy, answer, "the worker was stopped");
        }
    }

    /// The snapshot is awake: every other process ends, and it becomes the engine.
    fn on_woken(&mut self, copy: ForkedSnapshot, json: &[u8], answer: Answer<Vec<u8>>) {
        // It may have been reaped already; its id could then be reused.
        if copy.has_ended() {
            return self.fail_wake(copy, answer, "its process ended while waking");
        }
        let ForkedSnapshot { of, transient, control, pid, process } = copy;
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
            let _ = answer.send(Err(Error::lost("the snapshot ended as soon as it became the engine")));
            return self.on_engine_exit(ended);
        }
        if let Some(tools) = &self.snapshots.tools
            && let Err(why) = self.control.send(tools, &[], None)
        {
            self.kill(CrashCause::Protocol(why));
        }
        let _ = answer.send(Ok(missed_json(json)));
        self.begin_keep(of.clone(), of, transient, None);
    }

    /// Neither process is certainly the engine: both end.
    fn break_exchange(&mut self, error: &Error, answer: Answer<Vec<u8>>) {
        let _ = answer.send(Err(Error::lost(format!("the engine could not be replaced: {}", error.message))));
        self.kill(CrashCause::Unresponsive);
    }

    /// Ends snapshots, transient ones first, while all together exceed the budget, or half of the memory that
    /// would be free without them.
    pub(super) fn bound_snapshots(&mut self) {
        while !self.snapshots.kept.is_empty() {
            let budget = self.settings.rollback_bytes;
            let memory = self.enclosure.snapshots_memory(&self.snapshots.pids(), budget);
            let most = budget.min((memory.used_bytes + memory.free_bytes) / 2);
            if memory.used_bytes <= most {
                return;
            }
            let (used, most) = (memory.used_bytes >> 20, most >> 20);
            let first = self.snapshots.first_to_end();
            self.snapshots.drop_at(first, format!("memory is short: all snapshots used {used} MiB of {most} MiB"));
        }
    }

    /// Ends the oldest snapshot because a limit was exceeded; returns whether there was one.
    pub(super) fn drop_oldest_snapshot(&mut self) -> bool {
        let there = !self.snapshots.kept.is_empty();
        let first = self.snapshots.first_to_end();
        self.snapshots.drop_at(first, "memory was short");
        there
    }

    /// Answers every waiting call: the snapshots are gone.
    pub(super) fn forget_snapshots(&mut self, error: &Error) {
        let snapshots = std::mem::take(&mut self.snapshots);
        if let Some(PendingSnapshot { answer: Some(answer), .. }) = snapshots.pending {
            let _ = answer.send(Err(error.clone()));
        }
        if let Some(Waking { answer, .. }) = snapshots.waking {
            let _ = answer.send(Err(error.clone()));
        }
        for (_, answer) in snapshots.holds {
            let _ = answer.send(Err(error.clone()));
        }
    }

    /// Takes a change of the stored state; the last one stores them all.
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
                (false, false) => self.state.put_restored(key, meta, &data, more),
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

/// An error for a missing snapshot; the engine is unchanged.
fn gone(why: &str) -> Error {
    Error::not_found(why).reason(GONE)
}

/// The engine's reason for making no snapshot.
fn words(json: &[u8]) -> String {
    #[derive(Deserialize, Default)]
    struct Reply {
        #[serde(default)]
        message: String,
    }
    let mut message = serde_json::from_slice::<Reply>(json).unwrap_or_default().message;
    cut(&mut message, WORDS_BYTES);
    if message.is_empty() { "the engine made no snapshot".into() } else { message }
}
