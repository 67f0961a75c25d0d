//! The daemon under test, with its own directories, sockets and processes.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use ryokan::core::engine::EngineName;
use ryokan::core::exec::{ExecRequest, ExecResult};
use ryokan::core::info::Event;
use ryokan::core::name::KernelName;
use ryokan::rpc::client::{HostClient, KernelClient};
use ryokan::rpc::convert::spec::SpecRequest;
use ryokan::session::Session as _;

use crate::World;

/// Deadline for an answer of the daemon; generous, for a busy machine.
const ANSWER: Duration = Duration::from_secs(60);

/// A running daemon. Its drop ends the daemon and its workers and removes the directories.
pub struct Daemon {
    program: PathBuf,
    root: PathBuf,
    /// In memory, as a user's runtime directory is.
    run: tempfile::TempDir,
    child: Option<Child>,
}

impl Daemon {
    /// Starts a daemon with directories of its own and waits until it answers.
    pub fn start(world: &World) -> anyhow::Result<Daemon> {
        Daemon::start_with(world, "")
    }

    /// The same with more settings.
    pub fn start_with(world: &World, more: &str) -> anyhow::Result<Daemon> {
        Daemon::start_at(world, "warn", more)
    }

    /// The same with another level of its log.
    pub fn start_at(world: &World, level: &str, more: &str) -> anyhow::Result<Daemon> {
        let base = std::env::var_os("RYOKAN_BENCH_DIR").map_or_else(|| PathBuf::from("/tmp"), PathBuf::from);
        Daemon::place(world, &base, level, more)
    }

    /// The same with its directories in this one.
    pub fn start_in(world: &World, base: &Path, more: &str) -> anyhow::Result<Daemon> {
        Daemon::place(world, base, "warn", more)
    }

    fn place(world: &World, base: &Path, level: &str, more: &str) -> anyhow::Result<Daemon> {
        // Short: socket paths have 108 bytes.
        let root = tempfile::Builder::new().prefix("rb").tempdir_in(base)?.keep();
        for folder in ["data", "config/ryokan"] {
            std::fs::create_dir_all(root.join(folder))?;
        }
        let memory = Path::new("/dev/shm");
        let run = tempfile::Builder::new().prefix("rb").tempdir_in(if memory.is_dir() { memory } else { &root })?;
        set_private(run.path())?;
        let config = format!(
            "[engines.python]\ncommand = {:?}\n[daemon]\norphan_grace = \"1m\"\nlog_level = {level:?}\n{more}",
            world.python.display().to_string()
        );
        std::fs::write(root.join("config/ryokan/config.toml"), config)?;
        let mut daemon = Daemon { program: world.daemon.clone(), root, run, child: None };
        daemon.start_again()?;
        Ok(daemon)
    }

    /// Starts the daemon on the existing directories; returns the time until it answered.
    pub fn start_again(&mut self) -> anyhow::Result<Duration> {
        let log = std::fs::File::options().create(true).append(true).open(self.log())?;
        let begun = Instant::now();
        let mut command = Command::new(&self.program);
        self.places(&mut command);
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = ryokan::sys::process::unblocked(&mut command).spawn().context("ryokand")?;
        self.child = Some(child);
        let socket = self.socket();
        ryokan::rpc::client::run_local(async {
            loop {
                match HostClient::connect(&socket, "bench").await {
                    Ok(_) => return Ok(begun.elapsed()),
                    Err(error) if begun.elapsed() > ANSWER => {
                        let log = std::fs::read_to_string(self.log()).unwrap_or_default();
                        anyhow::bail!("the daemon does not answer: {error}; its log:\n{log}");
                    }
                    Err(_) => tokio::time::sleep(Duration::from_millis(1)).await,
                }
            }
        })?
    }

    fn log(&self) -> PathBuf {
        self.root.join("log")
    }

    /// The control socket.
    pub fn socket(&self) -> PathBuf {
        self.run.path().join("ryokan/ryokand.sock")
    }

    /// The data directory.
    pub fn data(&self) -> PathBuf {
        self.root.join("data/ryokan")
    }

