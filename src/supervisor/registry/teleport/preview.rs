//! The files of an arriving kernel, written while it still runs at its source: in the pause only what changed since is
//! left to write. A preview only saves time, so one that fails is logged.

use crate::bundle;
use crate::core::error::{Error, Result};
use crate::core::ids::{Digest, HandoverId};
use crate::supervisor::host::prepared_copies;
use crate::supervisor::registry::bundle_io::client_error;
use crate::teleport::{Offer, Received};
use crate::workspace::PreparedWorkspace;

use super::incoming::TargetSide;

/// Written files; removed with it, off the event loop.
pub(super) struct Preview {
    handover: HandoverId,
    copy: Option<PreparedWorkspace>,
}

impl Drop for Preview {
    fn drop(&mut self) {
        if let (Some(copy), Ok(runtime)) = (self.copy.take(), tokio::runtime::Handle::try_current()) {
            runtime.spawn_blocking(move || drop(copy));
        }
    }
}

impl TargetSide {
    /// Writes the files of the tree, all of which was received.
    pub(super) async fn write_preview(&self, offer: &Offer, received: &Received, tree: Digest) {
        let _earlier = self.preview.take();
        match self.copy_of(offer, received, tree).await {
            Ok(copy) => {
                self.preview.replace(Some(Preview { handover: offer.handover, copy: Some(copy) }));
            }
            Err(error) => tracing::info!(kernel = %offer.spec.name, %error, "the files of a kernel are written later"),
        }
    }

    async fn copy_of(&self, offer: &Offer, received: &Received, tree: Digest) -> Result<PreparedWorkspace> {
        let host = self.supervisor.host();
        let held = received.held.clone();
        let checked = host.store.run_beside(move |store| Ok(bundle::verify_tree(store, tree, held))).await?;
        let size = checked.map_err(client_error)?;
        let most = offer.spec.limits.workspace_bytes.min(received.most_bytes);
        // Half of what is free: the disk also holds the objects.
        let has_files = host.free_files().is_none_or(|free| size.entries <= free / 2);
        if size.bytes > most || !has_files {
            return Err(Error::refused("its files are too many or too large").reason("handover_size"));
        }
        let copy = prepared_copies::write(host, offer.kernel, tree).await?;
        self.supervisor.registry().handovers.room.wrote(offer.handover, size.bytes);
        Ok(copy)
    }

    /// Takes the files that were written for this handover.
    pub(super) fn take_preview(&self, handover: HandoverId) -> Option<PreparedWorkspace> {
        let mut preview = self.preview.take()?;
        if preview.handover == handover { preview.copy.take() } else { None }
    }

    /// Removes the files that were written for this handover and not used.
    pub(super) fn drop_preview(&self, handover: HandoverId) {
        drop(self.take_preview(handover).map(|copy| Preview { handover, copy: Some(copy) }));
    }
}
