//! Processes beside the engine: one task for each, which delivers its output at its reader's pace
//! and ends its tree. Runs in init.
//!
//! ```text
//!  Running ── exit ──▶ the pipes' content, then the end ──▶ daemon
//!     └─ timeout, interrupt, stop, no daemon ──▶ the tree is killed ── exit ──▶ …
//! ```
//!
//! The end is that of the program, as with `docker exec`. What the program leaves running may hold
//! its pipes open; the end does not wait for it, and its later output is dropped.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;

use super::enclosure::{Exit, NotRun, ProcessProgram, ProcessStreams, ProcessTree, SandboxedProcess, TreeEnd};
use super::output::Pipes;
use super::stdin::Stdin;
use super::{Life, Worker};
use crate::core::error::{Error, Result};
use crate::core::exec::{CODE_KILLED, CODE_LOST, CODE_TIMEOUT, ExecStatus, Stream, TerminalSize};
use crate::core::ids::ExecId;
use crate::core::kernel::CrashCause;
use crate::core::limits;
use crate::link::guest::{Answer, Finish, ProcessSink, ProcessStart};
use crate::sys::pidfd;
use crate::sys::terminal;
use crate::sys::watched::{Watched, watch as watch_fd};
use crate::worker::engines;

/// Pause between two rounds of ending a tree.
const ROUND: Duration = Duration::from_millis(2);

/// Why a process is ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    /// A client or the daemon asked for it.
    Asked,
    /// Its time is over.
    Timeout,
}

/// A running process.
struct Handle {
    program: Rc<OwnedFd>,
    stdin: Option<Stdin>,
    terminal: Option<OwnedFd>,
    /// At most a few requests: the task takes them at once.
    end: mpsc::UnboundedSender<Why>,
}

/// The pauses of a worker: a process's timeout does not count them.
#[derive(Default)]
pub(super) struct Pauses {
    since: Cell<Option<Instant>>,
    total: Cell<Duration>,
    changed: Notify,
}

impl Pauses {
    pub(super) fn begin(&self) {
        self.since.set(Some(Instant::now()));
        self.changed.notify_waiters();
    }

    pub(super) fn end(&self) {
        if let Some(since) = self.since.take() {
            self.total.set(self.total.get() + since.elapsed());
        }
        self.changed.notify_waiters();
    }
}

/// A deadline that pauses move.
struct Timeout {
    at: Instant,
    /// The pauses before its start.
    paused: Duration,
    pauses: Rc<Pauses>,
}

impl Timeout {
    async fn reached(&self) {
        loop {
            let changed = self.pauses.changed.notified();
            if self.pauses.since.get().is_some() {
                changed.await;
                continue;
            }
            let at = self.at + (self.pauses.total.get() - self.paused);
            tokio::select! {
                () = tokio::time::sleep_until(at) => return,
                () = changed => {}
            }
        }
    }
}

/// The running processes.
pub(super) struct Processes {
    running: Rc<RefCell<BTreeMap<ExecId, Handle>>>,
    count: Rc<watch::Sender<usize>>,
    pub(super) pauses: Rc<Pauses>,
    /// Trees that do not end.
    pub(super) overrun: mpsc::UnboundedReceiver<ExecId>,
    overran: mpsc::UnboundedSender<ExecId>,
}

impl Default for Processes {
    fn default() -> Self {
        let (overran, overrun) = mpsc::unbounded_channel();
        Processes {
            running: Rc::default(),
            count: Rc::new(watch::Sender::new(0)),
            pauses: Rc::default(),
            overrun,
            overran,
        }
    }
}

impl Processes {
    /// Whether none runs.
    pub(super) fn is_empty(&self) -> bool {
        self.running.borrow().is_empty()
    }

    /// Whether that number is a running process.
    pub(super) fn has(&self, exec: ExecId) -> bool {
        self.running.borrow().contains_key(&exec)
    }

    /// Ends a process with its tree.
    pub(super) fn end(&self, exec: ExecId) {
        if let Some(handle) = self.running.borrow().get(&exec) {
            let _ = handle.end.send(Why::Asked);
        }
    }

    /// Ends all of them.
    pub(super) fn end_all(&self) {
        for handle in self.running.borrow().values() {
            let _ = handle.end.send(Why::Asked);
        }
    }

