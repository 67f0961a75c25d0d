//! The tools that kaish gets from us: every builtin wrapped, and two hidden ones.
//!
//! ```text
//!  kaish ──▶ Wrapped(builtin) ── output ──▶ Outlet (waits while the pipe is full) ──▶ fd 1, 2
//!        ──▶ External (reached by hidden aliases) ──▶ child with fd 1, 2 themselves
//!        ──▶ Inside: reads and writes what no public call of kaish reaches
//! ```
//!
//! A wrapped builtin's output leaves at once and is then taken out of its result, so that loops do not gather gigabytes;
//! a small amount stays, for `kaish-last`.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use kaish_kernel::ast::Value as Kv;
use kaish_kernel::dispatch::PipelinePosition;
use kaish_kernel::interpreter::{ExecResult, OutputData, Scope, apply_output_format};
use kaish_kernel::output_limit::OutputLimitConfig;
use kaish_kernel::scheduler::JobId;
use kaish_kernel::tools::{
    ExecContext, RefusedFlag, Tool, ToolArgs, ToolCtx, ToolRegistry, ToolSchema, register_builtins,
};
use kaish_types::ToolFlow;

use super::command::{External, delegate};
use super::outlet::Outlet;

/// Stands for "the session itself" where kaish has a background job's number: it makes kaish keep track of whether a
/// command's output is the session's output. No such job exists.
pub const SESSION: JobId = JobId(u64::MAX);
/// How the names of hidden tools begin.
pub const HIDDEN: &str = "__ryokan-";
/// Name of the hidden tool that runs external commands.
pub const EXTERNAL: &str = "__ryokan-external";
/// Name of the hidden tool that reads and writes the session's inside.
pub const INSIDE: &str = "__ryokan-inside";

/// Name of the hidden tool that calls a command with literal words.
pub const CALL: &str = "__ryokan-call";

/// What the tools share with the engine.
pub struct Shared {
    /// fd 1.
    pub stdout: Outlet,
    /// fd 2.
    pub stderr: Outlet,
    now: Mutex<Now>,
    /// Something other than variables may have changed since the last look.
    pub inside_changed: AtomicBool,
    inside: Mutex<Option<Inside>>,
    order: Mutex<Option<Order>>,
    scripts_read: Arc<AtomicBool>,
}

/// What is known about the running execution.
#[derive(Default)]
struct Now {
    kept: usize,
    last_text: Option<Vec<u8>>,
    last_output: Option<OutputData>,
    last_error: String,
    /// Every redirect of standard error that can run now is `2>&1`.
    only_merges: bool,
}

/// The session's inside, as [`INSIDE`] found it.
pub struct Inside {
    /// Variables, options, positional parameters; cheap to clone.
    pub scope: Scope,
    /// Aliases without the hidden ones.
    pub aliases: HashMap<String, String>,
    /// Working directory.
    pub cwd: PathBuf,
    /// The one before.
    pub prev_cwd: Option<PathBuf>,
    /// Output limit.
    pub output_limit: OutputLimitConfig,
}

/// What [`INSIDE`] is to do.
pub enum Order {
    /// Look, and leave what was found for [`Shared::take_inside`].
    Look,
    /// Put hidden aliases in place and take others away.
    Alias {
        /// Names of external commands.
        add: Vec<String>,
        /// Names that became something else.
        remove: Vec<String>,
    },
    /// Replace the session's inside.
    Replace(Box<Inside>),
    /// Call a command with literal words.
    Call {
        /// The command.
        name: String,
        /// Its words.
        argv: Vec<Kv>,
    },
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing under these locks can panic halfway.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Output of one execution that stays in kaish's results, bytes.
const KEPT_BYTES: usize = 256 << 10;
/// Structured output that an execution's end may carry, as text, bytes.
const STRUCTURED_BYTES: usize = 1 << 20;

impl Shared {
    /// Shares these two outlets.
    pub fn new(stdout: Outlet, stderr: Outlet, scripts_read: Arc<AtomicBool>) -> Self {
        Shared {
            stdout,
            stderr,
            now: Mutex::default(),
            inside_changed: AtomicBool::new(true),
            inside: Mutex::default(),
            order: Mutex::default(),
            scripts_read,
        }
    }

