//! Comparison of two states of a repository.

use std::path::Path;

use super::Repository;
use super::overwritten::DIFF_TREE;
use super::repository::{alternates, id};
use crate::core::error::Result;
use crate::core::freeze::refs::CommitId;

/// A commit with the first line of its message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Commit {
    /// Its id.
    pub id: CommitId,
    /// The first line of its message.
    pub subject: String,
}

impl Repository {
    /// Adds the objects of a pack to `objects` in `scratch`.
    ///
    /// # Errors
    /// Errors of git.
    pub async fn unpack_apart(&self, scratch: &Path, pack: &Path) -> Result<()> {
        let (objects, own) = self.apart(scratch)?;
        let env = [("GIT_OBJECT_DIRECTORY", &*objects), ("GIT_ALTERNATE_OBJECT_DIRECTORIES", &*own)];
        self.unpack(pack, &env).await
    }

    /// The files that differ between two trees or commits, whose objects the repository or `objects` in `scratch` has:
    /// git's letter and the path.
    ///
    /// # Errors
    /// Errors of git.
    pub async fn changed_files(&self, scratch: &Path, from: &CommitId, to: &CommitId) -> Result<Vec<(char, String)>> {
        let (objects, own) = self.apart(scratch)?;
        let env = [("GIT_OBJECT_DIRECTORY", &*objects), ("GIT_ALTERNATE_OBJECT_DIRECTORIES", &*own)];
        let (args, excluded) = ([&DIFF_TREE[..], &[from.as_str(), to.as_str()]].concat(), self.without_left_out());
        let reported = self.ok(&Repository::compare(&args, &excluded), &env, b"").await?;
        let (mut fields, mut found) = (reported.split(|byte| *byte == 0), Vec::new());
        while let (Some(status), Some(path)) = (fields.next(), fields.next()) {
            let status = status.first().map_or('M', |letter| char::from(*letter));
            found.push((status, String::from_utf8_lossy(path).into_owned()));
        }
        Ok(found)
    }

    /// The commits that `to` has and `from` has not, newest first, at most `most`; and their whole number.
    ///
    /// # Errors
    /// Errors of git.
    pub async fn commits_between(&self, from: &CommitId, to: &CommitId, most: usize) -> Result<(Vec<Commit>, u64)> {
        let (without, most) = (format!("^{from}"), format!("--max-count={most}"));
        let count = self.ok(&["rev-list", "--count", to.as_str(), &without], &[], b"").await?;
        let count = String::from_utf8_lossy(&count).trim().parse().unwrap_or_default();
        let listed = self.ok(&["rev-list", &most, "--format=%s", to.as_str(), &without], &[], b"").await?;
        // Each commit has two lines: `commit ID` and its subject.
        let listed = String::from_utf8_lossy(&listed).into_owned();
        let (mut lines, mut found) = (listed.lines(), Vec::new());
        while let (Some(line), Some(subject)) = (lines.next(), lines.next()) {
            let text = line.strip_prefix("commit ").unwrap_or(line);
            found.push(Commit { id: id(text.as_bytes())?, subject: subject.to_owned() });
        }
        Ok((found, count))
    }

    /// The directory of objects in `scratch`, and the repository's own in git's notation.
    fn apart(&self, scratch: &Path) -> Result<(std::path::PathBuf, std::path::PathBuf)> {
        let objects = scratch.join("objects");
        std::fs::create_dir_all(&objects).map_err(super::repository::failed(&objects))?;
        Ok((objects, alternates(&[&self.objects()])))
    }
}