    /// Passes standard input.
    pub(super) fn stdin(&self, exec: ExecId, data: Vec<u8>, end: bool, answer: Answer<()>) {
        let running = self.running.borrow();
        match running.get(&exec).and_then(|handle| handle.stdin.as_ref()) {
            Some(stdin) => stdin.take(data, end, answer),
            None => drop(answer.send(Err(Error::not_found("this process has no standard input")))),
        }
    }

    /// Sends a signal to a process's program.
    pub(super) fn signal(&self, exec: ExecId, signal: i32) -> Result<()> {
        let signal = Signal::try_from(signal).map_err(|_| Error::invalid(format!("{signal} is no signal")))?;
        let running = self.running.borrow();
        let gone = || Error::not_found(format!("process {exec} does not run"));
        let handle = running.get(&exec).ok_or_else(gone)?;
        pidfd::signal(handle.program.as_fd(), signal).map_err(|_| gone())
    }

    /// Sets the size of a process's terminal.
    pub(super) fn resize(&self, exec: ExecId, size: TerminalSize) -> Result<()> {
        let running = self.running.borrow();
        let handle = running.get(&exec).ok_or_else(|| Error::not_found(format!("process {exec} does not run")))?;
        let none = || Error::not_found(format!("process {exec} has no terminal"));
        terminal::resize(handle.terminal.as_ref().ok_or_else(none)?, size.rows, size.columns).map_err(|_| none())
    }

    /// Ends all of them; answered when their ends were reported.
    pub(super) fn end_all_then(&self, answer: Answer<()>) {
        self.end_all();
        let mut count = self.count.subscribe();
        tokio::task::spawn_local(async move {
            // The sender outlives the wait, or the worker ends.
            let _ = count.wait_for(|count| *count == 0).await;
            let _ = answer.send(Ok(()));
        });
    }
}

impl Worker {
    /// Starts a program beside the engine.
    pub(super) fn spawn(&mut self, start: ProcessStart, sink: ProcessSink) -> Result<()> {
        let frozen = || Error::busy("the kernel is frozen or being restored").reason("frozen");
        match &self.life {
            Life::Serving if self.frozen || self.suspended || self.loading.is_some() || self.snapshots.is_waking() => {
                return Err(frozen());
            }
            Life::Serving => {}
            Life::Starting(_) | Life::Unbound => return Err(Error::busy("the worker is starting")),
            Life::Stopping(_) | Life::Leaving(_) => return Err(Error::unavailable("the worker is stopping")),
        }
        if self.processes.has(start.exec) || self.processes.running.borrow().len() >= limits::PROCESSES {
            return Err(Error::busy(format!("{} processes run already", limits::PROCESSES)).reason("processes"));
        }
        let internal = |error: std::io::Error| Error::internal(format!("no descriptor for a process: {error}"));
        let (mut stdin, read_end) = match start.has_stdin && start.terminal.is_none() {
            true => {
                let (stdin, read_end) = Stdin::open(Vec::new(), false).map_err(internal)?;
                (Some(stdin), Some(read_end))
            }
            false => (None, None),
        };
        // Before the program runs: what fails here leaves nothing behind.
        let files = if self.settings.sync_files { Some(self.enclosure.open_workspace()?) } else { None };
        let ProcessStart { exec, argv, env, cwd, has_stdin, timeout_ms, terminal } = start;
        let env = engines::common_environment(self.settings.venv.as_deref()).into_iter().chain(env).collect();
        let process = self.enclosure.spawn_process(ProcessProgram { argv, env, cwd, terminal }, read_end)?;
        let SandboxedProcess { tree, pidfd, starting, exit, streams } = process;
        let watched = || -> std::io::Result<_> {
            let starting = watch_fd(starting, Interest::READABLE)?;
            let exit = watch_fd(exit, Interest::READABLE)?;
            let (pipes, terminal) = match streams {
                ProcessStreams::Pipes { stdout, stderr } => (Pipes::new(stdout, stderr)?, None),
                ProcessStreams::Terminal(terminal) => {
                    if has_stdin {
                        stdin = Some(Stdin::to(terminal.try_clone()?, Vec::new(), false)?);
                    }
                    let sized = terminal.try_clone()?;
                    (Pipes::of_terminal(terminal)?, Some(sized))
                }
            };
            Ok((starting, exit, pipes, terminal))
        };
        let overran = self.processes.overran.clone();
        let (starting, exit, pipes, terminal) = match watched() {
            Ok(watched) => watched,
            Err(error) => {
                // The program runs already, and nothing would report its end.
                let _ = pidfd::signal(pidfd.as_fd(), Signal::SIGKILL);
                tokio::task::spawn_local(async move { end_tree(&tree, exec, &overran).await });
                return Err(internal(error));
            }
        };
        let (end, ends) = mpsc::unbounded_channel();
        let program = Rc::new(pidfd);
        let started = Instant::now();
        let pauses = Rc::clone(&self.processes.pauses);
        let task = Process {
            exec,
            tree,
            program: Rc::clone(&program),
            starting: Some(starting),
            exit,
            pipes,
            sink,
            ends,
            started,
            timeout_ms,
            timeout: (timeout_ms > 0)
                .then(|| started.checked_add(Duration::from_millis(timeout_ms)))
                .flatten()
                .map(|at| Timeout { at, paused: pauses.total.get(), pauses }),
            written: 0,
            why: None,
            overran,
        };
        self.processes.running.borrow_mut().insert(exec, Handle { program, stdin, terminal, end });
        self.processes.count.send_modify(|count| *count += 1);
        self.start_watch();
        let (running, count) = (Rc::clone(&self.processes.running), Rc::clone(&self.processes.count));
        tokio::task::spawn_local(async move {
            let sink = task.sink.clone();
            let finish = task.run(files).await;
            // Its number is free for no other process: it needs no place in the limit while it is reported.
            running.borrow_mut().remove(&exec);
            let _ = tokio::time::timeout(limits::PROCESS_REPORT, sink.ended(&finish)).await;
            count.send_modify(|count| *count -= 1);
        });
        Ok(())
    }

