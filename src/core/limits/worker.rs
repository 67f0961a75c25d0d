//! Limits of workers, their init and their engines.

use std::time::Duration;

use super::client::VALUE_PARTS;
use super::kernel::MOUNTS;

/// Deadline for a worker's report of a complete sandbox and a ready engine.
pub const WORKER_START: Duration = Duration::from_secs(30);
/// Workers started concurrently.
pub const WORKER_STARTS: usize = 8;
/// Largest configurable value for that.
pub const WORKER_STARTS_MAX: usize = 1000;
/// Longest wait for a worker start.
pub const WORKER_WAIT: Duration = Duration::from_secs(60);
/// Deadline for a warm worker's engine to accept its kernel: it changes directory and sets some variables.
pub const WORKER_BIND: Duration = Duration::from_secs(5);
/// Deadline for a running worker's answer to its re-adoption.
pub const WORKER_ADOPT: Duration = Duration::from_secs(10);
/// Time in which a worker must save and exit before it is killed.
pub const WORKER_STOP: Duration = Duration::from_secs(10);
/// Time for which a worker whose engine died waits for its daemon to collect the last events.
pub const WORKER_LINGER: Duration = Duration::from_secs(5);
/// Deadline for a worker's answer to a call of its daemon.
pub const WORKER_CALL: Duration = Duration::from_secs(120);
/// Calls of the daemon queued for init's event loop.
pub const WORKER_CALLS: usize = 256;
/// Open connections of a worker's private socket.
pub const WORKER_CONNECTIONS: usize = 8;
/// Descriptors that a worker holds for announced calls: a kernel's mounts and the exec channel.
pub const WORKER_DESCRIPTORS: usize = MOUNTS + 3;
/// Lifetime of a worker without its daemon.
pub const ORPHAN_GRACE: Duration = Duration::from_secs(600);
/// Deadline for one fork by the spawner, which is replaced after it.
pub const WORKER_SPAWN: Duration = Duration::from_secs(10);
/// Deadline for a worker's usage report; a later one is shown as unknown.
pub const USAGE_ANSWER: Duration = Duration::from_secs(2);
/// Workers queried for their usage concurrently, for a list.
pub const USAGE_QUERIES: usize = 32;
/// Run time of code before a worker first samples its usage.
pub const USAGE_FIRST_SAMPLE: Duration = Duration::from_millis(20);
/// Interval of usage samples while no code runs.
pub const USAGE_IDLE_SAMPLE: Duration = Duration::from_secs(10);
/// Largest message on the exec channel between daemon and init, bytes; a larger start or end goes as a call.
pub const EXEC_CHANNEL_BYTES: usize = 64 << 10;
/// Frames queued from init to an engine that does not read, bytes; beyond, the engine is killed.
pub const ENGINE_QUEUE_BYTES: usize = 64 << 20;
/// Open requests of one engine.
pub const ENGINE_REQUESTS: usize = 64;
/// An engine's list of jobs or of uncaptured state, bytes.
pub const ENGINE_LIST_BYTES: usize = 4 << 20;
/// Deadline for an engine's answer to a request other than code; then it is killed.
pub const ENGINE_ANSWER: Duration = Duration::from_secs(60);
/// Time in which an engine must exit after it closed its control socket, before it is killed.
pub const ENGINE_EXIT: Duration = Duration::from_secs(3);
/// Open calls of dynamic tools of one engine.
pub const TOOL_CALLS: usize = 64;
/// JSON part of a frame between init and engine, bytes.
pub const FRAME_JSON_BYTES: usize = 16 << 20;
/// Values, rows, cells and fields in the JSON part of one frame that the daemon decodes.
/// A text of 16 MiB could hold enough of them to take hundreds of MiB, and to delay all kernels.
pub const FRAME_PARTS: usize = 2 * VALUE_PARTS;
/// Parts, as in [`FRAME_PARTS`], of a list with a row for each state entry. Its rows are decoded
/// into fixed fields, which takes much less than a value does.
pub const LISTING_PARTS: usize = 5 * STATE_ENTRIES;
/// Tail of a frame between init and engine, bytes.
pub const FRAME_TAIL_BYTES: usize = 1 << 20;
/// Engine state as one message (`snapshot`, `restore`), bytes.
pub const STATE_INLINE_BYTES: usize = 32 << 20;
/// Engine state of any kernel, all entries, bytes.
pub const STATE_BYTES: u64 = 4 << 30;
/// Engine state of a kernel, all entries, bytes, for its memory limit: more could not be loaded again.
pub const fn engine_state_bytes(memory_bytes: u64) -> u64 {
    if memory_bytes > STATE_BYTES { STATE_BYTES } else { memory_bytes }
}
/// State entries of one kernel.
pub const STATE_ENTRIES: usize = 100_000;
/// Parts, as in [`FRAME_PARTS`], of the metadata of all of a kernel's state entries.
pub const STATE_META_PARTS: usize = 20 * STATE_ENTRIES;
/// Init's memory for the changed state of one execution, bytes, for a kernel's memory limit.
/// A quarter: the engine holds the value, and its saved form while it sends it.
pub const fn pending_state_bytes(memory_bytes: u64) -> usize {
    let quarter = memory_bytes / 4;
    if quarter > PENDING_STATE_MAX { PENDING_STATE_MAX as usize } else { quarter as usize }
}

