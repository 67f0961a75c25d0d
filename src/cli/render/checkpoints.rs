//! Checkpoints as lines, and as a graph.

use std::collections::BTreeMap;

use super::time::{ago, now_ms};
use super::{first_line, plain, plain_line};
use crate::cli::paint::Paint;
use crate::cli::preview::Preview;
use crate::core::checkpoint::{Checkpoint, CheckpointType, Restoration, RestoredFrom};
use crate::core::diff::{Area, Deed, Difference};
use crate::core::ids::CheckpointId;
use crate::core::info::Job;
use crate::core::missed::MissedEntry;
use crate::core::origin::ForkPoint;
use crate::core::quantity::format_size;

/// Maximum characters of a name in a line.
const NAME: usize = 60;
/// Maximum characters of a reason in a line.
const REASON: usize = 200;
/// Unrestored entries that are listed individually.
const NAMED: usize = 8;

/// One checkpoint.
pub fn checkpoint_line(checkpoint: &Checkpoint, is_head: bool, paint: Paint) -> String {
    format!("{}\n", line(checkpoint, is_head, paint))
}

fn line(checkpoint: &Checkpoint, is_head: bool, paint: Paint) -> String {
    let mut words = vec![paint.head(&checkpoint.short_id())];
    if is_head {
        words.push(paint.good("(here)"));
    }
    if !checkpoint.name.is_empty() {
        words.push(first_line(&checkpoint.name, NAME));
    }
    let mut facts = vec![ago(checkpoint.at_ms, now_ms())];
    if checkpoint.kind != CheckpointType::Manual {
        facts.push(checkpoint.kind.name().into());
    }
    if checkpoint.step > 0 {
        facts.push(format!("step {}", checkpoint.step));
    }
    if !checkpoint.agent.is_empty() {
        facts.push(first_line(&checkpoint.agent, NAME));
    }
    match checkpoint.compacted {
        0 => {}
        1 => facts.push("compacts 1 message".into()),
        messages => facts.push(format!("compacts {messages} messages")),
    }
    if checkpoint.pinned {
        facts.push("pinned".into());
    }
    facts.push(match checkpoint.files {
        1 => "1 file".into(),
        files => format!("{files} files"),
    });
    facts.push(format!("state {}", format_size(checkpoint.state_bytes)));
    if checkpoint.machine_bytes > 0 {
        facts.push(format!("{} {}", checkpoint.snapshot_kind().name(), format_size(checkpoint.machine_bytes)));
    }
    words.push(paint.dim(&format!("({})", facts.join(", "))));
    words.join(" ")
}

/// Fork points among a kernel's checkpoints.
#[derive(Debug, Default)]
pub struct Branches {
    /// The origin of the kernel itself, if it is a fork.
    pub from: Option<ForkPoint>,
    /// Names of the kernel's forks, by checkpoint.
    pub to: BTreeMap<CheckpointId, Vec<String>>,
}

/// What names each checkpoint: its short id, and its name if a shell takes it as one word.
pub fn checkpoint_names(all: &[(Checkpoint, bool)]) -> String {
    all.iter().map(|(checkpoint, _)| reference_names(&checkpoint.short_id(), &checkpoint.name)).collect()
}

/// A short id, and the name if a shell takes it as one word, a line each.
pub fn reference_names(short_id: &str, name: &str) -> String {
    let is_word = !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || "-_./".contains(c));
    if is_word { format!("{short_id}\n{name}\n") } else { format!("{short_id}\n") }
}

