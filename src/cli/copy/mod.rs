//! `cp`: files and directories between this host and a kernel's workspace, or those of two kernels.

mod between;
mod download;
mod upload;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use clap::Args;

use super::blobs::Progress;
use super::context::Context;
use super::drive::Signals;
use super::failure::Failure;
use super::render;
use crate::core::error::{Error, ErrorCode};
use crate::core::files::{FileInfo, FileKind, WORKSPACE, WhileHeld};
use crate::core::quantity::format_size;
use crate::rpc::client::FilesClient;

/// `ryokan cp`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan cp data.csv demo:
  ryokan cp demo:/workspace/out.csv out.csv
  ryokan cp ./project demo:src
  git archive HEAD | ryokan cp - demo:head.tar
  ryokan cp demo:report.txt -
  ryokan cp try2:src demo:

A path of the kernel is in /workspace. A destination that is a directory receives the source under its own name. Modes (without set-user-ID and set-group-ID) and times are kept, links in directories stay links, hard links become files of their own, and files are replaced, but no device, pipe or socket. It stops at the first file that cannot be read or written; what was copied before stays. Works on running and stopped kernels; the files of a suspended virtual machine are only read.")]
pub struct CopyArgs {
    /// NAME:PATH, a path of this host, or - for standard input
    #[arg(value_name = "SRC")]
    pub source: OsString,
    /// NAME:PATH, a path of this host, or - for standard output
    #[arg(value_name = "DST")]
    pub destination: OsString,
    /// Waiting for transitions.
    #[command(flatten)]
    pub wait: WaitArgs,
}

/// Whether operations on files wait.
#[derive(Debug, Clone, Copy, Args)]
pub struct WaitArgs {
    /// Fail, not wait, while a checkpoint, restore, archive, move or freeze has the kernel
    #[arg(long)]
    pub no_wait: bool,
}

impl WaitArgs {
    pub(super) fn held(self) -> WhileHeld {
        if self.no_wait { WhileHeld::Refuse } else { WhileHeld::Wait }
    }
}

/// One side of a copy.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Place {
    Stream,
    Host(PathBuf),
    Kernel { name: String, path: Vec<u8> },
}

impl Place {
    /// A name and a colon before any slash name a kernel.
    pub(super) fn parse(text: &OsStr) -> Place {
        let bytes = text.as_bytes();
        if bytes == b"-" {
            return Place::Stream;
        }
        let colon = bytes.iter().position(|byte| matches!(byte, b':' | b'/')).filter(|at| bytes[*at] == b':');
        match colon.map(|at| (std::str::from_utf8(&bytes[..at]), &bytes[at + 1..])) {
            Some((Ok(name), path)) if !name.is_empty() => {
                let path = if path.is_empty() { WORKSPACE.as_bytes() } else { path };
                Place::Kernel { name: name.to_owned(), path: path.to_vec() }
            }
            _ => Place::Host(PathBuf::from(text)),
        }
    }
}

/// What was copied so far.
pub(super) struct Copied {
    files: u64,
    bytes: u64,
    progress: Progress,
}

impl Copied {
    pub(super) fn new(context: &Context, verb: &'static str) -> Copied {
        Copied { files: 0, bytes: 0, progress: Progress::new(context, verb) }
    }

    /// Clears the progress line.
    pub(super) fn end(&mut self) {
        self.progress.end();
    }

    fn add(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
        self.progress.add(bytes);
    }
}

