//! Suspend and resume: memory is kept, nothing runs meanwhile, and nothing saved depends on it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use ryokan::core::engine::EngineName;
use ryokan::sys::fault;

use crate::faults::fault_points::ELSEWHERE;
use crate::pool::worker_of;
use crate::support::{Host, User, until, users};

/// Time in which a running process would write many times.
const MOMENT: Duration = Duration::from_millis(400);

/// A generator is in memory only; the number is saved, too.
const MEMORY: &str = "g = iter(range(100)); next(g); saved = 42";

/// Writes a growing file until its kernel ends.
const TICKER: &str = "i=0; while [ $i -lt 100000 ]; do echo tick >> ticks; i=$((i+1)); sleep 0.02; done";

fn state(host: &Host, name: &str) -> String {
    let shown: serde_json::Value = serde_json::from_str(&host.ok(&["show", name, "--json"])).expect("JSON");
    shown["state"].as_str().expect("a state").to_owned()
}

fn exec(host: &Host, name: &str, code: &str) -> String {
    host.ok(&["exec", name, code]).trim().to_owned()
}

/// A Python kernel with a value in memory and a process that writes.
fn busy_kernel(host: &Host, name: &str) {
    host.ok(&["new", name, "--engine", "python"]);
    exec(host, name, MEMORY);
    host.ok(&["spawn", name, "-d", "--", "sh", "-c", TICKER]);
    until("the process writes", || ticks(host) > 0);
}

fn ticks(host: &Host) -> u64 {
    let folders = std::fs::read_dir(host.data().join("kernels")).expect("kernels").flatten();
    let file = |folder: std::fs::DirEntry| -> PathBuf { folder.path().join("workspace/ticks") };
    folders.filter_map(|folder| std::fs::metadata(file(folder)).ok()).map(|found| found.len()).sum()
}

fn assert_paused(host: &Host) {
    let before = ticks(host);
    std::thread::sleep(MOMENT);
    assert_eq!(ticks(host), before, "a paused process wrote");
}

#[test]
fn suspend_no_faults() {
    for user in users() {
        let host = Host::start_as(user);
        busy_kernel(&host, "k");
        let worker = worker_of(&host, "k");
        assert_eq!(host.ok(&["suspend", "k"]), "k is suspended\n");
        host.ok(&["suspend", "k"]);
        assert_eq!(state(&host, "k"), "suspended");
        assert!(host.ok(&["ls", "--state", "suspended", "-q"]).contains('k'));
        assert_paused(&host);
        assert_eq!(host.ok(&["resume", "k"]), "k is ready\n");
        let before = ticks(&host);
        until("the process writes again", || ticks(&host) > before);
        assert_eq!((exec(&host, "k", "print(next(g))"), worker_of(&host, "k")), ("1".into(), worker), "{user:?}");
    }
}

#[test]
fn every_engine_resumes() {
    let host = Host::start();
    for engine in EngineName::ALL {
        let name = engine.name();
        host.ok(&["new", name, "--engine", name]);
        host.ok(&["start", name]);
        host.ok(&["suspend", name]);
        // The use of a suspended kernel resumes it.
        let code = if matches!(engine, EngineName::Node | EngineName::Python) { "1 + 1" } else { "echo 2" };
        assert_eq!((exec(&host, name, code).as_str(), state(&host, name).as_str()), ("2", "ready"), "{name}");
    }
}

#[test]
fn suspended_kernel_stays_suspended() {
    let host = Host::start();
    host.ok(&["new", "k", "--engine", "python", "--idle-timeout", "5s"]);
    exec(&host, "k", MEMORY);
    host.ok(&["suspend", "k"]);
    std::thread::sleep(Duration::from_secs(7));
    host.ok(&["journal", "k"]);
    assert_eq!(state(&host, "k"), "suspended");
    assert_eq!(exec(&host, "k", "print(next(g))"), "1");
    until("the idle time counts again", || state(&host, "k") == "stopped");
}

