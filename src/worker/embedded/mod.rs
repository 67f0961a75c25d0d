//! The library's embedded mode: a kernel in this process, the kaish engine on a thread, without a
//! sandbox.
//!
//! For tests and for programs that trust their code. The engine thread follows the engine contract
//! over a socket pair and two pipes, exactly as in a worker. Output is read only as fast as the
//! sink takes it.

mod peer;
mod session;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::{Duration, Instant};

use serde_json::Value as Json;
use tokio::net::unix::pipe::Receiver;
use tokio::sync::{Mutex, oneshot};

use self::peer::Peer;
use super::engines::kaish::Setup;
use crate::core::error::{Error, Result};
use crate::core::exec::{
    CODE_TIMEOUT, ExecEnd, ExecRequest, ExecResult, ExecStatus, OutputEvent, RequestError, Stream, Tail, Work,
    streams_of,
};
use crate::core::ids::{Digest, ExecId};
use crate::core::limits;
use crate::core::value::Value;
use crate::link::frames::{EndStatus, Event, Reply, Request};
use crate::session::OutputSink;

/// A kernel in this process. Belongs to one thread and its tokio runtime; the engine has its own
/// thread.
pub struct EmbeddedKernel {
    peer: Rc<Peer>,
    /// The contract allows one request at a time.
    turn: Mutex<Pipes>,
    next_exec: Cell<u64>,
    /// Executions that run or wait; `true` once an interrupt was requested.
    executions: RefCell<BTreeMap<ExecId, bool>>,
    blobs: RefCell<HashMap<Digest, Vec<u8>>>,
    /// A running execution whose caller has dropped its future.
    abandoned: Cell<Option<ExecId>>,
}

/// Read ends of the output pipes.
struct Pipes {
    stdout: Receiver,
    stderr: Receiver,
}

impl From<RequestError> for Error {
    fn from(error: RequestError) -> Self {
        Error::invalid(error.to_string())
    }
}

fn gone() -> Error {
    Error::lost("the engine has ended").hint("make a new kernel and restore its last snapshot")
}

impl EmbeddedKernel {
    /// Starts a kernel whose working directory is `cwd`. Needs a tokio runtime around it.
    ///
    /// # Errors
    /// `Unavailable` if the engine does not start.
    pub async fn start(cwd: impl Into<PathBuf>) -> Result<Self> {
        let cwd = cwd.into();
        let home = cwd.to_string_lossy().into_owned();
        let path = std::env::var("PATH").unwrap_or_else(|_| "/usr/local/bin:/usr/bin:/bin".into());
        let vars = [("HOME", home), ("PATH", path), ("LANG", "C.UTF-8".into()), ("TMPDIR", "/tmp".into())];
        let vars = vars.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        Self::start_with(Setup { cwd, vars, ..Setup::default() }).await
    }

    /// Starts a kernel with this setup.
    ///
    /// # Errors
    /// `Unavailable` if the engine does not start.
    pub async fn start_with(setup: Setup) -> Result<Self> {
        let (peer, pipes) = peer::connect(setup)
            .map_err(|error| Error::unavailable(format!("cannot start the embedded engine: {error}")))?;
        let ready = tokio::time::timeout(limits::WORKER_START, peer.ready());
        ready.await.map_err(|_| Error::unavailable("the embedded engine does not get ready"))??;
        Ok(EmbeddedKernel {
            peer: Rc::new(peer),
            turn: Mutex::new(pipes),
            next_exec: Cell::new(1),
            executions: RefCell::default(),
            blobs: RefCell::default(),
            abandoned: Cell::new(None),
        })
    }

    /// The running background jobs, as id and command.
    pub fn jobs(&self) -> Vec<(String, String)> {
        self.peer.jobs.borrow().iter().map(|job| (job.id.clone(), job.command.clone())).collect()
    }

