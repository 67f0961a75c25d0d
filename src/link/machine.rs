//! The protocol between the daemon and the first process of a virtual machine.
//!
//! ```text
//!  daemon                 virtio-serial or vsock port        guest
//!  link: bytes of a worker's link ── ryokan.link ──────────▶ relay ──▶ the worker's private socket
//!  requests, one at a time ───────── ryokan.control ───────▶ control: start, files, engine state, clock
//!  "?" ──────────────────────────── ryokan.events ─────────▶ "R" or "E": the worker runs, has ended
//! ```
//!
//! A virtio-serial port knows no connections: each begins with a hello and a nonce, whose echo ends what an earlier
//! connection left. Over vsock it is the same: what the guest accepted, but did not answer, is no connection yet.
//! The daemon trusts nothing from a guest beyond messages of limited size, and waits for each with a deadline.

use std::collections::VecDeque;
use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

use crate::core::error::Error;
use crate::core::files::{FileChange, FileEvent, FileEventKind, FilePath, Placement};
use crate::core::limits;
use crate::link::bootstrap::ReportLine;
use crate::link::mirror::Entry;

/// Port of the worker's link.
pub const LINK_PORT: &str = "ryokan.link";
/// Port of the requests.
pub const CONTROL_PORT: &str = "ryokan.control";
/// Port of the worker's state.
pub const EVENT_PORT: &str = "ryokan.events";
/// [`LINK_PORT`] of a guest with vsock.
pub const LINK_VSOCK: u32 = 7001;
/// [`CONTROL_PORT`] of a guest with vsock.
pub const CONTROL_VSOCK: u32 = 7002;
/// [`EVENT_PORT`] of a guest with vsock.
pub const EVENT_VSOCK: u32 = 7003;
/// Asks for the worker's state.
pub const EVENT_QUERY: u8 = b'?';
/// The worker runs, or was not started.
pub const EVENT_RUNS: u8 = b'R';
/// The worker has ended.
pub const EVENT_ENDED: u8 = b'E';

/// The folder of a prepared worker in a guest, before it has a kernel's.
pub const PREPARED: &str = "/run/prepared";
/// The folder in a guest with the files of its identity, which code inside sees in place of the host kernel's.
pub const IDENTITY_FOLDER: &str = "/run/identity";
/// The files in that folder, and where code inside sees them.
pub const IDENTITY_FILES: [(&str, &str); 2] =
    [("boot_id", "/proc/sys/kernel/random/boot_id"), ("machine-id", "/etc/machine-id")];

/// What a guest of this build understands; it reports the number when it is seeded. A machine may be of an earlier build
/// than the daemon that adopts it, and its guest answers no request that it does not know.
pub const LEVEL: u32 = WATCH_LEVEL;
/// The level of guests that answer [`FileRequest`].
pub const FILES_LEVEL: u32 = 1;
/// The level of guests that answer [`WatchRequest`].
pub const WATCH_LEVEL: u32 = 2;
/// Reason of a guest's error: it does not have this watch any more.
pub const LOST_WATCH: &str = "lost_watch";

/// Length of a hello.
pub const HELLO_BYTES: usize = 32;
const HELLO: &[u8; 16] = b"ryokan-machine-1";
const READY: &[u8; 16] = b"ryokan-ready-001";

/// Largest JSON part of a message, bytes.
const JSON_BYTES: usize = 4 << 20;
/// Largest body of a message, bytes.
pub const BODY_BYTES: usize = 1 << 20;

/// The daemon's hello with a nonce.
pub fn hello(nonce: [u8; 16]) -> [u8; HELLO_BYTES] {
    joined(HELLO, nonce)
}

/// The guest's answer to a nonce.
pub fn ready(nonce: [u8; 16]) -> [u8; HELLO_BYTES] {
    joined(READY, nonce)
}

fn joined(word: &[u8; 16], nonce: [u8; 16]) -> [u8; HELLO_BYTES] {
    let mut bytes = [0; HELLO_BYTES];
    bytes[..16].copy_from_slice(word);
    bytes[16..].copy_from_slice(&nonce);
    bytes
}

