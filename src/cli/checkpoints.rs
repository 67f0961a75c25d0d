//! Checkpoints: checkpoint, log, diff, restore, undo.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::context::Context;
use super::failure::Failure;
use super::kernels::warn_unreadable;
use super::names::{KernelArg, KernelOrGroupArg};
use super::{failure, groups, json, preview, render};
use crate::core::checkpoint::{AMBIGUOUS, Checkpoint, CheckpointRequest, CheckpointType, Restoration, Span};
use crate::core::diff::{Area, Deed, Patch};
use crate::core::error::{Error, ErrorCode};
use crate::core::info::{KernelFilter, KernelInfo};
use crate::core::snapshot::{KindError, KindRequest, PortableKind};
use crate::core::workflow::Options;
use crate::rpc::client::KernelClient;

/// `ryokan checkpoint`
#[derive(Debug, Args)]
pub struct CheckpointArgs {
    /// Name or id of the kernel
    pub name: KernelArg,
    /// Name of the checkpoint; one that another checkpoint has gets a warning, because it is ambiguous
    #[arg(short, long, value_name = "TEXT", value_parser = parse_message)]
    pub message: Option<String>,
    /// Description of the checkpoint
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub description: String,
    /// Kind of snapshot; auto is checkpoint, teleport also holds the memory of a virtual machine
    #[arg(long, value_enum, default_value_t = Kind::Auto)]
    pub kind: Kind,
    /// Exempt it from retention
    #[arg(long)]
    pub pin: bool,
    /// Interrupt running code, do not wait for it
    #[arg(long)]
    pub interrupt: bool,
    /// Mark it as taken before the resolution of a conflict
    #[arg(long)]
    pub conflict: bool,
    /// Summary that the journal shows in place of compacted messages
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub summary: String,
    /// Messages to compact: A..B, A.. or ..B as journal numbers; repeatable
    #[arg(long, value_name = "A..B", value_parser = parse_span, requires = "summary")]
    pub compact: Vec<Span>,
    /// How long to wait for running code
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = humantime::parse_duration)]
    pub wait: Duration,
    /// Take no checkpoint; remove this one permanently
    #[arg(long, value_name = "REF", conflicts_with_all = ["message", "description", "kind", "pin", "interrupt", "wait", "conflict", "summary", "compact"])]
    pub delete: Option<String>,
    /// Take no checkpoint; exempt this one from retention
    #[arg(long, value_name = "REF", conflicts_with_all = ["message", "description", "kind", "pin", "interrupt", "wait", "conflict", "summary", "compact", "delete"])]
    pub pin_ref: Option<String>,
    /// Take no checkpoint; subject this one to retention again
    #[arg(long, value_name = "REF", conflicts_with_all = ["message", "description", "kind", "pin", "interrupt", "wait", "conflict", "summary", "compact", "delete", "pin_ref"])]
    pub unpin: Option<String>,
}

/// A name or message that can be given where one is expected.
pub(super) fn parse_message(text: &str) -> Result<String, String> {
    match text.trim().is_empty() {
        true => Err("it is empty: leave out -m for none".into()),
        false => Ok(text.to_owned()),
    }
}

fn parse_span(text: &str) -> Result<Span, String> {
    let number = |text: &str, open: u64| match text {
        "" => Ok(open),
        text => text.parse::<u64>().map_err(|e| format!("{text:?}: {e}")),
    };
    let (first, last) = match text.split_once("..") {
        Some((first, last)) => (number(first, 1)?, number(last, u64::MAX)?),
        None => (number(text, 1)?, number(text, 1)?),
    };
    if first > last || text.is_empty() {
        return Err(format!("{text:?} is not a range: write A..B with the smaller number first"));
    }
    Ok(Span { first, last })
}

/// A kind of snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// The kind that fits best
    Auto,
    /// Memory, to continue on this host
    Suspend,
    /// Memory, processor and disk of a virtual machine, with engine state and workspace
    Teleport,
    /// Engine state and workspace, valid anywhere
    Checkpoint,
}

impl Kind {
    /// What it asks for.
    ///
    /// # Errors
    /// `unsupported` for kind suspend, which is no checkpoint.
    pub fn request(self) -> Result<KindRequest, Error> {
        match self {
            Kind::Auto => Ok(KindRequest::Auto),
            Kind::Suspend => Err(KindError::SuspendIsNoCheckpoint.into()),
            Kind::Teleport => Ok(KindRequest::Only(PortableKind::Teleport)),
            Kind::Checkpoint => Ok(KindRequest::Only(PortableKind::Checkpoint)),
        }
    }
}

