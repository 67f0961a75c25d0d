//! A worker in a machine's template: its engine has started, and it waits for a kernel's folder and its own identity. Runs
//! in init, before the secret is read and the runtime exists.
//!
//! ```text
//!  engine: ready, preload ─▶ report ─ saved, restored ─▶ folder, assignment, secret ─▶ engine: enter ─▶ load, or preload
//! ```
//!
//! Anything unexpected ends the worker: there is no second try in the same machine.

use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Instant;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::engine_frames::{self, EngineEvent, EngineReady};
use super::entry::internal;
use super::sandboxed::Sandboxed;
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::link::bootstrap::Assignment;
use crate::link::frames::{self, Decoder, Request};
use crate::sys::socket::receive_with_fds;

/// The number of the only request here; those of the worker begin with 1.
const REQUEST: u64 = 0;

/// What a prepared worker has waited for.
pub(super) struct Assigned {
    pub assignment: Assignment,
    /// The kernel's folder, as init sees it.
    pub folder: PathBuf,
}

/// Waits for the engine, and makes it take the steps of a first execution. It is idle afterwards, and sends nothing.
///
/// # Errors
/// If it ends, is late, or sends anything else.
pub(super) fn rehearse(engine: &UnixStream) -> Result<EngineReady> {
    let mut decoder = Decoder::default();
    let ready = match receive(engine, &mut decoder)? {
        EngineEvent::Ready(ready) => ready,
        other => return Err(unexpected(&other)),
    };
    let (mut frame, mut to) = (Vec::new(), engine);
    frames::encode(&Request::Preload { id: REQUEST, modules: Vec::new() }, &[], &mut frame)
        .map_err(internal("encode a request"))?;
    // A few bytes into an empty buffer.
    to.write_all(&frame).map_err(internal("write to the engine"))?;
    match receive(engine, &mut decoder)? {
        EngineEvent::Reply { id: REQUEST, ok: true } => Ok(ready),
        EngineEvent::Reply { id: REQUEST, ok: false } => {
            Err(Error::internal("the engine cannot rehearse an execution"))
        }
        other => Err(unexpected(&other)),
    }
}

/// Waits without a deadline for the kernel's folder and the assignment, and moves the sandbox into the folder. The secret is
/// still to be read.
///
/// # Errors
/// If the input ends, or the folder cannot be mounted.
pub(super) fn await_assignment(input: &mut File, enclosure: &mut Sandboxed) -> Result<Assigned> {
    let (count, mut folders) = receive_with_fds(&*input, &mut [0]).map_err(internal("read its assignment"))?;
    let (1, Some(tree)) = (count, folders.pop()) else {
        return Err(Error::invalid("no folder comes with the assignment"));
    };
    let assignment = Assignment::read(input).map_err(internal("read its assignment"))?;
    let (path, hostname) = (assignment.kernel_dir.clone(), assignment.hostname.clone());
    let folder = enclosure.take_folder((tree, path), hostname, assignment.unbound)?;
    Ok(Assigned { assignment, folder })
}

/// The engine's next event.
fn receive(engine: &UnixStream, decoder: &mut Decoder) -> Result<EngineEvent> {
    let (deadline, mut scratch, mut from) = (Instant::now() + limits::WORKER_START, [0; 4 << 10], engine);
    loop {
        if let Some((json, _)) = decoder.raw_frame().map_err(internal("understand the engine"))? {
            return engine_frames::read(json).map_err(internal("understand the engine"));
        }
        await_data(engine, deadline)?;
        match from.read(&mut scratch) {
            Ok(0) => return Err(Error::lost("the engine ended before it was ready")),
            Ok(count) => decoder.feed(&scratch[..count]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => return Err(internal("read from the engine")(error)),
        }
    }
}

fn await_data(engine: &UnixStream, deadline: Instant) -> Result<()> {
    let left = deadline.saturating_duration_since(Instant::now());
    let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
    match poll(&mut [PollFd::new(engine.as_fd(), PollFlags::POLLIN)], timeout) {
        Ok(0) => Err(Error::deadline(format!("the engine was not ready within {} s", limits::WORKER_START.as_secs()))),
        Ok(_) | Err(Errno::EINTR) => Ok(()),
        Err(error) => Err(internal("wait for the engine")(error)),
    }
}

fn unexpected(event: &EngineEvent) -> Error {
    Error::internal(format!("the engine sent {} while it was prepared", event.name()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const READY: &[u8] = br#"{"ev":"ready","engine":"python","version":"3.11.2","interrupt":"signal"}"#;

    /// The outcome with an engine that sends `first`, reads a request, and sends `second`.
    fn rehearsed(first: &'static [u8], second: &'static [u8]) -> (Result<EngineReady>, String) {
        let (ours, theirs) = UnixStream::pair().expect("a socket pair");
        ours.set_nonblocking(true).expect("set");
        let engine = std::thread::spawn(move || {
            let (mut socket, mut asked) = (&theirs, [0; 200]);
            let mut send = |json: &[u8]| {
                let mut frame = Vec::new();
                frames::encode_raw(json, &[], &mut frame).expect("encodes");
                // In two pieces.
                socket.write_all(&frame[..9]).and_then(|()| socket.write_all(&frame[9..]))
            };
            send(first).expect("sent");
            let count = (&theirs).read(&mut asked).unwrap_or(0);
            if count > 0 && !second.is_empty() {
                send(second).expect("sent");
            }
            String::from_utf8_lossy(&asked[8.min(count)..count]).into_owned()
        });
        let outcome = rehearse(&ours);
        drop(ours);
        (outcome, engine.join().expect("it ends"))
    }

    #[test]
    fn prepared_engine_has_rehearsed() {
        let (ready, asked) = rehearsed(READY, br#"{"ev":"reply","id":0,"ok":true,"missed":[]}"#);
        assert_eq!(ready.expect("prepared").version, "3.11.2");
        assert_eq!(asked, r#"{"op":"preload","id":0,"modules":[]}"#);
    }

    #[test]
    fn unprepared_engine_is_refused() {
        for (first, second) in [
            (&br#"{"ev":"reply","id":0,"ok":true}"#[..], &b""[..]),
            (br#"{"ev":"nope"}"#, b""),
            (READY, b""),
            (READY, READY),
            (READY, br#"{"ev":"reply","id":1,"ok":true}"#),
            (READY, br#"{"ev":"reply","id":0,"ok":false,"code":"internal","message":"no"}"#),
        ] {
            let (outcome, _) = rehearsed(first, second);
            assert!(outcome.is_err(), "{:?}", String::from_utf8_lossy(second));
        }
    }
}
