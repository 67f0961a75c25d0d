//! The worker as the daemon starts it: real binary, real sandbox, real engine.

use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use nix::unistd::Uid;
use ryokan::core::engine::EngineName;
use ryokan::core::error::{ErrorCode, Result};
use ryokan::core::exec::ExecStatus;
use ryokan::core::ids::{Epoch, ExecId, KernelId, WorkerId};
use ryokan::core::kernel::CrashCause;
use ryokan::core::value::Value;
use ryokan::isolation::process::launch::{WorkerProcess, start};
use ryokan::isolation::process::program::WorkerProgram;
use ryokan::link::bootstrap::{BUILD, LaunchDocument};
use ryokan::link::connector::unix::UnixConnector;
use ryokan::link::host::{WorkerIdentity, WorkerLink, WorkerReport};
use ryokan::sandbox::{PlannedMount, RunAs, SandboxPlan};

use super::code;
use super::listener::{Recorder, local};

/// A kernel's folder with its worker's launch document.
pub struct Kernel {
    pub folder: tempfile::TempDir,
    pub identity: WorkerIdentity,
    pub document: LaunchDocument<SandboxPlan>,
}

impl Kernel {
    pub fn new(engine: EngineName) -> Kernel {
        let folder = tempfile::tempdir().unwrap();
        // As root the test changes the folder's owner.
        let dir = folder.path().join("kernel");
        std::fs::create_dir_all(dir.join("workspace")).unwrap();
        let identity = WorkerIdentity {
            worker: WorkerId::from_bytes([7; 16]),
            kernel: KernelId::from_bytes([8; 16]),
            epoch: Epoch(1),
            build: BUILD.into(),
            secret: [9; 32],
        };
        let mut plan = SandboxPlan::new(&dir);
        if Uid::effective().is_root() {
            plan.run_as = Some(RunAs { uid: 61_234, gid: 61_234, map_root: true });
        }
        let socket = folder.path().join("w.sock");
        let name = "demo".parse().unwrap();
        let mut document = LaunchDocument::new(&identity, name, engine, plan, socket);
        if engine == EngineName::Python {
            document.engine_settings.interpreter = vec!["/usr/bin/python3".into()];
        }
        Kernel { folder, identity, document }
    }

    pub async fn launch(&self) -> Result<Running> {
        let log = std::fs::File::create(self.folder.path().join("worker.log")).unwrap();
        start(&self.document, &self.identity.secret, &program(), log.as_fd(), async |_| Ok(())).await.map(Running)
    }

    /// The report of the worker's init.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("worker.log")).unwrap_or_default()
    }

    pub async fn attach(&self, listener: Rc<Recorder>) -> Result<(WorkerLink, WorkerReport)> {
        WorkerLink::attach(Rc::new(UnixConnector::new(&self.document.socket)), &self.identity, listener).await
    }

    pub fn dir(&self) -> &Path {
        &self.document.plan.kernel_dir
    }
}

/// A worker that does not outlive its test.
pub struct Running(pub WorkerProcess);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.kill();
    }
}

fn program() -> WorkerProgram {
    WorkerProgram::open(env!("CARGO_BIN_EXE_ryokan-worker").into()).unwrap()
}

async fn served(kernel: &Kernel) -> (Running, WorkerLink, Rc<Recorder>, WorkerReport) {
    let running = kernel.launch().await.unwrap_or_else(|error| panic!("{error}: {} ({})", error.hint, kernel.log()));
    let seen = Recorder::new();
    let (link, report) = kernel.attach(seen.clone()).await.unwrap();
    (running, link, seen, report)
}

