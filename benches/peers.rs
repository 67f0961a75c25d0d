//! Other ways to run code in a box on this machine, driven the way their users drive them.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::report::Samples;
use crate::{World, process};

/// A live ipykernel behind jupyter_client. Between its turns it stands still: its threads wake many times a second.
pub struct Ipykernel {
    child: Child,
    ask: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Ipykernel {
    /// Starts one, warmed up; `None` if this machine has none.
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
            // One that has ended meanwhile needs none.
            let _ = kill(Pid::from_raw(pid as i32), signal);
        }
    }

    /// Executes in the live kernel, so many times one after another.
    pub fn run(&mut self, code: &str, times: usize, into: &mut Samples) -> anyhow::Result<()> {
        self.times(&format!("run {times} {code}"), into)
    }

    /// Starts a fresh kernel, executes once, ends it; the end is not measured.
    pub fn start_fresh(&mut self, code: &str, into: &mut Samples) -> anyhow::Result<()> {
        self.times(&format!("start {code}"), into)
    }
}

impl Drop for Ipykernel {
    fn drop(&mut self) {
        // Its kernel looks whether its parent is there, and goes when it is not.
        self.signal(Signal::SIGCONT);
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One throw-away sandbox by bubblewrap: new namespaces, the host's tree read-only.
pub fn bubblewrap(python: &Path, code: &str) -> anyhow::Result<Duration> {
    let begun = Instant::now();
    let output = Command::new("bwrap")
        .args(["--unshare-all", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"])
        .arg(python)
        .args(["-c", code])
        .output()
        .context("bwrap")?;
    anyhow::ensure!(output.status.success(), "bwrap: {}", String::from_utf8_lossy(&output.stderr));
    Ok(begun.elapsed())
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
