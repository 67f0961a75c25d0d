//! Limits of kernels, names and requests.

use std::time::Duration;

/// Kernels of one daemon, live or not.
pub const KERNELS: usize = 20_000;
/// Requests queued for one kernel's task; further ones fail as `busy`.
pub const KERNEL_REQUESTS: usize = 1024;
/// Kernel name, bytes: its socket path must fit the 108 bytes of `sockaddr_un`.
pub const NAME_BYTES: usize = 64;
/// Path in a request, bytes (the host's own `PATH_MAX`).
pub const PATH_BYTES: usize = 4096;
/// Label, tool or variable name, bytes.
pub const IDENTIFIER_BYTES: usize = 256;
/// Labels of one kernel.
pub const LABELS: usize = 64;
/// Mounts of one kernel.
pub const MOUNTS: usize = 64;
/// Lines that name changes of a specification: its limits, and each path before and after.
pub const SPEC_CHANGES: usize = 2 * MOUNTS + 16;
/// MCP servers of one kernel.
pub const MCP_SERVERS: usize = 32;
/// Arguments, environment variables or headers of one MCP server.
pub const MCP_ITEMS: usize = 1024;
/// Deadline for an MCP server's answer to one call.
pub const MCP_CALL: Duration = Duration::from_secs(300);
/// Deadline for the start of an MCP server.
pub const MCP_START: Duration = Duration::from_secs(30);
/// Time for which an idempotency key is remembered.
pub const KEY_LIFETIME: Duration = Duration::from_secs(24 * 3600);
/// Idempotency key, bytes.
pub const KEY_BYTES: usize = 256;
/// Longest lease.
pub const LEASE_MAX: Duration = Duration::from_secs(24 * 3600);
/// Delay before a state change without a waiting caller is saved, with later changes.
pub const STATE_SAVE_DELAY: Duration = Duration::from_millis(5);
/// Default memory of a kernel, bytes.
pub const DEFAULT_MEMORY_BYTES: u64 = 512 << 20;
/// Default processors of a kernel, thousandths.
pub const DEFAULT_CPU_MILLI: u32 = 1000;
/// Default processes of a kernel.
pub const DEFAULT_PIDS: u32 = 256;
/// Default open files of one process.
pub const DEFAULT_OPEN_FILES: u32 = 1024;
/// Fewest open files of one process that a kernel may have.
pub const MIN_OPEN_FILES: u32 = 32;
/// Fewest open files for bash: its driver uses descriptors up to 255 and allocates from 256 on.
pub const BASH_MIN_OPEN_FILES: u32 = 320;
/// Default size of a workspace, bytes.
pub const DEFAULT_WORKSPACE_BYTES: u64 = 10 << 30;
/// Default idle time before a kernel is stopped.
pub const DEFAULT_IDLE_TIMEOUT: Duration = Duration::from_secs(300);
