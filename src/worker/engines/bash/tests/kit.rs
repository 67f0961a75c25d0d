//! An engine on a thread, with init's end of each channel.

use std::collections::{BTreeMap, VecDeque};
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::Value as Json;

use super::super::{Setup, serve};
use crate::link::frames::{Decoder, EndStatus, EntryMeta, Event, InterruptWay, Job, Missed, Reply, Request, encode};
use crate::sys::socket::send_with_fds;

/// Limit of every wait: longer means a hang.
const PATIENCE: Duration = Duration::from_secs(20);

/// The results of an execution.
#[derive(Debug, Default, Clone)]
pub struct Ran {
    pub status: Option<EndStatus>,
    pub code: i32,
    pub err: String,
    pub out: String,
    pub stderr: String,
    pub puts: Vec<String>,
    pub dels: Vec<String>,
    pub jobs: Option<Vec<Job>>,
    pub value: Option<Json>,
}

impl Ran {
    /// Asserts success and returns the output.
    pub fn good(&self) -> &str {
        assert_eq!((self.status, self.code), (Some(EndStatus::Done), 0), "{self:?}");
        assert_eq!(self.stderr, "", "{self:?}");
        &self.out
    }
}

pub struct Engine {
    pub socket: UnixStream,
    decoder: Decoder,
    events: VecDeque<(Event, Vec<u8>)>,
    pub stdout: std::io::PipeReader,
    pub stderr: std::io::PipeReader,
    thread: Option<JoinHandle<i32>>,
    next: u64,
    pub dir: tempfile::TempDir,
    /// The state as stored by init.
    pub entries: BTreeMap<String, (EntryMeta, Vec<u8>)>,
    partial: Option<String>,
    pub missed: Vec<Missed>,
    pub jobs: Vec<Job>,
    out: String,
    errs: String,
}

pub fn setup(dir: &tempfile::TempDir) -> Setup {
    let vars = [
        ("PATH", "/usr/local/bin:/usr/bin:/bin"),
        ("LANG", "C.UTF-8"),
        ("TMPDIR", "/tmp"),
        ("USER", "guest"),
        ("RYOKAN_KERNEL", "test"),
    ];
    let mut vars: Vec<(String, String)> = vars.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    vars.push(("HOME".into(), dir.path().to_string_lossy().into_owned()));
    Setup { argv: vec!["/bin/bash".into()], cwd: dir.path().to_owned(), vars }
}

impl Engine {
    pub fn start() -> Engine {
        let dir = tempfile::tempdir().expect("a folder");
        let setup = setup(&dir);
        Engine::start_with(dir, setup)
    }

    pub fn start_with(dir: tempfile::TempDir, setup: Setup) -> Engine {
        let (ours, theirs) = UnixStream::pair().expect("a socket pair");
        let (stdout, stdout_in) = std::io::pipe().expect("a pipe");
        let (stderr, stderr_in) = std::io::pipe().expect("a pipe");
        let thread = std::thread::spawn(move || serve(theirs.into(), stdout_in.into(), stderr_in.into(), setup));
        ours.set_read_timeout(Some(PATIENCE)).expect("sets");
        let mut engine = Engine {
            socket: ours,
            decoder: Decoder::default(),
            events: VecDeque::new(),
            stdout,
            stderr,
            thread: Some(thread),
            next: 1,
            dir,
            entries: BTreeMap::new(),
            partial: None,
            missed: Vec::new(),
            jobs: Vec::new(),
            out: String::new(),
            errs: String::new(),
        };
        let (ready, _) = engine.event();
        assert!(
            matches!(&ready, Event::Ready { engine, interrupt: InterruptWay::Frame, version } if engine == "bash" && version.starts_with(|c: char| c.is_ascii_digit())),
            "{ready:?}"
        );
        engine
    }

    /// Starts another engine with this one's saved state; also returns the entries that it could
    /// not restore.
    pub fn restored(&mut self) -> (Engine, Vec<Missed>) {
        let saved = self.save();
        let mut other = Engine::start();
        let missed = other.load(&saved);
        (other, missed)
    }

