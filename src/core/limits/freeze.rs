//! Limits of groups, freezes and locks.

use std::time::Duration;

/// Groups of one user.
pub const GROUPS: u64 = 256;
/// Members of one group.
pub const GROUP_MEMBERS: usize = 32;
/// Repositories and submodules of one exported group.
pub const GROUP_HISTORIES: usize = 256;
/// Message of a freeze, bytes.
pub const FREEZE_MESSAGE_BYTES: usize = 255;
/// How long a freeze may wait for running code of its kernels.
pub const FREEZE_WAIT: Duration = Duration::from_secs(60 * 60);
/// Freezes of one group.
pub const GROUP_FREEZES: u64 = 10_000;
/// A freeze's manifest, bytes.
pub const FREEZE_MANIFEST_BYTES: usize = 4 << 20;
/// Default time for one step of one member; the kernels of the group are paused meanwhile.
pub const FREEZE_STEP: Duration = Duration::from_secs(60);
/// Default time for storing or preparing one member, outside of the pause.
pub const FREEZE_STORE: Duration = Duration::from_secs(3600);
/// Attempts to bring a member back to what it was before they are left to recovery.
pub const REVERT_ATTEMPTS: u32 = 3;
/// Interval at which sources that stay frozen and restores that stay unfinished are retried.
pub const GROUP_RETRY: Duration = Duration::from_secs(60);
/// How often that interval is doubled for a group that fails each time.
pub const GROUP_RETRY_DOUBLINGS: u32 = 4;
/// Time that a new daemon grants a git command of the former one to end.
pub const GIT_ORPHAN: Duration = Duration::from_secs(30);
/// Output of one git command, bytes.
pub const GIT_OUTPUT_BYTES: u64 = 256 << 20;
/// Differences between two states of a group that are listed.
pub const GROUP_DIFFERENCES: usize = 1000;
/// The name of an item in one of them, characters.
pub const GROUP_DIFFERENCE_NAME: usize = 1024;
/// Commits between two states of a repository that are listed, for each direction.
pub const COMMITS_COMPARED: usize = 100;
/// Tables of a database whose rows a comparison counts.
pub const TABLES_COMPARED: usize = 1000;
/// Passes over a directory until two of them agree.
pub const DIRECTORY_ATTEMPTS: usize = 6;
/// Pause after a pass during which a directory was written.
pub const DIRECTORY_PAUSE: Duration = Duration::from_millis(100);
/// Default time limit of a program of a data source.
pub const SOURCE_TIMEOUT: Duration = Duration::from_secs(60);
/// Default limit of the data of a command source, bytes.
pub const SOURCE_BYTES: u64 = 1 << 30;
/// Sections of a daemon's configuration that a freeze names.
pub const CONFIGURATION_SECTIONS: usize = 64;
/// What a program prints to identify the data of a command source, bytes.
pub const SOURCE_REVISION_BYTES: u64 = 64 << 10;
/// Time that a new daemon grants a data source's program of the former one to end.
pub const PROGRAM_ORPHAN: Duration = Duration::from_secs(10);
/// The record of a quiesced data source, bytes.
pub const QUIESCED_BYTES: u64 = 64 << 10;
/// A name in a PostgreSQL server, bytes; with a suffix it has at most 63.
pub const POSTGRES_NAME_BYTES: usize = 48;
/// The directory of a PostgreSQL server's socket, or its name, bytes.
pub const POSTGRES_HOST_BYTES: usize = 100;
/// The answer of a PostgreSQL server to one statement, bytes.
pub const POSTGRES_ANSWER_BYTES: u64 = 64 << 10;
/// The end of the log of a PostgreSQL server that an error shows, bytes.
pub const POSTGRES_LOG_BYTES: u64 = 2000;
/// The definitions of a PostgreSQL database, bytes.
pub const POSTGRES_SCHEMA_BYTES: u64 = 64 << 20;
/// Ignored files that a refusal names.
pub const IGNORED_NAMED: usize = 5;
/// The configuration of a repository, bytes.
pub const GIT_CONFIG_BYTES: u64 = 1 << 20;
/// Memory of a git command that reads a pack from elsewhere, bytes: objects that are differences are held as a whole.
pub const GIT_FOREIGN_MEMORY: u64 = 2 << 30;
/// A file of git that names a directory, bytes.
pub const GIT_LINK_BYTES: u64 = 4096;
/// Submodules of one repository, and linked work trees that a lock names.
pub const GIT_SUBMODULES: usize = 64;
/// Submodules inside each other.
pub const GIT_SUBMODULE_DEPTH: usize = 8;
/// An index of git, bytes.
pub const GIT_INDEX_BYTES: u64 = 256 << 20;
/// Files of one repository that are marked as unchanged or skipped.
pub const GIT_MARKED_FILES: usize = 4096;
/// Files of one repository whose rights a freeze holds, as no other user can read them.
pub const GIT_PRIVATE_FILES: usize = 4096;
/// Wait for the lock of a database in a group.
pub const DATABASE_LOCK_WAIT: Duration = Duration::from_secs(5);
/// SQLite databases that the lock of one checkpoint lists.
pub const LOCKED_DATABASES: usize = 16;
/// A write-ahead log that is read for the lock, bytes.
pub const LOCKED_LOG_BYTES: u64 = 16 << 20;
/// Pairs of a schema revision and a commit that one freeze records.
pub const FREEZE_PAIRINGS: usize = 4096;
/// Git repositories that the lock of one checkpoint lists.
pub const LOCKED_REPOSITORIES: usize = 64;
/// Lock files of package managers that the lock of one kernel or repository lists.
pub const LOCKED_DEPENDENCIES: usize = 256;
/// Depth of directories in which repositories of a workspace are looked for.
pub const REPOSITORY_DEPTH: usize = 4;
/// Directories of a workspace in which they are looked for, for one checkpoint.
pub const REPOSITORY_FOLDERS: usize = 2000;
/// A `HEAD` or a reference of git, bytes.
pub const GIT_REFERENCE_BYTES: u64 = 4096;
/// The packed references of git, bytes.
pub const GIT_PACKED_BYTES: u64 = 4 << 20;
/// Symbolic references that are followed.
pub const GIT_REFERENCE_HOPS: usize = 5;
/// Default time of a program that rebuilds code for newer data.
pub const REBUILD_TIMEOUT: Duration = Duration::from_secs(3600);
/// The names of a PostgreSQL database's tables, bytes.
pub const POSTGRES_NAMES_BYTES: u64 = 4 << 20;
/// Version of an engine's interpreter, characters.
pub const ENGINE_VERSION_CHARS: usize = 64;
/// Keys of peers that one user trusts.
pub const TRUSTED_KEYS: u64 = 1000;
/// Signed units that one check lists.
pub const SIGNED_UNITS: usize = 1000;
