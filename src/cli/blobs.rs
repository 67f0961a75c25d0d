//! Blobs: put, get. They are streamed, never held in memory.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};

use super::context::Context;
use super::drive::Signals;
use super::failure::Failure;
use super::json;
use super::names::KernelArg;
use crate::core::error::Error;
use crate::core::ids::Digest;
use crate::core::limits;
use crate::core::quantity::format_size;
use crate::rpc::client::{BlobDownload, KernelClient};

/// `ryokan blob`
#[derive(Debug, Args)]
pub struct BlobArgs {
    /// The action.
    #[command(subcommand)]
    pub action: BlobAction,
}

/// Actions on blobs.
#[derive(Debug, Subcommand)]
pub enum BlobAction {
    /// Store a file and print its hash
    Put {
        /// Name or id of the kernel
        name: KernelArg,
        /// The file; - is standard input
        file: PathBuf,
    },
    /// Print a blob, or write it to a file
    Get {
        /// Name or id of the kernel
        name: KernelArg,
        /// Hash of the blob
        #[arg(value_parser = parse_hash)]
        hash: Digest,
        /// Write to this file
        #[arg(short, long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
}

fn parse_hash(text: &str) -> Result<Digest, String> {
    text.parse().map_err(|e: crate::core::ids::ParseIdError| e.to_string())
}

/// Stores or reads a blob.
pub async fn blob(context: &Context, args: BlobArgs) -> Result<(), Failure> {
    match args.action {
        BlobAction::Put { name, file } => put(context, &name, &file).await,
        BlobAction::Get { name, hash, output } => get(context, &name, hash, output.as_deref()).await,
    }
}

async fn put(context: &Context, name: &str, file: &Path) -> Result<(), Failure> {
    let (kernel, _) = context.kernel(name).await?;
    let (hash, bytes) = upload(context, &kernel, file).await?;
    context.show(|| json::blob(hash, bytes), || format!("{hash}\n"))
}

/// Stores a file, or standard input, as a blob.
pub(super) async fn upload(context: &Context, kernel: &KernelClient, file: &Path) -> Result<(Digest, u64), Failure> {
    let from = open(file)?;
    let mut upload = kernel.new_blob().await?;
    each_piece(context, "sent", file, from, async |piece| upload.write(piece).await).await?;
    Ok(upload.finish().await?)
}

/// A file, or standard input.
pub(super) fn open(file: &Path) -> Result<Box<dyn Read>, Failure> {
    match file == Path::new("-") {
        true => Ok(Box::new(std::io::stdin())),
        false => Ok(Box::new(std::fs::File::open(file).map_err(|e| Failure::of_file("read", file, &e))?)),
    }
}

/// Passes an opened file to `take` in pieces, and shows the progress.
pub(super) async fn each_piece(
    context: &Context,
    done: &'static str,
    file: &Path,
    mut from: Box<dyn Read>,
    mut take: impl AsyncFnMut(&[u8]) -> crate::core::error::Result<()>,
) -> Result<(), Failure> {
    let mut progress = Progress::new(context, done);
    let mut chunk = vec![0; limits::CHUNK_BYTES];
    loop {
        let read = match from.read(&mut chunk) {
            Ok(0) => break,
            Ok(read) => read,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(Failure::of_file("read", file, &e)),
        };
        take(&chunk[..read]).await?;
        progress.add(read);
    }
    progress.end();
    Ok(())
}

async fn get(context: &Context, name: &str, hash: Digest, output: Option<&Path>) -> Result<(), Failure> {
    let (kernel, _) = context.kernel(name).await?;
    let download = kernel.open_blob(hash).await?;
    let size = download.size();
    save(context, download, output).await?;
    match context.options.json && output.is_some() {
        true => context.print_json(&json::blob(hash, size)),
        false => Ok(()),
    }
}

/// Writes a blob to a file, or to standard output.
pub(super) async fn save(context: &Context, mut download: BlobDownload, output: Option<&Path>) -> Result<(), Failure> {
    let (mut to, mut signals) = Target::open(output)?;
    let mut progress = Progress::new(context, "received");
    while let Some(part) = unless_signalled(&mut signals, download.next()).await? {
        to.write(&part)?;
        progress.add(part.len());
    }
    to.finish()?;
    progress.end();
    Ok(())
}

/// Awaits `next`, or fails at a signal; the unfinished file is then removed.
pub(super) async fn unless_signalled<T>(
    signals: &mut Option<Signals>,
    next: impl Future<Output = crate::core::error::Result<T>>,
) -> Result<T, Failure> {
    // On standard output, signals keep their default.
    let Some(signals) = signals else { return Ok(next.await?) };
    tokio::select! {
        next = next => Ok(next?),
        code = signals.any() => Err(Failure::Quiet(code)),
    }
}

/// Destination of a blob. A file appears complete or not at all.
pub(super) enum Target<'a> {
    Stdout(std::io::Stdout),
    File { path: &'a Path, temporary: PathBuf, file: std::fs::File },
}

impl<'a> Target<'a> {
    /// Opens the destination. For a file, signals are caught so that no partial file remains.
    pub(super) fn open(output: Option<&'a Path>) -> Result<(Target<'a>, Option<Signals>), Failure> {
        match output.filter(|path| *path != Path::new("-")) {
            None => Ok((Target::Stdout(std::io::stdout()), None)),
            Some(path) => {
                let signals = Signals::catch()?;
                let mut temporary = path.as_os_str().to_owned();
                temporary.push(format!(".ryokan-{}", std::process::id()));
                let temporary = PathBuf::from(temporary);
                let file = std::fs::File::create_new(&temporary).map_err(|e| unwritable(path, e))?;
                Ok((Target::File { path, temporary, file }, Some(signals)))
            }
        }
    }

