//! Ports of kernels without network: connections from outside, their ends, their bounds, and nothing but the kernel's own
//! loopback behind them.

use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use ryokan::core::engine::EngineName;
use ryokan::core::error::ErrorCode;
use ryokan::core::limits;
use ryokan::core::rights::Right;
use ryokan::core::spec::Net;
use ryokan::rpc::client::{HostClient, KernelClient, PortClient};

use super::{bash, detached, each_user, program, says};
use crate::support::{Host, eventually, spec, until};

/// Sends back what arrives, once the other side has ended its direction.
const ECHO: &str = "
import socket, threading, sys
s = socket.create_server(('127.0.0.1', int(sys.argv[1])), backlog=256)
open('ready', 'w')
def serve(c):
    got = b''
    while d := c.recv(65536):
        got += d
    c.sendall(got)
    c.close()
while True:
    threading.Thread(target=serve, args=(s.accept()[0],), daemon=True).start()
";

/// Accepts nothing: its connections wait in the backlog.
const HOLD: &str = "
import socket, sys, time
s = socket.create_server(('127.0.0.1', int(sys.argv[1])), backlog=512)
open('ready', 'w')
time.sleep(600)
";

/// Sends without end, and counts what it could send.
const FLOOD: &str = "
import socket, sys
s = socket.create_server(('127.0.0.1', int(sys.argv[1])))
open('ready', 'w')
c = s.accept()[0]
c.setblocking(False)
import time, select
sent = 0
while True:
    if select.select([], [c], [], 0.2)[1]:
        sent += c.send(b'x' * 65536)
    open('sent.new', 'w').write(str(sent)); import os; os.rename('sent.new', 'sent')
";

async fn serves(kernel: &KernelClient, server: &str, port: u16) {
    says(kernel, "rm -f ready").await;
    let request = detached(program(&["python3", "-c", server, &port.to_string()]));
    kernel.spawn(&request).await.expect("accepted");
    eventually("it listens", || async { says(kernel, "ls").await.contains("ready") }).await;
}

/// Sends all, ends its direction, and returns what comes back.
async fn exchange(port: &PortClient, data: &[u8]) -> Vec<u8> {
    let stream = port.connect().await.expect("connected");
    for chunk in data.chunks(limits::PORT_CHUNK_BYTES) {
        stream.write(chunk).await.expect("taken");
    }
    stream.write(&[]).await.expect("ended");
    let mut back = Vec::new();
    loop {
        let data = stream.read().await.expect("read");
        if data.is_empty() {
            return back;
        }
        back.extend(data);
    }
}

#[test]
fn connections_carry_every_byte() {
    each_user(|host| {
        host.with(async |client| {
            let kernel = bash(&client, "k").await;
            serves(&kernel, ECHO, 8000).await;
            let port = kernel.open_port(8000).await.expect("opened");
            let data = |n: usize| (0..n * 7919).map(|i| (i * n % 251) as u8).collect::<Vec<u8>>();
            let exchanges = (1..=60).map(|n| {
                let (port, data) = (port.clone(), data(n));
                async move { exchange(&port, &data).await == data }
            });
            assert!(futures::future::join_all(exchanges).await.into_iter().all(|same| same));
            assert!(exchange(&port, &[]).await.is_empty());
            let large = data(2000);
            assert_eq!(exchange(&port, &large).await.len(), large.len());
            let shown = host.ok(&["audit", "k"]);
            assert!(shown.contains("kernel.open_port") && shown.contains("port 8000"), "{shown}");
        });
    });
}

