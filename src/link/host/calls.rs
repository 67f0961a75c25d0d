//! The calls of an attached link, with plain types and a deadline each.

use std::future::Future;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use capnp::capability::{Promise, Response};
use futures::future::Either;
use serde::{Deserialize, Serialize};
use serde_json::{Value as Json, json};

use super::{CodeCheck, Completions, DynamicTool, WorkerExec, WorkerLink, WorkerReport, decode_report};
use crate::core::error::{Error, Result};
use crate::core::exec::{ExecRequest, Work};
use crate::core::ids::{CheckpointId, ExecId};
use crate::core::info::{ToolInfo, VarInfo};
use crate::core::limits;
use crate::core::value::Value;
use crate::link::binding::KernelBinding;
use crate::link::connector::DescriptorNote;
use crate::link::frames::{FrameError, ReplyHead, parse_up_to};
use crate::link::handshake::Role;
use crate::link::host::callbacks::{self, Over, encode_value};
use crate::link::schema::worker_capnp::exec;
use crate::link::schema::worker_capnp::worker::start_results;
use crate::link::types::WorkerUsage;
use crate::link::types::from_capnp;

/// How long an acknowledgement waits for a start to join.
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_millis(5);

impl WorkerLink {
    /// Starts an execution. The request is sent when this returns; the future resolves when the
    /// worker has accepted the execution. If the execution has ended by then, the listener was
    /// notified.
    ///
    /// # Errors
    /// `Busy` if one runs already, `Lost` if the worker ended.
    pub fn start(&self, exec: WorkerExec) -> impl Future<Output = Result<()>> + 'static {
        match self.start_on_exec_channel(&exec) {
            Some(answer) => Either::Left(answer),
            None => Either::Right(self.start_by_call(&exec)),
        }
    }

    fn start_by_call(&self, exec: &WorkerExec) -> impl Future<Output = Result<()>> + use<> {
        let (id, sent, listener) = (exec.exec, self.send_start(exec), Rc::clone(&self.listener));
        async move {
            let answer = bounded(limits::WORKER_CALL, async { sent?.await.map_err(|e| from_capnp(&e)) }).await?;
            let answer = answer.get().map_err(|e| from_capnp(&e))?;
            if answer.get_ended() {
                let parts = answer.get_end().and_then(|end| Ok((end, answer.get_output()?)));
                let over = parts.and_then(|(end, output)| Over::read(end, output)).map_err(|e| from_capnp(&e))?;
                callbacks::tell_over(&*listener, id, over).await;
            }
            Ok(())
        }
    }

    fn send_start(&self, exec: &WorkerExec) -> Result<Promise<Response<start_results::Owned>, capnp::Error>> {
        let mut request = self.client.start_request();
        let acknowledged = self.acknowledged.take();
        write_exec(request.get().init_exec(), exec.exec, &exec.request, exec.output_kept, &acknowledged)?;
        Ok(request.send().promise)
    }

    /// Passes standard input to an execution; returns once the pipe has taken the bytes.
    ///
    /// # Errors
    /// `NotFound` if that execution does not run or its input has ended.
    pub async fn stdin(&self, exec: ExecId, data: &[u8], end: bool) -> Result<()> {
        let mut pieces = data.chunks(limits::CHUNK_BYTES).peekable();
        loop {
            let piece = pieces.next().unwrap_or_default();
            let last = pieces.peek().is_none();
            let mut request = self.client.stdin_request();
            request.get().set_exec_id(exec.0);
            request.get().set_data(piece);
            request.get().set_end(end && last);
            // No deadline: the code reads at its own pace, and the execution's end also ends the
            // wait.
            request.send().promise.await.map_err(|e| from_capnp(&e))?;
            if last {
                return Ok(());
            }
        }
    }

    /// Interrupts an execution if it runs.
    ///
    /// # Errors
    /// `NotFound` if it does not run.
    pub async fn interrupt(&self, exec: ExecId) -> Result<()> {
        let mut request = self.client.interrupt_request();
        request.get().set_exec_id(exec.0);
        answered(request.send().promise).await.map(drop)
    }

    /// Lets the worker forget an execution, with the next start or after a short delay. Saves a
    /// round trip per execution when executions follow each other.
    pub fn acknowledge_later(self: &Rc<Self>, exec: ExecId) {
        self.acknowledged.borrow_mut().push(exec);
        // One timer serves all: each flush sends every pending acknowledgement.
        if !self.acknowledging.replace(true) {
            let link = Rc::downgrade(self);
            tokio::task::spawn_local(async move {
                tokio::time::sleep(ACKNOWLEDGED_WITHIN).await;
                if let Some(link) = link.upgrade() {
                    link.acknowledging.set(false);
                    link.acknowledge_now().await;
                    // Opened lazily: a kernel that runs one execution does not pay for it.
                    if let Err(error) = link.open_exec_channel().await {
                        tracing::debug!(%error, "the worker has no execution channel");
                    }
                }
            });
        }
    }

    /// Sends the acknowledgements collected by [`Self::acknowledge_later`].
    async fn acknowledge_now(&self) {
        for exec in self.acknowledged.take() {
            if let Err(error) = self.acknowledge(exec).await {
                tracing::debug!(%exec, %error, "acknowledge");
            }
        }
    }

    /// Acknowledges an execution's end: the worker forgets it.
    ///
    /// # Errors
    /// Only those of the link.
    pub async fn acknowledge(&self, exec: ExecId) -> Result<()> {
        let mut request = self.client.acknowledge_request();
        request.get().set_exec_id(exec.0);
        answered(request.send().promise).await.map(drop)
    }

    /// Reads a variable.
    ///
    /// # Errors
    /// `NotFound` if there is none of that name, `Busy` while an execution runs.
    pub async fn get_var(&self, name: &str) -> Result<Value> {
        let reply: GetReply = self.ask(&json!({ "op": "get", "name": name })).await?;
        Value::from_json(&reply.value).map_err(|e| Error::corrupt(format!("value of {name}: {e}")))
    }

    /// Sets a variable.
    ///
    /// # Errors
    /// Those of the engine; `Busy` while an execution runs.
    pub async fn set_var(&self, name: &str, value: &Value) -> Result<()> {
        encode_value(value)?;
        self.ask(&json!({ "op": "set", "name": name, "value": value.to_json() })).await.map(|_: Done| ())
    }

    /// Lists the user's variables.
    ///
    /// # Errors
    /// `Busy` while an execution runs.
    pub async fn vars(&self) -> Result<Vec<VarInfo>> {
        self.ask_up_to(&json!({ "op": "vars" }), limits::LISTING_PARTS).await.map(|reply: VarsReply| reply.vars)
    }

    /// Lists the engine's tools, without dynamic ones.
    ///
    /// # Errors
    /// `Busy` while an execution runs.
    pub async fn tools(&self) -> Result<Vec<ToolInfo>> {
        let reply: ToolsReply = self.ask(&json!({ "op": "tools" })).await?;
        let info = |tool: ToolLine| ToolInfo {
            name: tool.name,
            description: tool.description,
            source: tool.source,
            schema_json: if tool.schema.is_null() { String::new() } else { tool.schema.to_string() },
        };
        Ok(reply.tools.into_iter().map(info).collect())
    }

    /// Completes code at a byte offset.
    ///
    /// # Errors
    /// `Busy` while an execution runs.
    pub async fn complete(&self, code: &str, cursor: usize) -> Result<Completions> {
        let reply: CompleteReply = self.ask(&json!({ "op": "complete", "code": code, "cursor": cursor })).await?;
        Ok(Completions { start: reply.start, matches: reply.matches })
    }

    /// Whether a text is a complete program.
    ///
    /// # Errors
    /// `Busy` while an execution runs.
    pub async fn check(&self, code: &str) -> Result<CodeCheck> {
        let reply: CheckReply = self.ask(&json!({ "op": "check", "code": code })).await?;
        match reply.status.as_str() {
            "complete" => Ok(CodeCheck::Complete),
            "incomplete" => Ok(CodeCheck::Incomplete { indent: reply.indent }),
            "invalid" => Ok(CodeCheck::Invalid),
            other => Err(Error::corrupt(format!("the engine answered {other:?} to a check"))),
        }
    }

    /// Writes every changed state entry to `engine.db`.
    ///
    /// # Errors
    /// `Busy` while an execution runs.
    pub async fn save(&self) -> Result<()> {
        self.ask(&json!({ "op": "save", "changed": true })).await.map(|_: Done| ())
    }

    /// Makes the engine fork a snapshot of itself for that checkpoint. Evicts the oldest snapshot
    /// if there are too many, but not that of `spare`. Returns the reason if there is no snapshot,
    /// else an empty text.
    ///
    /// # Errors
    /// `Busy` while an execution runs.
    pub async fn keep(&self, checkpoint: CheckpointId, spare: Option<CheckpointId>, transient: bool) -> Result<String> {
        let mut request = self.client.keep_request();
        request.get().set_checkpoint(checkpoint.to_string());
        request.get().set_spare(spare.map(|id| id.to_string()).unwrap_or_default());
        request.get().set_transient(transient);
        let answer = answered(request.send().promise).await?;
        let why = answer.get().and_then(|r| Ok(r.get_why_not()?.to_string()?));
        why.map_err(|e| from_capnp(&e))
    }

    /// Stops every process inside until [`Self::thaw`] or the end of the link.
    ///
    /// # Errors
    /// `Busy` while an execution runs; `Deadline` if a process does not stop, then all resume.
    pub async fn freeze(&self) -> Result<()> {
        answered(self.client.freeze_request().send().promise).await.map(drop)
    }

    /// As [`Self::freeze`], also while an execution runs.
    ///
    /// # Errors
    /// `Deadline` if a process does not stop, then all resume. `Unavailable` or `Lost` if the
    /// worker is ending.
    pub async fn freeze_at_work(&self) -> Result<()> {
        let mut request = self.client.freeze_request();
        request.get().set_at_work(true);
        answered(request.send().promise).await.map(drop)
    }

    /// Resumes every process inside.
    ///
    /// # Errors
    /// `Lost` if the worker ended.
    pub async fn thaw(&self) -> Result<()> {
        answered(self.client.thaw_request().send().promise).await.map(drop)
    }

    /// Pauses every process inside until [`Self::resume`] or a stop, also without a daemon.
    /// Idempotent.
    ///
    /// # Errors
    /// `Busy` while an execution runs; `Deadline` if a process does not stop, then all resume;
    /// `Unsupported` for a worker of an earlier build.
    pub async fn suspend(&self) -> Result<()> {
        answered(self.client.suspend_request().send().promise).await.map(drop)
    }

    /// As [`Self::suspend`], for a move or a copy of the worker's machine: a daemon that adopts the worker resumes it.
    ///
    /// # Errors
    /// As [`Self::suspend`].
    pub async fn suspend_for_copy(&self) -> Result<()> {
        let mut request = self.client.suspend_request();
        request.get().set_copied(true);
        answered(request.send().promise).await.map(drop)
    }

    /// Ends the pause, if there is one.
    ///
    /// # Errors
    /// `Lost` if the worker ended.
    pub async fn resume(&self) -> Result<()> {
        answered(self.client.resume_request().send().promise).await.map(drop)
    }

    /// Sends the engine the current list of dynamic tools.
    ///
    /// # Errors
    /// `InvalidArgument` if their descriptions are too large for a frame.
    pub async fn dynamic_tools(&self, tools: &[DynamicTool]) -> Result<()> {
        let json = to_json(&json!({ "op": "dynamic_tools", "tools": tools }))?;
        let mut request = self.client.dynamic_tools_request();
        request.get().set_json(&json);
        answered(request.send().promise).await.map(drop)
    }

    /// Whether descriptors can be passed to this worker.
    pub fn passes_descriptors(&self) -> bool {
        self.connector.passes_descriptors()
    }

    /// Passes a descriptor and returns its token for the next call.
    ///
    /// # Errors
    /// `Unavailable` or `Deadline` if the worker does not take it, `Unsupported` if descriptors
    /// cannot be passed.
    pub async fn pass_descriptor(&self, descriptor: OwnedFd) -> Result<u64> {
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|e| Error::internal(format!("no random bytes: {e}")))?;
        // 0 means no token.
        let token = u64::from_le_bytes(random) | 1;
        let proof = self.identity.now().proof(Role::Descriptor, &token.to_le_bytes(), b"");
        let passing = self.connector.pass_descriptor(DescriptorNote { token, proof }, descriptor);
        match tokio::time::timeout(limits::WORKER_ADOPT, passing).await {
            Ok(Ok(())) => Ok(token),
            Ok(Err(error)) if error.kind() == std::io::ErrorKind::Unsupported => {
                Err(Error::unsupported("no descriptor can be passed to this worker").reason("descriptors"))
            }
            Ok(Err(error)) => Err(Error::unavailable(format!("the worker did not take a descriptor: {error}"))),
            Err(_) => Err(Error::deadline("the worker did not take a descriptor in time")),
        }
    }

    /// Binds a warm worker to a kernel and returns its attach report.
    ///
    /// # Errors
    /// The errors of the kernel's folder, mounts and state; the worker then ends. `Lost` or
    /// `Unavailable` if the worker has ended already.
    pub async fn bind_kernel(&self, binding: &KernelBinding) -> Result<WorkerReport> {
        let json = serde_json::to_vec(binding).map_err(|e| Error::internal(format!("encode the binding: {e}")))?;
        let mut request = self.client.bind_kernel_request();
        request.get().set_json(&json);
        let answer = bounded(limits::WORKER_START, async { request.send().promise.await.map_err(|e| from_capnp(&e)) });
        let answer = answer.await?;
        let report = answer.get().and_then(|answer| decode_report(answer.get_report()?));
        let report = report.map_err(|e| from_capnp(&e))?;
        self.identity.become_kernels(binding.kernel, binding.epoch);
        if let Some(copy) = &binding.copy {
            self.identity.become_copy(copy.worker, copy.secret);
        }
        Ok(report)
    }

    /// Shows `source` at `path`. With `mount`, a detached mount, `source` is only the displayed
    /// name.
    ///
    /// # Errors
    /// The mount's errors; the hint names a missing prerequisite.
    pub async fn bind(&self, path: &Path, source: &Path, writable: bool, mount: Option<OwnedFd>) -> Result<()> {
        let text = |p: &Path| -> Result<String> {
            p.to_str().map(str::to_owned).ok_or_else(|| Error::invalid(format!("{} is not UTF-8", p.display())))
        };
        let token = match mount {
            Some(mount) => self.pass_descriptor(mount).await?,
            None => 0,
        };
        let mut request = self.client.bind_request();
        request.get().set_path(text(path)?);
        request.get().set_source(text(source)?);
        request.get().set_writable(writable);
        request.get().set_token(token);
        answered(request.send().promise).await.map(drop)
    }

    /// Removes a mount.
    ///
    /// # Errors
    /// `NotFound` if nothing is bound there, `Busy` if it is in use.
    pub async fn unbind(&self, path: &Path) -> Result<()> {
        let path = path.to_str().ok_or_else(|| Error::invalid(format!("{} is not UTF-8", path.display())))?;
        let mut request = self.client.unbind_request();
        request.get().set_path(path);
        answered(request.send().promise).await.map(drop)
    }

    /// Reads the current resource usage.
    ///
    /// # Errors
    /// Only those of the link.
    pub async fn usage(&self) -> Result<WorkerUsage> {
        let answer = answered(self.client.usage_request().send().promise).await?;
        let usage = answer.get().map_err(|e| from_capnp(&e))?;
        Ok(WorkerUsage {
            memory_bytes: usage.get_memory_bytes(),
            pids: usage.get_pids(),
            cpu_us: usage.get_cpu_us(),
            workspace_bytes: usage.get_workspace_bytes(),
        })
    }

    /// Whether the worker answers within that time.
    pub fn answers_within(&self, time: Duration) -> impl Future<Output = bool> + 'static {
        let mut answer = self.client.usage_request().send().promise;
        async move {
            // Two halves: if this process itself was stopped, the first half expires before a
            // received answer can be read.
            for _ in 0..2 {
                if let Ok(answered) = tokio::time::timeout(time / 2, &mut answer).await {
                    return answered.is_ok();
                }
            }
            false
        }
    }

    /// Saves and ends the worker. Returns once the state is saved; the exit follows within `grace`.
    ///
    /// # Errors
    /// The errors of saving.
    pub async fn stop(&self, grace: Duration) -> Result<()> {
        self.acknowledge_now().await;
        let mut request = self.client.stop_request();
        request.get().set_grace_ms(u64::try_from(grace.as_millis()).unwrap_or(u64::MAX));
        bounded(grace.saturating_add(limits::WORKER_STOP), async {
            request.send().promise.await.map(drop).map_err(|e| from_capnp(&e))
        })
        .await
    }

    /// Sends one request frame to the engine and decodes its reply.
    async fn ask<R: for<'de> Deserialize<'de>>(&self, frame: &Json) -> Result<R> {
        self.ask_up_to(frame, limits::FRAME_PARTS).await
    }

    /// Sends one request frame, and decodes a reply of at most `parts`.
    async fn ask_up_to<R: for<'de> Deserialize<'de>>(&self, frame: &Json, parts: usize) -> Result<R> {
        let mut request = self.client.request_request();
        request.get().set_json(&to_json(frame)?);
        let answer = answered(request.send().promise).await?;
        let json = answer.get().and_then(|r| r.get_json()).map_err(|e| from_capnp(&e))?;
        decode_reply(json, parts)
    }
}

