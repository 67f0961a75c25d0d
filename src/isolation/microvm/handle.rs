//! A handle to a machine's worker. A task beside it watches the machine, and brings files and state out at the end.

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::watch;
use tokio::time::Instant;

use super::base::BaseTemplate;
use super::copy::SavedMachine;
use super::halt;
use super::held_write::Stop;
use super::installed;
use super::machine::{Folder, Machine, Machines, Phase};
use super::monitor::Monitor;
use super::notes::Notes;
use super::saved;
use super::seed::{self, Renewal};
use super::sockets::Sockets;
use super::template::Kind;
use crate::core::durability::Durability;
use crate::core::engine::EngineName;
use crate::core::error::{DISK_FULL, Error, Result};
use crate::core::ids::{HostId, WorkerId};
use crate::core::limits;
use crate::core::snapshot;
use crate::isolation::cgroups::remove_cgroup;
use crate::isolation::process::handle::ProcessRecord;
use crate::isolation::process::launch::WorkerProcess;
use crate::isolation::{BoundSources, HostMount, KernelHome, WorkerHandle, WorkerRecord};
use crate::link::handshake::WorkerIdentity;
use crate::link::host::WorkerLink;
use crate::link::machine::{EVENT_ENDED, EVENT_QUERY, Request};

/// Pause after a state that was not asked for.
const UNASKED: Duration = Duration::from_millis(200);

/// The record of a machine, for a later daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub sockets: Sockets,
    /// The monitor's process; `None` before the start.
    pub process: Option<ProcessRecord>,
    pub dir: PathBuf,
    pub workspace: PathBuf,
    pub engine_db: PathBuf,
    pub most_bytes: u64,
    /// The image's version; absent in records of earlier daemons.
    #[serde(default)]
    pub image: String,
    /// What it must have in common with a machine that continues it; absent in records of earlier daemons.
    #[serde(default)]
    pub kind: Option<Kind>,
    /// The template that its memory maps; `None` if it is another file or none.
    #[serde(default)]
    pub base: Option<BaseTemplate>,
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
    host: HostId,
    pid: u32,
    about: Record,
    written: WorkerRecord,
    warm: Option<Warm>,
    machines: Machines,
    /// The folder for files of copies.
    copies: PathBuf,
    cgroup: Option<PathBuf>,
    watched: Rc<Watched>,
}

/// What a driver gives each of its handles.
pub(super) struct Shared {
    pub host: HostId,
    pub machines: Machines,
    /// The folder for files of copies.
    pub copies: PathBuf,
    /// The machine's cgroup.
    pub cgroup: Option<PathBuf>,
    pub notes: Rc<Notes>,
}

/// What a warm machine's binding needs.
pub(super) struct Warm {
    /// The boot id of another machine of its template; empty if it was booted.
    pub shared_boot_id: String,
    pub durability: Durability,
}

/// What the handle and its task share.
struct Watched {
    process: WorkerProcess,
    machine: RefCell<Arc<Machine>>,
    /// Whether it is a kernel's: the guest of a warm machine may be stopped, and is not asked.
    is_bound: watch::Sender<bool>,
    /// Whether the machine is stopped: the guest is not asked.
    is_parked: watch::Sender<bool>,
    /// Whether no code of the kernel runs any more, and files and state are being brought out.
    is_settling: Cell<bool>,
    /// Whether the guest did not answer, so that the machine was ended.
    was_silent: Cell<bool>,
    has_ended: watch::Sender<bool>,
}

impl Watched {
    fn machine(&self) -> Arc<Machine> {
        Arc::clone(&self.machine.borrow())
    }
}

impl MachineHandle {
    /// A handle to a running machine. One that is not `warm` is known to captures until it ends.
    pub(super) fn new(
        id: WorkerId,
        process: WorkerProcess,
        about: Record,
        machine: Arc<Machine>,
        Shared { host, machines, copies, cgroup, notes }: Shared,
        warm: Option<Warm>,
    ) -> Result<MachineHandle> {
        let (pid, written) = (process.pid, about.write()?);
        if warm.is_none() {
            machines.add(&machine);
        }
        let watched = Rc::new(Watched {
            process,
            machine: RefCell::new(machine),
            is_bound: watch::Sender::new(warm.is_none()),
            is_parked: watch::Sender::new(false),
            is_settling: Cell::new(false),
            was_silent: Cell::new(false),
            has_ended: watch::Sender::new(false),
        });
        tokio::task::spawn_local(watch_over(id, Rc::clone(&watched), machines.clone(), about.clone(), notes));
        Ok(MachineHandle { id, host, pid, about, written, warm, machines, copies, cgroup, watched })
    }

