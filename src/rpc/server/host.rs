//! `Host`: the bootstrap of the control socket.

use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;

use capnp_rpc::new_client;
use futures::StreamExt as _;

use super::Connection;
use super::groups::GroupsServer;
use super::images::ImagesServer;
use super::kernel::KernelServer;
use super::portable::BundleWriterServer;
use super::provenance::ProvenanceServer;
use super::sinks::Subscription;
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::info::Event;
use crate::core::limits;
use crate::core::name::{KernelName, NameError};
use crate::core::rights::{Right, Rights};
use crate::core::spec::KernelSpec;
use crate::link::message_limit::MaxWords;
use crate::rpc::convert::fork::read_fork_request;
use crate::rpc::convert::info::{read_kernel_filter, write_ability, write_host_info, write_kernel_info};
use crate::rpc::convert::spec::{read_spec_request, read_spec_update};
use crate::rpc::convert::{read_name, read_text, to_capnp, write_text_list};
use crate::rpc::schema::ryokan_capnp::{WIRE_VERSION, host};
use crate::supervisor::freeze;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::{Actor, Change};
use crate::supervisor::maintenance::refresh_figures;
use crate::supervisor::registry::bundle_io::Import;

/// One client's `Host` capability.
pub(super) struct HostServer {
    pub connection: Rc<Connection>,
    /// The client's own name, once it has said hello.
    pub client: RefCell<Option<String>>,
    /// Limit of its messages' size: small until it has said hello.
    pub most: MaxWords,
}

impl HostServer {
    pub(super) fn actor(&self) -> Result<Actor> {
        match &*self.client.borrow() {
            Some(client) => Ok(Actor { uid: self.connection.uid, client: client.clone(), lease: Vec::new() }),
            None => Err(Error::refused("say hello first")
                .reason("hello")
                .hint("call Host.hello with the wireVersion of the schema")),
        }
    }
}

impl HostServer {
    /// Creates a kernel that ends with this connection.
    ///
    /// Runs in its own task, so that a kernel is also removed if the connection ends during its
    /// creation.
    async fn create_ephemeral(
        &self,
        spec: KernelSpec,
        from_dir: Option<PathBuf>,
        key: String,
        actor: Actor,
    ) -> Result<Rc<Kernel>> {
        let connection = Rc::clone(&self.connection);
        let making = tokio::task::spawn_local(async move {
            let made = connection.supervisor.create(spec, from_dir.as_deref(), &key, &actor).await?;
            connection.hold(&made, actor);
            Ok(made)
        });
        making.await.map_err(|error| Error::internal(error.to_string()))?
    }
}

impl host::Server for HostServer {
    async fn hello(self: Rc<Self>, params: host::HelloParams, mut results: host::HelloResults) -> capnp::Result<()> {
        let params = params.get()?;
        let asked = params.get_wire_version();
        if asked == 0 || asked > WIRE_VERSION {
            let message = format!("this daemon speaks wire version {WIRE_VERSION}, the client {asked}");
            let error = Error::unsupported(message).reason("wire_version");
            return Err(to_capnp(error.hint(if asked == 0 {
                "state the version of the schema"
            } else {
                "update ryokand"
            })));
        }
        let client = read_text(params.get_client(), "client").map_err(to_capnp)?;
        *self.client.borrow_mut() = Some(client.chars().filter(|c| !c.is_control()).take(100).collect());
        self.most.set(limits::MESSAGE_WORDS);
        let mut results = results.get();
        results.set_wire_version(WIRE_VERSION);
        write_host_info(results.init_host(), &self.connection.supervisor.host().info());
        Ok(())
    }

    async fn create_kernel(
        self: Rc<Self>,
        params: host::CreateKernelParams,
        mut results: host::CreateKernelResults,
    ) -> capnp::Result<()> {
        let actor = self.actor().map_err(to_capnp)?;
        let params = params.get()?;
        let request = read_spec_request(params.get_spec()?).map_err(to_capnp)?;
        let key = read_text(params.get_key(), "key").map_err(to_capnp)?;
        let supervisor = &self.connection.supervisor;
        let spec = request.fill(&supervisor.host().config.defaults.spec());
        let made = match spec.ephemeral {
            false => supervisor.create(spec, request.from_dir.as_deref(), &key, &actor).await,
            true => self.create_ephemeral(spec, request.from_dir, key, actor.clone()).await,
        };
        if let Err(error) = &made {
            supervisor.host().audit_refusal(&actor, "kernel.create", None, error).await;
        }
        let made = made.map_err(to_capnp)?;
        let mut results = results.get();
        write_kernel_info(results.reborrow().init_info(), &made.info_without_usage(), Rights::ALL).map_err(to_capnp)?;
        results.set_kernel(self.connection.kernel_client(&made, Rights::ALL, actor));
        Ok(())
    }

