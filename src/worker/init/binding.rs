//! Binding: a warm worker becomes a kernel's worker, once. Runs in init.
//!
//! ```text
//!  Unbound ── bindKernel ──▶ name, mounts ─────────────▶ engine: bind ─────────────────────▶ Serving         a new kernel
//!                       └──▶ workspace, name, mounts ──▶ engine.db ─▶ engine: bind, load ─▶ Serving         an existing kernel
//! ```
//!
//! A warm worker has a folder like a kernel's. A new kernel adopts it, so no workspace needs to be
//! mounted and no database opened. In a virtual machine an existing kernel does so, too: its files and
//! its database were brought into the folder before.
//!
//! A failure ends the worker: a half-bound one is unusable.

use serde_json::json;
use tokio::time::Instant;

use super::enclosure::{KernelEntry, KernelFolder, MountSource};
use super::engine_frames::EngineReady;
use super::ledger::Ledger;
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
    /// Makes the engine preload its modules and run what its first execution needs.
    pub(super) fn preload(&mut self) {
        let frame = json!({ "op": "preload", "modules": self.settings.preload });
        // If it takes no request, it is being killed; that is reported elsewhere.
        let _ = self.ask(frame.to_string().as_bytes(), By::Preload);
    }

    /// Reports modules that could not be preloaded.
    pub(super) fn on_preloaded(&mut self, ok: bool, json: &[u8]) -> std::result::Result<(), String> {
        if !ok {
            self.fail_start(failure(json));
            return Ok(());
        }
        self.not_restored = missed_of(json);
        // Rehearse binding once, so that its code, data and caches are in memory.
        self.enclosure.rehearse();
        match self.begin_new_state() {
            Ok(()) => self.await_kernel(),
            Err(error) => self.fail_start(error),
        }
        Ok(())
    }

    /// Writes a new kernel's initial records into the warm worker's own database.
    fn begin_new_state(&mut self) -> Result<()> {
        let Some(EngineReady { engine, version, .. }) = &self.engine else { return Ok(()) };
        self.state.rehearse();
        self.state.set_engine(engine, version)?;
        self.state_is_new()
    }

    /// A kernel that adopts the warm worker's folder has nothing to load.
    fn state_is_new(&self) -> Result<()> {
        match self.state.heads()?.is_empty() {
            true => Ok(()),
            false => Err(Error::internal("the warm worker's folder contains a kernel's state")),
        }
    }

    /// The warm worker is ready: no user data has arrived.
    pub(super) fn await_kernel(&mut self) {
        self.life = Life::Unbound;
        // The daemon attaches at once or never.
        self.orphan_at = Some(Instant::now() + limits::WORKER_ADOPT);
        self.report_ready();
    }

    /// Handles calls while there is no kernel.
    pub(super) fn on_unbound_call(&mut self, call: Call) {
        match call {
            Call::BindKernel(binding, answer) => self.bind_kernel(*binding, answer),
            Call::ExecChannel(token, answer) => drop(answer.send(self.open_exec_channel(token))),
            Call::Usage(answer) if self.enclosure.stands_still() => {
                drop(answer.send(Err(Error::unavailable("the engine is stopped"))));
            }
            Call::Usage(answer) => drop(answer.send(Ok(self.enclosure.usage()))),
            other => other.refuse(Error::refused("this worker has no kernel yet").reason("unbound")),
        }
    }

    /// No kernel needs this worker any more: there is nothing to save.
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
        let KernelBinding { kernel, epoch, name, folder, brings_state, protected, mounts, origin, .. } = binding;
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
            self.settings.spool_folder = folder;
            self.open_kernels_state()?;
        } else if brings_state {
            self.open_kernels_state()?;
        }
        self.identity.become_kernels(kernel, epoch);
        let frame = json!({ "op": "bind", "env": engines::kernel_environment(Some((&name, origin, epoch))) });
        self.ask(frame.to_string().as_bytes(), By::Bind)
    }

    /// Opens the database of an existing kernel, whose entries are loaded once the engine is bound.
    fn open_kernels_state(&mut self) -> Result<()> {
        let db = EngineDb::open(&self.settings.spool_folder.join("engine.db"), self.settings.durability)?;
        let kernels = State::new(db.bounded(self.settings.stored_bytes), self.settings.state_bytes);
        std::mem::replace(&mut self.state, kernels).abandon();
        self.state_to_load = true;
        Ok(())
    }

    /// Makes the suspended worker of a copied machine another kernel's. Its processes continue, the engine seeds its
    /// generators before it gets anything else, and only then there is an answer.
    pub(super) fn become_copy(&mut self, binding: KernelBinding, answer: Answer<Report>) {
        let KernelBinding { kernel, epoch, name, origin, ephemeral, copy, .. } = binding;
        let renamed = match copy {
            Some(copy) if self.suspended && matches!(self.life, Life::Serving) => {
                self.enclosure.rename(name.as_str().to_owned()).map(|()| copy)
            }
            Some(_) | None => Err(Error::refused("the worker of a copied machine is not suspended").reason("bound")),
        };
        let copy = match renamed {
            Ok(copy) => copy,
            Err(error) => return drop(answer.send(Err(error))),
        };
        self.identity.become_kernels(kernel, epoch);
        self.identity.become_copy(copy.worker, copy.secret);
        self.ephemeral = ephemeral;
        // Executions and processes are the original's.
        self.ledger = Ledger::default();
        self.processes.end_all();
        self.resume();
        let frame = json!({ "op": "reseed", "env": engines::kernel_environment(Some((&name, origin, epoch))) });
        // A refusal is answered.
        let _ = self.ask(frame.to_string().as_bytes(), By::Reseed(answer));
    }

    /// Handles the engine's answer to `reseed`.
    pub(super) fn on_reseeded(&mut self, ok: bool, json: &[u8], answer: Answer<Report>) {
        let outcome = match ok {
            true => Ok(self.report()),
            false => Err(Error::unavailable(format!(
                "the seeding of the engine is not confirmed: {}",
                String::from_utf8_lossy(&json[..json.len().min(500)])
            ))
            .reason("seeding")),
        };
        let _ = answer.send(outcome);
    }

    /// Whether the worker ends with its daemon: it has no kernel, or an ephemeral one.
    pub(super) fn goes_with_daemon(&self) -> bool {
        matches!(self.life, Life::Unbound) || self.ephemeral
    }

    fn source(&self, source: BoundSource) -> Result<MountSource> {
        match source.token {
            0 => Ok(MountSource::Path(source.path)),
            token => {
                let tree = self.descriptors.take(token);
                let tree = tree.ok_or_else(|| Error::invalid("the descriptor of a mount did not arrive"))?;
                Ok(MountSource::Tree { tree, shows: source.path })
            }
        }
    }

    /// Handles the engine's answer to `bind`.
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
