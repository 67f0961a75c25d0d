//! The engine's side of the contract: frames on the control socket, output on the two pipes.
//!
//! ```text
//!            ┌── one thread, one runtime ───────────────────────────────────────────┐
//!  control ──┼▶ Link ─ requests ─▶ Server ─ execute ─▶ KaishEngine ─ output ─▶ pipes │
//!  control ◀─┼─ Link ◀─ puts, dels, missed, jobs, end ◀┘   ▲                         │
//!            │     └─ interrupt, tool_result while executing ┘                       │
//!            └───────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! Nothing polls on a clock: each wait is for a frame, a tool call, a job's end or the execution
//! itself.

use std::cell::Cell;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::{Arc, Once};
use std::time::Duration;

use futures::FutureExt;
use kaish_kernel::scheduler::pipe_stream;
use serde_json::{Value as Json, json};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::engine::{Execution, KaishEngine, Outcome, STACK_BYTES, Setup, Stdin};
use super::link::{Link, Stop, WAITING};
use super::program::Completeness;
use super::state::{Change, Entry};
use super::{Backend, ENGINE, ToolAnswer, ToolCall, VERSION};
use crate::core::error::ErrorCode;
use crate::core::limits;
use crate::core::value::Value;
use crate::link::frames::{EndStatus, Event, FrameError, InterruptWay, Job, Missed, Reply, Request};
use crate::worker::engines::answers::{bounded_value, larger_than, refusal, success};

/// Asked to end, or init is gone.
pub const EXIT_OK: i32 = 0;
/// init violated the contract.
pub const EXIT_PROTOCOL: i32 = 65;
/// A panic inside kaish: its locks may be in any state.
pub const EXIT_POISONED: i32 = 70;
/// No session could be started.
pub const EXIT_SETUP: i32 = 71;

/// Serves one session until init closes the socket or asks for the end; returns the exit code.
///
/// Runs on its own thread with a large stack; may be called several times in one process.
pub fn serve(control: OwnedFd, stdout: OwnedFd, stderr: OwnedFd, setup: Setup) -> i32 {
    let thread = std::thread::Builder::new().name("kaish".into()).stack_size(STACK_BYTES);
    let served = thread.spawn(move || serve_here(control, stdout, stderr, &setup));
    match served.map(std::thread::JoinHandle::join) {
        Ok(Ok(code)) => code,
        Ok(Err(_panic)) => EXIT_POISONED,
        Err(_) => EXIT_SETUP,
    }
}

/// Serves one session with the sandbox's setup and ends the process: for an init that forks without
/// exec.
pub fn main_forked(control: OwnedFd, stdout: OwnedFd, stderr: OwnedFd, setup: Setup) -> ! {
    // Builtin commands write in this process.
    if let Err(error) = crate::sys::process::let_large_writes_fail() {
        tracing::warn!(%error, "a file that grows too large ends the engine");
    }
    std::process::exit(serve(control, stdout, stderr, setup))
}

thread_local! {
    static PANICKED: Cell<bool> = const { Cell::new(false) };
}

/// Records panics of this thread: kaish turns those of pipeline stages into mere failures.
fn watch_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let former = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PANICKED.set(true);
            former(info);
        }));
    });
    PANICKED.set(false);
}

fn serve_here(control: OwnedFd, stdout: OwnedFd, stderr: OwnedFd, setup: &Setup) -> i32 {
    watch_panics();
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return EXIT_SETUP;
    };
    let code = runtime.block_on(async {
        let (calls_in, calls) = mpsc::unbounded_channel();
        let Ok(link) = Link::new(control) else {
            return EXIT_SETUP;
        };
        let engine = match KaishEngine::new(setup, stdout, stderr, calls_in).await {
            Ok(engine) => engine,
            Err(_) => return EXIT_SETUP,
        };
        let cwd = setup.cwd.clone();
        let mut server = Server { engine, link, calls, jobs: Vec::new(), missed: Vec::new(), loading: None, cwd };
        match server.run().await {
            Ok(()) => {
                server.engine.shutdown().await;
                EXIT_OK
            }
            Err(Stop::HungUp) => EXIT_OK,
            Err(Stop::Protocol) => EXIT_PROTOCOL,
            Err(Stop::Poisoned) => EXIT_POISONED,
        }
    });
    runtime.shutdown_background();
    code
}

/// The server of one session.
struct Server {
    engine: KaishEngine,
    link: Link,
    calls: mpsc::UnboundedReceiver<ToolCall>,
    jobs: Vec<Job>,
    missed: Vec<Missed>,
    /// Entries of a load so far, and whether each is incomplete.
    loading: Option<Vec<(Entry, bool)>>,
    /// The session's start.
    cwd: PathBuf,
}

/// The work of an execution.
enum Work {
    Code(String),
    Call(String, Json),
}

