//! Maintenance of a host, and its audit log.

use super::connection::{answer, fields};
use super::feed::feed;
use super::host::HostClient;
use crate::core::audit::{AuditBreak, AuditHead, AuditLine};
use crate::core::error::{Error, Result};
use crate::core::upkeep::{GcItem, GcReport, VerifyEvent, VerifyReport};
use crate::core::usage::DiskUsage;
use crate::rpc::convert::read_text;
use crate::rpc::convert::upkeep::{read_gc_report, read_verify_report};
use crate::rpc::convert::usage::read_disk_usage;

impl HostClient {
    /// Removes the checkpoints that retention expires and unreferenced objects.
    ///
    /// Passes each removed checkpoint to `take`. With `dry_run`, which changes nothing, passes
    /// every checkpoint and object.
    ///
    /// # Errors
    /// `busy` during another collection; `corrupt` if the needed objects cannot be determined; the
    /// errors of `take`.
    pub async fn gc(&self, dry_run: bool, mut take: impl AsyncFnMut(GcItem) -> Result<()>) -> Result<GcReport> {
        let (inlet, feed) = feed::<GcItem>();
        let mut request = self.cap.gc_request();
        request.get().set_dry_run(dry_run);
        request.get().set_sink(capnp_rpc::new_client(inlet));
        let call = request.send().promise;
        let ended = async {
            let response = self.link.wait(call).await?;
            Ok(read_gc_report(fields(fields(response.get())?.get_report())?))
        };
        feed.pump(&self.link, ended, async |item| take(item).await).await
    }

    /// Verifies all stored data. Passes damage and progress to `take`.
    ///
    /// # Errors
    /// `busy` during another verification; the errors of `take`.
    pub async fn verify(&self, mut take: impl AsyncFnMut(VerifyEvent) -> Result<()>) -> Result<VerifyReport> {
        let (inlet, feed) = feed::<VerifyEvent>();
        let mut request = self.cap.verify_request();
        request.get().set_sink(capnp_rpc::new_client(inlet));
        let call = request.send().promise;
        let ended = async {
            let response = self.link.wait(call).await?;
            Ok(read_verify_report(fields(fields(response.get())?.get_report())?))
        };
        feed.pump(&self.link, ended, async |reported| take(reported).await).await
    }

    /// What takes room on the disk: of one kernel, or (empty) of all kernels and the data folder.
    ///
    /// # Errors
    /// `notFound`; `busy` during another measurement.
    pub async fn disk_usage(&self, kernel: &str) -> Result<DiskUsage> {
        let mut request = self.cap.disk_usage_request();
        request.get().set_kernel(kernel);
        let response = self.link.wait(request.send().promise).await?;
        answer(read_disk_usage(fields(fields(response.get())?.get_usage())?))
    }

    /// Passes lines of the audit log after number `since` to `take`, oldest first.
    ///
    /// `limit` 0: all; `kernel` empty: of every kernel.
    ///
    /// # Errors
    /// `notFound` for an unknown kernel; the errors of `take`.
    pub async fn audit(
        &self,
        kernel: &str,
        since: u64,
        limit: u32,
        mut take: impl AsyncFnMut(AuditLine) -> Result<()>,
    ) -> Result<()> {
        let (inlet, feed) = feed::<AuditLine>();
        let mut request = self.cap.audit_request();
        request.get().set_kernel(kernel);
        request.get().set_since(since);
        request.get().set_limit(limit);
        request.get().set_sink(capnp_rpc::new_client(inlet));
        let call = request.send().promise;
        let ended = async { self.link.wait(call).await.map(drop) };
        feed.pump(&self.link, ended, async |line| take(line).await).await
    }

    /// Verifies the audit log's hash chain, optionally against an earlier end of it.
    ///
    /// The inner error names the first line that does not fit.
    ///
    /// # Errors
    /// `corrupt` if the log cannot be read.
    pub async fn verify_audit(&self, known: Option<AuditHead>) -> Result<std::result::Result<AuditHead, AuditBreak>> {
        let mut request = self.cap.verify_audit_request();
        request.get().set_known(known.map(|head| head.to_string()).unwrap_or_default());
        let response = self.link.wait(request.send().promise).await?;
        let response = fields(response.get())?;
        if response.get_broken_at() != 0 {
            let why = answer(read_text(response.get_why(), "why"))?;
            return Ok(Err(AuditBreak { sequence: response.get_broken_at(), why, is_gap: response.get_gap() }));
        }
        let head = answer(read_text(response.get_head(), "head"))?;
        head.parse().map(Ok).map_err(|error| Error::internal(format!("the daemon answered: {error}")))
    }
}
