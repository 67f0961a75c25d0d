//! The layers of a virtual machine monitor: the guest may take it over, so it is as untrusted as the code inside.
//!
//! It reads the system's libraries and firmware and the files it was started with, writes those of its own machine,
//! opens no socket, signals no other process, and sees no network. The parent prepares everything; the child applies it
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

/// Prepares the layers of a monitor that opens `readable` and `writable` by name, and nothing else but the system's
/// files.
///
/// # Errors
/// If the host kernel has no Landlock.
pub fn monitor_layers(
    readable: &[BorrowedFd<'_>],
    writable: &[BorrowedFd<'_>],
    bounds: MonitorBounds,
) -> Result<MonitorLayers, SandboxError> {
    let number = crate::sys::landlock::abi()
        .map_err(|error| SandboxError::new(Layer::Landlock, format!("the host kernel has no Landlock: {error}")))?;
    let rules = rules(known_abi(number), number >= 6, readable, writable)
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
    Ok(MonitorLayers { rules, filter: seccomp::monitor_program().clone(), limits })
}

fn rules(
    abi: ABI,
    is_scoped: bool,
    readable: &[BorrowedFd<'_>],
    writable: &[BorrowedFd<'_>],
) -> Result<OwnedFd, String> {
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
    for file in readable {
        set = allow(set, *file, AccessFs::ReadFile.into())?;
    }
    for file in writable {
        let all = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::Truncate;
        set = allow(set, *file, all & AccessFs::from_file(abi))?;
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
        let bounds = MonitorBounds { memory_bytes: 1 << 30, file_bytes: 4096 };
        let mut command = Command::new(program);
        command.args(args).env("LC_ALL", "C");
        crate::sys::process::confine_monitor(&mut command, monitor_layers(readable, &[], bounds).expect("layers"));
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
}
