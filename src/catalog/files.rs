//! A kernel's directory: `kernels/<id>/` with its two databases and the workspace.
//!
//! It is created before the kernel's row, and hidden after the row is deleted: a directory without a row is left from a
//! crash, and [`sweep_kernels`] removes it at start-up. This module does not look into the workspace.

use std::collections::HashSet;
use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use super::error::CatalogError;
use super::sqlite::{Kind, Result, write_template};
use crate::core::durability::Durability;
use crate::core::ids::KernelId;
use crate::sys::fs::{self, FsError};
use crate::sys::{btrfs, fault, inode};

/// Prefix of a removed kernel's directory until it is deleted.
const HIDDEN: &str = ".removed-";

/// The paths of one kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelFiles {
    /// The directory.
    pub dir: PathBuf,
    /// The daemon's database.
    pub state_db: PathBuf,
    /// The engine's database.
    pub engine_db: PathBuf,
    /// The kernel's own files.
    pub workspace: PathBuf,
    /// Staging area for files, on the same file system. Not created with the kernel.
    pub staging: PathBuf,
}

/// Name of the subvolume that holds the workspace, where the file system has subvolumes, and its name while it is
/// deleted.
const SUBVOLUME: &str = "files";

impl KernelFiles {
    /// The paths of a kernel, existing or not. Checks whether the workspace is in a subvolume.
    pub fn of(kernels: &Path, id: KernelId) -> KernelFiles {
        let dir = kernels.join(id.to_string());
        let subvolume = dir.join(SUBVOLUME);
        let home = if subvolume.is_dir() { &subvolume } else { &dir };
        KernelFiles {
            state_db: dir.join(Kind::State.file_name()),
            engine_db: dir.join(Kind::Engine.file_name()),
            workspace: home.join("workspace"),
            staging: home.join("staging"),
            dir,
        }
    }
}

/// Files of a new kernel that are not yet durable.
#[derive(Debug)]
pub(super) struct Unsynced {
    /// `state.db`. Closing it after this process has opened the database would drop the database's lock.
    state: Option<File>,
    rest: Vec<File>,
}

impl Unsynced {
    /// Takes `state.db`: to be synced and closed before the database is opened.
    pub(super) fn take_state(&mut self) -> Option<File> {
        self.state.take()
    }

    pub(super) fn sync(self) -> Result<()> {
        fault::point("kernel.files.sync").map_err(|e| CatalogError::of_io("sync", Path::new("state.db"), e))?;
        let synced = self.state.iter().chain(&self.rest).try_for_each(File::sync_all);
        synced.map_err(|e| CatalogError::of_io("sync", Path::new("state.db"), e))
    }
}

/// Attempts to empty a directory in which new entries appear.
const REMOVE_TRIES: u32 = 25;
/// Pause between attempts.
const REMOVE_PAUSE: std::time::Duration = std::time::Duration::from_millis(20);

/// Creates the directory with two empty databases and an empty workspace. After a failure nothing is left.
pub(super) fn create(kernels: &Path, id: KernelId, durability: Durability) -> Result<(KernelFiles, Unsynced)> {
    let mut files = KernelFiles::of(kernels, id);
    if files.dir.symlink_metadata().is_ok() {
        return Err(CatalogError::Exists(format!("the directory of kernel {id}")));
    }
    match fill(&mut files, durability) {
        Ok(unsynced) => Ok((files, unsynced)),
        Err(error) => {
            // The next start removes what cannot be removed now.
            let _ = fs::remove_tree(&files.dir);
            Err(error)
        }
    }
}

fn fill(files: &mut KernelFiles, durability: Durability) -> Result<Unsynced> {
    let durable = durability == Durability::Power;
    if durable {
        fs::create_dir_durable(&files.dir, 0o700, "kernel.files.dir")?;
    } else {
        make_folder(&files.dir)?;
    }
    let template = |path: &Path, kind: Kind| {
        let bytes = kind.template()?;
        write_template(path, bytes).map_err(|e| CatalogError::of_io("create", path, e))
    };
    fault::point("kernel.files.state").map_err(|e| CatalogError::of_io("create", &files.state_db, e))?;
    let state = template(&files.state_db, Kind::State)?;
    let unsynced = Unsynced { state: Some(state), rest: fill_live(files)? };
    if durable {
        unsynced.sync()?;
        return Ok(Unsynced { state: None, rest: Vec::new() });
    }
    Ok(unsynced)
}

