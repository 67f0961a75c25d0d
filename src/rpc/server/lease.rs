//! `Lease`: the exclusive right to change a kernel for a time.

use std::rc::Rc;

use super::Connection;
use crate::core::rights::Rights;
use crate::rpc::convert::to_capnp;
use crate::rpc::schema::ryokan_capnp::lease;
use crate::supervisor::command::Actor;
use crate::supervisor::kernel::Kernel;

/// A lease that its holder has. Dropping it releases nothing: it ends by its time, or by `release`.
pub(super) struct LeaseServer {
    pub connection: Rc<Connection>,
    pub kernel: Rc<Kernel>,
    pub rights: Rights,
    /// Carries the token.
    pub actor: Actor,
    pub holder: String,
}

impl lease::Server for LeaseServer {
    async fn kernel(
        self: Rc<Self>,
        _params: lease::KernelParams,
        mut results: lease::KernelResults,
    ) -> capnp::Result<()> {
        results.get().set_kernel(self.connection.kernel_client(&self.kernel, self.rights, self.actor.clone()));
        Ok(())
    }

    async fn renew(self: Rc<Self>, params: lease::RenewParams, mut results: lease::RenewResults) -> capnp::Result<()> {
        let ttl_ms = params.get()?.get_ttl_ms().max(1);
        let token = self.actor.lease.clone();
        let renewed = self.kernel.lease(self.actor.clone(), self.holder.clone(), token, ttl_ms).await;
        results.get().set_expires_at_ms(renewed.map_err(to_capnp)?.1);
        Ok(())
    }

    async fn release(
        self: Rc<Self>,
        _params: lease::ReleaseParams,
        _results: lease::ReleaseResults,
    ) -> capnp::Result<()> {
        let token = self.actor.lease.clone();
        self.kernel.lease(self.actor.clone(), self.holder.clone(), token, 0).await.map(drop).map_err(to_capnp)
    }
}
