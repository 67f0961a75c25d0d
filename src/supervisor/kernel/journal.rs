//! Records of one kernel on disk, for its task: journal, executions, mounts, servers, lease, blob grants.
//!
//! The kernel's version is the number of its newest journal entry plus one (a new kernel is at 1; 0 can mean "any").
//! Every change by a client appends an entry, so the version needs no record of its own and cannot disagree with the
//! history.

use std::collections::BTreeMap;

use super::command::{Actor, Message};
use super::lease::Lease;
use super::output::Kept;
use crate::catalog::state::{
    self, Begun, Direction, EntryKind, ExecBegin, ExecClose, NewConsent, NewEntry, OutputRecord, Runs,
};
use crate::catalog::{CatalogHandle, KernelChange, Notes, StateHandle};
use crate::core::error::{Error, Result};
use crate::core::exec::{ExecEnd, ExecRequest, Stream};
use crate::core::ids::{Digest, Epoch, ExecId, KernelId};
use crate::core::info::{GivenMount, JournalEntry, JournalView, McpTransport};
use crate::core::kernel::Life;
use crate::core::kernel::transition::Record;
use crate::core::limits;
use crate::core::origin::Origin;
use crate::core::rights::{Right, Rights};
use crate::core::spec::KernelSpec;
use crate::store::StoreHandle;

/// Prefix of the subject of a consent to a published socket.
const PUBLISHED: &str = "publish/";

/// A kernel's state record in the catalog.
#[derive(Debug, Clone, Default, serde::Serialize, serde::Deserialize)]
pub struct StateRecord {
    /// Lifecycle state.
    pub life: Life,
    /// Version at the time of writing; the journal has the present one.
    pub version: u64,
    /// Number of executions at the time of writing.
    pub executions: u64,
    /// The specification that the present worker has, if it was changed since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker_spec: Option<Box<KernelSpec>>,
    /// Whether the next daemon starts the kernel: it ran when the daemon stopped.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub resumes: bool,
}

impl StateRecord {
    /// The text for the catalog.
    ///
    /// # Errors
    /// `internal`.
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|error| Error::internal(error.to_string()))
    }
}

/// Journal record of an execution.
#[derive(Debug)]
pub enum Found {
    /// Ended.
    Ended(Kept, Box<ExecEnd>),
    /// Not ended yet.
    Running,
    /// No execution has that number.
    Nothing,
}

fn new_entry(kind: EntryKind, actor: &Actor, text: &str, detail_json: String, at_ms: i64) -> NewEntry {
    NewEntry { kind, at_ms, actor: actor.to_string(), text: text.to_owned(), detail_json }
}

fn new_mark(actor: &Actor, text: &str, at_ms: i64) -> NewEntry {
    new_entry(EntryKind::Mark, actor, text, String::new(), at_ms)
}

/// Initial data of a task.
#[derive(Debug)]
pub struct Loaded {
    /// Number of the newest journal entry.
    pub version: u64,
    /// Number of executions.
    pub executions: u64,
    /// Executions without an end; after recovery, those without a worker that could not be closed.
    pub running: Vec<ExecId>,
    /// Mounts added since creation.
    pub mounts: Vec<GivenMount>,
    /// Registered MCP servers.
    pub mcp: Vec<(String, McpTransport)>,
    /// The lease, expired or not.
    pub lease: Option<Lease>,
    /// The transition that was begun and has not ended.
    pub transition: Option<Record>,
    /// Number of checkpoints.
    pub checkpoints: u64,
    /// Origin of the present state.
    pub origin: Origin,
    /// Why the history could not be loaded. The kernel is then refused every change but its removal.
    pub damage: Option<Error>,
}

impl Loaded {
    /// Initial data of a new kernel.
    pub fn empty() -> Self {
        Loaded {
            version: version_after(0),
            executions: 0,
            running: Vec::new(),
            mounts: Vec::new(),
            mcp: Vec::new(),
            lease: None,
            transition: None,
            checkpoints: 0,
            origin: Origin::default(),
            damage: None,
        }
    }
}

/// The records of one kernel.
#[derive(Debug, Clone)]
pub struct Records {
    id: KernelId,
    epoch: Epoch,
    catalog: CatalogHandle,
    pub(crate) state: StateHandle,
    store: StoreHandle,
}

impl Records {
    /// The records of a kernel.
    pub fn new(id: KernelId, epoch: Epoch, catalog: &CatalogHandle, store: &StoreHandle) -> Self {
        Records { id, epoch, catalog: catalog.clone(), state: catalog.state(id), store: store.clone() }
    }

    /// Id of the kernel.
    pub(crate) fn kernel(&self) -> KernelId {
        self.id
    }

