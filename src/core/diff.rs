//! Differences between two states of a kernel, in terms of its user: variables, functions, files,
//! mounts, servers.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::checkpoint::{McpPart, StatePart, StateParts, ToolPart};
use super::info::GivenMount;
use super::limits;
use super::quantity::{format_cpus, format_duration, format_size};
use super::spec::KernelSpec;
use super::workflow::{ArtifactPart, DecisionPart, Step, WorkflowPart};

/// The part of a kernel that differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Area {
    /// The engine's state: variables, functions, aliases, options.
    State,
    /// The workspace.
    File,
    /// Mounts from the host.
    Mount,
    /// MCP servers.
    Mcp,
    /// Journal entries in between.
    Journal,
    /// Workflow steps.
    Step,
    /// The current agent.
    Agent,
    /// Decisions.
    Decision,
    /// Named, versioned results.
    Artifact,
    /// Tools of MCP servers.
    Tool,
    /// Limits of the kernel.
    Limit,
    /// Sizes.
    Size,
}

impl Area {
    /// Every area, in display order.
    pub const ALL: [Area; 12] = [
        Area::State,
        Area::File,
        Area::Mount,
        Area::Mcp,
        Area::Tool,
        Area::Limit,
        Area::Step,
        Area::Agent,
        Area::Decision,
        Area::Artifact,
        Area::Size,
        Area::Journal,
    ];

    /// The area in one word.
    pub const fn name(self) -> &'static str {
        match self {
            Area::State => "state",
            Area::File => "file",
            Area::Mount => "mount",
            Area::Mcp => "mcp",
            Area::Journal => "journal",
            Area::Step => "step",
            Area::Agent => "agent",
            Area::Decision => "decision",
            Area::Artifact => "artifact",
            Area::Tool => "tool",
            Area::Limit => "limit",
            Area::Size => "size",
        }
    }
}

/// The kind of a difference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Deed {
    /// Only in the second state.
    Added,
    /// Only in the first state.
    Removed,
    /// In both states, with different content.
    Changed,
    /// The same content under another name.
    Renamed,
    /// In both states, and not compared.
    Unknown,
}

impl Deed {
    /// Every kind.
    pub const ALL: [Deed; 5] = [Deed::Added, Deed::Removed, Deed::Changed, Deed::Renamed, Deed::Unknown];

    /// The kind in one word.
    pub const fn name(self) -> &'static str {
        match self {
            Deed::Added => "added",
            Deed::Removed => "removed",
            Deed::Changed => "changed",
            Deed::Renamed => "renamed",
            Deed::Unknown => "unknown",
        }
    }
}

/// One difference.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// The affected part.
    pub area: Area,
    /// The kind.
    pub deed: Deed,
    /// Name of the item: a state entry's key, a path.
    pub name: String,
    /// The former value, bounded; for a rename the former name.
    pub before: String,
    /// The present value, bounded.
    pub after: String,
    /// The changed properties, if known: `content`, `mode`, `time`.
    pub what: Vec<String>,
}

impl Difference {
    /// Creates a difference of an item that is only in the second state.
    pub fn added(area: Area, name: &str, after: String) -> Difference {
        Difference { area, deed: Deed::Added, name: name.into(), before: String::new(), after, what: Vec::new() }
    }

    /// Creates a difference of an item that is only in the first state.
    pub fn removed(area: Area, name: &str, before: String) -> Difference {
        Difference { area, deed: Deed::Removed, name: name.into(), before, after: String::new(), what: Vec::new() }
    }

    /// Creates a difference of an item that is in both states.
    pub fn changed(area: Area, name: &str, before: String, after: String) -> Difference {
        Difference { area, deed: Deed::Changed, name: name.into(), before, after, what: Vec::new() }
    }

