//! Groups and freezes.

use super::table::Table;
use super::{counted, plain};
use crate::cli::paint::Paint;
use crate::core::freeze::{FreezeInfo, GroupInfo};

/// One line for each group.
pub fn groups(groups: &[GroupInfo], paint: Paint) -> String {
    let mut table = Table::new(&["NAME", "MEMBERS", "FREEZES"]);
    for group in groups {
        table.row(&[group.name.clone(), group.members.len().to_string(), group.freezes.to_string()]);
    }
    table.text("no groups; create one: ryokan group new NAME", paint)
}

/// A group with its members.
pub fn group(group: &GroupInfo, paint: Paint) -> String {
    let mut table = Table::new(&["MEMBER", "KIND", "TARGET"]);
    for member in &group.members {
        table.row(&[member.name.clone(), member.kind.clone(), plain(&member.target)]);
    }
    let mut text = format!("{}  {}\n", paint.head(&plain(&group.name)), counted(group.freezes, "freeze"));
    if group.unfinished {
        text.push_str(&format!("{}\n", paint.bad("a restore was interrupted: the next operation goes back first")));
    }
    text.push_str(&table.text("no members; add one: ryokan group add", paint));
    text
}

/// One line for a freeze.
pub fn freeze_line(freeze: &FreezeInfo, paint: Paint) -> String {
    let id: String = freeze.id.chars().take(10).collect();
    let head = if freeze.is_head { " *" } else { "" };
    let message = if freeze.message.is_empty() { String::new() } else { format!("  {}", plain(&freeze.message)) };
    format!("{} {}{head}  {}{message}\n", freeze.number, paint.head(&plain(&id)), freeze.kind.name())
}
