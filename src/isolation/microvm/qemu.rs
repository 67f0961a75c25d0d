//! Starts QEMU: one process for each machine, without network, in namespaces of its own, as an unprivileged user.
//!
//! It gets every file and socket as a descriptor, opens nothing else but the system's libraries, and is as untrusted as
//! its guest (`sandbox::monitor`).

use std::fs::{File, TryLockError};
use std::os::fd::{AsFd as _, OwnedFd, RawFd};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::accelerator::Chosen;
use super::image::Image;
use super::template::{Kind, Template};
use crate::core::durability::Durability;
use crate::core::error::{Error, Result};
use crate::core::ids::WorkerId;
use crate::core::limits;
use crate::isolation::process::launch::WorkerProcess;
use crate::link::connector::unix;
use crate::link::machine::{CONTROL_PORT, EVENT_PORT, LINK_PORT};
use crate::sandbox::{MonitorBounds, MonitorGroup, monitor_layers};
use crate::sys::monitor::confine_monitor;
use crate::sys::process::give_descriptors;

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

/// The board, which a template and what is restored from it have in common.
const BOARD: &str = "q35,sata=off,usb=off,smbus=off,vmport=off,graphics=off,hpet=off,mem-merge=off,suppress-vmdesc=on,memory-backend=ram";
/// The processor of software emulation: what it emulates well.
const TCG_PROCESSOR: &str = "qemu64,+rdrand,+ssse3,+sse4.1,+sse4.2,+popcnt";
/// The processor with KVM: the host's, without what cannot be saved.
const KVM_PROCESSOR: &str = "host,migratable=on";
/// KVM itself, descriptor set 4: QEMU's user need not be able to open it.
const KVM: &str = "kvm,device=/dev/fdset/4";

/// The machine itself, which a template and what is restored from it have in common.
pub(super) fn machine(chosen: Chosen) -> Vec<String> {
    let (processor, accelerator) = match chosen {
        Chosen::Kvm => (KVM_PROCESSOR, KVM),
        Chosen::Tcg => (TCG_PROCESSOR, "tcg"),
    };
    ["-M", BOARD, "-cpu", processor, "-accel", accelerator].map(str::to_owned).to_vec()
}

/// The state of a machine without its memory, descriptor set 3.
pub(super) const STATE_URI: &str = "file:/dev/fdset/3";

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
    /// Of QEMU's monitor; absent in records of earlier daemons.
    #[serde(default)]
    pub monitor: PathBuf,
}

impl Sockets {
    pub(super) fn new(folder: &Path, worker: &impl std::fmt::Display) -> Sockets {
        let path = |port: &str| folder.join(format!("{worker}.{port}"));
        Sockets { link: path("link"), control: path("control"), events: path("events"), monitor: path("monitor") }
    }

