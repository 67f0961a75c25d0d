//! Captures a kernel's present state into the store: engine state and files. One device flush makes all of it durable.

use std::rc::Rc;
use std::sync::Arc;

use super::files::{CapturedFiles, Files};
use super::machine;
use super::memory::{self, Copy, Keep};
use super::quiesce::{Quiesced, Stop};
use super::state;
use crate::core::checkpoint::{CheckpointType, MachinePart, StateParts};
use crate::core::error::Result;
use crate::core::ids::{CheckpointId, Digest, ExecId};
use crate::core::missed::MissedEntry;
use crate::core::snapshot::PortableKind;
use crate::isolation::SavedMachine;
use crate::link::host::WorkerLink;
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::workspace::{Collected, SharedBatch};

/// A captured kernel state. Unreferenced in the store.
pub(super) struct Gathered {
    /// Id of the checkpoint that it may become.
    pub id: CheckpointId,
    /// The engine's memory copy.
    pub copy: Copy,
    pub parts: StateParts,
    /// Address of the state list.
    pub state: Digest,
    pub files: CapturedFiles,
    /// The machine; only in kind teleport.
    pub machine: Option<MachinePart>,
    pub objects: Objects,
    /// The execution that was under way.
    pub under_way: Option<UnderWay>,
}

/// An execution beside which a kernel was captured: the engine's state is that before it.
#[derive(Debug, Clone)]
pub(super) struct UnderWay {
    pub exec: ExecId,
    /// What the state before it lacked.
    pub missed: Vec<MissedEntry>,
}

/// Objects on their way into the store.
///
/// Until dropped, protects the objects from garbage collection and keeps other captures from the same files: they would
/// rely on objects that may still fail.
pub(super) struct Objects {
    pub together: Arc<SharedBatch>,
    files: Files,
    are_durable: bool,
}

impl Objects {
    /// Makes all objects durable, and one more.
    ///
    /// # Errors
    /// Store errors; the captured objects are unusable then.
    pub async fn settle(&mut self, host: &Host, last: Option<Vec<u8>>) -> Result<Option<Digest>> {
        let together = Arc::clone(&self.together);
        let settled = host.store.run_beside(move |_| {
            let last = last.map(|last| together.put(&last)).transpose()?;
            together.sync()?;
            Ok(last)
        });
        let last = settled.await?;
        self.are_durable = true;
        Ok(last)
    }
}

impl Drop for Objects {
    fn drop(&mut self) {
        if !self.are_durable {
            self.files.doubt();
        }
    }
}

/// A capture whose last files are not in the store yet.
pub(super) struct Gathering {
    id: CheckpointId,
    copy: Copy,
    parts: StateParts,
    state: Digest,
    objects: Objects,
    collected: Result<Collected>,
    machine: Option<SavedMachine>,
    under_way: Option<UnderWay>,
}

impl Gathering {
    /// Id of the checkpoint that it may become.
    ///
    /// # Errors
    /// Why the files could not be collected.
    pub fn id(&self) -> Result<CheckpointId> {
        self.collected.as_ref().map(|_| self.id).map_err(Clone::clone)
    }

    /// Stores the rest.
    ///
    /// # Errors
    /// Capture errors of the files.
    pub async fn finish(self, host: &Host) -> Result<Gathered> {
        let Gathering { id, copy, parts, state, mut objects, collected, machine, under_way } = self;
        let files = objects.files.finish(collected?).await?;
        let machine = match machine {
            Some(saved) => Some(machine::store(host, saved, &objects.together).await?),
            None => None,
        };
        Ok(Gathered { id, copy, parts, state, files, machine, objects, under_way })
    }

    /// The execution beside which it was captured.
    pub fn under_way(&self) -> Option<ExecId> {
        self.under_way.as_ref().map(|under_way| under_way.exec)
    }
}

/// Captures the kernel's present state; the caller holds the worker, or there is none. With `keep`, the engine keeps a copy of itself in
/// memory.
///
/// # Errors
/// Capture errors of any part; the kernel is unchanged.
pub(super) async fn gather(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    link: Option<&Rc<WorkerLink>>,
    keep: Option<Keep>,
) -> Result<Gathered> {
    let (gathering, still) =
        gather_quiesced(host, kernel, link, keep, (PortableKind::Checkpoint, Stop::Freeze)).await?;
    // The code inside resumes in every case.
    still.end().await?;
    gathering.finish(host).await
}

