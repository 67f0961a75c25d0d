//! Tests init's operations beyond starting a program: `ryokan-worker probe --exercise SOURCE --
//! PROGRAM…`, where SOURCE is a host folder with a file `file`. For the tests; init's operations
//! cannot be tested from outside.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::sandbox::{EngineProcess, EngineProgram, Init, MountSource};

type Outcome = Result<(), String>;

/// Runs every exercise; returns the first failure.
pub(super) fn run(init: &mut Init, source: &Path, sent: Option<OwnedFd>) -> Outcome {
    if let Some(tree) = sent {
        sent_mount(init, source, tree)?;
    }
    live_mounts(init, source)?;
    usage_and_kill(init)?;
    call(init)?;
    extra_descriptor(init)
}

fn sh(script: &str) -> EngineProgram {
    let argv = ["/bin/sh", "-c", script].map(String::from).to_vec();
    EngineProgram::Exec { argv, env: vec![("PATH".into(), "/usr/bin:/bin".into())], extra_fd: None }
}

fn spawn(init: &mut Init, program: EngineProgram) -> Result<EngineProcess, String> {
    init.spawn_engine(program).map_err(|error| error.to_string())
}

/// The program's output until it ends.
fn output(init: &Init, engine: &EngineProcess) -> Result<String, String> {
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut text = Vec::new();
    while Instant::now() < deadline {
        let mut fds = [PollFd::new(engine.stdout.as_fd(), PollFlags::POLLIN)];
        let _ = poll(&mut fds, PollTimeout::from(100u8));
        let mut buffer = [0; 4096];
        match nix::unistd::read(&engine.stdout, &mut buffer) {
            Ok(0) => {
                while init.reap().iter().all(|(pid, _)| *pid != engine.pid) && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(1));
                }
                return Ok(String::from_utf8_lossy(&text).trim().to_owned());
            }
            Ok(length) => text.extend_from_slice(&buffer[..length]),
            Err(_) => {}
        }
    }
    Err(format!("no end of output: {}", String::from_utf8_lossy(&text)))
}

fn expect(what: &str, got: &str, wanted: &str) -> Outcome {
    if got == wanted { Ok(()) } else { Err(format!("{what}: {got:?} instead of {wanted:?}")) }
}

fn live_mounts(init: &mut Init, source: &Path) -> Outcome {
    let wait = "i=0; while [ ! -e /live/file ] && [ $i -lt 500 ]; do sleep 0.01; i=$((i+1)); done; cat /live/file; \
        touch /live/x 2>/dev/null && echo writable; while [ -e /live/file ] && [ $i -lt 900 ]; do sleep 0.01; i=$((i+1)); done; \
        sleep 0.1; ls -A / | grep -c live";
    let engine = spawn(init, sh(wait))?;
    let bind = |init: &mut Init, inside: &str, writable| {
        init.bind(MountSource::Path(source.to_owned()), Path::new(inside), writable).map_err(|error| error.to_string())
    };
    bind(init, "/live", false)?;
    bind(init, "/workspace/deep/live", true)?;
    for (inside, why) in
        [("/live", "taken"), ("/etc/x", "reserved"), ("/usr/local/x", "reserved"), ("/proc/x", "reserved")]
    {
        if bind(init, inside, false).is_ok() {
            return Err(format!("bound at {inside}, which is {why}"));
        }
    }
    std::thread::sleep(Duration::from_millis(150));
    init.unbind(Path::new("/live")).map_err(|error| error.to_string())?;
    if init.unbind(Path::new("/live")).is_ok() || init.unbind(Path::new("/workspace")).is_ok() {
        return Err("unbound what was not bound".into());
    }
    expect("a live mount", &output(init, &engine)?, "given0")?;
    // Remaining mounts are repeated for the next engine.
    let engine =
        spawn(init, sh("cat /workspace/deep/live/file; ls /live 2>/dev/null; touch /workspace/deep/live/y && echo w"))?;
    expect("a live mount, again", &output(init, &engine)?, "givenw")
}

/// A mount from a root daemon: its owner is mapped to the kernel's user, for this engine and the
/// next.
fn sent_mount(init: &mut Init, source: &Path, tree: OwnedFd) -> Outcome {
    let script = "i=0; while [ ! -e /sent/file ] && [ $i -lt 500 ]; do sleep 0.01; i=$((i+1)); done; cat /sent/file; \
        echo by-kernel > /sent/made && stat -c %u /sent/made";
    let engine = spawn(init, sh(script))?;
    let sent = MountSource::Tree { tree, shows: source.to_owned() };
    init.bind(sent, Path::new("/sent"), true).map_err(|error| error.to_string())?;
    expect("a sent mount", &output(init, &engine)?, "given1000")?;
    let engine = spawn(init, sh("cat /sent/made; rm /sent/made"))?;
    expect("a sent mount, again", &output(init, &engine)?, "by-kernel")?;
    let engine = spawn(init, sh("while [ -e /sent/file ]; do sleep 0.01; done; echo gone"))?;
    init.unbind(Path::new("/sent")).map_err(|error| error.to_string())?;
    expect("a sent mount, taken away", &output(init, &engine)?, "gone")
}

fn usage_and_kill(init: &mut Init) -> Outcome {
    let engine = spawn(init, sh("trap '' TERM; (setsid sleep 60 &); (setsid sleep 60 &); echo up; sleep 60"))?;
    std::thread::sleep(Duration::from_millis(200));
    let usage = init.usage();
    if usage.tasks < 3 || usage.memory_bytes < 100_000 {
        return Err(format!("usage: {usage:?}"));
    }
    init.kill_all();
    expect("output before the kill", &output(init, &engine)?, "up")?;
    std::thread::sleep(Duration::from_millis(50));
    init.reap();
    match init.usage().tasks {
        0 => Ok(()),
        left => Err(format!("{left} tasks survived")),
    }
}

/// Runs inside, in a forked copy of this program.
fn called(_: Vec<String>) -> ! {
    let descriptors = std::fs::read_dir("/proc/self/fd").map(Iterator::count).unwrap_or(0);
    let environment: Vec<String> = std::env::vars().map(|(name, value)| format!("{name}={value}")).collect();
    let refused = std::fs::write("/usr/x", "").is_err() && nix::unistd::chroot("/tmp").is_err();
    println!("{descriptors} {} {refused}", environment.join(" "));
    std::process::exit(0)
}

fn call(init: &mut Init) -> Outcome {
    let engine =
        spawn(init, EngineProgram::Call { entry: called, arguments: Vec::new(), env: vec![("A".into(), "b".into())] })?;
    // Four, and the descriptor that reads the listing.
    expect("a called engine", &output(init, &engine)?, "5 A=b true")
}

fn extra_descriptor(init: &mut Init) -> Outcome {
    let extra = std::fs::File::open("/etc/hostname").map_err(|error| error.to_string())?;
    let argv = ["/bin/sh", "-c", "cat <&4 > /dev/null && echo read"].map(String::from).to_vec();
    let engine = spawn(init, EngineProgram::Exec { argv, env: Vec::new(), extra_fd: Some(extra.into()) })?;
    expect("the extra descriptor", &output(init, &engine)?, "read")?;
    let missing = EngineProgram::Exec { argv: vec!["/usr/bin/none-such".into()], env: Vec::new(), extra_fd: None };
    match spawn(init, missing) {
        Err(error) if error.contains("none-such") => Ok(()),
        other => Err(format!("a program that does not exist: {other:?}")),
    }
}
