//! Signals and disconnecting readers, against the fake.

use std::io::Read;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::command_line::{parts, ryokan};
use super::fake::Fake;
use crate::support::until;

/// Starts an execution and waits for its first output.
fn start(fake: &Fake, args: &[&str]) -> (Child, ChildStdout) {
    start_under(fake, "--default-signal=HUP", args)
}

/// The same with the signals that `env` sets, because the tests may run with ignored ones.
fn start_under(fake: &Fake, signals: &str, args: &[&str]) -> (Child, ChildStdout) {
    let bare = ryokan(fake, args);
    let mut command = Command::new("env");
    command.arg(signals).arg(bare.get_program()).args(bare.get_args());
    command.envs(bare.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let mut said = [0; 8];
    stdout.read_exact(&mut said).unwrap();
    assert_eq!(&said, b"waiting\n");
    (child, stdout)
}

fn send(child: &Child, signal: Signal) {
    kill(Pid::from_raw(child.id() as i32), signal).unwrap();
}

#[test]
fn ctrl_c_interrupts_execution() {
    let fake = Fake::start();
    let (child, _stdout) = start(&fake, &["exec", "demo", "wait"]);
    send(&child, Signal::SIGINT);
    assert_eq!(parts(child.wait_with_output().unwrap()).0, 130);
    assert!(fake.log.has("interrupt 1"));
}

#[test]
fn second_ctrl_c_exits_at_once() {
    let fake = Fake::start();
    let (child, _stdout) = start(&fake, &["exec", "demo", "stubborn"]);
    send(&child, Signal::SIGINT);
    fake.log.wait_for("interrupt 1");
    send(&child, Signal::SIGINT);
    let (exit, _, stderr) = parts(child.wait_with_output().unwrap());
    assert_eq!(exit, 130);
    let said = "execution 1 was interrupted; if it does not stop, its worker is killed 5 s after the interrupt; \
                attach to it: ryokan exec demo --attach 1";
    assert!(stderr.contains(said), "{stderr}");
    let (again, _stdout) = start(&fake, &["exec", "demo", "--attach", "1"]);
    send(&again, Signal::SIGTERM);
    assert_eq!(parts(again.wait_with_output().unwrap()).0, 143);
}

#[test]
fn nohup_ignores_sighup() {
    let fake = Fake::start();
    let (child, _stdout) = start_under(&fake, "--ignore-signal=HUP", &["exec", "demo", "wait"]);
    send(&child, Signal::SIGHUP);
    std::thread::sleep(Duration::from_millis(300));
    send(&child, Signal::SIGTERM);
    assert_eq!(parts(child.wait_with_output().unwrap()).0, 143, "it was there to be terminated");
}

#[test]
fn sigterm_leaves_execution_running() {
    let fake = Fake::start();
    for (signal, exit) in [(Signal::SIGTERM, 143), (Signal::SIGHUP, 129)] {
        let (child, _stdout) = start(&fake, &["exec", "demo", "wait"]);
        send(&child, signal);
        assert_eq!(parts(child.wait_with_output().unwrap()).0, exit, "{signal}");
    }
    assert!(!fake.log.lines().iter().any(|line| line.starts_with("interrupt")));
}

#[test]
fn closed_stdout_ends_quietly() {
    let fake = Fake::start();
    let mut child = ryokan(&fake, &["exec", "demo", "flood"]).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 100]).unwrap();
    drop(stdout);
    let (exit, _, stderr) = parts(child.wait_with_output().unwrap());
    assert_eq!((exit, stderr.as_str()), (141, ""));
    assert!(fake.log.has("interrupt 1"));
}

#[test]
fn ctrl_c_works_with_stalled_reader() {
    let fake = Fake::start();
    let mut child = ryokan(&fake, &["exec", "demo", "flood"]).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    fake.log.wait_for("chunk");
    std::thread::sleep(Duration::from_millis(300));
    send(&child, Signal::SIGINT);
    fake.log.wait_for("interrupt 1");
    std::io::copy(&mut stdout, &mut std::io::sink()).unwrap();
    assert_eq!(parts(child.wait_with_output().unwrap()).0, 130);
}

#[test]
fn ctrl_c_removes_ephemeral_kernel() {
    let fake = Fake::start();
    let interrupts = || fake.log.lines().iter().filter(|line| line.starts_with("interrupt ")).count();
    for (code, times, exit) in [("wait", 1, 130), ("stubborn", 2, 130)] {
        let (child, _stdout) = start(&fake, &["run", code]);
        let before = interrupts();
        for i in 0..times {
            if i > 0 {
                until("it is interrupted", || interrupts() > before);
            }
            send(&child, Signal::SIGINT);
        }
        assert_eq!(parts(child.wait_with_output().unwrap()).0, exit, "{code}");
    }
    let (child, _stdout) = start(&fake, &["run", "wait"]);
    send(&child, Signal::SIGTERM);
    assert_eq!(parts(child.wait_with_output().unwrap()).0, 143);
    let removed = fake.log.lines().iter().filter(|line| line.starts_with("remove run-")).count();
    assert_eq!(removed, 3, "{:?}", fake.log.lines());
}

#[test]
fn ctrl_c_works_with_open_stdin() {
    let fake = Fake::start();
    let mut child = ryokan(&fake, &["exec", "demo", "cat", "--stdin"]).stdin(Stdio::piped()).spawn().unwrap();
    let stdin = child.stdin.take().unwrap();
    fake.log.wait_for("exec cat");
    std::thread::sleep(Duration::from_millis(100));
    send(&child, Signal::SIGINT);
    assert_eq!(parts(child.wait_with_output().unwrap()).0, 130);
    drop(stdin);
}
