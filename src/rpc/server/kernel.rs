//! `Kernel`: the capability of one kernel, possibly with fewer rights than its owner has.

use std::rc::Rc;

use capnp_rpc::new_client;

use super::blob::{BlobReaderServer, BlobWriterServer};
use super::execution::ExecutionServer;
use super::files::FilesServer;
use super::sinks::{Subscription, pump};
use super::{Connection, require};
use crate::core::error::{Error, Result};
use crate::core::exec::{ExecRequest, ExecStatus, Work};
use crate::core::ids::{Digest, ExecId};
use crate::core::info::{Event, Job};
use crate::core::limits;
use crate::core::rights::{Right, Rights};
use crate::rpc::convert::exec::{read_exec_request, write_exec_result};
use crate::rpc::convert::info::write_kernel_info;
use crate::rpc::convert::listing::{write_jobs, write_missed, write_mounts, write_tools, write_vars};
use crate::rpc::convert::mcp::write_mcp_info;
use crate::rpc::convert::rights::read_rights;
use crate::rpc::convert::value::{read_value, write_value};
use crate::rpc::convert::{read_data, read_name, read_text, to_capnp, write_text_list};
use crate::rpc::schema::ryokan_capnp::{execution, kernel};
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::{Actor, Change, StartMode, StopMode};
use crate::supervisor::kernel::engine_state;
use crate::supervisor::kernel::execution::Execution;
use crate::supervisor::maintenance::refresh_figures;

/// A client's capability for one kernel.
pub(super) struct KernelServer {
    pub connection: Rc<Connection>,
    pub kernel: Rc<Kernel>,
    pub rights: Rights,
    pub actor: Actor,
}

impl KernelServer {
    pub(super) fn may(&self, right: Right) -> capnp::Result<()> {
        require(self.rights, right).map_err(to_capnp)
    }

    pub(super) fn change(&self, expected_version: u64) -> Change {
        Change { actor: self.actor.clone(), expected_version }
    }

    async fn run_code(&self, request: ExecRequest) -> capnp::Result<Rc<Execution>> {
        self.kernel.run(request, self.actor.clone()).await.map_err(to_capnp)
    }

    pub(super) fn execution_client(&self, execution: Rc<Execution>) -> execution::Client {
        let actor = self.actor.clone();
        new_client(ExecutionServer { kernel: Rc::clone(&self.kernel), execution, rights: self.rights, actor })
    }

    fn digest(text: capnp::Result<capnp::text::Reader<'_>>) -> Result<Digest> {
        read_text(text, "hash")?.parse().map_err(|error| Error::invalid(format!("{error}")))
    }
}

/// Methods that check a right and delegate the work to another file.
macro_rules! forward {
    ($($right:ident $method:ident($p:ident: $Params:ident, $r:ident: $Results:ident) = $done_by:ident($($given:ident),*);)*) => {$(
        async fn $method(self: Rc<Self>, $p: kernel::$Params, $r: kernel::$Results) -> capnp::Result<()> {
            self.may(Right::$right)?;
            KernelServer::$done_by(&self, $($given),*).await
        }
    )*};
}

/// Methods that change something: their refusals are audited, too.
macro_rules! audited {
    ($($deed:literal: $right:ident $method:ident($p:ident: $Params:ident, $r:ident: $Results:ident) = $done_by:ident($($given:ident),*);)*) => {$(
        async fn $method(self: Rc<Self>, $p: kernel::$Params, $r: kernel::$Results) -> capnp::Result<()> {
            self.audited($deed, Right::$right, KernelServer::$done_by(&self, $($given),*)).await
        }
    )*};
}

