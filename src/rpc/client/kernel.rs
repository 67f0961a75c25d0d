//! One kernel: executions, lifecycle, rights, events and journal. `state.rs` has its state.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use super::blob::{BlobDownload, BlobUpload};
use super::connection::{Link, answer, connect_stream, fields};
use super::execution::ExecutionClient;
use super::feed::{Events, feed};
use super::lease::LeaseClient;
use crate::core::error::{Error, Result};
use crate::core::exec::{ExecRequest, ExecResult, ExecStatus};
use crate::core::ids::{Digest, ExecId};
use crate::core::info::{Job, JournalEntry, KernelInfo};
use crate::core::limits;
use crate::core::rights::Rights;
use crate::rpc::convert::exec::{read_exec_result, write_exec_request};
use crate::rpc::convert::rights::{rights_len, write_rights};
use crate::rpc::convert::{info, listing, read_name, read_text};
use crate::rpc::schema::ryokan_capnp as wire;

/// A view of a journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JournalSeen<'a> {
    /// Every entry.
    Whole,
    /// Each checkpoint's summary in place of the messages that it compacted.
    Compacted,
    /// Only the messages that this checkpoint compacted.
    Of(&'a str),
}

/// A capability for one kernel.
#[derive(Clone)]
pub struct KernelClient {
    pub(super) cap: wire::kernel::Client,
    pub(super) link: Rc<Link>,
}

impl KernelClient {
    pub(super) fn new(cap: wire::kernel::Client, link: Rc<Link>) -> Self {
        KernelClient { cap, link }
    }

    /// Connects to the socket of one kernel: `kernels/<name>.sock` or a published one.
    ///
    /// # Errors
    /// As [`HostClient::connect`](super::HostClient::connect).
    pub async fn connect(socket: &Path) -> Result<KernelClient> {
        let (link, cap) = Link::start(connect_stream(socket, limits::CLIENT_HELLO).await?)?;
        Ok(KernelClient { cap, link })
    }