    /// Completions of `code` at `cursor`: where they begin, and the matches.
    ///
    /// # Errors
    /// `Lost` if the engine has ended.
    pub async fn complete(&self, code: &str, cursor: usize) -> Result<(usize, Vec<String>)> {
        let reply = self.ask(|id| Request::Complete { id, code: code.to_owned(), cursor }).await?;
        let start = field(&reply, "start").as_u64().unwrap_or_default() as usize;
        Ok((start, serde_json::from_value(field(&reply, "matches")).unwrap_or_default()))
    }

    /// Whether `code` is a whole program: `complete`, `incomplete` or `invalid`.
    ///
    /// # Errors
    /// `Lost` if the engine has ended.
    pub async fn check(&self, code: &str) -> Result<String> {
        let reply = self.ask(|id| Request::Check { id, code: code.to_owned() }).await?;
        Ok(field(&reply, "status").as_str().unwrap_or_default().to_owned())
    }

    async fn ask(&self, request: impl FnOnce(u64) -> Request) -> Result<Reply> {
        let _turn = self.turn().await?;
        self.peer.ask(request).await
    }

    /// Waits until nothing runs.
    async fn turn(&self) -> Result<tokio::sync::MutexGuard<'_, Pipes>> {
        let pipes = self.turn.lock().await;
        let Some(abandoned) = self.abandoned.get() else {
            return Ok(pipes);
        };
        self.peer.send(&Request::Interrupt { exec: abandoned.0 }, None).await?;
        // The reply arrives after the execution's end, so its output must be drained meanwhile.
        let ended = self.peer.ask(|id| Request::Vars { id });
        tokio::pin!(ended);
        let mut lost = vec![0; READ_BYTES];
        loop {
            tokio::select! {
                biased;
                ended = &mut ended => {
                    ended?;
                    break;
                }
                _ = pipes.stdout.readable() => drop(pipes.stdout.try_read(&mut lost)),
                _ = pipes.stderr.readable() => drop(pipes.stderr.try_read(&mut lost)),
            }
        }
        Output::new(abandoned, None, 0).drain(&pipes).await;
        self.abandoned.set(None);
        Ok(pipes)
    }

    async fn run(&self, request: ExecRequest, sink: Option<&dyn OutputSink>) -> Result<ExecResult> {
        request.check()?;
        if !request.key.is_empty() || request.expected_version != 0 {
            return Err(Error::unsupported("an embedded kernel has neither idempotency keys nor versions")
                .hint("use a kernel of ryokand"));
        }
        if request.stdin_open {
            return Err(Error::unsupported("an embedded kernel takes standard input only with the request")
                .hint("put all of it into the request's stdin"));
        }
        let exec = ExecId(self.next_exec.replace(self.next_exec.get() + 1));
        let _registered = Registered::new(&self.executions, exec);
        let mut pipes = self.turn().await?;
        if self.executions.borrow().get(&exec) == Some(&true) {
            return Ok(never_ran(exec));
        }
        self.run_in_turn(exec, request, sink, &mut pipes).await
    }

    async fn run_in_turn(
        &self,
        exec: ExecId,
        request: ExecRequest,
        sink: Option<&dyn OutputSink>,
        pipes: &mut Pipes,
    ) -> Result<ExecResult> {
        let began = Instant::now();
        let (id, ended) = self.peer.expect();
        self.abandoned.set(Some(exec));
        let ExecRequest { what, stdin, env, timeout_ms, output_limit_bytes, .. } = request;
        let has_stdin = !stdin.is_empty();
        let frame = match what {
            Work::Code(code) => Request::Exec { id, exec: exec.0, code, env, stdin: has_stdin },
            Work::Call { name, args } => {
                Request::Call { id, exec: exec.0, name, args: args.to_json(), env, stdin: has_stdin }
            }
            Work::Process(_) => {
                return Err(Error::unsupported("an embedded kernel has no sandbox for processes")
                    .hint("use a kernel of a daemon"));
            }
        };
        let _feeding = if has_stdin {
            let (reader, feeding) =
                feed(stdin).map_err(|error| Error::internal(format!("cannot make a pipe: {error}")))?;
            self.peer.send(&frame, Some(reader)).await?;
            Some(feeding)
        } else {
            self.peer.send(&frame, None).await?;
            None
        };
        let limit = if output_limit_bytes == 0 { limits::OUTPUT_KEPT_BYTES } else { output_limit_bytes };
        let mut output = Output::new(exec, sink, limit);
        let timeout = (timeout_ms > 0).then(|| Duration::from_millis(timeout_ms));
        let (event, timed_out) = self.follow(exec, ended, timeout, &mut output, pipes).await?;
        let Event::End { status, code, err, value, output: structured, .. } = event else {
            return Err(Error::internal("the engine answered an execution with something else"));
        };
        self.abandoned.set(None);
        output.drain(pipes).await;
        let value = value.map(|value| Value::from_json(&value)).transpose();
        let value = value.map_err(|error| Error::internal(format!("the engine gave a malformed value: {error}")))?;
        let (status, code) = match status {
            EndStatus::Interrupted if timed_out => (ExecStatus::Timeout, CODE_TIMEOUT),
            EndStatus::Interrupted => (ExecStatus::Interrupted, code),
            EndStatus::Done => (ExecStatus::Done, code),
            EndStatus::Failed => (ExecStatus::Failed, code),
            EndStatus::Refused => (ExecStatus::Refused, code),
        };
        if let Some(structured) = &structured {
            output.give(OutputEvent::Structured(structured.clone())).await;
        }
        output.give(OutputEvent::ExitCode(code)).await;
        let duration_us = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
        let end = ExecEnd { status, code, err, value, output: structured, duration_us };
        let (stdout_tail, stderr_tail) = streams_of(output.tail.into_chunks());
        Ok(ExecResult {
            exec,
            end,
            stdout: output.stdout,
            stderr: output.stderr,
            truncated_bytes: output.truncated,
            stdout_tail,
            stderr_tail,
            displays: Vec::new(),
        })
    }

    /// Forwards output until the execution ends. Also returns whether it timed out.
    async fn follow(
        &self,
        exec: ExecId,
        mut ended: oneshot::Receiver<Event>,
        timeout: Option<Duration>,
        output: &mut Output<'_>,
        pipes: &mut Pipes,
    ) -> Result<(Event, bool)> {
        let mut buffer = vec![0; READ_BYTES];
        let mut timed_out = false;
        let mut reported = false;
        let deadline = async {
            match timeout {
                Some(timeout) => tokio::time::sleep(timeout).await,
                None => std::future::pending().await,
            }
        };
        tokio::pin!(deadline);
        loop {
            if !reported && self.executions.borrow().get(&exec) == Some(&true) {
                reported = true;
                self.peer.send(&Request::Interrupt { exec: exec.0 }, None).await?;
            }
            tokio::select! {
                biased;
                event = &mut ended => return event.map(|event| (event, timed_out)).map_err(|_| gone()),
                () = &mut deadline, if !timed_out => {
                    timed_out = true;
                    self.peer.send(&Request::Interrupt { exec: exec.0 }, None).await?;
                }
                ready = pipes.stdout.readable() => {
                    ready.map_err(|_| gone())?;
                    output.read(&pipes.stdout, Stream::Stdout, &mut buffer).await;
                }
                ready = pipes.stderr.readable() => {
                    ready.map_err(|_| gone())?;
                    output.read(&pipes.stderr, Stream::Stderr, &mut buffer).await;
                }
                more = self.peer.receive() => more?,
            }
        }
    }
}

