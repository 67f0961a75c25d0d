//! Test support: workspaces, and observation of their content without this module's code.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{Tracker, WorkspacePaths};
use crate::store::Store;
use crate::sys::fault::tests::crash_dir;
use crate::sys::inode;

/// An observed entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Seen {
    pub what: Thing,
    pub mode: u32,
    pub owner: (u32, u32),
    pub modified: (i64, i64),
    pub attributes: Vec<(Vec<u8>, Vec<u8>)>,
}

#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Thing {
    File {
        bytes: Vec<u8>,
        /// Start and end of each data range.
        data: Vec<(u64, u64)>,
        /// The first of its hard links.
        same_as: PathBuf,
    },
    Folder,
    Symlink(PathBuf),
    Fifo,
    Socket,
}

impl std::fmt::Debug for Thing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Thing::File { bytes, data, same_as } => {
                write!(f, "File({} bytes {}, {data:?}, {same_as:?})", bytes.len(), blake3::hash(bytes).to_hex())
            }
            Thing::Folder => f.write_str("Folder"),
            Thing::Symlink(target) => write!(f, "Symlink({target:?})"),
            Thing::Fifo => f.write_str("Fifo"),
            Thing::Socket => f.write_str("Socket"),
        }
    }
}

pub(crate) type Observed = BTreeMap<PathBuf, Seen>;

/// Observes everything in a folder, and the folder itself under an empty path.
pub(crate) fn observe(root: &Path) -> Observed {
    let mut seen = Observed::new();
    let mut links = BTreeMap::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let mut names: Vec<OsString> =
            root.join(&folder).read_dir().expect("readable").map(|e| e.expect("readable").file_name()).collect();
        names.sort();
        if folder.as_os_str().is_empty() {
            names.push(OsString::new());
        }
        for name in names {
            let path = if name.is_empty() { PathBuf::new() } else { folder.join(&name) };
            let at = if name.is_empty() { root.to_owned() } else { root.join(&path) };
            let meta = at.symlink_metadata().expect("there");
            let kind = meta.file_type();
            let what = if kind.is_dir() {
                if !name.is_empty() {
                    folders.push(path.clone());
                }
                Thing::Folder
            } else if kind.is_symlink() {
                Thing::Symlink(at.read_link().expect("a link"))
            } else if kind.is_fifo() {
                Thing::Fifo
            } else if kind.is_socket() {
                Thing::Socket
            } else {
                let bytes = std::fs::read(&at).expect("readable");
                Thing::File { data: data(&at, bytes.len() as u64), bytes, same_as: meta.ino().to_string().into() }
            };
            if matches!(what, Thing::File { .. }) {
                let first: &mut PathBuf = links.entry(meta.ino().to_string()).or_insert_with(|| path.clone());
                *first = path.clone().min(first.clone());
            }
            let mut attributes = Vec::new();
            if kind.is_file() || kind.is_dir() {
                let file = std::fs::File::open(&at).expect("opened");
                for name in inode::attributes(file.as_fd()).expect("listed") {
                    let value = inode::attribute(file.as_fd(), &name).expect("there");
                    attributes.push((name, value));
                }
                attributes.sort();
            }
            let mode = meta.mode() & 0o7777;
            let (owner, modified) = ((meta.uid(), meta.gid()), (meta.mtime(), meta.mtime_nsec()));
            seen.insert(path, Seen { what, mode, owner, modified, attributes });
        }
    }
    for entry in seen.values_mut() {
        if let Thing::File { same_as, .. } = &mut entry.what {
            *same_as = links[&same_as.display().to_string()].clone();
        }
    }
    seen
}