#[test]
fn pause_does_not_count_as_runtime() {
    let host = Host::start();
    host.ok(&["new", "k", "--engine", "bash"]);
    host.ok(&["start", "k"]);
    let mut spawned = host.command("ryokan");
    let code = "echo up > up; until test -e go; do sleep 0.05; done";
    spawned.args(["--no-autostart", "spawn", "k", "--timeout", "15s", "--", "sh", "-c", code]);
    let mut spawned = spawned.spawn().expect("it runs");
    let shown: serde_json::Value = serde_json::from_str(&host.ok(&["show", "k", "--json"])).expect("JSON");
    let folder = host.workspace(shown["id"].as_str().expect("an id"));
    until("the process runs", || folder.join("up").exists());
    host.ok(&["suspend", "k"]);
    std::thread::sleep(Duration::from_secs(16));
    std::fs::write(folder.join("go"), "").expect("written");
    host.ok(&["resume", "k"]);
    assert!(spawned.wait().expect("it ends").success(), "the pause counted");
}

#[test]
fn suspend_waits_or_interrupts() {
    let host = Host::start();
    host.ok(&["new", "k", "--engine", "python"]);
    exec(&host, "k", MEMORY);
    let mut long = host.command("ryokan");
    long.args(["--no-autostart", "exec", "k", "import time; time.sleep(600)"]);
    let mut long = long.spawn().expect("it runs");
    until("it runs", || state(&host, "k") == "busy");
    let begun = Instant::now();
    host.ok(&["suspend", "k", "--interrupt"]);
    assert!(begun.elapsed() < Duration::from_secs(300), "it waited for the code");
    assert!(!long.wait().expect("it ends").success());
    assert_eq!((state(&host, "k").as_str(), exec(&host, "k", "print(next(g))").as_str()), ("suspended", "1"));
}

#[test]
fn next_daemon_adopts_suspended() {
    for user in users() {
        let mut host = Host::start_as(user);
        busy_kernel(&host, "k");
        host.ok(&["suspend", "k"]);
        let worker = worker_of(&host, "k");
        host.kill();
        assert_paused(&host);
        host.launch();
        assert_eq!(state(&host, "k"), "suspended");
        assert_paused(&host);
        assert_eq!((exec(&host, "k", "print(next(g))"), worker_of(&host, "k")), ("1".into(), worker));
    }
}

#[test]
fn dead_worker_is_stopped() {
    let host = Host::start();
    host.ok(&["new", "k", "--engine", "python"]);
    exec(&host, "k", MEMORY);
    host.ok(&["suspend", "k"]);
    kill(Pid::from_raw(worker_of(&host, "k") as i32), Signal::SIGKILL).expect("killed");
    until("the kernel is stopped", || state(&host, "k") == "stopped");
    let refused = host.cli(&["resume", "k"]);
    assert_eq!(refused.status.code(), Some(4), "{}", String::from_utf8_lossy(&refused.stderr));
    assert_eq!(host.cli(&["suspend", "k"]).status.code(), Some(4));
    assert_eq!(exec(&host, "k", "print(saved)"), "42");
}

#[test]
fn suspended_kernel_is_stopped_or_removed() {
    let mut host = Host::start();
    host.ok(&["new", "a", "--engine", "python"]);
    host.ok(&["new", "b"]);
    host.ok(&["new", "idle"]);
    exec(&host, "a", MEMORY);
    exec(&host, "b", "x=1");
    let listed = host.ok(&["suspend", "--all"]);
    assert!(listed.contains("a is suspended") && listed.contains("b is suspended"), "{listed}");
    assert_eq!(state(&host, "idle"), "created");
    let listed = host.ok(&["resume", "--all"]);
    assert!(listed.contains("a is ready") && listed.contains("b is ready"), "{listed}");
    host.ok(&["suspend", "--all"]);
    host.ok(&["stop", "a"]);
    assert_eq!((state(&host, "a").as_str(), exec(&host, "a", "print(saved)").as_str()), ("stopped", "42"));
    host.ok(&["suspend", "a"]);
    host.ok(&["--yes", "rm", "b"]);
    // The end of the daemon stops a suspended kernel as any other.
    let worker = worker_of(&host, "a");
    host.signal(Signal::SIGTERM);
    host.wait();
    assert!(!Host::is_alive(worker));
    host.launch();
    assert_eq!((state(&host, "a").as_str(), exec(&host, "a", "print(saved)").as_str()), ("stopped", "42"));
}