#[test]
fn kaish_worker_keeps_state() {
    local(async {
        let kernel = Kernel::new(EngineName::Kaish);
        let (running, link, seen, report) = served(&kernel).await;
        assert_eq!(report.engine, "kaish");
        assert!(report.sandbox.len() > 10, "{:?}", report.sandbox);
        link.start(code(1, "x=42; echo hi; echo oops >&2; echo file > f.txt")).await.unwrap();
        let end = seen.end(1).await;
        assert_eq!((end.status, end.code), (ExecStatus::Done, 0), "{}", end.err);
        assert_eq!((seen.out(1).as_str(), seen.err(1).as_str()), ("hi\n", "oops\n"));
        assert_eq!(std::fs::read_to_string(kernel.dir().join("workspace/f.txt")).unwrap(), "file\n");
        link.acknowledge(ExecId(1)).await.unwrap();
        let usage = link.usage().await.unwrap();
        assert!(usage.memory_bytes > 1 << 20 && usage.pids > 0, "{usage:?}");
        // Killed, not stopped: the state of the last end counts.
        running.0.kill();
        seen.gone().await;
        running.0.ended().await.unwrap();

        let (running, link, seen, report) = served(&kernel).await;
        assert!(report.restored_entries >= 1, "{report:?}");
        assert_eq!(link.get_var("x").await.unwrap(), Value::Int(42));
        link.start(code(2, "echo $x")).await.unwrap();
        seen.end(2).await;
        assert_eq!(seen.out(2), "42\n");
        link.stop(Duration::from_secs(60)).await.unwrap();
        seen.gone().await;
        running.0.ended().await.unwrap();
        assert!(!kernel.document.socket.exists() || Uid::effective().is_root(), "the socket's name is gone");
    });
}

/// Frames that code inside writes itself: metadata without bodies, 40 MB of them, and entries with a body.
const FORGED: &str = r#"
import json, os, struct
def link(fd):
    try: return os.readlink('/proc/self/fd/' + fd)
    except OSError: return ''
fd = max(int(fd) for fd in os.listdir('/proc/self/fd') if link(fd).startswith('socket:'))
def forge(count, size):
    for i in range(count):
        body = json.dumps({'ev': 'put', 'key': 'var/f%d' % i, 'meta': {'m': 'x' * size}}).encode()
        send(struct.pack('<II', len(body), 0) + body)
def send(frame):
    frame = memoryview(frame)
    while frame:
        try: frame = frame[os.write(fd, frame):]
        except BlockingIOError: pass
def store(key, size):
    meta = json.dumps({'ev': 'put', 'key': key, 'meta': {}}).encode()
    send(struct.pack('<II', len(meta), size) + meta + b'x' * size)
"#;

#[test]
fn init_memory_belongs_to_kernel_limit() {
    local(async {
        let mut kernel = Kernel::new(EngineName::Python);
        kernel.document.plan.limits.memory_bytes = 64 << 20;
        let (_running, link, seen, _) = served(&kernel).await;
        let before = link.usage().await.unwrap().memory_bytes;
        let waits = "import time\nwhile not os.path.exists('go'): time.sleep(0.05)";
        let program = format!("{FORGED}\nforge(200, 60_000)\nprint('held', flush=True)\n{waits}");
        link.start(code(1, &program)).await.unwrap();
        seen.until("the frames are written", |seen| {
            let is_held = |out: &[Vec<u8>; 2]| out[0].windows(4).any(|four| four == b"held");
            (seen.out.values().any(is_held) || !seen.ends.is_empty()).then_some(())
        })
        .await;
        let held = async || link.usage().await.unwrap().memory_bytes.saturating_sub(before);
        crate::support::eventually("usage counts the frames", async || held().await > 10 << 20).await;
        std::fs::write(kernel.dir().join("workspace/go"), "").unwrap();
        let end = seen.end(1).await;
        assert_eq!(end.status, ExecStatus::Done, "{}: {}", end.err, seen.err(1));
        link.acknowledge(ExecId(1)).await.unwrap();
        link.start(code(2, &format!("{FORGED}\nforge(2000, 60_000)"))).await.unwrap();
        let cause = seen.cause().await;
        assert!(matches!(&cause, CrashCause::Protocol(why) if why.contains("memory limit")), "{cause:?}");
    });
}

