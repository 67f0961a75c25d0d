//! Descriptions of kernels, tools, mounts, hosts and events for clients.

use serde::{Deserialize, Serialize};

use super::engine::EngineName;
use super::ids::{Epoch, ExecId, HandoverId, HostId, KernelId};
use super::name::KernelName;
use super::origin::Origin;
use super::snapshot::PortableKind;
use super::spec::KernelSpec;
use super::usage::DiskFigures;

/// A variable in a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VarInfo {
    /// The name.
    pub name: String,
    /// The type, as the engine names it.
    #[serde(rename = "type")]
    pub type_name: String,
    /// At most 200 characters.
    pub summary: String,
}

/// A host folder or file in a kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountInfo {
    /// Path in the kernel.
    pub path: String,
    /// Path on the host.
    pub source: String,
    /// Whether the kernel may write to it.
    pub writable: bool,
}

/// A recorded mount with its resolved source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GivenMount {
    /// The mount as clients see it.
    pub mount: MountInfo,
    /// The source with symbolic links resolved when it was granted; `None` for mounts recorded by
    /// an earlier release.
    pub real: Option<String>,
}

/// A tool that code or a client can call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolInfo {
    /// The name for calls.
    pub name: String,
    /// The tool's purpose.
    pub description: String,
    /// `builtin`, `user` or `mcp`.
    pub source: String,
    /// JSON schema of its arguments; empty if it has none.
    pub schema_json: String,
}

/// A process that runs beside a kernel's engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessInfo {
    /// Its number.
    pub exec: ExecId,
    /// The program and its arguments.
    pub argv: Vec<String>,
    /// Milliseconds since 1970.
    pub started_at_ms: i64,
    /// Whether it continues without its client.
    pub detached: bool,
    /// Whether it runs on a terminal.
    pub terminal: bool,
}

/// A running background job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// The engine's id of the job.
    pub id: String,
    /// The command, at most 200 characters.
    pub command: String,
}

/// Whether a text is a complete program, for interactive front ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CodeStatus {
    /// The text is a complete program.
    Complete,
    /// The program is not complete yet.
    Incomplete,
    /// No continuation makes the text a program.
    Invalid,
}

/// Transport to an MCP server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum McpTransport {
    /// A program that speaks on its standard input and output.
    Stdio {
        /// The program.
        command: String,
        /// Its arguments.
        args: Vec<String>,
        /// Its environment beyond the daemon's.
        env: Vec<(String, String)>,
    },
    /// A server that speaks streamable HTTP.
    Http {
        /// The URL.
        url: String,
        /// Headers for every request.
        headers: Vec<(String, String)>,
    },
}

/// A kernel's MCP server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct McpInfo {
    /// Prefix of its tools.
    pub name: String,
    /// `connecting`, `ready` or `failed`.
    pub state: String,
    /// Number of its tools.
    pub tools: u32,
    /// The error; empty unless the state is `failed`.
    pub error: String,
}

/// The present state of a kernel.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelInfo {
    /// Its identity.
    pub id: KernelId,
    /// Its specification.
    pub spec: KernelSpec,
    /// Name of its state.
    pub state: String,
    /// Reason of the state; empty if the name suffices.
    pub state_reason: String,
    /// Version, which grows with each change by a client.
    pub version: u64,
    /// Epoch, which grows with each change of ownership.
    pub epoch: Epoch,
    /// Number of checkpoints.
    pub checkpoints: u32,
    /// Milliseconds since 1970.
    pub created_at_ms: i64,
    /// Milliseconds since 1970.
    pub last_used_at_ms: i64,
    /// Present memory use of the worker in bytes; 0 without a worker.
    pub memory_bytes: u64,
    /// The sandbox layers in force, one line each; empty without a worker.
    pub sandbox: Vec<String>,
    /// Owner's uid.
    pub uid: u32,
    /// Number of executions.
    pub executions: u64,
    /// Origin of the present state.
    pub origin: Origin,
    /// The kernel whose workspace it shares; `None` if it has its own.
    pub thread_of: Option<KernelId>,
    /// The capture driver and, in parentheses, why it is not a better one.
    pub capture: String,
    /// Changes of the specification that the present worker does not have, a line each.
    pub at_next_start: Vec<String>,
    /// The specification of the present worker; `None`: `spec`.
    pub in_force: Option<Box<KernelSpec>>,
    /// Its figures on the disk; `None`: not measured yet.
    pub disk: Option<DiskFigures>,
}

/// The host's description of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostInfo {
    /// Its identity.
    pub id: HostId,
    /// Its host name.
    pub name: String,
    /// ryokan's version.
    pub version: String,
    /// `x86_64` or `aarch64`.
    pub arch: String,
    /// The engines available on this host.
    pub engines: Vec<EngineName>,
    /// The daemon's process, as it sees it; 0: an older daemon.
    pub pid: u32,
}

/// A feature that the host has or lacks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ability {
    /// Short name, for example `landlock`.
    pub name: String,
    /// Whether the host has it.
    pub present: bool,
    /// Whether kernels require it.
    pub required: bool,
    /// What was found.
    pub detail: String,
    /// What to install or set; empty if the feature is present.
    pub hint: String,
}

/// An event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Number of the event, without gaps on one host.
    pub sequence: u64,
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// The kernel; empty for events of the host.
    pub kernel: String,
    /// Kind of the event, in the past tense: `kernel_created`.
    pub kind: String,
    /// Details as one JSON object.
    pub detail_json: String,
}

