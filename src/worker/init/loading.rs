//! Loading state into the engine: from `engine.db` at the worker's start, from the daemon for a
//! restore. Runs in init.
//!
//! A restore replaces `engine.db` in one transaction, after the engine has built the state; until
//! then the entries wait in a spool. If a step fails, the worker ends and `engine.db` keeps the
//! previous state.

use std::collections::VecDeque;

use serde::Deserialize;
use serde_json::json;
use tokio::time::Instant;

use super::engine_frames::EngineReady;
use super::requests::By;
use super::spool::Spool;
use super::{Life, PreparedEngine, Worker};
use crate::catalog::{Entry, EntryHead};
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::kernel::CrashCause;
use crate::core::limits;
use crate::core::missed::MissedEntry;
use crate::link::frames::{Missed, ReplyHead};
use crate::link::guest::Answer;
use crate::link::types::StateChunk;

/// Limit of queued frames to the engine beyond which a load waits, bytes.
const QUEUED_BYTES: usize = 4 << 20;

/// Progress of the start.
pub(super) struct Startup {
    /// Its deadline.
    pub until: Instant,
    phase: Phase,
}

enum Phase {
    AwaitReady,
    /// The engine is entering the kernel's workspace.
    Binding,
    Feeding(Feeding),
    AwaitLoaded,
}

/// Stored state on its way to the engine.
struct Feeding {
    heads: VecDeque<EntryHead>,
    /// The entry that is being sent, and its bytes sent so far.
    current: Option<(Entry, usize)>,
}

impl Startup {
    pub(super) fn awaiting_ready(until: Instant) -> Self {
        Startup { until, phase: Phase::AwaitReady }
    }

    pub(super) fn binding(until: Instant) -> Self {
        Startup { until, phase: Phase::Binding }
    }
}

/// A load in progress.
pub(super) struct Loading {
    spool: Spool,
    /// Answers held back until the engine has read more.
    held: VecDeque<Answer<()>>,
    /// The daemon's last entry has arrived.
    complete: bool,
}

impl Worker {
    /// Handles the engine's first frame.
    pub(super) fn on_engine_ready(&mut self, ready: EngineReady) -> std::result::Result<(), String> {
        if self.take_engine(ready)? {
            self.go_on_from_ready();
        }
        Ok(())
    }

    /// Begins with the engine that was prepared without a kernel, if it was: it enters the kernel's folder.
    pub(super) fn begin_prepared(&mut self) {
        let Some(PreparedEngine { ready, env }) = self.settings.prepared.take() else { return };
        match self.take_engine(ready) {
            Ok(true) => {
                let frame = json!({ "op": "enter", "env": env });
                // If it takes no request, it is being killed; that is reported elsewhere.
                let _ = self.ask(frame.to_string().as_bytes(), By::Enter);
            }
            Ok(false) => {}
            Err(why) => self.kill(CrashCause::Protocol(why)),
        }
    }

    /// Checks the engine's introduction; returns whether the start goes on.
    fn take_engine(&mut self, ready: EngineReady) -> std::result::Result<bool, String> {
        let Life::Starting(Startup { phase: Phase::AwaitReady, .. }) = &self.life else {
            return Err("it sent `ready` twice".into());
        };
        if ready.engine != self.settings.engine.name() {
            return Err(format!("it reports to be {:?}", ready.engine.chars().take(40).collect::<String>()));
        }
        let version: String = ready.version.chars().take(limits::IDENTIFIER_BYTES).collect();
        if let Some(why) = self.settings.engine.too_old(&version) {
            let engine = self.settings.engine;
            self.fail_start(
                Error::new(ErrorCode::Unsupported, why)
                    .hint(format!("install a newer one, or name it in engines.{engine}.command")),
            );
            return Ok(false);
        }
        self.engine = Some(EngineReady { version, ..ready });
        Ok(true)
    }

    /// Handles the engine's answer to `enter`.
    pub(super) fn on_entered(&mut self, ok: bool, json: &[u8]) -> std::result::Result<(), String> {
        match ok {
            true => self.go_on_from_ready(),
            false => self.fail_start(failure(json)),
        }
        Ok(())
    }

    fn go_on_from_ready(&mut self) {
        match self.settings.unbound {
            true => self.preload(),
            false => self.begin_state(),
        }
    }

