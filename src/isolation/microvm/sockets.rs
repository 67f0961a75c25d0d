//! The sockets of a machine on this host, and how its guest's ports are reached through them.
//!
//! ```text
//!  QEMU         WORKER.link, .control, .events ── a virtio-serial port each          WORKER.monitor
//!  Firecracker  WORKER.machine/vsock ── CONNECT PORT ─▶ OK … ── all ports by number   WORKER.machine/api
//! ```

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream as BlockingStream;
use std::path::{Path, PathBuf};
use std::time::Instant;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

use super::vmm::Vmm;
use crate::core::limits;
use crate::link::connector::unix::{connect, connect_blocking};
use crate::link::machine::{CONTROL_VSOCK, EVENT_VSOCK, LINK_VSOCK};
use crate::sys::fs;

/// Suffix of the folder of a machine with Firecracker.
pub(super) const FOLDER: &str = "machine";
/// Its API.
pub(super) const API: &str = "api";
/// Its guest's ports.
pub(super) const VSOCK: &str = "vsock";
/// Longest answer to `CONNECT`, with its end.
const ANSWER_BYTES: usize = 32;

/// The sockets of a machine's ports.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Sockets {
    link: PathBuf,
    control: PathBuf,
    events: PathBuf,
    /// Of the monitor; absent in records of earlier daemons.
    #[serde(default)]
    pub monitor: PathBuf,
    /// Who serves them; absent in records of earlier daemons.
    #[serde(default)]
    pub vmm: Vmm,
}

impl Sockets {
    pub(super) fn new(folder: &Path, worker: &impl std::fmt::Display, vmm: Vmm) -> Sockets {
        match vmm {
            Vmm::Qemu => {
                let path = |port: &str| folder.join(format!("{worker}.{port}"));
                let (link, control, events) = (path("link"), path("control"), path("events"));
                Sockets { link, control, events, monitor: path("monitor"), vmm }
            }
            Vmm::Firecracker => {
                let folder = folder.join(format!("{worker}.{FOLDER}"));
                let [link, control, events] = [(); 3].map(|()| folder.join(VSOCK));
                Sockets { link, control, events, monitor: folder.join(API), vmm }
            }
        }
    }

    /// The worker's link.
    pub(super) fn link(&self) -> Address {
        self.address(&self.link, LINK_VSOCK)
    }

    /// Requests to the first process.
    pub(super) fn control(&self) -> Address {
        self.address(&self.control, CONTROL_VSOCK)
    }

    /// The worker's state.
    pub(super) fn events(&self) -> Address {
        self.address(&self.events, EVENT_VSOCK)
    }

    fn address(&self, socket: &Path, port: u32) -> Address {
        match self.vmm {
            Vmm::Qemu => Address::Socket(socket.to_owned()),
            Vmm::Firecracker => Address::Vsock(socket.to_owned(), port),
        }
    }

    /// The ports' sockets of QEMU: link, control, events.
    pub(super) fn ports(&self) -> [&Path; 3] {
        [&self.link, &self.control, &self.events]
    }

    /// The path that names the machine in lists of processes.
    pub(super) fn name(&self) -> &Path {
        match self.vmm {
            Vmm::Qemu => &self.control,
            Vmm::Firecracker => self.folder(),
        }
    }

    /// The folder of the sockets.
    pub(super) fn folder(&self) -> &Path {
        self.monitor.parent().unwrap_or(&self.monitor)
    }

    pub(super) fn unlink(&self) {
        match self.vmm {
            Vmm::Qemu => {
                for path in self.ports().into_iter().chain([&*self.monitor]) {
                    let _ = std::fs::remove_file(path);
                }
            }
            Vmm::Firecracker => drop(fs::remove_tree(self.folder())),
        }
    }
}

/// Where a port of a guest is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Address {
    /// A socket of its own.
    Socket(PathBuf),
    /// A port behind the socket of all ports.
    Vsock(PathBuf, u32),
}

impl Address {
    /// Connects to the port.
    ///
    /// # Errors
    /// `NotFound` and `ConnectionRefused` if the monitor has ended; `ConnectionReset` if nothing in the guest listens,
    /// `InvalidData`, `TimedOut`.
    pub(super) async fn connect(&self) -> io::Result<UnixStream> {
        match self {
            Address::Socket(socket) => connect(socket).await,
            Address::Vsock(socket, port) => {
                let mut stream = connect(socket).await?;
                let joined = async {
                    stream.write_all(&request(*port)).await?;
                    let mut answer = Answer::default();
                    while !answer.add(stream.read_u8().await.map_err(nothing_listens)?)? {}
                    Ok(())
                };
                let joined = tokio::time::timeout(limits::VM_CALL, joined).await;
                joined.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())).map(|()| stream)
            }
        }
    }

    /// As [`Self::connect`], blocking, until that time.
    pub(super) fn connect_blocking(&self, until: Instant) -> io::Result<BlockingStream> {
        match self {
            Address::Socket(socket) => connect_blocking(socket),
            Address::Vsock(socket, port) => {
                let mut stream = connect_blocking(socket)?;
                let left = || match until.saturating_duration_since(Instant::now()) {
                    left if left.is_zero() => Err(io::Error::from(io::ErrorKind::TimedOut)),
                    left => Ok(Some(left)),
                };
                stream.set_write_timeout(left()?)?;
                stream.write_all(&request(*port))?;
                let (mut answer, mut byte) = (Answer::default(), [0]);
                loop {
                    stream.set_read_timeout(left()?)?;
                    stream.read_exact(&mut byte).map_err(nothing_listens)?;
                    if answer.add(byte[0])? {
                        return Ok(stream);
                    }
                }
            }
        }
    }
}

