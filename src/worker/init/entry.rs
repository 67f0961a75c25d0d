//! From a fork of the spawner to PID 1 of a sandbox with an engine.
//!
//! The order matters: the sockets are created while the process still runs as the daemon's user.
//! The engine is forked while there is one thread, before the secret is read and the runtime
//! exists.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nix::fcntl::OFlag;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::stat::Mode;
use tokio::sync::mpsc;
use tokio::task::LocalSet;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use super::listener::{self, Descriptors, Door, Sockets};
use super::prepared::{self, Assigned};
use super::sandboxed::Sandboxed;
use super::{Parts, PreparedEngine, Settings, run};

use crate::catalog::{Durability, EngineDb};
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::link::bootstrap::{Assignment, LaunchDocument, ReportLine};
use crate::link::handshake::{PROOF_BYTES, SharedIdentity};
use crate::sandbox::SandboxPlan;
use crate::sandbox::{Init, enter};
use crate::sys::process::exit_now;
use crate::sys::socket::peer;
use crate::worker::engines;

/// Exit status of a worker that could not start.
const STATUS_FAILED: i32 = 3;

/// The command's entry point.
pub fn main() -> ! {
    // kaish traces every command in spans of level `info`, which nothing reads but every execution
    // would pay for.
    let filter = Targets::new().with_default(LevelFilter::INFO).with_target("kaish_kernel", LevelFilter::WARN);
    let lines = tracing_subscriber::fmt::layer().with_writer(io::stderr).with_ansi(false).with_target(false);
    // Errors of writing a log line are ignored: reported on a closed stderr they would make the
    // worker panic.
    let lines = lines.log_internal_errors(false);
    tracing_subscriber::registry().with(filter).with(lines).init();
    let status = match start() {
        Ok(status) => status,
        Err(error) => {
            report(&ReportLine::Failed(error));
            STATUS_FAILED
        }
    };
    exit_now(status)
}

/// Unbuffered standard input: nothing beyond the request is read.
fn stdin() -> Result<File> {
    let duplicate = io::stdin().as_fd().try_clone_to_owned().map_err(internal("read the launch document"))?;
    Ok(File::from(duplicate))
}

fn report(line: &ReportLine) {
    // The daemon may be gone.
    let _ = line.write(&mut io::stdout().lock());
}

fn start() -> Result<i32> {
    let document: LaunchDocument<SandboxPlan> =
        LaunchDocument::read(&mut stdin()?).map_err(|e| Error::invalid(format!("the launch document: {e}")))?;
    let sockets = Sockets::bind(&document.socket).map_err(|e| {
        Error::unavailable(format!("cannot make the worker's socket {}: {e}", document.socket.display()))
    })?;
    // Both ends belong to the daemon's user, whatever its id in init's namespace.
    let (witness, other_end) = UnixStream::pair().map_err(internal("a socket pair"))?;
    // `enter` closes other descriptors; no owner of them may remain.
    drop(other_end);
    let compiled = engines::read_compiled(&document.engine_settings);
    let [calls, descriptors] = sockets.fds();
    let keep = [calls, descriptors, witness.as_fd()];
    let init = enter(&document.plan, &keep, |pid| report(&ReportLine::Pid(pid)))?;
    let daemon_uid = peer(&witness).map_err(internal("who the daemon is"))?.uid;
    let outcome = serve(document.clone(), init, sockets, daemon_uid, &compiled);
    Sockets::unlink(&document.socket);
    outcome
}

