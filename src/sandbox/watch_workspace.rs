//! The size limit of the workspace: counts in slices while something runs. Each tick covers a
//! bounded number of files, and the pause after a round grows with the round's cost. Follows no
//! link. Runs in init.
//!
//! Code must be able to delete files, so a workspace that is beyond its limit already may stay as
//! large as it is: only further growth counts then.

use std::collections::HashSet;
use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::time::Instant;

use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::{Mode, fstatat};

use super::Verdict;
use super::tree::find;

/// Files per tick.
const SLICE: usize = 2_000;
/// Limit of files and folders in a workspace: the walk must remember them.
pub const FILES_MAX: u64 = 4_000_000;
/// Files counted before code runs: enough for the files of a new kernel.
const FIRST_SLICE: usize = 64;
/// Growth of a workspace beyond its limit between two rounds that does not count.
const GROWTH_BYTES: u64 = 4 << 20;
/// Pause between the slices of a round.
const SLICE_PAUSE_MS: u64 = 10;
/// Shortest pause between two rounds.
const ROUND_PAUSE_MS: u64 = 1_000;
/// Largest share of time for rounds, as a divisor.
const ROUND_SHARE: u64 = 20;

/// Watches the size of a workspace.
#[derive(Debug)]
pub struct WorkspaceWatch {
    root: OwnedFd,
    limit_bytes: u64,
    round: Round,
    /// The last complete round's result.
    last: Option<u64>,
}

/// A walk through the workspace.
#[derive(Debug, Default)]
struct Round {
    /// Folders still to be read, relative to the root.
    folders: Vec<PathBuf>,
    /// The current folder.
    here: PathBuf,
    open: Option<OwnedFd>,
    /// Its remaining files.
    names: Vec<OsString>,
    bytes: u64,
    files: u64,
    /// Files with several names, counted once.
    linked: HashSet<(u64, u64)>,
    spent_ms: u64,
    begun: bool,
    /// Whether the round was found beyond its bound.
    reported: bool,
}

impl WorkspaceWatch {
    /// Creates a watch on the folder, before code runs in it.
    pub fn new(root: OwnedFd, limit_bytes: u64) -> WorkspaceWatch {
        let mut watch = WorkspaceWatch { root, limit_bytes, round: Round::default(), last: None };
        watch.round.begin();
        if watch.slice(FIRST_SLICE) {
            watch.end_round();
        }
        watch
    }

    /// The size found by the last complete round.
    pub fn last_bytes(&self) -> u64 {
        self.last.unwrap_or(0)
    }

    /// The size that the present round may find.
    fn bound(&self) -> u64 {
        match self.last {
            // A workspace of unknown size: this round counts what is there.
            None => u64::MAX,
            Some(last) if last > self.limit_bytes => last.saturating_add(GROWTH_BYTES),
            Some(_) => self.limit_bytes,
        }
    }

    fn end_round(&mut self) {
        self.last = Some(self.round.bytes);
        self.round = Round::default();
    }

    /// Whether a round is in progress.
    pub fn is_counting(&self) -> bool {
        self.round.begun
    }

    /// Measures the next slice.
    pub fn tick(&mut self) -> Verdict {
        let started = Instant::now();
        if !self.round.begun {
            self.round.begin();
        }
        let bound = self.bound();
        let done = self.slice(SLICE);
        let round = &mut self.round;
        round.spent_ms += started.elapsed().as_millis() as u64;
        if round.files > FILES_MAX {
            let used = round.files;
            self.round = Round::default();
            return Verdict::Beyond { used, limit: FILES_MAX, unit: "files" };
        }
        let (used, next_ms) = (round.bytes, ROUND_PAUSE_MS.max(round.spent_ms * ROUND_SHARE));
        let is_news = used > bound && !std::mem::replace(&mut round.reported, used > bound);
        if done {
            self.end_round();
        }
        match (is_news, done) {
            (true, _) => Verdict::Beyond { used, limit: self.limit_bytes, unit: "bytes" },
            (false, true) => Verdict::Within { next_ms },
            (false, false) => Verdict::Within { next_ms: SLICE_PAUSE_MS },
        }
    }

    /// Counts one slice; true when the round is complete.
    fn slice(&mut self, files: usize) -> bool {
        let round = &mut self.round;
        for _ in 0..files {
            while round.names.is_empty() {
                let Some(folder) = round.folders.pop() else { return true };
                round.read(&self.root, folder);
            }
            round.count_next();
        }
        false
    }
}

impl Round {
    fn begin(&mut self) {
        *self = Round { folders: vec![PathBuf::new()], begun: true, ..Round::default() };
    }

