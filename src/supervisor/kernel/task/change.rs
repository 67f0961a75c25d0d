//! Changes by clients other than executions and records: mounts, MCP servers, leases.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::Task;
use crate::core::audit::NewAudit;
use crate::core::error::{Error, Result};
use crate::core::info::{GivenMount, McpTransport, MountInfo};
use crate::core::limits;
use crate::core::spec::check_inside_path;
use crate::isolation::HostMount;
use crate::supervisor::host::audit::bounded;
use crate::supervisor::kernel::command::{Actor, Change};
use crate::supervisor::kernel::lease::{self, Lease};

impl Task {
    /// The allowed paths of the specification and the mounts added since.
    pub(crate) fn all_mounts(&self) -> Vec<GivenMount> {
        let spec = self.kernel.spec();
        let own = spec.paths.iter().map(super::update::given);
        own.chain(self.mounts.added.iter().cloned()).collect()
    }

    /// Adds a mount: attached to the live worker first, which may refuse it, then recorded.
    pub(crate) async fn mount(&mut self, change: Change, mount: MountInfo) -> Result<()> {
        self.admit(&change.actor, change.expected_version)?;
        self.not_in_transition().await?;
        let driver = Rc::clone(self.workers.driver(self.kernel.spec().isolation)?);
        if !driver.has_local_files() {
            let message = "a kernel in a virtual machine has no host paths: its files are on a disk of its own";
            return Err(Error::unsupported(message).reason("mounts").hint("use --isolation process"));
        }
        check_inside_path(Path::new(&mount.path)).map_err(|error| Error::invalid(error.to_string()))?;
        let real = self.host.check_source(self.kernel.uid, Path::new(&mount.source))?;
        let mounts = self.all_mounts();
        if mounts.iter().any(|there| there.mount.path == mount.path) {
            return Err(Error::already_exists(format!("something is mounted at {} already", mount.path))
                .hint(format!("`ryokan unmount {} {}` takes it away", self.kernel.spec().name, mount.path)));
        }
        if mounts.len() >= limits::MOUNTS {
            return Err(Error::busy(format!("a kernel has at most {} mounts", limits::MOUNTS)));
        }
        // Checked before the mount is attached: existing directories stay when the mount is removed.
        let (workspace, inside) = (self.workspace(), Path::new(&mount.path));
        let made = driver.missing_components(&workspace, inside);
        if let (Some(link), Some(current)) = (self.link(), &self.worker.current) {
            // The checked path, whatever the requested path refers to by now.
            let attached = HostMount { inside: inside.to_owned(), source: real.clone(), writable: mount.writable };
            if let Err(error) = current.worker.handle().attach_mount(&link, &attached).await {
                driver.remove_components(&workspace, inside, made);
                return Err(error);
            }
        }
        let text = format!("mounted {} at {} ({})", mount.source, mount.path, if mount.writable { "rw" } else { "ro" });
        let given = GivenMount { mount: mount.clone(), real: Some(real.display().to_string()) };
        let recorded =
            self.kernel.records.put_mount(&change.actor, &text, given.clone(), made, self.host.now_ms()).await;
        let version = match recorded {
            Ok(version) => version,
            Err(error) => {
                // An unrecorded mount must not stay attached: the caller may retry.
                if let Some(link) = self.link()
                    && let Err(stuck) = link.unbind(Path::new(&mount.path)).await
                {
                    tracing::warn!(path = mount.path, error = %stuck, "a mount that was not recorded stays until the worker ends");
                } else {
                    driver.remove_components(&workspace, inside, made);
                }
                return Err(error);
            }
        };
        let mut detail = serde_json::json!({ "path": mount.path, "source": mount.source, "writable": mount.writable });
        if given.real.as_deref().is_some_and(|real| self.host.maps_owner(self.kernel.uid, Path::new(real))) {
            detail["owner_mapped"] = true.into();
        }
        self.changed(&change.actor, version, ("kernel_mounted", "kernel.mount"), detail).await;
        self.mounts.added.push(given);
        self.kernel.terms_changed();
        Ok(())
    }

    /// Removes a mount.
    pub(crate) async fn unmount(&mut self, change: Change, path: &str) -> Result<()> {
        self.admit(&change.actor, change.expected_version)?;
        self.not_in_transition().await?;
        let Some(at) = self.mounts.added.iter().position(|given| given.mount.path == path) else {
            let own = self.kernel.spec().paths.iter().any(|allowed| allowed.path == Path::new(path));
            return Err(if own {
                Error::refused(format!("{path} belongs to the kernel's specification"))
                    .reason("spec_path")
                    .hint(format!("ryokan update {} --remove-path {path}", self.kernel.spec().name))
            } else {
                Error::not_found(format!("nothing is mounted at {path}"))
            });
        };
        let text = format!("unmounted {path}");
        let (version, made) = self.kernel.records.remove_mount(&change.actor, &text, path, self.host.now_ms()).await?;
        let detail = serde_json::json!({ "path": path });
        self.changed(&change.actor, version, ("kernel_unmounted", "kernel.unmount"), detail).await;
        self.mounts.added.remove(at);
        // Recorded first: if the live worker keeps the mount because it is in use, the mount ends with that worker.
        if let Some(link) = self.link() {
            link.unbind(Path::new(path)).await?;
        }
        // In a shared workspace, another session may have a mount at the same path.
        if self.kernel.others().is_empty() {
            let driver = self.workers.driver(self.kernel.spec().isolation)?;
            driver.remove_components(&self.workspace(), Path::new(path), made);
        }
        Ok(())
    }

