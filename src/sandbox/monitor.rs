//! The layers of a virtual machine monitor: the guest may take it over, so it is as untrusted as the code inside.
//!
//! It reads the system's libraries and firmware and the files it was started with, writes those of its own machine,
//! opens no socket (or only listening Unix sockets in a folder of its own), signals no other process, and sees no
//! network. The parent prepares everything; the child applies it
//! between fork and exec (`sys::process::confine_monitor`).

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use landlock::{
    ABI, Access as _, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, Scope,
};
use nix::sys::resource::Resource;

use super::confine::known_abi;
use super::layer::{Layer, SandboxError};
use super::seccomp;
use crate::sys::process::MonitorLayers;

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
    /// Its program, if it may be outside the system's folders.
    pub program: Option<BorrowedFd<'f>>,
    /// The device that runs its guest.
    pub device: Option<BorrowedFd<'f>>,
    /// The folder in which it makes sockets and listens; it connects to none.
    pub sockets: Option<BorrowedFd<'f>>,
}

/// Prepares the layers of a monitor that opens `files` by name, and nothing else but the system's files.
///
/// # Errors
/// If the host kernel has no Landlock.
pub fn monitor_layers(files: &MonitorFiles<'_>, bounds: MonitorBounds) -> Result<MonitorLayers, SandboxError> {
    let number = crate::sys::landlock::abi()
        .map_err(|error| SandboxError::new(Layer::Landlock, format!("the host kernel has no Landlock: {error}")))?;
    let rules = rules(known_abi(number), number >= 6, files)
        .map_err(|error| SandboxError::new(Layer::Landlock, format!("cannot restrict a monitor: {error}")))?;
    let limits = vec![
        (Resource::RLIMIT_CORE, 0),
        (Resource::RLIMIT_NOFILE, OPEN_FILES),
        (Resource::RLIMIT_DATA, bounds.memory_bytes),
        (Resource::RLIMIT_FSIZE, bounds.file_bytes),
        (Resource::RLIMIT_MEMLOCK, 8 << 20),
        (Resource::RLIMIT_MSGQUEUE, 0),
        (Resource::RLIMIT_NICE, 0),
        (Resource::RLIMIT_RTPRIO, 0),
    ];
    let listens = files.sockets.is_some();
    Ok(MonitorLayers { rules, filter: seccomp::monitor_program(listens).clone(), limits })
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
    if let Some(program) = files.program {
        set = allow(set, program, AccessFs::ReadFile | AccessFs::Execute)?;
    }
    if let Some(device) = files.device {
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

    fn confined(program: &str, args: &[&str], readable: &[BorrowedFd<'_>]) -> (bool, String) {
        confined_in(program, args, readable, None)
    }

    /// `sockets`: the folder in which it listens.
    fn confined_in(
        program: &str,
        args: &[&str],
        readable: &[BorrowedFd<'_>],
        sockets: Option<BorrowedFd<'_>>,
    ) -> (bool, String) {
        let bounds = MonitorBounds { memory_bytes: 1 << 30, file_bytes: 4096 };
        let mut command = Command::new(program);
        command.args(args).env("LC_ALL", "C");
        let files = MonitorFiles { readable: readable.to_vec(), sockets, ..MonitorFiles::default() };
        crate::sys::process::confine_monitor(&mut command, monitor_layers(&files, bounds).expect("layers"));
        let output = command.output().expect("it starts");
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    }

    #[test]
    fn only_given_files_are_opened() -> std::io::Result<()> {
        let folder = tempfile::tempdir()?;
        let [given, other] = ["given", "other"].map(|name| folder.path().join(name));
        std::fs::write(&given, b"x")?;
        std::fs::write(&other, b"x")?;
        let file = File::open(&given)?;
        let [given, other] = [given, other].map(|path| path.display().to_string());
        let (read, said) = confined("/usr/bin/cat", &[&given], &[file.as_fd()]);
        assert!(read, "{said}");
        let (read, said) = confined("/usr/bin/cat", &[&other], &[file.as_fd()]);
        assert!(!read && said.contains("Permission denied"), "{said}");
        let (written, said) = confined("/usr/bin/truncate", &["-s", "0", &given], &[file.as_fd()]);
        assert!(!written && said.contains("Permission denied"), "{said}");
        Ok(())
    }

    #[test]
    fn sockets_and_signals_are_refused() {
        let (connected, said) = confined("/usr/bin/bash", &["-c", "exec 3<>/dev/tcp/127.0.0.1/1"], &[]);
        assert!(!connected && said.contains("not permitted"), "{said}");
        let (killed, said) = confined("/usr/bin/bash", &["-c", "kill -0 $PPID"], &[]);
        assert!(!killed && said.contains("not permitted"), "{said}");
    }

    #[test]
    fn listener_makes_sockets_only() -> std::io::Result<()> {
        let folders = [tempfile::tempdir()?, tempfile::tempdir()?];
        let [own, other] = [0, 1].map(|at: usize| folders[at].path());
        let sockets = File::open(own)?;
        let python = |text: &str, sockets| confined_in("/usr/bin/python3", &["-c", text], &[], sockets);
        let binds = |folder: &Path| {
            format!("import socket; s = socket.socket(socket.AF_UNIX); s.bind('{}/s'); s.listen()", folder.display())
        };
        if !python("", None).0 {
            eprintln!("not tested: there is no Python in /usr/bin");
            return Ok(());
        }
        let (listens, said) = python(&binds(own), Some(sockets.as_fd()));
        assert!(listens && own.join("s").exists(), "{said}");
        let refused = |text: &str, sockets, why: &str| {
            let (done, said) = python(text, sockets);
            assert!(!done && said.contains(why), "{text}: {said}");
        };
        refused(&binds(own), None, "Operation not permitted");
        refused(&binds(other), Some(sockets.as_fd()), "Permission denied");
        refused(&format!("open('{}/f', 'w')", own.display()), Some(sockets.as_fd()), "Permission denied");
        let connects = format!("import socket; s = socket.socket(socket.AF_UNIX); s.connect('{}/s')", own.display());
        refused(&connects, Some(sockets.as_fd()), "Operation not permitted");
        for kind in ["socket.AF_INET", "socket.AF_UNIX, socket.SOCK_DGRAM"] {
            refused(&format!("import socket; socket.socket({kind})"), Some(sockets.as_fd()), "Operation not permitted");
        }
        Ok(())
    }
}
