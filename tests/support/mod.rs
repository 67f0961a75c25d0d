//! A daemon of its own for a test: temporary XDG directories and separate processes, removed at the
//! end.

mod filesystems;
mod random;
mod terminal;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use ryokan::core::engine::EngineName;
use ryokan::core::exec::{ExecRequest, ExecResult};
use ryokan::rpc::client::{HostClient, KernelClient, run_local};
use ryokan::rpc::convert::spec::SpecRequest;

pub use filesystems::Mounted;
pub use random::Random;
pub use terminal::Terminal;

/// A uid without any rights; no such account needs to exist.
pub const UNPRIVILEGED: u32 = 1500;

/// Configuration of a daemon without warm workers.
pub const NO_POOL: &str = "[pool]\npool_size = 0\nmin_idle = 0\n";

/// After this time a command line has hung: the slowest ones boot a machine under software emulation.
const HUNG: Duration = Duration::from_secs(400);

/// Code of a shell that waits for the file `go` in its workspace.
pub const WAITS: &str = "/bin/sh -c 'until test -e go; do sleep 0.05; done'";

/// The user that a daemon runs as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum User {
    /// The tests' own user: root in CI, a person elsewhere.
    Own,
    /// An unprivileged uid if the tests run as root; otherwise the same as `Own`.
    Unprivileged,
}

/// Both users, if they differ.
pub fn users() -> Vec<User> {
    if nix::unistd::geteuid().is_root() { vec![User::Own, User::Unprivileged] } else { vec![User::Own] }
}

/// One host: directories, and a daemon that can be killed and restarted.
pub struct Host {
    dir: tempfile::TempDir,
    bin: PathBuf,
    user: User,
    daemon: Option<Child>,
    environment: Vec<(String, String)>,
}

impl Host {
    /// Starts a daemon.
    pub fn start() -> Host {
        Host::start_as(User::Own)
    }

    /// Starts a daemon as that user.
    pub fn start_as(user: User) -> Host {
        let mut host = Host::prepare(user);
        host.launch();
        host
    }

    /// Starts a daemon without warm workers, whatever the other tests use: for tests that count
    /// processes.
    pub fn without_pool(user: User) -> Host {
        let mut host = Host::prepare(user);
        host.configure(NO_POOL);
        host.launch();
        host
    }

    /// As [`Host::prepare`], with its data on a new file system, which must be dropped after the
    /// host.
    ///
    /// `None`, with a notice, if this host cannot mount such a file system.
    pub fn prepare_on(kind: &str, user: User) -> Option<(Mounted, Host)> {
        let mounted = match Mounted::new(kind) {
            Ok(mounted) => mounted,
            Err(why) => {
                eprintln!("ignored, because this host cannot mount {kind}: {why}");
                return None;
            }
        };
        let data = mounted.path().join("data");
        fs::create_dir(&data).unwrap();
        fs::set_permissions(&data, fs::Permissions::from_mode(0o700)).unwrap();
        if user == User::Unprivileged {
            std::os::unix::fs::chown(&data, Some(UNPRIVILEGED), Some(UNPRIVILEGED)).unwrap();
        }
        let mut host = Host::prepare(user);
        host.env("XDG_DATA_HOME", &data.display().to_string());
        Some((mounted, host))
    }

    /// Makes directories and binaries, but starts nothing.
    pub fn prepare(user: User) -> Host {
        // Short, for socket paths; not below a directory that other users cannot enter.
        let dir = tempfile::Builder::new().prefix("ryk").tempdir_in("/tmp").unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let bin = dir.path().join("bin");
        fs::create_dir(&bin).unwrap();
        for built in [env!("CARGO_BIN_EXE_ryokand"), env!("CARGO_BIN_EXE_ryokan"), env!("CARGO_BIN_EXE_ryokan-worker")]
        {
            let built = Path::new(built);
            // Hard links are fast, but a protected or other file system refuses them.
            let to = bin.join(built.file_name().unwrap());
            let copy = || Command::new("cp").arg(built).arg(&to).status().map(|status| assert!(status.success()));
            // Copied by `cp`: a fork of another test could hold a copy of our own open for writing
            // ("text file busy").
            fs::hard_link(built, &to).or_else(|_| copy()).unwrap();
        }
        for folder in ["run", "config", "data", "state", "home"] {
            let path = dir.path().join(folder);
            fs::create_dir(&path).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
            if user == User::Unprivileged {
                std::os::unix::fs::chown(&path, Some(UNPRIVILEGED), Some(UNPRIVILEGED)).unwrap();
            }
        }
        let host = Host { dir, bin, user, daemon: None, environment: Vec::new() };
        host.configure("");
        host
    }

    /// Sets a variable for daemons started later.
    pub fn env(&mut self, name: &str, value: &str) {
        self.environment.retain(|(n, _)| n != name);
        if !value.is_empty() {
            self.environment.push((name.into(), value.into()));
        }
    }

