//! Starts Firecracker: one process for each machine, confined as QEMU is (`sandbox::monitor`).
//!
//! It opens its files by name: as `/proc/self/fd/NUMBER`, with the same numbers in every process. So a template's drives
//! are those of the process that loads it, and no path of this host is in a snapshot. Its sockets are in the machine's
//! own folder, the only place where it makes any; it is in that folder, so their names are short and relative.

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::isolation::microvm::monitor::{Begin, NewMachine, machine_name};
use crate::isolation::microvm::saved::{self, SavedMemory};
use crate::isolation::microvm::sockets::API;
use crate::sandbox::{MonitorBounds, MonitorFiles, MonitorGroup, monitor_layers};
use crate::sys::monitor::confine_monitor;
use crate::sys::process::give_descriptors;

/// The root file system.
pub(super) const ROOT: RawFd = 3;
/// The private disk.
pub(super) const DISK: RawFd = 4;
/// Where the machine is saved.
pub(super) const SAVED_STATE: RawFd = 5;
pub(super) const SAVED_MEMORY: RawFd = 6;
/// What a new machine boots.
pub(super) const KERNEL: RawFd = 7;
pub(super) const INITRD: RawFd = 8;
/// What a machine goes on from.
pub(super) const LOADED_STATE: RawFd = 9;
pub(super) const LOADED_MEMORY: RawFd = 10;

const KVM: &str = "/dev/kvm";

/// The name by which Firecracker opens a descriptor.
pub(super) fn file(number: RawFd) -> String {
    format!("/proc/self/fd/{number}")
}

fn failed(what: &str) -> impl FnOnce(std::io::Error) -> Error {
    let what = what.to_owned();
    move |error| Error::unavailable(format!("a virtual machine cannot be started: {what}: {error}"))
}

/// The group with which an account can open `/dev/kvm`; `None` in a daemon that is no root.
///
/// # Errors
/// `unsupported` if the account cannot open it.
pub(in crate::isolation::microvm) fn group(account: Option<(u32, u32)>) -> Result<Option<u32>> {
    let Some((uid, gid)) = account else { return Ok(None) };
    let unsupported = |why: String| Error::unsupported(why).reason("kvm");
    let found = std::fs::metadata(KVM).map_err(|error| unsupported(format!("{KVM}: {error}")))?;
    opening_group((uid, gid), (found.uid(), found.gid(), found.mode())).map(Some).ok_or_else(|| {
        unsupported(format!("only the owner of {KVM} can open it, and Firecracker runs as another user"))
            .hint(format!("give {KVM} a group that may read and write it"))
    })
}

fn opening_group((uid, gid): (u32, u32), (owner, group, mode): (u32, u32, u32)) -> Option<u32> {
    let may = |shift: u32| mode >> shift & 0o6 == 0o6;
    if uid == owner {
        return may(6).then_some(gid);
    }
    if may(3) {
        return Some(group);
    }
    // As a member of its group it is bound by the group's rights.
    (may(0) && gid != group).then_some(gid)
}

/// The descriptors of a machine, and what Firecracker may open by name.
#[derive(Default)]
struct Files {
    all: Vec<(OwnedFd, RawFd)>,
    writable: Vec<RawFd>,
}

impl Files {
    fn read(&mut self, number: RawFd, file: impl Into<OwnedFd>) {
        self.all.push((file.into(), number));
    }

    /// Files that are written belong to the user that opens them.
    fn write(&mut self, number: RawFd, file: File, account: Option<(u32, u32)>) -> Result<()> {
        if let Some((uid, gid)) = account {
            std::os::unix::fs::fchown(&file, Some(uid), Some(gid)).map_err(failed("its files"))?;
        }
        self.writable.push(number);
        self.all.push((file.into(), number));
        Ok(())
    }

    fn of(&self, are_writable: bool) -> Vec<BorrowedFd<'_>> {
        let found = self.all.iter().filter(|(_, number)| self.writable.contains(number) == are_writable);
        found.map(|(fd, _)| fd.as_fd()).collect()
    }
}