    /// Reads the initial data of the task.
    ///
    /// # Errors
    /// `corrupt` names the damaged file.
    pub async fn load(&self) -> Result<Loaded> {
        let state = &self.state;
        let (newest, executions) = (state.journal(Direction::Before(u64::MAX), 1), state.exec_count());
        let (running, mounts) = (state.running_execs(), state.mounts());
        let (mcp, lease, transition) = (state.mcp_servers(), state.lease(), state.transition());
        let (checkpoints, origin) = (state.checkpoint_count(), state.origin());
        Ok(Loaded {
            version: version_after(newest.await?.first().map_or(0, |entry| entry.sequence)),
            executions: executions.await?,
            running: running.await?,
            mounts: mounts.await?,
            mcp: mcp.await?,
            lease: lease.await?.and_then(read_lease),
            transition: transition.await?,
            checkpoints: checkpoints.await?,
            origin: origin.await?,
            damage: None,
        })
    }

    /// Closes the database; the next use reopens it.
    pub async fn close(&self) {
        if let Err(error) = self.state.close().await {
            tracing::warn!(kernel = %self.id, %error, "state.db could not be closed");
        }
    }

    /// Writes the lifecycle state.
    ///
    /// # Errors
    /// Catalog errors.
    pub async fn save_life(&self, record: &StateRecord, last_used_at_ms: i64) -> Result<()> {
        let change = KernelChange {
            state_json: Some(record.to_json()?),
            last_used_at_ms: Some(last_used_at_ms),
            ..KernelChange::default()
        };
        self.catalog.update_kernel(self.id, change, Notes::default()).await?;
        Ok(())
    }

    /// The execution that was begun with this key, while keys are remembered.
    ///
    /// # Errors
    /// Database errors.
    pub async fn by_key(&self, key: &str, now_ms: i64) -> Result<Option<ExecId>> {
        Ok(self.state.exec_by_key(key.to_owned(), now_ms).await?)
    }

    /// Records an execution before it starts: appends a journal entry.
    ///
    /// # Errors
    /// Database errors.
    pub async fn begin(&self, request: &ExecRequest, actor: &Actor, at_ms: i64) -> Result<Begun> {
        let begin = ExecBegin { request: request.clone(), actor: actor.to_string(), at_ms };
        Ok(self.state.begin_exec(begin).await?)
    }

    /// Records the end of an execution; output that is too large for the row is stored first.
    ///
    /// # Errors
    /// Database errors and store errors.
    pub async fn end(&self, exec: ExecId, end: &ExecEnd, kept: &Kept, at_ms: i64) -> Result<()> {
        // Only the row refers to the stored output.
        let large = kept.chunks.iter().map(|(_, data)| data.len()).sum::<usize>() > limits::OUTPUT_INLINE_BYTES;
        let _held = if large { Some(self.store.run(|store| Ok(store.guard())).await?) } else { None };
        let output = self.output_record(kept).await?;
        self.state.end_exec(exec, ExecClose { end: end.clone(), output, at_ms }).await?;
        Ok(())
    }

    async fn output_record(&self, kept: &Kept) -> Result<OutputRecord> {
        let mut runs = Runs::default();
        let (mut tail, mut tail_runs) = (Vec::new(), Runs::default());
        for (stream, data) in &kept.tail {
            tail_runs.push(*stream, data.len() as u64);
            tail.extend_from_slice(data);
        }
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        for (stream, data) in &kept.chunks {
            runs.push(*stream, data.len() as u64);
            match stream {
                Stream::Stdout => stdout.extend_from_slice(data),
                Stream::Stderr => stderr.extend_from_slice(data),
            }
        }
        Ok(OutputRecord {
            stdout: self.keep(stdout).await?,
            stderr: self.keep(stderr).await?,
            runs,
            truncated_bytes: kept.truncated_bytes,
            tail,
            tail_runs,
            displays: kept.displays.clone(),
        })
    }

    async fn keep(&self, data: Vec<u8>) -> Result<state::Kept> {
        if data.len() <= limits::OUTPUT_INLINE_BYTES {
            return Ok(state::Kept::Inline(data));
        }
        let bytes = data.len() as u64;
        let digest = self.store.put(data).await?;
        Ok(state::Kept::Object { digest, bytes })
    }

    /// Whether an execution matches the request.
    ///
    /// # Errors
    /// Database errors.
    pub async fn is_of(&self, exec: ExecId, request: &ExecRequest) -> Result<bool> {
        Ok(self.state.exec(exec).await?.is_some_and(|record| record.request.asks_as(request)))
    }

