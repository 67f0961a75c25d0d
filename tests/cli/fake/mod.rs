//! A daemon in a thread of the test: the real protocol, no kernels.
//!
//! `execution` defines the effects of code; the log holds every call that changes something.

mod execution;
mod kernel;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use capnp_rpc::{RpcSystem, rpc_twoparty_capnp::Side, twoparty};
use ryokan::core::error::Error;
use ryokan::core::ids::{Epoch, HostId, KernelId};
use ryokan::core::info::{Ability, Event, HostInfo, KernelInfo, PoolInfo};
use ryokan::core::rights::Rights;
use ryokan::core::spec::KernelSpec;
use ryokan::rpc::client::run_local;
use ryokan::rpc::convert::{info, pool, reader_options, spec, to_capnp};
use ryokan::rpc::schema::ryokan_capnp as wire;
use tokio_util::compat::{TokioAsyncReadCompatExt, TokioAsyncWriteCompatExt};

pub use kernel::FakeKernel;

/// The fake's actions, in order.
#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    pub fn add(&self, line: impl Into<String>) {
        self.0.lock().unwrap().push(line.into());
    }

    pub fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }

    pub fn has(&self, line: &str) -> bool {
        self.lines().iter().any(|l| l == line)
    }

    /// Waits for a line with this prefix.
    pub fn wait_for(&self, start: &str) -> String {
        let until = std::time::Instant::now() + std::time::Duration::from_secs(180);
        loop {
            if let Some(line) = self.lines().into_iter().find(|line| line.starts_with(start)) {
                return line;
            }
            assert!(std::time::Instant::now() < until, "no {start:?} in {:?}", self.lines());
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }
}

/// A running fake and its socket.
pub struct Fake {
    pub socket: PathBuf,
    pub log: Log,
    _folder: tempfile::TempDir,
}

impl Fake {
    /// A fake with one kernel, `demo`, that speaks Python.
    pub fn start() -> Fake {
        let folder = tempfile::tempdir().unwrap();
        Fake::start_at(folder.path().join("d.sock"), folder)
    }

    pub fn start_at(socket: PathBuf, folder: tempfile::TempDir) -> Fake {
        let log = Log::default();
        let listener = bind(&socket);
        listener.set_nonblocking(true).unwrap();
        let for_server = log.clone();
        std::thread::spawn(move || run_local(serve(listener, for_server)).unwrap());
        Fake { socket, log, _folder: folder }
    }
}

/// Binds the socket, even if the path is too long for an address.
fn bind(socket: &Path) -> std::os::unix::net::UnixListener {
    use std::os::fd::AsRawFd;
    let folder = std::fs::File::open(socket.parent().unwrap()).unwrap();
    let short = format!("/proc/self/fd/{}/{}", folder.as_raw_fd(), socket.file_name().unwrap().to_str().unwrap());
    std::os::unix::net::UnixListener::bind(short).unwrap()
}

async fn serve(listener: std::os::unix::net::UnixListener, log: Log) {
    let listener = tokio::net::UnixListener::from_std(listener).unwrap();
    let connections = Rc::new(RefCell::new(tokio::task::JoinSet::new()));
    let host = Rc::new(FakeHost { log, kernels: RefCell::default(), connections: connections.clone() });
    let demo = KernelSpec::new("demo".parse().unwrap(), ryokan::core::engine::EngineName::Python);
    host.add(demo);
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let (read, write) = stream.into_split();
        let network = twoparty::VatNetwork::new(read.compat(), write.compat_write(), Side::Server, reader_options());
        let host: wire::host::Client = capnp_rpc::new_client_from_rc(host.clone());
        connections.borrow_mut().spawn_local(RpcSystem::new(Box::new(network), Some(host.client)));
    }
}

type Connections = Rc<RefCell<tokio::task::JoinSet<capnp::Result<()>>>>;

struct FakeHost {
    log: Log,
    kernels: RefCell<BTreeMap<String, Rc<FakeKernel>>>,
    connections: Connections,
}

impl FakeHost {
    fn add(&self, spec: KernelSpec) -> Rc<FakeKernel> {
        let id = [self.kernels.borrow().len() as u8 + 1; 16];
        let kernel = Rc::new(FakeKernel::new(
            KernelInfo {
                id: KernelId::from_bytes(id),
                spec,
                state: "ready".into(),
                state_reason: String::new(),
                version: 1,
                epoch: Epoch(1),
                checkpoints: 0,
                created_at_ms: 1_700_000_000_000,
                last_used_at_ms: 1_700_000_000_000,
                memory_bytes: 0,
                sandbox: vec![],
                uid: 1000,
                executions: 0,
                origin: Default::default(),
                thread_of: None,
                capture: "tracked".into(),
                at_next_start: Vec::new(),
                in_force: None,
                disk: None,
            },
            self.log.clone(),
            self.connections.clone(),
        ));
        self.kernels.borrow_mut().insert(kernel.info.spec.name.to_string(), kernel.clone());
        kernel
    }