    /// The same difference, from the second state to the first.
    #[must_use]
    pub fn reversed(self) -> Difference {
        let Difference { area, deed, name, before, after, what } = self;
        match deed {
            Deed::Renamed => Difference { area, deed, name: before, before: name, after, what },
            Deed::Added => Difference { area, deed: Deed::Removed, name, before: after, after: before, what },
            Deed::Removed => Difference { area, deed: Deed::Added, name, before: after, after: before, what },
            Deed::Changed | Deed::Unknown => Difference { area, deed, name, before: after, after: before, what },
        }
    }
}

/// A part of the text difference of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Patch {
    /// The path in the workspace, arbitrary bytes except zero.
    pub path: Vec<u8>,
    /// The kind of the difference.
    pub deed: Deed,
    /// The former path of a renamed file.
    pub before: Vec<u8>,
    /// Why there is no text; empty if there is.
    pub note: String,
    /// Unified diff, with the lines as in the files.
    pub text: Vec<u8>,
    /// Whether more parts of this file follow.
    pub more: bool,
}

/// Compares two engine states, by key.
pub fn of_state(before: &StateParts, after: &StateParts) -> Vec<Difference> {
    let same = |a: &StatePart, b: &StatePart| a.body == b.body && is_same_meta(&a.meta, &b.meta);
    by_name(Area::State, keyed(before), keyed(after), same, shown)
}

/// Whether two entries differ in their summary at most.
///
/// A summary is for people and may hold memory addresses.
fn is_same_meta(a: &serde_json::Value, b: &serde_json::Value) -> bool {
    match (a.as_object(), b.as_object()) {
        (Some(a), Some(b)) => {
            let rest = |meta: &serde_json::Map<String, serde_json::Value>| {
                meta.iter()
                    .filter(|(key, _)| *key != "summary")
                    .map(|(key, value)| (key.clone(), value.clone()))
                    .collect::<BTreeMap<_, _>>()
            };
            rest(a) == rest(b)
        }
        _ => a == b,
    }
}

fn keyed(parts: &StateParts) -> BTreeMap<&str, &StatePart> {
    parts.entries.iter().map(|part| (part.key.as_str(), part)).collect()
}

/// Returns an entry for display: its type and summary, if its meta has them.
fn shown(part: &StatePart) -> String {
    let text = |field: &str| part.meta.get(field).and_then(|value| value.as_str()).unwrap_or_default();
    let (kind, summary) = (text("type"), text("summary"));
    let shown = match (kind, summary) {
        ("", summary) => summary.to_owned(),
        (kind, "") => kind.to_owned(),
        (kind, summary) => format!("{kind} {summary}"),
    };
    shown.chars().take(limits::DIFF_SHOWN_CHARS).collect()
}

/// Compares two sets of mounts, by path.
pub fn of_mounts(before: &[GivenMount], after: &[GivenMount]) -> Vec<Difference> {
    let shown =
        |given: &GivenMount| format!("{} ({})", given.mount.source, if given.mount.writable { "rw" } else { "ro" });
    by_name(Area::Mount, mounted(before), mounted(after), |a, b| a == b, shown)
}

fn mounted(mounts: &[GivenMount]) -> BTreeMap<&str, &GivenMount> {
    mounts.iter().map(|given| (given.mount.path.as_str(), given)).collect()
}

/// Compares two sets of MCP servers, by name.
pub fn of_mcp(before: &[McpPart], after: &[McpPart]) -> Vec<Difference> {
    by_name(Area::Mcp, named(before), named(after), |a, b| a == b, |_| String::new())
}

fn named(parts: &[McpPart]) -> BTreeMap<&str, &McpPart> {
    parts.iter().map(|part| (part.name.as_str(), part)).collect()
}

/// Compares two sets of offered tools, by name.
pub fn of_tools(before: &[ToolPart], after: &[ToolPart]) -> Vec<Difference> {
    fn named(tools: &[ToolPart]) -> BTreeMap<&str, &ToolPart> {
        tools.iter().map(|tool| (tool.name.as_str(), tool)).collect()
    }
    by_name(Area::Tool, named(before), named(after), |a, b| a == b, |tool| tool.source.clone())
}