impl kernel::Server for KernelServer {
    forward! {
        Read find_checkpoint(params: FindCheckpointParams, results: FindCheckpointResults) = look_up_checkpoint(params, results);
        Read diff(params: DiffParams, _results: DiffResults) = stream_diff(params);
        Read diff_text(params: DiffTextParams, _results: DiffTextResults) = stream_text_diff(params);
        Read journal(params: JournalParams, _results: JournalResults) = stream_journal(params);
        Write message(params: MessageParams, results: MessageResults) = add_message(params, results);
        Read complete(params: CompleteParams, results: CompleteResults) = complete_code(params, results);
        Read check(params: CheckParams, results: CheckResults) = check_code(params, results);
        Read processes(_params: ProcessesParams, results: ProcessesResults) = list_processes(results);
        Execute resize_terminal(params: ResizeTerminalParams, _results: ResizeTerminalResults) = set_terminal_size(params);
        Read workflow(_params: WorkflowParams, results: WorkflowResults) = read_workflow(results);
        Read decisions(params: DecisionsParams, _results: DecisionsResults) = stream_decisions(params);
        Read artifacts(params: ArtifactsParams, _results: ArtifactsResults) = stream_artifacts(params);
        Read artifact(params: ArtifactParams, results: ArtifactResults) = open_artifact(params, results);
    }

    audited! {
        "kernel.spawn": Execute spawn(params: SpawnParams, results: SpawnResults) = spawn_process(params, results);
        "kernel.signal": Execute signal_process(params: SignalProcessParams, _results: SignalProcessResults) = send_signal(params);
        "kernel.open_port": Execute open_port(params: OpenPortParams, results: OpenPortResults) = open_kernel_port(params, results);
        "checkpoint.create": Checkpoint checkpoint(params: CheckpointParams, results: CheckpointResults) = take_checkpoint(params, results);
        "checkpoint.restore": Restore restore_checkpoint(params: RestoreCheckpointParams, results: RestoreCheckpointResults) = restore_to(params, results);
        "checkpoint.restore": Restore undo(params: UndoParams, results: UndoResults) = undo_restore(params, results);
        "kernel.fork": Fork fork(params: ForkParams, results: ForkResults) = create_forks(params, results);
        "kernel.thread": Fork thread(params: ThreadParams, results: ThreadResults) = create_thread(params, results);
        "checkpoint.pin": Checkpoint pin_checkpoint(params: PinCheckpointParams, _results: PinCheckpointResults) = pin(params);
        "kernel.export": Teleport export(params: ExportParams, results: ExportResults) = export_file(params, results);
        "kernel.suspend": Admin suspend(params: SuspendParams, _results: SuspendResults) = suspend_worker(params);
        "kernel.resume": Admin resume(_params: ResumeParams, _results: ResumeResults) = resume_worker();
        "kernel.archive": Admin archive(params: ArchiveParams, results: ArchiveResults) = archive(params, results);
        "kernel.unarchive": Admin unarchive(params: UnarchiveParams, results: UnarchiveResults) = unarchive(params, results);
        "kernel.lease": Write lease(params: LeaseParams, results: LeaseResults) = take_lease(params, results);
        "step.begin": Write begin_step(params: BeginStepParams, results: BeginStepResults) = begin_step(params, results);
        "step.complete": Write complete_step(params: CompleteStepParams, results: CompleteStepResults) = complete_step(params, results);
        "agent.hand_over": Write hand_over(params: HandOverParams, results: HandOverResults) = hand_off(params, results);
        "decision.open": Write open_decision(params: OpenDecisionParams, results: OpenDecisionResults) = open_decision(params, results);
        "decision.lock": Write lock_decision(params: LockDecisionParams, results: LockDecisionResults) = lock_decision(params, results);
        "decision.supersede": Write supersede_decision(params: SupersedeDecisionParams, results: SupersedeDecisionResults) = supersede_decision(params, results);
        "artifact.put": Write put_artifact(params: PutArtifactParams, results: PutArtifactResults) = put_artifact(params, results);
        "artifact.revert": Write revert_artifact(params: RevertArtifactParams, results: RevertArtifactResults) = revert_artifact(params, results);
        "checkpoint.remove": Admin remove_checkpoint(params: RemoveCheckpointParams, results: RemoveCheckpointResults) = remove_checkpoint(params, results);
        "kernel.retention": Admin set_retention(params: SetRetentionParams, results: SetRetentionResults) = set_retention(params, results);
    }

