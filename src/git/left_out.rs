//! Files in a work tree that belong to other members: databases, which programs have open. A state does not hold them,
//! and a switch neither writes nor removes them, whatever git tracks.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::repository::{Repository, id};
use crate::core::error::Result;
use crate::core::freeze::refs::CommitId;

/// The paths of such files within a work tree.
pub(super) type LeftOut = Rc<[String]>;

/// A pathspec of exactly this path, and what is below it.
fn literal(path: &str) -> String {
    format!(":(top,literal){path}")
}

impl Repository {
    /// The repository without these files, of which only those inside of it matter.
    pub fn leaving_out(mut self, files: &[PathBuf]) -> Repository {
        let inside = files.iter().filter_map(|file| file.strip_prefix(self.path()).ok());
        self.left_out = inside.filter_map(Path::to_str).map(str::to_owned).collect();
        self
    }

    /// The paths of these files.
    pub fn left_out(&self) -> Vec<String> {
        self.left_out.to_vec()
    }

    /// The repository without these files, too.
    pub fn leaving_out_also(mut self, files: &[PathBuf]) -> Repository {
        let before = Rc::clone(&self.left_out);
        self = self.leaving_out(files);
        let new = self.left_out.iter().filter(|path| !before.contains(path));
        self.left_out = before.iter().chain(new).cloned().collect();
        self
    }

    /// Those of a submodule.
    pub(super) fn left_out_below(&self, submodule: &str) -> LeftOut {
        let inside = self.left_out.iter().filter_map(|file| Path::new(file).strip_prefix(submodule).ok());
        inside.filter_map(Path::to_str).map(str::to_owned).collect()
    }

    /// Pathspecs that exclude them; they follow a pathspec that includes everything.
    pub(super) fn without_left_out(&self) -> Vec<String> {
        self.left_out.iter().map(|path| format!(":(exclude,top,literal){path}")).collect()
    }

    /// The arguments of a comparison without them.
    pub(super) fn compare<'a>(args: &[&'a str], excluded: &'a [String]) -> Vec<&'a str> {
        let all: &[&'a str] = if excluded.is_empty() { &[] } else { &["--", "."] };
        args.iter().chain(all).copied().chain(excluded.iter().map(String::as_str)).collect()
    }

    /// Removes them from an index.
    pub(super) async fn remove_left_out(&self, env: &[(&str, &Path)]) -> Result<()> {
        if self.left_out.is_empty() {
            return Ok(());
        }
        let listed = self.listed(&self.left_out, env).await?;
        match listed.is_empty() {
            true => Ok(()),
            false => self.ok(&["update-index", "--force-remove", "-z", "--stdin"], env, &listed).await.map(drop),
        }
    }

    /// The files of an index among these, each followed by a NUL.
    async fn listed(&self, files: &[String], env: &[(&str, &Path)]) -> Result<Vec<u8>> {
        let named: Vec<String> = files.iter().map(|path| literal(path)).collect();
        let mut args = vec!["ls-files", "--cached", "-z", "--"];
        args.extend(named.iter().map(String::as_str));
        self.ok(&args, env, b"").await
    }

    /// A tree without them, whose objects are added to the repository. `scratch` is for files of this operation.
    pub(super) async fn tree_without_left_out(&self, scratch: &Path, tree: &CommitId) -> Result<CommitId> {
        if self.left_out.is_empty() {
            return Ok(tree.clone());
        }
        let named: Vec<String> = self.left_out.iter().map(|path| literal(path)).collect();
        let mut args = vec!["ls-tree", "-r", "--full-tree", "--name-only", "-z", tree.as_str(), "--"];
        args.extend(named.iter().map(String::as_str));
        let listed = self.ok(&args, &[], b"").await?;
        match listed.is_empty() {
            true => Ok(tree.clone()),
            false => self.tree_without(scratch, tree, &listed).await,
        }
    }

    /// A tree without some files, each followed by a NUL, whose objects are added to the repository.
    pub(super) async fn tree_without(&self, scratch: &Path, tree: &CommitId, files: &[u8]) -> Result<CommitId> {
        let index = scratch.join("without");
        for stale in [&index, &scratch.join("without.lock")] {
            // Most do not exist.
            let _ = std::fs::remove_file(stale);
        }
        let env = [("GIT_INDEX_FILE", &*index)];
        self.ok(&["read-tree", tree.as_str()], &env, b"").await?;
        self.ok(&["update-index", "--force-remove", "-z", "--stdin"], &env, files).await?;
        id(&self.ok(&["write-tree"], &env, b"").await?)
    }

    /// Those of these files that git tracks here or in a submodule.
    ///
    /// # Errors
    /// Errors of git, and of a submodule whose .git is elsewhere.
    pub async fn tracked(&self, files: &[PathBuf]) -> Result<Vec<String>> {
        let apart = self.clone().leaving_out(files);
        if apart.left_out.is_empty() {
            return Ok(Vec::new());
        }
        let listed = apart.listed(&apart.left_out, &[]).await?;
        let names = listed.split(|byte| *byte == 0).filter(|name| !name.is_empty());
        let mut found: Vec<String> = names.map(|name| String::from_utf8_lossy(name).into_owned()).collect();
        for (path, _) in self.links(&[]).await? {
            let inner = if apart.left_out_below(&path).is_empty() { None } else { self.submodule(&path)? };
            if let Some(inner) = inner {
                inner.check_settings().await?;
                found.extend(Box::pin(inner.tracked(files)).await?.into_iter().map(|name| format!("{path}/{name}")));
            }
        }
        Ok(found)
    }
}
