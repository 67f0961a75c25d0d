//! Images of virtual machines.

use std::path::PathBuf;

use super::connection::{answer, fields};
use super::host::HostClient;
use crate::core::error::Result;
use crate::core::info::ImageInfo;
use crate::rpc::convert::image::read_images;
use crate::rpc::convert::{read_name, read_text};
use crate::rpc::schema::ryokan_capnp as wire;

impl HostClient {
    async fn images_cap(&self) -> Result<wire::images::Client> {
        let response = self.link.call(self.cap.images_request().send().promise).await?;
        fields(fields(response.get())?.get_images())
    }

    /// All images, and the daemon's folder of images.
    ///
    /// # Errors
    /// `unsupported`, `refused` for another user of a system-wide daemon.
    pub async fn images(&self) -> Result<(Vec<ImageInfo>, PathBuf)> {
        let response = self.link.call(self.images_cap().await?.list_request().send().promise).await?;
        let response = fields(response.get())?;
        Ok((answer(read_images(response.get_images()))?, answer(read_text(response.get_folder(), "folder"))?.into()))
    }

    /// Protects an image from removal, or no more. Returns its version.
    ///
    /// # Errors
    /// `notFound`, `invalidArgument` if several versions begin so.
    pub async fn pin_image(&self, version: &str, pinned: bool) -> Result<String> {
        let mut request = self.images_cap().await?.pin_request();
        request.get().set_version(version);
        request.get().set_pinned(pinned);
        let response = self.link.call(request.send().promise).await?;
        answer(read_name(fields(response.get())?.get_version(), "version"))
    }

    /// Makes an image current, the newest if `version` is empty. Returns its version.
    ///
    /// # Errors
    /// `unsupported`, `unavailable` if no machine starts from it.
    pub async fn rotate_image(&self, version: &str) -> Result<String> {
        let mut request = self.images_cap().await?.rotate_request();
        request.get().set_version(version);
        let response = self.link.wait(request.send().promise).await?;
        answer(read_name(fields(response.get())?.get_version(), "version"))
    }

    /// Removes an image. Returns its version.
    ///
    /// # Errors
    /// `conflict` if it is in use, current or pinned; `notFound`.
    pub async fn remove_image(&self, version: &str) -> Result<String> {
        let mut request = self.images_cap().await?.remove_request();
        request.get().set_version(version);
        let response = self.link.wait(request.send().promise).await?;
        answer(read_name(fields(response.get())?.get_version(), "version"))
    }
}
