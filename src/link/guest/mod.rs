//! Init's side of the link: answers the handshake, turns calls into plain [`WorkerCall`]s, and
//! calls the daemon.
//!
//! One `WorkerServer` serves one connection. It decides only who may call: before a proven `attach`
//! it answers `challenge` alone. Every other call goes to init's event loop, which also refuses
//! calls of a replaced connection.

mod call;
mod daemon;
mod exec_channel;
mod ports;
mod process;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use capnp_rpc::RpcSystem;
use capnp_rpc::rpc_twoparty_capnp::Side;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};

use crate::core::error::{Error, Result};
use crate::core::exec::TerminalSize;
use crate::core::ids::ExecId;
use crate::core::limits;
use crate::link::binding::KernelBinding;
use crate::link::connector::unix;
use crate::link::handshake::{PROOF_BYTES, Role, WorkerIdentity};
use crate::link::schema::worker_capnp::{self as wire, exec, report, worker};
use crate::link::types::{StateBefore, StateChunk, StateHeads};

pub use call::{Answer, Bind, Call, Chunks, Report, Revision, Start, Started, StatePiece, WorkerCall};
pub use daemon::{Daemon, Delivered, Delivery, Finish, ToolAnswer};
pub use exec_channel::{ExecChannelCall, ExecChannelService};
pub use ports::{OpenConnections, PortConnection};
pub use process::{ProcessSink, ProcessStart};

/// The server of one connection.
struct WorkerServer {
    connection: u64,
    identity: Rc<WorkerIdentity>,
    calls: mpsc::Sender<WorkerCall>,
    handshake: RefCell<Handshake>,
    proven: Rc<Cell<bool>>,
    /// Moves to the event loop with the attached daemon.
    close: RefCell<Option<oneshot::Sender<()>>>,
}

/// The progress of a connection.
enum Handshake {
    Silent,
    Challenged { nonce: [u8; PROOF_BYTES], counter_nonce: [u8; PROOF_BYTES] },
    Attached,
}

impl WorkerServer {
    fn new(
        connection: u64,
        identity: Rc<WorkerIdentity>,
        calls: mpsc::Sender<WorkerCall>,
        close: oneshot::Sender<()>,
    ) -> Self {
        WorkerServer {
            connection,
            identity,
            calls,
            handshake: RefCell::new(Handshake::Silent),
            proven: Rc::new(Cell::new(false)),
            close: RefCell::new(Some(close)),
        }
    }

    async fn call<T>(&self, what: impl FnOnce(Answer<T>) -> Call) -> Result<T, capnp::Error> {
        let attached = matches!(*self.handshake.borrow(), Handshake::Attached);
        if !attached {
            return Err(to_capnp(Error::refused("calls are refused before `attach`").reason("worker_identity")));
        }
        self.forward(what).await
    }

    async fn forward<T>(&self, what: impl FnOnce(Answer<T>) -> Call) -> Result<T, capnp::Error> {
        let (answer, answered) = oneshot::channel();
        let call = WorkerCall { connection: self.connection, what: what(answer) };
        let ending = || to_capnp(Error::lost("the execution or the worker ended during the call"));
        // Usually there is room at once; without an await the calls keep their order.
        match self.calls.try_send(call) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(call)) => self.calls.send(call).await.map_err(|_| ending())?,
            Err(mpsc::error::TrySendError::Closed(_)) => return Err(ending()),
        }
        answered.await.map_err(|_| ending())?.map_err(to_capnp)
    }
}

/// Encodes an error for the link.
fn to_capnp(error: Error) -> capnp::Error {
    capnp::Error::failed(error.to_line())
}

fn random() -> Result<[u8; PROOF_BYTES], capnp::Error> {
    let mut bytes = [0; PROOF_BYTES];
    getrandom::fill(&mut bytes).map_err(|e| capnp::Error::failed(format!("no random bytes: {e}")))?;
    Ok(bytes)
}

