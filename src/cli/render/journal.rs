//! Lines of journals and events.

use super::{first_line, plain, span_us, stamp};
use crate::cli::paint::Paint;
use crate::core::info::{Event, JournalEntry};
use crate::core::quantity::format_size;

/// Maximum characters of an entry's text in a line.
const TEXT: usize = 72;

/// An entry of a journal; `full`: with its whole text.
pub fn journal_entry(entry: &JournalEntry, full: bool, paint: Paint) -> String {
    let mut line = format!("{:>5}  {}  ", entry.sequence, paint.dim(&stamp(entry.at_ms)));
    match entry.exec {
        0 => line.push_str(&format!("{} ", paint.head(&plain(&entry.kind)))),
        exec => line.push_str(&format!("{} ", execution(entry, exec, paint))),
    }
    if full {
        line.push_str(&format!("{}\n", paint.dim(&plain(&entry.actor))));
        for text in plain(&entry.text).lines() {
            line.push_str(&format!("       {text}\n"));
        }
        if !entry.err.is_empty() {
            line.push_str(&format!("       {} {}\n", paint.bad("error:"), plain(&entry.err)));
        }
        return line;
    }
    line.push_str(&first_line(&entry.text, TEXT));
    if entry.status == "queued" {
        line.push_str(&format!("  {}", paint.note(&plain(&entry.err))));
    } else if !entry.err.is_empty() {
        line.push_str(&format!("  {}", paint.bad(&first_line(&entry.err, TEXT))));
    }
    line.push('\n');
    line
}

fn execution(entry: &JournalEntry, exec: u64, paint: Paint) -> String {
    let status = plain(&entry.status);
    let status = match entry.status.as_str() {
        "done" => paint.good(&status),
        "running" | "queued" => return format!("{} {}", paint.head(&format!("#{exec}")), paint.note(&status)),
        _ => paint.bad(&format!("{status} {}", entry.code)),
    };
    let mut facts = vec![span_us(entry.duration_us)];
    if entry.output_bytes > 0 {
        facts.push(format_size(entry.output_bytes));
    }
    if entry.truncated_bytes > 0 {
        facts.push(format!("{} cut", format_size(entry.truncated_bytes)));
    }
    format!("{} {status} {}", paint.head(&format!("#{exec}")), paint.dim(&format!("({})", facts.join(", "))))
}

/// An event.
pub fn event(event: &Event, paint: Paint) -> String {
    let kernel = if event.kernel.is_empty() { "host" } else { &event.kernel };
    let detail = if event.detail_json == "{}" { "" } else { &event.detail_json };
    let line = format!(
        "{:>5}  {}  {}  {}  {}",
        event.sequence,
        paint.dim(&stamp(event.at_ms)),
        paint.head(&plain(&event.kind)),
        plain(kernel),
        plain(detail)
    );
    format!("{}\n", line.trim_end())
}
