//! The engine's process before it becomes the engine. Still trusted, it builds its tree, drops
//! every right, verifies itself and reports to init. Untrusted code runs only after init's `go`.
//!
//! ```text
//!  child ── Tree (2 descriptors) ──▶ init        after the tree is built
//!  child ── Ready (report) ───────▶ init        after every layer is in force and verified
//!  child ◀──────────── go ───────── init
//!  child ── Failed (error) ───────▶ init        at any point; or the end of the socket once the program runs
//! ```

use std::convert::Infallible;
use std::ffi::CString;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use nix::fcntl::{AT_FDCWD, OFlag, openat};
use nix::sys::stat::Mode;
use nix::unistd::{chdir, execve, setsid};
use serde::{Deserialize, Serialize};

use super::confine::{self, ByCgroup};
use super::init::EngineProgram;
use super::layer::{Layer, SandboxError, SandboxReport, failed};
use super::plan::SandboxPlan;
use super::tree::{self, Hanging, Source};
use super::{protect, verify};
use crate::sys::process::{
    close_all_except, exit_now, place, replace_environment, reset_signals, set_dumpable, set_name, unmap_shared_files,
};
use crate::sys::socket::send_with_fds;

/// A message of the child.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Word {
    /// The tree is complete; its descriptors accompany the message.
    Tree,
    /// Every layer is in force.
    Ready(SandboxReport),
    /// The sandbox could not be built.
    Failed(SandboxError),
    /// A process beside the engine: its id.
    Born(i32),
    /// The end that controls its terminal accompanies the message.
    Terminal,
    /// A process beside the engine is confined, but its program does not run.
    NotRun {
        /// Exit code as in shells.
        code: i32,
        /// The reason.
        why: String,
    },
}

/// Longest message, bytes.
pub(super) const WORD_BYTES: usize = 64 << 10;
/// The report socket's number in the child.
pub(super) const REPORT: RawFd = 5;
/// Exit status of a child that could not report its failure.
pub(super) const MUTE: i32 = 70;

/// A mount to make, with its source in N1.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    /// Path inside.
    pub inside: PathBuf,
    /// Source.
    pub source: Source,
    /// Whether the kernel may write.
    pub writable: bool,
}

/// The child's input.
pub(super) struct Child<'a> {
    pub plan: &'a SandboxPlan,
    pub by: ByCgroup,
    /// Mounts, outermost first.
    pub mounts: Vec<Wanted>,
    pub protected: &'a [PathBuf],
    pub program: EngineProgram,
    pub report: OwnedFd,
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
    pub control: OwnedFd,
}

impl Child<'_> {
    /// Becomes the engine, or reports why not. A panic must not unwind into init's code.
    pub(super) fn run(self) -> ! {
        let said = catch_unwind(AssertUnwindSafe(|| {
            // A duplicate, so the error can be sent wherever the original has been moved.
            let report = self.report.try_clone();
            if let (Err(error), Ok(report)) = (self.become_engine(), report) {
                // Once the descriptors are placed, only the one at REPORT remains.
                let word = Word::Failed(error);
                if say(report.as_raw_fd(), &word, &[]).is_err() {
                    let _ = say(REPORT, &word, &[]);
                }
                // Not by returning: the duplicate may be closed already.
                exit_now(MUTE);
            }
        }));
        let _ = said;
        exit_now(MUTE)
    }

    fn become_engine(self) -> Result<Infallible, SandboxError> {
        let Child { plan, by, mounts, protected, program, report, stdout, stderr, control } = self;
        set_name("ryokan-engine");
        let _ = setsid();
        reset_signals().map_err(failed(Layer::Descriptors, "cannot reset signals"))?;
        unmap_shared_files().map_err(failed(Layer::Descriptors, "cannot let go of init's shared memory"))?;
        let hanging = mounts.into_iter().map(|wanted| open(wanted, protected)).collect::<Result<Vec<_>, _>>()?;
        let tree = tree::build(plan, hanging)?;
        say(report.as_raw_fd(), &Word::Tree, &[tree.namespace.as_raw_fd(), tree.scratch.as_raw_fd()])?;
        let mut expected = vec![0, 1, 2, 3, REPORT];
        let descriptors = |error| failed(Layer::Descriptors, "cannot put descriptors in place")(error);
        let null = openat(AT_FDCWD, "/dev/null", OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty())
            .map_err(failed(Layer::Descriptors, "cannot open /dev/null"))?;
        let (exec, env) = prepare(program, &mut expected)?;
        let mut places = vec![(null, 0), (stdout, 1), (stderr, 2), (control, 3), (report, REPORT)];
        let exec = exec.place(&mut places);
        place(places).map_err(descriptors)?;
        // `OwnedFd`s of the closed descriptors are never dropped: from here on this function does
        // not return Ok, and the caller ends the process.
        close_all_except(&expected).map_err(descriptors)?;
        std::mem::forget(tree);
        let mut in_force = SandboxReport::default();
        in_force.enforced(Layer::PivotRoot, format!("own tree, {} paths given", plan.mounts.len()));
        confine::confine(plan, by, &mut in_force)?;
        chdir("/workspace").map_err(failed(Layer::PivotRoot, "cannot enter /workspace"))?;
        confine::filter(plan, by, &mut in_force)?;
        let seen = verify::look().map_err(failed(Layer::Descriptors, "cannot look at ourselves"))?;
        verify::judge(plan, &in_force, &seen, &expected)?;
        in_force.enforced(Layer::Descriptors, "those of the engine contract");
        say(REPORT, &Word::Ready(in_force), &[])?;
        await_go()?;
        exec.run(env)
    }
}

