//! Kernels in memory: suspend, resume.

use clap::Args;
use futures::StreamExt as _;

use super::context::Context;
use super::failure::Failure;
use super::names::{KernelArg, KernelOrGroupArg};
use super::{failure, groups, json};
use crate::core::error::Result;
use crate::core::info::{KernelFilter, KernelInfo};
use crate::rpc::client::KernelClient;

/// Number of kernels that are suspended or resumed concurrently.
const AT_ONCE: usize = 16;

/// `ryokan suspend`
#[derive(Debug, Args)]
#[command(
    after_help = "The next use resumes the kernel. Memory is lost when the host stops; saved state is not. What `--all` \
                  suspended is started with the daemon that follows a shutdown. A shutdown itself needs no command: the \
                  daemon saves what runs, and its next start starts that."
)]
pub struct SuspendArgs {
    /// Name or id of the kernel
    #[arg(required_unless_present = "all")]
    pub name: Option<KernelArg>,
    /// Suspend every kernel that has a worker, until the next use or the next start of the host
    #[arg(long, conflicts_with = "name")]
    pub all: bool,
    /// Interrupt running code, do not wait for it
    #[arg(long)]
    pub interrupt: bool,
    /// Save a virtual machine's memory to disk and release it; processes beside the engine end
    #[arg(long)]
    pub release: bool,
}

/// `ryokan resume`
#[derive(Debug, Args)]
#[command(after_help = "A group is one that a failed freeze paused.")]
pub struct ResumeArgs {
    /// Name of a kernel or a group
    #[arg(required_unless_present = "all")]
    pub name: Option<KernelOrGroupArg>,
    /// Resume every suspended kernel
    #[arg(long, conflicts_with = "name")]
    pub all: bool,
}

/// Suspends kernels.
pub async fn suspend(context: &Context, args: SuspendArgs) -> std::result::Result<(), Failure> {
    let each = async |kernel: &KernelClient| kernel.suspend(args.interrupt, args.release, args.all).await;
    change(context, args.name.as_deref(), &["starting", "ready", "busy"], each).await
}

/// Resumes kernels.
pub async fn resume(context: &Context, args: ResumeArgs) -> std::result::Result<(), Failure> {
    let each = async |kernel: &KernelClient| kernel.resume().await;
    match (change(context, args.name.as_deref(), &["suspended"], each).await, &args.name) {
        (Err(failure), Some(name)) if groups::is_group(&failure) => groups::resume(context, name).await,
        (done, _) => done,
    }
}

/// Changes one kernel, or every kernel in these states. Tries every kernel, and fails with the first error.
async fn change(
    context: &Context,
    name: Option<&str>,
    states: &[&str],
    each: impl AsyncFn(&KernelClient) -> Result<()>,
) -> std::result::Result<(), Failure> {
    let host = context.host().await?;
    let names = match name {
        Some(name) => vec![name.to_owned()],
        None => {
            let states = states.iter().map(ToString::to_string).collect();
            let found = host.list_kernels(&KernelFilter { states, ..KernelFilter::default() }).await?;
            // By id: a new kernel may take the name meanwhile.
            found.iter().map(|info| info.id.to_string()).collect()
        }
    };
    let changed = futures::stream::iter(names.iter().map(async |name| -> Result<KernelInfo> {
        let (kernel, _) = host.open_kernel(name).await?;
        each(&kernel).await?;
        kernel.info().await
    }));
    let changed: Vec<Result<KernelInfo>> = changed.buffered(AT_ONCE).collect().await;
    let (done, mut failed): (Vec<_>, Vec<_>) = changed.into_iter().partition(Result::is_ok);
    let done: Vec<KernelInfo> = done.into_iter().flatten().collect();
    let shown = |info: &KernelInfo| format!("{} is {}\n", info.spec.name, info.state);
    match (name, &done[..]) {
        (Some(_), []) => {}
        (Some(_), [info, ..]) => context.show(|| json::kernel(info), || shown(info))?,
        (None, all) => context.show(
            || all.iter().map(json::kernel).collect(),
            || if all.is_empty() { "no such kernels\n".into() } else { all.iter().map(shown).collect() },
        )?,
    }
    let last = failed.pop().and_then(Result::err);
    for error in failed.into_iter().filter_map(Result::err) {
        context.say(failure::warning(&error.to_string(), context.terminal.paint_stderr).trim_end());
    }
    last.map_or(Ok(()), |error| Err(error.into()))
}
