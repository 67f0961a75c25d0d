//! What clients are shown of kernels, tools, mounts, hosts and events.

use serde::{Deserialize, Serialize};

use super::engine::EngineName;
use super::ids::{Epoch, HostId, KernelId};
use super::name::KernelName;
use super::origin::Origin;
use super::spec::KernelSpec;

/// A variable in a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VarInfo {
    /// The name.
    pub name: String,
    /// Type in the engine's words.
    #[serde(rename = "type")]
    pub type_name: String,
    /// At most 200 characters.
    pub summary: String,
}

/// A folder or file of the host inside a kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountInfo {
    /// Where the kernel sees it.
    pub path: String,
    /// Where the host has it.
    pub source: String,
    /// Whether the kernel may change it.
    pub writable: bool,
}

/// A mount as it is recorded: what was given, and where that led.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GivenMount {
    /// What clients see.
    pub mount: MountInfo,
    /// The source when it was given, symbolic links resolved; not known of mounts that an earlier release recorded.
    pub real: Option<String>,
}

/// A tool that code or a client can call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolInfo {
    /// The name to call it by.
    pub name: String,
    /// What it does.
    pub description: String,
    /// `builtin`, `user` or `mcp`.
    pub source: String,
    /// JSON schema of its arguments; empty if it has none.
    pub schema_json: String,
}

/// A background job that runs now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    /// The engine's own id for it.
    pub id: String,
    /// What it runs, at most 200 characters.
    pub command: String,
}

/// Whether a text is a whole program: for interactive front ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CodeStatus {
    /// It can run.
    Complete,
    /// More must follow.
    Incomplete,
    /// Nothing that follows makes it a program.
    Invalid,
}

/// How to reach an MCP server.
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
        /// Where.
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
    /// How many tools it offers.
    pub tools: u32,
    /// Why it failed; empty if it did not.
    pub error: String,
}

/// A kernel as it is now.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KernelInfo {
    /// Its identity.
    pub id: KernelId,
    /// What it was made from.
    pub spec: KernelSpec,
    /// Name of its state.
    pub state: String,
    /// Why it is in that state; empty if that says itself.
    pub state_reason: String,
    /// Grows with each change from outside.
    pub version: u64,
    /// Grows with each change of ownership.
    pub epoch: Epoch,
    /// How many checkpoints there are.
    pub checkpoints: u32,
    /// Milliseconds since 1970.
    pub created_at_ms: i64,
    /// Milliseconds since 1970.
    pub last_used_at_ms: i64,
    /// Memory that the worker uses now, bytes; 0 without one.
    pub memory_bytes: u64,
    /// The sandbox layers in force, one line each; empty without a worker.
    pub sandbox: Vec<String>,
    /// Owner's uid.
    pub uid: u32,
    /// How many executions there were.
    pub executions: u64,
    /// How the present state came to be.
    pub origin: Origin,
    /// The kernel whose workspace it works in; its own if there is none.
    pub thread_of: Option<KernelId>,
    /// How its files are captured: the driver, and in parentheses why it is no better one.
    pub capture: String,
}

/// The host as it introduces itself.
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
    /// The engines that can run here.
    pub engines: Vec<EngineName>,
}

/// Something that this host can or cannot do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ability {
    /// Short name, for example `landlock`.
    pub name: String,
    /// Whether it is there.
    pub present: bool,
    /// Whether kernels cannot run without it.
    pub required: bool,
    /// What was found.
    pub detail: String,
    /// What to install or set; empty if it is there.
    pub hint: String,
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Grows by one with each event of the host.
    pub sequence: u64,
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// Which kernel; empty for the host's own events.
    pub kernel: String,
    /// What happened, in the past tense: `kernel_created`.
    pub kind: String,
    /// One JSON object.
    pub detail_json: String,
}

/// One line of a kernel's journal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JournalEntry {
    /// Grows by one with each entry of the kernel.
    pub sequence: u64,
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// `execution`, `message` or `mark`; `checkpoint` for one that stands for what it compacted.
    pub kind: String,
    /// Who: a client's own name and its uid, for example `ryokan-cli uid 1000`.
    pub actor: String,
    /// For an execution: its number; 0 otherwise.
    pub exec: u64,
    /// The code, the message's text, the mark's text.
    pub text: String,
    /// For an execution: its status, or `running`.
    pub status: String,
    /// For an execution: its exit code.
    pub code: i32,
    /// For an execution: what went wrong, one line.
    pub err: String,
    /// For an execution: microseconds.
    pub duration_us: u64,
    /// Kept output of an execution: bytes of both streams.
    pub output_bytes: u64,
    /// Output beyond what was kept.
    pub truncated_bytes: u64,
}

/// What is seen of messages that checkpoints compacted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JournalView {
    /// Each of them.
    Whole,
    /// In the place of the last of them, the newest checkpoint's summary.
    Compacted,
    /// Only those of one checkpoint, by its number.
    Of(u64),
}

/// Which kernels to list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KernelFilter {
    /// Labels that must match, all of them.
    pub labels: Vec<(String, String)>,
    /// State names, any of them; empty: every state.
    pub states: Vec<String>,
    /// Names that start so; empty: every name.
    pub prefix: String,
}

impl KernelFilter {
    /// Whether a kernel belongs in the list.
    pub fn admits(&self, name: &KernelName, labels: &[(String, String)], state: &str) -> bool {
        name.as_str().starts_with(&self.prefix)
            && (self.states.is_empty() || self.states.iter().any(|wanted| wanted == state))
            && self.labels.iter().all(|wanted| labels.contains(wanted))
    }
}

/// Workers of one engine, with the same bounds and rights, that wait for kernels.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolInfo {
    /// The engine, by name.
    pub engine: String,
    /// Memory of each, bytes.
    pub memory_bytes: u64,
    /// Their network, by name.
    pub net: String,
    /// Whose rights they have on the host.
    pub uid: u32,
    /// Idle ones while kernels come, as the configuration wants it.
    pub pool_size: u32,
    /// Idle and in creation, at most.
    pub max_pool_size: u32,
    /// Idle ones while no kernel comes.
    pub min_idle: u32,
    /// Idle ones that are wanted now.
    pub target: u32,
    /// In creation, idle, and those that kernels have.
    pub total: u32,
    /// Ready.
    pub idle: u32,
    /// Being made ready.
    pub creating: u32,
    /// Kernels have them.
    pub active: u32,
    /// Since the pool began: that became ready.
    pub total_created: u64,
    /// Of those, the ones that are gone.
    pub total_destroyed: u64,
    /// Executions of all of them.
    pub total_executions: u64,
    /// That did not become ready.
    pub creation_errors: u64,
    /// Given to kernels.
    pub taken: u64,
    /// Kernels that came when none was ready.
    pub missed: u64,
    /// Kernels that waited for a worker and got none.
    pub refused: u64,
    /// Thousandths of a processor that each may use.
    pub cpu_milli: u32,
    /// Processes and threads of each.
    pub pids: u32,
    /// Why the last creation failed; empty: it did not.
    pub trouble: String,
    /// With trouble: when the next creation is tried, milliseconds; 0: as soon as one is wanted.
    pub tries_again_in_ms: u64,
}
