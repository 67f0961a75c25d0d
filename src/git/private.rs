//! Files that no other user can read. Git knows only whether a file is executable, and makes it anew as one that everyone
//! may read.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};

use super::command::Call;
use super::marks::terminated;
use super::overwritten::Change;
use super::repository::{Repository, alternates, failed};
use crate::core::error::{Error, Result};
use crate::core::freeze::refs::CommitId;
use crate::core::limits;

/// The rights of other users.
const OF_OTHERS: u32 = 0o077;

/// Those of the files that no other user can read, by themselves or by a directory of the work tree `root`. Blocks.
fn private(root: &Path, files: impl Iterator<Item = PathBuf>) -> Vec<String> {
    let mut closed: HashMap<PathBuf, bool> = HashMap::new();
    let mode = |path: &Path| {
        fs::symlink_metadata(root.join(path)).ok().map(|meta| (meta.is_file(), meta.permissions().mode()))
    };
    let mut is_private = |path: &Path| {
        let Some((true, rights)) = mode(path) else { return false };
        let mut folders = path.ancestors().skip(1).filter(|folder| !folder.as_os_str().is_empty());
        rights & OF_OTHERS == 0
            || folders.any(|folder| {
                let look = || mode(folder).is_some_and(|(_, rights)| rights & OF_OTHERS == 0);
                *closed.entry(folder.to_owned()).or_insert_with(look)
            })
    };
    let found = files.filter(|path| is_private(path)).filter_map(|path| path.to_str().map(str::to_owned));
    let mut found: Vec<String> = found.take(limits::GIT_PRIVATE_FILES).collect();
    found.sort();
    found
}

/// Takes the rights of others from a file within a work tree. No link is followed: an imported freeze names any path.
fn close(root: &Path, path: &str) -> std::io::Result<()> {
    let (mut at, mut parts) = (root.to_owned(), Path::new(path).components().peekable());
    while let Some(part) = parts.next() {
        let Component::Normal(name) = part else { return Ok(()) };
        at.push(name);
        let Ok(meta) = fs::symlink_metadata(&at) else { return Ok(()) };
        match parts.peek() {
            Some(_) if meta.is_dir() => {}
            None if meta.is_file() && meta.permissions().mode() & OF_OTHERS != 0 => {
                return fs::set_permissions(&at, fs::Permissions::from_mode(meta.permissions().mode() & 0o700));
            }
            _ => return Ok(()),
        }
    }
    Ok(())
}

impl Repository {
    /// The private files among those that a comparison reported.
    pub(super) async fn private_among(&self, reported: &[u8]) -> Result<Vec<String>> {
        let (change, root) = (Change::read(reported), self.path().to_owned());
        let look = move || private(&root, change.added.into_iter().chain(change.modified));
        tokio::task::spawn_blocking(look).await.map_err(|error| Error::internal(error.to_string()))
    }

    /// Changes the files of the work tree, which are those of the index of the last reading, to a tree. Private files are
    /// never readable by others in between: they are written after the rest.
    pub(super) async fn check_out(&self, scratch: &Path, tree: &CommitId, private: &[String]) -> Result<()> {
        // Git compares a new link of this second with its object, which is apart.
        let (index, others) = (scratch.join("index"), alternates(&[&scratch.join("objects")]));
        let env = [("GIT_INDEX_FILE", &*index), ("GIT_ALTERNATE_OBJECT_DIRECTORIES", &*others)];
        let written = self.written_among(tree, private, &env).await?;
        let open = match written.is_empty() {
            true => tree.clone(),
            false => self.tree_without(scratch, tree, &written).await?,
        };
        self.ok(&["read-tree", "-m", "-u", open.as_str()], &env, b"").await?;
        if !written.is_empty() {
            let args = ["read-tree", "-m", "-u", tree.as_str()];
            self.git().ok(Call { args: &args, env: &env, is_private: true, ..self.call() }).await?;
        }
        let (root, private) = (self.path().to_owned(), private.to_vec());
        let close = move || private.iter().try_for_each(|path| close(&root, path).map_err(failed(&root.join(path))));
        tokio::task::spawn_blocking(close).await.map_err(|error| Error::internal(error.to_string()))?
    }