#[test]
fn memory_limit_bounds_stored_state() {
    local(async {
        let mut kernel = Kernel::new(EngineName::Python);
        kernel.document.plan.limits.memory_bytes = 64 << 20;
        let (_running, link, seen, _) = served(&kernel).await;
        let mut refused = Vec::new();
        for exec in 1..=12 {
            let store = format!("{FORGED}\nfor i in range(6): store('var/s{exec}_%d' % i, 1 << 20)");
            link.start(code(exec, &store)).await.unwrap();
            let end = seen.end(exec).await;
            assert_eq!(end.status, ExecStatus::Done, "{}: {}", end.err, seen.err(exec));
            refused.push(end.err.contains("size of the engine state"));
            link.acknowledge(ExecId(exec)).await.unwrap();
        }
        // Ten times 6 MiB, and what the forging code itself defines.
        assert_eq!(refused.iter().position(|refused| *refused), Some(10), "{refused:?}");
    });
}

#[test]
fn python_worker_keeps_state() {
    local(async {
        let kernel = Kernel::new(EngineName::Python);
        let (running, link, seen, report) = served(&kernel).await;
        assert_eq!(report.engine, "python");
        link.start(code(1, "import os, sys\nx = [1, 2]\nprint('hi')\nprint('oops', file=sys.stderr)\nos.getcwd()"))
            .await
            .unwrap();
        let end = seen.end(1).await;
        assert_eq!(
            (end.status, end.value),
            (ExecStatus::Done, Some(Value::String("/workspace".into()))),
            "{}",
            end.err
        );
        assert_eq!(seen.out(1), "hi\n");
        link.start(code(2, "print('on', flush=True)\nwhile True: pass")).await.unwrap();
        seen.until("output", |s| s.out.get(&ExecId(2)).map(drop)).await;
        link.interrupt(ExecId(2)).await.unwrap();
        assert_eq!(seen.end(2).await.status, ExecStatus::Interrupted);
        let mut exec = code(3, "print(input() + input())");
        exec.request.stdin = b"a\nb\n".to_vec();
        link.start(exec).await.unwrap();
        seen.end(3).await;
        assert_eq!(seen.out(3), "ab\n");
        link.start(code(4, "import os; os.kill(os.getpid(), 9)")).await.unwrap();
        assert_eq!(seen.end(4).await.status, ExecStatus::Lost);
        assert_eq!(seen.cause().await, CrashCause::Signalled(9));
        for exec in 1..=4 {
            link.acknowledge(ExecId(exec)).await.unwrap();
        }
        running.0.ended().await.unwrap();

        let (_running, link, seen, _) = served(&kernel).await;
        link.start(code(5, "print(x)")).await.unwrap();
        seen.end(5).await;
        assert_eq!(seen.out(5), "[1, 2]\n");
    });
}

#[test]
fn worker_survives_daemon_disconnect() {
    local(async {
        let kernel = Kernel::new(EngineName::Kaish);
        let (_running, link, first, _) = served(&kernel).await;
        link.start(code(1, &format!("echo one; {}; echo two", crate::support::WAITS))).await.unwrap();
        first.until("output", |s| (s.chunks > 0).then_some(())).await;
        drop(link);
        let second = Recorder::new();
        let (link, report) = kernel.attach(second.clone()).await.unwrap();
        assert_eq!(report.executions, [(ExecId(1), true)]);
        std::fs::write(kernel.dir().join("workspace/go"), "").unwrap();
        second.end(1).await;
        assert_eq!(second.out(1), "one\ntwo\n");
        link.acknowledge(ExecId(1)).await.unwrap();
    });
}

#[test]
fn orphaned_worker_exits() {
    local(async {
        let mut kernel = Kernel::new(EngineName::Kaish);
        kernel.document.orphan_grace_ms = 200;
        let running = kernel.launch().await.unwrap();
        running.0.ended().await.unwrap();
    });
}

#[test]
fn memory_limit_ends_engine() {
    for (engine, program) in [
        (EngineName::Python, "x = []\nwhile True: x.append(bytearray(8 << 20))"),
        (EngineName::Kaish, "cat /dev/zero | wc -c"),
    ] {
        local(async move {
            let mut kernel = Kernel::new(engine);
            kernel.document.plan.limits.memory_bytes = 128 << 20;
            let (_running, link, seen, _) = served(&kernel).await;
            link.start(code(1, program)).await.unwrap();
            let end = seen.end(1).await;
            // Python may raise a MemoryError first; it must not continue running.
            match end.status {
                ExecStatus::Lost => assert_eq!(seen.cause().await, CrashCause::OutOfMemory, "{engine}"),
                ExecStatus::Failed => assert!(end.err.contains("Memory"), "{engine}: {}", end.err),
                other => panic!("{engine}: {other:?}"),
            }
        });
    }
}

