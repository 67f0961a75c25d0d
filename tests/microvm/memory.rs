//! Checkpoints with the memory of a virtual machine: what runs goes on where it was, and the rest is as in any other.

use serde_json::Value;

use ryokan::sys::fault;

use super::{COUNTER, Machines, users};
use crate::support::{Host, User, until};

/// In memory only: an open file, and a thread that counts.
const MEMORY: &str = "
numbers = iter(range(100)); next(numbers)
note = open('note', 'w+'); note.write('kept'); note.flush()
saved = 42
";
const CHANGE: &str = "saved = 43; next(numbers); note.write(' and more'); note.flush(); open('new', 'w').write('new')";
/// The next number, the variable, the file through its open handle, the folder.
const SEE: &str = "
import os
def see():
    note.seek(0)
    return next(numbers), saved, note.read(), sorted(os.listdir('.'))
print(*see())
";
const COUNTS: &str = "a = count; time.sleep(1); print(count > a, count)";

fn kernel(host: &Machines) {
    host.ok(&["new", "lab", "--isolation", "microvm", "--engine", "python"]);
    host.run("lab", &format!("{COUNTER}{MEMORY}"));
}

fn json(host: &Machines, args: &[&str]) -> Value {
    serde_json::from_str(&host.ok(&[args, &["--json"]].concat())).expect("JSON")
}

fn memory_checkpoint(host: &Machines, name: &str) -> Value {
    let taken = json(host, &["checkpoint", "lab", "--kind", "teleport", "-m", name]);
    assert_eq!(taken["kind"], "teleport", "{taken}");
    taken
}

fn restored(host: &Machines, reference: &str, more: &[&str]) -> Value {
    json(host, &[&["restore", "lab", reference, "--yes"][..], more].concat())
}

/// Bytes of the packs.
fn packs(host: &Machines) -> u64 {
    let folder = std::fs::read_dir(host.data().join("store/packs")).expect("a folder").flatten();
    folder.map(|pack| pack.metadata().expect("a file").len()).sum()
}

/// A refused command: what it says.
fn refused(host: &Machines, args: &[&str], code: i32) -> String {
    let output = host.cli(args);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{args:?}: {said}\n{}", host.log());
    said
}

#[test]
fn memory_checkpoint_comes_back() {
    for user in users() {
        let mut host = Machines::start(user);
        kernel(&host);
        let (machine, empty) = (host.machines(), packs(&host));
        let taken = memory_checkpoint(&host, "one");
        let (bytes, first) = (taken["machine_bytes"].as_u64().expect("a number"), packs(&host) - empty);
        assert_eq!(host.machines(), machine, "{user:?}: the machine goes on");
        assert!(host.run("lab", COUNTS).starts_with("True"), "{user:?}");
        memory_checkpoint(&host, "two");
        let second = packs(&host) - empty - first;
        eprintln!("{user:?}: {bytes} bytes of memory and disk; stored {first}, then {second}");
        assert!(second * 3 < first, "{user:?}: equal pieces are stored once: {first}, then {second}");
        assert!(host.ok(&["log", "lab"]).contains(", teleport "), "{user:?}");
        let boot_id = host.run("lab", "print(open('/proc/sys/kernel/random/boot_id').read())");
        host.run("lab", CHANGE);
        let done = restored(&host, "one", &[]);
        assert_eq!(done["engine_from"], "memory", "{user:?}: {done}\n{}", host.log());
        assert_eq!(host.run("lab", SEE), "1 42 kept ['note']", "{user:?}\n{}", host.log());
        assert!(host.run("lab", COUNTS).starts_with("True"), "{user:?}: the thread goes on");
        let renewed = "print(open('/proc/sys/kernel/random/boot_id').read())";
        assert_ne!(host.run("lab", renewed), boot_id, "{user:?}: it is another machine than the first");
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_secs();
        let clock: u64 = host.run("lab", "print(int(time.time()))").parse().expect("a time");
        assert!(now.abs_diff(clock) < 60, "{user:?}: {clock} is not {now}");
        // Undo brings the memory before the restore back, too.
        json(&host, &["undo", "lab", "--yes"]);
        assert_eq!(host.run("lab", SEE), "2 43 kept and more ['new', 'note']", "{user:?}\n{}", host.log());
        let files = restored(&host, "one", &["--kind", "checkpoint"]);
        assert_eq!((&files["engine_from"], &files["why_not_memory"]), (&"saved".into(), &"as requested".into()));
        let seen = host.run("lab", "import os; print('note' in globals(), saved, sorted(os.listdir('.')))");
        assert_eq!(seen, "False 42 ['note']", "{user:?}");
        // It outlives the daemon, is kept by garbage collection, whole, and restorable by a stopped kernel.
        host.restart();
        host.ok(&["gc"]);
        host.ok(&["verify"]);
        host.ok(&["stop", "lab"]);
        until("the machine's end", || host.machines().is_empty());
        assert_eq!(restored(&host, "one", &[])["engine_from"], "memory", "{user:?}\n{}", host.log());
        assert_eq!(host.run("lab", SEE), "1 42 kept ['note']", "{user:?}\n{}", host.log());
        // It travels in a file, and continues in another kernel.
        if user == User::Own {
            let file = host.path("lab.ryokan");
            host.ok(&["export", "lab", file.to_str().expect("text")]);
            host.ok(&["import", file.to_str().expect("text"), "--as", "copy"]);
            assert_eq!(host.run("copy", "print(saved)"), "42", "{}", host.log());
            assert_eq!(json(&host, &["restore", "copy", "one", "--yes"])["engine_from"], "memory", "{}", host.log());
            let named = SEE.replace("print(", "print(os.uname().nodename, ");
            assert_eq!(host.run("copy", &named), "copy 1 42 kept ['note']", "{}", host.log());
            host.ok(&["rm", "copy", "--yes"]);
        }
        // What comes back is suspended, stopped and started as before.
        host.ok(&["suspend", "lab", "--release"]);
        assert_eq!(host.run("lab", "print(next(numbers))"), "2", "{user:?}\n{}", host.log());
        // A machine that was continued from its pages is stored and comes back as any other.
        if user == User::Own {
            memory_checkpoint(&host, "resumed");
            host.run("lab", CHANGE);
            assert_eq!(restored(&host, "resumed", &[])["engine_from"], "memory", "{}", host.log());
            assert_eq!(host.run("lab", SEE), "3 42 kept ['note']", "{}", host.log());
            assert!(host.run("lab", COUNTS).starts_with("True"), "the thread goes on");
        }
        let events = host.ok(&["events", "lab", "--json"]);
        assert!(!events.contains("machine_saved_whole") && !events.contains("machine_copied_whole"), "{events}");
        host.ok(&["stop", "lab"]);
        assert_eq!(host.run("lab", "print(saved)"), "42", "{user:?}\n{}", host.log());
    }
}

