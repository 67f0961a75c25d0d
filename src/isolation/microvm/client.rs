//! The daemon's end of a machine's ports. Every wait has a deadline; a reply is data of a guest, never trusted.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use futures::AsyncWriteExt as _;
use futures::io::AsyncReadExt as _;

use super::guest_error::of_guest;
use super::halt::Halt;
use super::held_write::{HeldWrite, Stop};
use super::sockets::Address;
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::link::connector::unix::channel;
use crate::link::connector::{Channel, Connector, DescriptorNote};
use crate::link::machine::{self, HELLO_BYTES, Reply, Request};
use crate::link::mirror::{Entry, MOST_ENTRIES, Sink, Source};
use crate::sys::random;

/// Time for the echo of the first hello; twice as long for each further one, as a guest of a busy host needs.
const HELLO_WAIT: Duration = Duration::from_millis(1500);
/// Time for the monitor to notice that the former connection closed, and the guest after it.
const HELLO_PAUSE: Duration = Duration::from_millis(150);
/// Bytes of an earlier connection that may precede the echo.
const STALE_BYTES: usize = 16 << 20;

/// A blocking connection to a machine's control port.
pub(super) struct Client {
    address: Address,
    stream: Option<UnixStream>,
    /// When the present transfer ends at the latest.
    until: Option<Instant>,
    is_over: bool,
    /// What the guest understands, once it has reported it.
    level: Option<u32>,
    /// Whether the guest answers nothing until its host has room.
    halt: Halt,
}

impl Client {
    pub(super) fn new(address: Address) -> Client {
        Client { address, stream: None, until: None, is_over: false, level: None, halt: Halt::default() }
    }

    /// Connects from now on to another machine, which starts in place of one that failed.
    pub(super) fn redirect(&mut self, address: Address) {
        (self.address, self.stream, self.level) = (address, None, None);
    }

    /// Bounds all further requests together, until another bound is set.
    pub(super) fn bound(&mut self, until: Option<Instant>) {
        self.until = until;
    }

    /// Ends the connection for good: every further request fails.
    pub(super) fn end(&mut self) {
        self.stream = None;
        self.is_over = true;
    }

    /// The end of what may take `within`.
    fn deadline(&self, within: Duration) -> Instant {
        let own = Instant::now() + within;
        self.until.map_or(own, |until| until.min(own))
    }

    /// Connects to a machine that boots: it answers the first hello as soon as it can.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub(super) fn open_booting(&mut self, within: Duration) -> Result<()> {
        self.connect(within, within)
    }

    /// Connects, again and again until `within` has passed. A guest that goes on may lose a hello with an earlier
    /// connection.
    ///
    /// # Errors
    /// `deadline`; `unavailable` at once if the monitor has ended.
    pub(super) fn open(&mut self, within: Duration) -> Result<()> {
        self.connect(within, HELLO_WAIT)
    }

    fn connect(&mut self, within: Duration, first_wait: Duration) -> Result<()> {
        if self.is_over {
            return Err(Error::unavailable("the virtual machine has ended"));
        }
        let (until, mut wait) = (self.deadline(within), first_wait);
        loop {
            let failed = match hello(&self.address, until.min(Instant::now() + wait)) {
                Ok(stream) => {
                    self.stream = Some(stream);
                    return Ok(());
                }
                // A monitor listens before its machine runs.
                Err(failed) if has_ended(&failed) => {
                    return Err(Error::unavailable(format!("the virtual machine has ended: {failed}")));
                }
                Err(failed) => failed,
            };
            if Instant::now() >= until {
                return Err(Error::deadline(format!("the virtual machine does not answer: {failed}")));
            }
            wait *= 2;
            std::thread::sleep(HELLO_PAUSE);
        }
    }

    /// Moves the connection, and ends this one.
    pub(super) fn take(&mut self) -> Client {
        let (address, stream) = (self.address.clone(), self.stream.take());
        let (is_over, level, halt) = (self.is_over, self.level, self.halt.clone());
        let taken = Client { address, stream, until: None, is_over, level, halt };
        self.is_over = true;
        taken
    }

    /// Whether the machine is halted.
    pub(super) fn halt(&self) -> Halt {
        self.halt.clone()
    }

    /// What the guest understands; `None` before it has reported it.
    pub(super) fn level(&self) -> Option<u32> {
        self.level
    }

    /// Sends a request and waits for its reply. Connects first if needed.
    ///
    /// # Errors
    /// The guest's, as far as a guest is trusted; `deadline` and `unavailable` for a guest that does not answer.
    pub(super) fn call(&mut self, request: &Request, body: &[u8], within: Duration) -> Result<(Reply, Vec<u8>)> {
        match self.ask(request, body, within)? {
            (Reply::Failed(error), _) => Err(of_guest(&error)),
            answer => Ok(answer),
        }
    }

    /// As [`Self::call`]; the guest's own errors are replies, with whatever it says.
    ///
    /// # Errors
    /// `busy` with the reason `disk_full` for a halted machine; `deadline` and `unavailable` for a guest that does not
    /// answer.
    pub(super) fn ask(&mut self, request: &Request, body: &[u8], within: Duration) -> Result<(Reply, Vec<u8>)> {
        self.halt.check()?;
        if self.stream.is_none() {
            self.open(limits::VM_CALL)?;
        }
        let until = self.deadline(within);
        let Some(stream) = &self.stream else { return Err(Error::internal("the connection is gone")) };
        let mut bounded = Bounded { stream, until };
        let answered = machine::write(&mut bounded, request, body).and_then(|()| machine::read::<Reply>(&mut bounded));
        match answered {
            Ok(answer) => {
                if let (Reply::Seeded { level, .. }, _) = &answer {
                    self.level = Some(*level);
                }
                Ok(answer)
            }
            Err(error) => {
                self.stream = None;
                Err(match error.kind() {
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                        Error::deadline("the virtual machine does not answer in time")
                    }
                    io::ErrorKind::InvalidData => Error::unavailable(format!("the guest's answer is invalid: {error}")),
                    _ => Error::unavailable(format!("the virtual machine cannot be reached: {error}")),
                })
            }
        }
    }

    /// Sends a request that has no result.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub(super) fn tell(&mut self, request: &Request, body: &[u8]) -> Result<()> {
        match self.call(request, body, limits::VM_CALL)?.0 {
            Reply::Done => Ok(()),
            _ => Err(unexpected()),
        }
    }
}

