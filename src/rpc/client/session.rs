//! A kernel over a socket as a [`Session`].

use super::kernel::KernelClient;
use crate::core::error::Result;
use crate::core::exec::{ExecRequest, ExecResult};
use crate::core::ids::{Digest, ExecId};
use crate::core::info::{MountInfo, ToolInfo, VarInfo};
use crate::core::missed::MissedEntry;
use crate::core::value::Value;
use crate::session::{OutputSink, Session, StateSnapshot};

#[async_trait::async_trait(?Send)]
impl Session for KernelClient {
    async fn execute(&self, request: ExecRequest) -> Result<ExecResult> {
        self.run_to_end(&request).await
    }

    async fn execute_streaming(&self, request: ExecRequest, sink: &dyn OutputSink) -> Result<ExecResult> {
        let execution = self.run(&request).await?;
        let exec = execution.exec();
        let mut detached = false;
        let delivered = execution.output(0, async |event| {
            let taken = sink.take(exec, event).await;
            detached = taken.is_err();
            taken
        });
        match delivered.await {
            Err(error) if !detached => Err(error),
            Ok(()) | Err(_) => execution.result().await,
        }
    }

    async fn interrupt(&self, exec: ExecId) -> Result<()> {
        self.interrupt_execution(exec).await.map(drop)
    }

    async fn get_var(&self, name: &str) -> Result<Value> {
        self.var(name).await
    }

    async fn set_var(&self, name: &str, value: Value) -> Result<()> {
        self.put_var(name, &value, 0).await
    }

    async fn list_vars(&self) -> Result<Vec<VarInfo>> {
        self.vars().await
    }

    async fn mount(&self, path: &str, source: &str, writable: bool) -> Result<()> {
        self.mount_at(path, source, writable, 0).await
    }

    async fn unmount(&self, path: &str) -> Result<()> {
        self.unmount_at(path, 0).await
    }

    async fn list_mounts(&self) -> Result<Vec<MountInfo>> {
        self.mounts().await
    }

    async fn list_tools(&self) -> Result<Vec<ToolInfo>> {
        self.tools().await
    }

    async fn call_tool(&self, name: &str, args: Value) -> Result<ExecResult> {
        self.tool(name, &args).await
    }

    async fn snapshot(&self) -> Result<StateSnapshot> {
        self.save_state().await
    }

    async fn restore(&self, data: &[u8]) -> Result<Vec<MissedEntry>> {
        self.put_state(data, 0).await
    }

    async fn read_blob(&self, hash: Digest) -> Result<Vec<u8>> {
        let mut download = self.open_blob(hash).await?;
        let mut data = Vec::new();
        while let Some(part) = download.next().await? {
            data.extend_from_slice(&part);
        }
        Ok(data)
    }

    async fn write_blob(&self, data: &[u8]) -> Result<Digest> {
        let mut upload = self.new_blob().await?;
        upload.write(data).await?;
        upload.finish().await.map(|(hash, _)| hash)
    }
}
