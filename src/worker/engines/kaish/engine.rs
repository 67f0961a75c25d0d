//! One kaish session: runs programs, calls tools, reads and writes variables.
//!
//! Owns the session and its recorded state. Does not know the contract: that is `serve`.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kaish_kernel::ast::Value as Kv;
use kaish_kernel::interpreter::ExecResult;
use kaish_kernel::scheduler::{JobStatus, PipeReader};
use kaish_kernel::{ExecuteOptions, Kernel, KernelConfig, KernelError, parser};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::backend::{Backend, ToolCall, Unanswered, shown};
use super::calls::{json_schema, literal_argv, output_data};
use super::program::{self, Completeness, Found};
use super::state::{Change, Entry, State};
use super::tools::{CALL, HIDDEN, INSIDE, Order, SESSION, Shared, Wrapped, can_alias};
use super::{Outlet, complete, values};
use crate::core::exec::{CODE_INTERRUPTED, OutputData};
use crate::core::info::{ToolInfo, VarInfo};
use crate::core::limits;
use crate::core::value::Value;
use crate::link::frames::{EndStatus, Job, Missed};
use crate::worker::engines::paths;

/// The start of a session.
#[derive(Debug, Clone)]
pub struct Setup {
    /// Working directory.
    pub cwd: PathBuf,
    /// Exported variables: `PATH`, `HOME` and others for children.
    pub vars: Vec<(String, String)>,
    /// Time from `SIGTERM` to `SIGKILL` for an interrupted command.
    pub kill_grace: Duration,
}

impl Default for Setup {
    fn default() -> Self {
        let vars = [
            ("HOME", "/workspace"),
            ("PATH", "/usr/local/bin:/usr/bin:/bin"),
            ("LANG", "C.UTF-8"),
            ("TMPDIR", "/tmp"),
            ("USER", "guest"),
        ];
        Setup {
            cwd: "/workspace".into(),
            vars: vars.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
            kill_grace: Duration::from_secs(2),
        }
    }
}

/// Why there is no session.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// kaish's error.
    #[error("cannot make a kaish session: {0}")]
    Kernel(String),
    /// An output pipe is unusable.
    #[error("cannot use an output pipe")]
    Outlet(#[source] std::io::Error),
}

/// Standard input of an execution.
#[derive(Default)]
pub enum Stdin {
    /// None: commands see the end of input at once.
    #[default]
    Empty,
    /// A stream.
    Pipe(PipeReader),
}

/// Options of an execution.
#[derive(Default)]
pub struct Execution<'a> {
    /// Environment for this execution only.
    pub env: &'a [(String, String)],
    /// Standard input.
    pub stdin: Stdin,
    /// Interrupts it when cancelled.
    pub cancel: CancellationToken,
}

/// How an execution ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// Its status.
    pub status: EndStatus,
    /// Its exit code.
    pub code: i32,
    /// One-line error; empty on success.
    pub err: String,
    /// The structured data of the last result, if any.
    pub value: Option<Value>,
    /// The structured form of the last output, if any.
    pub output: Option<OutputData>,
}

/// A kaish session.
pub struct KaishEngine {
    session: Arc<Kernel>,
    // Holds state shared by forks; `shutdown` needs it.
    base: Arc<Kernel>,
    backend: Arc<Backend>,
    shared: Arc<Shared>,
    state: State,
    builtins: HashSet<String>,
    aliased: HashSet<String>,
    // Programs that read other programs may define functions and redirect in unseen ways.
    sources: bool,
    redirects_in_functions: bool,
}

impl KaishEngine {
    /// Starts a session with these two output pipes, sending dynamic tool calls to `calls`.
    ///
    /// Must run inside a current-thread tokio runtime, on a thread with `STACK_BYTES` of stack.
    ///
    /// # Errors
    /// See [`SetupError`].
    pub async fn new(
        setup: &Setup,
        stdout: std::os::fd::OwnedFd,
        stderr: std::os::fd::OwnedFd,
        calls: mpsc::UnboundedSender<ToolCall>,
    ) -> Result<Self, SetupError> {
        let backend = Arc::new(Backend::new(calls));
        let shared = Arc::new(Shared::new(
            Outlet::new(stdout).map_err(SetupError::Outlet)?,
            Outlet::new(stderr).map_err(SetupError::Outlet)?,
            backend.scripts_read(),
        ));
        let vars: HashMap<String, Kv> =
            setup.vars.iter().map(|(name, value)| (name.clone(), Kv::String(value.clone()))).collect();
        let config = KernelConfig::default()
            .with_cwd(setup.cwd.clone())
            .with_initial_vars(vars)
            .with_kill_grace(setup.kill_grace)
            .with_trash(false);
        let for_tools = Arc::clone(&shared);
        let base = Kernel::with_backend(
            Arc::clone(&backend) as Arc<dyn kaish_kernel::KernelBackend>,
            config,
            |_| {},
            move |tools| Wrapped::all(tools, &for_tools),
        )
        .map_err(|error| SetupError::Kernel(format!("{error:#}")))?
        .into_arc();
        let session = base.fork_for_background(CancellationToken::new(), SESSION).await;
        let builtins = base.tool_schemas().into_iter().map(|schema| schema.name).collect();
        let mut engine = KaishEngine {
            session,
            base,
            backend,
            shared,
            state: State::default(),
            builtins,
            aliased: HashSet::new(),
            sources: false,
            redirects_in_functions: false,
        };
        engine.begin_here().await;
        Ok(engine)
    }

