//! A live machine's files: brings the mirror on this host up to date, and the guest. Blocks.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::changes::Numbers;
use super::client::{Client, from_io, unexpected};
use super::halt::Halt;
use super::handle::Record;
use super::saved;
use super::seed::{self, Renewal};
use super::{DISK, LOST_DISK, NEW_DISK};
use crate::catalog::{EngineDb, EngineInfo, Entry as StateEntry};
use crate::core::durability::Durability;
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::isolation::{KernelHome, Reach};
use crate::link::machine::{Head, Reply, Request};
use crate::link::mirror::{Entry, Sink, Stamp, Tree, stamps, transfer};
use crate::sys::{fault, fs};

/// A kernel's folder on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Folder {
    pub dir: PathBuf,
    pub workspace: PathBuf,
    pub engine_db: PathBuf,
}

impl Folder {
    pub(super) fn of(home: &KernelHome) -> Folder {
        let workspace = home.dir.join(&home.own_workspace);
        Folder { dir: home.dir.clone(), workspace, engine_db: home.engine_db.clone() }
    }

    pub(super) fn disk(&self) -> PathBuf {
        self.dir.join(DISK)
    }

    pub(super) fn new_disk(&self) -> PathBuf {
        self.dir.join(NEW_DISK)
    }

    /// Whether a machine's disk is the truth, not the mirror.
    pub(super) fn has_disk(&self) -> bool {
        self.disk().exists()
    }

    fn tree(&self) -> Result<Tree> {
        Tree::open(&self.workspace, !nix::unistd::geteuid().is_root()).map_err(from_io)
    }
}

/// What was equal at the last transfer.
#[derive(Default)]
struct Known {
    guest: HashMap<String, Stamp>,
    host: HashMap<String, Stamp>,
}

/// What may be done with the files in a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// They are read and changed.
    Open,
    /// The machine is about to stop: they are read.
    Stopping,
    /// The machine is stopped: the mirror is current, and the guest answers nothing.
    Parked,
    /// The worker has ended, and they are brought out: nothing changes them until the mirror is the truth.
    Over,
}

/// A live machine.
pub(super) struct Machine {
    pub folder: Folder,
    /// The image's version.
    pub image: String,
    most_bytes: u64,
    client: Mutex<Client>,
    /// The client's, for those who do not wait for it.
    pub(super) halt: Halt,
    known: Mutex<Known>,
    /// Held while a client's request uses the files: one thread for all of them.
    pub access_lock: Arc<tokio::sync::Mutex<()>>,
    phase: Mutex<Phase>,
    pub(super) uploads: Numbers,
    pub(super) watches: Numbers,
}

