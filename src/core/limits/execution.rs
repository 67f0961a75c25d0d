//! Limits of executions and their output.

use std::time::Duration;

/// Code of one execution, bytes. More goes through a file in the workspace.
pub const CODE_BYTES: usize = 1 << 20;
/// Environment of one execution, bytes in total.
pub const ENV_BYTES: usize = 256 << 10;
/// Standard input inside a request; more goes through `Execution.stdin`.
pub const STDIN_INLINE_BYTES: usize = 8 << 20;
/// Executions queued in one kernel behind the running one; further ones fail as `busy`.
pub const EXECUTIONS_QUEUED: usize = 256;
/// Finished executions whose handles a kernel's task keeps in memory.
pub const EXECUTIONS_REMEMBERED: usize = 64;
/// Unacknowledged ends that a worker remembers; further executions fail as `busy`.
pub const EXECUTIONS_UNACKNOWLEDGED: usize = 8;
/// Ended executions of one kernel that its journal has not accepted; at this number none are started.
/// One less than what a worker remembers.
pub const UNJOURNALLED_ENDS: usize = EXECUTIONS_UNACKNOWLEDGED - 1;
/// Interval at which a refused end is offered to the journal again.
pub const JOURNAL_RETRY: Duration = Duration::from_secs(2);
/// One message in the journal, bytes.
pub const MESSAGE_BYTES: usize = 1 << 20;
/// Output of a finished execution that stays in memory with its handle, bytes; larger output is read from the
/// journal.
pub const OUTPUT_REMEMBERED_BYTES: u64 = 64 << 10;
/// Output of one execution that the journal keeps by default, bytes; the rest is counted and dropped.
pub const OUTPUT_KEPT_BYTES: u64 = 4 << 20;
/// Largest configurable value for that, bytes.
/// A result with its output is one message, which every reader must accept.
pub const OUTPUT_KEPT_MAX_BYTES: u64 = 48 << 20;
/// Pieces of output that a running execution keeps for its journal; further pieces count as beyond its limit.
pub const OUTPUT_KEPT_ITEMS: usize = 64 << 10;
/// The newest output of one execution that is kept beside the first, at most, bytes: a quarter of its limit, up to this.
pub const OUTPUT_TAIL_BYTES: u64 = 64 << 10;
/// Output of one execution inside the journal's row; more becomes an object in the store.
pub const OUTPUT_INLINE_BYTES: usize = 16 << 10;
/// Longest delay of an execution's first output.
/// An execution that ends sooner, with at most [`OUTPUT_BATCH_BYTES`], is reported in one message.
pub const OUTPUT_BATCH_TIME: Duration = Duration::from_millis(2);
/// See [`OUTPUT_BATCH_TIME`], bytes.
pub const OUTPUT_BATCH_BYTES: u64 = 32 << 10;
/// Output that a worker buffers without a daemon, bytes; then the code blocks.
pub const OUTPUT_BUFFER_BYTES: usize = 4 << 20;
/// Columns of one table of output.
pub const OUTPUT_COLUMNS: usize = 4096;
/// Media type of a `display`, bytes.
pub const MEDIA_TYPE_BYTES: usize = 255;
/// Output of background jobs in one event, bytes.
pub const BACKGROUND_SHOWN_BYTES: usize = 4096;
/// Buffered output of background jobs between executions, bytes; then the jobs block.
pub const BACKGROUND_BUFFER_BYTES: usize = 256 << 10;
/// Time in which an interrupted engine must stop before it is killed.
pub const INTERRUPT_GRACE: Duration = Duration::from_secs(5);
/// Processes beside the engine of one kernel that run at once; a further one fails as `busy`.
pub const PROCESSES: usize = 32;
/// Arguments of a process.
pub const PROCESS_ARGUMENTS: usize = 4096;
/// Arguments of a process, bytes in total. With its environment it fits what Linux accepts.
pub const PROCESS_ARGUMENT_BYTES: usize = 512 << 10;
/// One argument of a process, bytes: what Linux accepts, with its end.
pub const PROCESS_ARGUMENT_MAX_BYTES: usize = (128 << 10) - 1;
/// Working directory of a process, bytes.
pub const PROCESS_DIRECTORY_BYTES: usize = 4096;
/// Deadline for the sandbox of a process.
pub const PROCESS_START: Duration = Duration::from_secs(10);
/// Time in which a killed tree of processes must end; after it the whole worker is killed.
pub const PROCESS_KILL: Duration = Duration::from_secs(5);
/// Time in which the end of a process must reach the daemon.
pub const PROCESS_REPORT: Duration = Duration::from_secs(10);
/// Exit code of a program that cannot be run.
pub const CODE_NOT_RUNNABLE: i32 = 126;
/// Exit code of a program that was not found.
pub const CODE_NOT_FOUND: i32 = 127;