/// Sessions of one workspace pause each other for a capture.
#[test]
fn capture_resumes_no_suspended_thread() {
    let host = Host::start();
    host.ok(&["new", "owner", "--engine", "bash"]);
    host.ok(&["new", "thread", "--share", "owner", "--engine", "bash"]);
    exec(&host, "owner", "echo 1 > file");
    exec(&host, "thread", &format!("({TICKER}) & true"));
    until("the job writes", || ticks(&host) > 0);
    host.ok(&["suspend", "thread"]);
    host.ok(&["checkpoint", "owner"]);
    assert_eq!(state(&host, "thread"), "suspended");
    assert_paused(&host);
    host.ok(&["resume", "thread"]);
    let before = ticks(&host);
    until("the job writes again", || ticks(&host) > before);
}

#[test]
fn suspend_crash_faults() {
    let mut host = Host::prepare(*users().last().expect("a user"));
    host.launch();
    host.ok(&["new", "k", "--engine", "python"]);
    exec(&host, "k", MEMORY);
    let worker = worker_of(&host, "k");
    let suspend =
        ["kernel.worker.suspend", "catalog.kernel.update.before_commit", "catalog.kernel.update.after_commit"];
    let resume = ["kernel.worker.resume"];
    let all = suspend.map(|point| ("suspend", point)).into_iter().chain(resume.map(|point| ("resume", point)));
    for (at, (command, point)) in all.enumerate() {
        if command == "resume" {
            host.ok(&["suspend", "k"]);
        }
        host.kill();
        host.env(fault::VARIABLE, &format!("{point}=kill"));
        host.launch();
        host.cli(&[command, "k"]);
        assert!(host.ends(), "{point} was not reached\n{}", host.log());
        host.kill();
        host.env(fault::VARIABLE, "");
        host.launch();
        let was_paused = command == "resume" || point.starts_with("catalog");
        assert_eq!(state(&host, "k"), if was_paused { "suspended" } else { "ready" }, "{point}");
        // The same worker, with its memory.
        assert_eq!(exec(&host, "k", "print(next(g))"), (at + 1).to_string(), "{point}");
        assert_eq!(worker_of(&host, "k"), worker, "{point}");
    }
    for label in ["kernel.worker.suspend", "kernel.worker.resume"] {
        assert!(ELSEWHERE.contains(&(label, "tests/suspend")));
    }
}

#[test]
fn failed_suspend_changes_nothing() {
    let mut host = Host::prepare(User::Own);
    host.env(fault::VARIABLE, "kernel.worker.suspend=eio");
    host.launch();
    host.ok(&["new", "k", "--engine", "python"]);
    exec(&host, "k", MEMORY);
    assert!(!host.cli(&["suspend", "k"]).status.success());
    assert_eq!((state(&host, "k").as_str(), exec(&host, "k", "print(next(g))").as_str()), ("ready", "1"));
}

#[test]
fn large_memory_is_not_suspended() {
    let mut host = Host::prepare(User::Own);
    host.configure("[limits]\nsuspended_memory = \"100MiB\"\n");
    host.launch();
    host.ok(&["new", "k", "--engine", "python"]);
    exec(&host, "k", &format!("{MEMORY}; big = bytearray(b'x') * (120 << 20)"));
    let refused = host.cli(&["--json", "suspend", "k"]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(4), "{said}");
    assert!(said.contains("kind suspend") && said.contains("suspended_memory"), "{said}");
    assert_eq!((state(&host, "k").as_str(), exec(&host, "k", "print(next(g)); del big").as_str()), ("ready", "1"));
    host.ok(&["suspend", "k"]);
    assert_eq!(exec(&host, "k", "print(next(g))"), "2");
}

#[test]
fn leased_kernel_is_not_suspended() {
    let host = Host::start();
    host.with(async |client| {
        let k = crate::support::kernel(&client, "k", EngineName::Bash).await;
        crate::support::run(&k, "x=1").await;
        let _lease = k.lease("me", Duration::from_secs(60), &[]).await.expect("leased");
        assert_eq!(k.suspend(false, false, false).await.expect_err("leased").reason, "lease");
    });
}
