//! Text for people, made by pure functions: equal data gives equal text. The caller prints it.
//!
//! Data of kernels, tools and journals is untrusted: control characters are escaped, never sent to
//! the terminal.

mod checkpoints;
mod groups;
mod images;
mod journal;
mod kernels;
mod lists;
mod patch;
mod pool;
mod signature;
mod table;
mod time;
mod upkeep;
mod usage;
mod value;
mod workflow;

pub use checkpoints::{
    Branches, change_counts, checkpoint_line, checkpoint_log, checkpoint_names, difference, difference_counts, preview,
    reference_names, restoration,
};
pub use groups::{freeze_cost, freeze_line, group, group_differences, groups, imported_group};
pub use images::images;
pub use journal::{event, journal_entry};
pub use kernels::{disk_total, forks, host_resources, imported, kernel, kernel_mounts, kernels, missed, state_painter};
pub use lists::{abilities, mcp_servers, mounts, process, processes, tools, vars};
pub use patch::{patch, shown as shown_bytes};
pub use pool::pools;
pub use signature::{known_keys, signed_unit, signer};
pub use table::Table;
pub use time::{ago, now_ms, span_us, stamp};
pub use upkeep::{audit_line, audit_proof, damage, gc_item, gc_report, verify_report};
pub use usage::{disk_usage, kernel_disk};
pub use value::value_of;
pub use workflow::{artifacts, decision, decision_line, decisions, step, workflow};

/// Text with every control character shown as an escape, except line ends and tabs.
pub fn plain(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut out, c| {
        match c {
            '\n' | '\t' => out.push(c),
            c if c.is_control() || is_directional(c) => out.extend(c.escape_default()),
            c => out.push(c),
        }
        out
    })
}

/// As [`plain`], on one line.
pub fn plain_line(text: &str) -> String {
    plain(text).replace('\n', "\\n").replace('\t', "\\t")
}

/// Whether a character changes the text direction, which would reorder the following text on a
/// terminal.
fn is_directional(c: char) -> bool {
    matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A number with what it counts: `1 kernel`, `2 kernels`.
pub fn counted(number: u64, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// The first line, at most `most` characters, with `…` for the rest.
pub fn first_line(text: &str, most: usize) -> String {
    let line = text.trim_start().lines().next().unwrap_or_default();
    let more = text.trim().lines().nth(1).is_some();
    let line = plain(line).replace('\t', " ");
    match line.chars().count() > most {
        true => line.chars().take(most.saturating_sub(1)).chain(['…']).collect(),
        false if more => format!("{line} …"),
        false => line,
    }
}
