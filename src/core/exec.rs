//! Executions: requests to run code in a kernel, and their results.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::error::{DISK_FULL, Error};
use super::ids::ExecId;
use super::limits;
use super::value::Value;

/// A request to run code, with its limits.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ExecRequest {
    /// The code or tool call.
    pub what: Work,
    /// Standard input that is available at once.
    pub stdin: Vec<u8>,
    /// Whether more standard input follows on the execution's stream; otherwise input ends after
    /// `stdin`.
    pub stdin_open: bool,
    /// Environment for this execution only.
    pub env: Vec<(String, String)>,
    /// Timeout of this execution in milliseconds; 0: none of its own.
    pub timeout_ms: u64,
    /// Bytes of output kept in the journal; 0: the default.
    pub output_limit_bytes: u64,
    /// Idempotency key: the same key returns the same execution.
    pub key: String,
    /// The kernel version that the client expects; 0: any.
    pub expected_version: u64,
}

impl ExecRequest {
    /// Whether `other` requests the same execution.
    ///
    /// The expected version and the output limit are ignored, because a repeated request may change
    /// them.
    pub fn asks_as(&self, other: &ExecRequest) -> bool {
        let same_work = match (&self.what, &other.what) {
            (Work::Code(a), Work::Code(b)) => a == b,
            // Compared as JSON, so that a NaN equals itself.
            (Work::Call { name: a, args: x }, Work::Call { name: b, args: y }) => a == b && x.to_json() == y.to_json(),
            (Work::Process(a), Work::Process(b)) => a == b,
            (Work::Code(_) | Work::Call { .. } | Work::Process(_), _) => false,
        };
        same_work
            && (&self.stdin, self.stdin_open, &self.env, self.timeout_ms)
                == (&other.stdin, other.stdin_open, &other.env, other.timeout_ms)
    }

    /// Approximate encoded size, bytes.
    pub fn memory_bytes(&self) -> usize {
        let work = match &self.what {
            Work::Code(code) => code.len(),
            Work::Call { name, args } => name.len() + args.bytes_up_to(usize::MAX),
            Work::Process(program) => program.argument_bytes() + program.cwd.len(),
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
    /// A program beside the engine.
    Process(Program),
}

/// A program that runs beside the engine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// The program and its arguments.
    pub argv: Vec<String>,
    /// Working directory in the kernel: absolute, or relative to the workspace in a request.
    pub cwd: String,
    /// Whether it continues without its client.
    #[serde(default)]
    pub detached: bool,
    /// Its terminal; none: pipes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub terminal: Option<TerminalSize>,
}

/// The size of a terminal, characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    /// Lines.
    pub rows: u16,
    /// Characters per line.
    pub columns: u16,
}

impl TerminalSize {
    /// A size as messages hold it: zeros for none.
    pub fn from_wire(rows: u16, columns: u16) -> Option<TerminalSize> {
        (rows > 0 && columns > 0).then_some(TerminalSize { rows, columns })
    }
}

impl Program {
    /// Size of the arguments, bytes.
    pub fn argument_bytes(&self) -> usize {
        self.argv.iter().map(|argument| argument.len() + 1).sum()
    }

    /// The arguments as a shell would read them.
    pub fn command_line(&self) -> String {
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
        let quoted = |argument: &String| match !argument.is_empty() && argument.chars().all(plain) {
            true => argument.clone(),
            false => format!("'{}'", argument.replace('\'', "'\\''")),
        };
        self.argv.iter().map(quoted).collect::<Vec<_>>().join(" ")
    }

    fn check(&self) -> Result<(), RequestError> {
        if self.argv.first().is_none_or(String::is_empty) {
            return Err(RequestError::NoProgram);
        }
        let longest = self.argv.iter().map(String::len).max().unwrap_or(0);
        if self.argv.len() > limits::PROCESS_ARGUMENTS
            || self.argument_bytes() > limits::PROCESS_ARGUMENT_BYTES
            || longest > limits::PROCESS_ARGUMENT_MAX_BYTES
        {
            return Err(RequestError::Arguments { count: self.argv.len(), bytes: self.argument_bytes() });
        }
        if self.cwd.len() > limits::PROCESS_DIRECTORY_BYTES {
            return Err(RequestError::Directory);
        }
        match self.argv.iter().chain([&self.cwd]).any(|text| text.contains('\0')) {
            true => Err(RequestError::Nul("an argument or the working directory")),
            false => Ok(()),
        }
    }
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
    /// The timeout expired.
    Timeout,
    /// A client interrupted it.
    Interrupted,
    /// The worker ended during the execution.
    Lost,
    /// Nothing ran: the code is invalid, or no worker was available.
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

