//! A suspended machine on the disk: its memory and processors beside the kernel's disk, as they were at one stop.
//!
//! ```text
//!  stopped machine ─▶ suspended.new ─ synced ─▶ suspended.state ─▶ suspended.json ─▶ QEMU ends
//!  next start: snapshot, disk and digest are right ─▶ loaded ─▶ all removed ─▶ the machine continues
//! ```
//!
//! All files are removed before the machine continues. The disk's time of change makes them invalid as soon as anything
//! else writes to the disk; in a data directory that was copied, contents are compared. QEMU's memory is the file that it
//! has mapped, kept as `suspended.base`, and the pages that differ from it (`suspended.pages`); where that is not possible,
//! QEMU writes state and memory as one stream. Firecracker opens its files by name when it starts: they are prepared then
//! (`machine.state`, `machine.memory`), and linked as `suspended.new` and `suspended.memory` once they are written.

use std::fs::{File, OpenOptions};
use std::io::Read as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::base::{self, Base};
use super::copy::create as create_file;
use super::saved_pages::{self, SavedPages};
use super::stamp::{self, Stamp};
use super::template::{Kind, Part, dig_holes, part};
use crate::core::error::{DISK_FULL, Error, Result};
use crate::core::ids::{Epoch, HostId, KernelId, WorkerId};
use crate::core::limits;
use crate::core::snapshot::{Architecture, KindError, Site, Snapshot, Suspend};
use crate::link::handshake::WorkerIdentity;
use crate::sys::fs;

const FORMAT: u32 = 3;
pub(super) const NEW: &str = "suspended.new";
/// The devices alone, until they are a state.
pub(super) const DEVICES: &str = "suspended.devices";
const STATE: &str = "suspended.state";
const MEMORY: &str = "suspended.memory";
pub(super) const PAGES: &str = "suspended.pages";
const DESCRIPTION: &str = "suspended.json";
/// The files of a running machine, and what they become.
const PREPARED: [(&str, &str); 2] = [("machine.state", NEW), ("machine.memory", MEMORY)];

/// A saved machine's files.
pub(super) struct SavedFiles {
    /// Devices and processors.
    pub devices: File,
    pub memory: SavedMemory,
}

/// Where a saved machine's memory is.
pub(super) enum SavedMemory {
    /// In the same stream as the devices.
    InState,
    /// In a file of its own.
    Whole(File),
    /// In a file beneath, and the pages that differ from it.
    Pages(SavedPages),
}

impl SavedFiles {
    /// The memory, if it is one file of its own.
    pub(super) fn whole_memory(&self) -> Option<&File> {
        match &self.memory {
            SavedMemory::Whole(file) => Some(file),
            SavedMemory::InState | SavedMemory::Pages(_) => None,
        }
    }
}

/// The memory in the description.
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum MemoryPart {
    InState,
    Whole(Part),
    Pages { pages: Part, base: Base },
}

/// The description of a suspended machine.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Saved {
    format: u32,
    arch: String,
    host: HostId,
    pub kind: Kind,
    /// QEMU's writes change its time.
    disk: Stamp,
    /// What the disk holds, unless it is large.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    disk_contents: Option<String>,
    state: Part,
    memory: MemoryPart,
    worker: WorkerId,
    kernel: KernelId,
    epoch: Epoch,
    /// The secret that the worker in the machine knows.
    secret: [u8; 32],
}

/// The error of saving; a full disk is one for which room can be made.
pub(super) fn failed(error: &std::io::Error) -> Error {
    let failed = cannot(error);
    if fs::is_full(error) { failed.reason(DISK_FULL) } else { failed }
}

fn cannot(why: &dyn std::fmt::Display) -> Error {
    Error::unavailable(format!("the memory of a virtual machine cannot be saved: {why}"))
}

/// `busy` in place of another error if this host lacks something for the moment: what is saved stays for the next start.
pub(super) fn unless_short(error: &std::io::Error, other: Error) -> Error {
    if fs::is_shortage(error) { Error::busy(other.message).hint("try again") } else { other }
}

/// The error of a file of saved memory that cannot be read: `corrupt` if it is gone or another one, `busy` if this host
/// lacks something for the moment, else `unavailable`: what is saved stays.
pub(super) fn unreadable(name: &str, error: &std::io::Error) -> Error {
    use std::io::ErrorKind;
    let message = format!("{name}: {error}");
    let is_link = error.raw_os_error() == Some(libc::ELOOP);
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::InvalidData | ErrorKind::UnexpectedEof => Error::corrupt(message),
        _ if is_link => Error::corrupt(message),
        _ => unless_short(error, Error::unavailable(message)),
    }
}

