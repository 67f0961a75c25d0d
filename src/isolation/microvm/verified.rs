//! Images whose files were read and found to be what was built.
//!
//! A file is read once by a daemon, and again when its inode, size or time of change differs.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::PathBuf;

use super::image::Image;
use super::stamp::Stamp;
use crate::core::error::{Error, Result};

/// The verified images of a daemon.
#[derive(Default)]
pub(super) struct VerifiedImages {
    known: RefCell<HashMap<PathBuf, Vec<Stamp>>>,
    /// One image is read at a time.
    turn: tokio::sync::Mutex<()>,
}

impl VerifiedImages {
    /// Checks that an image's files are what was built.
    ///
    /// # Errors
    /// `unsupported` if they are not; those of reading.
    pub(super) async fn check(&self, image: &Image) -> Result<()> {
        let _turn = self.turn.lock().await;
        let (about, known) = (image.clone(), self.known.borrow().get(&image.dir).cloned());
        let verified = tokio::task::spawn_blocking(move || {
            let stamps = about.stamps()?;
            if known.as_ref() != Some(&stamps) {
                about.verify()?;
            }
            Ok::<_, Error>(stamps)
        });
        let stamps = verified.await.map_err(|error| Error::internal(error.to_string()))??;
        self.known.borrow_mut().insert(image.dir.clone(), stamps);
        Ok(())
    }
}
