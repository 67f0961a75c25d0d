//! `ryokan-worker probe [OPTION…] -- PROGRAM ARGUMENT…`: runs a program in a sandbox and exits with
//! its status.
//!
//! `ryokan doctor` tests a host with it, and the tests look for escapes. Exit status 125: no
//! sandbox.
//!
//! | option | what |
//! |---|---|
//! | `--json` | one JSON object on stdout instead of the program's output: report, status, output |
//! | `--report` | the report's lines on stderr |
//! | `--plan JSON` | the plan, or `@FILE`; without it, default limits and a temporary kernel folder |
//! | `--timeout SECONDS` | kills the program (status 124); 60 without it |
//! | `--bind PATH=SOURCE[:rw]` | a live mount, made just after the start |
//! | `--pooled` | the kernel is bound to a finished sandbox (`probe_pooled`) |
//! | `--exercise SOURCE` | tests init's operations instead (`probe_exercise`) |

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{Pid, Uid, pipe2};
use serde::Serialize;

use super::probe_pooled;
use crate::sandbox::{
    EngineProgram, Init, MemoryWatch, MountSource, Owners, RunAs, SandboxError, SandboxPlan, SandboxReport, Verdict,
    WorkspaceWatch, enter,
};
use crate::sys::namespace::{Forked, fork};
use crate::sys::process::{exit_now, set_parent_death_signal};

/// Exit status without a sandbox.
const NO_SANDBOX: i32 = 125;
/// Exit status after a timeout.
const TIMED_OUT: i32 = 124;
/// Delay before the first resource check.
const FIRST_LOOK: Duration = Duration::from_millis(20);
/// Output kept for `--json`, bytes of each stream.
const KEPT: usize = 1 << 20;
/// The user `nobody`, for a probe started by root whose plan names no user.
const NOBODY: u32 = 65_534;

struct Options {
    json: bool,
    report: bool,
    plan: Option<SandboxPlan>,
    timeout: Duration,
    binds: Vec<(PathBuf, PathBuf, bool)>,
    pooled: bool,
    exercise: Option<PathBuf>,
    argv: Vec<String>,
}

/// The output of `--json`.
#[derive(Serialize)]
struct Outcome<'a> {
    report: Option<&'a SandboxReport>,
    error: Option<&'a SandboxError>,
    status: i32,
    stdout: String,
    stderr: String,
}

fn parse(arguments: Vec<String>) -> Result<Options, String> {
    let mut options = Options {
        json: false,
        report: false,
        plan: None,
        timeout: Duration::from_secs(60),
        binds: Vec::new(),
        pooled: false,
        exercise: None,
        argv: Vec::new(),
    };
    let mut rest = arguments.into_iter();
    while let Some(argument) = rest.next() {
        let mut value = || rest.next().ok_or_else(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--json" => options.json = true,
            "--report" => options.report = true,
            "--plan" => options.plan = Some(read_plan(&value()?)?),
            "--timeout" => {
                let seconds = value()?.parse().map_err(|_| String::from("--timeout needs a number of seconds"))?;
                options.timeout = Duration::from_secs(seconds);
            }
            "--bind" => options.binds.push(read_bind(&value()?)?),
            "--pooled" => options.pooled = true,
            "--exercise" => options.exercise = Some(value()?.into()),
            "--" => options.argv = rest.by_ref().collect(),
            other => return Err(format!("there is no option {other:?}; see `ryokan-worker probe -- PROGRAM`")),
        }
    }
    if options.argv.is_empty() { Err(String::from("which program? put it after `--`")) } else { Ok(options) }
}

fn read_plan(text: &str) -> Result<SandboxPlan, String> {
    let text = match text.strip_prefix('@') {
        Some(file) => std::fs::read_to_string(file).map_err(|error| format!("cannot read {file}: {error}"))?,
        None => text.to_owned(),
    };
    serde_json::from_str(&text).map_err(|error| format!("invalid plan: {error}"))
}

fn read_bind(text: &str) -> Result<(PathBuf, PathBuf, bool), String> {
    let (text, writable) = text.strip_suffix(":rw").map_or((text, false), |text| (text, true));
    let (inside, source) = text.split_once('=').ok_or("--bind needs PATH=SOURCE")?;
    Ok((inside.into(), source.into(), writable))
}

/// Entry of the `probe` command.
pub fn main(arguments: Vec<String>) -> ! {
    let options = match parse(arguments) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("ryokan-worker probe: {error}");
            std::process::exit(2);
        }
    };
    let status = run(&options).unwrap_or_else(|error| {
        eprintln!("ryokan-worker probe: {error}");
        NO_SANDBOX
    });
    std::process::exit(status)
}

/// A kernel's folder, removed when dropped.
struct TemporaryKernel(PathBuf);

impl TemporaryKernel {
    fn new() -> std::io::Result<TemporaryKernel> {
        let name: String = crate::sys::random::bytes::<8>().iter().map(|byte| format!("{byte:02x}")).collect();
        let folder = std::env::temp_dir().join(format!("ryokan-probe-{name}"));
        std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700)
            .create(&folder)
            .map_err(|error| std::io::Error::new(error.kind(), format!("cannot make {}: {error}", folder.display())))?;
        let kernel = TemporaryKernel(folder);
        std::fs::create_dir(kernel.0.join("workspace"))?;
        Ok(kernel)
    }
}

