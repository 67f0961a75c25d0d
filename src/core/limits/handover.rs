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
/// Objects of one kernel that is moved, and chunks of its larger objects that one connection asks about.
pub const HANDOVER_OBJECTS: usize = 2_000_000;
/// Objects of all kernels that arrive at once.
pub const HANDOVER_OBJECTS_ALL: usize = 4_000_000;
/// Objects of a user's own kernels that a source may refer to without sending them, in a system-wide daemon.
pub const HANDOVER_REUSED: usize = 500_000;
/// Calls of `ryokan pipe` in flight, in each direction.
pub const HANDOVER_CALLS: usize = 4;
/// Description of a moved kernel, bytes.
pub const HANDOVER_SEAL_BYTES: u64 = 64 << 20;
/// Lines of the audit log that move with a kernel: its newest ones.
pub const HANDOVER_AUDIT_LINES: usize = 10_000;
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
/// Kernels of one user that arrive at once in a system-wide daemon.
pub const HANDOVERS_OF_USER: usize = 4;
/// Deadline for one frame of the protocol.
pub const HANDOVER_FRAME: Duration = Duration::from_secs(60);
/// Deadline for a step of the other host that depends on the size of the kernel.
pub const HANDOVER_STEP: Duration = Duration::from_secs(900);
/// Longest time in which the source of an arriving kernel sends nothing: it takes a checkpoint meanwhile, for instance.
pub const HANDOVER_SILENCE: Duration = Duration::from_secs(300);
/// Longest time without progress of the other host while the kernel is held, unless configured.
pub const HANDOVER_STALL: Duration = Duration::from_secs(45);
/// Longest time in which a moving kernel is held, unless configured.
pub const HANDOVER_PAUSE: Duration = Duration::from_secs(600);
/// Shortest such time that can be configured.
pub const HANDOVER_STALL_MIN: Duration = Duration::from_secs(1);
/// Deadline for one step of the other host while the kernel is held, whatever it reports.
pub const HANDOVER_HELD: Duration = Duration::from_secs(300);
/// Shortest pause between two reports of a target that works on a step.
pub const HANDOVER_REPORT_MIN: Duration = Duration::from_millis(100);
/// Rounds of copying while the kernel runs.
pub const HANDOVER_ROUNDS: u32 = 5;
/// The same of a virtual machine with its memory: each one stops the machine while it is saved.
pub const HANDOVER_MACHINE_ROUNDS: u32 = 2;
/// A round that sends no more than this is the last one, bytes: the rest is about as small.
pub const HANDOVER_REST_BYTES: u64 = 4 << 20;
/// A round shorter than this is the last one: little can have been written meanwhile.
pub const HANDOVER_ROUND_SHORT: Duration = Duration::from_secs(1);
/// Room that an arriving kernel takes at once beyond what was offered, bytes.
pub const HANDOVER_ROOM_STEP: u64 = 64 << 20;
/// Failed arrivals whose leftovers are counted apart; older ones are counted together.
pub const HANDOVERS_FAILED: usize = 64;
/// Time for the reason of a connection that the other host has ended.
pub const HANDOVER_REFUSAL: Duration = Duration::from_secs(2);
/// Deadline for the first answer of the other host.
pub const HANDOVER_HELLO: Duration = Duration::from_secs(30);
/// Deadline for a decision and its acknowledgement; it is repeated after that.
pub const HANDOVER_DECISION: Duration = Duration::from_secs(300);
/// Time that a failed move waits for the acknowledgement of its abort, which is repeated after that.
pub const HANDOVER_ABORT_WAIT: Duration = Duration::from_secs(10);
/// Pause before the first repetition of an unacknowledged decision; it doubles.
pub const HANDOVER_REPEAT_FIRST: Duration = Duration::from_millis(500);
/// Longest pause between repetitions.
pub const HANDOVER_REPEAT_MAX: Duration = Duration::from_secs(60);
/// Text that names a transport, bytes.
pub const HANDOVER_TRANSPORT_BYTES: usize = 16 << 10;
/// Error output of a transport's command that an error quotes, bytes.
pub const HANDOVER_STDERR_BYTES: usize = 2048;