/// Creates the files that an archived kernel does not have: an empty workspace and an empty engine database.
fn fill_live(files: &mut KernelFiles) -> Result<Vec<File>> {
    let home = File::open(&files.dir).map_err(|e| CatalogError::of_io("open", &files.dir, e))?;
    if inode::file_system(home.as_fd()).is_ok_and(|magic| magic == btrfs::MAGIC) {
        // Without a subvolume, the workspace is a plain folder; `show` reports it.
        if btrfs::create(home.as_fd(), SUBVOLUME).is_ok() {
            let subvolume = files.dir.join(SUBVOLUME);
            let private = std::os::unix::fs::PermissionsExt::from_mode(0o700);
            std::fs::set_permissions(&subvolume, private).map_err(|e| CatalogError::of_io("change", &subvolume, e))?;
            (files.workspace, files.staging) = (subvolume.join("workspace"), subvolume.join("staging"));
        }
    }
    make_folder(&files.workspace)?;
    fault::point("kernel.files.engine").map_err(|e| CatalogError::of_io("create", &files.engine_db, e))?;
    let engine = write_template(&files.engine_db, Kind::Engine.template()?);
    let engine = engine.map_err(|e| CatalogError::of_io("create", &files.engine_db, e))?;
    Ok(vec![engine, home])
}

fn make_folder(path: &Path) -> Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    std::fs::DirBuilder::new().mode(0o700).create(path).map_err(|e| CatalogError::of_io("create", path, e))
}

/// Removes the files that an archived kernel does not have; `state.db` stays. Missing files are fine.
pub(super) fn clear(kernels: &Path, id: KernelId) -> Result<()> {
    let dir = kernels.join(id.to_string());
    let wrong = |e| CatalogError::of_io("remove", &dir, e);
    let stays = Kind::State.file_name();
    let (mut begun, home) = (false, File::open(&dir).map_err(wrong)?);
    for entry in dir.read_dir().map_err(wrong)? {
        let entry = entry.map_err(wrong)?;
        if entry.file_name().to_string_lossy().starts_with(stays) {
            continue;
        }
        if !std::mem::replace(&mut begun, true) {
            fault::point("kernel.files.clear").map_err(wrong)?;
        }
        if !entry.file_type().map_err(wrong)?.is_dir() {
            std::fs::remove_file(entry.path()).map_err(wrong)?;
            continue;
        }
        // At once, if it is a subvolume and deleting it is allowed.
        if let Some(name) = entry.file_name().to_str() {
            let _ = btrfs::destroy(home.as_fd(), name);
        }
        match emptied(|| fs::remove_tree(&entry.path())) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(wrong(error)),
            _ => {}
        }
    }
    Ok(())
}

/// Retries while new entries appear: a writer was just killed, or still removes files that a restore replaced.
fn emptied(mut remove: impl FnMut() -> std::io::Result<()>) -> std::io::Result<()> {
    let mut removed = remove();
    for _ in 0..REMOVE_TRIES {
        if !removed.as_ref().is_err_and(|error| error.kind() == std::io::ErrorKind::DirectoryNotEmpty) {
            break;
        }
        std::thread::sleep(REMOVE_PAUSE);
        removed = remove();
    }
    removed
}

/// Recreates the files that [`clear`] removes, empty.
pub(super) fn recreate(kernels: &Path, id: KernelId, durability: Durability) -> Result<KernelFiles> {
    clear(kernels, id)?;
    let mut files = KernelFiles::of(kernels, id);
    let made = Unsynced { state: None, rest: fill_live(&mut files)? };
    if durability == Durability::Power {
        made.sync()?;
    }
    Ok(files)
}

