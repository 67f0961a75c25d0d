//! Audit of refused and failed calls on a kernel's capability.
//!
//! The operation itself records its success, with the outcome.

use std::rc::Rc;

use super::kernel::KernelServer;
use crate::core::info::MountInfo;
use crate::core::rights::Right;
use crate::rpc::convert::error::from_capnp;
use crate::rpc::convert::mcp::read_mcp_transport;
use crate::rpc::convert::rights::read_rights;
use crate::rpc::convert::{read_name, to_capnp};
use crate::rpc::schema::ryokan_capnp::kernel;

impl KernelServer {
    /// Runs an operation that needs a right; records a refusal or failure in the audit log.
    pub(super) async fn audited(
        &self,
        action: &str,
        right: Right,
        work: impl Future<Output = capnp::Result<()>>,
    ) -> capnp::Result<()> {
        let done = match self.may(right) {
            Ok(()) => work.await,
            Err(error) => Err(error),
        };
        if let Err(error) = &done {
            let error = from_capnp(error.clone());
            self.host().audit_refusal(&self.actor, action, Some(&self.kernel), &error).await;
        }
        done
    }

    /// Records a completed operation in the audit log, with the kernel's version before it.
    pub(super) async fn audit_done(&self, action: &str, before: u64, detail: impl Into<String>) {
        let versions = (Some(before), Some(self.kernel.view().version));
        self.host().audit(&self.actor, action, &self.kernel, versions, detail).await;
    }

    pub(super) async fn add_mount(&self, params: kernel::MountParams) -> capnp::Result<()> {
        let params = params.get()?;
        let mount = MountInfo {
            path: read_name(params.get_path(), "path").map_err(to_capnp)?,
            source: read_name(params.get_source(), "source").map_err(to_capnp)?,
            writable: params.get_writable(),
        };
        self.kernel.mount(self.change(params.get_expected_version()), mount).await.map_err(to_capnp)
    }

    pub(super) async fn remove_mount(&self, params: kernel::UnmountParams) -> capnp::Result<()> {
        let params = params.get()?;
        let path = read_name(params.get_path(), "path").map_err(to_capnp)?;
        self.kernel.unmount(self.change(params.get_expected_version()), path).await.map_err(to_capnp)
    }

    pub(super) async fn add_mcp(&self, params: kernel::RegisterMcpParams) -> capnp::Result<()> {
        let params = params.get()?;
        let name = read_name(params.get_name(), "name").map_err(to_capnp)?;
        let transport = read_mcp_transport(params.get_transport()?).map_err(to_capnp)?;
        self.kernel.register_mcp(self.change(params.get_expected_version()), name, transport).await.map_err(to_capnp)
    }

    pub(super) async fn remove_mcp(&self, params: kernel::UnregisterMcpParams) -> capnp::Result<()> {
        let params = params.get()?;
        let name = read_name(params.get_name(), "name").map_err(to_capnp)?;
        self.kernel.unregister_mcp(self.change(params.get_expected_version()), name).await.map_err(to_capnp)
    }

    pub(super) async fn publish_socket(
        &self,
        params: kernel::PublishParams,
        mut results: kernel::PublishResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let rights = self.rights.and(read_rights(params.get_rights()).map_err(to_capnp)?);
        let name = read_name(params.get_name(), "name").map_err(to_capnp)?;
        let published = Rc::clone(&self.connection.published);
        let path = published.publish(&self.connection, &self.kernel, &name, rights).await.map_err(to_capnp)?;
        results.get().set_path(path.display().to_string());
        Ok(())
    }

    pub(super) async fn unpublish_socket(&self, params: kernel::UnpublishParams) -> capnp::Result<()> {
        let name = read_name(params.get()?.get_name(), "name").map_err(to_capnp)?;
        self.connection.published.unpublish(&self.kernel, &name, &self.actor).await.map_err(to_capnp)
    }

    pub(super) async fn remove_kernel(&self, params: kernel::RemoveParams) -> capnp::Result<()> {
        let params = params.get()?;
        let change = self.change(params.get_expected_version());
        self.connection.supervisor.remove(&self.kernel, change, params.get_with_threads()).await.map_err(to_capnp)
    }
}
