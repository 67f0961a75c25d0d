//! The files and the engine state of an arriving kernel, written while it still runs at its source: in the pause only
//! what changed since is left to write. A preview only saves time, so one that fails is logged.

use crate::bundle;
use crate::core::error::{Error, Result};
use crate::core::ids::{Digest, HandoverId};
use crate::core::limits;
use crate::supervisor::checkpoint::StagedState;
use crate::supervisor::host::prepared_copies;
use crate::supervisor::registry::bundle_io::client_error;
use crate::teleport::{Offer, Received};
use crate::workspace::PreparedWorkspace;

use super::incoming::TargetSide;

/// What was written; removed with it, off the event loop.
pub(super) struct Preview {
    handover: HandoverId,
    copy: Option<PreparedWorkspace>,
    files_bytes: u64,
    state: Option<StagedState>,
    state_bytes: u64,
}

impl Drop for Preview {
    fn drop(&mut self) {
        if let (Some(copy), Ok(runtime)) = (self.copy.take(), tokio::runtime::Handle::try_current()) {
            runtime.spawn_blocking(move || drop(copy));
        }
    }
}

fn too_large(what: &str) -> Error {
    Error::refused(format!("{what} too large")).reason("handover_size")
}

impl TargetSide {
    /// What was written for this handover until now.
    fn preview_of(&self, handover: HandoverId) -> Preview {
        let known = self.preview.take().filter(|preview| preview.handover == handover);
        known.unwrap_or(Preview { handover, copy: None, files_bytes: 0, state: None, state_bytes: 0 })
    }

    fn keep_preview(&self, preview: Preview) {
        let bytes = preview.files_bytes.saturating_add(preview.state_bytes);
        self.supervisor.registry().handovers.room.wrote(preview.handover, bytes);
        self.preview.replace(Some(preview));
    }

    /// Writes the files of the tree, all of which was received.
    pub(super) async fn write_files(&self, offer: &Offer, received: &Received, tree: Digest) {
        let mut preview = self.preview_of(offer.handover);
        match self.copy_of(offer, received, tree, preview.state_bytes).await {
            Ok((copy, bytes)) => (preview.copy, preview.files_bytes) = (Some(copy), bytes),
            Err(error) => tracing::info!(kernel = %offer.spec.name, %error, "the files of a kernel are written later"),
        }
        self.keep_preview(preview);
    }

    async fn copy_of(
        &self,
        offer: &Offer,
        received: &Received,
        tree: Digest,
        state_bytes: u64,
    ) -> Result<(PreparedWorkspace, u64)> {
        let host = self.supervisor.host();
        let held = received.held.clone();
        let checked = host.store.run_beside(move |store| Ok(bundle::verify_tree(store, tree, held))).await?;
        let size = checked.map_err(client_error)?;
        let most = offer.spec.limits.workspace_bytes.min(received.most_bytes.saturating_sub(state_bytes));
        // Half of what is free: the disk also holds the objects.
        let has_files = host.free_files().is_none_or(|free| size.entries <= free / 2);
        if size.bytes > most || !has_files {
            return Err(too_large("its files are too many or"));
        }
        Ok((prepared_copies::write(host, offer.kernel, tree).await?, size.bytes))
    }

    /// Writes engine state, all of which was received; of what was written before, only what differs.
    pub(super) async fn write_state(&self, offer: &Offer, received: &Received, list: Digest) {
        let mut preview = self.preview_of(offer.handover);
        let earlier = preview.state.take();
        preview.state_bytes = 0;
        match self.state_of(offer, received, list, (earlier, preview.files_bytes)).await {
            Ok((state, bytes)) => (preview.state, preview.state_bytes) = (Some(state), bytes),
            Err(error) => {
                tracing::info!(kernel = %offer.spec.name, %error, "the engine state of a kernel is written later");
            }
        }
        self.keep_preview(preview);
    }

    async fn state_of(
        &self,
        offer: &Offer,
        received: &Received,
        list: Digest,
        (earlier, files_bytes): (Option<StagedState>, u64),
    ) -> Result<(StagedState, u64)> {
        let host = self.supervisor.host();
        let held = received.held.clone();
        let checked = host.store.run_beside(move |store| Ok(bundle::verify_state(store, list, held))).await?;
        let parts = checked.map_err(client_error)?;
        let bytes = parts.bytes();
        let most = limits::engine_state_bytes(offer.spec.limits.memory_bytes)
            .min(received.most_bytes.saturating_sub(files_bytes));
        // A change is in the database's log first.
        let has_room = host.free_bytes().is_none_or(|free| bytes.saturating_mul(2) <= free);
        if bytes > most || !has_room || host.disk_is_full() {
            return Err(too_large("its engine state is"));
        }
        let state = match earlier {
            Some(earlier) => earlier,
            None => StagedState::new(host, offer.kernel)?,
        };
        let applied = state.revise(host, (offer.spec.isolation, offer.spec.engine), parts).await?;
        let (written, removed) = (applied.puts, applied.dels);
        tracing::info!(kernel = %offer.spec.name, written, removed, "engine state is written ahead");
        Ok((state, bytes))
    }

    /// Takes what was written for this handover.
    pub(super) fn take_preview(&self, handover: HandoverId) -> (Option<PreparedWorkspace>, Option<StagedState>) {
        let mut preview = self.preview_of(handover);
        (preview.copy.take(), preview.state.take())
    }
}
