//! The maintenance and audit methods of `Host`.

use std::rc::Rc;

use super::host::HostServer;
use crate::core::audit::AuditHead;
use crate::core::error::{Error, Result};
use crate::core::ids::KernelId;
use crate::core::limits;
use crate::core::upkeep::VerifyEvent;
use crate::rpc::convert::pool::write_pool;
use crate::rpc::convert::upkeep::{
    write_audit_line, write_damage, write_gc_item, write_gc_report, write_verify_report,
};
use crate::rpc::convert::usage::write_disk_usage;
use crate::rpc::convert::{read_text, to_capnp};
use crate::rpc::schema::ryokan_capnp::host;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::command::Actor;
use crate::supervisor::maintenance::{self, GcAsked};

impl HostServer {
    fn host(&self) -> &Rc<Host> {
        self.connection.supervisor.host()
    }

    /// The caller, if it is the daemon's own user: only that user may act on all users' kernels.
    pub(super) async fn operator(&self, action: &str) -> Result<Actor> {
        let actor = self.actor()?;
        if !self.host().environment.system_wide || actor.uid == nix::unistd::geteuid().as_raw() {
            return Ok(actor);
        }
        let error = Error::refused("this concerns everybody's kernels")
            .reason("operator")
            .hint("only the user that the daemon runs as may ask for it");
        self.host().audit_refusal(&actor, action, None, &error).await;
        Err(error)
    }

    /// Lists all pools for the operator, and for other users the pools of workers with their
    /// rights.
    pub(super) fn list_pools(&self, mut results: host::PoolsResults) -> capnp::Result<()> {
        let actor = self.actor().map_err(to_capnp)?;
        let workers = self.connection.supervisor.workers();
        let mut pools = workers.pool.infos(workers.pressure.is_on());
        if self.host().environment.system_wide && actor.uid != nix::unistd::geteuid().as_raw() {
            pools.retain(|pool| pool.uid == actor.uid);
        }
        let mut list = results.get().init_pools(pools.len() as u32);
        for (i, pool) in pools.iter().enumerate() {
            write_pool(list.reborrow().get(i as u32), pool);
        }
        Ok(())
    }

    pub(super) async fn collect(&self, params: host::GcParams, mut results: host::GcResults) -> capnp::Result<()> {
        let actor = self.operator("host.gc").await.map_err(to_capnp)?;
        let params = params.get()?;
        let sink = params.get_sink()?;
        let asked = GcAsked { dry_run: params.get_dry_run(), copy_most: u64::MAX, in_background: false };
        let mut refused = None;
        let done = maintenance::collect(&self.connection.supervisor, asked, &actor, async |item| {
            let mut request = sink.next_request();
            write_gc_item(request.get().init_item(), &item);
            request.send().await.map_err(|error| {
                refused = Some(error);
                Error::unavailable("the client takes no more")
            })
        });
        let done = done.await;
        if let Some(error) = refused {
            return Err(error);
        }
        write_gc_report(results.get().init_report(), &done.map_err(to_capnp)?);
        Ok(())
    }

    pub(super) async fn verify_all(
        &self,
        params: host::VerifyParams,
        mut results: host::VerifyResults,
    ) -> capnp::Result<()> {
        let actor = self.operator("host.verify").await.map_err(to_capnp)?;
        let sink = params.get()?.get_sink()?;
        let mut refused = None;
        let done = maintenance::verify(&self.connection.supervisor, &actor, async |reported| {
            let sent = match reported {
                VerifyEvent::Progress(at) => {
                    let mut request = sink.progress_request();
                    request.get().set_packs(at.packs);
                    request.get().set_of_packs(at.of_packs);
                    request.get().set_bytes(at.bytes);
                    request.send().await
                }
                VerifyEvent::Damage(damage) => {
                    let mut request = sink.damage_request();
                    write_damage(request.get().init_damage(), &damage);
                    request.send().await
                }
            };
            sent.map_err(|error| {
                refused = Some(error);
                Error::unavailable("the client takes no more")
            })
        });
        let done = done.await;
        if let Some(error) = refused {
            return Err(error);
        }
        write_verify_report(results.get().init_report(), &done.map_err(to_capnp)?);
        Ok(())
    }

    pub(super) async fn measure_disk(
        &self,
        params: host::DiskUsageParams,
        mut results: host::DiskUsageResults,
    ) -> capnp::Result<()> {
        let actor = self.actor().map_err(to_capnp)?;
        let name = read_text(params.get()?.get_kernel(), "kernel").map_err(to_capnp)?;
        let is_operator = !self.host().environment.system_wide || actor.uid == nix::unistd::geteuid().as_raw();
        let usage = maintenance::disk_usage(&self.connection.supervisor, actor.uid, is_operator, &name).await;
        write_disk_usage(results.get().init_usage(), &usage.map_err(to_capnp)?);
        Ok(())
    }

    pub(super) async fn stream_audit(&self, params: host::AuditParams) -> capnp::Result<()> {
        let actor = self.actor().map_err(to_capnp)?;
        let params = params.get()?;
        let name = read_text(params.get_kernel(), "kernel").map_err(to_capnp)?;
        let kernel = match name.as_str() {
            "" => None,
            name => match self.connection.supervisor.find(actor.uid, name) {
                Ok(kernel) => Some(kernel.id.to_string()),
                // A removed kernel still has its lines.
                Err(_) if KernelId::is_beginning(name) => Some(name.to_owned()),
                Err(error) => {
                    let hint =
                        "of one that was removed give the beginning of its id, as the lines of `ryokan audit` show it";
                    return Err(to_capnp(error.hint(hint)));
                }
            },
        };
        let (sink, mut at) = (params.get_sink()?, params.get_since());
        let mut left = if params.get_limit() == 0 { usize::MAX } else { params.get_limit() as usize };
        while left > 0 {
            let most = left.min(limits::PAGE_ROWS);
            let page = self.host().audit_lines(actor.uid, kernel.clone(), at, most).await.map_err(to_capnp)?;
            let Some(last) = page.last() else { break };
            (at, left) = (last.sequence, left - page.len());
            for line in &page {
                let mut request = sink.next_request();
                write_audit_line(request.get().init_line(), line);
                request.send().await?;
            }
        }
        Ok(())
    }

    pub(super) async fn verify_audit_log(
        &self,
        params: host::VerifyAuditParams,
        mut results: host::VerifyAuditResults,
    ) -> capnp::Result<()> {
        self.operator("host.verify_audit").await.map_err(to_capnp)?;
        let known = read_text(params.get()?.get_known(), "known").map_err(to_capnp)?;
        let known: Option<AuditHead> = match known.as_str() {
            "" => None,
            text => Some(
                text.parse()
                    .map_err(|error: crate::core::audit::ParseHeadError| to_capnp(Error::invalid(error.to_string())))?,
            ),
        };
        let proved = self.connection.supervisor.verify_audit(known).await.map_err(to_capnp)?;
        let mut results = results.get();
        match proved {
            Ok(head) => results.set_head(head.to_string()),
            Err(broken) => {
                results.set_broken_at(broken.sequence);
                results.set_why(broken.why.as_str());
                results.set_gap(broken.is_gap);
            }
        }
        Ok(())
    }
}