    /// QEMU's process id.
    pub(super) fn process(&self) -> u32 {
        self.pid
    }

    pub(super) fn kind(&self) -> Option<Kind> {
        self.about.kind.clone()
    }

    /// The template that its memory maps.
    pub(super) fn base(&self) -> Option<BaseTemplate> {
        self.about.base.clone()
    }

    pub(super) fn host(&self) -> HostId {
        self.host
    }

    pub(super) fn machine(&self) -> Arc<Machine> {
        self.watched.machine()
    }

    pub(super) fn copies(&self) -> &Path {
        &self.copies
    }

    pub(super) fn sockets(&self) -> &Sockets {
        &self.about.sockets
    }

    /// Whether it is a kernel's machine that is not stopped.
    pub(super) fn is_running(&self) -> bool {
        *self.watched.is_bound.borrow() && !*self.watched.is_parked.borrow()
    }

    /// Whether it is a kernel's machine that is stopped.
    pub(super) fn is_suspended(&self) -> bool {
        *self.watched.is_bound.borrow() && *self.watched.is_parked.borrow()
    }

    /// Whether it stands still, from now on.
    pub(super) fn watch_stop(&self) -> Stop {
        Stop { is_parked: self.watched.is_parked.subscribe(), has_ended: self.watched.has_ended.subscribe() }
    }

    /// While it is stopped, its guest is not asked whether it is alive.
    pub(super) fn set_stopped(&self, is_stopped: bool) {
        self.watched.is_parked.send_replace(is_stopped);
    }

    /// Sets the clock of a machine that was stopped.
    ///
    /// # Errors
    /// Those of the guest.
    pub(super) async fn set_clock(&self) -> Result<()> {
        let machine = self.watched.machine();
        blocking(move || seed::seed(&mut machine.client(), "", Renewal::Keep).map(drop)).await
    }
}

/// Watches a machine until it has ended.
async fn watch_over(id: WorkerId, watched: Rc<Watched>, machines: Machines, about: Record, notes: Rc<Notes>) {
    let (sockets, engine) = (about.sockets, about.kind.map(|kind| kind.engine));
    let why = tokio::select! {
        ended = watched.process.ended() => ended.err().map(|error| error.to_string()),
        over = kernels_worker_is_over(&watched, &sockets, &notes, engine) => match over {
            Ok(()) => settle(&watched, &watched.machine()).await.err().map(|error| error.message),
            Err(why) => {
                watched.was_silent.set(true);
                Some(why)
            }
        },
    };
    if let Some(why) = why {
        tracing::warn!(worker = %id, why, "a virtual machine is ended; its disk keeps the kernel's files and state");
    }
    watched.process.kill();
    if let Err(error) = watched.process.ended().await {
        tracing::warn!(worker = %id, %error, "a virtual machine cannot be watched");
    }
    let machine = watched.machine();
    machines.remove(&machine);
    // Waits outside the event loop for the transfer that the end interrupts: the next machine changes the same mirror.
    if let Err(error) = tokio::task::spawn_blocking(move || {
        machine.client().end();
        saved::drop_prepared(&machine.folder.dir);
    })
    .await
    {
        tracing::warn!(worker = %id, %error, "the connection to a virtual machine cannot be closed");
    }
    watched.has_ended.send_replace(true);
}

async fn kernels_worker_is_over(
    watched: &Watched,
    sockets: &Sockets,
    notes: &Notes,
    engine: Option<EngineName>,
) -> std::result::Result<(), String> {
    // The sender is borrowed, so it does not close.
    let _ = watched.is_bound.subscribe().wait_for(|is_bound| *is_bound).await;
    let mut is_parked = watched.is_parked.subscribe();
    loop {
        let _ = is_parked.wait_for(|is_parked| !*is_parked).await;
        let found = tokio::select! {
            found = worker_is_over(sockets) => found,
            _ = is_parked.wait_for(|is_parked| *is_parked) => continue,
        };
        match found {
            Found::Ended => return Ok(()),
            Found::Silent => return Err(String::from("its guest does not answer")),
            Found::Halted => keep_halted(watched, sockets, notes, engine).await?,
        }
    }
}

