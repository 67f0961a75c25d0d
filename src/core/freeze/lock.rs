//! `ryokan.lock`: the revisions of a kernel's checkpoint or of a group, as text (docs/lock-format.md).

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::cost::Storage;
use super::locked_submodules::{self, LockedSubmodule};
use super::refs::{DependencyLock, LinkedKind, McpLock, RepositoryLock};
use super::workspace_database::WorkspaceDatabase;
use super::{Captured, DatabasePart, KernelRevision, Part};
use crate::core::ids::Digest;
use crate::core::snapshot::image_version;

/// Format of the text that this release writes.
pub const FORMAT: u32 = 1;

/// The lock of a kernel or of a group.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lock {
    /// [`FORMAT`].
    pub format: u32,
    /// The kernel's or the group's name.
    pub name: String,
    /// `kernel` or `group`.
    pub subject: String,
    /// Digest of the daemon's configuration; absent: not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub configuration: String,
    /// Digests of those sections of it that are set, by name; absent: not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sections: Option<BTreeMap<String, String>>,
    /// Kernels of the group.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kernel: Vec<LockedKernel>,
    /// Repositories.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repository: Vec<LockedRepository>,
    /// Databases of the group.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub database: Vec<LockedDatabase>,
    /// Directories of the group.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub directory: Vec<LockedDirectory>,
    /// Command sources of the group; of the present state, those whose revision is known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<LockedCommand>,
    /// Lock files of package managers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dependencies: Vec<LockedDependencies>,
    /// MCP servers of kernels.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mcp: Vec<LockedMcp>,
    /// How members of a group were captured; absent for the present state.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub storage: Vec<LockedStorage>,
}

/// An MCP server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockedMcp {
    /// Name of the member or of the kernel.
    pub name: String,
    /// Name of the server.
    pub server: String,
    /// Of its program or address, without values of variables and headers.
    pub digest: String,
}

/// How a member was captured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockedStorage {
    /// Its name in the group.
    pub name: String,
    /// What held its content during the pause.
    pub driver: String,
    /// The program or the kernel that the driver used, with its version; absent: not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub version: String,
    /// The file system, with its id; absent: not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub file_system: String,
    /// What the content depends on there, for people; absent: not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub parameters: String,
}

/// A kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockedKernel {
    /// Its name in the group.
    pub name: String,
    /// The checkpoint that holds it; absent for the present state.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub checkpoint: String,
    /// Its engine.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub engine: String,
    /// Version of its interpreter; absent: not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub version: String,
    /// The release of ryokan, to which the engine's driver belongs.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub ryokan: String,
    /// Version of the image below the workspace; absent: none.
    #[serde(default, skip_serializing_if = "String::is_empty", deserialize_with = "image_version")]
    pub image: String,
    /// Digest of all files of the workspace.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub files: String,
}

/// A lock file of a package manager.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockedDependencies {
    /// Name of the member or of the kernel.
    pub name: String,
    /// Its path within the repository or the workspace.
    pub path: String,
    /// Of its content: `git:` with git's id, or `blake3:`.
    pub digest: String,
}

/// A repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockedRepository {
    /// Its name in the group, or the name of the kernel in whose workspace it is.
    pub name: String,
    /// Its directory, on the host or within the workspace.
    pub path: String,
    /// Its commit; empty: none.
    pub commit: String,
    /// Its branch; empty: detached.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub branch: String,
    /// Why there is no commit.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
    /// Digest of the staged state.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub index: String,
    /// Digest of the files.
    pub files: String,
    /// Files that differ from the commit; absent for a repository in a workspace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub changed: Option<u64>,
    /// Files among them that git does not track.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub untracked: Option<u64>,
    /// Directories of linked work trees, which are not captured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub worktrees: Vec<String>,
    /// Of a repository whose `.git` is a file: `worktree`, or in a workspace also `submodule` or `elsewhere`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub kind: String,
    /// The directory that a linked work tree shares; in a workspace, of the repository that holds its `.git`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub of: String,
    /// Submodules, those inside of others too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub submodule: Vec<LockedSubmodule>,
}

/// A database.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockedDatabase {
    /// Its name in the group.
    pub name: String,
    /// Its file.
    pub path: String,
    /// `whole`, `absent` or `damaged`.
    pub state: String,
    /// The application's own schema number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_version: Option<i64>,
    /// Digest of the schema.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub schema: String,
}

/// A directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockedDirectory {
    /// Its name in the group.
    pub name: String,
    /// Its path.
    pub path: String,
    /// Digest of all files; empty: the directory is missing.
    pub files: String,
}

/// A command source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockedCommand {
    /// Its name in the group.
    pub name: String,
    /// Its name in the configuration.
    pub source: String,
    /// Digest of its data; absent for the present state.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub data: String,
    /// Hash of what its program says to identify the data; absent: there is no such program.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub revision: String,
}