    /// Runs a program to its end. Its whole output is in the pipes when this returns.
    pub async fn execute(&mut self, code: &str, execution: Execution<'_>) -> Outcome {
        let found = if self.is_known_command(code) {
            Some(Found::default())
        } else {
            parser::parse(code).ok().map(|program| program::walk(&program))
        };
        let mut only_merges = false;
        if let Some(found) = &found {
            self.prepare(found).await;
            only_merges =
                found.merges_stderr && !found.redirects_stderr && !self.redirects_in_functions && !self.sources;
        }
        let outcome = self.run(code, execution, only_merges).await;
        if let Some(found) = found {
            let sources = self.backend.take_sources();
            self.state.saw_program(code, &found, &sources, &self.session, outcome.status).await;
        }
        outcome
    }

    /// Calls a tool with literal arguments: an object becomes flags, an array operands.
    ///
    /// # Errors
    /// If the arguments are neither or contain values that kaish cannot represent.
    pub async fn call(&mut self, name: &str, args: &Value, execution: Execution<'_>) -> Result<Outcome, String> {
        let known =
            self.builtins.contains(name) || self.session.has_function(name).await || self.backend.has_tool(name);
        if !known || name.starts_with(HIDDEN) {
            return Err(format!("there is no tool {name:?}"));
        }
        if self.backend.has_tool(name) {
            return self.call_dynamic(name, args, &execution.cancel).await;
        }
        let schema = self.session.tool_schemas().into_iter().find(|schema| schema.name == name);
        let argv = literal_argv(args, schema.as_ref())?;
        self.shared.order(Order::Call { name: name.to_owned(), argv });
        let outcome = self.run(CALL, execution, false).await;
        Ok(outcome)
    }

    /// Calls an MCP tool directly: kaish's words would turn numbers into text.
    async fn call_dynamic(&self, name: &str, args: &Value, cancel: &CancellationToken) -> Result<Outcome, String> {
        if !matches!(args, Value::Null | Value::Object(_)) {
            return Err(format!("tool {name:?} takes named arguments"));
        }
        self.shared.begin(false);
        let outcome = match self.backend.ask(name, args.clone(), cancel).await {
            Ok((value, text)) => {
                self.shared.stdout.write(shown(&value, text).as_bytes(), cancel).await;
                let value = Some(value).filter(|value| !matches!(value, Value::Null | Value::String(_)));
                Outcome { status: EndStatus::Done, code: 0, err: String::new(), value, output: None }
            }
            Err(Unanswered::Failed(message)) => {
                let message = format!("{name}: {message}");
                self.shared.stderr.write(format!("{}\n", message.trim_end()).as_bytes(), cancel).await;
                let err = values::one_line(message.trim_end());
                Outcome { status: EndStatus::Failed, code: 1, err, value: None, output: None }
            }
            Err(Unanswered::Interrupted) => {
                let (status, code) = (EndStatus::Interrupted, CODE_INTERRUPTED);
                Outcome { status, code, err: "interrupted".into(), value: None, output: None }
            }
        };
        self.shared.stdout.flush(cancel).await;
        self.shared.stderr.flush(cancel).await;
        Ok(outcome)
    }

