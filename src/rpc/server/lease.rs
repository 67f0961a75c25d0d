//! `Lease`: the exclusive right to change a kernel for a limited time.

use std::rc::Rc;

use capnp_rpc::new_client;

use super::Connection;
use super::kernel::KernelServer;
use crate::core::rights::Rights;
use crate::rpc::convert::{read_data, read_name, to_capnp};
use crate::rpc::schema::ryokan_capnp::{kernel, lease};
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::Actor;

/// A held lease. Dropping it does not release the lease; expiry or `release` does.
pub(super) struct LeaseServer {
    pub connection: Rc<Connection>,
    pub kernel: Rc<Kernel>,
    pub rights: Rights,
    /// Carries the token.
    pub actor: Actor,
    pub holder: String,
}

impl KernelServer {
    pub(super) async fn take_lease(
        &self,
        params: kernel::LeaseParams,
        mut results: kernel::LeaseResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let holder = read_name(params.get_holder(), "holder").map_err(to_capnp)?;
        let token = read_data(params.get_token(), "token", 32).map_err(to_capnp)?;
        let ttl_ms = params.get_ttl_ms().max(1);
        let (token, expires) =
            self.kernel.lease(self.actor.clone(), holder.clone(), token, ttl_ms).await.map_err(to_capnp)?;
        let server = LeaseServer {
            connection: Rc::clone(&self.connection),
            kernel: Rc::clone(&self.kernel),
            rights: self.rights,
            actor: Actor { lease: token.clone(), ..self.actor.clone() },
            holder,
        };
        let mut results = results.get();
        results.set_token(&token);
        results.set_expires_at_ms(expires);
        results.set_lease(new_client(server));
        Ok(())
    }
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