/// Decodes a reply frame of at most `most` parts.
fn decode_reply<R: for<'de> Deserialize<'de>>(json: &[u8], most: usize) -> Result<R> {
    let unreadable = |error| match error {
        FrameError::TooManyParts { parts, most } => {
            Error::refused(format!("the engine's answer has {parts} parts, more than {most}"))
                .reason("value_parts")
                .hint("have the code write it to a file in the workspace")
        }
        error => Error::corrupt(format!("the engine's answer cannot be read: {error}")),
    };
    let head: ReplyHead = parse_up_to(json, most).map_err(unreadable)?;
    match head.ok {
        true => parse_up_to(json, most).map_err(unreadable),
        false => Err(head.into_error()),
    }
}

/// Encodes an execution for init, with the engine's frame already built.
pub(crate) fn write_exec(
    mut wire: exec::Builder<'_>,
    id: ExecId,
    wanted: &ExecRequest,
    output_kept: u64,
    acknowledged: &[ExecId],
) -> Result<()> {
    let (exec, stdin) = (id.0, wanted.stdin_open || !wanted.stdin.is_empty());
    let json = match &wanted.what {
        Work::Code(code) => {
            to_json(&ExecFrame { op: "exec", exec, code: Some(code), stdin, ..ExecFrame::new(&wanted.env) })?
        }
        Work::Call { name, args } => {
            // The size and depth limits of every value for an engine.
            encode_value(args)?;
            let (name, args) = (Some(name.as_str()), Some(args.to_json()));
            to_json(&ExecFrame { op: "call", exec, name, args, stdin, ..ExecFrame::new(&wanted.env) })?
        }
        Work::Process(_) => return Err(Error::internal("a process is no work of the engine")),
    };
    wire.set_exec_id(exec);
    wire.set_request_json(&json);
    wire.set_stdin(&wanted.stdin);
    wire.set_stdin_open(wanted.stdin_open);
    wire.set_has_stdin(stdin);
    wire.set_timeout_ms(wanted.timeout_ms);
    wire.set_output_kept_bytes(output_kept);
    let mut list = wire.init_acknowledged(acknowledged.len() as u32);
    for (i, exec) in acknowledged.iter().enumerate() {
        list.set(i as u32, exec.0);
    }
    Ok(())
}

