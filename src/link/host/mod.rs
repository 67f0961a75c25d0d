//! The daemon's side of the link to one worker: an attach with mutual proof, then asynchronous
//! calls.
//!
//! Not `Send`: it belongs to the daemon's local task set. Dropping a [`WorkerLink`] closes the
//! connection; the worker runs on.
//!
//! ```text
//! kernel's task ── WorkerLink ──▶ Worker (init)          start, stdin, interrupt, request, load, bind, stop
//!      ▲                             │
//!      └──── WorkerListener ◀────────┘ Supervisor        output, event, ended, toolCall, jobs, dying
//! ```

mod callbacks;
mod calls;
mod exec_channel;
mod ports;
mod processes;
mod relay;
mod state;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use capnp_rpc::rpc_twoparty_capnp::Side;
use capnp_rpc::{Disconnector, RpcSystem};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::core::error::{Error, Result};
use crate::core::ids::ExecId;
use crate::core::limits;
use crate::link::connector::{self, Connector};
use crate::link::exec_channel::ExecChannel;
use crate::link::handshake::{PROOF_BYTES, Role, SharedIdentity};
use crate::link::message_limit::MaxWords;
use crate::link::schema::worker_capnp::{report, worker};
use crate::link::types::from_capnp;

pub use crate::link::frames::DynamicTool;
pub use crate::link::handshake::WorkerIdentity;
pub use crate::link::types::{
    CodeCheck, Completions, Job, StateChunk, StateEntry, StateHead, WorkerExec, WorkerListener, WorkerReport,
    WorkerUsage,
};
pub use ports::WorkerPortStream;
pub use processes::WorkerProcess;
pub use relay::Relay;

/// A live, proven connection to one worker.
pub struct WorkerLink {
    client: worker::Client,
    connector: Rc<dyn Connector>,
    identity: SharedIdentity,
    connection: JoinHandle<()>,
    disconnector: Cell<Option<Disconnector<Side>>>,
    listener: Rc<dyn WorkerListener>,
    /// Journalled ends, to be acknowledged with the next start.
    acknowledged: RefCell<Vec<ExecId>>,
    /// Whether a timer will send them otherwise.
    acknowledging: Cell<bool>,
    exec_channel: RefCell<Option<Rc<ExecChannel>>>,
    exec_channel_requested: Cell<bool>,
    /// Whether an execution was started before.
    has_begun: Cell<bool>,
    /// Ends with the link.
    lifetime: watch::Sender<()>,
}

impl Drop for WorkerLink {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl std::fmt::Debug for WorkerLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkerLink").field("identity", &self.identity).finish_non_exhaustive()
    }
}

impl WorkerLink {
    /// Connects, proves both identities and becomes the worker's daemon, replacing an attached one.
    ///
    /// Must run inside a `LocalSet`. `listener.disconnected()` is called once if the connection
    /// ends by itself, not when the link is dropped.
    ///
    /// # Errors
    /// `Unavailable` if no process listens, `Refused` (reason `worker_identity`) if the peer is
    /// another process, `Deadline` after that of the connector.
    pub async fn attach(
        connector: Rc<dyn Connector>,
        identity: &WorkerIdentity,
        listener: Rc<dyn WorkerListener>,
    ) -> Result<(WorkerLink, WorkerReport)> {
        let deadline = connector.attach_deadline();
        let attaching = Self::attach_unbounded(connector, identity, listener);
        let late = |_| Error::deadline(format!("worker {} did not answer its adoption in time", identity.worker));
        tokio::time::timeout(deadline, attaching).await.map_err(late)?
    }

    async fn attach_unbounded(
        connector: Rc<dyn Connector>,
        identity: &WorkerIdentity,
        listener: Rc<dyn WorkerListener>,
    ) -> Result<(WorkerLink, WorkerReport)> {
        let unavailable = |error| Error::unavailable(format!("the worker cannot be reached: {error}"));
        let channel = connector.connect().await.map_err(unavailable)?;
        let network = connector::network(channel, Side::Client, MaxWords::new(limits::MESSAGE_WORDS));
        let mut rpc = RpcSystem::new(Box::new(network), None);
        let client: worker::Client = rpc.bootstrap(Side::Server);
        let disconnector = rpc.get_disconnector();
        let (gone, reported) = (listener.clone(), listener.clone());
        let connection = tokio::task::spawn_local(async move {
            if let Err(error) = rpc.await {
                tracing::debug!(%error, "link to a worker closed");
            }
            gone.disconnected();
        });
        // From here on, dropping the link closes the connection.
        let identity = SharedIdentity::new(identity.clone());
        let link = WorkerLink {
            client,
            connector,
            identity,
            connection,
            disconnector: Cell::new(Some(disconnector)),
            listener: reported,
            acknowledged: RefCell::default(),
            acknowledging: Cell::default(),
            exec_channel: RefCell::default(),
            exec_channel_requested: Cell::default(),
            has_begun: Cell::default(),
            lifetime: watch::Sender::new(()),
        };
        let report = link.handshake(listener).await?;
        Ok((link, report))
    }

