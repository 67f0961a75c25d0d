//! The engine's process before it is the engine: trusted still, it builds its tree, gives everything up, looks at itself, and
//! tells init; only then, and only at init's word, untrusted code takes over.
//!
//! ```text
//!  child ── Tree (2 descriptors) ──▶ init        after the tree is built
//!  child ── Ready (report) ───────▶ init        after every layer is in force and seen to be
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

/// What the child says.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Word {
    /// The tree stands; its descriptors come along.
    Tree,
    /// Everything is in force.
    Ready(SandboxReport),
    /// It cannot be.
    Failed(SandboxError),
}

/// Longest word, bytes.
pub(super) const WORD_BYTES: usize = 64 << 10;
/// Where the report socket is in the child.
const REPORT: RawFd = 5;
/// Status of a child that could not even say why.
const MUTE: i32 = 70;

/// A mount to be made, by where its source is in N1.
#[derive(Debug, Clone)]
pub(super) struct Wanted {
    /// Where inside.
    pub inside: PathBuf,
    /// What.
    pub source: Source,
    /// Whether the kernel may change it.
    pub writable: bool,
}

/// What the child needs.
pub(super) struct Child<'a> {
    pub plan: &'a SandboxPlan,
    pub by: ByCgroup,
    /// Outermost first.
    pub mounts: Vec<Wanted>,
    pub protected: &'a [PathBuf],
    pub program: EngineProgram,
    pub report: OwnedFd,
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
    pub control: OwnedFd,
}

impl Child<'_> {
    /// Becomes the engine, or reports why not. A panic must not unwind into what is init's code.
    pub(super) fn run(self) -> ! {
        let said = catch_unwind(AssertUnwindSafe(|| {
            // A duplicate, so that the error finds its way wherever the first was put by then.
            let report = self.report.try_clone();
            if let (Err(error), Ok(report)) = (self.become_engine(), report) {
                // Once the descriptors are in place, it is the one at REPORT that is left.
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
        // Whoever still holds one of the others never comes to drop it: from here on this function does not return Ok, and
        // the caller ends the process.
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

/// What is left to do after the last look: no allocation that could fail, nothing that could be refused by then.
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
    /// Adds the extra descriptor to those that are put in place.
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
                // Closed by a successful exec, which is how init learns of it.
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
                // The same rights as a program that was executed has over itself.
                set_dumpable(true).map_err(failed(Layer::Descriptors, "cannot open /proc/self to the engine"))?;
                replace_environment(&env);
                close_all_except(&[0, 1, 2, 3])
                    .map_err(failed(Layer::Descriptors, "cannot close the report socket"))?;
                entry(arguments)
            }
        }
    }
}

fn close_on_exec(fd: RawFd) -> std::io::Result<()> {
    let socket = crate::sys::process::adopt(fd)?;
    nix::fcntl::fcntl(&socket, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC))?;
    std::mem::forget(socket);
    Ok(())
}

fn say(socket: RawFd, word: &Word, fds: &[RawFd]) -> Result<(), SandboxError> {
    const WHAT: &str = "cannot report to init";
    let text = serde_json::to_vec(word).map_err(failed(Layer::Descriptors, WHAT))?;
    let socket = crate::sys::process::adopt(socket).map_err(failed(Layer::Descriptors, WHAT))?;
    let sent = send_with_fds(socket.as_fd(), &text, fds);
    // Only borrowed: it is closed where it was opened, or by exec.
    std::mem::forget(socket);
    sent.map(drop).map_err(failed(Layer::Descriptors, WHAT))
}

fn await_go() -> Result<(), SandboxError> {
    let socket = crate::sys::process::adopt(REPORT).map_err(failed(Layer::Descriptors, "cannot hear init"))?;
    let mut file = std::mem::ManuallyDrop::new(File::from(socket));
    let mut word = [0];
    file.read_exact(&mut word).map_err(failed(Layer::Descriptors, "init did not say go"))?;
    let _ = file.flush();
    Ok(())
}
