//! Reports of maintenance, and lines of the audit log.

use super::time::stamp;
use super::{counted, first_line, plain};
use crate::cli::paint::Paint;
use crate::core::audit::{AuditBreak, AuditHead, AuditLine};
use crate::core::quantity::format_size;
use crate::core::upkeep::{AUDIT_GAP, Affected, Damage, GcItem, GcReport, GcThing, VerifyReport};

/// Maximum characters of a detail in a line.
const DETAIL: usize = 120;

/// One item of a garbage collection.
pub fn gc_item(item: &GcItem, paint: Paint) -> String {
    let fate = if item.stays { paint.dim("keep  ") } else { paint.warn("remove") };
    let thing = match &item.thing {
        GcThing::Checkpoint { kernel, checkpoint } => {
            let name = if checkpoint.name.is_empty() { String::new() } else { format!(" {:?}", checkpoint.name) };
            let (number, kind) = (checkpoint.number, checkpoint.kind.name());
            format!("checkpoint {number} of kernel {kernel} {}{name} ({kind})", checkpoint.short_id())
        }
        GcThing::Object { digest, bytes } => {
            let short: String = digest.to_string().chars().take(12).collect();
            format!("object {short} ({})", format_size(*bytes))
        }
    };
    format!("{fate}  {}: {}\n", plain(&thing), plain(&item.why))
}

/// The summary of a garbage collection.
pub fn gc_report(report: &GcReport) -> String {
    let removed = if report.dry_run { "to remove" } else { "removed" };
    let freed = report.pack_bytes_removed.saturating_sub(report.bytes_copied);
    format!(
        "{} {removed}, {} kept\n{} ({}) {removed}, {} ({}) kept, {} of them only as recent or in use\n\
         {} {removed}: {} of disk space\n",
        counted(report.checkpoints_removed, "checkpoint"),
        report.checkpoints_kept,
        counted(report.objects_removed, "object"),
        format_size(report.bytes_removed),
        report.objects_kept,
        format_size(report.bytes_kept),
        report.objects_recent,
        counted(report.packs_removed, "pack"),
        format_size(freed),
    )
}

/// Damage, and the data that is lost with it.
pub fn damage(damage: &Damage, paint: Paint) -> String {
    if damage.what == AUDIT_GAP {
        let note = paint.note("note:");
        return format!("{note} the audit log has a gap, which is no damage: {}\n", plain(&damage.why));
    }
    let mut text =
        format!("{} {} {}: {}\n", paint.bad("damaged"), damage.what, plain(&damage.name), plain(&damage.why));
    if damage.affects.is_empty() && damage.what == "object" {
        text.push_str("  not referenced\n");
    }
    for Affected { kernel, what, name } in &damage.affects {
        let of = if kernel.is_empty() { String::new() } else { format!(" of kernel {kernel}") };
        let name = if name.is_empty() { String::new() } else { format!(" {name}") };
        text.push_str(&plain(&format!("  affects {what}{name}{of}\n")));
    }
    text
}

/// The summary of a verification.
pub fn verify_report(report: &VerifyReport, paint: Paint) -> String {
    let found = match report.damaged {
        0 => paint.good("no damage"),
        1 => paint.bad("1 item is damaged"),
        many => paint.bad(&format!("{many} items are damaged")),
    };
    format!(
        "{found}: {}, {}, {} ({})\n",
        counted(report.kernels, "kernel"),
        counted(report.checkpoints, "intact checkpoint"),
        counted(report.objects, "intact object"),
        format_size(report.bytes),
    )
}

/// A line of the audit log.
pub fn audit_line(line: &AuditLine, paint: Paint) -> String {
    let what = &line.what;
    let outcome = match what.outcome.as_str() {
        "done" => paint.good("done"),
        other => paint.bad(&plain(other)),
    };
    let versions = match (what.version_before, what.version_after) {
        (Some(before), Some(after)) if before == after => format!(" version {after}"),
        (Some(before), Some(after)) => format!(" version {before} to {after}"),
        (Some(only), None) | (None, Some(only)) => format!(" version {only}"),
        (None, None) => String::new(),
    };
    let kernel: String = what.kernel.chars().take(10).collect();
    let kernel = if kernel.is_empty() { String::new() } else { format!(" kernel {kernel}") };
    let who = format!("{} (uid {})", plain(&what.client), what.uid);
    let detail = first_line(&what.detail, DETAIL);
    let manifest =
        what.manifest.map(|manifest| format!(" manifest {}", &manifest.to_string()[..12])).unwrap_or_default();
    let gap = if detail.is_empty() { "" } else { ": " };
    format!(
        "{} {} {} {outcome}{}{versions}{manifest} by {who}{gap}{detail}\n",
        paint.head(&line.sequence.to_string()),
        stamp(what.at_ms),
        plain(&what.action),
        plain(&kernel),
    )
}

/// The result of the audit log's verification.
pub fn audit_proof(proved: &Result<AuditHead, AuditBreak>, paint: Paint) -> String {
    match proved {
        Ok(head) => {
            format!(
                "{}: {}, its end is {head}\n",
                paint.good("the audit log is intact"),
                counted(head.sequence, "line")
            )
        }
        Err(gap) if gap.is_gap => format!("{}\n", paint.warn(&plain(&gap.to_string()))),
        Err(broken) => format!("{}\n", paint.bad(&plain(&broken.to_string()))),
    }
}