    pub(super) fn write(&mut self, part: &[u8]) -> Result<(), Failure> {
        match self {
            Target::Stdout(out) => out.write_all(part).map_err(Failure::of_output),
            Target::File { path, file, .. } => file.write_all(part).map_err(|e| unwritable(path, e)),
        }
    }

    pub(super) fn finish(&mut self) -> Result<(), Failure> {
        match self {
            Target::Stdout(out) => out.flush().map_err(Failure::of_output),
            Target::File { path, temporary, file } => {
                file.sync_all().and_then(|()| std::fs::rename(&*temporary, *path)).map_err(|e| unwritable(path, e))
            }
        }
    }
}

impl Drop for Target<'_> {
    fn drop(&mut self) {
        if let Target::File { temporary, .. } = self {
            // Already renamed on success.
            let _ = std::fs::remove_file(temporary);
        }
    }
}

fn unwritable(path: &Path, error: std::io::Error) -> Failure {
    match error.kind() {
        std::io::ErrorKind::NotFound => Failure::of_file("write", path, &error),
        _ => Error::internal(format!("could not write {}: {error}", path.display())).into(),
    }
}

/// A progress line on a terminal, for large transfers.
pub(super) struct Progress {
    shown: bool,
    what: &'static str,
    bytes: u64,
    next: u64,
}

/// Bytes between two updates.
const PROGRESS_BYTES: u64 = 16 << 20;

impl Progress {
    pub(super) fn new(context: &Context, what: &'static str) -> Self {
        Progress { shown: context.terminal.stderr, what, bytes: 0, next: PROGRESS_BYTES }
    }

    pub(super) fn add(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
        if self.shown && self.bytes >= self.next {
            self.next = self.bytes + PROGRESS_BYTES;
            let _ = write!(std::io::stderr(), "\r{} {}   ", self.what, format_size(self.bytes));
        }
    }

    pub(super) fn end(&self) {
        if self.shown && self.next > PROGRESS_BYTES {
            let _ = writeln!(std::io::stderr(), "\r{} {}   ", self.what, format_size(self.bytes));
        }
    }
}
