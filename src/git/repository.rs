//! One repository: its state, and how it is brought to another.

use std::cell::RefCell;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::SystemTime;

use futures::future::join;

use super::command::{Call, Git};
use super::left_out::LeftOut;
use super::overwritten::{Change, DIFF_TREE};
use super::settings::unsafe_setting;
use super::submodules::Submodule;
use super::worktrees;
use crate::core::error::{Error, Result};
use crate::core::freeze::marks::FileMarks;
use crate::core::freeze::refs::{CommitId, DEPENDENCY_LOCKS, DependencyLock, Head};
use crate::core::limits;
use crate::sys::fault;

/// The work tree of a repository.
#[derive(Debug, Clone)]
pub struct Repository {
    git: Rc<Git>,
    path: PathBuf,
    /// Where git keeps the commit and the index: of a submodule, below that of the outer repository.
    git_dir: PathBuf,
    /// Where it keeps objects and configuration: of a linked work tree, that of its repository.
    common_dir: PathBuf,
    /// How many repositories it is inside of.
    pub(super) depth: usize,
    /// Files of other members in the work tree.
    pub(super) left_out: LeftOut,
    /// The index of all files at the last reading of the state, which the next one continues.
    cached: Rc<RefCell<Option<CachedIndex>>>,
}

/// An index of all files as they were, in a file of the operation.
#[derive(Debug)]
struct CachedIndex {
    /// The file.
    at: PathBuf,
    /// Length, modification and change time (ns), and inode of the repository's own index.
    stamp: [i64; 4],
    /// The tree of the repository's index.
    index_tree: CommitId,
    /// The marks that it had.
    marks: FileMarks,
    differences: Differences,
}

/// How a working tree differed from its commit and index.
#[derive(Debug)]
struct Differences {
    commit: CommitId,
    work_tree: CommitId,
    left_out: LeftOut,
    /// From the commit, as git reports them.
    different: Vec<u8>,
    /// How many files the index does not have.
    untracked: u64,
}

/// What a repository is at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    /// Commit and branch.
    pub head: Head,
    /// Tree of the index.
    pub index_tree: CommitId,
    /// Tree of all files that are not ignored.
    pub work_tree: CommitId,
    /// Files that differ from the commit.
    pub changed: u64,
    /// Files among them that the index does not have.
    pub untracked: u64,
    /// Submodules with their own state.
    pub submodules: Vec<Submodule>,
    /// What trees do not say of its files.
    pub marks: FileMarks,
}

pub(super) fn failed(path: &Path) -> impl Fn(std::io::Error) -> Error {
    let path = path.display().to_string();
    move |error| Error::unavailable(format!("{path}: {error}"))
}

/// Directories of objects in git's own notation.
pub(super) fn alternates(directories: &[&Path]) -> PathBuf {
    let quoted = directories.iter().map(|directory| {
        let text = directory.display().to_string();
        format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"))
    });
    PathBuf::from(quoted.collect::<Vec<_>>().join(":"))
}

pub(super) fn id(output: &[u8]) -> Result<CommitId> {
    let text = String::from_utf8_lossy(output);
    text.trim().parse().map_err(|error: crate::core::freeze::refs::NotACommit| Error::internal(format!("git: {error}")))
}

/// The status of each difference in git's report.
fn statuses(reported: &[u8]) -> impl Iterator<Item = &[u8]> {
    reported.split(|byte| *byte == 0).step_by(2).filter(|field| !field.is_empty())
}

/// Whether jj works in this directory.
fn has_jj(path: &Path) -> bool {
    fs::symlink_metadata(path.join(".jj")).is_ok()
}

impl Repository {
    /// A repository, by its work tree, which may be a linked one.
    ///
    /// # Errors
    /// `notFound`, `unsupported` for a submodule, and for a `.git` file that leads elsewhere.
    pub fn open(git: &Rc<Git>, path: &Path) -> Result<Repository> {
        let shown = path.display();
        let inside = path.join(".git");
        match fs::symlink_metadata(&inside) {
            Ok(meta) if meta.is_dir() => {
                Ok(Repository::at(Rc::clone(git), path.to_owned(), (inside.clone(), inside), 0))
            }
            Ok(_) => Ok(Repository::at(Rc::clone(git), path.to_owned(), worktrees::places(path)?, 0)),
            Err(_) if has_jj(path) => {
                Err(Error::unsupported(format!("{shown} is a jj repository without a .git of its own"))
                    .reason("jj")
                    .hint("colocate it (`jj git colocation enable`), then add it again: it is captured through git"))
            }
            Err(_) => Err(Error::not_found(format!("{shown} is not the work tree of a git repository"))
                .reason("no_repository")
                .hint("give the directory that has .git")),
        }
    }