/// Opens a new file for a machine's state. Blocks.
///
/// # Errors
/// Those of the file system.
pub(super) fn create(dir: &Path) -> Result<File> {
    remove(dir)?;
    create_file(&dir.join(NEW)).map_err(|error| failed(&error))
}

/// Makes the files into which a machine that starts may be saved later. Blocks.
///
/// # Errors
/// Those of the file system.
pub(super) fn prepare(dir: &Path) -> Result<SavedFiles> {
    let made = |(name, _): (&str, &str)| {
        let path = dir.join(name);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(&error)),
            _ => {}
        }
        create_file(&path).map_err(|error| failed(&error))
    };
    Ok(SavedFiles { devices: made(PREPARED[0])?, memory: SavedMemory::Whole(made(PREPARED[1])?) })
}

/// Checks that the files of a running machine are in its folder. Blocks.
///
/// # Errors
/// `unavailable`.
pub(super) fn check_prepared(dir: &Path) -> Result<()> {
    for (name, _) in PREPARED {
        dir.join(name).symlink_metadata().map_err(|error| cannot(&format_args!("{name}: {error}")))?;
    }
    Ok(())
}

/// Gives the written files of a machine the names of a suspended one. The machine may be saved again. Blocks.
///
/// # Errors
/// Those of the file system.
pub(super) fn take_prepared(dir: &Path) -> Result<SavedFiles> {
    remove(dir)?;
    let take = |(name, becomes): (&str, &str)| {
        let to = dir.join(becomes);
        std::fs::hard_link(dir.join(name), &to).map_err(|error| failed(&error))?;
        OpenOptions::new().read(true).write(true).open(to).map_err(|error| failed(&error))
    };
    Ok(SavedFiles { devices: take(PREPARED[0])?, memory: SavedMemory::Whole(take(PREPARED[1])?) })
}

/// Moves the files of a running machine with its disk. Blocks.
///
/// # Errors
/// Those of renaming.
pub(super) fn move_prepared(from: &Path, to: &Path) -> Result<()> {
    for (name, _) in PREPARED {
        match std::fs::rename(from.join(name), to.join(name)) {
            // QEMU has none.
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::internal(format!("take a warm machine's {name}: {error}")));
            }
            _ => {}
        }
    }
    // Firecracker has none.
    base::move_pin(from, to).map_err(|error| Error::internal(format!("take the base of a warm machine: {error}")))
}

/// Removes the files of a running machine once it has ended; sealed ones stay. Blocks.
pub(super) fn drop_prepared(dir: &Path) {
    for (name, _) in PREPARED {
        let _ = std::fs::remove_file(dir.join(name));
    }
    let _ = base::unpin(dir);
}

/// Describes a machine whose state was written; from then on the next start continues it. Blocks.
///
/// # Errors
/// Those of the file system, `refused` if the state is too large.
pub(super) fn seal(
    dir: &Path,
    disk: &Path,
    host: HostId,
    kind: Kind,
    worker: &WorkerIdentity,
    files: &SavedFiles,
) -> Result<()> {
    let SavedFiles { devices, memory } = files;
    check_sizes(&kind, devices, memory)?;
    let sealed = |file: &File| file.sync_all().and_then(|()| part(file)).map_err(|error| failed(&error));
    let memory = match memory {
        SavedMemory::InState => MemoryPart::InState,
        SavedMemory::Whole(memory) => {
            dig_holes(memory).map_err(|error| failed(&error))?;
            MemoryPart::Whole(sealed(memory)?)
        }
        SavedMemory::Pages(SavedPages { pages, base, template }) => {
            let base = Base::describe(base, template.clone()).map_err(|error| failed(&error))?;
            MemoryPart::Pages { pages: sealed(pages)?, base }
        }
    };
    // What the guest has flushed may be in the host's memory only: after a loss of power, its own would not agree with it.
    let synced = File::open(disk).and_then(|disk| disk.sync_all().map(|()| disk)).map_err(|error| failed(&error))?;
    let saved = Saved {
        format: FORMAT,
        arch: std::env::consts::ARCH.to_owned(),
        host,
        kind,
        disk: Stamp::of(disk).map_err(|error| failed(&error))?,
        disk_contents: disk_contents(&synced).map_err(|error| failed(&error))?,
        state: sealed(devices)?,
        memory,
        worker: worker.worker,
        kernel: worker.kernel,
        epoch: worker.epoch,
        secret: worker.secret,
    };
    saved.snapshot()?.check_size(limits::SNAPSHOT_SUSPEND_BYTES)?;
    let text = serde_json::to_vec_pretty(&saved).map_err(|error| cannot(&error))?;
    std::fs::rename(dir.join(NEW), dir.join(STATE)).map_err(|error| failed(&error))?;
    fs::replace(&dir.join(DESCRIPTION), &text, 0o600, "machine.suspend.seal").map_err(|error| match error.is_full() {
        true => cannot(&error).reason(DISK_FULL),
        false => cannot(&error),
    })
}