impl Drop for TemporaryKernel {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs the program in the sandbox of its plan, or of a default plan with a temporary folder.
fn run(options: &Options) -> std::io::Result<i32> {
    if let Some(plan) = &options.plan {
        return run_planned(options, plan);
    }
    let folder = TemporaryKernel::new()?;
    let mut plan = SandboxPlan::new(&folder.0);
    if Uid::effective().is_root() {
        plan.run_as = Some(RunAs { uid: NOBODY, gid: NOBODY, map_root: false });
    }
    run_planned(options, &plan)
}

/// Starts the outer process and waits for init, which becomes our child.
fn run_planned(options: &Options, plan: &SandboxPlan) -> std::io::Result<i32> {
    let (pid_out, pid_in) = pipe2(OFlag::O_CLOEXEC)?;
    let stand_in = if options.pooled { Some(TemporaryKernel::new()?) } else { None };
    let parted = stand_in.as_ref().map(|stand_in| probe_pooled::part(plan, &stand_in.0)).transpose();
    let (unbound, kernel) = match parted {
        Ok(parted) => parted.unzip(),
        Err(error) => {
            tell(options, &Outcome::failed(&error));
            return Ok(NO_SANDBOX);
        }
    };
    let plan = unbound.as_ref().unwrap_or(plan);
    run_in(options, plan, kernel, (pid_out, pid_in))
}

fn run_in(
    options: &Options,
    plan: &SandboxPlan,
    kernel: Option<probe_pooled::Kernel>,
    (pid_out, pid_in): (OwnedFd, OwnedFd),
) -> std::io::Result<i32> {
    // The mounts that a root daemon would send later.
    let sent = match (&options.exercise, plan.run_as.filter(|_| Uid::effective().is_root())) {
        (Some(source), Some(run_as)) => Some(Owners::default().mapped(source, run_as).map_err(std::io::Error::other)?),
        _ => None,
    };
    match fork()? {
        Forked::Child => {
            drop(pid_out);
            let report = |pid: i32| {
                let _ = nix::unistd::write(&pid_in, &pid.to_le_bytes());
            };
            let later = kernel.iter().flat_map(|kernel| kernel.descriptors());
            let keep: Vec<_> = sent.iter().map(AsFd::as_fd).chain(later).chain([pid_in.as_fd()]).collect();
            match enter(plan, &keep, report) {
                Ok(init) => {
                    drop(pid_in);
                    exit_now(inside(options, init, sent, kernel));
                }
                Err(error) => {
                    tell(options, &Outcome::failed(&error));
                    exit_now(NO_SANDBOX);
                }
            }
        }
        Forked::Parent(outer) => {
            drop(pid_in);
            let mut pid = [0; 4];
            let reported = std::fs::File::from(pid_out).read_exact(&mut pid);
            let outer = code(waitpid(outer, None)?);
            match reported {
                Ok(()) => Ok(code(waitpid(Pid::from_raw(i32::from_le_bytes(pid)), None)?)),
                Err(_) => Ok(outer),
            }
        }
    }
}

fn code(status: WaitStatus) -> i32 {
    match status {
        WaitStatus::Exited(_, status) => status,
        WaitStatus::Signaled(_, signal, _) => 128 + signal as i32,
        _ => NO_SANDBOX,
    }
}

/// Init's part of a probe.
fn inside(options: &Options, mut init: Init, sent: Option<OwnedFd>, kernel: Option<probe_pooled::Kernel>) -> i32 {
    // A caller that has gone needs no report.
    let _ = set_parent_death_signal(Some(Signal::SIGKILL));
    if let Some(source) = &options.exercise {
        return match super::probe_exercise::run(&mut init, source, sent) {
            Ok(()) => 0,
            Err(error) => {
                eprintln!("{error}");
                1
            }
        };
    }
    let env = [
        ("HOME", "/workspace"),
        ("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"),
        ("LANG", "C.UTF-8"),
        ("TMPDIR", "/tmp"),
        ("USER", "guest"),
        ("RYOKAN_KERNEL", "probe"),
    ];
    let program = EngineProgram::Exec {
        argv: if kernel.is_some() { probe_pooled::waiting(&options.argv) } else { options.argv.clone() },
        env: env.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec(),
        extra_fd: None,
    };
    let engine = init.spawn_engine(program).and_then(|engine| {
        if let Some(kernel) = kernel {
            kernel.enter(&mut init, &engine)?;
        }
        for (inside, source, writable) in &options.binds {
            init.bind(MountSource::Path(source.clone()), inside, *writable)?;
        }
        Ok(engine)
    });
    let engine = match engine {
        Ok(engine) => engine,
        Err(error) => {
            tell(options, &Outcome::failed(&error));
            return NO_SANDBOX;
        }
    };
    if options.report {
        init.report().lines().iter().for_each(|line| eprintln!("{line}"));
    }
    let mut session = Session::new(options, &init, engine.pid);
    let status = session.watch(&init, [engine.stdout, engine.stderr], &engine.pidfd);
    let [stdout, stderr] = session.kept.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    tell(options, &Outcome { report: Some(init.report()), error: None, status, stdout, stderr });
    status
}

/// A run of the program.
struct Session {
    json: bool,
    pid: i32,
    deadline: Instant,
    memory: Option<MemoryWatch>,
    workspace: Option<WorkspaceWatch>,
    kept: [Vec<u8>; 2],
}

impl Session {
    fn new(options: &Options, init: &Init, pid: i32) -> Session {
        let limit = init.workspace_limit();
        Session {
            json: options.json,
            pid,
            deadline: Instant::now() + options.timeout,
            memory: Some(MemoryWatch::new(init)),
            workspace: init.open_workspace().ok().map(|root| WorkspaceWatch::new(root, limit)),
            kept: [Vec::new(), Vec::new()],
        }
    }

