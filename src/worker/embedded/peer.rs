//! The connection to an embedded engine: requests out, replies and state entries in.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::io::IoSlice;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use serde_json::Value as Json;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::net::unix::pipe::Receiver;
use tokio::sync::{Mutex, oneshot};

use super::{Pipes, READ_BYTES, gone};
use crate::core::error::{Error, Result};
use crate::core::missed::MissedEntry;
use crate::core::state::StateEntry;
use crate::link::frames::{Decoder, EntryMeta, Event, Reply, ReplyHead, Request, encode};
use crate::worker::engines::kaish::{self, Setup};

/// The connection to the engine.
pub(super) struct Peer {
    socket: UnixStream,
    incoming: Mutex<Decoder>,
    outgoing: Mutex<()>,
    pub(super) next_id: Cell<u64>,
    waiting: RefCell<HashMap<u64, oneshot::Sender<Event>>>,
    pub(super) saved: RefCell<BTreeMap<String, StateEntry>>,
    pub(super) missed: RefCell<Vec<MissedEntry>>,
    pub(super) jobs: RefCell<Vec<crate::link::frames::Job>>,
    gone: Cell<bool>,
}

pub(super) fn connect(setup: Setup) -> std::io::Result<(Peer, Pipes)> {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
    let (stdout, stdout_in) = std::io::pipe()?;
    let (stderr, stderr_in) = std::io::pipe()?;
    ours.set_nonblocking(true)?;
    let peer = Peer {
        socket: UnixStream::from_std(ours)?,
        incoming: Mutex::default(),
        outgoing: Mutex::default(),
        next_id: Cell::new(1),
        waiting: RefCell::default(),
        saved: RefCell::default(),
        missed: RefCell::default(),
        jobs: RefCell::default(),
        gone: Cell::new(false),
    };
    let pipes =
        Pipes { stdout: Receiver::from_owned_fd(stdout.into())?, stderr: Receiver::from_owned_fd(stderr.into())? };
    std::thread::Builder::new()
        .name("embedded-kernel".into())
        .spawn(move || kaish::serve(theirs.into(), stdout_in.into(), stderr_in.into(), setup))?;
    Ok((peer, pipes))
}

impl Peer {
    pub(super) fn expect(&self) -> (u64, oneshot::Receiver<Event>) {
        let id = self.next_id.replace(self.next_id.get() + 1);
        let (sender, receiver) = oneshot::channel();
        self.waiting.borrow_mut().insert(id, sender);
        (id, receiver)
    }

    pub(super) async fn ready(&self) -> Result<()> {
        // `ready` has no id; it is registered as 0.
        let (sender, mut ready) = oneshot::channel();
        self.waiting.borrow_mut().insert(0, sender);
        while ready.try_recv().is_err() {
            self.receive().await?;
        }
        Ok(())
    }

    pub(super) async fn ask(&self, request: impl FnOnce(u64) -> Request) -> Result<Reply> {
        let (id, mut answer) = self.expect();
        self.send(&request(id), None).await?;
        loop {
            match answer.try_recv() {
                Ok(Event::Reply(reply)) if reply.ok => return Ok(reply),
                Ok(Event::Reply(reply)) => {
                    let Reply { ok, code, message, hint, .. } = reply;
                    return Err(ReplyHead { ok, code, message, hint }.into_error());
                }
                Ok(_) => return Err(Error::internal("the engine answered with something else")),
                Err(oneshot::error::TryRecvError::Closed) => return Err(gone()),
                Err(oneshot::error::TryRecvError::Empty) => self.receive().await?,
            }
        }
    }

    pub(super) async fn send(&self, request: &Request, descriptor: Option<OwnedFd>) -> Result<()> {
        self.send_with_tail(request, &[], descriptor).await
    }

    pub(super) async fn send_with_tail(
        &self,
        request: &Request,
        tail: &[u8],
        descriptor: Option<OwnedFd>,
    ) -> Result<()> {
        let mut bytes = Vec::new();
        encode(request, tail, &mut bytes).map_err(|error| Error::invalid(error.to_string()))?;
        // Partial writes of two frames must not interleave.
        let _outgoing = self.outgoing.lock().await;
        let mut sent = 0;
        let mut descriptor = descriptor;
        while sent < bytes.len() {
            let numbers: Vec<_> = descriptor.iter().map(AsRawFd::as_raw_fd).collect();
            let rights = [ControlMessage::ScmRights(&numbers)];
            let control = if numbers.is_empty() { &rights[..0] } else { &rights[..] };
            let now = self.socket.try_io(Interest::WRITABLE, || {
                let rest = [IoSlice::new(&bytes[sent..])];
                Ok(sendmsg::<()>(self.socket.as_raw_fd(), &rest, control, MsgFlags::MSG_NOSIGNAL, None)?)
            });
            match now {
                Ok(n) => {
                    sent += n;
                    descriptor = None;
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    self.socket.writable().await.map_err(|_| gone())?;
                }
                Err(_) => return Err(gone()),
            }
        }
        Ok(())
    }

    /// Reads from the engine at least once. Cancel safe.
    pub(super) async fn receive(&self) -> Result<()> {
        let mut decoder = self.incoming.lock().await;
        if self.gone.get() {
            return Err(gone());
        }
        self.socket.readable().await.map_err(|_| gone())?;
        let mut buffer = vec![0; READ_BYTES];
        match self.socket.try_read(&mut buffer) {
            Ok(0) => {
                self.gone.set(true);
                self.waiting.borrow_mut().clear();
                return Err(gone());
            }
            Ok(n) => decoder.feed(&buffer[..n]),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(()),
            Err(_) => return Err(gone()),
        }
        loop {
            match decoder.frame::<Event>() {
                Ok(Some((event, tail))) => self.take(event, tail),
                Ok(None) => return Ok(()),
                Err(error) => return Err(Error::internal(format!("the engine broke the contract: {error}"))),
            }
        }
    }

    fn take(&self, event: Event, tail: Vec<u8>) {
        match event {
            Event::Ready { .. } => self.answer(0, event),
            Event::End { id, .. } => self.answer(id, event),
            Event::Reply(ref reply) => self.answer(reply.id, event),
            Event::Put { key, meta, more } => self.put(key, meta, more, tail),
            Event::Del { key } => drop(self.saved.borrow_mut().remove(&key)),
            Event::Missed { entries } => {
                *self.missed.borrow_mut() = entries.into_iter().map(MissedEntry::from).collect();
            }
            Event::Jobs { jobs } => *self.jobs.borrow_mut() = jobs,
            // No dynamic tools are offered, so none is called; kaish has no other displays.
            Event::ToolCall { .. } | Event::Display { .. } | Event::Structured { .. } => {}
        }
    }

    fn answer(&self, id: u64, event: Event) {
        if let Some(waiting) = self.waiting.borrow_mut().remove(&id) {
            // The waiting future may have been dropped.
            let _ = waiting.send(event);
        }
    }

    /// Chunks of one entry with `more` arrive in sequence; the first has the metadata.
    fn put(&self, key: String, meta: EntryMeta, more: bool, tail: Vec<u8>) {
        const PARTIAL: &str = "\0partial";
        let mut saved = self.saved.borrow_mut();
        let meta = match serde_json::to_value(meta) {
            Ok(Json::Object(meta)) => meta,
            _ => serde_json::Map::new(),
        };
        let partial_key = format!("{key}{PARTIAL}");
        let mut entry = saved.remove(&partial_key).unwrap_or(StateEntry { meta, body: Vec::new() });
        entry.body.extend(tail);
        saved.insert(if more { partial_key } else { key }, entry);
    }
}
