//! Limits of checkpoints, forks, comparisons and workflow records.

use std::time::Duration;

/// A checkpoint's manifest, or its list of engine state, bytes.
pub const MANIFEST_BYTES: usize = 64 << 20;
/// Version of an image, characters.
pub const IMAGE_VERSION_CHARS: usize = 64;
/// One text that describes a machine, characters: a processor's model with its features, for instance.
pub const MACHINE_TEXT_CHARS: usize = 1024;
/// Default limit of the memory of a suspended kernel's processes, bytes.
pub const SNAPSHOT_SUSPEND_BYTES: u64 = 100 << 20;
/// Default limit of memory and disk of a snapshot of kind teleport, bytes.
pub const SNAPSHOT_TELEPORT_BYTES: u64 = 4 << 30;
/// Engine state of a checkpoint that moves to another host, bytes; its files are bounded by that host's disk.
pub const SNAPSHOT_CHECKPOINT_BYTES: u64 = 500 << 20;
/// A checkpoint's name, bytes.
pub const CHECKPOINT_NAME_BYTES: usize = 255;
/// A checkpoint's description, bytes.
pub const CHECKPOINT_DESCRIPTION_BYTES: usize = 64 << 10;
/// Default wait of a checkpoint for running code.
pub const CHECKPOINT_WAIT: Duration = Duration::from_secs(60);
/// Default number of automatic checkpoints kept per kernel, newest first.
pub const DEFAULT_CHECKPOINTS_KEPT: u32 = 20;
/// Default time for which automatic checkpoints are kept.
pub const DEFAULT_CHECKPOINTS_KEPT_FOR: Duration = Duration::from_secs(90 * 86_400);
/// Attempts to seal a manifest while work is recorded concurrently.
pub const SEAL_ATTEMPTS: u32 = 5;
/// Time that a stop grants its checkpoint.
pub const STOP_CHECKPOINT: Duration = Duration::from_secs(10);
/// The same at the daemon's stop, where many are queued; at most half of that stop's time.
pub const STOP_CHECKPOINT_SHUTDOWN: Duration = Duration::from_secs(30);
/// The same for a forced stop.
pub const STOP_CHECKPOINT_FORCED: Duration = Duration::from_secs(3);
/// Kernels checkpointed concurrently before they stop.
pub const STOP_CHECKPOINTS: usize = 8;
/// Steps of one kernel.
pub const STEPS: u32 = 4096;
/// Decisions of one kernel.
pub const DECISIONS: u64 = 4096;
/// Artifacts of one kernel.
pub const ARTIFACTS: u64 = 4096;
/// Versions of one artifact.
pub const ARTIFACT_VERSIONS: u32 = 65_536;
/// Name of a step, agent or artifact, or title of a decision, bytes.
pub const RECORD_NAME_BYTES: usize = 255;
/// Text of a decision, note of a hand-off or summary of a checkpoint, bytes.
pub const RECORD_TEXT_BYTES: usize = 64 << 10;
/// Messages that one checkpoint compacts.
pub const COMPACTED_MESSAGES: u64 = 65_536;
/// Ranges of messages that one checkpoint compacts.
pub const COMPACTED_SPANS: usize = 1024;
/// Characters of a value in one difference.
pub const DIFF_SHOWN_CHARS: usize = 200;
/// Size of a file whose text is compared, bytes; a larger one is only reported as changed.
pub const DIFF_TEXT_BYTES: u64 = 4 << 20;
/// Lines of such a file.
pub const DIFF_TEXT_LINES: usize = 200_000;
/// Time for the search of the shortest difference of two files; then a longer one is used.
pub const DIFF_TEXT_TIME: Duration = Duration::from_millis(500);
/// Paths to which a text comparison is limited.
pub const DIFF_PATHS: usize = 1024;
/// Path within a workspace in a text comparison, bytes: deeper than a path in a request may be.
pub const PATCH_PATH_BYTES: usize = 4 << 20;
/// File differences queued for the client.
pub const DIFF_QUEUE: usize = 256;
/// Children of one fork.
pub const FORK_CHILDREN: usize = 256;
/// Children of one fork created concurrently.
pub const FORKS_CONCURRENT: usize = 4;
/// Default number of kernels with a prepared copy of their files for the next fork.
pub const PREPARED_COPIES: usize = 4;
/// Largest configurable value for that.
pub const PREPARED_COPIES_MAX: usize = 256;
/// Files, directories and links from which on a workspace is worth a prepared copy ...
pub const PREPARED_MIN_ENTRIES: u64 = 256;
/// ... or bytes from which on it is; smaller ones are copied fast enough.
pub const PREPARED_MIN_BYTES: u64 = 16 << 20;
/// Free disk space that a prepared copy needs, as a multiple of its size.
pub const PREPARED_FREE_FACTOR: u64 = 10;
/// Entries of a prepared copy: the metadata of each stays in memory.
pub const PREPARED_MAX_ENTRIES: u64 = 1 << 18;
/// Size from which on a file of a prepared copy is checked before use, bytes: it may have been emptied to
/// free space.
pub const PREPARED_VERIFY_BYTES: u64 = 256 << 10;
/// Pause after a failed preparation.
pub const PREPARED_RETRY_DELAY: Duration = Duration::from_secs(600);
/// Free disk space below which a prepared copy is removed, as a multiple of its size.
pub const PREPARED_EVICT_FACTOR: u64 = 5;
/// Interval of that check.
pub const PREPARED_CHECK_INTERVAL: Duration = Duration::from_secs(30);
/// Time after which an unused prepared copy is removed.
pub const PREPARED_LIFETIME: Duration = Duration::from_secs(3600);
