//! Connections to ports of a kernel without network.

use std::cell::Cell;
use std::io;
use std::rc::Rc;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use super::connection::{Link, answer, fields};
use super::kernel::KernelClient;
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::rpc::convert::read_data;
use crate::rpc::schema::ryokan_capnp as wire;

/// A port of a kernel's present worker.
#[derive(Clone)]
pub struct PortClient {
    cap: wire::port::Client,
    link: Rc<Link>,
}

/// One connection to a port. Its drop closes both directions.
pub struct PortStream {
    cap: wire::port_stream::Client,
    link: Rc<Link>,
}

impl KernelClient {
    /// Opens a TCP port of the kernel's own loopback for connections.
    ///
    /// # Errors
    /// `conflict` without a worker, `unsupported` for a kernel with the host's network.
    pub async fn open_port(&self, port: u16) -> Result<PortClient> {
        let mut request = self.cap.open_port_request();
        request.get().set_port(port);
        let response = self.link.call(request.send().promise).await?;
        Ok(PortClient { cap: fields(fields(response.get())?.get_port())?, link: self.link.clone() })
    }
}

impl PortClient {
    /// Connects.
    ///
    /// # Errors
    /// `notFound` if nothing listens, `busy` beyond the limit, `lost` after the worker's end.
    pub async fn connect(&self) -> Result<PortStream> {
        let response = self.link.call(self.cap.connect_request().send().promise).await?;
        Ok(PortStream { cap: fields(fields(response.get())?.get_stream())?, link: self.link.clone() })
    }

    /// Returns when the worker has ended.
    ///
    /// # Errors
    /// `unavailable` if the connection to the daemon is lost.
    pub async fn closed(&self) -> Result<()> {
        self.link.wait(self.cap.closed_request().send().promise).await.map(drop)
    }
}

impl PortStream {
    /// Sends at most 64 KiB; returns when the connection has taken them. None: the end of this
    /// direction.
    ///
    /// # Errors
    /// `lost` if the connection inside has ended.
    pub async fn write(&self, data: &[u8]) -> Result<()> {
        let mut request = self.cap.write_request();
        request.get().set_data(data);
        self.link.wait(request.send().promise).await.map(drop)
    }

    /// Waits for bytes; none: the end of this direction.
    ///
    /// # Errors
    /// `lost` if the connection inside has ended.
    pub async fn read(&self) -> Result<Vec<u8>> {
        let response = self.link.wait(self.cap.read_request().send().promise).await?;
        answer(read_data(fields(response.get())?.get_data(), "data", limits::PORT_CHUNK_BYTES))
    }

    /// Connects a local stream with it until both directions have ended. Each direction ends alone,
    /// and what the program inside sends still arrives after it stopped reading.
    ///
    /// # Errors
    /// `lost` if the connection inside broke, `unavailable` for the local one.
    pub async fn splice(self, local: impl AsyncRead + AsyncWrite) -> Result<()> {
        let (mut from, mut to) = tokio::io::split(local);
        let broke = |error: io::Error| Error::unavailable(format!("the local connection broke: {error}"));
        let is_taken = Cell::new(true);
        let up = async {
            let mut room = vec![0; limits::PORT_CHUNK_BYTES];
            loop {
                let count = from.read(&mut room).await.map_err(broke)?;
                if is_taken.get() && self.write(&room[..count]).await.is_err() {
                    is_taken.set(false);
                }
                if count == 0 {
                    return Ok(());
                }
            }
        };
        let down = async {
            loop {
                let data = self.read().await?;
                if data.is_empty() {
                    // The local program may have closed it already.
                    let _ = to.shutdown().await;
                    return Ok(());
                }
                to.write_all(&data).await.map_err(broke)?;
            }
        };
        let (mut up, mut down) = (std::pin::pin!(up), std::pin::pin!(down));
        tokio::select! {
            sent = &mut up => sent.and(down.await),
            received = &mut down => {
                received?;
                // Nothing takes the rest.
                if is_taken.get() { up.await } else { Ok(()) }
            }
        }
    }
}