impl Lock {
    /// A lock without entries.
    pub fn new(name: &str, subject: &str) -> Lock {
        Lock { format: FORMAT, name: name.to_owned(), subject: subject.to_owned(), ..Lock::default() }
    }

    /// The lock of a group.
    pub fn of_group(name: &str, parts: &[Part]) -> Lock {
        let mut lock = Lock::new(name, "group");
        parts.iter().for_each(|part| lock.add(part));
        lock
    }

    /// Adds a kernel; `checkpoint` empty: its present state.
    pub fn add_kernel(
        &mut self,
        name: &str,
        checkpoint: String,
        repositories: &[RepositoryLock],
        revision: &KernelRevision,
    ) {
        let KernelRevision { engine, version, ryokan, image, files, dependencies, databases, mcp } = revision.clone();
        let locked = |McpLock { name: server, digest }| LockedMcp { name: name.to_owned(), server, digest };
        self.mcp.extend(mcp.into_iter().map(locked));
        let files = files.map(|files| files.to_string()).unwrap_or_default();
        self.kernel.push(LockedKernel { name: name.to_owned(), checkpoint, engine, version, ryokan, image, files });
        self.repository.extend(repositories.iter().map(|one| inside(name, one)));
        self.add_dependencies(name, dependencies);
        self.database.extend(databases.into_iter().map(|WorkspaceDatabase { path, user_version }| LockedDatabase {
            name: name.to_owned(),
            path,
            state: "whole".into(),
            user_version: Some(user_version),
            schema: String::new(),
        }));
    }

    fn add_dependencies(&mut self, name: &str, found: Vec<DependencyLock>) {
        let locked = |DependencyLock { path, digest }| LockedDependencies { name: name.to_owned(), path, digest };
        self.dependencies.extend(found.into_iter().map(locked));
    }

    /// Adds a member of a group.
    pub fn add(&mut self, part: &Part) {
        let name = part.name.clone();
        if !part.driver.is_empty() {
            let (name, driver) = (name.clone(), part.driver.clone());
            let Storage { version, file_system, parameters } = part.storage.clone();
            self.storage.push(LockedStorage { name, driver, version, file_system, parameters });
        }
        match &part.captured {
            Captured::Kernel { checkpoint, repositories, revision, .. } => {
                self.add_kernel(&name, checkpoint.to_string(), repositories, revision);
            }
            Captured::Repository { path, part } => {
                self.add_dependencies(&name, part.dependencies.clone());
                self.repository.push(LockedRepository {
                    name,
                    path: path.clone(),
                    commit: part.head.commit.to_string(),
                    branch: part.head.branch.clone().unwrap_or_default(),
                    note: String::new(),
                    index: part.index_tree.to_string(),
                    files: part.work_tree.to_string(),
                    changed: Some(part.changed),
                    untracked: Some(part.untracked),
                    worktrees: part.worktrees.clone(),
                    kind: part.linked_to.as_ref().map(|_| LinkedKind::Worktree.name().to_owned()).unwrap_or_default(),
                    of: part.linked_to.clone().unwrap_or_default(),
                    submodule: locked_submodules::of(part),
                });
            }
            Captured::Database { path, part } => {
                let (state, revision) = match part {
                    DatabasePart::Whole { revision, .. } => ("whole", Some(revision)),
                    DatabasePart::Absent => ("absent", None),
                    DatabasePart::Damaged { .. } => ("damaged", None),
                };
                self.database.push(LockedDatabase {
                    name,
                    path: path.clone(),
                    state: state.into(),
                    user_version: revision.map(|one| one.user_version),
                    schema: revision.map(|one| one.schema.clone()).unwrap_or_default(),
                });
            }
            Captured::Postgres { connection, part } => self.database.push(LockedDatabase {
                name,
                path: connection.clone(),
                state: if part.revision.is_some() { "whole" } else { "absent" }.into(),
                user_version: None,
                schema: part.revision.as_ref().map(|one| one.schema.clone()).unwrap_or_default(),
            }),
            Captured::Server { server, part } => self.database.push(LockedDatabase {
                name,
                path: server.clone(),
                state: match (part.tree, &part.revision) {
                    (_, Some(_)) => "whole",
                    (Some(_), None) => "damaged",
                    (None, None) => "absent",
                }
                .into(),
                user_version: None,
                schema: part.revision.as_ref().map(|one| one.schema.clone()).unwrap_or_default(),
            }),
            Captured::Directory { path, part } => {
                let files = part.tree.map(|tree| tree.to_string()).unwrap_or_default();
                self.directory.push(LockedDirectory { name, path: path.clone(), files });
            }
            Captured::Command { source, data, bytes: _, revision } => {
                let is_stored = *data != Digest::from_bytes([0; 32]);
                let data = if is_stored { data.to_string() } else { String::new() };
                self.command.push(LockedCommand { name, source: source.clone(), data, revision: revision.clone() });
            }
        }
    }