    /// The status with this name.
    pub fn from_name(name: &str) -> Option<ExecStatus> {
        Self::ALL.into_iter().find(|s| s.name() == name)
    }
}

/// Exit code of an execution whose worker ended; never used by an engine.
pub const CODE_LOST: i32 = 137;
/// Exit code of a process that was killed on request: 128 and the number of SIGKILL.
pub const CODE_KILLED: i32 = 137;
/// Exit code of a timed-out execution.
pub const CODE_TIMEOUT: i32 = 124;
/// Exit code of an interrupted execution.
pub const CODE_INTERRUPTED: i32 = 130;

/// The result of an execution, without its output streams.
#[derive(Debug, Clone, PartialEq)]
pub struct ExecEnd {
    /// How it ended.
    pub status: ExecStatus,
    /// Exit code.
    pub code: i32,
    /// Error in one line; empty on success.
    pub err: String,
    /// The value of the last expression, where the language has one.
    pub value: Option<Value>,
    /// Structured output, where the engine gives it.
    pub output: Option<OutputData>,
    /// Wall time, microseconds.
    pub duration_us: u64,
}

/// Start of the part of [`ExecEnd::err`] that says that the state after an execution is not saved.
const UNSAVED: &str = "the engine's state is not saved: ";

impl ExecEnd {
    /// The part of `err` that says that the state after the execution is not saved.
    pub fn unsaved(&self) -> Option<&str> {
        self.err.find(UNSAVED).map(|at| &self.err[at..])
    }

    /// The error of the code itself: `err` without [`Self::unsaved`].
    pub fn own_err(&self) -> &str {
        self.err.find(UNSAVED).map_or(&*self.err, |at| self.err[..at].trim_end_matches("; "))
    }

    /// Adds to an error that the state since `since` is not saved, why, and what to do next.
    pub fn add_unsaved(err: &mut String, since: ExecId, why: &Error) {
        let separator = if err.is_empty() { "" } else { "; " };
        let next = match (&*why.reason, &*why.hint) {
            (DISK_FULL, _) => "free space on the disk of ryokan's data; ",
            (_, "") => "",
            (_, hint) => &format!("{hint}; "),
        };
        err.push_str(&format!(
            "{separator}{UNSAVED}{}; what changed in variables and functions in execution {since} and after it is only in \
             memory, and is lost if the kernel stops (files are kept); {next}each later execution tries to save it again",
            why.message
        ));
    }

    /// Creates the result of an execution whose worker ended.
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

/// A rich form of a result: an image, a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Display {
    /// Media type.
    pub mime: String,
    /// Its content.
    pub data: Vec<u8>,
}

/// The result of an execution with its output.
#[derive(Debug, Clone, PartialEq)]
pub struct ExecResult {
    /// Number of the execution.
    pub exec: ExecId,
    /// The result.
    pub end: ExecEnd,
    /// Kept standard output: its beginning.
    pub stdout: Vec<u8>,
    /// Kept standard error: its beginning.
    pub stderr: Vec<u8>,
    /// Bytes of output beyond `stdout` and `stderr`.
    pub truncated_bytes: u64,
    /// The newest of those bytes that were of standard output.
    pub stdout_tail: Vec<u8>,
    /// The newest of those bytes that were of standard error.
    pub stderr_tail: Vec<u8>,
    /// Kept rich forms, in order.
    pub displays: Vec<Display>,
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

/// The newest output of an execution beyond what is kept of its beginning.
#[derive(Debug, Clone, Default)]
pub struct Tail {
    chunks: VecDeque<(Stream, Vec<u8>)>,
    bytes: u64,
    limit: u64,
}

impl Tail {
    /// The most bytes that are kept of an execution of which the first `kept` bytes are kept.
    pub fn limit(kept: u64) -> u64 {
        (kept / 4).min(limits::OUTPUT_TAIL_BYTES)
    }