#[test]
fn memory_is_refused_with_its_rule() {
    let host = Machines::configured(User::Own, "[limits]\nteleport_snapshot = \"2GiB\"\n");
    host.ok(&["new", "plain", "--engine", "python"]);
    let said = refused(&host, &["checkpoint", "plain", "--kind", "teleport"], 5);
    assert!(said.contains("isolation process") && said.contains("--kind checkpoint"), "{said}");
    host.ok(&["checkpoint", "plain", "-m", "files"]);
    let said = refused(&host, &["restore", "plain", "files", "--kind", "teleport", "--yes"], 4);
    assert!(said.contains("holds no memory"), "{said}");
    host.ok(&["new", "sh", "--isolation", "microvm", "--engine", "node"]);
    let said = refused(&host, &["checkpoint", "sh", "--kind", "teleport"], 5);
    assert!(said.contains("engine node"), "{said}");
    host.ok(&["rm", "sh", "plain", "--yes"]);
    host.ok(&["new", "wide", "--isolation", "microvm", "--engine", "python", "--memory", "2G"]);
    let said = refused(&host, &["checkpoint", "wide", "--kind", "teleport"], 4);
    assert!(said.contains("kind teleport") && said.contains("teleport_snapshot"), "{said}");
    assert!(host.ok(&["log", "wide"]).is_empty(), "nothing was taken");
    host.ok(&["rm", "wide", "--yes"]);
    // A machine of another size, and damage, are found before anything is changed.
    kernel(&host);
    memory_checkpoint(&host, "one");
    other_architecture_is_refused(&host);
    host.run("lab", CHANGE);
    host.ok(&["update", "lab", "--memory", "640M"]);
    let said = refused(&host, &["restore", "lab", "one", "--yes"], 4);
    assert!(said.contains("machine size") && said.contains("--kind checkpoint"), "{said}");
    assert_eq!(host.run("lab", SEE), "2 43 kept and more ['new', 'note']", "{}", host.log());
    let done = restored(&host, "one", &["--kind", "auto"]);
    let why = done["why_not_memory"].as_str().unwrap_or_default();
    assert!(done["engine_from"] == "saved" && why.contains("machine size"), "{done}");
    host.ok(&["update", "lab", "--memory", "512M"]);
    host.ok(&["stop", "lab"]);
    assert_eq!(restored(&host, "one", &[])["engine_from"], "memory", "{}", host.log());
    host.run("lab", CHANGE);
    damage(&host);
    let said = refused(&host, &["restore", "lab", "one", "--yes"], 1);
    assert!(said.contains("virtual machine in this checkpoint") && said.contains("damaged"), "{said}");
    assert_eq!(host.run("lab", SEE), "2 43 kept and more ['new', 'note']", "{}", host.log());
    let done = restored(&host, "one", &["--kind", "auto"]);
    let why = done["why_not_memory"].as_str().unwrap_or_default();
    assert!(done["engine_from"] == "saved" && why.contains("damaged"), "{done}");
    assert_eq!(host.run("lab", "print(saved, open('note').read())"), "42 kept", "{}", host.log());
}

