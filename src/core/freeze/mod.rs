//! Freezes: kernels, repositories and data sources that are captured and restored as one.
//!
//! A *group* names its members. A [`FreezeManifest`], an object of the store, holds what was captured of each; the row
//! of the catalog that names it makes the freeze visible. [`capture`] and [`restore`] decide the order of the steps and
//! what follows a failure.

pub mod capture;
pub mod concern;
pub mod cost;
pub mod difference;
pub mod drain;
pub mod gate;
mod info;
mod intent;
pub mod lock;
pub mod locked_submodules;
pub mod marks;
pub mod on_failure;
pub mod portable;
pub mod postgres;
pub mod refs;
pub mod restore;
pub mod server;
pub mod submodule;
pub mod workspace_database;

#[cfg(test)]
mod capture_tests;
#[cfg(test)]
mod restore_tests;
#[cfg(test)]
mod simulation_tests;

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use self::cost::Storage;
pub use self::info::{FreezeInfo, GroupInfo, GroupRestored, MemberInfo};
pub use self::intent::{Intent, NewRepository};
use self::marks::FileMarks;
use self::on_failure::OnFailure;
use self::refs::{CommitId, DependencyLock, Head, McpLock, RepositoryLock};
use self::server::ServerPart;
use self::submodule::SubmodulePart;
use self::workspace_database::WorkspaceDatabase;
use super::checkpoint::{CheckpointType, Manifest};
use super::ids::{CheckpointId, Digest, FreezeId, GroupId, KernelId};
use super::limits;
use super::signature::Signed;
use super::snapshot::image_version;

/// Format of the manifests that this release writes.
pub const FORMAT: u32 = 1;

/// What a group names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum Target {
    /// A kernel of this host.
    Kernel {
        /// Its id.
        id: KernelId,
    },
    /// The work tree of a git repository on this host.
    Repository {
        /// Its directory, without symbolic links.
        path: String,
    },
    /// An SQLite database on this host.
    Database {
        /// Its file, without symbolic links.
        path: String,
    },
    /// A directory on this host.
    Directory {
        /// Its path, without symbolic links.
        path: String,
    },
    /// A data source of the configuration: the user's own programs.
    Command {
        /// Its name there.
        source: String,
    },
    /// A PostgreSQL database.
    Postgres {
        /// How it is reached, see [`postgres::Connection`].
        connection: String,
    },
    /// A PostgreSQL server of the configuration, with all of its databases.
    Server {
        /// Its name there.
        server: String,
    },
}

impl Target {
    /// The kind by name.
    pub const fn kind(&self) -> &'static str {
        match self {
            Target::Kernel { .. } => "kernel",
            Target::Repository { .. } => "repository",
            Target::Database { .. } => "database",
            Target::Directory { .. } => "directory",
            Target::Command { .. } => "command",
            Target::Postgres { .. } => "postgres",
            Target::Server { .. } => "server",
        }
    }

    /// What a text names of a kind, except a kernel: that has an id.
    pub fn named(kind: &str, text: &str) -> Option<Target> {
        let text = text.to_owned();
        Some(match kind {
            "repository" => Target::Repository { path: text },
            "database" => Target::Database { path: text },
            "directory" => Target::Directory { path: text },
            "command" => Target::Command { source: text },
            "postgres" => Target::Postgres { connection: text },
            "server" => Target::Server { server: text },
            _ => return None,
        })
    }

    /// The file of an SQLite database.
    pub fn database_path(&self) -> Option<&Path> {
        match self {
            Target::Database { path } => Some(Path::new(path)),
            Target::Kernel { .. }
            | Target::Repository { .. }
            | Target::Directory { .. }
            | Target::Command { .. }
            | Target::Postgres { .. }
            | Target::Server { .. } => None,
        }
    }
}

/// A member of a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Its name within the group.
    pub name: String,
    /// What it is.
    pub target: Target,
}

/// A group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Its identity.
    pub id: GroupId,
    /// Its owner.
    pub uid: u32,
    /// Its name, unique among its owner's groups and kernels.
    pub name: String,
    /// Its members, by name.
    pub members: Vec<Member>,
    /// Milliseconds since 1970.
    pub created_at_ms: i64,
    /// Number of freezes.
    pub freezes: u64,
    /// The freeze taken or restored last.
    pub head: Option<FreezeId>,
    /// The target of undo: taken before the last restore.
    pub undo: Option<FreezeId>,
    /// Whether a freeze or a restore was begun and has not ended.
    pub unfinished: bool,
    /// What a failed freeze does with its kernels.
    pub on_failure: OnFailure,
    /// Why its kernels are paused; `None`: they are not.
    pub paused: Option<String>,
}

