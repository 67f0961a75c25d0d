//! `ryokan forward`: a port of a kernel without network on a socket of this command.
//!
//! The listener belongs to this command and ends with it, with the kernel's worker, or with the
//! daemon. Every byte goes through the daemon: the kernel stays without network.

use std::cell::Cell;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};

use super::context::Context;
use super::drive::Signals;
use super::failure::{Failure, warning};
use super::names::KernelArg;
use super::{exit, paths, render};
use crate::core::error::{Error, ErrorCode};
use crate::core::limits;
use crate::rpc::client::PortClient;
use crate::sys::loopback;

/// Pause after a failed accept: an immediate retry would spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// `ryokan forward`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan spawn demo -d -- python3 -m http.server 8000
  ryokan forward demo 8000
  curl --unix-socket \"$XDG_RUNTIME_DIR/ryokan/ports/demo-8000.sock\" http://localhost/
  ryokan forward demo 8000 --listen 127.0.0.1:8080

The listener is a Unix socket that only you can use. A loopback port must be asked for by name; port 0 takes a free one. It serves your programs and those of root, in a browser also the pages that it shows; connections of other users, and those whose program has closed them already, are closed at once, with a line on stderr. The program inside listens on 127.0.0.1, ::1 or all addresses. Each connection is made when it is used: one that is refused inside is closed here, with a line on stderr. Ends with Ctrl-C, and with the kernel's worker.")]
pub struct ForwardArgs {
    /// Name or id of the kernel
    pub name: KernelArg,
    /// TCP port inside
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    pub port: u16,
    /// Where to listen: unix:PATH, 127.0.0.1:PORT or [::1]:PORT
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<Listen>,
}

/// Where to listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listen {
    /// A Unix socket.
    Unix(PathBuf),
    /// A port of the loopback.
    Loopback(SocketAddr),
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("unix:") {
            Some("") => Err("unix: needs a path".into()),
            Some(path) => Ok(Listen::Unix(path.into())),
            None => match text.parse::<SocketAddr>() {
                Ok(address) if address.ip().is_loopback() => Ok(Listen::Loopback(address)),
                Ok(_) => Err("only a loopback address: other hosts could connect to another one".into()),
                Err(_) => Err("it is neither unix:PATH nor 127.0.0.1:PORT".into()),
            },
        }
    }
}

/// A bound listener.
enum Listener {
    Unix(UnixListener, OwnSocket),
    Loopback(TcpListener),
}

/// The file of this command's socket, removed with it.
pub struct OwnSocket {
    path: PathBuf,
    inode: u64,
}

impl Drop for OwnSocket {
    fn drop(&mut self) {
        let is_own = std::fs::symlink_metadata(&self.path).is_ok_and(|meta| meta.ino() == self.inode);
        if is_own && let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "the socket stays");
        }
    }
}

/// A local connection.
trait Local: AsyncRead + AsyncWrite + Unpin {
    /// Closes it in a way that its other end takes for an error.
    fn reset(self: Box<Self>) {}

    /// Its ends, if any user can connect: here and there.
    fn ends(&self) -> io::Result<Option<(SocketAddr, SocketAddr)>> {
        Ok(None)
    }
}

impl Local for tokio::net::UnixStream {}

impl Local for tokio::net::TcpStream {
    fn ends(&self) -> io::Result<Option<(SocketAddr, SocketAddr)>> {
        Ok(Some((self.local_addr()?, self.peer_addr()?)))
    }

    fn reset(self: Box<Self>) {
        // Without it the close is a normal end.
        let _ = self.set_zero_linger();
    }
}

impl Listener {
    fn bind(listen: &Listen) -> Result<Listener, Failure> {
        match listen {
            Listen::Unix(path) => {
                let (listener, own) = bind_private(path).map_err(|error| {
                    let code = if error.kind() == io::ErrorKind::AddrInUse {
                        ErrorCode::AlreadyExists
                    } else {
                        ErrorCode::Refused
                    };
                    Error::new(code, format!("cannot listen on {}: {error}", path.display()))
                        .hint("name another path: --listen unix:PATH")
                })?;
                Ok(Listener::Unix(listener, own))
            }
            Listen::Loopback(address) => {
                let listener = std::net::TcpListener::bind(address).and_then(|listener| {
                    listener.set_nonblocking(true)?;
                    TcpListener::from_std(listener)
                });
                let listener = listener.map_err(|error| {
                    Error::already_exists(format!("cannot listen on {address}: {error}"))
                        .hint("port 0 takes a free one")
                })?;
                Ok(Listener::Loopback(listener))
            }
        }
    }

    fn address(&self) -> String {
        match self {
            Listener::Unix(_, own) => format!("unix:{}", own.path.display()),
            Listener::Loopback(listener) => {
                listener.local_addr().map(|address| address.to_string()).unwrap_or_default()
            }
        }
    }

