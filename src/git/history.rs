//! The history of a repository as one pack: written for a file, and read into a new or an existing repository.
//!
//! A pack that comes from elsewhere is checked object by object before anything refers to it. Only objects travel: no
//! configuration, hooks, remotes or other references.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use nix::sys::resource::Resource;

use super::command::{Call, Git};
use super::repository::{Repository, alternates, failed};
use crate::core::error::{Error, Result};
use crate::core::freeze::refs::{CommitId, Head};
use crate::core::limits;
use crate::sys::fault;

/// How git checks objects from elsewhere. What old tools wrote and git reads is admitted; names that lead out of a work
/// tree or into `.git` are not.
const STRICT: &str = "--strict=zeroPaddedFilemode=ignore,badTimezone=ignore,missingSpaceBeforeDate=ignore,\
                      missingTaggerEntry=ignore";

/// Smallest size of a file on a disk, bytes.
const BLOCK: u64 = 4096;

/// Room for the files of a repository.
#[derive(Debug, Clone, Copy)]
pub struct Room {
    /// Bytes.
    pub bytes: u64,
    /// Files and directories.
    pub entries: u64,
}

impl Room {
    /// The room in the file system of a directory.
    pub fn at(directory: &Path) -> Room {
        let Ok(found) = nix::sys::statvfs::statvfs(directory) else {
            return Room { bytes: u64::MAX, entries: limits::WORKSPACE_ENTRIES };
        };
        // Some file systems make inodes as they need them, and report none.
        let inodes = if found.files() == 0 { u64::MAX } else { found.files_available() };
        let bytes = found.blocks_available().saturating_mul(found.fragment_size());
        Room { bytes, entries: inodes.min(limits::WORKSPACE_ENTRIES) }
    }
}

/// Keeps the user's settings, which name filters, from content that the user did not choose.
fn apart_from_user() -> [(&'static str, &'static Path); 2] {
    [("GIT_CONFIG_GLOBAL", Path::new("/dev/null")), ("GIT_CONFIG_NOSYSTEM", Path::new("1"))]
}

/// Variables for objects in a folder: first the folder, then where further ones are.
fn apart_env<'a>(objects: Option<&'a Path>, others: &'a Path) -> Vec<(&'a str, &'a Path)> {
    let env = |objects| [("GIT_OBJECT_DIRECTORY", objects), ("GIT_ALTERNATE_OBJECT_DIRECTORIES", others)];
    objects.into_iter().flat_map(env).collect()
}

