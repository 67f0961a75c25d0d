//! One kernel's `state.db`: its history and grants.

mod cell;
mod checkpoints;
mod executions;
mod grants;
mod history;
mod journal;
mod keys;
mod lease;
mod origin;
mod output;
mod pruning;
mod roots;
mod transition;
mod workflow;
mod workflow_restore;

use super::open_databases::Target;
use super::sqlite::{Db, Result};
use super::thread::{Pending, Queue};
use crate::core::exec::ExecEnd;
use crate::core::ids::{Digest, ExecId, KernelId};
use crate::core::info::{GivenMount, JournalEntry, JournalView, McpTransport};
use crate::core::limits;

pub use checkpoints::{Added, Finished, Head, NewCheckpoint, Restored, Together, WORK_CHANGED};
pub use executions::{Begun, ExecBegin, ExecClose, ExecRecord};
pub use grants::{Consent, NewConsent};
pub use history::{Arrival, Position};
pub use journal::{Direction, EntryKind, NewEntry};
pub use lease::Lease;
pub use origin::{Beginning, FirstCheckpoint};
pub use output::{Kept, OutputRecord, Runs};
pub use pruning::Selection;
pub use roots::{Root, RootKind};
pub use workflow::Done;

/// Sends requests to the thread that owns a kernel's database. Cheap to clone. The database opens on use.
#[derive(Debug, Clone)]
pub struct StateHandle {
    kernel: KernelId,
    queue: Queue,
}

impl StateHandle {
    pub(super) fn new(kernel: KernelId, queue: Queue) -> StateHandle {
        StateHandle { kernel, queue }
    }

    /// The kernel.
    pub fn kernel(&self) -> KernelId {
        self.kernel
    }

