//! Information from events: time of the last state change, recent events of each kernel, failures.
//!
//! Everything is bounded: events arrive for the lifetime of the daemon, for kernels that are
//! created and removed.

use std::collections::{BTreeMap, VecDeque};

use crate::core::info::{Event, KernelInfo};

/// Events kept per kernel.
const OF_KERNEL: usize = 20;
/// Kernels with kept events.
const KERNELS: usize = 20_000;

/// Events of one kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Story {
    state: String,
    since_ms: i64,
    newest: VecDeque<Event>,
}

/// The effect of an event on the list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Meaning {
    /// A kernel is new, or changed in a way that requires a query.
    Changed,
    /// A kernel entered another state.
    Entered {
        /// The state by name.
        state: String,
        /// The reason; may be empty.
        reason: String,
    },
    /// A kernel was removed.
    Removed,
    /// No effect on the list.
    Nothing,
}

/// The kept events.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct News {
    stories: BTreeMap<String, Story>,
    /// Number of the newest event.
    pub sequence: u64,
    /// Kernels created since the start of the program.
    pub created: u64,
    /// Failures since the start of the program.
    pub troubles: u64,
}

impl News {
    /// Adds an event; past events do not count in rates.
    pub fn take(&mut self, event: Event, past: bool) -> Meaning {
        self.sequence = self.sequence.max(event.sequence);
        if !past {
            self.created += u64::from(is_creation(&event.kind));
            self.troubles += u64::from(is_trouble(&event.kind));
        }
        if event.kernel.is_empty() {
            return Meaning::Nothing;
        }
        if event.kind == "kernel_removed" {
            self.stories.remove(&event.kernel);
            return Meaning::Removed;
        }
        let meaning = meaning(&event);
        if self.stories.len() >= KERNELS && !self.stories.contains_key(&event.kernel) {
            self.stories.pop_first();
        }
        let story = self.stories.entry(event.kernel.clone()).or_default();
        let state = match &meaning {
            Meaning::Entered { state, .. } => Some(state.as_str()),
            Meaning::Changed if is_creation(&event.kind) => Some("created"),
            Meaning::Changed | Meaning::Removed | Meaning::Nothing => None,
        };
        if let Some(state) = state.filter(|state| *state != story.state) {
            state.clone_into(&mut story.state);
            story.since_ms = event.at_ms;
        }
        story.newest.push_back(event);
        while story.newest.len() > OF_KERNEL {
            story.newest.pop_front();
        }
        meaning
    }

    /// Time of the last state change, if an event reported it.
    ///
    /// Ready and busy count as one state, which begins with the start of the worker.
    pub fn since_ms(&self, info: &KernelInfo) -> Option<i64> {
        let story = self.story(info)?;
        let state = if info.state == "busy" { "ready" } else { &info.state };
        (story.state == state).then_some(story.since_ms)
    }

    /// A kernel's newest events, oldest first.
    pub fn of(&self, info: &KernelInfo) -> impl DoubleEndedIterator<Item = &Event> {
        self.story(info).into_iter().flat_map(|story| &story.newest)
    }

    fn story(&self, info: &KernelInfo) -> Option<&Story> {
        let name = info.spec.name.as_str();
        // A system-wide daemon prefixes the name with the owner.
        self.stories.get(name).or_else(|| self.stories.get(&format!("{}/{name}", info.uid)))
    }
}

/// Whether an event of `kernel` concerns the kernel of `info`.
pub fn is_about(kernel: &str, info: &KernelInfo) -> bool {
    match kernel.split_once('/') {
        Some((uid, name)) => name == info.spec.name.as_str() && uid == info.uid.to_string(),
        None => kernel == info.spec.name.as_str(),
    }
}

fn meaning(event: &Event) -> Meaning {
    let detail: serde_json::Value = serde_json::from_str(&event.detail_json).unwrap_or_default();
    let text = |field: &str| detail.get(field).and_then(serde_json::Value::as_str).map(str::to_owned);
    match text("state") {
        Some(state) => Meaning::Entered { state, reason: text("reason").unwrap_or_default() },
        None if event.kind.starts_with("kernel_") || event.kind.starts_with("checkpoint") => Meaning::Changed,
        None => Meaning::Nothing,
    }
}

fn is_creation(kind: &str) -> bool {
    matches!(kind, "kernel_created" | "kernel_forked")
}

/// Whether an event kind means a failure. Decided by the kind's suffix, which also covers new
/// kinds.
pub fn is_trouble(kind: &str) -> bool {
    let ends = ["_failed", "_lost", "_crashed", "_damaged", "_killed", "_unfinished", "_breaker_opened"];
    ends.iter().any(|end| kind.ends_with(end)) || kind.contains("_not_")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::top::fixtures::{NOW_MS, event, kernel};

    #[test]
    fn state_since_follows_events() {
        let mut news = News::default();
        let mut info = kernel("a", "ready");
        assert_eq!(news.since_ms(&info), None);
        news.take(event(1, "a", "kernel_created", "{}"), true);
        news.take(event(2, "a", "kernel_starting", r#"{"state":"starting"}"#), true);
        let entered = news.take(event(3, "a", "kernel_ready", r#"{"state":"ready","reason":""}"#), true);
        assert_eq!(entered, Meaning::Entered { state: "ready".into(), reason: String::new() });
        news.take(event(4, "a", "kernel_adopted", r#"{"state":"ready","reason":""}"#), true);
        assert_eq!(news.since_ms(&info), Some(NOW_MS + 3), "an adoption changes nothing");
        info.state = "busy".into();
        assert_eq!(news.since_ms(&info), Some(NOW_MS + 3));
        info.state = "stopped".into();
        assert_eq!(news.since_ms(&info), None, "no event names it yet");
        assert_eq!(news.of(&info).map(|event| event.sequence).collect::<Vec<_>>(), [1, 2, 3, 4]);
        assert_eq!(news.take(event(5, "a", "kernel_removed", "{}"), false), Meaning::Removed);
        assert_eq!((news.of(&info).count(), news.sequence), (0, 5));
    }

    #[test]
    fn past_events_are_not_counted() {
        let mut news = News::default();
        for (kind, past) in [
            ("kernel_created", true),
            ("kernel_created", false),
            ("kernel_forked", false),
            ("kernel_crashed", true),
            ("kernel_crashed", false),
            ("execution_lost", false),
            ("state_not_saved", false),
            ("kernel_ready", false),
        ] {
            news.take(event(1, "a", kind, "{}"), past);
        }
        assert_eq!((news.created, news.troubles), (2, 3));
    }

    #[test]
    fn event_names_have_owner() {
        let mut news = News::default();
        let info = kernel("a", "ready");
        news.take(event(1, "7/a", "kernel_ready", r#"{"state":"ready"}"#), true);
        assert_eq!(news.since_ms(&info), None);
        news.take(event(2, "1000/a", "kernel_ready", r#"{"state":"ready"}"#), true);
        assert_eq!(news.since_ms(&info), Some(NOW_MS + 2));
        assert!(is_about("1000/a", &info) && is_about("a", &info) && !is_about("7/a", &info) && !is_about("b", &info));
    }

    #[test]
    fn event_history_is_bounded() {
        let mut news = News::default();
        for sequence in 0..100 {
            news.take(event(sequence, "a", "output", "not even JSON"), false);
        }
        assert_eq!(news.of(&kernel("a", "ready")).count(), OF_KERNEL);
        for sequence in 0..KERNELS as u64 + 10 {
            news.take(event(sequence, &format!("k{sequence}"), "kernel_created", "{}"), false);
        }
        assert_eq!(news.stories.len(), KERNELS);
    }
}
