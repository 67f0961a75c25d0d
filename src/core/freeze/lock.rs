//! `ryokan.lock`: the revisions of a kernel's checkpoint or of a group, as text (docs/lock-format.md).

use serde::{Deserialize, Serialize};

use super::refs::RepositoryLock;
use super::{Captured, DatabasePart, Part};

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
    /// Kernels of the group.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kernel: Vec<LockedKernel>,
    /// Repositories.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repository: Vec<LockedRepository>,
    /// Databases of the group.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub database: Vec<LockedDatabase>,
}

/// A kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockedKernel {
    /// Its name in the group.
    pub name: String,
    /// The checkpoint that holds it.
    pub checkpoint: String,
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

impl Lock {
    /// The lock of a kernel's checkpoint.
    pub fn of_kernel(name: &str, checkpoint: &str, repositories: &[RepositoryLock]) -> Lock {
        let kernel = vec![LockedKernel { name: name.to_owned(), checkpoint: checkpoint.to_owned() }];
        let repository = repositories.iter().map(|one| inside(name, one)).collect();
        Lock {
            format: FORMAT,
            name: name.to_owned(),
            subject: "kernel".into(),
            kernel,
            repository,
            database: Vec::new(),
        }
    }

    /// The lock of a group.
    pub fn of_group(name: &str, parts: &[Part]) -> Lock {
        let mut lock = Lock { format: FORMAT, name: name.to_owned(), subject: "group".into(), ..Lock::default() };
        for part in parts {
            let name = part.name.clone();
            match &part.captured {
                Captured::Kernel { checkpoint, repositories, .. } => {
                    lock.repository.extend(repositories.iter().map(|one| inside(&name, one)));
                    lock.kernel.push(LockedKernel { name, checkpoint: checkpoint.to_string() });
                }
                Captured::Repository { path, part } => lock.repository.push(LockedRepository {
                    name,
                    path: path.clone(),
                    commit: part.head.commit.to_string(),
                    branch: part.head.branch.clone().unwrap_or_default(),
                    note: String::new(),
                    index: part.index_tree.to_string(),
                    files: part.work_tree.to_string(),
                    changed: Some(part.changed),
                    untracked: Some(part.untracked),
                }),
                Captured::Database { path, part } => {
                    let (state, revision) = match part {
                        DatabasePart::Whole { revision, .. } => ("whole", Some(revision)),
                        DatabasePart::Absent => ("absent", None),
                        DatabasePart::Damaged { .. } => ("damaged", None),
                    };
                    lock.database.push(LockedDatabase {
                        name,
                        path: path.clone(),
                        state: state.into(),
                        user_version: revision.map(|one| one.user_version),
                        schema: revision.map(|one| one.schema.clone()).unwrap_or_default(),
                    });
                }
            }
        }
        lock
    }

    /// The text.
    pub fn text(&self) -> String {
        // Every field is a number, a text or a table of these.
        toml::to_string(self).unwrap_or_default()
    }

    /// How this state differs from an earlier lock, for people.
    pub fn differences(&self, before: &Lock) -> Vec<String> {
        let mut reported = Vec::new();
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
        }
        for then in &before.database {
            let Some(now) = self.database.iter().find(|now| now.name == then.name) else {
                reported.push(format!("database {} is gone", then.name));
                continue;
            };
            if (&now.state, now.user_version, &now.schema) != (&then.state, then.user_version, &then.schema) {
                reported.push(format!("database {} has another schema", then.name));
            }
        }
        reported
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
    }
}
