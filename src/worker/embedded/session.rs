//! The library's `Session` over an embedded kernel.

use serde_json::Value as Json;

use super::{EmbeddedKernel, field};
use crate::core::error::{Error, Result};
use crate::core::exec::{ExecRequest, ExecResult, Work};
use crate::core::ids::{Digest, ExecId};
use crate::core::info::{MountInfo, ToolInfo, VarInfo};
use crate::core::limits;
use crate::core::missed::MissedEntry;
use crate::core::state::EngineState;
use crate::core::value::Value;
use crate::link::frames::{EntryMeta, Missed, Request};
use crate::session::{OutputSink, Session, StateSnapshot};
use crate::worker::engines::kaish;

#[async_trait::async_trait(?Send)]
impl Session for EmbeddedKernel {
    async fn execute(&self, request: ExecRequest) -> Result<ExecResult> {
        self.run(request, None).await
    }

    async fn execute_streaming(&self, request: ExecRequest, sink: &dyn OutputSink) -> Result<ExecResult> {
        self.run(request, Some(sink)).await
    }

    async fn interrupt(&self, exec: ExecId) -> Result<()> {
        match self.executions.borrow_mut().get_mut(&exec) {
            Some(interrupted) => *interrupted = true,
            None => return Err(Error::not_found(format!("execution {exec} neither runs nor waits"))),
        }
        // Interrupts a running execution; a waiting one checks its mark before it starts.
        self.peer.send(&Request::Interrupt { exec: exec.0 }, None).await
    }

    async fn get_var(&self, name: &str) -> Result<Value> {
        let reply = self.ask(|id| Request::Get { id, name: name.to_owned() }).await?;
        Value::from_json(&field(&reply, "value"))
            .map_err(|error| Error::internal(format!("the engine gave a malformed value: {error}")))
    }

    async fn set_var(&self, name: &str, value: Value) -> Result<()> {
        self.ask(|id| Request::Set { id, name: name.to_owned(), value: value.to_json() }).await.map(drop)
    }

    async fn list_vars(&self) -> Result<Vec<VarInfo>> {
        let reply = self.ask(|id| Request::Vars { id }).await?;
        serde_json::from_value(field(&reply, "vars")).map_err(|error| Error::internal(error.to_string()))
    }

    async fn mount(&self, _path: &str, _source: &str, _writable: bool) -> Result<()> {
        Err(no_mounts())
    }

    async fn unmount(&self, _path: &str) -> Result<()> {
        Err(no_mounts())
    }

    async fn list_mounts(&self) -> Result<Vec<MountInfo>> {
        Ok(Vec::new())
    }

    async fn list_tools(&self) -> Result<Vec<ToolInfo>> {
        let reply = self.ask(|id| Request::Tools { id }).await?;
        let tools = field(&reply, "tools");
        let text = |tool: &Json, name: &str| tool.get(name).and_then(Json::as_str).unwrap_or_default().to_owned();
        let info = |tool: &Json| ToolInfo {
            name: text(tool, "name"),
            description: text(tool, "description"),
            source: text(tool, "source"),
            schema_json: tool.get("schema").filter(|schema| !schema.is_null()).map(Json::to_string).unwrap_or_default(),
        };
        Ok(tools.as_array().into_iter().flatten().map(info).collect())
    }

    async fn call_tool(&self, name: &str, args: Value) -> Result<ExecResult> {
        self.run(ExecRequest { what: Work::Call { name: name.to_owned(), args }, ..ExecRequest::default() }, None).await
    }

    async fn snapshot(&self) -> Result<StateSnapshot> {
        let _turn = self.turn().await?;
        self.peer.saved.borrow_mut().clear();
        self.peer.ask(|id| Request::Save { id }).await?;
        let missed = self.peer.missed.borrow().clone();
        let state = EngineState {
            engine: kaish::ENGINE.into(),
            version: kaish::VERSION.into(),
            entries: self.peer.saved.borrow().clone(),
            missed: missed.clone(),
        };
        Ok(StateSnapshot { data: state.pack()?, missed })
    }

    async fn restore(&self, data: &[u8]) -> Result<Vec<MissedEntry>> {
        // Decoded and checked before the running state changes.
        let state = EngineState::unpack_of(data, kaish::ENGINE)?;
        let _turn = self.turn().await?;
        let id = self.peer.next_id.get();
        self.peer.send(&Request::Load { id }, None).await?;
        for (key, entry) in state.entries {
            let meta: EntryMeta = serde_json::from_value(Json::Object(entry.meta)).unwrap_or_default();
            let mut chunks = entry.body.chunks(limits::FRAME_TAIL_BYTES).peekable();
            while let Some(chunk) = chunks.next() {
                let frame = Request::Entry { key: key.clone(), meta: meta.clone(), more: chunks.peek().is_some() };
                self.peer.send_with_tail(&frame, chunk, None).await?;
            }
        }
        let reply = self.peer.ask(|id| Request::Loaded { id }).await?;
        let missed: Vec<Missed> =
            serde_json::from_value(field(&reply, "missed")).map_err(|error| Error::internal(error.to_string()))?;
        Ok(missed.into_iter().map(MissedEntry::from).collect())
    }

    async fn read_blob(&self, hash: Digest) -> Result<Vec<u8>> {
        self.blobs.borrow().get(&hash).cloned().ok_or_else(|| Error::not_found(format!("there is no blob {hash}")))
    }

    async fn write_blob(&self, data: &[u8]) -> Result<Digest> {
        let hash = Digest::from_bytes(*blake3::hash(data).as_bytes());
        self.blobs.borrow_mut().insert(hash, data.to_vec());
        Ok(hash)
    }
}

fn no_mounts() -> Error {
    Error::unsupported("an embedded kernel has no sandbox and so no mounts")
        .hint("use paths of the host, or a kernel of ryokand")
}
