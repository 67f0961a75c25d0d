//! `ryokan update`: another network, other limits and host paths for a kernel.

use std::path::PathBuf;

use clap::Args;

use super::context::Context;
use super::failure::Failure;
use super::spec::{LimitArgs, absolute, parse_allowed, parse_net};
use super::{json, paths, render};
use crate::core::spec::{AllowedPath, Net};
use crate::core::spec_update::SpecUpdate;

/// `ryokan update`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan update demo --memory 2G --cpus 2
  ryokan update demo --net host
  ryokan update demo --allow-path ~/data:rw --remove-path ~/old

Paths and the idle timeout change at once. Limits and network change with the next start: ryokan stop demo, then any use. Neither restore nor fork brings an earlier network, limit or path back.")]
pub struct UpdateArgs {
    /// Name or id of the kernel
    pub name: String,
    /// Network: none or host
    #[arg(long, value_name = "NET", value_parser = parse_net)]
    pub net: Option<Net>,
    /// Limits
    #[command(flatten)]
    pub limits: LimitArgs,
    /// Allow a host path, or change its access; repeatable
    #[arg(long, value_name = "P:ro|rw", value_parser = parse_allowed)]
    pub allow_path: Vec<AllowedPath>,
    /// Withdraw a host path; repeatable
    #[arg(long, value_name = "P")]
    pub remove_path: Vec<PathBuf>,
}

/// Changes a kernel's specification.
pub async fn update(context: &Context, args: UpdateArgs) -> Result<(), Failure> {
    let update = SpecUpdate {
        net: args.net,
        memory_bytes: args.limits.memory,
        cpu_milli: args.limits.cpus,
        pids: args.limits.pids,
        open_files: args.limits.open_files,
        workspace_bytes: args.limits.workspace,
        idle_timeout_ms: args.limits.idle_timeout,
        paths: args.allow_path.iter().map(absolute).collect::<Result<_, _>>()?,
        // Not resolved: the path may be gone from this host.
        remove_paths: args
            .remove_path
            .iter()
            .map(|path| paths::for_daemon(path).map(Into::into))
            .collect::<Result<_, _>>()?,
    };
    if update == SpecUpdate::default() {
        return Err(Failure::usage("nothing to change", "name what: --memory, --net, --allow-path and others"));
    }
    let host = context.host().await?;
    let (kernel, info) = host.open_kernel(&args.name).await?;
    let (_, waiting) = host.update_kernel(&info.id.to_string(), &update, 0).await?;
    let info = kernel.info().await?;
    let name = &info.spec.name;
    context.show(
        || json::kernel(&info),
        || match waiting.is_empty() {
            true => format!("updated {name}\n"),
            false => format!(
                "updated {name}; with its next start (ryokan stop {name}, then any use): {}\n",
                render::plain(&waiting.join(", "))
            ),
        },
    )
}