    /// Sends the engine its stored state.
    pub(super) fn begin_state(&mut self) {
        let Some(EngineReady { engine, version, .. }) = &self.engine else { return };
        let opened = self.state.set_engine(engine, version).and_then(|()| {
            let jobs = self.state.take_lost_jobs()?;
            self.state.read_ended()?;
            Ok((jobs, self.state.heads()?))
        });
        match opened {
            Ok((jobs, heads)) => {
                self.report_missed();
                let lost = |job: crate::catalog::JobRecord| MissedEntry {
                    key: format!("job/{}", job.id),
                    type_name: "job".into(),
                    reason: format!("killed when the worker before this one ended: {}", job.command),
                };
                self.not_restored = jobs.into_iter().map(lost).collect();
                self.restored_entries = u32::try_from(heads.len()).unwrap_or(u32::MAX);
                self.set_phase(Phase::Feeding(Feeding { heads: heads.into(), current: None }));
                self.begin_feeding();
            }
            Err(error) => self.fail_start(error.into()),
        }
    }

    fn begin_feeding(&mut self) {
        match self.restored_entries {
            0 => self.serve(),
            _ => {
                let id = self.next_id();
                if let Err(why) = self.control.request(id, br#"{"op":"load"}"#, None) {
                    self.kill(CrashCause::Protocol(why));
                }
            }
        }
    }