type Done = Result<(), capnp::Error>;

impl worker::Server for WorkerServer {
    async fn challenge(self: Rc<Self>, params: worker::ChallengeParams, mut results: worker::ChallengeResults) -> Done {
        let nonce: [u8; PROOF_BYTES] = params
            .get()?
            .get_nonce()?
            .try_into()
            .map_err(|_| to_capnp(Error::invalid(format!("a nonce has {PROOF_BYTES} bytes"))))?;
        if !matches!(*self.handshake.borrow(), Handshake::Silent) {
            return Err(to_capnp(Error::refused("one challenge for each connection").reason("worker_identity")));
        }
        let counter_nonce = random()?;
        *self.handshake.borrow_mut() = Handshake::Challenged { nonce, counter_nonce };
        let mut results = results.get();
        results.set_proof(&self.identity.proof(Role::Worker, &nonce, &counter_nonce));
        results.set_counter_nonce(&counter_nonce);
        let mut reported = results.init_identity();
        reported.set_worker_id(self.identity.worker.to_string());
        reported.set_kernel_id(self.identity.kernel.to_string());
        reported.set_epoch(self.identity.epoch.0);
        reported.set_build(&self.identity.build);
        Ok(())
    }

    async fn attach(self: Rc<Self>, params: worker::AttachParams, mut results: worker::AttachResults) -> Done {
        let params = params.get()?;
        // A nonce is used once, whatever the outcome.
        let challenged = std::mem::replace(&mut *self.handshake.borrow_mut(), Handshake::Silent);
        let proven = match challenged {
            Handshake::Challenged { nonce, counter_nonce } => {
                self.identity.verify(Role::Daemon, &counter_nonce, &nonce, params.get_proof()?)
            }
            Handshake::Silent | Handshake::Attached => false,
        };
        if !proven {
            return Err(to_capnp(Error::refused("the proof is wrong").reason("worker_identity")));
        }
        let close = self.close.borrow_mut().take();
        let daemon = Daemon::new(params.get_supervisor()?, close);
        *self.handshake.borrow_mut() = Handshake::Attached;
        self.proven.set(true);
        let reported = self.forward(|answer| Call::Attach { daemon, answer }).await?;
        write_report(results.get().init_report(), &reported)
    }

    async fn start(self: Rc<Self>, params: worker::StartParams, mut results: worker::StartResults) -> Done {
        let start = read_start(params.get()?.get_exec()?)?;
        if let Started::Ended(finish, output) = self.call(|answer| Call::Start(start, answer)).await? {
            daemon::write_ended(results.get(), &finish, &output);
        }
        Ok(())
    }

    async fn stdin(self: Rc<Self>, params: worker::StdinParams, _: worker::StdinResults) -> Done {
        let params = params.get()?;
        let (exec, data, end) = (ExecId(params.get_exec_id()), params.get_data()?.to_vec(), params.get_end());
        if data.len() > limits::CHUNK_BYTES {
            return Err(to_capnp(Error::invalid("a piece of standard input is too large")));
        }
        self.call(|answer| Call::Stdin { exec, data, end, answer }).await
    }

    async fn interrupt(self: Rc<Self>, params: worker::InterruptParams, _: worker::InterruptResults) -> Done {
        let exec = ExecId(params.get()?.get_exec_id());
        self.call(|answer| Call::Interrupt(exec, answer)).await
    }

    async fn acknowledge(self: Rc<Self>, params: worker::AcknowledgeParams, _: worker::AcknowledgeResults) -> Done {
        let exec = ExecId(params.get()?.get_exec_id());
        self.call(|answer| Call::Acknowledge(exec, answer)).await
    }

    async fn request(self: Rc<Self>, params: worker::RequestParams, mut results: worker::RequestResults) -> Done {
        let json = params.get()?.get_json()?.to_vec();
        let reply = self.call(|answer| Call::Request(json, answer)).await?;
        results.get().set_json(&reply);
        Ok(())
    }