    async fn execute(
        self: Rc<Self>,
        params: kernel::ExecuteParams,
        mut results: kernel::ExecuteResults,
    ) -> capnp::Result<()> {
        self.audited("kernel.run", Right::Execute, async {
            let code = read_text(params.get()?.get_code(), "code").map_err(to_capnp)?;
            results.get().set_exec_id(self.run_code(ExecRequest::code(code)).await?.id.0);
            Ok(())
        })
        .await
    }

    async fn execute_streaming(
        self: Rc<Self>,
        params: kernel::ExecuteStreamingParams,
        mut results: kernel::ExecuteStreamingResults,
    ) -> capnp::Result<()> {
        self.audited("kernel.run", Right::Execute, async {
            let params = params.get()?;
            let code = read_text(params.get_code(), "code").map_err(to_capnp)?;
            let callback = params.get_callback()?;
            let execution = self.run_code(ExecRequest::code(code)).await?;
            results.get().set_exec_id(execution.id.0);
            tokio::task::spawn_local(async move {
                if let Err(error) = pump(execution.id, execution.output.reader(0), callback).await {
                    tracing::debug!(exec = %execution.id, %error, "a client stopped listening");
                }
            });
            Ok(())
        })
        .await
    }

    async fn interrupt(
        self: Rc<Self>,
        params: kernel::InterruptParams,
        mut results: kernel::InterruptResults,
    ) -> capnp::Result<()> {
        self.may(Right::Execute)?;
        let ended = self.kernel.interrupt(ExecId(params.get()?.get_exec_id()), self.actor.clone()).await;
        results.get().set_ended(ended.map_err(to_capnp)?.map_or("", ExecStatus::name));
        Ok(())
    }

    async fn get_var(
        self: Rc<Self>,
        params: kernel::GetVarParams,
        mut results: kernel::GetVarResults,
    ) -> capnp::Result<()> {
        self.may(Right::Read)?;
        let name = read_name(params.get()?.get_name(), "name").map_err(to_capnp)?;
        let value = self.kernel.with_worker(None, move |link| async move { link.get_var(&name).await }).await;
        write_value(results.get().init_value(), &value.map_err(to_capnp)?).map_err(to_capnp)
    }

    async fn set_var(
        self: Rc<Self>,
        params: kernel::SetVarParams,
        _results: kernel::SetVarResults,
    ) -> capnp::Result<()> {
        self.audited("kernel.set_var", Right::Write, async {
            let before = self.kernel.view().version;
            let params = params.get()?;
            let name = read_name(params.get_name(), "name").map_err(to_capnp)?;
            let named = name.clone();
            let value = read_value(params.get_value()?).map_err(to_capnp)?;
            let change = Some((self.change(params.get_expected_version()), format!("set {name}")));
            let set = self.kernel.with_worker(change, move |link| async move { link.set_var(&name, &value).await });
            set.await.map_err(to_capnp)?;
            self.audit_done("kernel.set_var", before, named).await;
            Ok(())
        })
        .await
    }

    async fn list_vars(
        self: Rc<Self>,
        _params: kernel::ListVarsParams,
        mut results: kernel::ListVarsResults,
    ) -> capnp::Result<()> {
        self.may(Right::Read)?;
        let vars = self.kernel.with_worker(None, |link| async move { link.vars().await }).await.map_err(to_capnp)?;
        let names: Vec<&str> = vars.iter().map(|var| var.name.as_str()).collect();
        write_text_list(results.get().init_names(names.len() as u32), &names);
        Ok(())
    }

    async fn mount(self: Rc<Self>, params: kernel::MountParams, _results: kernel::MountResults) -> capnp::Result<()> {
        self.audited("kernel.mount", Right::Admin, self.add_mount(params)).await
    }

