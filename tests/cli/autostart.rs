//! Starting the daemon on demand. Here the daemon is a script that counts its starts and serves the
//! fake's socket.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::command_line::parts;
use super::fake::Fake;

/// A directory with the program, the script as `ryokand`, and directories of its own for everything
/// else.
struct Installed {
    folder: tempfile::TempDir,
}

impl Installed {
    fn new(script: &str) -> Installed {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        // Not a symbolic link, which would resolve to the directory of the real daemon. Copied by
        // `cp`, because a fork of another test could hold a copy of our own open for writing ("text
        // file busy").
        let copied = Command::new("cp").args(["--link", env!("CARGO_BIN_EXE_ryokan")]).arg(at("ryokan")).status();
        let copied = copied.unwrap().success()
            || Command::new("cp").arg(env!("CARGO_BIN_EXE_ryokan")).arg(at("ryokan")).status().unwrap().success();
        assert!(copied, "the program is copied");
        std::fs::write(at("ryokand"), format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(at("ryokand"), std::fs::Permissions::from_mode(0o700)).unwrap();
        std::fs::create_dir(at("run")).unwrap();
        std::fs::set_permissions(at("run"), std::fs::Permissions::from_mode(0o700)).unwrap();
        Installed { folder }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn socket(&self) -> PathBuf {
        self.path().join("run/ryokan/ryokand.sock")
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(self.path().join("ryokan"));
        command
            .args(args)
            .env("XDG_RUNTIME_DIR", self.path().join("run"))
            .env("XDG_STATE_HOME", self.path().join("state"));
        command.env_remove("RYOKAN_SOCKET").env("HOME", self.path()).env("COUNT", self.path().join("count"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }
}

#[test]
fn concurrent_autostart() {
    let fake = Fake::start();
    let script =
        "echo started $1 >> \"$COUNT\"\nsleep 0.3\nln -s \"$FAKE\" \"$XDG_RUNTIME_DIR/ryokan/ryokand.sock\"\nsleep 60";
    let installed = Installed::new(script);
    let start = || installed.command(&["ls", "-q"]).env("FAKE", &fake.socket).spawn().unwrap();
    let children: Vec<_> = (0..4).map(|_| start()).collect();
    for child in children {
        assert_eq!(parts(child.wait_with_output().unwrap()), (0, "demo\n".into(), String::new()));
    }
    assert_eq!(std::fs::read_to_string(installed.path().join("count")).unwrap(), "started --on-demand\n");
}

#[test]
fn stale_socket_starts_daemon() {
    let fake = Fake::start();
    let installed = Installed::new("ln -sf \"$FAKE\" \"$XDG_RUNTIME_DIR/ryokan/ryokand.sock\"\nsleep 60");
    let folder = installed.socket().parent().unwrap().to_owned();
    std::fs::create_dir(&folder).unwrap();
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o700)).unwrap();
    drop(std::os::unix::net::UnixListener::bind(installed.socket()).unwrap());
    let output = installed.command(&["ls", "-q"]).env("FAKE", &fake.socket).output().unwrap();
    assert_eq!(parts(output), (0, "demo\n".into(), String::new()));
}

#[test]
fn failed_start_shows_log_tail() {
    let installed = Installed::new("echo 'an old line' >&2; echo 'config.toml:3: no such key' >&2; exit 3");
    let (exit, _, stderr) = parts(installed.command(&["ls"]).output().unwrap());
    assert_eq!(exit, 69);
    assert!(
        stderr.contains("exited with exit status: 3") && stderr.contains("  config.toml:3: no such key"),
        "{stderr}"
    );
    assert!(stderr.contains("hint: read the full log "), "{stderr}");
    // The next start shows only its own lines.
    std::fs::write(installed.path().join("ryokand"), "#!/bin/sh\necho new >&2\nexit 1\n").unwrap();
    let (_, _, stderr) = parts(installed.command(&["ls"]).output().unwrap());
    assert!(stderr.contains("  new") && !stderr.contains("config.toml"), "{stderr}");
}

#[test]
fn autostart_can_be_disabled() {
    let installed = Installed::new("echo started >> \"$COUNT\"");
    let socket = installed.path().join("elsewhere.sock");
    for args in [vec!["ls", "--no-autostart"], vec!["ls", "--socket", socket.to_str().unwrap()]] {
        assert_eq!(parts(installed.command(&args).output().unwrap()).0, 69, "{args:?}");
    }
    assert!(!installed.path().join("count").exists());
}

#[test]
fn doctor_works_without_daemon() {
    let script = "[ \"$1\" = --abilities ] || exit 1
echo '[{\"name\":\"landlock\",\"present\":false,\"required\":true,\"detail\":\"none\",\"hint\":\"a newer kernel\"}]'";
    let installed = Installed::new(script);
    let (exit, stdout, _) = parts(installed.command(&["doctor"]).output().unwrap());
    assert_eq!(exit, 5);
    assert!(stdout.contains("landlock  MISSING"), "{stdout}");
}

#[test]
fn config_uses_daemon_binary() {
    let installed = Installed::new("echo \"$@\"; [ \"$1\" = --show-config ] || exit 1");
    let run = |args: &[&str]| parts(installed.command(args).output().unwrap());
    assert_eq!(run(&["config", "check"]), (1, "--check-config\n".into(), String::new()));
    let file = installed.path().join("ryokand").display().to_string();
    assert_eq!(run(&["config", "check", &file]), (1, format!("--check-config {file}\n"), String::new()));
    assert_eq!(run(&["config", "show"]), (0, "--show-config\n".into(), String::new()));
    assert_eq!(run(&["config", "show", "--json"]), (0, "--show-config --json\n".into(), String::new()));
}

/// A daemon that is about to end holds its data and does not listen: the command line retries.
#[test]
fn autostart_retries_on_lock() {
    let fake = Fake::start();
    let script = "echo started >> \"$COUNT\"\n[ $(wc -l < \"$COUNT\") -ge 3 ] || exit 75\n\
        ln -s \"$FAKE\" \"$XDG_RUNTIME_DIR/ryokan/ryokand.sock\"\nsleep 60";
    let installed = Installed::new(script);
    let output = installed.command(&["ls", "-q"]).env("FAKE", &fake.socket).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(std::fs::read_to_string(installed.path().join("count")).unwrap().lines().count(), 3);
}