/// Largest value of [`pending_state_bytes`].
const PENDING_STATE_MAX: u64 = 512 << 20;
/// Init's memory for the differences that a restore from memory writes into the database, bytes.
pub const RESTORED_STATE_BYTES: usize = PENDING_STATE_MAX as usize;
/// Modules that Python preloads in a warm worker.
pub const PRELOADED_MODULES: usize = 64;
/// Snapshots of one Python engine in memory for requested checkpoints, one per checkpoint.
pub const FORKED_SNAPSHOTS: usize = 3;
/// Further snapshots for safety checkpoints: during an undo, the restored one's and the new one's.
pub const TRANSIENT_SNAPSHOTS: usize = 2;
/// Lost snapshots of which a worker remembers the reason.
pub const LOST_SNAPSHOTS: usize = 64;
/// Deadline for a snapshot's wake-up; then the saved state is used.
pub const SNAPSHOT_WAKE: Duration = Duration::from_secs(2);
/// Default memory for the snapshots of one engine, bytes.
pub const ROLLBACK_BYTES: u64 = 256 << 20;
/// Connections from outside to the ports of one kernel; a further one fails as `busy`.
pub const PORT_CONNECTIONS: usize = 128;
/// Bytes of such a connection in one message, in each direction.
pub const PORT_CHUNK_BYTES: usize = 64 << 10;
/// Size of each buffer of such a connection's socket inside, bytes.
pub const PORT_SOCKET_BYTES: u32 = 256 << 10;
/// Deadline for a connection to a port inside.
pub const PORT_CONNECT: Duration = Duration::from_secs(10);
/// Crashes within [`BREAKER_WINDOW`] that open a kernel's circuit breaker.
pub const BREAKER_CRASHES: usize = 3;
/// See [`BREAKER_CRASHES`].
pub const BREAKER_WINDOW: Duration = Duration::from_secs(60);
/// How long a start-up waits for a kernel's busy database before the kernel counts as damaged.
pub const LOAD_RETRY: Duration = Duration::from_secs(10);
/// First pause before a crashed worker is restarted; doubles with each crash in the window.
pub const RESTART_BACKOFF_FIRST: Duration = Duration::from_millis(100);
/// Longest such pause.
pub const RESTART_BACKOFF_MAX: Duration = Duration::from_secs(10);