    pub fn save(&mut self) -> BTreeMap<String, (EntryMeta, Vec<u8>)> {
        self.entries.clear();
        let reply = self.ask(|id| Request::Save { id });
        assert!(reply.ok);
        self.entries.clone()
    }

    pub fn load(&mut self, entries: &BTreeMap<String, (EntryMeta, Vec<u8>)>) -> Vec<Missed> {
        let id = self.id();
        self.send(&Request::Load { id }, &[]);
        for (key, (meta, body)) in entries {
            if body.is_empty() {
                self.send(&Request::Entry { key: key.clone(), meta: meta.clone(), more: false }, &[]);
            }
            let mut chunks = body.chunks(1 << 20).peekable();
            while let Some(chunk) = chunks.next() {
                let more = chunks.peek().is_some();
                self.send(&Request::Entry { key: key.clone(), meta: meta.clone(), more }, chunk);
            }
        }
        self.entries = entries.clone();
        let reply = self.ask(|id| Request::Loaded { id });
        assert!(reply.ok, "{reply:?}");
        serde_json::from_value(reply.fields["missed"].clone()).expect("a list")
    }

    pub fn send(&mut self, request: &Request, tail: &[u8]) {
        let mut bytes = Vec::new();
        encode(request, tail, &mut bytes).expect("within limits");
        self.socket.write_all(&bytes).expect("the engine reads");
    }

    pub fn event(&mut self) -> (Event, Vec<u8>) {
        let until = std::time::Instant::now() + PATIENCE;
        loop {
            assert!(std::time::Instant::now() < until, "no event came; {:?} {:?}", self.out, self.errs);
            while let Some(event) = self.decoder.frame().expect("keeps the contract") {
                self.events.push_back(event);
            }
            if let Some((event, tail)) = self.events.pop_front() {
                self.note(&event, &tail);
                return (event, tail);
            }
            self.drain();
            let mut waiting =
                [nix::poll::PollFd::new(std::os::fd::AsFd::as_fd(&self.socket), nix::poll::PollFlags::POLLIN)];
            // Short, so that output is read in between.
            let _ = nix::poll::poll(&mut waiting, nix::poll::PollTimeout::from(5u8));
            if waiting[0].revents().is_none_or(|events| events.is_empty()) {
                continue;
            }
            let mut buffer = vec![0; 1 << 16];
            let n = match self.socket.read(&mut buffer) {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                read => read.expect("answers in time"),
            };
            assert!(n > 0, "the engine hung up");
            self.decoder.feed(&buffer[..n]);
        }
    }

    /// The next event within `time`.
    pub fn event_within(&mut self, time: Duration) -> Option<Event> {
        let until = std::time::Instant::now() + time;
        while std::time::Instant::now() < until {
            if !self.events.is_empty() {
                return Some(self.event().0);
            }
            let mut waiting =
                [nix::poll::PollFd::new(std::os::fd::AsFd::as_fd(&self.socket), nix::poll::PollFlags::POLLIN)];
            let _ = nix::poll::poll(&mut waiting, nix::poll::PollTimeout::from(10u8));
            if waiting[0].revents().is_some_and(|events| !events.is_empty()) {
                return Some(self.event().0);
            }
        }
        None
    }

    fn note(&mut self, event: &Event, tail: &[u8]) {
        match event {
            Event::Put { key, meta, more } => {
                let entry = self.entries.entry(key.clone()).or_default();
                if self.partial.take().as_ref() != Some(key) {
                    *entry = (meta.clone(), Vec::new());
                }
                entry.1.extend_from_slice(tail);
                self.partial = more.then(|| key.clone());
            }
            Event::Del { key } => {
                assert!(self.entries.remove(key).is_some(), "{key} was never there");
            }
            Event::Missed { entries } => self.missed.clone_from(entries),
            Event::Jobs { jobs } => self.jobs.clone_from(jobs),
            _ => {}
        }
    }

    pub fn id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub fn begin(&mut self, code: &str) -> u64 {
        self.resume_unjournalled(code, &[])
    }

