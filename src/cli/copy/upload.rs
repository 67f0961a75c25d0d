//! Copies from this host into a kernel.
//!
//! A kernel may share the directory that is copied, and other programs change it. So everything below the named path is
//! opened relative to an open directory, without following a link, and checked when it is open.

use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat, readlinkat};
use nix::sys::stat::{FileStat, Mode, fstatat};

use super::{Copied, below, is_directory, look, warn};
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::core::error::Error;
use crate::core::files::{FILE_MODE_BITS, FileAttributes, FileError};
use crate::core::limits;
use crate::rpc::client::{FileUpload, FilesClient};

/// A name in an open directory of this host.
struct Spot {
    folder: Rc<OwnedFd>,
    name: OsString,
    /// For messages.
    shown: PathBuf,
}

impl Spot {
    /// Opens what has the name, but no link. A pipe without a writer does not block.
    fn open(&self, flags: OFlag) -> Result<File, Failure> {
        let flags = flags | OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        let opened = openat(&*self.folder, self.name.as_os_str(), flags, Mode::empty());
        opened.map(File::from).map_err(|error| unread(&self.shown, error))
    }

    /// The attributes of what has the name; of a link, its own.
    fn look(&self) -> Result<FileStat, Failure> {
        fstatat(&*self.folder, self.name.as_os_str(), AtFlags::AT_SYMLINK_NOFOLLOW)
            .map_err(|error| unread(&self.shown, error))
    }
}

/// A step of the walk through a directory.
enum Step {
    Enter {
        from: Spot,
        to: Vec<u8>,
        depth: usize,
    },
    /// All of it is copied: mode and time last, because each entry changes the time.
    Leave {
        to: Vec<u8>,
        attributes: FileAttributes,
    },
}

/// Copies standard input into a file.
pub(super) async fn stream(files: &FilesClient, to: &[u8], copied: &mut Copied) -> Result<(), Failure> {
    if look(files, to).await?.is_some_and(|info| is_directory(&info)) {
        return Err(FileError::IsDirectory.on(&String::from_utf8_lossy(to)).hint("name a file in it").into());
    }
    let upload = files.create(to, FileAttributes::default()).await?;
    send(std::io::stdin(), Path::new("standard input"), upload, copied).await
}

/// Copies a file or directory.
pub(super) async fn path(
    context: &Context,
    files: &FilesClient,
    from: &Path,
    to: &[u8],
    copied: &mut Copied,
) -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::of_file("read", from, &error);
    // The user chose the path; links in it are followed.
    let metadata = std::fs::metadata(from).map_err(failed)?;
    if !metadata.is_dir() && !metadata.is_file() {
        let error = Error::conflict(format!("{} is a device, a pipe or a socket", from.display()));
        let hint = format!("to copy what it gives: ryokan cp - KERNEL:FILE < {}", from.display());
        return Err(error.reason("not_a_file").hint(hint).into());
    }
    let opened = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(from).map_err(failed)?;
    let metadata = opened.metadata().map_err(failed)?;
    let existing = look(files, to).await?;
    let to = match &existing {
        Some(info) if is_directory(info) => {
            let whole = from.canonicalize().map_err(failed)?;
            match from.file_name().or(whole.file_name()) {
                Some(name) => below(to, name.as_bytes()),
                None => to.to_vec(),
            }
        }
        Some(_) | None => to.to_vec(),
    };
    if !metadata.is_dir() {
        return file(context, files, opened, from, &to, copied).await;
    }
    let mut steps = Vec::new();
    enter(context, files, (opened, from, to, 0), &mut steps, copied).await?;
    while let Some(step) = steps.pop() {
        match step {
            Step::Enter { from, to, depth } => {
                let opened = from.open(OFlag::O_DIRECTORY)?;
                enter(context, files, (opened, &from.shown, to, depth), &mut steps, copied).await?;
            }
            Step::Leave { to, attributes } => files.set_attributes(&to, attributes).await?,
        }
    }
    Ok(())
}

