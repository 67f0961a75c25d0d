//! Known failures of comparable pools, with virtual machines. Those that the policy decides are in
//! `core::pool::regressions`: a pool of machines is opened by a kernel, and has no `min_idle` once it is quiet.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use ryokan::sys::fault;
use serde_json::{Value, json};

use super::warm::{POOL, is_restored};
use super::{Machines, NEW_LAB, has_open, image};
use crate::support::{Host, User, until};

impl Machines {
    /// The sum of a number over all pools.
    fn pool(&self, number: &str) -> u64 {
        let pools: Value = serde_json::from_str(&self.ok(&["pool", "--json"])).expect("JSON");
        pools.as_array().expect("a list").iter().filter_map(|pool| pool[number].as_u64()).sum()
    }
}

fn end(pid: u32) {
    kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL).expect("it runs");
}

/// Another pool counted dead machines as idle, and handed them out.
#[test]
fn dead_parked_machine_is_not_granted() {
    let host = Machines::configured(User::Own, POOL);
    let dead = host.warm_up();
    let destroyed = host.pool("total_destroyed");
    end(dead);
    // A kernel at once, whether the daemon has noticed it or not.
    host.ok(&NEW_LAB);
    assert_eq!(host.run("lab", "print(1)"), "1", "{}", host.log());
    assert!(!host.machines().contains(&dead) && !Host::is_alive(dead));
    assert!(host.pool("total_destroyed") > destroyed, "{}", host.ok(&["pool", "--json"]));
    let next = host.await_restored();
    assert_ne!(next, dead);
    // Its end is noticed without a request, too.
    end(next);
    until("the daemon's notice", || host.pool("idle") == 0 || !host.parked().is_empty());
}

/// Another pool was not refilled after requests that were cancelled while they waited.
#[test]
fn cancelled_request_refills_pool() {
    let host = Machines::configured(User::Own, POOL);
    end(host.warm_up());
    host.ok(&["new", "gone", "--isolation", "microvm", "--engine", "python"]);
    let waiting = host.begin("gone", "print(1)");
    until("its start", || host.ok(&["show", "gone", "--json"]).contains("\"starting\""));
    host.ok(&["rm", "gone", "--yes"]);
    waiting.wait_with_output().expect("it ends");
    host.await_restored();
}

/// Another pool was closed twice: here a second signal arrives while the first one ends its machines.
#[test]
fn second_stop_is_noop() {
    let mut host = Machines::configured(User::Own, POOL);
    host.warm_up();
    host.signal(Signal::SIGTERM);
    host.signal(Signal::SIGTERM);
    assert!(host.wait().success(), "{}", host.log());
    until("the end of every machine", || host.all().is_empty());
}

/// Another pool exceeded its maximum because machines in creation did not count, and its totals never fell.
#[test]
fn burst_stays_below_max() {
    let host = Machines::configured(User::Own, POOL);
    host.warm_up();
    let mut kernels = ["one", "two", "three"].map(|name| {
        host.ok(&["new", name, "--isolation", "microvm", "--engine", "python"]);
        host.begin(name, "print(1)")
    });
    while kernels.iter_mut().any(|kernel| kernel.try_wait().expect("a child").is_none()) {
        let pools: Value = serde_json::from_str(&host.ok(&["pool", "--json"])).expect("JSON");
        for pool in pools.as_array().expect("a list") {
            let number = |name: &str| pool[name].as_u64().expect("a number");
            assert!(number("idle") + number("creating") <= number("max_pool_size"), "{pool}");
        }
    }
    for kernel in kernels {
        let output = kernel.wait_with_output().expect("it ends");
        assert!(output.status.success(), "{output:?}\n{}", host.log());
    }
    host.await_restored();
    let (total, active) = (host.pool("total"), host.pool("active"));
    assert!(active > 0, "{}", host.ok(&["pool", "--json"]));
    host.ok(&["rm", "first", "one", "two", "three", "--yes"]);
    until("lower totals", || host.pool("active") == 0 && host.pool("total") < total);
}

/// Another pool asked only whether a machine's process was there: one that hung was handed out.
#[test]
fn hung_parked_machine_is_not_granted() {
    let host = Machines::configured(User::Own, &format!("{POOL}maintenance_interval = \"1s\"\n"));
    let stop = |pid: u32| kill(Pid::from_raw(pid.cast_signed()), Signal::SIGSTOP).expect("it runs");
    let hung = host.warm_up();
    stop(hung);
    // The pool asks, and replaces it.
    until("the machine's end", || !Host::is_alive(hung));
    assert_ne!(host.await_restored(), hung);
    drop(host);
    // A kernel comes first.
    let host = Machines::configured(User::Own, POOL);
    let hung = host.warm_up();
    host.ok(&NEW_LAB);
    stop(hung);
    assert_eq!(host.run("lab", "print(1)"), "1", "{}", host.log());
    until("the machine's end", || !Host::is_alive(hung));
    assert!(host.log().contains("the monitor of a stopped machine does not answer"), "{}", host.log());
}

