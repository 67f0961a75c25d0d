//! Verifies the audit log against the heads sealed in checkpoints.

use crate::core::audit::{AuditBreak, AuditHead};
use crate::core::error::Result;
use crate::supervisor::checkpoint::manifest_of;
use crate::supervisor::host::audit::read_head;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::registry::Supervisor;

impl Supervisor {
    /// Verifies the audit log's chain against the caller's head, the head in the file, and the heads in checkpoint
    /// manifests. The inner error names the first line that does not fit, or else the first gap.
    ///
    /// # Errors
    /// The catalog's; `corrupt` if the file cannot be understood.
    pub async fn verify_audit(&self, known: Option<AuditHead>) -> Result<std::result::Result<AuditHead, AuditBreak>> {
        let mut ends: Vec<(AuditHead, String)> = known.map(|head| (head, "the caller".into())).into_iter().collect();
        let path = self.host().environment.data.join("audit.head");
        ends.extend(read_head(&path)?.map(|head| (head, path.display().to_string())));
        for kernel in self.kernels() {
            ends.extend(self.sealed_heads(&kernel).await);
        }
        let proved = self.host().catalog.verify_audit(ends).await?;
        let lost = self.host().lost_audit_lines();
        Ok(proved.and_then(|head| match lost {
            0 => Ok(head),
            _ => {
                let why = format!("after line {}, the last one, {lost} lines could not be written", head.sequence);
                Err(AuditBreak { sequence: head.sequence + 1, why, is_gap: true })
            }
        }))
    }

    /// The heads sealed in a kernel's checkpoints. Unreadable checkpoints are skipped here and reported by `verify`.
    async fn sealed_heads(&self, kernel: &Kernel) -> Vec<(AuditHead, String)> {
        let mut heads = Vec::new();
        for checkpoint in kernel.records.all_checkpoints().await.unwrap_or_default() {
            if let Ok(manifest) = manifest_of(self.host(), &checkpoint).await
                && manifest.host == self.host().id()
                && let Some(head) = manifest.audit
            {
                heads.push((head, format!("checkpoint {} of kernel {}", checkpoint.short_id(), kernel.spec().name)));
            }
        }
        heads
    }
}
