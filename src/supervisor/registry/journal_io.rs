//! The journal of a kernel in its file.

use std::collections::{BTreeSet, HashSet};

use crate::bundle::Journal;
use crate::catalog::StateHandle;
use crate::catalog::state::{Direction, ExecClose, OutputRecord, Position, RootKind};
use crate::core::error::{Error, Result};
use crate::core::exec::ExecEnd;
use crate::core::ids::{Digest, KernelId};
use crate::core::limits;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;

/// Executions and programs of a kernel that run or wait at once, at most.
const RUNNING: usize = 1 + limits::EXECUTIONS_QUEUED + limits::PROCESSES;

/// Stores the pages of a kernel's journal. The caller keeps the store from collecting them.
pub(super) async fn export(host: &Host, kernel: &Kernel) -> Result<Journal> {
    let state = &kernel.records.state;
    // An output may end, and another begin, while the pages are read.
    let mut outputs = outputs(state).await?;
    let (mut at, mut pages) = (Position::default(), Vec::new());
    while let Some((page, next)) = state.journal_page(at).await? {
        pages.push(host.store.put(page).await?);
        at = next;
        if pages.len() > limits::HANDOVER_PAGES {
            return Err(Error::refused("the kernel's journal is too large for a file")
                .reason("bundle_size")
                .hint("export named checkpoints, without the journal"));
        }
    }
    outputs.extend(self::outputs(state).await?);
    Ok(Journal { format: StateHandle::history_format(), pages, outputs: outputs.into_iter().collect() })
}

/// The objects with output of executions.
async fn outputs(state: &StateHandle) -> Result<BTreeSet<Digest>> {
    let roots = state.roots().await?.into_iter();
    Ok(roots.filter(|root| matches!(root.kind, RootKind::Output { .. })).map(|root| root.digest).collect())
}

/// Imports a journal into the database of a kernel that has no row yet; returns whether this release can read it.
pub(super) async fn import(host: &Host, id: KernelId, journal: &Journal) -> Result<bool> {
    if journal.format != StateHandle::history_format() {
        return Ok(false);
    }
    let pages = journal.pages.clone();
    let sizes = host.store.run_beside(move |store| pages.iter().map(|page| store.size(*page)).collect());
    let sizes: Vec<u64> = sizes.await?;
    let bytes = sizes.iter().copied().fold(0, u64::saturating_add);
    if host.free_bytes().is_some_and(|free| bytes > free) {
        return Err(Host::full());
    }
    let state = host.catalog.state(id);
    for page in &journal.pages {
        state.import_journal(host.store.get(*page, limits::HANDOVER_PAGE_BYTES).await?).await?;
    }
    let held: HashSet<Digest> = journal.outputs.iter().copied().collect();
    if !outputs(&state).await?.iter().all(|output| held.contains(output)) {
        return Err(Error::corrupt("the journal names output that the file does not have").reason("bundle"));
    }
    is_readable(&state).await?;
    end_running(host, &state).await?;
    Ok(true)
}

/// Ends what ran at the export: no worker has it here.
async fn end_running(host: &Host, state: &StateHandle) -> Result<()> {
    let running = state.running_execs().await?;
    if running.len() > RUNNING {
        return Err(Error::corrupt(format!("the journal has {} executions at once", running.len())).reason("bundle"));
    }
    for exec in running {
        let end = ExecEnd::lost("it ran when its kernel was exported");
        state.end_exec(exec, ExecClose { end, output: OutputRecord::default(), at_ms: host.now_ms() }).await?;
    }
    Ok(())
}

/// Checks that imported entries read back as records, in order.
pub(super) async fn is_readable(state: &StateHandle) -> Result<()> {
    let mut after = 0;
    loop {
        let page = state.journal(Direction::After(after), limits::PAGE_ROWS).await?;
        match page.last() {
            Some(last) if last.sequence > after => after = last.sequence,
            Some(_) => return Err(Error::corrupt("the numbers of the journal do not grow").reason("bundle")),
            None => return Ok(()),
        }
    }
}
