//! A machine from a checkpoint, put into its kernel's folder: the kernel's next worker continues it.
//!
//! ```text
//!  installed.new.* ─ filled, synced ─▶ disk.ext4, installed.ram, installed.state ─▶ installed.json: installed
//!  next start: files and machine are right ─▶ loaded ─▶ installed.begun ─▶ seeded anew, bound: continues
//! ```
//!
//! The memory is mapped and read as it is used. The files are removed before the machine continues; their times make
//! them invalid as soon as anything else writes to them. Without them, the kernel starts from the disk. `installed.begun`
//! stays until the machine is bound: it says that memory is lost if nothing binds it.

use std::fs::{File, OpenOptions};
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::DISK;
use super::copy::{Description, MachineCopy, create};
use super::saved::unreadable;
use super::stamp::Stamp;
use super::template::{Kind, Template, close};
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::isolation::InstallFiles;
use crate::sys::fs;

const FORMAT: u32 = 1;
const MEMORY: &str = "installed.ram";
const STATE: &str = "installed.state";
const DESCRIPTION: &str = "installed.json";
/// The description of a machine that continues and is not bound yet.
const BEGUN: &str = "installed.begun";
/// Files that are being filled.
const NEW: [&str; 3] = ["installed.new.ram", "installed.new.state", "installed.new.disk"];

/// The description on the disk.
#[derive(Serialize, Deserialize)]
struct Installed {
    format: u32,
    /// Memory, state and disk.
    files: [Stamp; 3],
    machine: Description,
}

fn failed(error: &dyn std::fmt::Display) -> Error {
    Error::unavailable(format!("a virtual machine cannot be installed: {error}"))
}

/// Puts a machine into a kernel's folder; its disk becomes the truth. Blocks.
///
/// # Errors
/// `corrupt`, those of `fill` and of the file system: nothing is installed then.
pub(super) fn install(dir: &Path, description: &[u8], fill: InstallFiles) -> Result<()> {
    let installed = fill_and_place(dir, description, fill);
    if installed.is_err()
        && let Err(error) = remove(dir)
    {
        tracing::warn!(%error, "files of a machine that was not installed are left");
    }
    installed
}

fn fill_and_place(dir: &Path, description: &[u8], fill: InstallFiles) -> Result<()> {
    let machine = Description::decode(description)?;
    remove(dir)?;
    let [memory, state, disk] = NEW.map(|name| create(&dir.join(name)).map_err(|error| failed(&error)));
    let files = [memory?, state?, disk?];
    fill([&files[0], &files[1], &files[2]])?;
    let lengths = [machine.kind.memory_bytes(), limits::VM_DEVICE_STATE_BYTES, machine.kind.disk_bytes];
    for (at, file) in files.iter().enumerate() {
        let found = file.metadata().map_err(|error| failed(&error))?.len();
        if found > lengths[at] || (at != 1 && found != lengths[at]) {
            return Err(Error::corrupt(format!("a virtual machine's {} has {found} bytes", NEW[at])));
        }
    }
    let place = || {
        for file in &files[..2] {
            close(file)?;
        }
        // Nothing compares them again: after a loss of power, memory must not meet another disk.
        files.iter().try_for_each(File::sync_all)?;
        for (from, to) in NEW.iter().zip([MEMORY, STATE, DISK]) {
            std::fs::rename(dir.join(from), dir.join(to))?;
        }
        let [memory, state, disk] = [MEMORY, STATE, DISK].map(|name| Stamp::of(&dir.join(name)));
        Ok::<_, std::io::Error>([memory?, state?, disk?])
    };
    let files = place().map_err(|error| failed(&error))?;
    let installed = Installed { format: FORMAT, files, machine };
    let text = serde_json::to_vec(&installed).map_err(|error| failed(&error))?;
    fs::replace(&dir.join(DESCRIPTION), &text, 0o600, "microvm.installed").map_err(|error| failed(&error))
}

/// Removes what is installed, except the disk, before the machine continues: from here on the disk changes. Blocks.
///
/// # Errors
/// Those of renaming and removing.
pub(super) fn begin(dir: &Path) -> Result<()> {
    if !is_there(dir) {
        return Ok(());
    }
    let renamed = fs::rename_durable(&dir.join(DESCRIPTION), &dir.join(BEGUN), "microvm.installed.begin");
    renamed.map_err(|error| failed(&error))?;
    remove_files(dir, &[MEMORY, STATE])
}

