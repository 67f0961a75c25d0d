//! Measures what takes room on the disk: folders by walking them, objects by following every root.
//!
//! An object is counted with its entries in packs, so chunks that two objects share count once. What
//! a single kernel needs is freed with it; `gc` frees it afterwards. A large file with several names
//! counts once; the memory of a template that a kernel's machine needs, too, counts with the
//! templates, and what only copies have in common is divided among their kernels.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::OwnedSemaphorePermit;

use super::figures::disk_marks;
use super::is_gone;
use super::marks::walk;
use super::roots::{self, Named, Root};
use crate::catalog::state::RootKind;
use crate::core::checkpoint::Checkpoint;
use crate::core::error::{Error, Result};
use crate::core::ids::{Digest, KernelId};
use crate::core::limits;
use crate::core::usage::{CheckpointDisk, DiskFigures, DiskPart, DiskUsage, KernelDisk};
use crate::store::Store;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::disk::MeasuredDisk;
use crate::supervisor::registry::Supervisor;
use crate::workspace::{LinkedFiles, Seen, disk_bytes, disk_bytes_beyond};

/// Parts of a kernel's folder: the part, the beginnings of its files' names, what it is for.
const KERNEL_PARTS: &[(&str, &[&str], &str)] = &[
    ("workspace", &["workspace/", "files/"], "files of the kernel's code"),
    ("engine state", &["engine.db"], "variables, functions, settings"),
    ("journal", &["state.db"], "executions, messages, records; kept until the kernel is removed"),
    ("machine disk", &["disk."], "disk of the virtual machine"),
    (
        "machine memory",
        &["suspended.", "installed.", "machine."],
        "memory of a virtual machine, and its share of copies' common memory",
    ),
    ("other", &[""], "index of the files, staging"),
];

/// Parts of the data folder beside kernels and packs.
const HOST_PARTS: &[(&str, &[&str], &str)] = &[
    ("catalog", &["catalog.db", "audit.head"], "list of kernels, events, audit log"),
    ("reserve", &["reserve"], "released when the disk is full"),
    ("store index", &["store/"], "where objects are; made again if it is lost"),
    ("images", &["images/"], "images of virtual machines"),
    ("templates", &["templates/"], "booted virtual machines; built again if they are removed"),
    ("other", &[""], "copies for the next forks, locks, exchanged files"),
];

/// What objects of the store are kept for. One that several references need counts with the first of these.
const REASONS: [(&str, &str); 5] = [
    ("checkpoints", "files and state at each; `ryokan retention` limits them, `checkpoint --delete` removes one"),
    ("freezes", "states of groups; kept until the group is removed"),
    ("blobs", "blobs and artifacts; kept until their kernel is removed"),
    ("output", "output of executions, in the journal; kept until the kernel is removed"),
    ("present files", "files as last captured, with which the next checkpoint begins"),
];

/// The place of a reference in [`REASONS`].
fn reason(named: Named) -> usize {
    match named {
        Named::Row(RootKind::Checkpoint { .. }) => 0,
        Named::Freeze { .. } => 1,
        Named::Row(RootKind::Blob) => 2,
        Named::Row(RootKind::Output { .. }) => 3,
        Named::Files => 4,
    }
}

fn reasons(bytes: &ByReason) -> Vec<DiskPart> {
    let part = |((what, why), bytes): (&(&str, &str), &u64)| DiskPart {
        what: (*what).into(),
        bytes: *bytes,
        why: (*why).into(),
    };
    REASONS.iter().zip(bytes).map(part).filter(|part| part.bytes > 0).collect()
}

/// Bytes for each of [`REASONS`].
type ByReason = [u64; REASONS.len()];

/// What the folders of kernels are for.
const KERNELS_WHY: &str = "folders of the kernels, and of workers that wait for one";

/// Folders of the data folder.
pub(super) const KERNELS: &str = "kernels";
const TEMPLATES: &str = "templates";

/// Guard of the only measurement that a client waits for.
struct Measuring(Rc<Host>);

