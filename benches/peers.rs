//! Other ways to run code in a sandbox on this machine, driven as their users drive them.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::report::Samples;
use crate::{World, process};

/// A live ipykernel behind jupyter_client.
///
/// It is stopped between measurements, because its threads wake many times a second.
pub struct Ipykernel {
    child: Child,
    ask: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Ipykernel {
    /// Starts a warmed-up ipykernel; `None` if it is not installed.
    pub fn start(world: &World) -> anyhow::Result<Option<Ipykernel>> {
        let Some(python) = &world.ipykernel else { return Ok(None) };
        let mut command = Command::new(python);
        command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/benches/ipykernel_peer.py"));
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child =
            ryokan::sys::process::unblocked(&mut command).spawn().with_context(|| python.display().to_string())?;
        let ask = child.stdin.take().context("its input")?;
        let answers = BufReader::new(child.stdout.take().context("its output")?);
        let mut peer = Ipykernel { child, ask, answers };
        let ready = peer.line()?;
        anyhow::ensure!(ready.trim() == "ready", "ipykernel said {ready:?}");
        peer.signal(Signal::SIGSTOP);
        Ok(Some(peer))
    }

    fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        anyhow::ensure!(!line.is_empty(), "ipykernel's driver ended");
        Ok(line)
    }

    fn times(&mut self, ask: &str, into: &mut Samples) -> anyhow::Result<()> {
        self.signal(Signal::SIGCONT);
        writeln!(self.ask, "{ask}")?;
        let times: Vec<f64> = serde_json::from_str(&self.line()?)?;
        self.signal(Signal::SIGSTOP);
        times.into_iter().for_each(|ms| into.add_ms(ms));
        Ok(())
    }

    fn signal(&self, signal: Signal) {
        for pid in process::tree(self.child.id()) {
            // A process that has ended meanwhile needs no signal.
            let _ = kill(Pid::from_raw(pid as i32), signal);
        }
    }

    /// Executes code in the live kernel the given number of times, one after another.
    pub fn run(&mut self, code: &str, times: usize, into: &mut Samples) -> anyhow::Result<()> {
        self.times(&format!("run {times} {code}"), into)
    }

    /// Starts a fresh kernel, executes code once, ends it. The end is not measured.
    pub fn start_fresh(&mut self, code: &str, into: &mut Samples) -> anyhow::Result<()> {
        self.times(&format!("start {code}"), into)
    }
}