    /// Writes the configuration, without a pool unless the text configures one.
    ///
    /// Tests count kernels' workers and their starts. `RYOKAN_TEST_POOL` in the environment keeps
    /// the default pool.
    pub fn configure(&self, text: &str) {
        let as_users = text.contains("[pool") || std::env::var_os("RYOKAN_TEST_POOL").is_some();
        let text = if as_users { text.to_owned() } else { format!("{text}\n{NO_POOL}") };
        // Mounts of tests are writable for kernels, for every user of the tests.
        let mapped = format!("[sandbox]\nmap_owner = [{:?}]\n", self.dir.path());
        let text = match text.contains("[sandbox]\n") || text.contains("map_owner") {
            true if text.contains("map_owner") => text,
            true => text.replacen("[sandbox]\n", &mapped, 1),
            false => format!("{text}\n{mapped}"),
        };
        let folder = self.path("config").join("ryokan");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("config.toml"), text).unwrap();
        if self.user == User::Unprivileged {
            for path in [folder.clone(), folder.join("config.toml")] {
                std::os::unix::fs::chown(path, Some(UNPRIVILEGED), Some(UNPRIVILEGED)).unwrap();
            }
        }
    }

    /// A path below this host's directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A new directory of its user with a file `file`, whose content is `of the host`.
    pub fn given(&self, user: User) -> PathBuf {
        let given = self.path("home").join("given");
        fs::create_dir(&given).expect("made");
        fs::write(given.join("file"), "of the host").expect("written");
        if user == User::Unprivileged {
            std::os::unix::fs::chown(&given, Some(UNPRIVILEGED), Some(UNPRIVILEGED)).expect("given");
        }
        given
    }

    /// The daemon's data.
    pub fn data(&self) -> PathBuf {
        let moved = self.environment.iter().find(|(name, _)| name == "XDG_DATA_HOME");
        moved.map_or_else(|| self.path("data"), |(_, at)| at.into()).join("ryokan")
    }

    /// The workspace of the kernel with that id.
    pub fn workspace(&self, id: impl std::fmt::Display) -> PathBuf {
        self.data().join("kernels").join(id.to_string()).join("workspace")
    }

    /// Creates the file for which [`WAITS`] waits in that kernel.
    pub async fn release(&self, kernel: &KernelClient) {
        let id = kernel.info().await.expect("info").id;
        fs::write(self.workspace(id).join("go"), "").expect("written");
    }

    /// The control socket.
    pub fn socket(&self) -> PathBuf {
        self.path("run").join("ryokan/ryokand.sock")
    }

    /// The socket of one kernel.
    pub fn kernel_socket(&self, name: &str) -> PathBuf {
        self.path("run").join(format!("ryokan/kernels/{name}.sock"))
    }

    /// A command with this host's user and directories.
    pub fn command(&self, program: &str) -> Command {
        let program = self.bin.join(program);
        let mut command = if self.user == User::Unprivileged && nix::unistd::geteuid().is_root() {
            let mut command = Command::new("setpriv");
            let id = UNPRIVILEGED.to_string();
            command.args(["--reuid", &id, "--regid", &id, "--clear-groups", "--"]).arg(program);
            command
        } else {
            Command::new(program)
        };
        command
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin")
            .env("HOME", self.path("home"))
            .env("XDG_RUNTIME_DIR", self.path("run"))
            .env("XDG_CONFIG_HOME", self.path("config"))
            .env("XDG_DATA_HOME", self.path("data"))
            .env("XDG_STATE_HOME", self.path("state"))
            .env("RYOKAN_LOG", std::env::var("RYOKAN_LOG").unwrap_or_else(|_| "info".into()))
            .envs(self.environment.iter().map(|(n, v)| (n, v)))
            .current_dir(self.dir.path());
        command
    }

    /// Starts the daemon and waits until it serves.
    pub fn launch(&mut self) {
        self.spawn();
        let deadline = Instant::now() + Duration::from_secs(180);
        loop {
            if let Some(status) = self.daemon.as_mut().and_then(|daemon| daemon.try_wait().unwrap()) {
                panic!("the daemon ended with {status}:\n{}", self.log());
            }
            // By this very daemon: a child of a killed one may hold the old socket for a moment.
            let answers = std::os::unix::net::UnixStream::connect(self.socket()).is_ok_and(|stream| {
                let peer = nix::sys::socket::getsockopt(&stream, nix::sys::socket::sockopt::PeerCredentials);
                peer.is_ok_and(|peer| peer.pid() == self.pid())
            });
            if answers {
                return;
            }
            assert!(Instant::now() < deadline, "the daemon does not serve:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Starts the daemon without waiting.
    pub fn spawn(&mut self) {
        let log = fs::File::options().create(true).append(true).open(self.path("daemon.log")).unwrap();
        let mut command = self.command("ryokand");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.daemon = Some(command.spawn().unwrap());
    }

    /// The daemon's log.
    pub fn log(&self) -> String {
        fs::read_to_string(self.path("daemon.log")).unwrap_or_default()
    }

    /// The daemon's process id.
    pub fn pid(&self) -> i32 {
        self.daemon.as_ref().unwrap().id() as i32
    }

    /// Ends the daemon at once.
    pub fn kill(&mut self) {
        self.signal(nix::sys::signal::Signal::SIGKILL);
        self.wait();
    }

    /// Whether the daemon has ended or ends, for a test that expects it.
    pub fn ends(&self) -> bool {
        self.ends_within(Duration::from_secs(180))
    }

    /// Whether the daemon has ended or ends soon: a killed one takes a moment.
    pub fn ends_soon(&self) -> bool {
        self.ends_within(Duration::from_secs(20))
    }

    fn ends_within(&self, time: Duration) -> bool {
        let deadline = Instant::now() + time;
        while Host::is_alive(self.pid() as u32) {
            if Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        true
    }

    /// Sends the daemon a signal.
    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.pid()), signal).unwrap();
    }

    /// Waits for the daemon's end.
    pub fn wait(&mut self) -> std::process::ExitStatus {
        self.daemon.take().unwrap().wait().unwrap()
    }

    /// Kills the daemon and starts another.
    pub fn restart(&mut self) {
        self.kill();
        self.launch();
    }

    /// Runs the command line, without autostart of a daemon. A hung one is killed and named.
    pub fn cli(&self, args: &[&str]) -> Output {
        let mut command = self.command("ryokan");
        command.arg("--no-autostart").args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let running = command.spawn().unwrap();
        let pid = nix::unistd::Pid::from_raw(running.id().cast_signed());
        let (ended, end) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(move || ended.send(running.wait_with_output()));
            end.recv_timeout(HUNG).unwrap_or_else(|_| {
                let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
                panic!("ryokan {args:?} hung; daemon:\n{}", self.log())
            })
        })
        .unwrap()
    }

    /// Runs the command line, which must succeed; returns its standard output.
    pub fn ok(&self, args: &[&str]) -> String {
        let output = self.cli(args);
        assert!(
            output.status.success(),
            "ryokan {args:?} ended with {}\n{}{}\ndaemon:\n{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
            self.log()
        );
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs `work` with a connected client.
    pub fn with<T>(&self, work: impl AsyncFnOnce(HostClient) -> T) -> T {
        run_local(async {
            let client = HostClient::connect(&self.socket(), "test").await.expect("the daemon answers");
            tokio::time::timeout(3 * HUNG, work(client)).await.expect("the client hung")
        })
        .unwrap()
    }

    /// Whether the process exists and is not a zombie.
    pub fn is_alive(pid: u32) -> bool {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
    }

    /// Every process of this host's workers, found by its binary, without the spawner.
    pub fn workers(&self) -> Vec<u32> {
        self.of_worker_binary().into_iter().filter(|pid| !is_spawner(*pid)).collect()
    }

    /// The spawner, from which workers are forked, if there is one.
    pub fn spawner(&self) -> Option<u32> {
        self.of_worker_binary().into_iter().find(|pid| is_spawner(*pid))
    }

    /// Every process that runs the worker's binary.
    pub fn of_worker_binary(&self) -> Vec<u32> {
        let worker = self.bin.join("ryokan-worker");
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
            if fs::read_link(entry.path().join("exe")).is_ok_and(|exe| exe == worker) && Host::is_alive(pid) {
                found.push(pid);
            }
        }
        found
    }
}