impl Measuring {
    /// Waits for a measurement in the background.
    async fn begin(host: &Rc<Host>) -> Result<(Measuring, OwnedSemaphorePermit)> {
        let measuring = match host.upkeep.measuring.replace(true) {
            false => Measuring(Rc::clone(host)),
            true => return Err(Error::busy("the disk is being measured already").reason("upkeep").hint("try again")),
        };
        let turn = Arc::clone(&host.upkeep.measure_turn).acquire_owned().await;
        Ok((measuring, turn.map_err(|error| Error::internal(error.to_string()))?))
    }
}

impl Drop for Measuring {
    fn drop(&mut self) {
        self.0.upkeep.measuring.set(false);
    }
}

/// Measures all kernels that are visible to `uid`, or one of them. `is_operator`: also the whole data folder, and
/// sharing with all kernels.
///
/// # Errors
/// `busy` during another measurement, `notFound`; errors of the file system and of the catalog.
pub async fn disk_usage(supervisor: &Supervisor, uid: u32, is_operator: bool, name: &str) -> Result<DiskUsage> {
    let host = supervisor.host();
    let _measuring = Measuring::begin(host).await?;
    let mut own = supervisor.visible(uid);
    own.sort_by_key(|kernel| kernel.spec().name.to_string());
    let one = match name {
        "" => None,
        name => Some(supervisor.find(uid, name)?),
    };
    // First: a change during the measurement is seen by the next one.
    let marks = disk_marks(host, &own).await?;
    let mut roots = roots::list_readable(supervisor).await?;
    if !is_operator {
        let ids: HashSet<KernelId> = own.iter().map(|kernel| kernel.id).collect();
        roots.retain(|root| ids.contains(&root.kernel));
    }
    let detailed = one.as_ref().map(|kernel| kernel.id);
    let objects = count_objects(host, by_kernel(roots).await?, detailed, limits::GC_OBJECTS).await?;
    let mut usage = DiskUsage::default();
    let linked = template_files(host).await?;
    for kernel in one.as_ref().map_or(own.as_slice(), std::slice::from_ref) {
        let mark = marks.get(&kernel.id).copied();
        match of_kernel(host, kernel, &objects, linked.clone()).await {
            Ok((_, false)) | Err(_) if one.is_none() && is_gone(supervisor, kernel.id) => {}
            Ok((measured, is_whole)) => {
                // What kernels of other users share is not for the eyes of their owner.
                if is_whole && (!is_operator || !host.environment.system_wide) {
                    let folder = figures_of(&measured.parts, host.now_ms());
                    kernel.disk.set(Some(MeasuredDisk { folder, freed: measured.freed_bytes, mark }));
                }
                usage.kernels.push(measured);
            }
            Err(error) => return Err(error),
        }
    }
    if is_operator && one.is_none() {
        usage.host = of_host(host.environment.data.clone(), objects.needed.iter().sum()).await?;
        usage.store = reasons(&objects.needed);
    }
    Ok(usage)
}

/// The files of templates that have several names: those in kernels' folders count with the templates.
pub(super) async fn template_files(host: &Host) -> Result<LinkedFiles> {
    let templates = host.environment.data.join(TEMPLATES);
    blocking(move || {
        let mut linked = LinkedFiles::default();
        disk_bytes_beyond(&templates, &mut linked)?;
        Ok(linked)
    })
    .await
}

/// The parts of a kernel's folder, without the `linked` files.
pub(super) async fn folder_parts(host: &Host, kernel: KernelId, mut linked: LinkedFiles) -> Result<Vec<DiskPart>> {
    let folder = host.environment.data.join(KERNELS).join(kernel.to_string());
    blocking(move || parts_of(&folder, KERNEL_PARTS, "", &mut linked)).await
}