/// `ryokan log`
#[derive(Debug, Args)]
pub struct LogArgs {
    /// Name or id of the kernel
    pub name: KernelOrGroupArg,
    /// Draw the ancestry as a graph
    #[arg(long)]
    pub graph: bool,
    /// At most this many; 0 for all
    #[arg(short = 'n', long, value_name = "N", default_value_t = 0)]
    pub limit: u32,
    /// Print only what names a checkpoint: ids and names, one per line
    #[arg(short, long, conflicts_with = "graph")]
    pub quiet: bool,
}

/// `ryokan restore`
#[derive(Debug, Args)]
pub struct RestoreArgs {
    /// Name or id of the kernel
    pub name: KernelOrGroupArg,
    /// Checkpoint: an id's beginning, a name, latest, or '~N' (N before the newest; quote it)
    #[arg(value_name = "REF")]
    pub reference: String,
    /// Change nothing; show what the restore would change
    #[arg(long, conflicts_with_all = ["with_artifacts", "supersede_decisions"])]
    pub preview: bool,
    /// Kind to restore: teleport continues a virtual machine's memory, checkpoint leaves it out, auto
    /// does the first where this host can; without it, the checkpoint's kind
    #[arg(long, value_enum, conflicts_with_all = ["preview", "members"])]
    pub kind: Option<Kind>,
    /// Also restore artifacts, as new versions
    #[arg(long)]
    pub with_artifacts: bool,
    /// Also mark later decisions as superseded
    #[arg(long)]
    pub supersede_decisions: bool,
    /// Of a group: only this member; repeatable
    #[arg(long = "member", value_name = "NAME")]
    pub members: Vec<String>,
    /// Running code of a group.
    #[command(flatten)]
    pub drain: groups::DrainArgs,
}

/// Takes a checkpoint.
pub async fn checkpoint(context: &Context, args: CheckpointArgs) -> Result<(), Failure> {
    if let Some(reference) = &args.delete {
        return delete(context, &args.name, reference).await;
    }
    if let Some((reference, pinned)) =
        args.pin_ref.as_ref().map(|r| (r, true)).or(args.unpin.as_ref().map(|r| (r, false)))
    {
        let (kernel, _) = context.kernel(&args.name).await?;
        // Looked up first: retention may remove an unpinned checkpoint at once.
        let (found, is_head) = kernel.find_checkpoint(reference).await?;
        kernel.pin_checkpoint(&found.id.to_string(), pinned).await?;
        let found = Checkpoint { pinned, ..found };
        let line = || render::checkpoint_line(&found, is_head, context.terminal.paint);
        return context.show(|| json::checkpoint(&found, is_head), line);
    }
    let request = CheckpointRequest {
        name: args.message.unwrap_or_default(),
        description: args.description,
        pinned: args.pin,
        interrupt: args.interrupt,
        wait: args.wait,
        summary: args.summary,
        compact: args.compact,
        snapshot: args.kind.request()?,
        ..CheckpointRequest::new(if args.conflict { CheckpointType::Conflict } else { CheckpointType::Manual }, "")
    };
    request.check()?;
    let (kernel, _) = context.kernel(&args.name).await?;
    let taken = kernel.checkpoint(&request).await?;
    warn_unreadable(context, &kernel).await;
    warn_ambiguous(context, &kernel, &args.name, &taken).await;
    match context.options.json {
        true => context.print_json(&json::checkpoint(&taken, true)),
        false => context.print(&render::checkpoint_line(&taken, true, context.terminal.paint)),
    }
}

/// Warns if other checkpoints of the kernel have the same name.
async fn warn_ambiguous(context: &Context, kernel: &KernelClient, name: &str, taken: &Checkpoint) {
    if taken.name.is_empty() {
        return;
    }
    if let Err(error) = kernel.find_checkpoint(&taken.name).await
        && error.reason == AMBIGUOUS
    {
        let text = format!(
            "{name} has other checkpoints named {:?}: give the id of this one, {}, where one is named",
            taken.name,
            taken.short_id()
        );
        context.say(failure::warning(&text, context.terminal.paint_stderr).trim_end());
    }
}

async fn delete(context: &Context, name: &str, reference: &str) -> Result<(), Failure> {
    let (kernel, info) = context.kernel(name).await?;
    let (found, _) = kernel.find_checkpoint(reference).await?;
    let named = if found.name.is_empty() { String::new() } else { format!(" ({})", found.name) };
    context.confirm(&format!("permanently remove checkpoint {}{named} of {}", found.short_id(), info.spec.name))?;
    // By id: `latest` may change meaning before the confirmation.
    let removed = kernel.remove_checkpoint(&found.id.to_string(), 0).await?;
    context
        .show(|| json::checkpoint(&removed, false), || render::checkpoint_line(&removed, false, context.terminal.paint))
}