/// Forgets that a machine began to continue, because it is bound to its kernel. Blocks.
///
/// # Errors
/// Those of removing.
pub(super) fn forget_begun(dir: &Path) -> Result<()> {
    remove_files(dir, &[BEGUN])
}

/// Removes what is installed, except the disk. Blocks.
///
/// # Errors
/// Those of removing.
pub(super) fn remove(dir: &Path) -> Result<()> {
    // The description first: without it the files are nothing.
    remove_files(dir, &[DESCRIPTION, BEGUN, MEMORY, STATE])?;
    remove_files(dir, &NEW)
}

fn remove_files(dir: &Path, names: &[&str]) -> Result<()> {
    for name in names {
        match std::fs::remove_file(dir.join(name)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::unavailable(format!("remove {name}: {error}")));
            }
            _ => {}
        }
    }
    Ok(())
}

/// The image of the machine that is installed in a kernel's folder, if there is one. Blocks.
pub(super) fn image(dir: &Path) -> Option<String> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(dir.join(DESCRIPTION)).ok()?;
    let mut text = Vec::new();
    file.take(limits::VM_TEMPLATE_JSON_BYTES).read_to_end(&mut text).ok()?;
    let installed: Installed = serde_json::from_slice(&text).ok()?;
    Some(installed.machine.kind.image)
}

/// Whether a machine is installed in a kernel's folder. Blocks.
pub(super) fn is_there(dir: &Path) -> bool {
    dir.join(DESCRIPTION).exists()
}