    /// Sends more stored state while the engine reads.
    pub(super) fn feed_startup(&mut self) {
        while self.killed_for.is_none() && self.control.queued_bytes() < QUEUED_BYTES {
            let Life::Starting(Startup { phase: Phase::Feeding(feeding), .. }) = &mut self.life else { return };
            if let Some((entry, sent)) = feeding.current.take() {
                if let Err(why) = self.feed_piece(entry, sent) {
                    return self.kill(CrashCause::Protocol(why));
                }
                continue;
            }
            let Some(head) = feeding.heads.pop_front() else {
                self.set_phase(Phase::AwaitLoaded);
                let _ = self.ask(br#"{"op":"loaded"}"#, By::Startup);
                return;
            };
            match self.state.entry(&head.key) {
                Ok(entry) => feeding.current = entry.map(|entry| (entry, 0)),
                Err(error) => return self.fail_start(error.into()),
            }
        }
    }

    /// Sends one frame of an entry. A large entry takes many, as fast as the engine reads.
    fn feed_piece(&mut self, entry: Entry, sent: usize) -> std::result::Result<(), String> {
        let (data, more) = piece(&entry.body, sent);
        let end = sent + data.len();
        self.send_entry(&entry.key, entry.meta_json.as_bytes(), data, more)?;
        if let (true, Life::Starting(Startup { phase: Phase::Feeding(feeding), .. })) = (more, &mut self.life) {
            feeding.current = Some((entry, end));
        }
        Ok(())
    }

    fn set_phase(&mut self, next: Phase) {
        if let Life::Starting(startup) = &mut self.life {
            startup.phase = next;
        }
    }

    fn send_entry(&mut self, key: &str, meta: &[u8], data: &[u8], more: bool) -> std::result::Result<(), String> {
        let key = serde_json::to_string(key).map_err(|e| e.to_string())?;
        let mut json = format!("{{\"op\":\"entry\",\"key\":{key},\"more\":{more},\"meta\":").into_bytes();
        json.extend_from_slice(if meta.is_empty() { b"{}" } else { meta });
        json.push(b'}');
        self.control.send(&json, data, None)
    }

    /// The engine has built its state at the start.
    pub(super) fn on_started(&mut self, ok: bool, json: &[u8]) -> std::result::Result<(), String> {
        if !ok {
            self.fail_start(failure(json));
            return Ok(());
        }
        let missed = missed_of(json);
        self.not_restored.extend(missed);
        if let Err(error) = self.state.commit(None) {
            self.fail_start(error.into());
            return Ok(());
        }
        self.serve();
        Ok(())
    }

    /// Starts to answer calls.
    pub(super) fn serve(&mut self) {
        self.life = Life::Serving;
        self.first_words.clear();
        if self.outbox.connection().is_none() {
            self.orphan_at = Some(Instant::now() + self.settings.orphan_grace);
        }
        if let Some(bound) = self.bound.take() {
            let _ = bound.send(Ok(self.report()));
        }
        self.report_ready();
    }

    /// Reports to the daemon that the engine is ready; once.
    pub(super) fn report_ready(&mut self) {
        if let Some(tell) = self.on_ready.take() {
            tell(Ok(()));
        }
    }

    pub(super) fn load_begin(&mut self) -> Result<()> {
        self.check_idle()?;
        let spool = Spool::create(&self.settings.spool_folder)
            .map_err(|e| Error::internal(format!("no room to hold the state while it is loaded: {e}")))?;
        let id = self.next_id();
        if let Err(why) = self.control.request(id, br#"{"op":"load"}"#, None) {
            self.kill(CrashCause::Protocol(why));
            return Err(Error::lost("the engine does not take requests"));
        }
        // From here on the engine has no state: a load that is not completed ends the worker.
        self.loading = Some(Loading { spool, held: VecDeque::new(), complete: false });
        Ok(())
    }

    pub(super) fn load_entry(&mut self, chunk: &StateChunk, answer: Answer<()>) {
        let Some(loading) = self.loading.as_mut().filter(|loading| !loading.complete) else {
            let _ = answer.send(Err(Error::invalid("no load has begun")));
            return;
        };
        if chunk.data.len() > limits::FRAME_TAIL_BYTES {
            let _ = answer.send(Err(Error::invalid("a chunk of state is too large")));
            return self.break_load("a chunk of state is too large");
        }
        if let Err(error) = loading.spool.add(chunk) {
            let code = match error.kind() {
                std::io::ErrorKind::InvalidInput => ErrorCode::InvalidArgument,
                _ => ErrorCode::Busy,
            };
            let _ = answer.send(Err(Error::new(code, format!("state entry {:?}: {error}", chunk.key))));
            return self.break_load("the state to load could not be held");
        }
        if let Err(why) = self.send_entry(&chunk.key, &chunk.meta_json, &chunk.data, chunk.more) {
            let _ = answer.send(Err(Error::lost("the engine does not take its state")));
            return self.kill(CrashCause::Protocol(why));
        }
        match &mut self.loading {
            Some(loading) if self.control.queued_bytes() > QUEUED_BYTES => loading.held.push_back(answer),
            Some(_) | None => drop(answer.send(Ok(()))),
        }
    }

    /// Sends held answers once the engine has read enough.
    pub(super) fn release_load(&mut self) {
        let Some(loading) = &mut self.loading else { return };
        if self.control.queued_bytes() <= QUEUED_BYTES {
            for answer in loading.held.drain(..) {
                let _ = answer.send(Ok(()));
            }
        }
    }

    pub(super) fn load_end(&mut self, answer: Answer<Vec<u8>>) {
        match self.loading.as_mut().filter(|loading| !loading.complete) {
            Some(loading) => {
                loading.complete = true;
                let _ = self.ask(br#"{"op":"loaded"}"#, By::Load(answer));
            }
            None => drop(answer.send(Err(Error::invalid("no load has begun")))),
        }
    }

    /// Handles the engine's reply to a load.
    pub(super) fn on_loaded(&mut self, ok: bool, json: Vec<u8>, answer: Answer<Vec<u8>>) {
        let Some(loading) = self.loading.take() else { return };
        let replaced = match ok {
            true => self.state.replace(loading.spool).map_err(Error::from),
            false => Err(failure(&json)),
        };
        match replaced {
            Ok(()) => {
                self.start_watch();
                let _ = answer.send(Ok(missed_json(&json)));
            }
            Err(error) => {
                let _ = answer.send(Err(error));
                self.break_load("the state could not be loaded");
            }
        }
    }

    /// Ends a load that cannot be completed: the engine has half a state and must end.
    pub(super) fn break_load(&mut self, why: &str) {
        self.loading = None;
        self.kill(CrashCause::Protocol(why.to_owned()));
    }
}

/// The next bytes of a body for a frame, and whether more follow. An empty body is one empty frame.
fn piece(body: &[u8], sent: usize) -> (&[u8], bool) {
    let end = body.len().min(sent + limits::FRAME_TAIL_BYTES);
    (&body[sent..end], end < body.len())
}

/// The `missed` list of a reply, for the daemon.
pub(super) fn missed_json(reply: &[u8]) -> Vec<u8> {
    serde_json::to_vec(&json!({ "entries": missed_of(reply) })).unwrap_or_default()
}

pub(super) fn missed_of(json: &[u8]) -> Vec<MissedEntry> {
    #[derive(Deserialize, Default)]
    struct Reply {
        #[serde(default)]
        missed: Vec<Missed>,
    }
    let missed = serde_json::from_slice::<Reply>(json).unwrap_or_default().missed;
    missed.into_iter().map(MissedEntry::from).collect()
}

pub(super) fn failure(json: &[u8]) -> Error {
    let mut error = serde_json::from_slice::<ReplyHead>(json).unwrap_or_default().into_error();
    error.message = format!("the engine could not load its state: {}", error.message);
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_bodies_are_split() {
        let cut = |n: usize, sent: usize| {
            let body = vec![0; n];
            let (data, more) = piece(&body, sent);
            (data.len(), more)
        };
        let full = limits::FRAME_TAIL_BYTES;
        assert_eq!(cut(0, 0), (0, false));
        assert_eq!(cut(full, 0), (full, false));
        assert_eq!((cut(full + 1, 0), cut(full + 1, full)), ((full, true), (1, false)));
    }
}
