//! `ssh://` to a real sshd on a loopback port, with keys and configuration of its own.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::*;
use crate::support::until;

/// An sshd, and what a client needs for it. The files of the user are not touched.
struct Sshd {
    dir: tempfile::TempDir,
    port: u16,
    process: Child,
}

impl Drop for Sshd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn sshd_program() -> PathBuf {
    let found = ["/usr/sbin/sshd", "/usr/local/sbin/sshd"].into_iter().find(|path| Path::new(path).exists());
    found.expect("sshd is installed: scripts/check installs openssh-server").into()
}

impl Sshd {
    fn start() -> Sshd {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).display().to_string();
        for key in ["host", "user", "absent", "stranger"] {
            let made = Command::new("ssh-keygen").args(["-q", "-t", "ed25519", "-N", "", "-f", &at(key)]).status();
            assert!(made.unwrap().success());
        }
        let public = |key: &str| fs::read_to_string(at(&format!("{key}.pub"))).unwrap();
        // What a user sees whose other host has no ryokan.
        let absent = format!("command=\"/nonexistent/ryokan pipe\" {}", public("absent"));
        fs::write(at("authorized_keys"), format!("{}{absent}", public("user"))).unwrap();
        if nix::unistd::geteuid().is_root() {
            // Debian's service makes it.
            fs::create_dir_all("/run/sshd").unwrap();
        }
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let server = format!(
            "ListenAddress 127.0.0.1:{port}\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\nUsePAM no\n\
             StrictModes no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n\
             PermitRootLogin prohibit-password\n",
            at("host"),
            at("authorized_keys")
        );
        fs::write(at("sshd_config"), server).unwrap();
        fs::write(at("known"), format!("[127.0.0.1]:{port} {}", public("host"))).unwrap();
        fs::write(at("none_known"), "").unwrap();
        let host = |name: &str, key: &str, known: &str| {
            format!("Host {name}\n  IdentityFile {}\n  UserKnownHostsFile {}\n", at(key), at(known))
        };
        let client = format!(
            "{}{}{}{}Host *\n  HostName 127.0.0.1\n  HostKeyAlias [127.0.0.1]:{port}\n  IdentitiesOnly yes\n  \
             IdentityAgent none\n  GlobalKnownHostsFile /dev/null\n",
            host("good", "user", "known"),
            host("unknown", "user", "none_known"),
            host("denied", "stranger", "known"),
            host("absent", "absent", "known")
        );
        fs::write(at("ssh_config"), client).unwrap();
        let log = fs::File::create(at("log")).unwrap();
        let mut process = Command::new(sshd_program());
        process.args(["-D", "-e", "-f", &at("sshd_config")]).stdin(Stdio::null()).stderr(log);
        let process = process.spawn().unwrap();
        until("sshd listens", || TcpStream::connect(("127.0.0.1", port)).is_ok());
        Sshd { dir, port, process }
    }

    /// The configuration of a daemon whose kernels move to `target`.
    fn configuration(&self, target: &Host) -> String {
        let client = self.dir.path().join("ssh_config");
        let command = to(target);
        let command = command.strip_prefix("exec:").expect("a command");
        format!("[teleport]\nssh = [\"ssh\", \"-F\", {client:?}]\ncommand = {command:?}\n")
    }

    fn url(&self, alias: &str) -> String {
        let user = nix::unistd::User::from_uid(nix::unistd::geteuid()).unwrap().expect("an account").name;
        format!("ssh://{user}@{alias}:{}", self.port)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }
}

#[test]
fn kernel_moves_over_ssh() {
    let sshd = Sshd::start();
    let there = Host::start();
    let mut here = Host::prepare(User::Own);
    here.configure(&sshd.configuration(&there));
    here.launch();
    set_up(&here, "demo");
    for (alias, code, words) in [
        ("unknown", 4, &["does not trust the host key", "fingerprint"][..]),
        ("denied", 4, &["refuses the daemon's ssh keys", "without a question"]),
        ("absent", 69, &["cannot run", "[teleport] command"]),
    ] {
        let refused = here.cli(&["teleport", "demo", "--to", &sshd.url(alias)]);
        let said = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(code), "{alias}: {said}\n{}", sshd.log());
        assert!(words.iter().all(|word| said.contains(word)), "{alias}: {said}");
    }
    let closed = here.cli(&["teleport", "demo", "--to", "ssh://good:1"]);
    assert!(String::from_utf8_lossy(&closed.stderr).contains("ssh cannot connect"), "{closed:?}");
    assert_eq!(here.ok(&["exec", "demo", VIEW]), "2 two deep\n", "it stays after each failure");
    assert_eq!(handovers(&here), Vec::<Value>::new());
    let output = here.cli(&["--json", "teleport", "demo", "--to", &sshd.url("good")]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{}\n{}", sshd.log(), here.log());
    let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
    assert_eq!(report["acknowledged"], true, "{report}");
    assert_eq!(there.ok(&["exec", "demo", VIEW]), "2 two deep\n");
    assert!(!is_live(&here, "demo"));
}

#[test]
fn missing_ssh_is_unsupported() {
    let mut here = Host::prepare(User::Own);
    here.configure("[teleport]\nssh = [\"/nonexistent/ssh\"]\n");
    here.launch();
    set_up(&here, "demo");
    let refused = here.cli(&["teleport", "demo", "--to", "ssh://host"]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(5), "{said}");
    assert!(said.contains("/nonexistent/ssh") && said.contains("openssh-client"), "{said}");
    let refused = here.cli(&["teleport", "demo", "--to", "ssh://-oProxyCommand=true"]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    assert_eq!(here.ok(&["exec", "demo", VIEW]), "2 two deep\n");
}