    /// Output limit of an execution, bytes; 0: the configured limit.
    ///
    /// # Errors
    /// Database errors.
    pub async fn output_limit(&self, exec: ExecId) -> Result<u64> {
        Ok(self.state.exec(exec).await?.map_or(0, |record| record.request.output_limit_bytes))
    }

    /// Reads an execution from the journal.
    ///
    /// # Errors
    /// `corrupt` if its output is damaged.
    pub async fn find(&self, exec: ExecId) -> Result<Found> {
        let Some(record) = self.state.exec(exec).await? else {
            return Ok(Found::Nothing);
        };
        let Some((end, _)) = record.ended else {
            return Ok(Found::Running);
        };
        let output = self.state.exec_output(exec).await?.unwrap_or_default();
        let (stdout, stderr) = (self.kept_bytes(output.stdout).await?, self.kept_bytes(output.stderr).await?);
        let (mut stdout, mut stderr) = (&stdout[..], &stderr[..]);
        let mut chunks = Vec::new();
        for (stream, length) in output.runs.iter() {
            let rest = match stream {
                Stream::Stdout => &mut stdout,
                Stream::Stderr => &mut stderr,
            };
            let (chunk, left) = rest.split_at((length as usize).min(rest.len()));
            *rest = left;
            chunks.extend(chunk.chunks(limits::CHUNK_BYTES).map(|piece| (stream, piece.to_vec())));
        }
        let mut newest = &output.tail[..];
        let mut tail = Vec::new();
        for (stream, length) in output.tail_runs.iter() {
            let (chunk, left) = newest.split_at((length as usize).min(newest.len()));
            newest = left;
            tail.push((stream, chunk.to_vec()));
        }
        let kept = Kept { chunks, truncated_bytes: output.truncated_bytes, tail, displays: output.displays };
        Ok(Found::Ended(kept, Box::new(end)))
    }

    async fn kept_bytes(&self, kept: state::Kept) -> Result<Vec<u8>> {
        match kept {
            state::Kept::Inline(bytes) => Ok(bytes),
            state::Kept::Object { digest, .. } => Ok(self.store.get(digest, limits::OUTPUT_KEPT_MAX_BYTES).await?),
        }
    }

    async fn append(&self, kind: EntryKind, actor: &Actor, text: &str, detail_json: String, at_ms: i64) -> Result<u64> {
        let entry = new_entry(kind, actor, text, detail_json, at_ms);
        let numbers = self.state.append_journal(vec![entry]).await?;
        numbers.first().copied().ok_or_else(|| Error::internal("the journal gave no number"))
    }

    /// Appends a mark; returns the new version.
    ///
    /// # Errors
    /// Database errors.
    pub async fn mark(&self, actor: &Actor, text: &str, at_ms: i64) -> Result<u64> {
        Ok(version_after(self.append(EntryKind::Mark, actor, text, String::new(), at_ms).await?))
    }

    /// Appends a message; returns its number.
    ///
    /// # Errors
    /// Database errors.
    pub async fn message(&self, actor: &Actor, message: &Message, at_ms: i64) -> Result<u64> {
        let Message { role, text, key } = message;
        let (detail, text) = (serde_json::json!({ "role": role }).to_string(), format!("{role}: {text}"));
        if key.is_empty() {
            return self.append(EntryKind::Message, actor, &text, detail, at_ms).await;
        }
        let entry = new_entry(EntryKind::Message, actor, &text, detail, at_ms);
        Ok(self.state.add_message(entry, key.clone()).await?.0)
    }

    /// The message that was appended with this key, while keys are remembered.
    ///
    /// # Errors
    /// `alreadyExists` if the key belongs to another request.
    pub async fn message_by_key(&self, key: &str, now_ms: i64) -> Result<Option<u64>> {
        match key {
            "" => Ok(None),
            key => Ok(self.state.message_by_key(key.to_owned(), now_ms).await?),
        }
    }

    /// Records a mount and the number of directories it creates in the workspace; returns the new version.
    ///
    /// # Errors
    /// Database errors.
    pub async fn put_mount(&self, actor: &Actor, text: &str, mount: GivenMount, made: u32, at_ms: i64) -> Result<u64> {
        Ok(version_after(self.state.put_mount(mount, made, new_mark(actor, text, at_ms)).await?))
    }

    /// Removes a mount's record; returns the new version and the number of directories the mount had created.
    ///
    /// # Errors
    /// Database errors.
    pub async fn remove_mount(&self, actor: &Actor, text: &str, path: &str, at_ms: i64) -> Result<(u64, u32)> {
        let (sequence, made) = self.state.remove_mount(path.to_owned(), new_mark(actor, text, at_ms)).await?;
        Ok((version_after(sequence), made))
    }

