//! Starts QEMU: one process for each machine, without network, in namespaces of its own, as an unprivileged user.
//!
//! It gets every file and socket as a descriptor.

use std::fs::{File, TryLockError};
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::image::Image;
use crate::core::durability::Durability;
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::core::spec::KernelLimits;
use crate::link::connector::unix;
use crate::link::machine::{CONTROL_PORT, EVENT_PORT, LINK_PORT};
use crate::sys::process::{confine_monitor, give_descriptors};

/// The program.
const PROGRAM: &str = "qemu-system-x86_64";
/// How it is installed.
pub(super) const HINT: &str =
    "install qemu-system-x86 8 or later (on Debian 12: from bookworm-backports, with --no-install-recommends)";
/// The root file system, descriptor set 1.
const ROOT_DRIVE: &str =
    "driver=raw,node-name=d0,read-only=on,file.driver=file,file.filename=/dev/fdset/1,file.locking=off";
/// The guest kernel's command line.
const KERNEL_LINE: &str = "quiet panic=-1 random.trust_cpu=on no_timer_check mitigations=off cryptomgr.notests raid=noautodetect audit=0 selinux=0 apparmor=0 ima=off";

/// The private disk, descriptor set 2. The host's page cache outlives the machine: a flush reaches the device only
/// where a loss of power counts.
fn disk_drive(durability: Durability) -> String {
    let no_flush = match durability {
        Durability::Process => "on",
        Durability::Power => "off",
    };
    format!(
        "driver=raw,node-name=d1,discard=unmap,cache.no-flush={no_flush},file.driver=file,\
         file.filename=/dev/fdset/2,file.locking=off"
    )
}

/// The sockets of a machine's ports.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Sockets {
    pub link: PathBuf,
    pub control: PathBuf,
    pub events: PathBuf,
}

impl Sockets {
    pub(super) fn new(folder: &Path, worker: &impl std::fmt::Display) -> Sockets {
        let path = |port: &str| folder.join(format!("{worker}.{port}"));
        Sockets { link: path("link"), control: path("control"), events: path("events") }
    }

    pub(super) fn unlink(&self) {
        for path in [&self.link, &self.control, &self.events] {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Finds a program as a shell would, and where administrators' programs are.
pub(super) fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/bin", "/usr/sbin", "/sbin"].map(PathBuf::from));
    folders.map(|folder| folder.join(name)).find(|program| program.is_file())
}

/// The path of QEMU.
///
/// # Errors
/// `unsupported`.
pub(super) fn program() -> Result<PathBuf> {
    find_program(PROGRAM)
        .ok_or_else(|| Error::unsupported(format!("{PROGRAM} is not installed")).reason("qemu").hint(HINT))
}

/// A machine to start.
pub(super) struct NewMachine<'a> {
    pub image: &'a Image,
    pub disk: File,
    pub sockets: &'a Sockets,
    pub limits: &'a KernelLimits,
    pub account: Option<(u32, u32)>,
    pub durability: Durability,
    pub log: OwnedFd,
}

fn failed(what: &str) -> impl FnOnce(std::io::Error) -> Error {
    let what = what.to_owned();
    move |error| Error::unavailable(format!("a virtual machine cannot be started: {what}: {error}"))
}

/// Starts a machine.
///
/// # Errors
/// Those of opening, and of the start of the program.
pub(super) fn start(new: NewMachine<'_>) -> Result<tokio::process::Child> {
    let NewMachine { image, disk, sockets, limits, account, durability, log } = new;
    let mut fds: Vec<(OwnedFd, RawFd)> = Vec::new();
    let mut give = |fd: OwnedFd| {
        let number = 3 + fds.len() as RawFd;
        fds.push((fd, number));
        number
    };
    let open = |name: &str| File::open(image.dir.join(name)).map(OwnedFd::from).map_err(failed(name));
    let [kernel, initrd, root] = [open("vmlinux")?, open("initrd.cpio")?, open("rootfs.erofs")?].map(&mut give);
    let disk = give(disk.into());
    let listen = |path: &Path| {
        let _ = std::fs::remove_file(path);
        unix::listen(path).map(OwnedFd::from).map_err(failed("its sockets"))
    };
    let [link, control, events] =
        [listen(&sockets.link)?, listen(&sockets.control)?, listen(&sockets.events)?].map(&mut give);
    let memory = (limits.memory_bytes + limits::VM_EXTRA_MEMORY_BYTES).div_ceil(1 << 20);
    let processors = limits.cpu_milli.div_ceil(1000).max(1);
    let mut command = Command::new(program()?);
    command
        .args(["-M", "q35,sata=off,usb=off,smbus=off,vmport=off,graphics=off,hpet=off,mem-merge=off"])
        .args(["-cpu", "qemu64,+rdrand,+ssse3,+sse4.1,+sse4.2,+popcnt", "-accel", "tcg"])
        .args(["-smp", &processors.to_string(), "-m", &memory.to_string()])
        .args(["-nodefaults", "-no-user-config", "-nographic", "-no-reboot"])
        .args(["-name", &machine_name(&sockets.control)])
        .args(["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"])
        .args(["-kernel", &format!("/proc/self/fd/{kernel}"), "-initrd", &format!("/proc/self/fd/{initrd}")])
        .args(["-append", KERNEL_LINE])
        .args(["-add-fd", &format!("fd={root},set=1"), "-add-fd", &format!("fd={disk},set=2")])
        .args(["-blockdev", ROOT_DRIVE, "-blockdev", &disk_drive(durability)])
        .args(["-device", "virtio-blk-pci,drive=d0", "-device", "virtio-blk-pci,drive=d1"])
        .args(["-device", "virtio-serial-pci"]);
    for (id, fd, name) in [("c0", link, LINK_PORT), ("c1", control, CONTROL_PORT), ("c2", events, EVENT_PORT)] {
        command
            .args(["-chardev", &format!("socket,id={id},fd={fd},server=on,wait=off")])
            .args(["-device", &format!("virtserialport,chardev={id},name={name}")]);
    }
    command.env_clear().env("PATH", "/usr/bin:/bin").current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::from(log));
    if let Some((uid, gid)) = account {
        command.uid(uid).gid(gid);
    }
    give_descriptors(&mut command, fds);
    confine_monitor(&mut command);
    tokio::process::Command::from(command).spawn().map_err(failed("qemu"))
}

