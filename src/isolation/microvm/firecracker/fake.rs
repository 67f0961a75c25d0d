//! A server that checks requests as Firecracker's API does: order, fields, types, values.
//!
//! It has its own table of calls, and runs no guest: a saved machine is two small files.

use std::io::{BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Map, Value, json};

/// The state of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Nothing but a load or a configuration is possible.
    Fresh,
    /// It was configured: a load is refused.
    Configured,
    Running,
    Paused,
    /// A load failed: the process is of no use.
    Dead,
}

/// The type of a field's value.
#[derive(Clone, Copy)]
enum Type {
    Text,
    Path,
    Flag,
    /// A whole number in this range.
    Number(u64, u64),
    OneOf(&'static [&'static str]),
    Object(&'static [Field]),
}

/// A field: its name, whether it must be there, its type.
type Field = (&'static str, bool, Type);

/// A call: method, path, stages in which it is allowed, fields of its body.
type Call = (&'static str, &'static str, &'static [Stage], &'static [Field]);

const BEFORE: &[Stage] = &[Stage::Fresh, Stage::Configured];
const AFTER: &[Stage] = &[Stage::Running, Stage::Paused];
const ALWAYS: &[Stage] = &[Stage::Fresh, Stage::Configured, Stage::Running, Stage::Paused];

const CALLS: &[Call] = &[
    ("GET", "/", ALWAYS, &[]),
    (
        "PUT",
        "/boot-source",
        BEFORE,
        &[
            ("kernel_image_path", true, Type::Path),
            ("initrd_path", false, Type::Path),
            ("boot_args", false, Type::Text),
        ],
    ),
    (
        "PUT",
        "/machine-config",
        BEFORE,
        &[
            ("vcpu_count", true, Type::Number(1, 32)),
            ("mem_size_mib", true, Type::Number(1, u64::MAX)),
            ("smt", false, Type::Flag),
            ("track_dirty_pages", false, Type::Flag),
            ("huge_pages", false, Type::OneOf(&["None", "2M"])),
        ],
    ),
    (
        "PUT",
        "/drives/",
        BEFORE,
        &[
            ("drive_id", true, Type::Text),
            ("is_root_device", true, Type::Flag),
            ("path_on_host", true, Type::Path),
            ("is_read_only", false, Type::Flag),
            ("cache_type", false, Type::OneOf(&["Unsafe", "Writeback"])),
            ("io_engine", false, Type::OneOf(&["Sync", "Async"])),
        ],
    ),
    ("PUT", "/vsock", BEFORE, &[("guest_cid", true, Type::Number(3, u32::MAX as u64)), ("uds_path", true, Type::Path)]),
    ("PUT", "/entropy", BEFORE, &[]),
    (
        "PUT",
        "/actions",
        ALWAYS,
        &[("action_type", true, Type::OneOf(&["FlushMetrics", "InstanceStart", "SendCtrlAltDel"]))],
    ),
    ("PATCH", "/vm", AFTER, &[("state", true, Type::OneOf(&["Paused", "Resumed"]))]),
    (
        "PUT",
        "/snapshot/create",
        &[Stage::Paused],
        &[
            ("snapshot_type", false, Type::OneOf(&["Full", "Diff"])),
            ("snapshot_path", true, Type::Path),
            ("mem_file_path", true, Type::Path),
        ],
    ),
    (
        "PUT",
        "/snapshot/load",
        &[Stage::Fresh],
        &[
            ("snapshot_path", true, Type::Path),
            (
                "mem_backend",
                true,
                Type::Object(&[
                    ("backend_type", true, Type::OneOf(&["File", "Uffd"])),
                    ("backend_path", true, Type::Path),
                ]),
            ),
            ("vsock_override", false, Type::Object(&[("uds_path", true, Type::Path)])),
            ("track_dirty_pages", false, Type::Flag),
            ("resume_vm", false, Type::Flag),
            ("clock_realtime", false, Type::Flag),
        ],
    ),
];

/// Why a value has not that type.
fn mismatch(kind: Type, value: &Value) -> Option<String> {
    let fits = match kind {
        Type::Text => value.is_string(),
        Type::Path => value.as_str().is_some_and(|path| !path.is_empty()),
        Type::Flag => value.is_boolean(),
        Type::Number(least, most) => value.as_u64().is_some_and(|number| (least..=most).contains(&number)),
        Type::OneOf(values) => value.as_str().is_some_and(|text| values.contains(&text)),
        Type::Object(fields) => return wrong_fields(fields, value),
    };
    (!fits).then(|| format!("it is {value}"))
}

/// What is wrong with the fields of a body.
fn wrong_fields(fields: &[Field], body: &Value) -> Option<String> {
    let Some(body) = body.as_object() else { return Some(format!("{body} is no object")) };
    if let Some(unknown) = body.keys().find(|key| !fields.iter().any(|(name, ..)| name == key)) {
        return Some(format!("unknown field `{unknown}`"));
    }
    fields.iter().find_map(|(name, is_required, kind)| match body.get(*name) {
        None => is_required.then(|| format!("missing field `{name}`")),
        Some(value) => mismatch(*kind, value).map(|why| format!("field `{name}`: {why}")),
    })
}

/// What a fake does in place of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    Hang,
    Close,
    /// Bytes that are no HTTP.
    Garbage,
    /// A body without end.
    Endless,
    /// A head without end.
    EndlessHead,
    /// A body of another form than that of the answer.
    OtherBody,
    /// Another version of Firecracker.
    OtherVersion,
}

