//! Suspended machines: memory is kept, the guest stands still, and what a stop keeps does not depend on it.

use std::time::Duration;

use nix::sys::signal::Signal;

use super::{Machines, ask};
use crate::support::{Host, User, until, users};

/// A generator is in memory only; the number is saved, too.
const MEMORY: &str = "g = iter(range(100)); next(g); saved = 42; open('f', 'w').write('kept')";
/// The guest's clock.
const TIME: &str = "import time; print(int(time.time()))";

fn state(host: &Host) -> String {
    let shown: serde_json::Value = serde_json::from_str(&host.ok(&["show", "lab", "--json"])).expect("JSON");
    shown["state"].as_str().expect("a state").to_owned()
}

/// A kernel with a value in memory, and its machine.
fn kernel(host: &Machines) -> u32 {
    host.ok(&["new", "lab", "--isolation", "microvm", "--engine", "python"]);
    host.run("lab", MEMORY);
    machine(host)
}

fn machine(host: &Machines) -> u32 {
    match host.machines()[..] {
        [machine] => machine,
        ref other => panic!("one machine, not {other:?}\n{}", host.log()),
    }
}

fn is_paused(machine: u32) -> bool {
    ask(machine, r#"{"execute": "query-status"}"#).is_some_and(|status| status.contains("\"paused\""))
}

#[test]
fn suspended_machine_keeps_memory() {
    for user in users() {
        let host = Machines::start(user);
        let machine = kernel(&host);
        host.ok(&["spawn", "lab", "-d", "--", "sh", "-c", "while :; do date >> ticks; sleep 0.1; done"]);
        assert_eq!(host.ok(&["suspend", "lab"]), "lab is suspended\n");
        assert!(is_paused(machine), "{user:?}");
        assert_eq!(state(&host), "suspended", "a listing does not ask the guest");
        let used = cpu(machine);
        // Files are read, and nothing is changed by it.
        assert_eq!(host.ok(&["cp", "lab:f", "-"]), "kept", "{user:?}");
        let before = host.ok(&["cp", "lab:ticks", "-"]);
        std::thread::sleep(Duration::from_secs(3));
        assert_eq!(host.ok(&["cp", "lab:ticks", "-"]), before, "{user:?}: a suspended process wrote");
        assert!(cpu(machine) <= used + 10, "{user:?}: a suspended machine used the processor");
        assert!(!host.cli(&["kill", "lab", "2", "-s", "TERM"]).status.success(), "the guest does not answer");
        assert_eq!(host.ok(&["resume", "lab"]), "lab is ready\n");
        assert!(!is_paused(machine));
        assert_eq!(host.run("lab", "print(next(g), saved)"), "1 42", "{user:?}\n{}", host.log());
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_secs();
        let clock: u64 = host.run("lab", TIME).parse().expect("a time");
        assert!(now.abs_diff(clock) < 3, "{user:?}: the guest's clock is {clock}, not {now}");
        // The use of a suspended kernel resumes it, and it stops as any other.
        host.ok(&["suspend", "lab"]);
        host.ok(&["checkpoint", "lab", "-m", "one"]);
        assert_eq!(host.run("lab", "print(next(g))"), "2");
        host.ok(&["suspend", "lab"]);
        host.ok(&["stop", "lab"]);
        assert_eq!(host.run("lab", "print(saved, open('f').read())"), "42 kept", "{user:?}\n{}", host.log());
    }
}

/// Processor time of a process, clock ticks.
fn cpu(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    let fields: Vec<u64> =
        text.rsplit(')').next().expect("fields").split_whitespace().map(|field| field.parse().unwrap_or(0)).collect();
    fields[11] + fields[12]
}

#[test]
fn next_daemon_adopts_suspended_machine() {
    for user in users() {
        let mut host = Machines::start(user);
        let machine = kernel(&host);
        host.ok(&["suspend", "lab"]);
        host.kill();
        assert!(is_paused(machine));
        host.launch();
        assert_eq!(state(&host), "suspended", "{}", host.log());
        until("the adopted machine's pause", || is_paused(machine));
        assert_eq!(host.run("lab", "print(next(g))"), "1", "{user:?}\n{}", host.log());
        assert_eq!(self::machine(&host), machine, "{user:?}");
        // The end of the daemon stops a suspended kernel as any other.
        host.ok(&["suspend", "lab"]);
        host.signal(Signal::SIGTERM);
        host.wait();
        assert!(!Host::is_alive(machine), "{user:?}");
        host.launch();
        assert_eq!(state(&host), "stopped");
        assert_eq!(host.run("lab", "print(saved, open('f').read())"), "42 kept", "{user:?}\n{}", host.log());
    }
}

#[test]
fn dead_suspended_machine_is_stopped() {
    let mut host = Machines::start(User::Own);
    kernel(&host);
    host.ok(&["suspend", "lab"]);
    host.kill_machines();
    until("the kernel is stopped", || state(&host) == "stopped");
    assert_eq!(host.cli(&["resume", "lab"]).status.code(), Some(4));
    assert_eq!(host.run("lab", "print(saved, open('f').read())"), "42 kept", "{}", host.log());
    host.ok(&["suspend", "lab"]);
    host.kill();
    host.kill_machines();
    host.launch();
    assert_eq!(state(&host), "stopped", "{}", host.log());
    assert_eq!(host.run("lab", "print(saved, open('f').read())"), "42 kept", "{}", host.log());
}

#[test]
fn killed_suspend_of_machine_is_recovered() {
    use ryokan::sys::fault;

    let mut host = Machines::start(User::Own);
    let machine = kernel(&host);
    let points = [
        ("suspend", "kernel.worker.suspend", "ready"),
        ("suspend", "catalog.kernel.update.before_commit", "suspended"),
        ("resume", "kernel.worker.resume", "suspended"),
    ];
    for (at, (command, point, found)) in points.into_iter().enumerate() {
        if command == "resume" {
            host.ok(&["suspend", "lab"]);
        }
        host.kill();
        host.env(fault::VARIABLE, &format!("{point}=kill"));
        host.launch();
        host.cli(&[command, "lab"]);
        assert!(host.ends(), "{point} was not reached\n{}", host.log());
        host.kill();
        host.env(fault::VARIABLE, "");
        host.launch();
        assert_eq!(state(&host), found, "{point}");
        assert_eq!(host.run("lab", "print(next(g))"), (at + 1).to_string(), "{point}\n{}", host.log());
        assert_eq!(self::machine(&host), machine, "{point}");
    }
}
