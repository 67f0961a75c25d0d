//! Access to the databases: [`Catalog`] owns the threads, [`CatalogHandle`] sends them requests.
//!
//! A method queues its request when it is called, in call order; the future only waits for the reply.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use rusqlite::{OptionalExtension as _, params};

use super::audit::{self, AuditFilter};
use super::error::CatalogError;
use super::events::{self, EventPage, NewEvent};
use super::files::{self, KernelFiles};
use super::kernels::{self, Created, KernelChange, KernelRow};
use super::keys::{self, IdempotencyKey};
use super::open_databases::{OpenDatabases, Target};
use super::sqlite::{Db, Kind, Result};
use super::state::StateHandle;
use super::thread::{self, Pending, Queue};
use super::workers::{self, WorkerRow};
use crate::core::audit::{AuditBreak, AuditHead, AuditLine, NewAudit, Walk};
use crate::core::durability::Durability;
use crate::core::ids::{HostId, KernelId, WorkerId};
use crate::core::info::Event;
use crate::core::limits;
use crate::core::spec::KernelSpec;
use crate::sys::fs::{self, FsError};

/// Location of the databases, and their guarantees.
#[derive(Debug, Clone)]
pub struct CatalogConfig {
    /// The data directory; must exist. `catalog.db` and `kernels/` are created in it.
    pub data: PathBuf,
    /// What acknowledged work survives.
    pub durability: Durability,
    /// The host's identity if it has none yet.
    pub fresh_host_id: HostId,
    /// Milliseconds since 1970.
    pub now_ms: i64,
}

/// The threads of the databases. Dropping it ends them after the queued requests.
#[derive(Debug)]
pub struct Catalog {
    handle: CatalogHandle,
    threads: Vec<JoinHandle<()>>,
}

/// Events and audit lines of a change, written in its transaction.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Notes {
    /// Events.
    pub events: Vec<NewEvent>,
    /// Lines of the audit log.
    pub audit: Vec<NewAudit>,
}

/// The result of a change, with its numbered events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written<T> {
    /// The result.
    pub value: T,
    /// The events of the [`Notes`], numbered.
    pub events: Vec<Event>,
}

impl Notes {
    pub(super) fn write<T>(self, db: &Db, value: T) -> Result<Written<T>> {
        audit::append(db, &self.audit)?;
        let events = if self.events.is_empty() { Vec::new() } else { events::append(db, self.events)? };
        Ok(Written { value, events })
    }
}

impl Catalog {
    /// Opens `catalog.db`, or creates it, and starts the threads. Blocks; call it before serving.
    ///
    /// # Errors
    /// Those of [`Db::open`], and a thread that cannot be started.
    pub fn open(config: &CatalogConfig) -> Result<Catalog> {
        let kernels = config.data.join("kernels");
        fs::create_dir_durable(&kernels, 0o700, "catalog.data.dir")?;
        let db = Db::open_or_create(Kind::Catalog, &config.data.join(Kind::Catalog.file_name()), config.durability)?;
        // Built now, so that the first kernel does not wait for it.
        Kind::State.template()?;
        Kind::Engine.template()?;
        let host = host_id(&db, config)?;
        let no_thread = |e| CatalogError::File(FsError { op: "start a thread for", path: kernels.clone(), source: e });
        let databases = OpenDatabases::new(kernels.clone(), config.durability).with_host(db);
        let (queue, first) = thread::start("catalog", databases).map_err(no_thread)?;
        let mut threads = vec![first];
        let mut states = Vec::new();
        for n in 0..limits::STATE_THREADS {
            let databases = OpenDatabases::new(kernels.clone(), config.durability);
            let (queue, started) = thread::start(&format!("state-{n}"), databases).map_err(no_thread)?;
            states.push(queue);
            threads.push(started);
        }
        let handle = CatalogHandle { host, queue, states: states.into(), kernels: kernels.clone().into() };
        Ok(Catalog { handle, threads })
    }

    /// A handle to the threads.
    pub fn handle(&self) -> CatalogHandle {
        self.handle.clone()
    }

    /// Ends the threads after the queued requests and closes every database. Blocks.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.handle.queue.stop();
        self.handle.states.iter().for_each(Queue::stop);
        for thread in self.threads.drain(..) {
            // The panic of that thread is on stderr already.
            let _ = thread.join();
        }
    }
}

impl Drop for Catalog {
    fn drop(&mut self) {
        self.end();
    }
}

