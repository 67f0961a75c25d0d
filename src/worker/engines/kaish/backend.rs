//! kaish's view of the outside: the operating system's files, and this kernel's MCP tools.
//!
//! The file system is `LocalFs` at `/`: the sandbox around the process decides what is visible.
//! Tools unknown to kaish are looked up here last; a call is sent as `tool_call` and waits for
//! `tool_result`.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use async_trait::async_trait;
use kaish_kernel::backend::MountInfo;
use kaish_kernel::tools::{ExecContext, ParamSchema, ToolArgs, ToolCtx, ToolSchema};
use kaish_kernel::vfs::{DirEntry, LocalFs, VfsRouter};
use kaish_kernel::{
    BackendError, BackendResult, KernelBackend, LocalBackend, PatchOp, ReadRange, ToolInfo, ToolResult, WriteMode,
};
use kaish_types::PathAccess;
use serde_json::Value as Json;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::values;
use crate::core::value::Value;
use crate::link::frames::DynamicTool;

/// An outgoing call of a dynamic tool.
#[derive(Debug)]
pub struct ToolCall {
    /// The call's id.
    pub call: u64,
    /// `server__tool`.
    pub name: String,
    /// Named arguments.
    pub args: Value,
}

/// The answer to a [`ToolCall`].
#[derive(Debug)]
pub enum ToolAnswer {
    /// Success: a value and its text.
    Done(Value, String),
    /// Failure.
    Failed(String),
}

/// A text read by `source` or a script while recording.
pub type SourceText = String;

/// Files and dynamic tools.
pub struct Backend {
    files: LocalBackend,
    tools: Mutex<BTreeMap<String, DynamicTool>>,
    calls: mpsc::UnboundedSender<ToolCall>,
    waiting: Mutex<HashMap<u64, oneshot::Sender<ToolAnswer>>>,
    next_call: AtomicU64,
    watching: AtomicBool,
    seen: Mutex<Vec<SourceText>>,
    scripts: Arc<AtomicBool>,
}

/// Size limit of files searched for function definitions.
const SOURCE_BYTES: usize = 1 << 20;
/// Limit of recorded files per execution.
const SOURCES_KEPT: usize = 64;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing under these locks can panic halfway.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Backend {
    /// A backend whose tool calls go to `calls`.
    pub fn new(calls: mpsc::UnboundedSender<ToolCall>) -> Self {
        let mut router = VfsRouter::new();
        router.mount("/", LocalFs::new("/"));
        Backend {
            files: LocalBackend::new(Arc::new(router)),
            tools: Mutex::default(),
            calls,
            waiting: Mutex::default(),
            next_call: AtomicU64::new(1),
            watching: AtomicBool::new(false),
            seen: Mutex::default(),
            scripts: Arc::default(),
        }
    }

    /// Becomes true when a `.kai` script is read, whose redirects were not inspected.
    pub fn scripts_read(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.scripts)
    }

    /// The current MCP tools.
    pub fn set_tools(&self, tools: Vec<DynamicTool>) {
        *lock(&self.tools) = tools.into_iter().map(|tool| (tool.name.clone(), tool)).collect();
    }

    /// Passes an answer to its waiting call; an answer to an unknown call is dropped.
    pub fn answer(&self, call: u64, answer: ToolAnswer) {
        if let Some(waiting) = lock(&self.waiting).remove(&call) {
            // The call may have been interrupted.
            let _ = waiting.send(answer);
        }
    }

    /// Whether there is a dynamic tool of that name.
    pub fn has_tool(&self, name: &str) -> bool {
        lock(&self.tools).contains_key(name)
    }

    /// The dynamic tools' names.
    pub fn tool_names(&self) -> Vec<String> {
        lock(&self.tools).keys().cloned().collect()
    }

    /// Starts or stops recording the texts that are read.
    pub fn watch_sources(&self, on: bool) {
        self.watching.store(on, Ordering::Relaxed);
    }

    /// Takes the texts recorded since the last call.
    pub fn take_sources(&self) -> Vec<SourceText> {
        std::mem::take(&mut *lock(&self.seen))
    }

    /// Calls a dynamic tool with these arguments, outside of any program.
    ///
    /// # Errors
    /// The tool's error, or that no client can serve the call.
    pub async fn ask(
        &self,
        name: &str,
        args: Value,
        cancel: &CancellationToken,
    ) -> Result<(Value, String), Unanswered> {
        let call = self.next_call.fetch_add(1, Ordering::Relaxed);
        let (sender, answer) = oneshot::channel();
        lock(&self.waiting).insert(call, sender);
        let request = ToolCall { call, name: name.to_owned(), args };
        if self.calls.send(request).is_err() {
            lock(&self.waiting).remove(&call);
            return Err(Unanswered::Failed("tool calls are not available here".into()));
        }
        tokio::select! {
            answer = answer => match answer {
                Ok(ToolAnswer::Done(value, text)) => Ok((value, text)),
                Ok(ToolAnswer::Failed(message)) => Err(Unanswered::Failed(message)),
                Err(_) => Err(Unanswered::Failed("the call was abandoned".into())),
            },
            () = cancel.cancelled() => {
                lock(&self.waiting).remove(&call);
                Err(Unanswered::Interrupted)
            }
        }
    }

    async fn call(&self, name: &str, args: ToolArgs, ctx: &mut dyn ToolCtx) -> ToolResult {
        let cancel = ctx.as_any().downcast_ref::<ExecContext>().map(|ctx| ctx.cancel.clone()).unwrap_or_default();
        match self.ask(name, named_arguments(args), &cancel).await {
            Ok((value, text)) => tool_done(&value, text),
            Err(Unanswered::Failed(message)) => ToolResult::failure(1, format!("{name}: {message}")),
            Err(Unanswered::Interrupted) => ToolResult::failure(130, format!("{name}: interrupted")),
        }
    }
}