/// Lists checkpoints, newest first.
pub async fn log(context: &Context, args: LogArgs) -> Result<(), Failure> {
    let (kernel, info) = match context.kernel(&args.name).await {
        Err(failure) if groups::is_group(&failure) && !args.graph => {
            return groups::log(context, &args.name, args.limit, args.quiet).await;
        }
        opened => opened?,
    };
    let mut all: Vec<(Checkpoint, bool)> = Vec::new();
    let collected = kernel.checkpoints(args.limit, async |checkpoint, is_head| {
        all.push((checkpoint, is_head));
        Ok(())
    });
    collected.await?;
    if context.options.json {
        let lines = all.iter().map(|(checkpoint, is_head)| format!("{}\n", json::checkpoint(checkpoint, *is_head)));
        return context.print(&lines.collect::<String>());
    }
    if args.quiet {
        return context.print(&render::checkpoint_names(&all));
    }
    if all.is_empty() {
        let name = &info.spec.name;
        context.say(&format!("no checkpoints; take one: ryokan checkpoint {name} -m TEXT"));
        return Ok(());
    }
    let branches = if args.graph { Some(branches(context, &info).await?) } else { None };
    context.print(&render::checkpoint_log(&all, branches.as_ref(), context.terminal.paint))
}

/// The checkpoints from which the kernel and its forks originate.
async fn branches(context: &Context, info: &KernelInfo) -> Result<render::Branches, Failure> {
    let mut branches = render::Branches { from: info.origin.from.clone(), ..render::Branches::default() };
    for other in context.host().await?.list_kernels(&KernelFilter::default()).await? {
        if let Some(from) = other.origin.from.filter(|from| from.kernel == info.id) {
            branches.to.entry(from.checkpoint).or_default().push(other.spec.name.to_string());
        }
    }
    Ok(branches)
}

/// `ryokan diff`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan diff demo
  ryokan diff demo \"before refactor\" -p -- src
  ryokan diff demo --with try-2")]
pub struct DiffArgs {
    /// Name or id of the kernel, or name of the group
    pub name: KernelOrGroupArg,
    /// The older checkpoint or freeze; the newest by default, with --with the present
    #[arg(value_name = "A")]
    pub from: Option<String>,
    /// The newer checkpoint or freeze; the present by default
    #[arg(value_name = "B", default_value = "")]
    pub to: String,
    /// Compare with this kernel: B is a checkpoint, or the present, of that one
    #[arg(long, value_name = "KERNEL")]
    pub with: Option<KernelArg>,
    /// Only counts
    #[arg(long)]
    pub stat: bool,
    /// File contents, as unified diffs
    #[arg(short = 'p', long, conflicts_with = "stat")]
    pub text: bool,
    /// Only these files and directories; with --text
    #[arg(last = true, value_name = "PATH", requires = "text")]
    pub paths: Vec<OsString>,
}

impl DiffArgs {
    fn older(&self) -> &str {
        let default = if self.with.is_some() { "" } else { "latest" };
        self.from.as_deref().unwrap_or(default)
    }
}

/// Shows the differences between two checkpoints or freezes.
pub async fn diff(context: &Context, args: DiffArgs) -> Result<(), Failure> {
    let opened = match &args.with {
        Some(other) => {
            context.two_kernels([&args.name, other]).await.map(|[(kernel, _), (other, _)]| (kernel, Some(other)))
        }
        None => context.kernel(&args.name).await.map(|(kernel, _)| (kernel, None)),
    };
    let (kernel, other) = match opened {
        Err(failure) if groups::is_group(&failure) && !args.text && !args.stat && args.with.is_none() => {
            return groups::diff(context, &args.name, args.older(), &args.to).await;
        }
        opened => opened?,
    };
    if args.text {
        return diff_text(context, &kernel, other.as_ref(), args).await;
    }
    let (paint, mut counts) = (context.terminal.paint, BTreeMap::<(Area, Deed), u64>::new());
    let mut failed = None;
    let streamed = kernel.diff_with(args.older(), other.as_ref(), &args.to, async |difference| {
        *counts.entry((difference.area, difference.deed)).or_default() += 1;
        if args.stat {
            return Ok(());
        }
        let line = match context.options.json {
            true => format!("{}\n", serde_json::to_value(&difference).unwrap_or_default()),
            false => render::difference(&difference, paint),
        };
        context.print(&line).map_err(|failure| {
            failed = Some(failure);
            Error::unavailable("the output is closed")
        })
    });
    let streamed = streamed.await;
    if let Some(failure) = failed {
        return Err(failure);
    }
    streamed?;
    match (args.stat, context.options.json) {
        (true, true) => context.print_json(&json::difference_counts(&counts)),
        (true, false) => context.print(&render::difference_counts(&counts)),
        (false, _) => Ok(()),
    }
}

