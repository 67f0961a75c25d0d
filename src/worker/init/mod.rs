//! Init: PID 1 of the worker, trusted, between the daemon and the untrusted engine.
//!
//! ```text
//!  daemon ◀─ private socket ─▶ listener ─ WorkerCall ─▶ Worker ◀─ control socket, pipes ─▶ engine
//!                                ▲                        │ outbox ── output, ends, tool calls
//!                                └────────────────────────┘ state ─── engine.db, before an end is reported
//! ```
//!
//! One task ([`Worker`]) owns everything. Each poll takes one item from every source and then
//! settles. Handlers never block. Every action of the engine costs bounded memory; a contract
//! violation ends it with a cause.
//!
//! ```text
//!  Starting ──▶ Serving ──▶ Stopping ──▶ Leaving ──▶ (exit)
//!     │  ▲         └── engine gone ──────▶ Leaving
//!     │  └─ bound ── Unbound (a warm worker)
//!     └── failed ──────────────────────────────────▶ (exit)
//! ```

mod binding;
mod calls;
mod control;
pub mod enclosure;
mod ending;
mod engine_frames;
pub mod entry;
mod events;
mod exec_channel;
mod executions;
mod forked_snapshots;
mod ledger;
pub mod listener;
mod loading;
mod outbox;
mod output;
mod ports;
mod prepared;
mod processes;
mod requests;
pub mod sandboxed;
mod spool;
mod state;
mod stdin;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::FutureExt;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tokio::time::{Instant, Sleep};

use self::control::Control;
use self::enclosure::{Enclosure, EngineParts, Watch};
use self::ending::{Leaving, Stopping};
use self::engine_frames::EngineReady;
use self::executions::Run;
use self::forked_snapshots::ForkedSnapshots;
use self::ledger::Ledger;
use self::loading::{Loading, Startup};
use self::outbox::Outbox;
use self::output::Pipes;
use self::processes::Processes;
use self::requests::Asked;
use self::state::State;
use crate::catalog::{Durability, EngineDb};
use crate::core::engine::EngineName;
use crate::core::error::Error;
use crate::core::kernel::CrashCause;
use crate::core::limits;
use crate::core::missed::MissedEntry;
use crate::link::guest::{Answer, OpenConnections, Report, WorkerCall};
use crate::link::handshake::SharedIdentity;
use crate::sys::watched::{Watched, watch};

/// Steps per poll before other tasks run.
const STEPS: usize = 32;

/// Init's settings beside the sandbox.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The expected engine.
    pub engine: EngineName,
    /// How long the worker survives without a daemon.
    pub orphan_grace: Duration,
    /// Output held while no daemon listens, bytes.
    pub output_buffer_bytes: usize,
    /// Folder for the spool of a load: the kernel's.
    pub spool_folder: PathBuf,
    /// Memory limit for forked snapshots of the engine, bytes; 0 disables them.
    pub rollback_bytes: u64,
    /// Memory limit for changed state on its way into the database, bytes.
    pub state_bytes: usize,
    /// Limit of the state in the database, bytes.
    pub stored_bytes: u64,
    /// Durability of the state's database.
    pub durability: Durability,
    /// Whether the files that an execution wrote are written to the disk before its end is reported.
    pub sync_files: bool,
    /// Whether this is a warm worker, bound to a kernel later.
    pub unbound: bool,
    /// The engine, if it was prepared without a kernel.
    pub prepared: Option<PreparedEngine>,
    /// Modules that the engine preloads meanwhile.
    pub preload: Vec<String>,
    /// The virtual environment of the kernel's programs.
    pub venv: Option<PathBuf>,
}

/// An engine that started before its worker had a kernel's folder.
#[derive(Debug, Clone)]
pub struct PreparedEngine {
    /// Its introduction.
    pub ready: EngineReady,
    /// The variables that it gets as it enters the folder.
    pub env: Vec<(String, String)>,
}

