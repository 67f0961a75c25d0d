//! The tools that kaish gets from us: every builtin wrapped, and three hidden ones.
//!
//! ```text
//!  kaish ──▶ Wrapped(builtin) ── output ──▶ Outlet (waits while the pipe is full) ──▶ fd 1, 2
//!        ──▶ External (reached by hidden aliases) ──▶ child with fd 1, 2 themselves
//!        ──▶ Inside: accesses state that kaish's public calls do not reach
//! ```
//!
//! A wrapped builtin's output is written at once and removed from its result, so that loops do not
//! collect gigabytes; a small amount is kept for `kaish-last`.

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

/// A job number standing for "the session itself": with it kaish records whether a command's output
/// is the session's output. No such job exists.
pub const SESSION: JobId = JobId(u64::MAX);
/// Prefix of hidden tools.
pub const HIDDEN: &str = "__ryokan-";
/// Name of the hidden tool that runs external commands.
pub const EXTERNAL: &str = "__ryokan-external";
/// Name of the hidden tool that accesses the session's internal state.
pub const INSIDE: &str = "__ryokan-inside";

/// Name of the hidden tool that calls a command with literal words.
pub const CALL: &str = "__ryokan-call";

/// State shared by the tools and the engine.
pub struct Shared {
    /// fd 1.
    pub stdout: Outlet,
    /// fd 2.
    pub stderr: Outlet,
    now: Mutex<Now>,
    /// Whether anything but variables may have changed since the last look.
    pub inside_changed: AtomicBool,
    inside: Mutex<Option<Inside>>,
    order: Mutex<Option<Order>>,
    scripts_read: Arc<AtomicBool>,
}

/// State of the running execution.
#[derive(Default)]
struct Now {
    kept: usize,
    last_text: Option<Vec<u8>>,
    last_output: Option<OutputData>,
    last_error: String,
    /// Whether every redirect of standard error that can run now is `2>&1`.
    only_merges: bool,
}

/// The session's internal state, as read by [`INSIDE`].
pub struct Inside {
    /// Variables, options, positional parameters; cheap to clone.
    pub scope: Scope,
    /// Aliases without the hidden ones.
    pub aliases: HashMap<String, String>,
    /// The working directory.
    pub cwd: PathBuf,
    /// The previous working directory.
    pub prev_cwd: Option<PathBuf>,
    /// Output limit.
    pub output_limit: OutputLimitConfig,
}

/// An order for [`INSIDE`].
pub enum Order {
    /// Read the state for [`Shared::take_inside`].
    Look,
    /// Add and remove hidden aliases.
    Alias {
        /// Names of external commands.
        add: Vec<String>,
        /// Names that are no longer external commands.
        remove: Vec<String>,
    },
    /// Replace the session's internal state.
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

/// Limit of an execution's output kept in kaish's results, bytes.
const KEPT_BYTES: usize = 256 << 10;
/// Limit of structured output in an execution's end, as text, bytes.
const STRUCTURED_BYTES: usize = 1 << 20;

impl Shared {
    /// Wraps these two outlets.
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

    /// Resets the state for an execution.
    pub fn begin(&self, only_merges: bool) {
        let mut now = lock(&self.now);
        let last_text = now.last_text.take();
        *now = Now { only_merges, last_text, ..Now::default() };
    }

    /// The last line of standard error that the execution wrote through kaish.
    pub fn last_error(&self) -> String {
        lock(&self.now).last_error.clone()
    }

    /// The structured form of the last output, if any.
    pub fn take_output(&self) -> Option<OutputData> {
        lock(&self.now).last_output.take()
    }

    /// Marks further output as unstructured.
    pub fn forget_output(&self) {
        lock(&self.now).last_output = None;
    }

    /// Whether standard error outside the session's goes where standard output goes.
    pub fn only_merges(&self) -> bool {
        lock(&self.now).only_merges && !self.scripts_read.load(Ordering::Relaxed)
    }