    /// A repository with its places.
    pub(super) fn at(
        git: Rc<Git>,
        path: PathBuf,
        (git_dir, common_dir): (PathBuf, PathBuf),
        depth: usize,
    ) -> Repository {
        Repository { git, path, git_dir, common_dir, depth, left_out: Rc::from([]), cached: Rc::default() }
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Checks that the repository's own configuration runs no programs.
    ///
    /// # Errors
    /// `refused` (`repository_settings`) if it might, `unsupported` if it is elsewhere.
    pub async fn check_settings(&self) -> Result<()> {
        let shown = self.path.display();
        if self.shared_dir().is_none() && fs::symlink_metadata(self.git_dir.join("commondir")).is_ok() {
            return Err(Error::unsupported(format!("{shown} shares the .git directory of another repository"))
                .reason("linked_repository"));
        }
        let shared = ["config", "config.worktree"].map(|name| self.common_dir.join(name));
        let own = self.shared_dir().map(|_| self.git_dir.join("config.worktree"));
        for file in shared.into_iter().chain(own) {
            let name = file.to_str().ok_or_else(|| Error::invalid("the path is not UTF-8"))?;
            match fs::symlink_metadata(&file) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(error) => return Err(failed(&file)(error)),
                Ok(meta) if meta.is_file() && meta.len() <= limits::GIT_CONFIG_BYTES => {}
                Ok(_) => {
                    return Err(Error::refused(format!("{} is not a configuration of git", file.display()))
                        .reason("repository_settings"));
                }
            }
            let listed = self.ok(&["config", "--file", name, "--no-includes", "--list", "-z"], &[], b"").await?;
            if let Some(setting) = unsafe_setting(&listed) {
                return Err(Error::refused(format!("{} may run programs: {setting}", file.display()))
                    .reason("repository_settings")
                    .hint(format!(
                        "remove it, or set it for yourself after reading it: git config --global {setting} …"
                    )));
            }
        }
        Ok(())
    }

    /// The program that works in it.
    pub fn git(&self) -> &Rc<Git> {
        &self.git
    }