fn data(path: &Path, size: u64) -> Vec<(u64, u64)> {
    use nix::unistd::{Whence, lseek64};
    // A file that is stored inline loses its holes.
    if size <= crate::core::limits::TREE_INLINE_BYTES as u64 {
        return Vec::new();
    }
    let file = std::fs::File::open(path).expect("opened");
    // XFS reports the surroundings of a write to a clone as data while its pages are in memory.
    let is_zero = |at: u64, end: u64| {
        let mut block = vec![0; (end - at) as usize];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut block, at).expect("read");
        block.iter().all(|byte| *byte == 0)
    };
    let (mut at, mut found) = (0u64, Vec::new());
    while let Ok(start) = lseek64(&file, at.cast_signed(), Whence::SeekData) {
        let mut start = start.cast_unsigned();
        at = lseek64(&file, start.cast_signed(), Whence::SeekHole).expect("a hole or the end").cast_unsigned();
        let mut end = at.min(size);
        while start < end && is_zero(start, end.min(start + 4096)) {
            start = end.min(start + 4096);
        }
        while start < end && is_zero(start.max((end - 1) / 4096 * 4096), end) {
            end = start.max((end - 1) / 4096 * 4096);
        }
        if start < end {
            found.push((start, end));
        }
    }
    found
}

/// A folder with a workspace, its staging, its index and a store.
pub(crate) struct World {
    pub dir: tempfile::TempDir,
    /// In memory if possible: the tests do not depend on the store's device.
    _objects: tempfile::TempDir,
    pub store: Store,
    /// The folder with the workspace, possibly a subvolume.
    home: PathBuf,
    /// If set, drivers hold every file, and take a snapshot after this number of clones.
    hold_all: Option<usize>,
}

impl World {
    pub(crate) fn new() -> World {
        World::of(tempfile::tempdir().expect("a temporary directory"))
    }

    pub(crate) fn at(place: &Path) -> World {
        World::of(tempfile::tempdir_in(place).expect("a temporary directory"))
    }

    fn of(dir: tempfile::TempDir) -> World {
        let home = dir.path().to_owned();
        World::within(dir, home)
    }

    fn within(dir: tempfile::TempDir, home: PathBuf) -> World {
        std::fs::create_dir(home.join("workspace")).expect("made");
        let objects = crash_dir();
        let store = Store::open(&objects.path().join("store")).expect("opened");
        World { dir, _objects: objects, store, home, hold_all: None }
    }

    /// Creates the workspace in a subvolume, like kernels on Btrfs.
    pub(crate) fn in_subvolume(place: &Path) -> World {
        let dir = tempfile::tempdir_in(place).expect("a temporary directory");
        let opened = std::fs::File::open(dir.path()).expect("opened");
        crate::sys::btrfs::create(opened.as_fd(), "files").expect("a subvolume");
        let home = dir.path().join("files");
        World::within(dir, home)
    }

    /// Makes the driver hold every file, and take a snapshot after this many clones where
    /// supported.
    pub(crate) fn holding_all(self, clones: usize) -> World {
        World { hold_all: Some(clones), ..self }
    }

    pub(crate) fn workspace(&self) -> PathBuf {
        self.home.join("workspace")
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.workspace().join(name)
    }

    pub(crate) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        std::fs::write(self.path(name), bytes).expect("written");
    }

    pub(crate) fn paths(&self) -> WorkspacePaths {
        self.places_of("workspace")
    }

    pub(crate) fn places_of(&self, workspace: &str) -> WorkspacePaths {
        let dir = &self.home;
        WorkspacePaths {
            workspace: dir.join(workspace),
            staging: dir.join(format!("{workspace}.staging")),
            index: dir.join(format!("{workspace}.index")),
        }
    }

    /// Returns the paths of a new, empty workspace, like that of another kernel.
    pub(crate) fn another(&self, name: &str) -> WorkspacePaths {
        let dir = self.dir.path().join(name);
        std::fs::create_dir(&dir).expect("made");
        let mut home = dir.clone();
        if self.home != self.dir.path() {
            let opened = std::fs::File::open(&dir).expect("opened");
            crate::sys::btrfs::create(opened.as_fd(), "files").expect("a subvolume");
            home = dir.join("files");
        }
        std::fs::create_dir(home.join("workspace")).expect("made");
        WorkspacePaths { workspace: home.join("workspace"), staging: home.join("staging"), index: dir.join("index") }
    }

    pub(crate) fn tracker(&self) -> Tracker {
        self.tracker_of(self.paths())
    }

    pub(crate) fn tracker_of(&self, paths: WorkspacePaths) -> Tracker {
        let mut tracker = Tracker::open(paths).expect("opened");
        if let Some(clones) = self.hold_all {
            tracker.driver.hold_all(clones);
        }
        tracker
    }

    pub(crate) fn observe(&self) -> Observed {
        observe(&self.workspace())
    }

    /// Checks that the staging folder is empty.
    pub(crate) fn nothing_is_staged(&self) {
        becomes_empty(&self.paths().staging);
        assert!(!self.dir.path().join("files.moment").exists(), "a snapshot is left");
    }
}