/// Opens one mount in N1.
fn open(wanted: Wanted, protected: &[PathBuf]) -> Result<Hanging, SandboxError> {
    let Wanted { inside, source, writable } = wanted;
    let covers = match source.shows() {
        Some(shown) => protect::covers(&inside, shown, protected)?,
        None => Vec::new(),
    };
    let tree = tree::source(&source, &inside, writable)?;
    Ok(Hanging { inside, tree, covers })
}

/// The remaining steps after verification: none may allocate fallibly or be refused.
enum Prepared {
    Exec { argv: Vec<CString>, extra: Option<OwnedFd> },
    Call(fn(Vec<String>) -> !, Vec<String>),
}

type Environment = Vec<(String, String)>;

fn prepare(program: EngineProgram, expected: &mut Vec<RawFd>) -> Result<(Prepared, Environment), SandboxError> {
    match program {
        EngineProgram::Exec { argv, env, extra_fd } => {
            let argv = argv
                .into_iter()
                .map(CString::new)
                .collect::<Result<Vec<_>, _>>()
                .map_err(failed(Layer::PivotRoot, "an argument of the engine holds a zero"))?;
            if extra_fd.is_some() {
                expected.push(4);
            }
            Ok((Prepared::Exec { argv, extra: extra_fd }, env))
        }
        EngineProgram::Call { entry, arguments, env } => Ok((Prepared::Call(entry, arguments), env)),
    }
}

impl Prepared {
    /// Adds the extra descriptor to the placed ones.
    fn place(self, places: &mut Vec<(OwnedFd, RawFd)>) -> Prepared {
        match self {
            Prepared::Exec { argv, extra } => {
                places.extend(extra.map(|fd| (fd, 4)));
                Prepared::Exec { argv, extra: None }
            }
            call @ Prepared::Call(..) => call,
        }
    }

    fn run(self, env: Environment) -> Result<Infallible, SandboxError> {
        match self {
            Prepared::Exec { argv, .. } => {
                // A successful exec closes the socket, which tells init.
                close_on_exec(REPORT).map_err(failed(Layer::Descriptors, "cannot close the report socket"))?;
                let env: Vec<CString> =
                    env.into_iter().filter_map(|(name, value)| CString::new(format!("{name}={value}")).ok()).collect();
                let path =
                    argv.first().ok_or_else(|| SandboxError::new(Layer::PivotRoot, "there is no program to run"))?;
                execve(path, &argv, &env)
                    .map_err(failed(Layer::PivotRoot, format_args!("cannot run {path:?} inside")))
                    .map_err(|error| error.hint("make sure that the program exists below /usr or an allowed path"))
            }
            Prepared::Call(entry, arguments) => {
                // The rights that an executed program has over itself.
                set_dumpable(true).map_err(failed(Layer::Descriptors, "cannot open /proc/self to the engine"))?;
                replace_environment(&env);
                close_all_except(&[0, 1, 2, 3])
                    .map_err(failed(Layer::Descriptors, "cannot close the report socket"))?;
                entry(arguments)
            }
        }
    }
}

pub(super) fn close_on_exec(fd: RawFd) -> std::io::Result<()> {
    let socket = crate::sys::process::adopt(fd)?;
    nix::fcntl::fcntl(&socket, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC))?;
    std::mem::forget(socket);
    Ok(())
}

pub(super) fn say(socket: RawFd, word: &Word, fds: &[RawFd]) -> Result<(), SandboxError> {
    const WHAT: &str = "cannot report to init";
    let text = serde_json::to_vec(word).map_err(failed(Layer::Descriptors, WHAT))?;
    let socket = crate::sys::process::adopt(socket).map_err(failed(Layer::Descriptors, WHAT))?;
    let sent = send_with_fds(socket.as_fd(), &text, fds);
    // Borrowed: its opener or exec closes it.
    std::mem::forget(socket);
    sent.map(drop).map_err(failed(Layer::Descriptors, WHAT))
}

pub(super) fn await_go() -> Result<(), SandboxError> {
    let socket = crate::sys::process::adopt(REPORT).map_err(failed(Layer::Descriptors, "cannot read init's answer"))?;
    let mut file = std::mem::ManuallyDrop::new(File::from(socket));
    let mut word = [0];
    file.read_exact(&mut word).map_err(failed(Layer::Descriptors, "init did not send `go`"))?;
    let _ = file.flush();
    Ok(())
}
