//! `ssh://` to a real sshd with keys and configuration of its own: on a loopback port, and between two network namespaces.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use ryokan::sys::fault;

use super::failures::with_fault;
use super::*;
use crate::support::until;

/// An sshd, and what a client needs for it. The files of the user are not touched.
struct Sshd {
    dir: tempfile::TempDir,
    port: u16,
    process: Child,
    /// The client's program and its first arguments.
    client: Vec<String>,
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
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        Sshd::start_at("127.0.0.1", port, None)
    }

    /// Starts it at the far end of a link.
    fn start_at(address: &str, port: u16, link: Option<&Link>) -> Sshd {
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
        let server = format!(
            "ListenAddress {address}:{port}\nHostKey {}\nAuthorizedKeysFile {}\nPidFile none\nUsePAM no\n\
             StrictModes no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n\
             PermitRootLogin prohibit-password\n",
            at("host"),
            at("authorized_keys")
        );
        fs::write(at("sshd_config"), server).unwrap();
        fs::write(at("known"), format!("[{address}]:{port} {}", public("host"))).unwrap();
        fs::write(at("none_known"), "").unwrap();
        let host = |name: &str, key: &str, known: &str| {
            format!("Host {name}\n  IdentityFile {}\n  UserKnownHostsFile {}\n", at(key), at(known))
        };
        let client = format!(
            "{}{}{}{}Host *\n  HostName {address}\n  HostKeyAlias [{address}]:{port}\n  IdentitiesOnly yes\n  \
             IdentityAgent none\n  GlobalKnownHostsFile /dev/null\n",
            host("good", "user", "known"),
            host("unknown", "user", "none_known"),
            host("denied", "stranger", "known"),
            host("absent", "absent", "known")
        );
        fs::write(at("ssh_config"), client).unwrap();
        let log = fs::File::create(at("log")).unwrap();
        let within = |end: fn(&Link) -> &str| link.map_or_else(Vec::new, |link| in_namespace(end(link)));
        let sshd = [within(|link| &link.far), vec![sshd_program().display().to_string()]].concat();
        let mut process = Command::new(&sshd[0]);
        process.args(&sshd[1..]).args(["-D", "-e", "-f", &at("sshd_config")]).stdin(Stdio::null()).stderr(log);
        let client = ["ssh", "-F", &at("ssh_config")].map(str::to_owned).to_vec();
        let client = [within(|link| &link.near), client].concat();
        let sshd = Sshd { port, process: process.spawn().unwrap(), client, dir };
        until("sshd listens", || sshd.log().contains("Server listening"));
        sshd
    }

    /// The configuration of a daemon whose kernels move to `target`.
    fn configuration(&self, target: &Host) -> String {
        let client = &self.client;
        let command = to(target);
        let command = command.strip_prefix("exec:").expect("a command");
        format!("[teleport]\nssh = {client:?}\ncommand = {command:?}\n")
    }

    fn url(&self, alias: &str) -> String {
        let user = nix::unistd::User::from_uid(nix::unistd::geteuid()).unwrap().expect("an account").name;
        format!("ssh://{user}@{alias}:{}", self.port)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }
}

/// Words before a command that runs it in a network namespace.
fn in_namespace(name: &str) -> Vec<String> {
    ["ip", "netns", "exec", name].map(str::to_owned).to_vec()
}

/// Two network namespaces with a cable between them.
struct Link {
    near: String,
    far: String,
}

impl Drop for Link {
    fn drop(&mut self) {
        for name in [&self.near, &self.far] {
            let _ = Command::new("ip").args(["netns", "del", name]).status();
        }
    }
}

const NEAR: &str = "10.77.0.1/24";
const FAR: &str = "10.77.0.2";

fn ip(words: &str) -> Result<(), String> {
    let output = Command::new("ip").args(words.split(' ')).output().map_err(|error| format!("ip: {error}"))?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(()) } else { Err(format!("ip {words}: {said}")) }
}

impl Link {
    fn new() -> Result<Link, String> {
        if !nix::unistd::geteuid().is_root() {
            return Err("it needs root".into());
        }
        let [near, far] = ["near", "far"].map(|end| format!("ryk{}{end}", std::process::id()));
        // Whatever was made is removed.
        let link = Link { near, far };
        let Link { near, far } = &link;
        for command in [
            format!("netns add {near}"),
            format!("netns add {far}"),
            format!("link add cable netns {near} type veth peer name cable netns {far}"),
            format!("-n {near} addr add {NEAR} dev cable"),
            format!("-n {far} addr add {FAR}/24 dev cable"),
            format!("-n {near} link set cable up"),
            format!("-n {far} link set cable up"),
        ] {
            ip(&command)?;
        }
        Ok(link)
    }

    fn set(&self, state: &str) {
        ip(&format!("-n {} link set cable {state}", self.far)).unwrap();
    }
}

/// Bytes of a host's store.
fn stored(host: &Host) -> u64 {
    let (mut folders, mut bytes) = (vec![host.data().join("store")], 0);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            match entry.metadata() {
                Ok(found) if found.is_dir() => folders.push(entry.path()),
                Ok(found) => bytes += found.len(),
                Err(_) => {}
            }
        }
    }
    bytes
}

