//! `ryokan watch`: changes of a kernel's files, as they happen.

use std::ffi::OsString;

use clap::Args;

use super::context::Context;
use super::copy::{Place, WaitArgs};
use super::drive::Signals;
use super::failure::Failure;
use super::journal::until_signal;
use super::render;
use crate::core::error::Error;
use crate::core::files::{FileEvent, FileEventKind, WORKSPACE};

/// `ryokan watch`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan watch demo
  ryokan watch demo:src --recursive --json

One line for each event: created, written, closed (after it was open for writing), changed (mode, owner or times), removed; a move is removed and created. `ready` comes first: nothing after it is missed, except in a directory that is made later: what is in it when it is noticed is reported as created. A file that is put there whole, as by `ryokan cp`, is created, not closed. `overflow` means that events are missing. Ends with Ctrl-C, and with `ended` if the directory is removed or replaced, or has more than 4,096 directories below it, and when the kernel's virtual machine starts or ends.")]
pub struct WatchArgs {
    /// The kernel, and a directory in its workspace
    #[arg(value_name = "NAME[:PATH]")]
    pub place: OsString,
    /// Also watch the directories below it
    #[arg(long, short)]
    pub recursive: bool,
    /// Waiting for transitions.
    #[command(flatten)]
    pub wait: WaitArgs,
}

/// Prints events until a signal.
pub async fn watch(context: &Context, args: WatchArgs) -> Result<(), Failure> {
    let (name, path) = match Place::parse(&args.place) {
        Place::Kernel { name, path } => (name, path),
        Place::Host(name) => (name.display().to_string(), WORKSPACE.as_bytes().to_vec()),
        Place::Stream => return Err(Failure::usage("no kernel is named", "write it as NAME or NAME:PATH")),
    };
    let files = context.kernel(&name).await?.0.files_with(args.wait.held()).await?;
    let mut signals = Signals::catch()?;
    let mut failed = None;
    let show = async |event: FileEvent| {
        print(context, &event).map_err(|failure| {
            failed = Some(failure);
            Error::unavailable("the output is closed")
        })
    };
    let following = async { files.watch(&path, args.recursive, show).await.map_err(Failure::from) };
    let followed = until_signal(&mut signals, following).await;
    failed.map_or(followed, Err)
}

fn print(context: &Context, event: &FileEvent) -> Result<(), Failure> {
    let FileEvent { kind, path } = event;
    if context.options.json {
        let path = String::from_utf8_lossy(path);
        return context.print(&format!("{}\n", serde_json::json!({ "event": kind.name(), "path": path })));
    }
    let path = match kind {
        FileEventKind::Ready | FileEventKind::Overflow | FileEventKind::Ended => String::new(),
        _ if path.is_empty() => String::from("."),
        _ => render::shown_bytes(path),
    };
    context.print(format!("{:<8} {path}", kind.name()).trim_end()).and_then(|()| context.print("\n"))
}
