//! The change of a kernel's specification.
//!
//! New paths are attached first, since the worker may refuse them; then the change is recorded; then revoked paths are
//! detached. Limits and network belong to the worker: it keeps those of its start, which the catalog records.

use std::path::Path;
use std::rc::Rc;

use super::Task;
use crate::catalog::{KernelChange, Notes};
use crate::core::audit::NewAudit;
use crate::core::error::{Error, Result};
use crate::core::info::{GivenMount, MountInfo};
use crate::core::limits;
use crate::core::spec::{AllowedPath, Isolation, KernelSpec, Net};
use crate::core::spec_update::{SpecUpdate, changes};
use crate::core::venv::is_in_workspace;
use crate::supervisor::host::audit::bounded;
use crate::supervisor::host::venv::{has_venv, no_venv};
use crate::supervisor::kernel::command::Change;
use crate::supervisor::workers::admission::check_host_limits;

impl Task {
    /// Changes the specification; returns the version.
    pub(crate) async fn update(&mut self, change: Change, update: SpecUpdate) -> Result<u64> {
        self.admit(&change.actor, change.expected_version)?;
        self.not_in_transition().await?;
        let (host, kernel) = (Rc::clone(&self.host), Rc::clone(&self.kernel));
        let before = kernel.spec_now();
        let new = self.updated(&before, &update)?;
        let lines = changes(&before, &new);
        if lines.is_empty() {
            return Ok(kernel.view().version);
        }
        let (gone, added) = (paths_without(&before, &new), paths_without(&new, &before));
        let is_replaced = |given: &GivenMount| gone.iter().any(|other| other.mount.path == given.mount.path);
        let (replaced, fresh): (Vec<_>, Vec<_>) = added.into_iter().partition(is_replaced);
        self.exchange(&[], &fresh).await?;
        let worker_spec = self.life.has_worker().then(|| kernel.worker_spec());
        if let Err(error) = self.record_update(&change, &new, worker_spec.as_deref(), &lines).await {
            // An unrecorded path must not stay attached: the caller may retry.
            if let Err(stuck) = self.exchange(&fresh, &[]).await {
                tracing::warn!(error = %stuck, "a path that was not recorded stays until the worker ends");
            }
            return Err(error);
        }
        kernel.spec.replace(Rc::new(new.clone()));
        // Paths of the specification are mounts, too.
        kernel.terms_changed();
        if let Some(worker_spec) = worker_spec {
            let paths = match self.exchange(&gone, &replaced).await {
                Ok(()) => new.paths.clone(),
                Err(error) => {
                    tracing::warn!(kernel = %new.name, %error, "a changed path stays until the worker ends");
                    worker_spec.paths.clone()
                }
            };
            kernel.worker_spec.replace(Some(Rc::new(KernelSpec { paths, ..(*worker_spec).clone() })));
        }
        self.rearm_idle();
        self.save_life().await;
        let text = format!("updated: {}", lines.join(", "));
        let version = match kernel.records.mark(&change.actor, &text, host.now_ms()).await {
            Ok(version) => {
                kernel.advance(version);
                version
            }
            Err(error) => {
                // The change is in force; events and audit log say so.
                tracing::warn!(kernel = %new.name, %error, "a change of the specification is not in the journal");
                kernel.view().version
            }
        };
        Ok(version)
    }

    /// The checked new specification, with its new paths resolved.
    fn updated(&self, before: &KernelSpec, update: &SpecUpdate) -> Result<KernelSpec> {
        let (host, kernel) = (&self.host, &self.kernel);
        let mut new = update.apply(before).map_err(|path| {
            Error::not_found(format!("{} is no path of the specification of {}", path.display(), before.name))
                .hint(format!("ryokan show {} lists them; mounts go by ryokan unmount", before.name))
        })?;
        self.workers.check_spec(&new, kernel.uid)?;
        if new.limits != before.limits {
            check_host_limits(&new.limits, &host.config.defaults.limits())?;
        }
        self.check_update_here(before, &new)?;
        if self.mounts.added.len() + new.paths.len() > limits::MOUNTS {
            return Err(Error::busy(format!("a kernel has at most {} mounts", limits::MOUNTS)));
        }
        for allowed in new.paths.iter_mut().filter(|allowed| allowed.real.is_none()) {
            if self.mounts.added.iter().any(|given| Path::new(&given.mount.path) == allowed.path) {
                let path = allowed.path.display();
                return Err(Error::already_exists(format!("something is mounted at {path} already"))
                    .hint(format!("`ryokan unmount {} {path}` takes it away", before.name)));
            }
            let real = host.check_source(kernel.uid, &allowed.path)?;
            host.check_writable(kernel.uid, allowed, &real)?;
            allowed.real = Some(real);
        }
        Ok(new)
    }

