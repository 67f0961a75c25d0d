//! Input of a running cell: requests of its code, questions to the front end, answers.
//!
//! ```text
//!  input() ── display of a private type ──▶ request ── input_request ──▶ front end ── input_reply ──▶ relay ── a line ──▶ stdin
//! ```
//! Code can forge a request, as it can call `input`. A line reaches the code at most once: where that is unknown, the
//! input ends.

use std::cell::Cell;
use std::convert::Infallible;
use std::time::Duration;

use serde_json::{Value as Json, json};
use tokio::sync::{Mutex, Notify};

use super::message::Signer;
use super::session::Session;
use super::zmtp::{Router, Sender};
use crate::core::error::ErrorCode;
use crate::core::exec::OutputEvent;

/// The type of a display that requests a line.
const REQUEST: &str = "application/vnd.ryokan.input+json";
/// Pause before the end of the input is reported to a new daemon.
const RETRY: Duration = Duration::from_millis(250);

/// The front end of a cell.
pub struct Asker {
    /// Its routing id.
    pub front_end: Vec<u8>,
    /// Whether it answers requests for input.
    pub allows: bool,
}

/// The channel for input.
pub struct Input {
    sender: Sender,
    router: Mutex<Router>,
    /// The number of the newest request of this cell: after a reconnection earlier ones come again.
    newest: Cell<u64>,
    /// Whether an answer is outstanding.
    is_open: Cell<bool>,
    /// Notified if no front end can be asked.
    ends: Notify,
}

/// The number of a request for input, if an event is one.
pub fn requested(event: &OutputEvent) -> Option<u64> {
    match event {
        OutputEvent::Display { mime, data } if mime == REQUEST => {
            let request: Json = serde_json::from_slice(data).ok()?;
            Some(request["number"].as_u64().unwrap_or(0))
        }
        _ => None,
    }
}

impl Input {
    /// Serves the channel.
    pub fn new(router: Router) -> Input {
        Input {
            sender: router.sender.clone(),
            router: Mutex::new(router),
            newest: Cell::new(0),
            is_open: Cell::new(false),
            ends: Notify::new(),
        }
    }

    /// Prepares for a cell.
    pub fn begin(&self) {
        self.newest.set(0);
        self.is_open.set(false);
    }

    /// Asks the front end for a line.
    pub async fn request(&self, signer: &Signer, parent: &Json, asker: &Asker, number: u64) {
        if number <= self.newest.replace(number.max(self.newest.get())) {
            return;
        }
        match self.sender.find(&asker.front_end).filter(|_| asker.allows) {
            Some(peer) => {
                self.is_open.set(true);
                // The code has printed its prompt.
                let content = json!({ "prompt": "", "password": false });
                self.sender.send(peer, signer.write(Vec::new(), "input_request", parent, &content)).await;
            }
            None => self.ends.notify_one(),
        }
    }

    /// Passes answers to the running cell.
    pub async fn relay(&self, signer: &Signer, session: &Session<'_>) -> Infallible {
        let mut router = self.router.lock().await;
        loop {
            let line = tokio::select! {
                received = router.recv() => {
                    let reply = received.and_then(|(_, frames)| signer.read(frames));
                    match reply.filter(|reply| reply.kind() == "input_reply" && self.is_open.replace(false)) {
                        Some(reply) => reply.content["value"].as_str().map(str::to_owned),
                        // Late, forged, or of another kind.
                        None => continue,
                    }
                }
                () = self.ends.notified() => None,
            };
            let mut passed = session.answer(line.as_deref()).await;
            while passed.is_err_and(|error| error.code == ErrorCode::Unavailable) {
                tokio::time::sleep(RETRY).await;
                passed = session.answer(None).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_private_displays_request_input() {
        let display = |mime: &str, data: &[u8]| OutputEvent::Display { mime: mime.into(), data: data.to_vec() };
        assert_eq!(requested(&display(REQUEST, br#"{"number": 7}"#)), Some(7));
        assert_eq!(requested(&display(REQUEST, b"{}")), Some(0), "never newer than another");
        assert_eq!(requested(&display(REQUEST, b"no")), None);
        assert_eq!(requested(&display("application/json", br#"{"number": 7}"#)), None);
        assert_eq!(requested(&OutputEvent::Stdout(b"x".to_vec())), None);
    }
}
