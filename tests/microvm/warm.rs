//! Templates and warm machines: what is restored is a kernel's own, and nothing is left of what is damaged or killed.

use std::collections::HashSet;
use std::fs;

use ryokan::sys::fault;

use super::{Machines, NEW_LAB, ask, status, users, words};
use crate::support::{Host, User, until};

pub(super) const POOL: &str = "[pool]\npool_size = 1\nmin_idle = 1\n";
const WHO: &str = "
import os, random, secrets, ssl, time, uuid
read = lambda path: open(path).read().strip()
print(os.urandom(16).hex(), random.random(), uuid.uuid4(), secrets.token_hex(), ssl.RAND_bytes(16).hex(),
      read('/proc/sys/kernel/random/boot_id'), read('/etc/machine-id'), hash('x'), os.uname().nodename, int(time.time()))
";

impl Machines {
    /// Waits for a warm machine that was restored from a template.
    pub(super) fn await_restored(&self) -> u32 {
        let mut found = None;
        until("a restored machine", || {
            found = self.parked().into_iter().find(|pid| is_restored(*pid));
            found.is_some() && self.is_stocked()
        });
        found.expect("it was found")
    }

    /// Whether the daemon has all the warm workers that it wants: a machine stops a moment before it can be taken.
    pub(super) fn is_stocked(&self) -> bool {
        let pools: serde_json::Value = serde_json::from_str(&self.ok(&["pool", "--json"])).expect("JSON");
        pools.as_array().expect("a list").iter().all(|pool| pool["creating"] == 0 && pool["idle"] == pool["target"])
    }

    /// Creates a kernel, whose use opens the pool. Returns the warm machine.
    pub(super) fn warm_up(&self) -> u32 {
        self.ok(&["new", "first", "--isolation", "microvm", "--engine", "python"]);
        assert_eq!(self.run("first", "1 + 1"), "2", "{}", self.log());
        self.await_restored()
    }
}

pub(super) fn is_restored(machine: u32) -> bool {
    words(machine).iter().any(|word| word == "-incoming")
}

#[test]
fn warm_machines_differ() {
    for user in users() {
        let host = Machines::configured(user, POOL);
        let warm = host.warm_up();
        is_confined(&host, user, warm);
        host.ok(&["new", "one", "--isolation", "microvm", "--engine", "python"]);
        let one = host.run("one", WHO);
        assert!(host.machines().contains(&warm), "{user:?}: the kernel has the warm machine\n{}", host.log());
        let next = host.await_restored();
        // Created before: it brings its folder, and binds a machine all the same.
        let given = host.given(user);
        host.ok(&[
            &["new", "two", "--isolation", "microvm", "--engine", "python", "--from-dir"][..],
            &[given.to_str().expect("a path")],
        ]
        .concat());
        let two = host.run("two", WHO);
        assert!(host.machines().contains(&next), "{user:?}: the kernel has the warm machine\n{}", host.log());
        assert_eq!(host.run("two", "print(open('file').read())"), "of the host");
        // The first kernel's machine was never warm.
        let seen = [one, two, host.run("first", WHO)];
        let seen = seen.each_ref().map(|line| line.split(' ').collect::<Vec<&str>>());
        let what = ["urandom", "random", "uuid", "secrets", "OpenSSL", "boot id", "machine id"];
        for (i, what) in what.iter().enumerate() {
            let distinct: HashSet<&str> = seen.iter().map(|words| words[i]).collect();
            assert_eq!(distinct.len(), 3, "{user:?}: {what}: {seen:?}");
        }
        let hashes: HashSet<&str> = seen.iter().map(|words| words[7]).collect();
        assert_eq!(hashes.len(), 1, "{user:?}: the engine has started in the template: {seen:?}");
        assert_eq!(seen.each_ref().map(|words| words[8]), ["one", "two", "first"]);
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_secs();
        let clock: u64 = seen[1][9].parse().expect("a time");
        assert!(now.abs_diff(clock) < 60, "{user:?}: {clock} is not {now}");
        let events = host.ok(&["events", "--json"]);
        assert!(!events.contains("cold_boot") && !events.contains("template_built"), "{events}");
        // What it wrote is the kernel's, also after its end. A stopped kernel takes a warm machine, too.
        host.run("one", "x = 41; open('f', 'w').write('kept')");
        host.ok(&["stop", "one"]);
        let next = host.await_restored();
        assert_eq!(host.run("one", "print(x + 1, open('f').read())"), "42 kept", "{user:?}\n{}", host.log());
        assert!(host.machines().contains(&next), "{user:?}: it has the warm machine\n{}", host.log());
        host.run("one", "x = 1; y = 2");
        host.ok(&["stop", "one"]);
        assert_eq!(host.run("one", "print(x, y)"), "1 2", "{user:?}: state is written to what was brought");
    }
}