/// Finds the newest complete hello in received bytes, and returns its nonce.
pub fn nonce_of(received: &[u8]) -> Option<[u8; 16]> {
    let at = received.windows(HELLO_BYTES).rposition(|window| window.starts_with(HELLO))?;
    received[at + 16..at + HELLO_BYTES].try_into().ok()
}

/// A request of the daemon.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Seeds the random generator and sets the clock, nanoseconds since 1970. Before anything of a user runs, and again
    /// before a machine that was stopped becomes a kernel's.
    Seed {
        /// 32 random bytes.
        entropy: [u8; 32],
        /// The time.
        now_ns: i64,
        /// Whether boot id and machine id are made anew, too: the machine continues as a copy of another.
        #[serde(default)]
        renew: bool,
    },
    /// Runs a program of the image without input, so that a template holds what its start reads.
    WarmUp {
        /// An interpreter.
        program: String,
        /// Its arguments.
        arguments: Vec<String>,
    },
    /// Mounts the machine's disk, once.
    Mount,
    /// Starts a worker without identity and folder, for a template; the body is its launch document. Answered when its
    /// engine waits.
    Prepare,
    /// Starts the worker; the body is its launch document, or the prepared worker's assignment, with the secret. Answered
    /// when it serves or failed.
    Start,
    /// A page of the workspace's entries; 0 lists anew.
    List {
        /// First entry.
        from: usize,
    },
    /// A piece of a file.
    Read {
        /// The file.
        path: String,
        /// Where.
        offset: u64,
    },
    /// Removes an entry.
    Remove {
        /// The entry.
        path: String,
    },
    /// Makes a folder.
    Folder {
        /// The folder.
        path: String,
    },
    /// Makes a link.
    Link {
        /// The link.
        path: String,
        /// Its target.
        target: String,
    },
    /// Writes the body into a file.
    Write {
        /// The file.
        path: String,
        /// Where.
        offset: u64,
    },
    /// Sets permissions and time.
    Finish {
        /// The entry.
        entry: Entry,
    },
    /// A page of the engine state's heads.
    StateHeads {
        /// First entry.
        from: usize,
    },
    /// A piece of a state entry's body.
    StateBody {
        /// The entry.
        key: String,
        /// Where.
        offset: u64,
    },
    /// Appends the body to a state entry.
    StatePut {
        /// The entry.
        key: String,
        /// Its metadata.
        meta_json: String,
    },
    /// Stores the entries put before, and nothing else.
    StateCommit {
        /// Name, version and format of the engine that wrote them.
        engine: (String, String, u32),
    },
    /// Writes everything to the disk.
    Sync,
    /// A client's change of the workspace's files. From level 1.
    Files(FileRequest),
    /// A client's watch of the workspace's files. From level 2.
    Watch(WatchRequest),
}

/// A step of a client's watch of files. A connection's end ends all watches.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WatchRequest {
    /// Begins to watch a directory.
    Begin {
        /// The watch's number, which the daemon chooses.
        watch: u64,
        /// The directory.
        path: FilePath,
        /// Whether those below it are watched, too.
        recursive: bool,
    },
    /// Returns the events since the last request.
    Take {
        /// The watch's number.
        watch: u64,
    },
    /// Ends a watch.
    End {
        /// The watch's number.
        watch: u64,
    },
}

/// A step of a client's change of files. A connection's end discards unfinished files.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileRequest {
    /// Appends the body to a file without a name; an offset of 0 begins one.
    Append {
        /// The file's number, which the daemon chooses.
        upload: u64,
        /// The bytes before.
        offset: u64,
        /// The most bytes that the file may have.
        most_bytes: u64,
    },
    /// Makes a file appear, complete.
    Place {
        /// The file's number.
        upload: u64,
        /// All of its bytes; an empty one needs no beginning.
        bytes: u64,
        /// Where and how it appears.
        place: Placement,
    },
    /// Discards an unfinished file.
    Discard {
        /// The file's number.
        upload: u64,
    },
    /// Applies a change.
    Change {
        /// The change.
        change: FileChange,
    },
}

