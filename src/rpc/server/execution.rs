//! `Execution`: one execution, live or from the journal.

use std::rc::Rc;

use super::require;
use super::sinks::pump;
use crate::core::limits;
use crate::core::rights::{Right, Rights};
use crate::rpc::convert::exec::write_exec_result;
use crate::rpc::convert::{read_data, to_capnp};
use crate::rpc::schema::ryokan_capnp::execution;
use crate::supervisor::kernel::Kernel;
use crate::supervisor::kernel::command::Actor;
use crate::supervisor::kernel::execution::Execution;

/// A client's capability for one execution.
pub(super) struct ExecutionServer {
    pub kernel: Rc<Kernel>,
    pub execution: Rc<Execution>,
    pub rights: Rights,
    pub actor: Actor,
}

impl execution::Server for ExecutionServer {
    async fn result(
        self: Rc<Self>,
        _params: execution::ResultParams,
        mut results: execution::ResultResults,
    ) -> capnp::Result<()> {
        require(self.rights, Right::Read).or_else(|_| require(self.rights, Right::Execute)).map_err(to_capnp)?;
        let result = self.execution.result().await.map_err(to_capnp)?;
        write_exec_result(results.get().init_result(), &result).map_err(to_capnp)
    }

    async fn output(
        self: Rc<Self>,
        params: execution::OutputParams,
        _results: execution::OutputResults,
    ) -> capnp::Result<()> {
        require(self.rights, Right::Read).or_else(|_| require(self.rights, Right::Execute)).map_err(to_capnp)?;
        let params = params.get()?;
        pump(self.execution.id, self.execution.output.reader(params.get_from()), params.get_callback()?).await
    }

    async fn cancel(
        self: Rc<Self>,
        _params: execution::CancelParams,
        _results: execution::CancelResults,
    ) -> capnp::Result<()> {
        require(self.rights, Right::Execute).map_err(to_capnp)?;
        self.kernel.interrupt(self.execution.id, self.actor.clone()).await.map(drop).map_err(to_capnp)
    }

    async fn stdin(self: Rc<Self>, params: execution::StdinParams) -> capnp::Result<()> {
        require(self.rights, Right::Execute).map_err(to_capnp)?;
        let data = read_data(params.get()?.get_data(), "data", limits::CHUNK_BYTES).map_err(to_capnp)?;
        self.started().await.map_err(to_capnp)?;
        self.kernel.stdin(self.execution.id, &data, false).await.map_err(to_capnp)
    }

    async fn close_stdin(
        self: Rc<Self>,
        _params: execution::CloseStdinParams,
        _results: execution::CloseStdinResults,
    ) -> capnp::Result<()> {
        require(self.rights, Right::Execute).map_err(to_capnp)?;
        self.started().await.map_err(to_capnp)?;
        self.kernel.stdin(self.execution.id, &[], true).await.map_err(to_capnp)
    }
}

impl ExecutionServer {
    /// Waits until the execution has started: input for a queued one is held back.
    async fn started(&self) -> crate::core::error::Result<()> {
        self.execution.started().await;
        Ok(())
    }
}
