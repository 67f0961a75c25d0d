//! Mounts: mount, unmount, mounts.

use std::path::PathBuf;

use clap::Args;

use super::args::NameArgs;
use super::context::Context;
use super::failure::Failure;
use super::names::KernelArg;
use super::{json, paths, render};

/// `ryokan mount`
#[derive(Debug, Args)]
pub struct MountArgs {
    /// Name or id of the kernel
    pub name: KernelArg,
    /// Path in the kernel
    pub path: String,
    /// Directory or file of this host
    pub source: PathBuf,
    /// Let the kernel write to it
    #[arg(long)]
    pub rw: bool,
}

/// `ryokan unmount`
#[derive(Debug, Args)]
pub struct UnmountArgs {
    /// Name or id of the kernel
    pub name: KernelArg,
    /// Path in the kernel
    pub path: String,
}

/// Adds a mount, which persists across restarts.
pub async fn mount(context: &Context, args: MountArgs) -> Result<(), Failure> {
    let source = paths::for_daemon(&args.source)?;
    let (kernel, _) = context.kernel(&args.name).await?;
    kernel.mount_at(&args.path, &source, args.rw, 0).await?;
    list(context, kernel).await
}

/// Removes a mount.
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
