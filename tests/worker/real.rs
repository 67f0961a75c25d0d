//! The worker as the daemon starts it: real binary, real sandbox, real engine.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::rc::Rc;
use std::time::{Duration, Instant};

use nix::unistd::Uid;
use ryokan::core::engine::EngineName;
use ryokan::core::error::Result;
use ryokan::core::exec::ExecStatus;
use ryokan::core::ids::{Epoch, ExecId, KernelId, WorkerId};
use ryokan::rpc::worker_link::{WorkerIdentity, WorkerLink, WorkerReport};
use ryokan::sandbox::{RunAs, SandboxPlan};
use ryokan::worker::launch::{BUILD, Launch, LaunchDocument, start};

use super::code;
use super::listener::{Recorder, local};

/// A kernel's folder and what a worker for it is started with.
pub struct Kernel {
    pub folder: tempfile::TempDir,
    pub identity: WorkerIdentity,
    pub document: LaunchDocument,
}

impl Kernel {
    pub fn new(engine: EngineName) -> Kernel {
        let folder = tempfile::tempdir().unwrap();
        // The folder is given away when root runs the test.
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
        let document = LaunchDocument::new(&identity, name, engine, plan, socket);
        Kernel { folder, identity, document }
    }

    pub async fn launch(&self) -> Result<Running> {
        let log = std::fs::File::create(self.folder.path().join("worker.log")).unwrap();
        start(&self.document, &self.identity.secret, &binary(), Stdio::from(log)).await.map(Running)
    }

    /// What the worker's init said.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("worker.log")).unwrap_or_default()
    }

    pub async fn attach(&self, listener: Rc<Recorder>) -> Result<(WorkerLink, WorkerReport)> {
        WorkerLink::attach(&self.document.socket, &self.identity, listener).await
    }

    pub fn dir(&self) -> &Path {
        &self.document.plan.kernel_dir
    }
}

/// A worker that does not outlive its test.
pub struct Running(pub Launch);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.process.kill();
    }
}

pub fn binary() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_ryokan-worker"))
}

#[test]
fn a_kaish_worker_runs_code() {
    local(async {
        let kernel = Kernel::new(EngineName::Kaish);
        let began = Instant::now();
        let launch = kernel.launch().await.unwrap();
        println!("launch: {:?}", began.elapsed());
        let recorder = Recorder::new();
        let (link, report) = kernel.attach(recorder.clone()).await.unwrap();
        println!("launch + attach: {:?}", began.elapsed());
        assert_eq!(report.engine, "kaish");
        assert_eq!(report.pid, launch.0.process.pid);
        link.start(code(1, "echo hi; echo oops >&2; x=42")).await.unwrap();
        let end = recorder.end(1).await;
        assert_eq!((end.status, end.code), (ExecStatus::Done, 0));
        assert_eq!(recorder.out(1), "hi\n");
        link.acknowledge(ExecId(1)).await.unwrap();
        link.stop(Duration::from_secs(2)).await.unwrap();
        recorder.gone().await;
        launch.0.process.ended().await.unwrap();
    });
}