/// A freeze as it is recorded and shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Freeze {
    /// Its identity.
    pub id: FreezeId,
    /// Number of the freeze within its group, from 1.
    pub number: u64,
    /// The client's message; may be empty.
    pub message: String,
    /// Why it was taken: `manual` or `system`.
    #[serde(rename = "type")]
    pub kind: CheckpointType,
    /// The client that took it.
    pub creator: String,
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// When it was last restored, milliseconds since 1970.
    pub restored_at_ms: Option<i64>,
    /// Address of its [`FreezeManifest`].
    pub manifest: Digest,
    /// The host's signature over that; `None` of earlier releases.
    pub signed: Option<Signed>,
}

/// The revision of a database's schema: `PRAGMA user_version`, and a digest of `sqlite_schema`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SchemaRevision {
    /// The application's own number.
    pub user_version: i64,
    /// Over the definitions of all tables, indexes, views and triggers.
    pub schema: String,
}

/// What was captured of a database.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "form")]
pub enum DatabasePart {
    /// A verified copy.
    Whole {
        /// The copy.
        image: Digest,
        /// Its size.
        bytes: u64,
        /// Its schema.
        revision: SchemaRevision,
        /// The file's mode.
        mode: u32,
        /// Whether Btrfs writes the file in place: attribute No_COW.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        no_cow: bool,
    },
    /// There was no file. Only before a restore.
    Absent,
    /// The files of a database that SQLite cannot read, as they were. Only before a restore.
    Damaged {
        /// Suffix of each file, its content, and its mode.
        files: Vec<(String, Digest, u32)>,
    },
}

/// What was captured of a directory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectoryPart {
    /// Its tree; `None`: there was none. Only before a restore.
    pub tree: Option<Digest>,
    /// Number of entries.
    pub entries: u64,
    /// The directory's owner.
    pub uid: u32,
    /// The directory's group.
    pub gid: u32,
}

/// What was captured of a PostgreSQL database.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PostgresPart {
    /// The archive that `pg_dump` wrote; `None`: there was no database. Only before a restore.
    pub image: Option<Digest>,
    /// Its size.
    pub bytes: u64,
    /// Its schema; `user_version` is 0.
    pub revision: Option<SchemaRevision>,
    /// What an archive does not hold.
    pub facts: Option<PostgresFacts>,
}

/// What a new PostgreSQL database is created with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PostgresFacts {
    /// Its encoding.
    pub encoding: String,
    /// Its collation.
    pub collate: String,
    /// Its character classes.
    pub ctype: String,
    /// Its owner.
    pub owner: String,
    /// The server's version; empty of earlier releases.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub version: String,
}

/// What was captured of a repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RepositoryPart {
    /// Commit and branch.
    pub head: Head,
    /// Git's tree of the index.
    pub index_tree: CommitId,
    /// Git's tree of the files that are not ignored.
    pub work_tree: CommitId,
    /// Files that differ from the commit.
    pub changed: u64,
    /// Files among them that the index does not have.
    pub untracked: u64,
    /// Objects that the commit does not have, as a thin pack.
    pub pack: Option<Digest>,
    /// Its lock files of package managers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dependencies: Vec<DependencyLock>,
    /// Its submodules.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub submodules: Vec<SubmodulePart>,
    /// Directories of its linked work trees, which are not captured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub worktrees: Vec<String>,
    /// The directory that it shares with its repository, if it is a linked work tree itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub linked_to: Option<String>,
    /// Paths of files of databases within it, which a restore neither writes nor removes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<String>,
    /// What trees do not say of its files.
    #[serde(default, skip_serializing_if = "FileMarks::is_empty")]
    pub marks: FileMarks,
}