/// Puts an empty engine database in the place of a kernel's. May be repeated. No process has it open.
pub(crate) fn recreate_engine(kernels: &Path, id: KernelId, durability: Durability) -> Result<()> {
    let path = KernelFiles::of(kernels, id).engine_db;
    let wrong = |e| CatalogError::of_io("replace", &path, e);
    fault::point("kernel.engine.recreate").map_err(wrong)?;
    // The database last: a log without its database is nothing, a database with another one's log is damaged.
    for suffix in ["-wal", "-shm", "-journal", ""] {
        let mut file = path.clone().into_os_string();
        file.push(suffix);
        match std::fs::remove_file(&file) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(wrong(error)),
            Ok(()) | Err(_) => {}
        }
    }
    let file = write_template(&path, Kind::Engine.template()?).map_err(wrong)?;
    if durability == Durability::Power {
        file.sync_all().map_err(wrong)?;
        File::open(path.parent().unwrap_or(&path)).and_then(|home| home.sync_all()).map_err(wrong)?;
    }
    Ok(())
}

/// Puts a closed engine database in the place of a kernel's, which is empty. No process has either open.
pub(super) fn adopt_engine(kernels: &Path, id: KernelId, from: &Path) -> Result<()> {
    let path = KernelFiles::of(kernels, id).engine_db;
    for database in [from, &path] {
        let mut log = database.as_os_str().to_owned();
        log.push("-wal");
        if std::fs::metadata(log).is_ok_and(|log| log.len() > 0) {
            return Err(CatalogError::Conflict(format!("{} has a log", database.display())));
        }
    }
    let wrong = |e| CatalogError::of_io("replace", &path, e);
    fault::point("kernel.engine.adopt").map_err(wrong)?;
    std::fs::rename(from, &path).map_err(wrong)
}

/// Removes a kernel's directory with everything in it: out of sight at once, then file by file. One that is not there is fine.
pub(super) fn remove(kernels: &Path, id: KernelId) -> Result<()> {
    let dir = kernels.join(id.to_string());
    let hidden = kernels.join(format!("{HIDDEN}{id}"));
    match fs::rename_durable(&dir, &hidden, "kernel.files.hide") {
        Err(error) if error.source.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        hid => hid?,
    }
    remove_hidden(&hidden)
}

/// Makes one kernel's directory another's, whose own one is removed. One that is not there was adopted before.
pub(super) fn adopt(kernels: &Path, from: KernelId, id: KernelId) -> Result<()> {
    let (from, to) = (kernels.join(from.to_string()), kernels.join(id.to_string()));
    if from.symlink_metadata().is_err() {
        return Ok(());
    }
    remove(kernels, id)?;
    Ok(fs::rename_durable(&from, &to, "kernel.files.adopt")?)
}

/// Removes the directory of a kernel without a row; [`sweep_kernels`] completes an interrupted removal.
pub(super) fn remove_unlisted(kernels: &Path, id: KernelId) -> Result<()> {
    remove_hidden(&kernels.join(id.to_string()))
}

fn remove_hidden(hidden: &Path) -> Result<()> {
    let removed = emptied(|| {
        fault::point("kernel.files.remove")?;
        // At once, where that is allowed; else as plain folders.
        if let Ok(home) = File::open(hidden) {
            let _ = btrfs::destroy(home.as_fd(), SUBVOLUME);
        }
        fs::remove_tree(hidden)
    });
    removed.map_err(|e| CatalogError::of_io("remove", hidden, e))
}

/// Removes leftovers of crashes below `kernels/`: directories of unknown kernels and interrupted removals. Returns the
/// paths removed, and those that could not be removed.
///
/// Touches only names that ryokan creates.
///
/// # Errors
/// The directory cannot be read.
pub fn sweep_kernels(
    kernels: &Path,
    known: &HashSet<KernelId>,
) -> Result<(Vec<PathBuf>, Vec<CatalogError>), CatalogError> {
    let (mut gone, mut stuck) = (Vec::new(), Vec::new());
    for entry in kernels.read_dir().map_err(FsError::of("list", kernels))? {
        let path = entry.map_err(FsError::of("list", kernels))?.path();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let unknown = name.parse::<KernelId>().is_ok_and(|id| !known.contains(&id));
        let hidden = name.strip_prefix(HIDDEN).is_some_and(|id| id.parse::<KernelId>().is_ok());
        if unknown || hidden {
            match remove_hidden(&path) {
                Ok(()) => gone.push(path),
                Err(error) => stuck.push(error),
            }
        }
    }
    Ok((gone, stuck))
}
