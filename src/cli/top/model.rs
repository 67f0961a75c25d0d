//! The state of `ryokan top` and its reactions: `Model::step(now, input) -> actions`. Pure: the
//! shell owns terminal, clock and daemon.
//!
//! ```text
//! Waiting ──Connected──▶ Up ──Lost──▶ Waiting      in Up, at each tick: send every due request that is not pending
//! ```
//! A list of all kernels makes the daemon query every live worker. The interval between lists
//! therefore grows with the number of live kernels. Between lists, the kernels on the screen and
//! those named by events are queried singly, in batches of bounded size.

use std::collections::{BTreeMap, BTreeSet};

pub use super::exchange::{Action, Deed, Input, Inspection, Look, Question};
use super::layout::{Layout, Size};
use super::list::List;
use super::meter::Meter;
use super::mode::Mode;
use super::news::{Meaning, News, is_about};
use crate::core::error::Error;
use crate::core::ids::{HostId, KernelId};
use crate::core::info::{Event, HostInfo, KernelInfo, PoolInfo};

/// Live kernels that can be listed every second; for more, the interval grows.
const LIVE_EACH_SECOND: usize = 50;
/// The same for kernels that are not live: each costs a message, but no worker's answer.
const KERNELS_EACH_SECOND: usize = 500;
/// Maximum number of kernels in one [`Action::Look`].
pub const LOOKED_AT: usize = 64;
/// Maximum number of kernels waiting for [`Action::Look`].
const STALE: usize = 16 * LOOKED_AT;
/// Tolerance for early ticks.
const TICK_SLACK_MS: i64 = 100;
/// Display time of a note.
const NOTE_MS: i64 = 8_000;

/// One kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct Kernel {
    /// The daemon's latest information.
    pub info: KernelInfo,
    /// Time of the last state change, if an event reported it.
    pub since_ms: Option<i64>,
    /// Number of background jobs, once queried.
    pub jobs: Option<usize>,
}

impl Kernel {
    /// A kernel from a list.
    pub fn new(info: KernelInfo) -> Kernel {
        Kernel { info, since_ms: None, jobs: None }
    }

    /// The kernel's name.
    pub fn name(&self) -> String {
        self.info.spec.name.to_string()
    }

    /// Whether it has a worker.
    pub fn is_live(&self) -> bool {
        is_live(&self.info.state)
    }
}

fn is_live(state: &str) -> bool {
    matches!(state, "ready" | "busy" | "stopping")
}

/// The state of the connection.
#[derive(Debug, Clone, PartialEq)]
pub enum Link {
    /// Not connected.
    Waiting {
        /// Start of this state.
        since_ms: i64,
        /// The reason.
        why: String,
    },
    /// Connected.
    Up {
        /// The connected host.
        host: HostInfo,
        /// Time of the last answer.
        answered_ms: i64,
    },
}

/// The pending requests, at most one of each kind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Asked {
    connect: bool,
    list: bool,
    pools: bool,
    look: bool,
    inspect: bool,
    deeds: BTreeSet<(KernelId, Deed)>,
}

/// A message to the user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    at_ms: i64,
    /// The text.
    pub text: String,
    /// Whether it reports a failure.
    pub bad: bool,
}

/// The state of the program.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// Time of the last step.
    pub now_ms: i64,
    /// The terminal.
    pub size: Size,
    /// The connection.
    pub link: Link,
    /// All kernels.
    pub kernels: BTreeMap<KernelId, Kernel>,
    /// All pools.
    pub pools: Vec<PoolInfo>,
    /// Information from events.
    pub news: News,
    /// The shown kernels.
    pub list: List,
    host_id: HostId,
    /// The current view and meaning of keys.
    pub mode: Mode,
    /// The kernel in the details view, and its details.
    pub inspected: Option<(KernelId, Inspection)>,
    /// Executions of all kernels.
    pub executions: Meter,
    /// Created kernels.
    pub created: Meter,
    /// Failures.
    pub troubles: Meter,
    /// Whether questions are answered with yes.
    pub assume_yes: bool,
    note: Option<Note>,
    asked: Asked,
    /// Kernels to query, by id or name.
    stale: BTreeSet<String>,
    /// Whether a second has passed since the last request for pools or attempt to connect.
    is_new_second: bool,
    listed_ms: Option<i64>,
    executed: u64,
    counted: BTreeMap<KernelId, u64>,
}