#[test]
fn two_machines_are_warm() {
    let host = Machines::cold(User::Own, "[pool]\n");
    host.ok(&["new", "first", "--isolation", "microvm", "--engine", "python"]);
    assert_eq!(host.run("first", "1 + 1"), "2", "{}", host.log());
    until("two warm machines", || host.parked().len() == 2 && host.is_stocked());
    // They waited for the template; the kernel did not.
    assert!(host.parked().into_iter().all(is_restored), "{}", host.log());
    assert!(!host.machines().into_iter().any(is_restored), "{}", host.log());
    let events = host.ok(&["events", "--json"]);
    // The first warm machine may have begun its template before.
    let why = ["there is no template of it yet", "its template is being built"];
    assert!(events.contains("cold_boot") && why.iter().any(|why| events.contains(why)), "{events}");
    assert!(events.contains("template_built"), "{events}");
    host.ok(&["new", "two", "--isolation", "microvm", "--engine", "python"]);
    // They ran code, of which nothing is left.
    let seen = host.run("two", "print([n for n in globals() if not n.startswith('__')], '_' in globals())");
    assert_eq!(seen, "[] False");
    assert!(host.ok(&["journal", "two"]).lines().count() < 6, "{}", host.ok(&["journal", "two"]));
}

/// The soft and the hard limit of a process.
fn resource_limits(pid: u32, name: &str) -> [String; 2] {
    let all = fs::read_to_string(format!("/proc/{pid}/limits")).expect("it runs");
    let line = all.lines().find_map(|line| line.strip_prefix(name)).expect("a limit");
    let mut values = line.split_whitespace().map(str::to_owned);
    [values.next().expect("a soft limit"), values.next().expect("a hard limit")]
}

/// The memory of a machine's guest.
fn guest_bytes(pid: u32) -> u64 {
    let mebibytes = words(pid).into_iter().skip_while(|word| word != "-m").nth(1).expect("its memory");
    mebibytes.parse::<u64>().expect("a number") << 20
}

/// The size of a machine's disk.
fn disk_bytes(pid: u32) -> u64 {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs").flatten();
    let disk =
        files.map(|file| file.path()).find(|file| fs::read_link(file).is_ok_and(|to| to.ends_with("disk.new.ext4")));
    fs::metadata(disk.expect("a disk")).expect("it is open").len()
}

/// Checks every layer around the monitor of a warm machine.
fn is_confined(host: &Machines, user: User, pid: u32) {
    assert_eq!((status(pid, "Seccomp"), status(pid, "NoNewPrivs")), ("2".into(), "1".into()));
    assert_ne!(status(pid, "Seccomp_filters"), "1", "its own filter and ours");
    // Two gibibytes beside its guest's memory; no file is larger than its disk.
    let (memory, disk) = (guest_bytes(pid) + (2 << 30), disk_bytes(pid));
    let limits = [
        ("Max core file size", 0),
        ("Max open files", 512),
        ("Max processes", 512),
        ("Max data size", memory),
        ("Max file size", disk.max(guest_bytes(pid))),
        ("Max locked memory", 8 << 20),
        ("Max msgqueue size", 0),
        ("Max nice priority", 0),
        ("Max realtime priority", 0),
    ];
    for (name, most) in limits {
        assert_eq!(resource_limits(pid, name), [most.to_string(), most.to_string()], "{user:?}: {name}");
    }
    // The daemon's log is not the monitor's to write.
    let errors = fs::read_link(format!("/proc/{pid}/fd/2")).expect("a descriptor");
    assert!(errors.to_string_lossy().starts_with("pipe:"), "{user:?}: {errors:?}");
    for namespace in ["user", "mnt", "net", "ipc", "uts", "cgroup"] {
        let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{namespace}")).expect("a namespace");
        assert_ne!(of(&pid.to_string()), of("self"), "{namespace}");
    }
    // The monitor itself is asked to open files and sockets: it cannot.
    let open = |path: &str| {
        let command = serde_json::json!({ "execute": "blockdev-add", "arguments": {
                "driver": "file", "node-name": "x", "filename": path, "read-only": true } });
        ask(pid, &command.to_string()).expect("an answer")
    };
    let secret = host.data().join("catalog.db");
    assert!(secret.exists());
    for path in ["/etc/hostname", secret.to_str().expect("a path")] {
        assert!(open(path).contains("No such file"), "{user:?}: {path}: {}", open(path));
    }
    // What its tree shows of others, Landlock refuses.
    for path in ["/proc/1/environ", "/proc/self/root/proc/1/cmdline"] {
        assert!(open(path).contains("Permission denied"), "{user:?}: {path}: {}", open(path));
    }
    let socket = host.socket();
    let command = serde_json::json!({ "execute": "chardev-add", "arguments": { "id": "x", "backend": {
            "type": "socket", "data": { "server": false, "addr": { "type": "unix", "data": { "path": socket } } } } } });
    let answer = ask(pid, &command.to_string()).expect("an answer");
    assert!(answer.contains("error") && answer.contains("not permitted"), "{user:?}: {answer}");
}