    /// An execution begins.
    pub fn begin(&self, only_merges: bool) {
        let mut now = lock(&self.now);
        let last_text = now.last_text.take();
        *now = Now { only_merges, last_text, ..Now::default() };
    }

    /// The last line of standard error that the execution wrote through kaish.
    pub fn last_error(&self) -> String {
        lock(&self.now).last_error.clone()
    }

    /// The structured form of the last output, if it had one.
    pub fn take_output(&self) -> Option<OutputData> {
        lock(&self.now).last_output.take()
    }

    /// Whatever comes now has no structured form.
    pub fn forget_output(&self) {
        lock(&self.now).last_output = None;
    }

    /// Whether standard error that does not go to the session goes where standard output goes.
    pub fn only_merges(&self) -> bool {
        lock(&self.now).only_merges && !self.scripts_read.load(Ordering::Relaxed)
    }

    /// What [`Order::Look`] found.
    pub fn take_inside(&self) -> Option<Inside> {
        lock(&self.inside).take()
    }

    /// Gives [`INSIDE`] its next order.
    pub fn order(&self, order: Order) {
        *lock(&self.order) = Some(order);
    }

    /// Notes what a piece of output says about the execution's end.
    pub fn note_error(&self, text: &str) {
        if let Some(line) = text.lines().rev().find(|line| !line.trim().is_empty()) {
            lock(&self.now).last_error = line.chars().take(500).collect();
        }
    }

    /// Output that kaish handed over when a statement had ended, because no tool of ours made it.
    pub fn leftover(&self, result: &ExecResult) {
        match result.out_bytes() {
            Some(bytes) => self.stdout.offer(bytes),
            None => {
                let text = result.text_out();
                if !text.is_empty() {
                    self.stdout.offer(text.as_bytes());
                    lock(&self.now).last_output = result.output().cloned();
                }
            }
        }
        if !result.err.is_empty() {
            self.note_error(&result.err);
            self.stderr.offer(result.err.as_bytes());
        }
    }

    /// Writes a tool's output and takes it out of the result.
    pub async fn publish(&self, result: &mut ExecResult, ctx: &ExecContext) {
        if session_stdout(ctx) {
            let text;
            let bytes: &[u8] = match result.out_bytes() {
                Some(bytes) => bytes,
                None => {
                    text = result.text_out();
                    text.as_bytes()
                }
            };
            if !bytes.is_empty() {
                self.stdout.write(bytes, &ctx.cancel).await;
                let mut now = lock(&self.now);
                now.last_output = result.output().filter(|_| bytes.len() <= STRUCTURED_BYTES).cloned();
                now.last_text = (bytes.len() <= KEPT_BYTES).then(|| bytes.to_vec());
                now.kept += bytes.len();
                drop(now);
                let (data, is_value) = (result.data.take(), result.data_is_value);
                result.clear_stdout();
                result.clear_stream_order();
                result.data = data;
                result.data_is_value = is_value;
            }
        }
        // A refusal of flags (code 2) is reworded by kaish after the tool returns.
        if !result.err.is_empty() && result.code != 2 && session_stderr(ctx) {
            self.note_error(&result.err);
            self.stderr.write(result.err.as_bytes(), &ctx.cancel).await;
            result.err.clear();
            result.stderr_published_len = 0;
            result.clear_stream_order();
        }
    }