    fn read<T: Send + 'static>(&self, work: impl FnOnce(&Db) -> Result<T> + Send + 'static) -> Pending<T> {
        self.queue.run(Target::Kernel(self.kernel), None, work)
    }

    fn write<T: Send + 'static>(
        &self,
        label: &'static str,
        work: impl FnOnce(&Db) -> Result<T> + Send + 'static,
    ) -> Pending<T> {
        self.queue.run(Target::Kernel(self.kernel), Some(label), work)
    }

    /// Writes anew: see [`Db::write_anew`].
    fn write_anew(&self, label: &'static str, work: impl FnOnce(&Db) -> Result<()> + Send + 'static) -> Pending<()> {
        let target = Target::Kernel(self.kernel);
        self.queue.manage(move |databases| databases.db(target)?.write_anew(label, work))
    }

    /// A write of about `bytes`: the caller may do a small one.
    fn write_sized<T: Send + 'static>(
        &self,
        bytes: usize,
        label: &'static str,
        work: impl FnOnce(&Db) -> Result<T> + Send + 'static,
    ) -> Pending<T> {
        let target = Target::Kernel(self.kernel);
        if bytes <= limits::SMALL_WRITE_BYTES {
            self.queue.run_small(target, label, work)
        } else {
            self.queue.run(target, Some(label), work)
        }
    }

    /// Records an execution before it starts and assigns its number. With an unexpired key, returns the earlier
    /// execution and writes nothing.
    ///
    /// # Errors
    /// Database errors.
    pub fn begin_exec(&self, begin: ExecBegin) -> Pending<Begun> {
        self.write_sized(begin.request.memory_bytes(), "state.exec.begin", move |db| executions::begin(db, &begin))
    }

    /// The execution with this unexpired key.
    ///
    /// # Errors
    /// Database errors.
    pub fn exec_by_key(&self, key: String, now_ms: i64) -> Pending<Option<ExecId>> {
        self.read(move |db| executions::find_key(db, &key, now_ms))
    }

    /// Closes an execution.
    ///
    /// # Errors
    /// `NotFound`; `Conflict` if it is closed already.
    pub fn end_exec(&self, exec: ExecId, close: ExecClose) -> Pending<()> {
        let ExecEnd { value, output, err, .. } = &close.end;
        let value = value.as_ref().map_or(0, |value| value.bytes_up_to(limits::SMALL_WRITE_BYTES));
        let rich = output.as_ref().map_or(0, |output| output.memory_bytes());
        let bytes = value + rich + err.len() + close.output.inline_bytes();
        self.write_sized(bytes, "state.exec.end", move |db| executions::end(db, exec, &close))
    }

    /// An execution with its request and, if it has ended, its end.
    ///
    /// # Errors
    /// Database errors.
    pub fn exec(&self, exec: ExecId) -> Pending<Option<ExecRecord>> {
        self.read(move |db| executions::get(db, exec))
    }

    /// The number of an execution's journal entry.
    ///
    /// # Errors
    /// Database errors.
    pub fn exec_entry(&self, exec: ExecId) -> Pending<Option<u64>> {
        self.read(move |db| executions::entry(db, exec))
    }

    /// The kept output of an execution; `None` if the execution does not exist.
    ///
    /// # Errors
    /// Database errors.
    pub fn exec_output(&self, exec: ExecId) -> Pending<Option<OutputRecord>> {
        self.read(move |db| executions::output(db, exec))
    }

    /// Executions that have not ended, oldest first: after a crash, those to re-attach or to close as lost.
    ///
    /// # Errors
    /// Database errors.
    pub fn running_execs(&self) -> Pending<Vec<ExecId>> {
        self.read(executions::running)
    }

    /// Number of executions; also the newest one's number.
    ///
    /// # Errors
    /// Database errors.
    pub fn exec_count(&self) -> Pending<u64> {
        self.read(executions::count)
    }

    /// Appends messages or marks; returns their numbers.
    ///
    /// # Errors
    /// Database errors.
    pub fn append_journal(&self, entries: Vec<NewEntry>) -> Pending<Vec<u64>> {
        self.write("state.journal.append", move |db| journal::append(db, &entries))
    }

    /// Appends a message; returns its number, and whether it is new. With an unexpired key, returns the earlier message
    /// and writes nothing.
    ///
    /// # Errors
    /// `Refused` if the key belongs to another kind of record.
    pub fn add_message(&self, entry: NewEntry, key: String) -> Pending<(u64, bool)> {
        self.write("state.messages.add", move |db| journal::add_message(db, entry, &key))
    }

    /// The message with this unexpired key.
    ///
    /// # Errors
    /// `Refused` if the key belongs to another kind of record.
    pub fn message_by_key(&self, key: String, now_ms: i64) -> Pending<Option<u64>> {
        self.read(move |db| journal::message_by_key(db, &key, now_ms))
    }

    /// Journal entries, at most [`PAGE_ROWS`](crate::core::limits::PAGE_ROWS), in the direction's order.
    ///
    /// # Errors
    /// Database errors.
    pub fn journal(&self, from: Direction, most: usize) -> Pending<Vec<JournalEntry>> {
        self.read(move |db| journal::page(db, from, most))
    }

    /// Journal entries after a number in a view, oldest first, at most one page.
    ///
    /// # Errors
    /// Database errors.
    pub fn journal_as(&self, view: JournalView, after: u64, most: usize) -> Pending<Vec<JournalEntry>> {
        self.read(move |db| journal::page_as(db, view, after, most))
    }

    /// Adds or changes a mount, with the number of folders created for its mount point, and its journal entry; returns
    /// that entry's number.
    ///
    /// # Errors
    /// `Limit`.
    pub fn put_mount(&self, mount: GivenMount, made: u32, entry: NewEntry) -> Pending<u64> {
        self.write("state.mounts.put", move |db| {
            grants::put_mount(db, &mount, made)?;
            journal::append_one(db, entry)
        })
    }

    /// Deletes a mount and writes its journal entry; returns that entry's number, and how many folders the mount had
    /// created.
    ///
    /// # Errors
    /// Database errors.
    pub fn remove_mount(&self, path: String, entry: NewEntry) -> Pending<(u64, u32)> {
        self.write("state.mounts.remove", move |db| {
            let made = grants::remove_mount(db, &path)?;
            Ok((journal::append_one(db, entry)?, made))
        })
    }

    /// The mounts, by path.
    ///
    /// # Errors
    /// Database errors.
    pub fn mounts(&self) -> Pending<Vec<GivenMount>> {
        self.read(grants::mounts)
    }

    /// Adds or changes an MCP server, with its journal entry; returns that entry's number.
    ///
    /// # Errors
    /// `Limit`.
    pub fn put_mcp(&self, name: String, transport: McpTransport, entry: NewEntry) -> Pending<u64> {
        self.write("state.mcp.put", move |db| {
            grants::put_mcp(db, &name, &transport)?;
            journal::append_one(db, entry)
        })
    }

    /// Deletes an MCP server, with its journal entry; returns that entry's number, or `None` if there was no such
    /// server.
    ///
    /// # Errors
    /// Database errors.
    pub fn remove_mcp(&self, name: String, entry: NewEntry) -> Pending<Option<u64>> {
        self.write("state.mcp.remove", move |db| match grants::remove_mcp(db, &name)? {
            true => journal::append_one(db, entry).map(Some),
            false => Ok(None),
        })
    }

    /// The MCP servers, by name.
    ///
    /// # Errors
    /// Database errors.
    pub fn mcp_servers(&self) -> Pending<Vec<(String, McpTransport)>> {
        self.read(grants::mcp_servers)
    }

    /// Grants access to blobs that the store has.
    ///
    /// # Errors
    /// Database errors.
    pub fn grant_blobs(&self, digests: Vec<Digest>, at_ms: i64) -> Pending<()> {
        self.write("state.blobs.grant", move |db| grants::grant_blobs(db, &digests, at_ms))
    }

    /// Whether the kernel may read a blob.
    ///
    /// # Errors
    /// Database errors.
    pub fn blob_granted(&self, digest: Digest) -> Pending<bool> {
        self.read(move |db| grants::blob_granted(db, digest))
    }

    /// Takes or renews the lease.
    ///
    /// # Errors
    /// `Conflict` if another holder's has not expired, or if the epoch is an old one.
    pub fn take_lease(&self, lease: Lease, now_ms: i64) -> Pending<()> {
        self.write("state.lease.take", move |db| lease::take(db, &lease, now_ms))
    }

    /// Releases the lease; returns whether `holder` had it.
    ///
    /// # Errors
    /// Database errors.
    pub fn release_lease(&self, holder: String) -> Pending<bool> {
        self.write("state.lease.release", move |db| lease::release(db, &holder))
    }

    /// The lease, expired or not.
    ///
    /// # Errors
    /// Database errors.
    pub fn lease(&self) -> Pending<Option<Lease>> {
        self.read(lease::get)
    }

    /// Records a consent or its withdrawal; returns its number.
    ///
    /// # Errors
    /// Database errors.
    pub fn add_consent(&self, consent: NewConsent) -> Pending<u64> {
        self.write("state.consent.add", move |db| grants::add_consent(db, &consent))
    }

    /// Every consent and withdrawal, oldest first, at most [`PAGE_ROWS`](crate::core::limits::PAGE_ROWS) after a
    /// number.
    ///
    /// # Errors
    /// Database errors.
    pub fn consents(&self, after: u64) -> Pending<Vec<Consent>> {
        self.read(move |db| grants::consents(db, after))
    }

    /// Verifies every page and every row.
    ///
    /// # Errors
    /// `Corrupt`.
    pub fn check(&self) -> Pending<()> {
        self.read(|db| db.check().and_then(|()| db.check_rows()))
    }

    /// Opens the database and compiles the statements of an execution, so that the first execution need not.
    ///
    /// # Errors
    /// Those of opening it.
    pub fn open_ahead(&self) -> Pending<()> {
        let target = Target::Kernel(self.kernel);
        self.queue.manage(move |databases| executions::rehearse(databases.db(target)?))
    }

    /// Closes the database, when the kernel stops. It reopens on use.
    ///
    /// # Errors
    /// The WAL could not be checkpointed; it still has everything.
    pub fn close(&self) -> Pending<()> {
        let target = Target::Kernel(self.kernel);
        self.queue.manage(move |databases| databases.close(target))
    }
}
