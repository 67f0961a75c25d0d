//! The virtual machine in a checkpoint of kind teleport: stored, checked, and put back.
//!
//! ```text
//! take:     safe point ─▶ processes stop ─▶ files ─▶ machine stops, is saved, continues ─▶ processes continue
//!           ─▶ memory, state, disk into the store ─▶ manifest
//! restore:  record ─▶ worker ends ─▶ files, engine state ─▶ machine into the kernel's folder ─▶ row ─▶ next worker
//! ```
//!
//! A checkpoint of kind teleport is one of kind checkpoint with further parts: without them it is valid anywhere.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::sync::Arc;

use crate::core::checkpoint::{ImagePart, MachinePart, Manifest};
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::ids::KernelId;
use crate::core::limits;
use crate::core::quantity::format_size;
use crate::core::snapshot::{
    Choice, Continuing, KindError, KindRequest, PortableKind, Snapshot, Teleport, choose_for_checkpoint,
    choose_for_restore,
};
use crate::core::spec::KernelSpec;
use crate::isolation::{InstallFiles, KernelHome, MachineCopy, MachineFiles, MachineRoom, NamedMachine, SavedMachine};
use crate::store::{Image, Store};
use crate::supervisor::host::Host;
use crate::supervisor::kernel::Kernel;
use crate::sys::fault;
use crate::workspace::SharedBatch;

/// Checks that a checkpoint of the requested kind can be taken; returns the kind. Nothing is stopped yet.
///
/// # Errors
/// The rule that the kind breaks; `refused` for a machine that is too large, `busy` without room for it.
pub(super) fn check_kind(host: &Host, kernel: &Kernel, request: KindRequest) -> Result<PortableKind> {
    let spec = kernel.spec_now();
    let kind = choose_for_checkpoint(request, Continuing::of(&spec))?;
    if kind == PortableKind::Teleport {
        has_room(host, kernel, &spec)?;
    }
    Ok(kind)
}

/// Checks that a kernel's machine can be saved, and limit and room for it: what it needs at most.
pub(crate) fn has_room(host: &Host, kernel: &Kernel, spec: &KernelSpec) -> Result<()> {
    check_free(host, room_to_save(host, kernel, spec)?)
}

/// Checks that there is room to install a machine in a kernel's folder, after the present one was saved if `saves`.
pub(super) fn has_room_to_install(host: &Host, kernel: &Kernel, manifest: &Manifest, saves: bool) -> Result<()> {
    let saved = if saves { room_to_save(host, kernel, &kernel.spec_now())? } else { 0 };
    check_free(host, saved.saturating_add(installed_bytes(manifest)))
}

fn room_to_save(host: &Host, kernel: &Kernel, spec: &KernelSpec) -> Result<u64> {
    if let Some(worker) = kernel.worker.borrow().upgrade() {
        worker.handle().check_saves_running()?;
    }
    let (driver, dir) = (host.drivers.of(spec.isolation)?, host.home(kernel.id, None).dir);
    let MachineRoom { memory_bytes, disk_bytes, .. } = driver.machine_room(spec, &dir);
    check_size(host, memory_bytes, disk_bytes)?;
    // The saved stream, the memory that is separated from it, the disk's copy, and the pieces of both.
    Ok(memory_bytes.saturating_mul(2).saturating_add(disk_bytes.saturating_mul(2)))
}

fn check_free(host: &Host, needed: u64) -> Result<()> {
    match host.free_bytes() {
        Some(free) if free < needed => Err(Error {
            message: format!(
                "memory and disk of the machine need {} of free space at most, and there are {}",
                format_size(needed),
                format_size(free),
            ),
            ..Host::full()
        }
        .hint("free space on this host, or use --kind checkpoint")),
        Some(_) | None => Ok(()),
    }
}

fn check_size(host: &Host, memory_bytes: u64, disk_bytes: u64) -> Result<()> {
    let most = host.config.limits.teleport_snapshot.unwrap_or(u64::MAX);
    Ok(Teleport::check_bytes(memory_bytes, disk_bytes, most)?)
}