    /// Records an MCP server; returns the new version.
    ///
    /// # Errors
    /// Database errors.
    pub async fn put_mcp(
        &self,
        actor: &Actor,
        text: &str,
        name: &str,
        transport: McpTransport,
        at_ms: i64,
    ) -> Result<u64> {
        Ok(version_after(self.state.put_mcp(name.to_owned(), transport, new_mark(actor, text, at_ms)).await?))
    }

    /// Removes an MCP server's record; returns the new version.
    ///
    /// # Errors
    /// `notFound` if no server has that name.
    pub async fn remove_mcp(&self, actor: &Actor, text: &str, name: &str, at_ms: i64) -> Result<u64> {
        let removed = self.state.remove_mcp(name.to_owned(), new_mark(actor, text, at_ms)).await?;
        removed.map(version_after).ok_or_else(|| Error::not_found(format!("the kernel has no MCP server {name}")))
    }

    /// Records the lease.
    ///
    /// # Errors
    /// `conflict` if another holder's lease has not expired.
    pub async fn take_lease(&self, lease: &Lease, now_ms: i64) -> Result<()> {
        let row = state::Lease { holder: holder_text(lease), epoch: self.epoch, expires_at_ms: lease.expires_at_ms };
        Ok(self.state.take_lease(row, now_ms).await?)
    }

    /// Ends a lease before its expiry.
    ///
    /// # Errors
    /// Database errors.
    pub async fn release_lease(&self, lease: &Lease) -> Result<()> {
        self.state.release_lease(holder_text(lease)).await?;
        Ok(())
    }

    /// Grants the kernel read access to a stored blob.
    ///
    /// # Errors
    /// Database errors.
    pub async fn grant(&self, digest: Digest, at_ms: i64) -> Result<()> {
        Ok(self.state.grant_blobs(vec![digest], at_ms).await?)
    }

    /// The store, if the kernel may read that blob.
    ///
    /// # Errors
    /// `notFound`, identical for a missing blob and for one that the kernel may not read.
    pub async fn readable(&self, digest: Digest) -> Result<&StoreHandle> {
        if self.state.blob_granted(digest).await? {
            return Ok(&self.store);
        }
        Err(Error::not_found(format!("the kernel has no blob {digest}")))
    }

    /// The store, for writing.
    pub fn store(&self) -> &StoreHandle {
        &self.store
    }

    /// Records the rights that a socket of this name grants, or (`None`) their revocation.
    ///
    /// # Errors
    /// Database errors.
    pub async fn publish(&self, name: &str, rights: Option<Rights>, actor: &Actor, at_ms: i64) -> Result<()> {
        let names: Vec<&str> = rights.iter().flat_map(|rights| rights.iter()).map(Right::name).collect();
        let consent = NewConsent {
            at_ms,
            actor: actor.to_string(),
            subject: format!("{PUBLISHED}{name}"),
            granted: rights.is_some(),
            detail: names.join(","),
        };
        self.state.add_consent(consent).await?;
        Ok(())
    }

    /// The published sockets, with their rights.
    ///
    /// # Errors
    /// Database errors.
    pub async fn published(&self) -> Result<Vec<(String, Rights)>> {
        let mut now: BTreeMap<String, Rights> = BTreeMap::new();
        let mut after = 0;
        loop {
            let page = self.state.consents(after).await?;
            let Some(last) = page.last() else { break };
            after = last.sequence;
            for consent in page {
                let Some(name) = consent.what.subject.strip_prefix(PUBLISHED) else { continue };
                if consent.what.granted {
                    let rights = consent.what.detail.split(',').filter_map(Right::from_name).collect();
                    now.insert(name.to_owned(), rights);
                } else {
                    now.remove(name);
                }
            }
        }
        Ok(now.into_iter().collect())
    }

    /// Journal entries after a number, oldest first, at most one page.
    ///
    /// # Errors
    /// Database errors.
    pub async fn journal(&self, view: JournalView, after: u64, most: usize) -> Result<Vec<JournalEntry>> {
        Ok(self.state.journal_as(view, after, most).await?)
    }
}

/// The version of a kernel whose newest journal entry has this number.
pub fn version_after(sequence: u64) -> u64 {
    sequence + 1
}

/// Identifies a holder in the database: hash of the token, then the display name.
fn holder_text(lease: &Lease) -> String {
    format!("{} {}", Digest::from_bytes(lease.token_hash), lease.holder)
}

fn read_lease(row: state::Lease) -> Option<Lease> {
    let (hash, holder) = row.holder.split_once(' ')?;
    let token_hash = *hash.parse::<Digest>().ok()?.as_bytes();
    Some(Lease { holder: holder.to_owned(), token_hash, expires_at_ms: row.expires_at_ms })
}