pub(crate) async fn answered<T>(promise: impl Future<Output = capnp::Result<T>>) -> Result<T> {
    bounded(limits::WORKER_CALL, async { promise.await.map_err(|e| from_capnp(&e)) }).await
}

pub(crate) async fn bounded<T>(deadline: Duration, call: impl Future<Output = Result<T>>) -> Result<T> {
    match tokio::time::timeout(deadline, call).await {
        Ok(outcome) => outcome,
        Err(_) => Err(Error::deadline("the worker did not answer in time")),
    }
}

fn to_json(frame: &impl Serialize) -> Result<Vec<u8>> {
    let json = serde_json::to_vec(frame).map_err(|e| Error::internal(format!("encode a frame: {e}")))?;
    // Init adds the id.
    if json.len() + 32 > limits::FRAME_JSON_BYTES {
        return Err(Error::invalid(format!("a request of {} bytes is too large for an engine", json.len())));
    }
    Ok(json)
}

#[derive(Serialize)]
struct ExecFrame<'a> {
    op: &'static str,
    exec: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    args: Option<Json>,
    env: &'a [(String, String)],
    stdin: bool,
}

impl<'a> ExecFrame<'a> {
    fn new(env: &'a [(String, String)]) -> Self {
        ExecFrame { op: "", exec: 0, code: None, name: None, args: None, env, stdin: false }
    }
}