/// Why a dynamic tool gave no answer.
#[derive(Debug)]
pub enum Unanswered {
    /// It failed.
    Failed(String),
    /// The execution was interrupted.
    Interrupted,
}

/// A tool's answer on standard output: its text, else its value.
pub fn shown(value: &Value, text: String) -> String {
    let mut text = match (text.is_empty(), value) {
        (false, _) | (true, Value::Null) => text,
        (true, Value::String(s)) => s.clone(),
        (true, other) => other.to_plain_json().to_string(),
    };
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    text
}

/// A tool's answer: text on standard output, and structured data if its value is more than text.
fn tool_done(value: &Value, text: String) -> ToolResult {
    let data = match value {
        Value::Null | Value::String(_) => None,
        other => Some(other.to_plain_json()),
    };
    let mut result = ToolResult::success(shown(value, text));
    result.data = data;
    result
}

fn named_arguments(args: ToolArgs) -> Value {
    let mut fields: Vec<(String, Value)> =
        args.named.iter().map(|(key, value)| (key.clone(), values::from_kaish(value))).collect();
    let mut flags: Vec<_> = args.flags.into_iter().filter(|flag| !args.named.contains_key(flag)).collect();
    flags.sort();
    fields.extend(flags.into_iter().map(|flag| (flag, Value::Bool(true))));
    if !args.positional.is_empty() {
        // Positional arguments beyond the schema: the server reports them.
        fields.push(("args".into(), Value::Array(args.positional.iter().map(values::from_kaish).collect())));
    }
    Value::Object(fields)
}

fn tool_info(tool: &DynamicTool) -> ToolInfo {
    let mut schema = ToolSchema::new(&tool.name, &tool.description);
    let required: Vec<&str> =
        tool.schema.get("required").and_then(Json::as_array).into_iter().flatten().filter_map(Json::as_str).collect();
    for (name, property) in tool.schema.get("properties").and_then(Json::as_object).into_iter().flatten() {
        let kind = match property.get("type").and_then(Json::as_str) {
            Some("integer") => "int",
            Some("number") => "float",
            Some("boolean") => "bool",
            Some("string") => "string",
            _ => "any",
        };
        let description = property.get("description").and_then(Json::as_str).unwrap_or_default();
        schema = schema.param(
            ParamSchema::new(name, kind).with_description(description).with_required(required.contains(&name.as_str())),
        );
    }
    ToolInfo { name: tool.name.clone(), description: tool.description.clone(), schema }
}

