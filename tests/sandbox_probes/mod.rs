//! Ways out of the sandbox, each tried: in pairs of a harmless action that works and a malicious one that does not, as root
//! (kernels then run as nobody) and as an ordinary user. Invariant 6: untrusted code never runs outside a fully enforced
//! sandbox.
//!
//! Each pair runs through `ryokan-worker probe`. Where it is cheap, a control shows that the malicious action succeeds
//! without the sandbox, so that the test can fail.

mod files;
mod host;
mod lifecycle;
mod programs;
mod resource_limits;
mod syscalls;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// Who starts the probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Starter {
    /// The tests' own user.
    Own,
    /// An ordinary user, if the tests run as root.
    Ordinary,
    /// The tests' own user, with a kernel bound to a finished sandbox.
    OwnPooled,
    /// The same of an ordinary user.
    OrdinaryPooled,
}

/// The ordinary user.
const UID: u32 = 1500;

impl Starter {
    /// Every user that these tests can run a probe as, with a new sandbox and with a prepared one.
    pub fn all() -> Vec<Starter> {
        let mut all = Starter::fresh();
        all.extend(all.clone().into_iter().map(|starter| match starter {
            Starter::Own | Starter::OwnPooled => Starter::OwnPooled,
            Starter::Ordinary | Starter::OrdinaryPooled => Starter::OrdinaryPooled,
        }));
        all
    }

    /// Every user, each with a new sandbox.
    pub fn fresh() -> Vec<Starter> {
        if nix::unistd::Uid::effective().is_root() { vec![Starter::Own, Starter::Ordinary] } else { vec![Starter::Own] }
    }

    fn is_ordinary(self) -> bool {
        matches!(self, Starter::Ordinary | Starter::OrdinaryPooled)
    }

    fn is_pooled(self) -> bool {
        matches!(self, Starter::OwnPooled | Starter::OrdinaryPooled)
    }

    /// A command that this user runs.
    pub fn command(self, program: impl AsRef<Path>) -> Command {
        if !self.is_ordinary() {
            return Command::new(program.as_ref());
        }
        let mut command = Command::new("setpriv");
        let uid = UID.to_string();
        command.args(["--reuid", &uid, "--regid", &uid, "--clear-groups", "--inh-caps=-all", "--"]);
        command.arg(program.as_ref());
        command
    }

    /// A kernel folder of that user's, with a secret database and a workspace, beside another kernel's.
    pub fn home(self) -> Home {
        Home::new(self)
    }

    /// Runs a shell script in the default sandbox.
    pub fn shell(self, script: &str) -> Ran {
        self.probe(&[], &["/bin/sh", "-c", script])
    }

    /// Runs Python in the default sandbox; `libc`, `sys(number, …)` and `errno` are there.
    pub fn python(self, script: &str) -> Ran {
        self.probe(&[], &["/usr/bin/python3", "-c", &format!("{PRELUDE}{script}")])
    }

    /// Runs a program with options of the probe's own; its time suffices for a slow host, unless they set another.
    pub fn probe(self, options: &[&str], argv: &[&str]) -> Ran {
        let mut command = self.command(worker());
        let pooled = if self.is_pooled() { &["--pooled"][..] } else { &[] };
        command.args(["probe", "--timeout", "300"]).args(pooled).args(options).arg("--").args(argv);
        command.stdin(Stdio::null());
        Ran(command.output().expect("the worker can be run"))
    }
}

/// For scripts that make system calls by number.
pub const PRELUDE: &str = r"
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def sys_(*a):
    ctypes.set_errno(0)
    r = libc.syscall(*[ctypes.c_long(x) if isinstance(x, int) else x for x in a])
    return r if r >= 0 else -ctypes.get_errno()
def name(r):
    return errno.errorcode.get(-r, str(r)) if r < 0 else 'OK'
";

/// The binary under test, in a place that every user can reach.
pub fn worker() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_ryokan-worker"))
}

/// The result of a run.
pub struct Ran(Output);

impl Ran {
    pub fn out(&self) -> String {
        String::from_utf8_lossy(&self.0.stdout).trim().to_owned()
    }

    pub fn err(&self) -> String {
        String::from_utf8_lossy(&self.0.stderr).trim().to_owned()
    }

    pub fn code(&self) -> i32 {
        self.0.status.code().unwrap_or(-1)
    }