    /// A command in this repository.
    pub(super) fn call(&self) -> Call<'_> {
        Call { repository: Some(&self.path), ..Call::default() }
    }

    pub(super) fn git_dir(&self) -> &Path {
        &self.git_dir
    }

    pub(super) fn common_dir(&self) -> &Path {
        &self.common_dir
    }

    /// Git's objects.
    pub(super) fn objects(&self) -> PathBuf {
        self.common_dir.join("objects")
    }

    pub(super) async fn ok(&self, args: &[&str], env: &[(&str, &Path)], input: &[u8]) -> Result<Vec<u8>> {
        self.git.ok(Call { args, env, input, repository: Some(&self.path), ..Call::default() }).await
    }

    /// The present commit and branch.
    ///
    /// # Errors
    /// `refused` without a commit.
    pub async fn head(&self) -> Result<Head> {
        let args = ["symbolic-ref", "-q", "--short", "HEAD"];
        let (commit, branch) = join(
            self.ok(&["rev-parse", "--verify", "HEAD^{commit}"], &[], b""),
            self.git.asks(Call { args: &args, ..self.call() }),
        )
        .await;
        let commit = commit.map_err(|error| {
            Error::refused(format!("{} has no commit yet: {}", self.path.display(), error.message)).reason("no_commit")
        })?;
        let branch = branch?.map(|branch| String::from_utf8_lossy(&branch).trim().to_owned());
        Ok(Head { commit: id(&commit)?, branch })
    }

    /// Reads the state. New objects are written to `objects` in `scratch`; with `keep`, to the repository itself. The
    /// repository's index, files and references stay untouched.
    ///
    /// # Errors
    /// `refused` during a merge, `unsupported` with a submodule whose .git is elsewhere and of a sparse checkout, and errors
    /// of git.
    pub async fn state(&self, scratch: &Path, keep: bool) -> Result<State> {
        let (index, objects, own) = (scratch.join("index"), scratch.join("objects"), self.objects());
        fs::create_dir_all(&objects).map_err(failed(&objects))?;
        // A git that was killed leaves its lock.
        let _ = fs::remove_file(scratch.join("index.lock"));
        let others = alternates(&[&own]);
        let mut env: Vec<(&str, &Path)> = vec![("GIT_INDEX_FILE", &index)];
        if !keep {
            env.extend([("GIT_OBJECT_DIRECTORY", &*objects), ("GIT_ALTERNATE_OBJECT_DIRECTORIES", &*others)]);
        }
        let stamp = self.index_stamp();
        let cached = self
            .cached
            .take()
            .filter(|cached| !keep && cached.at == index && Some(cached.stamp) == stamp && index.exists());
        // Its entries name objects that are in `scratch`; files that did not change since are not read again.
        let cached_is_usable = async {
            match cached {
                Some(_) => self.ignores_none(&env).await,
                None => Ok(false),
            }
        };
        let (head, is_usable) = join(self.head(), cached_is_usable).await;
        let (head, cached) = (head?, if is_usable? { cached } else { None });
        let (index_tree, marks, known) = match cached {
            Some(cached) => (cached.index_tree, cached.marks, Some(cached.differences)),
            None => (self.index_tree(&head, &index, &env).await?, self.unmark(&env).await?, None),
        };
        let begun = SystemTime::now();
        let submodules = self.submodules(scratch, keep, &env).await?;
        // Git must not look into them: it would run what is configured there.
        let mut apart = self.without_left_out();
        apart.extend(submodules.iter().map(|one| format!(":(exclude,top,literal){}", one.path)));
        let mut add = self.add().to_vec();
        add.extend(apart.iter().map(String::as_str));
        self.ok(&add, &env, b"").await?;
        self.add_tracked_parts(&env).await?;
        self.remove_left_out(&env).await?;
        self.add_links(&submodules, &env).await?;
        let work_tree = id(&self.ok(&["write-tree"], &env, b"").await?)?;
        // A file that changed in the second in which it was read, or later, is read again.
        let written = File::options().write(true).open(&index);
        written.and_then(|file| file.set_modified(begun)).map_err(failed(&index))?;
        let is_known = |known: &Differences| {
            (&known.commit, &known.work_tree, &known.left_out) == (&head.commit, &work_tree, &self.left_out)
        };
        let differences = match known.filter(is_known) {
            Some(known) => known,
            None => {
                let (different, new) = join(
                    self.compared(head.commit.as_str(), work_tree.as_str(), &env),
                    self.compared(index_tree.as_str(), work_tree.as_str(), &env),
                )
                .await;
                let untracked = statuses(&new?).filter(|status| *status == b"A").count() as u64;
                let (commit, work_tree) = (head.commit.clone(), work_tree.clone());
                let left_out = Rc::clone(&self.left_out);
                Differences { commit, work_tree, left_out, different: different?, untracked }
            }
        };
        let changed = statuses(&differences.different).count() as u64;
        let untracked = differences.untracked;
        // The rights of files are in no tree.
        let private = self.private_among(&differences.different).await?;
        if let (Some(stamp), false, true) = (stamp, keep, submodules.is_empty()) {
            let (index_tree, marks) = (index_tree.clone(), marks.clone());
            self.cached.replace(Some(CachedIndex { at: index, stamp, index_tree, marks, differences }));
        }
        let marks = FileMarks { private, ..marks };
        Ok(State { head, index_tree, work_tree, changed, untracked, submodules, marks })
    }

    /// The command that adds the working tree to an index, without what is no work of the user.
    fn add(&self) -> &'static [&'static str] {
        // Parts of a member that is restored or imported into the repository are beside its place, as `.NAME.ryokan`.
        const ALL: [&str; 7] = [
            "add",
            "--all",
            "--",
            ".",
            ":(exclude,glob)**/.*.ryokan",
            ":(exclude,glob)**/.*.ryokan/**",
            // jj's own store is opaque: it is neither captured nor changed, even if nothing ignores it.
            ":(top,exclude).jj",
        ];
        if has_jj(&self.path) { &ALL } else { &ALL[..6] }
    }

    /// Adds changes of tracked files that have the names of such parts: they are work of the user.
    async fn add_tracked_parts(&self, env: &[(&str, &Path)]) -> Result<()> {
        const PARTS: [&str; 2] = [":(glob)**/.*.ryokan", ":(glob)**/.*.ryokan/**"];
        let tracked = self.ok(&[&["ls-files", "--cached", "-z", "--"][..], &PARTS].concat(), env, b"").await?;
        if tracked.is_empty() {
            return Ok(());
        }
        self.ok(&["update-index", "--remove", "-z", "--stdin"], env, &tracked).await.map(drop)
    }

    /// Whether no file of the index is ignored by now: git would keep it as a tracked one.
    async fn ignores_none(&self, env: &[(&str, &Path)]) -> Result<bool> {
        let ignored = self.ok(&["ls-files", "--cached", "--ignored", "--exclude-standard", "-z"], env, b"").await?;
        Ok(ignored.is_empty())
    }

    /// What tells one version of the repository's index from another.
    fn index_stamp(&self) -> Option<[i64; 4]> {
        let meta = fs::metadata(self.git_dir().join("index")).ok()?;
        let time = |seconds: i64, ns: i64| seconds.saturating_mul(1_000_000_000).saturating_add(ns);
        let (modified, changed) = (time(meta.mtime(), meta.mtime_nsec()), time(meta.ctime(), meta.ctime_nsec()));
        Some([i64::try_from(meta.len()).ok()?, modified, changed, meta.ino().cast_signed()])
    }

    /// Copies the repository's index to `index`; returns its tree.
    async fn index_tree(&self, head: &Head, index: &Path, env: &[(&str, &Path)]) -> Result<CommitId> {
        let _ = fs::remove_file(index);
        match fs::metadata(self.git_dir().join("index")) {
            Ok(meta) if meta.len() <= limits::GIT_INDEX_BYTES => {
                fs::copy(self.git_dir().join("index"), index).map_err(failed(index))?;
                // Git reads files that changed in the second of the index's own time, and trusts older ones.
                let copy = File::options().write(true).open(index).map_err(failed(index))?;
                meta.modified().and_then(|time| copy.set_modified(time)).map_err(failed(index))?;
            }
            Ok(_) => return Err(Error::refused("the index is too large").reason("git_index")),
            Err(_) => drop(self.ok(&["read-tree", head.commit.as_str()], env, b"").await?),
        }
        let index_tree = self.ok(&["write-tree"], env, b"").await.map_err(|error| {
            Error::refused(format!("the index of {} cannot be captured: {}", self.path.display(), error.message))
                .reason("git_index")
                .hint("end the merge, rebase or sparse checkout that is under way")
        })?;
        id(&index_tree)
    }

    /// The lock files of package managers in the last [`Self::state`], whose index is in `scratch`.
    ///
    /// # Errors
    /// Errors of git.
    pub async fn dependencies(&self, scratch: &Path) -> Result<Vec<DependencyLock>> {
        let index = scratch.join("index");
        let patterns: Vec<String> = DEPENDENCY_LOCKS.iter().map(|name| format!(":(glob)**/{name}")).collect();
        let mut args = vec!["ls-files", "--stage", "-z", "--"];
        args.extend(patterns.iter().map(String::as_str));
        let listed = self.ok(&args, &[("GIT_INDEX_FILE", &index)], b"").await?;
        let mut found = Vec::new();
        for entry in listed.split(|byte| *byte == 0).filter(|entry| !entry.is_empty()) {
            let entry = String::from_utf8_lossy(entry);
            let Some((facts, path)) = entry.split_once('\t') else { continue };
            let blob = facts.split(' ').nth(1).unwrap_or_default();
            let is_installed = path.split('/').any(|part| part == "node_modules");
            if !is_installed && found.len() < limits::LOCKED_DEPENDENCIES {
                found.push(DependencyLock { path: path.to_owned(), digest: format!("git:{blob}") });
            }
        }
        Ok(found)
    }

    /// The differences between two trees, as git reports them.
    async fn compared(&self, from: &str, to: &str, env: &[(&str, &Path)]) -> Result<Vec<u8>> {
        let (args, excluded) = ([&DIFF_TREE[..], &[from, to]].concat(), self.without_left_out());
        self.ok(&Repository::compare(&args, &excluded), env, b"").await
    }

    /// Refuses a switch that would destroy files which no capture holds. `scratch` holds the objects of the present state,
    /// `apart` those of the other one.
    ///
    /// # Errors
    /// `refused` (`ignored_files`, `open_database`) names some of them; errors of git.
    pub async fn check_ignored(&self, scratch: &Path, apart: &Path, (from, to): (&State, &State)) -> Result<()> {
        let objects = scratch.join("objects");
        let others = alternates(&[&self.objects(), &apart.join("objects")]);
        let env = [("GIT_OBJECT_DIRECTORY", &*objects), ("GIT_ALTERNATE_OBJECT_DIRECTORIES", &*others)];
        let args = [&DIFF_TREE[..], &[from.work_tree.as_str(), to.work_tree.as_str()]].concat();
        let excluded = self.without_left_out();
        let reported = self.ok(&Repository::compare(&args, &excluded), &env, b"").await?;
        let (change, root) = (Change::read(&reported), self.path.clone());
        let look = move || (change.destroyed(&root), change.open_databases(&root));
        let looked = tokio::task::spawn_blocking(look).await;
        let (found, databases) = looked.map_err(|error| Error::internal(error.to_string()))?;
        let named = |paths: &[PathBuf]| paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>();
        if !databases.is_empty() {
            return Err(Error::refused(format!(
                "the restore would replace databases of {} that programs may have open: {}",
                self.path.display(),
                named(&databases).join(", ")
            ))
            .reason("open_database")
            .hint("add them to the group with --database, or let git ignore them"));
        }
        if found.is_empty() {
            return Ok(());
        }
        let names = named(&found);
        Err(Error::refused(format!(
            "{} has ignored files where the restore writes its own: {}",
            self.path.display(),
            names.join(", ")
        ))
        .reason("ignored_files")
        .hint("no freeze holds ignored files: move these away, then try again"))
    }

    /// Packs the objects of a state that its commit does not have, into a new file. Returns `None` if there are none.
    ///
    /// # Errors
    /// Errors of git.
    pub async fn pack(&self, scratch: &Path, state: &State) -> Result<Option<PathBuf>> {
        let (objects, to) = (scratch.join("objects"), scratch.join("pack"));
        let own = alternates(&[&self.objects()]);
        let env = [("GIT_OBJECT_DIRECTORY", &*objects), ("GIT_ALTERNATE_OBJECT_DIRECTORIES", &*own)];
        let tree = id(&self.ok(&["rev-parse", &format!("{}^{{tree}}", state.head.commit)], &[], b"").await?)?;
        if state.work_tree == tree && state.index_tree == tree {
            return Ok(None);
        }
        let input = format!("{}\n{}\n^{}\n", state.work_tree, state.index_tree, state.head.commit);
        let args = ["pack-objects", "--revs", "--thin", "--stdout", "-q"];
        let call = Call {
            args: &args,
            env: &env,
            input: input.as_bytes(),
            repository: Some(&self.path),
            to: Some(&to),
            ..Call::default()
        };
        self.git.ok(call).await?;
        Ok(Some(to))
    }

    /// Checks that the repository has this commit.
    ///
    /// # Errors
    /// `notFound` (`commit_gone`) without it.
    pub async fn check_commit(&self, commit: &CommitId) -> Result<()> {
        self.check_commit_among(commit, &[]).await
    }

    async fn check_commit_among(&self, commit: &CommitId, env: &[(&str, &Path)]) -> Result<()> {
        match self.has_commit_among(commit, env).await? {
            true => Ok(()),
            false => Err(Error::not_found(format!("{} no longer has commit {commit}", self.path.display()))
                .reason("commit_gone")
                .hint(format!("fetch it from where it was pushed: `git fetch REMOTE {commit}`"))),
        }
    }

    /// Checks that a captured state can be restored here: its commit is present, and the pack completes it.
    ///
    /// # Errors
    /// `notFound` without the commit, `corrupt` if objects are missing.
    pub async fn verify(&self, scratch: &Path, state: &State, pack: Option<&Path>) -> Result<()> {
        let (objects, own) = (scratch.join("objects"), alternates(&[&self.objects()]));
        fs::create_dir_all(&objects).map_err(failed(&objects))?;
        let env = [("GIT_OBJECT_DIRECTORY", &*objects), ("GIT_ALTERNATE_OBJECT_DIRECTORIES", &*own)];
        self.check_commit_among(&state.head.commit, &env).await?;
        if let Some(pack) = pack {
            self.unpack(pack, &env).await?;
        }
        for tree in [&state.work_tree, &state.index_tree] {
            // Names every object beneath, and fails at the first that is missing.
            self.ok(&["rev-list", "--objects", "--quiet", tree.as_str()], &env, b"").await.map_err(|error| {
                Error::corrupt(format!(
                    "the captured files of {} are incomplete: {}",
                    self.path.display(),
                    error.message
                ))
            })?;
        }
        Ok(())
    }

    /// Adds the objects of a pack to the repository; nothing refers to them yet.
    ///
    /// # Errors
    /// Errors of git.
    pub async fn prepare(&self, pack: &Path) -> Result<()> {
        self.unpack(pack, &[]).await
    }

    pub(super) async fn unpack(&self, pack: &Path, env: &[(&str, &Path)]) -> Result<()> {
        // Loose objects would take the space of whole ones.
        let args = ["index-pack", "--stdin", "--fix-thin"];
        let call = Call { args: &args, env, repository: Some(&self.path), from: Some(pack), ..Call::default() };
        self.git.ok(call).await.map(drop)
    }

    /// Changes files, index and commit to those of a state, whose objects are present. `scratch` holds the index of the
    /// last [`Self::state`]: files changed since then fail the switch. `attach`: return to the branch if it is still at
    /// the commit, and no other work tree is on it. May be repeated after another [`Self::state`].
    ///
    /// # Errors
    /// Errors of git and of files; the repository may be between two states then.
    pub async fn switch(&self, scratch: &Path, to: &State, attach: bool) -> Result<()> {
        fault::point("repository.files.switch").map_err(failed(&self.path))?;
        let _ = fs::remove_file(scratch.join("staged.lock"));
        let work_tree = self.tree_without_left_out(scratch, &to.work_tree).await?;
        self.check_out(scratch, &work_tree, &to.marks.private).await?;
        let staged = scratch.join("staged");
        let _ = fs::remove_file(&staged);
        let env = [("GIT_INDEX_FILE", &*staged)];
        self.ok(&["read-tree", to.index_tree.as_str()], &env, b"").await?;
        // Records the files' times; it fails where files differ from the index, which is no error here.
        let refresh = ["update-index", "-q", "--refresh"];
        self.git.run(Call { args: &refresh, env: &env, repository: Some(&self.path), ..Call::default() }).await?;
        self.mark(&to.marks, &env).await?;
        self.place_index(&staged)?;
        fault::point("repository.head.switch").map_err(failed(&self.path))?;
        let commit = to.head.commit.as_str();
        if let (true, Some(branch)) = (attach, &to.head.branch) {
            let name = format!("refs/heads/{branch}");
            let args = ["rev-parse", "-q", "--verify", &name];
            let at = self.git.asks(Call { args: &args, ..self.call() }).await?.map(|at| id(&at)).transpose()?;
            if at.as_ref() == Some(&to.head.commit) && !self.is_elsewhere(&name) {
                return self.ok(&["symbolic-ref", "-m", "ryokan", "HEAD", &name], &[], b"").await.map(drop);
            }
        }
        self.ok(&["update-ref", "--no-deref", "-m", "ryokan", "HEAD", commit], &[], b"").await.map(drop)
    }

    /// Puts an index in the place of the repository's, with git's own locking.
    fn place_index(&self, staged: &Path) -> Result<()> {
        let (lock, index) = (self.git_dir().join("index.lock"), self.git_dir().join("index"));
        let bytes = fs::read(staged).map_err(failed(staged))?;
        // Complete before it is the lock: a lock that a killed daemon leaves is recognised by its bytes.
        let ready = self.git_dir().join("index.ryokan");
        let mut file = File::create(&ready).map_err(failed(&ready))?;
        file.write_all(&bytes).and_then(|()| file.sync_all()).map_err(failed(&ready))?;
        let locked = fs::hard_link(&ready, &lock);
        let _ = fs::remove_file(&ready);
        locked.map_err(|error| match error.kind() {
            std::io::ErrorKind::AlreadyExists => {
                Error::busy(format!("another git changes {}: {} exists", self.path.display(), lock.display()))
                    .reason("git_lock")
            }
            _ => failed(&lock)(error),
        })?;
        let placed = fault::point("repository.index.switch").and_then(|()| fs::rename(&lock, &index));
        placed.map_err(|error| {
            let _ = fs::remove_file(&lock);
            failed(&lock)(error)
        })
    }

    /// Removes the lock that a killed daemon left: only one with the bytes that it was about to place.
    pub fn release_index(&self, scratch: &Path) {
        let lock = self.git_dir().join("index.lock");
        let (Ok(there), Ok(own)) = (fs::read(&lock), fs::read(scratch.join("staged"))) else { return };
        if own == there {
            let _ = fs::remove_file(&lock);
        }
    }
}
