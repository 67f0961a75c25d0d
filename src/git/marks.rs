//! Marks in git's index that hide changes of files from git: `assume-unchanged` and `skip-worktree`. A capture looks at
//! these files as at all others, and a switch sets the marks again.

use std::collections::HashSet;
use std::path::Path;

use super::command::Call;
use super::repository::Repository;
use crate::core::error::{Error, Result};
use crate::core::freeze::marks::FileMarks;
use crate::core::limits;

/// The options that remove and set each mark.
const ASSUME_UNCHANGED: [&str; 2] = ["--no-assume-unchanged", "--assume-unchanged"];
const SKIP_WORKTREE: [&str; 2] = ["--no-skip-worktree", "--skip-worktree"];

/// Paths as git reads them.
pub(super) fn terminated<'a>(paths: impl Iterator<Item = &'a str>) -> Vec<u8> {
    paths.flat_map(|path| path.bytes().chain([0])).collect()
}

impl Repository {
    /// Removes the marks of all files from the index in `env`; returns them.
    ///
    /// # Errors
    /// `unsupported` (`sparse_checkout`), `refused` (`git_index`) with too many, errors of git.
    pub(super) async fn unmark(&self, env: &[(&str, &Path)]) -> Result<FileMarks> {
        let shown = self.path().display();
        let listed = self.ok(&["ls-files", "-v", "-z"], env, b"").await?;
        let mut marks = FileMarks::default();
        for entry in listed.split(|byte| *byte == 0) {
            let [tag, b' ', name @ ..] = entry else { continue };
            if !tag.is_ascii_lowercase() && *tag != b'S' {
                continue;
            }
            let name = std::str::from_utf8(name).map_err(|_| {
                Error::unsupported(format!("{shown} has a file with a mark, whose name is not UTF-8"))
                    .reason("git_index")
            })?;
            if tag.is_ascii_lowercase() {
                marks.assume_unchanged.push(name.to_owned());
            }
            if tag.eq_ignore_ascii_case(&b'S') {
                marks.skip_worktree.push(name.to_owned());
            }
        }
        if !marks.skip_worktree.is_empty() && self.is_sparse().await? {
            return Err(Error::unsupported(format!("{shown} is a sparse checkout"))
                .reason("sparse_checkout")
                .hint("check out all files: git sparse-checkout disable"));
        }
        if marks.assume_unchanged.len() + marks.skip_worktree.len() > limits::GIT_MARKED_FILES {
            let most = limits::GIT_MARKED_FILES;
            return Err(Error::refused(format!("more than {most} files of {shown} are marked as unchanged"))
                .reason("git_index")
                .hint("remove the marks: git update-index --no-assume-unchanged --no-skip-worktree"));
        }
        self.change_marks(&marks, 0, env).await?;
        Ok(marks)
    }

    /// Sets marks in the index in `env`, as far as it has these files.
    pub(super) async fn mark(&self, marks: &FileMarks, env: &[(&str, &Path)]) -> Result<()> {
        if marks.assume_unchanged.is_empty() && marks.skip_worktree.is_empty() {
            return Ok(());
        }
        // Those of an imported freeze may be any.
        let listed = self.ok(&["ls-files", "--cached", "-z"], env, b"").await?;
        let there: HashSet<&[u8]> = listed.split(|byte| *byte == 0).collect();
        let there = |paths: &[String]| paths.iter().filter(|path| there.contains(path.as_bytes())).cloned().collect();
        let marks = FileMarks {
            assume_unchanged: there(&marks.assume_unchanged),
            skip_worktree: there(&marks.skip_worktree),
            private: Vec::new(),
        };
        self.change_marks(&marks, 1, env).await
    }

    /// Removes (0) or sets (1) them. Git changes one kind at a time.
    async fn change_marks(&self, marks: &FileMarks, to: usize, env: &[(&str, &Path)]) -> Result<()> {
        for (option, paths) in
            [(ASSUME_UNCHANGED[to], &marks.assume_unchanged), (SKIP_WORKTREE[to], &marks.skip_worktree)]
        {
            let input = terminated(paths.iter().map(String::as_str));
            if !input.is_empty() {
                self.ok(&["update-index", option, "-z", "--stdin"], env, &input).await?;
            }
        }
        Ok(())
    }

    /// Whether its settings say that only some files are checked out.
    async fn is_sparse(&self) -> Result<bool> {
        for file in [self.git_dir().join("config.worktree"), self.common_dir().join("config")] {
            let name = file.to_str().ok_or_else(|| Error::invalid("the path is not UTF-8"))?;
            let args = ["config", "--file", name, "--no-includes", "--type=bool", "--get", "core.sparseCheckout"];
            if let Some(set) = self.git().asks(Call { args: &args, ..self.call() }).await? {
                return Ok(set.starts_with(b"true"));
            }
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_repository::TestRepository;

    #[tokio::test]
    async fn marked_files_are_captured() {
        let code = TestRepository::with(&[("a", "one"), ("b", "one"), ("c", "one"), ("d", "one"), ("plain", "one")]);
        code.git(&["checkout", "-q", "--detach"]);
        code.git(&["update-index", "--assume-unchanged", "a", "c"]);
        code.git(&["update-index", "--skip-worktree", "b", "c", "d"]);
        let marks = code.git(&["ls-files", "-v"]);
        assert_eq!(marks, "h a\nS b\ns c\nS d\nH plain");
        ["a", "b", "c"].iter().for_each(|name| code.write(name, "mine"));
        std::fs::remove_file(code.place("d")).expect("removed");
        let frozen = code.state().await;
        assert_eq!((frozen.changed, frozen.untracked), (4, 0));
        // The same from the index of the reading before.
        let (scratch, repository) = (code.scratch(), &code.repository);
        for _ in 0..2 {
            assert_eq!(repository.state(&scratch, false).await.expect("read"), frozen);
        }
        assert_eq!(code.git(&["ls-files", "-v"]), marks, "a capture changes nothing");
        code.git(&["update-index", "--no-assume-unchanged", "a", "c"]);
        code.git(&["update-index", "--no-skip-worktree", "b", "c", "d"]);
        code.git(&["reset", "-q", "--hard"]);
        code.write("plain", "two");
        code.git(&["commit", "-q", "-a", "-m", "second"]);
        let later = code.state().await;
        code.switch(&frozen).await;
        let texts = ["a", "b", "c", "d"].map(|name| code.read(name));
        assert_eq!(texts, [Some("mine".into()), Some("mine".into()), Some("mine".into()), None]);
        assert_eq!((code.git(&["ls-files", "-v"]), code.state().await), (marks, frozen));
        code.switch(&later).await;
        assert_eq!((code.read("a").as_deref(), code.git(&["status", "--porcelain"])), (Some("one"), String::new()));
        assert_eq!(code.state().await, later);
    }

    #[tokio::test]
    async fn sparse_checkout_is_refused() {
        let code = TestRepository::with(&[("in/a", "one"), ("out/b", "one")]);
        code.git(&["sparse-checkout", "set", "in"]);
        assert_eq!(code.read("out/b"), None);
        let refused = code.repository.state(&code.scratch(), false).await.expect_err("sparse");
        assert_eq!(refused.reason, "sparse_checkout", "{refused:?}");
        code.git(&["sparse-checkout", "disable"]);
        code.state().await;
    }
}