    /// Those of the private files that the change of an index to a tree writes, each followed by a NUL.
    async fn written_among(&self, tree: &CommitId, private: &[String], env: &[(&str, &Path)]) -> Result<Vec<u8>> {
        if private.is_empty() {
            return Ok(Vec::new());
        }
        let args = ["diff-index", "--cached", "--no-renames", "--name-only", "-z", tree.as_str()];
        let listed = self.ok(&args, env, b"").await?;
        let changed: HashSet<&[u8]> = listed.split(|byte| *byte == 0).collect();
        Ok(terminated(private.iter().map(String::as_str).filter(|path| changed.contains(path.as_bytes()))))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::super::test_repository::TestRepository;
    use super::*;

    #[tokio::test]
    async fn private_files_stay_private() {
        let code = TestRepository::with(&[("plain", "one")]);
        let rights = |name: &str| fs::metadata(code.place(name)).expect("there").permissions().mode() & 0o777;
        let set = |name: &str, mode| fs::set_permissions(code.place(name), fs::Permissions::from_mode(mode));
        let names = ["secret", "tool", "closed/key", "same", "plain"];
        names.iter().for_each(|name| code.write(name, "frozen"));
        for (name, mode) in [("secret", 0o600), ("tool", 0o700), ("closed", 0o700), ("same", 0o600)] {
            set(name, mode).expect("set");
        }
        let (others, frozen) = (rights("plain"), code.state().await);
        assert_eq!(frozen.marks.private, ["closed/key", "same", "secret", "tool"]);
        let same = fs::File::open(code.place("same")).expect("opened");
        fs::remove_dir_all(code.place("closed")).expect("removed");
        fs::remove_file(code.place("tool")).expect("removed");
        ["secret", "plain"].iter().for_each(|name| code.write(name, "later"));
        set("secret", 0o644).and_then(|()| set("same", 0o644)).expect("set");
        let later = code.state().await;
        code.switch(&frozen).await;
        assert_eq!(names.map(rights), [0o600, 0o700, 0o600, 0o600, others]);
        assert!(names.iter().all(|name| code.read(name).as_deref() == Some("frozen")));
        assert_eq!(code.state().await, frozen);
        assert_eq!(same.metadata().map(|meta| meta.nlink()).ok(), Some(1), "an unchanged file is not written");
        code.switch(&later).await;
        assert_eq!((code.read("secret").as_deref(), rights("plain")), (Some("later"), others));
    }

    /// A freeze from elsewhere may name any path.
    #[test]
    fn other_files_keep_their_rights() {
        let dir = tempfile::tempdir().expect("a folder");
        let root = dir.path().join("root");
        fs::create_dir(&root).expect("made");
        let outside = dir.path().join("outside");
        fs::write(&outside, "").expect("written");
        fs::set_permissions(&outside, fs::Permissions::from_mode(0o644)).expect("set");
        std::os::unix::fs::symlink("../outside", root.join("link")).expect("made");
        std::os::unix::fs::symlink("..", root.join("up")).expect("made");
        for path in ["../outside", "link", "up/outside", outside.to_str().expect("text"), "none", ""] {
            close(&root, path).expect("nothing to do");
        }
        assert_eq!(fs::metadata(&outside).expect("there").permissions().mode() & 0o777, 0o644);
    }

    /// Git trusts no time of a file that is not before that of the index, and reads it: of a link, also its object.
    #[tokio::test]
    async fn links_of_this_second_change() {
        let code = TestRepository::with(&[("plain", "one")]);
        let before = code.state().await;
        code.write("link", "1");
        let with_file = code.state().await;
        fs::remove_file(code.place("link")).expect("removed");
        std::os::unix::fs::symlink("plain", code.place("link")).expect("made");
        // Its objects stay apart.
        code.repository.state(&code.scratch(), false).await.expect("read");
        let index = fs::File::options().write(true).open(code.scratch().join("index")).expect("opened");
        let time = fs::symlink_metadata(code.place("link")).and_then(|meta| meta.modified()).expect("a time");
        index.set_modified(time).expect("set");
        code.repository.switch(&code.scratch(), &with_file, true).await.expect("switched");
        assert_eq!(code.read("link").as_deref(), Some("1"));
        code.switch(&before).await;
        assert_eq!(code.read("link"), None);
    }
}
