//! Kernels as a whole: new, ls, show, start, stop, rename, rm, archive, unarchive.

use clap::Args;

use super::args::{NameArgs, StartArgs};
use super::context::Context;
use super::failure::Failure;
use super::names::KernelArg;
use super::spec::{SpecArgs, parse_pair};
use super::{failure, json, render};
use crate::core::info::{KernelFilter, KernelInfo, ProcessInfo};
use crate::core::kernel::State;
use crate::core::missed::{MissedEntry, UNREADABLE};
use crate::core::name::KernelName;
use crate::rpc::client::KernelClient;

/// `ryokan new`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan new demo
  ryokan new data --engine python --memory 2G --cpus 2 --idle-timeout 1h
  ryokan new site --from-dir ./site --label project=site
  ryokan new shell --share demo --engine bash
  ryokan new lab --venv ~/project/.venv
  ryokan new build --allow-path ~/src/app:rw --allow-path /opt/sdk:ro --net host")]
pub struct NewArgs {
    /// Name of the new kernel
    #[arg(value_parser = parse_name)]
    pub name: KernelName,
    /// Work in the workspace of this kernel, with a state of its own
    #[arg(long, value_name = "KERNEL", conflicts_with_all = NOT_SHARED)]
    pub share: Option<KernelArg>,
    /// Its specification.
    #[command(flatten)]
    pub spec: SpecArgs,
    /// Idempotency key, valid for 24 hours
    #[arg(long, value_name = "KEY")]
    pub key: Option<String>,
}

/// Options that do not apply to `--share`: the kernel takes them from the workspace's owner.
const NOT_SHARED: [&str; 16] = [
    "isolation",
    "image",
    "allow_path",
    "venv",
    "net",
    "memory",
    "cpus",
    "pids",
    "open_files",
    "workspace",
    "idle_timeout",
    "keep",
    "keep_for",
    "labels",
    "allow_degraded",
    "from_dir",
];

/// `ryokan ls`
#[derive(Debug, Args)]
pub struct LsArgs {
    /// Only names with this prefix
    pub prefix: Option<String>,
    /// Only kernels with this label; repeatable
    #[arg(long = "label", value_name = "K=V", value_parser = parse_pair)]
    pub labels: Vec<(String, String)>,
    /// Only kernels in this state, such as ready or stopped; repeatable
    #[arg(long = "state", value_name = "STATE", value_parser = State::NAMES, hide_possible_values = true)]
    pub states: Vec<String>,
    /// Print names only
    #[arg(short, long)]
    pub quiet: bool,
}

/// `ryokan stop`
#[derive(Debug, Args)]
pub struct StopArgs {
    /// Name or id of the kernel
    pub name: KernelArg,
    /// Interrupt running code, do not wait for it
    #[arg(long)]
    pub force: bool,
}

/// `ryokan rename`
#[derive(Debug, Args)]
#[command(after_help = "Id, history, checkpoints and open connections stay. The kernel's own socket gets the new name;
published sockets keep theirs. Running code sees the new name in RYOKAN_KERNEL after the next start.")]
pub struct RenameArgs {
    /// Name or id of the kernel
    #[arg(value_name = "OLD")]
    pub name: KernelArg,
    /// Its new name
    #[arg(value_name = "NEW", value_parser = parse_name)]
    pub to: KernelName,
}

/// `ryokan rm`
#[derive(Debug, Args)]
pub struct RmArgs {
    /// Names or ids of the kernels
    #[arg(required = true, value_name = "NAME")]
    pub names: Vec<KernelArg>,
    /// Also remove the kernels that share its workspace (threads)
    #[arg(long)]
    pub with_threads: bool,
}

pub(super) fn parse_name(text: &str) -> Result<KernelName, String> {
    text.parse().map_err(|e: crate::core::name::NameError| e.to_string())
}