pub(super) fn unexpected() -> Error {
    Error::unavailable("the guest gave another answer than was asked for")
}

/// Whether the error of connecting says that the monitor has ended.
fn has_ended(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound)
}

/// A stream whose reads and writes end together at a time, however slowly the guest sends and receives.
struct Bounded<'s> {
    stream: &'s UnixStream,
    until: Instant,
}

impl Bounded<'_> {
    fn left(&self) -> io::Result<Option<Duration>> {
        match self.until.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
            left => Ok(Some(left)),
        }
    }
}

impl io::Read for Bounded<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(into)
    }
}

impl io::Write for Bounded<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn hello(address: &Address, until: Instant) -> io::Result<UnixStream> {
    let stream = address.connect_blocking(until)?;
    let mut bounded = Bounded { stream: &stream, until };
    let nonce = random::bytes();
    bounded.write_all(&machine::hello(nonce))?;
    let (ready, mut last, mut stale) = (machine::ready(nonce), Vec::new(), 0);
    while stale < STALE_BYTES {
        // One byte at a time once the echo may have begun: what follows it belongs to the connection.
        let mut bytes = [0; HELLO_BYTES];
        let want = HELLO_BYTES - overlap(&last, &ready);
        let count = bounded.read(&mut bytes[..want])?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        stale += count;
        last.extend_from_slice(&bytes[..count]);
        if last.ends_with(&ready) {
            return Ok(stream);
        }
        let surplus = last.len().saturating_sub(HELLO_BYTES);
        last.drain(..surplus);
    }
    Err(io::ErrorKind::TimedOut.into())
}

/// Length of the longest beginning of `ready` with which `bytes` end.
fn overlap(bytes: &[u8], ready: &[u8]) -> usize {
    (0..=bytes.len().min(ready.len() - 1)).rev().find(|n| bytes.ends_with(&ready[..*n])).unwrap_or(0)
}

/// Connects to a worker in a machine, through its link port.
pub(super) struct PortConnector {
    pub address: Address,
    /// Whether the machine stands still: what is sent then waits.
    pub stop: Stop,
}

#[async_trait::async_trait(?Send)]
impl Connector for PortConnector {
    async fn connect(&self) -> io::Result<Channel> {
        let mut wait = HELLO_WAIT;
        loop {
            match tokio::time::timeout(wait, self.try_connect()).await {
                Ok(Ok(channel)) => return Ok(channel),
                Ok(Err(error)) if has_ended(&error) => return Err(error),
                // The caller bounds the attempts.
                Ok(Err(_)) => {}
                Err(_) => wait *= 2,
            }
            tokio::time::sleep(HELLO_PAUSE).await;
        }
    }

    async fn pass_descriptor(&self, _: DescriptorNote, _: std::os::fd::OwnedFd) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn passes_descriptors(&self) -> bool {
        false
    }

    fn attach_deadline(&self) -> Duration {
        limits::VM_CALL
    }
}

impl PortConnector {
    async fn try_connect(&self) -> io::Result<Channel> {
        let mut channel = channel(self.address.connect().await?)?;
        let nonce = random::bytes();
        channel.write.write_all(&machine::hello(nonce)).await?;
        let (ready, mut last) = (machine::ready(nonce), Vec::new());
        loop {
            let mut bytes = [0; HELLO_BYTES];
            let want = HELLO_BYTES - overlap(&last, &ready);
            let count = channel.read.read(&mut bytes[..want]).await?;
            if count == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            last.extend_from_slice(&bytes[..count]);
            if last.ends_with(&ready) {
                channel.write = Box::new(HeldWrite::new(channel.write, self.stop.clone()));
                return Ok(channel);
            }
            let surplus = last.len().saturating_sub(HELLO_BYTES);
            last.drain(..surplus);
        }
    }
}

