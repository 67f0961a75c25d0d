//! Init in this process around a fake engine without a sandbox: fast, and as hostile as a test
//! wants.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::rc::Rc;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, Uid};
use ryokan::catalog::{Durability, EngineDb};
use ryokan::core::engine::EngineName;
use ryokan::core::error::{Error, Result};
use ryokan::core::ids::{Epoch, KernelId, WorkerId};
use ryokan::core::kernel::CrashCause;
use ryokan::core::limits;
use ryokan::link::connector::unix::UnixConnector;
use ryokan::link::handshake::SharedIdentity;
use ryokan::link::host::{WorkerIdentity, WorkerLink, WorkerReport};
use ryokan::link::types::WorkerUsage;
use ryokan::sys::pidfd;
use ryokan::worker::init::enclosure::{Enclosure, EngineParts, Exit, MountSource, Watch};
use ryokan::worker::init::listener::{Descriptors, Door, Sockets, serve};
use ryokan::worker::init::{Parts, Settings, run};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use super::listener::Recorder;

/// What the test sees of the enclosure.
#[derive(Debug, Default)]
pub struct Notes {
    pub binds: Vec<(PathBuf, String, bool)>,
    /// What the next watch finds.
    pub beyond: Option<CrashCause>,
    pub watched: usize,
    /// Something runs although no execution does.
    pub has_activity: bool,
    pub pid: i32,
    pub frozen: bool,
}

struct Bare {
    child: Child,
    notes: Rc<RefCell<Notes>>,
}

impl Drop for Bare {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Enclosure for Bare {
    fn layers(&self) -> Vec<String> {
        vec!["none: a test".into()]
    }
    fn signal(&mut self, signal: Signal) {
        let _ = kill(Pid::from_raw(self.child.id() as i32), signal);
    }
    fn kill_all(&mut self) {
        let _ = self.child.kill();
    }
    fn freeze(&mut self) -> Result<()> {
        self.signal(Signal::SIGSTOP);
        self.notes.borrow_mut().frozen = true;
        Ok(())
    }
    fn thaw(&mut self) {
        if std::mem::take(&mut self.notes.borrow_mut().frozen) {
            self.signal(Signal::SIGCONT);
        }
    }
    fn reap(&mut self) -> Option<Exit> {
        use std::os::unix::process::ExitStatusExt;
        let status = self.child.try_wait().unwrap()?;
        Some(status.code().map_or_else(|| Exit::Signal(status.signal().unwrap()), Exit::Status))
    }
    fn cause_of(&mut self, exit: Exit) -> CrashCause {
        match exit {
            Exit::Status(status) => CrashCause::Exited(status),
            Exit::Signal(signal) => CrashCause::Signalled(signal),
        }
    }
    fn has_activity(&mut self) -> bool {
        self.notes.borrow().has_activity
    }
    fn watch(&mut self) -> Watch {
        let mut notes = self.notes.borrow_mut();
        notes.watched += 1;
        notes.beyond.take().map_or(Watch::Within { next: Duration::from_millis(20) }, Watch::Beyond)
    }
    fn usage(&mut self) -> WorkerUsage {
        WorkerUsage { memory_bytes: 1, pids: 2, cpu_us: 3, workspace_bytes: 4 }
    }
    fn bind(&mut self, path: &Path, source: MountSource, writable: bool) -> Result<()> {
        let source = match source {
            MountSource::Path(path) => path.display().to_string(),
            MountSource::Tree { tree: fd, shows } => {
                use std::io::Read;
                let mut text = String::new();
                std::fs::File::from(fd).read_to_string(&mut text).unwrap();
                format!("{}: {text}", shows.display())
            }
        };
        self.notes.borrow_mut().binds.push((path.to_owned(), source, writable));
        Ok(())
    }
    fn bound(&self) -> Vec<String> {
        self.notes.borrow().binds.iter().map(|(path, ..)| path.display().to_string()).collect()
    }

    fn unbind(&mut self, path: &Path) -> Result<()> {
        let mut notes = self.notes.borrow_mut();
        let at = notes.binds.iter().position(|(bound, ..)| bound == path);
        at.map(|at| drop(notes.binds.remove(at))).ok_or_else(|| Error::not_found("nothing is bound there"))
    }
}

/// How a fake worker is started.
pub struct Plan {
    pub prelude: String,
    pub orphan_grace: Duration,
    pub output_buffer_bytes: usize,
    pub daemon_uid: u32,
    pub rollback_bytes: u64,
    pub state_bytes: usize,
    pub stored_bytes: u64,
}

impl Default for Plan {
    fn default() -> Self {
        Plan {
            prelude: String::new(),
            orphan_grace: Duration::from_secs(60),
            output_buffer_bytes: limits::OUTPUT_BUFFER_BYTES,
            daemon_uid: Uid::effective().as_raw(),
            rollback_bytes: limits::ROLLBACK_BYTES,
            state_bytes: 512 << 20,
            stored_bytes: limits::STATE_BYTES,
        }
    }
}

/// A worker in this process.
pub struct Fake {
    pub folder: Rc<tempfile::TempDir>,
    pub identity: WorkerIdentity,
    pub notes: Rc<RefCell<Notes>>,
    pub init: JoinHandle<i32>,
    door: JoinHandle<()>,
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.init.abort();
        self.door.abort();
    }
}

