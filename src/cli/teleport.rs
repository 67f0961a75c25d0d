//! Moves of kernels between hosts, and the far end of a transport.

use std::cell::Cell;
use std::collections::VecDeque;
use std::io::Write as _;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::context::Context;
use super::failure::Failure;
use super::names::KernelArg;
use super::portable::parse_place;
use super::spec::isolations;
use super::{json, render};
use crate::core::error::Error;
use crate::core::handover::{Allowed, MoveOptions};
use crate::core::ids::HandoverId;
use crate::core::info::{HandoverInfo, TeleportReport};
use crate::core::limits;
use crate::core::quantity::{QuantityError, format_size, parse_size};
use crate::core::snapshot::{KindRequest, PortableKind};
use crate::core::spec::Isolation;

/// Time between two lines of progress.
const DRAWN_EVERY: Duration = Duration::from_millis(100);
/// The value of `--allow-missing` without one.
const ALL: &str = "all";
/// Columns of a line of progress.
const WIDTH: usize = 72;

/// `ryokan teleport`
#[derive(Debug, Args)]
pub struct TeleportArgs {
    /// Name or id of the kernel, or name of the group
    #[arg(required_unless_present_any = ["status", "resolve"])]
    pub name: Option<KernelArg>,
    /// The other host: ssh://[USER@]HOST[:PORT][/SOCKET], or exec:COMMAND that leads to `ryokan pipe` there
    #[arg(long, value_name = "TRANSPORT", required_unless_present_any = ["status", "abort", "resolve"])]
    pub to: Option<String>,
    /// Move without what belongs to this host; with =WHAT, repeatable, only without that: paths, venv, network, layers,
    /// mounts, mcp, processes
    #[arg(long, value_name = "WHAT", num_args = 0..=1, require_equals = true, default_missing_value = ALL)]
    pub allow_missing: Vec<String>,
    /// Kind of snapshot; auto is the most complete kind that the other host can continue
    #[arg(long, value_enum, default_value_t = MoveKind::Auto, conflicts_with_all = ["status", "abort", "resolve"])]
    pub kind: MoveKind,
    /// Most bytes a second while the kernel runs, such as 10M; the rest of the pause has no limit
    #[arg(long, value_name = "RATE", value_parser = parse_rate, default_value = "0", hide_default_value = true)]
    pub limit_rate: u64,
    /// Isolation on the other host: process or microvm; without it, as here
    #[arg(long, value_name = "ISOLATION", value_parser = isolations(), hide_possible_values = true, conflicts_with_all = ["status", "abort", "resolve"])]
    pub isolation: Option<Isolation>,
    /// Leave older checkpoints behind, except pinned ones, those with a summary, of a freeze, and that of an undo;
    /// they end with the record of the departed kernel: when it comes back, or when the record is removed
    #[arg(long, value_name = "CHECKPOINT", conflicts_with_all = ["status", "abort", "resolve"])]
    pub since: Option<String>,
    /// Idempotency key, valid for 24 hours: a repeated command returns the report of the first move
    #[arg(long, value_name = "KEY", default_value = "", hide_default_value = true, conflicts_with_all = ["status", "abort", "resolve"])]
    pub key: String,
    /// Of a group: where a repository, database or directory comes to be on the other host; repeatable
    #[arg(long = "place", value_name = "MEMBER=PATH", value_parser = parse_place, conflicts_with_all = ["status", "abort", "resolve"])]
    pub places: Vec<(String, String)>,
    /// List moves in progress, unacknowledged moves and received kernels
    #[arg(long, conflicts_with_all = ["to", "abort", "resolve"])]
    pub status: bool,
    /// Cancel a move before its commit
    #[arg(long, conflicts_with_all = ["to", "resolve"])]
    pub abort: bool,
    /// Decide about a move whose other host is gone for good
    #[arg(long, value_name = "HANDOVER", requires = "decision", conflicts_with = "to")]
    pub resolve: Option<String>,
    /// With --resolve: activate the prepared kernel here
    #[arg(long, group = "decision", requires = "resolve")]
    pub live: bool,
    /// With --resolve: delete the prepared kernel; at the source, give up notifying the target
    #[arg(long, group = "decision", requires = "resolve")]
    pub discard: bool,
}

