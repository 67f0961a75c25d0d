//! A process beside the engine: its supervisor, and the child before it becomes the program. Both
//! are trusted; the program runs only after init's `go`.
//!
//! The child enters the engine's tree and goes the engine's way: every right dropped, every layer
//! verified from inside and from outside.

use std::convert::Infallible;
use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, openat};
use nix::sched::{CloneFlags, setns};
use nix::sys::stat::Mode;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{chdir, execve, setsid};

use super::child::{MUTE, REPORT, Word, await_go, close_on_exec, say};
use super::confine::{self, ByCgroup};
use super::layer::{Layer, SandboxError, SandboxReport, failed};
use super::plan::SandboxPlan;
use super::process::ProcessProgram;
use super::verify;
use crate::core::exec::TerminalSize;
use crate::core::limits;
use crate::sys::caps;
use crate::sys::namespace::{Forked, fork};
use crate::sys::process::{
    adopt_orphans, close_all_except, exit_now, let_large_writes_fail, place, reset_signals, set_name,
    unmap_shared_files,
};
use crate::sys::socket::send_with_fds;
use crate::sys::terminal;

/// Makes terminals of the engine's tree.
const PTMX: &str = "/dev/pts/ptmx";

/// The child's input.
pub(super) struct ProcessChild<'a> {
    /// The plan with the later mounts.
    pub plan: &'a SandboxPlan,
    pub by: ByCgroup,
    /// The engine's mount namespace.
    pub namespace: OwnedFd,
    pub program: ProcessProgram,
    pub report: OwnedFd,
    pub streams: Streams,
}

/// The process's streams.
pub(super) enum Streams {
    Pipes {
        /// None: empty input.
        stdin: Option<OwnedFd>,
        stdout: OwnedFd,
        stderr: OwnedFd,
    },
    /// A terminal of that size, which the child makes in the engine's tree.
    Terminal(TerminalSize),
}

impl Streams {
    /// Input, output and errors. Called in the engine's tree by the leader of a session.
    fn open(self, report: &OwnedFd) -> Result<[OwnedFd; 3], SandboxError> {
        let cannot = |what: &'static str| failed::<std::io::Error>(Layer::Descriptors, what);
        match self {
            Streams::Pipes { stdin: Some(stdin), stdout, stderr } => Ok([stdin, stdout, stderr]),
            Streams::Pipes { stdin: None, stdout, stderr } => {
                let null = openat(AT_FDCWD, "/dev/null", OFlag::O_RDWR | OFlag::O_CLOEXEC, Mode::empty());
                Ok([null.map_err(failed(Layer::Descriptors, "cannot open /dev/null"))?, stdout, stderr])
            }
            Streams::Terminal(TerminalSize { rows, columns }) => {
                let (controller, end) = terminal::make(PTMX.as_ref()).map_err(cannot("cannot make a terminal"))?;
                terminal::resize(&end, rows, columns).map_err(cannot("cannot size the terminal"))?;
                terminal::control(&end).map_err(cannot("cannot control the terminal"))?;
                say(report.as_raw_fd(), &Word::Terminal, &[controller.as_raw_fd()])?;
                let again = || end.try_clone().map_err(cannot("cannot use the terminal"));
                Ok([again()?, again()?, end])
            }
        }
    }
}

/// Becomes the supervisor of a process: starts the child, reaps its tree and sends the program's exit.
/// It ends with its tree, or when init ends it.
pub(super) fn supervise(exit: OwnedFd, child: ProcessChild<'_>) -> ! {
    // A panic must not unwind into init's code.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        set_name("ryokan-process");
        let forked = adopt_orphans().and_then(|()| fork());
        let pid = match forked {
            Ok(Forked::Child) => {
                drop(exit);
                child.run()
            }
            Ok(Forked::Parent(pid)) => pid,
            Err(error) => {
                let word = Word::Failed(failed(Layer::PidNs, "cannot start the process")(error));
                let _ = say(child.report.as_raw_fd(), &word, &[]);
                exit_now(MUTE)
            }
        };
        // This function never returns, so no owner of a closed descriptor is dropped.
        let _ = close_all_except(&[exit.as_raw_fd()]);
        let _ = caps::drop_all();
        loop {
            let (kind, value) = match waitpid(None, Some(WaitPidFlag::__WALL)) {
                Ok(WaitStatus::Exited(ended, status)) if ended == pid => (0, status),
                Ok(WaitStatus::Signaled(ended, signal, _)) if ended == pid => (1, signal as i32),
                Ok(_) | Err(Errno::EINTR) => continue,
                // The whole tree is gone.
                Err(_) => exit_now(0),
            };
            let mut word = vec![kind];
            word.extend(value.to_le_bytes());
            let _ = send_with_fds(&exit, &word, &[]);
        }
    }));
    exit_now(MUTE)
}

