//! The life of a kernel in a virtual machine: executions, checkpoints, restore, stop, start, fork, removal.

use super::{Machines, users};
use crate::support::until;

const SET_UP: &str = "import os\nx = {'n': [1, 2.5]}\ndef greet(who): return 'hello ' + who\nos.makedirs('src/deep')\nopen('src/deep/a.txt', 'w').write('one\\n')\nopen('big', 'wb').write(os.urandom(3 << 20))\nos.symlink('deep/a.txt', 'src/link')\nos.chmod('src/deep', 0o500)";
const BREAK: &str = "x = 'after'\ngreet = None\nos.chmod('src/deep', 0o700); os.remove('src/deep/a.txt'); open('big', 'ab').write(b'more'); open('new', 'w').close()";
const SHOW: &str = "import hashlib\nprint(x, greet and greet('you'), sorted(os.listdir('.')), os.path.exists('src/link') and open('src/link').read(), hashlib.sha256(open('big', 'rb').read()).hexdigest(), oct(os.stat('src/deep').st_mode))";

#[test]
fn machine_kernel_lives() {
    for user in users() {
        let host = Machines::start(user);
        host.ok(&["new", "lab", "--isolation", "microvm", "--engine", "python"]);
        let seen =
            host.run("lab", "import os; print(os.uname().release, os.uname().nodename, os.getuid(), os.getcwd())");
        let here = nix::sys::utsname::uname().expect("a name").release().to_string_lossy().into_owned();
        assert!(seen.ends_with(" lab 1000 /workspace") && !seen.starts_with(&here), "{user:?}: {seen}");
        assert_eq!(host.machines().len(), 1, "{user:?}: one machine");
        host.run("lab", SET_UP);
        let before = host.run("lab", SHOW);
        host.ok(&["checkpoint", "lab", "-m", "one"]);
        host.run("lab", BREAK);
        let after = host.run("lab", SHOW);
        assert_ne!(before, after);
        let diff = host.ok(&["diff", "lab", "one"]);
        assert!(diff.contains("new") && diff.contains("src/deep/a.txt"), "{diff}");
        host.ok(&["restore", "lab", "one", "--yes"]);
        assert_eq!(host.run("lab", SHOW), before, "{user:?}: restored");
        host.ok(&["undo", "lab", "--yes"]);
        assert_eq!(host.run("lab", SHOW), after, "{user:?}: undone");
        host.ok(&["stop", "lab"]);
        until("the machine's end", || host.machines().is_empty());
        let folders = std::fs::read_dir(host.data().join("kernels")).expect("a folder").flatten();
        let disks = folders.filter(|entry| entry.path().join("disk.ext4").exists()).count();
        assert_eq!(disks, 0, "{user:?}: files and state are on the host\n{}", host.log());
        assert_eq!(host.run("lab", SHOW), after, "{user:?}: started again\n{}", host.log());
        host.ok(&["fork", "lab", "twin"]);
        assert_eq!(host.run("twin", SHOW), after, "{user:?}: forked");
        host.run("twin", "x = 'own'");
        assert_eq!(host.run("lab", SHOW), after);
        host.ok(&["rm", "twin", "--yes"]);
        // State and files hold nothing of the isolation.
        host.ok(&["fork", "lab", "plain", "--isolation", "process"]);
        assert_eq!(host.run("plain", SHOW), after, "{user:?}: in a process");
        let there = host.run("plain", "import os; os.uname().release");
        assert!(there.contains(&here), "{user:?}: {there}");
        assert_eq!(host.machines().len(), 1);
        host.run("plain", "x = 'from a process'; open('src/deep/b.txt', 'w').write('two')");
        host.ok(&["fork", "plain", "again", "--isolation", "microvm"]);
        let seen = host.run("again", "import os; print(x, greet, open('src/deep/b.txt').read(), os.uname().release)");
        assert!(seen.starts_with("from a process None two ") && !seen.contains(&here), "{user:?}: {seen}");
        host.ok(&["rm", "plain", "again", "--yes"]);
        host.ok(&["rm", "lab", "--yes"]);
        until("the machines' end", || host.machines().is_empty());
    }
}

#[test]
fn machine_has_its_specified_size() {
    let host = Machines::start(crate::support::User::Own);
    let size = ["--cpus", "2", "--memory", "768M", "--workspace", "3G"];
    host.ok(&[&["new", "wide", "--isolation", "microvm", "--engine", "bash"][..], &size].concat());
    let code = "nproc; awk '/^MemTotal/ { print $2 }' /proc/meminfo; df --output=size -B1M /workspace | tail -n 1";
    let seen: Vec<u64> =
        host.run("wide", code).split_whitespace().map(|word| word.parse().expect("a number")).collect();
    // The guest's own memory and 2 GiB for state come on top of it; the file system takes a part.
    let [cpus, memory_kib, disk_mib] = seen[..] else { panic!("three numbers, not {seen:?}") };
    assert_eq!(cpus, 2, "{}", host.log());
    assert!((700 << 10..1200 << 10).contains(&memory_kib), "{memory_kib} KiB");
    assert!((4500..5200).contains(&disk_mib), "{disk_mib} MiB");
    // Two processes at once, each for a moment: both processors run.
    let busy =
        "for i in 1 2; do (end=$((SECONDS + 2)); while [ $SECONDS -lt $end ]; do :; done) & done; wait; echo done";
    assert_eq!(host.run("wide", busy), "done");
}