    /// Kills the engine with a tree that cannot be ended alone.
    pub(super) fn poll_processes(&mut self, cx: &mut std::task::Context<'_>) -> bool {
        let mut progressed = false;
        while let std::task::Poll::Ready(Some(exec)) = self.processes.overrun.poll_recv(cx) {
            tracing::warn!(%exec, "the processes of a killed tree multiply");
            self.kill(CrashCause::Unresponsive);
            progressed = true;
        }
        progressed
    }
}

/// The task of one process.
struct Process {
    exec: ExecId,
    tree: ProcessTree,
    program: Rc<OwnedFd>,
    /// Until it is known whether the program runs.
    starting: Option<AsyncFd<Watched>>,
    exit: AsyncFd<Watched>,
    pipes: Pipes,
    sink: ProcessSink,
    ends: mpsc::UnboundedReceiver<Why>,
    started: Instant,
    timeout_ms: u64,
    timeout: Option<Timeout>,
    /// Bytes of both streams so far.
    written: u64,
    /// Why it is being ended.
    why: Option<Why>,
    overran: mpsc::UnboundedSender<ExecId>,
}

/// Ends the whole tree; reports one that does not end.
async fn end_tree(tree: &ProcessTree, exec: ExecId, overran: &mpsc::UnboundedSender<ExecId>) {
    let overdue = Instant::now() + limits::PROCESS_KILL;
    let mut is_reported = false;
    loop {
        let end = tree.end();
        if end == TreeEnd::Gone {
            return;
        }
        if end == TreeEnd::Killed && !is_reported && Instant::now() > overdue {
            is_reported = overran.send(exec).is_ok();
        }
        tokio::time::sleep(ROUND).await;
    }
}

/// Something that happened to a process.
enum Happened {
    Output(Stream, Vec<u8>),
    Started(Result<(), NotRun>),
    Exited(Option<Exit>),
    End(Why),
}

impl Process {
    async fn run(mut self, files: Option<OwnedFd>) -> Finish {
        let (exit, not_run) = loop {
            match self.next().await {
                Happened::Output(stream, data) => self.deliver(stream, data).await,
                Happened::Started(Ok(())) => self.starting = None,
                Happened::Started(Err(not_run)) => break (None, Some(not_run)),
                Happened::Exited(exit) => break (exit, self.read_not_run()),
                Happened::End(why) => {
                    self.why = Some(why);
                    self.end_tree().await;
                    break (self.exited().await, None);
                }
            }
        };
        if exit.is_none() {
            // Its supervisor is gone: nothing else would end it.
            let _ = pidfd::signal(self.program.as_fd(), Signal::SIGKILL);
        }
        let mut finish = self.finish(exit, not_run);
        self.deliver_rest().await;
        finish.output_bytes = self.written;
        if let Some(Err(error)) = files.map(nix::unistd::syncfs)
            && finish.err.is_empty()
        {
            finish.err = format!("the files of this process could not be written to the disk: {error}");
        }
        finish
    }

