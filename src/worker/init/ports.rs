//! Connections from outside to TCP ports of the kernel's own loopback. Runs in init, which is in the
//! network namespace of the engine: what listens elsewhere cannot be reached from there.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use tokio::net::{TcpSocket, TcpStream};

use super::{Life, Worker};
use crate::core::error::{Error, Result};
use crate::core::limits;
use crate::link::guest::{Answer, PortConnection};

impl Worker {
    /// Connects to a port and answers.
    pub(super) fn connect(&mut self, port: u16, answer: Answer<PortConnection>) {
        let place = match self.check_port(port).and_then(|()| self.connections.add()) {
            Ok(place) => place,
            // The caller may have gone.
            Err(error) => return drop(answer.send(Err(error))),
        };
        self.start_watch();
        tokio::task::spawn_local(async move {
            let stream = tokio::time::timeout(limits::PORT_CONNECT, dial(port)).await;
            let late = |_| Err(Error::deadline(format!("port {port} inside did not accept in time")));
            let _ = answer.send(stream.unwrap_or_else(late).map(|stream| PortConnection { stream, place }));
        });
    }

    fn check_port(&self, port: u16) -> Result<()> {
        if !matches!(self.life, Life::Serving) {
            return Err(Error::unavailable("the worker is starting or stopping"));
        }
        if !self.enclosure.has_own_loopback() {
            return Err(Error::unsupported("the kernel has no network of its own")
                .reason("network")
                .hint(format!("it shares the host's: connect to 127.0.0.1:{port}")));
        }
        if self.suspended {
            return Err(Error::busy("the kernel is suspended").reason("suspended").hint("resume it first"));
        }
        match port {
            0 => Err(Error::invalid("port 0 is no port")),
            _ => Ok(()),
        }
    }
}

async fn dial(port: u16) -> Result<TcpStream> {
    let closed = |error: io::Error| match error.kind() {
        io::ErrorKind::ConnectionRefused => Error::not_found(format!("nothing listens on port {port} in the kernel"))
            .reason("port_closed")
            .hint("start the server in it, on 127.0.0.1 or all addresses"),
        _ => Error::unavailable(format!("port {port} in the kernel: {error}")),
    };
    let first = match dial_address((Ipv4Addr::LOCALHOST, port).into()).await {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => error,
        other => return other.map_err(closed),
    };
    // The host may have no IPv6.
    dial_address((Ipv6Addr::LOCALHOST, port).into()).await.map_err(|_| closed(first))
}

async fn dial_address(address: SocketAddr) -> io::Result<TcpStream> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_send_buffer_size(limits::PORT_SOCKET_BYTES)?;
    socket.set_recv_buffer_size(limits::PORT_SOCKET_BYTES)?;
    let stream = socket.connect(address).await?;
    // Without a listener, a port that the socket itself got connects to itself.
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    stream.set_nodelay(true)?;
    Ok(stream)
}