fn request(port: u32) -> Vec<u8> {
    format!("CONNECT {port}\n").into_bytes()
}

/// The connection is closed if nothing in the guest listens on the port.
fn nothing_listens(error: io::Error) -> io::Error {
    match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
            io::Error::new(io::ErrorKind::ConnectionReset, "nothing in the guest listens on the port")
        }
        _ => error,
    }
}

/// The answer to `CONNECT`, byte by byte: what follows it belongs to the connection.
#[derive(Default)]
struct Answer(Vec<u8>);

impl Answer {
    /// Takes the next byte; whether the answer is complete.
    fn add(&mut self, byte: u8) -> io::Result<bool> {
        self.0.push(byte);
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "a monitor's answer to CONNECT is invalid");
        if byte != b'\n' {
            return if self.0.len() < ANSWER_BYTES { Ok(false) } else { Err(invalid()) };
        }
        let port = self.0.strip_prefix(b"OK ").and_then(|rest| rest.strip_suffix(b"\n"));
        let is_number = |port: &[u8]| !port.is_empty() && port.iter().all(u8::is_ascii_digit);
        port.is_some_and(is_number).then_some(true).ok_or_else(invalid)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::time::Duration;

    use super::*;

    /// A monitor's socket whose next two connections get that answer to `CONNECT 7`; `hangs`: it stays open then.
    fn monitor(answer: &'static [u8], hangs: bool) -> (tempfile::TempDir, Address, std::thread::JoinHandle<()>) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("vsock");
        let listener = UnixListener::bind(&path).expect("bound");
        let serving = std::thread::spawn(move || {
            let mut open = Vec::new();
            for _ in 0..2 {
                let (mut stream, _) = listener.accept().expect("connected");
                let mut asked = [0; 10];
                stream.read_exact(&mut asked).expect("asked");
                assert_eq!(&asked, b"CONNECT 7\n");
                let _ = stream.write_all(answer);
                open.extend(hangs.then_some(stream));
            }
            // Until the client closes.
            for mut stream in open {
                let _ = stream.read(&mut [0]);
            }
        });
        (folder, Address::Vsock(path, 7), serving)
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(300)
    }

    #[tokio::test]
    async fn bytes_after_answer_stay() -> io::Result<()> {
        let (_folder, address, serving) = monitor(b"OK 1073741824\nOK 5\nhello", false);
        let mut text = String::new();
        address.connect_blocking(soon())?.read_to_string(&mut text)?;
        assert_eq!(text, "OK 5\nhello");
        text.clear();
        address.connect().await?.read_to_string(&mut text).await?;
        assert_eq!(text, "OK 5\nhello");
        serving.join().map_err(|_| io::Error::other("the monitor failed"))
    }

    #[tokio::test]
    async fn bad_answers_are_refused() {
        let answers: [(&[u8], io::ErrorKind); 6] = [
            (b"", io::ErrorKind::ConnectionReset),
            (b"OK 12", io::ErrorKind::ConnectionReset),
            (b"OK \n", io::ErrorKind::InvalidData),
            (b"OK 1 2\n", io::ErrorKind::InvalidData),
            (b"NO 12\n", io::ErrorKind::InvalidData),
            (b"OK 1234567890123456789012345678901234567890", io::ErrorKind::InvalidData),
        ];
        for (answer, kind) in answers {
            let (_folder, address, _serving) = monitor(answer, false);
            let text = String::from_utf8_lossy(answer);
            assert_eq!(address.connect_blocking(soon()).map_err(|error| error.kind()).err(), Some(kind), "{text}");
            assert_eq!(address.connect().await.map_err(|error| error.kind()).err(), Some(kind), "{text}");
        }
    }

    #[test]
    fn silent_monitor_is_left() {
        let (_folder, address, _serving) = monitor(b"OK 1", true);
        let late = address.connect_blocking(soon()).map_err(|error| error.kind()).err();
        assert!(matches!(late, Some(io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)), "{late:?}");
    }

    #[test]
    fn ended_monitor_is_noticed() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("vsock");
        let failed = |path: &Path| Address::Vsock(path.to_owned(), 7).connect_blocking(soon()).map_err(|e| e.kind());
        assert_eq!(failed(&path).err(), Some(io::ErrorKind::NotFound));
        drop(UnixListener::bind(&path)?);
        assert_eq!(failed(&path).err(), Some(io::ErrorKind::ConnectionRefused));
        Ok(())
    }

    #[test]
    fn early_records_are_read() -> serde_json::Result<()> {
        let read: Sockets =
            serde_json::from_str(r#"{"link": "/r/a.link", "control": "/r/a.control", "events": "/r/e"}"#)?;
        assert_eq!(read.control(), Address::Socket(PathBuf::from("/r/a.control")));
        let ours = Sockets::new(Path::new("/r"), &"a", Vmm::Firecracker);
        assert_eq!(ours.link(), Address::Vsock(PathBuf::from("/r/a.machine/vsock"), LINK_VSOCK));
        assert_eq!(serde_json::from_str::<Sockets>(&serde_json::to_string(&ours)?)?, ours);
        Ok(())
    }
}