    /// An empty tail beside `kept` bytes.
    pub fn beside(kept: u64) -> Tail {
        Tail { chunks: VecDeque::new(), bytes: 0, limit: Tail::limit(kept) }
    }

    /// Appends bytes; the oldest beyond the limit are dropped.
    pub fn push(&mut self, stream: Stream, data: &[u8]) {
        let data = &data[data.len().saturating_sub(usize::try_from(self.limit).unwrap_or(usize::MAX))..];
        if data.is_empty() {
            return;
        }
        self.bytes += data.len() as u64;
        match self.chunks.back_mut() {
            Some((last, joined)) if *last == stream => joined.extend_from_slice(data),
            _ => self.chunks.push_back((stream, data.to_vec())),
        }
        while self.bytes > self.limit {
            let Some((_, oldest)) = self.chunks.front_mut() else { break };
            let over = (self.bytes - self.limit).min(oldest.len() as u64);
            oldest.drain(..over as usize);
            self.bytes -= over;
            if oldest.is_empty() {
                self.chunks.pop_front();
            }
        }
    }

    /// The bytes in order of arrival.
    pub fn into_chunks(self) -> Vec<(Stream, Vec<u8>)> {
        self.chunks.into()
    }
}

/// Standard output and standard error of chunks.
pub fn streams_of(chunks: Vec<(Stream, Vec<u8>)>) -> (Vec<u8>, Vec<u8>) {
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    for (stream, data) in chunks {
        let whole = match stream {
            Stream::Stdout => &mut stdout,
            Stream::Stderr => &mut stderr,
        };
        match whole.is_empty() {
            true => *whole = data,
            false => whole.extend_from_slice(&data),
        }
    }
    (stdout, stderr)
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
    /// Bytes of output that are no longer available for replay.
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
    /// Approximate size in memory, bytes.
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

/// A request that violates a limit.
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
    /// No program.
    #[error("a process needs a program")]
    NoProgram,
    /// More arguments than [`limits::PROCESS_ARGUMENTS`] or [`limits::PROCESS_ARGUMENT_BYTES`].
    #[error(
        "{count} arguments of {bytes} bytes are more than {most} of {most_bytes} bytes, or one is too long",
        most = limits::PROCESS_ARGUMENTS,
        most_bytes = limits::PROCESS_ARGUMENT_BYTES
    )]
    Arguments {
        /// Their number.
        count: usize,
        /// Their size.
        bytes: usize,
    },
    /// A working directory that is too long.
    #[error("the working directory is longer than {} bytes", limits::PROCESS_DIRECTORY_BYTES)]
    Directory,
}

impl ExecRequest {
    /// Creates a request that runs `code`.
    pub fn code(code: impl Into<String>) -> Self {
        ExecRequest { what: Work::Code(code.into()), ..ExecRequest::default() }
    }

    /// Checks every limit.
    ///
    /// # Errors
    /// The first violated limit.
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
            Work::Process(program) => program.check()?,
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
    fn unsaved_state_follows_error() {
        let why = Error::busy("no room to write the engine's state").reason(DISK_FULL);
        for own in ["", "ValueError: x"] {
            let mut end = ExecEnd { err: own.into(), ..ExecEnd::lost("") };
            assert_eq!((end.unsaved(), end.own_err()), (None, own));
            ExecEnd::add_unsaved(&mut end.err, ExecId(9), &why);
            let unsaved = end.unsaved().expect("it was added");
            for part in [&*why.message, "execution 9 and after", "lost if the kernel stops", "free space"] {
                assert!(unsaved.contains(part), "{part}: {unsaved}");
            }
            assert_eq!(end.own_err(), own);
        }
    }

    #[test]
    fn exec_status_names_round_trip() {
        for status in ExecStatus::ALL {
            assert_eq!(ExecStatus::from_name(status.name()), Some(status));
        }
    }
}