/// Checkpoints, newest first; with `branches`, as a graph of their ancestry.
pub fn checkpoint_log(all: &[(Checkpoint, bool)], branches: Option<&Branches>, paint: Paint) -> String {
    let Some(branches) = branches else {
        return all.iter().map(|(checkpoint, is_head)| checkpoint_line(checkpoint, *is_head, paint)).collect();
    };
    let mut lanes: Vec<CheckpointId> = Vec::new();
    let mut drawn = String::new();
    for (checkpoint, is_head) in all {
        let own: Vec<usize> = (0..lanes.len()).filter(|at| lanes[*at] == checkpoint.id).collect();
        let at = match own.first() {
            Some(first) => *first,
            None => {
                lanes.push(checkpoint.id);
                lanes.len() - 1
            }
        };
        // Branches that start at this checkpoint end in its row, rightmost first.
        for joins in own.iter().skip(1).rev() {
            drawn.push_str(&format!("{}\n", paint.dim(join_row(lanes.len(), *joins).trim_end())));
            lanes.remove(*joins);
        }
        let marks: Vec<&str> = (0..lanes.len()).map(|lane| if lane == at { "*" } else { "|" }).collect();
        let forks = branches.to.get(&checkpoint.id).map(|names| names.join(", ")).unwrap_or_default();
        let forks =
            if forks.is_empty() { forks } else { format!(" {}", paint.note(&format!("⑂ {}", plain(&forks)))) };
        let marks = paint.dim(&marks.join(" "));
        drawn.push_str(&format!("{marks}  {}{forks}\n", line(checkpoint, *is_head, paint)));
        match checkpoint.parent {
            Some(parent) => lanes[at] = parent,
            None => drop(lanes.remove(at)),
        }
    }
    if let Some(from) = branches.from.as_ref().filter(|from| lanes.contains(&from.checkpoint)) {
        let short: String = from.checkpoint.to_string().chars().take(10).collect();
        let marks: Vec<&str> = lanes.iter().map(|lane| if *lane == from.checkpoint { "o" } else { "|" }).collect();
        let marks = paint.dim(&marks.join(" "));
        drawn.push_str(&format!("{marks}  {}\n", paint.note(&format!("{short} of {}", plain(&from.name)))));
    }
    drawn
}

/// A row in which lane `joins` merges into the lane before it.
fn join_row(lanes: usize, joins: usize) -> String {
    let cell = |lane: usize| if lane == joins { "/" } else { "|" };
    let mut row = String::new();
    for lane in 0..lanes {
        if lane > 0 {
            // The stroke is between the two lanes.
            row.push_str(if lane == joins { "" } else { " " });
        }
        row.push_str(cell(lane));
    }
    row
}

/// The result of a restore.
pub fn restoration(name: &str, done: &Restoration, paint: Paint) -> String {
    let mut text = format!("{} is at {}", plain(name), line(&done.checkpoint, false, paint));
    // A thread's files belong to another kernel, as a missed entry says.
    let files_stay = done.missed.iter().any(|missed| missed.key == "workspace");
    text.push_str(&match done.files_changed {
        _ if files_stay => String::new(),
        0 => "\nno file changed".to_owned(),
        1 => "\n1 file or directory changed".to_owned(),
        changed => format!("\n{changed} files and directories changed (a created or removed directory counts as one)"),
    });
    text.push_str(&match &done.engine {
        RestoredFrom::Memory => "\nthe interpreter was restored from memory".to_owned(),
        RestoredFrom::Saved { why_not_memory } if why_not_memory.is_empty() => String::new(),
        RestoredFrom::Saved { why_not_memory } => {
            format!("\nthe interpreter was rebuilt from saved state: {}", first_line(why_not_memory, REASON))
        }
    });
    for (changed, what) in [(done.decisions_changed, "decision"), (done.artifacts_changed, "artifact")] {
        match changed {
            0 => {}
            1 => text.push_str(&format!("\n1 {what} changed")),
            changed => text.push_str(&format!("\n{changed} {what}s changed")),
        }
    }
    if !done.missed.is_empty() {
        text.push_str(&format!("\n{}", paint.note("not restored:")));
        for missed in done.missed.iter().take(NAMED) {
            text.push_str(&format!("\n  {}  {}", plain(&missed.key), paint.dim(&first_line(&missed.reason, REASON))));
        }
        if done.missed.len() > NAMED {
            text.push_str(&format!("\n  and {} more", done.missed.len() - NAMED));
        }
    }
    if !done.ended.is_empty() {
        text.push_str(&format!("\n{}", paint.note("ended:")));
        for job in done.ended.iter().take(NAMED) {
            text.push_str(&format!("\n  {}  {}", plain(&job.id), paint.dim(&first_line(&job.command, REASON))));
        }
        if done.ended.len() > NAMED {
            text.push_str(&format!("\n  and {} more", done.ended.len() - NAMED));
        }
    }
    text.push_str(&format!("\n{}\n", paint.dim(&format!("to undo: ryokan undo {}", plain(name)))));
    text
}

