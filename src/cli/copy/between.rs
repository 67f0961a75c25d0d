//! Copies from one kernel to another, through this process; nothing of it touches this host's files.

use super::{Copied, below, is_directory, look, warn};
use crate::cli::context::Context;
use crate::cli::failure::Failure;
use crate::core::files::{FILE_MODE_BITS, FileAttributes, FileError, FileInfo, FileKind};
use crate::core::limits;
use crate::rpc::client::FilesClient;

/// The two kernels.
pub(super) struct Sides<'a> {
    pub from: &'a FilesClient,
    pub to: &'a FilesClient,
}

/// A step of the walk through a directory.
enum Step {
    Enter {
        from: Vec<u8>,
        info: FileInfo,
        to: Vec<u8>,
        depth: usize,
    },
    /// All of it is copied: mode and time last, because each entry changes the time.
    Leave {
        to: Vec<u8>,
        attributes: FileAttributes,
    },
}

/// Copies a file or directory.
pub(super) async fn path(
    context: &Context,
    sides: &Sides<'_>,
    from: &[u8],
    to: &[u8],
    copied: &mut Copied,
) -> Result<(), Failure> {
    let info = sides.from.stat(from, true).await?;
    let to = match look(sides.to, to).await? {
        Some(existing) if is_directory(&existing) && !info.name.is_empty() => below(to, &info.name),
        Some(_) | None => to.to_vec(),
    };
    if !is_directory(&info) {
        return entry(context, sides, from, &info, &to, copied).await;
    }
    let mut steps = vec![Step::Enter { from: from.to_vec(), info, to, depth: 0 }];
    while let Some(step) = steps.pop() {
        match step {
            Step::Leave { to, attributes } => sides.to.set_attributes(&to, attributes).await?,
            Step::Enter { from, info, to, depth } => {
                if depth > limits::COPY_DEPTH {
                    let text =
                        format!("{} is nested more than {} deep", String::from_utf8_lossy(&from), limits::COPY_DEPTH);
                    return Err(Failure::usage(text, "copy the inner directories one by one"));
                }
                // Listed before anything is made: a copy into itself ends.
                let entries = sides.from.list(&from).await?;
                let attributes = attributes(&info);
                // Open to its owner until everything is in it.
                sides.to.make_dir(&to, attributes.mode.unwrap_or_default() | 0o700).await?;
                steps.push(Step::Leave { to: to.clone(), attributes });
                for info in entries {
                    let (from, to) = (below(&from, &info.name), below(&to, &info.name));
                    match is_directory(&info) {
                        true => steps.push(Step::Enter { from, info, to, depth: depth + 1 }),
                        false => entry(context, sides, &from, &info, &to, copied).await?,
                    }
                }
            }
        }
    }
    Ok(())
}

/// Copies anything but a directory. It appears complete, and replaces a file or link.
pub(super) async fn entry(
    context: &Context,
    sides: &Sides<'_>,
    from: &[u8],
    info: &FileInfo,
    to: &[u8],
    copied: &mut Copied,
) -> Result<(), Failure> {
    match info.kind {
        FileKind::File => {
            let mut download = sides.from.open(from).await?;
            let mut upload = sides.to.create(to, attributes(download.info())).await?;
            while let Some(part) = download.next().await? {
                upload.write(&part).await?;
                copied.add(part.len());
            }
            upload.finish().await?;
        }
        FileKind::Symlink => sides.to.make_link(to, &info.target, attributes(info)).await?,
        FileKind::Directory => {
            return Err(FileError::IsDirectory
                .on(&String::from_utf8_lossy(from))
                .hint("it became one meanwhile")
                .into());
        }
        FileKind::Other => {
            warn(context, &format!("skipped {}: a pipe, a socket or a device", String::from_utf8_lossy(from)));
            return Ok(());
        }
    }
    copied.files += 1;
    Ok(())
}

fn attributes(info: &FileInfo) -> FileAttributes {
    FileAttributes { mode: Some(info.mode & FILE_MODE_BITS), modified_ns: Some(info.modified_ns) }
}