    /// Closes the connection: pending and later calls fail, and the listener is notified.
    fn disconnect(&self) {
        if let Some(disconnector) = self.disconnector.take() {
            tokio::task::spawn_local(async move {
                // The other end may be gone already.
                let _ = disconnector.await;
            });
        }
    }

    async fn handshake(&self, listener: Rc<dyn WorkerListener>) -> Result<WorkerReport> {
        let identity = self.identity.now();
        let mut nonce = [0; PROOF_BYTES];
        getrandom::fill(&mut nonce).map_err(|e| Error::internal(format!("no random bytes: {e}")))?;
        let mut request = self.client.challenge_request();
        request.get().set_nonce(&nonce);
        let answer = request.send().promise.await.map_err(refused)?;
        let answer = answer.get().map_err(refused)?;
        let counter_nonce = answer.get_counter_nonce().map_err(refused)?;
        self.check_identity(answer.get_identity().map_err(refused)?)?;
        if !identity.verify(Role::Worker, &nonce, counter_nonce, answer.get_proof().map_err(refused)?) {
            return Err(foreign("its proof is wrong"));
        }
        let mut request = self.client.attach_request();
        request.get().set_proof(&identity.proof(Role::Daemon, counter_nonce, &nonce));
        request.get().set_supervisor(capnp_rpc::new_client(callbacks::SupervisorServer { listener }));
        let answer = request.send().promise.await.map_err(|e| from_capnp(&e))?;
        let report = answer.get().and_then(|r| r.get_report()).map_err(refused)?;
        decode_report(report).map_err(refused)
    }

    fn check_identity(&self, reported: crate::link::schema::worker_capnp::identity::Reader<'_>) -> Result<()> {
        let text = |t: capnp::Result<capnp::text::Reader<'_>>| -> Result<String> {
            t.and_then(|t| Ok(t.to_string()?)).map_err(refused)
        };
        let (identity, build) = (self.identity.now(), text(reported.get_build())?);
        if build != identity.build {
            let message = format!("the worker is of build {build}, not {}", identity.build);
            return Err(Error::refused(message).reason("worker_build"));
        }
        if text(reported.get_worker_id())? != identity.worker.to_string()
            || text(reported.get_kernel_id())? != identity.kernel.to_string()
            || reported.get_epoch() != identity.epoch.0
        {
            return Err(foreign("it names another worker, kernel or epoch"));
        }
        Ok(())
    }
}

fn foreign(why: &str) -> Error {
    Error::refused(format!("the socket's owner is not the worker that was started: {why}")).reason("worker_identity")
}

/// For the handshake: any failure but the end of the connection means that the peer is not the
/// worker.
fn refused(error: capnp::Error) -> Error {
    match error.kind {
        capnp::ErrorKind::Disconnected => Error::unavailable("the worker closed the connection during its adoption"),
        _ => foreign(&error.to_string()),
    }
}

fn decode_report(report: report::Reader<'_>) -> capnp::Result<WorkerReport> {
    let sandbox = report.get_sandbox()?.iter().map(|line| Ok(line?.to_string()?)).collect::<capnp::Result<_>>()?;
    let mounts = report.get_mounts()?.iter().map(|path| Ok(path?.to_string()?)).collect::<capnp::Result<_>>()?;
    let executions = report.get_executions()?.iter().map(|known| (ExecId(known.get_exec_id()), known.get_running()));
    Ok(WorkerReport {
        engine: report.get_engine()?.to_string()?,
        engine_version: report.get_engine_version()?.to_string()?,
        sandbox,
        executions: executions.collect(),
        jobs: callbacks::decode_jobs(report.get_jobs_json()?),
        missed: callbacks::decode_missed(report.get_missed_json()?),
        mounts,
        is_suspended: report.get_suspended(),
        restored_entries: report.get_restored_entries(),
        not_restored: callbacks::decode_not_restored(report.get_not_restored_json()?),
    })
}