/// One entry of a kernel's journal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JournalEntry {
    /// Number of the entry, without gaps in one kernel.
    pub sequence: u64,
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// `execution`, `message` or `mark`; `checkpoint` for a summary of compacted messages.
    pub kind: String,
    /// The client's own name and uid, for example `ryokan-cli uid 1000`.
    pub actor: String,
    /// For an execution: its number; 0 otherwise.
    pub exec: u64,
    /// The code, the message's text, the mark's text.
    pub text: String,
    /// For an execution: its status, or `running` or `queued`.
    pub status: String,
    /// For an execution: its exit code.
    pub code: i32,
    /// For an execution: the error in one line.
    pub err: String,
    /// For an execution: the duration in microseconds.
    pub duration_us: u64,
    /// Bytes of an execution's kept output, both streams.
    pub output_bytes: u64,
    /// Bytes of output beyond those kept.
    pub truncated_bytes: u64,
}

/// How compacted messages are listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JournalView {
    /// Every message is listed.
    Whole,
    /// The summary of the newest checkpoint replaces them.
    Compacted,
    /// Only the messages of one checkpoint, by its number.
    Of(u64),
}

/// A filter for kernels.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KernelFilter {
    /// Labels that must all match.
    pub labels: Vec<(String, String)>,
    /// State names, any of which matches; empty: every state.
    pub states: Vec<String>,
    /// Prefix of the name.
    pub prefix: String,
}

impl KernelFilter {
    /// Whether a kernel matches the filter.
    pub fn admits(&self, name: &KernelName, labels: &[(String, String)], state: &str) -> bool {
        name.as_str().starts_with(&self.prefix)
            && (self.states.is_empty() || self.states.iter().any(|wanted| wanted == state))
            && self.labels.iter().all(|wanted| labels.contains(wanted))
    }
}

/// An image of virtual machines.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageInfo {
    /// The digest of its content.
    pub version: String,
    /// Names of its engines.
    pub engines: Vec<String>,
    /// The versions of these engines, in their order; empty for the worker's own, and where none is known.
    pub engine_versions: Vec<String>,
    /// What it is made of.
    pub summary: String,
    /// Its size, bytes.
    pub bytes: u64,
    /// When it was built, milliseconds since 1970.
    pub built_at_ms: i64,
    /// Whether kernels that name no image run it.
    pub is_current: bool,
    /// Whether it may not be removed.
    pub is_pinned: bool,
    /// Names of the kernels that use it.
    pub kernels: Vec<String>,
    /// Why it cannot be used; else empty.
    pub trouble: String,
}

/// A pool of warm workers with the same engine, limits and rights.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolInfo {
    /// Name of the engine.
    pub engine: String,
    /// Memory limit of each worker, bytes.
    pub memory_bytes: u64,
    /// Name of the network.
    pub net: String,
    /// Uid whose rights the workers have on the host.
    pub uid: u32,
    /// Configured number of idle workers while kernels are created.
    pub pool_size: u32,
    /// Maximum of idle workers and workers in creation.
    pub max_pool_size: u32,
    /// Number of idle workers without demand.
    pub min_idle: u32,
    /// Number of idle workers that are wanted now.
    pub target: u32,
    /// Workers in creation, idle or in use.
    pub total: u32,
    /// Idle workers.
    pub idle: u32,
    /// Workers in creation.
    pub creating: u32,
    /// Workers used by kernels.
    pub active: u32,
    /// Workers that became ready since the pool began.
    pub total_created: u64,
    /// Workers of `total_created` that are gone.
    pub total_destroyed: u64,
    /// Executions of all workers.
    pub total_executions: u64,
    /// Workers that did not become ready.
    pub creation_errors: u64,
    /// Workers granted to kernels.
    pub taken: u64,
    /// Requests that found no idle worker.
    pub missed: u64,
    /// Requests that waited and received no worker.
    pub refused: u64,
    /// Processor limit of each worker, thousandths.
    pub cpu_milli: u32,
    /// Process and thread limit of each worker.
    pub pids: u32,
    /// Why the last creation failed; empty after a success.
    pub trouble: String,
    /// After failures: milliseconds until the next creation; 0: as soon as one is wanted.
    pub tries_again_in_ms: u64,
}

/// A move of a kernel between hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HandoverInfo {
    /// Its identity, the same on both hosts.
    pub id: HandoverId,
    /// The kernel.
    pub kernel: KernelId,
    /// The kernel's name.
    pub name: String,
    /// `moving`, `committing`, `aborting`, `undecided`; `prepared`, `arriving` (a group whose
    /// members are not in their places), `live`; `damaged`: its record cannot be read.
    pub state: String,
    /// Outgoing: the transport; incoming: the source host.
    pub peer: String,
    /// The kernel's epoch at the target.
    pub epoch: Epoch,
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// Why it is not acknowledged yet, or what is wrong with its record; empty: nothing is known.
    pub problem: String,
}

/// A completed move of a kernel to another host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TeleportReport {
    /// The handover.
    pub handover: HandoverId,
    /// The other host.
    pub host: HostId,
    /// The kernel's epoch there.
    pub epoch: Epoch,
    /// Objects that the kernel consists of.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Objects that the other host lacked.
    pub sent_objects: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// From the freeze to the commit, milliseconds.
    pub pause_ms: u64,
    /// What the kernel moved without.
    pub missing: Vec<String>,
    /// Whether the other host has acknowledged the commit.
    pub acknowledged: bool,
    /// The kind of snapshot, and why.
    pub kind: PortableKind,
    /// Why this kind.
    pub kind_reason: String,
    /// Time of the whole move, milliseconds.
    pub elapsed_ms: u64,
    /// Bytes sent on the connection, compressed.
    pub wire_bytes: u64,
    /// Of a group: what stays here as it is, and what is not captured.
    pub stays: Vec<String>,
}