#[test]
fn launch_reports_damaged_state() {
    local(async {
        let kernel = Kernel::new(EngineName::Kaish);
        std::fs::write(kernel.dir().join("engine.db"), vec![1; 8192]).unwrap();
        let error = kernel.launch().await.map(drop).unwrap_err();
        assert_eq!(error.code, ErrorCode::Corrupt, "{error}");
        assert!(error.message.contains("the engine's state is damaged"), "{error}");
    });
}

#[test]
fn launch_reports_failed_layer() {
    local(async {
        let mut kernel = Kernel::new(EngineName::Kaish);
        let nowhere = PathBuf::from("/nowhere/at/all");
        kernel.document.plan.mounts = vec![PlannedMount {
            inside: "/data".into(),
            source: nowhere,
            writable: false,
            system: false,
            is_mapped: false,
        }];
        let error = kernel.launch().await.map(drop).unwrap_err();
        assert_eq!(error.code, ErrorCode::Refused, "{error}");
        assert!(error.reason.starts_with("sandbox-") && !error.hint.is_empty(), "{error:?}");
        kernel.document.plan.mounts.clear();
        kernel.document.build = "another".into();
        let error = kernel.launch().await.map(drop).unwrap_err();
        assert!(error.message.contains("another"), "{error}");
    });
}

#[test]
fn live_mount_and_unmount() {
    local(async {
        let kernel = Kernel::new(EngineName::Kaish);
        let (_running, link, seen, _) = served(&kernel).await;
        let host = tempfile::tempdir().unwrap();
        std::fs::set_permissions(host.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        std::fs::write(host.path().join("f"), "from outside\n").unwrap();
        link.bind("/data/in".as_ref(), host.path(), false, None).await.unwrap();
        link.start(code(1, "cat /data/in/f; echo x > /data/in/g")).await.unwrap();
        seen.end(1).await;
        assert_eq!(seen.out(1), "from outside\n");
        assert!(!host.path().join("g").exists());
        link.unbind("/data/in".as_ref()).await.unwrap();
        link.start(code(2, "cat /data/in/f")).await.unwrap();
        assert_eq!(seen.end(2).await.status, ExecStatus::Failed);
        // ryokan's own folders are never mounted.
        assert!(link.bind("/data/own".as_ref(), kernel.dir(), true, None).await.is_err());
    });
}

#[test]
fn worker_secret_hidden() {
    local(async {
        let kernel = Kernel::new(EngineName::Python);
        let (_running, link, seen, _) = served(&kernel).await;
        let program = r#"
import glob
found = []
for name in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline") + ["/proc/self/maps"]:
    try:
        found.append(open(name, "rb").read())
    except OSError:
        pass
import os
print(any(b"\x09" * 32 in one for one in found), os.path.exists("/proc/1/mem") and os.access("/proc/1/mem", os.R_OK))
"#;
        link.start(code(1, program)).await.unwrap();
        let end = seen.end(1).await;
        assert_eq!(end.status, ExecStatus::Done, "{}", end.err);
        assert_eq!(seen.out(1), "False False\n");
    });
}

/// The same as an unprivileged user: root's test runs itself again as uid 1500.
#[test]
fn unprivileged_daemon_runs_workers() {
    if !Uid::effective().is_root() {
        return;
    }
    let program = std::env::current_exe().unwrap();
    let run = std::process::Command::new("setpriv")
        .args(["--reuid", "1500", "--regid", "1500", "--clear-groups"])
        .arg(&program)
        .args(["worker::sandboxed", "--skip", "unprivileged", "--skip", "memory"])
        .env("TMPDIR", "/tmp")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&run.stdout);
    assert!(run.status.success(), "{text}\n{}", String::from_utf8_lossy(&run.stderr));
    assert!(text.contains("python_worker_keeps_state ... ok"), "{text}");
}
