//! Templates and warm machines: what is restored is a kernel's own, and nothing is left of what is damaged or killed.

use std::fs;
use std::path::PathBuf;

use super::{Machines, ask, words};
use crate::support::{Host, User, until, users};

const POOL: &str = "[pool]\npool_size = 1\nmin_idle = 1\n";
const WHO: &str = "import os, random, uuid, time; print(os.urandom(16).hex(), random.random(), uuid.uuid4(), hash('x'), open('/proc/sys/kernel/random/boot_id').read().strip(), os.uname().nodename, int(time.time()))";

impl Machines {
    /// The descriptions of this host's templates.
    fn templates(&self) -> Vec<PathBuf> {
        let folders = fs::read_dir(self.data().join("templates")).into_iter().flatten().flatten();
        folders.map(|folder| folder.path().join("template.json")).filter(|file| file.exists()).collect()
    }

    /// Waits for a warm machine that was restored from a template.
    fn await_restored(&self) -> u32 {
        let mut found = None;
        until("a restored machine", || {
            found = self.parked().into_iter().find(|pid| words(*pid).iter().any(|word| word == "-incoming"));
            found.is_some()
        });
        found.expect("it was found")
    }

    /// Creates a kernel, and makes this host have a template and a restored warm machine. Returns the machine.
    fn warm_up(&self) -> u32 {
        self.ok(&["new", "first", "--isolation", "microvm", "--engine", "python"]);
        assert_eq!(self.run("first", "1 + 1"), "2", "{}", self.log());
        until("a template", || !self.templates().is_empty());
        self.replace_booted()
    }

    /// Kills the warm machine that was booted while there was no template. Returns the one that replaces it.
    fn replace_booted(&self) -> u32 {
        until("a warm machine", || !self.parked().is_empty());
        let killed = self.parked();
        killed.iter().for_each(|pid| kill(*pid));
        let restored = self.await_restored();
        assert!(!killed.contains(&restored));
        restored
    }
}

fn kill(pid: u32) {
    let pid = nix::unistd::Pid::from_raw(pid.cast_signed());
    let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
}

fn status(pid: u32, field: &str) -> String {
    let all = fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = all.lines().find_map(|line| line.strip_prefix(field)).expect("a field");
    line.trim_start_matches(':').trim().to_owned()
}

#[test]
fn warm_machines_differ() {
    for user in users() {
        let host = Machines::configured(user, POOL);
        let warm = host.warm_up();
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
        let (one, two): (Vec<&str>, Vec<&str>) = (one.split(' ').collect(), two.split(' ').collect());
        assert_eq!((one.len(), two.len()), (7, 7), "{one:?} {two:?}");
        for (i, what) in ["urandom", "random", "uuid", "hash", "boot id"].iter().enumerate() {
            assert_ne!(one[i], two[i], "{user:?}: {what}");
        }
        assert_eq!((one[5], two[5]), ("one", "two"));
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970").as_secs();
        let clock: u64 = two[6].parse().expect("a time");
        assert!(now.abs_diff(clock) < 60, "{user:?}: {clock} is not {now}");
        let events = host.ok(&["events", "--json"]);
        // The first warm machine may have begun its template before.
        let why = ["there is no template of it yet", "its template is being built"];
        assert!(events.contains("cold_boot") && why.iter().any(|why| events.contains(why)), "{events}");
        assert!(events.contains("template_built"), "{events}");
        // What it wrote is the kernel's, also after its end.
        host.run("one", "x = 41; open('f', 'w').write('kept')");
        host.ok(&["stop", "one"]);
        assert_eq!(host.run("one", "print(x + 1, open('f').read())"), "42 kept", "{user:?}\n{}", host.log());
    }
}