    /// The command line, with this daemon.
    pub fn cli(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.program.with_file_name("ryokan"));
        command.args(arguments);
        self.places(&mut command);
        command
    }

    fn places(&self, command: &mut Command) {
        command.env("XDG_RUNTIME_DIR", self.run.path());
        for (variable, folder) in [("XDG_DATA_HOME", "data"), ("XDG_CONFIG_HOME", "config")] {
            command.env(variable, self.root.join(folder));
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }

    /// Ends the daemon with a signal and waits. `SIGHUP` leaves its workers to the next daemon,
    /// `SIGINT` ends them too.
    pub fn end(&mut self, signal: Signal) -> anyhow::Result<Duration> {
        let begun = Instant::now();
        if let Some(mut child) = self.child.take() {
            kill(Pid::from_raw(child.id() as i32), signal)?;
            child.wait()?;
        }
        Ok(begun.elapsed())
    }

    /// Runs `work` with a connection of its own.
    pub fn with<T>(&self, work: impl AsyncFnOnce(HostClient) -> anyhow::Result<T>) -> anyhow::Result<T> {
        let socket = self.socket();
        ryokan::rpc::client::run_local(async {
            let host = HostClient::connect(&socket, "bench").await?;
            work(host).await
        })?
    }

    /// The log so far.
    pub fn log_text(&self) -> String {
        std::fs::read_to_string(self.log()).unwrap_or_default()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let log = self.log_text();
        if !log.is_empty() {
            let most = log.lines().count().saturating_sub(20);
            eprintln!("  the daemon logged:");
            log.lines().skip(most).for_each(|line| eprintln!("    {line}"));
        }
        if let Err(error) = self.end(Signal::SIGINT) {
            eprintln!("  the daemon did not end: {error}");
        }
        let _ = std::fs::remove_dir_all(&self.root);
    }
}

fn set_private(folder: &Path) -> std::io::Result<()> {
    std::fs::set_permissions(folder, std::os::unix::fs::PermissionsExt::from_mode(0o700))
}

/// A new kernel with the daemon's defaults.
pub async fn create(host: &HostClient, name: &str, engine: EngineName) -> anyhow::Result<KernelClient> {
    let mut spec = SpecRequest::new(name.parse::<KernelName>()?);
    spec.engine = Some(engine);
    Ok(host.create_kernel(&spec, "").await?.0)
}

/// Runs code that must end well.
pub async fn run(kernel: &KernelClient, code: &str) -> anyhow::Result<ExecResult> {
    let result = kernel.execute(ExecRequest::code(code)).await?;
    anyhow::ensure!(result.end.code == 0, "{code:?} ended with {}: {}", result.end.code, result.end.err);
    Ok(result)
}

/// The process of a kernel's worker, from its event.
pub async fn worker_pid(host: &HostClient, name: &str) -> anyhow::Result<u32> {
    let found = workers(host, |found| found.contains_key(name)).await?;
    found.get(name).copied().context("no event names the worker")
}

/// The process of a kernel's newest worker, from its events.
pub async fn newest_worker_pid(host: &HostClient, name: &str) -> anyhow::Result<u32> {
    let (mut events, mut newest) = (host.events(0).await?, None);
    while let Some(event) = events.next_past().await? {
        newest = pid_in(&event)?.filter(|_| event.kernel == name).or(newest);
    }
    newest.context("no event names the worker")
}

/// The worker's process in an event of its start.
fn pid_in(event: &Event) -> anyhow::Result<Option<u32>> {
    if !matches!(&*event.kind, "kernel_ready" | "kernel_adopted") {
        return Ok(None);
    }
    let detail: serde_json::Value = serde_json::from_str(&event.detail_json)?;
    Ok(detail["worker_pid"].as_u64().map(u32::try_from).transpose()?)
}

/// The processes of several kernels' workers, from their events.
pub async fn worker_pids(host: &HostClient, kernels: usize) -> anyhow::Result<HashMap<String, u32>> {
    workers(host, |found| found.len() == kernels).await
}

async fn workers(
    host: &HostClient,
    are_all: impl Fn(&HashMap<String, u32>) -> bool,
) -> anyhow::Result<HashMap<String, u32>> {
    let mut events = host.events(0).await?;
    let mut found = HashMap::new();
    let all = tokio::time::timeout(ANSWER, async {
        while !are_all(&found) {
            let event = events.next().await?;
            if let Some(pid) = pid_in(&event)? {
                found.insert(event.kernel, pid);
            }
        }
        Ok::<_, anyhow::Error>(())
    });
    all.await.context("no event names a worker")??;
    Ok(found)
}