/// Stores a saved machine. The original runs meanwhile.
///
/// # Errors
/// Those of separating its memory, of the store, and `refused` if it is too large after all.
pub(super) async fn store(host: &Host, saved: SavedMachine, together: &Arc<SharedBatch>) -> Result<MachinePart> {
    let copy = saved.into_copy().await?;
    let objects = Arc::clone(together);
    let (part, _copy) = host.store.run_beside(move |_| Ok(put(copy, &objects))).await??;
    check_size(host, part.memory.bytes.saturating_add(part.state_bytes), part.disk.bytes)?;
    fault::point("machine.checkpoint.stored").map_err(|error| Error::unavailable(error.to_string()))?;
    Ok(part)
}

/// Adds the parts of a machine. Returns its copy, whose files are removed outside.
fn put(copy: MachineCopy, objects: &SharedBatch) -> Result<(MachinePart, MachineCopy)> {
    let MachineFiles { memory, mut state, disk, description, machine } = copy.files()?;
    let image = |file: &File| {
        let (list, image) = objects.put_image(file)?;
        Ok::<_, Error>(ImagePart { list, bytes: image.stored_bytes() })
    };
    let mut bytes = Vec::new();
    let read = (&mut state).take(limits::VM_DEVICE_STATE_BYTES).read_to_end(&mut bytes);
    let state_bytes = read.map_err(|error| Error::unavailable(format!("read a machine's state: {error}")))? as u64;
    let (memory, disk) = (image(&memory)?, image(&disk)?);
    let (state, description) = (objects.put(&bytes)?, objects.put(&description)?);
    Ok((MachinePart { machine, description, state, state_bytes, memory, disk }, copy))
}

/// Chooses the kind in which a checkpoint is restored in a kernel: with its machine only if this host can continue it and
/// every object of it is whole. Changes nothing.
///
/// # Errors
/// The rule that the requested kind breaks; `corrupt`.
pub(super) async fn choose(
    host: &Host,
    kernel: &Kernel,
    manifest: &Manifest,
    request: Option<KindRequest>,
) -> Result<Choice> {
    let is_asked = request != Some(KindRequest::Only(PortableKind::Checkpoint));
    let arrival = match &manifest.machine {
        Some(_) if is_asked => Some(can_continue(host, kernel, manifest).await),
        Some(_) => Some(Ok(())),
        None => None,
    };
    choose_for_restore(request, arrival)
}

/// Checks that a kernel can continue the machine in a manifest, and that all of it is there.
async fn can_continue(host: &Host, kernel: &Kernel, manifest: &Manifest) -> Result<()> {
    let spec = kernel.spec_now();
    check_arrival(host, &spec, kernel.uid, manifest).await?;
    if let Some(part) = &manifest.machine {
        check_disk(host, &spec, kernel.id, part).await?;
    }
    readable(host, &spec, manifest).await
}

/// Checks that a kernel with this specification can continue the machine in a manifest on this host.
///
/// # Errors
/// One for each property that differs.
pub(crate) async fn check_arrival(host: &Host, spec: &KernelSpec, uid: u32, manifest: &Manifest) -> Result<()> {
    let Some(snapshot) = manifest.machine_snapshot() else {
        return Err(KindError::NoMemory.into());
    };
    check_snapshot(host, spec, uid, &snapshot).await
}

/// As [`check_arrival`], of a snapshot.
///
/// # Errors
/// As there.
pub(crate) async fn check_snapshot(
    host: &Host,
    spec: &KernelSpec,
    uid: u32,
    snapshot: &Snapshot<Teleport>,
) -> Result<()> {
    Continuing::of(spec).check()?;
    let here = host.drivers.of(spec.isolation)?.site(spec, uid, &snapshot.base_image_version).await?;
    Ok(snapshot.check_arrival(&here, host.config.limits.teleport_snapshot.unwrap_or(u64::MAX))?)
}

