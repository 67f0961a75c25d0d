//! A client of Firecracker's API: one request at a time over its Unix socket, each with a deadline.
//!
//! ```text
//!  not started ── boot source, machine, drives, vsock, entropy ── InstanceStart ─▶ running ◀─ PATCH /vm ─▶ paused
//!       └──────── snapshot/load, before anything else ───────────────────────────────────────────────────▶ │
//!                                                                         snapshot/create, while paused ───┘
//! ```
//!
//! Firecracker is as untrusted as its guest: an answer has a limited size, and is text for an error at most.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::{ACCEPT, CONTENT_TYPE, HOST};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use crate::core::error::Error;
use crate::core::limits;
use crate::link::connector::unix::connect;

/// Time for one request.
const REQUEST: Duration = Duration::from_secs(10);
/// Pause between two attempts to connect to a process that starts.
const PAUSE: Duration = Duration::from_millis(2);
/// The only type of bodies.
const JSON: &str = "application/json";

/// What the guest boots.
#[derive(Debug, Serialize)]
pub(super) struct BootSource<'a> {
    pub kernel_image_path: &'a str,
    pub initrd_path: &'a str,
    pub boot_args: &'a str,
}

/// Processors and memory.
#[derive(Debug, Serialize)]
pub(super) struct MachineConfig {
    pub vcpu_count: u32,
    pub mem_size_mib: u64,
    pub smt: bool,
    pub track_dirty_pages: bool,
}

/// Whether the guest's flushes reach the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) enum CacheType {
    Unsafe,
    Writeback,
}

/// A block device.
#[derive(Debug, Serialize)]
pub(super) struct Drive<'a> {
    pub drive_id: &'a str,
    pub path_on_host: &'a str,
    pub is_root_device: bool,
    pub is_read_only: bool,
    pub cache_type: CacheType,
}

/// The guest's channels.
#[derive(Debug, Serialize)]
pub(super) struct Vsock<'a> {
    pub guest_cid: u32,
    pub uds_path: &'a str,
}

/// Source of randomness, without settings.
#[derive(Debug, Serialize)]
pub(super) struct Entropy {}

#[derive(Debug, Serialize)]
struct Action {
    action_type: &'static str,
}

/// A state that a machine may be set to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) enum WantedState {
    Paused,
    Resumed,
}

#[derive(Debug, Serialize)]
struct NewState {
    state: WantedState,
}

/// Where a paused machine is saved.
#[derive(Debug, Serialize)]
pub(super) struct SnapshotCreate<'a> {
    pub snapshot_type: SnapshotType,
    pub snapshot_path: &'a str,
    pub mem_file_path: &'a str,
}

/// How much of the memory is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) enum SnapshotType {
    Full,
}

/// What backs the memory of a loaded machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) enum BackendType {
    /// A private mapping of a file. (A process that serves page faults instead leaves zeros when it ends.)
    File,
}

#[derive(Debug, Serialize)]
pub(super) struct MemoryBackend<'a> {
    pub backend_type: BackendType,
    pub backend_path: &'a str,
}

#[derive(Debug, Serialize)]
pub(super) struct VsockOverride<'a> {
    pub uds_path: &'a str,
}

/// What a new process loads.
#[derive(Debug, Serialize)]
pub(super) struct SnapshotLoad<'a> {
    pub snapshot_path: &'a str,
    pub mem_backend: MemoryBackend<'a>,
    pub vsock_override: VsockOverride<'a>,
    pub track_dirty_pages: bool,
    pub resume_vm: bool,
    /// Whether the guest's clock advances by the time since the snapshot.
    pub clock_realtime: bool,
}

/// A machine's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub(super) enum State {
    #[serde(rename = "Not started")]
    NotStarted,
    Running,
    Paused,
}

/// What a process says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Instance {
    pub id: String,
    pub state: State,
    pub vmm_version: String,
}

#[derive(Debug, Deserialize)]
struct Fault {
    fault_message: String,
}

/// A failed request.
#[derive(Debug, thiserror::Error)]
pub(super) enum ApiError {
    /// It answers that the request is wrong, or fails.
    #[error("Firecracker refuses {request}: {fault} ({status})")]
    Refused { request: String, status: StatusCode, fault: String },
    /// It does not answer in time.
    #[error("Firecracker does not answer in time: {0}")]
    Late(String),
    /// It cannot be reached, or ended the connection.
    #[error("Firecracker cannot be reached: {0}")]
    Lost(String),
    /// Its answer is no answer to the request.
    #[error("Firecracker's answer is invalid: {0}")]
    Invalid(String),
}

impl From<ApiError> for Error {
    fn from(error: ApiError) -> Error {
        match &error {
            ApiError::Refused { .. } => Error::unavailable(error.to_string()).reason("vmm_refused"),
            ApiError::Late(_) => Error::deadline(error.to_string()),
            ApiError::Lost(_) | ApiError::Invalid(_) => Error::unavailable(error.to_string()),
        }
    }
}

type Result<T> = std::result::Result<T, ApiError>;

/// The API of one process.
#[derive(Debug)]
pub(in crate::isolation::microvm) struct Api {
    socket: PathBuf,
    /// Time for one request.
    pub(super) within: Duration,
}

impl Api {
    /// The API behind that socket. Connects with each request.
    pub(super) fn new(socket: &Path) -> Api {
        Api { socket: socket.to_owned(), within: REQUEST }
    }