fn as_io(error: Error) -> io::Error {
    io::Error::other(error)
}

/// The error within an I/O error of a transfer.
pub(super) fn from_io(error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::QuotaExceeded => {
            Error::refused(error.to_string()).reason("workspace_size").hint("remove files in the kernel")
        }
        io::ErrorKind::StorageFull => Error::busy("no room for the files of a virtual machine on this host"),
        _ => match error.downcast::<Error>() {
            Ok(ours) => ours,
            Err(error) => Error::internal(format!("the files of a virtual machine: {error}")),
        },
    }
}

impl Source for Client {
    fn list(&mut self) -> io::Result<Vec<Entry>> {
        let (mut all, mut bytes) = (Vec::new(), 0);
        loop {
            let (reply, _) = self.call(&Request::List { from: all.len() }, &[], limits::VM_CALL).map_err(as_io)?;
            let Reply::Entries { entries, more } = reply else { return Err(as_io(unexpected())) };
            let is_empty = entries.is_empty();
            bytes += entries.iter().map(|entry| entry.path.len() + entry.target.len()).sum::<usize>();
            all.extend(entries);
            if all.len() > MOST_ENTRIES || bytes > limits::VM_LIST_BYTES || (more && is_empty) {
                return Err(as_io(Error::refused("the workspace of the virtual machine has too many files")));
            }
            if !more {
                return Ok(all);
            }
        }
    }

    fn read(&mut self, path: &str, offset: u64) -> io::Result<Vec<u8>> {
        let request = Request::Read { path: path.to_owned(), offset };
        match self.call(&request, &[], limits::VM_CALL).map_err(as_io)? {
            (Reply::Done, data) => Ok(data),
            (Reply::Gone, _) => Err(io::ErrorKind::NotFound.into()),
            _ => Err(as_io(unexpected())),
        }
    }
}

impl Sink for Client {
    fn list(&mut self) -> io::Result<Vec<Entry>> {
        Source::list(self)
    }

    fn remove(&mut self, path: &str) -> io::Result<()> {
        self.tell(&Request::Remove { path: path.to_owned() }, &[]).map_err(as_io)
    }

    fn folder(&mut self, path: &str) -> io::Result<()> {
        self.tell(&Request::Folder { path: path.to_owned() }, &[]).map_err(as_io)
    }

    fn link(&mut self, path: &str, target: &str) -> io::Result<()> {
        self.tell(&Request::Link { path: path.to_owned(), target: target.to_owned() }, &[]).map_err(as_io)
    }

    fn write(&mut self, path: &str, offset: u64, data: &[u8]) -> io::Result<()> {
        self.tell(&Request::Write { path: path.to_owned(), offset }, data).map_err(as_io)
    }

    fn finish(&mut self, entry: &Entry) -> io::Result<()> {
        self.tell(&Request::Finish { entry: entry.clone() }, &[]).map_err(as_io)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::error::ErrorCode;

    #[test]
    fn ended_machine_fails_at_once() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let (refuses, missing) = (folder.path().join("s"), folder.path().join("none"));
        drop(crate::link::connector::unix::listen(&refuses)?);
        for socket in [refuses, missing] {
            let began = Instant::now();
            let failed = Client::new(Address::Socket(socket)).call(&Request::Sync, &[], limits::VM_CALL).err();
            assert_eq!(failed.map(|error| error.code), Some(ErrorCode::Unavailable));
            assert!(began.elapsed() < limits::VM_CALL / 3, "{:?}", began.elapsed());
        }
        Ok(())
    }

    #[test]
    fn slow_answers_end_in_time() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let socket = folder.path().join("s");
        let listener = std::os::unix::net::UnixListener::bind(&socket)?;
        let guest = std::thread::spawn(move || -> io::Result<()> {
            let (mut stream, _) = listener.accept()?;
            let mut bytes = [0; HELLO_BYTES];
            stream.read_exact(&mut bytes)?;
            let nonce = machine::nonce_of(&bytes).ok_or(io::ErrorKind::InvalidData)?;
            stream.write_all(&machine::ready(nonce))?;
            // The header of the largest answer, which arrives byte by byte.
            let header = [(4u32 << 20).to_le_bytes(), 0u32.to_le_bytes()].concat();
            for byte in header.into_iter().chain(std::iter::repeat(b' ')) {
                stream.write_all(&[byte])?;
                std::thread::sleep(Duration::from_millis(20));
            }
            Ok(())
        });
        let (mut client, began) = (Client::new(Address::Socket(socket)), Instant::now());
        client.bound(Some(began + Duration::from_millis(500)));
        let failed = Source::read(&mut client, "f", 0).map_err(from_io).err();
        assert_eq!(failed.map(|error| error.code), Some(ErrorCode::Deadline));
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
        drop(client);
        assert!(guest.join().is_ok_and(|sent| sent.is_err()), "the connection was closed");
        Ok(())
    }
}
