//! Questions about commits. A question that git cannot answer is an error, not a "no".

use std::path::Path;

use super::Repository;
use super::command::Call;
use crate::core::error::{Error, Result};
use crate::core::freeze::refs::CommitId;

impl Repository {
    /// Whether `b` is `a` or a descendant of it. A commit that is not there is no ancestor of one that is.
    ///
    /// # Errors
    /// Errors of git.
    pub async fn is_ancestor(&self, a: &CommitId, b: &CommitId) -> Result<bool> {
        let args = ["merge-base", "--is-ancestor", a.as_str(), b.as_str()];
        match self.git().asks(Call { args: &args, ..self.call() }).await {
            Ok(answer) => Ok(answer.is_some()),
            Err(error) => match self.has_commit(a).await? {
                true => Err(error),
                false => Ok(false),
            },
        }
    }

    /// Checks that the history of `b` can be followed to `a`: some releases of git take a missing commit in between for
    /// the end of the history.
    ///
    /// # Errors
    /// Errors of git.
    pub async fn check_followed(&self, a: &CommitId, b: &CommitId) -> Result<()> {
        self.ok(&["rev-list", "--quiet", b.as_str(), &format!("^{a}")], &[], b"").await.map(drop)
    }

    /// Whether the repository has this commit.
    ///
    /// # Errors
    /// Errors of git.
    pub async fn has_commit(&self, commit: &CommitId) -> Result<bool> {
        self.has_commit_among(commit, &[]).await
    }

    /// As [`Self::has_commit`], with variables that name further objects.
    pub(super) async fn has_commit_among(&self, commit: &CommitId, env: &[(&str, &Path)]) -> Result<bool> {
        let input = format!("{commit}^{{commit}}\n");
        // It answers for a commit that is missing, too.
        let answer = self.ok(&["cat-file", "--batch-check"], env, input.as_bytes()).await?;
        let answer = String::from_utf8_lossy(&answer);
        match answer.split_whitespace().nth(1) {
            Some("commit") => Ok(true),
            Some("missing") => Ok(false),
            _ => Err(Error::refused(format!("git cat-file answered {:?}", answer.trim())).reason("git")),
        }
    }
}