#[test]
fn two_machines_are_warm() {
    for user in users() {
        let host = Machines::configured(user, "[pool]\n");
        host.ok(&["new", "first", "--isolation", "microvm", "--engine", "python"]);
        assert_eq!(host.run("first", "1 + 1"), "2", "{user:?}: {}", host.log());
        until("two warm machines", || host.parked().len() == 2);
        // They waited for the template.
        let restored = host.parked().into_iter().filter(|pid| words(*pid).iter().any(|word| word == "-incoming"));
        assert_eq!(restored.count(), 2, "{user:?}: {}", host.log());
        host.ok(&["new", "two", "--isolation", "microvm", "--engine", "python"]);
        // They ran code, of which nothing is left.
        let seen = host.run("two", "print([n for n in globals() if not n.startswith('__')], '_' in globals())");
        assert_eq!(seen, "[] False", "{user:?}");
        assert!(host.ok(&["journal", "two"]).lines().count() < 6, "{user:?}: {}", host.ok(&["journal", "two"]));
    }
}

#[test]
fn monitor_is_confined() {
    for user in users() {
        let host = Machines::configured(user, POOL);
        let pid = host.warm_up();
        assert_eq!((status(pid, "Seccomp"), status(pid, "NoNewPrivs")), ("2".into(), "1".into()));
        assert_ne!(status(pid, "Seccomp_filters"), "1", "its own filter and ours");
        for namespace in ["user", "net", "ipc", "uts", "cgroup"] {
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
            assert!(open(path).contains("Permission denied"), "{user:?}: {path}: {}", open(path));
        }
        let socket = host.socket();
        let command = serde_json::json!({ "execute": "chardev-add", "arguments": { "id": "x", "backend": {
            "type": "socket", "data": { "server": false, "addr": { "type": "unix", "data": { "path": socket } } } } } });
        let answer = ask(pid, &command.to_string()).expect("an answer");
        assert!(answer.contains("error") && answer.contains("not permitted"), "{user:?}: {answer}");
    }
}

#[test]
fn killed_daemon_leaves_no_warm_machine() {
    let mut host = Machines::configured(User::Own, POOL);
    let warm = host.warm_up();
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
fn stopped_daemon_ends_template_build() {
    let mut host = Machines::start(User::Own);
    host.ok(&["new", "first", "--isolation", "microvm", "--engine", "python"]);
    assert_eq!(host.run("first", "1 + 1"), "2", "{}", host.log());
    let builds =
        |host: &Machines| host.all().into_iter().any(|pid| words(pid).iter().any(|word| word.contains("share=on")));
    until("a template's machine", || builds(&host));
    host.signal(nix::sys::signal::Signal::SIGTERM);
    host.wait();
    // Without a daemon its guest would wait for minutes.
    until("the machines' end", || host.all().is_empty());
}

#[test]
fn damaged_template_is_built_again() {
    let mut host = Machines::configured(User::Own, POOL);
    host.warm_up();
    host.kill();
    let description = host.templates().pop().expect("a template");
    let (ram, before) = (description.with_file_name("ram"), fs::metadata(&description).expect("it is there"));
    fs::set_permissions(&ram, std::os::unix::fs::PermissionsExt::from_mode(0o600)).expect("opened");
    let file = fs::File::options().write(true).open(&ram).expect("the memory");
    std::os::unix::fs::FileExt::write_all_at(&file, b"damage", 1 << 20).expect("written");
    drop(file);
    host.launch();
    host.ok(&["new", "two", "--isolation", "microvm", "--engine", "python"]);
    assert_eq!(host.run("two", "1 + 1"), "2", "{}", host.log());
    until("another template", || {
        let now = host.templates().pop().and_then(|found| fs::metadata(found).ok());
        now.is_some_and(|now| now.modified().ok() != before.modified().ok())
    });
    host.replace_booted();
    host.ok(&["new", "three", "--isolation", "microvm", "--engine", "python"]);
    assert_eq!(host.run("three", "1 + 2"), "3", "{}", host.log());
    let events = host.ok(&["events", "--json"]);
    assert!(events.contains("template_damaged") && events.contains("ram is not what was written"), "{events}");
}
