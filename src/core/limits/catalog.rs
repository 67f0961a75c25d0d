//! Limits of the databases, the journal, events and the audit log.

use std::time::Duration;

/// Requests queued for one database thread; further ones fail as `busy`.
pub const DATABASE_REQUESTS: usize = 4096;
/// Requests that share one transaction.
pub const DATABASE_BATCH: usize = 64;
/// Write that a caller may do itself while the database's thread is idle, bytes.
pub const SMALL_WRITE_BYTES: usize = 64 << 10;
/// Size up to which a database is checked completely at each opening, bytes.
pub const DATABASE_CHECKED_BYTES: u64 = 1 << 20;
/// Threads for the kernels' state databases.
pub const STATE_THREADS: usize = 2;
/// State databases that one thread keeps open; beyond, the least recently used one is closed.
pub const STATE_DATABASES_OPEN: usize = 1024;
/// Write-ahead log size from which on it is checkpointed when the thread is idle, bytes.
pub const WAL_BYTES: u64 = 2 << 20;
/// Size from which on it is checkpointed even while requests are queued, bytes.
pub const WAL_MAX_BYTES: u64 = 16 << 20;
/// Rows of one page of a journal, of events or of the audit log.
pub const PAGE_ROWS: usize = 1000;
/// Text of one page of a journal, bytes; a page has at least one entry.
pub const JOURNAL_PAGE_BYTES: usize = 1 << 20;
/// Events kept in the catalog.
pub const EVENTS_KEPT: u64 = 100_000;
/// Time that a stopping daemon grants the last events to be written.
pub const EVENT_FLUSH: Duration = Duration::from_secs(2);
/// Refusals of one user that the audit log records per minute; the rest is counted in the next minute.
pub const AUDIT_REFUSALS_PER_MINUTE: u32 = 120;
/// Detail of one line of the audit log, bytes.
pub const AUDIT_DETAIL_BYTES: usize = 1024;
