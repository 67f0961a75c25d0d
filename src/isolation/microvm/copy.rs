//! A running machine, copied at one stop: other kernels' machines begin with its memory, processors and disk.
//!
//! ```text
//!  processes stopped ─▶ machine stopped ─▶ memory, devices, disk ─▶ machine continues, and its processes
//!                                             └▶ ram, state ─▶ each copy: own disk, private memory, seeded, renamed, bound
//! ```
//!
//! A machine whose memory is mapped from a file is copied by the pages that it changed; the file beneath is copied before
//! the stop. Any other machine writes its whole memory as a stream, and so does one whose template did not prove copies
//! by pages.
//!
//! The copy's files are in an unfinished folder of the templates, which the next daemon removes, and exist until the last
//! machine was started: their memory stays mapped. A machine that does not confirm its seeding ends. A checkpoint of kind
//! teleport stores the same files; `installed.rs` puts them back.

use std::fs::{File, OpenOptions};
use std::io::Seek as _;
use std::os::fd::AsFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::unistd::{Whence, lseek};
use serde::{Deserialize, Serialize};

use super::handle::{MachineHandle, blocking};
use super::pages::MappedMemory;
use super::qmp::Qmp;
use super::seed::{self, Renewal};
use super::stream;
use super::template::{self, Kind, MEMORY, STATE, Template, close};
use super::template_folder::UNFINISHED;
use super::vmm::Vmm;
use crate::core::durability::Durability;
use crate::core::error::{Error, Result};
use crate::core::ids::{Epoch, KernelId, WorkerId};
use crate::core::limits;
use crate::core::snapshot::Machine;
use crate::isolation::NamedMachine;
use crate::link::handshake::WorkerIdentity;
use crate::sys::{fault, fs, inode, random};

const STREAM: &str = "stream";
const DEVICES: &str = "devices";
const COPIED_DISK: &str = "disk";
/// How often pages and devices are saved before memory that changes meanwhile is an error.
pub(super) const ATTEMPTS: usize = 3;
/// Why memory and devices do not belong together.
pub(super) const CHANGED: &str = "its memory changed while it stood still";

/// A machine that was saved at one stop. Its files are removed with it.
pub struct SavedMachine {
    place: Place,
    source: Source,
    kind: Kind,
    worker: WorkerIdentity,
    boot_id: String,
    /// Why its whole memory was written as a stream; `None`: its changed pages were.
    copied_whole: Option<String>,
}

/// How a machine's memory and devices are saved.
pub(super) enum Source {
    /// Everything in one stream.
    Stream(File),
    /// By its changed pages.
    Pages {
        mapped: MappedMemory,
        /// The memory, with the changed pages once it is saved.
        memory: File,
        devices: File,
        /// The state of its template.
        template: File,
    },
}

impl Source {
    /// Prepares to save a running machine in a folder. Copies what is beneath the changed pages. Blocks.
    ///
    /// # Errors
    /// Those of the file system.
    fn prepare(place: &Path, by_pages: Option<(MappedMemory, File)>) -> std::io::Result<Source> {
        let Some((mapped, template)) = by_pages else { return Source::stream(place) };
        let memory = create(&place.join(MEMORY))?;
        copy_file(mapped.base(), &memory)?;
        let mut options = OpenOptions::new();
        // Its reader opens it anew: the monitor finds a descriptor by how it was opened.
        let devices = options.write(true).create_new(true).mode(0o600).open(place.join(DEVICES))?;
        Ok(Source::Pages { mapped, memory, devices, template })
    }

    /// Prepares a copy as a stream.
    ///
    /// # Errors
    /// Those of the file system.
    pub(super) fn stream(place: &Path) -> std::io::Result<Source> {
        create(&place.join(STREAM)).map(Source::Stream)
    }

    /// Prepares a copy by pages.
    ///
    /// # Errors
    /// Those of the file system and of `/proc`.
    pub(super) fn pages(place: &Path, pid: u32, memory_bytes: u64, template: File) -> std::io::Result<Source> {
        Source::prepare(place, Some((MappedMemory::find(pid, memory_bytes)?, template)))
    }