/// One process.
#[derive(Debug)]
pub(super) struct Process {
    pub stage: Stage,
    folder: PathBuf,
    configured: Map<String, Value>,
    drives: Vec<String>,
    /// The accepted and refused calls, in order.
    pub calls: Vec<(String, Value)>,
    pub faults: Vec<(String, Fault)>,
}

impl Process {
    /// The answer to a request, which is checked as a whole before anything happens.
    fn answer(&mut self, method: &str, path: &str, body: &[u8]) -> Result<Option<Value>, String> {
        let call = CALLS.iter().find(|(known, at, ..)| {
            *known == method && (*at == path || (at.len() > 1 && at.ends_with('/') && path.starts_with(at)))
        });
        let (_, at, stages, fields) =
            call.ok_or_else(|| format!("Invalid request method and/or path: {method} {path}."))?;
        let body = match (method, body.is_empty()) {
            ("GET", true) => json!({}),
            (_, false) => serde_json::from_slice(body).map_err(|error| format!("not JSON: {error}"))?,
            (_, true) => return Err(String::from("Empty PUT request.")),
        };
        self.calls.push((format!("{method} {path}"), body.clone()));
        if let Some(why) = wrong_fields(fields, &body) {
            return Err(format!("An error occurred when deserializing the json body of a request: {why}."));
        }
        if !stages.contains(&self.stage) {
            return Err(format!("The requested operation is not supported: {:?}.", self.stage));
        }
        self.act(at, path, &body)
    }

    fn act(&mut self, at: &str, path: &str, body: &Value) -> Result<Option<Value>, String> {
        let text = |name: &str| body[name].as_str().unwrap_or_default().to_owned();
        match at {
            "/" => {
                let state = match self.stage {
                    Stage::Running => "Running",
                    Stage::Paused => "Paused",
                    Stage::Fresh | Stage::Configured | Stage::Dead => "Not started",
                };
                let version = if self.has_fault("GET /", Fault::OtherVersion) { "1.17.0" } else { "1.16.1" };
                return Ok(Some(
                    json!({ "id": "fake", "state": state, "vmm_version": version, "app_name": "Firecracker" }),
                ));
            }
            "/drives/" => {
                let id = path.trim_start_matches(at);
                if id != text("drive_id") {
                    return Err(String::from("The id from the path does not match the id from the body!"));
                }
                self.drives.push(id.to_owned());
                self.configured(at, body);
            }
            "/actions" if text("action_type") == "InstanceStart" => self.start()?,
            "/actions" => return Err(String::from("not supported before the start")),
            "/vm" if text("state") == "Paused" => self.stage = Stage::Paused,
            "/vm" => self.stage = Stage::Running,
            "/snapshot/create" => {
                let saved = json!({ "drives": self.drives, "vsock": self.configured["/vsock"]["uds_path"] });
                let written = std::fs::write(self.place(&text("snapshot_path")), saved.to_string());
                written.map_err(|error| format!("Cannot open the snapshot file: {error}"))?;
                let written = std::fs::write(self.place(&text("mem_file_path")), b"memory");
                written.map_err(|error| format!("Cannot open the memory file: {error}"))?;
            }
            "/snapshot/load" => {
                self.stage = Stage::Dead;
                self.load(body)?;
                self.stage = if body["resume_vm"] == true { Stage::Running } else { Stage::Paused };
            }
            other => self.configured(other, body),
        }
        Ok(None)
    }

    fn configured(&mut self, at: &str, body: &Value) {
        self.configured.insert(at.to_owned(), body.clone());
        self.stage = Stage::Configured;
    }

    fn start(&mut self) -> Result<(), String> {
        if AFTER.contains(&self.stage) {
            return Err(String::from("The requested operation is not supported after starting the microVM."));
        }
        if !self.configured.contains_key("/boot-source") {
            return Err(String::from("Cannot start microvm without kernel configuration."));
        }
        self.stage = Stage::Running;
        Ok(())
    }