impl ProcessChild<'_> {
    /// Becomes the program, or reports why not.
    fn run(self) -> ! {
        let _ = catch_unwind(AssertUnwindSafe(|| {
            let report = self.report.try_clone();
            if let (Err(error), Ok(report)) = (self.become_program(), report) {
                // Once the descriptors are placed, only the one at REPORT remains.
                let word = Word::Failed(error);
                if say(report.as_raw_fd(), &word, &[]).is_err() {
                    let _ = say(REPORT, &word, &[]);
                }
                exit_now(MUTE);
            }
        }));
        exit_now(MUTE)
    }

    fn become_program(self) -> Result<Infallible, SandboxError> {
        let ProcessChild { plan, by, namespace, program, report, streams } = self;
        let _ = setsid();
        reset_signals().map_err(failed(Layer::Descriptors, "cannot reset signals"))?;
        let_large_writes_fail().map_err(failed(Layer::Rlimits, "cannot ignore a signal"))?;
        unmap_shared_files().map_err(failed(Layer::Descriptors, "cannot let go of init's shared memory"))?;
        let own = i32::try_from(std::process::id()).map_err(failed(Layer::PidNs, "a strange process id"))?;
        say(report.as_raw_fd(), &Word::Born(own), &[])?;
        setns(&namespace, CloneFlags::CLONE_NEWNS).map_err(failed(Layer::PivotRoot, "cannot enter the tree"))?;
        let expected = [0, 1, 2, REPORT];
        let descriptors = |error| failed(Layer::Descriptors, "cannot put descriptors in place")(error);
        let [stdin, stdout, stderr] = streams.open(&report)?;
        let argv = strings(program.argv)?;
        let env = strings(program.env.iter().map(|(name, value)| format!("{name}={value}")).collect())?;
        let path = program.env.iter().rev().find(|(name, _)| name == "PATH").map_or("", |(_, path)| path.as_str());
        let places = candidates(argv.first(), path);
        place(vec![(stdin, 0), (stdout, 1), (stderr, 2), (report, REPORT)]).map_err(descriptors)?;
        // This function does not return Ok, and the caller ends the process: no owner of a closed
        // descriptor is dropped but this one.
        std::mem::forget(namespace);
        close_all_except(&expected).map_err(descriptors)?;
        let mut in_force = SandboxReport::default();
        in_force.enforced(Layer::PivotRoot, "the engine's tree");
        confine::confine(plan, by, &mut in_force)?;
        confine::filter(plan, by, &mut in_force)?;
        let seen = verify::look().map_err(failed(Layer::Descriptors, "cannot look at ourselves"))?;
        verify::judge(plan, &in_force, &seen, &expected)?;
        in_force.enforced(Layer::Descriptors, "the standard streams");
        say(REPORT, &Word::Ready(in_force), &[])?;
        await_go()?;
        close_on_exec(REPORT).map_err(failed(Layer::Descriptors, "cannot close the report socket"))?;
        // From here on init does not wait for this process: a directory of a mount may hang.
        let (code, why) = exec(&program.cwd, &places, &argv, &env);
        say(REPORT, &Word::NotRun { code, why }, &[])?;
        exit_now(code)
    }
}

fn strings(texts: Vec<String>) -> Result<Vec<CString>, SandboxError> {
    let strings = texts.into_iter().map(CString::new).collect::<Result<Vec<_>, _>>();
    strings.map_err(failed(Layer::PivotRoot, "an argument or variable holds a zero"))
}

/// The paths at which a program may be: itself if it has a slash, else in the directories of `PATH`.
fn candidates(program: Option<&CString>, path: &str) -> Vec<CString> {
    let Some(program) = program else { return Vec::new() };
    if program.as_bytes().contains(&b'/') {
        return vec![program.clone()];
    }
    let inside = |folder: &str| {
        let folder = if folder.is_empty() { "." } else { folder };
        CString::new([folder.as_bytes(), b"/", program.as_bytes()].concat()).ok()
    };
    path.split(':').filter_map(inside).collect()
}

/// Enters the directory and runs the program; returns why it could not.
fn exec(cwd: &str, places: &[CString], argv: &[CString], env: &[CString]) -> (i32, String) {
    if let Err(error) = chdir(cwd) {
        return (limits::CODE_NOT_RUNNABLE, format!("cannot enter {cwd:?}: {}", error.desc()));
    }
    let name = argv.first().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let mut denied = None;
    for place in places {
        let Err(error) = execve(place, argv, env);
        match error {
            Errno::ENOENT | Errno::ENOTDIR => {}
            Errno::EACCES => denied = Some(error),
            other => return (limits::CODE_NOT_RUNNABLE, format!("cannot run {name:?}: {}", other.desc())),
        }
    }
    match denied {
        Some(error) => (limits::CODE_NOT_RUNNABLE, format!("cannot run {name:?}: {}", error.desc())),
        None => (limits::CODE_NOT_FOUND, format!("{name:?} was not found")),
    }
}
