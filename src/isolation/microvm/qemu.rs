//! Starts QEMU: one process for each machine, without network, in namespaces of its own, as an unprivileged user.
//!
//! It gets every file and socket as a descriptor, opens nothing else but the system's libraries, and is as untrusted as
//! its guest (`sandbox::monitor`).

use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd, RawFd};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::accelerator::Chosen;
use super::image::Image;
use super::monitor::{Begin, NewMachine, machine_name};
use super::saved::SavedMemory;
use super::template::Kind;
use crate::core::durability::Durability;
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::link::connector::unix;
use crate::link::machine::{CONTROL_PORT, EVENT_PORT, LINK_PORT};
use crate::sandbox::{MonitorBounds, MonitorFiles, MonitorGroup, monitor_layers};
use crate::sys::monitor::confine_monitor;
use crate::sys::process::give_descriptors;

/// The program.
const PROGRAM: &str = "qemu-system-x86_64";
/// How it is installed.
pub(super) const HINT: &str =
    "install qemu-system-x86 8.2 or later (on Debian 12: from bookworm-backports, with --no-install-recommends)";
/// The first version that has `rom=off` of files beneath memory ([`COPY_ON_WRITE`]) and states in files ([`STATE_URI`]).
const MINIMUM: (u32, u32) = (8, 2);
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

/// Software emulation. The buffer of translated code, MiB, is most of an idle machine's own memory, but with 32 MiB code
/// was translated again and again: work in the guest took two to nine times as long (docs/benchmarks.md).
const TCG: &str = "tcg,tb-size=128";

/// The machine itself, which a template and what is restored from it have in common.
pub(super) fn machine(chosen: Chosen) -> Vec<String> {
    let (processor, accelerator) = match chosen {
        Chosen::Kvm => (KVM_PROCESSOR, KVM),
        Chosen::Tcg => (TCG_PROCESSOR, TCG),
    };
    ["-M", BOARD, "-cpu", processor, "-accel", accelerator].map(str::to_owned).to_vec()
}

/// Memory that is a file's, except for the pages that the machine writes.
const COPY_ON_WRITE: &str = "share=off,readonly=on,rom=off";

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

/// The private disk's device. A write for which the host has no room stops the machine, and is repeated when it continues
/// (`halt.rs`); other errors are the guest's.
const DISK_DEVICE: &str = "virtio-blk-pci,drive=d1,werror=enospc,rerror=report";

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

