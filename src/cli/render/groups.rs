//! Groups and freezes.

use super::table::Table;
use super::{counted, first_line, host_resources, plain, signer};
use crate::cli::paint::Paint;
use crate::core::diff::Deed;
use crate::core::freeze::cost::{FreezeCost, MemberCost};
use crate::core::freeze::difference::GroupDifference;
use crate::core::freeze::on_failure::OnFailure;
use crate::core::freeze::portable::ImportedGroup;
use crate::core::freeze::{FreezeInfo, GroupInfo};
use crate::core::signature::Signer;

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
    if group.on_failure == OnFailure::Pause {
        text.push_str("a failed freeze pauses its kernels\n");
    }
    if !group.paused.is_empty() {
        text.push_str(&format!("{} {}\n", paint.bad("paused:"), plain(&group.paused)));
        text.push_str(&format!("let its kernels go on: ryokan resume {}\n", plain(&group.name)));
    }
    text.push_str(&table.text("no members; add one: ryokan group add", paint));
    text
}

/// A group that was created from a file: who signed the file, and who sealed the freeze.
pub fn imported_group(imported: &ImportedGroup, by: &Signer, sealer: &Signer, paint: Paint) -> String {
    let ImportedGroup { group: made, freeze, left_out, granted, withheld } = imported;
    let mut text = format!("imported group {}", group(made, paint));
    for name in left_out {
        text.push_str(&format!("left out: {}\n", plain(name)));
    }
    if !granted.is_empty() {
        text.push_str(&format!("granted from this host:\n{}", host_resources(granted)));
    }
    if !withheld.is_empty() {
        text.push_str(&format!("withheld, although the file requests it:\n{}", host_resources(withheld)));
    }
    text.push_str(&format!("the file is {}; the freeze is {}\n", signer(by, paint), signer(sealer, paint)));
    text.push_str(&format!("bring every member into place: ryokan restore {} {}\n", plain(&made.name), freeze.number));
    text
}

/// One line for a freeze.
pub fn freeze_line(freeze: &FreezeInfo, paint: Paint) -> String {
    let id: String = freeze.id.chars().take(10).collect();
    let head = if freeze.is_head { " *" } else { "" };
    let message = if freeze.message.is_empty() { String::new() } else { format!("  {}", plain(&freeze.message)) };
    format!("{} {}{head}  {}{message}\n", freeze.number, paint.head(&plain(&id)), freeze.kind.name())
}

/// The pause of a freeze, and how each member was captured.
pub fn freeze_cost(cost: &FreezeCost, paint: Paint) -> String {
    let ms = |us: u64| format!("{}.{} ms", us / 1000, us % 1000 / 100);
    let mut table = Table::new(&["MEMBER", "DRIVER", "PAUSE GROWS WITH", "PAUSE", "STORED IN"]);
    for member in &cost.members {
        let growth = if member.growth == "constant" { "nothing".into() } else { plain(&member.growth) };
        table.row(&[plain(&member.name), plain(&member.driver), growth, ms(member.pause_us), ms(member.store_us)]);
    }
    let (pause, admission, total) = (ms(cost.pause_us), ms(cost.admission_us), ms(cost.total_us));
    let named = |what: &str, exec: u64, member: &MemberCost| match exec {
        0 => String::new(),
        exec => format!("{what}: execution {exec} of {}\n", plain(&member.name)),
    };
    let in_flight = cost.members.iter().map(|member| {
        let (interrupted, parked) = (member.executions.interrupted, member.executions.parked);
        named("interrupted", interrupted, member) + &named("parked", parked, member)
    });
    let in_flight: String = in_flight.collect();
    format!("{in_flight}pause {pause}, executions after {admission}, total {total}\n{}", table.text("", paint))
}

/// Characters of a value in a difference.
const SHOWN: usize = 60;

/// The differences between two states of a group, member by member.
pub fn group_differences(differences: &[GroupDifference], paint: Paint) -> String {
    let (mut text, mut member) = (String::new(), "");
    for one in differences {
        if one.member != member {
            member = &one.member;
            text.push_str(&format!("{}  {}\n", paint.head(&plain(member)), plain(&one.kind)));
        }
        let name = format!("{} {}", plain(&one.what), plain(&one.name));
        text.push_str("  ");
        text.push_str(&match one.deed {
            Deed::Added => paint.good(&format!("+ {name}")),
            Deed::Removed => paint.bad(&format!("- {name}")),
            Deed::Changed | Deed::Renamed => paint.note(&format!("~ {name}")),
            Deed::Unknown => paint.note(&format!("? {name}")),
        });
        let (before, after) = (first_line(&one.before, SHOWN), first_line(&one.after, SHOWN));
        let mut facts = match (before.as_str(), after.as_str()) {
            ("", value) | (value, "") => value.to_owned(),
            (before, after) => format!("{before} → {after}"),
        };
        if !one.details.is_empty() {
            let details: Vec<String> = one.details.iter().map(|detail| plain(detail)).collect();
            facts.push_str(&format!("({})", details.join(", ")));
        }
        if !facts.is_empty() {
            text.push_str(&format!("  {}", paint.dim(&facts)));
        }
        text.push('\n');
    }
    if text.is_empty() { "no differences\n".into() } else { text }
}
