//! The manifest of a checkpoint: one JSON object in the store, written last.
//!
//! It names every part by content address and thereby seals them: a client with the right manifest
//! can verify everything else.

use serde::{Deserialize, Serialize};

use crate::core::audit::AuditHead;
use crate::core::engine::EngineName;
use crate::core::freeze::refs::{DependencyLock, RepositoryLock};
use crate::core::freeze::workspace_database::WorkspaceDatabase;
use crate::core::ids::{CheckpointId, Digest, Epoch, HostId, KernelId};
use crate::core::info::{GivenMount, McpTransport};
use crate::core::limits;
use crate::core::missed::MissedEntry;
use crate::core::snapshot::{Architecture, Checkpoint, Machine, PortableKind, Snapshot, Teleport, image_version};
use crate::core::spec::KernelSpec;
use crate::core::workflow::{PART_FORMAT, WorkflowPart};

/// Format of the manifests that this release writes.
pub const FORMAT: u32 = 2;

/// The content of a checkpoint: engine state, workspace and records.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: u32,
    /// Kind of the snapshot: `checkpoint`, or `teleport` with a [`MachinePart`].
    pub kind: PortableKind,
    /// The release that wrote it.
    pub ryokan: String,
    /// Name of the host's architecture; irrelevant for kind checkpoint.
    pub arch: Architecture,
    /// Version of the image below the workspace; empty: none.
    #[serde(deserialize_with = "image_version")]
    pub base_image_version: String,
    /// Version of the engine's interpreter; empty: not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub engine_version: String,
    /// The host that took the checkpoint.
    pub host: HostId,
    /// The kernel.
    pub kernel: KernelId,
    /// The kernel's epoch at the checkpoint.
    pub epoch: Epoch,
    /// The checkpoint's id.
    pub id: CheckpointId,
    /// The preceding checkpoint.
    pub parent: Option<CheckpointId>,
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// The engine.
    pub engine: EngineName,
    /// The kernel's specification with its limits.
    pub spec: KernelSpec,
    /// Number of the newest journal entry at the checkpoint.
    pub journal: u64,
    /// Address of the [`StateParts`].
    pub state: Digest,
    /// The file tree.
    pub workspace: WorkspacePart,
    /// Mounts added since the kernel was created.
    pub mounts: Vec<GivenMount>,
    /// MCP servers.
    pub mcp: Vec<McpPart>,
    /// Steps, agent, decisions, artifacts.
    pub work: WorkflowPart,
    /// Tools of the MCP servers.
    pub tools: Vec<ToolPart>,
    /// Parts of the state that it does not hold, by name.
    pub missed: Vec<MissedEntry>,
    /// Head of the host's audit log at the checkpoint, which reveals a later truncation or rewrite
    /// of the log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub audit: Option<AuditHead>,
    /// The git repositories in the workspace, at their commits.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repositories: Vec<RepositoryLock>,
    /// The lock files of package managers in the workspace.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dependencies: Vec<DependencyLock>,
    /// The SQLite databases in the workspace.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub databases: Vec<WorkspaceDatabase>,
    /// The virtual machine at the same moment; only in kind teleport.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<MachinePart>,
}

/// A virtual machine in a checkpoint of kind teleport: its memory, processors and disk at one stop.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachinePart {
    /// What a host must have to continue it.
    pub machine: Machine,
    /// Address of the description for the isolation driver. It holds the secret of the worker inside.
    pub description: Digest,
    /// Address of the state of processors and devices.
    pub state: Digest,
    /// Bytes of that state.
    pub state_bytes: u64,
    /// The memory.
    pub memory: ImagePart,
    /// The disk.
    pub disk: ImagePart,
}

impl MachinePart {
    /// Bytes that are stored of memory, state and disk.
    pub fn bytes(&self) -> u64 {
        self.state_bytes.saturating_add(self.memory.bytes).saturating_add(self.disk.bytes)
    }
}

