//! What `ryokan top` knows, and what it does about what happens: `Model::step(now, input) -> actions`. Pure: terminal, clock
//! and daemon are the shell's.
//!
//! ```text
//! Waiting ──Connected──▶ Up ──Lost──▶ Waiting      in Up, at each tick: ask for what is due and not asked for already
//! ```
//! A list of all kernels makes the daemon ask every live worker what it uses. So the more kernels live, the rarer it is asked for; those
//! on the screen, and those that events name, are looked at one by one meanwhile, a bounded number at a time.

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

/// Live kernels that are listed every second; of more, the list comes more rarely.
const LIVE_EACH_SECOND: usize = 50;
/// As before, of kernels that are not live: they cost a message each, and no worker's answer.
const KERNELS_EACH_SECOND: usize = 500;
/// Kernels that are looked at in one request.
pub const LOOKED_AT: usize = 64;
/// Kernels that wait to be looked at.
const STALE: usize = 16 * LOOKED_AT;
/// A tick may come a little early.
const TICK_SLACK_MS: i64 = 100;
/// How long a note stays.
const NOTE_MS: i64 = 8_000;

/// One kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct Kernel {
    /// As the daemon told last.
    pub info: KernelInfo,
    /// Since when it is in its state, if an event said so.
    pub since_ms: Option<i64>,
    /// Background jobs, if it was looked at.
    pub jobs: Option<usize>,
}

impl Kernel {
    /// Of what a list tells.
    pub fn new(info: KernelInfo) -> Kernel {
        Kernel { info, since_ms: None, jobs: None }
    }

    /// What people call it.
    pub fn name(&self) -> String {
        self.info.spec.name.to_string()
    }

    /// Whether it has a worker that can be asked.
    pub fn is_live(&self) -> bool {
        is_live(&self.info.state)
    }
}

fn is_live(state: &str) -> bool {
    matches!(state, "ready" | "busy" | "stopping")
}

/// The connection.
#[derive(Debug, Clone, PartialEq)]
pub enum Link {
    /// There is none.
    Waiting {
        /// Since when.
        since_ms: i64,
        /// Why.
        why: String,
    },
    /// There is one.
    Up {
        /// Whose.
        host: HostInfo,
        /// When it answered last.
        answered_ms: i64,
    },
}

/// What was asked for and not answered yet: never two of a kind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Asked {
    connect: bool,
    list: bool,
    pools: bool,
    look: bool,
    inspect: bool,
    deeds: BTreeSet<(KernelId, Deed)>,
}

/// A line that says what was done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    at_ms: i64,
    /// The line.
    pub text: String,
    /// It went wrong.
    pub bad: bool,
}

/// Everything that is known.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// When it was stepped last.
    pub now_ms: i64,
    /// The terminal.
    pub size: Size,
    /// The connection.
    pub link: Link,
    /// All kernels.
    pub kernels: BTreeMap<KernelId, Kernel>,
    /// All pools.
    pub pools: Vec<PoolInfo>,
    /// What events told.
    pub news: News,
    /// Which kernels are shown.
    pub list: List,
    host_id: HostId,
    /// What keys mean now.
    pub mode: Mode,
    /// The kernel that is looked at closely, and what was found.
    pub inspected: Option<(KernelId, Inspection)>,
    /// Executions of all kernels.
    pub executions: Meter,
    /// Kernels made.
    pub created: Meter,
    /// What went wrong.
    pub troubles: Meter,
    /// Answers yes to every question.
    pub assume_yes: bool,
    note: Option<Note>,
    asked: Asked,
    /// By id or name: what should be looked at.
    stale: BTreeSet<String>,
    /// A second went by since the daemon was asked for its pools, or looked for.
    is_new_second: bool,
    listed_ms: Option<i64>,
    executed: u64,
    counted: BTreeMap<KernelId, u64>,
}

impl Model {
    /// Knows nothing yet.
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

    /// The parts of the screen.
    pub fn layout(&self) -> Layout {
        Layout::of(self.size.lines, self.pools.len())
    }

    /// Lines of the list.
    pub fn lines(&self) -> usize {
        usize::from(self.layout().body)
    }

    /// What was done last, for a while.
    pub fn note(&self) -> Option<&Note> {
        self.note.as_ref()
    }

    /// Whether all kernels were listed since there is a connection.
    pub fn is_listed(&self) -> bool {
        self.listed_ms.is_some()
    }

    /// Takes in what happened; gives what is to be done.
    pub fn step(&mut self, now_ms: i64, input: Input) -> Vec<Action> {
        self.now_ms = now_ms;
        let mut actions = Vec::new();
        // Thousands of events may come between two frames.
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

    /// Brings the list up to date; to be done before each frame.
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
        // Those on the screen change without an event, too.
        let on_screen = self.list.on_screen(self.lines()).iter();
        let live = on_screen.filter(|id| self.kernels.get(*id).is_some_and(Kernel::is_live));
        self.stale.extend(live.take(LOOKED_AT).map(KernelId::to_string));
        self.stale.extend(self.mode.inspects().map(|id| id.to_string()));
    }

    /// What is due and not under way.
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

    /// Up to which event everything is known of that host.
    pub fn events_known_of(&mut self, host: &HostInfo) -> u64 {
        if self.host_id != host.id {
            (self.news, self.host_id) = (News::default(), host.id);
            self.kernels.clear();
        }
        self.news.sequence
    }

    /// The time from one list to the next.
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
        // The first attempt comes with the next tick: a daemon that hangs up at once must not be called in a circle.
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
            // What a kernel executed before it was first seen was not executed just now, unless it is new itself.
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
                // Not at once again.
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
        // So many are what the list is for.
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

    /// Tells a kernel to do something, once.
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

    /// Shows a line for a while.
    pub(super) fn say(&mut self, text: String, bad: bool) {
        self.note = Some(Note { at_ms: self.now_ms, text, bad });
    }
}