/// The figures of a kernel's folder with these parts.
pub(super) fn figures_of(parts: &[DiskPart], now_ms: i64) -> DiskFigures {
    let mut figures = DiskFigures { measured_at_ms: now_ms, ..DiskFigures::default() };
    for part in parts {
        let of = match part.what.as_str() {
            "workspace" | "machine disk" => &mut figures.workspace_bytes,
            "journal" => &mut figures.history_bytes,
            "machine memory" => &mut figures.saved_memory_bytes,
            _ => &mut figures.other_bytes,
        };
        *of = of.saturating_add(part.bytes);
    }
    figures
}

/// What a kernel takes, and whether its folder could be measured.
async fn of_kernel(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    objects: &Objects,
    linked: LinkedFiles,
) -> Result<(KernelDisk, bool)> {
    let mut found = objects.kernels.get(&kernel.id).cloned().unwrap_or_default();
    let folder = folder_parts(host, kernel.id, linked).await;
    let is_whole = folder.is_ok();
    let parts = folder.unwrap_or_else(|error| {
        found.incomplete = error.message;
        Vec::new()
    });
    let mut each = Vec::new();
    if !objects.each.is_empty() {
        for (checkpoint, fate) in kernel.fates(host.now_ms()).await? {
            let freeze = match checkpoint.pinned {
                true => host.catalog.freeze_of_checkpoint(kernel.id, checkpoint.id).await?,
                false => None,
            };
            let why = freeze.map_or_else(|| fate.to_string(), |(group, number)| format!("freeze {number} of {group}"));
            let (stored_bytes, freed_bytes) = objects.each.get(&checkpoint.number).copied().unwrap_or_default();
            let Checkpoint { id, name, machine_bytes, .. } = checkpoint;
            each.push(CheckpointDisk { id, name, stored_bytes, freed_bytes, machine_bytes, why });
        }
    }
    let measured = KernelDisk {
        id: kernel.id,
        name: kernel.spec().name.to_string(),
        parts,
        checkpoints: u32::try_from(kernel.view().checkpoints).unwrap_or(u32::MAX),
        stored_bytes: found.stored.iter().sum(),
        freed_bytes: found.freed,
        kept: reasons(&found.stored),
        each,
        incomplete: found.incomplete,
    };
    Ok((measured, is_whole))
}

async fn of_host(data: PathBuf, needed: u64) -> Result<Vec<DiskPart>> {
    blocking(move || {
        let part = |what: &str, bytes, why: &str| DiskPart { what: what.into(), bytes, why: why.into() };
        let (kernels, packs) = (data.join(KERNELS), data.join("store/packs"));
        // Templates first: kernels have further names of their files.
        let mut linked = LinkedFiles::default();
        let mut rest = parts_of(&data, HOST_PARTS, KERNELS, &mut linked)?;
        // Each kernel has its own bound on the number of files; one beyond it must not hide the rest.
        let (kernel_bytes, kernels_why) = match parts_of(&kernels, &[("all", &[""], "")], "", &mut linked) {
            Ok(parts) => (parts.iter().map(|part| part.bytes).sum(), KERNELS_WHY.to_owned()),
            Err(error) => (0, format!("not measured: {}", error.message)),
        };
        let pack_bytes = disk_bytes(&packs)?;
        let mut all = vec![
            part("kernels", kernel_bytes, &kernels_why),
            part("objects", needed.min(pack_bytes), "checkpoints, blobs, kept output"),
            part("unreferenced", pack_bytes.saturating_sub(needed), "nothing needs it: `ryokan gc` frees most of it"),
        ];
        for part in rest.iter_mut().filter(|part| part.what == "store index") {
            // The packs were counted with their folder.
            part.bytes = part.bytes.saturating_sub(pack_bytes);
        }
        all.append(&mut rest);
        Ok(all)
    })
    .await
}

pub(super) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| Error::internal(error.to_string()))?
}

/// The files beneath the memory of machines, which copies of one machine have in common.
const COMMON: [&str; 2] = ["machine.base", "suspended.base"];

