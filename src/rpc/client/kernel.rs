//! One kernel: executions, life, rights, events and journal. Its state is in `state.rs`.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use super::blob::{BlobDownload, BlobUpload};
use super::connection::{Link, answer, connect_stream, fields};
use super::execution::ExecutionClient;
use super::feed::{Events, feed};
use super::lease::LeaseClient;
use crate::core::error::{Error, Result};
use crate::core::exec::{ExecRequest, ExecResult};
use crate::core::ids::{Digest, ExecId};
use crate::core::info::{Job, JournalEntry, KernelInfo};
use crate::core::limits;
use crate::core::rights::Rights;
use crate::rpc::convert::exec::{read_exec_result, write_exec_request};
use crate::rpc::convert::rights::{rights_len, write_rights};
use crate::rpc::convert::{info, listing, read_name};
use crate::rpc::schema::ryokan_capnp as wire;

/// How a journal is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JournalSeen<'a> {
    /// Every entry.
    Whole,
    /// In the place of messages that a checkpoint compacted, its summary.
    Compacted,
    /// Only the messages that this checkpoint compacted.
    Of(&'a str),
}

/// A capability of one kernel.
#[derive(Clone)]
pub struct KernelClient {
    pub(super) cap: wire::kernel::Client,
    pub(super) link: Rc<Link>,
}

impl KernelClient {
    pub(super) fn new(cap: wire::kernel::Client, link: Rc<Link>) -> Self {
        KernelClient { cap, link }
    }

    /// Connects to the socket of one kernel: `kernels/<name>.sock` or one that was published.
    ///
    /// # Errors
    /// As [`HostClient::connect`](super::HostClient::connect).
    pub async fn connect(socket: &Path) -> Result<KernelClient> {
        let (link, cap) = Link::start(connect_stream(socket, limits::CLIENT_HELLO).await?)?;
        Ok(KernelClient { cap, link })
    }

    /// Starts an execution of code without more; it is in the journal when this returns.
    ///
    /// # Errors
    /// The daemon's.
    pub async fn submit(&self, code: &str) -> Result<ExecId> {
        let mut request = self.cap.execute_request();
        request.get().set_code(code);
        let response = self.link.call(request.send().promise).await?;
        Ok(ExecId(fields(response.get())?.get_exec_id()))
    }

    /// Starts an execution; it is in the journal when this returns, and goes on whatever becomes of the client.
    ///
    /// # Errors
    /// The daemon's; `invalidArgument` for a request that breaks a bound.
    pub async fn run(&self, request: &ExecRequest) -> Result<ExecutionClient> {
        request.check().map_err(|e| Error::invalid(e.to_string()))?;
        let mut call = self.cap.run_request();
        write_exec_request(call.get().init_request(), request)?;
        let response = self.link.call(call.send().promise).await?;
        let response = fields(response.get())?;
        let cap = fields(response.get_execution())?;
        Ok(ExecutionClient::new(cap, ExecId(response.get_exec_id()), self.link.clone()))
    }