    async fn dynamic_tools(self: Rc<Self>, params: worker::DynamicToolsParams, _: worker::DynamicToolsResults) -> Done {
        let json = params.get()?.get_json()?.to_vec();
        self.call(|answer| Call::DynamicTools(json, answer)).await
    }

    async fn load_begin(self: Rc<Self>, _: worker::LoadBeginParams, _: worker::LoadBeginResults) -> Done {
        self.call(Call::LoadBegin).await
    }

    async fn load_entry(self: Rc<Self>, params: worker::LoadEntryParams) -> Done {
        let params = params.get()?;
        let chunk = StateChunk {
            key: params.get_key()?.to_string()?,
            meta_json: params.get_meta_json()?.to_vec(),
            data: params.get_data()?.to_vec(),
            more: params.get_more(),
        };
        self.call(|answer| Call::LoadEntry(chunk, answer)).await
    }

    async fn load_end(self: Rc<Self>, _: worker::LoadEndParams, mut results: worker::LoadEndResults) -> Done {
        let missed = self.call(Call::LoadEnd).await?;
        results.get().set_missed_json(&missed);
        Ok(())
    }

    async fn bind(self: Rc<Self>, params: worker::BindParams, _: worker::BindResults) -> Done {
        let params = params.get()?;
        let bind = Bind {
            path: params.get_path()?.to_string()?,
            source: params.get_source()?.to_string()?,
            writable: params.get_writable(),
            token: params.get_token(),
        };
        self.call(|answer| Call::Bind(bind, answer)).await
    }

    async fn bind_kernel(
        self: Rc<Self>,
        params: worker::BindKernelParams,
        mut results: worker::BindKernelResults,
    ) -> Done {
        let binding: KernelBinding = serde_json::from_slice(params.get()?.get_json()?)
            .map_err(|error| to_capnp(Error::invalid(format!("the binding: {error}"))))?;
        let reported = self.call(|answer| Call::BindKernel(Box::new(binding), answer)).await?;
        write_report(results.get().init_report(), &reported)
    }

    async fn unbind(self: Rc<Self>, params: worker::UnbindParams, _: worker::UnbindResults) -> Done {
        let path = params.get()?.get_path()?.to_string()?;
        self.call(|answer| Call::Unbind(path, answer)).await
    }

    async fn keep(self: Rc<Self>, params: worker::KeepParams, mut results: worker::KeepResults) -> Done {
        let params = params.get()?;
        let (of, spare) = (params.get_checkpoint()?.to_string()?, params.get_spare()?.to_string()?);
        let transient = params.get_transient();
        let why = self.call(|answer| Call::Keep { of, spare, transient, answer }).await?;
        results.get().set_why_not(&why);
        Ok(())
    }

    async fn wake(self: Rc<Self>, params: worker::WakeParams, mut results: worker::WakeResults) -> Done {
        let of = params.get()?.get_checkpoint()?.to_string()?;
        let missed = self.call(|answer| Call::Wake(of, answer)).await?;
        results.get().set_missed_json(&missed);
        Ok(())
    }

    async fn revise(self: Rc<Self>, params: worker::ReviseParams, _: worker::ReviseResults) -> Done {
        let params = params.get()?;
        let revision = Revision {
            key: params.get_key()?.to_string()?,
            meta_json: params.get_meta_json()?.to_vec(),
            data: params.get_data()?.to_vec(),
            more: params.get_more(),
            gone: params.get_gone(),
            last: params.get_last(),
        };
        self.call(|answer| Call::Revise(revision, answer)).await
    }

    async fn freeze(self: Rc<Self>, params: worker::FreezeParams, _: worker::FreezeResults) -> Done {
        let at_work = params.get()?.get_at_work();
        self.call(|answer| Call::Freeze(at_work, answer)).await
    }

