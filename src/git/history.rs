//! The history of a repository as one pack: written for a file, and read into a new or an existing repository.
//!
//! A pack that comes from elsewhere is checked object by object before anything refers to it. Only objects travel: no
//! configuration, hooks, remotes or other references.

use std::path::Path;
use std::rc::Rc;

use super::command::{Call, Git};
use super::repository::{Repository, alternates, failed};
use crate::core::error::{Error, Result};
use crate::core::freeze::refs::{CommitId, Head};

impl Repository {
    /// Packs everything that a commit leads to into the file `to`.
    ///
    /// # Errors
    /// `notFound` without the commit, `unsupported` if the repository has a part of its history only.
    pub async fn pack_history(&self, commit: &CommitId, to: &Path) -> Result<()> {
        self.check_commit(commit).await?;
        if std::fs::symlink_metadata(self.git_dir().join("shallow")).is_ok() {
            return Err(Error::unsupported(format!("{} has a part of its history only", self.path().display()))
                .reason("shallow_repository")
                .hint("fetch the rest: git fetch --unshallow"));
        }
        let args = ["pack-objects", "--revs", "--stdout", "-q"];
        let input = format!("{commit}\n");
        let call = Call { args: &args, input: input.as_bytes(), to: Some(to), ..self.call() };
        self.git().ok(call).await.map(drop)
    }

    /// Makes a repository at `path`, which must not exist, with the history of a commit, and checks the commit out. It is
    /// on the branch of `head`, if there is one. `most`: bytes that its files may have.
    ///
    /// # Errors
    /// `corrupt` if the pack does not hold the commit; `refused` if an object is malformed or the files are too large.
    pub async fn create(git: &Rc<Git>, path: &Path, pack: &Path, head: &Head, most: u64) -> Result<Repository> {
        let shown = path.to_str().ok_or_else(|| Error::invalid("the path is not UTF-8"))?;
        let format = if head.commit.as_str().len() == 64 { "sha256" } else { "sha1" };
        let format = format!("--object-format={format}");
        // No template: those of the host may hold hooks.
        let args = ["init", "-q", "--template=", &format, "--", shown];
        git.ok(Call { args: &args, ..Call::default() }).await?;
        let repository = Repository::open(git, path)?;
        repository.add_history(pack, &head.commit).await?;
        repository.check_size(&head.commit, None, most).await?;
        let commit = head.commit.as_str();
        match &head.branch {
            Some(branch) => {
                let name = format!("refs/heads/{branch}");
                repository.ok(&["update-ref", &name, commit], &[], b"").await?;
                repository.ok(&["symbolic-ref", "HEAD", &name], &[], b"").await?;
            }
            None => drop(repository.ok(&["update-ref", "--no-deref", "HEAD", commit], &[], b"").await?),
        }
        repository.ok(&["read-tree", "--reset", "-u", commit], &[], b"").await?;
        Ok(repository)
    }

    /// Adds the objects of a history, if the commit is not there; nothing refers to them yet.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub async fn add_history(&self, pack: &Path, commit: &CommitId) -> Result<()> {
        if self.has_commit(commit).await? {
            return Ok(());
        }
        let args = ["index-pack", "--stdin", "--strict"];
        self.git().ok(Call { args: &args, from: Some(pack), ..self.call() }).await?;
        match self.has_commit(commit).await? {
            true => Ok(()),
            false => Err(Error::corrupt(format!("the history of {} lacks commit {commit}", self.path().display()))),
        }
    }

    /// Checks that the files of a commit or tree have at most so many bytes: small objects can reference each other many
    /// times. `apart`: a folder with further objects.
    ///
    /// # Errors
    /// `refused` (`bundle_size`, `git_output`).
    pub async fn check_size(&self, tree: &CommitId, apart: Option<&Path>, most: u64) -> Result<()> {
        let own = self.git_dir().join("objects");
        let (objects, others) = (apart.map(|apart| apart.join("objects")), alternates(&[&own]));
        let env = objects
            .iter()
            .flat_map(|objects| [("GIT_OBJECT_DIRECTORY", &**objects), ("GIT_ALTERNATE_OBJECT_DIRECTORIES", &*others)]);
        let env: Vec<(&str, &Path)> = env.collect();
        let listed = self.ok(&["ls-tree", "-r", "-l", "-z", tree.as_str()], &env, b"").await?;
        let size = |entry: &[u8]| {
            let facts = entry.split(|byte| *byte == b'\t').next().unwrap_or_default();
            let size = facts.rsplit(|byte| *byte == b' ').next().unwrap_or_default();
            std::str::from_utf8(size).ok().and_then(|size| size.parse::<u64>().ok()).unwrap_or(0)
        };
        let bytes = listed.split(|byte| *byte == 0).map(size).fold(0, u64::saturating_add);
        if bytes > most {
            return Err(Error::refused(format!("the files of {tree} have {bytes} bytes, and {most} are free"))
                .reason("bundle_size")
                .hint("free space on the device, then try again"));
        }
        Ok(())
    }

    /// Marks a repository as one that an import has not finished, with a text.
    ///
    /// # Errors
    /// File errors.
    pub fn mark(&self, text: &str) -> Result<()> {
        let file = self.git_dir().join(MARK);
        let written = std::fs::write(&file, text).and_then(|()| std::fs::File::open(&file)?.sync_all());
        written.map_err(failed(&file))
    }
}

/// The file in `.git` of a repository that an import has not finished.
const MARK: &str = "ryokan-import";

/// The text with which the repository at `path` was marked, if it was.
pub fn mark_of(path: &Path) -> Option<String> {
    std::fs::read_to_string(path.join(".git").join(MARK)).ok()
}

/// Removes the mark of a repository; idempotent.
pub fn unmark(path: &Path) {
    // Without its intent a mark means nothing.
    let _ = std::fs::remove_file(path.join(".git").join(MARK));
}
