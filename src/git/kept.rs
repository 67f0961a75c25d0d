//! References that keep commits from git's own collection. They are no branches, and no work tree is on them.

use std::path::Path;

use nix::sys::statvfs::{FsFlags, statvfs};

use super::repository::id;
use super::submodules::scratch_of;
use super::{Repository, State};
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

    /// Removes every reference below a name, and the one that has it, except those below the names `kept`. Idempotent.
    ///
    /// # Errors
    /// Errors of git.
    pub async fn release(&self, name: &str, kept: &[String]) -> Result<()> {
        if self.is_read_only() {
            return Ok(());
        }
        let listed = self.ok(&["for-each-ref", "--format=%(refname)", name], &[], b"").await?;
        let listed = String::from_utf8_lossy(&listed);
        let is_below = |reference: &str, name: &str| reference.strip_prefix(name).is_some_and(|at| at.starts_with('/'));
        let gone = listed.lines().filter(|reference| !kept.iter().any(|name| is_below(reference, name)));
        let deletions: String = gone.map(|reference| format!("delete {reference}\n")).collect();
        if deletions.is_empty() {
            return Ok(());
        }
        self.ok(&["update-ref", "--stdin"], &[], deletions.as_bytes()).await.map(drop)
    }

    /// Keeps the work of a repository and of its submodules that none of the `known` states has: `reference` names it, and
    /// `git stash apply` brings it back. The objects of `present` are in the repository, `scratch` holds files of the
    /// operation. Returns the directories of those that had such work.
    ///
    /// # Errors
    /// Errors of git and of submodules.
    pub async fn keep_work(
        &self,
        scratch: &Path,
        reference: &str,
        (present, known): (&State, &[&State]),
    ) -> Result<Vec<String>> {
        let mut found = Vec::new();
        if self.is_new_work(scratch, present, known).await? {
            let commit = self.stash(present).await?;
            self.keep(reference, &commit).await?;
            found.push(self.path().display().to_string());
        }
        for one in &present.submodules {
            let (Some(present), Some(inner)) = (&one.state, self.submodule(&one.path)?) else { continue };
            let inside = known.iter().flat_map(|state| &state.submodules).filter(|other| other.path == one.path);
            let known: Vec<&State> = inside.filter_map(|other| other.state.as_ref()).collect();
            let scratch = scratch_of(scratch, &one.path);
            found.extend(Box::pin(inner.keep_work(&scratch, reference, (present, &known))).await?);
        }
        Ok(found)
    }

    /// Whether commit, index or files of a state are those of no other one.
    async fn is_new_work(&self, scratch: &Path, present: &State, known: &[&State]) -> Result<bool> {
        let others = |is_same: &dyn Fn(&State) -> bool| !known.iter().any(|state| is_same(state));
        if others(&|state| state.head.commit == present.head.commit)
            || others(&|state| state.index_tree == present.index_tree)
        {
            return Ok(true);
        }
        for state in known {
            // An older freeze has files of other members, which the present state has not.
            let same = state.work_tree == present.work_tree
                || self
                    .tree_without_left_out(scratch, &state.work_tree)
                    .await
                    .is_ok_and(|tree| tree == present.work_tree);
            if same {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// A commit of the files of a state, as `git stash` makes it: its parents are the commit and one of the index.
    async fn stash(&self, state: &State) -> Result<CommitId> {
        let (name, mail) = (Path::new("ryokan"), Path::new("ryokan@localhost"));
        let env = [
            ("GIT_AUTHOR_NAME", name),
            ("GIT_AUTHOR_EMAIL", mail),
            ("GIT_COMMITTER_NAME", name),
            ("GIT_COMMITTER_EMAIL", mail),
        ];
        let (head, message) = (state.head.commit.as_str(), b"replaced when a restore was reverted\n");
        let index = ["commit-tree", state.index_tree.as_str(), "-p", head];
        let index = id(&self.ok(&index, &env, message).await?)?;
        let files = ["commit-tree", state.work_tree.as_str(), "-p", head, "-p", index.as_str()];
        id(&self.ok(&files, &env, message).await?)
    }

    fn is_read_only(&self) -> bool {
        statvfs(self.common_dir()).is_ok_and(|found| found.flags().contains(FsFlags::ST_RDONLY))
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_repository::TestRepository;

    #[tokio::test]
    async fn replaced_work_can_be_applied() {
        let code = TestRepository::with(&[("a", "one"), ("b", "one")]);
        let before = code.state().await;
        code.write("a", "target");
        code.git(&["commit", "-q", "-a", "-m", "second"]);
        let target = code.state().await;
        let (scratch, reference) = (code.scratch(), "refs/ryokan/kept/shop-1");
        let known = [&before, &target];
        let keep = async || {
            let present = code.state().await;
            code.repository.keep_work(&scratch, reference, (&present, &known)).await.expect("kept")
        };
        assert!(keep().await.is_empty(), "a freeze has it");
        code.write("b", "theirs");
        code.git(&["add", "b"]);
        code.write("a", "theirs, too");
        code.write("new", "theirs");
        assert_eq!(keep().await, [code.repository.path().display().to_string()]);
        code.switch(&target).await;
        assert_eq!(code.git(&["status", "--porcelain"]), "");
        code.git(&["gc", "-q", "--prune=now"]);
        code.git(&["stash", "apply", "-q", "--index", reference]);
        assert_eq!(["a", "b", "new"].map(|name| code.read(name).expect("there")), ["theirs, too", "theirs", "theirs"]);
        assert!(code.git(&["status", "--porcelain"]).contains("M  b"));
    }
}