    /// Runs code and waits for its end, in one round trip. Who gives up waiting does not stop it.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub async fn run_to_end(&self, request: &ExecRequest) -> Result<ExecResult> {
        request.check().map_err(|e| Error::invalid(e.to_string()))?;
        let mut call = self.cap.run_to_end_request();
        write_exec_request(call.get().init_request(), request)?;
        let response = self.link.wait(call.send().promise).await?;
        answer(read_exec_result(fields(fields(response.get())?.get_result())?))
    }

    /// An execution by its number, also one that ended long ago.
    ///
    /// # Errors
    /// `notFound`.
    pub async fn execution(&self, exec: ExecId) -> Result<ExecutionClient> {
        let mut request = self.cap.execution_request();
        request.get().set_exec_id(exec.0);
        let response = self.link.call(request.send().promise).await?;
        let cap = fields(fields(response.get())?.get_execution())?;
        Ok(ExecutionClient::new(cap, exec, self.link.clone()))
    }

    /// Interrupts an execution that runs or waits.
    ///
    /// # Errors
    /// `notFound` if there is none of that number.
    pub async fn interrupt_execution(&self, exec: ExecId) -> Result<()> {
        let mut request = self.cap.interrupt_request();
        request.get().set_exec_id(exec.0);
        self.link.call(request.send().promise).await.map(drop)
    }

    /// The kernel as it is now.
    ///
    /// # Errors
    /// The daemon's.
    pub async fn info(&self) -> Result<KernelInfo> {
        self.info_and_rights().await.map(|(info, _)| info)
    }

    /// The kernel as it is now, and what this capability allows.
    ///
    /// # Errors
    /// The daemon's.
    pub async fn info_and_rights(&self) -> Result<(KernelInfo, Rights)> {
        let response = self.link.call(self.cap.info_request().send().promise).await?;
        answer(info::read_kernel_info(fields(fields(response.get())?.get_info())?))
    }

    /// Starts the worker now; closes an open circuit breaker.
    ///
    /// # Errors
    /// The daemon's.
    pub async fn start(&self) -> Result<()> {
        self.link.wait(self.cap.start_request().send().promise).await.map(drop)
    }

    /// Ends the worker; state is kept. Waits for what runs, unless `force` interrupts it.
    ///
    /// # Errors
    /// The daemon's.
    pub async fn stop(&self, force: bool) -> Result<()> {
        let mut request = self.cap.stop_request();
        request.get().set_force(force);
        self.link.wait(request.send().promise).await.map(drop)
    }

    /// Removes the kernel; `expected_version` 0: whatever its version.
    ///
    /// # Errors
    /// `conflict`.
    pub async fn remove(&self, expected_version: u64) -> Result<()> {
        let mut request = self.cap.remove_request();
        request.get().set_expected_version(expected_version);
        self.link.wait(request.send().promise).await.map(drop)
    }

    /// The same kernel with at most these rights; `label` names the holder in the journal.
    ///
    /// # Errors
    /// `refused` without the right to.
    pub async fn attenuate(&self, rights: Rights, label: &str) -> Result<KernelClient> {
        let mut request = self.cap.attenuate_request();
        write_rights(request.get().init_rights(rights_len(rights)), rights);
        request.get().set_label(label);
        let response = self.link.call(request.send().promise).await?;
        Ok(KernelClient::new(fields(fields(response.get())?.get_kernel())?, self.link.clone()))
    }

    /// The same kernel with at most these rights as a socket for another program of this user; gives its path.
    ///
    /// # Errors
    /// `refused`, `alreadyExists`.
    pub async fn publish(&self, rights: Rights, name: &str) -> Result<PathBuf> {
        let mut request = self.cap.publish_request();
        write_rights(request.get().init_rights(rights_len(rights)), rights);
        request.get().set_name(name);
        let response = self.link.call(request.send().promise).await?;
        answer(read_name(fields(response.get())?.get_path(), "path")).map(PathBuf::from)
    }

    /// Takes a published socket away.
    ///
    /// # Errors
    /// `notFound`.
    pub async fn unpublish(&self, name: &str) -> Result<()> {
        let mut request = self.cap.unpublish_request();
        request.get().set_name(name);
        self.link.call(request.send().promise).await.map(drop)
    }

    /// Opens a blob for reading in parts.
    ///
    /// # Errors
    /// `notFound`, also for one that this kernel was never given.
    pub async fn open_blob(&self, hash: Digest) -> Result<BlobDownload> {
        let mut request = self.cap.open_blob_request();
        request.get().set_hash(hash.to_string());
        let response = self.link.call(request.send().promise).await?;
        BlobDownload::new(fields(fields(response.get())?.get_blob())?, self.link.clone()).await
    }

    /// Begins a new blob, written in parts.
    ///
    /// # Errors
    /// The daemon's.
    pub async fn new_blob(&self) -> Result<BlobUpload> {
        let response = self.link.call(self.cap.new_blob_request().send().promise).await?;
        Ok(BlobUpload::new(fields(fields(response.get())?.get_blob())?, self.link.clone()))
    }

    /// Lets another kernel read a blob that this one can read. Both from the same connection.
    ///
    /// # Errors
    /// `notFound`.
    pub async fn grant_blob(&self, hash: Digest, to: &KernelClient) -> Result<()> {
        let mut request = self.cap.grant_blob_request();
        request.get().set_hash(hash.to_string());
        request.get().set_to(to.cap.clone());
        self.link.call(request.send().promise).await.map(drop)
    }

    /// Gives `each` the journal's entries after sequence number `since`, oldest first; `limit` 0: all.
    ///
    /// # Errors
    /// The daemon's and `each`'s.
    pub async fn each_journal_entry(
        &self,
        since: u64,
        limit: u32,
        each: impl AsyncFnMut(JournalEntry) -> Result<()>,
    ) -> Result<()> {
        self.each_entry_seen(JournalSeen::Whole, since, limit, each).await
    }

    /// As [`Self::each_journal_entry`], as checkpoints let the journal be seen.
    ///
    /// # Errors
    /// As there; `notFound` for a checkpoint.
    pub async fn each_entry_seen(
        &self,
        seen: JournalSeen<'_>,
        since: u64,
        limit: u32,
        each: impl AsyncFnMut(JournalEntry) -> Result<()>,
    ) -> Result<()> {
        let (inlet, feed) = feed::<JournalEntry>();
        let mut request = self.cap.journal_request();
        request.get().set_since(since);
        request.get().set_limit(limit);
        match seen {
            JournalSeen::Whole => {}
            JournalSeen::Compacted => request.get().set_compacted(true),
            JournalSeen::Of(checkpoint) => request.get().set_checkpoint(checkpoint),
        }
        request.get().set_sink(capnp_rpc::new_client(inlet));
        let call = request.send().promise;
        feed.pump(&self.link, async { self.link.wait(call).await.map(drop) }, each).await
    }

    /// Appends to the journal what an agent or a person said; gives the entry's sequence number.
    ///
    /// # Errors
    /// `invalidArgument`, `refused`.
    pub async fn message(&self, role: &str, text: &str) -> Result<u64> {
        self.message_once(role, text, "", 0).await
    }

    /// As [`Self::message`]; the same `key` (if any) gives the same entry.
    ///
    /// # Errors
    /// As there, and `conflict`.
    pub async fn message_once(&self, role: &str, text: &str, key: &str, expected_version: u64) -> Result<u64> {
        let mut request = self.cap.message_request();
        request.get().set_role(role);
        request.get().set_text(text);
        request.get().set_key(key);
        request.get().set_expected_version(expected_version);
        let response = self.link.call(request.send().promise).await?;
        Ok(fields(response.get())?.get_sequence())
    }

    /// What happened to this kernel after sequence number `since`, and what will.
    ///
    /// # Errors
    /// The daemon's.
    pub async fn events(&self, since: u64) -> Result<Events> {
        let (inlet, feed) = feed();
        let mut request = self.cap.events_request();
        request.get().set_since(since);
        request.get().set_sink(capnp_rpc::new_client(inlet));
        let response = self.link.call(request.send().promise).await?;
        let subscription = fields(fields(response.get())?.get_subscription())?;
        Ok(Events::new(feed, self.link.clone(), subscription))
    }

    /// Takes a lease, or takes up again the one of `token`: while it lasts, only its holder changes or executes.
    ///
    /// # Errors
    /// `busy` while another lease lasts.
    pub async fn lease(&self, holder: &str, ttl: Duration, token: &[u8]) -> Result<LeaseClient> {
        let mut request = self.cap.lease_request();
        request.get().set_holder(holder);
        request.get().set_ttl_ms(super::lease::millis(ttl));
        request.get().set_token(token);
        let response = self.link.call(request.send().promise).await?;
        let response = fields(response.get())?;
        Ok(LeaseClient::new(
            fields(response.get_lease())?,
            fields(response.get_token())?.to_vec(),
            response.get_expires_at_ms(),
            self.link.clone(),
        ))
    }

    /// Background jobs that run now.
    ///
    /// # Errors
    /// The daemon's.
    pub async fn jobs(&self) -> Result<Vec<Job>> {
        let response = self.link.call(self.cap.jobs_request().send().promise).await?;
        answer(listing::read_jobs(fields(response.get())?.get_jobs()))
    }
}