/// State of the worker.
enum Life {
    /// The engine is not ready, or its state is not loaded.
    Starting(Startup),
    /// A warm worker without a kernel.
    Unbound,
    /// Calls are answered.
    Serving,
    /// The state is being saved, or the engine was asked to exit.
    Stopping(Stopping),
    /// The engine is gone; the daemon is being notified.
    Leaving(Leaving),
}

/// Called once with the result of the start.
type OnReady = Box<dyn FnOnce(Result<(), Error>)>;

/// Init's event loop.
pub struct Worker {
    settings: Settings,
    enclosure: Box<dyn Enclosure>,
    life: Life,
    engine: Option<EngineReady>,
    control: Control,
    pipes: Pipes,
    exit: AsyncFd<Watched>,
    children: Option<AsyncFd<Watched>>,
    calls: mpsc::Receiver<WorkerCall>,
    exec_channel: Option<exec_channel::ExecChannel>,
    descriptors: listener::Descriptors,
    ledger: Ledger,
    outbox: Outbox,
    state: State,
    run: Option<Run>,
    loading: Option<Loading>,
    snapshots: ForkedSnapshots,
    /// Processes beside the engine.
    processes: Processes,
    /// Connections from outside to ports inside.
    connections: OpenConnections,
    /// Whether every process inside is stopped for a checkpoint.
    frozen: bool,
    /// Whether they are stopped until the kernel resumes.
    suspended: bool,
    /// Whether that is for a copy of the machine only.
    is_copied: bool,
    asked: HashMap<u64, Asked>,
    last_id: u64,
    /// Why init killed the engine, if it did.
    killed_for: Option<CrashCause>,
    /// The end of the engine's output during its start, for error messages.
    first_words: VecDeque<u8>,
    restored_entries: u32,
    not_restored: Vec<MissedEntry>,
    on_ready: Option<OnReady>,
    /// The pending bind call, until the kernel's state is loaded.
    bound: Option<Answer<Report>>,
    /// Whether the kernel ends with its client.
    ephemeral: bool,
    /// Whether the bound kernel's state must still be loaded.
    state_to_load: bool,
    identity: SharedIdentity,
    orphan_at: Option<Instant>,
    watch_at: Option<Instant>,
    /// Executions that were interrupted because the workspace was too large.
    full: VecDeque<Instant>,
    /// Nothing ran at the last check, so a new execution is checked sooner than the next regular
    /// one.
    quiet: bool,
    /// The engine closed its control socket: its deadline to end.
    hung_up_at: Option<Instant>,
    /// The engine was killed: its deadline to end.
    gone_by: Option<Instant>,
    sleep: Pin<Box<Sleep>>,
    armed: Option<Instant>,
    status: Option<i32>,
}

/// The parts of a worker.
pub struct Parts {
    /// Settings.
    pub settings: Settings,
    /// The sandbox.
    pub enclosure: Box<dyn Enclosure>,
    /// The started engine.
    pub engine: EngineParts,
    /// A `signalfd`, readable when a child of init has ended.
    pub children: Option<OwnedFd>,
    /// The identity that both ends of the private socket must prove.
    pub identity: SharedIdentity,
    /// The engine's open state.
    pub db: EngineDb,
    /// Calls of the daemon.
    pub calls: mpsc::Receiver<WorkerCall>,
    /// Descriptors from the daemon.
    pub descriptors: listener::Descriptors,
    /// Called once: the worker serves, or why it does not.
    pub on_ready: Box<dyn FnOnce(Result<(), Error>)>,
}

/// Runs init to its end and returns its exit status.
///
/// Must run on a current-thread runtime inside a `LocalSet`.
///
/// # Errors
/// If the engine's descriptors cannot be watched.
pub async fn run(parts: Parts) -> io::Result<i32> {
    let mut worker = Worker::new(parts)?;
    worker.begin_prepared();
    let status = std::future::poll_fn(|cx| worker.poll(cx)).await;
    if let Err(error) = worker.state.close() {
        tracing::warn!(%error, "the state's database does not close");
    }
    Ok(status)
}