    /// The state read by [`Order::Look`].
    pub fn take_inside(&self) -> Option<Inside> {
        lock(&self.inside).take()
    }

    /// Sets [`INSIDE`]'s next order.
    pub fn order(&self, order: Order) {
        *lock(&self.order) = Some(order);
    }

    /// Records facts about the execution's end from a piece of output.
    pub fn note_error(&self, text: &str) {
        if let Some(line) = text.lines().rev().find(|line| !line.trim().is_empty()) {
            lock(&self.now).last_error = line.chars().take(500).collect();
        }
    }

    /// Output that kaish passed on after a statement, made by none of our tools.
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

    /// Writes a tool's output and removes it from the result.
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
        // kaish rewords a refusal of flags (code 2) after the tool returns.
        if !result.err.is_empty() && result.code != 2 && session_stderr(ctx) {
            self.note_error(&result.err);
            self.stderr.write(result.err.as_bytes(), &ctx.cancel).await;
            result.err.clear();
            result.stderr_published_len = 0;
            result.clear_stream_order();
        }
    }

    /// Writes output of other origin, in order.
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

/// Builtins that may change more than variables.
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
/// Builtins that show or change aliases: they must not see hidden ones.
const ALIAS_READERS: [&str; 6] = ["alias", "unalias", "type", "command", "which", "kaish-status"];

/// kaish's schemas of its own tools, by name. kaish builds a command line parser for each at every
/// request, which took a third of a warm worker's instructions.
static SCHEMAS: LazyLock<BTreeMap<String, ToolSchema>> = LazyLock::new(|| {
    let mut tools = ToolRegistry::new();
    register_builtins(&mut tools);
    tools.schemas().into_iter().map(|schema| (schema.name.clone(), schema)).collect()
});

/// Computes shared tables in advance, for forks of this process.
pub fn prepare() {
    LazyLock::force(&SCHEMAS);
}

/// A builtin that writes to the session's pipes itself.
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
                // kaish would replace this process.
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
            // kaish would apply `--json` after us, to an empty result.
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
    /// The last result's text went to the pipe; `kaish-last` needs it.
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

/// Files from this size on are copied in pieces instead of being read whole.
const STREAMED_FROM: u64 = 1 << 20;

/// `cat FILE…` and `head -c N FILE` of large files into the session's output, without kaish's
/// reading into memory. `None`: another call.
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

/// Accesses state that kaish's public calls do not reach: aliases, options, positional parameters,
/// export marks.
struct InsideTool {
    shared: Arc<Shared>,
}

#[async_trait]
impl Tool for InsideTool {
    fn name(&self) -> &str {
        INSIDE
    }

    fn schema(&self) -> ToolSchema {
        ToolSchema::new(INSIDE, "Accesses the session's internal state").with_raw_argv()
    }

    async fn execute(&self, _args: ToolArgs, ctx: &mut dyn ToolCtx) -> ExecResult {
        let Some(ctx) = ctx.as_any_mut().downcast_mut::<ExecContext>() else {
            return ExecResult::failure(1, "no execution context");
        };
        let order = lock(&self.shared.order).take();
        match order {
            // A user who types the hidden name has no effect.
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
        // kaish stores a command's result as the last one: return the existing one.
        ctx.scope.last_result().clone()
    }
}

fn result_mut(flow: &mut ToolFlow) -> &mut ExecResult {
    match flow {
        ToolFlow::Normal(result) | ToolFlow::Exit(result) => result,
        other => unreachable!("kaish =0.18.1 has no other way for a tool to end: {other:?}"),
    }
}

/// Calls a command with literal words inside its own program, so that a call has standard input,
/// environment and live output.
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
            // A user who types the hidden name has no effect.
            _ => ToolFlow::Normal(ExecResult::failure(127, format!("command not found: {CALL}"))),
        }
    }
}

/// Whether a word can be a hidden alias: an alias is split at blanks and parsed again.
pub fn can_alias(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '/' | '+' | '-' | '@' | ':');
    !name.is_empty() && !name.starts_with('-') && name.chars().all(plain)
}
