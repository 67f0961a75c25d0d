//! The manifest of a checkpoint: one JSON object in the store, written last.
//!
//! It names every part by content address and thereby seals them: a client with the right manifest
//! can verify everything else.

use serde::{Deserialize, Serialize};

use crate::core::audit::AuditHead;
use crate::core::engine::EngineName;
use crate::core::freeze::refs::{DependencyLock, RepositoryLock};
use crate::core::ids::{CheckpointId, Digest, Epoch, HostId, KernelId};
use crate::core::info::{GivenMount, McpTransport};
use crate::core::limits;
use crate::core::missed::MissedEntry;
use crate::core::snapshot::{Checkpoint, Snapshot, SnapshotKind};
use crate::core::spec::KernelSpec;
use crate::core::workflow::{PART_FORMAT, WorkflowPart};

/// Format of the manifests that this release writes.
pub const FORMAT: u32 = 2;

/// The content of a checkpoint: engine state, workspace and records.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: u32,
    /// Kind of the snapshot: `checkpoint`.
    pub kind: String,
    /// The release that wrote it.
    pub ryokan: String,
    /// The machine's architecture; irrelevant for this kind.
    pub arch: String,
    /// Version of the image below the workspace; empty: none.
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

/// The kind of these manifests.
const KIND: &str = SnapshotKind::Checkpoint.name();

impl Manifest {
    /// Returns the kind's name, for the construction of a manifest.
    pub fn kind_name() -> String {
        KIND.to_owned()
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
        let objects = self.work.artifacts.iter().map(|artifact| artifact.hash).collect();
        Names { state: self.state, tree: self.workspace.tree, objects }
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
        if head.kind != KIND {
            return Err(ManifestError::Kind(head.kind));
        }
        if let Some(work) = head.work.filter(|work| work.format != PART_FORMAT) {
            return Err(ManifestError::UnknownWorkFormat(work.format));
        }
        serde_json::from_slice(bytes).map_err(|e| ManifestError::Malformed(e.to_string()))
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
            kind: Manifest::kind_name(),
            ryokan: "0.1.0".into(),
            arch: "x86_64".into(),
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
        }
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
            let refused = Manifest::decode(&with(format, KIND));
            assert!(matches!(refused, Err(ManifestError::UnknownFormat(found)) if found == format));
        }
        assert!(matches!(Manifest::decode(&with(FORMAT, "teleport")), Err(ManifestError::Kind(_))));
        assert!(matches!(Manifest::decode(&with(FORMAT, KIND)), Err(ManifestError::Malformed(_))));
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
        let manifest = manifest();
        let mut found = Vec::new();
        addresses(&serde_json::to_value(&manifest).expect("JSON"), &mut found);
        let Names { state, tree, objects } = manifest.names();
        let mut reported: Vec<String> = [state, tree].iter().chain(&objects).map(Digest::to_string).collect();
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
