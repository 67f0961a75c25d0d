//! Answers the daemon's requests, one at a time.

use std::io::{self, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nix::time::{ClockId, clock_gettime, clock_settime};

use super::files::Files;
use super::port::{Port, Tail};
use super::start::Starting;
use super::watches::Watches;
use super::{DATA, KERNEL, Machine, identity, mount_disk, start};
use crate::catalog::{Durability, EngineDb, EngineInfo, Entry as StateEntry};
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::link::machine::{self, Head, Reply, Request};
use crate::link::mirror::{Entry, Sink as _, Source as _, Tree};

/// Entries in one answer, at most.
const PAGE: usize = 2000;
/// Bytes of paths or metadata in one answer, at most.
const PAGE_BYTES: usize = 512 << 10;
/// The engine's state in the kernel's folder.
const STATE: &str = "engine.db";

/// The control port's server.
pub(super) struct Control {
    machine: Arc<Machine>,
    /// The workspace, once the disk is mounted.
    tree: Option<Tree>,
    /// The same for changes of clients.
    files: Option<Files>,
    watches: Option<Watches>,
    /// The worker that waits for its kernel's folder.
    prepared: Option<Starting>,
    listed: Vec<Entry>,
    heads: Vec<Head>,
    put: Vec<StateEntry>,
    put_bytes: u64,
}

impl Control {
    pub(super) fn new(machine: Arc<Machine>) -> Control {
        let (listed, heads, put) = (Vec::new(), Vec::new(), Vec::new());
        Control { machine, tree: None, files: None, watches: None, prepared: None, listed, heads, put, put_bytes: 0 }
    }

    fn tree(&mut self) -> Result<&mut Tree> {
        self.tree.as_mut().ok_or_else(not_mounted)
    }

    fn mount(&mut self) -> io::Result<()> {
        if self.tree.is_none() {
            mount_disk()?;
            self.tree = Some(Tree::open(&Path::new(KERNEL).join("workspace"), false)?);
            let files = Files::new(Path::new(KERNEL));
            self.watches = Some(Watches::new(files.local()));
            self.files = Some(files);
        }
        Ok(())
    }

    /// Serves one connection after the other, until the port is over.
    pub(super) fn run(&mut self, port: &Port) {
        let mut last = Vec::new();
        while let Some(nonce) = port.await_hello(std::mem::take(&mut last)) {
            self.put.clear();
            self.put_bytes = 0;
            self.files.iter_mut().for_each(Files::discard_all);
            self.watches.iter_mut().for_each(Watches::end_all);
            if (&*port).write_all(&machine::ready(nonce)).is_err() {
                continue;
            }
            let mut asked = Tail { port, last: Vec::new() };
            while let Ok((request, body)) = machine::read::<Request>(&mut asked) {
                self.machine.is_used.store(true, Ordering::Release);
                let (reply, data) = match self.answer(request, body) {
                    Ok(answer) => answer,
                    Err(error) => (Reply::Failed(error), Vec::new()),
                };
                if machine::write(&mut &*port, &reply, &data).is_err() {
                    break;
                }
            }
            last = asked.last;
        }
    }

    fn answer(&mut self, request: Request, body: Vec<u8>) -> Result<(Reply, Vec<u8>)> {
        let done = |done: io::Result<()>| match done {
            Ok(()) => Ok((Reply::Done, Vec::new())),
            Err(error) => Err(failed(&error)),
        };
        match request {
            Request::Seed { entropy, now_ns, renew } => {
                let (boot_id, now_ns) = seed(&entropy, now_ns, renew).map_err(|error| failed(&error))?;
                Ok((Reply::Seeded { boot_id, now_ns, level: machine::LEVEL }, Vec::new()))
            }
            Request::WarmUp { program, arguments } => done(warm_up(&program, &arguments)),
            Request::Mount => done(self.mount()),
            Request::Prepare => {
                self.check_no_worker()?;
                self.prepared = Some(start::prepare(&body)?);
                Ok((Reply::Done, Vec::new()))
            }
            Request::Start => match self.prepared.take() {
                Some(prepared) => Ok((Reply::Started(prepared.assign(&self.machine, &body)?), Vec::new())),
                None => {
                    self.check_no_worker()?;
                    Ok((Reply::Started(start::start(&self.machine, &body)?), Vec::new()))
                }
            },
            Request::List { from } => {
                if from == 0 {
                    self.listed = self.tree()?.list_all().map_err(|error| failed(&error))?;
                }
                let (entries, more) = page(&self.listed, from, |entry| entry.path.len() + entry.target.len());
                Ok((Reply::Entries { entries, more }, Vec::new()))
            }
            Request::Read { path, offset } => match self.tree()?.read(&path, offset) {
                Ok(data) => Ok((Reply::Done, data)),
                Err(error) => match error.raw_os_error() {
                    Some(libc::ENOENT | libc::ENOTDIR | libc::ELOOP) => Ok((Reply::Gone, Vec::new())),
                    None if error.kind() == io::ErrorKind::NotFound => Ok((Reply::Gone, Vec::new())),
                    _ => Err(failed(&error)),
                },
            },
            Request::Remove { path } => done(self.tree()?.remove(&path)),
            Request::Folder { path } => done(self.tree()?.folder(&path)),
            Request::Link { path, target } => done(self.tree()?.link(&path, &target)),
            Request::Write { path, offset } => done(self.tree()?.write(&path, offset, &body)),
            Request::Finish { entry } => done(self.tree()?.finish(&entry)),
            Request::StateHeads { from } => self.state_heads(from),
            Request::StateBody { key, offset } => {
                let found = database()?.piece(&key, offset)?;
                let (_, data) = found.ok_or_else(|| Error::not_found("there is no state entry of that key"))?;
                Ok((Reply::Done, data))
            }
            Request::StatePut { key, meta_json } => self.state_put(key, meta_json, body),
            Request::StateCommit { engine: (name, version, format) } => {
                let (info, entries) = (EngineInfo { name, version, format }, std::mem::take(&mut self.put));
                self.put_bytes = 0;
                let folder = Path::new(KERNEL);
                match self.machine.init.load(Ordering::Acquire) {
                    0 => store_state(&folder.join(STATE), &info, entries)?,
                    _ => exchange_state(folder, &info, entries)?,
                }
                Ok((Reply::Done, Vec::new()))
            }
            Request::Files(request) => {
                let files = self.files.as_mut().ok_or_else(not_mounted)?;
                Ok((files.answer(request, &body)?, Vec::new()))
            }
            Request::Watch(request) => self.watches.as_mut().ok_or_else(not_mounted)?.answer(request),
            Request::Sync => done(std::fs::File::open(DATA).and_then(|disk| Ok(nix::unistd::syncfs(disk)?))),
        }
    }

    fn check_no_worker(&self) -> Result<()> {
        match (self.machine.init.load(Ordering::Acquire), &self.prepared) {
            (0, None) => Ok(()),
            _ => Err(Error::refused("the machine has a worker already")),
        }
    }

    fn state_heads(&mut self, from: usize) -> Result<(Reply, Vec<u8>)> {
        let mut engine = None;
        if from == 0 {
            let db = database()?;
            engine = db.info()?.map(|info| (info.name, info.version, info.format));
            let heads = db.heads()?.into_iter().map(|head| Head {
                key: head.key,
                meta_json: head.meta_json,
                size: head.size,
                digest: *head.digest.as_bytes(),
            });
            self.heads = heads.collect();
        }
        let (heads, more) = page(&self.heads, from, |head| head.key.len() + head.meta_json.len());
        Ok((Reply::Heads { engine, heads, more }, Vec::new()))
    }

    fn state_put(&mut self, key: String, meta_json: String, body: Vec<u8>) -> Result<(Reply, Vec<u8>)> {
        self.put_bytes += body.len() as u64;
        if self.put_bytes > limits::STATE_BYTES || self.put.len() > limits::STATE_ENTRIES {
            return Err(Error::invalid("the engine's state is too large"));
        }
        match self.put.last_mut().filter(|last| last.key == key) {
            Some(last) => last.body.extend_from_slice(&body),
            None => self.put.push(StateEntry { key, meta_json, body }),
        }
        Ok((Reply::Done, Vec::new()))
    }
}

fn not_mounted() -> Error {
    Error::refused("the machine's disk is not mounted")
}

/// The kernel's engine state; no worker may have it open.
fn database() -> Result<EngineDb> {
    Ok(EngineDb::open(&Path::new(KERNEL).join(STATE), Durability::Power)?)
}

fn store_state(path: &Path, info: &EngineInfo, entries: Vec<StateEntry>) -> Result<()> {
    let db = EngineDb::open(path, Durability::Power)?;
    db.replace_all(info, entries.into_iter().map(Ok), &[])?;
    Ok(db.close()?)
}

/// Puts a database with these entries in the place of the one that a warm worker has open. The worker opens it when it is
/// bound.
fn exchange_state(folder: &Path, info: &EngineInfo, entries: Vec<StateEntry>) -> Result<()> {
    let (arrived, current) = (folder.join("arrived.db"), folder.join(STATE));
    // The log of another file would be applied to this one.
    let discard_log = |path: &Path| match std::fs::remove_file(path.with_extension("db-wal")) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(&error)),
        _ => Ok(()),
    };
    match std::fs::remove_file(&arrived) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(&error)),
        _ => discard_log(&arrived)?,
    }
    store_state(&arrived, info, entries)?;
    discard_log(&current)?;
    std::fs::rename(&arrived, &current).map_err(|error| failed(&error))?;
    std::fs::File::open(folder).and_then(|folder| folder.sync_all()).map_err(|error| failed(&error))
}