    async fn run(&mut self, code: &str, execution: Execution<'_>, only_merges: bool) -> Outcome {
        self.shared.begin(only_merges);
        let mut options = ExecuteOptions::new();
        if !execution.env.is_empty() {
            let vars = execution.env.iter().map(|(name, value)| (name.clone(), Kv::String(value.clone())));
            options = options.with_vars(vars.collect());
        }
        let shared = Arc::clone(&self.shared);
        let mut on_output = move |result: &ExecResult| shared.leftover(result);
        let session = Arc::clone(&self.session);
        let running = async {
            match execution.stdin {
                Stdin::Empty => session.execute_with_options_streaming(code, options, &mut on_output).await,
                Stdin::Pipe(pipe) => {
                    session.execute_with_pipe_stdin_streaming(code, options, pipe, &mut on_output).await
                }
            }
        };
        let result = self.cancellable(running, &execution.cancel).await;
        self.end(result, &execution.cancel).await
    }

    async fn cancellable<T>(&self, running: impl Future<Output = T>, cancel: &CancellationToken) -> T {
        tokio::pin!(running);
        tokio::select! {
            biased;
            result = &mut running => return result,
            () = cancel.cancelled() => self.session.cancel(),
        }
        running.await
    }

    async fn end(&mut self, result: Result<ExecResult, KernelError>, cancel: &CancellationToken) -> Outcome {
        let outcome = match result {
            Ok(mut result) => {
                let mut code = i32::try_from(result.code).unwrap_or(1);
                let interrupted = cancel.is_cancelled() && (code == CODE_INTERRUPTED || code > 128);
                if interrupted {
                    code = CODE_INTERRUPTED;
                }
                let status = match code {
                    _ if interrupted => EndStatus::Interrupted,
                    0 => EndStatus::Done,
                    _ => EndStatus::Failed,
                };
                let err = match status {
                    EndStatus::Failed => self.shared.last_error(),
                    EndStatus::Interrupted => "interrupted".into(),
                    EndStatus::Done | EndStatus::Refused => String::new(),
                };
                let value = result.data.take().map(|data| values::from_kaish(&data));
                Outcome { status, code, err, value, output: None }
            }
            Err(error) => {
                let (status, code) = if error.is_rejected() { (EndStatus::Refused, 2) } else { (EndStatus::Failed, 1) };
                let text = format!("{error:#}");
                self.shared.note_error(&text);
                self.shared.stderr.offer(format!("{}\n{}", text.trim_end(), program::hint(&error)).as_bytes());
                Outcome { status, code, err: values::one_line(text.trim_end()), value: None, output: None }
            }
        };
        self.shared.stdout.flush(cancel).await;
        self.shared.stderr.flush(cancel).await;
        let output = self.shared.take_output().as_ref().map(output_data);
        Outcome { output, ..outcome }
    }

    /// Whether the program is a single command that needs no preparation.
    fn is_known_command(&self, code: &str) -> bool {
        program::plain_command(code).is_some_and(|name| self.builtins.contains(name) || self.aliased.contains(name))
    }

    /// Prepares a program: its external commands get hidden aliases.
    async fn prepare(&mut self, found: &Found) {
        self.sources |= found.sources;
        self.redirects_in_functions |= found.redirects_stderr && !found.definitions.is_empty();
        self.backend.watch_sources(self.sources);
        let defined = |name: &str| found.definitions.iter().any(|definition| definition.def.name == name);
        let mut add = Vec::new();
        for name in &found.commands {
            if self.aliased.contains(name) || self.builtins.contains(name) || defined(name) || !can_alias(name) {
                continue;
            }
            if matches!(name.as_str(), "true" | "false" | "source" | "." | ":" | "exit" | "return") {
                continue;
            }
            if !self.session.has_function(name).await {
                self.aliased.insert(name.clone());
                add.push(name.clone());
            }
        }
        let remove: Vec<String> = found
            .definitions
            .iter()
            .map(|definition| definition.def.name.clone())
            .filter(|name| self.aliased.remove(name))
            .collect();
        if !add.is_empty() || !remove.is_empty() {
            self.inside(Order::Alias { add, remove }).await;
        }
    }

    /// Runs the hidden tool in the session and undoes its one trace.
    async fn inside(&self, order: Order) {
        let pipestatus = self.session.get_var("PIPESTATUS").await;
        self.shared.order(order);
        // Cannot fail: the tool is registered and takes no arguments.
        let _ = self.session.execute_argv(INSIDE, &[]).await;
        if let Some(pipestatus) = pipestatus {
            self.session.set_var("PIPESTATUS", pipestatus).await;
        }
    }

    /// Sets the variables of the kernel in a warm session, as if it had started with them.
    pub async fn bind(&mut self, vars: Vec<(String, String)>) {
        for (name, value) in vars {
            // A load starts from the base again.
            self.base.set_var(&name, Kv::String(value.clone())).await;
            self.session.set_var(&name, Kv::String(value.clone())).await;
            self.state.add_initial(name, Kv::String(value));
        }
    }