#[async_trait]
impl KernelBackend for Backend {
    async fn read(&self, path: &Path, range: Option<ReadRange>) -> BackendResult<Vec<u8>> {
        let whole = range.is_none();
        if path.extension().is_some_and(|extension| extension == "kai") {
            self.scripts.store(true, Ordering::Relaxed);
        }
        let bytes = self.files.read(path, range).await?;
        if whole && bytes.len() <= SOURCE_BYTES && self.watching.load(Ordering::Relaxed) {
            let mut seen = lock(&self.seen);
            if seen.len() < SOURCES_KEPT
                && let Ok(text) = std::str::from_utf8(&bytes)
                && (text.contains("()") || text.contains("function "))
            {
                seen.push(text.to_owned());
            }
        }
        Ok(bytes)
    }
    async fn write(&self, path: &Path, content: &[u8], mode: WriteMode) -> BackendResult<()> {
        self.files.write(path, content, mode).await
    }
    async fn append(&self, path: &Path, content: &[u8]) -> BackendResult<()> {
        self.files.append(path, content).await
    }
    async fn patch(&self, path: &Path, ops: &[PatchOp]) -> BackendResult<()> {
        self.files.patch(path, ops).await
    }
    async fn list(&self, path: &Path) -> BackendResult<Vec<DirEntry>> {
        self.files.list(path).await
    }
    async fn stat(&self, path: &Path) -> BackendResult<DirEntry> {
        self.files.stat(path).await
    }
    async fn stat_write_parent(&self, path: &Path) -> BackendResult<DirEntry> {
        self.files.stat_write_parent(path).await
    }
    async fn mkdir(&self, path: &Path) -> BackendResult<()> {
        self.files.mkdir(path).await
    }
    async fn set_mtime(&self, path: &Path, mtime: SystemTime) -> BackendResult<()> {
        self.files.set_mtime(path, mtime).await
    }
    async fn remove(&self, path: &Path, recursive: bool) -> BackendResult<()> {
        self.files.remove(path, recursive).await
    }
    async fn rename(&self, from: &Path, to: &Path) -> BackendResult<()> {
        self.files.rename(from, to).await
    }
    async fn exists(&self, path: &Path) -> bool {
        self.files.exists(path).await
    }
    async fn lstat(&self, path: &Path) -> BackendResult<DirEntry> {
        self.files.lstat(path).await
    }
    async fn read_link(&self, path: &Path) -> BackendResult<PathBuf> {
        self.files.read_link(path).await
    }
    async fn symlink(&self, target: &Path, link: &Path) -> BackendResult<()> {
        self.files.symlink(target, link).await
    }
    async fn canonicalize(&self, path: &Path, allow_missing_final: bool) -> BackendResult<PathBuf> {
        self.files.canonicalize(path, allow_missing_final).await
    }
    async fn call_tool(&self, name: &str, args: ToolArgs, ctx: &mut dyn ToolCtx) -> BackendResult<ToolResult> {
        if !self.has_tool(name) {
            return Err(BackendError::ToolNotFound(name.to_owned()));
        }
        Ok(self.call(name, args, ctx).await)
    }
    async fn list_tools(&self) -> BackendResult<Vec<ToolInfo>> {
        Ok(lock(&self.tools).values().map(tool_info).collect())
    }
    async fn get_tool(&self, name: &str) -> BackendResult<Option<ToolInfo>> {
        Ok(lock(&self.tools).get(name).map(tool_info))
    }
    fn read_only(&self) -> bool {
        false
    }
    async fn path_access(&self, path: &Path) -> BackendResult<PathAccess> {
        self.files.path_access(path).await
    }
    fn backend_type(&self) -> &str {
        "ryokan"
    }
    fn mounts(&self) -> Vec<MountInfo> {
        self.files.mounts()
    }
    fn walk_boundaries(&self) -> Vec<PathBuf> {
        self.files.walk_boundaries()
    }
    fn resolve_real_path(&self, path: &Path) -> Option<PathBuf> {
        self.files.resolve_real_path(path)
    }
}