    async fn unmount(
        self: Rc<Self>,
        params: kernel::UnmountParams,
        _results: kernel::UnmountResults,
    ) -> capnp::Result<()> {
        self.audited("kernel.unmount", Right::Admin, self.remove_mount(params)).await
    }

    async fn list_mounts(
        self: Rc<Self>,
        _params: kernel::ListMountsParams,
        mut results: kernel::ListMountsResults,
    ) -> capnp::Result<()> {
        self.may(Right::Read)?;
        let mounts = self.kernel.mounts().await.map_err(to_capnp)?;
        write_mounts(results.get().init_mounts(mounts.len() as u32), &mounts);
        Ok(())
    }

    async fn list_tools(
        self: Rc<Self>,
        _params: kernel::ListToolsParams,
        mut results: kernel::ListToolsResults,
    ) -> capnp::Result<()> {
        self.may(Right::Read)?;
        let mut tools =
            self.kernel.with_worker(None, |link| async move { link.tools().await }).await.map_err(to_capnp)?;
        let (_, mcp) = self.kernel.mcp_servers().await.map_err(to_capnp)?;
        tools.extend(mcp);
        write_tools(results.get().init_tools(tools.len() as u32), &tools);
        Ok(())
    }

    async fn call_tool(
        self: Rc<Self>,
        params: kernel::CallToolParams,
        mut results: kernel::CallToolResults,
    ) -> capnp::Result<()> {
        self.audited("kernel.run", Right::Execute, async {
            let params = params.get()?;
            let name = read_name(params.get_name(), "name").map_err(to_capnp)?;
            let args = read_value(params.get_args()?).map_err(to_capnp)?;
            let request = ExecRequest { what: Work::Call { name, args }, ..ExecRequest::default() };
            let result = self.run_code(request).await?.result().await.map_err(to_capnp)?;
            write_exec_result(results.get().init_result(), &result).map_err(to_capnp)
        })
        .await
    }

    async fn register_mcp(
        self: Rc<Self>,
        params: kernel::RegisterMcpParams,
        _results: kernel::RegisterMcpResults,
    ) -> capnp::Result<()> {
        self.audited("kernel.mcp_register", Right::Admin, self.add_mcp(params)).await
    }

    async fn unregister_mcp(
        self: Rc<Self>,
        params: kernel::UnregisterMcpParams,
        _results: kernel::UnregisterMcpResults,
    ) -> capnp::Result<()> {
        self.audited("kernel.mcp_unregister", Right::Admin, self.remove_mcp(params)).await
    }

    async fn list_mcp_servers(
        self: Rc<Self>,
        _params: kernel::ListMcpServersParams,
        mut results: kernel::ListMcpServersResults,
    ) -> capnp::Result<()> {
        self.may(Right::Read)?;
        let (servers, _) = self.kernel.mcp_servers().await.map_err(to_capnp)?;
        let mut list = results.get().init_servers(servers.len() as u32);
        for (i, server) in servers.iter().enumerate() {
            write_mcp_info(list.reborrow().get(i as u32), server);
        }
        Ok(())
    }

    async fn snapshot(
        self: Rc<Self>,
        _params: kernel::SnapshotParams,
        mut results: kernel::SnapshotResults,
    ) -> capnp::Result<()> {
        self.audited("kernel.snapshot", Right::Checkpoint, async {
            let before = self.kernel.view().version;
            let taken = engine_state::take(&self.kernel).await.map_err(to_capnp)?;
            let mut results = results.get();
            let bytes = taken.data.len();
            results.set_data(&taken.data);
            write_missed(results.init_missed(taken.missed.len() as u32), &taken.missed);
            self.audit_done("kernel.snapshot", before, format!("{bytes} bytes")).await;
            Ok(())
        })
        .await
    }

