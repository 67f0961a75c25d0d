//! A system-wide daemon, and the separation of its users.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::UNPRIVILEGED;

/// A system-wide daemon in a mount namespace, with directories of its own in place of the system's.
pub struct SystemWide {
    dir: tempfile::TempDir,
    bin: PathBuf,
    daemon: Child,
}

impl SystemWide {
    pub fn start(config: &str) -> SystemWide {
        let dir = tempfile::Builder::new().prefix("ryk").tempdir_in("/tmp").unwrap();
        let at = dir.path();
        let open = |path: &Path| std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
        open(at);
        for folder in ["run", "data", "etc", "etc/up", "etc/up/ryokan", "etc/work", "bin"] {
            std::fs::create_dir(at.join(folder)).unwrap();
            open(&at.join(folder));
        }
        std::fs::write(at.join("etc/up/ryokan/config.toml"), config).unwrap();
        for built in [env!("CARGO_BIN_EXE_ryokand"), env!("CARGO_BIN_EXE_ryokan"), env!("CARGO_BIN_EXE_ryokan-worker")]
        {
            let copied = Command::new("cp").arg(built).arg(at.join("bin")).status().unwrap();
            assert!(copied.success());
        }
        // Replacing these directories hides nothing from the daemon; /etc is an overlay, because
        // the daemon needs all of it.
        let script = "set -e; cd \"$0\"; mount -t tmpfs none /run; mkdir /run/ryokan; mount --bind run /run/ryokan
            mount -t tmpfs none /var/lib; mkdir /var/lib/ryokan; mount --bind data /var/lib/ryokan
            mount -t overlay none -o lowerdir=/etc,upperdir=etc/up,workdir=etc/work /etc
            exec bin/ryokand --system";
        let log = std::fs::File::create(at.join("log")).unwrap();
        let daemon = Command::new("unshare")
            .args(["--mount", "/bin/sh", "-c", script])
            .arg(at)
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let bin = at.join("bin");
        let mut system = SystemWide { dir, bin, daemon };
        let deadline = Instant::now() + Duration::from_secs(180);
        while UnixStream::connect(system.socket()).is_err() {
            let over = system.daemon.try_wait().unwrap();
            assert!(over.is_none() && Instant::now() < deadline, "{over:?}: {}", system.log());
            std::thread::sleep(Duration::from_millis(20));
        }
        system
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("run/ryokand.sock")
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// A command of that user.
    pub fn run_as(&self, uid: u32, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("setpriv");
        let id = uid.to_string();
        command.args(["--reuid", &id, "--regid", &id, "--clear-groups", "--"]).arg(program).env("HOME", "/");
        command
    }

    /// The command line of that user.
    pub fn cli_command(&self, uid: u32, args: &[&str]) -> Command {
        let mut command = self.run_as(uid, self.bin.join("ryokan"));
        command.arg("--no-autostart").arg("--socket").arg(self.socket()).args(args).stdin(Stdio::null());
        command
    }

    pub fn cli(&self, uid: u32, args: &[&str]) -> Output {
        self.cli_command(uid, args).output().unwrap()
    }
}

impl Drop for SystemWide {
    fn drop(&mut self) {
        let pid = nix::unistd::Pid::from_raw(self.daemon.id() as i32);
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        let _ = self.daemon.wait();
    }
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn audit_log_is_filtered_per_user() {
    if !nix::unistd::geteuid().is_root() {
        return eprintln!("ignored, because only root starts a system-wide daemon");
    }
    let system = SystemWide::start("");
    let (one, other) = (UNPRIVILEGED, UNPRIVILEGED + 1);
    let ok = |uid, args: &[&str]| {
        let output = system.cli(uid, args);
        assert!(output.status.success(), "{uid} {args:?}: {}\n{}", said(&output), system.log());
        String::from_utf8(output.stdout).expect("text")
    };
    let id = |uid| {
        let shown: serde_json::Value = serde_json::from_str(&ok(uid, &["show", "mine", "--json"])).expect("JSON");
        shown["id"].as_str().expect("an id").to_owned()
    };
    for uid in [one, other] {
        ok(uid, &["new", "mine"]);
        ok(uid, &["exec", "mine", "x=1"]);
        ok(uid, &["checkpoint", "mine", "-m", "kept"]);
    }
    let (own, others) = (id(one), id(other));
    let short = |id: &str| id[..10].to_owned();
    // Operations on all kernels are refused, and only the requesting user sees the refusal.
    for what in ["gc", "verify"] {
        let refused = system.cli(one, &[what]);
        assert_eq!(refused.status.code(), Some(4), "{what}: {}", said(&refused));
        assert!(said(&refused).contains("everybody's kernels"), "{what}: {}", said(&refused));
    }
    let seen = ok(one, &["audit"]);
    assert!(seen.contains(&short(&own)) && seen.contains("checkpoint.create"), "{seen}");
    assert!(seen.contains("host.gc refused") && seen.contains("host.verify refused"), "{seen}");
    assert!(!seen.contains(&short(&others)), "{seen}");
    let seen = ok(other, &["audit"]);
    assert!(seen.contains(&short(&others)) && !seen.contains(&short(&own)) && !seen.contains("host.gc"), "{seen}");
    let of_mine = ok(one, &["audit", "mine"]);
    assert!(of_mine.contains(&short(&own)) && !of_mine.contains("host."), "{of_mine}");
    for guess in [others.clone(), short(&others)] {
        assert_eq!(ok(one, &["audit", &guess]), "");
    }
    // A removed kernel stays private, too; its owner finds it by the id in the log.
    ok(other, &["rm", "--yes", "mine"]);
    assert_eq!(ok(one, &["audit", &others]), "");
    assert!(ok(other, &["audit", &short(&others)]).contains("kernel.remove"));
    // The operator collects the garbage of all users and keeps everything referenced.
    let report = ok(0, &["gc"]);
    assert!(report.starts_with("0 checkpoints removed, 1 kept\n"), "of the remaining kernel: {report}");
    assert!(ok(0, &["verify"]).contains("no damage"));
    assert!(ok(one, &["log", "mine"]).contains("kept"));
    ok(one, &["rm", "--yes", "mine"]);
}