    async fn exited(&self) -> Option<Exit> {
        let read = self.exit.async_io(Interest::READABLE, |exit| SandboxedProcess::read_exit(exit.as_fd()));
        read.await.unwrap_or_default()
    }

    async fn next(&mut self) -> Happened {
        let Process { pipes, starting, exit, ends, timeout, .. } = self;
        let output = std::future::poll_fn(|cx| pipes.poll_read(cx).map(|(stream, data)| (stream, data.to_vec())));
        let is_starting = starting.is_some();
        let start = async {
            match starting {
                Some(starting) => {
                    let read = |socket: &Watched| SandboxedProcess::read_start(socket.as_fd());
                    starting.async_io(Interest::READABLE, read).await.unwrap_or(Ok(()))
                }
                None => std::future::pending().await,
            }
        };
        let exited = exit.async_io(Interest::READABLE, |exit| SandboxedProcess::read_exit(exit.as_fd()));
        let clock = async {
            match timeout {
                Some(timeout) => timeout.reached().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            Some(why) = ends.recv() => Happened::End(why),
            () = clock => Happened::End(Why::Timeout),
            started = start, if is_starting => Happened::Started(started),
            // Before output: what the program left running may write without end.
            exit = exited => Happened::Exited(exit.unwrap_or_default()),
            (stream, data) = output => Happened::Output(stream, data),
        }
    }

    /// Sends output, and waits until there is room for more. An order to end the process ends the wait.
    async fn deliver(&mut self, stream: Stream, data: Vec<u8>) {
        for piece in data.chunks(limits::CHUNK_BYTES) {
            let sent = self.sink.output(self.written, stream, piece);
            self.written += piece.len() as u64;
            let clock = async {
                match self.timeout.as_ref().filter(|_| self.why.is_none()) {
                    Some(timeout) => timeout.reached().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                works = sent => {
                    if !works {
                        // The daemon is gone.
                        self.why.get_or_insert(Why::Asked);
                        self.end_tree().await;
                        return;
                    }
                }
                Some(why) = self.ends.recv() => {
                    self.why.get_or_insert(why);
                    self.end_tree().await;
                    return;
                }
                () = clock => {
                    self.why.get_or_insert(Why::Timeout);
                    self.end_tree().await;
                    return;
                }
            }
        }
    }

    /// Delivers what the pipes hold.
    async fn deliver_rest(&mut self) {
        let mut rest = Vec::new();
        self.pipes.drain(|stream, data| rest.push((stream, data.to_vec())));
        for (stream, data) in rest {
            if !data.is_empty() {
                self.deliver(stream, data).await;
            }
        }
    }

    async fn end_tree(&self) {
        end_tree(&self.tree, self.exec, &self.overran).await;
    }

    /// The program may have failed to run in the moment in which its process ended.
    fn read_not_run(&self) -> Option<NotRun> {
        let starting = self.starting.as_ref()?;
        SandboxedProcess::read_start(starting.get_ref().as_fd()).ok()?.err()
    }

    fn finish(&self, exit: Option<Exit>, not_run: Option<NotRun>) -> Finish {
        let (status, code, err) = match (self.why, not_run, exit) {
            (Some(Why::Timeout), ..) => {
                (ExecStatus::Timeout, CODE_TIMEOUT, format!("timed out after {} ms", self.timeout_ms))
            }
            (Some(Why::Asked), ..) => (ExecStatus::Interrupted, CODE_KILLED, "it was ended with its tree".into()),
            (None, Some(not_run), _) => (ExecStatus::Refused, not_run.code, not_run.why),
            (None, None, Some(Exit::Status(0))) => (ExecStatus::Done, 0, String::new()),
            (None, None, Some(Exit::Status(status))) => (ExecStatus::Failed, status, String::new()),
            (None, None, Some(exit @ Exit::Signal(signal))) => {
                let name = Signal::try_from(signal).map_or_else(|_| signal.to_string(), |signal| signal.to_string());
                (ExecStatus::Failed, exit.code(), format!("ended by {name}"))
            }
            (None, None, None) => (ExecStatus::Lost, CODE_LOST, "every process of the kernel was ended".into()),
        };
        Finish {
            status,
            code,
            err,
            frame_json: Vec::new(),
            duration_us: u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX),
            output_bytes: self.written,
            last: false,
        }
    }
}
