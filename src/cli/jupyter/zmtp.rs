//! The sockets of a Jupyter kernel: ZeroMQ's wire protocol (ZMTP 3.0, mechanism NULL), as far as the listening
//! side of Jupyter needs it: routers, and a publisher.
//!
//! ```text
//! peer ── greeting, READY ──▶ registered ── messages ──▶ Router::recv      Router::send ──▶ queue of the peer
//!                                                        Publisher::publish ──▶ queue of each subscriber
//! ```
//! Nothing of a peer is authenticated here (messages carry signatures), so everything has a limit: peers, frames, bytes,
//! the time of the handshake. A full queue of a peer delays the sender; a peer that takes nothing is disconnected.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::core::limits;

/// The frames of a message.
pub type Frames = Vec<Vec<u8>>;

/// A peer of a socket.
pub type PeerId = u64;

/// Messages that wait for a peer, or from all peers.
const QUEUE: usize = 64;
/// Pause after a failed accept: an immediate retry would spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const GREETING_BYTES: usize = 64;
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;
/// Longest routing id.
const IDENTITY_BYTES: usize = 255;

/// A bound listener.
pub enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

struct Peer {
    /// The routing id that it announced, perhaps empty: the same on all sockets of a front end.
    identity: Vec<u8>,
    outgoing: mpsc::Sender<Rc<Frames>>,
    /// Beginnings of the messages that it subscribed to.
    subscriptions: Rc<RefCell<Vec<Vec<u8>>>>,
}

/// The peers of one socket.
struct Shared {
    kind: &'static str,
    peers: RefCell<BTreeMap<PeerId, Peer>>,
    incoming: mpsc::Sender<(PeerId, Frames)>,
}