    fn find(&self, name: &str) -> capnp::Result<Rc<FakeKernel>> {
        let kernels = self.kernels.borrow();
        let found = kernels.values().find(|k| k.info.spec.name.as_str() == name || k.info.id.to_string() == name);
        found.cloned().ok_or_else(|| {
            to_capnp(Error::not_found(format!("there is no kernel {name}")).hint("ryokan ls lists them"))
        })
    }
}

impl wire::host::Server for FakeHost {
    async fn hello(self: Rc<Self>, p: wire::host::HelloParams, mut r: wire::host::HelloResults) -> capnp::Result<()> {
        self.log.add(format!("hello {}", p.get()?.get_client()?.to_str()?));
        r.get().set_wire_version(wire::WIRE_VERSION);
        let host = HostInfo {
            id: HostId::from_bytes([7; 16]),
            name: "fake".into(),
            version: "0".into(),
            arch: "x86_64".into(),
            engines: vec![],
            pid: 0,
        };
        info::write_host_info(r.get().init_host(), &host);
        Ok(())
    }

    async fn create_kernel(
        self: Rc<Self>,
        p: wire::host::CreateKernelParams,
        mut r: wire::host::CreateKernelResults,
    ) -> capnp::Result<()> {
        let request = spec::read_spec_request(p.get()?.get_spec()?).map_err(to_capnp)?;
        if self.kernels.borrow().contains_key(request.name.as_str()) {
            return Err(to_capnp(Error::already_exists(format!("kernel {} exists already", request.name))));
        }
        self.log.add(format!("create {} {:?}", request.name, request.labels));
        let defaults = KernelSpec::new(request.name.clone(), ryokan::core::engine::EngineName::Kaish);
        let kernel = self.add(request.fill(&defaults));
        info::write_kernel_info(r.get().init_info(), &kernel.info, Rights::ALL).map_err(to_capnp)?;
        r.get().set_kernel(capnp_rpc::new_client_from_rc(kernel));
        Ok(())
    }

    async fn open_kernel(
        self: Rc<Self>,
        p: wire::host::OpenKernelParams,
        mut r: wire::host::OpenKernelResults,
    ) -> capnp::Result<()> {
        let kernel = self.find(p.get()?.get_name()?.to_str()?)?;
        info::write_kernel_info(r.get().init_info(), &kernel.info, Rights::ALL).map_err(to_capnp)?;
        r.get().set_kernel(capnp_rpc::new_client_from_rc(kernel));
        Ok(())
    }

    async fn list_kernels(
        self: Rc<Self>,
        p: wire::host::ListKernelsParams,
        _: wire::host::ListKernelsResults,
    ) -> capnp::Result<()> {
        let filter = info::read_kernel_filter(p.get()?.get_filter()?).map_err(to_capnp)?;
        let sink = p.get()?.get_sink()?;
        let kernels: Vec<_> = self.kernels.borrow().values().cloned().collect();
        for kernel in kernels {
            let i = &kernel.info;
            if filter.admits(&i.spec.name, &i.spec.labels, &i.state) {
                let mut call = sink.next_request();
                info::write_kernel_info(call.get().init_info(), i, Rights::ALL).map_err(to_capnp)?;
                call.send().await?;
            }
        }
        Ok(())
    }

    async fn remove_kernel(
        self: Rc<Self>,
        p: wire::host::RemoveKernelParams,
        _: wire::host::RemoveKernelResults,
    ) -> capnp::Result<()> {
        let kernel = self.find(p.get()?.get_name()?.to_str()?)?;
        let name = kernel.info.spec.name.to_string();
        self.kernels.borrow_mut().remove(&name);
        self.log.add(format!("remove {name}"));
        Ok(())
    }

    async fn events(
        self: Rc<Self>,
        p: wire::host::EventsParams,
        mut r: wire::host::EventsResults,
    ) -> capnp::Result<()> {
        let since = p.get()?.get_since();
        r.get().set_subscription(kernel::send_events(p.get()?.get_sink()?, since, &self.log));
        Ok(())
    }

    async fn pools(self: Rc<Self>, _: wire::host::PoolsParams, mut r: wire::host::PoolsResults) -> capnp::Result<()> {
        let made = PoolInfo { engine: "python".into(), net: "none".into(), idle: 2, target: 3, ..PoolInfo::default() };
        pool::write_pool(r.get().init_pools(1).get(0), &made);
        Ok(())
    }

    async fn abilities(
        self: Rc<Self>,
        _: wire::host::AbilitiesParams,
        mut r: wire::host::AbilitiesResults,
    ) -> capnp::Result<()> {
        let ability = |name: &str, present, required| Ability {
            name: name.into(),
            present,
            required,
            detail: "looked".into(),
            hint: if present { String::new() } else { format!("install {name}") },
        };
        let abilities = [ability("landlock", true, true), ability("kvm", false, false), ability("userns", false, true)];
        info::write_abilities(r.get().init_abilities(abilities.len() as u32), &abilities);
        Ok(())
    }
}

/// The fake's constant events: three, then one more a little later.
pub fn past_event(sequence: u64) -> Event {
    Event {
        sequence,
        at_ms: 1_700_000_000_000,
        kernel: "demo".into(),
        kind: "kernel_started".into(),
        detail_json: "{}".into(),
    }
}
