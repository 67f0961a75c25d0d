//! Places of clients: nobody takes those of others, and whoever has not said hello takes little.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use ryokan::core::engine::EngineName;
use ryokan::core::exec::ExecRequest;
use ryokan::core::limits;

use crate::support::{Host, UNPRIVILEGED, User, kernel, users};

/// A message of one segment as it begins on the wire.
fn table(words: usize) -> Vec<u8> {
    [0, words as u32].iter().flat_map(|word| word.to_le_bytes()).collect()
}

#[test]
fn a_large_message_before_hello_ends_the_connection() {
    for user in users() {
        let host = Host::start_as(user);
        let connect = || {
            let stream = UnixStream::connect(host.socket()).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            stream
        };
        // What it announces is enough: nothing of it is waited for.
        let mut large = connect();
        large.write_all(&table(limits::HELLO_WORDS + 1)).unwrap();
        let began = Instant::now();
        // Perhaps after a word about it.
        let over = large.read_to_end(&mut Vec::new());
        assert!(!over.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock), "it is over");
        assert!(began.elapsed() < Duration::from_secs(4), "at once, not when the time to say hello is over");
        // One as large as may be is awaited, as any client's is.
        let mut small = connect();
        small.write_all(&table(limits::HELLO_WORDS)).unwrap();
        small.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let waits = small.read(&mut [0; 64]).expect_err("nothing to read yet");
        assert_eq!(waits.kind(), std::io::ErrorKind::WouldBlock, "{waits}");
        // After hello large ones are welcome.
        host.with(async |client| {
            let shell = kernel(&client, "k", EngineName::Kaish).await;
            let code = format!("echo large # {}", "x".repeat(limits::HELLO_WORDS * 8 * 4));
            let result = shell.run(&ExecRequest::code(code)).await.expect("accepted").result().await.expect("a result");
            assert_eq!(result.stdout, b"large\n");
        });
    }
}

#[test]
fn a_client_without_a_place_is_told_so() {
    let mut host = Host::prepare(User::Own);
    host.configure("[limits]\nclients = 2\n");
    host.launch();
    let mut taken = Vec::new();
    let said = until_refused(|| {
        // One of those that came before may have been leaving still, and so turned away this one.
        taken.push(UnixStream::connect(host.socket()).unwrap());
        host.cli(&["ls"])
    });
    assert!(said.contains("has 2 clients already"), "{said}");
    drop(taken);
    until_served(|| host.cli(&["ls"]));
}

/// Repeats until it fails: a connection counts when the daemon has accepted it. Gives what was said.
fn until_refused(mut run: impl FnMut() -> Output) -> String {
    let began = Instant::now();
    for tries in 0.. {
        let output = run();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        if !output.status.success() {
            assert_eq!(output.status.code(), Some(4), "a refusal, as its code says: {said}");
            return said;
        }
        assert!(began.elapsed() < Duration::from_secs(8), "it is served still, {tries} times");
    }
    unreachable!("it is refused, or the test fails")
}

fn until_served(mut run: impl FnMut() -> Output) {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let output = run();
        if output.status.success() {
            return;
        }
        assert!(Instant::now() < deadline, "{}", String::from_utf8_lossy(&output.stderr));
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A system-wide daemon with folders of its own in place of the system's, in a mount namespace.
struct SystemWide {
    dir: tempfile::TempDir,
    bin: PathBuf,
    daemon: Child,
}

impl SystemWide {
    fn start(config: &str) -> SystemWide {
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
        // The system's folders hide nothing that the daemon needs; /etc it needs whole.
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
        let deadline = Instant::now() + Duration::from_secs(60);
        while UnixStream::connect(system.socket()).is_err() {
            let over = system.daemon.try_wait().unwrap();
            assert!(over.is_none() && Instant::now() < deadline, "{over:?}: {}", system.log());
            std::thread::sleep(Duration::from_millis(20));
        }
        system
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("run/ryokand.sock")
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// A command as that user.
    fn run_as(&self, uid: u32, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("setpriv");
        let id = uid.to_string();
        command.args(["--reuid", &id, "--regid", &id, "--clear-groups", "--"]).arg(program).env("HOME", "/");
        command
    }

    fn cli(&self, uid: u32, args: &[&str]) -> Output {
        let mut command = self.run_as(uid, self.bin.join("ryokan"));
        command.arg("--no-autostart").arg("--socket").arg(self.socket()).args(args).stdin(Stdio::null());
        command.output().unwrap()
    }
}

impl Drop for SystemWide {
    fn drop(&mut self) {
        let pid = nix::unistd::Pid::from_raw(self.daemon.id() as i32);
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        let _ = self.daemon.wait();
    }
}

#[test]
fn one_user_of_a_system_wide_daemon_leaves_places_to_others() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let system = SystemWide::start("[limits]\nclients = 20\nclients_per_user = 3\n");
    let (greedy, other) = (UNPRIVILEGED, UNPRIVILEGED + 1);
    let made = system.cli(other, &["new", "mine"]);
    assert!(made.status.success(), "{}\n{}", String::from_utf8_lossy(&made.stderr), system.log());
    let script = "import socket, sys\nheld = [socket.socket(socket.AF_UNIX) for _ in range(40)]\n\
        for one in held: one.connect(sys.argv[1])\nprint('held', flush=True)\nsys.stdin.read()";
    let mut holder = system.run_as(greedy, "/usr/bin/python3");
    holder.args(["-c", script]).arg(system.socket()).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut holder = holder.spawn().unwrap();
    holder.stdout.as_mut().unwrap().read_exact(&mut [0; 4]).unwrap();
    let said = until_refused(|| system.cli(greedy, &["ls"]));
    assert!(said.contains("you have 3 clients connected already"), "{said}");
    let ran = system.cli(other, &["exec", "mine", "echo served"]);
    assert_eq!(String::from_utf8_lossy(&ran.stdout), "served\n", "{ran:?}\n{}", system.log());
    drop(holder.stdin.take());
    holder.wait().unwrap();
    until_served(|| system.cli(greedy, &["ls"]));
    assert!(system.cli(other, &["rm", "--yes", "mine"]).status.success());
}
