//! A suspended machine on the disk: its memory and processors beside the kernel's disk, as they were at one stop.
//!
//! ```text
//!  stopped machine ─▶ suspended.new ─ synced ─▶ suspended.state ─▶ suspended.json ─▶ QEMU ends
//!  next start: description, disk and digest are right ─▶ loaded ─▶ both removed ─▶ the machine continues
//! ```
//!
//! Both files are removed before the machine continues. The disk's time of change makes the pair invalid as soon as
//! anything else writes to the disk.

use std::fs::{File, OpenOptions};
use std::io::Read as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::template::{Kind, Part, part};
use crate::core::error::{Error, Result};
use crate::core::ids::{Epoch, KernelId, WorkerId};
use crate::core::limits;
use crate::link::handshake::WorkerIdentity;
use crate::sys::fs;

const FORMAT: u32 = 1;
const NEW: &str = "suspended.new";
const STATE: &str = "suspended.state";
const DESCRIPTION: &str = "suspended.json";

/// A disk at one moment: QEMU's writes change its time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct DiskStamp {
    inode: u64,
    bytes: u64,
    changed_s: i64,
    changed_ns: i64,
}

impl DiskStamp {
    fn of(disk: &Path) -> std::io::Result<DiskStamp> {
        let found = disk.symlink_metadata()?;
        let (changed_s, changed_ns) = (found.mtime(), found.mtime_nsec());
        Ok(DiskStamp { inode: found.ino(), bytes: found.len(), changed_s, changed_ns })
    }
}

/// The description of a suspended machine.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct Saved {
    format: u32,
    arch: String,
    pub kind: Kind,
    disk: DiskStamp,
    state: Part,
    worker: WorkerId,
    kernel: KernelId,
    epoch: Epoch,
    /// The secret that the worker in the machine knows.
    secret: [u8; 32],
}

fn failed(error: &dyn std::fmt::Display) -> Error {
    Error::unavailable(format!("the memory of a virtual machine cannot be saved: {error}"))
}

/// Opens a new file for a machine's state. Blocks.
///
/// # Errors
/// Those of the file system.
pub(super) fn create(dir: &Path) -> Result<File> {
    remove(dir)?;
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true).mode(0o600).open(dir.join(NEW)).map_err(|error| failed(&error))
}

/// Describes a machine whose state was written; from then on the next start continues it. Blocks.
///
/// # Errors
/// Those of the file system.
pub(super) fn seal(dir: &Path, disk: &Path, kind: Kind, worker: &WorkerIdentity, state: &File) -> Result<()> {
    state.sync_all().map_err(|error| failed(&error))?;
    let saved = Saved {
        format: FORMAT,
        arch: std::env::consts::ARCH.to_owned(),
        kind,
        disk: DiskStamp::of(disk).map_err(|error| failed(&error))?,
        state: part(state).map_err(|error| failed(&error))?,
        worker: worker.worker,
        kernel: worker.kernel,
        epoch: worker.epoch,
        secret: worker.secret,
    };
    let text = serde_json::to_vec_pretty(&saved).map_err(|error| failed(&error))?;
    std::fs::rename(dir.join(NEW), dir.join(STATE)).map_err(|error| failed(&error))?;
    fs::replace(&dir.join(DESCRIPTION), &text, 0o600, "microvm.suspended").map_err(|error| failed(&error))
}

/// Removes what is saved, if anything is. Blocks.
///
/// # Errors
/// Those of removing.
pub(super) fn remove(dir: &Path) -> Result<()> {
    // The description first: without it the state is nothing.
    for name in [DESCRIPTION, STATE, NEW] {
        match std::fs::remove_file(dir.join(name)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::unavailable(format!("remove {name}: {error}")));
            }
            _ => {}
        }
    }
    Ok(())
}