/// Shows the differences in files. Their content is untrusted: only printable text reaches the terminal.
async fn diff_text(
    context: &Context,
    kernel: &KernelClient,
    other: Option<&KernelClient>,
    args: DiffArgs,
) -> Result<(), Failure> {
    let paths: Vec<Vec<u8>> = args.paths.iter().cloned().map(OsStringExt::into_vec).collect();
    let (mut failed, mut whole) = (None, Vec::new());
    let streamed = kernel.diff_text(args.older(), (other, &args.to), &paths, async |patch| {
        whole.extend_from_slice(&patch.text);
        if patch.more {
            return Ok(());
        }
        let patch = Patch { text: std::mem::take(&mut whole), ..patch };
        let shown = match context.options.json {
            true => format!("{}\n", json::patch(&patch)),
            false => render::patch(&patch, context.terminal.paint),
        };
        context.print(&shown).map_err(|failure| {
            failed = Some(failure);
            Error::unavailable("the output is closed")
        })
    });
    let streamed = streamed.await;
    match failed {
        Some(failure) => Err(failure),
        None => Ok(streamed?),
    }
}

/// Restores a checkpoint.
pub async fn restore(context: &Context, args: RestoreArgs) -> Result<(), Failure> {
    let (kernel, info) = match context.kernel(&args.name).await {
        Err(failure) if groups::is_group(&failure) && args.preview => {
            return Err(Failure::usage("--preview is for kernels", "name one of the group's kernels"));
        }
        Err(failure) if groups::is_group(&failure) && args.kind.is_some() => {
            return Err(Failure::usage("--kind is for kernels", "name one of the group's kernels"));
        }
        Err(failure) if groups::is_group(&failure) => {
            return groups::restore(context, &args.name, &args.reference, &args.members, &args.drain).await;
        }
        opened => opened?,
    };
    if !args.members.is_empty() {
        return Err(Failure::usage("--member is for groups", "leave it out for a kernel"));
    }
    args.drain.refuse()?;
    let (found, _) = kernel.find_checkpoint(&args.reference).await?;
    if args.preview {
        return preview::preview(context, &kernel, &info, &found).await;
    }
    context.confirm(&format!("restore {} to {}", info.spec.name, described(&found)))?;
    // By id: `latest` may change meaning before the confirmation.
    let (supersede_decisions, with_artifacts) = (args.supersede_decisions, args.with_artifacts);
    let options = Options { supersede_decisions, with_artifacts, ..Options::default() };
    let kind = args.kind.map(Kind::request).transpose()?;
    let done = kernel.restore_as(&found.id.to_string(), options, kind, 0).await?;
    show_restoration(context, &args.name, &done)
}

/// Undoes the kernel's last restore.
pub async fn undo(context: &Context, name: &str, drain: &groups::DrainArgs) -> Result<(), Failure> {
    let (kernel, info) = match context.kernel(name).await {
        Err(failure) if groups::is_group(&failure) => return groups::undo(context, name, drain).await,
        opened => opened?,
    };
    drain.refuse()?;
    if !context.options.yes {
        context.confirm(&undo_question(context, &kernel, &info).await?)?;
    }
    let done = kernel.undo(0).await?;
    show_restoration(context, name, &done)
}

/// A checkpoint with its name and age.
fn described(checkpoint: &Checkpoint) -> String {
    let named = match checkpoint.name.as_str() {
        "" => String::new(),
        name => format!(" ({})", render::plain(name)),
    };
    format!("checkpoint {}{named}, taken {}", checkpoint.short_id(), render::ago(checkpoint.at_ms, render::now_ms()))
}

/// What an undo does: to which checkpoint it goes back, and how much that changes.
async fn undo_question(context: &Context, kernel: &KernelClient, info: &KernelInfo) -> Result<String, Failure> {
    let question = format!("undo the last restore of {}", info.spec.name);
    let target = match kernel.undo_target().await {
        Err(error) if error.code == ErrorCode::NotFound => return Err(error.into()),
        // Without the right to read, and by an earlier daemon, it is not named.
        Err(_) => return Ok(question),
        Ok(target) => target,
    };
    let question = format!("{question}: go back to {}", described(&target));
    if !context.terminal.can_ask {
        return Ok(question);
    }
    let changes = preview::changes(kernel, &target).await?;
    Ok(format!("{question}; {}", render::change_counts(&changes)))
}

fn show_restoration(context: &Context, name: &str, done: &Restoration) -> Result<(), Failure> {
    if context.options.json {
        return context.print_json(&json::restoration(done));
    }
    context.print(&render::restoration(name, done, context.terminal.paint))
}
