//! Resource limits by cgroup v2, where a cgroup is delegated to the daemon.
//!
//! ```text
//!  <base>/<name>/          made by the outer process, removed by the daemon
//!     └ engine/            everything untrusted: memory, processes, processors; killed as one
//! ```
//!
//! Files are opened before the outer process changes its user: later writes through them need no
//! rights.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use nix::unistd::Pid;

use crate::core::limits;
use crate::core::spec::KernelLimits;

/// Period of the processor limit, microseconds.
const CPU_PERIOD_US: u64 = 100_000;

/// A kernel's cgroup, with the open files that init needs.
#[derive(Debug)]
pub(super) struct Cgroup {
    /// The folder.
    pub path: PathBuf,
    /// Whether it limits memory.
    pub memory: bool,
    /// Whether it limits processes.
    pub pids: bool,
    /// Whether it limits processors.
    pub cpu: bool,
    /// `cgroup.procs`, to add processes.
    procs: OwnedFd,
    kill: Option<File>,
}

/// Creates a kernel's cgroup with its limits at `path`. Init stays in the daemon's cgroup, so no
/// limit ends the watching process; the memory watch counts its memory.
///
/// # Errors
/// If the parent cgroup does not allow children; nothing is left behind then. A missing controller
/// is no error: the cgroup lacks that limit.
pub(super) fn establish(path: &Path, limits: &KernelLimits) -> io::Result<Cgroup> {
    let base = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    // Never fill a folder that is no cgroup with ordinary folders.
    std::fs::metadata(base.join("cgroup.procs"))?;
    establish_at(base, path, limits).inspect_err(|_| {
        let _ = remove(path);
    })
}

fn establish_at(base: &Path, path: &Path, limits: &KernelLimits) -> io::Result<Cgroup> {
    let engine = path.join("engine");
    let [memory, pids, cpu] = ["memory", "pids", "cpu"].map(|controller| enable(base, controller));
    std::fs::create_dir_all(path)?;
    let [memory, pids, cpu] =
        [("memory", memory), ("pids", pids), ("cpu", cpu)].map(|(name, above)| above && enable(path, name));
    std::fs::create_dir_all(&engine)?;
    let memory = memory && set_memory(&engine, limits.memory_bytes).is_ok();
    let pids = pids && write(&engine, "pids.max", &limits.pids.to_string()).is_ok();
    let quota_us = CPU_PERIOD_US * u64::from(limits.cpu_milli) / 1000;
    let cpu = cpu && write(&engine, "cpu.max", &format!("{quota_us} {CPU_PERIOD_US}")).is_ok();
    let procs = OpenOptions::new().write(true).open(engine.join("cgroup.procs"))?;
    let kill = OpenOptions::new().write(true).open(engine.join("cgroup.kill")).ok();
    Ok(Cgroup { path: path.to_owned(), memory, pids, cpu, procs: procs.into(), kill })
}

/// Creates a virtual machine monitor's cgroup with its limits at `path`. The monitor joins it before it becomes a program.
/// Returns the limits that it lacks.
///
/// # Errors
/// As [`establish`].
pub(super) fn establish_monitor(path: &Path, memory_bytes: u64, processors: u32) -> io::Result<Vec<&'static str>> {
    let base = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    std::fs::metadata(base.join("cgroup.procs"))?;
    let [memory, cpu, pids] = ["memory", "cpu", "pids"].map(|controller| enable(base, controller));
    std::fs::create_dir_all(path)?;
    let quota_us = CPU_PERIOD_US * u64::from(processors);
    let set = [
        ("memory", memory && set_memory(path, memory_bytes).is_ok()),
        ("processors", cpu && write(path, "cpu.max", &format!("{quota_us} {CPU_PERIOD_US}")).is_ok()),
        ("threads", pids && write(path, "pids.max", &limits::VM_MONITOR_THREADS.to_string()).is_ok()),
    ];
    Ok(set.into_iter().filter(|(_, is_set)| !is_set).map(|(name, _)| name).collect())
}

/// Kills everything in a cgroup and below, where the host kernel supports it.
pub fn kill(path: &Path) {
    let _ = std::fs::OpenOptions::new()
        .write(true)
        .open(path.join("cgroup.kill"))
        .and_then(|mut file| file.write_all(b"1"));
}