/// A head of a state entry.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Head {
    /// Its key.
    pub key: String,
    /// Its metadata.
    pub meta_json: String,
    /// Its length, bytes.
    pub size: u64,
    /// BLAKE3 of its body.
    pub digest: [u8; 32],
}

/// An answer of the guest.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// It is done; a body may follow.
    Done,
    /// The generator is seeded and the clock is set.
    Seeded {
        /// The guest's boot id.
        boot_id: String,
        /// The guest's clock, nanoseconds since 1970.
        now_ns: i64,
        /// What it understands: [`LEVEL`] of its build; 0 of the first ones.
        #[serde(default)]
        level: u32,
    },
    /// A client's file has appeared.
    Placed {
        /// Its permission bits.
        mode: u32,
        /// Its modification time, nanoseconds since 1970.
        modified_ns: i64,
    },
    /// Events of a watch: the body, as [`events_to_bytes`] writes it.
    Events {
        /// Whether further ones wait.
        more: bool,
    },
    /// The worker's report.
    Started(ReportLine),
    /// Entries of the workspace; `more`: further ones follow.
    Entries {
        /// The entries.
        entries: Vec<Entry>,
        /// Whether further ones follow.
        more: bool,
    },
    /// Heads of state entries.
    Heads {
        /// The engine that wrote them.
        engine: Option<(String, String, u32)>,
        /// The heads.
        heads: Vec<Head>,
        /// Whether further ones follow.
        more: bool,
    },
    /// It failed.
    Failed(Error),
    /// A file is gone.
    Gone,
}

/// The kinds of events that a guest reports, by number.
const EVENT_KINDS: [FileEventKind; 7] = [
    FileEventKind::Created,
    FileEventKind::Written,
    FileEventKind::Closed,
    FileEventKind::Changed,
    FileEventKind::Removed,
    FileEventKind::Overflow,
    FileEventKind::Ended,
];

/// Takes the first events that a message can have, and returns its body: of each the number of its kind, the length of its
/// path, and the path.
pub fn events_to_bytes(events: &mut VecDeque<FileEvent>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..limits::FILE_EVENT_BATCH {
        let Some(event) = events.front() else { break };
        let kind = EVENT_KINDS.iter().position(|kind| *kind == event.kind);
        let length = u16::try_from(event.path.len());
        if let (Some(kind), Ok(length)) = (kind, length) {
            if bytes.len() + 3 + event.path.len() > BODY_BYTES {
                break;
            }
            bytes.push(kind as u8);
            bytes.extend(length.to_le_bytes());
            bytes.extend(&event.path);
        }
        events.pop_front();
    }
    bytes
}

/// The events of a message's body; `None` if it is not of that form, or names something outside the directory.
pub fn events_from_bytes(mut bytes: &[u8]) -> Option<Vec<FileEvent>> {
    let mut events = Vec::new();
    while let Some((kind, rest)) = bytes.split_first() {
        let (length, rest) = rest.split_first_chunk()?;
        let (path, rest) = rest.split_at_checked(usize::from(u16::from_le_bytes(*length)))?;
        let is_name = |name: &[u8]| !matches!(name, b"" | b"." | b"..") && name.len() <= limits::FILE_NAME_BYTES;
        let is_inside = path.is_empty() || path.split(|byte| *byte == b'/').all(is_name);
        if !is_inside || path.contains(&0) || events.len() >= limits::FILE_EVENT_BATCH {
            return None;
        }
        events.push(FileEvent { kind: *EVENT_KINDS.get(usize::from(*kind))?, path: path.to_vec() });
        bytes = rest;
    }
    Some(events)
}