    /// Forwards output and enforces the limits until the program has ended.
    fn watch(&mut self, init: &Init, pipes: [OwnedFd; 2], process: &OwnedFd) -> i32 {
        let mut pipes = pipes.map(Some);
        // Nothing grows much within the first delay.
        let mut memory_due = Instant::now() + FIRST_LOOK;
        let mut workspace_due = memory_due;
        let mut ended = None;
        loop {
            let now = Instant::now();
            if now >= self.deadline {
                return self.stop(init, TIMED_OUT, "timeout");
            }
            if let Some(watch) = self.memory.as_ref().filter(|_| now >= memory_due) {
                match watch.tick(init) {
                    Verdict::Within { next_ms } => memory_due = now + Duration::from_millis(next_ms),
                    Verdict::Beyond { used, .. } => return self.stop(init, 137, &format!("{used} bytes of memory")),
                }
            }
            if let Some(watch) = self.workspace.as_mut().filter(|_| now >= workspace_due) {
                match watch.tick() {
                    Verdict::Within { next_ms } => workspace_due = now + Duration::from_millis(next_ms),
                    Verdict::Beyond { used, unit, .. } => {
                        return self.stop(init, 137, &format!("{used} {unit} in the workspace"));
                    }
                }
            }
            for (pid, cause) in init.reap() {
                if pid == self.pid {
                    ended = Some(cause);
                }
            }
            self.pass(&mut pipes);
            if let Some(cause) = ended {
                init.kill_all();
                self.pass(&mut pipes);
                return cause.code();
            }
            let due = self.deadline.min(memory_due).min(workspace_due);
            wait_for_output(&pipes, process, due.saturating_duration_since(Instant::now()));
        }
    }

    fn stop(&self, init: &Init, status: i32, why: &str) -> i32 {
        init.kill_all();
        eprintln!("ryokan-worker probe: killed: {why}");
        status
    }

    /// Forwards the available output.
    fn pass(&mut self, pipes: &mut [Option<OwnedFd>; 2]) {
        for (i, pipe) in pipes.iter_mut().enumerate() {
            let mut buffer = [0; 64 << 10];
            while let Some(fd) = pipe.as_ref() {
                match nix::unistd::read(fd, &mut buffer) {
                    Ok(0) => *pipe = None,
                    Ok(length) => self.keep(i, &buffer[..length]),
                    Err(_) => break,
                }
            }
        }
    }

    fn keep(&mut self, stream: usize, bytes: &[u8]) {
        let kept = &mut self.kept[stream];
        if self.json {
            kept.extend_from_slice(&bytes[..bytes.len().min(KEPT.saturating_sub(kept.len()))]);
        } else if stream == 0 {
            let _ = std::io::stdout().write_all(bytes).and_then(|()| std::io::stdout().flush());
        } else {
            let _ = std::io::stderr().write_all(bytes);
        }
    }
}

fn wait_for_output(pipes: &[Option<OwnedFd>; 2], process: &OwnedFd, at_most: Duration) {
    let mut fds = vec![PollFd::new(process.as_fd(), PollFlags::POLLIN)];
    fds.extend(pipes.iter().flatten().map(|fd| PollFd::new(fd.as_fd(), PollFlags::POLLIN)));
    // Rounded up, so that what is due at the end of the wait is due.
    let timeout = PollTimeout::try_from(at_most + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
    let _ = poll(&mut fds, timeout);
}

impl<'a> Outcome<'a> {
    fn failed(error: &'a SandboxError) -> Outcome<'a> {
        Outcome { report: None, error: Some(error), status: NO_SANDBOX, stdout: String::new(), stderr: String::new() }
    }
}

fn tell(options: &Options, outcome: &Outcome<'_>) {
    if options.json {
        let text = serde_json::to_string(outcome).unwrap_or_default();
        // A reader that left wants no more output.
        let _ = writeln!(std::io::stdout(), "{text}");
    } else if let Some(error) = outcome.error {
        eprintln!("ryokan-worker probe: {error}\n  hint: {}", error.hint);
    }
}