    /// Writes what no tool of ours wrote, so that it stays in order.
    pub async fn flush(&self, ctx: &ExecContext) {
        self.stdout.flush(&ctx.cancel).await;
        self.stderr.flush(&ctx.cancel).await;
    }
}

/// Whether this command's standard output is the session's.
pub fn session_stdout(ctx: &ExecContext) -> bool {
    ctx.background_job == Some(SESSION)
        && ctx.background_stream_output
        && ctx.pipe_stdout.is_none()
        && matches!(ctx.pipeline_position, PipelinePosition::Only | PipelinePosition::Last)
}

/// Whether this command's standard error is the session's.
pub fn session_stderr(ctx: &ExecContext) -> bool {
    ctx.background_job == Some(SESSION) && ctx.background_stream_stderr
}

/// Builtins after which more than variables may be different.
const CHANGERS: [&str; 11] = [
    "alias",
    "unalias",
    "cd",
    "set",
    "export",
    "unset",
    "kaish-ast",
    "kaish-clear",
    "kaish-output-limit",
    "kaish-trash",
    "shift",
];
/// Builtins that show or change aliases: they must not see the hidden ones.
const ALIAS_READERS: [&str; 6] = ["alias", "unalias", "type", "command", "which", "kaish-status"];

/// What kaish says of its own tools, by name. It makes a command line parser for each of them each time it is asked, which took a third
/// of the instructions of a slot.
static SCHEMAS: LazyLock<BTreeMap<String, ToolSchema>> = LazyLock::new(|| {
    let mut tools = ToolRegistry::new();
    register_builtins(&mut tools);
    tools.schemas().into_iter().map(|schema| (schema.name.clone(), schema)).collect()
});

/// Makes ahead what all sessions share, for what this process forks.
pub fn prepare() {
    LazyLock::force(&SCHEMAS);
}

/// A builtin whose output goes to the session's pipes by itself.
pub struct Wrapped {
    inner: Arc<dyn Tool>,
    schema: &'static ToolSchema,
    name: String,
    shared: Arc<Shared>,
    owns_output: bool,
    changes: bool,
    reads_aliases: bool,
}

impl Wrapped {
    /// Wraps every tool of the registry and adds the hidden ones.
    pub fn all(tools: &mut ToolRegistry, shared: &Arc<Shared>) {
        let names: Vec<String> = tools.names().into_iter().map(str::to_owned).collect();
        for name in names {
            let (Some(inner), Some(schema)) = (tools.get(&name), SCHEMAS.get(&name)) else { continue };
            tools.register(Wrapped {
                inner,
                schema,
                shared: Arc::clone(shared),
                owns_output: schema.owns_output,
                changes: CHANGERS.contains(&name.as_str()),
                reads_aliases: ALIAS_READERS.contains(&name.as_str()),
                name,
            });
        }
        tools.register(External { shared: Arc::clone(shared) });
        tools.register(InsideTool { shared: Arc::clone(shared) });
        tools.register(Call { shared: Arc::clone(shared) });
    }
}

fn take_hidden(aliases: &mut HashMap<String, String>) -> Vec<(String, String)> {
    let hidden: Vec<String> =
        aliases.iter().filter(|(_, value)| is_hidden(value)).map(|(name, _)| name.clone()).collect();
    hidden.into_iter().filter_map(|name| aliases.remove_entry(&name)).collect()
}

fn is_hidden(alias: &str) -> bool {
    alias.strip_prefix(EXTERNAL).is_some_and(|rest| rest.starts_with(' '))
}

#[async_trait]
impl Tool for Wrapped {
    fn name(&self) -> &str {
        &self.name
    }

    fn schema(&self) -> ToolSchema {
        self.schema.clone()
    }

    fn validate(&self, args: &ToolArgs) -> Vec<kaish_kernel::validator::ValidationIssue> {
        self.inner.validate(args)
    }

    fn refused_flags(&self) -> &[RefusedFlag] {
        self.inner.refused_flags()
    }

    async fn execute(&self, args: ToolArgs, ctx: &mut dyn ToolCtx) -> ExecResult {
        self.execute_flow(args, ctx).await.into_result()
    }

