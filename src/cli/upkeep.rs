//! gc, verify, audit, retention.

use std::io::Write as _;

use clap::Args;

use super::context::Context;
use super::exit;
use super::failure::Failure;
use super::names::{KernelArg, KernelOrGroupArg};
use super::{json, render, spec};
use crate::core::audit::AuditHead;
use crate::core::error::Error;
use crate::core::quantity::format_size;
use crate::core::retention::Retention;
use crate::core::upkeep::{GcThing, VerifyEvent};

/// `ryokan gc`
#[derive(Debug, Args)]
pub struct GcArgs {
    /// Only show what would be kept or removed, and why
    #[arg(long)]
    pub dry_run: bool,
    /// List the objects that stay, too
    #[arg(long, requires = "dry_run")]
    pub all: bool,
}

/// `ryokan verify`
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Show who signed freezes and the checkpoints in them; exit 1 if one is damaged
    #[arg(long)]
    pub provenance: bool,
    /// A group or a kernel; without it, all groups
    #[arg(requires = "provenance", default_value = "")]
    pub name: KernelOrGroupArg,
    /// One of its freezes or checkpoints
    #[arg(value_name = "REF", requires = "provenance", default_value = "")]
    pub reference: String,
}

/// `ryokan audit`
#[derive(Debug, Args)]
pub struct AuditArgs {
    /// Only this kernel, by name or id; a removed kernel by an id's beginning
    #[arg(conflicts_with = "verify")]
    pub name: Option<KernelArg>,
    /// Verify that no line was changed, moved or removed
    #[arg(long)]
    pub verify: bool,
    /// A previously noted end of the log, which must still be part of it
    #[arg(long, value_name = "LINE:HASH", requires = "verify")]
    pub known: Option<AuditHead>,
    /// Only lines after this number
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "verify")]
    pub since: u64,
    /// At most this many lines; 0 for all
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "verify")]
    pub limit: u32,
}

/// `ryokan retention`
#[derive(Debug, Args)]
pub struct RetentionArgs {
    /// Name or id of the kernel
    pub name: KernelArg,
    /// Number of newest checkpoints to keep, or all
    #[arg(long, value_name = "N|all", value_parser = spec::parse_newest)]
    pub newest: Option<u32>,
    /// Age at which a checkpoint expires, such as 30d, or never
    #[arg(long = "for", value_name = "TIME|never", value_parser = spec::parse_idle)]
    pub keep_for: Option<u64>,
}

/// Collects garbage.
pub async fn gc(context: &Context, args: GcArgs) -> Result<(), Failure> {
    let host = context.host().await?;
    let (paint, mut failed) = (context.terminal.paint, None);
    let done = host.gc(args.dry_run, async |item| {
        // There may be millions.
        if item.stays && matches!(item.thing, GcThing::Object { .. }) && !args.all && !context.options.json {
            return Ok(());
        }
        let line = match context.options.json {
            true => format!("{}\n", json::gc_item(&item)),
            false => render::gc_item(&item, paint),
        };
        context.print(&line).map_err(|failure| {
            failed = Some(failure);
            Error::unavailable("the output is closed")
        })
    });
    let done = done.await;
    if let Some(failure) = failed {
        return Err(failure);
    }
    let report = done?;
    match context.options.json {
        true => context.print(&format!("{}\n", json::gc_report(&report))),
        false => context.print(&render::gc_report(&report)),
    }
}

/// Verifies all stored data.
pub async fn verify(context: &Context) -> Result<(), Failure> {
    let host = context.host().await?;
    let (paint, mut failed) = (context.terminal.paint, None);
    let on_terminal = context.terminal.stderr && !context.options.json;
    let clear = || {
        if on_terminal {
            let _ = std::io::stderr().write_all(b"\r\x1b[K");
        }
    };
    let done = host.verify(async |reported| {
        let line = match reported {
            VerifyEvent::Progress(at) => {
                if on_terminal {
                    let text = format!("\r\x1b[K{} of {} packs, {}", at.packs, at.of_packs, format_size(at.bytes));
                    let _ = std::io::stderr().write_all(text.as_bytes());
                }
                return Ok(());
            }
            VerifyEvent::Damage(damage) if context.options.json => format!("{}\n", json::damage(&damage)),
            VerifyEvent::Damage(damage) => render::damage(&damage, paint),
        };
        clear();
        context.print(&line).map_err(|failure| {
            failed = Some(failure);
            Error::unavailable("the output is closed")
        })
    });
    let done = done.await;
    clear();
    if let Some(failure) = failed {
        return Err(failure);
    }
    let report = done?;
    match context.options.json {
        true => context.print(&format!("{}\n", json::verify_report(&report)))?,
        false => context.print(&render::verify_report(&report, paint))?,
    }
    match report.damaged {
        0 => Ok(()),
        _ => Err(Failure::Quiet(exit::FAILED)),
    }
}

/// Shows the audit log, or verifies it.
pub async fn audit(context: &Context, args: AuditArgs) -> Result<(), Failure> {
    let host = context.host().await?;
    if args.verify {
        let proved = host.verify_audit(args.known).await?;
        context.show(|| json::audit_proof(&proved), || render::audit_proof(&proved, context.terminal.paint))?;
        return match proved {
            Ok(_) => Ok(()),
            Err(_) => Err(Failure::Quiet(exit::FAILED)),
        };
    }
    let (paint, mut failed) = (context.terminal.paint, None);
    let reported = host.audit(args.name.as_deref().unwrap_or_default(), args.since, args.limit, async |line| {
        let line = match context.options.json {
            true => format!("{}\n", json::audit_line(&line)),
            false => render::audit_line(&line, paint),
        };
        context.print(&line).map_err(|failure| {
            failed = Some(failure);
            Error::unavailable("the output is closed")
        })
    });
    let reported = reported.await;
    match failed {
        Some(failure) => Err(failure),
        None => Ok(reported?),
    }
}

/// Shows or changes a kernel's retention.
pub async fn retention(context: &Context, args: RetentionArgs) -> Result<(), Failure> {
    let (kernel, info) = context.kernel(&args.name).await?;
    let before = info.spec.retention;
    let retention = Retention {
        newest: args.newest.map_or(before.newest, |newest| (newest > 0).then_some(newest)),
        keep_for_ms: args.keep_for.map_or(before.keep_for_ms, |ms| (ms > 0).then_some(ms)),
    };
    let mut gone = 0;
    if retention != before {
        gone = kernel.set_retention(&retention, 0).await?;
    }
    let said = || match gone {
        0 => format!("{retention}\n"),
        _ => format!("{retention}; {} removed\n", render::counted(gone, "checkpoint")),
    };
    context.show(|| json::retention(&retention), said)
}