    /// Refuses changes that no later start of this kernel could apply.
    fn check_update_here(&self, before: &KernelSpec, new: &KernelSpec) -> Result<()> {
        let kernel = &self.kernel;
        let other_workspace = new.limits.workspace_bytes != before.limits.workspace_bytes;
        if other_workspace && kernel.thread_of.is_some() {
            let owner = &kernel.files().spec().name;
            return Err(Error::refused(format!("{} works in the workspace of {owner}", new.name))
                .reason("thread")
                .hint(format!("change the size there: ryokan update {owner} --workspace SIZE")));
        }
        if other_workspace && new.isolation == Isolation::Microvm {
            return Err(Error::unsupported("the disk of a virtual machine keeps its size")
                .reason("workspace")
                .hint("fork the kernel to a new one, or export it and import it there"));
        }
        let driver = self.workers.driver(new.isolation)?;
        let home = self.host.home(kernel.id, kernel.thread_of);
        if let Some(venv) = new.venv.as_ref().filter(|_| new.venv != before.venv).filter(|venv| is_in_workspace(venv)) {
            let workspace = home.shared_workspace.clone().unwrap_or_else(|| home.dir.join(&home.own_workspace));
            if !has_venv(&workspace, venv) {
                return Err(no_venv(&new.name, venv));
            }
        }
        if !self.life.has_worker() && driver.keeps_memory(&home)? {
            return Err(Error::conflict(format!("the memory of {} is saved for a machine like the last", new.name))
                .reason("saved_memory")
                .hint(format!(
                    "stop it first: ryokan start {0} && ryokan stop {0}; or discard the memory: ryokan start {0} --without-memory",
                    new.name
                )));
        }
        Ok(())
    }

    /// Records the change: one transaction of the catalog for row, event and audit log.
    async fn record_update(
        &self,
        change: &Change,
        new: &KernelSpec,
        worker_spec: Option<&KernelSpec>,
        lines: &[String],
    ) -> Result<()> {
        let (host, kernel) = (&self.host, &self.kernel);
        let (version, weaker) = (kernel.view().version, new.net != Net::None && kernel.spec().net == Net::None);
        let action = if weaker { "kernel.update_weaker" } else { "kernel.update" };
        let mut detail = serde_json::json!({ "changes": lines, "by": change.actor.to_string() });
        let real =
            |allowed: &AllowedPath| allowed.real.as_deref().is_some_and(|real| host.maps_owner(kernel.uid, real));
        if new.paths.iter().any(real) {
            detail["owner_mapped"] = true.into();
        }
        let line = host.line(&change.actor, action, Some(kernel));
        let (version_before, version_after) = (Some(version), Some(version + 1));
        let audit = vec![NewAudit { version_before, version_after, detail: bounded(lines.join(", ")), ..line }];
        let notes = Notes { events: vec![host.events.event(&kernel.event_name(), "kernel_updated", detail)], audit };
        let state_json = self.state_record(worker_spec).to_json()?;
        let row = KernelChange { spec: Some(new.clone()), state_json: Some(state_json), ..KernelChange::default() };
        host.catalog.update_kernel(kernel.id, row, notes).await?;
        host.events.noted();
        Ok(())
    }
}

/// The paths of one specification that the other lacks, or has with other access.
fn paths_without(spec: &KernelSpec, other: &KernelSpec) -> Vec<GivenMount> {
    let has = |allowed: &&AllowedPath| {
        !other.paths.iter().any(|known| (&known.path, known.writable) == (&allowed.path, allowed.writable))
    };
    spec.paths.iter().filter(has).map(given).collect()
}

/// The mount of an allowed path.
pub(super) fn given(allowed: &AllowedPath) -> GivenMount {
    let path = allowed.path.display().to_string();
    let real = allowed.real.as_ref().map(|real| real.display().to_string());
    GivenMount { mount: MountInfo { source: path.clone(), path, writable: allowed.writable }, real }
}