    async fn open_kernel(
        self: Rc<Self>,
        params: host::OpenKernelParams,
        mut results: host::OpenKernelResults,
    ) -> capnp::Result<()> {
        let actor = self.actor().map_err(to_capnp)?;
        let name = read_text(params.get()?.get_name(), "name").map_err(to_capnp)?;
        let found = self.connection.supervisor.find(actor.uid, &name);
        let kernel = match found {
            Err(error) if error.code == ErrorCode::NotFound => {
                return Err(to_capnp(match freeze::exists(&self.connection.supervisor, actor.uid, &name).await {
                    true => Error::unsupported(format!("{name} is a group, and this is for kernels"))
                        .reason("group")
                        .hint("groups have freeze, lock, log, restore, undo, export and import"),
                    false => error,
                }));
            }
            found => found.map_err(to_capnp)?,
        };
        let mut results = results.get();
        write_kernel_info(results.reborrow().init_info(), &kernel.info_without_usage(), Rights::ALL)
            .map_err(to_capnp)?;
        results.set_kernel(self.connection.kernel_client(&kernel, Rights::ALL, actor));
        Ok(())
    }

    async fn list_kernels(
        self: Rc<Self>,
        params: host::ListKernelsParams,
        _results: host::ListKernelsResults,
    ) -> capnp::Result<()> {
        let actor = self.actor().map_err(to_capnp)?;
        let params = params.get()?;
        let filter = read_kernel_filter(params.get_filter()?).map_err(to_capnp)?;
        let sink = params.get_sink()?;
        refresh_figures(&self.connection.supervisor);
        let mut kernels = self.connection.supervisor.visible(actor.uid);
        kernels.retain(|kernel| filter.admits(&kernel.spec().name, &kernel.spec().labels, kernel.view().state.name()));
        // Several live workers are queried at once, since one of them may be slow to answer.
        let infos = kernels.into_iter().map(|kernel| async move { kernel.info().await });
        let mut infos = futures::stream::iter(infos).buffered(limits::USAGE_QUERIES);
        while let Some(info) = infos.next().await {
            let mut request = sink.next_request();
            write_kernel_info(request.get().init_info(), &info, Rights::ALL).map_err(to_capnp)?;
            request.send().await?;
        }
        Ok(())
    }

    async fn remove_kernel(
        self: Rc<Self>,
        params: host::RemoveKernelParams,
        _results: host::RemoveKernelResults,
    ) -> capnp::Result<()> {
        let actor = self.actor().map_err(to_capnp)?;
        let params = params.get()?;
        let name = read_text(params.get_name(), "name").map_err(to_capnp)?;
        let supervisor = &self.connection.supervisor;
        let kernel = supervisor.find(actor.uid, &name).map_err(to_capnp)?;
        let change = Change { actor: actor.clone(), expected_version: params.get_expected_version() };
        let removed = supervisor.remove(&kernel, change, params.get_with_threads()).await;
        if let Err(error) = &removed {
            supervisor.host().audit_refusal(&actor, "kernel.remove", Some(&kernel), error).await;
        }
        removed.map_err(to_capnp)
    }