    async fn execute_flow(&self, args: ToolArgs, tool_ctx: &mut dyn ToolCtx) -> ToolFlow {
        let mut hidden = Vec::new();
        let mut streamed = None;
        if let Some(ctx) = tool_ctx.as_any_mut().downcast_mut::<ExecContext>() {
            self.shared.flush(ctx).await;
            if self.reads_aliases {
                hidden = take_hidden(&mut ctx.aliases);
            }
            if self.name == "kaish-last" {
                self.give_back_last_text(ctx);
            }
            streamed = stream_files(&self.name, &args, ctx, &self.shared).await.map(ToolFlow::Normal);
            if self.name == "exec"
                && let Some(name) = args.positional_text(0)
            {
                // kaish would replace this very process.
                let flow = delegate(&None, &name, &args, ctx).await;
                streamed = Some(ToolFlow::Exit(flow.into_result()));
            }
        }
        let mut flow = match streamed {
            Some(flow) => flow,
            None => self.inner.execute_flow(args, tool_ctx).await,
        };
        if self.changes {
            self.shared.inside_changed.store(true, Ordering::Relaxed);
        }
        if let Some(ctx) = tool_ctx.as_any_mut().downcast_mut::<ExecContext>() {
            for (name, value) in hidden {
                ctx.aliases.entry(name).or_insert(value);
            }
            let result = result_mut(&mut flow);
            // kaish would apply `--json` after us, to nothing.
            if (session_stdout(ctx) || session_stderr(ctx))
                && let Some(format) = ctx.output_format.take()
                && !(self.owns_output && result.ok())
            {
                *result = apply_output_format(std::mem::take(result), format);
            }
            self.shared.publish(result, ctx).await;
        }
        flow
    }
}

impl Wrapped {
    /// The last result's text went to the pipe; `kaish-last` wants it back.
    fn give_back_last_text(&self, ctx: &mut ExecContext) {
        let last = ctx.scope.last_result();
        if last.data.is_some() || last.is_bytes() || !last.text_out().is_empty() {
            return;
        }
        if let Some(bytes) = lock(&self.shared.now).last_text.clone() {
            let mut restored = last.clone();
            match String::from_utf8(bytes) {
                Ok(text) => restored.set_out(text),
                Err(error) => restored.set_out_bytes(error.into_bytes()),
            }
            ctx.scope.set_last_result(restored);
        }
    }
}

/// Files from this size on are passed on piece by piece instead of being read whole.
const STREAMED_FROM: u64 = 1 << 20;

/// `cat FILE…` and `head -c N FILE` of large files into the session's output, without reading them into memory as kaish
/// does. `None`: not such a call.
async fn stream_files(name: &str, args: &ToolArgs, ctx: &ExecContext, shared: &Shared) -> Option<ExecResult> {
    if !session_stdout(ctx) || ctx.output_format.is_some() || !args.flags.is_empty() || args.words.is_some() {
        return None;
    }
    let limit = match name {
        "cat" if args.named.is_empty() => u64::MAX,
        "head" if args.named.len() == 1 && args.positional.len() == 1 => {
            match args.named.get("bytes").or_else(|| args.named.get("c")) {
                Some(Kv::Int(n)) => u64::try_from(*n).ok()?,
                _ => return None,
            }
        }
        _ => return None,
    };
    let mut files = Vec::new();
    let mut largest = 0;
    for arg in &args.positional {
        let Kv::String(path) = arg else { return None };
        let real = ctx.backend.resolve_real_path(&ctx.resolve_path(path));
        let (real, endless) = match real {
            Some(real) => (real, false),
            None if path == "/dev/zero" => (PathBuf::from("/dev/zero"), true),
            None => return None,
        };
        let meta = std::fs::metadata(&real).ok()?;
        if !(meta.is_file() || endless && limit != u64::MAX) {
            return None;
        }
        largest = largest.max(if endless { limit } else { meta.len().min(limit) });
        files.push(real);
    }
    if files.is_empty() || largest < STREAMED_FROM {
        return None;
    }
    for file in files {
        if let Err(error) = stream_file(&file, limit, ctx, shared).await {
            return Some(ExecResult::failure(1, format!("{name}: {}: {error}", file.display())));
        }
        if ctx.cancel.is_cancelled() {
            return Some(ExecResult::failure(130, format!("{name}: interrupted")));
        }
    }
    Some(ExecResult::success(String::new()))
}

async fn stream_file(path: &Path, mut limit: u64, ctx: &ExecContext, shared: &Shared) -> std::io::Result<()> {
    use std::io::Read;
    let mut file = std::fs::File::open(path)?;
    let mut buffer = vec![0; 256 << 10];
    while limit > 0 {
        let most = usize::try_from(limit).unwrap_or(usize::MAX).min(buffer.len());
        let n = file.read(&mut buffer[..most])?;
        if n == 0 || shared.stdout.write(&buffer[..n], &ctx.cancel).await > 0 {
            break;
        }
        limit -= n as u64;
        tokio::task::yield_now().await;
    }
    Ok(())
}

/// Reads and writes what no public call of kaish reaches: aliases, options, positional parameters, export marks.
struct InsideTool {
    shared: Arc<Shared>,
}

#[async_trait]
impl Tool for InsideTool {
    fn name(&self) -> &str {
        INSIDE
    }

