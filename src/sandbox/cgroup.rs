//! Limits by cgroup v2, where a folder of it is delegated to the daemon.
//!
//! ```text
//!  <base>/<name>/          made and removed by the daemon's side
//!     ├ init/              the outer process and init: no limits, so that init outlives what it watches
//!     └ engine/            everything untrusted: memory, processes, processors; killed as one
//! ```
//!
//! Files are opened before the outer process gives up its user: writing through them later needs no rights any more.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use crate::core::spec::KernelLimits;

/// Period of the processor limit, microseconds.
const CPU_PERIOD_US: u64 = 100_000;

/// A kernel's cgroup, by the files of it that init needs.
#[derive(Debug)]
pub(super) struct Cgroup {
    /// The folder, for the daemon to remove.
    pub path: PathBuf,
    /// Whether it limits memory.
    pub memory: bool,
    /// Whether it limits processes.
    pub pids: bool,
    /// Whether it limits processors.
    pub cpu: bool,
    /// Takes a process in: written by the process itself.
    pub procs: OwnedFd,
    kill: Option<File>,
    memory_current: Option<File>,
}

/// Makes a kernel's cgroup below `base` and enters its `init` part.
///
/// # Errors
/// If `base` is not ours to make children in. A controller that is missing is no error: the fields say which are there.
pub(super) fn prepare(base: &Path, name: &str, limits: &KernelLimits) -> io::Result<Cgroup> {
    // A folder that is no cgroup must not be filled with folders that are none either.
    std::fs::metadata(base.join("cgroup.procs"))?;
    let path = base.join(name);
    prepare_at(base, &path, limits).inspect_err(|_| {
        let _ = remove(&path);
    })
}

fn prepare_at(base: &Path, path: &Path, limits: &KernelLimits) -> io::Result<Cgroup> {
    let engine = path.join("engine");
    let [memory, pids, cpu] = ["memory", "pids", "cpu"].map(|controller| enable(base, controller));
    std::fs::create_dir_all(path)?;
    let [memory, pids, cpu] =
        [("memory", memory), ("pids", pids), ("cpu", cpu)].map(|(name, above)| above && enable(path, name));
    for part in ["init", "engine"] {
        std::fs::create_dir_all(path.join(part))?;
    }
    let memory = memory && set_memory(&engine, limits.memory_bytes).is_ok();
    let pids = pids && write(&engine, "pids.max", &limits.pids.to_string()).is_ok();
    let quota_us = CPU_PERIOD_US * u64::from(limits.cpu_milli) / 1000;
    let cpu = cpu && write(&engine, "cpu.max", &format!("{quota_us} {CPU_PERIOD_US}")).is_ok();
    let procs = OpenOptions::new().write(true).open(engine.join("cgroup.procs"))?;
    let kill = OpenOptions::new().write(true).open(engine.join("cgroup.kill")).ok();
    let memory_current = File::open(engine.join("memory.current")).ok();
    write(&path.join("init"), "cgroup.procs", "0")?;
    Ok(Cgroup { path: path.to_owned(), memory, pids, cpu, procs: procs.into(), kill, memory_current })
}

/// Removes a kernel's cgroup once its processes are gone; how long that takes is up to the host kernel, hence the result.
///
/// # Errors
/// `EBUSY` while a process is left.
pub fn remove(path: &Path) -> io::Result<()> {
    for part in ["engine", "init"] {
        match std::fs::remove_dir(path.join(part)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    match std::fs::remove_dir(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Makes a controller available to the children of a folder.
fn enable(folder: &Path, controller: &str) -> bool {
    let has = |file: &str| {
        std::fs::read_to_string(folder.join(file))
            .is_ok_and(|list| list.split_whitespace().any(|name| name == controller))
    };
    has("cgroup.controllers")
        && (has("cgroup.subtree_control") || write(folder, "cgroup.subtree_control", &format!("+{controller}")).is_ok())
}

fn set_memory(engine: &Path, bytes: u64) -> io::Result<()> {
    write(engine, "memory.max", &bytes.to_string())?;
    // Absent where the host has no swap accounting; the limit holds either way.
    match write(engine, "memory.swap.max", "0") {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    write(engine, "memory.oom.group", "1")
}

fn write(folder: &Path, file: &str, text: &str) -> io::Result<()> {
    OpenOptions::new().write(true).open(folder.join(file))?.write_all(text.as_bytes())
}

impl Cgroup {
    /// Kills everything in the engine's part; false if the host kernel is too old for that.
    pub(super) fn kill(&self) -> bool {
        self.kill.as_ref().is_some_and(|mut file| file.write_all(b"1").is_ok())
    }

    /// Memory in use, all of it, bytes.
    pub(super) fn memory_bytes(&self) -> Option<u64> {
        let mut file = self.memory_current.as_ref()?;
        let mut text = String::new();
        file.rewind().ok()?;
        file.read_to_string(&mut text).ok()?;
        text.trim().parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that looks like a delegated cgroup. A plain one cannot make the files of its children, so they are there.
    fn fake(controllers: &str) -> tempfile::TempDir {
        let base = tempfile::tempdir().expect("temporary folder");
        for folder in ["", "k", "k/init", "k/engine"] {
            let folder = base.path().join(folder);
            std::fs::create_dir_all(&folder).expect("created");
            for file in ["cgroup.procs", "cgroup.kill", "cgroup.subtree_control", "pids.max", "cpu.max"] {
                std::fs::write(folder.join(file), "").expect("written");
            }
            for file in ["memory.max", "memory.oom.group", "memory.swap.max"] {
                std::fs::write(folder.join(file), "").expect("written");
            }
            std::fs::write(folder.join("cgroup.controllers"), controllers).expect("written");
            std::fs::write(folder.join("memory.current"), "4096\n").expect("written");
        }
        base
    }

    fn read(base: &tempfile::TempDir, file: &str) -> String {
        std::fs::read_to_string(base.path().join(file)).expect("readable")
    }

    #[test]
    fn limits_are_written() {
        let base = fake("cpu memory pids");
        let limits = KernelLimits { memory_bytes: 1 << 29, cpu_milli: 1500, pids: 77, ..KernelLimits::default() };
        let cgroup = prepare(base.path(), "k", &limits).expect("prepared");
        assert!(cgroup.memory && cgroup.pids && cgroup.cpu);
        assert_eq!(read(&base, "k/engine/memory.max"), "536870912");
        assert_eq!(read(&base, "k/engine/memory.swap.max"), "0");
        assert_eq!(read(&base, "k/engine/memory.oom.group"), "1");
        assert_eq!(read(&base, "k/engine/pids.max"), "77");
        assert_eq!(read(&base, "k/engine/cpu.max"), "150000 100000");
        assert_eq!(read(&base, "k/init/cgroup.procs"), "0");
        assert_eq!(cgroup.memory_bytes(), Some(4096));
        assert!(cgroup.kill());
        assert_eq!(read(&base, "k/engine/cgroup.kill"), "1");
    }

    #[test]
    fn a_missing_controller_is_seen() {
        let base = fake("pids");
        let cgroup = prepare(base.path(), "k", &KernelLimits::default()).expect("prepared");
        assert!(!cgroup.memory && cgroup.pids && !cgroup.cpu);
        assert_eq!(read(&base, "k/engine/memory.max"), "");
    }

    #[test]
    fn a_folder_that_is_no_cgroup_is_refused() {
        let base = tempfile::tempdir().expect("temporary folder");
        assert!(prepare(base.path(), "k", &KernelLimits::default()).is_err());
    }
}
