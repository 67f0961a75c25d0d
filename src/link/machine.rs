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

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

use crate::core::error::Error;
use crate::core::files::{FileChange, Placement};
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

/// The folder in a guest with the files of its identity, which code inside sees in place of the host kernel's.
pub const IDENTITY_FOLDER: &str = "/run/identity";
/// The files in that folder, and where code inside sees them.
pub const IDENTITY_FILES: [(&str, &str); 2] =
    [("boot_id", "/proc/sys/kernel/random/boot_id"), ("machine-id", "/etc/machine-id")];

/// What a guest of this build understands; it reports the number when it is seeded. 1: [`FileRequest`]. A machine may be of
/// an earlier build than the daemon that adopts it, and its guest answers no request that it does not know.
pub const LEVEL: u32 = 1;

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
    },
    /// Mounts the machine's disk, once.
    Mount,
    /// Starts the worker; the body is its launch document with the secret. Answered when it serves or failed.
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
