//! A slot becomes a kernel's worker: once, at the daemon's word.
//!
//! ```text
//!  Unbound ── bindKernel ──▶ name, mounts ─────────────▶ engine: bind ─────────────────────▶ Serving         a new kernel
//!                       └──▶ workspace, name, mounts ──▶ engine.db ─▶ engine: bind, load ─▶ Serving         one with a folder
//! ```
//!
//! A slot stands on a folder like a kernel's. A new kernel takes it over: then its workspace need not be mounted, nor its database opened.
//!
//! What fails on the way ends the worker: half bound it is of no use to anybody.

use serde_json::json;
use tokio::time::Instant;

use super::enclosure::{KernelEntry, KernelFolder, MountSource};
use super::engine_frames::EngineReady;
use super::loading::{Startup, failure, missed_of};
use super::requests::By;
use super::state::State;
use super::{Life, Worker};
use crate::catalog::EngineDb;
use crate::core::error::{Error, Result};
use crate::core::kernel::CrashCause;
use crate::core::limits;
use crate::link::binding::{BoundFolder, BoundSource, KernelBinding};
use crate::link::guest::{Answer, Call, Report};
use crate::worker::engines;

impl Worker {
    /// Has the engine load ahead what is to be loaded, and what its first execution takes.
    pub(super) fn preload(&mut self) {
        let frame = json!({ "op": "preload", "modules": self.settings.preload });
        // If it takes no request it is being killed, which is an answer too.
        let _ = self.ask(frame.to_string().as_bytes(), By::Preload);
    }

    /// It has; what could not be loaded is said to the daemon.
    pub(super) fn on_preloaded(&mut self, ok: bool, json: &[u8]) -> std::result::Result<(), String> {
        if !ok {
            self.fail_start(failure(json));
            return Ok(());
        }
        self.not_restored = missed_of(json);
        // Once for nothing all that a kernel's coming takes: code, memory and caches are there then.
        self.enclosure.rehearse();
        match self.begin_new_state() {
            Ok(()) => self.await_kernel(),
            Err(error) => self.fail_start(error),
        }
        Ok(())
    }

    /// Writes into the slot's own database what a new kernel's has.
    fn begin_new_state(&mut self) -> Result<()> {
        let Some(EngineReady { engine, version, .. }) = &self.engine else { return Ok(()) };
        self.state.rehearse();
        self.state.set_engine(engine, version)?;
        self.state_is_new()
    }

    /// Whoever takes the slot's folder over has nothing to load.
    fn state_is_new(&self) -> Result<()> {
        match self.state.heads()?.is_empty() {
            true => Ok(()),
            false => Err(Error::internal("a slot stands on a folder that has a kernel's state")),
        }
    }

    /// Nobody's yet: the engine is ready, and no user's bytes have come.
    pub(super) fn await_kernel(&mut self) {
        self.life = Life::Unbound;
        // Its daemon comes at once, or never.
        self.orphan_at = Some(Instant::now() + limits::WORKER_ADOPT);
        self.tell_ready();
    }

    /// What a slot does before it has a kernel.
    pub(super) fn on_unbound_call(&mut self, call: Call) {
        match call {
            Call::BindKernel(binding, answer) => self.bind_kernel(*binding, answer),
            Call::ExecChannel(token, answer) => drop(answer.send(self.open_exec_channel(token))),
            Call::Usage(answer) if self.enclosure.stands_still() => {
                drop(answer.send(Err(Error::unavailable("something has stopped the engine"))));
            }
            Call::Usage(answer) => drop(answer.send(Ok(self.enclosure.usage()))),
            other => other.refuse(Error::refused("this worker has no kernel yet").reason("unbound")),
        }
    }

    /// Nobody wants it any more: there is nothing to save.
    pub(super) fn leave_unsaved(&mut self) {
        self.enclosure.kill_all();
        self.status = Some(0);
    }

    fn bind_kernel(&mut self, binding: KernelBinding, answer: Answer<Report>) {
        self.bound = Some(answer);
        self.ephemeral = binding.ephemeral;
        self.life = Life::Starting(Startup::binding(Instant::now() + limits::WORKER_BIND));
        if let Err(error) = self.take_kernel(binding) {
            self.fail_start(error);
        }
    }

    fn take_kernel(&mut self, binding: KernelBinding) -> Result<()> {
        let KernelBinding { kernel, epoch, name, folder, protected, mounts, origin, ephemeral: _ } = binding;
        let mut mounted = Vec::with_capacity(mounts.len());
        for mount in mounts {
            mounted.push((mount.inside, self.source(mount.source)?, mount.writable));
        }
        let source = |BoundFolder { dir, own_workspace, workspace }: BoundFolder| {
            let workspace = workspace.map(|shared| self.source(shared)).transpose()?;
            Ok::<_, Error>(KernelFolder { dir: self.source(dir)?, own_workspace, workspace })
        };
        let folder = folder.map(source).transpose()?;
        let hostname = name.as_str().to_owned();
        let entry = KernelEntry { folder, hostname, protected };
        if let Some(folder) = self.enclosure.enter_kernel(entry, mounted)? {
            let kernels = State::new(EngineDb::open(&folder.join("engine.db"), self.settings.durability)?);
            std::mem::replace(&mut self.state, kernels).abandon();
            self.settings.spool_folder = folder;
            self.state_to_load = true;
        }
        self.identity.become_kernels(kernel, epoch);
        let frame = json!({ "op": "bind", "env": engines::kernel_environment(Some((&name, origin))) });
        self.ask(frame.to_string().as_bytes(), By::Bind)
    }

    /// Whether it ends with its daemon: it has no kernel, or an ephemeral one.
    pub(super) fn goes_with_daemon(&self) -> bool {
        matches!(self.life, Life::Unbound) || self.ephemeral
    }

    fn source(&self, source: BoundSource) -> Result<MountSource> {
        match source.token {
            0 => Ok(MountSource::Path(source.path)),
            token => {
                let tree = self.descriptors.take(token);
                let tree = tree.ok_or_else(|| Error::invalid("the descriptor of a mount did not come"))?;
                Ok(MountSource::Tree { tree, shows: source.path })
            }
        }
    }

    /// The engine has entered the workspace, or cannot.
    pub(super) fn on_bound(&mut self, ok: bool, json: &[u8]) {
        if ok && self.state_to_load {
            self.life = Life::Starting(Startup::awaiting_ready(Instant::now() + limits::WORKER_START));
            self.begin_state();
        } else if ok {
            self.not_restored.clear();
            self.serve();
        } else {
            self.kill(CrashCause::Protocol(format!(
                "it could not be bound to its kernel: {}",
                String::from_utf8_lossy(&json[..json.len().min(500)])
            )));
        }
    }
}