const READ_BYTES: usize = 256 << 10;

fn never_ran(exec: ExecId) -> ExecResult {
    let end = ExecEnd {
        status: ExecStatus::Interrupted,
        code: crate::core::exec::CODE_INTERRUPTED,
        err: "interrupted before it began".into(),
        value: None,
        output: None,
        duration_us: 0,
    };
    ExecResult {
        exec,
        end,
        stdout: Vec::new(),
        stderr: Vec::new(),
        truncated_bytes: 0,
        stdout_tail: Vec::new(),
        stderr_tail: Vec::new(),
        displays: Vec::new(),
    }
}

/// Registers an execution as running or waiting.
struct Registered<'a> {
    list: &'a RefCell<BTreeMap<ExecId, bool>>,
    exec: ExecId,
}

impl<'a> Registered<'a> {
    fn new(list: &'a RefCell<BTreeMap<ExecId, bool>>, exec: ExecId) -> Self {
        list.borrow_mut().insert(exec, false);
        Registered { list, exec }
    }
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        self.list.borrow_mut().remove(&self.exec);
    }
}

/// The destinations of an execution's output.
struct Output<'a> {
    exec: ExecId,
    sink: Option<&'a dyn OutputSink>,
    kept: u64,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    truncated: u64,
    tail: Tail,
}

