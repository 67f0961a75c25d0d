//! Requests to the engine other than executions, and their replies. Runs in init.

use std::os::fd::OwnedFd;

use tokio::time::Instant;

use super::{Life, Worker};
use crate::core::error::{Error, Result};
use crate::core::ids::ExecId;
use crate::core::kernel::CrashCause;
use crate::core::limits;
use crate::link::guest::{Answer, Report};

/// An open request.
pub(super) struct Asked {
    /// Its origin.
    pub by: By,
    /// Its deadline.
    pub until: Instant,
}

/// The origin of a request.
pub(super) enum By {
    /// The daemon, which receives the `reply` frame unchanged.
    Daemon(Answer<Vec<u8>>),
    /// The worker's start: loading the state.
    Startup,
    /// A load by the daemon.
    Load(Answer<Vec<u8>>),
    /// A stop: saving the state.
    Stop,
    /// A forked snapshot of the engine.
    Keep,
    /// Binding a warm worker.
    Bind,
    /// Preloading modules in a warm worker.
    Preload,
    /// Entering the folder of a worker that was prepared without one.
    Enter,
    /// Seeding the generators of a copied engine.
    Reseed(Answer<Report>),
}

impl By {
    /// Notifies the origin, if it waits, that there will be no answer.
    fn fail(self, error: &Error) {
        match self {
            By::Daemon(answer) | By::Load(answer) => drop(answer.send(Err(error.clone()))),
            By::Reseed(answer) => drop(answer.send(Err(error.clone()))),
            By::Startup | By::Stop | By::Keep | By::Bind | By::Preload | By::Enter => {}
        }
    }
}

impl Worker {
    pub(super) fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// Forwards a request of the daemon.
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
    /// If the engine takes no more. It is being killed then, and the origin is notified.
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
            by.fail(&lost);
            return Err(lost);
        }
        self.asked.insert(id, Asked { by, until: Instant::now() + limits::ENGINE_ANSWER });
        Ok(())
    }

    /// Handles a reply, after storing the state changes that preceded it.
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
            By::Enter => self.on_entered(ok, &json),
            By::Bind => {
                self.on_bound(ok, &json);
                Ok(())
            }
            By::Reseed(answer) => {
                self.on_reseeded(ok, &json, answer);
                Ok(())
            }
            By::Stop => {
                let refused =
                    || Error::unavailable(format!("the engine could not save: {}", String::from_utf8_lossy(&json)));
                let stored = self.store().and_then(|()| if ok { Ok(()) } else { Err(refused()) });
                let since = self.state.unsaved_since();
                self.on_saved(stored.map_err(|error| unsaved(error, since)));
                Ok(())
            }
        }
    }

    /// Stores state changes from outside an execution. Those of a running execution wait for its
    /// end.
    fn store(&mut self) -> Result<()> {
        match self.run {
            Some(_) => Ok(()),
            None => self.state.commit(None).map_err(Error::from),
        }
    }

    /// Answers every open request: the engine is gone.
    pub(super) fn fail_requests(&mut self, error: &Error) {
        for (_, asked) in self.asked.drain() {
            asked.by.fail(error);
        }
        self.forget_snapshots(error);
    }

    /// Whether calls are taken from the queue; only once the worker serves.
    pub(super) fn takes_calls(&self) -> bool {
        !matches!(self.life, Life::Starting(_))
    }
}

/// The error for changes that a stop could not save: what they are, and why.
fn unsaved(error: Error, since: Option<ExecId>) -> Error {
    let since = match since {
        Some(exec) => format!("in execution {exec} and after it"),
        None => "after the last execution".into(),
    };
    let message = format!("variables and functions that changed {since} ({})", error.message);
    Error { message, ..error }
}