/// Opens what is installed in a kernel's folder, for machines of this user; `None` if nothing is. Blocks.
///
/// # Errors
/// `corrupt`; `refused` if a file has changed; `lost` if the machine began to continue and was not bound; `busy`,
/// `unavailable` if it cannot be read now, or was copied: it stays.
pub(super) fn open(dir: &Path, uid: u32) -> Result<Option<MachineCopy>> {
    let damaged = |error: &dyn std::fmt::Display| Error::corrupt(format!("{DESCRIPTION} is damaged: {error}"));
    let mut options = OpenOptions::new();
    let file = match options.read(true).custom_flags(libc::O_NOFOLLOW).open(dir.join(DESCRIPTION)) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return match dir.join(BEGUN).exists() {
                true => Err(Error::lost("the daemon ended while the machine began to continue")),
                false => Ok(None),
            };
        }
        opened => opened.map_err(|error| unreadable(DESCRIPTION, &error))?,
    };
    let mut text = Vec::new();
    let read = file.take(limits::VM_TEMPLATE_JSON_BYTES).read_to_end(&mut text);
    read.map_err(|error| unreadable(DESCRIPTION, &error))?;
    let installed: Installed = serde_json::from_slice(&text).map_err(|error| damaged(&error))?;
    if installed.format != FORMAT {
        return Err(
            Error::unsupported(format!("its format is {}, and this is {FORMAT}", installed.format)).reason("format")
        );
    }
    for (name, was) in [MEMORY, STATE, DISK].into_iter().zip(&installed.files) {
        match Stamp::of(&dir.join(name)) {
            Ok(found) if found == *was => {}
            // A copy of the data directory: nothing says whether it is whole.
            Ok(found) if found.is_copy(was) => {
                return Err(Error::unavailable(format!("{name} was copied since, and cannot be compared")));
            }
            Ok(_) => return Err(Error::refused(format!("{name} has changed since")).reason("disk")),
            Err(error) => return Err(unreadable(name, &error)),
        }
    }
    let template = Template::of_files(&dir.join(MEMORY), &dir.join(STATE));
    let template = template.map_err(|error| unreadable("the memory of a checkpoint", &error))?;
    let worker = installed.machine.worker();
    let Description { kind, boot_id, .. } = installed.machine;
    Ok(Some(MachineCopy::installed(template, Kind { uid, ..kind }, worker, boot_id)))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::super::template::tests::kind;
    use super::*;
    use crate::core::error::ErrorCode;

    /// A description with memory of 1 MiB and a disk of 1 MiB.
    fn description() -> Vec<u8> {
        let kind = serde_json::to_value(kind()).expect("JSON");
        let (id, secret) = ("01".repeat(16), vec![7; 32]);
        let whole = serde_json::json!({
            "format": 1, "kind": kind, "worker": id, "kernel": id, "epoch": 3, "secret": secret, "boot_id": "b",
        });
        whole.to_string().into_bytes()
    }

    fn filled(sizes: [u64; 3]) -> InstallFiles {
        Box::new(move |files| {
            for (file, bytes) in files.into_iter().zip(sizes) {
                file.set_len(bytes).map_err(|error| failed(&error))?;
                (&mut &*file).write_all(b"content").map_err(|error| failed(&error))?;
            }
            Ok(())
        })
    }

    const MIB: u64 = 1 << 20;

    fn installed(dir: &Path) {
        install(dir, &description(), filled([MIB, 7, MIB])).expect("installed");
    }

    #[test]
    fn installed_machine_is_found() {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = folder.path();
        assert!(open(dir, 5).is_ok_and(|found| found.is_none()) && !is_there(dir));
        installed(dir);
        let found = open(dir, 5).expect("whole").expect("there");
        assert_eq!((found.kind().uid, found.boot_id(), found.worker().epoch.0), (5, "b", 3));
        assert_eq!(found.worker().secret, [7; 32]);
        remove(dir).expect("removed");
        let left: Vec<_> = std::fs::read_dir(dir).expect("a folder").flatten().map(|entry| entry.file_name()).collect();
        assert_eq!(left, [DISK]);
        assert!(open(dir, 5).is_ok_and(|found| found.is_none()));
    }

    #[test]
    fn begun_machine_is_lost_until_bound() {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = folder.path();
        installed(dir);
        begin(dir).expect("begun");
        assert_eq!(open(dir, 5).err().map(|error| error.code), Some(ErrorCode::Lost));
        forget_begun(dir).expect("bound");
        assert!(open(dir, 5).is_ok_and(|found| found.is_none()) && dir.join(DISK).exists());
    }

    #[test]
    fn failed_install_leaves_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = folder.path();
        let refuse: InstallFiles = Box::new(|_| Err(Error::corrupt("a piece")));
        assert!(install(dir, &description(), refuse).is_err());
        for sizes in [[MIB + 1, 7, MIB], [MIB - 1, 7, MIB], [MIB, 7, 8], [MIB, 1 << 40, MIB]] {
            assert!(install(dir, &description(), filled(sizes)).is_err(), "{sizes:?}");
        }
        assert!(install(dir, b"{}", filled([MIB, 7, MIB])).is_err());
        let other = String::from_utf8(description()).expect("text").replace("\"format\":1", "\"format\":2");
        let refused = install(dir, other.as_bytes(), filled([MIB, 7, MIB]));
        assert_eq!(refused.err().map(|error| error.reason), Some("format".into()));
        assert_eq!(std::fs::read_dir(dir).expect("a folder").count(), 0, "nothing is left");
    }

    #[test]
    fn changed_files_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let dir = folder.path();
        for name in [MEMORY, STATE, DISK] {
            installed(dir);
            let bytes = std::fs::read(dir.join(name)).expect("read");
            std::fs::remove_file(dir.join(name)).expect("removed");
            assert_eq!(open(dir, 0).err().map(|error| error.code), Some(ErrorCode::Corrupt), "{name}");
            std::fs::write(dir.join(name), bytes).expect("written");
            assert_eq!(open(dir, 0).err().map(|error| error.code), Some(ErrorCode::Refused), "{name}");
            // As the data directory is copied to another disk: other files with the same times.
            installed(dir);
            super::super::stamp::tests::copied(&dir.join(name)).expect("copied");
            assert_eq!(open(dir, 0).err().map(|error| error.code), Some(ErrorCode::Unavailable), "{name}");
        }
        std::fs::write(dir.join(DESCRIPTION), b"{").expect("written");
        assert_eq!(open(dir, 0).err().map(|error| error.code), Some(ErrorCode::Corrupt));
    }
}