    fn load(&mut self, body: &Value) -> Result<(), String> {
        let read = |path: &Value| std::fs::read(self.place(path.as_str().unwrap_or_default()));
        let state = read(&body["snapshot_path"]).map_err(|error| format!("Failed to open snapshot file: {error}"))?;
        read(&body["mem_backend"]["backend_path"]).map_err(|error| format!("Failed to load guest memory: {error}"))?;
        let saved: Value =
            serde_json::from_slice(&state).map_err(|error| format!("Invalid snapshot state: {error}"))?;
        let socket = match body["vsock_override"]["uds_path"].as_str() {
            Some(_) if saved["vsock"].is_null() => return Err(String::from("Unknown Vsock Device.")),
            Some(socket) => socket.to_owned(),
            None => saved["vsock"].as_str().unwrap_or_default().to_owned(),
        };
        self.configured.insert("/vsock".into(), json!({ "uds_path": socket }));
        self.drives = serde_json::from_value(saved["drives"].clone()).unwrap_or_default();
        Ok(())
    }

    /// A descriptor of the process is a file in its folder.
    fn place(&self, path: &str) -> PathBuf {
        match path.strip_prefix("/proc/self/fd/") {
            Some(number) => self.folder.join(number),
            None => self.folder.join(path),
        }
    }

    fn fault(&self, request: &str) -> Option<Fault> {
        self.faults.iter().find(|(at, _)| at == request).map(|(_, fault)| *fault)
    }

    fn has_fault(&self, request: &str, fault: Fault) -> bool {
        self.fault(request) == Some(fault)
    }
}

/// A served process.
pub(super) struct Fake {
    pub socket: PathBuf,
    pub process: Arc<Mutex<Process>>,
}

impl Fake {
    /// Serves a new process in that folder, which holds what its descriptors would. Serves until the test ends.
    pub(super) fn serve(folder: &Path) -> Fake {
        let socket = folder.join("api");
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).expect("bound");
        let (stage, folder) = (Stage::Fresh, folder.to_owned());
        let (configured, drives, calls, faults) = (Map::new(), Vec::new(), Vec::new(), Vec::new());
        let process = Arc::new(Mutex::new(Process { stage, folder, configured, drives, calls, faults }));
        let shared = Arc::clone(&process);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let process = Arc::clone(&shared);
                std::thread::spawn(move || serve_one(&stream, &process));
            }
        });
        Fake { socket, process }
    }

    /// Does that in place of the answer to a request.
    pub(super) fn fails(&self, request: &str, fault: Fault) {
        self.locked().faults.push((request.to_owned(), fault));
    }

    pub(super) fn locked(&self) -> std::sync::MutexGuard<'_, Process> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The requests so far but those for the state, and forgets them.
    pub(super) fn requests(&self) -> Vec<String> {
        let calls = std::mem::take(&mut self.locked().calls);
        calls.into_iter().map(|(request, _)| request).filter(|request| request != "GET /").collect()
    }
}

fn serve_one(stream: &UnixStream, process: &Mutex<Process>) {
    let mut reader = BufReader::new(stream);
    loop {
        let Some((method, path, body)) = request(&mut reader) else { return };
        let mut process = process.lock().unwrap_or_else(PoisonError::into_inner);
        let fault = process.fault(&format!("{method} {path}"));
        let mut writer = stream;
        let mut write = |bytes: &[u8]| writer.write_all(bytes).is_ok();
        match fault {
            None | Some(Fault::OtherVersion) => {
                let (status, body) = match process.answer(&method, &path, &body) {
                    Ok(None) => ("204 ", String::new()),
                    Ok(Some(body)) => ("200 ", body.to_string()),
                    Err(fault) => ("400 ", json!({ "fault_message": fault }).to_string()),
                };
                drop(process);
                let length = body.len();
                let head = "Server: Firecracker API\r\nConnection: keep-alive\r\nContent-Type: application/json\r\n";
                write(format!("HTTP/1.1 {status}\r\n{head}Content-Length: {length}\r\n\r\n{body}").as_bytes());
            }
            Some(fault) => {
                drop(process);
                match fault {
                    Fault::Garbage => drop(write(b"\x16\x03\x01 this is no HTTP\r\n\r\n")),
                    Fault::OtherBody => drop(write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n[1, 2, 3]")),
                    Fault::Endless => {
                        write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
                        while write(format!("1000\r\n{}\r\n", "x".repeat(0x1000)).as_bytes()) {}
                    }
                    Fault::EndlessHead => {
                        write(b"HTTP/1.1 200 OK\r\n");
                        while write(format!("X: {}\r\n", "x".repeat(0x1000)).as_bytes()) {}
                    }
                    // Until the client gives up.
                    Fault::Hang | Fault::OtherVersion => drop(reader.read(&mut [0])),
                    Fault::Close => {}
                }
                return;
            }
        }
    }
}

/// The next request: method, path, body. `None` at the end.
fn request(reader: &mut impl std::io::BufRead) -> Option<(String, String, Vec<u8>)> {
    let (mut line, mut length) = (String::new(), 0);
    reader.read_line(&mut line).ok()?;
    let mut words = line.split(' ');
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).ok()?;
        let header = header.trim().to_ascii_lowercase();
        match header.split_once(':') {
            _ if header.is_empty() => break,
            Some(("content-length", value)) => length = value.trim().parse().ok()?,
            _ => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some((method, path, body))
}