#[derive(Deserialize)]
struct Done {}

#[derive(Deserialize)]
struct GetReply {
    value: Json,
}

#[derive(Deserialize)]
struct VarsReply {
    vars: Vec<VarInfo>,
}

#[derive(Deserialize)]
struct ToolsReply {
    tools: Vec<ToolLine>,
}

#[derive(Deserialize)]
struct ToolLine {
    name: String,
    #[serde(default)]
    description: String,
    source: String,
    #[serde(default)]
    schema: Json,
}

#[derive(Deserialize)]
struct CompleteReply {
    start: usize,
    matches: Vec<String>,
}

#[derive(Deserialize)]
struct CheckReply {
    status: String,
    #[serde(default)]
    indent: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vars(count: usize) -> Result<VarsReply> {
        let var = r#"{"name":"x","type":"int","summary":"1"}"#;
        decode_reply(
            format!(r#"{{"id":1,"ok":true,"vars":[{}]}}"#, vec![var; count].join(",")).as_bytes(),
            limits::LISTING_PARTS,
        )
    }

    #[test]
    fn largest_state_can_be_listed() {
        assert_eq!(vars(limits::STATE_ENTRIES).map(|reply| reply.vars.len()), Ok(limits::STATE_ENTRIES));
    }

    #[test]
    fn oversized_replies_are_refused() {
        let refused = vars(limits::LISTING_PARTS).map(drop).expect_err("too many parts");
        assert_eq!((refused.code, &*refused.reason), (crate::core::error::ErrorCode::Refused, "value_parts"));
        let failed = format!(r#"{{"ok":false,"message":"no","x":[{}]}}"#, vec!["0"; limits::FRAME_PARTS].join(","));
        let refused =
            decode_reply::<Done>(failed.as_bytes(), limits::FRAME_PARTS).map(drop).expect_err("too many parts");
        assert_eq!(refused.reason, "value_parts");
    }
}