#[test]
fn closed_port_is_an_error() {
    each_user(|host| {
        host.with(async |client| {
            let kernel = bash(&client, "k").await;
            let without = kernel.open_port(8000).await.map(drop).expect_err("no worker");
            assert_eq!((without.code, &*without.reason), (ErrorCode::Conflict, "no_worker"));
            says(&kernel, "true").await;
            assert_eq!(kernel.open_port(0).await.map(drop).expect_err("no port").code, ErrorCode::InvalidArgument);
            let port = kernel.open_port(8000).await.expect("opened");
            let closed = port.connect().await.map(drop).expect_err("nothing listens");
            assert_eq!((closed.code, &*closed.reason), (ErrorCode::NotFound, "port_closed"), "{closed}");
            serves(&kernel, ECHO, 8000).await;
            assert_eq!(exchange(&port, b"now").await, b"now", "the same port, later");
            kernel.stop(false).await.expect("stopped");
            port.closed().await.expect("it is closed");
            assert_eq!(port.connect().await.map(drop).expect_err("gone").code, ErrorCode::Lost);
        });
    });
}

#[test]
fn open_connections_are_bounded() {
    let host = Host::start();
    host.with(async |client| {
        let kernel = bash(&client, "k").await;
        serves(&kernel, HOLD, 8000).await;
        let port = kernel.open_port(8000).await.expect("opened");
        let mut open = Vec::new();
        for _ in 0..limits::PORT_CONNECTIONS {
            open.push(port.connect().await.expect("connected"));
        }
        let more = kernel.open_port(8000).await.expect("opened").connect().await.map(drop).expect_err("too many");
        assert_eq!((more.code, &*more.reason), (ErrorCode::Busy, "connections"));
        // A read that waits ends with its connection.
        let waiting = open.pop().expect("some");
        assert!(tokio::time::timeout(Duration::from_millis(50), waiting.read()).await.is_err());
        drop(waiting);
        eventually("its place is free", || async { port.connect().await.is_ok() }).await;
        open.clear();
        eventually("all are closed", || async {
            let connections = (0..limits::PORT_CONNECTIONS).map(|_| port.connect());
            futures::future::join_all(connections).await.iter().all(Result::is_ok)
        })
        .await;
    });
}

/// What is not read stays with the program that sends it.
#[test]
fn unread_connection_holds_its_sender() {
    let host = Host::start();
    host.with(async |client| {
        let kernel = bash(&client, "k").await;
        serves(&kernel, FLOOD, 8000).await;
        let port = kernel.open_port(8000).await.expect("opened");
        let stream = port.connect().await.expect("connected");
        assert!(!stream.read().await.expect("read").is_empty());
        let sent = async || says(&kernel, "cat sent || echo 0").await.parse::<usize>().expect("a number");
        let held = std::cell::Cell::new(0);
        // Once all buffers on the way are full.
        eventually("it cannot send more", async || {
            held.set(sent().await);
            tokio::time::sleep(Duration::from_secs(1)).await;
            held.get() > 0 && held.get() == sent().await
        })
        .await;
        assert!(held.get() < 16 << 20, "{} bytes are held", held.get());
        // Two calls at once would mix their data.
        let (one, other) = futures::future::join(stream.write(b"a"), stream.write(b"b")).await;
        assert!(one.is_ok() || other.is_ok());
    });
}

/// Neither the host's loopback nor that of another kernel answers a port of a kernel that runs.
pub(crate) async fn own_loopback(client: &HostClient, kernel: &KernelClient) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bound");
    let outside = listener.local_addr().expect("bound").port();
    let six = std::net::TcpListener::bind("[::1]:0").ok().and_then(|l| Some((l.local_addr().ok()?.port(), l)));
    let other = bash(client, "other").await;
    serves(&other, ECHO, 8123).await;
    let ports = [Some(outside), six.as_ref().map(|(port, _)| *port), Some(8123)];
    for number in ports.into_iter().flatten() {
        let port = kernel.open_port(number).await.expect("opened");
        let refused = port.connect().await.map(drop).expect_err("it is not this kernel's");
        assert_eq!((refused.code, &*refused.reason), (ErrorCode::NotFound, "port_closed"), "{number}");
    }
    other.stop(false).await.expect("stopped");
}

