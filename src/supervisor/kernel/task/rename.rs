//! The change of a kernel's name.

use std::rc::Rc;

use super::Task;
use crate::catalog::Notes;
use crate::core::audit::NewAudit;
use crate::core::error::Result;
use crate::core::name::KernelName;
use crate::core::spec::KernelSpec;
use crate::supervisor::host::audit::bounded;
use crate::supervisor::kernel::command::Change;

impl Task {
    /// Changes the kernel's name; returns the version.
    ///
    /// One transaction of the catalog changes row, events and audit log. The journal's mark follows it.
    pub(crate) async fn rename(&mut self, change: Change, name: KernelName) -> Result<u64> {
        self.admit(&change.actor, change.expected_version)?;
        self.settle().await?;
        self.kernel.not_in_transition()?;
        let (host, kernel) = (Rc::clone(&self.host), Rc::clone(&self.kernel));
        let (before, version) = (kernel.spec().name.clone(), kernel.view().version);
        if before == name {
            return Ok(version);
        }
        self.tools.check_rename(&name)?;
        let names = (kernel.event_name(), host.event_name(kernel.uid, &name));
        // Earlier events must be in the catalog, where the transaction renames them.
        host.events.flush().await;
        let detail = serde_json::json!({ "from": before, "to": name, "by": change.actor.to_string() });
        let line = host.line(&change.actor, "kernel.rename", Some(&kernel));
        let text = bounded(format!("from {before} to {name}"));
        let line = NewAudit { version_before: Some(version), version_after: Some(version + 1), detail: text, ..line };
        let notes = Notes { events: vec![host.events.event(&names.1, "kernel_renamed", detail)], audit: vec![line] };
        let spec = KernelSpec { name: name.clone(), ..kernel.spec_now() };
        host.catalog.rename_kernel(kernel.id, spec.clone(), names.clone(), notes).await?;
        kernel.spec.replace(Rc::new(spec));
        kernel.event_name.replace(names.1.clone());
        self.tools.rename(name.clone(), names.1);
        host.events.noted();
        match kernel.records.mark(&change.actor, &format!("renamed from {before} to {name}"), host.now_ms()).await {
            Ok(version) => {
                kernel.advance(version);
                Ok(version)
            }
            Err(error) => {
                // The kernel has its new name; events and audit log say so.
                tracing::warn!(kernel = %name, %error, "a new name could not be noted in the journal");
                Ok(version)
            }
        }
    }
}