pub fn identity() -> WorkerIdentity {
    WorkerIdentity {
        worker: WorkerId::from_bytes([1; 16]),
        kernel: KernelId::from_bytes([2; 16]),
        epoch: Epoch(3),
        build: "test".into(),
        secret: [4; 32],
    }
}

impl Fake {
    pub async fn start() -> Fake {
        Fake::with(Plan::default()).await
    }

    pub async fn with(plan: Plan) -> Fake {
        Fake::within(Rc::new(tempfile::tempdir().unwrap()), plan).await.unwrap()
    }

    /// Starts a worker on a folder that may hold the state of one before.
    pub async fn within(folder: Rc<tempfile::TempDir>, plan: Plan) -> Result<Fake> {
        let notes = Rc::new(RefCell::new(Notes::default()));
        let (enclosure, engine) = spawn(&plan.prelude, notes.clone());
        notes.borrow_mut().pid = engine.pid;
        let db = EngineDb::open(&folder.path().join("engine.db"), Durability::Process)?.bounded(plan.stored_bytes);
        let sockets = Sockets::bind(&folder.path().join("w")).unwrap();
        let (sender, calls) = mpsc::channel(limits::WORKER_CALLS);
        let descriptors = Descriptors::default();
        let identity = identity();
        let shared = SharedIdentity::new(identity.clone());
        let door = Door {
            identity: shared.clone(),
            daemon_uid: plan.daemon_uid,
            calls: sender,
            descriptors: descriptors.clone(),
        };
        let (tell, ready) = oneshot::channel();
        let parts = Parts {
            settings: Settings {
                engine: EngineName::Python,
                orphan_grace: plan.orphan_grace,
                output_buffer_bytes: plan.output_buffer_bytes,
                spool_folder: folder.path().to_owned(),
                rollback_bytes: plan.rollback_bytes,
                sync_files: false,
                state_bytes: plan.state_bytes,
                stored_bytes: plan.stored_bytes,
                durability: Durability::Process,
                unbound: false,
                prepared: None,
                preload: Vec::new(),
                venv: None,
            },
            enclosure: Box::new(enclosure),
            engine,
            children: None,
            identity: shared,
            db,
            calls,
            descriptors,
            on_ready: Box::new(move |outcome| drop(tell.send(outcome))),
        };
        let init = tokio::task::spawn_local(async { run(parts).await.unwrap() });
        let door = tokio::task::spawn_local(async { serve(sockets, door).await.unwrap() });
        let fake = Fake { folder, identity, notes, init, door };
        ready.await.unwrap()?;
        Ok(fake)
    }

    pub async fn attach(&self, listener: &Rc<Recorder>) -> Result<(WorkerLink, WorkerReport)> {
        self.attach_as(&self.identity, listener).await
    }

    pub async fn attach_as(
        &self,
        identity: &WorkerIdentity,
        listener: &Rc<Recorder>,
    ) -> Result<(WorkerLink, WorkerReport)> {
        WorkerLink::attach(Rc::new(UnixConnector::new(self.socket())), identity, listener.clone()).await
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("w")
    }

    /// Init's exit status.
    pub async fn status(&mut self) -> i32 {
        tokio::time::timeout(Duration::from_secs(180), &mut self.init).await.expect("init ends").unwrap()
    }

    /// The state as the next worker will find it; init must have ended.
    pub fn state(&self) -> Vec<(String, Vec<u8>)> {
        let db = EngineDb::open(&self.folder.path().join("engine.db"), Durability::Process).unwrap();
        let heads = db.heads().unwrap();
        heads.into_iter().map(|head| (head.key.clone(), db.entry(&head.key).unwrap().unwrap().body)).collect()
    }
}

fn spawn(prelude: &str, notes: Rc<RefCell<Notes>>) -> (Bare, EngineParts) {
    let (control, theirs) = UnixStream::pair().unwrap();
    let (stdout, out) = std::io::pipe().unwrap();
    let (stderr, err) = std::io::pipe().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/worker/fake_engine.py");
    let child = Command::new("python3")
        .arg("-S")
        .arg(script)
        .arg(prelude)
        .stdin(OwnedFd::from(theirs))
        .stdout(out)
        .stderr(err)
        .spawn()
        .unwrap();
    let pid = child.id() as i32;
    let pidfd = pidfd::open(Pid::from_raw(pid)).unwrap();
    (Bare { child, notes }, EngineParts { pid, pidfd, control, stdout: stdout.into(), stderr: stderr.into() })
}