fn page<T: Clone>(all: &[T], from: usize, bytes_of: impl Fn(&T) -> usize) -> (Vec<T>, bool) {
    let rest = all.get(from..).unwrap_or_default();
    let mut bytes = 0;
    let fits = |item: &&T| {
        bytes += bytes_of(item);
        bytes <= PAGE_BYTES
    };
    let count = rest.iter().take(PAGE).take_while(fits).count().max(usize::from(!rest.is_empty()));
    (rest[..count].to_vec(), count < rest.len())
}

fn failed(error: &io::Error) -> Error {
    match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => Error::busy("the virtual machine's disk is full"),
        _ => Error::internal(format!("in the guest: {error}")),
    }
}

/// Returns the guest's boot id and clock.
fn seed(entropy: &[u8; 32], now_ns: i64, renew: bool) -> io::Result<(String, i64)> {
    crate::sys::random::seed(entropy)?;
    let time = nix::sys::time::TimeSpec::new(now_ns.div_euclid(1_000_000_000), now_ns.rem_euclid(1_000_000_000));
    clock_settime(ClockId::CLOCK_REALTIME, time)?;
    let now = clock_gettime(ClockId::CLOCK_REALTIME)?;
    let boot_id = identity::identify(renew)?;
    Ok((boot_id, now.tv_sec() * 1_000_000_000 + now.tv_nsec()))
}

