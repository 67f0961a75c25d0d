//! Limits of moves between hosts.

use std::time::Duration;

/// One control message of the handover protocol, bytes.
pub const HANDOVER_MESSAGE_BYTES: usize = 4 << 20;
/// One piece of an object, bytes.
pub const HANDOVER_PIECE_BYTES: usize = 256 << 10;
/// Smallest rate limit of a move, bytes a second: a slower one would break the deadlines of the protocol.
pub const HANDOVER_RATE_MIN: u64 = 16 << 10;
/// Addresses in one question for missing objects.
pub const HANDOVER_DIGESTS: usize = 8192;
/// Objects of one kernel that is moved.
pub const HANDOVER_OBJECTS: usize = 2_000_000;
/// Description of a moved kernel, bytes.
pub const HANDOVER_SEAL_BYTES: u64 = 64 << 20;
/// Page of a moved history, bytes: the largest row fits.
pub const HANDOVER_PAGE_BYTES: u64 = 96 << 20;
/// Bytes after which a page of history ends.
pub const HANDOVER_PAGE_TARGET: usize = 1 << 20;
/// Rows of one page of history.
pub const HANDOVER_PAGE_ROWS: usize = 256;
/// Pages of one history.
pub const HANDOVER_PAGES: usize = 200_000;
/// Records of moves that one daemon keeps; an activated kernel's record goes first.
pub const HANDOVER_RECORDS: usize = 1000;
/// Moves in progress of one daemon, in either direction.
pub const HANDOVERS_CONCURRENT: usize = 8;
/// Deadline for one frame of the protocol.
pub const HANDOVER_FRAME: Duration = Duration::from_secs(60);
/// Deadline for a step of the other host that depends on the size of the kernel.
pub const HANDOVER_STEP: Duration = Duration::from_secs(900);
/// Deadline for the first answer of the other host.
pub const HANDOVER_HELLO: Duration = Duration::from_secs(30);
/// Deadline for a decision and its acknowledgement; it is repeated after that.
pub const HANDOVER_DECISION: Duration = Duration::from_secs(300);
/// Pause before the first repetition of an unacknowledged decision; it doubles.
pub const HANDOVER_REPEAT_FIRST: Duration = Duration::from_millis(500);
/// Longest pause between repetitions.
pub const HANDOVER_REPEAT_MAX: Duration = Duration::from_secs(60);
/// Text that names a transport, bytes.
pub const HANDOVER_TRANSPORT_BYTES: usize = 16 << 10;
/// Error output of a transport's command that an error quotes, bytes.
pub const HANDOVER_STDERR_BYTES: usize = 2048;
