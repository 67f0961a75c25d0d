//! What each kernel takes on the disk, for lists: measured in the background when clients ask.
//!
//! A request is answered with the last figures and starts a measurement if these are old. A host without requests measures
//! nothing, and a measurement reads no folder that is as it was. Figures never depend on kernels of other users: they
//! would reveal what is in them.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use tokio::time::Instant;

use super::is_gone;
use super::roots;
use super::usage::{KERNELS, NeededBy, blocking, by_kernel, count_objects, figures_of, folder_parts, template_files};
use crate::core::error::Result;
use crate::core::ids::KernelId;
use crate::core::limits;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::disk::MeasuredDisk;
use crate::supervisor::registry::Supervisor;
use crate::workspace::LinkedFiles;

/// The file beneath the saved memory of a kernel's machine.
const BENEATH_MEMORY: &str = "suspended.base";

/// Marks of kernels; none of those that code can change.
pub(super) type DiskMarks = HashMap<KernelId, u64>;

/// Starts a measurement of all kernels unless one runs or the last one is recent.
pub fn refresh_figures(supervisor: &Supervisor) {
    let host = supervisor.host();
    if host.is_stopping() || host.upkeep.figures_due.get().is_some_and(|due| Instant::now() < due) {
        return;
    }
    let Ok(turn) = Arc::clone(&host.upkeep.measure_turn).try_acquire_owned() else { return };
    let supervisor = supervisor.clone();
    tokio::task::spawn_local(async move {
        let _turn = turn;
        let begun = Instant::now();
        if let Err(error) = measure_all(&supervisor).await {
            tracing::debug!(%error, "what kernels take on the disk was not measured");
        }
        let pause = (begun.elapsed() * limits::FIGURES_SHARE).max(limits::FIGURES_PAUSE);
        supervisor.host().upkeep.figures_due.set(Some(Instant::now() + pause));
    });
}

async fn measure_all(supervisor: &Supervisor) -> Result<()> {
    let host = supervisor.host();
    let (kernels, gone) = (supervisor.kernels(), host.upkeep.gone.get());
    // Before everything that is measured: a change during the measurement is seen by the next one.
    let marks = disk_marks(host, &kernels).await?;
    if kernels.iter().all(|kernel| is_known(kernel, &marks)) && gone == host.upkeep.figures_gone.get() {
        return Ok(());
    }
    let roots = roots::list_unlocked(supervisor).await?;
    let linked = template_files(host).await?;
    let mut users: BTreeMap<u32, Vec<Rc<Kernel>>> = BTreeMap::new();
    for kernel in kernels {
        users.entry(kernel.uid).or_default().push(kernel);
    }
    let mut needed_by = by_owner(by_kernel(roots).await?, &users);
    let mut is_whole = true;
    for (user, own) in users {
        let needed = needed_by.remove(&user).unwrap_or_default();
        let objects = match count_objects(host, needed, None, limits::FIGURES_OBJECTS).await {
            Ok(objects) => objects,
            Err(error) => {
                tracing::debug!(user, %error, "what the kernels of a user take on the disk was not measured");
                is_whole = false;
                continue;
            }
        };
        for kernel in own {
            let freed = objects.kernels.get(&kernel.id).map_or(0, |needs| needs.freed);
            let mark = marks.get(&kernel.id).copied();
            if let Err(error) = measure(supervisor, &kernel, mark, freed, &linked).await
                && !is_gone(supervisor, kernel.id)
            {
                tracing::debug!(kernel = %kernel.spec().name, %error, "what a kernel takes on the disk was not measured");
            }
        }
    }
    if is_whole {
        host.upkeep.figures_gone.set(gone);
    }
    Ok(())
}

/// What each user's kernels need. A single user's include what belongs to no kernel, such as freezes.
fn by_owner(needed_by: NeededBy, users: &BTreeMap<u32, Vec<Rc<Kernel>>>) -> HashMap<u32, NeededBy> {
    let sole = users.keys().next().copied().filter(|_| users.len() == 1);
    let owners: HashMap<KernelId, u32> = users.values().flatten().map(|kernel| (kernel.id, kernel.uid)).collect();
    let mut all: HashMap<u32, NeededBy> = HashMap::new();
    for (kernel, needed) in needed_by {
        if let Some(user) = owners.get(&kernel).copied().or(sole) {
            all.entry(user).or_default().push((kernel, needed));
        }
    }
    all
}

/// [`Kernel::disk_mark`] of these kernels, with the number of names of the file beneath saved memory: if its template is
/// rebuilt or removed, the file counts with the kernel.
pub(super) async fn disk_marks(host: &Host, kernels: &[Rc<Kernel>]) -> Result<DiskMarks> {
    let folders = host.environment.data.join(KERNELS);
    let marks: Vec<(KernelId, u64)> =
        kernels.iter().filter_map(|kernel| Some((kernel.id, kernel.disk_mark()?))).collect();
    blocking(move || {
        let with_names = |(id, mark): (KernelId, u64)| {
            let mut all = DefaultHasher::new();
            (mark, names_beneath(&folders.join(id.to_string()))).hash(&mut all);
            (id, all.finish())
        };
        Ok(marks.into_iter().map(with_names).collect())
    })
    .await
}

/// Number of names of the file beneath a kernel's saved memory. Blocks.
fn names_beneath(folder: &Path) -> u64 {
    std::fs::symlink_metadata(folder.join(BENEATH_MEMORY)).map_or(0, |file| file.nlink())
}

/// Whether the kernel's folder is as it was measured last.
fn is_known(kernel: &Kernel, marks: &DiskMarks) -> bool {
    let mark = marks.get(&kernel.id).copied();
    kernel.disk.get().is_some_and(|measured| measured.mark.is_some() && measured.mark == mark)
}

async fn measure(
    supervisor: &Supervisor,
    kernel: &Kernel,
    mark: Option<u64>,
    freed: u64,
    linked: &LinkedFiles,
) -> Result<()> {
    let host = supervisor.host();
    let folder = match kernel.disk.get() {
        Some(known) if mark.is_some() && known.mark == mark => known.folder,
        Some(_) | None => figures_of(&folder_parts(host, kernel.id, linked.clone()).await?, host.now_ms()),
    };
    kernel.disk.set(Some(MeasuredDisk { folder, freed, mark }));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_templates() {
        let folder = tempfile::tempdir().expect("a directory");
        assert_eq!(names_beneath(folder.path()), 0);
        let template = folder.path().join("ram");
        std::fs::write(&template, "memory").expect("written");
        std::fs::hard_link(&template, folder.path().join(BENEATH_MEMORY)).expect("linked");
        assert_eq!(names_beneath(folder.path()), 2);
        std::fs::remove_file(template).expect("removed");
        assert_eq!(names_beneath(folder.path()), 1);
    }
}