/// Checks the sizes of files before they are read: a monitor could make them as large as its disk.
fn check_sizes(kind: &Kind, devices: &File, memory: &SavedMemory) -> Result<()> {
    let bytes = |file: &File| file.metadata().map(|found| found.len()).map_err(|error| failed(&error));
    let (whole, state) = (kind.memory_bytes(), limits::VM_DEVICE_STATE_BYTES);
    let (most, is_right) = match memory {
        SavedMemory::InState => (whole.saturating_add(state), true),
        SavedMemory::Whole(memory) => (state, bytes(memory)? == whole),
        SavedMemory::Pages(saved) => {
            (state, bytes(&saved.base)? == whole && bytes(&saved.pages)? <= saved_pages::most_bytes(whole))
        }
    };
    match is_right && bytes(devices)? <= most {
        true => Ok(()),
        false => Err(cannot(&"its files have other sizes than its memory")),
    }
}

/// Removes what is saved, if anything is. Blocks.
///
/// # Errors
/// Those of removing.
pub(super) fn remove(dir: &Path) -> Result<()> {
    // The description first, durably: the disk may change from here on, and without it the state is nothing.
    if dir.join(DESCRIPTION).exists() {
        let removed = fs::remove_durable(&dir.join(DESCRIPTION), "machine.suspend.forget");
        removed.map_err(|error| Error::unavailable(format!("remove {DESCRIPTION}: {error}")))?;
    }
    for name in [STATE, MEMORY, PAGES, base::SAVED, DEVICES, NEW] {
        match std::fs::remove_file(dir.join(name)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::unavailable(format!("remove {name}: {error}")));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Removes what is left of a save that was not sealed. Blocks.
///
/// # Errors
/// As [`remove`].
pub(super) fn remove_unsealed(dir: &Path) -> Result<()> {
    if dir.join(DESCRIPTION).exists() { Ok(()) } else { remove(dir) }
}

impl Saved {
    /// What is saved in a kernel's folder; `None` if nothing is. Blocks.
    ///
    /// # Errors
    /// `corrupt`; `unsupported` for another format; `busy`, `unavailable` if it cannot be read now.
    pub(super) fn read(dir: &Path) -> Result<Option<Saved>> {
        #[derive(Deserialize)]
        struct Head {
            format: u32,
        }
        let damaged = |error: &dyn std::fmt::Display| Error::corrupt(format!("{DESCRIPTION} is damaged: {error}"));
        let mut options = OpenOptions::new();
        let file = match options.read(true).custom_flags(libc::O_NOFOLLOW).open(dir.join(DESCRIPTION)) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(|error| unreadable(DESCRIPTION, &error))?,
        };
        let mut text = String::new();
        let read = file.take(limits::VM_TEMPLATE_JSON_BYTES).read_to_string(&mut text);
        read.map_err(|error| unreadable(DESCRIPTION, &error))?;
        // Another format may have other fields.
        let Head { format } = serde_json::from_str(&text).map_err(|error| damaged(&error))?;
        match format {
            FORMAT => serde_json::from_str(&text).map(Some).map_err(|error| damaged(&error)),
            other => Err(Error::unsupported(format!("its format is {other}, and this is {FORMAT}")).reason("format")),
        }
    }

    /// The worker in the machine.
    pub(super) fn worker(&self) -> WorkerIdentity {
        let (worker, kernel, epoch, secret) = (self.worker, self.kernel, self.epoch, self.secret);
        WorkerIdentity { worker, kernel, epoch, build: self.kind.build.clone(), secret }
    }

    /// The machine's memory as a snapshot.
    fn snapshot(&self) -> Result<Snapshot<Suspend>> {
        let foreign =
            |_| KindError::ArchitectureMismatch { snapshot: self.arch.clone(), host: Architecture::here().to_string() };
        Ok(Snapshot {
            architecture: self.arch.parse().map_err(foreign)?,
            base_image_version: self.kind.image.clone(),
            host: self.host,
            content: Suspend {
                memory_bytes: self.state.bytes.saturating_add(match &self.memory {
                    MemoryPart::InState => 0,
                    MemoryPart::Whole(memory) | MemoryPart::Pages { pages: memory, .. } => memory.bytes,
                }),
                machine: Some(self.kind.machine()),
            },
        })
    }

    /// Checks that a machine of that kind with that disk can continue here, and opens its state. Changes nothing. Blocks.
    ///
    /// # Errors
    /// One for each property that differs; `corrupt`.
    pub(super) fn open(&self, dir: &Path, disk: &Path, host: HostId, now: &Kind) -> Result<SavedFiles> {
        let resumed = self.snapshot()?.check_resume(&Site {
            architecture: Architecture::here(),
            base_image_version: now.image.clone(),
            host,
            machine: Some(now.machine()),
        });
        // The hints of kinds are about checkpoints.
        resumed.map_err(|error| Error::from(error).hint(""))?;
        if !self.kind.is_same(now) {
            return Err(Error::refused("it is a machine of another kind").reason("kind"));
        }
        let found = Stamp::of(disk).map_err(|error| Error::lost(format!("its disk is gone: {error}")))?;
        if found.bytes != self.disk.bytes {
            return Err(Error::refused(format!("its disk has {} bytes, and had {}", found.bytes, self.disk.bytes))
                .reason("disk_size"));
        }
        if found != self.disk {
            self.check_other(disk, &found)?;
        }
        let devices = open_part(&dir.join(STATE), &self.state)?;
        let memory = match &self.memory {
            MemoryPart::InState => SavedMemory::InState,
            MemoryPart::Whole(memory) => SavedMemory::Whole(open_part(&dir.join(MEMORY), memory)?),
            MemoryPart::Pages { base, .. } if base.bytes() != self.kind.memory_bytes() => {
                return Err(Error::corrupt("the file beneath the saved pages has another size than the memory"));
            }
            MemoryPart::Pages { pages, base } => SavedMemory::Pages(SavedPages {
                pages: open_part(&dir.join(PAGES), pages)?,
                base: base.open(dir)?,
                template: base.template.clone(),
            }),
        };
        Ok(SavedFiles { devices, memory })
    }

    /// Checks a disk that is not as it was described: a copy of it, after the data directory was moved, serves as well.
    ///
    /// # Errors
    /// `refused` if it holds something else; `unavailable` if that is unknown: the memory stays.
    fn check_other(&self, disk: &Path, found: &Stamp) -> Result<()> {
        let is_copy = match &self.disk_contents {
            _ if !found.is_elsewhere(&self.disk) => false,
            Some(was) => {
                let now = File::open(disk).and_then(|disk| stamp::contents(&disk));
                now.map_err(|error| unreadable("its disk", &error))? == *was
            }
            None if found.is_copy(&self.disk) => {
                return Err(Error::unavailable(
                    "its disk was copied, and is too large to be compared with the one that it was saved with",
                ));
            }
            None => false,
        };
        is_copy.then_some(()).ok_or_else(|| Error::refused("its disk has changed since").reason("disk"))
    }
}

/// What a disk holds, for a copy of it; `None` for a large one, which it would take long to read.
fn disk_contents(disk: &File) -> std::io::Result<Option<String>> {
    let allocated = disk.metadata()?.blocks().saturating_mul(512);
    (allocated <= limits::VM_COMPARED_DISK_BYTES).then(|| stamp::contents(disk)).transpose()
}

/// Opens a file that must be as it was written.
fn open_part(path: &Path, written: &Part) -> Result<File> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let damaged = |error: std::io::Error| unreadable(&name, &error);
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path).map_err(damaged)?;
    let is_whole =
        file.metadata().map_err(damaged)?.len() == written.bytes && part(&file).map_err(damaged)? == *written;
    is_whole.then_some(file).ok_or_else(|| Error::corrupt(format!("{name} is not what was written")))
}

#[cfg(test)]
mod tests;
