//! Exhausting the host's resources: each flood stops at the kernel's own limit.

use serde_json::{Value, json};

use super::{Home, Ran, Starter};
use crate::support::until;

fn limits(memory_mib: u64, pids: u32, open_files: u32, workspace_mib: u64) -> Value {
    json!({"limits": {
        "memory_bytes": memory_mib << 20, "cpu_milli": 1000, "pids": pids, "open_files": open_files,
        "workspace_bytes": workspace_mib << 20,
    }})
}

fn python(home: &Home, limits: &Value, script: &str) -> Ran {
    let script = format!("{}{script}", super::PRELUDE);
    home.starter.probe(&["--plan", &home.plan(limits.clone())], &["/usr/bin/python3", "-c", &script])
}

/// A harmless action, a malicious one, and how the latter ends.
struct Flood {
    what: &'static str,
    harmless: &'static str,
    malicious: &'static str,
    says: &'static str,
}

const FLOODS: &[Flood] = &[
    Flood {
        what: "processes",
        harmless: "
ps = [os.fork() or os._exit(0) for _ in range(20)]
for p in ps: os.waitpid(p, 0)",
        malicious: "
import time
n = 0
try:
    while n < 2000:
        if os.fork() == 0: time.sleep(60)
        n += 1
except BlockingIOError:
    assert 30 < n <= 40, n
    sys.exit('stopped')",
        says: "stopped",
    },
    Flood {
        what: "threads",
        harmless: "
import threading
ts = [threading.Thread(target=print) for _ in range(20)]
for t in ts: t.start()",
        malicious: "
import threading
e = threading.Event()
try:
    for n in range(2000): threading.Thread(target=e.wait, daemon=True).start()
except RuntimeError: print(\"can't start\", flush=True); os._exit(1)",
        says: "can't start",
    },
    Flood {
        what: "memory of one process",
        harmless: "bytearray(32 << 20)",
        malicious: "bytearray(1 << 30)",
        says: "MemoryError",
    },
    Flood {
        what: "memory of many processes",
        harmless: "
import multiprocessing as m
def work(n): return len(bytearray(4 << 20))
m.Pool(3).map(work, range(6))",
        malicious: "
import time
for _ in range(8):
    if os.fork() == 0:
        b = bytearray(64 << 20)
        for i in range(0, len(b), 4096): b[i] = 1
        time.sleep(60)
time.sleep(60)",
        says: "of memory",
    },
    Flood {
        what: "memory that processes share",
        harmless: "
import mmap
m = mmap.mmap(-1, 16 << 20); m.write(b'x' * (16 << 20))",
        malicious: "
import mmap, time
m = mmap.mmap(-1, 512 << 20)
for i in range(0, 512 << 20, 4096): m[i] = 1
time.sleep(60)",
        says: "of memory",
    },
    Flood {
        what: "memory of the kernel's /tmp",
        harmless: "open('/tmp/a', 'wb').write(b'x' * (16 << 20))",
        malicious: "
for i in range(200): open(f'/tmp/{i}', 'wb').write(b'x' * (1 << 20))",
        says: "No space left",
    },
    Flood {
        what: "memory of /dev/shm, which shares its bound with /tmp",
        harmless: "
from multiprocessing import shared_memory as s
m = s.SharedMemory(create=True, size=1 << 20); m.close(); m.unlink()",
        malicious: "
for p in ('/tmp/a', '/dev/shm/b', '/tmp/c'):
    f = open(p, 'wb')
    for _ in range(24): f.write(b'x' * (1 << 20))",
        says: "No space left",
    },
    Flood {
        what: "files in /tmp",
        harmless: "[open(f'/tmp/{i}', 'w').close() for i in range(1000)]",
        malicious: "[open(f'/tmp/{i}', 'w').close() for i in range(100000)]",
        says: "No space left",
    },
    Flood {
        what: "open files",
        harmless: "[os.dup(1) for _ in range(50)]",
        malicious: "[os.dup(1) for _ in range(1000)]",
        says: "Too many open files",
    },
    Flood {
        what: "one large file",
        harmless: "open('a', 'wb').write(b'x' * (4 << 20))",
        malicious: "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); open('a', 'wb').write(b'x' * (64 << 20))",
        says: "File too large",
    },
    Flood {
        what: "many files",
        harmless: "[open(f'f{i}', 'wb').write(b'x' * 65536) for i in range(10)]",
        malicious: "
import time
for i in range(20):
    open(f'g{i}', 'wb').write(b'x' * (4 << 20))
time.sleep(60)",
        says: "in the workspace",
    },
];

#[test]
fn resource_floods_stop_at_limit() {
    let limits = limits(128, 40, 64, 32);
    for starter in Starter::all() {
        for flood in FLOODS {
            let home = starter.home();
            let harmless = python(&home, &limits, flood.harmless);
            assert_eq!(harmless.code(), 0, "{starter:?}, {}: {}", flood.what, harmless.err());
            let malicious = python(&home, &limits, flood.malicious);
            let all = format!("{}\n{}", malicious.out(), malicious.err());
            let code = malicious.code();
            assert!(code != 0 && code != 125 && all.contains(flood.says), "{starter:?}, {}: {code} {all}", flood.what);
        }
    }
}

#[test]
fn fork_bomb_ends_with_kernel() {
    for starter in Starter::all() {
        let home = starter.home();
        let plan = home.plan(limits(256, 64, 256, 32));
        let ran = starter.probe(&["--timeout", "2", "--plan", &plan], &["/bin/bash", "-c", ":(){ :|:& };:; sleep 60"]);
        assert!([124, 137].contains(&ran.code()), "{} {}", ran.code(), ran.err());
        until("it has ended", || !command_lines().iter().any(|line| line.contains(":(){ :|:& };:")));
    }
}

#[test]
fn nothing_outlives_its_kernel() {
    for starter in Starter::all() {
        let mark = format!("31{}", std::process::id());
        let script = format!("setsid sleep {mark} & (setsid setsid nohup sleep {mark} &) ; sleep 0.1");
        starter.shell(&script).prints("");
        until("they have ended", || !command_lines().iter().any(|line| line.contains(&mark)));
    }
}

#[test]
fn probe_timeout_ends_kernel() {
    for starter in Starter::all() {
        let ran = starter.probe(&["--timeout", "1"], &["/bin/sh", "-c", "trap '' TERM INT HUP; while :; do :; done"]);
        assert_eq!(ran.code(), 124);
    }
}

fn command_lines() -> Vec<String> {
    let entries = std::fs::read_dir("/proc").expect("there is a /proc");
    entries
        .flatten()
        .filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok())
        .map(|line| String::from_utf8_lossy(&line).replace('\0', " "))
        // The tests' own command lines hold the scripts.
        .filter(|line| !line.contains("probe"))
        .collect()
}
