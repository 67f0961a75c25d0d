//! `ryokan fork`: kernels created from another kernel.

use std::time::Duration;

use clap::Args;

use super::context::Context;
use super::failure::Failure;
use super::kernels::warn_unreadable;
use super::names::KernelArg;
use super::spec::{UpdateFields, isolations};
use super::{json, render};
use crate::core::fork::Forking;
use crate::core::spec::Isolation;
use crate::core::spec_update::SpecUpdate;

/// `ryokan fork`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan fork demo try-it
  ryokan fork demo old --from \"before refactor\"
  ryokan fork demo worker --count 8
  ryokan fork demo untrusted --isolation microvm
  ryokan fork demo big --memory 4G --remove-path ~/data")]
pub struct ForkArgs {
    /// Name or id of the kernel
    pub name: KernelArg,
    /// Name of the new kernel; with --count, NEW-1, NEW-2 and so on
    #[arg(value_name = "NEW")]
    pub new: String,
    /// Fork from this checkpoint, not from the present
    #[arg(long, value_name = "REF", default_value = "")]
    pub from: String,
    /// Number of forks, all from the same moment
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub count: u32,
    /// Interrupt running code, do not wait for it
    #[arg(long)]
    pub interrupt: bool,
    /// How long to wait for running code
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = humantime::parse_duration)]
    pub wait: Duration,
    /// Isolation of the new kernel: process or microvm, whatever that of NAME
    #[arg(long, value_name = "ISOLATION", value_parser = isolations(), hide_possible_values = true)]
    pub isolation: Option<Isolation>,
    /// Image of the new kernel
    #[arg(long, value_name = "IMG")]
    pub image: Option<String>,
    /// What the new kernel has other than NAME
    #[command(flatten)]
    pub changes: UpdateFields,
    /// Idempotency key, valid for 24 hours
    #[arg(long, value_name = "KEY", default_value = "")]
    pub key: String,
}

/// Forks a kernel. Prints every fork, and fails with the first error.
pub async fn fork(context: &Context, args: ForkArgs) -> Result<(), Failure> {
    let forking = Forking {
        name: args.new,
        from: args.from,
        count: args.count,
        interrupt: args.interrupt,
        wait: args.wait,
        expected_version: 0,
        key: args.key,
        isolation: args.isolation,
        image: args.image,
        update: args.changes.update()?,
    };
    forking.check()?;
    let host = context.host().await?;
    let (kernel, info) = host.open_kernel(&args.name).await?;
    let done = match forking.update == SpecUpdate::default() {
        true => kernel.fork(&forking).await?,
        false => host.fork_kernel(&info.id.to_string(), &forking).await?,
    };
    if forking.from.is_empty() {
        warn_unreadable(context, &kernel).await;
    }
    match context.options.json {
        true => context.print_json(&json::forks(&done))?,
        false => context.print(&render::forks(info.spec.name.as_str(), &done, context.terminal.paint))?,
    }
    let first = done.children.into_iter().find_map(|(_, made)| made.err());
    first.map_or(Ok(()), |error| Err(error.into()))
}