/// The parts of a folder, each entry in the first part that takes its name; they add up to the folder without one entry,
/// without files that were counted before, and with its share of [`COMMON`] ones.
fn parts_of(
    folder: &Path,
    parts: &[(&str, &[&str], &str)],
    without: &str,
    linked: &mut LinkedFiles,
) -> Result<Vec<DiskPart>> {
    let mut bytes = vec![0_u64; parts.len()];
    let last = bytes.len() - 1;
    let own = std::fs::symlink_metadata(folder).map_or(0, |meta| std::os::unix::fs::MetadataExt::blocks(&meta) * 512);
    bytes[last] += own;
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let mut name = entry.file_name().to_string_lossy().into_owned();
        if name == without {
            continue;
        }
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            name.push('/');
        }
        let at = parts.iter().position(|(_, names, _)| names.iter().any(|known| name.starts_with(known)));
        let own = disk_bytes_beyond(&entry.path(), linked)?;
        bytes[at.unwrap_or(last)] += match COMMON.contains(&name.as_str()) {
            true => own / names_of(&entry.path()),
            false => own,
        };
    }
    let part = |((what, _, why), bytes): (&(&str, &[&str], &str), u64)| DiskPart {
        what: (*what).into(),
        bytes,
        why: (*why).into(),
    };
    Ok(parts.iter().zip(bytes).map(part).collect())
}

/// The number of names of a file.
fn names_of(path: &Path) -> u64 {
    std::fs::symlink_metadata(path).map_or(1, |meta| std::os::unix::fs::MetadataExt::nlink(&meta).max(1))
}

/// The roots of kernels.
pub(super) type NeededBy = Vec<(KernelId, Vec<(Named, Digest)>)>;

/// The roots of each kernel.
pub(super) async fn by_kernel(roots: Vec<Root>) -> Result<NeededBy> {
    // Names of kernels stay in their thread.
    let roots: Vec<_> = roots.into_iter().map(|root| (root.kernel, root.named, root.digest)).collect();
    blocking(move || {
        let mut all: HashMap<KernelId, Vec<(Named, Digest)>> = HashMap::new();
        for (kernel, named, digest) in roots {
            all.entry(kernel).or_default().push((named, digest));
        }
        all.values_mut().for_each(|roots| roots.sort_by_key(|(named, _)| reason(*named)));
        Ok(all.into_iter().collect())
    })
    .await
}

/// What one kernel needs of the store.
#[derive(Debug, Clone, Default)]
pub(super) struct Needs {
    stored: ByReason,
    pub freed: u64,
    incomplete: String,
}

/// What all roots need of the store.
#[derive(Debug, Default)]
pub(super) struct Objects {
    needed: ByReason,
    pub kernels: HashMap<KernelId, Needs>,
    /// Stored and freed bytes of each checkpoint of the kernel that was asked for, by number.
    each: HashMap<u64, (u64, u64)>,
}

/// Who needs an entry of a pack.
#[derive(Debug, Clone, Copy)]
struct Entry {
    bytes: u64,
    /// The first of the reasons why it is kept.
    reason: usize,
    /// The only one that needs it; `None`: several do.
    by: Option<u32>,
    /// The last one that counted it.
    last: u32,
}

/// Ends a count of objects when its caller is gone.
#[derive(Debug, Default)]
struct StopOnDrop(Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Counts what kernels need of the store, and each checkpoint of the kernel `detailed`.
///
/// # Errors
/// `refused` for more than `most` objects.
pub(super) async fn count_objects(
    host: &Host,
    kernels: NeededBy,
    detailed: Option<KernelId>,
    most: usize,
) -> Result<Objects> {
    let stop = StopOnDrop::default();
    let stopped = Arc::clone(&stop.0);
    host.store.run_beside(move |store| Ok(measure(store, &kernels, detailed, &Bounds { stopped, most }))).await?
}

/// What ends a count.
#[derive(Debug)]
struct Bounds {
    stopped: Arc<AtomicBool>,
    /// Entries of packs.
    most: usize,
}

/// Entries of packs, with those that need them.
#[derive(Debug)]
struct Entries<'a> {
    places: HashMap<(u32, u32), Entry>,
    bounds: &'a Bounds,
}