impl Server {
    /// Serves until the end; `Ok` after `shutdown`.
    async fn run(&mut self) -> Result<(), Stop> {
        let ready = Event::Ready { engine: ENGINE.into(), version: VERSION.into(), interrupt: InterruptWay::Frame };
        self.link.put(&ready, &[])?;
        self.link.send().await?;
        loop {
            let next = match self.link.waiting.pop_front() {
                Some(next) => Some(next),
                None => tokio::select! {
                    biased;
                    next = self.link.next() => next?,
                    () = self.engine.job_ended(&self.jobs) => {
                        self.settle_jobs().await?;
                        continue;
                    }
                },
            };
            let Some((request, tail)) = next else {
                return Err(Stop::HungUp);
            };
            if matches!(request, Request::Shutdown) {
                return Ok(());
            }
            self.serve(request, tail).await?;
            if PANICKED.get() {
                return Err(Stop::Poisoned);
            }
        }
    }

    async fn serve(&mut self, request: Request, tail: Vec<u8>) -> Result<(), Stop> {
        match request {
            Request::Exec { id, exec, code, env, stdin } => self.exec(id, exec, Work::Code(code), env, stdin).await,
            Request::Call { id, exec, name, args, env, stdin } => {
                self.exec(id, exec, Work::Call(name, args), env, stdin).await
            }
            Request::Interrupt { .. } | Request::Shutdown => Ok(()),
            Request::Get { id, name } => {
                let reply = match self.engine.get(&name).await {
                    Some(value) => bounded_value(id, &value),
                    None => refusal(id, ErrorCode::NotFound, format!("there is no variable {name}")),
                };
                self.reply(reply).await
            }
            Request::Set { id, name, value } => {
                let set = match Value::from_json(&value) {
                    Ok(value) => self.engine.set(&name, &value).await,
                    Err(error) => Err(error.to_string()),
                };
                let reply = match set {
                    Ok(()) => success(id, []),
                    Err(message) => refusal(id, ErrorCode::InvalidArgument, message),
                };
                self.put_changes(false).await?;
                self.reply(reply).await
            }
            Request::Vars { id } => {
                let vars: Vec<Json> = self
                    .engine
                    .vars()
                    .await
                    .into_iter()
                    .map(|var| json!({ "name": var.name, "type": var.type_name, "summary": var.summary }))
                    .collect();
                self.reply(success(id, [("vars", vars.into())])).await
            }
            Request::Tools { id } => {
                let tools: Vec<Json> = self
                    .engine
                    .tools()
                    .await
                    .into_iter()
                    .map(|tool| {
                        let schema: Json = serde_json::from_str(&tool.schema_json).unwrap_or(Json::Null);
                        json!({
                            "name": tool.name, "description": tool.description, "source": tool.source, "schema": schema,
                        })
                    })
                    .collect();
                self.reply(success(id, [("tools", tools.into())])).await
            }
            Request::Complete { id, code, cursor } => {
                let (start, matches) = self.engine.complete(&code, cursor).await;
                self.reply(success(id, [("start", start.into()), ("matches", matches.into())])).await
            }
            Request::Check { id, code } => {
                let reply = match self.engine.check(&code) {
                    Completeness::Complete => success(id, [("status", "complete".into())]),
                    // No indentation: the next line may belong to a here-document or a text, where
                    // blanks count.
                    Completeness::Incomplete => success(id, [("status", "incomplete".into()), ("indent", "".into())]),
                    Completeness::Invalid => success(id, [("status", "invalid".into())]),
                };
                self.reply(reply).await
            }
            Request::DynamicTools { tools } => {
                self.engine.backend().set_tools(tools);
                Ok(())
            }
            // The answered call has ended.
            Request::ToolResult { .. } => Ok(()),
            Request::Save { id } => {
                self.put_changes(true).await?;
                self.reply(success(id, [])).await
            }
            Request::Load { .. } => {
                self.loading = Some(Vec::new());
                Ok(())
            }
            Request::Entry { key, meta, more } => {
                let entries = self.loading.as_mut().ok_or(Stop::Protocol)?;
                match entries.last_mut() {
                    Some((entry, true)) if entry.key == key => {
                        entry.body.extend(tail);
                        if let Some(last) = entries.last_mut() {
                            last.1 = more;
                        }
                    }
                    _ => entries.push((Entry { key, meta, body: tail }, more)),
                }
                Ok(())
            }
            Request::Loaded { id } => {
                let entries = self.loading.take().ok_or(Stop::Protocol)?;
                let missed = self.engine.load(entries.into_iter().map(|(entry, _)| entry).collect()).await;
                let missed = serde_json::to_value(missed).unwrap_or_default();
                self.reply(success(id, [("missed", missed)])).await
            }
            Request::Preload { id, modules: _ } => {
                self.rehearse().await?;
                self.reply(success(id, [("missed", Json::Array(Vec::new()))])).await
            }
            // Its random numbers are the system's: there is no generator to seed.
            Request::Reseed { id, env } => {
                self.engine.bind(env).await;
                self.reply(success(id, [])).await
            }
            Request::Bind { id, env } | Request::Enter { id, env } => {
                let bound = std::env::set_current_dir(&self.cwd);
                self.engine.bind(env).await;
                let reply = match bound {
                    Ok(()) => success(id, []),
                    Err(error) => refusal(id, ErrorCode::Internal, format!("cannot enter the workspace: {error}")),
                };
                self.reply(reply).await
            }
        }
    }