/// Creates a kernel.
pub async fn new(context: &Context, args: NewArgs) -> Result<(), Failure> {
    if let Some(owner) = &args.share {
        return new_shared(context, owner, &args).await;
    }
    let request = args.spec.request(args.name)?;
    let (_, info) = context.host().await?.create_kernel(&request, args.key.as_deref().unwrap_or_default()).await?;
    context.show(
        || json::kernel(&info),
        || format!("created {} ({}, {})\n", info.spec.name, info.spec.engine, info.spec.isolation.name()),
    )
}

/// Creates a kernel in the workspace of `owner`: a thread of it.
async fn new_shared(context: &Context, owner: &str, args: &NewArgs) -> Result<(), Failure> {
    let (kernel, parent) = context.kernel(owner).await?;
    let key = args.key.as_deref().unwrap_or_default();
    let (_, info) = kernel.thread(&args.name, args.spec.engine, key).await?;
    context.show(
        || json::kernel(&info),
        || format!("created {} ({}) in the workspace of {}\n", info.spec.name, info.spec.engine, parent.spec.name),
    )
}

/// Lists kernels.
pub async fn ls(context: &Context, args: LsArgs) -> Result<(), Failure> {
    let filter = KernelFilter { labels: args.labels, states: args.states, prefix: args.prefix.unwrap_or_default() };
    let none = match filter == KernelFilter::default() {
        true => "no kernels; create one: ryokan new NAME",
        false => "no matching kernels",
    };
    let kernels = context.host().await?.list_kernels(&filter).await?;
    if args.quiet && !context.options.json {
        return context.print(&kernels.iter().map(|info| format!("{}\n", info.spec.name)).collect::<String>());
    }
    context.show(
        || kernels.iter().map(json::kernel).collect(),
        || render::kernels(&kernels, none, render::now_ms(), context.terminal.paint),
    )
}

/// Shows one kernel.
pub async fn show(context: &Context, args: NameArgs) -> Result<(), Failure> {
    let (kernel, _) = context.kernel(&args.name).await?;
    let (info, rights) = kernel.info_and_rights().await?;
    let missed = kernel.missed().await.unwrap_or_default();
    let mounts = kernel.mounts().await?;
    context.show(
        || json::shown_kernel(&info, rights, &missed, &mounts),
        || {
            let shown = render::kernel(&info, rights, render::now_ms(), context.terminal.paint);
            shown
                + &render::kernel_mounts(&mounts, context.terminal.paint)
                + &render::missed(&missed, context.terminal.paint)
        },
    )
}

/// Starts a kernel's worker.
pub async fn start(context: &Context, args: StartArgs) -> Result<(), Failure> {
    let (kernel, _) = context.kernel(&args.name).await?;
    match args.without_memory {
        true => kernel.start_without_memory().await?,
        false => kernel.start().await?,
    }
    report(context, &kernel.info().await?)
}

/// Stops a kernel's worker.
pub async fn stop(context: &Context, args: StopArgs) -> Result<(), Failure> {
    let (kernel, _) = context.kernel(&args.name).await?;
    // Read first: the stop ends the engine that reports them.
    let ends = Ends::with(&kernel).await;
    kernel.stop(args.force).await?;
    ends.report(context);
    report(context, &kernel.info().await?)
}

/// Archives a kernel.
pub async fn archive(context: &Context, args: NameArgs) -> Result<(), Failure> {
    let (kernel, _) = context.kernel(&args.name).await?;
    // Read first: the stop ends the engine that reports them.
    let ends = Ends::with(&kernel).await;
    let (checkpoint, _) = kernel.archive(0).await?;
    ends.report(context);
    context.show(
        || json::checkpoint(&checkpoint, true),
        || format!("{} is archived in checkpoint {}\n", args.name, checkpoint.short_id()),
    )
}

/// Brings an archived kernel back.
pub async fn unarchive(context: &Context, args: NameArgs) -> Result<(), Failure> {
    let (kernel, _) = context.kernel(&args.name).await?;
    kernel.unarchive(0).await?;
    let info = kernel.info().await?;
    context.show(|| json::kernel(&info), || format!("{} is unarchived: its next use starts it\n", info.spec.name))
}

