//! The size of the workspace, counted in slices while something runs: each tick looks at a bounded number of files, and
//! after a whole round the pause grows with what the round cost. Links are never followed.

use std::collections::HashSet;
use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::time::Instant;

use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::{Mode, fstatat};

use super::Verdict;
use super::tree::find;

/// Files of one tick.
const SLICE: usize = 2_000;
/// Files and folders that a workspace may hold: what a walk can remember.
pub const FILES_MAX: u64 = 4_000_000;
/// Pause between the slices of a round.
const SLICE_PAUSE_MS: u64 = 10;
/// Shortest pause between two rounds.
const ROUND_PAUSE_MS: u64 = 1_000;
/// A round takes at most this share of the time, as a divisor.
const ROUND_SHARE: u64 = 20;

/// Watches the size of a workspace.
#[derive(Debug)]
pub struct WorkspaceWatch {
    root: OwnedFd,
    limit_bytes: u64,
    round: Round,
    last_bytes: u64,
}

/// One walk through everything.
#[derive(Debug, Default)]
struct Round {
    /// Folders still to be read, relative to the root.
    folders: Vec<PathBuf>,
    /// The folder in hand.
    here: PathBuf,
    open: Option<OwnedFd>,
    /// Files of it that are still to be looked at.
    names: Vec<OsString>,
    bytes: u64,
    files: u64,
    /// Files with several names, which count once.
    linked: HashSet<(u64, u64)>,
    spent_ms: u64,
    begun: bool,
}

impl WorkspaceWatch {
    /// A watch over the folder.
    pub fn new(root: OwnedFd, limit_bytes: u64) -> WorkspaceWatch {
        WorkspaceWatch { root, limit_bytes, round: Round::default(), last_bytes: 0 }
    }

    /// The size that the last whole round found.
    pub fn last_bytes(&self) -> u64 {
        self.last_bytes
    }

    /// Whether a round has begun that is not over.
    pub fn is_counting(&self) -> bool {
        self.round.begun
    }

    /// Looks at the next slice.
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

    /// Counts one slice; true when the round is over.
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
    /// Takes the next folder in hand; one that is gone or closed to us holds nothing that we could count.
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

    /// Counts one file of the folder in hand.
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
