//! Limits of client connections and messages.

use std::time::Duration;

/// Clients connected at once to one daemon.
pub const CLIENTS: usize = 2_000;
/// Clients of one user of a system-wide daemon.
pub const CLIENTS_PER_USER: usize = 500;
/// Clients that are sent a refusal at once; further ones are disconnected without a message.
pub const CLIENT_REFUSALS: usize = 64;
/// Time in which a refused client must disconnect.
pub const CLIENT_REFUSAL: Duration = Duration::from_secs(2);
/// Deadline for a client's hello.
pub const CLIENT_HELLO: Duration = Duration::from_secs(10);
/// Deadline for a call that does not depend on code, files or a worker's exit.
pub const CLIENT_CALL: Duration = Duration::from_secs(120);
/// Time for which the command line waits for a stopping daemon: slightly more than a full stop takes.
pub const DAEMON_EXIT_WAIT: Duration = Duration::from_secs(75);
/// Deadline for the first answer of a daemon that the command line starts.
pub const DAEMON_START: Duration = Duration::from_secs(20);
/// Reader's limit for one Cap'n Proto message, in 8-byte words (64 MiB).
pub const MESSAGE_WORDS: usize = 8 << 20;
/// Reader's limit for a client before its hello, in 8-byte words (64 KiB).
pub const HELLO_WORDS: usize = 8 << 10;
/// One chunk of a stream, bytes.
pub const CHUNK_BYTES: usize = 1 << 20;
/// One value in its JSON form, bytes; larger data is a blob.
pub const VALUE_BYTES: usize = 8 << 20;
/// Nesting of a value.
pub const VALUE_DEPTH: usize = 100;
/// Parts of one value: values, and names of fields. They are converted on the event loop, where all kernels wait for it;
/// more goes through a file or a blob.
pub const VALUE_PARTS: usize = 50_000;
/// Items of one list in a message that has no narrower bound: an array, an object, rows, variables.
pub const VALUE_ITEMS: usize = 1_000_000;
/// Blob in one message (`readBlob`, `writeBlob`), bytes; larger ones stream.
pub const BLOB_INLINE_BYTES: usize = 32 << 20;
/// One blob, bytes.
pub const BLOB_BYTES: u64 = 64 << 30;
/// Event subscriptions of one connection.
pub const SUBSCRIPTIONS: usize = 32;
/// Event subscriptions of one user.
pub const SUBSCRIPTIONS_PER_USER: usize = 1_000;
/// Events of one subscription on their way to the client; the next are read once it has taken these.
pub const EVENTS_IN_FLIGHT: usize = 8;
/// Peers of one socket of a Jupyter kernel.
pub const JUPYTER_PEERS: usize = 64;
/// Frames of one message of a Jupyter front end.
pub const JUPYTER_FRAMES: usize = 64;
/// One message of a Jupyter front end, bytes: more than the largest code as JSON.
pub const JUPYTER_MESSAGE_BYTES: usize = 8 << 20;
/// Time after which a front end that takes no messages is disconnected.
pub const JUPYTER_PEER_SILENCE: Duration = Duration::from_secs(10);
/// A connection file of Jupyter, bytes.
pub const JUPYTER_FILE_BYTES: u64 = 64 << 10;
/// Time for which a cell waits for a daemon that was killed.
pub const JUPYTER_RECONNECT: Duration = Duration::from_secs(60);
/// Events by which one subscriber may lag before it receives a gap.
pub const EVENT_LAG: usize = 4096;
