//! Executions: one run of code in a kernel, what it is asked, what it gives.

use serde::{Deserialize, Serialize};

use super::ids::ExecId;
use super::limits;
use super::value::Value;

/// What to run, and under which bounds.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ExecRequest {
    /// The code or tool call.
    pub what: Work,
    /// Standard input that is there at once.
    pub stdin: Vec<u8>,
    /// More standard input follows through the execution's stream; without it, input ends after `stdin`.
    pub stdin_open: bool,
    /// Environment for this execution only.
    pub env: Vec<(String, String)>,
    /// End it after this many milliseconds; 0: no limit of its own.
    pub timeout_ms: u64,
    /// Output that the journal keeps, bytes; 0: the default.
    pub output_limit_bytes: u64,
    /// Idempotency key: the same key again gives the same execution.
    pub key: String,
    /// The kernel's version that the caller knows; 0: any.
    pub expected_version: u64,
}

impl ExecRequest {
    /// Whether the other one asks for the same to be run. Which version the caller knew, and how much output is kept, are no
    /// matter: a request that is repeated may say so otherwise.
    pub fn asks_as(&self, other: &ExecRequest) -> bool {
        let same_work = match (&self.what, &other.what) {
            (Work::Code(a), Work::Code(b)) => a == b,
            // As JSON, in which a NaN is itself.
            (Work::Call { name: a, args: x }, Work::Call { name: b, args: y }) => a == b && x.to_json() == y.to_json(),
            (Work::Code(_), Work::Call { .. }) | (Work::Call { .. }, Work::Code(_)) => false,
        };
        same_work
            && (&self.stdin, self.stdin_open, &self.env, self.timeout_ms)
                == (&other.stdin, other.stdin_open, &other.env, other.timeout_ms)
    }

    /// About what it takes to write it down, bytes.
    pub fn memory_bytes(&self) -> usize {
        let work = match &self.what {
            Work::Code(code) => code.len(),
            Work::Call { name, args } => name.len() + args.bytes_up_to(usize::MAX),
        };
        let env: usize = self.env.iter().map(|(name, value)| name.len() + value.len()).sum();
        work + self.stdin.len() + env + self.key.len()
    }
}

/// What an execution runs.
#[derive(Debug, Clone, PartialEq)]
pub enum Work {
    /// A program in the engine's language.
    Code(String),
    /// A tool by name with literal arguments.
    Call {
        /// The tool.
        name: String,
        /// Named (object) or positional (array) arguments.
        args: Value,
    },
}

impl Default for Work {
    fn default() -> Self {
        Work::Code(String::new())
    }
}

/// How an execution ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ExecStatus {
    /// The code ended well.
    Done,
    /// The code ended with a failure of its own.
    Failed,
    /// Its time was up.
    Timeout,
    /// Somebody interrupted it.
    Interrupted,
    /// The worker ended under it.
    Lost,
    /// Nothing ran: the code is no program, or there could be no worker for it.
    Refused,
}

impl ExecStatus {
    /// Every status, in wire order.
    pub const ALL: [ExecStatus; 6] = [
        ExecStatus::Done,
        ExecStatus::Failed,
        ExecStatus::Timeout,
        ExecStatus::Interrupted,
        ExecStatus::Lost,
        ExecStatus::Refused,
    ];

    /// The status in one word.
    pub const fn name(self) -> &'static str {
        match self {
            ExecStatus::Done => "done",
            ExecStatus::Failed => "failed",
            ExecStatus::Timeout => "timeout",
            ExecStatus::Interrupted => "interrupted",
            ExecStatus::Lost => "lost",
            ExecStatus::Refused => "refused",
        }
    }

    /// The status of that word.
    pub fn from_name(name: &str) -> Option<ExecStatus> {
        Self::ALL.into_iter().find(|s| s.name() == name)
    }
}