/// What a restore would do.
pub fn preview(preview: &Preview<'_>, paint: Paint) -> String {
    let (name, to) = (plain(preview.name), preview.checkpoint.short_id());
    let mut text = match preview.changes.is_empty() {
        true => format!("a restore of {name} to {to} would change nothing\n"),
        false => format!("a restore of {name} to {to} would change:\n"),
    };
    text.extend(preview.changes.iter().map(|change| difference(change, paint)));
    if !preview.ends.is_empty() {
        text.push_str(&format!("{}\n", paint.note("would end:")));
        let line = |job: &Job| format!("  {}  {}\n", plain(&job.id), paint.dim(&first_line(&job.command, REASON)));
        text.extend(preview.ends.iter().map(line));
    }
    if !preview.lost.is_empty() {
        text.push_str(&format!("{}\n", paint.note("would be lost, also for undo:")));
        let line =
            |lost: &MissedEntry| format!("  {}  {}\n", plain(&lost.key), paint.dim(&first_line(&lost.reason, REASON)));
        text.extend(preview.lost.iter().map(line));
    }
    text
}

/// How much a restore changes, in a few words.
pub fn change_counts(changes: &[Difference]) -> String {
    let count = |counted: fn(&Area) -> bool| changes.iter().filter(|change| counted(&change.area)).count();
    let parts = [
        (count(|area| *area == Area::File), "file or directory", "files and directories"),
        (count(|area| *area == Area::State), "variable or setting", "variables and settings"),
        (count(|area| !matches!(area, Area::File | Area::State)), "other part", "other parts"),
    ];
    let parts: Vec<String> = parts
        .into_iter()
        .filter(|(count, ..)| *count > 0)
        .map(|(count, one, several)| format!("{count} {}", if count == 1 { one } else { several }))
        .collect();
    match (changes.len(), parts.join(", ")) {
        (0, _) => "nothing changes".into(),
        (1, parts) => format!("{parts} changes"),
        (_, parts) => format!("{parts} change"),
    }
}

/// One difference.
pub fn difference(difference: &Difference, paint: Paint) -> String {
    let name = match (difference.area, difference.deed) {
        (_, Deed::Renamed) => format!("{} → {}", plain_line(&difference.before), plain_line(&difference.name)),
        _ => plain_line(&difference.name),
    };
    let mut line = match difference.deed {
        Deed::Added => paint.good(&format!("+ {name}")),
        Deed::Removed => paint.bad(&format!("- {name}")),
        Deed::Changed | Deed::Renamed => paint.note(&format!("~ {name}")),
        Deed::Unknown => paint.note(&format!("? {name}")),
    };
    let facts = match difference.deed {
        Deed::Renamed => String::new(),
        Deed::Unknown => difference.what.join(", "),
        Deed::Changed if !difference.what.is_empty() => difference.what.join(", "),
        Deed::Changed if difference.before == difference.after => String::new(),
        Deed::Changed => format!("{} → {}", first_line(&difference.before, NAME), first_line(&difference.after, NAME)),
        Deed::Added => first_line(&difference.after, NAME),
        Deed::Removed => first_line(&difference.before, NAME),
    };
    if !facts.is_empty() {
        line.push_str(&format!("  {}", paint.dim(&facts)));
    }
    // Files and state are recognisable by name; other areas are named.
    match difference.area {
        Area::File | Area::State => format!("{line}\n"),
        Area::Mount
        | Area::Mcp
        | Area::Journal
        | Area::Step
        | Area::Agent
        | Area::Decision
        | Area::Artifact
        | Area::Tool
        | Area::Limit
        | Area::Size => {
            format!("{line} {}\n", paint.dim(&format!("({})", difference.area.name())))
        }
    }
}

