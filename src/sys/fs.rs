//! Durable file operations, each under a label of [`fault::LABELS`].
//!
//! A successful operation survives a loss of power. All of them block: never call one on the event
//! loop.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::fault;

/// Prefix of the temporary files of [`write_new`] and [`replace`].
pub const TEMP_PREFIX: &str = ".ryokan-tmp-";

/// A failed file operation.
#[derive(Debug, thiserror::Error)]
#[error("cannot {op} {}", path.display())]
pub struct FsError {
    /// The operation.
    pub op: &'static str,
    /// The path.
    pub path: PathBuf,
    /// The cause.
    #[source]
    pub source: io::Error,
}

impl FsError {
    /// Returns a function that adds `op` and `path` to an I/O error.
    pub fn of(op: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FsError {
        move |source| FsError { op, path: path.to_owned(), source }
    }

    /// Whether there was no room: device or quota full, or the process's file size limit reached.
    pub fn is_full(&self) -> bool {
        is_full(&self.source)
    }
}

/// Whether an error means that there is no room.
pub fn is_full(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG))
}

/// Whether an error means that descriptors, memory or processes are short for the moment.
pub fn is_shortage(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::EAGAIN))
}

/// A path of an open directory, which leads to it whatever is renamed or put into its place meanwhile.
pub fn path_of(dir: &File) -> PathBuf {
    use std::os::fd::AsRawFd as _;
    PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd()))
}

/// Makes a directory's entries durable.
///
/// # Errors
/// If the directory cannot be opened or synced.
pub fn sync_dir(dir: &Path) -> Result<(), FsError> {
    File::open(dir).and_then(|handle| handle.sync_all()).map_err(FsError::of("sync directory", dir))
}

/// Writes a new file: temporary file, fsync, rename, fsync of the directory. Readers never see a
/// part of it.
///
/// # Errors
/// `AlreadyExists` if the name is taken; the operating system's errors. Leaves nothing behind.
pub fn write_new(path: &Path, bytes: &[u8], mode: u32, label: &'static str) -> Result<(), FsError> {
    if path.symlink_metadata().is_ok() {
        return Err(FsError::of("create", path)(io::ErrorKind::AlreadyExists.into()));
    }
    replace(path, bytes, mode, label)
}

/// Replaces or creates a file, as [`write_new`].
///
/// # Errors
/// The operating system's errors. The previous file is then unchanged, and nothing else is left
/// behind.
pub fn replace(path: &Path, bytes: &[u8], mode: u32, label: &'static str) -> Result<(), FsError> {
    replace_with(path, mode, label, |file| file.write_all(bytes))
}

/// A name in the same directory that no other file has.
fn temp_beside(path: &Path) -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    parent(path).join(format!("{TEMP_PREFIX}{}-{count}", std::process::id()))
}

/// As [`replace`], with a writer function in place of bytes in memory.
///
/// # Errors
/// As [`replace`], and the errors of `content`.
pub fn replace_with(
    path: &Path,
    mode: u32,
    label: &'static str,
    content: impl FnOnce(&mut File) -> io::Result<()>,
) -> Result<(), FsError> {
    let (dir, temp) = (parent(path), temp_beside(path));
    let write = || {
        fault::step(label, ".create")?;
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&temp)?;
        content(&mut file)?;
        fault::step(label, ".sync")?;
        file.sync_all()?;
        fault::step(label, ".rename")?;
        std::fs::rename(&temp, path)
    };
    if let Err(source) = write() {
        let _ = std::fs::remove_file(&temp);
        return Err(FsError { op: "write", path: path.to_owned(), source });
    }
    sync_dir_step(dir, label)
}

/// As [`replace`] without syncing the device: after a loss of power the file may be the previous
/// one, or damaged. Only for files whose readers verify them and can do without them.
///
/// # Errors
/// As [`replace`].
pub fn replace_soon(path: &Path, bytes: &[u8], mode: u32, label: &'static str) -> Result<(), FsError> {
    let temp = temp_beside(path);
    let write = || {
        fault::point(label)?;
        OpenOptions::new().write(true).create_new(true).mode(mode).open(&temp)?.write_all(bytes)?;
        std::fs::rename(&temp, path)
    };
    write().map_err(|source| {
        let _ = std::fs::remove_file(&temp);
        FsError { op: "write", path: path.to_owned(), source }
    })
}

/// Removes temporary files of dead processes in `dir`. Only for directories with a single writing
/// process, at its start.
///
/// # Errors
/// If the directory cannot be read or a file cannot be removed.
pub fn sweep_temps(dir: &Path) -> Result<usize, FsError> {
    let mut swept = 0;
    for entry in dir.read_dir().map_err(FsError::of("list", dir))? {
        let entry = entry.map_err(FsError::of("list", dir))?;
        if entry.file_name().to_string_lossy().starts_with(TEMP_PREFIX) {
            std::fs::remove_file(entry.path()).map_err(FsError::of("remove", &entry.path()))?;
            swept += 1;
        }
    }
    Ok(swept)
}

/// Creates a directory; succeeds if it exists.
///
/// # Errors
/// The operating system's errors.
pub fn create_dir_durable(path: &Path, mode: u32, label: &'static str) -> Result<(), FsError> {
    let create = || {
        fault::step(label, ".create")?;
        match DirBuilder::new().mode(mode).create(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
            done => done,
        }
    };
    create().map_err(FsError::of("create directory", path))?;
    sync_dir_step(parent(path), label)
}

