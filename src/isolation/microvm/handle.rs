//! A handle to a machine's worker. A task beside it watches the machine, and brings files and state out at the end.

use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::watch;
use tokio::time::Instant;

use super::machine::{Machine, Machines};
use super::qemu::Sockets;
use crate::core::error::{Error, Result};
use crate::core::ids::WorkerId;
use crate::core::limits;
use crate::isolation::process::handle::ProcessRecord;
use crate::isolation::process::launch::WorkerProcess;
use crate::isolation::{BoundSources, HostMount, KernelHome, WorkerHandle, WorkerRecord};
use crate::link::connector::unix::connect;
use crate::link::host::WorkerLink;
use crate::link::machine::{EVENT_ENDED, EVENT_QUERY};

/// The record of a machine, for a later daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub sockets: Sockets,
    /// QEMU's process; `None` before the start.
    pub process: Option<ProcessRecord>,
    pub dir: std::path::PathBuf,
    pub workspace: std::path::PathBuf,
    pub engine_db: std::path::PathBuf,
    pub most_bytes: u64,
}

impl Record {
    pub(super) fn read(record: &str) -> Result<Record> {
        serde_json::from_str(record).map_err(|error| Error::corrupt(format!("a worker's record is damaged: {error}")))
    }

    pub(super) fn write(&self) -> Result<WorkerRecord> {
        serde_json::to_string(self).map_err(|error| Error::internal(error.to_string()))
    }
}

/// A machine's worker.
pub(super) struct MachineHandle {
    id: WorkerId,
    pid: u32,
    written: WorkerRecord,
    sockets: Sockets,
    watched: Rc<Watched>,
}

/// What the handle and its task share.
struct Watched {
    process: WorkerProcess,
    /// Whether no code of the kernel runs any more, and files and state are being brought out.
    is_settling: Cell<bool>,
    has_ended: watch::Sender<bool>,
}

impl MachineHandle {
    /// A handle to a running machine; `machine` is known to captures until it ends.
    pub(super) fn new(
        id: WorkerId,
        process: WorkerProcess,
        written: WorkerRecord,
        sockets: Sockets,
        machine: Arc<Machine>,
        machines: Machines,
    ) -> MachineHandle {
        let (pid, (has_ended, _)) = (process.pid, watch::channel(false));
        let watched = Rc::new(Watched { process, is_settling: Cell::new(false), has_ended });
        machines.add(&machine);
        tokio::task::spawn_local(watch_over(id, Rc::clone(&watched), machine, machines, sockets.clone()));
        MachineHandle { id, pid, written, sockets, watched }
    }
}

/// Watches a machine until it has ended.
async fn watch_over(id: WorkerId, watched: Rc<Watched>, machine: Arc<Machine>, machines: Machines, sockets: Sockets) {
    let why = tokio::select! {
        ended = watched.process.ended() => ended.err().map(|error| error.to_string()),
        over = worker_is_over(&sockets) => match over {
            Ok(()) => settle(&watched, &machine).await.err().map(|error| error.message),
            Err(why) => Some(why),
        },
    };
    if let Some(why) = why {
        tracing::warn!(worker = %id, why, "a virtual machine is ended; its disk keeps the kernel's files and state");
    }
    watched.process.kill();
    if let Err(error) = watched.process.ended().await {
        tracing::warn!(worker = %id, %error, "a virtual machine cannot be watched");
    }
    machines.remove(&machine);
    // Waits outside the event loop for the transfer that the end interrupts: the next machine changes the same mirror.
    if let Err(error) = tokio::task::spawn_blocking(move || machine.client().end()).await {
        tracing::warn!(worker = %id, %error, "the connection to a virtual machine cannot be closed");
    }
    watched.has_ended.send_replace(true);
}

/// Brings files and state out of a machine whose worker has ended.
async fn settle(watched: &Watched, machine: &Arc<Machine>) -> Result<()> {
    watched.is_settling.set(true);
    let machine = Arc::clone(machine);
    let mut settled = tokio::task::spawn_blocking(move || machine.settle());
    let done = match tokio::time::timeout(limits::VM_SETTLE, &mut settled).await {
        Ok(done) => done,
        Err(_) => {
            // Its thread may be about to remove the disk: the machine has not ended before it.
            watched.process.kill();
            settled.await
        }
    };
    done.map_err(|error| Error::internal(error.to_string()))?
}

/// Waits until the guest reports its worker's end; an error says that the guest does not answer.
async fn worker_is_over(sockets: &Sockets) -> std::result::Result<(), String> {
    let mut answered = Instant::now();
    loop {
        if let Ok(mut stream) = connect(&sockets.events).await {
            loop {
                let mut bytes = [0; 64];
                if stream.write_all(&[EVENT_QUERY]).await.is_err() {
                    break;
                }
                match tokio::time::timeout(limits::VM_HEARTBEAT, stream.read(&mut bytes)).await {
                    Ok(Ok(0) | Err(_)) => break,
                    Ok(Ok(count)) => {
                        answered = Instant::now();
                        if bytes[..count].contains(&EVENT_ENDED) {
                            return Ok(());
                        }
                        // The end is reported without being asked for.
                        match tokio::time::timeout(limits::VM_HEARTBEAT, stream.read(&mut bytes)).await {
                            Ok(Ok(0) | Err(_)) => break,
                            Ok(Ok(count)) if bytes[..count].contains(&EVENT_ENDED) => return Ok(()),
                            Ok(Ok(_)) | Err(_) => {}
                        }
                    }
                    Err(_) => {}
                }
                if answered.elapsed() > limits::VM_SILENCE {
                    return Err(String::from("its guest does not answer"));
                }
            }
        }
        if answered.elapsed() > limits::VM_SILENCE {
            return Err(String::from("its guest does not answer"));
        }
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    }
}

#[async_trait::async_trait(?Send)]
impl WorkerHandle for MachineHandle {
    fn id(&self) -> WorkerId {
        self.id
    }

    fn record(&self) -> WorkerRecord {
        self.written.clone()
    }

    fn process_id(&self) -> Option<u32> {
        Some(self.pid)
    }

    fn kill(&self) {
        // The task beside it ends the machine, within a limit; no code of the kernel runs.
        if !self.watched.is_settling.get() {
            self.watched.process.kill();
        }
    }

    async fn exited(&self) {
        let mut ended = self.watched.has_ended.subscribe();
        // The sender is in this handle.
        let _ = ended.wait_for(|ended| *ended).await;
    }

    async fn clean_up(&self) {
        self.sockets.unlink();
    }

    async fn bind_sources(&self, _: &WorkerLink, _: Option<&KernelHome>, _: &[HostMount]) -> Result<BoundSources> {
        Err(Error::internal("a virtual machine is started for its kernel"))
    }

    async fn attach_mount(&self, _: &WorkerLink, _: &HostMount) -> Result<()> {
        Err(no_mounts())
    }

    async fn detach_mount(&self, _: &WorkerLink, inside: &Path) -> Result<()> {
        Err(Error::not_found(format!("nothing is mounted at {}", inside.display())))
    }
}

/// Why there are no mounts.
pub(super) fn no_mounts() -> Error {
    Error::unsupported("a kernel in a virtual machine has no host paths: its files are on a disk of its own")
        .reason("mounts")
        .hint("copy files in with --from-dir, or use --isolation process")
}