/// Time for a virtual machine to boot until its first process answers.
pub const VM_BOOT: Duration = Duration::from_secs(60);
/// The same with KVM: a host where it takes longer emulates it.
pub const KVM_BOOT: Duration = Duration::from_secs(20);
/// After this, what did not boot a machine is tried again, and after twice the time each time it fails again.
pub const VM_GIVEN_UP: Duration = Duration::from_secs(600);
/// The longest of these times.
pub const VM_GIVEN_UP_MAX: Duration = Duration::from_secs(6 * 3600);
/// Time for the measurement of KVM.
pub const KVM_PROBE: Duration = Duration::from_secs(2);
/// The longest time of the measured loop with which KVM serves. Hardware needs far below a millisecond, an emulated KVM
/// more than twenty.
pub const KVM_LOOP: Duration = Duration::from_millis(5);
/// Time for one request to a virtual machine's first process.
pub const VM_CALL: Duration = Duration::from_secs(30);
/// Time for a worker and its engine to start in a virtual machine of which a template is made: three times
/// [`WORKER_START`], and the request.
pub const VM_PREPARE: Duration = Duration::from_secs(120);
/// Time for one transfer of a virtual machine's files or state, with all of its requests.
pub const VM_TRANSFER: Duration = Duration::from_secs(600);
/// Time for a virtual machine to bring its files and state out after its worker has ended.
pub const VM_SETTLE: Duration = Duration::from_secs(300);
/// Pause between two checks that a guest answers.
pub const VM_HEARTBEAT: Duration = Duration::from_secs(15);
/// A guest without an answer for this long is ended.
pub const VM_SILENCE: Duration = Duration::from_secs(60);
/// Pause between two attempts to continue a virtual machine that stands still because the host's disk is full.
pub const VM_ROOM_RETRY: Duration = Duration::from_secs(2);
/// Room on the host's disk from which such a machine continues, bytes.
pub const VM_ROOM_BYTES: u64 = 16 << 20;
/// Memory of a virtual machine beside that of its kernel, bytes: for the guest's own kernel and init.
pub const VM_EXTRA_MEMORY_BYTES: u64 = 160 << 20;
/// Room on a virtual machine's disk beside the workspace, bytes: for the engine's state and the file system.
pub const VM_EXTRA_DISK_BYTES: u64 = 2 << 30;
/// Largest description of an image, bytes.
pub const VM_IMAGE_JSON_BYTES: u64 = 64 << 10;
/// Time to save or load a suspended machine with its memory.
pub const VM_MEMORY: Duration = Duration::from_secs(180);
/// Images of one host.
pub const VM_IMAGES: usize = 1000;
/// Largest list of current and pinned images, bytes.
pub const VM_IMAGES_JSON_BYTES: u64 = 256 << 10;
/// Paths and links' targets in the list of a virtual machine's files, bytes.
pub const VM_LIST_BYTES: usize = 64 << 20;
/// Largest disk of a virtual machine, bytes.
pub const VM_DISK_MAX_BYTES: u64 = 8 << 40;
/// Longest answer of a virtual machine monitor, bytes.
pub const VM_MONITOR_LINE_BYTES: usize = 256 << 10;
/// Longest head of an answer of a virtual machine monitor that speaks HTTP, bytes.
pub const VM_MONITOR_HEAD_BYTES: usize = 16 << 10;
/// Memory of a virtual machine monitor beside its guest's, bytes: translated code, devices, threads.
pub const VM_MONITOR_MEMORY_BYTES: u64 = 2 << 30;
/// Threads of a virtual machine monitor.
pub const VM_MONITOR_THREADS: u32 = 512;
/// What a virtual machine monitor may write to its error output, bytes; the daemon logs it.
pub const VM_MONITOR_WORDS_BYTES: u64 = 4 << 10;
/// Templates of virtual machines that a host keeps.
pub const VM_TEMPLATES: usize = 12;
/// Time for the monitor of a stopped machine to continue it for its kernel; then another worker is started.
pub const VM_PARKED_ANSWER: Duration = Duration::from_secs(3);
/// Users of an image that an error names.
pub const NAMED_USERS: usize = 8;
/// Shapes of machines whose templates an image must have before it becomes current.
pub const VM_ROTATED_SHAPES: usize = 8;
/// Largest description of a template, bytes.
pub const VM_TEMPLATE_JSON_BYTES: u64 = 64 << 10;
/// Largest saved state of a template without its memory, bytes.
pub const VM_DEVICE_STATE_BYTES: u64 = 64 << 20;
/// A machine's disk that is read at its suspension, so that a copy of it can be recognised; bytes in use.
pub const VM_COMPARED_DISK_BYTES: u64 = 64 << 20;
/// Time after a failure in which a template is not built again.
pub const VM_TEMPLATE_RETRY: Duration = Duration::from_secs(600);
/// Default age from which a template in use is rebuilt.
pub const VM_TEMPLATE_MAX_AGE: Duration = Duration::from_secs(6 * 3600);
/// Default least time between two attempts to rebuild a template beside its use.
pub const VM_TEMPLATE_REFRESH: Duration = Duration::from_secs(30 * 60);
/// Entries that a report on the folder of templates names.
pub const VM_TEMPLATE_REPORT: usize = 8;
/// Failed restores in a row after which a template is removed.
pub const VM_TEMPLATE_FAILURES: u32 = 3;
/// Largest difference between the clocks of a seeded guest and its host.
pub const VM_CLOCK_ERROR: Duration = Duration::from_secs(5);
