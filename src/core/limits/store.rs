//! Limits of the object store and its upkeep.

use std::time::Duration;

/// Concurrent store operations.
pub const STORE_OPERATIONS: usize = 4;
/// Threads that hash and compress for one batch, or read for one restore.
pub const STORE_THREADS: usize = 4;
/// Bytes of one batch queued for compression; beyond, the submitting thread compresses too.
pub const STORE_QUEUE_BYTES: usize = 4 << 20;
/// Queued bytes beyond which additional threads compress.
pub const STORE_PARALLEL_BYTES: usize = 512 << 10;
/// Chunk lists that wait for their chunks to be written.
pub const STORE_PENDING_LISTS: usize = 1024;
/// Size up to which an object is one chunk, bytes; a larger one is cut by content.
pub const STORE_UNCHUNKED_BYTES: usize = 512 << 10;
/// Smallest chunk of a larger object except its last, bytes.
/// This and the next two are part of the format: with other values, stored chunks would not be found again.
pub const STORE_CHUNK_MIN_BYTES: usize = 128 << 10;
/// Average chunk, bytes.
pub const STORE_CHUNK_MEAN_BYTES: usize = 512 << 10;
/// Largest chunk, bytes.
pub const STORE_CHUNK_MAX_BYTES: usize = 1 << 20;
/// One entry of a pack, bytes: more than the chunk list of the largest object.
pub const STORE_ENTRY_BYTES: u64 = 64 << 20;
/// Size at which a pack is full, bytes.
pub const STORE_PACK_BYTES: u64 = 64 << 20;
/// List of the pieces of a memory or disk image, bytes.
pub const IMAGE_LIST_BYTES: u64 = 256 << 20;
/// Entries of one pack.
pub const STORE_PACK_ENTRIES: usize = 64 << 10;
/// Packs that the store keeps open for reading.
pub const STORE_PACKS_OPEN: usize = 64;
/// Packs that one reader keeps open, so that it can continue after their removal.
pub const STORE_READER_PACKS: usize = 64;
/// Entries without an index file that trigger the writing of one.
pub const STORE_UNINDEXED_ENTRIES: usize = 64 << 10;
/// Recently written or reused objects that the store remembers individually.
pub const STORE_RECENT_OBJECTS: usize = 256 << 10;
/// Default time for which garbage collection spares recently written or reused objects.
pub const STORE_GRACE: Duration = Duration::from_secs(600);
/// Largest configurable value for that.
pub const STORE_GRACE_MAX: Duration = Duration::from_secs(24 * 3600);
/// Time for which the opening of a store waits for its previous owner.
pub const STORE_LOCK_WAIT: Duration = Duration::from_secs(2);
/// Live objects that one garbage collection can track; beyond, it removes nothing.
pub const GC_OBJECTS: usize = 32 << 20;
/// Shortest pause between two background measurements of what kernels take on the disk.
pub const FIGURES_PAUSE: Duration = Duration::from_secs(10);
/// That pause as a multiple of the time that the last measurement took.
pub const FIGURES_SHARE: u32 = 50;
/// Items of a garbage collection or a verification queued for the client.
pub const UPKEEP_QUEUE: usize = 256;
/// Deadline for the client's acceptance of one item; then it receives no more.
pub const UPKEEP_ITEM_TIMEOUT: Duration = Duration::from_secs(30);
/// Default bytes that one pass of background collection copies out of mostly dead packs.
pub const UPKEEP_PASS_BYTES: u64 = 256 << 20;
/// Default interval of background upkeep.
pub const UPKEEP_INTERVAL: Duration = Duration::from_secs(600);
/// Passes of background collection that running code may defer in a row.
pub const UPKEEP_DEFERRALS: u32 = 6;