    pub(super) fn unlink(&self) {
        for path in [&self.link, &self.control, &self.events, &self.monitor] {
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

/// How a machine begins.
pub(super) enum Begin<'a> {
    /// It boots the image.
    Boot(&'a Image),
    /// It boots the image with its memory in a file, and is saved.
    Record { image: &'a Image, memory: &'a File, state: &'a File },
    /// It goes on from a template, once that is loaded.
    Restore { image: &'a Image, template: &'a Template },
    /// As a template, from the copy of a running machine.
    Copy { image: &'a Image, template: &'a Template },
    /// It goes on from a suspended machine, once that is loaded.
    Continue { image: &'a Image, state: &'a File },
}

impl Begin<'_> {
    /// Whether it waits for a state.
    pub(super) fn is_loaded(&self) -> bool {
        matches!(self, Begin::Restore { .. } | Begin::Copy { .. } | Begin::Continue { .. })
    }

    /// Whether its guest had a daemon before, whose connections it has still to see end.
    pub(super) fn had_daemon(&self) -> bool {
        matches!(self, Begin::Copy { .. } | Begin::Continue { .. })
    }
}

/// A machine to start.
pub(super) struct NewMachine<'a> {
    pub begin: Begin<'a>,
    pub kind: &'a Kind,
    pub disk: File,
    pub sockets: &'a Sockets,
    pub account: Option<(u32, u32)>,
    /// The place of its cgroup, where one is delegated.
    pub cgroup: Option<&'a Path>,
    pub durability: Durability,
    /// Whether it ends when its process is dropped; else it outlives the daemon.
    pub is_temporary: bool,
    pub log: OwnedFd,
}

fn failed(what: &str) -> impl FnOnce(std::io::Error) -> Error {
    let what = what.to_owned();
    move |error| Error::unavailable(format!("a virtual machine cannot be started: {what}: {error}"))
}

/// The descriptors of a machine: their numbers in QEMU, and those that it opens by name.
#[derive(Default)]
struct Descriptors {
    all: Vec<(OwnedFd, RawFd)>,
    readable: Vec<RawFd>,
    writable: Vec<RawFd>,
}

impl Descriptors {
    fn give(&mut self, fd: impl Into<OwnedFd>) -> RawFd {
        let number = 3 + self.all.len() as RawFd;
        self.all.push((fd.into(), number));
        number
    }

    /// The path of a file that QEMU opens itself.
    fn path(&mut self, file: File, is_written: bool) -> String {
        let number = self.give(file);
        let list = if is_written { &mut self.writable } else { &mut self.readable };
        list.push(number);
        format!("/proc/self/fd/{number}")
    }

    fn of(&self, numbers: &[RawFd]) -> Vec<std::os::fd::BorrowedFd<'_>> {
        let named = self.all.iter().filter(|(_, number)| numbers.contains(number));
        named.map(|(fd, _)| fd.as_fd()).collect()
    }
}

/// Starts a machine. One that is restored waits for its state.
///
/// # Errors
/// Those of opening, and of the start of the program.
pub(super) fn start(new: NewMachine<'_>) -> Result<tokio::process::Child> {
    let NewMachine { begin, kind, disk, sockets, account, cgroup, durability, is_temporary, log } = new;
    let mut fds = Descriptors::default();
    let mut command = Command::new(program()?);
    command.args(&kind.machine);
    let image = begin_with(&mut command, &mut fds, begin, kind)?;
    let root = fds.give(image.open("rootfs.erofs").map_err(failed("rootfs.erofs"))?);
    let bounds = MonitorBounds {
        memory_bytes: kind.memory_bytes() + limits::VM_MONITOR_MEMORY_BYTES,
        file_bytes: kind.memory_bytes().max(kind.disk_bytes),
    };
    let disk = fds.give(disk);
    if kind.uses_kvm() {
        let kvm = File::options().read(true).write(true).open("/dev/kvm").map_err(failed("/dev/kvm"))?;
        command.args(["-add-fd", &format!("fd={},set=4", fds.give(kvm))]);
    }
    command
        .args(["-smp", &kind.processors.to_string(), "-m", &kind.memory_mib.to_string()])
        .args(["-nodefaults", "-no-user-config", "-nographic", "-no-reboot"])
        .args(["-name", &machine_name(&sockets.control)])
        .args(["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"])
        .args(["-add-fd", &format!("fd={root},set=1"), "-add-fd", &format!("fd={disk},set=2")])
        .args(["-blockdev", ROOT_DRIVE, "-blockdev", &disk_drive(durability)])
        .args(["-device", "virtio-blk-pci,drive=d0", "-device", "virtio-blk-pci,drive=d1"])
        .args(["-device", "virtio-serial-pci"]);
    let mut listen = |path: &Path| {
        let _ = std::fs::remove_file(path);
        Ok::<_, Error>(fds.give(unix::listen(path).map_err(failed("its sockets"))?))
    };
    let ports =
        [("c0", &sockets.link, LINK_PORT), ("c1", &sockets.control, CONTROL_PORT), ("c2", &sockets.events, EVENT_PORT)];
    for (id, path, name) in ports {
        command
            .args(["-chardev", &format!("socket,id={id},fd={},server=on,wait=off", listen(path)?)])
            .args(["-device", &format!("virtserialport,chardev={id},name={name}")]);
    }
    let monitor = listen(&sockets.monitor)?;
    command
        .args(["-chardev", &format!("socket,id=monitor,fd={monitor},server=on,wait=off")])
        .args(["-mon", "chardev=monitor,mode=control"]);
    command.env_clear().env("PATH", "/usr/bin:/bin").current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::from(log));
    if let Some((uid, gid)) = account {
        command.uid(uid).gid(gid);
    }
    let (memory_bytes, processors) = (bounds.memory_bytes, kind.processors);
    let group = cgroup.map(|path| MonitorGroup { path, memory_bytes, processors });
    let layers = monitor_layers(&fds.of(&fds.readable), &fds.of(&fds.writable), bounds, group)?;
    give_descriptors(&mut command, fds.all);
    confine_monitor(&mut command, layers).map_err(failed("its layers"))?;
    tokio::process::Command::from(command).kill_on_drop(is_temporary).spawn().map_err(failed("qemu"))
}

