//! `Port` and `PortStream`: connections from outside to a kernel's own loopback.

use std::rc::Rc;

use capnp_rpc::new_client;

use super::kernel::KernelServer;
use crate::core::limits;
use crate::rpc::convert::{read_data, to_capnp};
use crate::rpc::schema::ryokan_capnp::{kernel, port, port_stream};
use crate::supervisor::kernel::ports::{KernelPort, KernelPortStream};

struct PortServer(KernelPort);

impl port::Server for PortServer {
    async fn connect(
        self: Rc<Self>,
        _params: port::ConnectParams,
        mut results: port::ConnectResults,
    ) -> capnp::Result<()> {
        let stream = self.0.connect().await.map_err(to_capnp)?;
        results.get().set_stream(new_client(StreamServer(stream)));
        Ok(())
    }

    async fn closed(self: Rc<Self>, _params: port::ClosedParams, _results: port::ClosedResults) -> capnp::Result<()> {
        self.0.closed().await;
        Ok(())
    }
}

struct StreamServer(KernelPortStream);

impl port_stream::Server for StreamServer {
    async fn write(
        self: Rc<Self>,
        params: port_stream::WriteParams,
        _results: port_stream::WriteResults,
    ) -> capnp::Result<()> {
        let data = read_data(params.get()?.get_data(), "data", limits::PORT_CHUNK_BYTES).map_err(to_capnp)?;
        self.0.bytes.write(&data).await.map_err(to_capnp)
    }

    async fn read(
        self: Rc<Self>,
        _params: port_stream::ReadParams,
        mut results: port_stream::ReadResults,
    ) -> capnp::Result<()> {
        let data = self.0.bytes.read().await.map_err(to_capnp)?;
        results.get().set_data(&data);
        Ok(())
    }
}

impl KernelServer {
    pub(super) async fn open_kernel_port(
        &self,
        params: kernel::OpenPortParams,
        mut results: kernel::OpenPortResults,
    ) -> capnp::Result<()> {
        let number = params.get()?.get_port();
        let before = self.kernel.view().version;
        let opened = self.kernel.open_port(number, &self.actor).await.map_err(to_capnp)?;
        self.audit_done("kernel.open_port", before, format!("port {number}")).await;
        results.get().set_port(new_client(PortServer(opened)));
        Ok(())
    }
}
