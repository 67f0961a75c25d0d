//! References that keep commits from git's own collection. They are no branches, and no work tree is on them.

use nix::sys::statvfs::{FsFlags, statvfs};

use super::Repository;
use crate::core::error::Result;
use crate::core::freeze::refs::CommitId;

impl Repository {
    /// Makes `reference` name a commit. In a linked work tree, it is one of the repository. On a file system that is mounted
    /// read-only, nothing can be collected, and nothing is made.
    ///
    /// # Errors
    /// Errors of git.
    pub async fn keep(&self, reference: &str, commit: &CommitId) -> Result<()> {
        if self.is_read_only() {
            return Ok(());
        }
        self.ok(&["update-ref", reference, commit.as_str()], &[], b"").await.map(drop)
    }

    /// Removes every reference below a name, and the one that has it. Idempotent.
    ///
    /// # Errors
    /// Errors of git.
    pub async fn release(&self, name: &str) -> Result<()> {
        if self.is_read_only() {
            return Ok(());
        }
        let listed = self.ok(&["for-each-ref", "--format=%(refname)", name], &[], b"").await?;
        if listed.is_empty() {
            return Ok(());
        }
        let listed = String::from_utf8_lossy(&listed);
        let deletions: String = listed.lines().map(|reference| format!("delete {reference}\n")).collect();
        self.ok(&["update-ref", "--stdin"], &[], deletions.as_bytes()).await.map(drop)
    }

    fn is_read_only(&self) -> bool {
        statvfs(self.common_dir()).is_ok_and(|found| found.flags().contains(FsFlags::ST_RDONLY))
    }
}