/// Counts of differences by area.
pub fn difference_counts(counts: &BTreeMap<(Area, Deed), u64>) -> String {
    let of = |area: Area| {
        let deeds = Deed::ALL.iter().filter_map(|deed| Some((deed, counts.get(&(area, *deed))?)));
        let words: Vec<String> = deeds.map(|(deed, count)| format!("{count} {}", deed.name())).collect();
        (!words.is_empty()).then(|| format!("{}: {}\n", area.name(), words.join(", ")))
    };
    let lines: String = Area::ALL.into_iter().filter_map(of).collect();
    if lines.is_empty() { "no differences\n".into() } else { lines }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::ids::Digest;
    use crate::core::missed::MissedEntry;

    fn one(id: u8, parent: Option<u8>) -> (Checkpoint, bool) {
        let id_of = |id: u8| CheckpointId::from_bytes([id; 16]);
        let checkpoint = Checkpoint {
            id: id_of(id),
            number: u64::from(id),
            name: format!("c{id}"),
            description: String::new(),
            kind: CheckpointType::Manual,
            creator: String::new(),
            at_ms: 0,
            parent: parent.map(id_of),
            pinned: false,
            restore_point: true,
            restored_at_ms: None,
            version: 1,
            manifest: Digest::from_bytes([0; 32]),
            files: 1,
            state_bytes: 0,
            machine_bytes: 0,
            step: 0,
            step_name: String::new(),
            agent: String::new(),
            summary: String::new(),
            compacted: 0,
        };
        (checkpoint, false)
    }

    fn marks(all: &[(Checkpoint, bool)]) -> Vec<String> {
        let drawn = checkpoint_log(all, Some(&Branches::default()), Paint::OFF);
        let mark = |line: &str| {
            let name = line.split_whitespace().find(|word| word.starts_with('c') && word.len() == 2);
            let lanes = line.split("  ").next().unwrap_or_default();
            format!("{lanes} {}", name.unwrap_or_default()).trim_end().to_owned()
        };
        drawn.lines().map(mark).collect()
    }

    #[test]
    fn restore_lists_missed_entries() {
        let missed = |n: usize| MissedEntry {
            key: format!("var/v{n}"),
            type_name: "socket".into(),
            reason: format!("reason {n}\nand more"),
        };
        let done = Restoration {
            checkpoint: one(1, None).0,
            safety: CheckpointId::from_bytes([2; 16]),
            version: 1,
            missed: (0..NAMED + 2).map(missed).collect(),
            files_changed: 3,
            engine: RestoredFrom::Memory,
            decisions_changed: 0,
            artifacts_changed: 0,
            ended: vec![Job { id: "process 7".into(), command: "sleep 9".into() }],
        };
        let text = restoration("k", &done, Paint::OFF);
        assert!(text.contains("\nended:\n  process 7  sleep 9\n"), "{text}");
        assert!(text.contains("3 files and directories changed (a created"), "{text}");
        assert!(text.contains("not restored:\n  var/v0  reason 0") && text.contains("var/v7"), "{text}");
        assert!(text.contains("\n  and 2 more\n") && !text.contains("var/v8"), "{text}");
        // A thread does not own its files: only the missed entry mentions them.
        let workspace = MissedEntry { key: "workspace".into(), ..missed(0) };
        let thread = Restoration { files_changed: 0, missed: vec![workspace], ..done };
        let text = restoration("t", &thread, Paint::OFF);
        assert!(
            !text.contains("directories changed")
                && !text.contains("no file")
                && text.contains("  workspace  reason 0"),
            "{text}"
        );
    }

    #[test]
    fn difference_has_one_line() {
        let odd = Difference::added(Area::File, "a\nb\t\u{1b}", String::new());
        assert_eq!(difference(&odd, Paint::OFF), "+ a\\nb\\t\\u{1b}\n");
    }

    #[test]
    fn linear_log_has_one_column() {
        let all = [one(3, Some(2)), one(2, Some(1)), one(1, None)];
        assert_eq!(marks(&all), ["* c3", "* c2", "* c1"]);
    }

    #[test]
    fn branches_join_at_parent() {
        // The parent of 2, 3 and 4 is 1; the parent of 5 is 3.
        let all = [one(5, Some(3)), one(4, Some(1)), one(3, Some(1)), one(2, Some(1)), one(1, None)];
        assert_eq!(marks(&all), ["* c5", "| * c4", "* | c3", "| | * c2", "| |/", "|/", "* c1"]);
    }

    #[test]
    fn missing_parent_is_tolerated() {
        let all = [one(5, Some(4)), one(3, Some(2))];
        assert_eq!(marks(&all), ["* c5", "| * c3"]);
    }

    #[test]
    fn log_marks_fork_points() {
        use crate::core::ids::KernelId;
        let all = [one(3, Some(2)), one(2, Some(1)), one(1, Some(9))];
        let id = |n: u8| CheckpointId::from_bytes([n; 16]);
        let from = ForkPoint { kernel: KernelId::from_bytes([1; 16]), name: "parent".into(), checkpoint: id(9) };
        let to = BTreeMap::from([(id(2), vec!["a".to_owned(), "b".to_owned()])]);
        let drawn = checkpoint_log(&all, Some(&Branches { from: Some(from), to }), Paint::OFF);
        let lines: Vec<&str> = drawn.lines().collect();
        assert!(lines[1].ends_with("⑂ a, b") && !lines[0].contains('⑂'), "{drawn}");
        assert_eq!(lines[3], "o  0909090909 of parent", "{drawn}");
    }
}
