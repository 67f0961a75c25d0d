//! The layers of a virtual machine monitor: the guest may take it over, so it is as untrusted as the code inside.
//!
//! It sees a tree of its own with the system's libraries and firmware, reads those and the files it was started with,
//! writes those of its own machine, opens no socket (or only listening Unix sockets in a folder of its own), signals no
//! other process, and sees no network. Where a cgroup is
//! delegated, memory and processors are limited by one. The parent prepares everything; the child applies it between
//! fork and exec (`sys::monitor`).

use std::ffi::CString;
use std::fs::OpenOptions;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use landlock::{
    ABI, Access as _, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, Scope,
};
use nix::sys::resource::Resource;

use super::cgroup;
use super::confine::known_abi;
use super::layer::{Layer, SandboxError};
use super::seccomp;
use crate::core::limits;
use crate::sys::monitor::{MonitorLayers, TreePart};

/// Programs, libraries and firmware.
const SYSTEM: &[&str] = &["/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom"];
/// Open files of a monitor.
const OPEN_FILES: u64 = 512;

/// What a monitor may use.
#[derive(Debug, Clone, Copy)]
pub struct MonitorBounds {
    /// Private writable memory, bytes.
    pub memory_bytes: u64,
    /// Its largest file, bytes.
    pub file_bytes: u64,
}

/// What a monitor opens by name, beside the system's files.
#[derive(Debug, Default)]
pub struct MonitorFiles<'f> {
    /// Files that it reads.
    pub readable: Vec<BorrowedFd<'f>>,
    /// Files that it writes.
    pub writable: Vec<BorrowedFd<'f>>,
    /// Its program and that one's path without links, if it may be outside the system's folders.
    pub program: Option<(&'f Path, BorrowedFd<'f>)>,
    /// The device that runs its guest, and its path.
    pub device: Option<(&'f Path, BorrowedFd<'f>)>,
    /// The folder in which it makes sockets and listens; it connects to none. It is started in it.
    pub sockets: Option<BorrowedFd<'f>>,
}

/// A monitor's cgroup.
#[derive(Debug, Clone, Copy)]
pub struct MonitorGroup<'a> {
    /// Its place; the folder above is delegated to this daemon.
    pub path: &'a Path,
    /// All memory, bytes: the guest's and the monitor's own.
    pub memory_bytes: u64,
    /// Processors.
    pub processors: u32,
}

/// Prepares the layers of a monitor that opens `files` by name, and nothing else but the system's files.
///
/// # Errors
/// If the host kernel has no Landlock.
pub fn monitor_layers(
    files: &MonitorFiles<'_>,
    bounds: MonitorBounds,
    group: Option<MonitorGroup<'_>>,
) -> Result<MonitorLayers, SandboxError> {
    let number = crate::sys::landlock::abi()
        .map_err(|error| SandboxError::new(Layer::Landlock, format!("the host kernel has no Landlock: {error}")))?;
    let rules = rules(known_abi(number), number >= 6, files)
        .map_err(|error| SandboxError::new(Layer::Landlock, format!("cannot restrict a monitor: {error}")))?;
    let resource_limits = vec![
        (Resource::RLIMIT_CORE, 0),
        (Resource::RLIMIT_NOFILE, OPEN_FILES),
        // Counted in the monitor's own user namespace since Linux 5.14: only its threads are there. The user's other
        // processes, further monitors among them, do not count, and a cgroup that is not delegated is not needed.
        (Resource::RLIMIT_NPROC, u64::from(limits::VM_MONITOR_THREADS)),
        (Resource::RLIMIT_DATA, bounds.memory_bytes),
        (Resource::RLIMIT_FSIZE, bounds.file_bytes),
        (Resource::RLIMIT_MEMLOCK, 8 << 20),
        (Resource::RLIMIT_MSGQUEUE, 0),
        (Resource::RLIMIT_NICE, 0),
        (Resource::RLIMIT_RTPRIO, 0),
    ];
    let cgroup = group.and_then(establish);
    let listens = files.sockets.is_some();
    let filter = seccomp::monitor_program(listens).clone();
    let folder = files.sockets.map(|folder| folder.try_clone_to_owned()).transpose();
    let folder = folder.map_err(|error| SandboxError::new(Layer::PivotRoot, format!("a monitor's folder: {error}")))?;
    Ok(MonitorLayers { tree: tree(files)?, folder, rules, filter, limits: resource_limits, cgroup })
}