fn number(text: &[u8]) -> u64 {
    std::str::from_utf8(text).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

fn too_large(what: String, most: u64) -> Error {
    Error::refused(format!("{what}, and {most} are free"))
        .reason("bundle_size")
        .hint("free space on the device, then try again")
}

impl Repository {
    /// Packs everything that a commit leads to into the file `to`.
    ///
    /// # Errors
    /// `notFound` without the commit, `unsupported` if the repository has a part of its history only.
    pub async fn pack_history(&self, commit: &CommitId, to: &Path) -> Result<()> {
        self.check_commit(commit).await?;
        if std::fs::symlink_metadata(self.common_dir().join("shallow")).is_ok() {
            return Err(Error::unsupported(format!("{} has a part of its history only", self.path().display()))
                .reason("shallow_repository")
                .hint("fetch the rest: git fetch --unshallow"));
        }
        let args = ["pack-objects", "--revs", "--stdout", "-q"];
        let input = format!("{commit}\n");
        let call = Call { args: &args, input: input.as_bytes(), to: Some(to), ..self.call() };
        self.git().ok(call).await.map(drop)
    }

    /// Checks that a pack of [`Self::pack_history`] can be read elsewhere: there every object is checked. `apart`: a
    /// folder for its objects.
    ///
    /// # Errors
    /// `refused` if an object is malformed.
    pub async fn check_history(&self, pack: &Path, apart: &Path) -> Result<()> {
        self.index_foreign(pack, Some(apart), u64::MAX).await.map_err(|error| Error {
            message: format!("another host would refuse its history: {}", error.message),
            ..error
        })
    }

    /// Makes a repository at `path`, which must not exist, with the history of a commit, and checks the commit out. It is
    /// on the branch of `head`, if there is one. Its files may need `room`.
    ///
    /// # Errors
    /// `corrupt` if the pack does not hold the commit; `refused` if an object is malformed or the files are too large.
    pub async fn create(git: &Rc<Git>, path: &Path, pack: &Path, head: &Head, room: Room) -> Result<Repository> {
        let shown = path.to_str().ok_or_else(|| Error::invalid("the path is not UTF-8"))?;
        let format = if head.commit.as_str().len() == 64 { "sha256" } else { "sha1" };
        let format = format!("--object-format={format}");
        // No template: those of the host may hold hooks.
        let args = ["init", "-q", "--template=", &format, "--", shown];
        git.ok(Call { args: &args, env: &apart_from_user(), ..Call::default() }).await?;
        let repository = Repository::open(git, path)?;
        repository.index_foreign(pack, None, room.bytes).await?;
        repository.measure(None, room.bytes).await?;
        repository.refuse_without(&head.commit, None).await?;
        repository.check_size(&head.commit, None, room).await?;
        let (commit, env) = (head.commit.as_str(), apart_from_user());
        match &head.branch {
            Some(branch) => {
                let name = format!("refs/heads/{branch}");
                repository.ok(&["update-ref", &name, commit], &env, b"").await?;
                repository.ok(&["symbolic-ref", "HEAD", &name], &env, b"").await?;
            }
            None => drop(repository.ok(&["update-ref", "--no-deref", "HEAD", commit], &env, b"").await?),
        }
        fault::point("repository.history.checkout").map_err(failed(path))?;
        repository.ok(&["read-tree", "--reset", "-u", commit], &env, b"").await?;
        Ok(repository)
    }

    /// Reads a history into the folder `apart`, and checks that it completes the repository. The repository stays as it is.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub async fn read_history(&self, pack: &Path, commit: &CommitId, apart: &Path, most: u64) -> Result<()> {
        if self.has_commit(commit).await? {
            return Ok(());
        }
        self.read_foreign(pack, apart, most).await?;
        self.refuse_without(commit, Some(apart)).await
    }

    /// Adds the objects of a history that [`Self::read_history`] checked, and refers to its commit by `reference`, so that
    /// git's own collection keeps them.
    ///
    /// # Errors
    /// Errors of git.
    pub async fn keep_history(&self, pack: &Path, commit: &CommitId, reference: &str) -> Result<()> {
        self.refuse_linked()?;
        if !self.has_commit(commit).await? {
            self.index_foreign(pack, None, u64::MAX).await?;
        }
        self.ok(&["update-ref", reference, commit.as_str()], &[], b"").await.map(drop)
    }

    /// Removes a reference of [`Self::keep_history`]. Idempotent.
    ///
    /// # Errors
    /// Errors of git.
    pub async fn drop_history(&self, reference: &str) -> Result<()> {
        if self.shared_dir().is_some() {
            return Ok(());
        }
        self.ok(&["update-ref", "-d", reference], &[], b"").await.map(drop)
    }

    /// Reads a pack from elsewhere into the folder `apart`, which has further objects then.
    ///
    /// # Errors
    /// `refused` if an object is malformed, or all of them have more than `most` bytes.
    pub async fn read_foreign(&self, pack: &Path, apart: &Path, most: u64) -> Result<()> {
        self.index_foreign(pack, Some(apart), most).await?;
        self.measure(Some(apart), most).await
    }

    /// Indexes a pack from elsewhere, in the folder `apart` or in the repository. Each object is checked.
    async fn index_foreign(&self, pack: &Path, apart: Option<&Path>, most: u64) -> Result<()> {
        let (objects, others) = self.object_folders(apart);
        if let Some(objects) = &objects {
            std::fs::create_dir_all(objects).map_err(failed(objects))?;
        }
        let env = apart_env(objects.as_deref(), &others);
        // One thread: each has memory of its own.
        let args = ["index-pack", "--stdin", "--fix-thin", STRICT, "--threads=1"];
        let bounds = [(Resource::RLIMIT_DATA, limits::GIT_FOREIGN_MEMORY), (Resource::RLIMIT_FSIZE, most)];
        self.git().ok(Call { args: &args, env: &env, from: Some(pack), limits: &bounds, ..self.call() }).await.map(drop)
    }

    /// Checks that all objects of a folder, or of a new repository, have at most so many bytes as a whole: a small pack
    /// may hold large ones, as differences.
    async fn measure(&self, apart: Option<&Path>, most: u64) -> Result<()> {
        let objects = apart.map(|apart| apart.join("objects"));
        // Without the repository's own.
        let env: Vec<(&str, &Path)> = objects.iter().map(|objects| ("GIT_OBJECT_DIRECTORY", &**objects)).collect();
        let args = ["cat-file", "--batch-all-objects", "--unordered", "--buffer", "--batch-check=%(objectsize)"];
        let listed = self.ok(&args, &env, b"").await?;
        let bytes = listed.split(|byte| *byte == b'\n').map(number).fold(0, u64::saturating_add);
        match bytes > most {
            true => Err(too_large(format!("the objects of its history have {bytes} bytes"), most)),
            false => Ok(()),
        }
    }

    /// Refuses a history without its commit.
    async fn refuse_without(&self, commit: &CommitId, apart: Option<&Path>) -> Result<()> {
        let (objects, others) = self.object_folders(apart);
        match self.has_commit_among(commit, &apart_env(objects.as_deref(), &others)).await? {
            true => Ok(()),
            false => Err(Error::corrupt(format!("the history of {} lacks commit {commit}", self.path().display()))),
        }
    }

    /// The objects in a folder, and the repository's own as further ones.
    fn object_folders(&self, apart: Option<&Path>) -> (Option<PathBuf>, PathBuf) {
        (apart.map(|apart| apart.join("objects")), alternates(&[&self.objects()]))
    }

    /// Checks that the files of a commit or tree need no more than `room`: small objects can reference each other many
    /// times. `apart`: a folder with further objects.
    ///
    /// # Errors
    /// `refused` (`bundle_size`, `git_output`).
    pub async fn check_size(&self, tree: &CommitId, apart: Option<&Path>, room: Room) -> Result<()> {
        let (objects, others) = self.object_folders(apart);
        let env = apart_env(objects.as_deref(), &others);
        let listed = self.ok(&["ls-tree", "-r", "-t", "-l", "-z", tree.as_str()], &env, b"").await?;
        let (mut bytes, mut entries) = (0u64, 0u64);
        for entry in listed.split(|byte| *byte == 0).filter(|entry| !entry.is_empty()) {
            let facts = entry.split(|byte| *byte == b'\t').next().unwrap_or_default();
            // A directory has no size, but takes a block as well.
            let size = number(facts.rsplit(|byte| *byte == b' ').next().unwrap_or_default()).max(1);
            bytes = bytes.saturating_add(size.checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX));
            entries += 1;
        }
        if bytes > room.bytes {
            return Err(too_large(format!("the files of {tree} need {bytes} bytes"), room.bytes));
        }
        if entries > room.entries {
            return Err(Error::refused(format!("{tree} has {entries} files, and there is room for {}", room.entries))
                .reason("bundle_size")
                .hint("the file system has no more inodes: give a place on another one"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// A repository with one commit, packed.
    struct Packed {
        dir: tempfile::TempDir,
        commit: CommitId,
    }

    impl Packed {
        fn new(prepare: impl FnOnce(&Packed) -> String) -> Packed {
            let dir = tempfile::tempdir().expect("a folder");
            let mut packed = Packed { dir, commit: "0".repeat(40).parse().expect("an id") };
            std::fs::create_dir(packed.path("source")).expect("made");
            packed.git(&["init", "-q"], b"");
            let tree = prepare(&packed);
            let commit = packed.git(&["commit-tree", &tree, "-m", "one"], b"");
            let pack = packed.run(&["pack-objects", "--revs", "--stdout", "-q"], format!("{commit}\n").as_bytes());
            std::fs::write(packed.path("pack"), pack).expect("written");
            packed.commit = commit.parse().expect("an id");
            packed
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn run(&self, args: &[&str], input: &[u8]) -> Vec<u8> {
            use std::io::Write as _;
            let file = self.path("input");
            std::fs::File::create(&file).and_then(|mut file| file.write_all(input)).expect("written");
            let names = ["-c", "user.name=t", "-c", "user.email=t@t"];
            let mut command = Command::new("git");
            command.arg("-C").arg(self.path("source")).args(names).args(args);
            let output = command.stdin(std::fs::File::open(&file).expect("opened")).output().expect("git runs");
            assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
            output.stdout
        }

        fn git(&self, args: &[&str], input: &[u8]) -> String {
            String::from_utf8(self.run(args, input)).expect("text").trim().to_owned()
        }

        async fn create(&self, room: Room) -> Result<Repository> {
            let git = Rc::new(Git::open(self.path("log"))?);
            let head = Head { commit: self.commit.clone(), branch: Some("main".into()) };
            Repository::create(&git, &self.path("made"), &self.path("pack"), &head, room).await
        }
    }

    fn with_file(packed: &Packed, bytes: &[u8]) -> String {
        std::fs::write(packed.path("source").join("file"), bytes).expect("written");
        packed.git(&["add", "file"], b"");
        packed.git(&["write-tree"], b"")
    }

    const ROOM: Room = Room { bytes: 100 << 20, entries: 100 };

    #[tokio::test]
    async fn large_objects_are_refused() {
        let packed = Packed::new(|packed| with_file(packed, &vec![0; 4 << 20]));
        let small = std::fs::metadata(packed.path("pack")).expect("there").len();
        let refused = packed.create(Room { bytes: 1 << 20, ..ROOM }).await.expect_err("too large");
        assert!(small < 1 << 20 && refused.reason == "bundle_size", "{refused:?}");
        assert!(!packed.path("made/file").exists());
    }

    #[tokio::test]
    async fn small_files_take_blocks() {
        let many = |packed: &Packed| {
            let blob = packed.git(&["hash-object", "-w", "--stdin"], b"x");
            let entries: String = (0..50).map(|n| format!("100644 blob {blob}\t{n}\n")).collect();
            packed.git(&["mktree"], entries.as_bytes())
        };
        let packed = Packed::new(many);
        let refused = packed.create(Room { bytes: 100 << 10, ..ROOM }).await.expect_err("too large");
        assert_eq!(refused.reason, "bundle_size");
        std::fs::remove_dir_all(packed.path("made")).expect("removed");
        let refused = packed.create(Room { entries: 49, ..ROOM }).await.expect_err("too many");
        assert!(refused.message.contains("50 files"), "{refused:?}");
        std::fs::remove_dir_all(packed.path("made")).expect("removed");
        packed.create(ROOM).await.expect("made");
        assert_eq!(std::fs::read_to_string(packed.path("made/49")).expect("read"), "x");
    }

    #[tokio::test]
    async fn old_trees_are_admitted() {
        // A tree with one entry, whose mode and name git's own commands do not write.
        let tree = |entry: &'static [u8]| {
            move |packed: &Packed| {
                let blob = packed.git(&["hash-object", "-w", "--stdin"], b"x");
                let id: Vec<u8> =
                    (0..20).map(|n| u8::from_str_radix(&blob[2 * n..2 * n + 2], 16).expect("hexadecimal")).collect();
                let tree = [entry, &b"\0"[..], &id].concat();
                packed.git(&["hash-object", "-w", "-t", "tree", "--literally", "--stdin"], &tree)
            }
        };
        Packed::new(tree(b"0100644 file")).create(ROOM).await.expect("made");
        // A name that leads into the repository's own files is not.
        let refused = Packed::new(tree(b"100644 .GIT")).create(ROOM).await.expect_err("refused");
        assert_eq!(refused.reason, "git");
    }
}
