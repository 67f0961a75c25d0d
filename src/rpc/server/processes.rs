//! Processes beside the engine: spawn, list, signal; and `Process`, whose drop ends one.

use std::rc::Rc;

use capnp_rpc::new_client;

use super::kernel::KernelServer;
use crate::core::error::Error;
use crate::core::exec::{TerminalSize, Work};
use crate::core::ids::ExecId;
use crate::rpc::convert::process::{read_process_request, write_processes};
use crate::rpc::convert::to_capnp;
use crate::rpc::schema::ryokan_capnp::{kernel, process};
use crate::supervisor::kernel::Kernel;

/// A client's hold on a process.
struct ProcessServer {
    kernel: Rc<Kernel>,
    exec: ExecId,
    detached: bool,
}

impl process::Server for ProcessServer {}

impl Drop for ProcessServer {
    fn drop(&mut self) {
        if !self.detached {
            self.kernel.end_process(self.exec);
        }
    }
}

impl KernelServer {
    pub(super) async fn spawn_process(
        &self,
        params: kernel::SpawnParams,
        mut results: kernel::SpawnResults,
    ) -> capnp::Result<()> {
        let request = read_process_request(params.get()?.get_request()?).map_err(to_capnp)?;
        let detached = matches!(&request.what, Work::Process(program) if program.detached);
        let execution = self.kernel.spawn(request, self.actor.clone()).await.map_err(to_capnp)?;
        let process = ProcessServer { kernel: Rc::clone(&self.kernel), exec: execution.id, detached };
        let mut results = results.get();
        results.set_exec_id(execution.id.0);
        results.set_process(new_client(process));
        results.set_execution(self.execution_client(execution));
        Ok(())
    }

    pub(super) async fn list_processes(&self, mut results: kernel::ProcessesResults) -> capnp::Result<()> {
        let processes = self.kernel.running_processes();
        write_processes(results.get().init_processes(processes.len() as u32), &processes);
        Ok(())
    }

    pub(super) async fn set_terminal_size(&self, params: kernel::ResizeTerminalParams) -> capnp::Result<()> {
        let params = params.get()?;
        let (exec, size) = (ExecId(params.get_exec_id()), (params.get_rows(), params.get_columns()));
        let size = TerminalSize::from_wire(size.0, size.1);
        let size = size.ok_or_else(|| to_capnp(Error::invalid("a terminal has at least one row and one column")))?;
        self.kernel.resize_terminal(exec, size).await.map_err(to_capnp)
    }

    pub(super) async fn send_signal(&self, params: kernel::SignalProcessParams) -> capnp::Result<()> {
        let params = params.get()?;
        let (exec, signal) = (ExecId(params.get_exec_id()), params.get_signal());
        self.kernel.signal_process(exec, signal).await.map_err(to_capnp)
    }
}