    /// Starts an execution of code alone. The execution is in the journal when this returns.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn submit(&self, code: &str) -> Result<ExecId> {
        let mut request = self.cap.execute_request();
        request.get().set_code(code);
        let response = self.link.call(request.send().promise).await?;
        Ok(ExecId(fields(response.get())?.get_exec_id()))
    }

    /// Starts an execution, which continues independently of the client.
    ///
    /// It is in the journal when this returns.
    ///
    /// # Errors
    /// The daemon's errors; `invalidArgument` for a request beyond a limit.
    pub async fn run(&self, request: &ExecRequest) -> Result<ExecutionClient> {
        request.check().map_err(|e| Error::invalid(e.to_string()))?;
        let mut call = self.cap.run_request();
        write_exec_request(call.get().init_request(), request)?;
        let response = self.link.call(call.send().promise).await?;
        let response = fields(response.get())?;
        let cap = fields(response.get_execution())?;
        Ok(ExecutionClient::new(cap, ExecId(response.get_exec_id()), self.link.clone()))
    }

    /// Runs code and waits for its end, in one round trip. Dropping the future does not stop the
    /// code.
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

    /// Opens an execution by its number, also one that ended long ago.
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

    /// Interrupts a running or queued execution; returns how it ended if it had ended before.
    ///
    /// # Errors
    /// `notFound` if the number is unknown.
    pub async fn interrupt_execution(&self, exec: ExecId) -> Result<Option<ExecStatus>> {
        let mut request = self.cap.interrupt_request();
        request.get().set_exec_id(exec.0);
        let response = self.link.call(request.send().promise).await?;
        let ended = answer(read_text(fields(response.get())?.get_ended(), "how an execution ended"))?;
        Ok(ExecStatus::from_name(&ended))
    }

    /// The kernel's present state.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn info(&self) -> Result<KernelInfo> {
        self.info_and_rights().await.map(|(info, _)| info)
    }

    /// The kernel's present state and the rights of this capability.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn info_and_rights(&self) -> Result<(KernelInfo, Rights)> {
        let response = self.link.call(self.cap.info_request().send().promise).await?;
        answer(info::read_kernel_info(fields(fields(response.get())?.get_info())?))
    }

    /// Starts the worker now; closes an open circuit breaker.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn start(&self) -> Result<()> {
        self.link.wait(self.cap.start_request().send().promise).await.map(drop)
    }

    /// The same from the saved state: memory that is kept for the next start is discarded.
    ///
    /// # Errors
    /// `conflict` with a worker; the daemon's errors.
    pub async fn start_without_memory(&self) -> Result<()> {
        let mut request = self.cap.start_request();
        request.get().set_without_memory(true);
        self.link.wait(request.send().promise).await.map(drop)
    }

    /// Ends the worker and keeps the state. Waits for the running execution unless `force`
    /// interrupts it.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn stop(&self, force: bool) -> Result<()> {
        let mut request = self.cap.stop_request();
        request.get().set_force(force);
        self.link.wait(request.send().promise).await.map(drop)
    }

    /// Saves the state and pauses every process; memory is kept while the host is up. Waits for the
    /// running execution unless `interrupt` interrupts it. `until_start`: if the daemon is stopped before the next use, its
    /// next start starts the kernel.
    ///
    /// # Errors
    /// `conflict` without a worker, `unsupported` with `release` for processes; the kernel is unchanged then.
    pub async fn suspend(&self, interrupt: bool, release: bool, until_start: bool) -> Result<()> {
        let mut request = self.cap.suspend_request();
        request.get().set_interrupt(interrupt);
        request.get().set_release(release);
        request.get().set_until_start(until_start);
        self.link.wait(request.send().promise).await.map(drop)
    }

    /// Resumes a suspended kernel.
    ///
    /// # Errors
    /// `conflict` without a worker.
    pub async fn resume(&self) -> Result<()> {
        self.link.wait(self.cap.resume_request().send().promise).await.map(drop)
    }

    /// Removes the kernel; `expected_version` 0: any version.
    ///
    /// # Errors
    /// `conflict`.
    pub async fn remove(&self, expected_version: u64) -> Result<()> {
        let mut request = self.cap.remove_request();
        request.get().set_expected_version(expected_version);
        self.link.wait(request.send().promise).await.map(drop)
    }

    /// Returns a capability with at most these rights; `label` names its holder in the journal.
    ///
    /// # Errors
    /// `refused` without the necessary right.
    pub async fn attenuate(&self, rights: Rights, label: &str) -> Result<KernelClient> {
        let mut request = self.cap.attenuate_request();
        write_rights(request.get().init_rights(rights_len(rights)), rights);
        request.get().set_label(label);
        let response = self.link.call(request.send().promise).await?;
        Ok(KernelClient::new(fields(fields(response.get())?.get_kernel())?, self.link.clone()))
    }

    /// Publishes a capability with at most these rights as a socket for another program of this
    /// user.
    ///
    /// Returns the socket's path.
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

    /// Removes a published socket.
    ///
    /// # Errors
    /// `notFound`.
    pub async fn unpublish(&self, name: &str) -> Result<()> {
        let mut request = self.cap.unpublish_request();
        request.get().set_name(name);
        self.link.call(request.send().promise).await.map(drop)
    }

    /// Opens a blob for reading in chunks.
    ///
    /// # Errors
    /// `notFound`, also for a blob that this kernel may not read.
    pub async fn open_blob(&self, hash: Digest) -> Result<BlobDownload> {
        let mut request = self.cap.open_blob_request();
        request.get().set_hash(hash.to_string());
        let response = self.link.call(request.send().promise).await?;
        BlobDownload::new(fields(fields(response.get())?.get_blob())?, self.link.clone()).await
    }

    /// Creates a blob, written in chunks.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn new_blob(&self) -> Result<BlobUpload> {
        let response = self.link.call(self.cap.new_blob_request().send().promise).await?;
        Ok(BlobUpload::new(fields(fields(response.get())?.get_blob())?, self.link.clone()))
    }

    /// Lets another kernel of the same connection read a blob that this one can read.
    ///
    /// # Errors
    /// `notFound`.
    pub async fn grant_blob(&self, hash: Digest, to: &KernelClient) -> Result<()> {
        let mut request = self.cap.grant_blob_request();
        request.get().set_hash(hash.to_string());
        request.get().set_to(to.cap.clone());
        self.link.call(request.send().promise).await.map(drop)
    }

    /// Passes the journal's entries after sequence number `since` to `each`, oldest first; `limit`
    /// 0: all.
    ///
    /// # Errors
    /// The errors of the daemon and of `each`.
    pub async fn each_journal_entry(
        &self,
        since: u64,
        limit: u32,
        each: impl AsyncFnMut(JournalEntry) -> Result<()>,
    ) -> Result<()> {
        self.each_entry_seen(JournalSeen::Whole, since, limit, each).await
    }

    /// As [`Self::each_journal_entry`], through a view.
    ///
    /// # Errors
    /// As [`Self::each_journal_entry`]; `notFound` for an unknown checkpoint.
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

    /// Appends a message of an agent or a person to the journal and returns its sequence number.
    ///
    /// # Errors
    /// `invalidArgument`, `refused`.
    pub async fn message(&self, role: &str, text: &str) -> Result<u64> {
        self.message_once(role, text, "", 0).await
    }

    /// As [`Self::message`]; the same `key`, if any, returns the same entry.
    ///
    /// # Errors
    /// As [`Self::message`], and `conflict`.
    pub async fn message_once(&self, role: &str, text: &str, key: &str, expected_version: u64) -> Result<u64> {
        let mut request = self.cap.message_request();
        request.get().set_role(role);
        request.get().set_text(text);
        request.get().set_key(key);
        request.get().set_expected_version(expected_version);
        let response = self.link.call(request.send().promise).await?;
        Ok(fields(response.get())?.get_sequence())
    }

    /// Subscribes to this kernel's events after sequence number `since`, past and future.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn events(&self, since: u64) -> Result<Events> {
        let (inlet, feed) = feed();
        let mut request = self.cap.events_request();
        request.get().set_since(since);
        request.get().set_sink(capnp_rpc::new_client(inlet));
        let response = self.link.call(request.send().promise).await?;
        let subscription = fields(fields(response.get())?.get_subscription())?;
        Ok(Events::new(feed, self.link.clone(), subscription))
    }

    /// Takes a lease, or resumes the lease of `token`.
    ///
    /// While the lease lasts, only its holder may change the kernel or execute in it.
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

    /// Background jobs that are running.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn jobs(&self) -> Result<Vec<Job>> {
        let response = self.link.call(self.cap.jobs_request().send().promise).await?;
        answer(listing::read_jobs(fields(response.get())?.get_jobs()))
    }
}
