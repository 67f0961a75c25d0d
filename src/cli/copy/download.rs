//! Copies from a kernel to this host.
//!
//! What comes from a kernel is not trusted: every name is one name, and everything is made relative to an open
//! directory, without following a link of the destination. So nothing is written outside of it.

use std::fs::{File, Permissions};
use std::io::Write as _;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat, renameat};
use nix::sys::stat::{Mode, UtimensatFlags, fchmod, fstatat, futimens, mkdirat, utimensat};
use nix::sys::time::TimeSpec;
use nix::unistd::{UnlinkatFlags, symlinkat, unlinkat};

use super::{Copied, below, is_directory, os, warn, wrong_type};
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::core::error::Error;
use crate::core::files::{FileInfo, FileKind};
use crate::core::limits;
use crate::rpc::client::FilesClient;
use crate::sys::random;

/// The permission bits that a file from a kernel may have.
const MODE_BITS: u32 = 0o777;

/// A place in an open directory of this host.
struct Spot {
    folder: Rc<OwnedFd>,
    name: std::ffi::OsString,
    /// For messages.
    shown: PathBuf,
}

/// A step of the walk through a directory.
enum Step {
    Enter {
        from: Vec<u8>,
        info: FileInfo,
        to: Spot,
        depth: usize,
    },
    /// All of it is copied: mode and time last, because each entry changes the time.
    Leave {
        made: Rc<OwnedFd>,
        info: FileInfo,
        shown: PathBuf,
    },
}

/// Copies a file to standard output.
pub(super) async fn stream(files: &FilesClient, from: &[u8], copied: &mut Copied) -> Result<(), Failure> {
    let mut download = files.open(from).await?;
    let mut out = std::io::stdout();
    while let Some(part) = download.next().await? {
        out.write_all(&part).map_err(Failure::of_output)?;
        copied.add(part.len());
    }
    out.flush().map_err(Failure::of_output)
}

/// Copies a file or directory.
pub(super) async fn path(
    context: &Context,
    files: &FilesClient,
    from: &[u8],
    to: &Path,
    copied: &mut Copied,
) -> Result<(), Failure> {
    let info = files.stat(from, true).await?;
    // The user chose the destination; links in its own path are followed.
    let (folder, name) = if to.is_dir() {
        let name = if info.name.is_empty() { "workspace".into() } else { os(&info.name) };
        (to, name)
    } else {
        let parent = to.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        match to.file_name() {
            Some(name) => (parent, name.to_owned()),
            None => return Err(Failure::usage(format!("{} is no file name", to.display()), "name a file")),
        }
    };
    let opened = File::open(folder).map_err(|error| Failure::of_file("write to", folder, &error))?;
    let spot = Spot { folder: Rc::new(opened.into()), shown: folder.join(&name), name };
    if !is_directory(&info) {
        return entry(context, files, from, &info, &spot, copied).await;
    }
    let mut steps = vec![Step::Enter { from: from.to_vec(), info, to: spot, depth: 0 }];
    while let Some(step) = steps.pop() {
        match step {
            Step::Enter { from, info, to, depth } => {
                enter(context, files, (from, info, to, depth), &mut steps, copied).await?;
            }
            Step::Leave { made, info, shown } => {
                let set = fchmod(made.as_fd(), mode(&info)).and_then(|()| set_time(&made, &info));
                set.map_err(|error| failed(&shown, error))?;
            }
        }
    }
    Ok(())
}

/// Makes a directory, copies its files, and plans its directories.
async fn enter(
    context: &Context,
    files: &FilesClient,
    (from, info, to, depth): (Vec<u8>, FileInfo, Spot, usize),
    steps: &mut Vec<Step>,
    copied: &mut Copied,
) -> Result<(), Failure> {
    if depth > limits::COPY_DEPTH {
        let text = format!("{} is nested more than {} deep", to.shown.display(), limits::COPY_DEPTH);
        return Err(Failure::usage(text, "copy the inner directories one by one"));
    }
    match mkdirat(&*to.folder, to.name.as_os_str(), Mode::S_IRWXU) {
        Ok(()) | Err(Errno::EEXIST) => {}
        Err(error) => return Err(failed(&to.shown, error)),
    }
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let made = match openat(&*to.folder, to.name.as_os_str(), flags, Mode::empty()) {
        Ok(made) => Rc::new(made),
        Err(Errno::ENOTDIR | Errno::ELOOP) => {
            return Err(wrong_type(&to.shown, "is not a directory", "not_directory"));
        }
        Err(error) => return Err(failed(&to.shown, error)),
    };
    let entries = files.list(&from).await?;
    steps.push(Step::Leave { made: Rc::clone(&made), info, shown: to.shown.clone() });
    for info in entries {
        let name = os(&info.name);
        let spot = Spot { folder: Rc::clone(&made), shown: to.shown.join(&name), name };
        let from = below(&from, &info.name);
        if is_directory(&info) {
            steps.push(Step::Enter { from, info, to: spot, depth: depth + 1 });
        } else {
            entry(context, files, &from, &info, &spot, copied).await?;
        }
    }
    Ok(())
}