/// Makes a monitor's cgroup and opens its list of processes. As for processes, what the host refuses is reported, and the
/// resource limits remain.
fn establish(group: MonitorGroup<'_>) -> Option<OwnedFd> {
    let made = cgroup::establish_monitor(group.path, group.memory_bytes, group.processors);
    let opened = made.and_then(|lacks| {
        if !lacks.is_empty() {
            tracing::warn!(cgroup = %group.path.display(), ?lacks, "a virtual machine's cgroup lacks limits");
        }
        OpenOptions::new().write(true).open(group.path.join("cgroup.procs"))
    });
    match opened {
        Ok(procs) => Some(procs.into()),
        Err(error) => {
            tracing::warn!(cgroup = %group.path.display(), %error, "a virtual machine has no cgroup");
            let _ = cgroup::remove(group.path);
            None
        }
    }
}

/// The tree that a monitor sees: the system's files, its program and device, and `/proc`, through which it opens its own
/// descriptors.
fn tree(files: &MonitorFiles<'_>) -> Result<Vec<TreePart>, SandboxError> {
    let c_path = |path: &Path| CString::new(path.as_os_str().as_bytes());
    let mut parts = Vec::new();
    let mut above: Vec<&Path> = Vec::new();
    let is_system = |path: &Path| SYSTEM.iter().any(|system| path.starts_with(system));
    let own = [files.program, files.device].into_iter().flatten().map(|(path, _)| path);
    let own = own.filter(|path| !is_system(path));
    // Libraries may be reached by links through the folder of alternatives, which holds only links.
    let system = SYSTEM.iter().chain(&["/etc/alternatives", "/proc"]).map(Path::new).filter(|path| path.exists());
    for path in system.chain(own) {
        let failed = |error: &dyn std::fmt::Display| {
            SandboxError::new(Layer::PivotRoot, format!("cannot show {} to a monitor: {error}", path.display()))
        };
        let inside = path.strip_prefix("/").unwrap_or(path);
        let host = c_path(path).map_err(|error| failed(&error))?;
        let place = c_path(inside).map_err(|error| failed(&error))?;
        let folders: Vec<&Path> = inside.ancestors().skip(1).filter(|folder| !folder.as_os_str().is_empty()).collect();
        for folder in folders.into_iter().rev() {
            if !above.contains(&folder) {
                above.push(folder);
                parts.push(TreePart::Folder(c_path(folder).map_err(|error| failed(&error))?));
            }
        }
        let kind = path.symlink_metadata().map_err(|error| failed(&error))?.file_type();
        parts.push(if kind.is_symlink() {
            let target = path.read_link().map_err(|error| failed(&error))?;
            TreePart::Link(place, c_path(&target).map_err(|error| failed(&error))?)
        } else if kind.is_dir() {
            TreePart::HostFolder(place, host)
        } else {
            TreePart::HostFile(place, host)
        });
    }
    Ok(parts)
}

