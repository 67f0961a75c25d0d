//! `ryokan update`: another network, other limits and host paths for a kernel.

use std::path::PathBuf;

use clap::Args;

use super::context::Context;
use super::failure::Failure;
use super::spec::{absolute, parse_allowed, parse_idle, parse_net};
use super::{json, paths, render};
use crate::core::quantity::{parse_cpu_milli, parse_size};
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
    /// Memory of all processes, such as 512M
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub memory: Option<u64>,
    /// Processors, such as 1 or 0.5
    #[arg(long, value_name = "N", value_parser = parse_cpu_milli)]
    pub cpus: Option<u32>,
    /// Maximum processes and threads
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub pids: Option<u32>,
    /// Maximum open files of one process
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub open_files: Option<u32>,
    /// Size of the workspace, such as 10G
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub workspace: Option<u64>,
    /// Idle time before it is stopped, such as 5m, or never
    #[arg(long, value_name = "TIME", value_parser = parse_idle)]
    pub idle_timeout: Option<u64>,
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
        memory_bytes: args.memory,
        cpu_milli: args.cpus,
        pids: args.pids,
        open_files: args.open_files,
        workspace_bytes: args.workspace,
        idle_timeout_ms: args.idle_timeout,
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
