//! What git's own files say about the present commit, parsed without git.
//!
//! The files come from untrusted workspaces: every name and size is checked, and nothing that they name is executed or
//! followed outside of the directory that the caller reads.

use serde::{Deserialize, Serialize};

use super::workspace_database::WorkspaceDatabase;
use crate::core::ids::Digest;
use crate::core::info::McpTransport;
use crate::core::limits;

/// An immutable commit id: 40 or 64 hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CommitId(String);

/// Text that is no commit id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotACommit {
    /// Something else.
    #[error("{0:?} is not a commit id: expected 40 or 64 hexadecimal digits")]
    Text(String),
    /// A Change ID of jj.
    #[error("{0:?} is a Change ID of jj: it names a commit that may be rewritten; give its Commit ID")]
    ChangeId(String),
}

impl CommitId {
    /// As text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the displayed form.
    pub fn short(&self) -> &str {
        &self.0[..10]
    }
}

impl std::str::FromStr for CommitId {
    type Err = NotACommit;

    fn from_str(text: &str) -> Result<CommitId, NotACommit> {
        let digits = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        match digits && (text.len() == 40 || text.len() == 64) {
            true => Ok(CommitId(text.to_owned())),
            // jj writes them with the last letters of the alphabet, so that they are no commit ids.
            false if text.len() == 32 && text.bytes().all(|byte| matches!(byte, b'k'..=b'z')) => {
                Err(NotACommit::ChangeId(text.to_owned()))
            }
            false => Err(NotACommit::Text(text.chars().take(80).collect())),
        }
    }
}

impl TryFrom<String> for CommitId {
    type Error = NotACommit;

    fn try_from(text: String) -> Result<CommitId, NotACommit> {
        text.parse()
    }
}

impl From<CommitId> for String {
    fn from(id: CommitId) -> String {
        id.0
    }
}

impl std::fmt::Display for CommitId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// The present commit of a repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// The commit.
    pub commit: CommitId,
    /// The branch, such as `main`; `None`: detached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub branch: Option<String>,
}

/// A repository in the workspace of a kernel, as its checkpoint holds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepositoryLock {
    /// Its directory within the workspace; `.` is the workspace itself.
    pub path: String,
    /// Its commit; `None`: it has none yet, or its files do not say.
    #[serde(flatten)]
    pub head: Option<Head>,
    /// Why there is no commit.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
    /// The index (`.git/index`): staged work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<Digest>,
    /// The directory with everything in it: committed, uncommitted and untracked files.
    pub files: Digest,
    /// Where its `.git` file leads; `None`: it has a `.git` directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub linked: Option<Linked>,
}

/// A repository whose `.git` is a file that names a directory of another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Linked {
    /// What it is.
    pub kind: LinkedKind,
    /// The other repository's directory within the workspace; empty: not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub of: String,
}

/// What a repository is to the one that holds its `.git` directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LinkedKind {
    /// A submodule: it has its own history.
    Submodule,
    /// A linked work tree: it shares history and branches.
    Worktree,
    /// Its `.git` leads out of the workspace, or nowhere.
    Elsewhere,
}

impl LinkedKind {
    /// By name.
    pub const fn name(self) -> &'static str {
        match self {
            LinkedKind::Submodule => "submodule",
            LinkedKind::Worktree => "worktree",
            LinkedKind::Elsewhere => "elsewhere",
        }
    }
}