/// Starts a process for a machine. It waits for the requests that configure or load the machine.
///
/// # Errors
/// Those of opening, and of the start of the program.
pub(in crate::isolation::microvm) fn command(new: NewMachine<'_>) -> Result<Command> {
    let NewMachine { program, begin, kind, disk, sockets, account, cgroup, saved_in, .. } = new;
    let mut files = Files::default();
    files.read(ROOT, begin.image().open("rootfs.erofs").map_err(failed("rootfs.erofs"))?);
    files.write(DISK, disk, account)?;
    begin_with(&mut files, begin, account)?;
    if let Some(dir) = saved_in {
        let prepared = saved::prepare(&dir)?;
        files.write(SAVED_STATE, prepared.devices, account)?;
        if let SavedMemory::Whole(memory) = prepared.memory {
            files.write(SAVED_MEMORY, memory, account)?;
        }
    }
    let folder = make_folder(sockets.folder(), account).map_err(failed("its sockets' folder"))?;
    let program = &program.canonicalize().map_err(failed(&program.display().to_string()))?;
    let executable = File::open(program).map_err(failed(&program.display().to_string()))?;
    let kvm = File::options().read(true).write(true).open(KVM).map_err(failed(KVM))?;
    let bounds = MonitorBounds {
        memory_bytes: kind.memory_bytes() + limits::VM_MONITOR_MEMORY_BYTES,
        file_bytes: kind.memory_bytes().max(kind.disk_bytes),
    };
    let worker = sockets.folder().file_stem().unwrap_or_default();
    let mut command = Command::new(program);
    command.arg0(machine_name(sockets.name())).args(["--api-sock", API, "--enable-pci", "--id"]).arg(worker);
    command.env_clear().current_dir("/");
    // A guest writes to the serial port what it likes.
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    if let Some((uid, gid)) = account {
        command.uid(uid).gid(group(account)?.unwrap_or(gid));
    }
    let opened = MonitorFiles {
        readable: files.of(false),
        writable: files.of(true),
        program: Some((program, executable.as_fd())),
        device: Some((Path::new(KVM), kvm.as_fd())),
        sockets: Some(folder.as_fd()),
    };
    let (memory_bytes, processors) = (bounds.memory_bytes, kind.processors);
    let group = cgroup.map(|path| MonitorGroup { path, memory_bytes, processors });
    let layers = monitor_layers(&opened, bounds, group)?;
    drop(opened);
    give_descriptors(&mut command, files.all);
    confine_monitor(&mut command, layers).map_err(failed("its layers"))?;
    Ok(command)
}

/// Adds what the machine boots or goes on from.
fn begin_with(files: &mut Files, begin: Begin<'_>, account: Option<(u32, u32)>) -> Result<()> {
    let copy = |file: &File| file.try_clone().map_err(failed("its state"));
    match begin {
        Begin::Boot(image) | Begin::Record { image, .. } => {
            files.read(KERNEL, image.open("vmlinux").map_err(failed("vmlinux"))?);
            files.read(INITRD, image.open("initrd.cpio").map_err(failed("initrd.cpio"))?);
            if let Begin::Record { memory, state, .. } = begin {
                files.write(SAVED_STATE, copy(state)?, account)?;
                files.write(SAVED_MEMORY, copy(memory)?, account)?;
            }
        }
        Begin::Restore { template, .. } | Begin::Copy { template, .. } => {
            files.read(LOADED_STATE, template.state().map_err(failed("its template"))?);
            files.read(LOADED_MEMORY, template.memory().map_err(failed("its template"))?);
        }
        Begin::Continue { state, .. } => {
            let memory = state.whole_memory().ok_or_else(|| Error::corrupt("a suspended machine has no memory"))?;
            files.read(LOADED_STATE, copy(&state.devices)?);
            files.read(LOADED_MEMORY, copy(memory)?);
        }
    }
    Ok(())
}

/// Makes the folder of a machine's sockets, empty.
fn make_folder(path: &Path, account: Option<(u32, u32)>) -> std::io::Result<File> {
    match crate::sys::fs::remove_tree(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    std::fs::DirBuilder::new().mode(0o700).create(path)?;
    let folder = File::open(path)?;
    if let Some((uid, gid)) = account {
        std::os::unix::fs::fchown(&folder, Some(uid), Some(gid))?;
    }
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kvm_is_opened_by_group() {
        let (account, root) = ((5, 6), 0);
        let cases = [
            ((root, 7, 0o660), Some(7)),
            ((root, 7, 0o666), Some(7)),
            ((root, 7, 0o606), Some(6)),
            ((root, 6, 0o606), None),
            ((root, 7, 0o600), None),
            ((5, 7, 0o600), Some(6)),
            ((5, 7, 0o066), None),
        ];
        for (device, expected) in cases {
            assert_eq!(opening_group(account, device), expected, "{device:?}");
        }
    }
}