    async fn restore(
        self: Rc<Self>,
        params: kernel::RestoreParams,
        mut results: kernel::RestoreResults,
    ) -> capnp::Result<()> {
        self.audited("kernel.restore_state", Right::Restore, async {
            let before = self.kernel.view().version;
            let params = params.get()?;
            let data = read_data(params.get_data(), "data", limits::STATE_INLINE_BYTES).map_err(to_capnp)?;
            let change = self.change(params.get_expected_version());
            let missed = engine_state::put_back(&self.kernel, change, &data).await.map_err(to_capnp)?;
            write_missed(results.get().init_missed(missed.len() as u32), &missed);
            self.audit_done("kernel.restore_state", before, blake3::hash(&data).to_string()).await;
            Ok(())
        })
        .await
    }

    async fn read_blob(
        self: Rc<Self>,
        params: kernel::ReadBlobParams,
        mut results: kernel::ReadBlobResults,
    ) -> capnp::Result<()> {
        self.may(Right::Read)?;
        let digest = Self::digest(params.get()?.get_hash()).map_err(to_capnp)?;
        let store = self.kernel.records.readable(digest).await.map_err(to_capnp)?;
        let data = store.get(digest, limits::BLOB_INLINE_BYTES as u64).await.map_err(|error| to_capnp(error.into()))?;
        results.get().set_data(&data);
        Ok(())
    }

    async fn write_blob(
        self: Rc<Self>,
        params: kernel::WriteBlobParams,
        mut results: kernel::WriteBlobResults,
    ) -> capnp::Result<()> {
        self.may(Right::Write)?;
        let data = read_data(params.get()?.get_data(), "data", limits::BLOB_INLINE_BYTES).map_err(to_capnp)?;
        let records = &self.kernel.records;
        let _held = records.store().run(|store| Ok(store.guard())).await.map_err(|error| to_capnp(error.into()))?;
        let digest = records.store().put(data).await.map_err(|error| to_capnp(error.into()))?;
        self.kernel.grant(digest, crate::sys::clock::now_ms()).await.map_err(to_capnp)?;
        results.get().set_hash(digest.to_string());
        Ok(())
    }

    async fn info(self: Rc<Self>, _params: kernel::InfoParams, mut results: kernel::InfoResults) -> capnp::Result<()> {
        self.may(Right::Read)?;
        refresh_figures(&self.connection.supervisor);
        write_kernel_info(results.get().init_info(), &self.shown_info().await, self.rights).map_err(to_capnp)
    }

    async fn run(self: Rc<Self>, params: kernel::RunParams, mut results: kernel::RunResults) -> capnp::Result<()> {
        self.audited("kernel.run", Right::Execute, async {
            let request = read_exec_request(params.get()?.get_request()?).map_err(to_capnp)?;
            let execution = self.run_code(request).await?;
            let mut results = results.get();
            results.set_exec_id(execution.id.0);
            results.set_execution(self.execution_client(execution));
            Ok(())
        })
        .await
    }

    async fn run_to_end(
        self: Rc<Self>,
        params: kernel::RunToEndParams,
        mut results: kernel::RunToEndResults,
    ) -> capnp::Result<()> {
        self.audited("kernel.run", Right::Execute, async {
            let request = read_exec_request(params.get()?.get_request()?).map_err(to_capnp)?;
            let result = self.run_code(request).await?.result().await.map_err(to_capnp)?;
            write_exec_result(results.get().init_result(), &result).map_err(to_capnp)
        })
        .await
    }

    async fn checkpoints(
        self: Rc<Self>,
        params: kernel::CheckpointsParams,
        _results: kernel::CheckpointsResults,
    ) -> capnp::Result<()> {
        self.may(Right::Read)?;
        let params = params.get()?;
        self.list_checkpoints(params.get_sink()?, params.get_limit() as usize).await
    }

    async fn execution(
        self: Rc<Self>,
        params: kernel::ExecutionParams,
        mut results: kernel::ExecutionResults,
    ) -> capnp::Result<()> {
        require(self.rights, Right::Read).or_else(|_| require(self.rights, Right::Execute)).map_err(to_capnp)?;
        let execution = self.kernel.execution(ExecId(params.get()?.get_exec_id())).await.map_err(to_capnp)?;
        results.get().set_execution(self.execution_client(execution));
        Ok(())
    }