    /// It succeeded and printed this.
    #[track_caller]
    pub fn prints(&self, expected: &str) {
        assert_eq!((self.code(), self.out().as_str()), (0, expected), "stderr: {}", self.err());
    }

    /// It failed and said this on either stream.
    #[track_caller]
    pub fn fails_with(&self, said: &str) {
        let all = format!("{}\n{}", self.out(), self.err());
        assert!(self.code() != 0 && self.code() != 125 && all.contains(said), "status {}: {all}", self.code());
    }

    /// There was no sandbox, for this reason.
    #[track_caller]
    pub fn is_refused(&self, why: &str) {
        assert!(self.code() == 125 && self.err().contains(why), "status {}: {}", self.code(), self.err());
    }
}

/// A folder with two kernels, as a daemon of that user keeps them.
pub struct Home {
    pub root: tempfile::TempDir,
    pub starter: Starter,
}

impl Home {
    fn new(starter: Starter) -> Home {
        let root = tempfile::Builder::new().prefix("ryokan-t").tempdir_in("/tmp").expect("a folder");
        let home = Home { root, starter };
        let data = home.path("data");
        for kernel in ["mine", "other"] {
            let folder = data.join(kernel);
            std::fs::create_dir_all(folder.join("workspace")).expect("made");
            std::fs::write(folder.join("engine.db"), format!("SECRET-{kernel}")).expect("written");
            std::fs::write(folder.join("state.db"), "SECRET-state").expect("written");
            std::fs::write(folder.join("workspace/note"), format!("note of {kernel}")).expect("written");
        }
        std::fs::create_dir_all(home.path("given/sub")).expect("made");
        std::fs::write(home.path("given/file"), "given").expect("written");
        home.own(home.root.path());
        home
    }

    /// Gives everything to whom the daemon runs as.
    pub fn own(&self, path: &Path) {
        if self.starter.is_ordinary() {
            let owner = format!("{UID}:{UID}");
            let status = Command::new("chown").args(["-R", &owner]).arg(path).status();
            assert!(status.is_ok_and(|status| status.success()));
        }
    }

    pub fn path(&self, below: &str) -> PathBuf {
        self.root.path().join(below)
    }

    /// A plan for the kernel `mine`, with more fields of it as JSON.
    pub fn plan(&self, more: serde_json::Value) -> String {
        let mut plan = ryokan::sandbox::SandboxPlan::new(self.path("data/mine"));
        plan.hostname = "mine".into();
        plan.protected = vec![self.path("data")];
        if !self.starter.is_ordinary() && nix::unistd::Uid::effective().is_root() {
            plan.run_as = Some(ryokan::sandbox::RunAs { uid: 65534, gid: 65534, map_root: true });
        }
        let mut json = serde_json::to_value(plan).expect("a plan is JSON");
        let object = json.as_object_mut().expect("a plan is an object");
        object.extend(more.as_object().cloned().unwrap_or_default());
        let is_mapped = object["run_as"]["map_root"] == true;
        for mount in object["mounts"].as_array_mut().into_iter().flatten() {
            mount["is_mapped"] = is_mapped.into();
        }
        json.to_string()
    }

    /// A shell script in the kernel `mine`.
    pub fn shell(&self, more: serde_json::Value, script: &str) -> Ran {
        self.starter.probe(&["--plan", &self.plan(more)], &["/bin/sh", "-c", script])
    }
}

/// A pair: an action that works, and one that fails.
pub struct Pair {
    pub what: &'static str,
    pub harmless: &'static str,
    pub malicious: &'static str,
    /// The malicious action's error message.
    pub says: &'static str,
}

/// Runs pairs of shell scripts as every user.
///
/// A harmless script exits with status 0; a malicious one with another status and the expected
/// message.
pub fn run_pairs(pairs: &[Pair], run: impl Fn(Starter, &str) -> Ran) {
    for starter in Starter::all() {
        for pair in pairs {
            let harmless = run(starter, pair.harmless);
            let (code, out, err) = (harmless.code(), harmless.out(), harmless.err());
            assert_eq!(code, 0, "{starter:?}, harmless side of {:?}: {out} {err}", pair.what);
            let malicious = run(starter, pair.malicious);
            let all = format!("{}\n{}", malicious.out(), malicious.err());
            let (code, expected) = (malicious.code(), pair.says);
            assert!(
                code != 0 && code != 125 && all.contains(expected),
                "{starter:?}, malicious side of {:?}: status {code}, expected {expected:?}: {all}",
                pair.what
            );
        }
    }
}