/// Keeps a machine for which the host's disk has no room, until it runs again.
async fn keep_halted(
    watched: &Watched,
    sockets: &Sockets,
    notes: &Notes,
    engine: Option<EngineName>,
) -> std::result::Result<(), String> {
    let machine = watched.machine();
    let dir = machine.folder.dir.clone();
    machine.halt.set(true);
    let folder = dir.file_name().unwrap_or_default().to_string_lossy();
    notes.add(engine, DISK_FULL, format!("the virtual machine of kernel {folder} stands still until there is room"));
    let runs = halt::await_room(&dir, sockets).await;
    machine.halt.set(false);
    runs.map_err(|error| error.message)?;
    let set = blocking(move || seed::seed(&mut machine.client(), "", Renewal::Keep).map(drop)).await;
    if let Err(error) = set {
        // It may be halted again.
        tracing::warn!(%error, "the clock of a virtual machine that stood still is not set");
    }
    Ok(())
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

/// What a watch of a guest finds.
enum Found {
    /// Its worker has ended.
    Ended,
    /// It does not answer.
    Silent,
    /// It does not answer because the host's disk has no room for a write.
    Halted,
}

/// Waits until the guest reports its worker's end, or does not answer.
async fn worker_is_over(sockets: &Sockets) -> Found {
    let mut answered = Instant::now();
    loop {
        if let Ok(mut stream) = sockets.events().connect().await {
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
                            return Found::Ended;
                        }
                        // The end is reported without being asked for.
                        match tokio::time::timeout(limits::VM_HEARTBEAT, stream.read(&mut bytes)).await {
                            Ok(Ok(0) | Err(_)) => break,
                            Ok(Ok(count)) if bytes[..count].contains(&EVENT_ENDED) => return Found::Ended,
                            // A guest that says more than it is asked for is read slowly.
                            Ok(Ok(_)) => tokio::time::sleep(UNASKED).await,
                            Err(_) => {}
                        }
                    }
                    Err(_) if halt::is_halted(sockets).await => return Found::Halted,
                    Err(_) => {}
                }
                if answered.elapsed() > limits::VM_SILENCE {
                    return Found::Silent;
                }
            }
        }
        if answered.elapsed() > limits::VM_SILENCE {
            return Found::Silent;
        }
        tokio::time::sleep(UNASKED).await;
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

    fn was_silent(&self) -> bool {
        self.watched.was_silent.get()
    }

    async fn clean_up(&self) {
        self.about.sockets.unlink();
        if let Some(cgroup) = &self.cgroup {
            remove_cgroup(cgroup).await;
        }
    }

    fn record_for(&self, home: &KernelHome) -> WorkerRecord {
        let Folder { dir, workspace, engine_db } = Folder::of(home);
        let about = Record { dir, workspace, engine_db, ..self.about.clone() };
        about.write().unwrap_or_else(|_| self.written.clone())
    }

    async fn park(&self) -> Result<()> {
        let (machine, is_bound) = (self.watched.machine(), *self.watched.is_bound.borrow());
        let quiet = Arc::clone(&machine);
        let stopped = async {
            blocking(move || {
                if is_bound {
                    quiet.close_changes(Phase::Stopping);
                    quiet.pull()?;
                }
                // Nothing is on its way to the disk while the processors stand still.
                quiet.client().tell(&Request::Sync, &[])
            })
            .await?;
            // A guest that is stopped is not asked whether it is alive.
            self.watched.is_parked.send_replace(true);
            Monitor::connect(&self.about.sockets).await?.stop().await
        };
        if let Err(error) = stopped.await {
            self.watched.is_parked.send_replace(false);
            machine.set_phase(Phase::Open);
            return Err(error);
        }
        if is_bound {
            machine.set_phase(Phase::Parked);
        }
        Ok(())
    }

    async fn unpark(&self) -> Result<()> {
        // Records of the first daemons name no monitor, and their machines never stop.
        if self.about.sockets.monitor.as_os_str().is_empty() {
            return Ok(());
        }
        let mut monitor = Monitor::connect(&self.about.sockets).await?;
        if monitor.is_stopped().await? {
            let machine = self.watched.machine();
            if installed::is_there(&machine.folder.dir) {
                // Its daemon was killed before it continued: the next start begins with the same memory and disk.
                return Err(Error::lost("the machine of a checkpoint has not continued yet"));
            }
            // From here on the disk changes.
            saved::remove(&machine.folder.dir)?;
            monitor.go_on().await?;
            machine.set_phase(Phase::Open);
            self.set_clock().await?;
        } else if monitor.is_halted().await? {
            // A former daemon ended while the host's disk was full.
            let dir = self.watched.machine().folder.dir.clone();
            let runs = tokio::time::timeout(limits::VM_CALL, halt::await_room(&dir, &self.about.sockets)).await;
            runs.map_err(|_| halt::full())??;
            self.set_clock().await?;
        }
        self.watched.is_parked.send_replace(false);
        Ok(())
    }

    async fn save_memory(&self, identity: &WorkerIdentity) -> Result<Option<String>> {
        self.save_stopped(identity).await
    }

    fn machine(&self) -> Option<snapshot::Machine> {
        self.about.kind.as_ref().map(Kind::machine)
    }

    fn check_saves_running(&self) -> Result<()> {
        self.copied_kind().map(drop)
    }

    async fn save_running(&self, worker: &WorkerIdentity) -> Result<SavedMachine> {
        MachineHandle::save_running(self, worker).await
    }

    fn is_parked(&self) -> bool {
        *self.watched.is_parked.borrow()
    }

    async fn answers_parked(&self, within: Duration) -> bool {
        let asked = async { Monitor::connect(&self.about.sockets).await?.is_stopped().await };
        matches!(tokio::time::timeout(within, asked).await, Ok(Ok(_)))
    }

    async fn bind_sources(
        &self,
        _: &WorkerLink,
        home: Option<&KernelHome>,
        mounts: &[HostMount],
    ) -> Result<BoundSources> {
        let Some(warm) = self.warm.as_ref().filter(|_| !*self.watched.is_bound.borrow()) else {
            return Err(Error::internal("a virtual machine has its kernel already"));
        };
        if !mounts.is_empty() {
            return Err(no_mounts());
        }
        if self.watched.is_parked.send_replace(false) {
            // Another worker starts sooner than one that hangs.
            let continued = async { Monitor::connect(&self.about.sockets).await?.resume().await };
            let late = |_| Err(Error::unavailable("the monitor of a stopped machine does not answer"));
            tokio::time::timeout(limits::VM_PARKED_ANSWER, continued).await.unwrap_or_else(late)?;
        }
        let (slot, folder) = (self.watched.machine(), home.map(Folder::of));
        let dir = folder.as_ref().unwrap_or(&slot.folder).dir.clone();
        // Until captures and clients find the machine, nothing changes the files that it takes.
        let _start = self.machines.start_lock(&dir).write_owned().await;
        let (shared_boot_id, durability) = (warm.shared_boot_id.clone(), warm.durability);
        let bound = blocking(move || {
            let disk = slot.folder.new_disk();
            let machine = match folder {
                Some(folder) => Arc::new(slot.moved_to(folder)),
                None => slot,
            };
            let brings_state = machine.bind(&disk, &shared_boot_id, durability)?;
            Ok((machine, brings_state))
        });
        let (machine, brings_state) = bound.await?;
        self.machines.add(&machine);
        *self.watched.machine.borrow_mut() = machine;
        self.watched.is_bound.send_replace(true);
        Ok(BoundSources { brings_state, ..BoundSources::default() })
    }

    async fn attach_mount(&self, _: &WorkerLink, _: &HostMount) -> Result<()> {
        Err(no_mounts())
    }

    async fn detach_mount(&self, _: &WorkerLink, inside: &Path) -> Result<()> {
        Err(Error::not_found(format!("nothing is mounted at {}", inside.display())))
    }
}

pub(super) async fn blocking<T: Send + 'static>(act: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(act).await.map_err(|error| Error::internal(error.to_string()))?
}

/// Why there are no mounts.
pub(super) fn no_mounts() -> Error {
    Error::unsupported("a kernel in a virtual machine has no host paths: its files are on a disk of its own")
        .reason("mounts")
        .hint("copy files in with --from-dir, or use --isolation process")
}