impl Model {
    /// A model without data.
    pub fn new(now_ms: i64, size: Size, host: HostInfo, assume_yes: bool) -> Model {
        Model {
            now_ms,
            size,
            host_id: host.id,
            link: Link::Up { host, answered_ms: now_ms },
            kernels: BTreeMap::new(),
            pools: Vec::new(),
            news: News::default(),
            list: List::default(),
            mode: Mode::List,
            inspected: None,
            executions: Meter::default(),
            created: Meter::default(),
            troubles: Meter::default(),
            assume_yes,
            note: None,
            asked: Asked::default(),
            stale: BTreeSet::new(),
            is_new_second: true,
            listed_ms: None,
            executed: 0,
            counted: BTreeMap::new(),
        }
    }

    /// The current layout.
    pub fn layout(&self) -> Layout {
        Layout::of(self.size.lines, self.pools.len())
    }

    /// Number of lines of the list.
    pub fn lines(&self) -> usize {
        usize::from(self.layout().body)
    }

    /// The current note; notes expire.
    pub fn note(&self) -> Option<&Note> {
        self.note.as_ref()
    }

    /// Whether all kernels were listed on this connection.
    pub fn is_listed(&self) -> bool {
        self.listed_ms.is_some()
    }

    /// Handles an input and returns the resulting actions.
    pub fn step(&mut self, now_ms: i64, input: Input) -> Vec<Action> {
        self.now_ms = now_ms;
        let mut actions = Vec::new();
        // Thousands of events may arrive between two frames.
        let is_event = matches!(input, Input::Happened { .. });
        match input {
            Input::Ticked => self.tick(),
            Input::Pressed(key) => actions = self.press(key),
            Input::Pasted(text) => self.paste(&text),
            Input::Resized(size) => self.size = size,
            Input::Connected(host) => self.connected(host),
            Input::NotConnected(why) => {
                self.asked.connect = false;
                if let Link::Waiting { why: known, .. } = &mut self.link {
                    *known = why;
                }
            }
            Input::Lost(why) => self.lost(why),
            Input::Listed(infos) => self.listed(infos),
            Input::PoolsTold(pools) => {
                self.asked.pools = false;
                self.pools = pools;
                self.answered();
            }
            Input::Looked { looks, gone } => self.looked(looks, &gone),
            Input::Inspected(id, found) => self.found(id, found),
            Input::Happened { event, past } => self.happened(event, past),
            Input::CaughtUp => self.date_all(),
            Input::Failed(question, error) => self.failed(question, &error),
            Input::Done { id, deed, result } => self.done(id, deed, result),
        }
        if !is_event {
            self.settle();
        }
        actions.extend(self.ask());
        actions
    }

    /// Updates the list; must precede each frame.
    pub fn settle(&mut self) {
        let lines = self.lines();
        self.list.arrange(self.kernels.values(), lines);
    }

    fn tick(&mut self) {
        self.note.take_if(|note| self.now_ms.saturating_sub(note.at_ms) > NOTE_MS);
        if let Link::Up { .. } = self.link {
            self.created.add(self.now_ms, self.news.created);
            self.troubles.add(self.now_ms, self.news.troubles);
        }
        self.is_new_second = true;
        // Their usage changes without events.
        let on_screen = self.list.on_screen(self.lines()).iter();
        let live = on_screen.filter(|id| self.kernels.get(*id).is_some_and(Kernel::is_live));
        self.stale.extend(live.take(LOOKED_AT).map(KernelId::to_string));
        self.stale.extend(self.mode.inspects().map(|id| id.to_string()));
    }