/// Waits until the leftovers of a restore are deleted.
#[track_caller]
pub(crate) fn becomes_empty(staging: &Path) {
    let left = || -> Vec<_> { staging.read_dir().map(|dir| dir.flatten().collect()).unwrap_or_default() };
    let late = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while !left().is_empty() {
        assert!(std::time::Instant::now() < late, "{:?}", left());
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Runs one ignored test of this program as an unprivileged user, who owns `place`.
pub(crate) fn as_nobody(test: &str, place: &Path) {
    std::os::unix::fs::chown(place, Some(65534), Some(65534)).expect("given away");
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--"]);
    command.arg(std::env::current_exe().expect("this program"));
    command.args([test, "--exact", "--ignored", "--nocapture", "--test-threads", "1"]);
    let output = command.env(PLACE, place).env("TMPDIR", "/tmp").current_dir("/").output().expect("setpriv runs");
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{said}\n{errors}");
}

/// Environment variable with the place of a test that [`as_nobody`] runs.
pub(crate) const PLACE: &str = "RYOKAN_TEST_PLACE";

/// Returns that place.
pub(crate) fn given_place() -> PathBuf {
    PathBuf::from(std::env::var_os(PLACE).expect("run by another test, which names the place"))
}

/// Checks that both have the same content; names the differences.
#[track_caller]
pub(crate) fn same(now: &Observed, wanted: &Observed) {
    for path in now.keys().chain(wanted.keys()) {
        assert_eq!(now.get(path), wanted.get(path), "{}", path.as_os_str().as_bytes().escape_ascii());
    }
}

/// A file system in an image, unmounted on drop.
pub(crate) struct Mounted {
    dir: tempfile::TempDir,
}

impl Mounted {
    /// Creates and mounts a file system, or returns why that is impossible.
    pub(crate) fn new(kind: &str, make: &[&str]) -> Result<Mounted, String> {
        Mounted::with(kind, make, "loop")
    }

    /// Does the same with mount options.
    pub(crate) fn with(kind: &str, make: &[&str], options: &str) -> Result<Mounted, String> {
        if !nix::unistd::Uid::effective().is_root() {
            return Err("only root may mount".into());
        }
        let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
        let image = dir.path().join("image");
        std::fs::File::create(&image).and_then(|file| file.set_len(512 << 20)).map_err(|e| e.to_string())?;
        let run = |program: &str, arguments: &[&str], last: &[&Path]| {
            let mut command = Command::new(program);
            let ran = command.args(arguments).args(last).stdin(Stdio::null()).output();
            match ran {
                Ok(output) if output.status.success() => Ok(()),
                Ok(output) => Err(format!("{program}: {}", String::from_utf8_lossy(&output.stderr).trim())),
                Err(error) => Err(format!("{program}: {error}")),
            }
        };
        run(&format!("mkfs.{kind}"), make, &[&image])?;
        let at = dir.path().join("mounted");
        std::fs::create_dir(&at).map_err(|e| e.to_string())?;
        run("mount", &["-o", options, "-t", kind], &[&image, &at])?;
        Ok(Mounted { dir })
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("mounted")
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // An exiting process may still have it open.
        for _ in 0..50 {
            if Command::new("umount").arg(self.path()).stderr(Stdio::null()).status().is_ok_and(|s| s.success()) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        let _ = Command::new("umount").arg("--lazy").arg(self.path()).status();
    }
}