/// Another pool kept a machine whose reset had failed, for the next kernel.
#[test]
fn machine_with_failed_bind_is_ended() {
    let mut host = Machines::with_template(User::Own, POOL);
    host.env(fault::VARIABLE, "machine.warm.seed=eio");
    host.launch();
    let dirty = host.warm_up();
    host.ok(&NEW_LAB);
    assert_eq!(host.run("lab", "print(1)"), "1", "the kernel has a new machine\n{}", host.log());
    assert!(!host.machines().contains(&dirty), "{}", host.log());
    until("the machine's end", || !Host::is_alive(dirty));
    assert_eq!(host.pool("taken"), 0, "{}", host.ok(&["pool", "--json"]));
}

/// Another pool stamped the time of a failed refresh: the old snapshot counted as new.
#[test]
fn failed_refresh_does_not_stamp_time() {
    let config = "[microvm]\ntemplate_max_age = \"1h\"\ntemplate_refresh_interval = \"3s\"\n";
    let mut host = Machines::with_template(User::Own, config);
    host.describe(|about| _ = about.insert("created_at_ms".into(), json!(1)));
    let old = host.description();
    host.env(fault::VARIABLE, "machine.template.boot=enospc");
    host.launch();
    host.ok(&NEW_LAB);
    let running = host.begin("lab", "print(1)");
    until("a failure", || host.counted("template_refresh_failed") == 1);
    let events = host.ok(&["events", "--json"]);
    assert!(events.contains("template_refresh_failed") && events.contains("No space left"), "{events}");
    assert_eq!(host.description(), old, "it is as old as before, and stays in use");
    // As it is old still, it is tried again.
    until("another attempt", || host.builder().is_some());
    assert_eq!(host.counted("cold_boot"), 0, "{}", host.log());
    let output = running.wait_with_output().expect("it ends");
    assert!(output.status.success() && output.stdout == b"1\n", "{output:?}\n{}", host.log());
}

/// Another pool left the machines of a killed daemon.
#[test]
fn killed_daemon_leaves_no_orphans() {
    // While a template is being made.
    let mut host = Machines::cold(User::Own, POOL);
    let begin = |host: &Machines| {
        let mut build = host.command("ryokan");
        build.args(["--no-autostart", "images", "rotate", &image()]).stderr(std::process::Stdio::null());
        let build = build.spawn().expect("it runs");
        until("a template's machine", || host.builder().is_some());
        build
    };
    // Without a daemon its guest would wait for minutes.
    let mut build = begin(&host);
    host.signal(Signal::SIGTERM);
    host.wait();
    assert!(!build.wait().expect("it ends").success());
    until("the machines' end", || host.all().is_empty());
    host.launch();
    let mut build = begin(&host);
    host.kill();
    assert!(!build.wait().expect("it ends").success());
    let left = host.all();
    assert!(!left.is_empty() && !host.leftovers().is_empty(), "{left:?}");
    host.launch();
    until("the machines' end", || left.iter().all(|pid| !Host::is_alive(*pid)));
    assert!(host.leftovers().is_empty(), "{:?}", host.leftovers());
    drop(host);
    // While a warm machine is.
    let mut host = Machines::configured(User::Own, POOL);
    host.ok(&NEW_LAB);
    assert_eq!(host.run("lab", "x = 1; print(x)"), "1", "{}", host.log());
    let creating = |host: &Machines| {
        let kernels = host.machines();
        host.all().into_iter().find(|pid| has_open(*pid, "disk.new.ext4") && !kernels.contains(pid))
    };
    let mut warm = None;
    until("a machine in creation", || {
        warm = creating(&host);
        warm.is_some()
    });
    host.kill();
    let (warm, lab) = (warm.expect("it was found"), host.machines());
    host.launch();
    until("the machine's end", || !Host::is_alive(warm));
    assert_eq!(host.run("lab", "print(x)"), "1", "{}", host.log());
    assert_eq!(host.machines(), lab, "{}", host.log());
}

/// Another product's snapshots were empty files, and a restore was a boot.
#[test]
fn template_is_no_empty_file() {
    let host = Machines::start(User::Own);
    let ram = host.templates()[0].with_file_name("ram").metadata().expect("a template");
    assert!(std::os::unix::fs::MetadataExt::blocks(&ram) * 512 > 16 << 20, "{ram:?}");
    host.ok(&NEW_LAB);
    assert_eq!(host.run("lab", "print(1)"), "1", "{}", host.log());
    let machine = host.machines()[0];
    assert!(is_restored(machine) && has_open(machine, "ram"), "its memory is the template's");
    assert_eq!(host.counted("cold_boot"), 0, "{}", host.log());
}

/// A daemon that was killed between the start of a machine and its record left it, with the kernel's disk.
#[test]
fn unrecorded_machine_is_ended() {
    let mut host = Machines::start(User::Own);
    host.ok(&NEW_LAB);
    host.run("lab", "g = iter(range(9)); next(g)");
    host.ok(&["suspend", "lab", "--release"]);
    host.kill();
    host.env(fault::VARIABLE, "machine.started.record=kill");
    host.launch();
    host.cli(&["exec", "lab", "1"]);
    assert!(host.ends(), "{}", host.log());
    let left = host.machines();
    assert_eq!(left.len(), 1, "it waits for the request to continue");
    host.kill();
    host.env(fault::VARIABLE, "");
    host.launch();
    assert_eq!(host.run("lab", "print(next(g))"), "1", "{}", host.log());
    assert!(!Host::is_alive(left[0]), "{}", host.log());
    assert_eq!(host.machines().len(), 1);
}