    async fn attenuate(
        self: Rc<Self>,
        params: kernel::AttenuateParams,
        mut results: kernel::AttenuateResults,
    ) -> capnp::Result<()> {
        let params = params.get()?;
        let rights = self.rights.and(read_rights(params.get_rights()).map_err(to_capnp)?);
        let label = read_text(params.get_label(), "label").map_err(to_capnp)?;
        let label: String = label.chars().filter(|c| !c.is_control()).take(100).collect();
        let client =
            if label.is_empty() { self.actor.client.clone() } else { format!("{}/{label}", self.actor.client) };
        let actor = Actor { client, ..self.actor.clone() };
        let version = Some(self.kernel.view().version);
        let detail = rights.iter().map(Right::name).collect::<Vec<_>>().join(", ");
        self.host().audit(&actor, "kernel.attenuate", &self.kernel, (version, version), detail).await;
        results.get().set_kernel(self.connection.kernel_client(&self.kernel, rights, actor));
        Ok(())
    }

    async fn publish(
        self: Rc<Self>,
        params: kernel::PublishParams,
        results: kernel::PublishResults,
    ) -> capnp::Result<()> {
        self.audited("kernel.publish", Right::Admin, self.publish_socket(params, results)).await
    }

    async fn unpublish(
        self: Rc<Self>,
        params: kernel::UnpublishParams,
        _results: kernel::UnpublishResults,
    ) -> capnp::Result<()> {
        self.audited("kernel.unpublish", Right::Admin, self.unpublish_socket(params)).await
    }

    async fn open_blob(
        self: Rc<Self>,
        params: kernel::OpenBlobParams,
        mut results: kernel::OpenBlobResults,
    ) -> capnp::Result<()> {
        self.may(Right::Read)?;
        let digest = Self::digest(params.get()?.get_hash()).map_err(to_capnp)?;
        let store = self.kernel.records.readable(digest).await.map_err(to_capnp)?.clone();
        let size = store.run(move |store| store.size(digest)).await.map_err(|error| to_capnp(error.into()))?;
        results.get().set_blob(new_client(BlobReaderServer { store, digest, size }));
        Ok(())
    }

    async fn new_blob(
        self: Rc<Self>,
        _params: kernel::NewBlobParams,
        mut results: kernel::NewBlobResults,
    ) -> capnp::Result<()> {
        self.may(Right::Write)?;
        let store = self.kernel.records.store().clone();
        let writer = store.writer(limits::BLOB_BYTES).await.map_err(|error| to_capnp(error.into()))?;
        let server = BlobWriterServer { store, kernel: Rc::clone(&self.kernel), writer: Some(writer).into() };
        results.get().set_blob(new_client(server));
        Ok(())
    }

    async fn grant_blob(
        self: Rc<Self>,
        params: kernel::GrantBlobParams,
        _results: kernel::GrantBlobResults,
    ) -> capnp::Result<()> {
        self.audited("kernel.grant_blob", Right::Read, async {
            let before = self.kernel.view().version;
            let params = params.get()?;
            let digest = Self::digest(params.get_hash()).map_err(to_capnp)?;
            let receiver = self.connection.local(&params.get_to()?).await;
            let receiver = receiver.ok_or_else(|| {
                to_capnp(
                    Error::invalid("`to` is no kernel of this connection")
                        .hint("open both kernels over the same connection"),
                )
            })?;
            receiver.may(Right::Write)?;
            // Garbage collection must not list rows between the check of one row and the write of the
            // other.
            let _names = self.host().upkeep.names.read().await;
            self.kernel.records.readable(digest).await.map_err(to_capnp)?;
            receiver.kernel.grant(digest, crate::sys::clock::now_ms()).await.map_err(to_capnp)?;
            self.audit_done("kernel.grant_blob", before, format!("{digest} to {}", receiver.kernel.id)).await;
            Ok(())
        })
        .await
    }

