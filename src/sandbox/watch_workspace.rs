//! The size limit of the workspace: counts in slices while something runs. Each tick covers a
//! bounded number of files, and the pause after a round grows with the round's cost. Follows no
//! link. Runs in init.

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
    last_bytes: u64,
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
}

impl WorkspaceWatch {
    /// Creates a watch on the folder.
    pub fn new(root: OwnedFd, limit_bytes: u64) -> WorkspaceWatch {
        WorkspaceWatch { root, limit_bytes, round: Round::default(), last_bytes: 0 }
    }

    /// The size found by the last complete round.
    pub fn last_bytes(&self) -> u64 {
        self.last_bytes
    }

    /// Whether a round is in progress.
    pub fn is_counting(&self) -> bool {
        self.round.begun
    }

    /// Measures the next slice.
    pub fn tick(&mut self) -> Verdict {
        let started = Instant::now();
        if !self.round.begun {
            self.round = Round { folders: vec![PathBuf::new()], begun: true, ..Round::default() };
        }
        let done = self.slice();
        let round = &mut self.round;
        round.spent_ms += started.elapsed().as_millis() as u64;
        if round.bytes > self.limit_bytes {
            let used = round.bytes;
            self.round = Round::default();
            return Verdict::Beyond { used, limit: self.limit_bytes, unit: "bytes" };
        }
        if round.files > FILES_MAX {
            let used = round.files;
            self.round = Round::default();
            return Verdict::Beyond { used, limit: FILES_MAX, unit: "files" };
        }
        if !done {
            return Verdict::Within { next_ms: SLICE_PAUSE_MS };
        }
        let next_ms = ROUND_PAUSE_MS.max(round.spent_ms * ROUND_SHARE);
        self.last_bytes = round.bytes;
        self.round = Round::default();
        Verdict::Within { next_ms }
    }

    /// Counts one slice; true when the round is complete.
    fn slice(&mut self) -> bool {
        let round = &mut self.round;
        for _ in 0..SLICE {
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
        std::fs::write(folder.path().join("x"), vec![1; 2 << 20]).expect("written");
        let found = whole_round(&mut watch(folder.path(), 1 << 20));
        assert!(matches!(found, Verdict::Beyond { used, unit: "bytes", .. } if used >= 2 << 20), "{found:?}");
    }
}