    /// The due requests that are not pending.
    fn ask(&mut self) -> Vec<Action> {
        let mut actions = Vec::new();
        if let Link::Waiting { .. } = self.link {
            if !self.asked.connect && std::mem::take(&mut self.is_new_second) {
                self.asked.connect = true;
                actions.push(Action::Connect);
            }
            return actions;
        }
        if self.is_list_due() && !std::mem::replace(&mut self.asked.list, true) {
            actions.push(Action::List);
        }
        if std::mem::take(&mut self.is_new_second) && !std::mem::replace(&mut self.asked.pools, true) {
            actions.push(Action::Pools);
        }
        if !self.stale.is_empty() && !self.asked.look && self.is_listed() {
            self.asked.look = true;
            let mut kernels: Vec<String> = Vec::new();
            while kernels.len() < LOOKED_AT {
                let Some(name) = self.stale.pop_first() else { break };
                kernels.push(name);
            }
            actions.push(Action::Look { kernels, with_usage: self.list_interval_ms() > 1000 });
        }
        if let Mode::Inspect { id, asked_ms, .. } = &mut self.mode {
            let due = asked_ms.is_none_or(|at| self.now_ms.saturating_sub(at) >= 1000 - TICK_SLACK_MS);
            if due && !self.asked.inspect {
                *asked_ms = Some(self.now_ms);
                self.asked.inspect = true;
                actions.push(Action::Inspect(*id));
            }
        }
        actions
    }

    fn is_list_due(&self) -> bool {
        self.listed_ms.is_none_or(|at| self.now_ms.saturating_sub(at) >= self.list_interval_ms() - TICK_SLACK_MS)
    }

    /// The number of the last known event of that host.
    pub fn events_known_of(&mut self, host: &HostInfo) -> u64 {
        if self.host_id != host.id {
            (self.news, self.host_id) = (News::default(), host.id);
            self.kernels.clear();
        }
        self.news.sequence
    }

    /// The interval between two lists.
    pub fn list_interval_ms(&self) -> i64 {
        let live = self.kernels.values().filter(|kernel| kernel.is_live()).count();
        let seconds = live.div_ceil(LIVE_EACH_SECOND).max(self.kernels.len().div_ceil(KERNELS_EACH_SECOND));
        i64::try_from(seconds.max(1)).unwrap_or(i64::MAX / 1000).saturating_mul(1000)
    }

    fn answered(&mut self) {
        if let Link::Up { answered_ms, .. } = &mut self.link {
            *answered_ms = self.now_ms;
        }
    }

    fn connected(&mut self, host: HostInfo) {
        self.asked = Asked::default();
        self.stale.clear();
        self.listed_ms = None;
        self.is_new_second = true;
        if self.news.sequence > 0 {
            self.say("connected again".into(), false);
        }
        self.link = Link::Up { host, answered_ms: self.now_ms };
    }

    fn lost(&mut self, why: String) {
        if !self.asked.deeds.is_empty() {
            self.say("the connection was lost: what was asked for may have been done".into(), true);
        }
        self.asked = Asked::default();
        // The next tick makes the first attempt: if the daemon disconnects at once, reconnecting
        // must not loop.
        self.is_new_second = false;
        self.stale.clear();
        (self.executions, self.created, self.troubles) = Default::default();
        if let Link::Up { .. } = self.link {
            self.link = Link::Waiting { since_ms: self.now_ms, why };
        }
    }

    fn listed(&mut self, infos: Vec<KernelInfo>) {
        self.asked.list = false;
        let before_ms = self.listed_ms.replace(self.now_ms);
        self.answered();
        let mut old = std::mem::take(&mut self.kernels);
        for info in infos {
            let jobs = old.remove(&info.id).and_then(|kernel| kernel.jobs).filter(|_| is_live(&info.state));
            let known = self.counted.get(&info.id).copied();
            let is_new = before_ms.is_some_and(|before| info.created_at_ms >= before);
            // The executions before a kernel was first seen are not recent, unless the kernel
            // itself is new.
            let from = known.unwrap_or(if is_new { 0 } else { info.executions });
            self.executed += info.executions.saturating_sub(from);
            let since_ms = self.news.since_ms(&info);
            self.kernels.insert(info.id, Kernel { info, since_ms, jobs });
        }
        self.counted = self.kernels.iter().map(|(id, kernel)| (*id, kernel.info.executions)).collect();
        self.executions.add(self.now_ms, self.executed);
    }