/// Ends its task when dropped.
struct Task(JoinHandle<()>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The sending side of a socket.
#[derive(Clone)]
pub struct Sender {
    shared: Rc<Shared>,
    _accepting: Rc<Task>,
}

/// A router: receives from all peers, sends to one of them.
pub struct Router {
    pub sender: Sender,
    incoming: mpsc::Receiver<(PeerId, Frames)>,
}

impl Router {
    /// Serves a router.
    pub fn new(listener: Listener) -> Router {
        let (sender, incoming) = serve(listener, "ROUTER");
        Router { sender, incoming }
    }

    /// The next message.
    pub async fn recv(&mut self) -> Option<(PeerId, Frames)> {
        self.incoming.recv().await
    }

    /// A message that has arrived already.
    pub fn try_recv(&mut self) -> Option<(PeerId, Frames)> {
        self.incoming.try_recv().ok()
    }
}

/// Serves a publisher.
pub fn publisher(listener: Listener) -> Sender {
    serve(listener, "PUB").0
}

impl Sender {
    /// The routing id of a peer.
    pub fn identity(&self, peer: PeerId) -> Vec<u8> {
        self.shared.peers.borrow().get(&peer).map(|peer| peer.identity.clone()).unwrap_or_default()
    }

    /// The peer with this routing id. Without one: the only peer.
    pub fn find(&self, identity: &[u8]) -> Option<PeerId> {
        let peers = self.shared.peers.borrow();
        match identity.is_empty() {
            true if peers.len() == 1 => peers.keys().next().copied(),
            true => None,
            false => peers.iter().find(|(_, peer)| peer.identity == identity).map(|(id, _)| *id),
        }
    }

    /// Sends to one peer; a peer that is gone gets nothing.
    pub async fn send(&self, peer: PeerId, frames: Frames) {
        let outgoing = self.shared.peers.borrow().get(&peer).map(|peer| peer.outgoing.clone());
        if let Some(outgoing) = outgoing {
            self.deliver(peer, &outgoing, Rc::new(frames)).await;
        }
    }

    /// Sends to every subscriber.
    pub async fn publish(&self, frames: Frames) {
        let topic = frames.first().cloned().unwrap_or_default();
        let wants = |peer: &Peer| peer.subscriptions.borrow().iter().any(|beginning| topic.starts_with(beginning));
        let peers: Vec<_> = {
            let peers = self.shared.peers.borrow();
            peers.iter().filter(|(_, peer)| wants(peer)).map(|(id, peer)| (*id, peer.outgoing.clone())).collect()
        };
        let frames = Rc::new(frames);
        for (id, outgoing) in peers {
            self.deliver(id, &outgoing, Rc::clone(&frames)).await;
        }
    }

    async fn deliver(&self, id: PeerId, outgoing: &mpsc::Sender<Rc<Frames>>, frames: Rc<Frames>) {
        let sent = tokio::time::timeout(limits::JUPYTER_PEER_SILENCE, outgoing.send(frames)).await;
        if !matches!(sent, Ok(Ok(()))) {
            self.shared.peers.borrow_mut().remove(&id);
        }
    }
}

fn serve(listener: Listener, kind: &'static str) -> (Sender, mpsc::Receiver<(PeerId, Frames)>) {
    let (incoming, received) = mpsc::channel(QUEUE);
    let shared = Rc::new(Shared { kind, peers: RefCell::default(), incoming });
    let accepting = tokio::task::spawn_local(accept(listener, Rc::clone(&shared)));
    (Sender { shared, _accepting: Rc::new(Task(accepting)) }, received)
}

async fn accept(listener: Listener, shared: Rc<Shared>) {
    let open = Rc::new(());
    for id in 0.. {
        let accepted: io::Result<()> = async {
            match &listener {
                Listener::Unix(listener) => {
                    let stream = listener.accept().await?.0;
                    start(stream, id, &shared, &open);
                }
                Listener::Tcp(listener) => {
                    let stream = listener.accept().await?.0;
                    stream.set_nodelay(true)?;
                    start(stream, id, &shared, &open);
                }
            }
            Ok(())
        }
        .await;
        if let Err(error) = accepted {
            tracing::warn!(%error, "a peer could not be accepted");
            tokio::time::sleep(ACCEPT_PAUSE).await;
        }
    }
}

/// Serves a peer, unless there are too many.
fn start(stream: impl AsyncRead + AsyncWrite + 'static, id: PeerId, shared: &Rc<Shared>, open: &Rc<()>) {
    if Rc::strong_count(open) > limits::JUPYTER_PEERS {
        return tracing::warn!("a peer is refused: there are {} already", limits::JUPYTER_PEERS);
    }
    let (shared, open) = (Rc::clone(shared), Rc::clone(open));
    tokio::task::spawn_local(async move {
        if let Err(error) = serve_peer(stream, id, &shared).await {
            tracing::debug!(%error, "a peer left");
        }
        shared.peers.borrow_mut().remove(&id);
        drop(open);
    });
}

async fn serve_peer(stream: impl AsyncRead + AsyncWrite, id: PeerId, shared: &Shared) -> io::Result<()> {
    let (mut from, mut to) = tokio::io::split(stream);
    let late = |_| io::Error::from(io::ErrorKind::TimedOut);
    let greeted = tokio::time::timeout(limits::CLIENT_HELLO, greet(&mut from, &mut to, shared.kind)).await;
    let identity = greeted.map_err(late)??;
    let (outgoing, mut queue) = mpsc::channel::<Rc<Frames>>(QUEUE);
    let subscriptions = Rc::new(RefCell::new(Vec::new()));
    let peer = Peer { identity, outgoing, subscriptions: Rc::clone(&subscriptions) };
    shared.peers.borrow_mut().insert(id, peer);
    let receive = async {
        loop {
            let frames = read_message(&mut from).await?;
            match shared.kind {
                "PUB" => subscribe(&mut subscriptions.borrow_mut(), &frames),
                _ => shared.incoming.send((id, frames)).await.map_err(|_| io::ErrorKind::BrokenPipe)?,
            }
        }
    };
    let send = async {
        while let Some(frames) = queue.recv().await {
            to.write_all(&encode(&frames)).await?;
        }
        Ok(())
    };
    tokio::select! {
        received = receive => received,
        sent = send => sent,
    }
}

fn subscribe(subscriptions: &mut Vec<Vec<u8>>, frames: &Frames) {
    match frames.as_slice() {
        [frame] if frame.first() == Some(&1) && subscriptions.len() < QUEUE && frame.len() <= QUEUE * 4 => {
            subscriptions.push(frame[1..].to_vec());
        }
        [frame] if frame.first() == Some(&0) => subscriptions.retain(|known| known[..] != frame[1..]),
        _ => {}
    }
}

/// Exchanges greetings and READY commands.
async fn greet(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    kind: &str,
) -> io::Result<Vec<u8>> {
    let mut greeting = [0; GREETING_BYTES];
    (greeting[0], greeting[8], greeting[9], greeting[10]) = (0xff, 1, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    to.write_all(&greeting).await?;
    let mut ready = b"\x05READY\x0bSocket-Type".to_vec();
    ready.extend((kind.len() as u32).to_be_bytes());
    ready.extend(kind.as_bytes());
    ready.splice(0..0, [COMMAND, ready.len() as u8]);
    to.write_all(&ready).await?;
    let mut theirs = [0; GREETING_BYTES];
    from.read_exact(&mut theirs).await?;
    if theirs[0] != 0xff || theirs[9] != 0x7f || theirs[10] < 3 || !theirs[12..].starts_with(b"NULL\0") {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a greeting of another protocol"));
    }
    match read_frame(from, 0).await? {
        (flags, body) if flags & COMMAND != 0 && body.starts_with(b"\x05READY") => Ok(identity_in(&body[6..])),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "no READY after the greeting")),
    }
}