impl Drop for Ipykernel {
    fn drop(&mut self) {
        // Its kernel polls for its parent and ends without it.
        self.signal(Signal::SIGCONT);
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One ephemeral sandbox by bubblewrap: new namespaces, the host's tree read-only.
pub fn bubblewrap(program: &Path, arguments: &[&str]) -> anyhow::Result<Duration> {
    let mut command = Command::new("bwrap");
    command.args(["--unshare-all", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]);
    time_of(command.arg(program).args(arguments))
}

/// A sandbox by unshare(1) that stays, into which nsenter(1) starts programs.
pub struct StandingSandbox {
    unshare: Child,
    inside: u32,
}

impl StandingSandbox {
    /// # Errors
    /// If the programs of util-linux are missing, or unprivileged user namespaces.
    pub fn start() -> anyhow::Result<StandingSandbox> {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts"]);
        command.args(["--fork", "--kill-child", "sleep", "infinity"]).stdin(Stdio::null());
        let unshare = ryokan::sys::process::unblocked(&mut command).spawn().context("unshare")?;
        let mut sandbox = StandingSandbox { unshare, inside: 0 };
        for _ in 0..200 {
            // The second process of the tree.
            if let Some(inside) = process::tree(sandbox.unshare.id()).into_iter().find(|p| *p != sandbox.unshare.id()) {
                sandbox.inside = inside;
                return Ok(sandbox);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        anyhow::bail!("unshare started nothing")
    }

    /// Starts a program in it, and waits for its end.
    pub fn enter(&self, program: &Path) -> anyhow::Result<Duration> {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.inside.to_string(), "--user", "--mount", "--pid", "--net", "--ipc", "--uts"]);
        time_of(command.arg("--preserve-credentials").arg(program))
    }
}

impl Drop for StandingSandbox {
    fn drop(&mut self) {
        let _ = self.unshare.kill();
        let _ = self.unshare.wait();
    }
}

/// Runs code in a fresh kaish of this process and ends it, as kaish's own command line does,
/// without ryokan.
pub fn run_kaish(code: &str) -> anyhow::Result<i32> {
    use std::io::Write as _;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(async {
        let kernel = kaish_kernel::Kernel::transient()?;
        Ok::<_, anyhow::Error>(kernel.execute(code).await?)
    })?;
    let mut stdout = std::io::stdout();
    stdout.write_all(result.text_out().as_bytes())?;
    stdout.flush()?;
    Ok(i32::try_from(result.code).unwrap_or(1))
}

/// A program without a sandbox: the cost of starting a process.
pub fn run_alone(program: &Path, arguments: &[&str]) -> anyhow::Result<Duration> {
    time_of(Command::new(program).args(arguments))
}

/// Runs a program to its end and reads its output.
fn time_of(command: &mut Command) -> anyhow::Result<Duration> {
    let begun = Instant::now();
    let output = command.output().with_context(|| format!("{}", command.get_program().display()))?;
    let took = begun.elapsed();
    anyhow::ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(took)
}

/// runc with a bundle that contains the host's programs, read-only.
pub struct Runc {
    bundle: tempfile::TempDir,
    /// Number of containers so far.
    count: std::cell::Cell<u32>,
}

impl Runc {
    /// Makes the bundle; `None` if runc is not installed or may not be used.
    pub fn prepare() -> anyhow::Result<Option<Runc>> {
        let is_there = Command::new("runc").arg("--version").output().is_ok_and(|output| output.status.success());
        if !is_there || !nix::unistd::geteuid().is_root() {
            return Ok(None);
        }
        let runc = Runc { bundle: tempfile::tempdir()?, count: Default::default() };
        let root = runc.bundle.path().join("rootfs");
        std::fs::create_dir_all(root.join("usr"))?;
        for name in ["bin", "lib", "lib64"] {
            std::os::unix::fs::symlink(Path::new("usr").join(name), root.join(name))?;
        }
        // runc's defaults for a new container: all namespaces except the user namespace, default
        // capabilities and mounts.
        anyhow::ensure!(Command::new("runc").arg("spec").current_dir(&runc.bundle).status()?.success(), "runc spec");
        Ok(Some(runc))
    }

    /// Creates a container, runs a program in it, and removes it.
    pub fn run(&self, arguments: &[&str]) -> anyhow::Result<Duration> {
        let path = self.bundle.path().join("config.json");
        let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path)?)?;
        (config["process"]["terminal"], config["process"]["args"]) = (false.into(), arguments.into());
        let mounts = config["mounts"].as_array_mut().context("runc's mounts")?;
        if mounts.iter().all(|mount| mount["destination"] != "/usr") {
            mounts.push(serde_json::json!({
                "destination": "/usr", "source": "/usr", "type": "bind", "options": ["rbind", "ro"],
            }));
        }
        std::fs::write(&path, config.to_string())?;
        self.count.set(self.count.get() + 1);
        let name = format!("ryokan-bench-{}-{}", std::process::id(), self.count.get());
        time_of(Command::new("runc").args(["run", "--bundle"]).arg(self.bundle.path()).arg(name))
    }
}

/// Bytes per second that a program writes into a plain pipe.
pub fn pipe_throughput(program: &Path, arguments: &[&str]) -> anyhow::Result<(u64, Duration)> {
    use std::io::Read as _;
    let begun = Instant::now();
    let mut child = Command::new(program).args(arguments).stdout(Stdio::piped()).spawn()?;
    let mut pipe = child.stdout.take().context("its output")?;
    let mut buffer = vec![0; 1 << 20];
    let mut total = 0;
    loop {
        match pipe.read(&mut buffer)? {
            0 => break,
            read => total += read as u64,
        }
    }
    child.wait()?;
    Ok((total, begun.elapsed()))
}
