//! Processes beside a kernel's engine.

use super::connection::{answer, fields};
use super::execution::ExecutionClient;
use super::kernel::KernelClient;
use crate::core::error::{Error, Result};
use crate::core::exec::{ExecRequest, TerminalSize};
use crate::core::ids::ExecId;
use crate::core::info::ProcessInfo;
use crate::rpc::convert::process::{read_processes, write_process_request};
use crate::rpc::schema::ryokan_capnp as wire;

/// A started process. Dropping it ends the process with its tree, unless it is detached.
#[derive(Clone)]
pub struct ProcessClient {
    _process: wire::process::Client,
    /// Its output, input and result.
    pub execution: ExecutionClient,
}

impl KernelClient {
    /// Starts a program beside the engine. It is in the journal when this returns.
    ///
    /// # Errors
    /// The daemon's errors; `invalidArgument` for a request beyond a limit.
    pub async fn spawn(&self, request: &ExecRequest) -> Result<ProcessClient> {
        request.check().map_err(|e| Error::invalid(e.to_string()))?;
        let mut call = self.cap.spawn_request();
        write_process_request(call.get().init_request(), request)?;
        let response = self.link.call(call.send().promise).await?;
        let response = fields(response.get())?;
        let (cap, exec) = (fields(response.get_execution())?, ExecId(response.get_exec_id()));
        let execution = ExecutionClient::new(cap, exec, self.link.clone());
        Ok(ProcessClient { _process: fields(response.get_process())?, execution })
    }

    /// The running processes, oldest first.
    ///
    /// # Errors
    /// The daemon's errors.
    pub async fn processes(&self) -> Result<Vec<ProcessInfo>> {
        let response = self.link.call(self.cap.processes_request().send().promise).await?;
        answer(read_processes(fields(response.get())?.get_processes()))
    }

    /// Sets the size of a process's terminal.
    ///
    /// # Errors
    /// `notFound` if it does not run or has none.
    pub async fn resize_terminal(&self, exec: ExecId, size: TerminalSize) -> Result<()> {
        let mut request = self.cap.resize_terminal_request();
        request.get().set_exec_id(exec.0);
        request.get().set_rows(size.rows);
        request.get().set_columns(size.columns);
        self.link.call(request.send().promise).await.map(drop)
    }

    /// Sends a signal to a process's program.
    ///
    /// # Errors
    /// `notFound` if it does not run.
    pub async fn signal_process(&self, exec: ExecId, signal: i32) -> Result<()> {
        let mut request = self.cap.signal_process_request();
        request.get().set_exec_id(exec.0);
        request.get().set_signal(signal);
        self.link.call(request.send().promise).await.map(drop)
    }
}