/// As [`gather`], with the kernel's machine at the same moment. The machine continues in every case.
///
/// # Errors
/// As [`gather`], and those of saving the machine.
pub(super) async fn gather_machine(host: &Rc<Host>, kernel: &Rc<Kernel>, link: &Rc<WorkerLink>) -> Result<Gathered> {
    let (gathering, still) =
        gather_quiesced(host, kernel, Some(link), None, (PortableKind::Teleport, Stop::Suspend)).await?;
    if let Err(error) = still.end().await {
        tracing::warn!(kernel = %kernel.spec().name, %error, "a saved kernel did not continue; its worker is ended");
        kernel.release_worker();
        return Err(error);
    }
    gathering.finish(host).await
}

/// Stores changed files while the kernel runs on, so that its next capture has less to read.
///
/// # Errors
/// Errors of the files and of the store.
pub(super) async fn read_ahead(host: &Rc<Host>, kernel: &Rc<Kernel>) -> Result<()> {
    let together = host.store.run_beside(|store| Ok(Arc::new(SharedBatch::begin(store)))).await?;
    let files = Files::of(host, kernel).await?;
    let mut objects = Objects { together: Arc::clone(&together), files, are_durable: false };
    objects.files.prepare(&together).await?;
    objects.settle(host, None).await.map(drop)
}

/// As [`gather`]; the kernel stays quiesced until the caller ends that. With kind teleport, its machine is saved, too.
///
/// # Errors
/// As [`gather`], except those of the files.
pub(super) async fn gather_quiesced(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    link: Option<&Rc<WorkerLink>>,
    keep: Option<Keep>,
    (kind, stop): (PortableKind, Stop),
) -> Result<(Gathering, Quiesced)> {
    let together = host.store.run_beside(|store| Ok(Arc::new(SharedBatch::begin(store)))).await?;
    let files = Files::of(host, kernel).await?;
    let mut objects = Objects { together: Arc::clone(&together), files, are_durable: false };
    // Reads most changes in advance, so that less work remains during the freeze.
    let prepared = objects.files.prepare(&together);
    let saved = async {
        match link {
            Some(link) => state::capture(link, &host.store, &together).await,
            None => state::capture_stored(host, kernel, &together).await,
        }
    };
    let (prepared, saved) = futures::join!(prepared, saved);
    prepared?;
    let (parts, state) = saved?;
    let id = CheckpointId::from_bytes(host.random());
    let copy = match link {
        Some(link) => memory::keep(host, link, kernel.spec().engine, id, keep).await?,
        None => Copy { why_not: None, took_us: None },
    };
    let still = Quiesced::stopped(kernel, link, stop).await?;
    let mut collected = objects.files.collect(&together).await;
    let mut machine = None;
    if kind == PortableKind::Teleport && collected.is_ok() {
        match host.making_room(async || kernel.save_running(host).await).await {
            Ok(saved) => machine = Some(saved),
            Err(error) => collected = Err(error),
        }
    }
    let under_way = None;
    Ok((Gathering { id, copy, parts, state, objects, collected, machine, under_way }, still))
}

/// As [`gather_quiesced`], beside a running execution, which goes on when the caller ends that: the files of the moment, and
/// the engine's state from before it. The caller keeps other work from starting. `None`: the execution has ended.
///
/// # Errors
/// `unsupported` (`park`) if that state is not saved; as [`gather_quiesced`].
pub(super) async fn gather_beside(
    host: &Rc<Host>,
    kernel: &Rc<Kernel>,
    link: &Rc<WorkerLink>,
    (exec, kind): (ExecId, CheckpointType),
) -> Result<Option<(Gathering, Quiesced)>> {
    let together = host.store.run_beside(|store| Ok(Arc::new(SharedBatch::begin(store)))).await?;
    let files = Files::of(host, kernel).await?;
    let mut objects = Objects { together: Arc::clone(&together), files, are_durable: false };
    let prepared = objects.files.prepare(&together);
    let saved = state::capture_before(link, &host.store, &together, exec);
    let (prepared, saved) = futures::join!(prepared, saved);
    prepared?;
    let Some((parts, state)) = saved? else { return Ok(None) };
    // Its end may change the list.
    let under_way = Some(UnderWay { exec, missed: kernel.view().missed });
    let still = Quiesced::stopped(kernel, Some(link), Stop::FreezeAtWork).await?;
    let is_under_way = state::saved_before(link, exec).await;
    if !matches!(is_under_way, Ok(Some(_))) {
        still.end().await?;
        return is_under_way.map(|_| None);
    }
    let collected = objects.files.collect(&together).await;
    let (id, copy) = (CheckpointId::from_bytes(host.random()), memory::none_at_work(host, kernel.spec().engine, kind));
    Ok(Some((Gathering { id, copy, parts, state, objects, collected, machine: None, under_way }, still)))
}
