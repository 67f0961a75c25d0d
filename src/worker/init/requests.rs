//! Requests to the engine other than executions, and their replies.

use std::os::fd::OwnedFd;

use tokio::time::Instant;

use super::{Life, Worker};
use crate::core::error::{Error, Result};
use crate::core::kernel::CrashCause;
use crate::core::limits;
use crate::link::guest::Answer;

/// A request that the engine has not answered.
pub(super) struct Asked {
    /// For whom.
    pub by: By,
    /// The engine must have answered by then.
    pub until: Instant,
}

/// Who waits for a reply.
pub(super) enum By {
    /// The daemon: the `reply` frame goes to it as it is.
    Daemon(Answer<Vec<u8>>),
    /// The start of the worker: its state is loaded.
    Startup,
    /// A load that the daemon asked for.
    Load(Answer<Vec<u8>>),
    /// A stop: the state is saved.
    Stop,
    /// A copy of the engine that is being made.
    Keep,
    /// A slot that got its kernel.
    Bind,
    /// A slot that loads ahead.
    Preload,
}

impl Worker {
    pub(super) fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// Passes a request of the daemon on.
    pub(super) fn request(&mut self, json: &[u8], answer: Answer<Vec<u8>>) {
        let free = self.check_idle().and_then(|()| match self.asked.len() < limits::ENGINE_REQUESTS {
            true => Ok(()),
            false => Err(Error::busy("too many requests at once")),
        });
        match free {
            Ok(()) => {
                if let Err(refused) = self.ask(json, By::Daemon(answer)) {
                    tracing::debug!(%refused, "a request did not go out");
                }
            }
            Err(error) => drop(answer.send(Err(error))),
        }
    }

    /// Sends a request frame without `id`.
    ///
    /// # Errors
    /// If the engine takes no more; it is being killed then, and whoever waited learns of it.
    pub(super) fn ask(&mut self, json: &[u8], by: By) -> Result<()> {
        self.ask_with(json, None, by)
    }

    /// As [`Self::ask`], with a descriptor.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub(super) fn ask_with(&mut self, json: &[u8], descriptor: Option<OwnedFd>, by: By) -> Result<()> {
        let id = self.next_id();
        if let Err(why) = self.control.request(id, json, descriptor) {
            self.kill(CrashCause::Protocol(why));
            let lost = Error::lost("the engine does not take requests");
            if let By::Daemon(answer) | By::Load(answer) = by {
                let _ = answer.send(Err(lost.clone()));
            }
            return Err(lost);
        }
        self.asked.insert(id, Asked { by, until: Instant::now() + limits::ENGINE_ANSWER });
        Ok(())
    }

    /// A reply: state changes that came before it are stored first.
    pub(super) fn on_reply(&mut self, id: u64, ok: bool, json: Vec<u8>) -> Result<(), String> {
        let asked = self.asked.remove(&id).ok_or_else(|| format!("reply to request {id}, which is not open"))?;
        match asked.by {
            By::Daemon(answer) => {
                let stored = self.store();
                let _ = answer.send(stored.map(|()| json));
                Ok(())
            }
            By::Startup => self.on_started(ok, &json),
            By::Load(answer) => {
                self.on_loaded(ok, json, answer);
                Ok(())
            }
            By::Keep => {
                self.on_snapshot_made(ok, &json);
                Ok(())
            }
            By::Preload => self.on_preloaded(ok, &json),
            By::Bind => {
                self.on_bound(ok, &json);
                Ok(())
            }
            By::Stop => {
                let refused =
                    || Error::unavailable(format!("the engine could not save: {}", String::from_utf8_lossy(&json)));
                let stored = self.store().and_then(|()| if ok { Ok(()) } else { Err(refused()) });
                self.on_saved(stored);
                Ok(())
            }
        }
    }

    /// Stores the changes that came outside an execution. Those of a running one wait for its end.
    fn store(&mut self) -> Result<()> {
        match self.run {
            Some(_) => Ok(()),
            None => self.state.commit(None).map_err(Error::from),
        }
    }

    /// Whoever waits for the engine learns that it is gone.
    pub(super) fn fail_requests(&mut self, error: &Error) {
        for (_, asked) in self.asked.drain() {
            if let By::Daemon(answer) | By::Load(answer) = asked.by {
                let _ = answer.send(Err(error.clone()));
            }
        }
        self.forget_snapshots(error);
    }

    /// Whether calls are taken from the queue: not before the worker serves.
    pub(super) fn takes_calls(&self) -> bool {
        !matches!(self.life, Life::Starting(_))
    }
}
