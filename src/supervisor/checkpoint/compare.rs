//! Differences between two checkpoints of a kernel, or between a checkpoint and the present.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::{Arc, PoisonError};

use tokio::sync::mpsc;

use super::contents;
use super::gather::gather;
use super::take::tool_part;
use crate::core::checkpoint::{Checkpoint, McpPart, StateParts, ToolPart};
use crate::core::diff::{self, Area, Deed, Difference, Sizes};
use crate::core::error::{Error, Result};
use crate::core::freeze::KernelRevision;
use crate::core::freeze::refs::{McpLock, Revisions};
use crate::core::ids::Digest;
use crate::core::info::GivenMount;
use crate::core::limits;
use crate::core::spec::KernelSpec;
use crate::core::workflow::WorkflowPart;
use crate::link::types::StateHead;
use crate::store::Store;
use crate::supervisor::checkpoint::pruning::find_pinned;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::workspace::{self, Changed, TreeId, WorkspaceError};

/// Property of a state entry whose saved form differs each time.
const PERHAPS: &str = "perhaps: its saved form is never the same";

/// A kernel's state at one moment.
struct Side {
    parts: StateParts,
    tree: Digest,
    mounts: Vec<GivenMount>,
    mcp: Vec<McpPart>,
    tools: Vec<ToolPart>,
    spec: KernelSpec,
    work: WorkflowPart,
    files: u64,
    /// Number of the newest journal entry.
    journal: u64,
}

impl Side {
    fn sizes(&self) -> Sizes {
        let artifacts = self.work.artifacts.iter().map(|artifact| artifact.bytes).sum();
        [("files", self.files), ("engine state", self.parts.bytes()), ("artifacts", artifacts)]
    }
}

/// A state to compare: of a kernel at a checkpoint, or now if the reference is empty.
pub type State<'a> = (&'a Rc<Kernel>, &'a str);

/// Reports to `take` the differences from one state to another, perhaps of another kernel.
///
/// # Errors
/// `notFound` (also for the present of one kernel with itself), `conflict` (ambiguous), `corrupt`, errors of capturing the present state, and errors of `take`.
pub async fn diff(
    host: &Rc<Host>,
    (kernel, from): State<'_>,
    (of, to): State<'_>,
    mut take: impl AsyncFnMut(Difference) -> Result<()>,
) -> Result<()> {
    let is_one_kernel = kernel.id == of.id;
    // Only this guard protects the tree of the present state from garbage collection.
    let _held = host.store.run(|store| Ok(store.guard())).await?;
    // The pins keep both checkpoints until the comparison ends.
    let (before, _from_held) = match from {
        "" if !is_one_kernel => (now(host, kernel, None).await?.0, None),
        from => {
            let (from, held) = find_pinned(kernel, from).await?;
            (side_of(host, &from).await?, Some(held))
        }
    };
    let (after, unsteady, _to_held) = match to {
        "" => {
            let (after, unsteady) = now(host, of, Some(before.parts.clone())).await?;
            (after, unsteady, None)
        }
        to => {
            let (to, held) = find_pinned(of, to).await?;
            (side_of(host, &to).await?, BTreeSet::new(), Some(held))
        }
    };
    for mut difference in diff::of_state(&before.parts, &after.parts) {
        if difference.deed == Deed::Changed && unsteady.contains(&difference.name) {
            difference.what.push(PERHAPS.into());
        }
        take(difference).await?;
    }
    files(host, before.tree, after.tree, &mut take).await?;
    let shown = [
        diff::of_mounts(&before.mounts, &after.mounts),
        diff::of_mcp(&before.mcp, &after.mcp),
        diff::of_tools(&before.tools, &after.tools),
        diff::of_limits(&before.spec, &after.spec),
        diff::of_work(&before.work, &after.work),
        diff::of_sizes(&before.sizes(), &after.sizes()),
    ];
    for difference in shown.into_iter().flatten() {
        take(difference).await?;
    }
    // The journals of two kernels have nothing in common.
    match journal(before.journal, after.journal).filter(|_| is_one_kernel) {
        Some(difference) => take(difference).await,
        None => Ok(()),
    }
}