/// Reads everything of a checkpoint's machine, and checks its description.
///
/// # Errors
/// `corrupt` names the first damaged or missing object; `unsupported` for a description of another format.
async fn readable(host: &Host, spec: &KernelSpec, manifest: &Manifest) -> Result<()> {
    let Some(part) = manifest.machine.clone() else { return Ok(()) };
    let machine = part.machine.clone();
    let read = host.store.run_beside(move |store| Ok(read(store, &part))).await?;
    let checked = read.and_then(|(description, [memory_bytes, disk_bytes])| {
        let named = NamedMachine { machine: &machine, image: &manifest.base_image_version, memory_bytes, disk_bytes };
        host.drivers.of(spec.isolation)?.check_description(&description, &named)
    });
    checked.map_err(|error| {
        let message = format!("the virtual machine in this checkpoint: {}", error.message);
        match error.code {
            ErrorCode::NotFound | ErrorCode::Corrupt => {
                Error::corrupt(message).hint("--kind checkpoint restores files and engine state only")
            }
            _ => Error { message, ..error },
        }
    })
}

/// Returns the description, and the sizes of memory and disk.
fn read(store: &Store, part: &MachinePart) -> Result<(Vec<u8>, [u64; 2])> {
    let description = store.get(part.description, limits::VM_TEMPLATE_JSON_BYTES)?;
    store.get(part.state, limits::VM_DEVICE_STATE_BYTES)?;
    let sizes = [&part.memory, &part.disk].map(|named| {
        let image = Image::load(store, named.list)?;
        image.read(store, |_, _| Ok(()))?;
        Ok::<_, Error>(image.bytes())
    });
    let [memory, disk] = sizes;
    Ok((description, [memory?, disk?]))
}

/// Puts the machine of a checkpoint into the folder of a kernel without a worker.
///
/// # Errors
/// `corrupt`, those of the store and of the file system: nothing is installed then.
pub(crate) async fn install(host: &Host, kernel: KernelId, spec: &KernelSpec, manifest: &Manifest) -> Result<()> {
    let Some(part) = manifest.machine.clone() else {
        return Err(Error::internal("a checkpoint without a machine is to be installed"));
    };
    let (driver, home): (_, KernelHome) = (host.drivers.of(spec.isolation)?, host.home(kernel, None));
    check_disk(host, spec, kernel, &part).await?;
    let description = host.store.get(part.description, limits::VM_TEMPLATE_JSON_BYTES).await?;
    let store = host.store.run(|store| Ok(store.clone())).await?;
    let fill: InstallFiles = Box::new(move |[memory, state, disk]| {
        Image::load(&store, part.memory.list)?.write(&store, memory)?;
        Image::load(&store, part.disk.list)?.write(&store, disk)?;
        let bytes = store.get(part.state, limits::VM_DEVICE_STATE_BYTES)?;
        let mut to = state;
        to.write_all(&bytes).map_err(|error| Error::unavailable(format!("write a machine's state: {error}")))
    });
    driver.install(&home, description, fill).await?;
    fault::point("machine.install.done").map_err(|error| Error::unavailable(error.to_string()))
}

/// Checks that a machine's disk is not larger than the kernel's limits allow: the size of a disk is what bounds its use.
///
/// # Errors
/// `refused`; `corrupt`.
async fn check_disk(host: &Host, spec: &KernelSpec, kernel: KernelId, part: &MachinePart) -> Result<()> {
    let most = host.drivers.of(spec.isolation)?.machine_room(spec, &host.home(kernel, None).dir).most_disk_bytes;
    let list = part.disk.list;
    let bytes = host.store.run_beside(move |store| Ok(Image::load(store, list).map(|image| image.bytes()))).await??;
    if bytes > most {
        let (bytes, most) = (format_size(bytes), format_size(most));
        return Err(Error::refused(format!("the machine's disk has {bytes}, and the kernel's limits allow {most}"))
            .reason("disk_size")
            .hint("raise the kernel's limit of disk space, or use --kind checkpoint"));
    }
    Ok(())
}

/// Bytes that the machine of a manifest takes in its kernel's folder.
pub(crate) fn installed_bytes(manifest: &Manifest) -> u64 {
    manifest.machine.as_ref().map_or(0, MachinePart::bytes)
}