fn is_spawner(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim_end() == "ryokan-spawner")
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            let _ = nix::sys::signal::kill(
                nix::unistd::Pid::from_raw(daemon.id() as i32),
                nix::sys::signal::Signal::SIGTERM,
            );
            let deadline = Instant::now() + Duration::from_secs(20);
            while Instant::now() < deadline && matches!(daemon.try_wait(), Ok(None)) {
                std::thread::sleep(Duration::from_millis(20));
            }
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        for pid in self.of_worker_binary() {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid as i32), nix::sys::signal::Signal::SIGKILL);
        }
    }
}

/// A specification with defaults.
pub fn spec(name: &str, engine: EngineName) -> SpecRequest {
    let mut spec = SpecRequest::new(name.parse().unwrap());
    spec.engine = Some(engine);
    spec
}

/// Creates a kernel.
pub async fn kernel(client: &HostClient, name: &str, engine: EngineName) -> KernelClient {
    client.create_kernel(&spec(name, engine), "").await.expect("the kernel is made").0
}

/// Runs code to its end.
pub async fn run(kernel: &KernelClient, code: &str) -> ExecResult {
    kernel.run(&ExecRequest::code(code)).await.expect("accepted").result().await.expect("a result")
}

/// Runs code to its end and returns its trimmed output.
pub async fn out(kernel: &KernelClient, code: &str) -> String {
    let result = run(kernel, code).await;
    assert!(result.end.code == 0, "{code:?}: {:?}\n{}", result.end, String::from_utf8_lossy(&result.stderr));
    String::from_utf8_lossy(&result.stdout).trim().to_owned()
}

/// Bound of a wait: longer than the product's own deadlines, such as that of a machine's end.
const LATEST: Duration = Duration::from_secs(400);

/// Waits for a condition on a thread without an event loop.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + LATEST;
    while !holds() {
        assert!(Instant::now() < deadline, "timed out waiting for: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits for a condition.
pub async fn eventually<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) {
    let deadline = Instant::now() + LATEST;
    while !holds().await {
        assert!(Instant::now() < deadline, "timed out waiting for: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