#[test]
fn only_own_loopback_is_reached() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bound");
    let outside = listener.local_addr().expect("bound").port();
    each_user(|host| {
        host.with(async |client| {
            let kernel = bash(&client, "k").await;
            says(&kernel, "true").await;
            own_loopback(&client, &kernel).await;
            let mut with_network = spec("net", EngineName::Bash);
            with_network.net = Some(Net::Host);
            let (with_network, _) = client.create_kernel(&with_network, "").await.expect("made");
            says(&with_network, "true").await;
            let refused = with_network.open_port(outside).await.map(drop).expect_err("the host's network");
            assert_eq!((refused.code, &*refused.reason), (ErrorCode::Unsupported, "network"), "{refused}");
            let rights = Right::ALL.into_iter().filter(|right| *right != Right::Execute).collect();
            let less = kernel.attenuate(rights, "less").await.expect("attenuated");
            assert_eq!(less.open_port(8000).await.map(drop).expect_err("no right").code, ErrorCode::Refused);
        });
    });
}

/// A running `ryokan forward`.
struct Forward {
    child: Child,
    address: String,
}

impl Forward {
    fn start(host: &Host, args: &[&str]) -> Forward {
        let mut command = host.command("ryokan");
        command.args(["--no-autostart", "forward", "--json"]).args(args);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it runs");
        let mut lines = BufReader::new(child.stdout.take().expect("piped"));
        let mut text = String::new();
        while !text.ends_with("}\n") {
            assert!(lines.read_line(&mut text).expect("read") > 0, "no address: {text}");
        }
        let shown: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        Forward { child, address: shown["listen"].as_str().expect("an address").to_owned() }
    }

    fn socket(&self) -> PathBuf {
        self.address.strip_prefix("unix:").expect("a Unix socket").into()
    }

    /// Waits for its end; returns the exit code and stderr.
    fn end(mut self) -> (Option<i32>, String) {
        let mut text = String::new();
        self.child.stderr.take().expect("piped").read_to_string(&mut text).expect("read");
        (self.child.wait().expect("ended").code(), text)
    }
}

/// Exchanges a text over a stream, whose sending direction `end` ends.
fn exchanges<S: std::io::Read + std::io::Write>(mut stream: S, end: impl FnOnce(&S)) -> String {
    stream.write_all(b"over a socket").expect("written");
    end(&stream);
    let mut back = String::new();
    stream.read_to_string(&mut back).expect("read");
    back
}

fn over(path: &Path) -> String {
    exchanges(UnixStream::connect(path).expect("connected"), |s| s.shutdown(std::net::Shutdown::Write).expect("ended"))
}

/// Starts a server on port 8000 of a kernel.
fn ready(host: &Host, kernel: &str) {
    // Of a former server.
    host.ok(&["spawn", kernel, "--", "rm", "-f", "ready"]);
    host.ok(&["spawn", kernel, "-d", "--", "python3", "-c", ECHO, "8000"]);
    until("it listens", || host.cli(&["cp", &format!("{kernel}:ready"), "-"]).status.success());
}

/// A forwarded port carries connections for its user, and ends with the worker. The kernel is stopped at the end.
pub(crate) fn forwarding(host: &Host, kernel: &str) {
    ready(host, kernel);
    let forward = Forward::start(host, &[kernel, "8000"]);
    let loopback = Forward::start(host, &[kernel, "8000", "--listen", "127.0.0.1:0"]);
    let socket = forward.socket();
    assert_eq!(over(&socket), "over a socket");
    let stream = std::net::TcpStream::connect(&loopback.address).expect("connected");
    let text = exchanges(stream, |s| s.shutdown(std::net::Shutdown::Write).expect("ended"));
    assert_eq!(text, "over a socket");
    host.ok(&["stop", kernel]);
    for (forward, warns) in [(forward, false), (loopback, true)] {
        let (code, text) = forward.end();
        assert_eq!(code, Some(1), "{text}");
        assert_eq!(text.contains("serves all programs of this user and of root"), warns, "{text}");
        assert!(text.contains(&format!("worker of kernel {kernel} has ended")), "{text}");
    }
    assert!(!socket.exists());
}

