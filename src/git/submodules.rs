//! Submodules: repositories inside a repository, which records a commit of each.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::repository::{Repository, State, failed};
use crate::core::error::{Error, Result};
use crate::core::freeze::refs::CommitId;
use crate::core::limits;

/// One submodule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Submodule {
    /// Its directory within the repository.
    pub path: String,
    /// The commit that is checked out; without a state, the one that the repository's index records.
    pub commit: CommitId,
    /// Its own state; `None`: not initialised.
    pub state: Option<State>,
}

impl State {
    /// The trees of all files of its submodules, those inside of others too, by path.
    pub fn inner_trees(&self, outer: &str) -> Vec<(String, String)> {
        let mut found = Vec::new();
        for one in &self.submodules {
            let Some(state) = &one.state else { continue };
            let path = format!("{outer}{}", one.path);
            found.push((path.clone(), state.work_tree.to_string()));
            found.extend(state.inner_trees(&format!("{path}/")));
        }
        found
    }
}

/// The files of an operation for a submodule, below those of its repository.
pub fn scratch_of(scratch: &Path, path: &str) -> PathBuf {
    scratch.join("modules").join(&blake3::hash(path.as_bytes()).to_hex()[..16])
}

impl Repository {
    /// The submodule in a directory; `None`: not initialised.
    ///
    /// # Errors
    /// `unsupported` (`nested_repository`) if its .git is not within that of this repository, and file errors.
    pub fn submodule(&self, path: &str) -> Result<Option<Repository>> {
        let at = self.path().join(path);
        let inside = at.join(".git");
        let meta = match fs::symlink_metadata(&inside) {
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
            found => found.map_err(failed(&inside))?,
        };
        let real = at.canonicalize().map_err(failed(&at))?;
        if real != self.path().canonicalize().map_err(failed(self.path()))?.join(path) {
            return Err(elsewhere(&at));
        }
        let git_dir = if meta.is_file() && meta.len() <= limits::GIT_LINK_BYTES {
            let text = fs::read_to_string(&inside).map_err(failed(&inside))?;
            let named = text.strip_prefix("gitdir: ").ok_or_else(|| elsewhere(&at))?.trim_end_matches('\n');
            let real = at.join(named).canonicalize().map_err(failed(&inside))?;
            // A link in the place of `modules` may lead to where a kernel writes.
            let modules = self.git_dir().canonicalize().map_err(failed(self.git_dir()))?.join("modules");
            if real == modules || !real.starts_with(&modules) {
                return Err(elsewhere(&at));
            }
            real
        } else {
            return Err(elsewhere(&at));
        };
        let owner = |path: &Path| fs::symlink_metadata(path).map(|meta| meta.uid()).map_err(failed(path));
        if owner(&git_dir)? != owner(self.git_dir())? {
            return Err(Error::refused(format!("{} belongs to another user", at.display())).reason("other_owner"));
        }
        let mut inner = Repository::at(Rc::clone(self.git()), at, (git_dir.clone(), git_dir), self.depth + 1);
        inner.left_out = self.left_out_below(path);
        Ok(Some(inner))
    }

    /// The submodules of an index with their states. One whose directory is gone is left to `git add`.
    pub(super) async fn submodules(&self, scratch: &Path, keep: bool, env: &[(&str, &Path)]) -> Result<Vec<Submodule>> {
        let (mut found, links) = (Vec::new(), self.links(env).await?);
        if links.len() > limits::GIT_SUBMODULES || (!links.is_empty() && self.depth >= limits::GIT_SUBMODULE_DEPTH) {
            let shown = self.path().display();
            return Err(Error::refused(format!("{shown} has too many submodules")).reason("submodules"));
        }
        for (path, commit) in links {
            if !fs::symlink_metadata(self.path().join(&path)).is_ok_and(|meta| meta.is_dir()) {
                continue;
            }
            found.push(match self.submodule(&path)? {
                None => Submodule { path, commit, state: None },
                Some(repository) => {
                    repository.check_settings().await?;
                    let scratch = scratch_of(scratch, &path);
                    let state = Box::pin(repository.state(&scratch, keep)).await?;
                    Submodule { path, commit: state.head.commit.clone(), state: Some(state) }
                }
            });
        }
        Ok(found)
    }

    /// Records the commits of submodules in an index, and refuses other repositories in it.
    pub(super) async fn add_links(&self, submodules: &[Submodule], env: &[(&str, &Path)]) -> Result<()> {
        for one in submodules {
            let entry = format!("160000,{},{}", one.commit, one.path);
            self.ok(&["update-index", "--add", "--cacheinfo", &entry], env, b"").await?;
        }
        let links = self.links(env).await?;
        // Outside of a sparse checkout there is no directory.
        let is_there = |path: &str| fs::symlink_metadata(self.path().join(path)).is_ok();
        match links.iter().find(|(path, _)| is_there(path) && submodules.iter().all(|one| one.path != *path)) {
            Some((name, _)) => {
                Err(Error::unsupported(format!("{} has a repository inside it: {name}", self.path().display()))
                    .reason("nested_repository")
                    .hint("ignore it in .gitignore, and add it to the group as a member of its own"))
            }
            None => Ok(()),
        }
    }

    /// The repositories that an index records: directory and commit.
    pub(super) async fn links(&self, env: &[(&str, &Path)]) -> Result<Vec<(String, CommitId)>> {
        let listed = self.ok(&["ls-files", "--stage", "-z"], env, b"").await?;
        let mut found = Vec::new();
        for entry in listed.split(|byte| *byte == 0).filter(|entry| entry.starts_with(b"160000 ")) {
            let shown = String::from_utf8_lossy(entry).into_owned();
            let unread = || Error::unsupported(format!("a submodule cannot be read: {shown}")).reason("submodules");
            let (facts, path) =
                std::str::from_utf8(entry).ok().and_then(|text| text.split_once('\t')).ok_or_else(unread)?;
            // An index that a kernel wrote may name any path.
            let is_inside = Path::new(path)
                .components()
                .all(|part| matches!(part, std::path::Component::Normal(name) if !name.eq_ignore_ascii_case(".git")));
            if !is_inside {
                return Err(unread());
            }
            let commit = facts.split(' ').nth(1).unwrap_or_default().parse().map_err(|_| unread())?;
            found.push((path.to_owned(), commit));
        }
        Ok(found)
    }
}

fn elsewhere(path: &Path) -> Error {
    Error::unsupported(format!("the .git of {} is not within that of the outer repository", path.display()))
        .reason("nested_repository")
        .hint("move it there: git submodule absorbgitdirs")
}