/// The code of an execution whose worker ended: no engine gives it.
pub const CODE_LOST: i32 = 137;
/// The code of a timed-out execution.
pub const CODE_TIMEOUT: i32 = 124;
/// The code of an interrupted execution.
pub const CODE_INTERRUPTED: i32 = 130;

/// The end of an execution, without its output streams.
#[derive(Debug, Clone, PartialEq)]
pub struct ExecEnd {
    /// How it ended.
    pub status: ExecStatus,
    /// Exit code.
    pub code: i32,
    /// What went wrong, one line; empty if nothing did.
    pub err: String,
    /// The value of the last expression, where the language has one.
    pub value: Option<Value>,
    /// Structured output, where the engine gives it.
    pub output: Option<OutputData>,
    /// Wall time, microseconds.
    pub duration_us: u64,
}

impl ExecEnd {
    /// The end of an execution whose worker ended under it.
    pub fn lost(why: impl Into<String>) -> Self {
        ExecEnd {
            status: ExecStatus::Lost,
            code: CODE_LOST,
            err: why.into(),
            value: None,
            output: None,
            duration_us: 0,
        }
    }
}

/// The end of an execution and what it wrote.
#[derive(Debug, Clone, PartialEq)]
pub struct ExecResult {
    /// Which execution.
    pub exec: ExecId,
    /// How it ended.
    pub end: ExecEnd,
    /// Kept standard output.
    pub stdout: Vec<u8>,
    /// Kept standard error.
    pub stderr: Vec<u8>,
    /// Bytes written beyond what was kept.
    pub truncated_bytes: u64,
}

/// One of the two output streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stream {
    /// fd 1.
    Stdout,
    /// fd 2.
    Stderr,
}

/// What a client sees of a running execution, in order.
#[derive(Debug, Clone, PartialEq)]
pub enum OutputEvent {
    /// Bytes of standard output, at most [`limits::CHUNK_BYTES`].
    Stdout(Vec<u8>),
    /// Bytes of standard error, at most [`limits::CHUNK_BYTES`].
    Stderr(Vec<u8>),
    /// Structured output.
    Structured(OutputData),
    /// A rich form of a result.
    Display {
        /// Media type.
        mime: String,
        /// At most [`limits::CHUNK_BYTES`].
        data: Vec<u8>,
    },
    /// Bytes that were written but are no longer there to replay.
    Truncated(u64),
    /// The execution is over; the last event.
    ExitCode(i32),
}

/// A table or tree of output.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputData {
    /// Column names; empty for a list or tree.
    #[serde(default)]
    pub headers: Vec<String>,
    /// Rows.
    #[serde(default)]
    pub root: Vec<OutputNode>,
}

impl OutputData {
    /// About what it takes of memory, bytes.
    pub fn memory_bytes(&self) -> usize {
        let mut bytes = texts(&self.headers);
        // Not recursive: a tree may be deep.
        let mut nodes: Vec<&OutputNode> = self.root.iter().collect();
        while let Some(node) = nodes.pop() {
            bytes += size_of::<OutputNode>() + node.name.len() + node.entry_type.len() + node.text.len();
            bytes += texts(&node.cells);
            nodes.extend(&node.children);
        }
        bytes
    }
}

fn texts(texts: &[String]) -> usize {
    texts.iter().map(|text| size_of::<String>() + text.len()).sum()
}

/// A row or tree node of [`OutputData`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputNode {
    /// The row's name.
    #[serde(default)]
    pub name: String,
    /// `text`, `file`, `directory`, `executable` or `symlink`.
    #[serde(default, rename = "type")]
    pub entry_type: String,
    /// Text of a leaf.
    #[serde(default)]
    pub text: String,
    /// Cells beyond the name.
    #[serde(default)]
    pub cells: Vec<String>,
    /// Children of a tree node.
    #[serde(default)]
    pub children: Vec<OutputNode>,
}

