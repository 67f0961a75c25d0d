//! Copies from this host into a kernel.

use std::fs::{File, Metadata};
use std::io::Read;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::{Copied, below, is_directory, look, warn};
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::core::files::{FILE_MODE_BITS, FileAttributes, FileError};
use crate::core::limits;
use crate::rpc::client::{FileUpload, FilesClient};

/// A step of the walk through a directory.
enum Step {
    Enter {
        from: PathBuf,
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
    let failed = |error: std::io::Error| Failure::of_file("read", from, &error);
    let metadata = std::fs::metadata(from).map_err(failed)?;
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
        return file(context, files, from, &metadata, &to, copied).await;
    }
    let mut steps = vec![Step::Enter { from: from.to_owned(), to, depth: 0 }];
    while let Some(step) = steps.pop() {
        match step {
            Step::Enter { from, to, depth } => enter(context, files, (from, to, depth), &mut steps, copied).await?,
            Step::Leave { to, attributes } => files.set_attributes(&to, attributes).await?,
        }
    }
    Ok(())
}

/// Copies the files of a directory, and plans its directories.
async fn enter(
    context: &Context,
    files: &FilesClient,
    (from, to, depth): (PathBuf, Vec<u8>, usize),
    steps: &mut Vec<Step>,
    copied: &mut Copied,
) -> Result<(), Failure> {
    let failed = |error: std::io::Error| Failure::of_file("read", &from, &error);
    if depth > limits::COPY_DEPTH {
        let text = format!("{} is nested more than {} deep", from.display(), limits::COPY_DEPTH);
        return Err(Failure::usage(text, "copy the inner directories one by one"));
    }
    let attributes = attributes(&std::fs::metadata(&from).map_err(failed)?);
    // Open to its owner until everything is in it.
    files.make_dir(&to, attributes.mode.unwrap_or_default() | 0o700).await?;
    steps.push(Step::Leave { to: to.clone(), attributes });
    for entry in std::fs::read_dir(&from).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let (from, to) = (entry.path(), below(&to, entry.file_name().as_bytes()));
        let metadata = entry.metadata().map_err(|error| Failure::of_file("read", &from, &error))?;
        if metadata.is_dir() {
            steps.push(Step::Enter { from, to, depth: depth + 1 });
        } else {
            file(context, files, &from, &metadata, &to, copied).await?;
        }
    }
    Ok(())
}

/// Copies anything but a directory.
async fn file(
    context: &Context,
    files: &FilesClient,
    from: &Path,
    metadata: &Metadata,
    to: &[u8],
    copied: &mut Copied,
) -> Result<(), Failure> {
    let failed = |error: std::io::Error| Failure::of_file("read", from, &error);
    if metadata.is_symlink() {
        let target = std::fs::read_link(from).map_err(failed)?;
        files.make_link(to, target.as_os_str().as_bytes(), attributes(metadata)).await?;
        copied.files += 1;
        return Ok(());
    }
    if !metadata.is_file() {
        warn(context, &format!("skipped {}: a pipe, a socket or a device", from.display()));
        return Ok(());
    }
    let opened = File::open(from).map_err(failed)?;
    let upload = files.create(to, attributes(metadata)).await?;
    send(opened, from, upload, copied).await
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
    let modified_ns = metadata.mtime().saturating_mul(1_000_000_000).saturating_add(metadata.mtime_nsec());
    FileAttributes { mode: Some(metadata.mode() & FILE_MODE_BITS), modified_ns: Some(modified_ns) }
}