impl Worker {
    fn new(parts: Parts) -> io::Result<Worker> {
        let Parts { settings, enclosure, engine, children, identity, db, calls, descriptors, on_ready } = parts;
        let watched = |fd: OwnedFd| watch(fd, Interest::READABLE);
        let state_bytes = settings.state_bytes;
        Ok(Worker {
            settings,
            enclosure,
            life: Life::Starting(Startup::awaiting_ready(Instant::now() + limits::WORKER_START)),
            engine: None,
            control: Control::new(engine.control)?,
            pipes: Pipes::new(engine.stdout, engine.stderr)?,
            exit: watched(engine.pidfd)?,
            children: children.map(watched).transpose()?,
            calls,
            exec_channel: None,
            descriptors,
            ledger: Ledger::default(),
            outbox: Outbox::default(),
            state: State::new(db, state_bytes),
            full: VecDeque::new(),
            run: None,
            loading: None,
            snapshots: ForkedSnapshots::default(),
            processes: Processes::default(),
            connections: OpenConnections::default(),
            frozen: false,
            suspended: false,
            is_copied: false,
            asked: HashMap::new(),
            last_id: 0,
            killed_for: None,
            first_words: VecDeque::new(),
            restored_entries: 0,
            not_restored: Vec::new(),
            on_ready: Some(on_ready),
            bound: None,
            ephemeral: false,
            state_to_load: false,
            identity,
            orphan_at: None,
            watch_at: None,
            quiet: false,
            hung_up_at: None,
            gone_by: None,
            sleep: Box::pin(tokio::time::sleep(Duration::ZERO)),
            armed: None,
            status: None,
        })
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<i32> {
        let mut progressed = true;
        for _ in 0..STEPS {
            progressed = self.step(cx);
            self.settle(cx);
            if let Some(status) = self.status {
                return Poll::Ready(status);
            }
            if !progressed {
                break;
            }
        }
        // Deadlines hold even under load.
        if self.await_deadline(cx) || progressed {
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }

    /// Takes one item from each source; returns whether there was any.
    fn step(&mut self, cx: &mut Context<'_>) -> bool {
        let mut progressed = self.poll_engine(cx);
        progressed |= self.poll_snapshots(cx);
        progressed |= self.poll_exec_channel(cx);
        progressed |= self.poll_processes(cx);
        while self.takes_calls()
            && let Poll::Ready(Some(call)) = self.calls.poll_recv(cx)
        {
            progressed = true;
            self.on_call(call);
        }
        while let Poll::Ready(arrived) = self.outbox.poll(cx) {
            progressed = true;
            if let Some((call, answer)) = arrived {
                self.on_tool_answer(call, &answer);
            }
        }
        if self.takes_output()
            && let Poll::Ready((stream, data)) = self.pipes.poll_read(cx)
        {
            progressed = true;
            match (&self.run, &self.life) {
                (Some(run), _) => self.ledger.output(run.exec, stream, data),
                (None, Life::Starting(_) | Life::Unbound) => remember_end(&mut self.first_words, data),
                (None, _) => self.outbox.background(stream, data),
            }
        }
        progressed |= self.poll_exits(cx);
        progressed
    }

    fn takes_output(&self) -> bool {
        match (&self.run, &self.life) {
            (Some(_), _) => self.outbox.takes_output(&self.ledger, self.settings.output_buffer_bytes, self.gathers()),
            (None, Life::Starting(_) | Life::Unbound) => true,
            (None, _) => self.outbox.takes_background(),
        }
    }

    /// Follows up on the handled items.
    fn settle(&mut self, cx: &mut Context<'_>) {
        self.feed_startup();
        self.release_load();
        self.control.poll_flush(cx);
        self.note_hang_up();
        self.settle_start();
        let gathers = self.gathers();
        self.outbox.push(&mut self.ledger, gathers);
        self.leave_if_told();
    }

    /// Waits for the nearest deadline, or handles an expired one.
    fn await_deadline(&mut self, cx: &mut Context<'_>) -> bool {
        let nearest = self.nearest_deadline();
        let Some(at) = nearest else { return false };
        // An early timer costs one check; re-arming it for each execution costs more.
        if self.armed.is_none_or(|armed| at < armed) {
            self.sleep.as_mut().reset(at);
            self.armed = nearest;
        }
        let passed = self.sleep.poll_unpin(cx).is_ready();
        if passed {
            self.armed = None;
            self.on_deadline(Instant::now());
        }
        passed
    }

    fn nearest_deadline(&self) -> Option<Instant> {
        let life = match &self.life {
            Life::Starting(startup) => Some(startup.until),
            Life::Serving | Life::Unbound => None,
            Life::Stopping(stopping) => Some(stopping.until),
            Life::Leaving(leaving) => Some(leaving.until),
        };
        let run = self.run.as_ref().and_then(Run::nearest_deadline);
        let asked = self.asked.values().map(|asked| asked.until).min();
        let waking = self.snapshots.deadline();
        [life, run, asked, waking, self.orphan_at, self.watch_at, self.hung_up_at, self.gone_by]
            .into_iter()
            .flatten()
            .min()
    }

    fn on_deadline(&mut self, now: Instant) {
        let passed = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if passed(self.watch_at) {
            self.on_watch(now);
        }
        self.on_run_deadline(now);
        self.on_snapshot_deadline(now);
        if self.asked.values().any(|asked| asked.until <= now) {
            self.kill(CrashCause::Unresponsive);
        }
        if passed(self.hung_up_at) {
            self.hung_up_at = None;
            self.kill(CrashCause::Protocol("it closed its control socket".into()));
        }
        if passed(self.orphan_at) {
            self.orphan_at = None;
            self.on_orphaned();
        }
        self.on_life_deadline(now);
    }

    fn on_watch(&mut self, now: Instant) {
        // Between executions only leftovers can use more resources: jobs, and processes unknown to
        // the engine.
        let busy = self.run.is_some() || !self.state.jobs().is_empty() || !self.processes.is_empty();
        self.quiet = !busy && !self.enclosure.has_activity();
        if self.quiet {
            self.watch_at = Some(now + limits::USAGE_IDLE_SAMPLE);
            return;
        }
        self.watch_at = None;
        self.bound_snapshots();
        match self.enclosure.watch() {
            Watch::Within { next } => self.watch_at = Some(now + next),
            // Unused snapshots are ended first.
            Watch::Beyond(CrashCause::OutOfMemory) if self.drop_oldest_snapshot() => {
                self.watch_at = Some(now + limits::USAGE_FIRST_SAMPLE);
            }
            Watch::Beyond(cause) => self.kill(cause),
            Watch::Full if self.may_interrupt_for_room(now) => {
                self.halt_for_room();
                self.watch_at = Some(now + limits::USAGE_FIRST_SAMPLE);
            }
            Watch::Full => self.kill(CrashCause::DiskFull),
        }
    }

    fn note_hang_up(&mut self) {
        let leaving = matches!(self.life, Life::Leaving(_)) || self.killed_for.is_some();
        match self.control.has_ended() && !leaving {
            true if self.hung_up_at.is_none() => self.hung_up_at = Some(Instant::now() + limits::ENGINE_EXIT),
            true => {}
            false => self.hung_up_at = None,
        }
    }

    fn start_watch(&mut self) {
        if std::mem::take(&mut self.quiet) || self.watch_at.is_none() {
            self.watch_at = Some(Instant::now() + limits::USAGE_FIRST_SAMPLE);
        }
    }
}

/// Keeps the end of a text for an error message.
fn remember_end(words: &mut VecDeque<u8>, data: &[u8]) {
    const KEPT: usize = 4 << 10;
    words.extend(&data[data.len().saturating_sub(KEPT)..]);
    let surplus = words.len().saturating_sub(KEPT);
    words.drain(..surplus);
}
