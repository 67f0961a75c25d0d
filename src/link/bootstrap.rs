//! Worker start-up: the launch document for init and init's report, over a private stream.
//!
//! ```text
//!  daemon ── length, document, secret ──▶ init
//!  daemon ◀─ {"pid":N} {"ready":…} or {"failed":…} ─┘
//! ```
//!
//! Nothing secret is in an argument or the environment. The secret comes last: init reads it after
//! forking the engine's process, so the engine's memory holds no copy.

use std::io::{self, Read, Write};
use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::handshake::{PROOF_BYTES, WorkerIdentity};
use crate::core::engine::EngineName;
use crate::core::error::{Error, Result};
use crate::core::ids::{Epoch, KernelId, WorkerId};
use crate::core::limits;
use crate::core::name::KernelName;
use crate::core::origin::OriginKind;

/// Version and sources of this program. A new worker is of its daemon's build; an adopted one may be older.
pub const BUILD: &str = concat!(env!("CARGO_PKG_VERSION"), "+", env!("RYOKAN_SOURCES"));

/// Largest document, bytes.
const DOCUMENT_BYTES: usize = 1 << 20;
/// The daemon's configuration of an engine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineSettings {
    /// The interpreter and its first arguments, as found inside; empty for an engine that is part of the worker.
    pub interpreter: Vec<String>,
    /// The compiled Python driver, a file of the daemon. Without it the engine starts from the
    /// sources.
    #[serde(default)]
    pub python_compiled: Option<PathBuf>,
    /// Modules that Python loads in a warm worker.
    #[serde(default)]
    pub preload: Vec<String>,
    /// The virtual environment of the interpreter, for the variables of programs.
    #[serde(default)]
    pub venv: Option<PathBuf>,
}

impl EngineSettings {
    /// Sets an engine's interpreter, in a kernel with that memory.
    pub fn set_interpreter(&mut self, engine: EngineName, interpreter: String, memory_bytes: u64) {
        self.interpreter = vec![interpreter];
        if engine == EngineName::Node {
            // Node would size its heap by the system's memory, and be killed at the kernel's limit.
            let heap_mib = (memory_bytes >> 20) / 4 * 3;
            self.interpreter.push(format!("--max-old-space-size={heap_mib}"));
        }
    }
}

/// What a worker is started with; the secret travels beside it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LaunchDocument<P> {
    /// The worker.
    pub worker: WorkerId,
    /// The kernel that it executes.
    pub kernel: KernelId,
    /// The kernel's name, for the code inside.
    pub name: KernelName,
    /// The ownership epoch at the start.
    pub epoch: Epoch,
    /// [`BUILD`] of the daemon: a worker of another build refuses to start.
    pub build: String,
    /// The interpreter.
    pub engine: EngineName,
    /// The interpreter's settings.
    pub engine_settings: EngineSettings,
    /// The isolation's instructions to init before it serves; for process isolation, the sandbox
    /// plan.
    pub plan: P,
    /// The private socket; the one for descriptors is beside it.
    pub socket: PathBuf,
    /// How long the worker survives without a daemon, milliseconds.
    pub orphan_grace_ms: u64,
    /// Output held while no daemon listens, bytes.
    pub output_buffer_bytes: usize,
    /// Whether saved state must survive a loss of power: every save then waits for the disk.
    #[serde(default)]
    pub power_safe: bool,
    /// Whether the files that an execution wrote must be on the disk before its end is reported.
    #[serde(default)]
    pub sync_files: bool,
    /// Memory limit for forked snapshots of the engine, bytes; 0 disables them.
    #[serde(default)]
    pub rollback_bytes: u64,
    /// Origin and generation of the loaded state, for the code inside.
    #[serde(default)]
    pub origin: (OriginKind, u32),
    /// Whether the worker waits with its started engine for an [`Assignment`]. Until then it has no identity, no secret and
    /// no kernel's folder: a machine's template may hold it.
    #[serde(default)]
    pub is_prepared: bool,
}

/// What a prepared worker gets later: its identity, and what depends on its kernel. A descriptor of the kernel's folder
/// precedes it, the secret follows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Assignment {
    /// The worker.
    pub worker: WorkerId,
    /// The kernel that it executes.
    pub kernel: KernelId,
    /// The kernel's name, for the code inside.
    pub name: KernelName,
    /// The ownership epoch at the start.
    pub epoch: Epoch,
    /// The host name inside.
    pub hostname: String,
    /// Where the kernel's folder is.
    pub kernel_dir: PathBuf,
    /// Whether it becomes a warm worker, without a kernel.
    pub unbound: bool,
    /// How long the worker survives without a daemon, milliseconds.
    pub orphan_grace_ms: u64,
    /// Origin and generation of the loaded state, for the code inside.
    pub origin: (OriginKind, u32),
}

impl Assignment {
    /// Encodes it for [`Self::read`].
    ///
    /// # Errors
    /// If it is too large.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        encode(self)
    }

    /// Reads one and nothing beyond it.
    ///
    /// # Errors
    /// For an invalid one, and the stream's errors.
    pub fn read(from: &mut impl Read) -> io::Result<Assignment> {
        decode(from)
    }
}

fn encode(document: &impl Serialize) -> Result<Vec<u8>> {
    let json = serde_json::to_vec(document).map_err(|e| Error::internal(format!("encode the launch document: {e}")))?;
    let length = u32::try_from(json.len()).ok().filter(|length| *length as usize <= DOCUMENT_BYTES);
    let length = length.ok_or_else(|| Error::invalid("the launch document is too large"))?;
    Ok([&length.to_le_bytes()[..], &json].concat())
}

