//! Forks of running machines: memory that no checkpoint can save lives on in each child, and nothing else is shared.

use std::collections::HashSet;
use std::time::SystemTime;

use ryokan::sys::fault;

use super::{COUNTER, Machines, users, words};
use crate::support::{Host, User, until};

/// In memory only: a generator, an open file, a lambda, a thread that counts, a process.
const MEMORY: &str = "
import os, random, ssl, subprocess, uuid
numbers = iter(range(100)); next(numbers)
note = open('note', 'w+'); note.write('kept'); note.flush()
add = lambda n: n + 1
ssl.RAND_bytes(1); random.random(); uuid.uuid4()
child = subprocess.Popen(['sleep', '1000'])
saved = 42
";
const WHO: &str = "
read = lambda path: open(path).read().strip()
print(os.urandom(16).hex(), random.random(), uuid.uuid4(), ssl.RAND_bytes(16).hex(),
      read('/proc/sys/kernel/random/boot_id'), read('/etc/machine-id'), os.uname().nodename, os.environ['RYOKAN_KERNEL'],
      read('/etc/hostname'), int(time.time()))
";
const COUNT: &str = "a = count; time.sleep(1); print(a, count)";

fn kernel(host: &Machines) -> u32 {
    host.ok(&["new", "lab", "--isolation", "microvm", "--engine", "python"]);
    host.run("lab", &format!("{COUNTER}{MEMORY}"));
    until("a template, and the end of its machine", || {
        host.template_names().iter().any(|name| !name.starts_with('.')) && host.all().len() == 1
    });
    host.machines()[0]
}

/// Forks the kernel with its machine; returns the answer.
fn fork(host: &Machines, names: &[&str]) -> serde_json::Value {
    let answer = host.ok(&[&["fork", "lab"][..], names, &["--json"]].concat());
    let answer: serde_json::Value = serde_json::from_str(&answer).expect("JSON");
    assert_eq!(answer["kind"], "machine", "{answer}\n{}", host.log());
    answer
}

fn count(host: &Machines, kernel: &str) -> (u64, u64) {
    let counted = host.run(kernel, COUNT);
    let (a, b) = counted.split_once(' ').expect("two numbers");
    (a.parse().expect("a number"), b.parse().expect("a number"))
}

#[test]
fn forked_machines_differ() {
    for user in users() {
        let host = Machines::start(user);
        kernel(&host);
        fork(&host, &["copy", "--count", "4"]);
        assert_eq!(host.machines().len(), 5, "{user:?}");
        assert!(!host.has_copies(), "{user:?}: no file of the copy is left");
        let now = || SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970").as_secs();
        let (kernels, begun) = (["lab", "copy-1", "copy-2", "copy-3", "copy-4"], now());
        let seen: Vec<Vec<String>> =
            kernels.iter().map(|name| host.run(name, WHO).split_whitespace().map(str::to_owned).collect()).collect();
        let what =
            ["urandom", "random", "uuid", "OpenSSL", "boot id", "machine id", "host name", "variable", "hostname"];
        for (i, what) in what.iter().enumerate() {
            let distinct: HashSet<&String> = seen.iter().map(|words| &words[i]).collect();
            assert_eq!(distinct.len(), kernels.len(), "{user:?}: {what}: {seen:?}");
        }
        let clocks = begun - 60..now() + 60;
        for (name, words) in kernels.iter().zip(&seen) {
            assert_eq!((&*words[6], &*words[7], &*words[8]), (*name, *name, *name), "{user:?}");
            let clock: u64 = words[9].parse().expect("a time");
            assert!(clocks.contains(&clock), "{user:?}: {name}: {clock} is not of {clocks:?}");
        }
        for name in kernels {
            let code = "note.write('+' + os.uname().nodename); note.flush(); print(next(numbers), add(1), saved, \
                        child.poll(), open('note').read())";
            let expected = format!("1 2 42 None kept+{name}");
            assert_eq!(host.run(name, code), expected, "{user:?}\n{}", host.log());
            let (a, b) = count(&host, name);
            assert!(b > a, "{user:?}: the thread of {name} does not run");
        }
        // The files are private, on disks of their own, and last.
        host.ok(&["stop", "copy-2"]);
        assert_eq!(host.run("copy-2", "print(saved, open('note').read())"), "42 kept+copy-2", "{user:?}");
        assert_eq!(host.ok(&["cp", "copy-3:note", "-"]), "kept+copy-3", "{user:?}");
        // A copy is a machine like others: it is copied, suspended and restored itself.
        let again = host.ok(&["fork", "copy-1", "again", "--json"]);
        assert!(again.contains("\"machine\""), "{user:?}: {again}");
        // Its memory is mapped from a file: only what it changed was read while it stood still.
        assert!(host.log().contains("the changed pages of a machine were copied"), "{user:?}: {}", host.log());
        assert_eq!(host.run("again", "print(next(numbers), os.uname().nodename)"), "2 again", "{user:?}");
        host.ok(&["suspend", "copy-1", "--release"]);
        assert_eq!(host.run("copy-1", "print(next(numbers))"), "2", "{user:?}\n{}", host.log());
        let events = host.ok(&["events", "--json"]);
        assert!(!events.contains("machine_saved_whole"), "{user:?}: only what it changed was written: {events}");
        host.ok(&["rm", "lab", "copy-1", "copy-2", "copy-3", "copy-4", "again", "--yes"]);
        until("the machines' end", || host.machines().is_empty());
    }
}