#[test]
fn cut_network_moves_nothing() {
    let link = match Link::new() {
        Ok(link) => link,
        Err(why) => return eprintln!("ignored, because this host cannot connect network namespaces: {why}"),
    };
    let mut sshd = Sshd::start_at(FAR, 2222, Some(&link));
    // A dead network is noticed sooner than by default, and a slow one is not dead.
    sshd.client.extend(["-o", "ServerAliveInterval=1", "-o", "ServerAliveCountMax=10"].map(str::to_owned));
    let mut there = Host::start();
    let mut here = Host::prepare(User::Own);
    here.configure(&sshd.configuration(&there));
    here.launch();
    here.ok(&["new", "demo", "--engine", "python"]);
    // Half a minute's worth, of which a part arrives.
    let fill = "import os; open('large', 'wb').write(os.urandom(32 << 20)); g = iter(range(9)); next(g)";
    here.ok(&["exec", "demo", fill]);
    let (url, before) = (sshd.url("good"), stored(&there));
    let mut command = here.command("ryokan");
    command.args(["--no-autostart", "teleport", "demo", "--to", &url, "--limit-rate", "1M"]).stderr(Stdio::piped());
    let moving = command.spawn().unwrap();
    until("objects arrive", || stored(&there) > before + (1 << 20));
    link.set("down");
    let cut = moving.wait_with_output().unwrap();
    assert!(!cut.status.success(), "the kernel moved without a network");
    assert!(is_live(&here, "demo") && !is_live(&there, "demo"));
    assert_eq!(here.ok(&["exec", "demo", "print(next(g))"]), "1\n", "the same worker continues");
    link.set("up");
    until("the first move is forgotten", || undecided(&here).is_empty() && undecided(&there).is_empty());
    // The same in the pause, while the target makes it durable.
    let hold = there.path("hold");
    std::fs::write(&hold, "").expect("written");
    there.env(fault::HOLD, hold.to_str().expect("a path"));
    with_fault(&mut there, "handover.data.sync=hold");
    let mut command = here.command("ryokan");
    command.args(["--no-autostart", "teleport", "demo", "--to", &url]).stderr(Stdio::piped());
    let moving = command.spawn().unwrap();
    until("its directory is filled", || !left_over(&there).is_empty());
    link.set("down");
    let cut = moving.wait_with_output().unwrap();
    assert!(!cut.status.success(), "the kernel moved without a network");
    assert_eq!(here.ok(&["exec", "demo", "print(next(g))"]), "2\n", "the same worker continues");
    link.set("up");
    std::fs::remove_file(&hold).expect("removed");
    until("the second move is forgotten", || undecided(&here).is_empty() && undecided(&there).is_empty());
    // And at the commit: the decision holds, and is repeated when the network is back.
    std::fs::write(&hold, "").expect("written");
    with_fault(&mut there, "catalog.handover.activate.before_commit=hold");
    let mut command = here.command("ryokan");
    command.args(["--no-autostart", "teleport", "demo", "--to", &url]).stderr(Stdio::piped());
    let moving = command.spawn().unwrap();
    until("it has left", || !is_live(&here, "demo"));
    link.set("down");
    let output = moving.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("not confirmed yet"), "{said}\n{}\n{}", sshd.log(), here.log());
    link.set("up");
    std::fs::remove_file(&hold).expect("removed");
    until("the commit is repeated", || undecided(&here).is_empty());
    assert!(is_live(&there, "demo") && !is_live(&here, "demo"));
    assert_eq!(there.ok(&["exec", "demo", "import os; print(os.path.getsize('large'))"]), format!("{}\n", 32 << 20));
    until("nothing is left", || left_over(&there).is_empty());
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

/// The address names the socket of the daemon there: the one of the command is another host's.
#[test]
fn address_names_far_socket() {
    let sshd = Sshd::start();
    let (there, other) = (Host::start(), Host::start());
    let mut here = Host::prepare(User::Own);
    here.configure(&sshd.configuration(&other));
    here.launch();
    set_up(&here, "demo");
    let url = |path: &str| format!("{}{path}", sshd.url("good"));
    for path in ["/tmp/a;id", "/tmp/$(id)", "/tmp/../s", "//s", "/a b"] {
        let refused = here.cli(&["teleport", "demo", "--to", &url(path)]);
        assert_eq!(refused.status.code(), Some(2), "{path}: {refused:?}");
    }
    let absent = here.cli(&["teleport", "demo", "--to", &url("/nonexistent/socket")]);
    assert!(!absent.status.success() && is_live(&here, "demo"), "{absent:?}");
    let socket = there.socket().display().to_string();
    let output = here.cli(&["--json", "teleport", "demo", "--to", &url(&socket)]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{}\n{}", sshd.log(), here.log());
    assert_eq!((is_live(&there, "demo"), state(&other, "demo")), (true, None));
    assert_eq!(there.ok(&["exec", "demo", VIEW]), "2 two deep\n");
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