    /// Saves a stopped machine.
    ///
    /// # Errors
    /// Those of the monitor, of the file system and of `/proc`.
    pub(super) async fn save(self, monitor: &mut Qmp) -> Result<Source> {
        match self {
            Source::Stream(stream) => {
                monitor.save_into(&stream, limits::VM_MEMORY).await?;
                Ok(Source::Stream(stream))
            }
            Source::Pages { mapped, memory, devices, template } => {
                let copy = Arc::new((mapped, memory));
                for _ in 0..ATTEMPTS {
                    let (from, mut begin) = (Arc::clone(&copy), devices.try_clone().map_err(|error| failed(&error))?);
                    blocking(move || {
                        let (mapped, memory) = &*from;
                        let pages = mapped.write_changed(memory).map_err(|error| failed(&error))?;
                        tracing::info!(pages, "the changed pages of a machine were copied");
                        // The monitor continues where the descriptor is.
                        begin.set_len(0).and_then(|()| begin.rewind()).map_err(|error| failed(&error))
                    })
                    .await?;
                    monitor.save_devices(&devices).await?;
                    let now = Arc::clone(&copy);
                    if blocking(move || now.0.is_written(&now.1).map_err(|error| failed(&error))).await? {
                        let (mapped, memory) =
                            Arc::try_unwrap(copy).map_err(|_| Error::internal("a copy is in use"))?;
                        return Ok(Source::Pages { mapped, memory, devices, template });
                    }
                    tracing::warn!("the memory of a stopped machine changed while it was copied");
                }
                Err(failed(&CHANGED).hint("try again"))
            }
        }
    }

    /// Makes memory and state in the same folder. Blocks.
    ///
    /// # Errors
    /// Those of the file system; `InvalidData`.
    pub(super) fn finish(self, place: &Path, memory_bytes: u64) -> std::io::Result<()> {
        let state = create(&place.join(STATE))?;
        let (memory, used) = match self {
            Source::Stream(stream) => {
                let memory = create(&place.join(MEMORY))?;
                stream::split(&stream, memory_bytes, &memory, &state)?;
                (memory, STREAM)
            }
            Source::Pages { memory, template, .. } => {
                stream::join(&template, &File::open(place.join(DEVICES))?, memory_bytes, &state)?;
                (memory, DEVICES)
            }
        };
        close(&memory)?;
        close(&state)?;
        std::fs::remove_file(place.join(used))
    }
}

/// A copied machine, ready for launches. Its files are removed with it.
pub struct MachineCopy {
    /// `None`: a machine that is installed in its kernel's folder, with its disk.
    place: Option<Place>,
    template: Template,
    kind: Kind,
    worker: WorkerIdentity,
    boot_id: String,
}

/// A folder that is removed when it is dropped.
struct Place(PathBuf);

impl Drop for Place {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_tree(&self.0) {
            tracing::warn!(%error, "the files of a copied machine are left for the next start");
        }
    }
}

/// The parts of a copied machine, for the store.
pub struct MachineFiles {
    /// Its memory, with holes.
    pub memory: File,
    /// The state of its processors and devices.
    pub state: File,
    /// Its disk, with holes.
    pub disk: File,
    /// What [`IsolationDriver::install`](crate::isolation::IsolationDriver::install) needs. Holds the worker's secret.
    pub description: Vec<u8>,
    /// What a host must have to continue it.
    pub machine: Machine,
}

impl MachineCopy {
    /// A machine whose files are in its kernel's folder.
    pub(super) fn installed(template: Template, kind: Kind, worker: WorkerIdentity, boot_id: String) -> MachineCopy {
        MachineCopy { place: None, template, kind, worker, boot_id }
    }

    /// Its parts, for the store. Blocks.
    ///
    /// # Errors
    /// Those of opening the files.
    pub fn files(&self) -> Result<MachineFiles> {
        let place = self.place.as_ref().ok_or_else(|| Error::internal("an installed machine is no copy"))?;
        let description = Description {
            format: FORMAT,
            kind: self.kind.clone(),
            worker: self.worker.worker,
            kernel: self.worker.kernel,
            epoch: self.worker.epoch,
            secret: self.worker.secret,
            boot_id: self.boot_id.clone(),
        };
        Ok(MachineFiles {
            memory: self.template.memory().map_err(|error| failed(&error))?,
            state: self.template.state().map_err(|error| failed(&error))?,
            disk: File::open(place.0.join(COPIED_DISK)).map_err(|error| failed(&error))?,
            description: serde_json::to_vec(&description).map_err(|error| failed(&error))?,
            machine: self.kind.machine(),
        })
    }

    /// The identity of the worker in the original, and in each copy until it is bound.
    pub fn worker(&self) -> &WorkerIdentity {
        &self.worker
    }