async fn side_of(host: &Host, checkpoint: &Checkpoint) -> Result<Side> {
    let (manifest, parts) = contents(host, checkpoint).await?;
    Ok(Side {
        parts,
        tree: manifest.workspace.tree,
        mounts: manifest.mounts,
        mcp: manifest.mcp,
        tools: manifest.tools,
        spec: manifest.spec,
        work: manifest.work,
        files: manifest.workspace.files,
        journal: manifest.journal,
    })
}

/// Captures the present files as a tree. The tree is unreferenced: the caller holds a store guard.
pub(super) async fn tree_now(host: &Rc<Host>, kernel: &Rc<Kernel>) -> Result<Digest> {
    let (of, own) = (Rc::clone(host), Rc::clone(kernel));
    let looked = kernel.with_worker(None, move |link| async move {
        let mut gathered = gather(&of, &own, Some(&link), None).await?;
        gathered.objects.settle(&of, None).await?;
        Ok(gathered.files.part.tree)
    });
    looked.await
}

/// The revisions in the present files, and what code and files are based on.
///
/// # Errors
/// Errors of capturing the files.
pub(crate) async fn revisions_now(host: &Rc<Host>, kernel: &Rc<Kernel>) -> Result<(Revisions, KernelRevision)> {
    // Only this guard protects the tree from garbage collection.
    let _held = host.store.run(|store| Ok(store.guard())).await?;
    let tree = tree_now(host, kernel).await?;
    let barren = Arc::clone(&host.barren);
    let found = host.store.run_beside(move |store| {
        // What a panic left is at most incomplete.
        let mut barren = barren.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(workspace::revisions(store, TreeId(tree), &mut barren))
    });
    let found = found.await?.map_err(Error::from)?;
    let now = environment_now(host, kernel).await?;
    let (dependencies, databases) = (found.dependencies.clone(), found.databases.clone());
    let revision = KernelRevision { files: Some(tree), dependencies, databases, ..now };
    Ok((found, revision))
}

/// What a kernel's code is based on at present, without its files.
pub(crate) async fn environment_now(host: &Host, kernel: &Kernel) -> Result<KernelRevision> {
    Ok(KernelRevision {
        engine: kernel.spec().engine.name().into(),
        ryokan: env!("CARGO_PKG_VERSION").into(),
        image: host.drivers.of(kernel.spec().isolation)?.image_version(&kernel.spec(), &host.home(kernel.id, None).dir),
        version: kernel.view().engine_version,
        mcp: kernel.records.grants().await?.1.iter().map(|(name, transport)| McpLock::new(name, transport)).collect(),
        ..KernelRevision::default()
    })
}

/// Captures the present state in the form of a checkpoint; the stored objects are unreferenced. Also returns the
/// entries that differ from `before` and are saved in another form each time.
async fn now(host: &Rc<Host>, kernel: &Rc<Kernel>, before: Option<StateParts>) -> Result<(Side, BTreeSet<String>)> {
    let (of, own) = (Rc::clone(host), Rc::clone(kernel));
    let looked = kernel.with_worker(None, move |link| async move {
        let mut gathered = gather(&of, &own, Some(&link), None).await?;
        gathered.objects.settle(&of, None).await?;
        let changed = |difference: &Difference| difference.deed == Deed::Changed;
        let mut unsteady = BTreeSet::new();
        if before.is_some_and(|before| diff::of_state(&before, &gathered.parts).iter().any(changed)) {
            // Nothing has run since: what differs again differs by itself.
            link.save().await?;
            let bodies: BTreeMap<&str, Digest> =
                gathered.parts.entries.iter().map(|part| (part.key.as_str(), part.body)).collect();
            let differs = |head: &StateHead| bodies.get(head.key.as_str()).is_some_and(|body| *body != head.digest);
            let again = link.state_heads().await?.into_iter();
            unsteady = again.filter(differs).map(|head| head.key).collect();
        }
        Ok((gathered.parts, gathered.files.part, unsteady))
    });
    let (parts, workspace, unsteady) = looked.await?;
    let (mounts, mcp) = kernel.records.grants().await?;
    let mcp = mcp.into_iter().map(|(name, transport)| McpPart { name, transport }).collect();
    let side = Side {
        parts,
        tree: workspace.tree,
        mounts,
        mcp,
        tools: kernel.offered_tools().iter().map(tool_part).collect(),
        spec: (*kernel.spec()).clone(),
        work: kernel.records.workflow_part().await?,
        files: workspace.files,
        journal: kernel.view().version.saturating_sub(1),
    };
    Ok((side, unsteady))
}