impl Entries<'_> {
    fn new(bounds: &Bounds) -> Entries<'_> {
        Entries { places: HashMap::new(), bounds }
    }

    /// Counts what `who` needs by `roots`, in the order of the reasons; returns its bytes, and why some are missing.
    fn count(&mut self, store: &Store, who: u32, roots: &[(Named, Digest)]) -> Result<(ByReason, String)> {
        let (mut seen, mut stored, mut incomplete) = (Seen::default(), ByReason::default(), String::new());
        for (named, digest) in roots {
            let at = reason(*named);
            if self.bounds.stopped.load(Ordering::Relaxed) {
                return Err(Error::unavailable("the measurement was ended"));
            }
            let mut unreadable = None;
            let mut take = |object| match store.stored_parts(object) {
                Ok(parts) => {
                    parts.into_iter().for_each(|(place, bytes)| stored[at] += self.add(place, (bytes, at), who));
                }
                Err(error) => unreadable = Some(error.to_string()),
            };
            let walked = walk(store, *named, *digest, &mut seen, &mut take);
            if let Some(why) = walked.err().map(|error| error.message).or(unreadable) {
                incomplete = why;
            }
            if self.places.len() > self.bounds.most {
                let message = format!("more than {} objects are in use", self.bounds.most);
                return Err(Error::refused(message).reason("objects"));
            }
        }
        Ok((stored, incomplete))
    }

    /// Adds an entry; returns its bytes unless `who` has counted it.
    fn add(&mut self, place: (u32, u32), (bytes, reason): (u64, usize), who: u32) -> u64 {
        let entry = self.places.entry(place).or_insert(Entry { bytes, reason, by: Some(who), last: u32::MAX });
        entry.reason = entry.reason.min(reason);
        if entry.by != Some(who) {
            entry.by = None;
        }
        match std::mem::replace(&mut entry.last, who) == who {
            true => 0,
            false => bytes,
        }
    }
}

fn measure(
    store: &Store,
    kernels: &[(KernelId, Vec<(Named, Digest)>)],
    detailed: Option<KernelId>,
    bounds: &Bounds,
) -> Result<Objects> {
    let mut objects = Objects::default();
    let mut entries = Entries::new(bounds);
    for (who, (kernel, roots)) in kernels.iter().enumerate() {
        let (stored, incomplete) = entries.count(store, who as u32, roots)?;
        objects.kernels.insert(*kernel, Needs { stored, freed: 0, incomplete });
    }
    for entry in entries.places.values() {
        objects.needed[entry.reason] += entry.bytes;
        let only = entry.by.and_then(|who| kernels.get(who as usize));
        if let Some(needs) = only.and_then(|(kernel, _)| objects.kernels.get_mut(kernel)) {
            needs.freed += entry.bytes;
        }
    }
    if let Some((kernel, (_, roots))) =
        detailed.and_then(|wanted| kernels.iter().enumerate().find(|(_, (kernel, _))| *kernel == wanted))
    {
        objects.each = of_checkpoints(store, roots, bounds, |place| {
            entries.places.get(&place).is_some_and(|entry| entry.by == Some(kernel as u32))
        })?;
    }
    Ok(objects)
}