fn rules(abi: ABI, is_scoped: bool, files: &MonitorFiles<'_>) -> Result<OwnedFd, String> {
    let words = |error: &dyn std::fmt::Display| error.to_string();
    let mut set = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(AccessFs::from_all(abi))
        .map_err(|error| words(&error))?;
    if is_scoped {
        set = set.scope(Scope::from_all(abi)).map_err(|error| words(&error))?;
    }
    let mut set = set.create().map_err(|error| words(&error))?;
    for path in SYSTEM.iter().map(Path::new).filter(|path| path.exists()) {
        let access = match path.is_dir() {
            true => AccessFs::ReadFile | AccessFs::ReadDir | AccessFs::Execute,
            false => AccessFs::ReadFile.into(),
        };
        let file = PathFd::new(path).map_err(|error| words(&error))?;
        set = allow(set, file.as_fd(), access)?;
    }
    for file in &files.readable {
        set = allow(set, *file, AccessFs::ReadFile.into())?;
    }
    for file in &files.writable {
        let all = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::Truncate;
        set = allow(set, *file, all & AccessFs::from_file(abi))?;
    }
    if let Some((_, program)) = files.program {
        set = allow(set, program, AccessFs::ReadFile | AccessFs::Execute)?;
    }
    if let Some((_, device)) = files.device {
        let all = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev;
        set = allow(set, device, all & AccessFs::from_file(abi))?;
    }
    if let Some(folder) = files.sockets {
        set = allow(set, folder, AccessFs::MakeSock.into())?;
    }
    Option::from(set).ok_or_else(|| String::from("the host kernel made no rules"))
}