    async fn thaw(self: Rc<Self>, _: worker::ThawParams, _: worker::ThawResults) -> Done {
        self.call(Call::Thaw).await
    }

    async fn suspend(self: Rc<Self>, params: worker::SuspendParams, _: worker::SuspendResults) -> Done {
        let copied = params.get()?.get_copied();
        self.call(|answer| Call::Suspend { copied, answer }).await
    }

    async fn resume(self: Rc<Self>, _: worker::ResumeParams, _: worker::ResumeResults) -> Done {
        self.call(Call::Resume).await
    }

    async fn exec_channel(self: Rc<Self>, params: worker::ExecChannelParams, _: worker::ExecChannelResults) -> Done {
        let token = params.get()?.get_token();
        self.call(|answer| Call::ExecChannel(token, answer)).await
    }

    async fn usage(self: Rc<Self>, _: worker::UsageParams, mut results: worker::UsageResults) -> Done {
        let usage = self.call(Call::Usage).await?;
        let mut results = results.get();
        results.set_memory_bytes(usage.memory_bytes);
        results.set_pids(usage.pids);
        results.set_cpu_us(usage.cpu_us);
        results.set_workspace_bytes(usage.workspace_bytes);
        Ok(())
    }

    async fn state_heads(self: Rc<Self>, _: worker::StateHeadsParams, mut results: worker::StateHeadsResults) -> Done {
        let StateHeads { heads, under_way, before } = self.call(Call::Heads).await?;
        let mut results = results.get();
        results.set_under_way(under_way.map_or(0, |exec| exec.0));
        results.set_before(match before {
            StateBefore::Unknown => wire::StateBefore::Unknown,
            StateBefore::Saved => wire::StateBefore::Saved,
            StateBefore::Unsaved => wire::StateBefore::Unsaved,
            StateBefore::Background => wire::StateBefore::Background,
        });
        let mut list = results.init_heads(heads.len() as u32);
        for (i, head) in heads.iter().enumerate() {
            let mut one = list.reborrow().get(i as u32);
            one.set_key(&head.key);
            one.set_meta_json(head.meta_json.as_bytes());
            one.set_digest(head.digest.as_bytes());
            one.set_size(head.size);
            one.set_exec_id(head.exec.map_or(0, |exec| exec.0));
        }
        Ok(())
    }

    async fn state_entry(
        self: Rc<Self>,
        params: worker::StateEntryParams,
        mut results: worker::StateEntryResults,
    ) -> Done {
        let params = params.get()?;
        let (key, offset) = (params.get_key()?.to_string()?, params.get_offset());
        let piece = self.call(|answer| Call::Entry(key, offset, answer)).await?;
        let Some(piece) = piece else {
            return Err(to_capnp(Error::not_found("there is no state entry of that key")));
        };
        let mut results = results.get();
        results.set_meta_json(piece.meta_json.as_bytes());
        results.set_size(piece.size);
        results.set_data(&piece.data[..piece.data.len().min(limits::CHUNK_BYTES)]);
        Ok(())
    }

    async fn spawn(self: Rc<Self>, params: worker::SpawnParams, _: worker::SpawnResults) -> Done {
        let params = params.get()?;
        let start = ProcessStart::read(params.get_process()?)?.map_err(to_capnp)?;
        let sink = ProcessSink::new(params.get_sink()?);
        self.call(|answer| Call::Spawn(start, sink, answer)).await
    }

    async fn signal(self: Rc<Self>, params: worker::SignalParams, _: worker::SignalResults) -> Done {
        let params = params.get()?;
        let (exec, signal) = (ExecId(params.get_exec_id()), params.get_signal());
        self.call(|answer| Call::Signal(exec, signal, answer)).await
    }