#[test]
fn killed_daemon_leaves_no_warm_machine() {
    let mut host = Machines::configured(User::Own, POOL);
    let warm = host.warm_up();
    is_confined(&host, User::Own, warm);
    host.ok(&["new", "kept", "--isolation", "microvm", "--engine", "python"]);
    host.run("kept", "x = 1");
    let next = host.await_restored();
    assert_ne!(warm, next);
    let bound = host.machines();
    assert!(bound.contains(&warm));
    // Recorded as a kernel's, and not bound yet.
    host.ok(&["new", "reserved", "--isolation", "microvm", "--engine", "python"]);
    host.kill();
    assert!(Host::is_alive(next), "it does not notice");
    host.launch();
    until("the end of the stopped machine", || !Host::is_alive(next));
    assert_eq!(host.machines(), bound, "those of kernels live\n{}", host.log());
    assert_eq!(host.run("kept", "print(x)"), "1", "{}", host.log());
    assert_eq!(host.run("reserved", "print(2)"), "2", "{}", host.log());
    host.ok(&["rm", "kept", "first", "reserved", "--yes"]);
    until("the machines' end", || host.machines().is_empty());
}

#[test]
fn killed_bind_keeps_state() {
    let mut host = Machines::with_template(User::Own, POOL);
    host.launch();
    host.warm_up();
    host.ok(&NEW_LAB);
    host.run("lab", "x = 41; open('f', 'w').write('kept')");
    for fault in ["machine.warm.seed=kill", "machine.warm.bound=kill", "machine.warm.bound=eio"] {
        host.ok(&["stop", "lab"]);
        host.ok(&["stop", "first"]);
        host.kill();
        host.env(fault::VARIABLE, fault);
        host.launch();
        // Its start opens the pool.
        host.run("first", "1");
        host.await_restored();
        let code = "print(x + 1, open('f').read())";
        let output = host.cli(&["exec", "lab", code]);
        if fault.ends_with("kill") {
            assert!(host.ends(), "{fault} was not reached\n{}", host.log());
            host.kill();
            host.env(fault::VARIABLE, "");
            host.launch();
        } else {
            assert!(output.status.success(), "{output:?}");
        }
        assert_eq!(host.run("lab", code), "42 kept", "{fault}\n{}", host.log());
        until("the end of the other machine", || host.machines().len() == 2);
    }
}

#[test]
fn damaged_template_is_built_again() {
    type Damage = (&'static str, fn(&fs::File) -> std::io::Result<()>);
    let damages: [Damage; 2] = [
        ("ram is not what was written", |ram| std::os::unix::fs::FileExt::write_all_at(ram, b"damage", 1 << 20)),
        ("ram has another size than was written", |ram| ram.set_len(ram.metadata()?.len() / 2)),
    ];
    let mut host = Machines::with_template(User::Own, POOL);
    for (round, (why, damage)) in damages.into_iter().enumerate() {
        let description = host.templates().pop().expect("a template");
        let (ram, before) = (description.with_file_name("ram"), fs::metadata(&description).expect("it is there"));
        // The file is that of other tests, too.
        let own = ram.with_file_name("own");
        fs::copy(&ram, &own).expect("copied");
        fs::set_permissions(&own, std::os::unix::fs::PermissionsExt::from_mode(0o600)).expect("opened");
        damage(&fs::File::options().write(true).open(&own).expect("the memory")).expect("damaged");
        fs::rename(&own, &ram).expect("replaced");
        host.launch();
        let name = format!("lab{round}");
        host.ok(&["new", &name, "--isolation", "microvm", "--engine", "python"]);
        assert_eq!(host.run(&name, "1 + 1"), "2", "{}", host.log());
        assert!(!host.machines().into_iter().any(is_restored), "{why}: it was used\n{}", host.log());
        until("another template", || {
            let now = host.templates().pop().and_then(|found| fs::metadata(found).ok());
            now.is_some_and(|now| now.modified().ok() != before.modified().ok())
        });
        let events = host.ok(&["events", "--json"]);
        assert!(events.contains("template_damaged") && events.contains(why), "{why}: {events}");
        until("its event", || host.counted("template_built") == 1);
        // The warm machine may have booted, too, and found the damage before.
        let counted = ["cold_boot", "template_damaged"].map(|event| host.counted(event));
        assert!((1..=2).contains(&counted[0]) && (1..=2).contains(&counted[1]), "{why}: {counted:?}");
        if round == 0 {
            host.ok(&["rm", &name, "--yes"]);
            host.kill();
        }
    }
    host.await_restored();
    host.ok(&["new", "last", "--isolation", "microvm", "--engine", "python"]);
    assert_eq!(host.run("last", "1 + 2"), "3", "{}", host.log());
}