fn allow(set: RulesetCreated, file: BorrowedFd<'_>, access: BitFlags<AccessFs>) -> Result<RulesetCreated, String> {
    set.add_rule(PathBeneath::new(file, access)).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::process::Command;

    use crate::sys::monitor::confine_monitor;
    use crate::sys::process::give_descriptors;

    const BOUNDS: MonitorBounds = MonitorBounds { memory_bytes: 1 << 30, file_bytes: 4096 };

    /// Runs a program that has these files as descriptors 3 and on, and may open the first.
    fn confined(program: &str, args: &[&str], files: Vec<OwnedFd>) -> (bool, String) {
        confined_in(program, args, files, None)
    }

    /// `sockets`: the folder in which it listens.
    fn confined_in(program: &str, args: &[&str], files: Vec<OwnedFd>, sockets: Option<&Path>) -> (bool, String) {
        let mut command = Command::new(program);
        command.args(args);
        run(command, files, sockets)
    }

    fn run(mut command: Command, files: Vec<OwnedFd>, sockets: Option<&Path>) -> (bool, String) {
        command.env("LC_ALL", "C").current_dir("/");
        let folder = sockets.map(|path| File::open(path).expect("opened"));
        let readable: Vec<BorrowedFd<'_>> = files.iter().take(1).map(|file| file.as_fd()).collect();
        let sockets = folder.as_ref().map(|folder| folder.as_fd());
        let own = MonitorFiles { readable, sockets, ..MonitorFiles::default() };
        let layers = monitor_layers(&own, BOUNDS, None).expect("layers");
        drop(own);
        give_descriptors(&mut command, (3..).zip(files).map(|(number, file)| (file, number)).collect());
        confine_monitor(&mut command, layers).expect("descriptors");
        let output = command.output().expect("it starts");
        let texts = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&texts).into_owned())
    }

    #[test]
    fn only_given_files_are_opened() -> std::io::Result<()> {
        let folder = tempfile::tempdir()?;
        let files = || {
            ["given", "other"].map(|name| folder.path().join(name)).map(|path| {
                std::fs::write(&path, b"x").expect("written");
                OwnedFd::from(File::open(&path).expect("opened"))
            })
        };
        let (read, said) = confined("/usr/bin/cat", &["/proc/self/fd/3"], files().into());
        assert!(read && said == "x", "{said}");
        let (read, said) = confined("/usr/bin/cat", &["/proc/self/fd/4"], files().into());
        assert!(!read && said.contains("Permission denied"), "{said}");
        let (written, said) = confined("/usr/bin/truncate", &["-s", "0", "/proc/self/fd/3"], files().into());
        assert!(!written && said.contains("Permission denied"), "{said}");
        let (read, said) = confined("/usr/bin/cat", &["/proc/1/environ"], files().into());
        assert!(!read && said.contains("Permission denied"), "{said}");
        Ok(())
    }

    #[test]
    fn host_files_are_invisible() -> std::io::Result<()> {
        let folder = tempfile::tempdir()?;
        let given = File::open("/etc/passwd")?;
        let place = folder.path().display().to_string();
        for path in [place.as_str(), "/etc/passwd", "/home", "/var", "/sys", "/tmp", "/run"] {
            let (seen, said) = confined("/usr/bin/stat", &[path], vec![given.try_clone()?.into()]);
            assert!(!seen && said.contains("No such file"), "{path}: {said}");
        }
        let (made, said) = confined("/usr/bin/mkdir", &["/x"], Vec::new());
        assert!(!made, "{said}");
        let (_, said) = confined("/usr/bin/cat", &["/proc/self/mounts"], vec![File::open("/proc/self/mounts")?.into()]);
        assert!(!said.contains(" / ext4"), "{said}");
        Ok(())
    }

    /// A monitor without root has the uid that owns what other machines use.
    #[test]
    fn owned_files_keep_their_attributes() -> std::io::Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("given");
        std::fs::write(&path, b"x")?;
        let mode = |file: &std::fs::Metadata| std::os::unix::fs::PermissionsExt::mode(&file.permissions());
        let before = path.metadata()?;
        let given = || Ok::<OwnedFd, std::io::Error>(File::open(&path)?.into());
        for (program, args) in [
            ("/usr/bin/chmod", ["0", "/proc/self/fd/3"]),
            ("/usr/bin/touch", ["-d1970-01-02", "/proc/self/fd/3"]),
            ("/usr/bin/chgrp", ["1000", "/proc/self/fd/3"]),
        ] {
            let (done, said) = confined(program, &args, vec![given()?]);
            assert!(!done && said.contains("ermi"), "{program}: {said}");
        }
        let calls = [
            "os.fchmod(3, 0)",
            "os.utime(3)",
            "os.fchown(3, -1, 1000)",
            "os.setxattr(3, 'user.x', b'')",
            "os.removexattr(3, 'user.x')",
        ];
        let has_python = confined("/usr/bin/python3", &["-c", ""], Vec::new()).0;
        for call in calls.into_iter().filter(|_| has_python) {
            let (done, said) = confined("/usr/bin/python3", &["-c", &format!("import os; {call}")], vec![given()?]);
            assert!(!done && said.contains("Operation not permitted"), "{call}: {said}");
        }
        let after = path.metadata()?;
        assert_eq!((mode(&after), after.modified()?), (mode(&before), before.modified()?));
        Ok(())
    }

    #[test]
    fn threads_are_bounded_for_each_monitor() {
        let begins = |threads: u32| {
            let text = format!(
                "import threading, time; threading.stack_size(65536)\n\
                 for _ in range({threads}): threading.Thread(target=time.sleep, args=(2,), daemon=True).start()"
            );
            let mut command = Command::new("/usr/bin/python3");
            command.args(["-c", &text]);
            if nix::unistd::geteuid().is_root() {
                // The host kernel bounds root's own threads by nothing.
                std::os::unix::process::CommandExt::uid(&mut command, 65534);
            }
            run(command, Vec::new(), None)
        };
        if !begins(0).0 {
            eprintln!("not tested: there is no Python in /usr/bin");
            return;
        }
        let (bounded, said) = begins(limits::VM_MONITOR_THREADS + 1);
        assert!(!bounded && said.contains("can't start new thread"), "{said}");
        // Two of one user have more threads than one may have.
        let most = limits::VM_MONITOR_THREADS - 12;
        std::thread::scope(|scope| {
            for run in [scope.spawn(|| begins(most)), scope.spawn(|| begins(most))] {
                let (done, said) = run.join().expect("it ran");
                assert!(done, "{said}");
            }
        });
    }

    #[test]
    fn many_open_files_are_no_hindrance() {
        let files: Vec<File> = (0..600).map(|_| File::open("/dev/null").expect("opened")).collect();
        let (done, said) = confined("/usr/bin/true", &[], Vec::new());
        assert!(done && files.len() == 600, "{said}");
    }

    #[test]
    fn sockets_and_signals_are_refused() {
        let (connected, said) = confined("/usr/bin/bash", &["-c", "exec 3<>/dev/tcp/127.0.0.1/1"], Vec::new());
        assert!(!connected && said.contains("not permitted"), "{said}");
        let (killed, said) = confined("/usr/bin/bash", &["-c", "kill -0 $PPID"], Vec::new());
        assert!(!killed && said.contains("not permitted"), "{said}");
    }

    /// Plain folders do not create control files, so they are prepared.
    #[test]
    fn monitor_joins_its_cgroup() -> std::io::Result<()> {
        let base = tempfile::tempdir()?;
        let path = base.path().join("worker");
        std::fs::create_dir(&path)?;
        for folder in [base.path(), &path] {
            let files = ["cgroup.procs", "cgroup.subtree_control", "cpu.max", "pids.max", "memory.max"];
            for file in files.into_iter().chain(["memory.oom.group"]) {
                std::fs::write(folder.join(file), "")?;
            }
            std::fs::write(folder.join("cgroup.controllers"), "cpu memory pids")?;
        }
        let group = MonitorGroup { path: &path, memory_bytes: 1 << 20, processors: 2 };
        let mut command = Command::new("/usr/bin/true");
        confine_monitor(&mut command, monitor_layers(&MonitorFiles::default(), BOUNDS, Some(group)).expect("layers"))?;
        assert!(command.status()?.success());
        let text = |file: &str| std::fs::read_to_string(path.join(file));
        assert_eq!(text("cgroup.procs")?, "0");
        let limits = [text("memory.max")?, text("cpu.max")?, text("pids.max")?];
        assert_eq!(limits, ["1048576", "200000 100000", "512"]);
        // A host that refuses one has the other limits.
        let nowhere = MonitorGroup { path: Path::new("/nowhere/worker"), ..group };
        assert!(monitor_layers(&MonitorFiles::default(), BOUNDS, Some(nowhere)).expect("layers").cgroup.is_none());
        std::fs::write(base.path().join("cgroup.controllers"), "cpu")?;
        assert_eq!(cgroup::establish_monitor(&path, 1, 1)?, ["memory", "threads"]);
        Ok(())
    }

    #[test]
    fn listener_makes_sockets_only() -> std::io::Result<()> {
        let own = tempfile::tempdir()?;
        let python = |text: &str, sockets| confined_in("/usr/bin/python3", &["-c", text], Vec::new(), sockets);
        let binds =
            |path: &str| format!("import socket; s = socket.socket(socket.AF_UNIX); s.bind('{path}'); s.listen()");
        if !python("", None).0 {
            eprintln!("not tested: there is no Python in /usr/bin");
            return Ok(());
        }
        let (listens, said) = python(&binds("s"), Some(own.path()));
        assert!(listens && own.path().join("s").exists(), "{said}");
        let refused = |text: &str, sockets, why: &str| {
            let (done, said) = python(text, sockets);
            assert!(!done && said.contains(why), "{text}: {said}");
        };
        refused(&binds("s"), None, "Operation not permitted");
        refused(&binds("/s"), Some(own.path()), "Read-only file system");
        refused("open('f', 'w')", Some(own.path()), "Permission denied");
        let connects = "import socket; s = socket.socket(socket.AF_UNIX); s.connect('s')";
        refused(connects, Some(own.path()), "Operation not permitted");
        for kind in ["socket.AF_INET", "socket.AF_UNIX, socket.SOCK_DGRAM"] {
            refused(&format!("import socket; socket.socket({kind})"), Some(own.path()), "Operation not permitted");
        }
        Ok(())
    }
}
