//! The first process of a virtual machine: mounts, reaps, and serves the daemon's ports. Runs as root in the guest.
//!
//! ```text
//!  daemon ── ryokan.control ──▶ control ─ exec ─▶ the worker: init, engine (as in process isolation)
//!         ── ryokan.link ─────▶ relay ──────────▶ its private socket
//!         ◀─ ryokan.events ──── events ◀──────── its end, seen by the loop that reaps
//! ```
//!
//! The worker builds the same sandbox as on a host: the engine is unprivileged in the guest, too. The machine's disk
//! holds the kernel's folder. No secret is passed here but the worker's, which it passes on.

mod control;
mod events;
mod files;
mod identity;
mod port;
mod relay;
mod start;
mod watches;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sys::reboot::{RebootMode, reboot};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};

use self::port::Channel;
use crate::link::machine;
use crate::sys::process::exit_now;

/// The argument of the worker inside.
pub(super) const WORKER_COMMAND: &str = "guest-worker";
/// Where the machine's disk is mounted.
const DATA: &str = "/data";
/// The kernel's folder.
const KERNEL: &str = "/data/kernel";
/// The worker's private socket.
const SOCKET: &str = "/run/ryokan/worker.sock";
/// How long the machine waits for a daemon after its worker has ended.
const LINGER: Duration = Duration::from_secs(60);
/// How long it waits for its first worker.
const FIRST_START: Duration = Duration::from_secs(300);
/// Time between two looks for ended processes while there is no worker.
const PAUSE: Duration = Duration::from_millis(50);

/// State of the machine, shared by its threads.
#[derive(Default)]
struct Machine {
    /// Init's process id; 0: not started, or prepared only.
    init: AtomicI32,
    has_ended: AtomicBool,
    /// Whether the daemon is using the control port.
    is_used: AtomicBool,
}

/// The command's entry point.
pub(super) fn main() -> ! {
    if std::process::id() != 1 {
        eprintln!("ryokan-worker guest: runs as the first process of a virtual machine only");
        exit_now(2);
    }
    let end = run().unwrap_or_else(|error| {
        eprintln!("ryokan-worker: the machine ends: {error}");
        RebootMode::RB_AUTOBOOT
    });
    nix::unistd::sync();
    let _ = reboot(end);
    exit_now(1)
}

/// Serves until the machine is not needed any more. Returns how it ends.
fn run() -> std::io::Result<RebootMode> {
    prepare()?;
    let machine = Arc::new(Machine::default());
    let link = Channel::open(machine::LINK_PORT, machine::LINK_VSOCK)?;
    let requests = Channel::open(machine::CONTROL_PORT, machine::CONTROL_VSOCK)?;
    let states = Channel::open(machine::EVENT_PORT, machine::EVENT_VSOCK)?;
    // Firecracker's machines cannot be switched off: their restart ends them.
    let end = if link.is_vsock() { RebootMode::RB_AUTOBOOT } else { RebootMode::RB_POWER_OFF };
    let (mut control, shared) = (control::Control::new(Arc::clone(&machine)), Arc::clone(&machine));
    std::thread::spawn(move || link.serve(relay::run));
    std::thread::spawn(move || requests.serve(|port| control.run(port)));
    std::thread::spawn(move || states.serve(|port| events::run(port, &shared)));
    reap(&machine);
    Ok(end)
}

/// Reaps every process; returns when the machine is not needed any more.
fn reap(machine: &Machine) {
    let mut idle_since = Instant::now();
    loop {
        let init = machine.init.load(Ordering::Acquire);
        // A prepared worker never ends by itself, and nothing may come for it.
        let flags = (init == 0).then_some(WaitPidFlag::WNOHANG);
        match waitpid(None, flags) {
            Ok(WaitStatus::StillAlive) => std::thread::sleep(PAUSE),
            Ok(WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, ..)) => {
                // The worker's outer process ends by itself; init's end is the worker's.
                let init = machine.init.load(Ordering::Acquire);
                if init == pid.as_raw() {
                    machine.has_ended.store(true, Ordering::Release);
                }
            }
            Err(Errno::ECHILD) => {
                // Its id may have been reported after its end.
                if init != 0 {
                    machine.has_ended.store(true, Ordering::Release);
                }
                std::thread::sleep(PAUSE);
            }
            Ok(_) | Err(_) => {}
        }
        let most = if machine.has_ended.load(Ordering::Acquire) { LINGER } else { FIRST_START };
        if machine.is_used.swap(false, Ordering::AcqRel) || (init != 0 && !machine.has_ended.load(Ordering::Acquire)) {
            idle_since = Instant::now();
        }
        if idle_since.elapsed() > most {
            return;
        }
    }
}

fn prepare() -> std::io::Result<()> {
    let mounts = [
        ("proc", "/proc", "proc", MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC, None),
        ("sysfs", "/sys", "sysfs", MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC, None),
        ("tmpfs", "/run", "tmpfs", MsFlags::MS_NOSUID | MsFlags::MS_NODEV, Some("mode=0755,size=16m")),
        ("tmpfs", "/tmp", "tmpfs", MsFlags::MS_NOSUID | MsFlags::MS_NODEV, Some("mode=1777,size=16m")),
    ];
    for (source, at, kind, flags, options) in mounts {
        mount_at(source, at, kind, flags, options)?;
    }
    // What is written goes to the disk soon: an execution's end waits for it.
    for (setting, value) in [("vm/dirty_bytes", "33554432"), ("vm/dirty_background_bytes", "4194304")] {
        std::fs::write(Path::new("/proc/sys").join(setting), value)?;
    }
    nix::unistd::sethostname("kernel")?;
    make_folders(&["/run/ryokan"])
}

/// Mounts the machine's disk: not at the guest's start, since machines with disks of their own share a template.
fn mount_disk() -> std::io::Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOATIME;
    mount_at("/dev/vdb", DATA, "ext4", flags, Some("errors=remount-ro"))?;
    make_folders(&[KERNEL, "/data/kernel/workspace"])
}

fn mount_at(source: &str, at: &str, kind: &str, flags: MsFlags, options: Option<&str>) -> std::io::Result<()> {
    mount(Some(source), at, Some(kind), flags, options)
        .map_err(|error| std::io::Error::other(format!("mount {source} at {at}: {error}")))
}

fn make_folders(folders: &[&str]) -> std::io::Result<()> {
    for folder in folders {
        match std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700).create(folder) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(error),
            Ok(()) | Err(_) => {}
        }
    }
    Ok(())
}
