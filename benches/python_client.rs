//! The Python package beside the Rust client: the same calls to the same kernel, in turns.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use anyhow::Context as _;
use ryokan::core::engine::EngineName;
use ryokan::core::exec::{ExecRequest, Program, Work};
use ryokan::core::files::FileAttributes;
use ryokan::core::spec::WORKSPACE;
use ryokan::rpc::client::{FilesClient, KernelClient};
use ryokan::session::Session as _;

use crate::daemon::{create, run};
use crate::report::{Report, Samples};
use crate::{Daemon, World, go_on};

/// Rounds. In each, every client runs one block of each call, so that other load affects all alike.
const ROUNDS: usize = 8;

/// Calls, as the peer names them, and their names in the table.
const CALLS: [(&str, &str); 4] =
    [("run", "run_code `1+1`"), ("write", "write of 1 KiB"), ("read", "read of 1 KiB"), ("program", "program by argv")];

/// Faces of the Python package.
const FACES: [(&str, &str); 2] = [("sync", "Python client"), ("aio", "Python client, asyncio")];

/// The program that uses the Python package. It ends with its input.
struct Peer {
    child: Child,
    ask: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Peer {
    fn start(python: &Path, socket: &Path, kernel: &str) -> anyhow::Result<Peer> {
        let root = env!("CARGO_MANIFEST_DIR");
        let mut command = Command::new(python);
        command.arg(format!("{root}/benches/python_client_peer.py")).arg(socket).arg(kernel);
        command.env("PYTHONPATH", format!("{root}/clients/python/src")).env("PYTHONDONTWRITEBYTECODE", "1");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child =
            ryokan::sys::process::unblocked(&mut command).spawn().with_context(|| python.display().to_string())?;
        let ask = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().context("its output")?);
        let mut peer = Peer { child, ask, answers };
        let ready = peer.line()?;
        anyhow::ensure!(ready.trim() == "ready", "the Python client said {ready:?}");
        Ok(peer)
    }

    fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.answers.read_line(&mut line)?;
        anyhow::ensure!(!line.is_empty(), "the Python client ended");
        Ok(line)
    }

    fn several(&mut self, face: &str, call: &str, times: usize, into: &mut Samples) -> anyhow::Result<()> {
        writeln!(self.ask.as_ref().context("its input")?, "{face} {call} {times}")?;
        let times: Vec<f64> = serde_json::from_str(&self.line()?)?;
        times.into_iter().for_each(|ms| into.add_ms(ms));
        Ok(())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.ask = None;
        let _ = self.child.wait();
    }
}

/// Latency of the same calls by the clients in Rust and in Python.
pub fn python_client(world: &World, report: &mut Report) -> anyhow::Result<()> {
    let Some(python) = &world.python_client else {
        report.failed("no interpreter with pycapnp: scripts/bench installs one, and names it with --python-client");
        return Ok(());
    };
    let daemon = Daemon::start(world)?;
    let each = world.times(1000, 160) / ROUNDS;
    let mut rust: [Samples; CALLS.len()] = Default::default();
    let mut peers: [[Samples; CALLS.len()]; FACES.len()] = Default::default();
    daemon.with(async |host| {
        let kernel = create(&host, "measured", EngineName::Python).await?;
        for _ in 0..100 {
            run(&kernel, "1+1").await?;
        }
        let files = kernel.files().await?;
        let mut peer = Peer::start(python, &daemon.socket(), "measured")?;
        for round in 0..=ROUNDS {
            for (at, (call, _)) in CALLS.iter().enumerate() {
                go_on()?;
                let mut samples = Samples::default();
                several(&kernel, &files, call, each, &mut samples).await?;
                let mut of_peers: [Samples; FACES.len()] = Default::default();
                for ((face, _), samples) in FACES.iter().zip(&mut of_peers) {
                    peer.several(face, call, each, samples)?;
                }
                // The first round warms all of them.
                if round > 0 {
                    rust[at].append(samples);
                    for (all, samples) in peers.iter_mut().zip(of_peers) {
                        all[at].append(samples);
                    }
                }
            }
        }
        Ok(())
    })?;
    for (at, (_, what)) in CALLS.iter().enumerate() {
        report.times(&format!("{what}: Rust client"), &rust[at], None);
        for ((_, face), samples) in FACES.iter().zip(&peers) {
            report.times(&format!("{what}: {face}"), &samples[at], None);
            report.figure(&format!("  ÷ Rust client ({face})"), samples[at].p50() / rust[at].p50(), "×", None);
        }
    }
    Ok(())
}

async fn several(
    kernel: &KernelClient,
    files: &FilesClient,
    call: &str,
    times: usize,
    into: &mut Samples,
) -> anyhow::Result<()> {
    let content: Vec<u8> = (0..1024_u32).map(|at| at as u8).collect();
    let program = Program { argv: vec!["/bin/true".into()], cwd: WORKSPACE.into(), detached: false, terminal: None };
    let request = ExecRequest { what: Work::Process(program), ..ExecRequest::default() };
    for _ in 0..times {
        let begun = Instant::now();
        match call {
            "run" => {
                let result = kernel.execute(ExecRequest::code("1+1")).await?;
                into.add(begun.elapsed());
                anyhow::ensure!(result.end.code == 0, "{}", result.end.err);
            }
            "write" => {
                let mut upload = files.create(b"file", FileAttributes::default()).await?;
                upload.write(&content).await?;
                upload.finish().await?;
                into.add(begun.elapsed());
            }
            "read" => {
                let (mut download, mut came) = (files.open(b"file").await?, Vec::new());
                while let Some(part) = download.next().await? {
                    came.extend_from_slice(&part);
                }
                into.add(begun.elapsed());
                anyhow::ensure!(came == content, "{} bytes came", came.len());
            }
            _ => {
                let process = kernel.spawn(&request).await?;
                let result = process.execution.result().await?;
                into.add(begun.elapsed());
                anyhow::ensure!(result.end.code == 0, "{}", result.end.err);
            }
        }
    }
    Ok(())
}