/// An image of memory or a disk in pieces, without its zero pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImagePart {
    /// Address of the list of pieces.
    pub list: Digest,
    /// Bytes of the pages that are not zero.
    pub bytes: u64,
}

/// Objects that a manifest names, for garbage collection and verification.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names {
    /// The [`StateParts`], which names the entries' bodies.
    pub state: Digest,
    /// The root of the file tree, which names its contents.
    pub tree: Digest,
    /// Objects that name no others.
    pub objects: Vec<Digest>,
    /// Lists of images, which name their pieces.
    pub images: Vec<Digest>,
}

/// A tool of an MCP server, as needed for comparisons.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolPart {
    /// Its name.
    pub name: String,
    /// The tool's server.
    pub source: String,
    /// Hash of the tool's description and schema.
    pub hash: Digest,
}

/// The workspace in a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkspacePart {
    /// Address of the root folder's object.
    pub tree: Digest,
    /// Number of files, folders and links.
    pub files: u64,
}

/// A registered MCP server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct McpPart {
    /// The name.
    pub name: String,
    /// Transport to the server.
    pub transport: McpTransport,
}

/// The engine's state: its entries with ascending keys.
///
/// A separate object, because it often stays the same between checkpoints.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StateParts {
    /// The entries.
    pub entries: Vec<StatePart>,
}

/// One entry of the engine's state; its body is an object of the store.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StatePart {
    /// Its key, `kind/name`.
    pub key: String,
    /// Displayed properties, one JSON object.
    pub meta: serde_json::Value,
    /// Address of the body.
    pub body: Digest,
    /// Bytes of the body.
    pub bytes: u64,
}

/// Why bytes are not a usable manifest.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// The bytes are malformed.
    #[error("the manifest cannot be read: {0}")]
    Malformed(String),
    /// The format belongs to another release.
    #[error("the manifest has format {0}; this release reads format {FORMAT} only")]
    UnknownFormat(u32),
    /// Workflow records in a format of another release.
    #[error("its records of the work have format {0}; this release reads format {PART_FORMAT} only")]
    UnknownWorkFormat(u32),
    /// The snapshot is of another kind.
    #[error("it is a snapshot of kind {0:?}, not a checkpoint")]
    Kind(String),
    /// The kind and the parts differ.
    #[error("it is of kind {}, and its parts are not", .0.name())]
    Parts(PortableKind),
    /// An object is too large.
    #[error("{what} of {bytes} bytes is larger than {most}")]
    TooLarge {
        /// The object.
        what: &'static str,
        /// Its size.
        bytes: usize,
        /// The maximum size.
        most: usize,
    },
}

impl Manifest {
    /// Returns the kind with such a machine, for the construction of a manifest.
    pub fn kind_with(machine: Option<&MachinePart>) -> PortableKind {
        if machine.is_some() { PortableKind::Teleport } else { PortableKind::Checkpoint }
    }

    /// Leaves the machine out: the rest is a snapshot of kind checkpoint.
    pub fn leave_out_machine(&mut self) {
        self.machine = None;
        self.kind = Manifest::kind_with(None);
    }

    /// Returns the machine as a snapshot of its kind, if there is one.
    pub fn machine_snapshot(&self) -> Option<Snapshot<Teleport>> {
        let part = self.machine.as_ref()?;
        Some(Snapshot {
            architecture: self.arch.clone(),
            base_image_version: self.base_image_version.clone(),
            host: self.host,
            content: Teleport {
                memory_bytes: part.memory.bytes.saturating_add(part.state_bytes),
                disk_bytes: part.disk.bytes,
                machine: part.machine.clone(),
            },
        })
    }

    /// Returns the snapshot with engine state of this size, as its kind sees it.
    pub fn snapshot(&self, state_bytes: u64) -> Snapshot<Checkpoint> {
        Snapshot {
            architecture: self.arch.clone(),
            base_image_version: self.base_image_version.clone(),
            host: self.host,
            content: Checkpoint { state_bytes },
        }
    }

