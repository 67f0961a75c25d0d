//! Limits of workspaces and their trees.

/// Size up to which a file is part of its directory's object, bytes.
pub const TREE_INLINE_BYTES: usize = 256;
/// One piece of a file in the store, bytes.
pub const TREE_PIECE_BYTES: usize = 1 << 20;
/// Entries of one page of a directory; names usually end a page sooner.
pub const TREE_PAGE_ENTRIES: usize = 1024;
/// Object of a tree other than file content, bytes: holds a page whose entries all have the largest extended
/// attributes.
pub const TREE_OBJECT_BYTES: u64 = 256 << 20;
/// Removed and added files that a comparison of trees keeps for the detection of renames.
pub const TREE_DIFF_RENAMES: usize = 65_536;
/// Files, directories and links of one workspace.
pub const WORKSPACE_ENTRIES: u64 = 8_000_000;
/// Nesting of directories.
pub const WORKSPACE_DEPTH: u32 = 16_384;
/// Changed names since the last capture; beyond, the whole workspace is scanned.
pub const WORKSPACE_CHANGES: usize = 262_144;
/// Attempts to read a file that changes meanwhile.
pub const WORKSPACE_READ_ATTEMPTS: usize = 3;
/// Files that a scan opens before it reads their notifications: fewer than the host queues.
pub const WORKSPACE_OPEN_BATCH: usize = 2048;
/// Directories that a scan of a workspace keeps open.
pub const WORKSPACE_OPEN_DIRS: usize = 64;
/// Uncaptured entries that a capture names; the rest is counted.
pub const WORKSPACE_MISSED_NAMES: usize = 10_000;
/// Files held in memory or by a driver while the workspace is quiesced, to be stored later; further files are
/// stored at once.
pub const WORKSPACE_DEFERRED_FILES: usize = 65_536;
/// Bytes of such files in memory.
pub const WORKSPACE_DEFERRED_BYTES: u64 = 32 << 20;
/// Entries of a new workspace above which the clock's next tick is awaited, so that none is read again.
pub const WORKSPACE_SETTLE_ENTRIES: u64 = 1000;
/// Size up to which a file is copied into a new workspace rather than cloned, bytes.
pub const WORKSPACE_COPY_BYTES: u64 = 16 << 10;
/// Clones held at once: each is an open file.
pub const WORKSPACE_CLONES: usize = 256;
/// Clones after which a snapshot is cheaper.
pub const WORKSPACE_CLONES_BEFORE_SNAPSHOT: usize = 64;
/// Replaced files that a restore removes after it, bytes; beyond, each is removed at once.
pub const WORKSPACE_REPLACED_BYTES: u64 = 64 << 20;
/// Saved index of a workspace, bytes; a larger one is not saved.
pub const WORKSPACE_INDEX_BYTES: u64 = 4 << 30;