/// Writes a message.
///
/// # Errors
/// The stream's; `InvalidInput` beyond the limits.
pub fn write(to: &mut impl Write, message: &impl Serialize, body: &[u8]) -> io::Result<()> {
    let json = serde_json::to_vec(message)?;
    if json.len() > JSON_BYTES || body.len() > BODY_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a message to or from a guest is too large"));
    }
    let mut bytes = Vec::with_capacity(8 + json.len() + body.len());
    bytes.extend((json.len() as u32).to_le_bytes());
    bytes.extend((body.len() as u32).to_le_bytes());
    bytes.extend(json);
    bytes.extend(body);
    to.write_all(&bytes)
}

/// Reads a message.
///
/// # Errors
/// The stream's; `InvalidData` for what is no message.
pub fn read<T: for<'de> Deserialize<'de>>(from: &mut impl Read) -> io::Result<(T, Vec<u8>)> {
    let mut lengths = [[0; 4]; 2];
    from.read_exact(&mut lengths[0])?;
    from.read_exact(&mut lengths[1])?;
    let [json, body] = lengths.map(|length| u32::from_le_bytes(length) as usize);
    if json > JSON_BYTES || body > BODY_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message to or from a guest is too large"));
    }
    let (mut text, mut data) = (vec![0; json], vec![0; body]);
    from.read_exact(&mut text)?;
    from.read_exact(&mut data)?;
    let message = serde_json::from_slice(&text).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
    Ok((message, data))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hello_is_found_after_stale_bytes() {
        let bytes = [b"stale".as_slice(), &hello([1; 16]), &hello([2; 16])].concat();
        assert_eq!(nonce_of(&bytes), Some([2; 16]));
        assert_eq!(nonce_of(&bytes[..30]), None);
    }

    #[test]
    fn events_return_as_sent() {
        let event = |kind, path: &[u8]| FileEvent { kind, path: path.to_vec() };
        let mut sent: VecDeque<FileEvent> = EVENT_KINDS.map(|kind| event(kind, b"d/\xff")).into();
        sent.push_back(event(FileEventKind::Ended, b""));
        let all: Vec<FileEvent> = sent.iter().cloned().collect();
        assert_eq!(events_from_bytes(&events_to_bytes(&mut sent)), Some(all));
        assert!(sent.is_empty());
        // The rest waits.
        sent.extend((0..3000).map(|n| event(FileEventKind::Created, format!("f{n}").as_bytes())));
        let bytes = events_to_bytes(&mut sent);
        assert_eq!(events_from_bytes(&bytes).map(|events| events.len()), Some(limits::FILE_EVENT_BATCH));
        assert_eq!(sent.front().map(|event| event.path.as_slice()), Some(&b"f1024"[..]));
    }

    #[test]
    fn hostile_events_are_refused() {
        let bytes = |kind: u8, path: &[u8]| [&[kind][..], &(path.len() as u16).to_le_bytes(), path].concat();
        let long = vec![b'x'; limits::FILE_NAME_BYTES + 1];
        for path in [&b".."[..], b"../x", b"a/../b", b"/etc", b"a//b", b"a/", b".", b"a\0", &long] {
            assert_eq!(events_from_bytes(&bytes(0, path)), None, "{path:?}");
        }
        assert!(events_from_bytes(&bytes(0, b"a/..b")).is_some());
        assert_eq!(events_from_bytes(&bytes(7, b"a")), None, "no such kind");
        assert_eq!(events_from_bytes(&[0, 9, 0, b'a']), None, "its end is missing");
        assert_eq!(events_from_bytes(&bytes(0, b"a").repeat(limits::FILE_EVENT_BATCH + 1)), None, "too many");
    }

    #[test]
    fn oversized_messages_are_refused() -> io::Result<()> {
        let mut bytes = Vec::new();
        write(&mut bytes, &Request::Read { path: "a".into(), offset: 1 }, b"body")?;
        let (request, body): (Request, _) = read(&mut &bytes[..])?;
        assert!(matches!(request, Request::Read { offset: 1, .. }) && body == b"body");
        assert!(write(&mut Vec::new(), &Request::Sync, &vec![0; BODY_BYTES + 1]).is_err());
        bytes[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(read::<Request>(&mut &bytes[..]).is_err());
        Ok(())
    }
}