/// Copies the files of an open directory, and plans its directories.
async fn enter(
    context: &Context,
    files: &FilesClient,
    (opened, shown, to, depth): (File, &Path, Vec<u8>, usize),
    steps: &mut Vec<Step>,
    copied: &mut Copied,
) -> Result<(), Failure> {
    if depth > limits::COPY_DEPTH {
        let text = format!("{} is nested more than {} deep", shown.display(), limits::COPY_DEPTH);
        return Err(Failure::usage(text, "copy the inner directories one by one"));
    }
    let attributes = attributes(&opened.metadata().map_err(|error| Failure::of_file("read", shown, &error))?);
    let folder = Rc::new(OwnedFd::from(opened));
    // Open to its owner until everything is in it.
    files.make_dir(&to, attributes.mode.unwrap_or_default() | 0o700).await?;
    steps.push(Step::Leave { to: to.clone(), attributes });
    for name in names(&folder).map_err(|error| unread(shown, error))? {
        let to = below(&to, name.as_bytes());
        let spot = Spot { folder: Rc::clone(&folder), shown: shown.join(&name), name };
        let found = spot.look()?;
        match found.st_mode & libc::S_IFMT {
            libc::S_IFDIR => steps.push(Step::Enter { from: spot, to, depth: depth + 1 }),
            libc::S_IFLNK => {
                let target = readlinkat(&*folder, spot.name.as_os_str()).map_err(|error| unread(&spot.shown, error))?;
                let attributes = attributes_of(found.st_mode, found.st_mtime, found.st_mtime_nsec);
                files.make_link(&to, target.as_bytes(), attributes).await?;
                copied.files += 1;
            }
            libc::S_IFREG => {
                let opened = spot.open(OFlag::empty())?;
                file(context, files, opened, &spot.shown, &to, copied).await?;
            }
            _ => skip(context, &spot.shown),
        }
    }
    Ok(())
}

/// The names in an open directory.
fn names(folder: &OwnedFd) -> nix::Result<Vec<OsString>> {
    let own = folder.try_clone().map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)))?;
    let mut names = Vec::new();
    for entry in Dir::from_fd(own)?.iter() {
        let name = OsStr::from_bytes(entry?.file_name().to_bytes()).to_owned();
        if name != "." && name != ".." {
            names.push(name);
        }
    }
    Ok(names)
}

/// Copies an open file; skips anything else, which its name may have become.
async fn file(
    context: &Context,
    files: &FilesClient,
    opened: File,
    shown: &Path,
    to: &[u8],
    copied: &mut Copied,
) -> Result<(), Failure> {
    let metadata = opened.metadata().map_err(|error| Failure::of_file("read", shown, &error))?;
    if !metadata.is_file() {
        skip(context, shown);
        return Ok(());
    }
    let upload = files.create(to, attributes(&metadata)).await?;
    send(opened, shown, upload, copied).await
}

fn skip(context: &Context, shown: &Path) {
    warn(context, &format!("skipped {}: a pipe, a socket or a device", shown.display()));
}

async fn send(mut from: impl Read, shown: &Path, mut upload: FileUpload, copied: &mut Copied) -> Result<(), Failure> {
    let mut chunk = vec![0; limits::CHUNK_BYTES];
    loop {
        match from.read(&mut chunk) {
            Ok(0) => break,
            Ok(read) => {
                upload.write(&chunk[..read]).await?;
                copied.add(read);
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(Failure::of_file("read", shown, &error)),
        }
    }
    upload.finish().await?;
    copied.files += 1;
    Ok(())
}

fn attributes(metadata: &Metadata) -> FileAttributes {
    attributes_of(metadata.mode(), metadata.mtime(), metadata.mtime_nsec())
}

fn attributes_of(mode: u32, seconds: i64, nanoseconds: i64) -> FileAttributes {
    let modified_ns = seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds);
    FileAttributes { mode: Some(mode & FILE_MODE_BITS), modified_ns: Some(modified_ns) }
}

fn unread(shown: &Path, error: Errno) -> Failure {
    Failure::of_file("read", shown, &error.into())
}

#[cfg(test)]
mod tests {
    use nix::unistd::mkfifo;

    use super::*;

    #[test]
    fn swapped_names_open_nothing_else() {
        let folder = tempfile::tempdir().expect("a directory");
        std::fs::write(folder.path().join("secret"), "of the host").expect("written");
        std::os::unix::fs::symlink("secret", folder.path().join("link")).expect("made");
        std::os::unix::fs::symlink(".", folder.path().join("linked")).expect("made");
        mkfifo(&folder.path().join("pipe"), Mode::S_IRWXU).expect("made");
        let opened = Rc::new(OwnedFd::from(File::open(folder.path()).expect("opened")));
        let spot = |name: &str| Spot { folder: Rc::clone(&opened), name: name.into(), shown: name.into() };
        assert!(spot("link").open(OFlag::empty()).is_err());
        assert!(spot("linked").open(OFlag::O_DIRECTORY).is_err());
        let pipe = spot("pipe").open(OFlag::empty()).expect("opened without a writer");
        assert!(!pipe.metadata().expect("known").is_file());
        assert!(spot("secret").open(OFlag::empty()).is_ok());
    }
}