/// Removes a kernel's cgroup once its processes are gone. The host kernel decides how long that
/// takes, hence the result.
///
/// # Errors
/// `EBUSY` while a process remains.
pub fn remove(path: &Path) -> io::Result<()> {
    for folder in [&path.join("engine"), path] {
        match std::fs::remove_dir(folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Enables a controller for the children of a cgroup.
fn enable(folder: &Path, controller: &str) -> bool {
    let has = |file: &str| {
        std::fs::read_to_string(folder.join(file))
            .is_ok_and(|list| list.split_whitespace().any(|name| name == controller))
    };
    has("cgroup.controllers")
        && (has("cgroup.subtree_control") || write(folder, "cgroup.subtree_control", &format!("+{controller}")).is_ok())
}

/// The limit itself is written last, so it is present only with all its settings.
fn set_memory(engine: &Path, bytes: u64) -> io::Result<()> {
    // Absent without swap accounting; the limit holds either way.
    match write(engine, "memory.swap.max", "0") {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    write(engine, "memory.oom.group", "1")?;
    write(engine, "memory.max", &bytes.to_string())
}

fn write(folder: &Path, file: &str, text: &str) -> io::Result<()> {
    OpenOptions::new().write(true).open(folder.join(file))?.write_all(text.as_bytes())
}

impl Cgroup {
    /// Adds a process. This may take 20 ms, because the host kernel waits for all processors; the
    /// process runs meanwhile.
    ///
    /// # Errors
    /// The host kernel's errors.
    pub(super) fn take(&self, pid: Pid) -> nix::Result<()> {
        nix::unistd::write(&self.procs, pid.to_string().as_bytes()).map(drop)
    }

    /// Kills everything in the engine's part; false if the host kernel is too old.
    pub(super) fn kill(&self) -> bool {
        self.kill.as_ref().is_some_and(|mut file| file.write_all(b"1").is_ok())
    }

    /// Memory in use without cached files, bytes.
    pub(super) fn held_bytes(&self) -> Option<u64> {
        let text = std::fs::read_to_string(self.path.join("engine/memory.stat")).ok()?;
        let bytes = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
        Some(bytes("anon ")? + bytes("shmem ")?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that resembles a delegated cgroup. Plain folders do not create control files, so
    /// they are prepared.
    fn fake(controllers: &str) -> tempfile::TempDir {
        let base = tempfile::tempdir().expect("temporary folder");
        for folder in ["", "k", "k/engine"] {
            let folder = base.path().join(folder);
            std::fs::create_dir_all(&folder).expect("created");
            for file in ["cgroup.procs", "cgroup.kill", "cgroup.subtree_control", "pids.max", "cpu.max"] {
                std::fs::write(folder.join(file), "").expect("written");
            }
            for file in ["memory.max", "memory.oom.group", "memory.swap.max"] {
                std::fs::write(folder.join(file), "").expect("written");
            }
            std::fs::write(folder.join("cgroup.controllers"), controllers).expect("written");
            std::fs::write(folder.join("memory.stat"), "anon 2000\nfile 900\nshmem 48\n").expect("written");
        }
        base
    }

    fn read(base: &tempfile::TempDir, file: &str) -> String {
        std::fs::read_to_string(base.path().join(file)).expect("readable")
    }

    #[test]
    fn cgroup_limits_are_written() {
        let base = fake("cpu memory pids");
        let limits = KernelLimits { memory_bytes: 1 << 29, cpu_milli: 1500, pids: 77, ..KernelLimits::default() };
        let cgroup = establish(&base.path().join("k"), &limits).expect("established");
        assert!(cgroup.memory && cgroup.pids && cgroup.cpu);
        assert_eq!(read(&base, "k/engine/memory.max"), "536870912");
        assert_eq!(read(&base, "k/engine/memory.swap.max"), "0");
        assert_eq!(read(&base, "k/engine/memory.oom.group"), "1");
        assert_eq!(read(&base, "k/engine/pids.max"), "77");
        assert_eq!(read(&base, "k/engine/cpu.max"), "150000 100000");
        cgroup.take(Pid::from_raw(42)).expect("taken");
        assert_eq!(read(&base, "k/engine/cgroup.procs"), "42");
        assert_eq!(cgroup.held_bytes(), Some(2048));
        assert!(cgroup.kill());
        assert_eq!(read(&base, "k/engine/cgroup.kill"), "1");
    }

    #[test]
    fn missing_controller_is_reported() {
        let base = fake("pids");
        let cgroup = establish(&base.path().join("k"), &KernelLimits::default()).expect("established");
        assert!(!cgroup.memory && cgroup.pids && !cgroup.cpu);
        assert_eq!(read(&base, "k/engine/memory.max"), "");
    }

    #[test]
    fn plain_directory_is_no_cgroup() {
        let base = tempfile::tempdir().expect("temporary folder");
        assert!(establish(&base.path().join("k"), &KernelLimits::default()).is_err());
    }
}