    pub(super) fn template(&self) -> &Template {
        &self.template
    }

    pub(super) fn kind(&self) -> &Kind {
        &self.kind
    }

    /// The boot id of the original.
    pub(super) fn boot_id(&self) -> &str {
        &self.boot_id
    }

    /// Makes a kernel's disk from the copied one; an installed machine has its disk.
    ///
    /// # Errors
    /// Those of the file system.
    pub(super) async fn make_disk(&self, to: &Path, durability: Durability) -> Result<()> {
        let Some(place) = &self.place else { return Ok(()) };
        let (from, to) = (place.0.join(COPIED_DISK), to.to_owned());
        blocking(move || {
            let copied = copy_disk(&from, &to).and_then(|disk| match durability {
                Durability::Process => Ok(()),
                Durability::Power => disk.sync_all(),
            });
            copied.map_err(|error| failed(&error))
        })
        .await
    }
}

fn failed(error: &dyn std::fmt::Display) -> Error {
    Error::unavailable(format!("a virtual machine cannot be copied: {error}"))
}

/// The format of a description.
const FORMAT: u32 = 1;

/// What is stored beside memory, state and disk.
#[derive(Serialize, Deserialize)]
pub(super) struct Description {
    format: u32,
    pub kind: Kind,
    worker: WorkerId,
    kernel: KernelId,
    epoch: Epoch,
    /// The secret that the worker in the machine knows.
    secret: [u8; 32],
    pub boot_id: String,
}

impl Description {
    /// Decodes a stored description.
    ///
    /// # Errors
    /// `corrupt`; `unsupported` for another format.
    pub(super) fn decode(bytes: &[u8]) -> Result<Description> {
        #[derive(Deserialize)]
        struct Head {
            format: u32,
        }
        let damaged = |error: serde_json::Error| {
            Error::corrupt(format!("the description of a virtual machine is damaged: {error}"))
        };
        let Head { format } = serde_json::from_slice(bytes).map_err(damaged)?;
        match format {
            FORMAT => serde_json::from_slice(bytes).map_err(damaged),
            other => Err(Error::unsupported(format!("a virtual machine has format {other}, and this is {FORMAT}"))
                .reason("format")
                .hint("use --kind checkpoint, which is valid anywhere")),
        }
    }

    /// Checks that it describes the machine that its snapshot names.
    ///
    /// # Errors
    /// `corrupt`.
    pub(super) fn check(&self, named: &NamedMachine<'_>) -> Result<()> {
        let kind = &self.kind;
        let is_it = kind.machine() == *named.machine
            && kind.image == named.image
            && (kind.memory_bytes(), kind.disk_bytes) == (named.memory_bytes, named.disk_bytes);
        is_it.then_some(()).ok_or_else(|| Error::corrupt("its description is of another machine"))
    }

    /// The worker in the machine.
    pub(super) fn worker(&self) -> WorkerIdentity {
        let (worker, kernel, epoch, secret) = (self.worker, self.kernel, self.epoch, self.secret);
        WorkerIdentity { worker, kernel, epoch, build: self.kind.build.clone(), secret }
    }
}

impl MachineHandle {
    /// What the machine is, if it can be copied while it runs.
    ///
    /// # Errors
    /// `unsupported` for a machine of an earlier version, and with Firecracker.
    pub(super) fn copied_kind(&self) -> Result<Kind> {
        let Some(kind) = self.kind().filter(|_| self.is_running()) else {
            return Err(Error::unsupported("the virtual machine was started by an earlier version of ryokan")
                .reason("fork")
                .hint("stop the kernel, and start it again"));
        };
        match kind.vmm() {
            Vmm::Qemu => Ok(kind),
            // Its save ends the guest's connections, the worker's link among them: the kernel would be lost.
            Vmm::Firecracker => Err(Error::unsupported("Firecracker cannot copy a running machine")
                .reason("fork")
                .hint("use files and engine state (--kind checkpoint), or set microvm.vmm to \"qemu\"")),
        }
    }