pub(super) fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    // What a panic left is as good as what an error leaves: the next transfer compares anew.
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Machine {
    pub(super) fn new(folder: Folder, about: &Record) -> Machine {
        Machine::with(Client::new(about.sockets.control()), folder, about.image.clone(), about.most_bytes)
    }

    fn with(client: Client, folder: Folder, image: String, most_bytes: u64) -> Machine {
        let halt = client.halt();
        let (client, known, access_lock) = (Mutex::new(client), Mutex::default(), Arc::default());
        let (phase, uploads, watches) = (Mutex::new(Phase::Open), Numbers::default(), Numbers::default());
        Machine { folder, image, most_bytes, client, halt, known, access_lock, phase, uploads, watches }
    }

    /// The same machine as that of the kernel with this folder. It takes the connection with it. Blocks.
    pub(super) fn moved_to(&self, folder: Folder) -> Machine {
        let client = self.client().take();
        Machine::with(client, folder, self.image.clone(), self.most_bytes)
    }

    /// Gives a warm machine its kernel's files and engine state, once it is seeded anew. Its disk becomes the truth. Returns
    /// whether there is state to load.
    ///
    /// # Errors
    /// If the seeding is not confirmed; those of the guest and of renaming. The machine must end then.
    pub(super) fn bind(&self, disk: &Path, shared_boot_id: &str, durability: Durability) -> Result<bool> {
        let unconfirmed = |error| Error::unavailable(format!("seeding: {error}")).reason("seeding");
        fault::point("machine.warm.seed").map_err(unconfirmed)?;
        seed::seed(&mut self.client(), shared_boot_id, Renewal::Keep)?;
        let failed = |error: &dyn std::fmt::Display| Error::internal(format!("take a warm machine's disk: {error}"));
        let mut files = std::fs::read_dir(&self.folder.workspace).map_err(|error| failed(&error))?;
        if files.next().is_some() {
            self.push()?;
        }
        let brings_state = self.push_state()?;
        if brings_state {
            self.client().tell(&Request::Sync, &[])?;
        }
        if self.folder.has_disk() {
            return Err(Error::internal("the kernel has a disk already"));
        }
        if let Some(slot) = disk.parent() {
            saved::move_prepared(slot, &self.folder.dir)?;
        }
        match durability {
            Durability::Process => std::fs::rename(disk, self.folder.disk()).map_err(|error| failed(&error))?,
            Durability::Power => {
                fs::rename_durable(disk, &self.folder.disk(), "microvm.disk.bind").map_err(|error| failed(&error))?;
            }
        }
        fault::point("machine.warm.bound").map_err(|error| failed(&error))?;
        Ok(brings_state)
    }

    /// The connection, for requests that are bounded one by one. Blocks.
    pub(super) fn client(&self) -> MutexGuard<'_, Client> {
        self.client_within(None)
    }

    /// The connection, for a transfer that takes at most that long once it is acquired.
    pub(super) fn client_within(&self, within: Option<Duration>) -> MutexGuard<'_, Client> {
        let mut client = lock(&self.client);
        client.bound(within.map(|within| Instant::now() + within));
        client
    }

    /// Makes the mirror equal to the guest's files.
    ///
    /// # Errors
    /// `refused` beyond the workspace's limit; those of the guest and of writing.
    pub(super) fn pull(&self) -> Result<()> {
        self.pull_within(limits::VM_TRANSFER)
    }

    pub(super) fn phase(&self) -> Phase {
        *lock(&self.phase)
    }

    /// Begins a phase, unless the worker has ended.
    pub(super) fn set_phase(&self, phase: Phase) {
        let mut present = lock(&self.phase);
        if *present != Phase::Over {
            *present = phase;
        }
    }

    /// Begins a phase without changes: none is under way when this returns. Blocks.
    pub(super) fn close_changes(&self, phase: Phase) {
        let _none_is_under_way = self.client();
        self.set_phase(phase);
    }

    fn pull_within(&self, within: Duration) -> Result<()> {
        if self.phase() == Phase::Parked {
            return Ok(());
        }
        let (mut client, mut known) = (self.client_within(Some(within)), lock(&self.known));
        let mut tree = self.folder.tree()?;
        let before = std::mem::take(&mut *known);
        let same = |guest: &Entry, host: &Entry| {
            before.guest.get(&guest.path) == Some(&guest.stamp()) && before.host.get(&host.path) == Some(&host.stamp())
        };
        let guest = transfer(&mut *client, &mut tree, self.most_bytes, &same).map_err(from_io)?;
        *known = Known { guest: stamps(&guest), host: stamps(&tree.list_all().map_err(from_io)?) };
        tree.lock_again(&guest).map_err(from_io)
    }

    /// Makes the guest's files equal to the mirror.
    ///
    /// # Errors
    /// Those of the guest and of the mirror.
    pub(super) fn push(&self) -> Result<()> {
        let (mut client, mut known) = (self.client_within(Some(limits::VM_TRANSFER)), lock(&self.known));
        let mut tree = self.folder.tree()?;
        let before = std::mem::take(&mut *known);
        let same = |host: &Entry, guest: &Entry| {
            before.guest.get(&guest.path) == Some(&guest.stamp()) && before.host.get(&host.path) == Some(&host.stamp())
        };
        let host = transfer(&mut tree, &mut *client, u64::MAX, &same).map_err(from_io)?;
        tree.lock_again(&host).map_err(from_io)?;
        // Reading may have changed a mirrored file's permissions for a moment.
        let guest = Sink::list(&mut *client).map_err(from_io)?;
        *known = Known { guest: stamps(&guest), host: stamps(&tree.list_all().map_err(from_io)?) };
        tree.lock_again(&host).map_err(from_io)?;
        client.tell(&Request::Sync, &[])
    }

    /// Sends the engine's state on this host to a guest whose worker is not started, or not bound. Returns whether there is
    /// any.
    ///
    /// # Errors
    /// Those of the database and of the guest.
    pub(super) fn push_state(&self) -> Result<bool> {
        if !self.folder.engine_db.exists() {
            return Ok(false);
        }
        let db = EngineDb::open(&self.folder.engine_db, Durability::Process)?;
        let Some(info) = db.info()? else {
            db.close()?;
            return Ok(false);
        };
        let mut client = self.client_within(Some(limits::VM_TRANSFER));
        db.entries(|head, piece, _| {
            let put = Request::StatePut { key: head.key.clone(), meta_json: head.meta_json.clone() };
            client.tell(&put, piece)
        })?;
        client.tell(&Request::StateCommit { engine: (info.name, info.version, info.format) }, &[])?;
        db.close()?;
        Ok(true)
    }

    /// Stores the engine's state of a guest whose worker has ended.
    ///
    /// # Errors
    /// Those of the guest and of the database.
    fn pull_state(&self, within: Duration) -> Result<()> {
        let mut client = self.client_within(Some(within));
        let (mut heads, mut engine) = (Vec::<Head>::new(), None);
        loop {
            let (reply, _) = client.call(&Request::StateHeads { from: heads.len() }, &[], limits::VM_CALL)?;
            let Reply::Heads { engine: info, heads: page, more } = reply else { return Err(unexpected()) };
            engine = engine.or(info);
            let is_empty = page.is_empty();
            heads.extend(page);
            let reported = |head: &Head| head.size.saturating_add((head.key.len() + head.meta_json.len()) as u64);
            let bytes = heads.iter().fold(0, |sum: u64, head| sum.saturating_add(reported(head)));
            if heads.len() > limits::STATE_ENTRIES || bytes > limits::STATE_BYTES || (more && is_empty) {
                return Err(Error::refused("the engine's state in the guest is too large"));
            }
            if !more {
                break;
            }
        }
        let Some((name, version, format)) = engine else { return Ok(()) };
        let mut entries = Vec::with_capacity(heads.len());
        for head in heads {
            let mut body = Vec::new();
            while (body.len() as u64) < head.size {
                let request = Request::StateBody { key: head.key.clone(), offset: body.len() as u64 };
                let (reply, data) = client.call(&request, &[], limits::VM_CALL)?;
                if !matches!(reply, Reply::Done) || data.is_empty() || (body.len() + data.len()) as u64 > head.size {
                    return Err(unexpected());
                }
                body.extend(data);
            }
            if blake3::hash(&body).as_bytes() != &head.digest {
                return Err(Error::corrupt(format!("state entry {:?} of the guest is not what was stored", head.key)));
            }
            entries.push(StateEntry { key: head.key, meta_json: head.meta_json, body });
        }
        let db = EngineDb::open(&self.folder.engine_db, Durability::Power)?;
        db.replace_all(&EngineInfo { name, version, format }, entries.into_iter().map(Ok), &[])?;
        Ok(db.close()?)
    }

    /// Makes the mirror the truth: files and state are in it, and the disk is removed.
    ///
    /// # Errors
    /// Those of the transfers; the disk remains the truth then.
    pub(super) fn settle(&self) -> Result<()> {
        let until = Instant::now() + limits::VM_SETTLE;
        let left = || until.saturating_duration_since(Instant::now());
        self.close_changes(Phase::Over);
        self.pull_within(left())?;
        self.pull_state(left())?;
        let synced = std::fs::File::open(&self.folder.dir).and_then(|dir| Ok(nix::unistd::syncfs(dir)?));
        synced.map_err(|error| Error::internal(format!("write the mirror of a virtual machine: {error}")))?;
        // From here on a transfer would change the truth.
        self.client().end();
        self.folder.drop_disk()
    }
}

