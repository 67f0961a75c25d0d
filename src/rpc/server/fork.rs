//! Kernels created from a kernel: forks and threads.

use super::kernel::KernelServer;
use crate::core::error::Error;
use crate::core::fork::{ForkWay, Forking};
use crate::core::spec_update::SpecUpdate;
use crate::rpc::convert::checkpoint::write_checkpoint;
use crate::rpc::convert::fork::{read_fork_request, write_error};
use crate::rpc::convert::info::write_kernel_info;
use crate::rpc::convert::{read_name, read_text, to_capnp};
use crate::rpc::schema::ryokan_capnp::{fork_result, kernel};
use crate::supervisor::registry::fork;
use crate::supervisor::registry::share::{self, Threading};

impl KernelServer {
    pub(super) async fn create_forks(
        &self,
        params: kernel::ForkParams,
        mut results: kernel::ForkResults,
    ) -> capnp::Result<()> {
        let requested = read_fork_request(params.get()?.get_request()?).map_err(to_capnp)?;
        // No capability of a kernel widens what it may do.
        if requested.update != SpecUpdate::default() {
            let refused = Error::refused("a kernel's capability cannot change the specification of its forks");
            return Err(to_capnp(refused.reason("rights").hint("call Host.forkKernel")));
        }
        self.fork(requested, results.get()).await
    }

    /// Forks the kernel. The children's capabilities have the rights of this one.
    pub(super) async fn fork(&self, wanted: Forking, mut results: fork_result::Builder<'_>) -> capnp::Result<()> {
        let done = fork::fork(&self.connection.supervisor, &self.kernel, wanted, self.actor.clone()).await;
        let done = done.map_err(to_capnp)?;
        if let Some(point) = &done.checkpoint {
            let head = self.kernel.records.head().await.map_err(to_capnp)?.checkpoint;
            write_checkpoint(results.reborrow().init_checkpoint(), point, head == Some(point.id));
        }
        if let Some(way) = &done.way {
            results.set_kind(way.name());
            match way {
                ForkWay::Machine { pause } => {
                    results.set_pause_us(u64::try_from(pause.as_micros()).unwrap_or(u64::MAX))
                }
                ForkWay::Checkpoint { reason } => results.set_reason(reason.as_str()),
            }
        }
        let mut children = results.init_children(done.children.len() as u32);
        for (i, (name, made)) in done.children.iter().enumerate() {
            let mut child = children.reborrow().get(i as u32);
            child.set_name(name.as_str());
            match made {
                Ok(made) => {
                    let mut forked = child.init_forked();
                    // A child's capability has at most the holder's rights on this kernel.
                    let info = self.shown(made, made.info_without_usage());
                    write_kernel_info(forked.reborrow().init_info(), &info, self.rights).map_err(to_capnp)?;
                    forked.set_kernel(self.connection.kernel_client(made, self.rights, self.actor_of_another()));
                }
                Err(error) => write_error(child.init_failed(), error),
            }
        }
        Ok(())
    }

    pub(super) async fn create_thread(
        &self,
        params: kernel::ThreadParams,
        mut results: kernel::ThreadResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let name = read_name(params.get_name(), "name").map_err(to_capnp)?;
        let name = name.parse().map_err(|e: crate::core::name::NameError| to_capnp(Error::invalid(e.to_string())))?;
        let engine = read_name(params.get_engine(), "engine").map_err(to_capnp)?;
        let engine = match engine.as_str() {
            "" => None,
            engine => Some(
                engine
                    .parse()
                    .map_err(|e: crate::core::engine::UnknownEngine| to_capnp(Error::invalid(e.to_string())))?,
            ),
        };
        let key = read_text(params.get_key(), "key").map_err(to_capnp)?;
        let wanted = Threading { name, engine, key };
        let made = share::thread(&self.connection.supervisor, &self.kernel, wanted, self.actor.clone()).await;
        let made = made.map_err(to_capnp)?;
        let mut results = results.get();
        let info = self.shown(&made, made.info_without_usage());
        write_kernel_info(results.reborrow().init_info(), &info, self.rights).map_err(to_capnp)?;
        results.set_kernel(self.connection.kernel_client(&made, self.rights, self.actor_of_another()));
        Ok(())
    }

    /// The same actor at another kernel, where a lease on this kernel is not valid.
    fn actor_of_another(&self) -> crate::supervisor::kernel::command::Actor {
        crate::supervisor::kernel::command::Actor { lease: Vec::new(), ..self.actor.clone() }
    }
}
