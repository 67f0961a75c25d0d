//! Submodules of a repository that an import creates.

use std::fs;
use std::io::ErrorKind;
use std::path::{Component, Path, PathBuf};
use std::rc::Rc;

use super::command::Call;
use super::history::Room;
use super::repository::{Repository, failed};
use crate::core::error::{Error, Result};
use crate::core::freeze::refs::Head;

impl Repository {
    /// Makes a submodule in a new repository, whose history is untrusted, and checks its commit out. Its `.git` is within
    /// that of the repository, by relative paths: the repository is renamed later.
    ///
    /// # Errors
    /// As [`Repository::create`]; `corrupt` if something else is in the place.
    pub async fn create_submodule(&self, path: &str, pack: &Path, head: &Head, room: Room) -> Result<Repository> {
        let at = self.path().join(path);
        self.make_folder(Path::new(path))?;
        let made = Repository::create(self.git(), &at, pack, head, room).await?;
        let (inside, kept) = (made.path().join(".git"), self.git_dir().join("modules").join(path));
        if let Some(above) = kept.parent() {
            fs::create_dir_all(above).map_err(failed(above))?;
        }
        if fs::symlink_metadata(&kept).is_ok() {
            return Err(Error::corrupt(format!("two submodules have the place {path}")));
        }
        fs::rename(&inside, &kept).map_err(failed(&kept))?;
        let link = format!("gitdir: {}\n", relative(&at, &kept).display());
        fs::write(&inside, link).map_err(failed(&inside))?;
        let (file, back) = (kept.join("config").display().to_string(), relative(&kept, &at).display().to_string());
        let args = ["config", "--file", &file, "core.worktree", &back];
        self.git().ok(Call { args: &args, ..Call::default() }).await?;
        // Otherwise it would be another repository in the work tree.
        let place = format!(":(top,literal){path}");
        if self.ok(&["ls-files", "--stage", "--", &place], &[], b"").await?.is_empty() {
            let entry = format!("160000,{},{path}", head.commit);
            self.ok(&["update-index", "--add", "--cacheinfo", &entry], &[], b"").await?;
        }
        Ok(Repository::at(Rc::clone(self.git()), at, (kept.clone(), kept), self.depth + 1))
    }

    /// Makes an empty folder in the work tree. A link of the history must not lead elsewhere.
    fn make_folder(&self, path: &Path) -> Result<()> {
        let mut at = self.path().to_owned();
        for part in path.components() {
            let Component::Normal(name) = part else {
                return Err(Error::corrupt(format!("{} is no place of a submodule", path.display())));
            };
            at.push(name);
            match fs::symlink_metadata(&at) {
                Ok(meta) if meta.is_dir() => {}
                Ok(_) => return Err(Error::corrupt(format!("{} in the file is no directory", path.display()))),
                Err(error) if error.kind() == ErrorKind::NotFound => fs::create_dir(&at).map_err(failed(&at))?,
                Err(error) => return Err(failed(&at)(error)),
            }
        }
        match fs::read_dir(&at).map_err(failed(&at))?.next() {
            None => Ok(()),
            Some(_) => Err(Error::corrupt(format!("the repository in the file has files in {}", path.display()))),
        }
    }

    /// The initialised submodules of its index, those inside of others too.
    ///
    /// # Errors
    /// Errors of git, and submodules that lead elsewhere.
    pub async fn inner(&self) -> Result<Vec<Repository>> {
        let mut found = Vec::new();
        for (path, _) in self.links(&[]).await? {
            let Some(inner) = self.submodule(&path)? else { continue };
            inner.check_settings().await?;
            found.extend(Box::pin(inner.inner()).await?);
            found.push(inner);
        }
        Ok(found)
    }
}

/// The way from one directory to another; both absolute, without links.
fn relative(from: &Path, to: &Path) -> PathBuf {
    let shared = from.components().zip(to.components()).take_while(|(one, other)| one == other).count();
    let up = from.components().skip(shared).map(|_| Component::ParentDir);
    up.chain(to.components().skip(shared)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_are_relative() {
        for (from, to, way) in [
            ("/r/lib", "/r/.git/modules/lib", "../.git/modules/lib"),
            ("/r/a/b", "/r/.git/modules/a/b", "../../.git/modules/a/b"),
            ("/r/.git/modules/lib/modules/x", "/r/lib/x", "../../../../../lib/x"),
        ] {
            assert_eq!(relative(Path::new(from), Path::new(to)), Path::new(way));
        }
    }
}