/// Changes a kernel's name.
pub async fn rename(context: &Context, args: RenameArgs) -> Result<(), Failure> {
    let host = context.host().await?;
    let (kernel, before) = host.open_kernel(&args.name).await?;
    // By id: a new kernel may have taken the name meanwhile.
    host.rename_kernel(&before.id.to_string(), args.to.as_str(), 0).await?;
    let info = kernel.info().await?;
    context.show(|| json::kernel(&info), || format!("renamed {} to {}\n", before.spec.name, info.spec.name))
}

/// Warns of files that a capture of the workspace could not read and therefore omitted.
pub async fn warn_unreadable(context: &Context, kernel: &KernelClient) {
    let missed = kernel.missed().await.unwrap_or_default();
    let unreadable = missed.iter().filter(|entry| entry.reason == UNREADABLE);
    let files: Vec<&str> = unreadable.filter_map(|entry| entry.key.strip_prefix("file/")).collect();
    if let Some(more) = files.len().checked_sub(1) {
        let others = if more > 0 { format!(" and {more} more") } else { String::new() };
        let what = format!("not included: {}{others} (not readable)", files[0]);
        context.say(failure::warning(&what, context.terminal.paint_stderr).trim_end());
    }
}

/// What ends with a kernel's worker.
struct Ends {
    missed: Vec<MissedEntry>,
    processes: Vec<ProcessInfo>,
}

impl Ends {
    async fn with(kernel: &KernelClient) -> Self {
        let (missed, processes) = futures::join!(kernel.missed(), kernel.processes());
        Self { missed: missed.unwrap_or_default(), processes: processes.unwrap_or_default() }
    }

    /// Names what is gone.
    fn report(&self, context: &Context) {
        if !self.processes.is_empty() {
            let named: Vec<String> = self.processes.iter().map(render::process).collect();
            context.say(&format!("ended: {}", named.join(", ")));
        }
        if !self.missed.is_empty() {
            let names: Vec<String> =
                self.missed.iter().map(|entry| format!("{} ({})", entry.key, entry.reason)).collect();
            context.say(&format!("not saved: {}", render::plain(&names.join(", "))));
        }
    }
}

fn report(context: &Context, info: &KernelInfo) -> Result<(), Failure> {
    context.show(|| json::kernel(info), || format!("{} is {}\n", info.spec.name, info.state))
}

/// Removes kernels after a confirmation. Tries every kernel, and fails with the first error.
pub async fn rm(context: &Context, args: RmArgs) -> Result<(), Failure> {
    let host = context.host().await?;
    let mut named = Vec::new();
    for name in &args.names {
        let (_, info) = host.open_kernel(name).await?;
        named.push(info);
    }
    if args.with_threads {
        // The confirmation names the threads too.
        let all = host.list_kernels(&KernelFilter::default()).await?;
        let is_named = |info: &KernelInfo| named.iter().any(|other: &KernelInfo| other.id == info.id);
        let threads = all.into_iter().filter(|info| !is_named(info));
        let threads: Vec<KernelInfo> =
            threads.filter(|info| named.iter().any(|other| info.thread_of == Some(other.id))).collect();
        named.splice(0..0, threads);
    }
    let names: Vec<&str> = named.iter().map(|info| info.spec.name.as_str()).collect();
    context.confirm(&format!("remove {} with files and journal", names.join(", ")))?;
    let mut first = None;
    for info in &named {
        // By id: a new kernel may have taken the name since the confirmation.
        let id = info.id.to_string();
        let removed = match args.with_threads {
            true => host.remove_with_threads(&id, 0).await,
            false => host.remove_kernel(&id, 0).await,
        };
        match removed {
            Ok(()) if context.options.json => {}
            Ok(()) => context.print(&format!("removed {}\n", info.spec.name))?,
            Err(error) => first = first.or(Some(error)),
        }
    }
    if context.options.json {
        context.print_json(&named.iter().map(json::kernel).collect())?;
    }
    first.map_or(Ok(()), |error| Err(error.into()))
}