    /// Opens the next folder. A folder that is gone or unreadable counts as empty.
    fn read(&mut self, root: &OwnedFd, folder: PathBuf) {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let opened = find(root.as_fd(), &folder).ok().and_then(|fd| openat(&fd, ".", flags, Mode::empty()).ok());
        self.open = opened;
        self.here = folder;
        let Some(open) = &self.open else { return };
        if let Ok(entries) = std::fs::read_dir(format!("/proc/self/fd/{}", open.as_raw_fd())) {
            self.names = entries.flatten().map(|entry| entry.file_name()).take(FILES_MAX as usize + 1).collect();
        }
    }

    /// Counts one file of the current folder.
    fn count_next(&mut self) {
        let (Some(name), Some(open)) = (self.names.pop(), &self.open) else { return };
        let Ok(found) = fstatat(open, name.as_os_str(), AtFlags::AT_SYMLINK_NOFOLLOW) else { return };
        self.files += 1;
        let is_folder = found.st_mode & libc::S_IFMT == libc::S_IFDIR;
        if found.st_nlink > 1 && !is_folder && !self.linked.insert((found.st_dev, found.st_ino)) {
            return;
        }
        self.bytes += found.st_blocks as u64 * 512;
        if is_folder {
            self.folders.push(self.here.join(name));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watch(folder: &std::path::Path, limit: u64) -> WorkspaceWatch {
        WorkspaceWatch::new(std::fs::File::open(folder).expect("opened").into(), limit)
    }

    fn whole_round(watch: &mut WorkspaceWatch) -> Verdict {
        loop {
            match watch.tick() {
                Verdict::Within { next_ms: SLICE_PAUSE_MS } => {}
                other => return other,
            }
        }
    }

    #[test]
    fn size_counts_inodes_once() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let outside = tempfile::tempdir().expect("temporary folder");
        std::fs::write(outside.path().join("big"), vec![1; 1 << 20]).expect("written");
        let deep = folder.path().join("a/b/c");
        std::fs::create_dir_all(&deep).expect("made");
        std::fs::write(deep.join("x"), vec![1; 100_000]).expect("written");
        std::fs::hard_link(deep.join("x"), folder.path().join("again")).expect("linked");
        std::os::unix::fs::symlink(outside.path(), folder.path().join("out")).expect("linked");
        for i in 0..3000 {
            std::fs::write(folder.path().join(format!("f{i}")), b"").expect("written");
        }
        let mut watch = watch(folder.path(), 1 << 20);
        assert!(matches!(whole_round(&mut watch), Verdict::Within { .. }));
        assert!((100_000..400_000).contains(&watch.last_bytes()), "{}", watch.last_bytes());
    }

    #[test]
    fn oversized_workspace_is_detected() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let mut watch = watch(folder.path(), 1 << 20);
        std::fs::write(folder.path().join("x"), vec![1; 2 << 20]).expect("written");
        let found = whole_round(&mut watch);
        assert!(matches!(found, Verdict::Beyond { used, unit: "bytes", .. } if used >= 2 << 20), "{found:?}");
    }

    #[test]
    fn only_growth_beyond_limit_counts() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let write = |name: &str, mib: usize| {
            std::fs::write(folder.path().join(name), vec![1; mib << 20]).expect("written");
        };
        write("x", 2);
        let mut watch = watch(folder.path(), 1 << 20);
        let beyond = |watch: &mut WorkspaceWatch| matches!(whole_round(watch), Verdict::Beyond { .. });
        assert!(!beyond(&mut watch), "it was so before");
        write("y", 1);
        assert!(!beyond(&mut watch), "room to delete");
        write("z", 6);
        assert!(beyond(&mut watch) && !beyond(&mut watch), "once");
        ["x", "y", "z"].iter().for_each(|name| std::fs::remove_file(folder.path().join(name)).expect("removed"));
        assert!(!beyond(&mut watch));
        write("x", 2);
        assert!(beyond(&mut watch), "the limit holds again");
    }

    #[test]
    fn unknown_workspace_is_counted_first() {
        let folder = tempfile::tempdir().expect("temporary folder");
        for i in 0..3 * SLICE {
            std::fs::write(folder.path().join(format!("f{i}")), b"1").expect("written");
        }
        let mut watch = watch(folder.path(), 1 << 20);
        assert!(watch.is_counting());
        assert!(matches!(whole_round(&mut watch), Verdict::Within { .. }));
        assert!(watch.last_bytes() > 1 << 20);
    }
}
