//! Driving one execution from the terminal: its output to the right descriptors, its input from ours, and signals.
//!
//! | what happens to the command line | what happens to the execution |
//! |---|---|
//! | first Ctrl-C | interrupted; its end is awaited |
//! | second Ctrl-C | its worker is ended if it does not react; the command line leaves and says how to find it |
//! | SIGTERM, SIGHUP (not under `nohup`) | goes on |
//! | whoever reads the output leaves | interrupted, as in a pipe of the shell |
//!
//! Output is written from the runtime's blocking threads, so a reader that is slow slows the execution, and a reader
//! that stands still does not keep Ctrl-C from working.

use std::cell::Cell;
use std::io;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::exit;
use super::failure::Failure;
use crate::core::error::{Error, Result};
use crate::core::exec::{ExecResult, OutputEvent};
use crate::core::ids::ExecId;
use crate::rpc::client::{ExecutionClient, KernelClient};
use crate::sys::process;

/// Bytes of standard input read at once.
const STDIN_BYTES: usize = 64 << 10;

/// How driving ended.
#[derive(Debug)]
pub enum Driven {
    /// The execution is over. `wrote_stderr` says whether it wrote anything to stderr meanwhile.
    Ended { result: Box<ExecResult>, wrote_stderr: bool },
    /// Ctrl-C twice: its end is not waited for.
    Detached(ExecId),
    /// Nobody reads the output any more; the execution was interrupted.
    ReaderGone,
    /// SIGTERM or SIGHUP: the execution goes on. The exit code for it.
    Terminated(u8),
}

/// What becomes of output and input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Streams {
    /// Whether output is shown as it comes; if not, it is in the result.
    pub show: bool,
    /// Whether our standard input is the code's.
    pub feed_stdin: bool,
    /// What to say on stderr after a first Ctrl-C.
    pub explain: Option<&'static str>,
}

/// The signals that a command line answers while something runs.
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
    /// None for who was told to go on without a terminal (`nohup`).
    hang_up: Option<Signal>,
}

impl Signals {
    /// Takes the signals over from their default of ending the process.
    pub fn catch() -> Result<Signals> {
        let catch = |kind| signal(kind).map_err(|e| Error::internal(format!("could not listen for signals: {e}")));
        Ok(Signals {
            interrupt: catch(SignalKind::interrupt())?,
            terminate: catch(SignalKind::terminate())?,
            hang_up: match process::ignores(nix::sys::signal::Signal::SIGHUP) {
                true => None,
                false => Some(catch(SignalKind::hangup())?),
            },
        })
    }

    /// Waits for any of them; gives the exit code that it stands for.
    pub async fn any(&mut self) -> u8 {
        tokio::select! {
            _ = self.interrupt.recv() => exit::INTERRUPTED,
            _ = self.terminate.recv() => exit::TERMINATED,
            Some(_) = async { self.hang_up.as_mut()?.recv().await }, if self.hang_up.is_some() => exit::HUNG_UP,
        }
    }
}

/// Drives `execution` of `kernel` to its end, or to the command line's.
pub async fn drive(
    kernel: &KernelClient,
    execution: &ExecutionClient,
    streams: Streams,
    signals: &mut Signals,
) -> Result<Driven, Failure> {
    let begun = Instant::now();
    tracing::info!(exec = %execution.exec(), "execution begun");
    let reader_gone = Cell::new(false);
    let wrote_stderr = Cell::new(false);
    let mut deliver = std::pin::pin!(async {
        // Asked for before any input is fed: calls wait behind input that the code has not read.
        let result = execution.result();
        if !streams.show {
            return result.await;
        }
        let output = execution.output(0, async |event| {
            show(event, &wrote_stderr).await.map_err(|error| {
                reader_gone.set(error.kind() == io::ErrorKind::BrokenPipe);
                not_written(&error)
            })
        });
        futures::future::try_join(output, result).await.map(|((), result)| result)
    });
    let mut feed = std::pin::pin!(async {
        if streams.feed_stdin {
            feed_stdin(execution).await;
        }
        std::future::pending::<()>().await
    });
    let mut interrupts = 0;
    let delivered = loop {
        tokio::select! {
            delivered = &mut deliver => break delivered,
            () = &mut feed => {}
            code = signals.any() => {
                if code != exit::INTERRUPTED {
                    return Ok(Driven::Terminated(code));
                }
                interrupts += 1;
                if interrupts > 1 {
                    return Ok(Driven::Detached(execution.exec()));
                }
                if let Some(explanation) = streams.explain {
                    say(explanation);
                }
                interrupt(kernel, execution.exec());
            }
        }
    };
    match delivered {
        Ok(result) => {
            let (exec, status, code) = (result.exec, result.end.status.name(), result.end.code);
            let (ran, took) = (Duration::from_micros(result.end.duration_us), begun.elapsed());
            tracing::info!(%exec, status, code, ?ran, ?took, "execution ended");
            Ok(Driven::Ended { result: Box::new(result), wrote_stderr: wrote_stderr.get() })
        }
        Err(_) if reader_gone.get() => {
            // An execution that has just ended needs no interruption.
            let _ = kernel.interrupt_execution(execution.exec()).await;
            Ok(Driven::ReaderGone)
        }
        Err(error) => Err(error.into()),
    }
}

/// Asks for the interruption without waiting for it: the output that still comes must be taken meanwhile.
fn interrupt(kernel: &KernelClient, exec: ExecId) {
    let kernel = kernel.clone();
    tokio::task::spawn_local(async move {
        if let Err(error) = kernel.interrupt_execution(exec).await {
            say(&format!("could not interrupt execution {exec}: {error}"));
        }
    });
}

/// The reason of an error that says that the output of an execution cannot be written. Nobody has told that to end.
pub const UNWRITTEN: &str = "output";

fn not_written(error: &io::Error) -> Error {
    Error::internal(format!("could not write the output: {error}")).reason(UNWRITTEN)
}

async fn show(event: OutputEvent, wrote_stderr: &Cell<bool>) -> io::Result<()> {
    match event {
        OutputEvent::Stdout(bytes) => write(tokio::io::stdout(), &bytes).await,
        OutputEvent::Stderr(bytes) => {
            wrote_stderr.set(wrote_stderr.get() || !bytes.is_empty());
            write(tokio::io::stderr(), &bytes).await
        }
        OutputEvent::Truncated(bytes) => {
            say(&format!("note: {bytes} bytes of output are no longer there"));
            Ok(())
        }
        // The engines say the same as text; these forms are for `--json` and for other front ends.
        OutputEvent::Structured(_) | OutputEvent::Display { .. } => Ok(()),
        OutputEvent::ExitCode(_) => Ok(()),
    }
}

async fn write(mut to: impl AsyncWrite + Unpin, bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes).await?;
    to.flush().await
}

/// Passes our standard input on until its end. Code that ends or closes its input first is not a failure of ours.
async fn feed_stdin(execution: &ExecutionClient) {
    let mut stdin = tokio::io::stdin();
    let mut chunk = vec![0; STDIN_BYTES];
    loop {
        match stdin.read(&mut chunk).await {
            Ok(0) => break,
            Ok(read) => {
                if execution.stdin(&chunk[..read]).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                say(&format!("could not read standard input: {error}"));
                break;
            }
        }
    }
    let _ = execution.close_stdin().await;
}

fn say(text: &str) {
    use io::Write;
    let _ = writeln!(io::stderr(), "{text}");
}
