//! Messages of a worker to its daemon, from a worker that proves its identity and then sends
//! arbitrary engine output.
//!
//! The worker speaks the real protocol, so the input reaches the daemon's decoding as in
//! production.

use std::cell::{Cell, RefCell};
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::OnceLock;

use capnp_rpc::RpcSystem;
use capnp_rpc::rpc_twoparty_capnp::Side;
use ryokan::link::connector::unix::UnixConnector;
use ryokan::core::error::Result;
use ryokan::core::exec::{ExecEnd, OutputEvent, Stream};
use ryokan::core::ids::{Epoch, ExecId, KernelId, WorkerId};
use ryokan::core::missed::MissedEntry;
use ryokan::core::value::Value;
use ryokan::link::schema::worker_capnp::{supervisor, worker};
use ryokan::link::host::{Job, WorkerIdentity, WorkerLink, WorkerListener};
use ryokan::core::kernel::CrashCause;
use ryokan::link::handshake::Role;
use ryokan::link::connector::unix;

fn identity() -> WorkerIdentity {
    WorkerIdentity {
        worker: WorkerId::from_bytes([1; 16]),
        kernel: KernelId::from_bytes([2; 16]),
        epoch: Epoch(3),
        build: "fuzz".into(),
        secret: [4; 32],
    }
}

/// The worker. Its report contains the input as JSON texts; it keeps the capability that `attach`
/// passes.
struct Worker {
    text: Rc<Vec<u8>>,
    nonce: RefCell<Vec<u8>>,
    daemon: Rc<RefCell<Option<supervisor::Client>>>,
}

const COUNTER_NONCE: [u8; 32] = [7; 32];

impl worker::Server for Worker {
    async fn challenge(
        self: Rc<Self>,
        params: worker::ChallengeParams,
        mut results: worker::ChallengeResults,
    ) -> capnp::Result<()> {
        let nonce = params.get()?.get_nonce()?.to_vec();
        let mut results = results.get();
        results.set_proof(&identity().proof(Role::Worker, &nonce, &COUNTER_NONCE));
        results.set_counter_nonce(&COUNTER_NONCE);
        let mut told = results.init_identity();
        told.set_worker_id(identity().worker.to_string());
        told.set_kernel_id(identity().kernel.to_string());
        told.set_epoch(3);
        told.set_build("fuzz");
        *self.nonce.borrow_mut() = nonce;
        Ok(())
    }

    async fn attach(
        self: Rc<Self>,
        params: worker::AttachParams,
        mut results: worker::AttachResults,
    ) -> capnp::Result<()> {
        *self.daemon.borrow_mut() = Some(params.get()?.get_supervisor()?);
        let mut report = results.get().init_report();
        report.set_engine(capnp::text::Reader(&self.text));
        report.set_jobs_json(&self.text);
        report.set_missed_json(&self.text);
        report.set_not_restored_json(&self.text);
        Ok(())
    }
}

#[derive(Default)]
struct Listener(Cell<usize>);

#[async_trait::async_trait(?Send)]
impl WorkerListener for Listener {
    async fn output(&self, _: ExecId, _: u64, _: Stream, _: Vec<u8>) {}
    async fn event(&self, _: ExecId, _: OutputEvent) {}
    fn ended(&self, _: ExecId, _: ExecEnd, _: u64) {
        self.0.set(self.0.get() + 1);
    }
    async fn tool_call(&self, _: ExecId, name: String, args: Value) -> Result<(Value, String)> {
        Ok((args, name))
    }
    fn jobs(&self, _: Vec<Job>) {}
    fn missed(&self, _: Vec<MissedEntry>) {}
    fn background(&self, _: Stream, _: Vec<u8>) {}
    fn dying(&self, _: CrashCause) {}
    fn disconnected(&self) {}
}

fn socket() -> &'static PathBuf {
    static SOCKET: OnceLock<PathBuf> = OnceLock::new();
    SOCKET.get_or_init(|| std::env::temp_dir().join(format!("ryokan-fuzz-{}.sock", std::process::id())))
}

async fn one(listener: &tokio::net::UnixListener, text: Rc<Vec<u8>>) {
    let daemon = Rc::new(RefCell::new(None));
    let server = Worker { text: Rc::clone(&text), nonce: RefCell::default(), daemon: Rc::clone(&daemon) };
    let ended = Rc::new(Listener::default());
    let identity = identity();
    let attaching = WorkerLink::attach(Rc::new(UnixConnector::new(socket())), &identity, ended.clone());
    let accepting = async {
        let (stream, _) = listener.accept().await.expect("our own socket");
        let bootstrap: worker::Client = capnp_rpc::new_client(server);
        let network = unix::network(stream, Side::Server).expect("a connected socket");
        tokio::task::spawn_local(RpcSystem::new(Box::new(network), Some(bootstrap.client)))
    };
    let (attached, serving) = tokio::join!(attaching, accepting);
    // A report that does not decode must be refused.
    if let Ok((_link, _report)) = attached {
        let supervisor = daemon.borrow().clone().expect("attach passed the capability");
        say(&supervisor, &text).await;
        assert!(ended.0.get() <= 1, "one end");
    }
    serving.abort();
}

/// Sends every message that carries a text of the engine. Each call may fail; none may panic or
/// hang.
async fn say(daemon: &supervisor::Client, text: &[u8]) {
    let (json, tail) = text.split_at(text.len() - text.len() / 8);
    let mut event = daemon.event_request();
    event.get().set_json(json);
    event.get().set_tail(tail);
    let _ = event.send().await;
    let mut end = daemon.ended_request();
    {
        let mut end = end.get().init_end();
        end.set_status(["done", "failed", "lost", "?"][text.len() % 4]);
        end.set_err(capnp::text::Reader(tail));
        end.set_frame_json(text);
    }
    let _ = end.send().promise.await;
    let mut call = daemon.tool_call_request();
    call.get().set_json(text);
    let _ = call.send().promise.await;
    let mut jobs = daemon.jobs_request();
    jobs.get().set_json(text);
    let _ = jobs.send().promise.await;
    let mut missed = daemon.missed_request();
    missed.get().set_json(text);
    let _ = missed.send().promise.await;
    let mut dying = daemon.dying_request();
    dying.get().set_cause_json(text);
    let _ = dying.send().promise.await;
}

thread_local! {
    static WORLD: (tokio::runtime::Runtime, tokio::net::UnixListener) = {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let _ = std::fs::remove_file(socket());
        let listener = {
            let _inside = runtime.enter();
            tokio::net::UnixListener::bind(socket()).expect("a socket in the temporary folder")
        };
        (runtime, listener)
    };
}

pub fn run(data: &[u8]) {
    WORLD.with(|(runtime, listener)| {
        let tasks = tokio::task::LocalSet::new();
        tasks.block_on(runtime, one(listener, Rc::new(data.to_vec())));
    });
}