    /// Copies the machine, whose processes the caller has stopped. It runs on, also after a failure.
    ///
    /// # Errors
    /// `unsupported` for a machine of an earlier version; those of saving.
    pub(super) async fn save_running(&self, worker: &WorkerIdentity) -> Result<SavedMachine> {
        let kind = self.copied_kind()?;
        let (machine, folder) = (self.machine(), self.copies().to_owned());
        // Clients' access to the files is delayed, unless a transfer takes longer: then its guest answers late.
        let access = Arc::clone(&machine.access_lock).lock_owned();
        let _access = tokio::time::timeout(limits::VM_CALL, access).await;
        let (disk, worker) = (machine.folder.disk(), worker.clone());
        let (pid, about) = (self.process(), kind.clone());
        let (place, source, boot_id, copied_whole) = blocking(move || {
            let place = Place(folder.join(format!("{UNFINISHED}copy-{:016x}", u64::from_le_bytes(random::bytes()))));
            std::fs::create_dir_all(&folder).map_err(|error| failed(&error))?;
            let mut builder = std::fs::DirBuilder::new();
            std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
            builder.create(&place.0).map_err(|error| failed(&error))?;
            let (pages, copied_whole) = match by_pages(&folder, pid, &about) {
                Ok(pages) => (Some(pages), None),
                Err(why) => (None, Some(why)),
            };
            let source = Source::prepare(&place.0, pages).map_err(|error| failed(&error))?;
            Ok((place, source, seed::seed(&mut machine.client(), "", Renewal::Keep)?, copied_whole))
        })
        .await?;
        let copied_disk = place.0.join(COPIED_DISK);
        let mut monitor = Qmp::connect(&self.sockets().monitor).await?;
        self.set_stopped(true);
        let saved = async {
            monitor.stop().await?;
            let source = source.save(&mut monitor).await?;
            fault::point("machine.copy.save").map_err(|error| failed(&error))?;
            blocking(move || copy_disk(&disk, &copied_disk).map_err(|error| failed(&error))).await?;
            Ok(source)
        };
        let saved: Result<Source> = saved.await;
        let resumed = monitor.go_on().await;
        self.set_stopped(false);
        resumed?;
        let source = saved?;
        self.set_clock().await?;
        Ok(SavedMachine { place, source, kind, worker, boot_id, copied_whole })
    }
}

impl SavedMachine {
    /// Why the whole memory was copied while the machine stood still, and not only what it changed.
    pub fn copied_whole(&self) -> Option<&str> {
        self.copied_whole.as_deref()
    }

    /// Completes memory and state, which takes its time: the original runs meanwhile.
    ///
    /// # Errors
    /// Those of the file system; `unavailable` if what was saved is not understood.
    pub async fn into_copy(self) -> Result<MachineCopy> {
        let SavedMachine { place, source, kind, worker, boot_id, copied_whole: _ } = self;
        let memory_bytes = kind.memory_bytes();
        let (place, template) = blocking(move || {
            let finished = source.finish(&place.0, memory_bytes).and_then(|()| Template::untested(&place.0));
            let template = finished.map_err(|error| failed(&error))?;
            Ok((place, template))
        })
        .await?;
        fault::point("machine.copy.split").map_err(|error| failed(&error))?;
        Ok(MachineCopy { place: Some(place), template, kind, worker, boot_id })
    }
}

/// What a copy by pages needs: where the machine's memory is mapped, and the state of its template, which has proved
/// such copies; an error says why the whole memory is copied. Blocks.
fn by_pages(templates: &Path, pid: u32, kind: &Kind) -> std::result::Result<(MappedMemory, File), String> {
    let words = |error: std::io::Error| error.to_string();
    fault::point("machine.copy.pages").map_err(words)?;
    let folder = templates.join(kind.key().map_err(|error| error.message)?);
    let mapped = MappedMemory::find(pid, kind.memory_bytes()).map_err(words)?;
    Ok((mapped, template::proven_state(&folder, kind)?))
}

pub(super) fn create(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)
}

/// Copies a disk: as a clone where the file system can, else what is no hole.
fn copy_disk(from: &Path, to: &Path) -> std::io::Result<File> {
    let (from, to) = (File::open(from)?, create(to)?);
    copy_file(&from, &to)?;
    Ok(to)
}

fn copy_file(from: &File, to: &File) -> std::io::Result<()> {
    match inode::clone_blocks(from.as_fd(), to.as_fd()) {
        Ok(()) => Ok(()),
        Err(_) => copy_sparse(from, to),
    }
}

