//! Drives one execution from the terminal: output, input and signals.
//!
//! | event | effect on the execution |
//! |---|---|
//! | first Ctrl-C | interrupted; its end is awaited |
//! | second Ctrl-C | its worker is killed if it does not stop; the command line exits and says how to attach |
//! | Ctrl-C, a reader that exits, while attached to a process | continues |
//! | SIGTERM, SIGHUP (not under `nohup`) | continues; a process ends |
//! | the reader of the output exits | interrupted, as in a shell's pipe |
//!
//! The runtime's blocking threads write the output. A slow reader therefore slows the execution, and a blocked reader
//! does not block Ctrl-C.

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
    /// The execution ended. `wrote_stderr`: whether it wrote to stderr.
    Ended { result: Box<ExecResult>, wrote_stderr: bool },
    /// Ctrl-C twice: its end is not awaited.
    Detached(ExecId),
    /// The reader of the output exited; the execution was interrupted.
    ReaderGone,
    /// SIGTERM or SIGHUP, as an exit code: the execution continues.
    Terminated(u8),
    /// Attached to a process that continues; the exit code.
    Left(u8),
}

/// What runs, which decides what Ctrl-C means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Runs {
    /// Code of the engine: it is interrupted.
    Code,
    /// A program that ends with this command: it gets SIGINT.
    Program,
    /// A program that was there before: it continues.
    Attached,
}

/// How output and input are connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Streams {
    /// Whether output is streamed; otherwise it is in the result.
    pub show: bool,
    /// The byte of the output, both streams together, at which showing begins.
    pub offset: u64,
    /// Whether standard input is passed to the code.
    pub feed_stdin: bool,
    /// What runs.
    pub runs: Runs,
    /// Message on stderr after the first Ctrl-C.
    pub explain: Option<&'static str>,
}

/// The signals that are handled during an execution.
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
    /// `None` if SIGHUP is ignored (`nohup`).
    hang_up: Option<Signal>,
}

impl Signals {
    /// Replaces the signals' default of ending the process.
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

    /// Waits for a signal and returns its exit code.
    pub async fn any(&mut self) -> u8 {
        tokio::select! {
            _ = self.interrupt.recv() => exit::INTERRUPTED,
            _ = self.terminate.recv() => exit::TERMINATED,
            Some(_) = async { self.hang_up.as_mut()?.recv().await }, if self.hang_up.is_some() => exit::HUNG_UP,
        }
    }
}

/// Drives `execution` of `kernel` until it ends or the command line must.
pub async fn drive(
    kernel: &KernelClient,
    execution: &ExecutionClient,
    streams: Streams,
    signals: &mut Signals,
) -> Result<Driven, Failure> {
    let begun = Instant::now();
    tracing::info!(exec = %execution.exec(), "execution begun");
    let reader_gone = Cell::new(false);
    let output = Shown::default();
    let mut deliver = std::pin::pin!(async {
        // Requested before any input is sent: calls queue behind unread input.
        let result = execution.result();
        if !streams.show {
            return result.await;
        }
        let output = execution.output(streams.offset, async |event| {
            show(event, &output).await.map_err(|error| {
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
                if streams.runs == Runs::Attached {
                    return Ok(Driven::Left(code));
                }
                interrupts += 1;
                if interrupts > 1 {
                    return Ok(Driven::Detached(execution.exec()));
                }
                if let Some(explanation) = streams.explain {
                    say(explanation);
                }
                interrupt(kernel, execution.exec(), streams.runs);
            }
        }
    };
    match delivered {
        Ok(result) => {
            let (exec, status, code) = (result.exec, result.end.status.name(), result.end.code);
            let (ran, took) = (Duration::from_micros(result.end.duration_us), begun.elapsed());
            tracing::info!(%exec, status, code, ?ran, ?took, "execution ended");
            Ok(Driven::Ended { result: Box::new(result), wrote_stderr: output.wrote_stderr.get() })
        }
        Err(_) if reader_gone.get() && streams.runs == Runs::Attached => Ok(Driven::Left(exit::READER_GONE)),
        Err(_) if reader_gone.get() => {
            // An execution that has just ended needs no interruption.
            let _ = kernel.interrupt_execution(execution.exec()).await;
            Ok(Driven::ReaderGone)
        }
        Err(error) => Err(error.into()),
    }
}

/// Interrupts without waiting, because output must be read meanwhile.
fn interrupt(kernel: &KernelClient, exec: ExecId, runs: Runs) {
    let kernel = kernel.clone();
    tokio::task::spawn_local(async move {
        let interrupted = match runs {
            Runs::Program => kernel.signal_process(exec, nix::sys::signal::Signal::SIGINT as i32).await,
            Runs::Code | Runs::Attached => kernel.interrupt_execution(exec).await.map(drop),
        };
        if let Err(error) = interrupted {
            say(&format!("could not interrupt execution {exec}: {error}"));
        }
    });
}

/// Reason of an error for output that cannot be written; the execution continues.
pub const UNWRITTEN: &str = "output";

fn not_written(error: &io::Error) -> Error {
    Error::internal(format!("could not write the output: {error}")).reason(UNWRITTEN)
}

/// The output shown so far.
#[derive(Default)]
struct Shown {
    wrote_stderr: Cell<bool>,
    /// Whether its last line is unfinished.
    is_in_line: Cell<bool>,
}

impl Shown {
    fn add(&self, bytes: &[u8]) {
        if let Some(last) = bytes.last() {
            self.is_in_line.set(*last != b'\n');
        }
    }
}

async fn show(event: OutputEvent, shown: &Shown) -> io::Result<()> {
    match event {
        OutputEvent::Stdout(bytes) => {
            shown.add(&bytes);
            write(tokio::io::stdout(), &bytes).await
        }
        OutputEvent::Stderr(bytes) => {
            shown.add(&bytes);
            shown.wrote_stderr.set(shown.wrote_stderr.get() || !bytes.is_empty());
            write(tokio::io::stderr(), &bytes).await
        }
        OutputEvent::Truncated(bytes) => {
            let line_end = if shown.is_in_line.replace(false) { "\n" } else { "" };
            say(&format!("{line_end}note: {bytes} bytes of output were dropped"));
            Ok(())
        }
        // Engines also print these as text; the structured forms are for `--json` and other front ends.
        OutputEvent::Structured(_) | OutputEvent::Display { .. } => Ok(()),
        OutputEvent::ExitCode(_) => Ok(()),
    }
}

async fn write(mut to: impl AsyncWrite + Unpin, bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes).await?;
    to.flush().await
}

/// Passes standard input on until its end. Code that ends or closes its input first is no failure.
pub async fn feed_stdin(execution: &ExecutionClient) {
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
