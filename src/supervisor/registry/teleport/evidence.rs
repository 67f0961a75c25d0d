//! The lines of the source's audit log about a moved kernel: read and sent, verified, and kept at the target.
//!
//! The target stores them as one object that the kernel may read, and names the object in its own line `kernel.arrive`.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::catalog::AuditFilter;
use crate::core::audit::AuditHead;
use crate::core::error::{Error, Result};
use crate::core::handover::{Excerpt, Link};
use crate::core::ids::{Digest, HostId, KernelId};
use crate::core::limits;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;

/// A verified excerpt.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(in crate::supervisor::registry) struct Evidence {
    /// Its address.
    pub(super) excerpt: Digest,
    /// What the own log says about it.
    pub(in crate::supervisor::registry) text: String,
}

/// Reads the newest lines about a kernel.
async fn read(host: &Host, kernel: KernelId) -> Result<Excerpt> {
    let head = host.catalog.audit_head().await?;
    let filter = AuditFilter { kernel: Some(kernel.to_string()), seen_by: None };
    let (mut found, mut after) = (VecDeque::new(), 0);
    loop {
        let page = host.catalog.audit_after(after, filter.clone(), limits::PAGE_ROWS).await?;
        let Some(last) = page.last() else { break };
        after = last.sequence;
        found.extend(page.into_iter().filter(|line| line.sequence <= head.sequence));
        let excess = found.len().saturating_sub(limits::HANDOVER_AUDIT_LINES);
        found.drain(..excess);
    }
    let (mut lines, mut last) = (Vec::with_capacity(found.len()), AuditHead::EMPTY);
    for line in found {
        let previous = line.sequence.saturating_sub(1);
        let before = match previous {
            0 => AuditHead::EMPTY.hash,
            previous if previous == last.sequence => last.hash,
            previous => {
                let before = host.catalog.audit_after(previous - 1, AuditFilter::default(), 1).await?;
                before.first().map_or(AuditHead::EMPTY.hash, |before| before.hash)
            }
        };
        last = AuditHead { sequence: line.sequence, hash: line.hash };
        lines.push(Link::of(before, line));
    }
    Ok(Excerpt { host: host.id(), kernel, head, lines })
}

/// Stores the excerpt about a kernel; returns its address.
///
/// # Errors
/// Catalog errors, `corrupt` for a log whose chain is broken at these lines.
pub(in crate::supervisor::registry) async fn store_excerpt(host: &Host, kernel: &Kernel) -> Result<Digest> {
    let excerpt = read(host, kernel.id).await?;
    excerpt.check(host.id(), kernel.id).map_err(|error| {
        Error::corrupt(format!("the audit log about kernel {}: {error}", kernel.spec().name))
            .reason("audit")
            .hint("`ryokan audit --verify` checks all of it")
    })?;
    let bytes = serde_json::to_vec(&excerpt).map_err(|error| Error::internal(error.to_string()))?;
    if bytes.len() as u64 > limits::HANDOVER_SEAL_BYTES {
        return Err(Error::refused("the audit log about the kernel is too large to move").reason("handover_size"));
    }
    Ok(host.store.put(bytes).await?)
}

/// Verifies a received excerpt.
///
/// # Errors
/// `corrupt` if it is not linked to a chain, or is of another host or kernel.
pub(in crate::supervisor::registry) async fn check_excerpt(
    host: &Host,
    digest: Digest,
    source: HostId,
    kernel: KernelId,
) -> Result<Evidence> {
    let wrong = |why: String| {
        Error::corrupt(format!("the received kernel: its excerpt of the audit log: {why}")).reason("handover")
    };
    let bytes = host.store.get(digest, limits::HANDOVER_SEAL_BYTES).await?;
    let excerpt: Excerpt = serde_json::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
    excerpt.check(source, kernel).map_err(|error| wrong(error.to_string()))?;
    let text = format!("blob {digest}: {} lines of its log, which ends at {}", excerpt.lines.len(), excerpt.head);
    Ok(Evidence { excerpt: digest, text })
}