/// What a kernel's code and files are based on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelRevision {
    /// The engine's name.
    pub engine: String,
    /// The release of ryokan, to which the engine's driver belongs.
    pub ryokan: String,
    /// Version of the image below the workspace; empty: none.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "image_version")]
    pub image: String,
    /// Version of the engine's interpreter; empty: not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub version: String,
    /// Every file of the workspace.
    pub files: Option<Digest>,
    /// The lock files of package managers in it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dependencies: Vec<DependencyLock>,
    /// The SQLite databases in it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub databases: Vec<WorkspaceDatabase>,
    /// Its MCP servers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mcp: Vec<McpLock>,
}

impl From<&Manifest> for KernelRevision {
    fn from(manifest: &Manifest) -> KernelRevision {
        KernelRevision {
            engine: manifest.engine.name().into(),
            ryokan: manifest.ryokan.clone(),
            image: manifest.base_image_version.clone(),
            version: manifest.engine_version.clone(),
            files: Some(manifest.workspace.tree),
            dependencies: manifest.dependencies.clone(),
            databases: manifest.databases.clone(),
            mcp: manifest.mcp.iter().map(|one| McpLock::new(&one.name, &one.transport)).collect(),
        }
    }
}

/// The captured content of one member.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum Captured {
    /// Of a kernel.
    Kernel {
        /// Its id.
        kernel: KernelId,
        /// Its name at that time.
        kernel_name: String,
        /// The checkpoint that holds it.
        checkpoint: CheckpointId,
        /// The checkpoint's manifest; `None` of earlier releases.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        manifest: Option<Digest>,
        /// The repositories in its workspace.
        repositories: Vec<RepositoryLock>,
        /// What its code and files are based on.
        #[serde(default)]
        revision: KernelRevision,
        /// The execution that was under way: engine state before it, files of the moment; 0: none.
        #[serde(default, skip_serializing_if = "drain::is_none")]
        under_way: u64,
    },
    /// Of a repository.
    Repository {
        /// Its directory.
        path: String,
        /// Its content.
        part: RepositoryPart,
    },
    /// Of a database.
    Database {
        /// Its file.
        path: String,
        /// Its content.
        part: DatabasePart,
    },
    /// Of a directory.
    Directory {
        /// Its path.
        path: String,
        /// Its content.
        part: DirectoryPart,
    },
    /// Of a command source.
    Command {
        /// Its name in the configuration.
        source: String,
        /// What its program wrote.
        data: Digest,
        /// The size of that.
        bytes: u64,
        /// A hash of what identifies the data; empty: no program says it.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        revision: String,
    },
    /// Of a PostgreSQL database.
    Postgres {
        /// How it is reached.
        connection: String,
        /// Its content.
        part: PostgresPart,
    },
    /// Of a PostgreSQL server.
    Server {
        /// Its name in the configuration.
        server: String,
        /// Its content.
        part: ServerPart,
    },
}

impl Captured {
    /// The member's kind by name.
    pub const fn kind(&self) -> &'static str {
        match self {
            Captured::Kernel { .. } => "kernel",
            Captured::Repository { .. } => "repository",
            Captured::Database { .. } => "database",
            Captured::Directory { .. } => "directory",
            Captured::Command { .. } => "command",
            Captured::Postgres { .. } => "postgres",
            Captured::Server { .. } => "server",
        }
    }
}

impl DatabasePart {
    /// The form by name.
    pub const fn form(&self) -> &'static str {
        match self {
            DatabasePart::Whole { .. } => "whole",
            DatabasePart::Absent => "absent",
            DatabasePart::Damaged { .. } => "damaged",
        }
    }
}

/// One member in a freeze.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The member's name.
    pub name: String,
    /// Its content.
    pub captured: Captured,
    /// How its content was held during the pause: [`cost::Driver::name`]. Empty of the present state, and of earlier releases.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub driver: String,
    /// What the driver used.
    #[serde(default, skip_serializing_if = "Storage::is_empty")]
    pub storage: Storage,
}

/// The content of a freeze: one JSON object in the store, written after everything that it names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FreezeManifest {
    /// [`FORMAT`].
    pub format: u32,
    /// The release that wrote it.
    pub ryokan: String,
    /// Its id.
    pub id: FreezeId,
    /// Its group.
    pub group: GroupId,
    /// The group's name at that time.
    pub group_name: String,
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// Digest of the daemon's configuration; empty of earlier releases.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub configuration: String,
    /// Digests of those sections of it that were set, by name; `None` of earlier releases.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sections: Option<BTreeMap<String, String>>,
    /// Of a safety freeze: the members that the restore after it changed, and an undo brings back. Empty: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changed: Vec<String>,
    /// Where it was sealed, if it came in a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<portable::FreezeOrigin>,
    /// The members.
    pub parts: Vec<Part>,
}

