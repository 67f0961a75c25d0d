//! Checkpoints of a kernel.

use super::connection::{answer, fields};
use super::feed::feed;
use super::kernel::KernelClient;
use crate::core::checkpoint::{Checkpoint, CheckpointRequest, Restoration};
use crate::core::diff::{Difference, Patch};
use crate::core::error::Result;
use crate::core::retention::Retention;
use crate::core::snapshot::KindRequest;
use crate::core::workflow::Options;
use crate::rpc::convert::checkpoint::{read_checkpoint, read_restoration, write_request};
use crate::rpc::convert::spec::write_retention;

impl KernelClient {
    /// Takes a checkpoint at the kernel's next safe point.
    ///
    /// # Errors
    /// `deadline` if the kernel did not quiesce in time; the daemon's errors.
    pub async fn checkpoint(&self, wanted: &CheckpointRequest) -> Result<Checkpoint> {
        let mut call = self.cap.checkpoint_request();
        write_request(call.get().init_request(), wanted);
        let response = self.link.wait(call.send().promise).await?;
        answer(read_checkpoint(fields(fields(response.get())?.get_checkpoint())?)).map(|(checkpoint, _)| checkpoint)
    }

    /// Passes the checkpoints to `take`, newest first, each with whether it is the kernel's current
    /// one.
    ///
    /// `limit` 0: all.
    ///
    /// # Errors
    /// The daemon's and `take`'s.
    pub async fn checkpoints(
        &self,
        limit: u32,
        mut take: impl AsyncFnMut(Checkpoint, bool) -> Result<()>,
    ) -> Result<()> {
        let (inlet, feed) = feed::<(Checkpoint, bool)>();
        let mut request = self.cap.checkpoints_request();
        request.get().set_limit(limit);
        request.get().set_sink(capnp_rpc::new_client(inlet));
        let call = request.send().promise;
        let ended = async { self.link.wait(call).await.map(drop) };
        feed.pump(&self.link, ended, async |(checkpoint, is_head)| take(checkpoint, is_head).await).await
    }

    /// Finds a checkpoint by the beginning of its id, its name, `~N` or `latest`.
    ///
    /// Also returns whether it is the kernel's current checkpoint.
    ///
    /// # Errors
    /// `notFound`, `conflict` with the candidates.
    pub async fn find_checkpoint(&self, reference: &str) -> Result<(Checkpoint, bool)> {
        let mut request = self.cap.find_checkpoint_request();
        request.get().set_ref(reference);
        let response = self.link.call(request.send().promise).await?;
        answer(read_checkpoint(fields(fields(response.get())?.get_checkpoint())?))
    }

    /// The checkpoint to which [`Self::undo`] returns.
    ///
    /// # Errors
    /// `notFound` if nothing was restored; `invalidArgument` by a daemon that does not know the call.
    pub async fn undo_target(&self) -> Result<Checkpoint> {
        let mut request = self.cap.find_checkpoint_request();
        request.get().set_undo(true);
        let response = self.link.call(request.send().promise).await?;
        answer(read_checkpoint(fields(fields(response.get())?.get_checkpoint())?)).map(|(found, _)| found)
    }

    /// Passes the differences from checkpoint `from` to checkpoint `to` to `take`.
    ///
    /// An empty `to` means the present state.
    ///
    /// # Errors
    /// `notFound`, `conflict` with the candidates, and the errors of `take`.
    pub async fn diff(&self, from: &str, to: &str, take: impl AsyncFnMut(Difference) -> Result<()>) -> Result<()> {
        self.diff_with(from, None, to, take).await
    }

    /// As [`Self::diff`]; `to` refers to `other`, and an empty `from` means this kernel's present
    /// state.
    ///
    /// # Errors
    /// As [`Self::diff`].
    pub async fn diff_with(
        &self,
        from: &str,
        other: Option<&KernelClient>,
        to: &str,
        mut take: impl AsyncFnMut(Difference) -> Result<()>,
    ) -> Result<()> {
        let (inlet, feed) = feed::<Difference>();
        let mut request = self.cap.diff_request();
        request.get().set_from(from);
        request.get().set_to(to);
        if let Some(other) = other {
            request.get().set_other(other.cap.clone());
        }
        request.get().set_sink(capnp_rpc::new_client(inlet));
        let call = request.send().promise;
        let ended = async { self.link.wait(call).await.map(drop) };
        feed.pump(&self.link, ended, async |difference| take(difference).await).await
    }

    /// Passes unified diffs of the files that differ between two checkpoints to `take`.
    ///
    /// References as in [`Self::diff_with`]. `paths` restricts the diffs to these paths and
    /// everything beneath them; empty: all files.
    ///
    /// # Errors
    /// As [`Self::diff`].
    pub async fn diff_text(
        &self,
        from: &str,
        (other, to): (Option<&KernelClient>, &str),
        paths: &[Vec<u8>],
        take: impl AsyncFnMut(Patch) -> Result<()>,
    ) -> Result<()> {
        let (inlet, feed) = feed::<Patch>();
        let mut request = self.cap.diff_text_request();
        request.get().set_from(from);
        request.get().set_to(to);
        if let Some(other) = other {
            request.get().set_other(other.cap.clone());
        }
        let mut list = request.get().init_paths(u32::try_from(paths.len()).unwrap_or(u32::MAX));
        for (i, path) in (0..).zip(paths) {
            list.set(i, path);
        }
        request.get().set_sink(capnp_rpc::new_client(inlet));
        let call = request.send().promise;
        feed.pump(&self.link, async { self.link.wait(call).await.map(drop) }, take).await
    }