/// Adds what the machine boots or goes on from. Returns its image.
fn begin_with<'a>(command: &mut Command, fds: &mut Descriptors, begin: Begin<'a>, kind: &Kind) -> Result<&'a Image> {
    let size = format!("size={}M", kind.memory_mib);
    let file = |path: &str, how: &str| format!("memory-backend-file,id=ram,{size},mem-path={path},{how}");
    let is_loaded = begin.is_loaded();
    let (image, memory) = match begin {
        Begin::Boot(image) => (image, format!("memory-backend-ram,id=ram,{size}")),
        Begin::Record { image, memory, state } => {
            let copy = |file: &File| file.try_clone().map_err(failed("its template"));
            let state = fds.give(copy(state)?);
            command.args(["-add-fd", &format!("fd={state},set=3")]);
            (image, file(&fds.path(copy(memory)?, true), "share=on"))
        }
        Begin::Restore { image, template } | Begin::Copy { image, template } => {
            let state = fds.give(template.state().map_err(failed("its template"))?);
            command.args(["-add-fd", &format!("fd={state},set=3"), "-S", "-incoming", "defer"]);
            let memory = template.memory().map_err(failed("its template"))?;
            (image, file(&fds.path(memory, false), "share=off,readonly=on,rom=off"))
        }
        Begin::Continue { image, state } => {
            let state = fds.give(state.try_clone().map_err(failed("its state"))?);
            command.args(["-add-fd", &format!("fd={state},set=3"), "-S", "-incoming", "defer"]);
            (image, format!("memory-backend-ram,id=ram,{size}"))
        }
    };
    command.args(["-object", &memory]);
    if !is_loaded {
        let mut path = |name: &str| Ok::<_, Error>(fds.path(image.open(name).map_err(failed(name))?, false));
        command.args(["-kernel", &path("vmlinux")?, "-initrd", &path("initrd.cpio")?, "-append", KERNEL_LINE]);
    }
    Ok(image)
}

/// The size of a kernel's new disk.
pub(super) fn disk_bytes(workspace_bytes: u64) -> u64 {
    workspace_bytes.saturating_add(limits::VM_EXTRA_DISK_BYTES).min(limits::VM_DISK_MAX_BYTES)
}

/// Makes an empty disk of that size in a new sparse file.
///
/// # Errors
/// `unsupported` without `mke2fs`; its errors.
pub(super) async fn make_disk(path: &Path, bytes: u64) -> Result<()> {
    let program = find_program("mke2fs")
        .ok_or_else(|| Error::unsupported("mke2fs is not installed").reason("mke2fs").hint("install e2fsprogs"))?;
    let failed = |error: std::io::Error| Error::unavailable(format!("make {}: {error}", path.display()));
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

/// The machine's name for `ps` and for a later daemon: it names the daemon's folder and the worker.
fn machine_name(control: &Path) -> String {
    format!("ryokan {}", control.display()).replace(',', ",,")
}

/// The worker of a machine of a daemon with that folder of sockets, by QEMU's command line.
fn worker_of(line: &[u8], sockets: &Path) -> Option<WorkerId> {
    let mut words = line.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    words.find(|word| word == "-name")?;
    let ours = machine_name(&sockets.join(""));
    words.next()?.strip_prefix(&ours)?.strip_suffix(".control")?.parse().ok()
}

/// Kills the machines of former daemons with that folder of sockets whose worker is not known: a stopped one does not
/// notice its daemon's end.
pub(super) fn kill_unknown(sockets: &Path, known: &[WorkerId]) {
    let unknown = |pid: u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        worker_of(&line, sockets).filter(|worker| !known.contains(worker))
    };
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        if unknown(pid).is_none() {
            continue;
        }
        // Looked at again once the descriptor names the process: its number may have been reused.
        if let Ok(process) = WorkerProcess::find(pid)
            && let Some(worker) = unknown(pid)
        {
            tracing::info!(%worker, pid, "ending a virtual machine of a former daemon that no kernel has");
            process.kill();
            Sockets::new(sockets, &worker).unlink();
        }
    }
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
    fn only_own_machines_are_found() {
        let worker = WorkerId::from_bytes([7; 16]);
        let line = |folder: &str| {
            let name = machine_name(&Sockets::new(Path::new(folder), &worker).control);
            ["qemu", "-name", &name, "-S"].join("\0").into_bytes()
        };
        assert_eq!(worker_of(&line("/run/a,b"), Path::new("/run/a,b")), Some(worker));
        assert_eq!(worker_of(&line("/run/a/b"), Path::new("/run/a")), None);
        assert_eq!(worker_of(b"vi\0-name\0ryokan /run/a/x.control", Path::new("/run/a")), None);
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
        make_disk(&path, 8 << 20).await?;
        let held = open_disk(&path)?;
        make_disk(&path, 8 << 20).await?;
        drop((open_disk(&path)?, held));
        Ok(())
    }
}