impl Saved {
    /// What is saved in a kernel's folder; `None` if nothing is. Blocks.
    ///
    /// # Errors
    /// `corrupt`.
    pub(super) fn read(dir: &Path) -> Result<Option<Saved>> {
        let damaged = |error: &dyn std::fmt::Display| Error::corrupt(format!("{DESCRIPTION} is damaged: {error}"));
        let mut options = OpenOptions::new();
        let file = match options.read(true).custom_flags(libc::O_NOFOLLOW).open(dir.join(DESCRIPTION)) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            opened => opened.map_err(|error| damaged(&error))?,
        };
        let mut text = String::new();
        file.take(limits::VM_TEMPLATE_JSON_BYTES).read_to_string(&mut text).map_err(|error| damaged(&error))?;
        let saved: Saved = serde_json::from_str(&text).map_err(|error| damaged(&error))?;
        match saved.format {
            FORMAT => Ok(Some(saved)),
            other => Err(Error::unsupported(format!("its format is {other}, and this is {FORMAT}")).reason("format")),
        }
    }

    /// The worker in the machine.
    pub(super) fn worker(&self) -> WorkerIdentity {
        let (worker, kernel, epoch, secret) = (self.worker, self.kernel, self.epoch, self.secret);
        WorkerIdentity { worker, kernel, epoch, build: self.kind.build.clone(), secret }
    }

    /// Checks that a machine of that kind with that disk can continue, and opens its state. Changes nothing. Blocks.
    ///
    /// # Errors
    /// One for each property that differs; `corrupt`.
    pub(super) fn open(&self, dir: &Path, disk: &Path, now: &Kind) -> Result<File> {
        self.check(now)?;
        let found = DiskStamp::of(disk).map_err(|error| Error::lost(format!("its disk is gone: {error}")))?;
        if found.bytes != self.disk.bytes {
            return Err(Error::refused(format!("its disk has {} bytes, and had {}", found.bytes, self.disk.bytes))
                .reason("disk_size"));
        }
        if found != self.disk {
            return Err(Error::refused("its disk has changed since").reason("disk"));
        }
        let mut options = OpenOptions::new();
        let state = options.read(true).custom_flags(libc::O_NOFOLLOW).open(dir.join(STATE));
        let state = state.map_err(|error| Error::corrupt(format!("{STATE}: {error}")))?;
        match part(&state) {
            Ok(found) if found == self.state => Ok(state),
            Ok(_) => Err(Error::corrupt(format!("{STATE} is not what was written"))),
            Err(error) => Err(Error::corrupt(format!("{STATE}: {error}"))),
        }
    }

    fn check(&self, now: &Kind) -> Result<()> {
        let was = &self.kind;
        let differs = |what: &str, was: &str, now: &str, reason: &str| {
            Err(Error::refused(format!("its {what} was {was:?}, and is {now:?}")).reason(reason))
        };
        if self.arch != std::env::consts::ARCH {
            return differs("architecture", &self.arch, std::env::consts::ARCH, "architecture");
        }
        if was.qemu != now.qemu {
            return differs("QEMU", &was.qemu, &now.qemu, "qemu_version");
        }
        if was.build != now.build {
            return differs("ryokan", &was.build, &now.build, "build");
        }
        if was.image != now.image {
            return differs("image", &was.image, &now.image, "image");
        }
        let [machine, cpu] = [("-M", "machine", "machine_type"), ("-cpu", "processor model", "cpu_model")].map(
            |(option, what, reason)| {
                let of = |kind: &Kind| kind.machine.iter().skip_while(|word| *word != option).nth(1).cloned();
                (of(was), of(now), what, reason)
            },
        );
        for (was, now, what, reason) in [machine, cpu] {
            if was != now {
                return differs(what, &was.unwrap_or_default(), &now.unwrap_or_default(), reason);
            }
        }
        if (was.memory_mib, was.processors) != (now.memory_mib, now.processors) {
            let text = |kind: &Kind| format!("{} MiB, {} processors", kind.memory_mib, kind.processors);
            return differs("size", &text(was), &text(now), "size");
        }
        match was == now {
            true => Ok(()),
            false => Err(Error::refused("it is a machine of another kind").reason("kind")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::engine::EngineName;
    use crate::link::bootstrap::BUILD;

    fn kind() -> Kind {
        Kind {
            image: String::from("abc"),
            engine: EngineName::Python,
            uid: 0,
            qemu: String::from("QEMU 10"),
            build: BUILD.to_owned(),
            machine: ["-M", "q35", "-cpu", "qemu64", "-accel", "tcg"].map(str::to_owned).to_vec(),
            memory_mib: 1,
            processors: 1,
            disk_bytes: 4,
        }
    }

    fn saved(dir: &Path) -> Saved {
        let mut state = create(dir).expect("created");
        std::io::Write::write_all(&mut state, b"state").expect("written");
        std::fs::write(dir.join("disk"), b"disk").expect("written");
        let worker = WorkerIdentity {
            worker: WorkerId::from_bytes([1; 16]),
            kernel: KernelId::from_bytes([2; 16]),
            epoch: Epoch(3),
            build: BUILD.to_owned(),
            secret: [4; 32],
        };
        seal(dir, &dir.join("disk"), kind(), &worker, &state).expect("sealed");
        Saved::read(dir).expect("read").expect("it is there")
    }

    #[test]
    fn other_machines_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let (dir, disk) = (folder.path(), folder.path().join("disk"));
        let saved = saved(dir);
        assert!(saved.open(dir, &disk, &kind()).is_ok());
        let machine = |words: [&str; 4]| words.map(str::to_owned).to_vec();
        let others: [(&str, Kind); 7] = [
            ("qemu_version", Kind { qemu: "QEMU 11".into(), ..kind() }),
            ("image", Kind { image: "def".into(), ..kind() }),
            ("build", Kind { build: "other".into(), ..kind() }),
            ("machine_type", Kind { machine: machine(["-M", "pc", "-cpu", "qemu64"]), ..kind() }),
            ("cpu_model", Kind { machine: machine(["-M", "q35", "-cpu", "max"]), ..kind() }),
            ("size", Kind { memory_mib: 2, ..kind() }),
            ("kind", Kind { uid: 1, ..kind() }),
        ];
        for (reason, other) in others {
            assert_eq!(saved.open(dir, &disk, &other).err().map(|error| error.reason), Some(reason.into()));
        }
        let foreign = Saved { arch: "vax".into(), ..saved };
        assert_eq!(foreign.open(dir, &disk, &kind()).err().map(|error| error.reason), Some("architecture".into()));
    }

    #[test]
    fn changed_files_are_refused() {
        use crate::core::error::ErrorCode;

        let folder = tempfile::tempdir().expect("a folder");
        let (dir, disk) = (folder.path(), folder.path().join("disk"));
        let refused = |saved: &Saved| saved.open(dir, &disk, &kind()).err().map(|error| (error.code, error.reason));
        let first = saved(dir);
        std::fs::write(dir.join(STATE), b"stale").expect("written");
        assert_eq!(refused(&first), Some((ErrorCode::Corrupt, String::new())));
        let second = saved(dir);
        std::thread::sleep(std::time::Duration::from_millis(20));
        std::fs::write(&disk, b"DISK").expect("written");
        assert_eq!(refused(&second), Some((ErrorCode::Refused, "disk".into())));
        std::fs::write(&disk, b"larger").expect("written");
        assert_eq!(refused(&second), Some((ErrorCode::Refused, "disk_size".into())));
        std::fs::remove_file(&disk).expect("removed");
        assert_eq!(refused(&second), Some((ErrorCode::Lost, String::new())));
        std::fs::write(dir.join(DESCRIPTION), b"{").expect("written");
        assert_eq!(Saved::read(dir).err().map(|error| error.code), Some(ErrorCode::Corrupt));
        remove(dir).expect("removed");
        assert!(Saved::read(dir).is_ok_and(|found| found.is_none()) && !dir.join(STATE).exists());
    }
}
