//! Mounts: mount, unmount, mounts.

use std::path::PathBuf;

use clap::Args;

use super::args::NameArgs;
use super::context::Context;
use super::failure::Failure;
use super::{json, paths, render};

/// `ryokan mount`
#[derive(Debug, Args)]
pub struct MountArgs {
    /// Name or id of the kernel
    pub name: String,
    /// Where the kernel sees it
    pub path: String,
    /// Folder or file of this host
    pub source: PathBuf,
    /// Let the kernel change what is there
    #[arg(long)]
    pub rw: bool,
}

/// `ryokan unmount`
#[derive(Debug, Args)]
pub struct UnmountArgs {
    /// Name or id of the kernel
    pub name: String,
    /// Where the kernel sees it
    pub path: String,
}

/// Mounts, at once and after every restart.
pub async fn mount(context: &Context, args: MountArgs) -> Result<(), Failure> {
    let source = paths::for_daemon(&args.source)?;
    let (kernel, _) = context.kernel(&args.name).await?;
    kernel.mount_at(&args.path, &source, args.rw, 0).await?;
    list(context, kernel).await
}

/// Takes a mount away.
pub async fn unmount(context: &Context, args: UnmountArgs) -> Result<(), Failure> {
    let (kernel, _) = context.kernel(&args.name).await?;
    kernel.unmount_at(&args.path, 0).await?;
    list(context, kernel).await
}

/// Lists mounts.
pub async fn mounts(context: &Context, args: NameArgs) -> Result<(), Failure> {
    let (kernel, _) = context.kernel(&args.name).await?;
    list(context, kernel).await
}

async fn list(context: &Context, kernel: crate::rpc::client::KernelClient) -> Result<(), Failure> {
    let mounts = kernel.mounts().await?;
    context.show(|| json::list(&mounts), || render::mounts(&mounts, context.terminal.paint))
}