    /// The text.
    pub fn text(&self) -> String {
        // Every field is a number, a text or a table of these.
        toml::to_string(self).unwrap_or_default()
    }

    /// What a restore does not bring back: configuration, engines, images and MCP servers.
    pub fn environment(&self) -> Lock {
        let without_content = |kernel: &LockedKernel| LockedKernel { files: String::new(), ..kernel.clone() };
        Lock {
            configuration: self.configuration.clone(),
            sections: self.sections.clone(),
            kernel: self.kernel.iter().map(without_content).collect(),
            mcp: self.mcp.clone(),
            ..Lock::new(&self.name, &self.subject)
        }
    }

    /// The lock files of package managers alone.
    pub fn dependencies(&self) -> Lock {
        Lock { dependencies: self.dependencies.clone(), ..Lock::new(&self.name, &self.subject) }
    }

    /// How this state differs from an earlier lock, for people.
    pub fn differences(&self, before: &Lock) -> Vec<String> {
        let mut reported = Vec::new();
        self.kernel_differences(before, &mut reported);
        self.dependency_differences(before, &mut reported);
        self.mcp_differences(before, &mut reported);
        if ![&self.configuration, &before.configuration].into_iter().any(String::is_empty)
            && self.configuration != before.configuration
        {
            reported.push(format!("the daemon has another configuration{}", self.other_sections(before)));
        }
        for then in &before.repository {
            let now = self.repository.iter().find(|now| (&now.name, &now.path) == (&then.name, &then.path));
            match now {
                None => reported.push(format!("repository {} ({}) is gone", then.name, then.path)),
                Some(now) if now.commit != then.commit => {
                    reported.push(format!(
                        "repository {} is at {}, not at {}",
                        then.name,
                        start(&now.commit),
                        start(&then.commit)
                    ));
                }
                Some(now) if now.files != then.files || now.index != then.index => {
                    reported.push(format!("repository {} has other files", then.name));
                }
                Some(now) if now.branch != then.branch => {
                    reported.push(format!("repository {} is on another branch", then.name))
                }
                Some(_) => {}
            }
            if let Some(now) = now {
                locked_submodules::differences(&then.name, &now.submodule, &then.submodule, &mut reported);
                if now.worktrees != then.worktrees {
                    reported.push(format!("repository {} has other linked work trees", then.name));
                }
            }
        }
        for then in &before.database {
            // A kernel may have several.
            let is_same =
                |now: &&LockedDatabase| now.name == then.name && (!then.schema.is_empty() || now.path == then.path);
            let Some(now) = self.database.iter().find(is_same) else {
                reported.push(format!("database {} is gone", then.name));
                continue;
            };
            if (&now.state, now.user_version, &now.schema) != (&then.state, then.user_version, &then.schema) {
                reported.push(format!("database {} has another schema", then.name));
            }
        }
        for then in &before.directory {
            match self.directory.iter().find(|now| now.name == then.name) {
                None => reported.push(format!("directory {} is gone", then.name)),
                Some(now) if now.files != then.files => {
                    reported.push(format!("directory {} has other files", then.name));
                }
                Some(_) => {}
            }
        }
        for then in before.command.iter().filter(|then| !then.revision.is_empty()) {
            let is_same = |now: &&LockedCommand| now.name == then.name && !now.revision.is_empty();
            if self.command.iter().find(is_same).is_some_and(|now| now.revision != then.revision) {
                reported.push(format!("source {} has other data", then.name));
            }
        }
        reported
    }
}

impl Lock {
    /// The sections of the configuration that differ, as far as both are known.
    fn other_sections(&self, before: &Lock) -> String {
        let (Some(now), Some(then)) = (&self.sections, &before.sections) else { return String::new() };
        let names: BTreeSet<&String> = now.keys().chain(then.keys()).collect();
        let other: Vec<String> = names
            .into_iter()
            .filter(|name| now.get(*name) != then.get(*name))
            .map(|name| format!("[{name}]"))
            .collect();
        if other.is_empty() { String::new() } else { format!(" in {}", other.join(", ")) }
    }

    fn kernel_differences(&self, before: &Lock, reported: &mut Vec<String>) {
        for then in &before.kernel {
            let Some(now) = self.kernel.iter().find(|now| now.name == then.name) else {
                reported.push(format!("kernel {} is gone", then.name));
                continue;
            };
            let name = &then.name;
            for (what, now, then) in [
                ("engine", &now.engine, &then.engine),
                ("release of ryokan", &now.ryokan, &then.ryokan),
                ("image", &now.image, &then.image),
            ] {
                if now != then {
                    reported.push(format!("kernel {name} has {what} {now:?}, not {then:?}"));
                }
            }
            // Without a worker so far it is not known.
            if ![&now.version, &then.version].into_iter().any(String::is_empty) && now.version != then.version {
                reported.push(format!("kernel {name} has {} {}, not {}", now.engine, now.version, then.version));
            }
            if now.files != then.files {
                reported.push(format!("kernel {} has other files", then.name));
            }
        }
    }