    /// Returns the objects that the manifest names.
    pub fn names(&self) -> Names {
        let mut objects: Vec<Digest> = self.work.artifacts.iter().map(|artifact| artifact.hash).collect();
        let mut images = Vec::new();
        if let Some(part) = &self.machine {
            objects.extend([part.description, part.state]);
            images.extend([part.memory.list, part.disk.list]);
        }
        Names { state: self.state, tree: self.workspace.tree, objects, images }
    }

    /// Encodes the manifest.
    ///
    /// # Errors
    /// `TooLarge`.
    pub fn encode(&self) -> Result<Vec<u8>, ManifestError> {
        encode("the manifest", self)
    }

    /// Decodes a manifest; refuses formats that this release does not know.
    ///
    /// # Errors
    /// Each of [`ManifestError`].
    pub fn decode(bytes: &[u8]) -> Result<Manifest, ManifestError> {
        #[derive(Deserialize)]
        struct Head {
            format: u32,
            kind: String,
            work: Option<Work>,
        }
        #[derive(Deserialize)]
        struct Work {
            format: u32,
        }
        check_size("the manifest", bytes.len())?;
        // The head is decoded first, because another format may have other fields.
        let head: Head = serde_json::from_slice(bytes).map_err(|e| ManifestError::Malformed(e.to_string()))?;
        if head.format != FORMAT {
            return Err(ManifestError::UnknownFormat(head.format));
        }
        if PortableKind::from_name(&head.kind).is_none() {
            return Err(ManifestError::Kind(head.kind));
        }
        if let Some(work) = head.work.filter(|work| work.format != PART_FORMAT) {
            return Err(ManifestError::UnknownWorkFormat(work.format));
        }
        let manifest: Manifest = serde_json::from_slice(bytes).map_err(|e| ManifestError::Malformed(e.to_string()))?;
        match manifest.kind == Manifest::kind_with(manifest.machine.as_ref()) {
            true => Ok(manifest),
            false => Err(ManifestError::Parts(manifest.kind)),
        }
    }
}

/// Key prefix of state entries that hold the state of random generators.
const RANDOM: &str = "random/";

impl StateParts {
    /// Removes the state of random generators, so that two kernels do not draw the same numbers.
    pub fn leave_out_random(&mut self) {
        self.entries.retain(|part| !part.key.starts_with(RANDOM));
    }

    /// Encodes the list.
    ///
    /// # Errors
    /// `TooLarge`.
    pub fn encode(&self) -> Result<Vec<u8>, ManifestError> {
        encode("the list of engine state", self)
    }

    /// Decodes a list.
    ///
    /// # Errors
    /// `Malformed`, `TooLarge`.
    pub fn decode(bytes: &[u8]) -> Result<StateParts, ManifestError> {
        check_size("the list of engine state", bytes.len())?;
        let parts: StateParts = serde_json::from_slice(bytes).map_err(|e| ManifestError::Malformed(e.to_string()))?;
        match parts.entries.is_sorted_by(|a, b| a.key < b.key) {
            true => Ok(parts),
            false => Err(ManifestError::Malformed("its keys are not in order".into())),
        }
    }

    /// Returns the total size of all bodies.
    pub fn bytes(&self) -> u64 {
        self.entries.iter().map(|entry| entry.bytes).sum()
    }
}

fn encode<T: Serialize>(what: &'static str, value: &T) -> Result<Vec<u8>, ManifestError> {
    let bytes = serde_json::to_vec(value).map_err(|e| ManifestError::Malformed(e.to_string()))?;
    check_size(what, bytes.len()).map(|()| bytes)
}

