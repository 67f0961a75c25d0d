//! Kernels made from a kernel: fork, thread.

use std::time::Duration;

use clap::Args;

use super::context::Context;
use super::failure::Failure;
use super::kernels::tell_unreadable;
use super::{json, render};
use crate::core::engine::EngineName;
use crate::core::fork::Forking;
use crate::core::name::KernelName;

/// `ryokan fork`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan fork demo try-it
  ryokan fork demo old --from \"before refactor\"
  ryokan fork demo worker --count 8")]
pub struct ForkArgs {
    /// Name or id of the kernel
    pub name: String,
    /// Name of the new kernel; of several: NEW-1, NEW-2 and so on
    #[arg(value_name = "NEW")]
    pub new: String,
    /// Begin at this checkpoint in place of what is now
    #[arg(long, value_name = "REF", default_value = "")]
    pub from: String,
    /// Make so many, all from the same moment
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub count: u32,
    /// Interrupt what runs in place of waiting for it
    #[arg(long)]
    pub interrupt: bool,
    /// How long to wait for what runs
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = humantime::parse_duration)]
    pub wait: Duration,
    /// The same key again within 24 hours gives the same kernels
    #[arg(long, value_name = "KEY", default_value = "")]
    pub key: String,
}

/// `ryokan thread`
#[derive(Debug, Args)]
pub struct ThreadArgs {
    /// Name or id of the kernel whose workspace it is to share
    pub name: String,
    /// Name of the new kernel
    #[arg(value_name = "NEW", value_parser = super::kernels::parse_name)]
    pub new: KernelName,
    /// Its engine, if it is to be another
    #[arg(long, value_name = "ENGINE")]
    pub engine: Option<EngineName>,
    /// The same key again within 24 hours gives the same kernel
    #[arg(long, value_name = "KEY", default_value = "")]
    pub key: String,
}

/// Makes kernels that begin as one is. What was made is told; the first failure is the command's.
pub async fn fork(context: &Context, args: ForkArgs) -> Result<(), Failure> {
    let forking = Forking {
        name: args.new,
        from: args.from,
        count: args.count,
        interrupt: args.interrupt,
        wait: args.wait,
        expected_version: 0,
        key: args.key,
    };
    forking.check()?;
    let (kernel, info) = context.kernel(&args.name).await?;
    let done = kernel.fork(&forking).await?;
    if forking.from.is_empty() {
        tell_unreadable(context, &kernel).await;
    }
    match context.options.json {
        true => context.print_json(&json::forks(&done))?,
        false => context.print(&render::forks(info.spec.name.as_str(), &done, context.terminal.paint))?,
    }
    let first = done.children.into_iter().find_map(|(_, made)| made.err());
    first.map_or(Ok(()), |error| Err(error.into()))
}

/// Makes a kernel that works in the workspace of one.
pub async fn thread(context: &Context, args: ThreadArgs) -> Result<(), Failure> {
    let (kernel, parent) = context.kernel(&args.name).await?;
    let (_, info) = kernel.thread(&args.new, args.engine, &args.key).await?;
    context.show(
        || json::kernel(&info),
        || format!("created {} ({}), a thread of {}\n", info.spec.name, info.spec.engine, parent.spec.name),
    )
}
