//! Linked work trees: each has files, `HEAD` and index of its own, and shares objects, branches and settings with the
//! repository that it was made from.
//!
//! A planted `.git` file could lead git to settings that someone else wrote. So both sides must name each other, as git
//! itself records it.

use std::fs;
use std::path::{Path, PathBuf};

use super::repository::{Repository, failed};
use crate::core::error::{Error, Result};
use crate::core::limits;

/// The text of a small file of git.
fn line(file: &Path) -> Option<String> {
    let meta = fs::symlink_metadata(file).ok()?;
    let text = (meta.is_file() && meta.len() <= limits::GIT_LINK_BYTES).then(|| fs::read_to_string(file))?.ok()?;
    Some(text.trim_end_matches('\n').to_owned())
}

/// Where the `.git` file of a linked work tree leads: its own directory, and the one that it shares.
///
/// # Errors
/// `unsupported` (`linked_repository`) for a submodule, and if the other side does not name the work tree.
pub(super) fn places(path: &Path) -> Result<(PathBuf, PathBuf)> {
    let shown = path.display();
    let elsewhere = |why: &str| {
        Error::unsupported(format!("the .git of {shown} leads to no linked work tree: {why}"))
            .reason("linked_repository")
            .hint("give a submodule by its outer repository; after a move: git worktree repair")
    };
    let inside = path.join(".git");
    let text = line(&inside).ok_or_else(|| elsewhere("it cannot be read"))?;
    let named = text.strip_prefix("gitdir: ").ok_or_else(|| elsewhere("it names no directory"))?;
    let git_dir = path.join(named).canonicalize().map_err(|error| elsewhere(&format!("{named}: {error}")))?;
    let kept = git_dir.parent().filter(|kept| kept.file_name().is_some_and(|name| name == "worktrees"));
    let common = kept.and_then(Path::parent).ok_or_else(|| elsewhere("it is no work tree's"))?;
    let shared = line(&git_dir.join("commondir")).and_then(|shared| git_dir.join(shared).canonicalize().ok());
    if shared.as_deref() != Some(common) {
        return Err(elsewhere("it shares another directory than that above it"));
    }
    let back = line(&git_dir.join("gitdir")).map(|back| git_dir.join(back));
    // Of the file itself: a link in its place leads elsewhere.
    let real = path.canonicalize().map_err(failed(path))?.join(".git");
    let is_back = |back: &PathBuf| {
        let folder = back.parent().and_then(|folder| folder.canonicalize().ok());
        folder.is_some_and(|folder| folder.join(".git") == real) && back.file_name().is_some_and(|name| name == ".git")
    };
    match back.is_some_and(|back| is_back(&back)) {
        true => Ok((git_dir.clone(), common.to_owned())),
        false => Err(elsewhere("the repository does not name it")),
    }
}

/// The directory that the work tree at `path` shares, if it is a linked one.
pub fn shared_by(path: &Path) -> Option<PathBuf> {
    let is_file = fs::symlink_metadata(path.join(".git")).is_ok_and(|meta| meta.is_file());
    is_file.then(|| places(path).ok()).flatten().map(|(_, common)| common)
}

impl Repository {
    /// The directory that a linked work tree shares with its repository.
    pub fn shared_dir(&self) -> Option<&Path> {
        (self.common_dir() != self.git_dir()).then(|| self.common_dir())
    }

    /// Refuses a linked work tree where references of the repository would change.
    ///
    /// # Errors
    /// `unsupported` (`linked_repository`).
    pub fn refuse_linked(&self) -> Result<()> {
        match self.shared_dir() {
            None => Ok(()),
            Some(shared) => Err(Error::unsupported(format!("{} is a linked work tree", self.path().display()))
                .reason("linked_repository")
                .hint(format!("give the work tree of {}, or another place", shared.display()))),
        }
    }

    /// Whether another work tree of the repository is on this branch.
    pub(super) fn is_elsewhere(&self, reference: &str) -> bool {
        let linked = fs::read_dir(self.common_dir().join("worktrees")).into_iter().flatten().flatten();
        let all = std::iter::once(self.common_dir().to_owned()).chain(linked.map(|entry| entry.path()));
        let wanted = format!("ref: {reference}");
        all.filter(|one| one != self.git_dir()).any(|one| line(&one.join("HEAD")).is_some_and(|head| head == wanted))
    }

    /// The directories of linked work trees that this repository records.
    pub fn worktrees(&self) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.git_dir().join("worktrees")) else { return Vec::new() };
        let mut found: Vec<String> = entries
            .flatten()
            .filter_map(|entry| line(&entry.path().join("gitdir")))
            .map(|file| file.trim_end().trim_end_matches("/.git").to_owned())
            .collect();
        // Sorted before it is cut, so that the same ones are named each time.
        found.sort();
        found.truncate(limits::GIT_SUBMODULES);
        found
    }
}
