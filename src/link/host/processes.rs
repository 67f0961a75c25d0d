//! Processes beside the engine over the link.

use std::rc::Rc;

use super::WorkerLink;
use super::callbacks::ProcessSinkServer;
use super::calls::answered;
use crate::core::error::Result;
use crate::core::exec::{Program, TerminalSize};
use crate::core::ids::ExecId;

/// A process to start.
#[derive(Debug)]
pub struct WorkerProcess {
    /// Its number.
    pub exec: ExecId,
    /// The program.
    pub program: Program,
    /// Its environment beside the variables of every engine.
    pub env: Vec<(String, String)>,
    /// Whether it has standard input.
    pub has_stdin: bool,
    /// Timeout, milliseconds; 0: none.
    pub timeout_ms: u64,
}

impl WorkerLink {
    /// Starts a program beside the engine. Its output and end go to the listener, as those of an
    /// execution. It ends with this link.
    ///
    /// # Errors
    /// `Busy` with reason `frozen` while the kernel is frozen or restored, `Unsupported` if the
    /// worker cannot.
    pub async fn spawn(&self, process: &WorkerProcess) -> Result<()> {
        let WorkerProcess { exec, program, env, has_stdin, timeout_ms } = process;
        let exec = *exec;
        let mut request = self.client.spawn_request();
        let sink = ProcessSinkServer { exec, listener: Rc::clone(&self.listener) };
        request.get().set_sink(capnp_rpc::new_client(sink));
        let mut wire = request.get().init_process();
        wire.set_exec_id(exec.0);
        let mut list = wire.reborrow().init_argv(program.argv.len() as u32);
        for (i, argument) in program.argv.iter().enumerate() {
            list.set(i as u32, argument);
        }
        let mut list = wire.reborrow().init_env(env.len() as u32);
        for (i, (name, value)) in env.iter().enumerate() {
            list.set(i as u32, format!("{name}={value}"));
        }
        wire.set_cwd(&program.cwd);
        wire.set_has_stdin(*has_stdin);
        wire.set_timeout_ms(*timeout_ms);
        if let Some(TerminalSize { rows, columns }) = program.terminal {
            wire.set_rows(rows);
            wire.set_columns(columns);
        }
        answered(request.send().promise).await.map(drop)
    }

    /// Sends a signal to a process's program.
    ///
    /// # Errors
    /// `NotFound` if it does not run.
    pub async fn signal(&self, exec: ExecId, signal: i32) -> Result<()> {
        let mut request = self.client.signal_request();
        request.get().set_exec_id(exec.0);
        request.get().set_signal(signal);
        answered(request.send().promise).await.map(drop)
    }

    /// Sets the size of a process's terminal.
    ///
    /// # Errors
    /// `NotFound` if it does not run or has none.
    pub async fn resize(&self, exec: ExecId, size: TerminalSize) -> Result<()> {
        let mut request = self.client.resize_request();
        request.get().set_exec_id(exec.0);
        request.get().set_rows(size.rows);
        request.get().set_columns(size.columns);
        answered(request.send().promise).await.map(drop)
    }

    /// Ends every process; returns when each end is reported.
    ///
    /// # Errors
    /// Only those of the link.
    pub async fn end_processes(&self) -> Result<()> {
        answered(self.client.end_processes_request().send().promise).await.map(drop)
    }
}
