//! `ryokan du`: what takes room on the disk.

use clap::Args;

use super::context::Context;
use super::failure::Failure;
use super::names::KernelArg;
use super::{json, render};

/// `ryokan du`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan du
  ryokan du demo

Sizes are those on the disk. CHECKPOINTS is what a kernel's checkpoints, blobs and kept output take in the store, where equal data is kept once; FREED is the part that only this kernel needs. OBJECTS FOR says what the store keeps them for, each once, with the first reason; KEPT why retention keeps a checkpoint. Removing a checkpoint or a kernel releases its data, ryokan gc then gives the room back. With a name: the same for each checkpoint, alone.")]
pub struct UsageArgs {
    /// Name or id of a kernel; without it all kernels and the data folder
    pub name: Option<KernelArg>,
}

/// Shows what takes room on the disk.
pub async fn usage(context: &Context, args: UsageArgs) -> Result<(), Failure> {
    let usage = context.host().await?.disk_usage(args.name.as_deref().unwrap_or_default()).await?;
    context.show(
        || json::disk_usage(&usage, args.name.is_some()),
        || match args.name {
            Some(_) => render::kernel_disk(&usage, context.terminal.paint),
            None => render::disk_usage(&usage, context.terminal.paint),
        },
    )
}