impl<'a> Output<'a> {
    fn new(exec: ExecId, sink: Option<&'a dyn OutputSink>, kept: u64) -> Output<'a> {
        let (stdout, stderr, tail) = (Vec::new(), Vec::new(), Tail::beside(kept));
        Output { exec, sink, kept, stdout, stderr, truncated: 0, tail }
    }

    async fn give(&mut self, event: OutputEvent) {
        if let Some(sink) = self.sink
            && sink.take(self.exec, event).await.is_err()
        {
            self.sink = None;
        }
    }

    /// Forwards available output; `false` if there was none.
    async fn read(&mut self, pipe: &Receiver, stream: Stream, buffer: &mut [u8]) -> bool {
        let Ok(n @ 1..) = pipe.try_read(buffer) else {
            return false;
        };
        let bytes = &buffer[..n];
        let kept = if stream == Stream::Stdout { &mut self.stdout } else { &mut self.stderr };
        let room = usize::try_from(self.kept).unwrap_or(usize::MAX).min(n);
        kept.extend(&bytes[..room]);
        self.kept -= room as u64;
        self.truncated += (n - room) as u64;
        self.tail.push(stream, &bytes[room..]);
        let event = match stream {
            Stream::Stdout => OutputEvent::Stdout(bytes.to_vec()),
            Stream::Stderr => OutputEvent::Stderr(bytes.to_vec()),
        };
        self.give(event).await;
        true
    }

    /// Forwards the rest of the output after the execution's end; the engine has flushed everything
    /// by then.
    async fn drain(&mut self, pipes: &Pipes) {
        let mut buffer = vec![0; READ_BYTES];
        for (pipe, stream) in [(&pipes.stdout, Stream::Stdout), (&pipes.stderr, Stream::Stderr)] {
            loop {
                // tokio's readiness may lag behind the pipe.
                let known = tokio::time::timeout(Duration::ZERO, pipe.readable()).await;
                if !self.read(pipe, stream, &mut buffer).await && known.is_err() {
                    break;
                }
            }
        }
    }
}

/// A pipe for these bytes, and the task that writes them.
fn feed(bytes: Vec<u8>) -> std::io::Result<(OwnedFd, Feeding)> {
    use tokio::io::AsyncWriteExt;
    let (reader, writer) = std::io::pipe()?;
    let mut writer = tokio::net::unix::pipe::Sender::from_owned_fd(writer.into())?;
    let task = tokio::spawn(async move {
        // The code may not read all of it.
        let _ = writer.write_all(&bytes).await;
    });
    Ok((reader.into(), Feeding(task)))
}

struct Feeding(tokio::task::JoinHandle<()>);

impl Drop for Feeding {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn field(reply: &Reply, name: &str) -> Json {
    reply.fields.get(name).cloned().unwrap_or_default()
}