/// Where a path in a file of git leads, from the directory `from` of a workspace; `None`: out of the workspace. Names only:
/// no link is followed.
pub fn resolve(from: &str, named: &str) -> Option<String> {
    let (from, named) = match named.strip_prefix('/') {
        Some(_) => ("", named.strip_prefix("/workspace")?.strip_prefix('/')?),
        None => (from, named),
    };
    let mut parts: Vec<&str> = Vec::new();
    for part in from.split('/').chain(named.split('/')) {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// Files in which package managers record the versions of dependencies.
pub const DEPENDENCY_LOCKS: [&str; 20] = [
    "Cargo.lock",
    "Gemfile.lock",
    "Package.resolved",
    "Pipfile.lock",
    "bun.lock",
    "bun.lockb",
    "composer.lock",
    "deno.lock",
    "flake.lock",
    "go.sum",
    "gradle.lockfile",
    "mix.lock",
    "npm-shrinkwrap.json",
    "package-lock.json",
    "packages.lock.json",
    "pdm.lock",
    "pnpm-lock.yaml",
    "poetry.lock",
    "uv.lock",
    "yarn.lock",
];

/// A lock file of a package manager.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DependencyLock {
    /// Its path within the workspace or the repository.
    pub path: String,
    /// Of its content: `git:` with git's id, or `blake3:`.
    pub digest: String,
}

/// An MCP server of a kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct McpLock {
    /// Its name.
    pub name: String,
    /// Of the program with its arguments, or of the address; and of the names of variables or headers.
    pub digest: String,
}

impl McpLock {
    /// A server. The values of variables and headers may be secret: they are left out.
    pub fn new(name: &str, transport: &McpTransport) -> McpLock {
        let mut hash = blake3::Hasher::new();
        let mut add = |text: &str| {
            hash.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
        };
        match transport {
            McpTransport::Stdio { command, args, env } => {
                ["stdio", command.as_str()].into_iter().for_each(&mut add);
                args.iter().for_each(|arg| add(arg));
                env.iter().for_each(|(name, _)| add(name));
            }
            McpTransport::Http { url, headers } => {
                ["http", url.as_str()].into_iter().for_each(&mut add);
                headers.iter().for_each(|(name, _)| add(name));
            }
        }
        McpLock { name: name.to_owned(), digest: format!("blake3:{}", hash.finalize().to_hex()) }
    }
}

/// The revisions in the workspace of a kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Revisions {
    /// Its repositories.
    pub repositories: Vec<RepositoryLock>,
    /// Its lock files.
    pub dependencies: Vec<DependencyLock>,
    /// Its SQLite databases.
    pub databases: Vec<WorkspaceDatabase>,
}

/// Finds the present commit. `read` returns a file of the repository's `.git` directory, at most that many bytes, or
/// `None` if it is no regular file of that size.
///
/// # Errors
/// Why the files do not name a commit.
pub fn head<E>(mut read: impl FnMut(&str, u64) -> Result<Option<Vec<u8>>, E>) -> Result<Result<Head, &'static str>, E> {
    let mut name = String::from("HEAD");
    let mut branch = None;
    for _ in 0..=limits::GIT_REFERENCE_HOPS {
        let text = match read(&name, limits::GIT_REFERENCE_BYTES)? {
            Some(bytes) => bytes,
            None if name == "HEAD" => return Ok(Err("there is no HEAD")),
            None => {
                let packed = read("packed-refs", limits::GIT_PACKED_BYTES)?.unwrap_or_default();
                return Ok(packed_reference(&packed, &name)
                    .map(|commit| Head { commit, branch })
                    .ok_or("the branch has no commit"));
            }
        };
        let Ok(text) = std::str::from_utf8(&text) else { return Ok(Err("a reference is not text")) };
        let text = text.trim_end();
        match text.strip_prefix("ref: ").map(str::trim_start) {
            Some(target) if is_reference(target) => {
                target.clone_into(&mut name);
                branch = Some(target.strip_prefix("refs/heads/").unwrap_or(target).to_owned());
            }
            Some(_) => return Ok(Err("a reference has an invalid name")),
            None => {
                return Ok(text.parse().map(|commit| Head { commit, branch }).map_err(|_| "a reference is malformed"));
            }
        }
    }
    Ok(Err("too many references lead to one another"))
}

/// Whether a name is safe as a path beneath `.git`.
fn is_reference(name: &str) -> bool {
    let part = |part: &str| !part.is_empty() && part != "." && part != ".." && !part.ends_with(".lock");
    name.len() <= 1024
        && name.starts_with("refs/")
        && name.split('/').all(part)
        && !name.chars().any(|c| c.is_control() || "\\ ~^:?*[".contains(c))
}

