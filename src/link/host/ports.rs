//! Connections to ports of a kernel over the link.

use super::WorkerLink;
use super::calls::answered;
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::link::schema::worker_capnp::port_stream;
use crate::link::types::from_capnp;

/// A connection to a port inside. Its drop closes both directions.
pub struct WorkerPortStream(port_stream::Client);

impl WorkerPortStream {
    /// Sends bytes; returns when the socket inside has taken them. None: the end of this direction.
    ///
    /// # Errors
    /// `Lost` if the connection or the worker has ended.
    pub async fn write(&self, data: &[u8]) -> Result<()> {
        let mut request = self.0.write_request();
        request.get().set_data(data);
        request.send().promise.await.map(drop).map_err(|error| from_capnp(&error))
    }

    /// Waits for bytes; none: the end of this direction.
    ///
    /// # Errors
    /// `Lost` if the connection or the worker has ended.
    pub async fn read(&self) -> Result<Vec<u8>> {
        let answer = self.0.read_request().send().promise.await.map_err(|error| from_capnp(&error))?;
        let data = answer.get().and_then(|results| results.get_data()).map_err(|error| from_capnp(&error))?;
        match data.len() <= limits::PORT_CHUNK_BYTES {
            true => Ok(data.to_vec()),
            false => Err(Error::corrupt("a chunk of a connection is too large")),
        }
    }
}

impl WorkerLink {
    /// Connects to a TCP port of the kernel's own loopback.
    ///
    /// # Errors
    /// `NotFound` if nothing listens, `Busy` beyond the limit, `Unsupported` without a network
    /// namespace of its own.
    pub async fn connect(&self, port: u16) -> Result<WorkerPortStream> {
        let mut request = self.client.connect_request();
        request.get().set_port(port);
        let answer = answered(request.send().promise).await?;
        let stream = answer.get().and_then(|results| results.get_stream());
        stream.map(WorkerPortStream).map_err(|error| from_capnp(&error))
    }

    /// Returns when this link has ended. The future does not keep it.
    pub fn ended(&self) -> impl Future<Output = ()> + use<> {
        let mut lifetime = self.lifetime.subscribe();
        // The sender sends nothing: only its drop ends the wait.
        async move { while lifetime.changed().await.is_ok() {} }
    }
}