fn journal(before: u64, after: u64) -> Option<Difference> {
    let entries = |entries: u64| if entries == 1 { "1 entry".to_owned() } else { format!("{entries} entries") };
    match after.cmp(&before) {
        std::cmp::Ordering::Equal => None,
        std::cmp::Ordering::Greater => Some(Difference::added(Area::Journal, "journal", entries(after - before))),
        std::cmp::Ordering::Less => Some(Difference::removed(Area::Journal, "journal", entries(before - after))),
    }
}

/// Reports to `take` the differences between two trees.
///
/// # Errors
/// As [`diff`].
pub(crate) async fn diff_trees(
    host: &Host,
    before: Digest,
    after: Digest,
    mut take: impl AsyncFnMut(Difference) -> Result<()>,
) -> Result<()> {
    files(host, before, after, &mut take).await
}

/// Walks both trees on a blocking thread, at the pace of the caller.
async fn files(
    host: &Host,
    before: Digest,
    after: Digest,
    take: &mut impl AsyncFnMut(Difference) -> Result<()>,
) -> Result<()> {
    let walk = move |store: &Store, put: &mut dyn FnMut(Difference) -> bool| {
        for change in workspace::diff(store, TreeId(before), TreeId(after))? {
            let change = change?;
            if is_reported(&change) && !put(describe(change)) {
                break;
            }
        }
        Ok(())
    };
    each_found(host, limits::DIFF_QUEUE, walk, take).await
}

/// Runs `walk` on a blocking thread and passes its items to `take`; `walk` learns when no more items are wanted.
pub(super) async fn each_found<T: Send + 'static>(
    host: &Host,
    behind: usize,
    walk: impl FnOnce(&Store, &mut dyn FnMut(T) -> bool) -> std::result::Result<(), WorkspaceError> + Send + 'static,
    take: &mut impl AsyncFnMut(T) -> Result<()>,
) -> Result<()> {
    let (found, mut finds) = mpsc::channel(behind);
    let walk = host.store.run_beside(move |store| {
        let walked = walk(store, &mut |one| found.blocking_send(one).is_ok());
        drop(found);
        Ok(walked)
    });
    let shown = async {
        while let Some(one) = finds.recv().await {
            if let Err(error) = take(one).await {
                finds.close();
                return Err(error);
            }
        }
        Ok::<(), Error>(())
    };
    let (walked, shown) = futures::join!(walk, shown);
    shown?;
    Ok(walked??)
}

/// Whether a change is reported. A changed time alone is not: every change in a directory updates the directory's time.
fn is_reported(change: &workspace::Change) -> bool {
    let time_only = Changed { modified: true, ..Changed::default() };
    change.kind != workspace::ChangeKind::Changed(time_only)
}

fn describe(change: workspace::Change) -> Difference {
    let path = |path: &std::path::Path| path.display().to_string();
    let mut difference = Difference {
        area: Area::File,
        deed: Deed::Changed,
        name: if change.path.as_os_str().is_empty() { ".".into() } else { path(&change.path) },
        before: String::new(),
        after: String::new(),
        what: Vec::new(),
    };
    match change.kind {
        workspace::ChangeKind::Added => difference.deed = Deed::Added,
        workspace::ChangeKind::Removed => difference.deed = Deed::Removed,
        workspace::ChangeKind::Renamed { from } => {
            difference.deed = Deed::Renamed;
            difference.before = path(&from);
        }
        workspace::ChangeKind::Kind => difference.what.push("kind".into()),
        workspace::ChangeKind::Changed(Changed { content, mode, ownership, links, modified }) => {
            let words =
                [(content, "content"), (mode, "mode"), (ownership, "owner"), (links, "links"), (modified, "time")];
            difference.what.extend(words.into_iter().filter(|(is, _)| *is).map(|(_, word)| word.to_owned()));
        }
    }
    difference
}