fn check_size(what: &'static str, bytes: usize) -> Result<(), ManifestError> {
    match bytes <= limits::MANIFEST_BYTES {
        true => Ok(()),
        false => Err(ManifestError::TooLarge { what, bytes, most: limits::MANIFEST_BYTES }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        Manifest {
            format: FORMAT,
            kind: Manifest::kind_with(None),
            ryokan: "0.1.0".into(),
            arch: "x86_64".parse().expect("a name"),
            base_image_version: String::new(),
            engine_version: "3.12.1".into(),
            host: HostId::from_bytes([1; 16]),
            kernel: KernelId::from_bytes([2; 16]),
            epoch: Epoch(1),
            id: CheckpointId::from_bytes([3; 16]),
            parent: None,
            at_ms: 5,
            engine: EngineName::Python,
            spec: KernelSpec::new("k".parse().expect("a name"), EngineName::Python),
            journal: 7,
            state: Digest::from_bytes([4; 32]),
            workspace: WorkspacePart { tree: Digest::from_bytes([5; 32]), files: 1 },
            mounts: Vec::new(),
            mcp: Vec::new(),
            work: WorkflowPart::default(),
            tools: Vec::new(),
            missed: Vec::new(),
            audit: Some(AuditHead::EMPTY),
            repositories: Vec::new(),
            dependencies: Vec::new(),
            databases: Vec::new(),
            machine: None,
        }
    }

    fn with_machine() -> Manifest {
        let image = |byte| ImagePart { list: Digest::from_bytes([byte; 32]), bytes: 4096 };
        let machine = Machine {
            vmm: "QEMU 10".into(),
            build: "a".into(),
            machine_type: "q35".into(),
            cpu_model: "qemu64".into(),
            ram_bytes: 1 << 20,
            processors: 1,
        };
        let machine = Some(MachinePart {
            machine,
            description: Digest::from_bytes([6; 32]),
            state: Digest::from_bytes([7; 32]),
            state_bytes: 3,
            memory: image(8),
            disk: image(9),
        });
        Manifest { kind: Manifest::kind_with(machine.as_ref()), machine, ..manifest() }
    }

    #[test]
    fn manifest_format_is_checked() {
        let whole = manifest();
        let bytes = whole.encode().expect("encodes");
        assert_eq!(Manifest::decode(&bytes).expect("decodes"), whole);
        let with = |format: u32, kind: &str| {
            serde_json::to_vec(&serde_json::json!({ "format": format, "kind": kind, "later": true })).expect("JSON")
        };
        for format in [0, FORMAT - 1, FORMAT + 1] {
            let refused = Manifest::decode(&with(format, "checkpoint"));
            assert!(matches!(refused, Err(ManifestError::UnknownFormat(found)) if found == format));
        }
        assert!(matches!(Manifest::decode(&with(FORMAT, "suspend")), Err(ManifestError::Kind(_))));
        assert!(matches!(Manifest::decode(&with(FORMAT, "checkpoint")), Err(ManifestError::Malformed(_))));
        assert!(matches!(Manifest::decode(b"{"), Err(ManifestError::Malformed(_))));
        let mut json = serde_json::to_value(&whole).expect("JSON");
        json.as_object_mut().expect("an object").remove("work");
        let bytes = serde_json::to_vec(&json).expect("JSON");
        assert!(matches!(Manifest::decode(&bytes), Err(ManifestError::Malformed(_))));
        json["work"] = serde_json::json!({ "format": PART_FORMAT + 1 });
        let bytes = serde_json::to_vec(&json).expect("JSON");
        assert!(matches!(Manifest::decode(&bytes), Err(ManifestError::UnknownWorkFormat(_))));
        let large = vec![b' '; limits::MANIFEST_BYTES + 1];
        assert!(matches!(Manifest::decode(&large), Err(ManifestError::TooLarge { .. })));
    }

    #[test]
    fn machine_belongs_to_its_kind() {
        let whole = with_machine();
        assert_eq!(Manifest::decode(&whole.encode().expect("encodes")).expect("decodes"), whole);
        let snapshot = whole.machine_snapshot().expect("it has one");
        assert_eq!((snapshot.content.memory_bytes, snapshot.content.disk_bytes), (4099, 4096));
        let mut rest = whole.clone();
        rest.leave_out_machine();
        assert_eq!(rest, manifest());
        let (with, without) = (PortableKind::Teleport, PortableKind::Checkpoint);
        for wrong in [Manifest { kind: without, ..whole }, Manifest { kind: with, ..manifest() }] {
            let bytes = wrong.encode().expect("encodes");
            assert!(matches!(Manifest::decode(&bytes), Err(ManifestError::Parts(_))));
        }
    }

    /// Of the machine below, kind checkpoint names the architecture only.
    #[test]
    fn manifest_names_no_machine() {
        let mut manifest = with_machine();
        manifest.leave_out_machine();
        let json = serde_json::to_value(&manifest).expect("JSON");
        assert_eq!((&json["kind"], &json["arch"], json.get("machine")), (&"checkpoint".into(), &"x86_64".into(), None));
        for foreign in ["x86_64 avx2", "", "X86"] {
            let bytes = serde_json::to_vec(&{
                let mut json = json.clone();
                json["arch"] = foreign.into();
                json
            });
            let refused = Manifest::decode(&bytes.expect("JSON"));
            assert!(matches!(refused, Err(ManifestError::Malformed(_))), "{foreign}");
        }
    }

    #[test]
    fn long_texts_are_refused() {
        let whole = serde_json::to_value(with_machine()).expect("JSON");
        for (at, most) in [
            ("/base_image_version", limits::IMAGE_VERSION_CHARS),
            ("/machine/machine/vmm", limits::MACHINE_TEXT_CHARS),
            ("/machine/machine/cpu_model", limits::MACHINE_TEXT_CHARS),
        ] {
            for (chars, fits) in [(most, true), (most + 1, false)] {
                let mut json = whole.clone();
                *json.pointer_mut(at).expect("a text") = "x".repeat(chars).into();
                let read = Manifest::decode(&serde_json::to_vec(&json).expect("JSON"));
                assert_eq!(read.is_ok(), fits, "{at}: {chars}");
                let said = read.err().map_or_else(|| most.to_string(), |error| error.to_string());
                assert!(said.contains(&most.to_string()), "{said}");
            }
        }
    }

    /// Garbage collection would remove an object whose address is not listed.
    #[test]
    fn manifest_names_every_digest() {
        fn addresses(json: &serde_json::Value, found: &mut Vec<String>) {
            match json {
                serde_json::Value::String(text) if text.parse::<Digest>().is_ok() => found.push(text.clone()),
                serde_json::Value::Array(items) => items.iter().for_each(|item| addresses(item, found)),
                // The audit head is not an object.
                serde_json::Value::Object(fields) => {
                    fields.iter().filter(|(key, _)| *key != "audit").for_each(|(_, item)| addresses(item, found));
                }
                _ => {}
            }
        }
        let manifest = with_machine();
        let mut found = Vec::new();
        addresses(&serde_json::to_value(&manifest).expect("JSON"), &mut found);
        let Names { state, tree, objects, images } = manifest.names();
        let mut reported: Vec<String> =
            [state, tree].iter().chain(&objects).chain(&images).map(Digest::to_string).collect();
        found.sort();
        reported.sort();
        assert_eq!(found, reported);
    }

    #[test]
    fn state_parts_must_be_sorted() {
        let part = |key: &str| StatePart {
            key: key.into(),
            meta: serde_json::json!({}),
            body: Digest::from_bytes([0; 32]),
            bytes: 3,
        };
        let parts = StateParts { entries: vec![part("a"), part("b")] };
        assert_eq!(StateParts::decode(&parts.encode().expect("encodes")).expect("decodes"), parts);
        assert_eq!(parts.bytes(), 6);
        for wrong in [vec![part("b"), part("a")], vec![part("a"), part("a")]] {
            let bytes = StateParts { entries: wrong }.encode().expect("encodes");
            assert!(StateParts::decode(&bytes).is_err());
        }
    }
}