fn decode<T: DeserializeOwned>(from: &mut impl Read) -> io::Result<T> {
    let wrong = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > DOCUMENT_BYTES {
        return Err(wrong(format!("a launch document of {length} bytes")));
    }
    let mut json = vec![0; length];
    from.read_exact(&mut json)?;
    serde_json::from_slice(&json).map_err(|e| wrong(e.to_string()))
}

impl<P> LaunchDocument<P> {
    /// A document with this release's default limits.
    pub fn new(identity: &WorkerIdentity, name: KernelName, engine: EngineName, plan: P, socket: PathBuf) -> Self {
        LaunchDocument {
            worker: identity.worker,
            kernel: identity.kernel,
            name,
            epoch: identity.epoch,
            build: identity.build.clone(),
            engine,
            engine_settings: EngineSettings::default(),
            plan,
            socket,
            orphan_grace_ms: u64::try_from(limits::ORPHAN_GRACE.as_millis()).unwrap_or(u64::MAX),
            output_buffer_bytes: limits::OUTPUT_BUFFER_BYTES,
            power_safe: false,
            sync_files: false,
            rollback_bytes: 0,
            origin: (OriginKind::Original, 0),
            is_prepared: false,
        }
    }

    /// The identity that both ends prove.
    pub fn identity(&self, secret: [u8; PROOF_BYTES]) -> WorkerIdentity {
        WorkerIdentity {
            worker: self.worker,
            kernel: self.kernel,
            epoch: self.epoch,
            build: self.build.clone(),
            secret,
        }
    }
}

impl<P: Serialize + DeserializeOwned> LaunchDocument<P> {
    /// Reads one document and nothing beyond it.
    ///
    /// # Errors
    /// For a document of another build or an invalid one, and the stream's errors.
    pub fn read(from: &mut impl Read) -> io::Result<Self> {
        let wrong = |why: String| io::Error::new(io::ErrorKind::InvalidData, why);
        let document: Self = decode(from)?;
        if document.build != BUILD {
            return Err(wrong(format!("the daemon is of build {}, this worker of {BUILD}", document.build)));
        }
        Ok(document)
    }

    /// Encodes the document for [`Self::read`].
    ///
    /// # Errors
    /// `invalidArgument` if the document exceeds the size limit.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        encode(self)
    }
}

/// A line of a starting worker's report; one JSON object per line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReportLine {
    /// Init's process id on the host.
    Pid(i32),
    /// The engine is ready in a complete sandbox, its state is loaded and the private socket
    /// answers.
    Ready {},
    /// The start failed. Nothing untrusted runs.
    Failed(Error),
}

impl ReportLine {
    /// Writes the line.
    ///
    /// # Errors
    /// The stream's.
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let mut line = serde_json::to_vec(self)?;
        line.push(b'\n');
        to.write_all(&line)?;
        to.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document() -> LaunchDocument<String> {
        let identity = WorkerIdentity {
            worker: WorkerId::from_bytes([1; 16]),
            kernel: KernelId::from_bytes([2; 16]),
            epoch: Epoch(3),
            build: BUILD.into(),
            secret: [0xa5; 32],
        };
        let name = "demo".parse().expect("a name");
        LaunchDocument::new(&identity, name, EngineName::Kaish, "plan".to_owned(), "/s".into())
    }

    #[test]
    fn launch_document_is_read_exactly() {
        let bytes = [document().to_bytes().expect("encodes"), vec![0xa5; 32]].concat();
        let mut rest = &bytes[..];
        assert_eq!(LaunchDocument::<String>::read(&mut rest).expect("reads"), document());
        assert_eq!(rest, [0xa5; 32]);
    }

    #[test]
    fn assignment_is_read_exactly() {
        let assignment = Assignment {
            worker: WorkerId::from_bytes([1; 16]),
            kernel: KernelId::from_bytes([2; 16]),
            name: "demo".parse().expect("a name"),
            epoch: Epoch(3),
            hostname: "demo".into(),
            kernel_dir: "/k".into(),
            unbound: false,
            orphan_grace_ms: 4,
            origin: (OriginKind::Forked, 5),
        };
        let bytes = [assignment.to_bytes().expect("encodes"), vec![0xa5; 32]].concat();
        let mut rest = &bytes[..];
        assert_eq!(Assignment::read(&mut rest).expect("reads"), assignment);
        assert_eq!(rest, [0xa5; 32]);
        assert!(Assignment::read(&mut &bytes[..bytes.len() - 40]).is_err(), "it is cut off");
    }

    #[test]
    fn other_build_document_is_refused() {
        let other = LaunchDocument { build: "0.0.1+other".into(), ..document() };
        let bytes = other.to_bytes().expect("encodes");
        let error = LaunchDocument::<String>::read(&mut &bytes[..]).expect_err("refused");
        assert!(error.to_string().contains("0.0.1+other"), "{error}");
    }

    #[test]
    fn launch_reports_are_single_lines() {
        let mut text = Vec::new();
        ReportLine::Pid(7).write(&mut text).expect("written");
        ReportLine::Failed(Error::unsupported("a\nb")).write(&mut text).expect("written");
        let lines: Vec<_> = text.split(|b| *b == b'\n').filter(|line| !line.is_empty()).collect();
        assert_eq!(lines[0], br#"{"pid":7}"#);
        assert_eq!(lines.len(), 2);
    }
}