/// Why bytes are not a usable manifest of a freeze.
#[derive(Debug, thiserror::Error)]
pub enum FreezeManifestError {
    /// The bytes are malformed.
    #[error("the manifest of the freeze cannot be read: {0}")]
    Malformed(String),
    /// The format belongs to another release.
    #[error("the manifest of the freeze has format {0}; this release reads format {FORMAT} only")]
    UnknownFormat(u32),
    /// It is too large.
    #[error("the manifest of the freeze has more than {} bytes", limits::FREEZE_MANIFEST_BYTES)]
    TooLarge,
}

impl FreezeManifest {
    /// Encodes the manifest.
    ///
    /// # Errors
    /// `TooLarge`.
    pub fn encode(&self) -> Result<Vec<u8>, FreezeManifestError> {
        let bytes = serde_json::to_vec(self).map_err(|error| FreezeManifestError::Malformed(error.to_string()))?;
        if bytes.len() > limits::FREEZE_MANIFEST_BYTES { Err(FreezeManifestError::TooLarge) } else { Ok(bytes) }
    }

    /// Decodes a manifest.
    ///
    /// # Errors
    /// `Malformed`, `UnknownFormat`, `TooLarge`.
    pub fn decode(bytes: &[u8]) -> Result<FreezeManifest, FreezeManifestError> {
        #[derive(Deserialize)]
        struct Start {
            format: u32,
        }
        let wrong = |error: serde_json::Error| FreezeManifestError::Malformed(error.to_string());
        if bytes.len() > limits::FREEZE_MANIFEST_BYTES {
            return Err(FreezeManifestError::TooLarge);
        }
        let Start { format } = serde_json::from_slice(bytes).map_err(wrong)?;
        match format {
            FORMAT => serde_json::from_slice(bytes).map_err(wrong),
            other => Err(FreezeManifestError::UnknownFormat(other)),
        }
    }

    /// The objects that it names, without those of trees. Those of its kernels belong to their checkpoints.
    pub fn objects(&self) -> Vec<Digest> {
        let of = |part: &Part| -> Vec<Digest> {
            match &part.captured {
                Captured::Kernel { .. } => Vec::new(),
                Captured::Repository { part, .. } => part.packs(),
                Captured::Database { part, .. } => match part {
                    DatabasePart::Whole { image, .. } => vec![*image],
                    DatabasePart::Absent => Vec::new(),
                    DatabasePart::Damaged { files } => files.iter().map(|(_, digest, _)| *digest).collect(),
                },
                Captured::Directory { .. } | Captured::Server { .. } => Vec::new(),
                Captured::Command { data, .. } => vec![*data],
                Captured::Postgres { part, .. } => part.image.into_iter().collect(),
            }
        };
        let origin = self.origin.iter().map(|origin| origin.manifest);
        origin.chain(self.parts.iter().flat_map(of)).collect()
    }

    /// The file trees that it names.
    pub fn trees(&self) -> Vec<Digest> {
        let of = |part: &Part| match part.captured {
            Captured::Directory { part: DirectoryPart { tree, .. }, .. } => tree,
            Captured::Server { part: ServerPart { tree, .. }, .. } => tree,
            Captured::Kernel { .. }
            | Captured::Repository { .. }
            | Captured::Database { .. }
            | Captured::Command { .. }
            | Captured::Postgres { .. } => None,
        };
        self.parts.iter().filter_map(of).collect()
    }

    /// The checkpoints that it needs.
    pub fn checkpoints(&self) -> Vec<(KernelId, CheckpointId)> {
        let of = |part: &Part| match part.captured {
            Captured::Kernel { kernel, checkpoint, .. } => Some((kernel, checkpoint)),
            Captured::Repository { .. }
            | Captured::Database { .. }
            | Captured::Directory { .. }
            | Captured::Command { .. }
            | Captured::Postgres { .. }
            | Captured::Server { .. } => None,
        };
        self.parts.iter().filter_map(of).collect()
    }
}