    async fn resize(self: Rc<Self>, params: worker::ResizeParams, _: worker::ResizeResults) -> Done {
        let params = params.get()?;
        let size = TerminalSize::from_wire(params.get_rows(), params.get_columns());
        let size = size.ok_or_else(|| to_capnp(Error::invalid("a terminal without size")))?;
        let exec = ExecId(params.get_exec_id());
        self.call(|answer| Call::Resize(exec, size, answer)).await
    }

    async fn connect(self: Rc<Self>, params: worker::ConnectParams, mut results: worker::ConnectResults) -> Done {
        let port = params.get()?.get_port();
        let connection = self.call(|answer| Call::Connect(port, answer)).await?;
        results.get().set_stream(connection.serve());
        Ok(())
    }

    async fn end_processes(self: Rc<Self>, _: worker::EndProcessesParams, _: worker::EndProcessesResults) -> Done {
        self.call(Call::EndProcesses).await
    }

    async fn stop(self: Rc<Self>, params: worker::StopParams, _: worker::StopResults) -> Done {
        let grace_ms = params.get()?.get_grace_ms();
        self.call(|answer| Call::Stop { grace_ms, answer }).await
    }
}

fn read_start(exec: exec::Reader<'_>) -> capnp::Result<Start> {
    Ok(Start {
        exec: ExecId(exec.get_exec_id()),
        request_json: exec.get_request_json()?.to_vec(),
        stdin: exec.get_stdin()?.to_vec(),
        stdin_open: exec.get_stdin_open(),
        has_stdin: exec.get_has_stdin(),
        timeout_ms: exec.get_timeout_ms(),
        output_kept_bytes: exec.get_output_kept_bytes(),
        acknowledged: exec.get_acknowledged()?.iter().map(ExecId).collect(),
    })
}

/// Serves one connection until the peer closes it, a newer daemon attaches, or an unproven peer
/// runs out of time.
pub async fn serve_connection(
    connection: u64,
    stream: UnixStream,
    identity: Rc<WorkerIdentity>,
    calls: mpsc::Sender<WorkerCall>,
) {
    let (close, closed) = oneshot::channel();
    let server = WorkerServer::new(connection, identity, calls.clone(), close);
    let proven = server.proven.clone();
    let client: worker::Client = capnp_rpc::new_client(server);
    let network = match unix::network(stream, Side::Server) {
        Ok(network) => network,
        Err(error) => return tracing::warn!(%error, "a connection cannot be watched"),
    };
    let rpc = RpcSystem::new(Box::new(network), Some(client.client));
    let unproven = async {
        tokio::time::sleep(limits::CLIENT_HELLO).await;
        if proven.get() {
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        _ = rpc => {}
        _ = closed => {}
        () = unproven => {}
    }
    // A stopped event loop needs no notice.
    let _ = calls.send(WorkerCall { connection, what: Call::Gone }).await;
}

fn write_report(mut to: report::Builder<'_>, reported: &Report) -> Done {
    to.set_engine(&reported.engine);
    to.set_engine_version(&reported.engine_version);
    let mut lines = to.reborrow().init_sandbox(reported.sandbox.len() as u32);
    for (i, line) in reported.sandbox.iter().enumerate() {
        lines.set(i as u32, line);
    }
    let mut mounts = to.reborrow().init_mounts(reported.mounts.len() as u32);
    for (i, path) in reported.mounts.iter().enumerate() {
        mounts.set(i as u32, path);
    }
    let mut known = to.reborrow().init_executions(reported.executions.len() as u32);
    for (i, (exec, running)) in reported.executions.iter().enumerate() {
        let mut one = known.reborrow().get(i as u32);
        one.set_exec_id(exec.0);
        one.set_running(*running);
    }
    to.set_jobs_json(&reported.jobs_json);
    to.set_missed_json(&reported.missed_json);
    to.set_suspended(reported.is_suspended);
    to.set_restored_entries(reported.restored_entries);
    to.set_not_restored_json(&reported.not_restored_json);
    Ok(())
}