/// The same memory, as if another architecture's: it is refused before anything is changed.
fn other_architecture_is_refused(host: &Machines) {
    let (file, machines) = (host.path("lab.ryokan"), host.machines());
    let exported = host.cli(&["export", "lab", "-"]);
    let other = if cfg!(target_arch = "x86_64") { "aarch64" } else { "x86_64" };
    std::fs::write(&file, crate::teleport::marked(&exported.stdout, other)).expect("written");
    host.ok(&["import", file.to_str().expect("text"), "--as", "foreign"]);
    let seen = || {
        let mut shown = json(host, &["show", "foreign"]);
        // It is measured from time to time.
        shown["disk"].take();
        shown
    };
    let before = seen();
    let said = refused(host, &["restore", "foreign", "one", "--kind", "teleport", "--yes"], 4);
    assert!(said.contains(other) && said.contains("--kind checkpoint"), "{said}");
    assert_eq!((seen(), host.machines()), (before, machines), "it is untouched");
    host.ok(&["rm", "foreign", "--yes"]);
}

/// Damages an entry of the store that only memory or a disk can be: bytes in the middle of the largest pack.
fn damage(host: &Machines) {
    use std::os::unix::fs::FileExt as _;
    let folder = std::fs::read_dir(host.data().join("store/packs")).expect("a folder").flatten();
    let packs = folder.map(|pack| (pack.metadata().expect("a file").len(), pack.path()));
    let (bytes, path) = packs.max().expect("a pack");
    let file = std::fs::File::options().write(true).open(path).expect("opened");
    file.write_all_at(&[0xa5; 4096], bytes / 2).expect("written");
}

#[test]
fn killed_memory_restore_recovers() {
    let mut host = Machines::start(User::Own);
    kernel(&host);
    let arm = |host: &mut Machines, fault: &str| {
        host.kill();
        host.env(fault::VARIABLE, fault);
        host.launch();
    };
    // A checkpoint that was not sealed is none, and the kernel goes on.
    arm(&mut host, "machine.checkpoint.stored=kill");
    host.cli(&["checkpoint", "lab", "--kind", "teleport", "-m", "lost"]);
    assert!(host.ends(), "{}", host.log());
    arm(&mut host, "");
    assert_eq!(host.run("lab", "print(next(numbers))"), "1", "{}", host.log());
    assert!(!host.ok(&["log", "lab"]).contains("lost") && !host.has_copies());
    memory_checkpoint(&host, "one");
    host.run("lab", CHANGE);
    let points = [
        "machine.restore.recorded",
        "machine.install.done",
        "state.restore.finish.before_commit",
        "state.restore.finish.after_commit",
        "machine.installed.start",
        "machine.installed.bound",
    ];
    for point in points {
        arm(&mut host, &format!("{point}=kill"));
        host.cli(&["restore", "lab", "one", "--yes"]);
        assert!(host.ends(), "{point} was not reached\n{}", host.log());
        arm(&mut host, "");
        assert_eq!(host.run("lab", SEE), "2 42 kept ['note']", "{point}\n{}", host.log());
        assert!(host.run("lab", COUNTS).starts_with("True"), "{point}");
        assert_eq!(host.machines().len(), 1, "{point}");
        host.run("lab", CHANGE);
    }
    // What the last machine was started from is forgotten, although its daemon was killed before.
    let folder = std::fs::read_dir(host.data().join("kernels")).expect("a folder").flatten().next().expect("a kernel");
    assert!(!folder.path().join("installed.begun").exists());
    // Before the record nothing has changed.
    arm(&mut host, "state.transition.begin.before_commit=kill");
    host.cli(&["restore", "lab", "one", "--yes"]);
    assert!(host.ends(), "{}", host.log());
    arm(&mut host, "");
    assert_eq!(host.run("lab", SEE), "4 43 kept and more ['new', 'note']", "{}", host.log());
    // A machine that cannot be installed: the kernel goes back, with its memory.
    arm(&mut host, "machine.install.done=eio");
    let failed = host.cli(&["restore", "lab", "one", "--yes"]);
    assert!(!failed.status.success(), "{}", String::from_utf8_lossy(&failed.stdout));
    assert_eq!(host.run("lab", "print(next(numbers), saved)"), "5 43", "{}", host.log());
    // One that cannot continue now is kept: nothing of it was used.
    arm(&mut host, "machine.installed.start=eio");
    let done = restored(&host, "one", &[]);
    let why = done["why_not_memory"].as_str().unwrap_or_default();
    assert!(why.contains("cannot continue now") && why.contains("--without-memory"), "{done}\n{}", host.log());
    assert_eq!(host.run("lab", SEE), "2 42 kept ['note']", "{}", host.log());
    assert!(host.run("lab", COUNTS).starts_with("True"), "the thread goes on");
    assert!(!host.ok(&["events", "lab", "--json"]).contains("memory_lost"));
    // One that is not seeded ends, and the kernel has its files and saved state.
    arm(&mut host, "machine.copy.seed=eio");
    let done = restored(&host, "one", &[]);
    assert!(done["why_not_memory"].as_str().unwrap_or_default().contains("seeding"), "{done}\n{}", host.log());
    assert_eq!(host.run("lab", "print(saved, open('note').read())"), "42 kept", "{}", host.log());
    assert!(host.ok(&["events", "lab", "--json"]).contains("memory_lost"));
    assert!(Host::is_alive(host.machines()[0]));
}