    async fn rename_kernel(
        self: Rc<Self>,
        params: host::RenameKernelParams,
        mut results: host::RenameKernelResults,
    ) -> capnp::Result<()> {
        let actor = self.actor().map_err(to_capnp)?;
        let params = params.get()?;
        let name = read_text(params.get_name(), "name").map_err(to_capnp)?;
        let to = read_name(params.get_to(), "to").map_err(to_capnp)?;
        let to: KernelName = to.parse().map_err(|error: NameError| to_capnp(Error::invalid(error.to_string())))?;
        let supervisor = &self.connection.supervisor;
        let kernel = supervisor.find(actor.uid, &name).map_err(to_capnp)?;
        let change = Change { actor: actor.clone(), expected_version: params.get_expected_version() };
        let renamed = match freeze::exists(supervisor, actor.uid, to.as_str()).await {
            true => Err(Error::already_exists(format!("there is a group {to}")).hint("take another name")),
            false => supervisor.rename(&kernel, to, change).await,
        };
        if let Err(error) = &renamed {
            supervisor.host().audit_refusal(&actor, "kernel.rename", Some(&kernel), error).await;
        }
        results.get().set_version(renamed.map_err(to_capnp)?);
        Ok(())
    }

    async fn update_kernel(
        self: Rc<Self>,
        params: host::UpdateKernelParams,
        mut results: host::UpdateKernelResults,
    ) -> capnp::Result<()> {
        let actor = self.actor().map_err(to_capnp)?;
        let params = params.get()?;
        let name = read_text(params.get_name(), "name").map_err(to_capnp)?;
        let update = read_spec_update(params.get_change()?).map_err(to_capnp)?;
        let supervisor = &self.connection.supervisor;
        let kernel = supervisor.find(actor.uid, &name).map_err(to_capnp)?;
        let change = Change { actor: actor.clone(), expected_version: params.get_expected_version() };
        let updated = supervisor.update(&kernel, update, change).await;
        if let Err(error) = &updated {
            supervisor.host().audit_refusal(&actor, "kernel.update", Some(&kernel), error).await;
        }
        results.get().set_version(updated.map_err(to_capnp)?);
        let waiting = kernel.at_next_start();
        let list = results.get().init_at_next_start(u32::try_from(waiting.len()).unwrap_or(u32::MAX));
        write_text_list(list, &waiting);
        Ok(())
    }

    async fn fork_kernel(
        self: Rc<Self>,
        params: host::ForkKernelParams,
        mut results: host::ForkKernelResults,
    ) -> capnp::Result<()> {
        let actor = self.actor().map_err(to_capnp)?;
        let params = params.get()?;
        let name = read_text(params.get_name(), "name").map_err(to_capnp)?;
        let requested = read_fork_request(params.get_request()?).map_err(to_capnp)?;
        let kernel = self.connection.supervisor.find(actor.uid, &name).map_err(to_capnp)?;
        let server = KernelServer { connection: Rc::clone(&self.connection), kernel, rights: Rights::ALL, actor };
        server.audited("kernel.fork", Right::Fork, server.fork(requested, results.get())).await
    }

    async fn import_kernel(
        self: Rc<Self>,
        params: host::ImportKernelParams,
        mut results: host::ImportKernelResults,
    ) -> capnp::Result<()> {
        let actor = self.actor().map_err(to_capnp)?;
        let params = params.get()?;
        let name = read_name(params.get_name(), "name").map_err(to_capnp)?;
        let import = Import::begin(&self.connection.supervisor, &actor).await.map_err(to_capnp)?;
        let server = BundleWriterServer {
            connection: Rc::clone(&self.connection),
            actor,
            name,
            without_host: params.get_without_host(),
            import: tokio::sync::Mutex::new(Some(import)),
        };
        results.get().set_file(new_client(server));
        Ok(())
    }

    async fn events(self: Rc<Self>, params: host::EventsParams, mut results: host::EventsResults) -> capnp::Result<()> {
        let actor = self.actor().map_err(to_capnp)?;
        let params = params.get()?;
        let host = self.connection.supervisor.host();
        let own = host.environment.system_wide.then(|| format!("{}/", actor.uid));
        let subscription = Subscription::start(
            &self.connection,
            host.events.follow(params.get_since()),
            params.get_sink()?,
            move |event: &Event| {
                match &own {
                    // Events of the host are visible to all users, those of a kernel to its owner.
                    Some(own) => event.kernel.is_empty() || event.kernel.starts_with(own.as_str()),
                    None => true,
                }
            },
        );
        results.get().set_subscription(new_client(subscription.map_err(to_capnp)?));
        Ok(())
    }