    /// Makes the session's current state its base.
    pub async fn begin_here(&mut self) {
        let initial = self.look().await;
        self.state.set_initial(initial);
    }

    async fn look(&self) -> Option<super::tools::Inside> {
        self.inside(Order::Look).await;
        self.shared.take_inside()
    }

    /// Reads a variable.
    pub async fn get(&self, name: &str) -> Option<Value> {
        self.session.get_var(name).await.as_ref().map(values::from_kaish)
    }

    /// Sets a variable.
    ///
    /// # Errors
    /// If the name is invalid or kaish cannot represent the value.
    pub async fn set(&self, name: &str, value: &Value) -> Result<(), String> {
        if !is_variable_name(name) {
            return Err(format!("{:?} cannot be the name of a kaish variable", values::one_line(name)));
        }
        let value = values::to_kaish(value).map_err(|error| error.to_string())?;
        self.session.set_var(name, value).await;
        Ok(())
    }

    /// Lists the user's variables.
    pub async fn vars(&self) -> Vec<VarInfo> {
        let mut vars: Vec<VarInfo> = self
            .session
            .list_vars()
            .await
            .into_iter()
            .filter(|(name, value)| !self.state.is_initial(name, value))
            .map(|(name, value)| VarInfo {
                name,
                type_name: values::type_name(&value).to_owned(),
                summary: values::summary(&value),
            })
            .collect();
        vars.sort_by(|a, b| a.name.cmp(&b.name));
        vars
    }

    /// Builtins and functions; the caller adds dynamic tools.
    pub async fn tools(&self) -> Vec<ToolInfo> {
        let mut tools: Vec<ToolInfo> = self
            .session
            .tool_schemas()
            .into_iter()
            .filter(|schema| !schema.name.starts_with(HIDDEN))
            .map(|schema| ToolInfo {
                schema_json: json_schema(&schema).to_string(),
                name: schema.name,
                description: schema.description,
                source: "builtin".into(),
            })
            .collect();
        tools.extend(self.state.functions().map(|name| ToolInfo {
            name: name.to_owned(),
            description: format!("function {name}"),
            source: "user".into(),
            schema_json: String::new(),
        }));
        tools.sort_by(|a, b| a.name.cmp(&b.name));
        tools
    }

    /// Completions of `code` at `cursor` (bytes): their start, and the candidates.
    pub async fn complete(&self, code: &str, cursor: usize) -> (usize, Vec<String>) {
        let word = complete::word_at(code, cursor);
        let mut names: Vec<String> = Vec::new();
        match &word.kind {
            complete::Kind::Variable => {
                names.extend(self.session.list_vars().await.into_iter().map(|(name, _)| name));
            }
            complete::Kind::Command => {
                names.extend(self.builtins.iter().filter(|name| !name.starts_with(HIDDEN)).cloned());
                names.extend(self.state.functions().map(str::to_owned));
                names.extend(self.state.aliases().map(str::to_owned));
                names.extend(complete::KEYWORDS.iter().map(|keyword| (*keyword).to_owned()));
                names.extend(self.backend.tool_names());
                let path = self.session.get_var("PATH").await;
                let path = path.as_ref().map(kaish_kernel::interpreter::value_to_string).unwrap_or_default();
                names.extend(paths::executables(&path, &word.text));
            }
            complete::Kind::Path => {}
        }
        let mut matches: Vec<String> = names.into_iter().filter(|name| name.starts_with(&word.text)).collect();
        if matches!(word.kind, complete::Kind::Path) || word.text.contains('/') {
            let home = self.session.get_var("HOME").await;
            let home = home.as_ref().map(kaish_kernel::interpreter::value_to_string);
            matches.extend(paths::beginning_with(&self.session.cwd().await, home.as_deref(), &word.text));
        }
        matches.sort();
        matches.dedup();
        matches.truncate(complete::MATCHES);
        (word.start, matches)
    }

    /// Whether `code` is a complete program.
    pub fn check(&self, code: &str) -> Completeness {
        program::completeness(code)
    }

    /// The running background jobs.
    pub async fn jobs(&self) -> Vec<Job> {
        let jobs = self.session.jobs().list().await;
        jobs.into_iter()
            .filter(|job| matches!(job.status, JobStatus::Running | JobStatus::Stopped))
            .map(|job| Job { id: job.id.0.to_string(), command: job.command.chars().take(200).collect() })
            .collect()
    }