/// A request that breaks a bound.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// More code than [`limits::CODE_BYTES`].
    #[error("code of {0} bytes is larger than {max} bytes", max = limits::CODE_BYTES)]
    CodeTooLarge(usize),
    /// More environment than [`limits::ENV_BYTES`].
    #[error("environment of {0} bytes is larger than {max} bytes", max = limits::ENV_BYTES)]
    EnvTooLarge(usize),
    /// A name that cannot be an environment variable.
    #[error("{0:?} cannot be the name of an environment variable")]
    EnvName(String),
    /// Code, a value or a name with a NUL byte where none can be.
    #[error("{0} holds a NUL byte")]
    Nul(&'static str),
    /// More inline input than [`limits::STDIN_INLINE_BYTES`].
    #[error("inline standard input of {0} bytes is larger than {max} bytes", max = limits::STDIN_INLINE_BYTES)]
    StdinTooLarge(usize),
    /// An idempotency key longer than [`limits::KEY_BYTES`].
    #[error("idempotency key of {0} bytes is longer than {max} bytes", max = limits::KEY_BYTES)]
    KeyTooLong(usize),
    /// A tool name that is empty or too long.
    #[error("tool name is empty or longer than {} bytes", limits::IDENTIFIER_BYTES)]
    ToolName,
}

impl ExecRequest {
    /// A request that runs `code` and nothing else.
    pub fn code(code: impl Into<String>) -> Self {
        ExecRequest { what: Work::Code(code.into()), ..ExecRequest::default() }
    }

    /// Checks every bound.
    ///
    /// # Errors
    /// The first bound that is broken.
    pub fn check(&self) -> Result<(), RequestError> {
        match &self.what {
            Work::Code(code) if code.len() > limits::CODE_BYTES => return Err(RequestError::CodeTooLarge(code.len())),
            Work::Code(code) if code.contains('\0') => return Err(RequestError::Nul("code")),
            Work::Code(_) => {}
            Work::Call { name, .. } => {
                if name.is_empty() || name.len() > limits::IDENTIFIER_BYTES || name.contains('\0') {
                    return Err(RequestError::ToolName);
                }
            }
        }
        let env_bytes = self.env.iter().map(|(k, v)| k.len() + v.len() + 2).sum();
        if env_bytes > limits::ENV_BYTES {
            return Err(RequestError::EnvTooLarge(env_bytes));
        }
        for (name, value) in &self.env {
            if name.is_empty() || name.contains(['=', '\0']) {
                return Err(RequestError::EnvName(name.chars().take(80).collect()));
            }
            if value.contains('\0') {
                return Err(RequestError::Nul("environment value"));
            }
        }
        if self.stdin.len() > limits::STDIN_INLINE_BYTES {
            return Err(RequestError::StdinTooLarge(self.stdin.len()));
        }
        if self.key.len() > limits::KEY_BYTES {
            return Err(RequestError::KeyTooLong(self.key.len()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_checked() {
        assert_eq!(ExecRequest::code("echo hi").check(), Ok(()));
        let env =
            |name: &str, value: &str| ExecRequest { env: vec![(name.into(), value.into())], ..ExecRequest::code("x") };
        assert!(env("A", "b").check().is_ok());
        for bad in [
            ExecRequest::code("x".repeat(limits::CODE_BYTES + 1)),
            ExecRequest::code("a\0b"),
            env("", "v"),
            env("A=B", "v"),
            env("A", "v\0"),
            env("A", &"v".repeat(limits::ENV_BYTES)),
            ExecRequest { stdin: vec![0; limits::STDIN_INLINE_BYTES + 1], ..ExecRequest::code("x") },
            ExecRequest { key: "k".repeat(limits::KEY_BYTES + 1), ..ExecRequest::code("x") },
            ExecRequest { what: Work::Call { name: String::new(), args: Value::Null }, ..ExecRequest::default() },
        ] {
            assert!(bad.check().is_err(), "{:?}", bad.check());
        }
    }

    #[test]
    fn exec_status_names_round_trip() {
        for status in ExecStatus::ALL {
            assert_eq!(ExecStatus::from_name(status.name()), Some(status));
        }
    }
}