impl Folder {
    /// Removes the disk, so that the mirror is the truth.
    ///
    /// # Errors
    /// Those of removing.
    pub(super) fn drop_disk(&self) -> Result<()> {
        fs::remove_durable(&self.disk(), "microvm.disk.remove")
            .map_err(|error| Error::internal(format!("remove a virtual machine's disk: {error}")))
    }

    /// Makes the filled disk the truth.
    ///
    /// # Errors
    /// Those of renaming.
    pub(super) fn keep_disk(&self) -> Result<()> {
        fs::rename_durable(&self.new_disk(), &self.disk(), "microvm.disk.keep")
            .map_err(|error| Error::internal(format!("keep a virtual machine's disk: {error}")))
    }
}

/// The machines by their kernel's folder, for captures on other threads.
#[derive(Clone, Default)]
pub(super) struct Machines(Arc<Mutex<ByFolder>>);

#[derive(Default)]
struct ByFolder {
    live: HashMap<PathBuf, Arc<Machine>>,
    /// Folders whose last machine did not start.
    failed: HashSet<PathBuf>,
    starts: HashMap<PathBuf, Weak<StartLock>>,
}

/// Held by the start of a kernel's machine, which takes the mirror into the guest, and shared by changes of the mirror.
pub(super) type StartLock = tokio::sync::RwLock<()>;

impl Machines {
    pub(super) fn add(&self, machine: &Arc<Machine>) {
        let (mut all, dir) = (lock(&self.0), &machine.folder.dir);
        all.failed.remove(dir);
        all.live.insert(dir.clone(), Arc::clone(machine));
    }