/// Starts an interpreter and waits for its end, which closes its output: the loop that reaps takes its status.
fn warm_up(program: &str, arguments: &[String]) -> io::Result<()> {
    let mut command = Command::new(program);
    command.args(arguments).env_clear().stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn()?;
    match child.stdout.take() {
        Some(mut output) => io::copy(&mut output, &mut io::sink()).map(drop),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::time::Duration;

    use super::*;

    #[test]
    fn closed_connection_makes_room() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let (channel, address) = super::super::port::tests::listener(folder.path())?;
        std::thread::spawn(move || {
            let mut control = Control::new(Arc::default());
            channel.serve(|port| control.run(port));
        });
        let connect = |nonce| {
            let mut host = std::os::unix::net::UnixStream::connect(&address)?;
            host.set_read_timeout(Some(Duration::from_secs(20)))?;
            host.write_all(&machine::hello(nonce))?;
            Ok::<_, io::Error>(host)
        };
        // Closed before and after the answer, and in a request; the last one waits meanwhile.
        let answered = |host: &mut std::os::unix::net::UnixStream, nonce| {
            let mut echo = [0; machine::HELLO_BYTES];
            host.read_exact(&mut echo)?;
            assert_eq!(echo, machine::ready(nonce));
            Ok::<_, io::Error>(())
        };
        drop(connect([1; 16])?);
        let mut second = connect([2; 16])?;
        answered(&mut second, [2; 16])?;
        let mut third = connect([3; 16])?;
        second.write_all(&[7, 0, 0])?;
        drop(second);
        answered(&mut third, [3; 16])?;
        machine::write(&mut third, &Request::List { from: 0 }, &[])?;
        let (reply, _) = machine::read::<Reply>(&mut third)?;
        assert!(matches!(reply, Reply::Failed(_)), "it is not mounted");
        Ok(())
    }

    #[test]
    fn exchanged_state_has_its_own_log() -> Result<()> {
        let folder = tempfile::tempdir().map_err(|error| failed(&error))?;
        let info = |version: &str| EngineInfo { name: "python".into(), version: version.into(), format: 1 };
        // As the warm worker has it: what it wrote is in the log only.
        let path = folder.path().join(STATE);
        let open = EngineDb::open(&path, Durability::Process)?;
        open.set_info(&info("of the warm worker"))?;
        assert!(path.with_extension("db-wal").exists());
        let entry = StateEntry { key: "x".into(), meta_json: "{}".into(), body: b"41".to_vec() };
        exchange_state(folder.path(), &info("of the kernel"), vec![entry])?;
        let read = || {
            let db = EngineDb::open(&path, Durability::Process)?;
            let found = (db.info()?.map(|info| info.version), db.heads()?.len());
            db.close()?;
            Ok::<_, Error>(found)
        };
        let expected = (Some("of the kernel".to_owned()), 1);
        assert_eq!(read()?, expected);
        // The former connection ends later.
        open.discard();
        assert_eq!(read()?, expected);
        let left: Vec<_> = std::fs::read_dir(folder.path()).into_iter().flatten().flatten().collect();
        assert_eq!(left.len(), 1, "{left:?}");
        Ok(())
    }

    #[test]
    fn unnoticed_reconnection_is_answered() -> io::Result<()> {
        let (port, mut host) = super::super::port::tests::port()?;
        // Serves until the test's process ends.
        std::thread::spawn(move || Control::new(Arc::default()).run(&port));
        host.set_read_timeout(Some(Duration::from_secs(20)))?;
        for nonce in [[1; 16], [2; 16]] {
            host.write_all(&machine::hello(nonce))?;
            let mut echo = [0; machine::HELLO_BYTES];
            host.read_exact(&mut echo)?;
            assert_eq!(echo, machine::ready(nonce));
            machine::write(&mut host, &Request::List { from: 0 }, &[])?;
            let (reply, _) = machine::read::<Reply>(&mut host)?;
            assert!(matches!(reply, Reply::Failed(_)), "it is not mounted");
        }
        Ok(())
    }
}
