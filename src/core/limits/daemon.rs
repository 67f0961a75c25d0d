//! Limits of the daemon itself.

use std::time::Duration;

/// Time for the daemon's orderly stop.
pub const DAEMON_DRAIN: Duration = Duration::from_secs(60);
/// Time for which a starting daemon waits for the lock of a killed one.
pub const LOCK_WAIT: Duration = Duration::from_millis(500);
/// Disk space reserved for a full disk, bytes.
pub const DISK_RESERVE_BYTES: u64 = 2 << 20;
/// Interval at which the reserve is checked.
pub const DISK_RESERVE_INTERVAL: Duration = Duration::from_secs(10);
/// Interval at which the daemon compares its memory with what it uses.
pub const MEMORY_INTERVAL: Duration = Duration::from_secs(5);
/// Unused memory of the daemon, bytes, beyond which it is returned to the system.
pub const UNUSED_MEMORY_BYTES: u64 = 4 << 20;
/// Concurrent readers of metrics.
pub const METRICS_CONNECTIONS: usize = 16;
/// Time in which a reader of metrics must send its request and read the answer.
pub const METRICS_TIMEOUT: Duration = Duration::from_secs(10);
/// Machines whose memory is saved at the same time when the daemon stops.
pub const MEMORIES_SAVED_AT_ONCE: usize = 2;
/// Kernels of a former daemon that are started at the same time when a daemon starts.
pub const KERNELS_RESUMED_AT_ONCE: usize = 4;
/// Longest path of a socket in `sockaddr_un`, without the final NUL.
pub const SOCKET_PATH_BYTES: usize = 107;