fn packed_reference(packed: &[u8], name: &str) -> Option<CommitId> {
    packed.split(|byte| *byte == b'\n').find_map(|line| {
        let (id, found) = std::str::from_utf8(line).ok()?.split_once(' ')?;
        if found.trim_end() == name { id.parse().ok() } else { None }
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::convert::Infallible;

    use super::*;

    const A: &str = "00112233445566778899aabbccddeeff00112233";

    fn read(files: &[(&str, &str)]) -> Result<Head, &'static str> {
        let files: BTreeMap<&str, &str> = files.iter().copied().collect();
        let get = |name: &str, most: u64| {
            let found = files.get(name).filter(|text| text.len() as u64 <= most);
            Ok::<_, Infallible>(found.map(|text| text.as_bytes().to_vec()))
        };
        head(get).unwrap_or_else(|never| match never {})
    }

    #[test]
    fn head_is_found() {
        let commit: CommitId = A.parse().expect("a commit");
        let main = Ok(Head { commit: commit.clone(), branch: Some("main".into()) });
        let line = format!("{A}\n");
        assert_eq!(read(&[("HEAD", "ref: refs/heads/main\n"), ("refs/heads/main", &line)]), main);
        let packed =
            format!("# pack-refs with: peeled\n{} refs/heads/mainly\n{A} refs/heads/main\n^{A}\n", "1".repeat(40));
        assert_eq!(read(&[("HEAD", "ref: refs/heads/main"), ("packed-refs", &packed)]), main);
        assert_eq!(read(&[("HEAD", &line)]), Ok(Head { commit, branch: None }));
    }

    /// Each would make a careless reader leave the directory, loop, or take a name for a commit.
    #[test]
    fn hostile_heads_are_refused() {
        let huge = "a".repeat(limits::GIT_REFERENCE_BYTES as usize + 1);
        for head in [
            "",
            "ref: ",
            "ref: refs/heads/../../../etc/passwd",
            "ref: /etc/passwd",
            "ref: refs//heads",
            "ref: HEAD",
            "ref: refs/heads/a b",
            "ref: refs/heads/x.lock",
            "ref: refs/heads/a\u{1}",
            "main",
            "0011",
            &A.to_uppercase(),
            &huge,
        ] {
            assert!(read(&[("HEAD", head)]).is_err(), "{head:?}");
        }
        assert!(read(&[("HEAD", "ref: refs/a"), ("refs/a", "ref: refs/b"), ("refs/b", "ref: refs/a")]).is_err());
        assert!(read(&[("HEAD", "ref: refs/heads/new")]).is_err());
    }

    #[test]
    fn git_files_stay_inside() {
        for (from, named, leads) in [
            ("a/lib", "../.git/modules/lib", Some("a/.git/modules/lib")),
            (".", ".git/modules/lib", Some(".git/modules/lib")),
            ("a", "/workspace/b/.git/worktrees/a", Some("b/.git/worktrees/a")),
            ("a", "../../b", None),
            ("a", "/etc", None),
            ("a", "/workspaces/b", None),
            ("a", "/workspace/../etc", None),
        ] {
            assert_eq!(resolve(from, named).as_deref(), leads, "{named} from {from}");
        }
    }

    #[test]
    fn change_ids_are_no_anchors() {
        let change = "kxryzmorwvpqtslnuyzmkxryzmorwvpq";
        assert_eq!(change.parse::<CommitId>(), Err(NotACommit::ChangeId(change.into())));
        for text in ["kxryzmor", &change.to_uppercase(), &change.replace('k', "a"), &A[..39]] {
            assert_eq!(text.parse::<CommitId>(), Err(NotACommit::Text(text.to_owned())));
        }
    }

    #[test]
    fn lock_entry_survives_storage() {
        let files = Digest::from_bytes([1; 32]);
        for head in [None, Some(Head { commit: A.parse().expect("a commit"), branch: None })] {
            let entry =
                RepositoryLock { path: "a".into(), head, note: String::new(), index: None, files, linked: None };
            let text = serde_json::to_string(&entry).expect("JSON");
            assert_eq!(serde_json::from_str::<RepositoryLock>(&text).expect("read back"), entry, "{text}");
        }
    }
}