fn copy_sparse(from: &File, to: &File) -> std::io::Result<()> {
    use std::io::{Read as _, Seek as _, SeekFrom};

    let bytes = from.metadata()?.len();
    to.set_len(bytes)?;
    let (mut source, mut target, mut at) = (from, to, 0);
    while at < bytes {
        let data = match lseek(from, at.cast_signed(), Whence::SeekData) {
            // Nothing but a hole follows.
            Err(nix::errno::Errno::ENXIO) => return Ok(()),
            found => found?.cast_unsigned(),
        };
        let end = lseek(from, data.cast_signed(), Whence::SeekHole)?.cast_unsigned().min(bytes);
        source.seek(SeekFrom::Start(data))?;
        target.seek(SeekFrom::Start(data))?;
        std::io::copy(&mut source.take(end - data), &mut target)?;
        at = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt as _, MetadataExt as _};

    use super::super::template::tests::{kind, template};
    use super::*;
    use crate::core::error::ErrorCode;
    use crate::sys::fault::tests::with_fault;

    #[test]
    fn foreign_descriptions_are_refused() {
        let description = Description {
            format: FORMAT,
            kind: kind(),
            worker: WorkerId::from_bytes([1; 16]),
            kernel: KernelId::from_bytes([2; 16]),
            epoch: Epoch(3),
            secret: [4; 32],
            boot_id: String::from("boot"),
        };
        let (machine, image) = (kind().machine(), kind().image);
        let (memory_bytes, disk_bytes) = (kind().memory_bytes(), kind().disk_bytes);
        let check = |image: &str, memory_bytes, disk_bytes| {
            let named = NamedMachine { machine: &machine, image, memory_bytes, disk_bytes };
            description.check(&named).err().map(|error| error.code)
        };
        assert_eq!(check(&image, memory_bytes, disk_bytes), None);
        for (image, memory_bytes, disk_bytes) in
            [("other", memory_bytes, disk_bytes), (&*image, 1, disk_bytes), (&*image, memory_bytes, 1)]
        {
            assert_eq!(check(image, memory_bytes, disk_bytes), Some(ErrorCode::Corrupt));
        }
        let text = serde_json::to_vec(&description).expect("JSON");
        assert!(Description::decode(&text).is_ok_and(|found| found.worker() == description.worker()));
        // A later one may have other fields.
        let reason = |bytes: &[u8]| Description::decode(bytes).err().map(|error| (error.code, error.reason));
        let later = br#"{"format": 2, "machine": "of another time"}"#;
        assert_eq!(reason(later), Some((ErrorCode::Unsupported, "format".into())));
        for damaged in [&text[..text.len() / 2], b"", b"{}", br#"{"format": 1}"#, br#"{"format": "1"}"#] {
            assert_eq!(reason(damaged).map(|(code, _)| code), Some(ErrorCode::Corrupt), "{damaged:?}");
        }
    }

    #[test]
    fn whole_copy_has_reason() {
        let (folder, kind) = (tempfile::tempdir().expect("a folder"), kind());
        template(folder.path(), &kind);
        let own = std::process::id();
        let why = |pid| by_pages(folder.path(), pid, &kind).expect_err("this process maps no such memory");
        assert!(!why(own).is_empty());
        let armed = with_fault("machine.copy.pages=eio", || why(own));
        assert!(armed.contains("Input/output error"), "{armed}");
        let unproven = template::proven_state(&folder.path().join(kind.key().expect("a key")), &kind);
        assert_eq!(unproven.err().as_deref(), Some("its template did not prove copies by pages"));
    }

    #[test]
    fn disk_copies_keep_holes() -> std::io::Result<()> {
        let folder = tempfile::tempdir()?;
        let path = |name: &str| folder.path().join(name);
        let disk = create(&path("disk"))?;
        disk.set_len(1 << 30)?;
        for (at, text) in [(5 << 20, b"one"), (900 << 20, b"two")] {
            disk.write_all_at(text, at)?;
        }
        let sparse = create(&path("sparse"))?;
        copy_sparse(&disk, &sparse)?;
        for copy in [sparse, copy_disk(&path("disk"), &path("copy"))?] {
            let (mut found, about) = ([0; 3], copy.metadata()?);
            assert_eq!(about.len(), 1 << 30);
            assert!(about.blocks() * 512 < 1 << 20, "{} blocks", about.blocks());
            for (at, text) in [(5 << 20, b"one"), (900 << 20, b"two"), (1 << 20, &[0; 3])] {
                copy.read_exact_at(&mut found, at)?;
                assert_eq!(&found, text);
            }
        }
        Ok(())
    }
}