/// Name and version in what the program prints, if this version can be used.
///
/// # Errors
/// `unsupported` with the reason `qemu`.
pub(super) fn printed(text: &str) -> Result<String> {
    let line: String = text.lines().next().unwrap_or_default().chars().take(200).collect();
    let unusable = |why: String| Error::unsupported(why).reason("qemu").hint(HINT);
    let number = line.strip_prefix("QEMU emulator version ").and_then(|rest| {
        let mut numbers = rest.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    });
    match number {
        Some(number) if number >= MINIMUM => Ok(line),
        Some((major, minor)) => {
            Err(unusable(format!("QEMU {major}.{minor} is older than {}.{}", MINIMUM.0, MINIMUM.1)))
        }
        None => Err(unusable(format!("{PROGRAM} does not say QEMU's version: {line:?}"))),
    }
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
pub(super) fn command(new: NewMachine<'_>) -> Result<Command> {
    let NewMachine { program, begin, kind, disk, sockets, account, cgroup, durability, .. } = new;
    let mut fds = Descriptors::default();
    // Through no link: its tree has few of the host's folders.
    let program = program.canonicalize().map_err(failed("qemu"))?;
    let mut command = Command::new(program);
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
        .args(["-name", &machine_name(sockets.name())])
        .args(["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"])
        .args(["-add-fd", &format!("fd={root},set=1"), "-add-fd", &format!("fd={disk},set=2")])
        .args(["-blockdev", ROOT_DRIVE, "-blockdev", &disk_drive(durability)])
        .args(["-device", "virtio-blk-pci,drive=d0", "-device", DISK_DEVICE])
        .args(["-device", "virtio-serial-pci"]);
    let mut listen = |path: &Path| {
        let _ = std::fs::remove_file(path);
        Ok::<_, Error>(fds.give(unix::listen(path).map_err(failed("its sockets"))?))
    };
    let ports = [("c0", LINK_PORT), ("c1", CONTROL_PORT), ("c2", EVENT_PORT)];
    for ((id, name), path) in ports.into_iter().zip(sockets.ports()) {
        command
            .args(["-chardev", &format!("socket,id={id},fd={},server=on,wait=off", listen(path)?)])
            .args(["-device", &format!("virtserialport,chardev={id},name={name}")]);
    }
    let monitor = listen(&sockets.monitor)?;
    command
        .args(["-chardev", &format!("socket,id=monitor,fd={monitor},server=on,wait=off")])
        .args(["-mon", "chardev=monitor,mode=control"]);
    command.env_clear().env("PATH", "/usr/bin:/bin").current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    if let Some((uid, gid)) = account {
        command.uid(uid).gid(gid);
    }
    let files =
        MonitorFiles { readable: fds.of(&fds.readable), writable: fds.of(&fds.writable), ..MonitorFiles::default() };
    let (memory_bytes, processors) = (bounds.memory_bytes, kind.processors);
    let group = cgroup.map(|path| MonitorGroup { path, memory_bytes, processors });
    let layers = monitor_layers(&files, bounds, group)?;
    give_descriptors(&mut command, fds.all);
    confine_monitor(&mut command, layers).map_err(failed("its layers"))?;
    Ok(command)
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
            (image, file(&fds.path(memory, false), COPY_ON_WRITE))
        }
        Begin::Continue { image, state: saved } => {
            let state = fds.give(saved.devices.try_clone().map_err(failed("its state"))?);
            command.args(["-add-fd", &format!("fd={state},set=3"), "-S", "-incoming", "defer"]);
            let memory = match &saved.memory {
                SavedMemory::Pages(pages) => {
                    let base = pages.base.try_clone().map_err(failed("the base of its memory"))?;
                    file(&fds.path(base, false), COPY_ON_WRITE)
                }
                SavedMemory::InState | SavedMemory::Whole(_) => format!("memory-backend-ram,id=ram,{size}"),
            };
            (image, memory)
        }
    };
    command.args(["-object", &memory]);
    if !is_loaded {
        let mut path = |name: &str| Ok::<_, Error>(fds.path(image.open(name).map_err(failed(name))?, false));
        command.args(["-kernel", &path("vmlinux")?, "-initrd", &path("initrd.cpio")?, "-append", KERNEL_LINE]);
    }
    Ok(image)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_versions_are_refused() {
        let version = |number: &str| format!("QEMU emulator version {number}\nCopyright (c) Fabrice Bellard\n");
        for number in ["8.2.0", "8.2.2 (Debian 1:8.2.2+ds-0ubuntu1.4)", "9.0.50", "10.0.2 (Debian 1:10.0.2+ds)", "11.1"]
        {
            assert_eq!(printed(&version(number)), Ok(format!("QEMU emulator version {number}")));
        }
        let refused = [
            (version("7.2.15 (Debian 1:7.2+dfsg-7+deb12u12)"), "QEMU 7.2 is older than 8.2"),
            (version("8.1.5"), "QEMU 8.1 is older than 8.2"),
            (version("8"), "does not say"),
            (String::from("bash 5.2"), "does not say"),
            (String::new(), "does not say"),
        ];
        for (text, why) in refused {
            let error = printed(&text).expect_err(&text);
            assert!(error.message.contains(why), "{text:?}: {error}");
            assert_eq!((error.code.name(), error.reason.as_str()), ("unsupported", "qemu"));
            assert!(error.hint.contains("8.2 or later"), "{error:?}");
        }
    }

    #[test]
    fn flushes_follow_durability() {
        assert!(disk_drive(Durability::Power).contains(",cache.no-flush=off,"));
        assert!(disk_drive(Durability::Process).contains(",cache.no-flush=on,"));
    }
}