    /// Refuses changes that a transition would overwrite.
    pub(crate) async fn not_in_transition(&mut self) -> Result<()> {
        self.settle().await?;
        self.kernel.check_available()?;
        let admitted = self.kernel.not_in_transition();
        if self.kernel.interrupted().is_some() {
            // This request is refused, and starts the recovery.
            self.kernel.wake_sharers();
        }
        admitted
    }

    fn workspace(&self) -> PathBuf {
        self.host.catalog.kernel_files(self.kernel.files().id).workspace
    }

    /// Adds an MCP server: only one that the configuration allows.
    pub(crate) async fn register_mcp(&mut self, change: Change, name: String, transport: McpTransport) -> Result<()> {
        self.admit(&change.actor, change.expected_version)?;
        self.not_in_transition().await?;
        self.tools.register(&name, &transport)?;
        let text = format!("registered MCP server {name}");
        let written = self.kernel.records.put_mcp(&change.actor, &text, &name, transport, self.host.now_ms()).await;
        match written {
            Ok(version) => {
                let detail = serde_json::json!({ "server": name });
                self.changed(&change.actor, version, ("mcp_registered", "kernel.mcp_register"), detail).await;
                Ok(())
            }
            Err(error) => {
                self.tools.unregister(&name);
                Err(error)
            }
        }
    }

    /// Removes an MCP server.
    pub(crate) async fn unregister_mcp(&mut self, change: Change, name: &str) -> Result<()> {
        self.admit(&change.actor, change.expected_version)?;
        self.not_in_transition().await?;
        let text = format!("unregistered MCP server {name}");
        let version = self.kernel.records.remove_mcp(&change.actor, &text, name, self.host.now_ms()).await?;
        self.tools.unregister(name);
        let detail = serde_json::json!({ "server": name });
        self.changed(&change.actor, version, ("mcp_unregistered", "kernel.mcp_unregister"), detail).await;
        Ok(())
    }

    /// Publishes a change of the kernel's access rights as an event, and writes it to the audit log.
    pub(crate) async fn changed(
        &self,
        actor: &Actor,
        version: u64,
        names: (&'static str, &str),
        detail: serde_json::Value,
    ) {
        let before = self.kernel.advance(version);
        let line = self.host.line(actor, names.1, Some(&self.kernel));
        let line = NewAudit { version_before: Some(before), version_after: Some(version), ..line };
        self.host.write_audit(NewAudit { detail: bounded(detail.to_string()), ..line }).await;
        self.host.events.publish(&self.kernel.event_name(), names.0, detail);
    }

    /// Takes, renews, or (with a time of 0) releases a lease.
    pub(crate) async fn take_lease(
        &mut self,
        actor: &Actor,
        holder: String,
        token: Vec<u8>,
        ttl_ms: u64,
    ) -> Result<(Vec<u8>, i64)> {
        let now = self.host.now_ms();
        let presented = if token.is_empty() { &actor.lease } else { &token };
        lease::admit(self.lease.as_ref(), presented, now)?;
        if ttl_ms != 0 && self.lease.is_none() {
            self.kernel.refuse_unfinished_group()?;
        }
        if ttl_ms == 0 {
            if let Some(lease) = self.lease.take() {
                self.kernel.records.release_lease(&lease).await?;
                self.leased(actor, "kernel.lease_release", &lease).await;
            }
            return Ok((Vec::new(), now));
        }
        let token = if presented.is_empty() { self.host.random::<32>().to_vec() } else { presented.clone() };
        // A renewal under another name is still the same lease: the name in the database identifies it.
        let holder = match &self.lease {
            Some(present) if present.is_held_by(&token) => present.holder.clone(),
            _ => holder,
        };
        let ttl_ms = ttl_ms.min(limits::LEASE_MAX.as_millis() as u64);
        let lease = Lease { holder, token_hash: Lease::hash(&token), expires_at_ms: now.saturating_add(ttl_ms as i64) };
        self.kernel.records.take_lease(&lease, now).await?;
        let expires = lease.expires_at_ms;
        // A renewed or prolonged lease is the same lease.
        if self.lease.as_ref().is_none_or(|before| !before.is_held_by(&token)) {
            self.leased(actor, "kernel.lease", &lease).await;
        }
        self.lease = Some(lease);
        self.kernel.terms_changed();
        Ok((token, expires))
    }

    async fn leased(&self, actor: &Actor, action: &str, lease: &Lease) {
        let line = self.host.line(actor, action, Some(&self.kernel));
        self.host.write_audit(NewAudit { detail: bounded(format!("holder {:?}", lease.holder)), ..line }).await;
    }
}