    /// Rehearses a first execution, so that its code and data are in memory. Leaves no trace.
    async fn rehearse(&mut self) -> Result<(), Stop> {
        for code in REHEARSAL {
            let work = Work::Code(code.to_owned());
            if let (_, Some(stop)) = self.drive(0, work, &[], Stdin::Empty).await? {
                return Err(stop);
            }
            // Not reported: the second program undoes the first.
            drop(self.engine.changes(false).await);
            drop((self.engine.missed().await, self.engine.jobs().await));
        }
        self.engine.begin_here().await;
        Ok(())
    }

    async fn reply(&mut self, reply: Reply) -> Result<(), Stop> {
        let id = reply.id;
        if let Err(FrameError::TooLarge { .. }) = self.link.put(&Event::Reply(reply), &[]) {
            let message = "the answer is larger than a frame".to_owned();
            self.link.put(&Event::Reply(refusal(id, ErrorCode::InvalidArgument, message)), &[])?;
        }
        Ok(self.link.send().await?)
    }

    async fn exec(
        &mut self,
        id: u64,
        exec: u64,
        work: Work,
        env: Vec<(String, String)>,
        stdin: bool,
    ) -> Result<(), Stop> {
        let mut feeding = None;
        let mut input = Stdin::Empty;
        if stdin {
            let Some(file) = self.link.fds.pop_front() else {
                return Err(Stop::Protocol);
            };
            let (writer, reader) = pipe_stream(STDIN_BYTES);
            feeding = Some(tokio::spawn(feed(file, writer)));
            input = Stdin::Pipe(reader);
        }
        let done = self.drive(exec, work, &env, input).await;
        if let Some(feeding) = feeding {
            feeding.abort();
        }
        let (outcome, leaving) = done?;
        self.put_changes(false).await?;
        self.put_jobs().await?;
        let mut value = outcome.value.as_ref().map(Value::to_json);
        let mut err = outcome.err;
        if value.as_ref().is_some_and(|value| larger_than(value, limits::VALUE_BYTES)) {
            value = None;
            err.push_str("the value is larger than a value may be and is left out");
        }
        let end = |value, output, err| Event::End {
            id,
            exec,
            status: outcome.status,
            code: outcome.code,
            err,
            value,
            output,
        };
        if self.link.put(&end(value, outcome.output, err.clone()), &[]).is_err() {
            self.link.put(&end(None, None, err), &[])?;
        }
        self.link.send().await?;
        match leaving {
            None => Ok(()),
            Some(stop) => Err(stop),
        }
    }

    /// Runs the execution while handling interrupts and tool results.
    async fn drive(
        &mut self,
        exec: u64,
        work: Work,
        env: &[(String, String)],
        stdin: Stdin,
    ) -> Result<(Outcome, Option<Stop>), Stop> {
        let cancel = CancellationToken::new();
        let backend = Arc::clone(self.engine.backend());
        let execution = Execution { env, stdin, cancel: cancel.clone() };
        let engine = &mut self.engine;
        let running = AssertUnwindSafe(async move {
            match work {
                Work::Code(code) => engine.execute(&code, execution).await,
                Work::Call(name, args) => {
                    let called = match Value::from_json(&args) {
                        Ok(args) => engine.call(&name, &args, execution).await,
                        Err(error) => Err(error.to_string()),
                    };
                    called.unwrap_or_else(|err| Outcome {
                        status: EndStatus::Refused,
                        code: 2,
                        err,
                        value: None,
                        output: None,
                    })
                }
            }
        })
        .catch_unwind();
        tokio::pin!(running);
        let mut leaving = None;
        loop {
            tokio::select! {
                biased;
                outcome = &mut running => {
                    return match outcome {
                        Ok(outcome) => Ok((outcome, leaving)),
                        Err(_panic) => Err(Stop::Poisoned),
                    };
                }
                Some(call) = self.calls.recv() => {
                    let ToolCall { call, name, args } = call;
                    let event = Event::ToolCall { call, exec, name, args: args.to_json() };
                    match self.link.put(&event, &[]) {
                        Ok(()) => self.link.send().await?,
                        Err(error) => backend.answer(call, ToolAnswer::Failed(error.to_string())),
                    }
                }
                next = self.link.next(), if leaving.is_none() => match next {
                    Ok(Some((request, tail))) => {
                        let ends = matches!(request, Request::Shutdown);
                        take_meanwhile(request, tail, exec, &cancel, &backend, &mut self.link)?;
                        if ends {
                            cancel.cancel();
                        }
                    }
                    Ok(None) => {
                        cancel.cancel();
                        leaving = Some(Stop::HungUp);
                    }
                    Err(stop) => {
                        cancel.cancel();
                        leaving = Some(stop);
                    }
                },
            }
        }
    }