    /// Waits until a process that starts listens.
    ///
    /// # Errors
    /// `Late`. The caller notices the process's end.
    pub(super) async fn listening(&self) -> Result<()> {
        let until = Instant::now() + self.within;
        loop {
            match connect(&self.socket).await {
                Ok(_) => return Ok(()),
                Err(error) if Instant::now() > until => return Err(ApiError::Late(format!("its socket: {error}"))),
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    /// What the process says of itself.
    pub(super) async fn describe(&self) -> Result<Instance> {
        self.describe_within(self.within).await
    }

    /// As [`Self::describe`], with another deadline.
    pub(super) async fn describe_within(&self, within: Duration) -> Result<Instance> {
        let answer = self.call(Method::GET, "/", Vec::new(), within).await?;
        serde_json::from_slice(&answer).map_err(|error| ApiError::Invalid(format!("GET /: {error}")))
    }

    pub(super) async fn set_boot_source(&self, source: &BootSource<'_>) -> Result<()> {
        self.put("/boot-source", source).await
    }

    pub(super) async fn set_machine(&self, machine: &MachineConfig) -> Result<()> {
        self.put("/machine-config", machine).await
    }

    pub(super) async fn set_drive(&self, drive: &Drive<'_>) -> Result<()> {
        self.put(&format!("/drives/{}", drive.drive_id), drive).await
    }

    pub(super) async fn set_vsock(&self, vsock: &Vsock<'_>) -> Result<()> {
        self.put("/vsock", vsock).await
    }

    pub(super) async fn set_entropy(&self) -> Result<()> {
        self.put("/entropy", &Entropy {}).await
    }

    /// Starts the configured machine.
    pub(super) async fn start(&self) -> Result<()> {
        self.put("/actions", &Action { action_type: "InstanceStart" }).await
    }

    /// Pauses or resumes the machine's processors.
    pub(super) async fn set_state(&self, state: WantedState) -> Result<()> {
        let body = json(&NewState { state })?;
        self.call(Method::PATCH, "/vm", body, self.within).await.map(drop)
    }

    /// Saves a paused machine.
    pub(super) async fn create_snapshot(&self, snapshot: &SnapshotCreate<'_>, within: Duration) -> Result<()> {
        self.call(Method::PUT, "/snapshot/create", json(snapshot)?, within).await.map(drop)
    }

    /// Loads a saved machine into a process that has none.
    pub(super) async fn load_snapshot(&self, snapshot: &SnapshotLoad<'_>, within: Duration) -> Result<()> {
        self.call(Method::PUT, "/snapshot/load", json(snapshot)?, within).await.map(drop)
    }

    pub(super) async fn put(&self, path: &str, body: &impl Serialize) -> Result<()> {
        self.call(Method::PUT, path, json(body)?, self.within).await.map(drop)
    }

    /// Sends a request and returns the body of its answer.
    async fn call(&self, method: Method, path: &str, body: Vec<u8>, within: Duration) -> Result<Vec<u8>> {
        let request = format!("{method} {path}");
        let answered = tokio::time::timeout(within, self.exchange(method, path, body)).await;
        let (status, body) = answered.map_err(|_| ApiError::Late(request.clone()))??;
        if status.is_success() {
            return Ok(body);
        }
        let fault = match serde_json::from_slice::<Fault>(&body) {
            Ok(fault) => fault.fault_message.chars().take(300).collect(),
            Err(_) => String::from("no reason given"),
        };
        Err(ApiError::Refused { request, status, fault })
    }

    async fn exchange(&self, method: Method, path: &str, body: Vec<u8>) -> Result<(StatusCode, Vec<u8>)> {
        let lost = |error: &dyn std::fmt::Display| ApiError::Lost(format!("{path}: {error}"));
        let stream = connect(&self.socket).await.map_err(|error| lost(&error))?;
        let mut request = Request::builder().method(method).uri(path).header(HOST, "localhost").header(ACCEPT, JSON);
        if !body.is_empty() {
            request = request.header(CONTENT_TYPE, JSON);
        }
        let request = request.body(Full::new(Bytes::from(body))).map_err(|error| lost(&error))?;
        let mut client = http1::Builder::new();
        client.max_buf_size(limits::VM_MONITOR_HEAD_BYTES);
        let shaken = client.handshake::<_, Full<Bytes>>(TokioIo::new(stream)).await;
        let (mut sender, connection) = shaken.map_err(|error| lost(&error))?;
        let exchanged = async {
            let answer = sender.send_request(request).await.map_err(|error| broken(path, &error))?;
            let status = answer.status();
            let body = Limited::new(answer.into_body(), limits::VM_MONITOR_LINE_BYTES).collect().await;
            let body = body.map_err(|error| match error.downcast_ref::<LengthLimitError>() {
                Some(_) => ApiError::Invalid(format!("{path}: it is too long")),
                None => lost(&error),
            })?;
            Ok((status, body.to_bytes().to_vec()))
        };
        // The connection's end is an error of the exchange.
        let driven = async {
            let _ = connection.await;
            std::future::pending::<Infallible>().await
        };
        tokio::select! {
            done = exchanged => done,
            never = driven => match never {},
        }
    }
}

/// An answer that is no HTTP differs from none.
fn broken(path: &str, error: &hyper::Error) -> ApiError {
    match error.is_parse() {
        true => ApiError::Invalid(format!("{path}: {error}")),
        false => ApiError::Lost(format!("{path}: {error}")),
    }
}

fn json(body: &impl Serialize) -> Result<Vec<u8>> {
    serde_json::to_vec(body).map_err(|error| ApiError::Invalid(error.to_string()))
}