fn serve(
    mut document: LaunchDocument<SandboxPlan>,
    init: Init,
    sockets: Sockets,
    daemon_uid: u32,
    compiled: &[u8],
) -> Result<i32> {
    let durability = if document.power_safe { Durability::Power } else { Durability::Process };
    let mut unbound = document.plan.unbound;
    let stored_bytes = limits::engine_state_bytes(document.plan.limits.memory_bytes);
    let mut spool_folder = init.kernel_dir();
    let kernel = kernel_of(&document, unbound);
    let program = engines::program(document.engine, &document.engine_settings, compiled, kernel)?;
    let children = watch_children().map_err(internal("watch processes"))?;
    let (mut enclosure, engine) = Sandboxed::start(init, document.engine, program)?;
    let mut prepared = None;
    if document.is_prepared {
        let ready = prepared::rehearse(&engine.control)?;
        report(&ReportLine::Ready {});
        let Assigned { assignment, folder } = prepared::await_assignment(&mut stdin()?, &mut enclosure)?;
        spool_folder = folder;
        unbound = assign(&mut document, assignment);
        prepared = Some(PreparedEngine { ready, env: engines::kernel_environment(kernel_of(&document, unbound)) });
    }
    let db = EngineDb::open(&spool_folder.join("engine.db"), durability)?.bounded(stored_bytes);
    let mut secret = [0; PROOF_BYTES];
    stdin()?.read_exact(&mut secret).map_err(internal("read the secret"))?;
    let (sender, calls) = mpsc::channel(limits::WORKER_CALLS);
    let held = Descriptors::default();
    let identity = SharedIdentity::new(document.identity(secret));
    let door = Door { identity: identity.clone(), daemon_uid, calls: sender, descriptors: held.clone() };
    let settings = Settings {
        engine: document.engine,
        orphan_grace: Duration::from_millis(document.orphan_grace_ms),
        output_buffer_bytes: document.output_buffer_bytes,
        spool_folder,
        rollback_bytes: document.rollback_bytes,
        state_bytes: limits::pending_state_bytes(document.plan.limits.memory_bytes),
        stored_bytes,
        durability,
        sync_files: document.sync_files,
        unbound,
        prepared,
        preload: document.engine_settings.preload.clone(),
        venv: document.engine_settings.venv.clone(),
    };
    let parts = Parts {
        settings,
        enclosure: Box::new(enclosure),
        engine,
        children: Some(children.into()),
        identity,
        db,
        calls,
        descriptors: held,
        on_ready: Box::new(report_ready),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(internal("a runtime"))?;
    let tasks = LocalSet::new();
    tasks.spawn_local(async move {
        if let Err(error) = listener::serve(sockets, door).await {
            tracing::error!(%error, "the private socket does not work");
        }
    });
    runtime.block_on(tasks.run_until(run(parts))).map_err(internal("watch the engine"))
}

/// The kernel as the code inside sees it.
fn kernel_of(document: &LaunchDocument<SandboxPlan>, unbound: bool) -> Option<engines::KernelSeen<'_>> {
    (!unbound).then_some((&document.name, document.origin, document.epoch))
}

/// Makes the document that of the assigned worker; returns whether it has no kernel yet.
fn assign(document: &mut LaunchDocument<SandboxPlan>, assignment: Assignment) -> bool {
    let Assignment { worker, kernel, name, epoch, unbound, orphan_grace_ms, origin, .. } = assignment;
    (document.worker, document.kernel, document.epoch) = (worker, kernel, epoch);
    (document.name, document.origin, document.orphan_grace_ms) = (name, origin, orphan_grace_ms);
    unbound
}

pub(super) fn internal<E: std::fmt::Display>(what: &str) -> impl FnOnce(E) -> Error {
    move |error| Error::internal(format!("init cannot {what}: {error}"))
}

/// Reports to the daemon; afterwards stdout is unused.
fn report_ready(outcome: Result<()>) {
    report(&match outcome {
        Ok(()) => ReportLine::Ready {},
        Err(error) => ReportLine::Failed(error),
    });
    let null = nix::fcntl::open("/dev/null", OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty());
    if let Ok(null) = null {
        let _ = nix::unistd::dup2_stdin(&null).and_then(|()| nix::unistd::dup2_stdout(&null));
    }
}

/// A descriptor that becomes readable when a child ends. PID 1 reaps all processes and has no
/// signal handlers.
fn watch_children() -> nix::Result<SignalFd> {
    let mut ended = SigSet::empty();
    ended.add(Signal::SIGCHLD);
    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&ended), None)?;
    SignalFd::with_flags(&ended, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
}