/// Compares workflow records: steps, agent, decisions, artifacts.
pub fn of_work(before: &WorkflowPart, after: &WorkflowPart) -> Vec<Difference> {
    let step = |step: &Step| {
        let state = if step.completed_at_ms.is_some() { "completed" } else { "current" };
        bounded(&format!("{} ({state})", step.name))
    };
    let mut reported =
        of_numbered(Area::Step, &before.workflow.steps, &after.workflow.steps, |step| step.index.into(), step);
    let (was, is) = (&before.workflow.agent, &after.workflow.agent);
    reported.extend(match (was.as_str(), is.as_str()) {
        (was, is) if was == is => None,
        ("", is) => Some(Difference::added(Area::Agent, "agent", is.into())),
        (was, "") => Some(Difference::removed(Area::Agent, "agent", was.into())),
        (was, is) => Some(Difference::changed(Area::Agent, "agent", was.into(), is.into())),
    });
    let decision = |one: &DecisionPart| bounded(&format!("{} ({})", one.title, one.state.name()));
    reported.extend(of_numbered(Area::Decision, &before.decisions, &after.decisions, |one| one.id, decision));
    fn artifacts(part: &WorkflowPart) -> BTreeMap<&str, &ArtifactPart> {
        part.artifacts.iter().map(|one| (one.name.as_str(), one)).collect()
    }
    let shown = |one: &ArtifactPart| match one.content_type.as_str() {
        "" => format!("version {}, {}", one.version, format_size(one.bytes)),
        kind => format!("version {}, {}, {kind}", one.version, format_size(one.bytes)),
    };
    reported.extend(by_name(Area::Artifact, artifacts(before), artifacts(after), |a, b| a == b, shown));
    reported
}

fn of_numbered<T: PartialEq>(
    area: Area,
    before: &[T],
    after: &[T],
    number: impl Fn(&T) -> u64,
    shown: impl Fn(&T) -> String,
) -> Vec<Difference> {
    let numbered =
        |all: &[T]| -> BTreeMap<u64, usize> { all.iter().enumerate().map(|(at, one)| (number(one), at)).collect() };
    let (a, b) = (numbered(before), numbered(after));
    let numbers: std::collections::BTreeSet<u64> = a.keys().chain(b.keys()).copied().collect();
    let one = |number: u64| {
        let name = number.to_string();
        match (a.get(&number).map(|at| &before[*at]), b.get(&number).map(|at| &after[*at])) {
            (Some(a), Some(b)) if a == b => None,
            (Some(a), Some(b)) => Some(Difference::changed(area, &name, shown(a), shown(b))),
            (Some(a), None) => Some(Difference::removed(area, &name, shown(a))),
            (None, Some(b)) => Some(Difference::added(area, &name, shown(b))),
            (None, None) => None,
        }
    };
    numbers.into_iter().filter_map(one).collect()
}

/// Compares the limits of a kernel.
pub fn of_limits(before: &KernelSpec, after: &KernelSpec) -> Vec<Difference> {
    let (a, b) = (limits_of(before), limits_of(after));
    let pairs = a.into_iter().zip(b).filter(|((_, before), (_, after))| before != after);
    pairs.map(|((name, before), (_, after))| Difference::changed(Area::Limit, name, before, after)).collect()
}