fn host_id(db: &Db, config: &CatalogConfig) -> Result<HostId> {
    let read = |db: &Db| {
        db.sql("read host", |c| c.query_row("SELECT id FROM host", [], |row| super::row::bytes(row, 0)).optional())
    };
    if let Some(id) = read(db)? {
        return Ok(HostId::from_bytes(id));
    }
    db.transaction("catalog.host.first", |db| {
        db.sql("write host", |c| {
            c.execute(
                "INSERT INTO host (one, id, created_at_ms) VALUES (1, ?, ?)",
                params![config.fresh_host_id.as_bytes(), config.now_ms],
            )
        })
    })?;
    Ok(config.fresh_host_id)
}

/// Sends requests to the databases' threads. Cheap to clone.
#[derive(Debug, Clone)]
pub struct CatalogHandle {
    host: HostId,
    queue: Queue,
    states: Arc<[Queue]>,
    kernels: Arc<std::path::Path>,
}

impl CatalogHandle {
    pub(super) fn read<T: Send + 'static>(&self, work: impl FnOnce(&Db) -> Result<T> + Send + 'static) -> Pending<T> {
        self.queue.run(Target::Host, None, work)
    }

    pub(super) fn write<T: Send + 'static>(
        &self,
        label: &'static str,
        work: impl FnOnce(&Db) -> Result<T> + Send + 'static,
    ) -> Pending<T> {
        self.queue.run(Target::Host, Some(label), work)
    }

    /// As [`Self::write`], for a write that takes no longer than waking the thread.
    fn write_small<T: Send + 'static>(
        &self,
        label: &'static str,
        work: impl FnOnce(&Db) -> Result<T> + Send + 'static,
    ) -> Pending<T> {
        self.queue.run_small(Target::Host, label, work)
    }

    /// Writes to the host's own database anew: see [`Db::write_anew`].
    pub(super) fn write_anew(
        &self,
        label: &'static str,
        work: impl FnOnce(&Db) -> Result<()> + Send + 'static,
    ) -> Pending<()> {
        self.queue.manage(move |databases| databases.db(Target::Host)?.write_anew(label, work))
    }

    fn state_queue(&self, kernel: KernelId) -> &Queue {
        let id = kernel.as_bytes();
        &self.states[usize::from(id[15]) % self.states.len()]
    }

    /// This host's identity.
    pub fn host_id(&self) -> HostId {
        self.host
    }

    /// A kernel's own database.
    pub fn state(&self, kernel: KernelId) -> StateHandle {
        StateHandle::new(kernel, self.state_queue(kernel).clone())
    }

    /// The paths of a kernel.
    pub fn kernel_files(&self, kernel: KernelId) -> KernelFiles {
        KernelFiles::of(&self.kernels, kernel)
    }

    /// Creates a kernel's directory: two empty databases and an empty workspace. Call it before
    /// [`Self::insert_kernel`].
    ///
    /// # Errors
    /// `Exists`, `Full`, `ReadOnly`; nothing is left then.
    pub fn create_kernel_files(&self, kernel: KernelId) -> Pending<KernelFiles> {
        let kernels = self.kernels.clone();
        self.state_queue(kernel).manage(move |databases| {
            let (files, unsynced) = files::create(&kernels, kernel, databases.durability())?;
            databases.sync_later(unsynced);
            Ok(files)
        })
    }

    /// Removes a kernel's files except its own database, for archiving. Idempotent.
    ///
    /// # Errors
    /// Files that cannot be removed.
    pub fn clear_kernel_files(&self, kernel: KernelId) -> Pending<()> {
        let kernels = self.kernels.clone();
        self.state_queue(kernel).manage(move |_| files::clear(&kernels, kernel))
    }

    /// Recreates what [`Self::clear_kernel_files`] removed: an empty workspace and an empty engine database.
    ///
    /// # Errors
    /// `Full`, `ReadOnly`.
    pub fn recreate_kernel_files(&self, kernel: KernelId) -> Pending<KernelFiles> {
        let kernels = self.kernels.clone();
        self.state_queue(kernel).manage(move |databases| files::recreate(&kernels, kernel, databases.durability()))
    }

    /// Makes the directory of `from`, a kernel that has no row, the directory of `kernel`, whose own one is removed.
    /// Both ids share their last byte. Idempotent.
    ///
    /// # Errors
    /// Files that cannot be removed or renamed.
    pub fn adopt_kernel_files(&self, from: KernelId, kernel: KernelId) -> Pending<()> {
        let kernels = self.kernels.clone();
        self.state_queue(kernel).manage(move |databases| {
            databases.discard(Target::Kernel(from));
            databases.discard(Target::Kernel(kernel));
            files::adopt(&kernels, from, kernel)
        })
    }

    /// Puts an empty engine database in the place of a kernel's, which no process has open. May be repeated.
    ///
    /// # Errors
    /// `Full`, `ReadOnly`.
    pub fn recreate_engine_db(&self, kernel: KernelId) -> Pending<()> {
        let kernels = self.kernels.clone();
        self.state_queue(kernel)
            .manage(move |databases| files::recreate_engine(&kernels, kernel, databases.durability()))
    }

    /// Puts a closed engine database, on the same file system, in the place of a kernel's empty one.
    ///
    /// # Errors
    /// `Conflict` if either has a log, and a failed rename: nothing is changed then.
    pub fn adopt_engine_db(&self, kernel: KernelId, from: PathBuf) -> Pending<()> {
        let kernels = self.kernels.clone();
        self.state_queue(kernel).manage(move |_| files::adopt_engine(&kernels, kernel, &from))
    }

    /// Closes a kernel's database and removes its directory, the workspace included. Comes after [`Self::remove_kernel`].
    ///
    /// # Errors
    /// Files that cannot be removed; they are hidden, and the next start tries again.
    pub fn remove_kernel_files(&self, kernel: KernelId) -> Pending<()> {
        let kernels = self.kernels.clone();
        self.state_queue(kernel).manage(move |databases| {
            databases.discard(Target::Kernel(kernel));
            files::remove(&kernels, kernel)
        })
    }

    /// Removes the files of a kernel that was never inserted, without occupying the databases' threads.
    ///
    /// # Errors
    /// Files that cannot be removed; the next start tries again.
    pub async fn remove_unlisted_files(&self, kernel: KernelId) -> Result<()> {
        let closed = self.state_queue(kernel).manage(move |databases| {
            databases.discard(Target::Kernel(kernel));
            Ok(())
        });
        closed.await?;
        let kernels = Arc::clone(&self.kernels);
        let removed = tokio::task::spawn_blocking(move || files::remove_unlisted(&kernels, kernel));
        removed.await.unwrap_or(Err(CatalogError::Stopped))
    }

    /// Inserts a kernel. With a key that was used before, returns the earlier kernel and writes nothing.
    ///
    /// # Errors
    /// `Exists` if the owner has a kernel of that name (or id); `Limit`.
    pub fn insert_kernel(
        &self,
        kernel: KernelRow,
        key: Option<IdempotencyKey>,
        notes: Notes,
    ) -> Pending<Written<Created>> {
        self.insert_kernel_with(kernel, key, None, notes)
    }

    /// As [`Self::insert_kernel`], together with the worker that it has already.
    ///
    /// # Errors
    /// As [`Self::insert_kernel`].
    pub fn insert_kernel_with(
        &self,
        kernel: KernelRow,
        key: Option<IdempotencyKey>,
        worker: Option<WorkerRow>,
        notes: Notes,
    ) -> Pending<Written<Created>> {
        self.write_small("catalog.kernel.insert", move |db| {
            match kernels::insert(db, &kernel, key.as_ref(), kernel.created_at_ms)? {
                Created::New => {
                    if let Some(worker) = &worker {
                        workers::put(db, worker)?;
                    }
                    notes.write(db, Created::New)
                }
                before @ Created::Before(_) => Ok(Written { value: before, events: Vec::new() }),
            }
        })
    }

    /// The kernel with this id.
    ///
    /// # Errors
    /// Database errors.
    pub fn kernel(&self, id: KernelId) -> Pending<Option<KernelRow>> {
        self.read(move |db| kernels::get(db, id))
    }

    /// All kernels, or one owner's, by owner and name.
    ///
    /// # Errors
    /// Database errors.
    pub fn kernels(&self, uid: Option<u32>) -> Pending<Vec<KernelRow>> {
        self.read(move |db| kernels::list(db, uid))
    }

    /// Updates a kernel's row and returns it.
    ///
    /// # Errors
    /// `NotFound`; `Conflict` if the version is not the expected one or the epoch is an old one; `Exists` if the new
    /// name is taken.
    pub fn update_kernel(&self, id: KernelId, change: KernelChange, notes: Notes) -> Pending<Written<KernelRow>> {
        self.write("catalog.kernel.update", move |db| {
            let row = kernels::update(db, id, &change)?;
            notes.write(db, row)
        })
    }

    /// Changes a kernel's name to that of `spec`, also in its events; `names` are its names in events, before and
    /// after.
    ///
    /// # Errors
    /// `NotFound`; `Exists` if the new name is taken.
    pub fn rename_kernel(
        &self,
        id: KernelId,
        spec: KernelSpec,
        names: (String, String),
        notes: Notes,
    ) -> Pending<Written<KernelRow>> {
        self.write("catalog.kernel.rename", move |db| {
            let row = kernels::update(db, id, &KernelChange { spec: Some(spec), ..KernelChange::default() })?;
            events::rename(db, &names.0, &names.1, row.created_at_ms)?;
            notes.write(db, row)
        })
    }

    /// Records a use of a kernel.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn touch_kernel(&self, id: KernelId, at_ms: i64) -> Pending<()> {
        self.write("catalog.kernel.touch", move |db| kernels::touch(db, id, at_ms))
    }

    /// Deletes a kernel's row. [`Self::remove_kernel_files`] deletes its files.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn remove_kernel(&self, id: KernelId, notes: Notes) -> Pending<Written<()>> {
        self.write("catalog.kernel.remove", move |db| {
            kernels::remove(db, id)?;
            notes.write(db, ())
        })
    }

    /// Records a worker, before its start or when more is known of it.
    ///
    /// # Errors
    /// Database errors.
    pub fn put_worker(&self, worker: WorkerRow) -> Pending<()> {
        self.write_small("catalog.worker.put", move |db| workers::put(db, &worker))
    }

    /// Every recorded worker.
    ///
    /// # Errors
    /// Database errors.
    pub fn workers(&self) -> Pending<Vec<WorkerRow>> {
        self.read(workers::list)
    }

    /// Deletes a worker's row; returns whether there was one.
    ///
    /// # Errors
    /// Database errors.
    pub fn remove_worker(&self, id: WorkerId) -> Pending<bool> {
        self.write("catalog.worker.remove", move |db| workers::remove(db, id))
    }

    /// Records the result of an idempotency key.
    ///
    /// # Errors
    /// `Limit` for too long a key.
    pub fn remember_key(&self, key: IdempotencyKey, result: String) -> Pending<()> {
        self.write("catalog.keys.remember", move |db| keys::remember(db, &key, &result))
    }

    /// The result of a key, if it was used and has not expired.
    ///
    /// # Errors
    /// Database errors.
    pub fn recall_key(&self, scope: String, key: String, now_ms: i64) -> Pending<Option<String>> {
        self.read(move |db| keys::recall(db, &scope, &key, now_ms))
    }

    /// Deletes expired keys; returns how many.
    ///
    /// # Errors
    /// Database errors.
    pub fn forget_expired_keys(&self, now_ms: i64) -> Pending<usize> {
        self.write("catalog.keys.forget", move |db| keys::forget_expired(db, now_ms))
    }

    /// Appends events; returns them with their numbers.
    ///
    /// # Errors
    /// Database errors.
    pub fn append_events(&self, new: Vec<NewEvent>) -> Pending<Vec<Event>> {
        self.write("catalog.events.append", move |db| events::append(db, new))
    }

    /// Events after a number, at most [`limits::PAGE_ROWS`], and how many before them were dropped.
    ///
    /// # Errors
    /// Database errors.
    pub fn events_after(&self, sequence: u64, most: usize) -> Pending<EventPage> {
        self.read(move |db| events::after(db, sequence, most))
    }

    /// Appends lines to the audit log.
    ///
    /// # Errors
    /// Database errors.
    pub fn append_audit(&self, lines: Vec<NewAudit>) -> Pending<()> {
        self.write("catalog.audit.append", move |db| audit::append(db, &lines))
    }

    /// Lines of the audit log after a number, at most [`limits::PAGE_ROWS`].
    ///
    /// # Errors
    /// Database errors.
    pub fn audit_after(&self, sequence: u64, filter: AuditFilter, most: usize) -> Pending<Vec<AuditLine>> {
        self.read(move |db| audit::after(db, sequence, &filter, most))
    }

    /// The end of the audit log.
    ///
    /// # Errors
    /// Database errors.
    pub fn audit_head(&self) -> Pending<AuditHead> {
        self.read(audit::head)
    }

    /// Verifies the audit log's whole chain, page by page between other requests. `known`: ends of the log that were
    /// kept elsewhere, with a description of where; they must still be part of it.
    ///
    /// # Errors
    /// The outer error is the database's; the inner one names the first line that does not fit.
    pub async fn verify_audit(&self, known: Vec<(AuditHead, String)>) -> Result<Result<AuditHead, AuditBreak>> {
        let mut walk = Walk::new(known);
        loop {
            match self.read(move |db| audit::walk(db, walk)).await? {
                Ok((walked, true)) => walk = walked,
                Ok((walked, false)) => return Ok(walked.end()),
                Err(broken) => return Ok(Err(broken)),
            }
        }
    }

    /// Checks every page of `catalog.db`.
    ///
    /// # Errors
    /// `Corrupt`.
    pub fn check(&self) -> Pending<()> {
        self.read(Db::check)
    }
}