/// A kind of snapshot in which a kernel can be asked to move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MoveKind {
    /// The most complete kind that the other host can continue
    Auto,
    /// Engine state and workspace
    Checkpoint,
    /// Memory, processor and disk
    Teleport,
}

impl MoveKind {
    fn request(self) -> KindRequest {
        match self {
            MoveKind::Auto => KindRequest::Auto,
            MoveKind::Checkpoint => KindRequest::Only(PortableKind::Checkpoint),
            MoveKind::Teleport => KindRequest::Only(PortableKind::Teleport),
        }
    }
}

fn parse_rate(text: &str) -> Result<u64, QuantityError> {
    parse_size(text.strip_suffix("/s").unwrap_or(text))
}

/// Moves a kernel, or shows, cancels and resolves moves.
pub async fn teleport(context: &Context, args: TeleportArgs) -> Result<(), Failure> {
    if let Some(id) = &args.resolve {
        return resolve(context, id, args.live).await;
    }
    let host = context.host().await?;
    if args.status {
        let mut found = host.handovers().await?;
        found
            .retain(|one| args.name.as_ref().is_none_or(|name| one.name == **name || one.kernel.to_string() == **name));
        return context.show(|| found.iter().map(json::handover).collect(), || table(&found));
    }
    let name = args.name.unwrap_or_default();
    if args.abort {
        host.abort_teleport(&name).await?;
        return context
            .show(|| serde_json::json!({ "aborted": name }), || format!("the move of {name} is cancelled\n"));
    }
    let (shown, drawn, begun) = (context.terminal.stderr, Cell::new(None::<Instant>), Instant::now());
    let progress = move |phase: &str, sent: u64, reused: u64| {
        if shown && drawn.get().is_none_or(|at| at.elapsed() >= DRAWN_EVERY) {
            drawn.set(Some(Instant::now()));
            let line = progress_line(&render::plain(phase), sent, reused, begun.elapsed());
            let _ = write!(std::io::stderr(), "\r{line:<WIDTH$}");
        }
    };
    let to = args.to.unwrap_or_default();
    let is_all = args.allow_missing.iter().any(|kind| kind == ALL);
    let kinds = args.allow_missing.iter().map(String::as_str).filter(|kind| *kind != ALL);
    let allow_missing = Allowed::named(is_all, kinds)?;
    let (kind, limit_rate) = (args.kind.request(), args.limit_rate);
    let (isolation, since, key) = (args.isolation, args.since, args.key);
    let options = MoveOptions { allow_missing, kind, limit_rate, isolation, since, key, expected_version: 0 };
    let moved = host.teleport_to(&name, &to, (options, &args.places), progress).await;
    if shown {
        let _ = write!(std::io::stderr(), "\r{:WIDTH$}\r", "");
    }
    let report = moved?;
    for missing in &report.missing {
        context.say(&format!("moved without {}", render::plain(missing)));
    }
    for stays in &report.stays {
        context.say(&render::plain(stays));
    }
    if !report.acknowledged {
        context.say("the other host has not confirmed yet: the commit is repeated until it does");
    }
    context.show(|| json::teleport(&report), || described(&name, &report))
}

fn progress_line(phase: &str, sent: u64, reused: u64, elapsed: Duration) -> String {
    let rate = format_size(rate(sent, elapsed));
    format!("{phase}: sent {}, {rate}/s, {} were there", format_size(sent), format_size(reused))
}

/// Bytes a second.
fn rate(bytes: u64, elapsed: Duration) -> u64 {
    (bytes as f64 / elapsed.as_secs_f64().max(0.001)) as u64
}

fn described(name: &str, report: &TeleportReport) -> String {
    let here = report.bytes.saturating_sub(report.sent_bytes);
    let elapsed = Duration::from_millis(report.elapsed_ms);
    format!(
        "{name} moved to host {} (epoch {}) by {}: {}\n\
         sent {} in {} of {} objects, {} were there; {} on the wire, {}/s; pause {} ms\n",
        &report.host.to_string()[..10],
        report.epoch.0,
        report.kind.name(),
        render::plain(&report.kind_reason),
        format_size(report.sent_bytes),
        report.sent_objects,
        report.objects,
        format_size(here),
        format_size(report.wire_bytes),
        format_size(rate(report.wire_bytes, elapsed)),
        report.pause_ms
    )
}

