//! `ryokan update`: another network, other limits and host paths for a kernel.

use clap::Args;

use super::context::Context;
use super::failure::Failure;
use super::names::KernelArg;
use super::spec::UpdateFields;
use super::{json, render};
use crate::core::spec_update::SpecUpdate;

/// `ryokan update`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan update demo --memory 2G --cpus 2
  ryokan update demo --net host
  ryokan update demo --allow-path ~/data:rw --remove-path ~/old
  ryokan update demo --venv ~/project/.venv

Paths and the idle timeout change at once. Limits, network and virtual environment change with the next start: ryokan stop demo, then any use. Neither restore nor fork brings an earlier one back.")]
pub struct UpdateArgs {
    /// Name or id of the kernel
    pub name: KernelArg,
    /// What to change
    #[command(flatten)]
    pub changes: UpdateFields,
}

/// Changes a kernel's specification.
pub async fn update(context: &Context, args: UpdateArgs) -> Result<(), Failure> {
    let update = args.changes.update()?;
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