/// Renames within one file system.
///
/// # Errors
/// The operating system's errors.
pub fn rename_durable(from: &Path, to: &Path, label: &'static str) -> Result<(), FsError> {
    fault::step(label, ".rename").and_then(|()| std::fs::rename(from, to)).map_err(FsError::of("rename", from))?;
    if parent(from) != parent(to) {
        sync_dir(parent(from))?;
    }
    sync_dir_step(parent(to), label)
}

/// Renames durably, unless something has the new name already.
///
/// # Errors
/// The operating system's errors; `AlreadyExists`.
pub fn rename_new_durable(from: &Path, to: &Path, label: &'static str) -> Result<(), FsError> {
    use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
    let renamed = fault::step(label, ".rename").and_then(|()| {
        match renameat2(AT_FDCWD, from, AT_FDCWD, to, RenameFlags::RENAME_NOREPLACE) {
            // Some file systems look first themselves, or not at all.
            Err(nix::Error::EINVAL) if std::fs::symlink_metadata(to).is_err() => std::fs::rename(from, to),
            Err(nix::Error::EINVAL) => Err(io::ErrorKind::AlreadyExists.into()),
            renamed => Ok(renamed?),
        }
    });
    renamed.map_err(FsError::of("rename", from))?;
    if parent(from) != parent(to) {
        sync_dir(parent(from))?;
    }
    sync_dir_step(parent(to), label)
}

/// Exchanges two entries of one directory at once: neither name is ever free.
///
/// # Errors
/// The operating system's errors; `InvalidInput` or `Unsupported` where the file system cannot exchange them.
pub fn exchange_durable(one: &Path, other: &Path, label: &'static str) -> Result<(), FsError> {
    use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};

    let exchange = || {
        fault::step(label, ".rename")?;
        Ok(renameat2(AT_FDCWD, one, AT_FDCWD, other, RenameFlags::RENAME_EXCHANGE)?)
    };
    exchange().map_err(FsError::of("exchange", one))?;
    sync_dir_step(parent(other), label)
}

/// Makes everything on the file system of a directory durable.
///
/// # Errors
/// The operating system's errors.
pub fn sync_file_system(dir: &Path, label: &'static str) -> io::Result<()> {
    sync_file_system_of(&File::open(dir)?, label)
}

/// As [`sync_file_system`], with an open directory: reports every failed write since it was opened, once.
///
/// # Errors
/// The operating system's errors.
pub fn sync_file_system_of(dir: &File, label: &'static str) -> io::Result<()> {
    fault::point(label)?;
    Ok(nix::unistd::syncfs(dir)?)
}

/// Removes a file; succeeds if it does not exist.
///
/// # Errors
/// The operating system's errors.
pub fn remove_durable(path: &Path, label: &'static str) -> Result<(), FsError> {
    let remove = || {
        fault::step(label, ".unlink")?;
        match std::fs::remove_file(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            done => done,
        }
    };
    remove().map_err(FsError::of("remove", path))?;
    sync_dir_step(parent(path), label)
}

fn sync_dir_step(dir: &Path, label: &'static str) -> Result<(), FsError> {
    fault::step(label, ".sync_dir").map_err(FsError::of("sync directory", dir))?;
    sync_dir(dir)
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    }
}

/// Removes a folder with its whole content. Makes unreadable or unwritable folders accessible
/// first; follows no symbolic link.
///
/// # Errors
/// The operating system's errors; `NotFound` if it does not exist.
pub fn remove_tree(path: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
        removed => return removed,
    }
    let mut locked = vec![path.to_owned()];
    while let Some(folder) = locked.pop() {
        unlock(&folder)?;
        for entry in folder.read_dir()? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                locked.push(entry.path());
            }
        }
    }
    std::fs::remove_dir_all(path)
}

/// Gives the owner access to a folder. Does not touch another entry that has taken its place.
fn unlock(folder: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW;
    let opened = File::options().read(true).custom_flags(flags).open(folder)?;
    let itself = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&opened));
    std::fs::set_permissions(itself, std::fs::Permissions::from_mode(0o700))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::fault::tests::with_fault;

    #[test]
    fn failed_replace_keeps_old_file() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("format");
        write_new(&path, b"old", 0o600, "store.format.write").expect("written");
        for step in [".create", ".sync", ".rename"] {
            let error = with_fault(&format!("store.format.write{step}=enospc"), || {
                replace(&path, b"new", 0o600, "store.format.write").expect_err("armed")
            });
            assert!(error.is_full(), "{error}");
            assert_eq!(std::fs::read(&path).expect("there"), b"old");
            assert_eq!(dir.path().read_dir().expect("readable").count(), 1);
        }
        let again = write_new(&path, b"x", 0o600, "store.format.write").expect_err("it is there");
        assert_eq!(again.source.kind(), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn temporary_files_are_swept() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        std::fs::write(dir.path().join(format!("{TEMP_PREFIX}1-1")), "x").expect("written");
        std::fs::write(dir.path().join("kept"), "x").expect("written");
        assert_eq!(sweep_temps(dir.path()).expect("swept"), 1);
        assert!(dir.path().join("kept").exists());
    }
}