#[test]
fn fork_keeps_parent_running() {
    let mut host = Machines::start(User::Own);
    let machine = kernel(&host);
    let before = count(&host, "lab").1;
    let answer = fork(&host, &["copy"]);
    eprintln!("the parent stood still for {} µs", answer["pause_us"]);
    assert_eq!(host.machines()[..].iter().filter(|pid| **pid == machine).count(), 1, "it has its machine");
    let (a, b) = count(&host, "lab");
    assert!(before < a && a < b, "{before} {a} {b}");
    let events = host.ok(&["events", "lab", "--json"]);
    assert!(events.contains("\"pause_us\"") && !events.contains("kernel_crashed"), "{events}");
    // Both are adopted by the next daemon.
    let machines = host.machines();
    host.restart();
    assert_eq!(host.run("copy", "print(next(numbers))"), "1", "{}", host.log());
    assert_eq!(host.run("lab", "print(next(numbers))"), "1", "{}", host.log());
    assert_eq!(host.machines(), machines);
    // What does not run, and what is no such machine, is forked from the checkpoint as before.
    host.ok(&["stop", "copy"]);
    let answer: serde_json::Value = serde_json::from_str(&host.ok(&["fork", "copy", "later", "--json"])).expect("JSON");
    assert_eq!((&answer["kind"], &answer["reason"]), (&"checkpoint".into(), &serde_json::Value::Null));
    assert_eq!(host.run("later", "print(saved, open('note').read())"), "42 kept");
    // A copy would keep the limits of the running machine.
    host.ok(&["update", "lab", "--memory", "768M"]);
    let answer: serde_json::Value = serde_json::from_str(&host.ok(&["fork", "lab", "wide", "--json"])).expect("JSON");
    let reason = answer["reason"].as_str().unwrap_or_default();
    assert!(answer["kind"] == "checkpoint" && reason.contains("next start"), "{answer}");
    assert_eq!(host.run("wide", "print(saved)"), "42");
}

#[test]
fn killed_fork_leaves_nothing() {
    let mut host = Machines::start(User::Own);
    let machine = kernel(&host);
    let points = [
        "machine.copy.save",
        "machine.copy.split",
        "machine.copy.seed",
        "state.kernel.begin.after_commit",
        "catalog.worker.put.after_commit",
        "catalog.kernel.insert.before_commit",
    ];
    for (at, point) in points.into_iter().enumerate() {
        host.kill();
        host.env(fault::VARIABLE, &format!("{point}=kill"));
        host.launch();
        host.cli(&["fork", "lab", "copy", "--count", "2"]);
        assert!(host.ends(), "{point} was not reached\n{}", host.log());
        host.kill();
        host.env(fault::VARIABLE, "");
        host.launch();
        assert_eq!(host.run("lab", "print(next(numbers))"), (at + 1).to_string(), "{point}\n{}", host.log());
        until("the end of the copies", || host.all() == [machine]);
        assert!(!host.ok(&["ls", "--json"]).contains("\"copy"), "{point}");
        assert!(!host.has_copies(), "{point}");
        let kernels = std::fs::read_dir(host.data().join("kernels")).expect("a folder").flatten();
        let kernels: Vec<_> = kernels.map(|folder| folder.file_name()).collect();
        assert_eq!(kernels.len(), 1, "{point}: {kernels:?}");
    }
    unseeded_copy_is_ended(&mut host, machine);
    // Once it is in the catalog, a child is whole.
    host.kill();
    host.env(fault::VARIABLE, "catalog.kernel.insert.after_commit=kill");
    host.launch();
    host.cli(&["fork", "lab", "copy"]);
    assert!(host.ends(), "{}", host.log());
    host.kill();
    host.env(fault::VARIABLE, "");
    host.launch();
    let expected = format!("{} copy", points.len() + 1);
    assert_eq!(host.run("copy", "print(next(numbers), os.uname().nodename)"), expected, "{}", host.log());
}

/// A copy that is not seeded anew, or does not confirm it, is ended; the parent goes on.
fn unseeded_copy_is_ended(host: &mut Machines, machine: u32) {
    host.kill();
    host.env(fault::VARIABLE, "machine.copy.seed=eio");
    host.launch();
    let refused = host.cli(&["fork", "lab", "copy"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("seeding"), "{said}\n{}", host.log());
    until("the end of the copy", || host.all() == [machine]);
    assert!(!host.ok(&["ls"]).contains("copy"));
    // An engine that does not confirm it is refused, too.
    host.run("lab", "seed = random.seed; random.seed = None");
    let refused = host.cli(&["fork", "lab", "copy"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("seeding of the engine is not confirmed"), "{said}");
    until("the end of the copy", || host.all() == [machine]);
    assert!(!host.has_copies() && Host::is_alive(machine));
    assert!(words(machine).iter().any(|word| word == "-name"));
    host.run("lab", "random.seed = seed");
}

#[test]
fn python_package_copies_machines() {
    let host = Machines::start(User::Own);
    kernel(&host);
    let ran = crate::foreign::script(&host, "tests/foreign/machines.py").output().expect("it runs");
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert!(ran.status.success(), "{said}\n{}", host.log());
    assert_eq!(String::from_utf8_lossy(&ran.stdout), "copied and compared\n", "{said}");
    assert_eq!(host.machines().len(), 4, "each fork is a copy that runs");
    assert_eq!(host.run("lab", "print(next(numbers))"), "1", "{}", host.log());
}

impl Machines {
    /// The names in the folder of templates.
    fn template_names(&self) -> Vec<String> {
        let folders = std::fs::read_dir(self.data().join("templates")).into_iter().flatten().flatten();
        folders.map(|folder| folder.file_name().to_string_lossy().into_owned()).collect()
    }

    /// Whether files of a copied machine are left.
    pub(super) fn has_copies(&self) -> bool {
        self.template_names().iter().any(|name| name.contains("copy"))
    }
}