fn table(found: &[HandoverInfo]) -> String {
    if found.is_empty() {
        return "no moves\n".into();
    }
    let line = |one: &HandoverInfo| {
        let (name, peer, problem) = (render::plain(&one.name), render::plain(&one.peer), render::plain(&one.problem));
        let problem = if problem.is_empty() { String::new() } else { format!("    {problem}\n") };
        format!("{}  {:<11} {name}  {peer}\n{problem}", one.id, one.state)
    };
    found.iter().map(line).collect()
}

async fn resolve(context: &Context, id: &str, live: bool) -> Result<(), Failure> {
    let id: HandoverId =
        id.parse().map_err(|error: crate::core::ids::ParseIdError| Error::invalid(error.to_string()))?;
    let host = context.host().await?;
    let found = host.handovers().await?.into_iter().find(|one| one.id == id);
    context.confirm(match (live, found.as_ref().map(|one| one.state.as_str()).unwrap_or_default()) {
        // It is decided: both go on with what the source wants.
        (true, "arriving") => "try again to bring the group into its places",
        (false, "arriving") => {
            "end the arrival of the group without its repositories, databases and directories: its kernels live here, \
             the others are at the source only; end it"
        }
        (true, _) => "activate it here: if its source host still runs it, there are two live copies; activate it",
        (false, "moving" | "committing" | "aborting" | "undecided") => {
            "give up notifying the other host: what it holds of the move must be resolved there; give up"
        }
        (false, _) => {
            "decide in place of the other host: if it has left its source, this deletes the only copy; delete it"
        }
    })?;
    host.resolve_handover(id, live).await?;
    let done = if live { "activated" } else { "discarded" };
    context.show(|| serde_json::json!({ "handover": id, "resolved": done }), || format!("handover {id} is {done}\n"))
}

/// Connects the standard streams to the local daemon: the far end of `teleport`. Several calls are in flight in each
/// direction; their results come in the order of the calls.
pub async fn pipe(context: &Context) -> Result<(), Failure> {
    let stream = context.host().await?.handover_pipe().await?;
    let sender = stream.clone();
    let sending = async move {
        let (mut from, mut room) = (tokio::io::stdin(), vec![0; limits::HANDOVER_PIECE_BYTES]);
        let mut calls = VecDeque::new();
        loop {
            let count = from.read(&mut room).await.unwrap_or(0);
            calls.push_back(Box::pin(sender.write(&room[..count])));
            while calls.len() == limits::HANDOVER_CALLS || count == 0 {
                let Some(call) = calls.pop_front() else { return };
                if call.await.is_err() {
                    return;
                }
            }
        }
    };
    let receiving = async {
        let mut to = tokio::io::stdout();
        let mut calls: VecDeque<_> = (0..limits::HANDOVER_CALLS).map(|_| Box::pin(stream.read())).collect();
        loop {
            let data = match calls.pop_front() {
                Some(call) => call.await?,
                None => Vec::new(),
            };
            if data.is_empty() {
                return Ok::<(), Failure>(());
            }
            calls.push_back(Box::pin(stream.read()));
            to.write_all(&data).await.map_err(Failure::of_output)?;
            to.flush().await.map_err(Failure::of_output)?;
        }
    };
    // The daemon ends the handover: after the end of the standard input, or before it.
    tokio::select! {
        received = receiving => received,
        () = async { sending.await; std::future::pending().await } => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_has_rate_and_reuse() {
        let line = progress_line("copying", 30 << 20, 1 << 30, Duration::from_secs(3));
        assert_eq!(line, "copying: sent 30 MiB, 10 MiB/s, 1 GiB were there");
        assert!(line.chars().count() <= WIDTH);
        // Nothing is divided by no time.
        assert!(progress_line("sealing", 0, 0, Duration::ZERO).contains("/s"));
    }
}