/// Stored and freed bytes of each checkpoint among a kernel's roots. `is_own`: whether no other kernel needs an entry.
fn of_checkpoints(
    store: &Store,
    roots: &[(Named, Digest)],
    bounds: &Bounds,
    is_own: impl Fn((u32, u32)) -> bool,
) -> Result<HashMap<u64, (u64, u64)>> {
    let (mut numbers, mut checkpoints, mut rest) = (Vec::new(), Vec::new(), Vec::new());
    for root in roots {
        match root.0 {
            Named::Row(RootKind::Checkpoint { number }) => {
                numbers.push(number);
                checkpoints.push(*root);
            }
            Named::Row(RootKind::Blob | RootKind::Output { .. }) | Named::Files | Named::Freeze { .. } => {
                rest.push(*root);
            }
        }
    }
    let mut entries = Entries::new(bounds);
    let mut each = HashMap::new();
    for (who, root) in checkpoints.iter().enumerate() {
        let (stored, _) = entries.count(store, who as u32, std::slice::from_ref(root))?;
        each.insert(numbers[who], (stored.iter().sum(), 0));
    }
    entries.count(store, checkpoints.len() as u32, &rest)?;
    for (place, entry) in &entries.places {
        let number = entry.by.and_then(|who| numbers.get(who as usize));
        if let Some((_, freed)) = number.filter(|_| is_own(*place)).and_then(|number| each.get_mut(number)) {
            *freed += entry.bytes;
        }
    }
    Ok(each)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_memory_is_divided() {
        const MIB: u64 = 1 << 20;
        let folder = tempfile::tempdir().expect("a folder");
        let place = |kernel: &str, name: &str| folder.path().join(kernel).join(name);
        for kernel in ["one", "two", "templates"] {
            std::fs::create_dir(folder.path().join(kernel)).expect("made");
        }
        let write = |path: &Path, count: u64| std::fs::write(path, vec![1; (count * MIB) as usize]).expect("written");
        let link = |from: &Path, to: &Path| std::fs::hard_link(from, to).expect("linked");
        write(&place("one", "machine.base"), 8);
        link(&place("one", "machine.base"), &place("two", "suspended.base"));
        write(&place("two", "suspended.pages"), 2);
        // Names of one kernel's file are not shared.
        write(&place("one", "machine.memory"), 4);
        link(&place("one", "machine.memory"), &place("one", "suspended.memory"));
        let measured = |kernel: &str, linked: &mut LinkedFiles| {
            let parts = parts_of(&folder.path().join(kernel), KERNEL_PARTS, "", linked).expect("measured");
            parts.iter().find(|part| part.what == "machine memory").map_or(0, |part| part.bytes / MIB)
        };
        assert_eq!(measured("one", &mut LinkedFiles::default()), 8 / 2 + 4);
        assert_eq!(measured("two", &mut LinkedFiles::default()), 8 / 2 + 2);
        // A template's counts there.
        link(&place("one", "machine.base"), &place("templates", "ram"));
        let mut linked = LinkedFiles::default();
        disk_bytes_beyond(&folder.path().join("templates"), &mut linked).expect("measured");
        assert_eq!((measured("one", &mut linked.clone()), measured("two", &mut linked)), (4, 2));
    }

    #[test]
    fn small_links_are_not_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let (small, large) = (folder.path().join("small"), folder.path().join("large"));
        std::fs::write(&small, [1; 4096]).expect("written");
        std::fs::write(&large, vec![1; 2 << 20]).expect("written");
        for file in [&small, &large] {
            std::fs::hard_link(file, file.with_extension("again")).expect("linked");
        }
        let mut linked = LinkedFiles::default();
        let bytes = disk_bytes_beyond(folder.path(), &mut linked).expect("measured");
        assert!((2 << 20..3 << 20).contains(&bytes) && linked.len() == 1, "{bytes}, {linked:?}");
        assert!(disk_bytes_beyond(folder.path(), &mut linked).expect("measured") < 1 << 20, "only the large one");
    }

    #[test]
    fn figures_add_up_to_parts() {
        let part = |(at, (what, ..)): (usize, &(&str, &[&str], &str))| DiskPart {
            what: (*what).into(),
            bytes: 1 << at,
            why: String::new(),
        };
        let parts: Vec<DiskPart> = KERNEL_PARTS.iter().enumerate().map(part).collect();
        let figures = figures_of(&parts, 9);
        assert_eq!(figures.total_bytes(), parts.iter().map(|part| part.bytes).sum::<u64>());
        let DiskFigures { workspace_bytes, history_bytes, saved_memory_bytes, other_bytes, .. } = figures;
        assert_eq!((workspace_bytes, history_bytes), (1 + 8, 4));
        assert_eq!((saved_memory_bytes, other_bytes), (16, 2 + 32));
    }
}