/// The routing id in the properties of READY; empty: none.
fn identity_in(mut properties: &[u8]) -> Vec<u8> {
    let mut read = || {
        let (length, rest) = properties.split_first()?;
        let (name, rest) = rest.split_at_checked(usize::from(*length))?;
        let (length, rest) = rest.split_first_chunk::<4>()?;
        let (value, rest) = rest.split_at_checked(usize::try_from(u32::from_be_bytes(*length)).ok()?)?;
        properties = rest;
        Some((name, value))
    };
    while let Some((name, value)) = read() {
        if name.eq_ignore_ascii_case(b"Identity") {
            return value.iter().copied().take(IDENTITY_BYTES).collect();
        }
    }
    Vec::new()
}

async fn read_message(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Frames> {
    let (mut frames, mut bytes) = (Vec::new(), 0);
    loop {
        let (flags, body) = read_frame(from, bytes).await?;
        if flags & COMMAND != 0 {
            continue;
        }
        bytes += body.len();
        frames.push(body);
        if frames.len() > limits::JUPYTER_FRAMES {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "too many frames"));
        }
        if flags & MORE == 0 {
            return Ok(frames);
        }
    }
}

/// Reads a frame; memory grows with what arrives, not with what is announced.
async fn read_frame(from: &mut (impl AsyncRead + Unpin), before: usize) -> io::Result<(u8, Vec<u8>)> {
    let flags = from.read_u8().await?;
    let length = match flags & LONG {
        0 => u64::from(from.read_u8().await?),
        _ => from.read_u64().await?,
    };
    if length > (limits::JUPYTER_MESSAGE_BYTES - before.min(limits::JUPYTER_MESSAGE_BYTES)) as u64 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a frame of {length} bytes")));
    }
    let mut body = Vec::new();
    from.take(length).read_to_end(&mut body).await?;
    match body.len() as u64 == length {
        true => Ok((flags, body)),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

fn encode(frames: &Frames) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(frames.iter().map(|frame| frame.len() + 9).sum());
    for (i, frame) in frames.iter().enumerate() {
        let more = if i + 1 < frames.len() { MORE } else { 0 };
        match u8::try_from(frame.len()) {
            Ok(length) => bytes.extend([more, length]),
            Err(_) => {
                bytes.push(more | LONG);
                bytes.extend((frame.len() as u64).to_be_bytes());
            }
        }
        bytes.extend(frame);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn decoded(bytes: &[u8]) -> io::Result<Frames> {
        read_message(&mut &bytes[..]).await
    }

    #[tokio::test]
    async fn messages_round_trip() {
        let large = vec![7; 70_000];
        for frames in [vec![vec![]], vec![b"a".to_vec(), vec![], large], vec![vec![1; 255], vec![2; 256]]] {
            assert_eq!(decoded(&encode(&frames)).await.expect("whole"), frames);
            let mut cut = encode(&frames);
            cut.pop();
            assert!(cut.len() < 3 || decoded(&cut).await.is_err());
        }
    }

    #[test]
    fn identities_are_read() {
        let property = |name: &str, value: &[u8]| {
            [&[name.len() as u8], name.as_bytes(), &(value.len() as u32).to_be_bytes(), value].concat()
        };
        let ready = [property("Socket-Type", b"DEALER"), property("Identity", b"\0id")].concat();
        assert_eq!(identity_in(&ready), b"\0id");
        assert_eq!(identity_in(&ready[..ready.len() - 1]), b"", "cut");
        assert_eq!(identity_in(&property("Identity", &[7; 300])).len(), IDENTITY_BYTES);
        assert_eq!(identity_in(b"\xff\xff\xff\xff\xff"), b"");
    }

    #[tokio::test]
    async fn hostile_frames_are_refused() {
        let mut huge = vec![LONG];
        huge.extend(u64::MAX.to_be_bytes());
        assert!(decoded(&huge).await.is_err());
        let many = vec![vec![]; limits::JUPYTER_FRAMES + 1];
        assert!(decoded(&encode(&many)).await.is_err());
        // Together they are too large, though none is.
        let mut growing = vec![MORE | LONG];
        growing.extend((limits::JUPYTER_MESSAGE_BYTES as u64).to_be_bytes());
        growing.extend(vec![0; limits::JUPYTER_MESSAGE_BYTES]);
        growing.extend([0, 1, 1]);
        assert!(decoded(&growing).await.is_err());
    }
}