    fn looked(&mut self, looks: Vec<Look>, gone: &[String]) {
        self.asked.look = false;
        self.answered();
        for Look { info, with_usage, jobs } in looks {
            let since_ms = self.news.since_ms(&info);
            let live = is_live(&info.state);
            let memory_bytes = self.kernels.get(&info.id).map_or(0, |kernel| kernel.info.memory_bytes);
            let keep = live && !with_usage;
            let info = KernelInfo { memory_bytes: if keep { memory_bytes } else { info.memory_bytes }, ..info };
            self.kernels.insert(info.id, Kernel { info, since_ms, jobs: live.then_some(jobs) });
        }
        self.kernels.retain(|id, kernel| {
            let name = kernel.info.spec.name.as_str();
            !gone.iter().any(|gone| gone == name || *gone == id.to_string())
        });
    }

    fn found(&mut self, id: KernelId, found: Result<Inspection, Error>) {
        self.asked.inspect = false;
        self.answered();
        match found {
            Ok(inspection) => self.inspected = Some((id, inspection)),
            Err(error) => self.say(error.message, true),
        }
    }

    fn failed(&mut self, question: Question, error: &Error) {
        match question {
            Question::List => {
                self.asked.list = false;
                // Delays the next attempt.
                self.listed_ms = Some(self.now_ms);
            }
            Question::Pools => self.asked.pools = false,
            Question::Look => self.asked.look = false,
        }
        self.answered();
        self.say(error.message.clone(), true);
    }

    fn date_all(&mut self) {
        for kernel in self.kernels.values_mut() {
            kernel.since_ms = self.news.since_ms(&kernel.info);
        }
    }

    fn happened(&mut self, event: Event, past: bool) {
        let name = event.kernel.clone();
        let meaning = self.news.take(event, past);
        if past {
            return;
        }
        let known = self.kernels.values_mut().find(|kernel| is_about(&name, &kernel.info));
        let short = name.rsplit('/').next().unwrap_or_default().to_owned();
        match (meaning, known) {
            (Meaning::Removed, Some(kernel)) => {
                let id = kernel.info.id;
                self.kernels.remove(&id);
            }
            (Meaning::Entered { state, reason }, Some(kernel)) => {
                if !is_live(&state) {
                    (kernel.info.memory_bytes, kernel.jobs) = (0, None);
                }
                (kernel.info.state, kernel.info.state_reason) = (state, reason);
                kernel.since_ms = self.news.since_ms(&kernel.info);
                self.stale.insert(kernel.info.id.to_string());
            }
            (Meaning::Changed, Some(kernel)) => {
                self.stale.insert(kernel.info.id.to_string());
            }
            (Meaning::Changed | Meaning::Entered { .. }, None) => {
                self.stale.insert(short);
            }
            (Meaning::Removed | Meaning::Nothing, _) => {}
        }
        // The next full list covers so many kernels.
        if self.stale.len() > STALE {
            self.stale.clear();
        }
    }

    fn done(&mut self, id: KernelId, deed: Deed, result: Result<String, Error>) {
        self.asked.deeds.remove(&(id, deed));
        self.answered();
        self.stale.insert(id.to_string());
        let name = self.kernels.get(&id).map_or_else(|| id.to_string(), Kernel::name);
        match result {
            Ok(text) => self.say(format!("{name}: {text}"), false),
            Err(error) if error.hint.is_empty() => self.say(format!("{name}: {}", error.message), true),
            Err(error) => self.say(format!("{name}: {} ({})", error.message, error.hint), true),
        }
    }

    /// Starts an operation on a kernel unless the same one is pending.
    pub(super) fn begin(&mut self, id: KernelId, deed: Deed) -> Vec<Action> {
        let Some(kernel) = self.kernels.get(&id) else {
            self.say("that kernel is gone".into(), true);
            return Vec::new();
        };
        let text = format!("{} {} …", deed.under_way(), kernel.name());
        if let Link::Waiting { .. } = self.link {
            self.say("no daemon answers: nothing was done".into(), true);
            return Vec::new();
        }
        if !self.asked.deeds.insert((id, deed.clone())) {
            self.say(format!("{text} (already)"), false);
            return Vec::new();
        }
        self.say(text, false);
        vec![Action::Do(id, deed)]
    }

    /// Shows a note.
    pub(super) fn say(&mut self, text: String, bad: bool) {
        self.note = Some(Note { at_ms: self.now_ms, text, bad });
    }
}
