//! Kernels in virtual machines: real QEMU with software emulation, and one image built for all tests.

mod crashes;
mod fork;
mod images;
mod lifecycle;
mod refusals;
mod suspend;
mod warm;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::support::{Host, User};

/// The folder of images with the worker of this build. Built once; the packages are kept in a cache.
fn images() -> &'static Path {
    static IMAGES: OnceLock<PathBuf> = OnceLock::new();
    IMAGES.get_or_init(|| {
        let worker = env!("CARGO_BIN_EXE_ryokan-worker");
        // Below a folder that other users can enter.
        let out = std::env::temp_dir().join(format!("ryokan-test-images-{}", nix::unistd::geteuid()));
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/build-image");
        let built = Command::new(script).args(["--worker", worker, "--out"]).arg(&out).output().expect("it runs");
        assert!(built.status.success(), "no image:\n{}", String::from_utf8_lossy(&built.stderr));
        let built = PathBuf::from(String::from_utf8(built.stdout).expect("a path").trim());
        // Images of former builds serve no other test.
        for entry in fs::read_dir(&out).expect("a folder").flatten().filter(|entry| entry.path() != built) {
            let _ = fs::remove_dir_all(entry.path());
        }
        out
    })
}

/// A host with an image. Its machines are ended with it.
struct Machines(Host);

impl std::ops::Deref for Machines {
    type Target = Host;

    fn deref(&self) -> &Host {
        &self.0
    }
}

impl std::ops::DerefMut for Machines {
    fn deref_mut(&mut self) -> &mut Host {
        &mut self.0
    }
}

impl Machines {
    fn start(user: User) -> Machines {
        Machines::configured(user, "")
    }

    fn configured(user: User, config: &str) -> Machines {
        let mut host = Host::prepare(user);
        host.configure(config);
        fs::create_dir_all(host.data()).expect("a folder");
        std::os::unix::fs::symlink(images(), host.data().join("images")).expect("a link");
        if user == User::Unprivileged {
            let id = Some(crate::support::UNPRIVILEGED);
            std::os::unix::fs::chown(host.data(), id, id).expect("given");
        }
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        fs::set_permissions(host.data(), mode).expect("closed");
        host.launch();
        Machines(host)
    }

    /// The processes of this host's kernels' machines.
    fn machines(&self) -> Vec<u32> {
        self.all().into_iter().filter(|pid| has_open(*pid, "disk.ext4")).collect()
    }

    /// The processes of this host's machines that are stopped until a kernel has them.
    fn parked(&self) -> Vec<u32> {
        let is_parked = |pid: &u32| {
            has_open(*pid, "disk.new.ext4")
                && ask(*pid, r#"{"execute": "query-status"}"#).is_some_and(|status| status.contains("\"paused\""))
        };
        self.all().into_iter().filter(is_parked).collect()
    }

    /// The processes of all machines of this host.
    fn all(&self) -> Vec<u32> {
        let ours = format!("ryokan {}/", self.path("run").display());
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").expect("it is mounted").flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            if String::from_utf8_lossy(&line).contains(&ours) && Host::is_alive(pid) {
                found.push(pid);
            }
        }
        found
    }

    /// Runs code in a kernel; returns its trimmed output.
    fn run(&self, kernel: &str, code: &str) -> String {
        self.ok(&["exec", kernel, code]).trim().to_owned()
    }

    fn kill_machines(&self) {
        for pid in self.all() {
            let _ = nix::sys::signal::kill(
                nix::unistd::Pid::from_raw(pid.cast_signed()),
                nix::sys::signal::Signal::SIGKILL,
            );
        }
    }
}

/// The words of a process's command line.
fn words(pid: u32) -> Vec<String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

/// Whether the process has a file of that name open.
fn has_open(pid: u32, name: &str) -> bool {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    files.filter_map(|file| fs::read_link(file.path()).ok()).any(|file| file.file_name().is_some_and(|n| n == name))
}

/// Asks a machine's monitor; `None` if it does not answer.
fn ask(pid: u32, command: &str) -> Option<String> {
    use std::io::{BufRead as _, Write as _};
    let name = words(pid).into_iter().skip_while(|word| word != "-name").nth(1)?;
    let socket = PathBuf::from(name.strip_prefix("ryokan ")?).with_extension("monitor");
    let mut stream = std::os::unix::net::UnixStream::connect(socket).ok()?;
    stream.set_read_timeout(Some(std::time::Duration::from_secs(5))).ok()?;
    let mut lines = std::io::BufReader::new(stream.try_clone().ok()?).lines();
    lines.next()?.ok()?;
    let mut answer = None;
    for command in ["{\"execute\": \"qmp_capabilities\"}", command] {
        writeln!(stream, "{command}").ok()?;
        answer = lines.by_ref().map_while(Result::ok).find(|line| !line.contains("\"event\""));
    }
    answer
}

impl Drop for Machines {
    fn drop(&mut self) {
        self.kill_machines();
    }
}
