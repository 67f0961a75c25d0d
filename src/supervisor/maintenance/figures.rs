//! What each kernel takes on the disk, for lists: measured in the background when clients ask.
//!
//! A request is answered with the last figures and starts a measurement if these are old. A host without requests measures
//! nothing, and a measurement reads no folder that is as it was. Figures never depend on kernels of other users: they
//! would reveal what is in them.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;

use tokio::time::Instant;

use super::usage::{by_kernel, count_objects, figures_of, folder_parts, template_files};
use super::{is_gone, roots};
use crate::core::error::Result;
use crate::core::limits;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::disk::MeasuredDisk;
use crate::supervisor::registry::Supervisor;
use crate::workspace::LinkedFiles;

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
    if kernels.iter().all(|kernel| is_known(kernel)) && gone == host.upkeep.figures_gone.get() {
        return Ok(());
    }
    // What running operations need stays meanwhile.
    let _held = host.store.run_beside(|store| Ok(store.guard())).await?;
    let roots = roots::list_unlocked(supervisor).await?;
    let linked = template_files(host).await?;
    let users: BTreeSet<u32> = kernels.iter().map(|kernel| kernel.uid).collect();
    for user in &users {
        let own: Vec<&Rc<Kernel>> = kernels.iter().filter(|kernel| kernel.uid == *user).collect();
        let marks: Vec<Option<u64>> = own.iter().map(|kernel| kernel.disk_mark()).collect();
        let mut needed_by = by_kernel(&roots);
        // The freezes of a single user count too.
        needed_by.retain(|(id, _)| users.len() == 1 || own.iter().any(|kernel| kernel.id == *id));
        let objects = count_objects(host, needed_by, None).await?;
        for (kernel, mark) in own.into_iter().zip(marks) {
            let freed = objects.kernels.get(&kernel.id).map_or(0, |needs| needs.freed);
            match measure(supervisor, kernel, mark, freed, &linked).await {
                Err(_) if is_gone(supervisor, kernel.id) => {}
                measured => measured?,
            }
        }
    }
    host.upkeep.figures_gone.set(gone);
    Ok(())
}

/// Whether the kernel's folder is as it was measured last.
fn is_known(kernel: &Kernel) -> bool {
    kernel.disk.get().is_some_and(|measured| measured.mark.is_some() && measured.mark == kernel.disk_mark())
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