#[test]
fn forward_listens_for_its_user_only() {
    each_user(|host| {
        host.ok(&["new", "k", "--engine", "bash"]);
        ready(&host, "k");
        let forward = Forward::start(&host, &["k", "8000"]);
        let socket = forward.socket();
        assert_eq!(over(&socket), "over a socket");
        assert_eq!(std::fs::metadata(&socket).expect("there").permissions().mode() & 0o777, 0o600);
        let taken = host.cli(&["forward", "k", "8000"]);
        assert_eq!(taken.status.code(), Some(4), "{}", String::from_utf8_lossy(&taken.stderr));
        let pid = nix::unistd::Pid::from_raw(forward.child.id().cast_signed());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).expect("killed");
        forward.end();
        assert!(socket.exists(), "a killed command leaves its socket");
        let again = Forward::start(&host, &["k", "8000"]);
        assert_eq!(over(&again.socket()), "over a socket", "the next one replaces it");
        let pid = nix::unistd::Pid::from_raw(again.child.id().cast_signed());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).expect("interrupted");
        assert_eq!(again.end().0, Some(0));
        assert!(!socket.exists());
        host.ok(&["stop", "k"]);
        forwarding(&host, "k");
        for wrong in [["k", "0"], ["k", "65536"]] {
            assert_eq!(host.cli(&["forward", wrong[0], wrong[1]]).status.code(), Some(2));
        }
        assert_eq!(host.cli(&["forward", "k", "1", "--listen", "0.0.0.0:80"]).status.code(), Some(2));
    });
}

/// Connects as another user and sends a text; prints what comes back.
const STRANGER: &str = "
import os, socket, sys
os.setuid(int(sys.argv[2]))
host, port = sys.argv[1].rsplit(':', 1)
# No names: the interpreter's library may be closed to that user.
c = socket.socket(socket.AF_INET6 if '[' in host else socket.AF_INET)
c.connect((host.strip('[]'), int(port)))
try:
    c.sendall(b'over a socket')
    c.shutdown(socket.SHUT_WR)
    print(c.recv(100))
except OSError:
    print(b'')
";

#[test]
fn loopback_port_refuses_other_users() {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("ignored: only root can connect as another user");
        return;
    }
    each_user(|host| {
        host.ok(&["new", "k", "--engine", "bash"]);
        ready(&host, "k");
        for listen in ["127.0.0.1:0", "[::1]:0"] {
            if std::net::TcpListener::bind(listen).is_err() {
                eprintln!("ignored: no {listen} here");
                continue;
            }
            let forward = Forward::start(&host, &["k", "8000", "--listen", listen]);
            let own = std::fs::metadata(format!("/proc/{}", forward.child.id())).expect("it runs").uid();
            let connects = |uid: u32| {
                let mut program = std::process::Command::new("python3");
                let output = program.args(["-c", STRANGER, &forward.address, &uid.to_string()]).output();
                String::from_utf8(output.expect("it runs").stdout).expect("text").trim().to_owned()
            };
            assert_eq!(connects(own), "b'over a socket'", "{listen}");
            assert_eq!(connects(0), "b'over a socket'", "{listen}");
            assert_eq!(connects(65_533), "b''", "{listen}");
            assert_eq!(connects(own), "b'over a socket'", "{listen}");
            let pid = nix::unistd::Pid::from_raw(forward.child.id().cast_signed());
            nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).expect("interrupted");
            let (code, text) = forward.end();
            assert_eq!(code, Some(0), "{text}");
            assert!(text.contains("a connection to port 8000 failed: it is of user 65533"), "{text}");
        }
    });
}

#[test]
fn forward_reports_refused_connections() {
    let mut host = Host::start();
    host.ok(&["new", "k", "--engine", "bash"]);
    ready(&host, "k");
    let own = host.path("home").join("own.sock");
    let listen = format!("unix:{}", own.display());
    let forward = Forward::start(&host, &["k", "8001", "--listen", &listen]);
    let mut text = String::new();
    // The connection ends at once, by an end or an error.
    let _ = UnixStream::connect(&own).expect("connected").read_to_string(&mut text);
    assert_eq!(text, "");
    host.kill();
    let (code, text) = forward.end();
    assert_eq!(code, Some(69), "{text}");
    assert!(text.contains("nothing listens on port 8001"), "{text}");
    assert!(!own.exists());
}