    pub fn resume_unjournalled(&mut self, code: &str, env: &[(&str, &str)]) -> u64 {
        let id = self.id();
        let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        self.send(&Request::Exec { id, exec: id, code: code.into(), env, stdin: false }, &[]);
        id
    }

    pub fn begin_fed(&mut self, code: &str, stdin: OwnedFd) -> u64 {
        let id = self.id();
        let mut bytes = Vec::new();
        let request = Request::Exec { id, exec: id, code: code.into(), env: Vec::new(), stdin: true };
        encode(&request, &[], &mut bytes).expect("within limits");
        send_with_fds(&self.socket, &bytes, &[stdin.as_raw_fd()]).expect("sends");
        id
    }

    pub fn call(&mut self, name: &str, args: Json) -> Ran {
        let id = self.id();
        self.send(&Request::Call { id, exec: id, name: name.into(), args, env: Vec::new(), stdin: false }, &[]);
        self.end(id)
    }

    /// Reads everything up to the end of the execution.
    pub fn end(&mut self, wanted: u64) -> Ran {
        let mut ran = Ran::default();
        loop {
            match self.event().0 {
                Event::Put { key, more: false, .. } => ran.puts.push(key),
                Event::Del { key } => ran.dels.push(key),
                Event::Jobs { jobs } => ran.jobs = Some(jobs),
                Event::End { id, exec, status, code, err, value, .. } => {
                    assert_eq!((id, exec), (wanted, wanted));
                    self.drain();
                    ran.out = std::mem::take(&mut self.out);
                    ran.stderr = std::mem::take(&mut self.errs);
                    return Ran { status: Some(status), code, err, value, ..ran };
                }
                _ => {}
            }
        }
    }

    pub fn run(&mut self, code: &str) -> Ran {
        let id = self.begin(code);
        self.end(id)
    }

    /// Runs code that must succeed, and returns its output.
    pub fn out(&mut self, code: &str) -> String {
        self.run(code).good().to_owned()
    }

    pub fn interrupt(&mut self, exec: u64) {
        self.send(&Request::Interrupt { exec }, &[]);
    }

    pub fn ask(&mut self, request: impl FnOnce(u64) -> Request) -> Reply {
        let id = self.id();
        self.send(&request(id), &[]);
        loop {
            if let (Event::Reply(reply), _) = self.event() {
                assert_eq!(reply.id, id);
                return reply;
            }
        }
    }

    pub fn get(&mut self, name: &str) -> Json {
        let reply = self.ask(|id| Request::Get { id, name: name.into() });
        assert!(reply.ok, "{name}: {reply:?}");
        reply.fields["value"].clone()
    }

    /// Waits until the output contains `wanted`.
    pub fn until_out(&mut self, wanted: &str) {
        let until = std::time::Instant::now() + PATIENCE;
        while !self.out.contains(wanted) {
            assert!(std::time::Instant::now() < until, "{wanted:?} never came, but {:?} {:?}", self.out, self.errs);
            self.drain();
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn drain(&mut self) {
        self.out.push_str(&String::from_utf8_lossy(&drain(&mut self.stdout)));
        self.errs.push_str(&String::from_utf8_lossy(&drain(&mut self.stderr)));
    }

    pub fn has_missed(&self, key: &str) -> bool {
        self.missed.iter().any(|missed| missed.key == key)
    }

    /// Closes the socket and returns the engine's exit code.
    pub fn exit(mut self) -> i32 {
        self.socket.shutdown(std::net::Shutdown::Both).expect("shuts down");
        self.joined()
    }

    /// Joins the engine and returns its exit code.
    pub fn joined(&mut self) -> i32 {
        self.thread.take().expect("once").join().expect("serve never panics")
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.socket.shutdown(std::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn drain(pipe: &mut std::io::PipeReader) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut buffer = [0; 65536];
    loop {
        let waiting = crate::sys::process::unread(std::os::fd::AsFd::as_fd(pipe)).unwrap_or(0);
        if waiting == 0 {
            return bytes;
        }
        match pipe.read(&mut buffer) {
            Ok(n @ 1..) => bytes.extend_from_slice(&buffer[..n]),
            _ => return bytes,
        }
    }
}