    async fn accept(&self) -> io::Result<Box<dyn Local>> {
        Ok(match self {
            Listener::Unix(listener, _) => Box::new(listener.accept().await?.0),
            Listener::Loopback(listener) => {
                let (stream, _) = listener.accept().await?;
                stream.set_nodelay(true)?;
                Box::new(stream)
            }
        })
    }
}

/// Listens on a socket of mode 0600. Replaces a socket on which no process listens.
pub fn bind_private(path: &Path) -> io::Result<(UnixListener, OwnSocket)> {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket());
    if is_socket
        && std::os::unix::net::UnixStream::connect(path)
            .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
    {
        std::fs::remove_file(path)?;
    }
    // Of this process, which has one thread that makes files.
    let before = nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o177));
    let bound = UnixListener::bind(path);
    nix::sys::stat::umask(before);
    let listener = bound?;
    let own = OwnSocket { path: path.to_owned(), inode: std::fs::symlink_metadata(path)?.ino() };
    Ok((listener, own))
}

/// The socket of a port without `--listen`, in a directory of the user.
fn default_socket(kernel: &str, port: u16) -> Result<Listen, Failure> {
    let folder = paths::ports_dir()?;
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder);
    made.map_err(|error| Failure::of_file("create", &folder, &error))?;
    Ok(Listen::Unix(folder.join(format!("{kernel}-{port}.sock"))))
}

/// Forwards connections to a port of a kernel.
pub async fn forward(context: &Context, args: ForwardArgs) -> Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let (kernel, info) = context.kernel(&args.name).await?;
    let name = info.spec.name.as_str();
    let port = kernel.open_port(args.port).await?;
    let listen = match args.listen {
        Some(listen) => listen,
        None => default_socket(name, args.port)?,
    };
    let listener = Listener::bind(&listen)?;
    let address = listener.address();
    if matches!(listen, Listen::Loopback(_)) {
        let text = format!("{address} serves all programs of this user and of root");
        context.say(warning(&text, context.terminal.paint_stderr).trim_end());
    }
    context.show(
        || json!({ "kernel": name, "port": args.port, "listen": address }),
        || format!("{address} leads to port {} of {name}\n", args.port),
    )?;
    tokio::select! {
        never = serve(&listener, &port, args.port) => match never {},
        closed = port.closed() => {
            closed?;
            let message = format!("the worker of kernel {name} has ended, and port {} with it", args.port);
            Err(Error::lost(message).reason("no_worker").into())
        }
        ended = signals.any() => match ended {
            exit::INTERRUPTED => Ok(()),
            code => Err(Failure::Quiet(code)),
        },
    }
}

async fn serve(listener: &Listener, port: &PortClient, number: u16) -> std::convert::Infallible {
    let open = Rc::new(Cell::new(0));
    loop {
        let local = match listener.accept().await {
            Ok(local) => local,
            Err(error) => {
                say(number, &error);
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        if open.get() >= limits::PORT_CONNECTIONS {
            say(number, &format_args!("{} connections are open", limits::PORT_CONNECTIONS));
            local.reset();
            continue;
        }
        open.set(open.get() + 1);
        let (open, port) = (Rc::clone(&open), port.clone());
        tokio::task::spawn_local(async move {
            let opened = match admit(&*local).await {
                Ok(()) => port.connect().await,
                Err(error) => Err(error),
            };
            match opened {
                // An end in the middle is for the two programs to notice.
                Ok(stream) => drop(stream.splice(local).await),
                Err(error) => {
                    say(number, &error);
                    local.reset();
                }
            }
            open.set(open.get() - 1);
        });
    }
}

/// Refuses a connection of another user than this one and root.
async fn admit(connection: &dyn Local) -> Result<(), Error> {
    let internal = |error: io::Error| Error::internal(format!("its user could not be found: {error}"));
    let Some((here, there)) = connection.ends().map_err(internal)? else { return Ok(()) };
    // The table is long on a host with many connections.
    let found = tokio::task::spawn_blocking(move || loopback::peer_uid(here, there));
    match found.await.unwrap_or_else(|error| Err(io::Error::other(error))).map_err(internal)? {
        Some(uid) if uid == 0 || uid == nix::unistd::geteuid().as_raw() => Ok(()),
        Some(uid) => Err(Error::refused(format!("it is of user {uid}"))),
        None => Err(Error::refused("its program has closed it already")),
    }
}

fn say(port: u16, why: &dyn std::fmt::Display) {
    use std::io::Write as _;
    let _ = writeln!(io::stderr(), "a connection to port {port} failed: {}", render::plain(&why.to_string()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_local_addresses_parse() {
        assert_eq!("unix:/run/x".parse(), Ok(Listen::Unix("/run/x".into())));
        assert_eq!("127.0.0.1:0".parse(), Ok(Listen::Loopback(([127, 0, 0, 1], 0).into())));
        assert!("[::1]:80".parse::<Listen>().is_ok());
        for text in ["", "unix:", "80", "0.0.0.0:80", "192.168.1.1:80", "[::]:80", "localhost:80", "/run/x"] {
            assert!(text.parse::<Listen>().is_err(), "{text}");
        }
    }
}