/// Makes an empty disk in a new sparse file.
///
/// # Errors
/// `unsupported` without `mke2fs`; its errors.
pub(super) async fn make_disk(path: &Path, workspace_bytes: u64) -> Result<()> {
    let program = find_program("mke2fs")
        .ok_or_else(|| Error::unsupported("mke2fs is not installed").reason("mke2fs").hint("install e2fsprogs"))?;
    let failed = |error: std::io::Error| Error::unavailable(format!("make {}: {error}", path.display()));
    let bytes = workspace_bytes.saturating_add(limits::VM_EXTRA_DISK_BYTES).min(limits::VM_DISK_MAX_BYTES);
    let mut options = std::fs::OpenOptions::new();
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    // A machine that lost its daemon while it started may still use the former file.
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let file = options.write(true).create_new(true).open(path).map_err(failed)?;
    file.set_len(bytes).map_err(failed)?;
    let mut command = tokio::process::Command::new(program);
    command.args(["-q", "-F", "-t", "ext4", "-m", "0", "-E"]);
    command.arg("lazy_itable_init=1,lazy_journal_init=1,nodiscard,root_owner=0:0").arg(path);
    command.env_clear().stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    let made = tokio::time::timeout(limits::VM_CALL, command.output()).await;
    match made {
        Ok(Ok(made)) if made.status.success() => Ok(()),
        Ok(Ok(made)) => {
            let why = String::from_utf8_lossy(&made.stderr[..made.stderr.len().min(500)]).trim().to_owned();
            Err(Error::unavailable(format!("mke2fs cannot make {}: {why}", path.display())))
        }
        Ok(Err(error)) => Err(failed(error)),
        Err(_) => Err(Error::deadline("mke2fs did not end in time")),
    }
}

/// Opens a disk for one machine: QEMU inherits the lock with the descriptor, and holds it until its end.
///
/// # Errors
/// `busy` while another machine has it.
pub(super) fn open_disk(path: &Path) -> Result<File> {
    let failed = |error: std::io::Error| Error::unavailable(format!("open {}: {error}", path.display()));
    let disk = File::options().read(true).write(true).open(path).map_err(failed)?;
    match disk.try_lock() {
        Ok(()) => Ok(disk),
        Err(TryLockError::WouldBlock) => Err(Error::busy("another virtual machine has the kernel's disk")
            .reason("disk")
            .hint("try again: a machine that lost its daemon while it started ends within five minutes")),
        Err(TryLockError::Error(error)) => Err(failed(error)),
    }
}

/// The machine's name for `ps`: it names the daemon's folder and the worker.
fn machine_name(control: &Path) -> String {
    format!("ryokan {}", control.display()).replace(',', ",,")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::error::ErrorCode;

    #[test]
    fn disk_has_one_machine() -> std::io::Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("disk");
        std::fs::write(&path, b"")?;
        let disk = open_disk(&path).map_err(std::io::Error::other)?;
        let busy = open_disk(&path).err();
        assert!(busy.is_some_and(|error| error.code == ErrorCode::Busy && !error.hint.is_empty()));
        // As QEMU inherits it, the daemon's own descriptor being closed.
        let mut child = Command::new("sleep").arg("60").stdin(Stdio::from(disk)).spawn()?;
        let held = open_disk(&path).is_err();
        child.kill()?;
        child.wait()?;
        assert!(held, "the child holds the lock");
        assert!(open_disk(&path).is_ok());
        Ok(())
    }

    #[test]
    fn flushes_follow_durability() {
        assert!(disk_drive(Durability::Power).contains(",cache.no-flush=off,"));
        assert!(disk_drive(Durability::Process).contains(",cache.no-flush=on,"));
    }

    #[tokio::test]
    async fn new_disk_is_a_new_file() -> Result<()> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("disk.new");
        make_disk(&path, 1 << 20).await?;
        let held = open_disk(&path)?;
        make_disk(&path, 1 << 20).await?;
        drop((open_disk(&path)?, held));
        Ok(())
    }
}