    fn mcp_differences(&self, before: &Lock, reported: &mut Vec<String>) {
        let of = |lock: &Lock| -> BTreeMap<(String, String), String> {
            lock.mcp.iter().map(|one| ((one.name.clone(), one.server.clone()), one.digest.clone())).collect()
        };
        let (now, then) = (of(self), of(before));
        for ((name, server), digest) in &then {
            match now.get(&(name.clone(), server.clone())) {
                None => reported.push(format!("MCP server {server} of {name} is gone")),
                Some(now) if now != digest => reported.push(format!("MCP server {server} of {name} is another one")),
                Some(_) => {}
            }
        }
        let new = now.keys().filter(|key| !then.contains_key(*key));
        reported.extend(new.map(|(name, server)| format!("MCP server {server} of {name} is new")));
    }

    fn dependency_differences(&self, before: &Lock, reported: &mut Vec<String>) {
        let key = |one: &LockedDependencies| (one.name.clone(), one.path.clone());
        let of = |lock: &Lock| -> BTreeMap<(String, String), String> {
            lock.dependencies.iter().map(|one| (key(one), one.digest.clone())).collect()
        };
        let (now, then) = (of(self), of(before));
        for ((name, path), digest) in &then {
            match now.get(&(name.clone(), path.clone())) {
                None => reported.push(format!("{path} of {name} is gone")),
                Some(now) if now != digest => reported.push(format!("{path} of {name} has other content")),
                Some(_) => {}
            }
        }
        let new = now.keys().filter(|key| !then.contains_key(*key));
        reported.extend(new.map(|(name, path)| format!("{path} of {name} is new")));
    }
}

fn start(commit: &str) -> &str {
    commit.get(..10).unwrap_or("no commit")
}

fn inside(kernel: &str, lock: &RepositoryLock) -> LockedRepository {
    LockedRepository {
        name: kernel.to_owned(),
        path: lock.path.clone(),
        commit: lock.head.as_ref().map(|head| head.commit.to_string()).unwrap_or_default(),
        branch: lock.head.as_ref().and_then(|head| head.branch.clone()).unwrap_or_default(),
        note: lock.note.clone(),
        index: lock.index.map(|digest| digest.to_string()).unwrap_or_default(),
        files: lock.files.to_string(),
        changed: None,
        untracked: None,
        worktrees: Vec::new(),
        kind: lock.linked.as_ref().map(|linked| linked.kind.name().to_owned()).unwrap_or_default(),
        of: lock.linked.as_ref().map(|linked| linked.of.clone()).unwrap_or_default(),
        submodule: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::info::McpTransport;

    fn lock(server: &str, arg: &str, secret: &str, configuration: &str) -> Lock {
        let env = vec![("TOKEN".to_owned(), secret.to_owned())];
        let transport = McpTransport::Stdio { command: "/bin/server".into(), args: vec![arg.into()], env };
        let mcp = vec![McpLock::new(server, &transport)];
        let mut lock = Lock { configuration: configuration.into(), ..Lock::new("shop", "group") };
        lock.add_kernel("agent", String::new(), &[], &KernelRevision { mcp, ..KernelRevision::default() });
        lock
    }

    #[test]
    fn servers_and_configuration_are_compared() {
        let before = lock("files", "one", "secret", "a");
        assert!(before.text().contains("[[mcp]]") && !before.text().contains("secret"));
        let differences = |now: Lock| now.differences(&before);
        assert_eq!(differences(lock("files", "one", "another secret", "a")), [""; 0]);
        assert_eq!(differences(lock("files", "two", "secret", "")), ["MCP server files of agent is another one"]);
        assert_eq!(
            differences(lock("search", "one", "secret", "b")),
            [
                "MCP server files of agent is gone",
                "MCP server search of agent is new",
                "the daemon has another configuration"
            ]
        );
        let set = |name: &str, digest: &str| Some([(name.to_owned(), digest.to_owned())].into());
        let with = |lock: Lock, sections| Lock { sections, ..lock };
        let before = with(lock("files", "one", "secret", "a"), set("limits", "a"));
        for (sections, report) in
            [(set("limits", "b"), " in [limits]"), (set("mcp", "a"), " in [limits], [mcp]"), (None, "")]
        {
            let now = with(lock("files", "one", "secret", "b"), sections);
            assert!(now.text().parse::<toml::Table>().is_ok());
            assert_eq!(now.differences(&before), [format!("the daemon has another configuration{report}")]);
        }
    }
}