    pub(super) fn find(&self, dir: &Path) -> Option<Arc<Machine>> {
        lock(&self.0).live.get(dir).cloned()
    }

    /// The lock of a kernel's starts and of changes of its mirror.
    pub(super) fn start_lock(&self, dir: &Path) -> Arc<StartLock> {
        let mut all = lock(&self.0);
        if let Some(found) = all.starts.get(dir).and_then(Weak::upgrade) {
            return found;
        }
        all.starts.retain(|_, unused| unused.strong_count() > 0);
        let made = Arc::default();
        all.starts.insert(dir.to_owned(), Arc::downgrade(&made));
        made
    }

    pub(super) fn remove(&self, machine: &Arc<Machine>) {
        let (mut all, dir) = (lock(&self.0), &machine.folder.dir);
        if all.live.get(dir).is_some_and(|found| Arc::ptr_eq(found, machine)) {
            all.live.remove(dir);
        }
    }

    /// Notes that the guest of a started machine did not serve.
    pub(super) fn note_failure(&self, dir: &Path) {
        lock(&self.0).failed.insert(dir.to_owned());
    }

    /// What reaches a kernel's newest files and state.
    pub(super) fn reach(&self, dir: &Path) -> Reach {
        let all = lock(&self.0);
        match dir.join(DISK).exists() {
            false => Reach::Host,
            true if all.failed.contains(dir) && !all.live.contains_key(dir) => Reach::Nothing,
            true => Reach::Worker,
        }
    }

    /// Puts aside a disk that nothing reaches. Blocks.
    ///
    /// # Errors
    /// Those of renaming.
    pub(super) fn put_aside(&self, dir: &Path) -> Result<Option<PathBuf>> {
        if self.reach(dir) != Reach::Nothing {
            return Ok(None);
        }
        let kept = dir.join(LOST_DISK);
        fs::rename_durable(&dir.join(DISK), &kept, "microvm.disk.lose")
            .map_err(|error| Error::internal(format!("put a virtual machine's disk aside: {error}")))?;
        lock(&self.0).failed.remove(dir);
        Ok(Some(kept))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::sockets::Sockets;
    use super::super::vmm::Vmm;
    use super::*;
    use crate::core::error::ErrorCode;

    pub(in crate::isolation::microvm) fn machine(dir: &Path) -> Arc<Machine> {
        let folder = Folder { dir: dir.to_owned(), workspace: dir.join("workspace"), engine_db: dir.join("engine.db") };
        let sockets = Sockets::new(dir, &"worker", Vmm::Qemu);
        let (workspace, engine_db) = (folder.workspace.clone(), folder.engine_db.clone());
        let dir = dir.to_owned();
        let about = Record {
            sockets,
            process: None,
            dir,
            workspace,
            engine_db,
            most_bytes: 1,
            image: String::from("abc"),
            kind: None,
            base: None,
        };
        Arc::new(Machine::new(folder, &about))
    }

    #[tokio::test]
    async fn only_unusable_disks_are_put_aside() -> Result<()> {
        let folder = tempfile::tempdir().expect("a folder");
        let (dir, machines) = (folder.path(), Machines::default());
        machines.note_failure(dir);
        assert_eq!((machines.reach(dir), machines.put_aside(dir)?), (Reach::Host, None));
        std::fs::write(dir.join(DISK), b"disk").expect("written");
        let live = machine(dir);
        machines.add(&live);
        assert_eq!((machines.reach(dir), machines.put_aside(dir)?), (Reach::Worker, None));
        machines.remove(&live);
        assert_eq!((machines.reach(dir), machines.put_aside(dir)?), (Reach::Worker, None));
        machines.note_failure(dir);
        assert_eq!(machines.reach(dir), Reach::Nothing);
        let kept = machines.put_aside(dir)?.expect("it is kept");
        assert_eq!(std::fs::read(kept).expect("it is there"), b"disk");
        assert_eq!(machines.reach(dir), Reach::Host);
        Ok(())
    }

    #[test]
    fn ended_machine_transfers_nothing() -> std::io::Result<()> {
        let folder = tempfile::tempdir()?;
        std::fs::create_dir(folder.path().join("workspace"))?;
        let (machine, listener) =
            (machine(folder.path()), std::os::unix::net::UnixListener::bind(folder.path().join("worker.control"))?);
        machine.client().end();
        assert_eq!(machine.pull().err().map(|error| error.code), Some(ErrorCode::Unavailable));
        listener.set_nonblocking(true)?;
        assert!(listener.accept().is_err(), "it did not connect");
        Ok(())
    }
}
