//! The git repositories in a captured tree with their present commits, and the lock files of package managers.
//!
//! Reads objects of the store only, never the live files: nothing can be executed, and no link can be followed.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use super::TreeId;
use super::entry::{Content, Entry, Node};
use super::lookup::{Text, text};
use super::read::{self, Entries};
use crate::core::freeze::refs::{
    self, DEPENDENCY_LOCKS, DependencyLock, Linked, LinkedKind, RepositoryLock, Revisions,
};
use crate::core::freeze::workspace_database::{NAMES, WorkspaceDatabase, logged_version, user_version};
use crate::core::ids::Digest;
use crate::core::limits;
use crate::workspace::error::WorkspaceError;
use crate::workspace::objects::Objects;

/// Folders known to hold neither, with the depth to which they were searched.
#[derive(Debug, Default)]
pub struct Barren(HashSet<(Digest, usize)>);

/// Folders that are remembered.
const REMEMBERED: usize = 1 << 16;

/// Finds both to a depth of [`limits::REPOSITORY_DEPTH`], at most [`limits::LOCKED_REPOSITORIES`] and
/// [`limits::LOCKED_DEPENDENCIES`]. Lock files of installed packages are not listed.
///
/// # Errors
/// An object is missing, damaged or no tree.
pub fn revisions(objects: &dyn Objects, tree: TreeId, barren: &mut Barren) -> Result<Revisions, WorkspaceError> {
    let root = read::root(objects, tree)?;
    let Some(digest) = read::root_folder(&root) else { return Ok(Revisions::default()) };
    if barren.0.len() > REMEMBERED {
        barren.0.clear();
    }
    let mut search = Search { objects, barren, root: digest, found: Revisions::default(), folders: 0 };
    search.folder(digest, PathBuf::new(), limits::REPOSITORY_DEPTH)?;
    Ok(search.found)
}

struct Search<'a> {
    objects: &'a dyn Objects,
    barren: &'a mut Barren,
    /// The workspace.
    root: Digest,
    found: Revisions,
    folders: usize,
}