    /// Waits until one of these jobs has ended.
    pub async fn job_ended(&self, jobs: &[Job]) {
        let ended = jobs.iter().filter_map(|job| job.id.parse().ok()).map(|id| {
            let manager = self.session.jobs();
            Box::pin(async move {
                if let Some(streams) = manager.streams(kaish_kernel::scheduler::JobId(id)).await {
                    // A larger count than possible: the read returns when the stream closes at the
                    // job's end.
                    streams.stdout.changed_since(u64::MAX).await;
                }
            })
        });
        let ended: Vec<_> = ended.collect();
        if ended.is_empty() {
            return std::future::pending().await;
        }
        futures::future::select_all(ended).await;
    }

    /// Sets the current MCP tools.
    pub fn backend(&self) -> &Arc<Backend> {
        &self.backend
    }

    /// The state changes since the last call; everything with `all`.
    pub async fn changes(&mut self, all: bool) -> Vec<Change> {
        if all {
            self.state.forget_sent();
        }
        let inside =
            if all || self.shared.inside_changed.swap(false, Ordering::Relaxed) { self.look().await } else { None };
        self.state.changes(&self.session, inside).await
    }

    /// The list of unsaved entries.
    pub async fn missed(&self) -> Vec<Missed> {
        let mut missed = self.state.missed();
        for job in self.jobs().await {
            missed.push(Missed {
                key: format!("job/{}", job.id),
                type_name: "job".into(),
                reason: "a running job cannot be restored".into(),
            });
        }
        missed
    }

    /// Replaces the session's state by these entries; returns those that could not be restored.
    pub async fn load(&mut self, entries: Vec<Entry>) -> Vec<Missed> {
        self.session.cancel_all_jobs().await;
        self.session = self.base.fork_for_background(CancellationToken::new(), SESSION).await;
        self.aliased.clear();
        self.shared.inside_changed.store(true, Ordering::Relaxed);
        let Some(fresh) = self.look().await else {
            return entries.into_iter().map(|entry| entry.missed("the session cannot be reached")).collect();
        };
        let loaded = self.state.load(entries, fresh);
        let mut missed = loaded.missed;
        self.inside(Order::Replace(Box::new(loaded.inside))).await;
        for (name, text) in loaded.functions {
            if let Err(reason) = self.define(&name, &text).await {
                missed.push(Missed { key: format!("fn/{name}"), type_name: "function".into(), reason });
            }
        }
        for (path, content) in loaded.files {
            if let Err(error) = self.write_memory_file(&path, &content).await {
                let reason = error.to_string();
                missed.push(Missed { key: format!("file{}", path.display()), type_name: "file".into(), reason });
            }
        }
        missed
    }

    async fn write_memory_file(&self, path: &std::path::Path, content: &[u8]) -> std::io::Result<()> {
        use kaish_kernel::vfs::Filesystem as _;
        let vfs = self.session.vfs();
        let mut folder = PathBuf::new();
        // Existing folders are fine; the write decides.
        for part in path.parent().into_iter().flat_map(std::path::Path::components) {
            folder.push(part);
            let _ = vfs.mkdir(&folder).await;
        }
        vfs.write(path, content).await
    }

    async fn define(&mut self, name: &str, text: &str) -> Result<(), String> {
        let def = program::single_definition(text).ok_or("the text is not one function definition")?;
        if def.name != name {
            return Err(format!("the text defines {:?}", def.name));
        }
        let found =
            program::walk(&kaish_kernel::ast::Program { statements: vec![kaish_kernel::ast::Stmt::ToolDef(def)] });
        self.prepare(&found).await;
        let last = self.session.get_var("PIPESTATUS").await;
        self.session.execute(text).await.map_err(|error| format!("{error:#}"))?;
        if let Some(last) = last {
            self.session.set_var("PIPESTATUS", last).await;
        }
        self.state.define(name, text);
        Ok(())
    }

    /// Ends background jobs.
    pub async fn shutdown(&self) {
        self.session.cancel_all_jobs().await;
        // Their commands get SIGTERM now; the process's exit ends the rest.
        tokio::task::yield_now().await;
        let _ = &self.base;
    }
}

/// Stack size of an engine thread: kaish recurses.
pub const STACK_BYTES: usize = 32 << 20;

fn is_variable_name(name: &str) -> bool {
    name.len() <= limits::IDENTIFIER_BYTES
        && name.starts_with(|c: char| c.is_alphabetic() || c == '_')
        && name.chars().all(|c| c.is_alphanumeric() || c == '_')
}
