//! Connections from outside to ports of the kernel, served to the daemon. Runs in init.
//!
//! The daemon pulls what the program inside sends, and waits until the socket has taken what it
//! writes: each connection holds one chunk in each direction. Its release closes the connection.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use super::{Done, to_capnp};
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::link::schema::worker_capnp::port_stream;

/// The number of open connections.
#[derive(Debug, Default)]
pub struct OpenConnections(Rc<Cell<usize>>);

impl OpenConnections {
    /// A place for one more.
    ///
    /// # Errors
    /// `Busy` beyond the limit.
    pub fn add(&self) -> Result<ConnectionPlace> {
        if self.0.get() >= limits::PORT_CONNECTIONS {
            let message = format!("{} connections to ports of this kernel are open", limits::PORT_CONNECTIONS);
            return Err(Error::busy(message).reason("connections").hint("close some of them"));
        }
        self.0.set(self.0.get() + 1);
        Ok(ConnectionPlace(Rc::clone(&self.0)))
    }
}

/// The place of one connection, until its drop.
#[derive(Debug)]
pub struct ConnectionPlace(Rc<Cell<usize>>);

impl Drop for ConnectionPlace {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// A connection that was made.
#[derive(Debug)]
pub struct PortConnection {
    /// Its socket.
    pub stream: TcpStream,
    /// Its place.
    pub place: ConnectionPlace,
}

impl PortConnection {
    pub(super) fn serve(self) -> port_stream::Client {
        let (read, write) = self.stream.into_split();
        let (read, write) = (RefCell::new(Some(read)), RefCell::new(Some(write)));
        capnp_rpc::new_client(StreamServer { read, write, _place: self.place })
    }
}

/// Each half is absent while a call uses it and after its end. A cancelled call ends its direction:
/// how much of its data arrived is unknown.
struct StreamServer {
    read: RefCell<Option<OwnedReadHalf>>,
    write: RefCell<Option<OwnedWriteHalf>>,
    _place: ConnectionPlace,
}

fn closed(what: &str) -> capnp::Error {
    to_capnp(Error::conflict(format!("this direction of the connection is closed or in use: {what}")))
}

fn broken(error: &std::io::Error) -> capnp::Error {
    to_capnp(Error::lost(format!("the connection inside broke: {error}")).reason("port_closed"))
}

impl port_stream::Server for StreamServer {
    async fn write(self: Rc<Self>, params: port_stream::WriteParams, _: port_stream::WriteResults) -> Done {
        let params = params.get()?;
        let data = params.get_data()?;
        if data.len() > limits::PORT_CHUNK_BYTES {
            return Err(to_capnp(Error::invalid("a chunk of a connection is too large")));
        }
        let taken = self.write.borrow_mut().take();
        let mut write = taken.ok_or_else(|| closed("write"))?;
        if data.is_empty() {
            return write.shutdown().await.map_err(|error| broken(&error));
        }
        write.write_all(data).await.map_err(|error| broken(&error))?;
        *self.write.borrow_mut() = Some(write);
        Ok(())
    }

    async fn read(self: Rc<Self>, _: port_stream::ReadParams, mut results: port_stream::ReadResults) -> Done {
        let taken = self.read.borrow_mut().take();
        let mut read = taken.ok_or_else(|| closed("read"))?;
        read.readable().await.map_err(|error| broken(&error))?;
        let mut data = vec![0; limits::PORT_CHUNK_BYTES];
        let count = read.read(&mut data).await.map_err(|error| broken(&error))?;
        results.get().set_data(&data[..count]);
        if count > 0 {
            *self.read.borrow_mut() = Some(read);
        }
        Ok(())
    }
}
