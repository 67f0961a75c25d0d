//! `Images`: the images of virtual machines. In a system-wide daemon only its own user has them.

use std::rc::Rc;

use super::Connection;
use crate::core::error::Result;
use crate::rpc::convert::image::write_image;
use crate::rpc::convert::{read_text, to_capnp};
use crate::rpc::schema::ryokan_capnp::images;
use crate::supervisor::kernel::command::Actor;

/// The images, for one client.
pub(super) struct ImagesServer {
    pub connection: Rc<Connection>,
    pub actor: Actor,
}

impl ImagesServer {
    /// Writes the change or its failure into the audit log.
    async fn audited(&self, action: &str, version: &str, done: Result<String>) -> capnp::Result<String> {
        let host = self.connection.supervisor.host();
        match &done {
            Ok(version) => {
                let mut line = host.line(&self.actor, action, None);
                line.detail.clone_from(version);
                host.write_audit(line).await;
            }
            Err(error) => host.audit_refusal(&self.actor, action, None, error).await,
        }
        tracing::debug!(action, version, "a change of images");
        done.map_err(to_capnp)
    }
}

impl images::Server for ImagesServer {
    async fn list(self: Rc<Self>, _: images::ListParams, mut results: images::ListResults) -> capnp::Result<()> {
        let supervisor = &self.connection.supervisor;
        let folder = supervisor.images_folder().map_err(to_capnp)?;
        let all = supervisor.images().await.map_err(to_capnp)?;
        results.get().set_folder(folder.to_string_lossy().as_ref());
        let mut list = results.get().init_images(all.len() as u32);
        for (i, image) in all.iter().enumerate() {
            write_image(list.reborrow().get(i as u32), image);
        }
        Ok(())
    }

    async fn pin(self: Rc<Self>, params: images::PinParams, mut results: images::PinResults) -> capnp::Result<()> {
        let params = params.get()?;
        let version = read_text(params.get_version(), "version").map_err(to_capnp)?;
        let (action, pinned) = if params.get_pinned() { ("images.pin", true) } else { ("images.unpin", false) };
        let done = self.connection.supervisor.pin_image(&version, pinned);
        results.get().set_version(self.audited(action, &version, done).await?);
        Ok(())
    }

    async fn rotate(
        self: Rc<Self>,
        params: images::RotateParams,
        mut results: images::RotateResults,
    ) -> capnp::Result<()> {
        let version = read_text(params.get()?.get_version(), "version").map_err(to_capnp)?;
        let done = self.connection.supervisor.rotate_image(&version).await;
        results.get().set_version(self.audited("images.rotate", &version, done).await?);
        Ok(())
    }

    async fn remove(
        self: Rc<Self>,
        params: images::RemoveParams,
        mut results: images::RemoveResults,
    ) -> capnp::Result<()> {
        let version = read_text(params.get()?.get_version(), "version").map_err(to_capnp)?;
        let done = self.connection.supervisor.remove_image(&version).await;
        results.get().set_version(self.audited("images.remove", &version, done).await?);
        Ok(())
    }
}