    async fn put_changes(&mut self, all: bool) -> Result<(), Stop> {
        for change in self.engine.changes(all).await {
            match change {
                Change::Del(key) => self.link.put(&Event::Del { key }, &[])?,
                Change::Put(entry) => self.put_entry(entry).await?,
            }
        }
        let missed = self.engine.missed().await;
        if missed != self.missed || all {
            self.missed.clone_from(&missed);
            self.link.put(&Event::Missed { entries: missed }, &[])?;
        }
        Ok(())
    }

    async fn put_entry(&mut self, entry: Entry) -> Result<(), Stop> {
        let Entry { key, mut meta, body } = entry;
        let mut chunks = body.chunks(limits::FRAME_TAIL_BYTES).peekable();
        while let Some(chunk) = chunks.next() {
            let event = Event::Put { key: key.clone(), meta: std::mem::take(&mut meta), more: chunks.peek().is_some() };
            self.link.put(&event, chunk)?;
            if self.link.out.len() > limits::FRAME_TAIL_BYTES {
                self.link.send().await?;
            }
        }
        Ok(())
    }

    async fn put_jobs(&mut self) -> Result<(), Stop> {
        let jobs = self.engine.jobs().await;
        if jobs != self.jobs {
            self.jobs.clone_from(&jobs);
            self.link.put(&Event::Jobs { jobs }, &[])?;
        }
        Ok(())
    }

    /// The job's streams have closed: its result follows within a few turns of the runtime.
    async fn settle_jobs(&mut self) -> Result<(), Stop> {
        for turn in 0..SETTLE_TURNS {
            if self.engine.jobs().await != self.jobs {
                break;
            }
            if turn < SETTLE_TURNS / 2 {
                tokio::task::yield_now().await;
            } else {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        self.put_jobs().await?;
        self.put_changes(false).await?;
        Ok(self.link.send().await?)
    }
}

/// A variable, a substitution, a pipeline and a loop; then the undo.
const REHEARSAL: [&str; 2] =
    ["rehearsed=$(echo 1); printf '' | cat; for each in 1; do printf \"\"; done", "unset rehearsed each; true"];
/// Read-ahead of standard input, bytes.
const STDIN_BYTES: usize = 64 << 10;
/// Checks of a job with closed streams before it counts as running.
const SETTLE_TURNS: u32 = 64;

fn take_meanwhile(
    request: Request,
    tail: Vec<u8>,
    exec: u64,
    cancel: &CancellationToken,
    backend: &Backend,
    link: &mut Link,
) -> Result<(), Stop> {
    match request {
        Request::Interrupt { exec: wanted } => {
            if wanted == exec {
                cancel.cancel();
            }
        }
        Request::ToolResult { call, ok, value, text, message } => {
            let answer = match (ok, Value::from_json(&value)) {
                (true, Ok(value)) => ToolAnswer::Done(value, text),
                (true, Err(error)) => ToolAnswer::Failed(format!("the result is malformed: {error}")),
                (false, _) => ToolAnswer::Failed(message),
            };
            backend.answer(call, answer);
        }
        Request::DynamicTools { tools } => backend.set_tools(tools),
        other if link.waiting.len() < WAITING => link.waiting.push_back((other, tail)),
        _ => return Err(Stop::Protocol),
    }
    Ok(())
}

/// Forwards standard input on demand.
async fn feed(file: File, mut to: kaish_kernel::scheduler::PipeWriter) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut buffer = vec![0; STDIN_BYTES];
    if file.metadata().is_ok_and(|meta| std::os::unix::fs::FileTypeExt::is_fifo(&meta.file_type())) {
        let Ok(mut pipe) = tokio::net::unix::pipe::Receiver::from_owned_fd(file.into()) else {
            return;
        };
        while let Ok(n @ 1..) = pipe.read(&mut buffer).await {
            if to.write_all(&buffer[..n]).await.is_err() {
                return;
            }
        }
        return;
    }
    let mut file = tokio::fs::File::from_std(file);
    while let Ok(n @ 1..) = file.read(&mut buffer).await {
        if to.write_all(&buffer[..n]).await.is_err() {
            return;
        }
    }
}