impl Search<'_> {
    /// Searches one folder; returns whether it was searched completely and holds none.
    fn folder(&mut self, digest: Digest, path: PathBuf, depth: usize) -> Result<bool, WorkspaceError> {
        if self.barren.0.contains(&(digest, depth)) {
            return Ok(true);
        }
        if self.folders >= limits::REPOSITORY_FOLDERS || self.found.repositories.len() >= limits::LOCKED_REPOSITORIES {
            return Ok(false);
        }
        self.folders += 1;
        let (mut entries, mut is_barren, mut below) = (Entries::of(self.objects, digest)?, true, Vec::new());
        while let Some(entry) = entries.take()? {
            let inner = match entry.node {
                Node::Folder { digest } => digest,
                Node::File { .. } if &*entry.name == b".git" => {
                    is_barren = false;
                    self.linked(digest, &entry.node, &path)?;
                    continue;
                }
                node @ Node::File { .. } => {
                    is_barren &= !self.database(digest, &path, &entry.name, &node)?;
                    let Node::File { content, .. } = node else { continue };
                    is_barren &= !self.dependency(&path, &entry.name, content);
                    continue;
                }
                _ => continue,
            };
            if &*entry.name == b".git" {
                is_barren = false;
                self.repository(digest, inner, &path)?;
            } else if depth > 0 {
                use std::os::unix::ffi::OsStrExt as _;
                below.push((inner, path.join(std::ffi::OsStr::from_bytes(&entry.name))));
            }
        }
        for (inner, path) in below {
            is_barren &= self.folder(inner, path, depth - 1)?;
        }
        if is_barren {
            self.barren.0.insert((digest, depth));
        }
        Ok(is_barren)
    }

    /// Lists a file if it is an SQLite database; returns whether it is one.
    fn database(&mut self, folder: Digest, path: &Path, name: &[u8], node: &Node) -> Result<bool, WorkspaceError> {
        let Ok(name) = std::str::from_utf8(name) else { return Ok(false) };
        if !NAMES.iter().any(|end| name.ends_with(end)) {
            return Ok(false);
        }
        let Some(version) = user_version(&self.start(node)?) else { return Ok(false) };
        let version = match self.file(folder, &format!("{name}-wal"))? {
            None => Some(version),
            // A log that is too large may say anything.
            Some(log) => match text(self.objects, &log.node, limits::LOCKED_LOG_BYTES)? {
                Text::Bytes(bytes) => Some(logged_version(&bytes).unwrap_or(version)),
                Text::Larger | Text::None => None,
            },
        };
        if let Some(user_version) = version
            && self.found.databases.len() < limits::LOCKED_DATABASES
        {
            let path = path.join(name).to_string_lossy().into_owned();
            self.found.databases.push(WorkspaceDatabase { path, user_version });
        }
        Ok(true)
    }

    /// The first bytes of a file.
    fn start(&self, node: &Node) -> Result<Vec<u8>, WorkspaceError> {
        let Node::File { size, content, .. } = node else { return Ok(Vec::new()) };
        Ok(match content {
            Content::Inline(bytes) => bytes.to_vec(),
            Content::Whole(digest) => self.objects.get(*digest, *size)?,
            Content::Map(digest) => match read::map(self.objects, *digest)?.pieces.first() {
                Some(piece) if piece.offset == 0 => self.objects.get(piece.digest, piece.length)?,
                _ => Vec::new(),
            },
        })
    }

    /// Lists a file if it is a lock file; returns whether it is one.
    fn dependency(&mut self, folder: &Path, name: &[u8], content: Content) -> bool {
        let Some(name) = DEPENDENCY_LOCKS.iter().find(|known| known.as_bytes() == name) else { return false };
        let is_installed = folder.components().any(|part| part.as_os_str() == "node_modules");
        if !is_installed && self.found.dependencies.len() < limits::LOCKED_DEPENDENCIES {
            let (path, digest) = (folder.join(name).to_string_lossy().into_owned(), digest_of(content));
            self.found.dependencies.push(DependencyLock { path, digest: format!("blake3:{digest}") });
        }
        true
    }

    fn repository(&mut self, files: Digest, git: Digest, path: &Path) -> Result<(), WorkspaceError> {
        self.add(files, (git, None), path, None)
    }

    /// Lists a submodule or a linked work tree, whose `.git` is a file. What the file names is untrusted.
    fn linked(&mut self, files: Digest, file: &Node, path: &Path) -> Result<(), WorkspaceError> {
        if self.found.repositories.len() >= limits::LOCKED_REPOSITORIES {
            return Ok(());
        }
        let here = path.to_string_lossy().into_owned();
        let named = self.line(file, "gitdir: ")?.and_then(|named| refs::resolve(&here, &named));
        let git = match &named {
            Some(named) => self.folder_at(named)?,
            None => None,
        };
        let (Some(named), Some(git)) = (named, git) else {
            self.found.repositories.push(RepositoryLock {
                path: if here.is_empty() { ".".into() } else { here },
                head: None,
                note: "its .git is not in the workspace".into(),
                index: None,
                files,
                linked: Some(Linked { kind: LinkedKind::Elsewhere, of: String::new() }),
            });
            return Ok(());
        };
        let directory = |before: &str| if before.is_empty() { ".".to_owned() } else { before.to_owned() };
        let common = match self.file(git, "commondir")? {
            Some(entry) => self.line(&entry.node, "")?.and_then(|common| refs::resolve(&named, &common)),
            None => None,
        };
        let (kind, of, shared) = match &common {
            Some(common) => {
                let of = if common == ".git" { Some("") } else { common.strip_suffix("/.git") };
                (LinkedKind::Worktree, of.map(directory), self.folder_at(common)?)
            }
            None => {
                let of = named.split_once(".git/modules/").map(|(before, _)| directory(before.trim_end_matches('/')));
                (LinkedKind::Submodule, of, None)
            }
        };
        self.add(files, (git, shared), path, Some(Linked { kind, of: of.unwrap_or_default() }))
    }

    /// Lists a repository. Of a linked work tree, `shared` has what the own directory lacks.
    fn add(
        &mut self,
        files: Digest,
        (git, shared): (Digest, Option<Digest>),
        path: &Path,
        linked: Option<Linked>,
    ) -> Result<(), WorkspaceError> {
        let found = refs::head(|name, most| {
            let entry = match (self.file(git, name)?, shared) {
                (None, Some(shared)) if name != "HEAD" => self.file(shared, name)?,
                (own, _) => own,
            };
            let Some(entry) = entry else { return Ok::<_, WorkspaceError>(None) };
            let Node::File { .. } = entry.node else { return Ok(None) };
            Ok(match text(self.objects, &entry.node, most)? {
                Text::Bytes(bytes) => Some(bytes),
                Text::Larger | Text::None => None,
            })
        })?;
        let index = match self.file(git, "index")?.map(|entry| entry.node) {
            Some(Node::File { content, .. }) => Some(digest_of(content)),
            _ => None,
        };
        let path = if path.as_os_str().is_empty() { ".".into() } else { path.to_string_lossy().into_owned() };
        let (head, note) = match found {
            Ok(head) => (Some(head), String::new()),
            Err(why) => (None, why.to_owned()),
        };
        self.found.repositories.push(RepositoryLock { path, head, note, index, files, linked });
        Ok(())
    }

    /// The only line of a small file, after `before`.
    fn line(&self, file: &Node, before: &str) -> Result<Option<String>, WorkspaceError> {
        let Node::File { .. } = file else { return Ok(None) };
        let Text::Bytes(bytes) = text(self.objects, file, limits::GIT_LINK_BYTES)? else { return Ok(None) };
        let text = std::str::from_utf8(&bytes).ok().and_then(|text| text.strip_prefix(before));
        Ok(text.map(|text| text.trim_end_matches('\n')).filter(|text| !text.contains('\n')).map(str::to_owned))
    }

    /// The folder of a path of plain names in the workspace.
    fn folder_at(&self, path: &str) -> Result<Option<Digest>, WorkspaceError> {
        Ok(match self.file(self.root, path)?.map(|entry| entry.node) {
            Some(Node::Folder { digest }) => Some(digest),
            _ => None,
        })
    }

    /// The entry of a path beneath a folder, of plain names only.
    fn file(&self, folder: Digest, path: &str) -> Result<Option<Entry>, WorkspaceError> {
        let (mut at, mut parts) = (folder, path.split('/').peekable());
        while let Some(part) = parts.next() {
            let Some(entry) = Entries::of(self.objects, at)?.seek(part.as_bytes())? else { return Ok(None) };
            match (parts.peek(), &entry.node) {
                (None, _) => return Ok(Some(entry)),
                (Some(_), Node::Folder { digest }) => at = *digest,
                (Some(_), _) => return Ok(None),
            }
        }
        Ok(None)
    }
}

/// Of a large file: of the list of its pieces.
fn digest_of(content: Content) -> Digest {
    match content {
        Content::Inline(bytes) => Digest::from_bytes(*blake3::hash(&bytes).as_bytes()),
        Content::Whole(digest) | Content::Map(digest) => digest,
    }
}