    fn schema(&self) -> ToolSchema {
        ToolSchema::new(INSIDE, "Reads and writes the session's inside").with_raw_argv()
    }

    async fn execute(&self, _args: ToolArgs, ctx: &mut dyn ToolCtx) -> ExecResult {
        let Some(ctx) = ctx.as_any_mut().downcast_mut::<ExecContext>() else {
            return ExecResult::failure(1, "no execution context");
        };
        let order = lock(&self.shared.order).take();
        match order {
            // A user who types the hidden name changes nothing.
            None => return ExecResult::failure(127, format!("command not found: {INSIDE}")),
            Some(Order::Look) => {
                let mut aliases = ctx.aliases.clone();
                take_hidden(&mut aliases);
                *lock(&self.shared.inside) = Some(Inside {
                    scope: ctx.scope.clone(),
                    aliases,
                    cwd: ctx.cwd.clone(),
                    prev_cwd: ctx.prev_cwd.clone(),
                    output_limit: ctx.output_limit.clone(),
                });
            }
            Some(Order::Alias { add, remove }) => {
                for name in remove {
                    if ctx.aliases.get(&name).is_some_and(|alias| is_hidden(alias)) {
                        ctx.aliases.remove(&name);
                    }
                }
                for name in add {
                    ctx.aliases.entry(name.clone()).or_insert_with(|| format!("{EXTERNAL} {name}"));
                }
            }
            Some(call @ Order::Call { .. }) => {
                self.shared.order(call);
                return ExecResult::failure(127, format!("command not found: {INSIDE}"));
            }
            Some(Order::Replace(inside)) => {
                ctx.scope = inside.scope;
                ctx.aliases = inside.aliases;
                ctx.set_cwd(inside.cwd);
                ctx.prev_cwd = inside.prev_cwd;
                ctx.output_limit = inside.output_limit;
            }
        }
        // kaish stores a command's result as the last one: give it the one it has.
        ctx.scope.last_result().clone()
    }
}

fn result_mut(flow: &mut ToolFlow) -> &mut ExecResult {
    match flow {
        ToolFlow::Normal(result) | ToolFlow::Exit(result) => result,
        other => unreachable!("kaish =0.18.1 has no other way for a tool to end: {other:?}"),
    }
}

/// Calls a command with literal words inside a program of its own, so that a call has what a program has: standard input,
/// environment, live output.
struct Call {
    shared: Arc<Shared>,
}

#[async_trait]
impl Tool for Call {
    fn name(&self) -> &str {
        CALL
    }

    fn schema(&self) -> ToolSchema {
        ToolSchema::new(CALL, "Calls a command with literal words").with_raw_argv().with_owned_output()
    }

    async fn execute(&self, args: ToolArgs, ctx: &mut dyn ToolCtx) -> ExecResult {
        self.execute_flow(args, ctx).await.into_result()
    }

    async fn execute_flow(&self, _args: ToolArgs, ctx: &mut dyn ToolCtx) -> ToolFlow {
        let order = lock(&self.shared.order).take();
        match (order, ctx.as_any_mut().downcast_mut::<ExecContext>()) {
            (Some(Order::Call { name, argv }), Some(ctx)) => {
                let mut words = ToolArgs::new();
                words.positional.push(Kv::String(name.clone()));
                words.positional.extend(argv);
                delegate(&None, &name, &words, ctx).await
            }
            // A user who types the hidden name calls nothing.
            _ => ToolFlow::Normal(ExecResult::failure(127, format!("command not found: {CALL}"))),
        }
    }
}

/// Whether a word may be a hidden alias: an alias is split at blanks and read as words again.
pub fn can_alias(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '/' | '+' | '-' | '@' | ':');
    !name.is_empty() && !name.starts_with('-') && name.chars().all(plain)
}