    async fn abilities(
        self: Rc<Self>,
        _params: host::AbilitiesParams,
        mut results: host::AbilitiesResults,
    ) -> capnp::Result<()> {
        let (supervisor, actor) = (&self.connection.supervisor, self.actor().map_err(to_capnp)?);
        let mut abilities = supervisor.abilities().await.map_err(to_capnp)?;
        abilities.extend(freeze::no_cow(supervisor, actor.uid).await.map_err(to_capnp)?);
        let mut list = results.get().init_abilities(abilities.len() as u32);
        for (i, ability) in abilities.iter().enumerate() {
            write_ability(list.reborrow().get(i as u32), ability);
        }
        Ok(())
    }

    async fn pools(self: Rc<Self>, _params: host::PoolsParams, results: host::PoolsResults) -> capnp::Result<()> {
        self.list_pools(results)
    }

    async fn teleport(
        self: Rc<Self>,
        params: host::TeleportParams,
        results: host::TeleportResults,
    ) -> capnp::Result<()> {
        self.move_kernel(params, results).await
    }

    async fn abort_teleport(
        self: Rc<Self>,
        params: host::AbortTeleportParams,
        _results: host::AbortTeleportResults,
    ) -> capnp::Result<()> {
        self.abort_move(params).await
    }

    async fn handovers(
        self: Rc<Self>,
        _params: host::HandoversParams,
        results: host::HandoversResults,
    ) -> capnp::Result<()> {
        self.list_handovers(results).await
    }

    async fn resolve_handover(
        self: Rc<Self>,
        params: host::ResolveHandoverParams,
        _results: host::ResolveHandoverResults,
    ) -> capnp::Result<()> {
        self.resolve(params).await
    }

    async fn handover_stream(
        self: Rc<Self>,
        _params: host::HandoverStreamParams,
        results: host::HandoverStreamResults,
    ) -> capnp::Result<()> {
        self.open_stream(results)
    }

    async fn groups(
        self: Rc<Self>,
        _params: host::GroupsParams,
        mut results: host::GroupsResults,
    ) -> capnp::Result<()> {
        let (connection, actor) = (Rc::clone(&self.connection), self.actor().map_err(to_capnp)?);
        results.get().set_groups(new_client(GroupsServer { connection, actor }));
        Ok(())
    }

    async fn provenance(
        self: Rc<Self>,
        _params: host::ProvenanceParams,
        mut results: host::ProvenanceResults,
    ) -> capnp::Result<()> {
        let (connection, actor) = (Rc::clone(&self.connection), self.actor().map_err(to_capnp)?);
        results.get().set_provenance(new_client(ProvenanceServer { connection, actor }));
        Ok(())
    }

    async fn images(
        self: Rc<Self>,
        _params: host::ImagesParams,
        mut results: host::ImagesResults,
    ) -> capnp::Result<()> {
        let (connection, actor) = (Rc::clone(&self.connection), self.operator("images").await.map_err(to_capnp)?);
        results.get().set_images(new_client(ImagesServer { connection, actor }));
        Ok(())
    }

    async fn ping(self: Rc<Self>, _params: host::PingParams, mut results: host::PingResults) -> capnp::Result<()> {
        self.actor().map_err(to_capnp)?;
        let host = self.connection.supervisor.host();
        results.get().set_host_id(host.id().to_string());
        results.get().set_server_time_ms(host.now_ms());
        Ok(())
    }

    async fn gc(self: Rc<Self>, params: host::GcParams, results: host::GcResults) -> capnp::Result<()> {
        self.collect(params, results).await
    }

    async fn verify(self: Rc<Self>, params: host::VerifyParams, results: host::VerifyResults) -> capnp::Result<()> {
        self.verify_all(params, results).await
    }

    async fn audit(self: Rc<Self>, params: host::AuditParams, _results: host::AuditResults) -> capnp::Result<()> {
        self.stream_audit(params).await
    }

    async fn disk_usage(
        self: Rc<Self>,
        params: host::DiskUsageParams,
        results: host::DiskUsageResults,
    ) -> capnp::Result<()> {
        self.measure_disk(params, results).await
    }

    async fn verify_audit(
        self: Rc<Self>,
        params: host::VerifyAuditParams,
        results: host::VerifyAuditResults,
    ) -> capnp::Result<()> {
        self.verify_audit_log(params, results).await
    }
}