    /// Restores the kernel to a checkpoint, completely or not at all.
    ///
    /// # Errors
    /// The daemon's errors; the kernel is then unchanged.
    pub async fn restore_checkpoint(&self, reference: &str, expected_version: u64) -> Result<Restoration> {
        self.restore_with(reference, Options::default(), expected_version).await
    }

    /// As [`Self::restore_checkpoint`], with options.
    ///
    /// # Errors
    /// As [`Self::restore_checkpoint`].
    pub async fn restore_with(&self, reference: &str, options: Options, expected_version: u64) -> Result<Restoration> {
        self.restore_as(reference, options, None, expected_version).await
    }

    /// As [`Self::restore_with`], of that kind; `None`: the checkpoint's own.
    ///
    /// # Errors
    /// As [`Self::restore_checkpoint`]; the rule that the kind breaks.
    pub async fn restore_as(
        &self,
        reference: &str,
        options: Options,
        kind: Option<KindRequest>,
        expected_version: u64,
    ) -> Result<Restoration> {
        let mut request = self.cap.restore_checkpoint_request();
        request.get().set_ref(reference);
        request.get().set_expected_version(expected_version);
        request.get().set_supersede_decisions(options.supersede_decisions);
        request.get().set_with_artifacts(options.with_artifacts);
        request.get().set_kind(kind.map_or("", KindRequest::name));
        let response = self.link.wait(request.send().promise).await?;
        answer(read_restoration(fields(fields(response.get())?.get_restoration())?))
    }

    /// Returns to the state before the kernel's last restore.
    ///
    /// # Errors
    /// `notFound` if nothing was restored; the daemon's errors.
    pub async fn undo(&self, expected_version: u64) -> Result<Restoration> {
        let mut request = self.cap.undo_request();
        request.get().set_expected_version(expected_version);
        let response = self.link.wait(request.send().promise).await?;
        answer(read_restoration(fields(fields(response.get())?.get_restoration())?))
    }

    /// Exempts a checkpoint from retention, or ends the exemption.
    ///
    /// # Errors
    /// `notFound`, `conflict` with the candidates.
    pub async fn pin_checkpoint(&self, reference: &str, pinned: bool) -> Result<()> {
        let mut request = self.cap.pin_checkpoint_request();
        request.get().set_ref(reference);
        request.get().set_pinned(pinned);
        self.link.call(request.send().promise).await.map(drop)
    }

    /// Removes a checkpoint permanently and returns it.
    ///
    /// # Errors
    /// `notFound`; `conflict` with the candidates, or because the kernel needs it.
    pub async fn remove_checkpoint(&self, reference: &str, expected_version: u64) -> Result<Checkpoint> {
        let mut request = self.cap.remove_checkpoint_request();
        request.get().set_ref(reference);
        request.get().set_expected_version(expected_version);
        let response = self.link.call(request.send().promise).await?;
        answer(read_checkpoint(fields(fields(response.get())?.get_checkpoint())?)).map(|(checkpoint, _)| checkpoint)
    }

    /// Archives the kernel and returns the checkpoint that holds it, and its version.
    ///
    /// # Errors
    /// `conflict` (version, threads, used meanwhile, archived already), `busy`, `refused`. Nothing
    /// was removed then.
    pub async fn archive(&self, expected_version: u64) -> Result<(Checkpoint, u64)> {
        let mut request = self.cap.archive_request();
        request.get().set_expected_version(expected_version);
        let response = self.link.wait(request.send().promise).await?;
        let response = fields(response.get())?;
        let (checkpoint, _) = answer(read_checkpoint(fields(response.get_checkpoint())?))?;
        Ok((checkpoint, response.get_version()))
    }

    /// Restores the kernel from the archive and returns its version.
    ///
    /// # Errors
    /// `conflict` (version, not archived), `busy`, `corrupt`. The kernel is still archived then.
    pub async fn unarchive(&self, expected_version: u64) -> Result<u64> {
        let mut request = self.cap.unarchive_request();
        request.get().set_expected_version(expected_version);
        let response = self.link.wait(request.send().promise).await?;
        Ok(fields(response.get())?.get_version())
    }

    /// Sets the retention of checkpoints that are neither manual nor pinned.
    ///
    /// Returns how many were removed at once.
    ///
    /// # Errors
    /// `invalidArgument`, `conflict`.
    pub async fn set_retention(&self, retention: &Retention, expected_version: u64) -> Result<u64> {
        let mut request = self.cap.set_retention_request();
        write_retention(request.get().init_retention(), retention);
        request.get().set_expected_version(expected_version);
        let response = self.link.call(request.send().promise).await?;
        Ok(fields(response.get())?.get_gone())
    }
}