/// Sizes by name; in bytes where the name says so.
pub type Sizes = [(&'static str, u64); 3];

/// Compares sizes.
pub fn of_sizes(before: &Sizes, after: &Sizes) -> Vec<Difference> {
    let shown = |name: &str, size: u64| if name == "files" { size.to_string() } else { format_size(size) };
    let pairs = before.iter().zip(after).filter(|((_, before), (_, after))| before != after);
    let reported = |((name, before), (_, after)): (&(&'static str, u64), &(&'static str, u64))| {
        Difference::changed(Area::Size, name, shown(name, *before), shown(name, *after))
    };
    pairs.map(reported).collect()
}

fn limits_of(spec: &KernelSpec) -> [(&'static str, String); 7] {
    let bounds = &spec.limits;
    let idle = match spec.idle_timeout_ms {
        0 => "never".to_owned(),
        ms => format_duration(ms),
    };
    [
        ("memory", format_size(bounds.memory_bytes)),
        ("cpus", format_cpus(bounds.cpu_milli)),
        ("pids", bounds.pids.to_string()),
        ("open files", bounds.open_files.to_string()),
        ("workspace", format_size(bounds.workspace_bytes)),
        ("idle timeout", idle),
        ("net", spec.net.name().to_owned()),
    ]
}

fn bounded(text: &str) -> String {
    text.chars().take(limits::DIFF_SHOWN_CHARS).collect()
}

fn by_name<T>(
    area: Area,
    before: BTreeMap<&str, &T>,
    after: BTreeMap<&str, &T>,
    same: impl Fn(&T, &T) -> bool,
    shown: impl Fn(&T) -> String,
) -> Vec<Difference> {
    let names: std::collections::BTreeSet<&str> = before.keys().chain(after.keys()).copied().collect();
    let one = |name: &str| match (before.get(name), after.get(name)) {
        (Some(a), Some(b)) if same(a, b) => None,
        (Some(a), Some(b)) => Some(Difference::changed(area, name, shown(a), shown(b))),
        (Some(a), None) => Some(Difference::removed(area, name, shown(a))),
        (None, Some(b)) => Some(Difference::added(area, name, shown(b))),
        (None, None) => None,
    };
    names.into_iter().filter_map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::ids::Digest;
    use crate::core::info::MountInfo;

    fn part(key: &str, body: u8, summary: &str) -> StatePart {
        StatePart {
            key: key.into(),
            meta: serde_json::json!({ "type": "int", "summary": summary }),
            body: Digest::from_bytes([body; 32]),
            bytes: 1,
        }
    }

    #[test]
    fn state_diff_is_by_key() {
        let before = StateParts { entries: vec![part("var/a", 1, "1"), part("var/b", 2, "2"), part("var/c", 3, "3")] };
        let after = StateParts { entries: vec![part("var/a", 1, "1"), part("var/b", 9, "9"), part("var/d", 4, "4")] };
        assert_eq!(
            of_state(&before, &after),
            [
                Difference::changed(Area::State, "var/b", "int 2".into(), "int 9".into()),
                Difference::removed(Area::State, "var/c", "int 3".into()),
                Difference::added(Area::State, "var/d", "int 4".into()),
            ]
        );
        assert!(of_state(&after, &after).is_empty());
        // Another memory address is no difference; another type is.
        let moved = StateParts {
            entries: vec![part("var/a", 1, "<object at 0x7f>"), part("var/b", 2, "2"), part("var/c", 3, "3")],
        };
        assert!(of_state(&before, &moved).is_empty());
        let mut other = before.clone();
        other.entries[0].meta["type"] = "float".into();
        assert_eq!(of_state(&before, &other).len(), 1);
        let long = StateParts { entries: vec![part("var/l", 1, &"x".repeat(5000))] };
        assert!(of_state(&StateParts::default(), &long)[0].after.chars().count() <= limits::DIFF_SHOWN_CHARS);
    }

    #[test]
    fn mount_mode_change_is_shown() {
        let given = |writable| GivenMount {
            mount: MountInfo { path: "/data".into(), source: "/srv".into(), writable },
            real: None,
        };
        let differences = of_mounts(&[given(false)], &[given(true)]);
        assert_eq!(differences, [Difference::changed(Area::Mount, "/data", "/srv (ro)".into(), "/srv (rw)".into())]);
        assert!(of_mcp(&[], &[]).is_empty());
    }
}