/// Copies anything but a directory. It appears complete, and replaces a file or link; never a device, pipe or socket.
async fn entry(
    context: &Context,
    files: &FilesClient,
    from: &[u8],
    info: &FileInfo,
    to: &Spot,
    copied: &mut Copied,
) -> Result<(), Failure> {
    let existing = fstatat(&*to.folder, to.name.as_os_str(), AtFlags::AT_SYMLINK_NOFOLLOW);
    match existing.map(|stat| stat.st_mode & libc::S_IFMT) {
        Ok(libc::S_IFDIR) => return Err(wrong_type(&to.shown, "is a directory", "is_directory")),
        Ok(libc::S_IFREG | libc::S_IFLNK) | Err(_) => {}
        Ok(_) => {
            let error = Error::conflict(format!("{} is a device, a pipe or a socket", to.shown.display()));
            let hint = format!("to write into it: ryokan cp KERNEL:FILE - > {}", to.shown.display());
            return Err(error.reason("not_a_file").hint(hint).into());
        }
    }
    let unwritable = |error| failed(&to.shown, error);
    let name = part_name();
    let temporary = match info.kind {
        FileKind::File => {
            let mut download = files.open(from).await?;
            let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
            let made = openat(&*to.folder, name.as_str(), flags, Mode::S_IRUSR | Mode::S_IWUSR);
            let mut file = File::from(made.map_err(unwritable)?);
            let temporary = Temporary { folder: Rc::clone(&to.folder), name };
            let info = download.info().clone();
            while let Some(part) = download.next().await? {
                file.write_all(&part).map_err(|error| Failure::of_file("write", &to.shown, &error))?;
                copied.add(part.len());
            }
            let set = file.set_permissions(Permissions::from_mode(info.mode & MODE_BITS));
            set.map_err(|error| Failure::of_file("write", &to.shown, &error))?;
            futimens(&file, &TimeSpec::UTIME_OMIT, &time(&info)).map_err(unwritable)?;
            temporary
        }
        FileKind::Symlink => {
            symlinkat(os(&info.target).as_os_str(), &*to.folder, name.as_str()).map_err(unwritable)?;
            let temporary = Temporary { folder: Rc::clone(&to.folder), name };
            let (access, modified) = (TimeSpec::UTIME_OMIT, time(info));
            let how = UtimensatFlags::NoFollowSymlink;
            utimensat(&*to.folder, temporary.name.as_str(), &access, &modified, how).map_err(unwritable)?;
            temporary
        }
        FileKind::Directory => return Err(wrong_type(&to.shown, "became a directory meanwhile", "is_directory")),
        FileKind::Other => {
            warn(context, &format!("skipped {}: a pipe, a socket or a device", String::from_utf8_lossy(from)));
            return Ok(());
        }
    };
    renameat(&*to.folder, temporary.name.as_str(), &*to.folder, to.name.as_os_str()).map_err(unwritable)?;
    copied.files += 1;
    Ok(())
}

/// The name of an unfinished file, which no other file has.
fn part_name() -> String {
    format!(".ryokan-{:016x}", u64::from_ne_bytes(random::bytes()))
}

/// An unfinished file that this copy made, removed if it is not renamed.
struct Temporary {
    folder: Rc<OwnedFd>,
    name: String,
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // Already renamed on success.
        let _ = unlinkat(&*self.folder, self.name.as_str(), UnlinkatFlags::NoRemoveDir);
    }
}

fn mode(info: &FileInfo) -> Mode {
    Mode::from_bits_truncate(info.mode & MODE_BITS)
}

fn time(info: &FileInfo) -> TimeSpec {
    TimeSpec::new(info.modified_ns.div_euclid(1_000_000_000), info.modified_ns.rem_euclid(1_000_000_000))
}

fn set_time(file: &OwnedFd, info: &FileInfo) -> nix::Result<()> {
    futimens(file, &TimeSpec::UTIME_OMIT, &time(info))
}

fn failed(shown: &Path, error: Errno) -> Failure {
    Failure::of_file("write", shown, &error.into())
}