/// Copies files between this host and a kernel, or two kernels.
pub async fn copy(context: &Context, args: CopyArgs) -> Result<(), Failure> {
    let (source, destination) = (Place::parse(&args.source), Place::parse(&args.destination));
    let to_stdout = destination == Place::Stream;
    let is_stream = to_stdout || source == Place::Stream;
    let inwards = matches!(destination, Place::Kernel { .. });
    let ((Place::Kernel { name, path }, other) | (other, Place::Kernel { name, path })) = (source, destination) else {
        return Err(no_kernel());
    };
    let (kernel, info) = context.kernel(&name).await?;
    let files = kernel.files_with(args.wait.held()).await?;
    // The first of two kernels is the source.
    let target = match &other {
        Place::Kernel { name, .. } => {
            let (kernel, target) = context.kernel(name).await?;
            if target.id == info.id {
                return Err(Failure::usage(
                    "both sides are the same kernel",
                    "copy inside it: ryokan spawn NAME -- cp -a",
                ));
            }
            Some(kernel.files_with(args.wait.held()).await?)
        }
        Place::Stream | Place::Host(_) => None,
    };
    let mut copied = Copied::new(context, if inwards { "sent" } else { "received" });
    // On standard streams, signals keep their default: a read that waits for input could not end at one.
    let mut signals = if is_stream { None } else { Some(Signals::catch()?) };
    let copying = async {
        match (other, inwards) {
            (Place::Kernel { path: to, .. }, _) => match &target {
                Some(target) => {
                    between::path(context, &between::Sides { from: &files, to: target }, &path, &to, &mut copied).await
                }
                None => Err(no_kernel()),
            },
            (Place::Host(from), true) => upload::path(context, &files, &from, &path, &mut copied).await,
            (_, true) => upload::stream(&files, &path, &mut copied).await,
            (Place::Host(to), false) => download::path(context, &files, &path, &to, &mut copied).await,
            (_, false) => download::stream(&files, &path, &mut copied).await,
        }
    };
    let done = match &mut signals {
        None => Ok(copying.await),
        Some(signals) => tokio::select! {
            done = copying => Ok(done),
            code = signals.any() => Err(code),
        },
    };
    copied.end();
    match done {
        Ok(Ok(())) => {}
        Ok(Err(failure)) => {
            if copied.files > 0 {
                let whole = render::counted(copied.files, "whole file");
                context.say(&format!("stopped at an error: {whole} copied before it; the others were not tried"));
            }
            return Err(failure);
        }
        Err(code) => {
            let whole = render::counted(copied.files, "whole file");
            context.say(&format!("interrupted: {whole} copied; the next one is whole or unchanged"));
            return Err(Failure::Quiet(code));
        }
    }
    if to_stdout {
        return Ok(());
    }
    let (count, bytes) = (copied.files, copied.bytes);
    context.show(
        || serde_json::json!({ "files": count, "bytes": bytes }),
        || format!("copied {} ({})\n", render::counted(count, "file"), format_size(bytes)),
    )
}

/// Copies one file or link of a kernel to the same path of another one.
pub(super) async fn same_path(
    context: &Context,
    (from, to): (&FilesClient, &FilesClient),
    path: &[u8],
    info: &FileInfo,
    copied: &mut Copied,
) -> Result<(), Failure> {
    between::entry(context, &between::Sides { from, to }, path, info, path, copied).await
}

fn no_kernel() -> Failure {
    Failure::usage("cp needs a kernel on a side", "write it as NAME:PATH; the other side is a path of this host or -")
}

/// A path below a directory of the kernel.
fn below(folder: &[u8], name: &[u8]) -> Vec<u8> {
    [folder, b"/", name].concat()
}

/// The attributes of a path of the kernel, if it exists.
async fn look(files: &FilesClient, path: &[u8]) -> Result<Option<FileInfo>, Failure> {
    match files.stat(path, true).await {
        Ok(info) => Ok(Some(info)),
        Err(error) if error.code == ErrorCode::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn is_directory(info: &FileInfo) -> bool {
    info.kind == FileKind::Directory
}

fn warn(context: &Context, text: &str) {
    context.say(super::failure::warning(text, context.terminal.paint_stderr).trim_end());
}

/// A conflict of types on this host.
fn wrong_type(path: &Path, what: &str, reason: &str) -> Failure {
    Error::conflict(format!("{} {what}", path.display())).reason(reason).into()
}

fn os(name: &[u8]) -> OsString {
    OsString::from_vec(name.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_told_apart() {
        let kernel = |name: &str, path: &str| Place::Kernel { name: name.into(), path: path.into() };
        for (text, place) in [
            ("-", Place::Stream),
            ("demo:", kernel("demo", "/workspace")),
            ("demo:a/b:c", kernel("demo", "a/b:c")),
            ("./demo:a", Place::Host("./demo:a".into())),
            (":a", Place::Host(":a".into())),
            ("a/b", Place::Host("a/b".into())),
        ] {
            assert_eq!(Place::parse(OsStr::new(text)), place, "{text}");
        }
    }
}