    async fn files(
        self: Rc<Self>,
        params: kernel::FilesParams,
        mut results: kernel::FilesResults,
    ) -> capnp::Result<()> {
        require(self.rights, Right::Read).or_else(|_| require(self.rights, Right::Write)).map_err(to_capnp)?;
        results.get().set_files(new_client(FilesServer::new(&self, params.get()?.get_no_wait())));
        Ok(())
    }

    async fn start(self: Rc<Self>, params: kernel::StartParams, _results: kernel::StartResults) -> capnp::Result<()> {
        self.audited("kernel.start", Right::Admin, async {
            let (before, without) = (self.kernel.view().version, params.get()?.get_without_memory());
            self.kernel.start(self.actor.clone(), StartMode::of(without)).await.map_err(to_capnp)?;
            self.audit_done("kernel.start", before, if without { "without memory" } else { "" }).await;
            Ok(())
        })
        .await
    }

    async fn stop(self: Rc<Self>, params: kernel::StopParams, _results: kernel::StopResults) -> capnp::Result<()> {
        self.audited("kernel.stop", Right::Admin, async {
            let (before, force) = (self.kernel.view().version, params.get()?.get_force());
            let mode = if force { StopMode::Force } else { StopMode::WhenIdle };
            self.kernel.stop(self.actor.clone(), mode).await.map_err(to_capnp)?;
            self.audit_done("kernel.stop", before, if force { "at once" } else { "" }).await;
            Ok(())
        })
        .await
    }

    async fn remove(
        self: Rc<Self>,
        params: kernel::RemoveParams,
        _results: kernel::RemoveResults,
    ) -> capnp::Result<()> {
        self.audited("kernel.remove", Right::Admin, self.remove_kernel(params)).await
    }

    async fn events(
        self: Rc<Self>,
        params: kernel::EventsParams,
        mut results: kernel::EventsResults,
    ) -> capnp::Result<()> {
        self.may(Right::Read)?;
        let params = params.get()?;
        let follower = self.connection.supervisor.host().events.follow(params.get_since());
        // An earlier kernel had the same name.
        let (kernel, since_ms) = (Rc::clone(&self.kernel), self.kernel.created_at_ms);
        let wanted = move |event: &Event| event.kernel == *kernel.event_name.borrow() && event.at_ms >= since_ms;
        let subscription = Subscription::start(&self.connection, follower, params.get_sink()?, wanted);
        results.get().set_subscription(new_client(subscription.map_err(to_capnp)?));
        Ok(())
    }

    async fn describe_vars(
        self: Rc<Self>,
        _params: kernel::DescribeVarsParams,
        mut results: kernel::DescribeVarsResults,
    ) -> capnp::Result<()> {
        self.may(Right::Read)?;
        let vars = self.kernel.with_worker(None, |link| async move { link.vars().await }).await.map_err(to_capnp)?;
        write_vars(results.get().init_vars(vars.len() as u32), &vars);
        Ok(())
    }

    async fn missed(
        self: Rc<Self>,
        _params: kernel::MissedParams,
        mut results: kernel::MissedResults,
    ) -> capnp::Result<()> {
        self.may(Right::Read)?;
        let view = self.kernel.view();
        let missed = [view.missed, view.unreadable].concat();
        write_missed(results.get().init_missed(missed.len() as u32), &missed);
        Ok(())
    }

    async fn jobs(self: Rc<Self>, _params: kernel::JobsParams, mut results: kernel::JobsResults) -> capnp::Result<()> {
        self.may(Right::Read)?;
        let jobs: Vec<Job> =
            self.kernel.background_work().into_iter().map(|job| Job { id: job.id, command: job.command }).collect();
        write_jobs(results.get().init_jobs(jobs.len() as u32), &jobs);
        Ok(())
    }
}
