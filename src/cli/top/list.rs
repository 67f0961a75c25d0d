//! The shown kernels, their order and the selected one.
//!
//! The selection follows a kernel, not a line. Only when the kernel is gone does the selection move
//! to the kernel on its line.

use std::cmp::Ordering;

use super::model::Kernel;
use crate::core::ids::KernelId;

/// A sort column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Column {
    /// Alphabetical.
    Name,
    /// Alphabetical.
    Engine,
    /// Active kernels first.
    State,
    /// The latest change of state first.
    Since,
    /// Highest first.
    Executions,
    /// Highest first.
    Memory,
    /// Highest first.
    Disk,
    /// Shortest first.
    Idle,
    /// Highest first.
    Jobs,
}

impl Column {
    /// All columns, in display order.
    pub const ALL: [Column; 9] = [
        Column::Name,
        Column::Engine,
        Column::State,
        Column::Since,
        Column::Executions,
        Column::Memory,
        Column::Disk,
        Column::Idle,
        Column::Jobs,
    ];

    /// The column's heading.
    pub const fn heading(self) -> &'static str {
        match self {
            Column::Name => "NAME",
            Column::Engine => "ENGINE",
            Column::State => "STATE",
            Column::Since => "SINCE",
            Column::Executions => "EXECUTIONS",
            Column::Memory => "MEMORY",
            Column::Disk => "DISK",
            Column::Idle => "IDLE",
            Column::Jobs => "JOBS",
        }
    }

    /// The column `by` places to the right, wrapping around.
    pub fn moved(self, by: isize) -> Column {
        let count = Column::ALL.len() as isize;
        let at = Column::ALL.iter().position(|column| *column == self).unwrap_or(0) as isize;
        Column::ALL[(at + by).rem_euclid(count) as usize]
    }

    fn compare(self, a: &Kernel, b: &Kernel) -> Ordering {
        let (x, y) = (&a.info, &b.info);
        match self {
            Column::Name => Ordering::Equal,
            Column::Engine => x.spec.engine.name().cmp(y.spec.engine.name()),
            Column::State => rank(&x.state).cmp(&rank(&y.state)).then_with(|| x.state.cmp(&y.state)),
            Column::Since => b.since_ms.cmp(&a.since_ms),
            Column::Executions => y.executions.cmp(&x.executions),
            Column::Memory => y.memory_bytes.cmp(&x.memory_bytes),
            Column::Disk => disk_bytes(b).cmp(&disk_bytes(a)),
            Column::Idle => y.last_used_at_ms.cmp(&x.last_used_at_ms),
            Column::Jobs => b.jobs.cmp(&a.jobs),
        }
    }
}

/// What the kernel takes on the disk; `None`, the lowest, if it was not measured yet.
fn disk_bytes(kernel: &Kernel) -> Option<u64> {
    kernel.info.disk.map(|disk| disk.total_bytes())
}

/// Sort rank of a state: transient and failed states first, states unknown to this build last.
fn rank(state: &str) -> u8 {
    let order = ["busy", "starting", "stopping", "crashed", "ready", "suspended", "stopped", "created", "archived"];
    order.iter().position(|known| *known == state).map_or(u8::MAX, |at| at as u8)
}

/// The list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct List {
    /// The sort column.
    pub column: Column,
    /// Whether the order is reversed.
    pub reversed: bool,
    /// Words that a kernel must contain.
    pub filter: String,
    shown: Vec<KernelId>,
    selected: Option<KernelId>,
    first: usize,
}

impl Default for List {
    fn default() -> Self {
        let (filter, shown) = (String::new(), Vec::new());
        List { column: Column::Name, reversed: false, filter, shown, selected: None, first: 0 }
    }
}

impl List {
    /// Rebuilds the list from all kernels, for a view of `lines` lines.
    pub fn arrange<'a>(&mut self, kernels: impl Iterator<Item = &'a Kernel>, lines: usize) {
        let line = self.line();
        let words = self.filter.to_lowercase();
        let mut kept: Vec<&Kernel> = kernels.filter(|kernel| admits(&words, kernel)).collect();
        kept.sort_by(|a, b| {
            let order = self.column.compare(a, b);
            let by_name = || a.info.spec.name.as_str().cmp(b.info.spec.name.as_str());
            let order = order.then_with(by_name).then_with(|| a.info.id.cmp(&b.info.id));
            if self.reversed { order.reverse() } else { order }
        });
        self.shown = kept.into_iter().map(|kernel| kernel.info.id).collect();
        if !self.selected.is_some_and(|id| self.shown.contains(&id)) {
            self.selected = self.shown.get(line.min(self.shown.len().saturating_sub(1))).copied();
        }
        self.scroll(lines);
    }

    /// The shown kernels, in order.
    pub fn shown(&self) -> &[KernelId] {
        &self.shown
    }

    /// The kernels visible in a view of `lines` lines.
    pub fn on_screen(&self, lines: usize) -> &[KernelId] {
        let end = self.shown.len().min(self.first.saturating_add(lines));
        self.shown.get(self.first..end).unwrap_or_default()
    }

    /// The selected kernel; `None` if the list is empty.
    pub fn selected(&self) -> Option<KernelId> {
        self.selected
    }

    /// The line of the selected kernel.
    pub fn line(&self) -> usize {
        self.shown.iter().position(|id| Some(*id) == self.selected).unwrap_or(0)
    }

    /// Moves the selection by `by` lines, within the list.
    pub fn select(&mut self, by: isize, lines: usize) {
        let to = self.line().saturating_add_signed(by).min(self.shown.len().saturating_sub(1));
        self.selected = self.shown.get(to).copied();
        self.scroll(lines);
    }

    /// Scrolls so that the selection is visible and the view is full if possible.
    fn scroll(&mut self, lines: usize) {
        let line = self.line();
        let lines = lines.max(1);
        self.first = self.first.min(line).max((line + 1).saturating_sub(lines));
        self.first = self.first.min(self.shown.len().saturating_sub(lines));
    }
}

/// Whether each word occurs in the kernel's name, engine, state or labels.
fn admits(words: &str, kernel: &Kernel) -> bool {
    let info = &kernel.info;
    words.split_whitespace().all(|word| {
        let has = |text: &str| text.to_lowercase().contains(word);
        let labelled = || info.spec.labels.iter().any(|(name, value)| has(&format!("{name}={value}")));
        has(info.spec.name.as_str()) || has(info.spec.engine.name()) || has(&info.state) || labelled()
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cli::top::fixtures::kernel;
    use crate::core::usage::DiskFigures;

    fn of(name: &str, state: &str) -> Kernel {
        Kernel::new(kernel(name, state))
    }

    fn names(list: &List, kernels: &[Kernel]) -> Vec<String> {
        let name = |id: &KernelId| kernels.iter().find(|kernel| kernel.info.id == *id).map(Kernel::name);
        list.shown().iter().filter_map(name).collect()
    }

    #[test]
    fn every_column_sorts() {
        let mut kernels = [of("a", "stopped"), of("b", "busy"), of("c", "ready")];
        (kernels[0].info.executions, kernels[2].info.executions) = (5, 9);
        (kernels[1].info.memory_bytes, kernels[2].info.memory_bytes) = (100, 50);
        (kernels[0].since_ms, kernels[1].since_ms) = (Some(5), Some(9));
        kernels[2].info.disk = Some(DiskFigures { history_bytes: 7, ..DiskFigures::default() });
        kernels[0].info.disk = Some(DiskFigures::default());
        kernels[1].info.spec.engine = crate::core::engine::EngineName::Python;
        kernels[2].info.last_used_at_ms += 1;
        kernels[2].jobs = Some(1);
        let mut list = List::default();
        for (column, order) in [
            (Column::Name, "abc"),
            (Column::Engine, "acb"),
            (Column::State, "bca"),
            (Column::Since, "bac"),
            (Column::Executions, "cab"),
            (Column::Memory, "bca"),
            (Column::Disk, "cab"),
            (Column::Idle, "cab"),
            (Column::Jobs, "cab"),
        ] {
            list.column = column;
            list.reversed = false;
            list.arrange(kernels.iter(), 10);
            assert_eq!(names(&list, &kernels).concat(), order, "{column:?}");
            list.reversed = true;
            list.arrange(kernels.iter(), 10);
            assert_eq!(names(&list, &kernels).concat(), order.chars().rev().collect::<String>(), "{column:?}");
        }
        let round = (0..9).fold(Column::Name, |column, _| column.moved(1));
        assert_eq!((round, Column::Name.moved(-1)), (Column::Name, Column::Jobs));
    }

    #[test]
    fn filter_matches_all_words() {
        let mut kernels = [of("web-1", "ready"), of("web-2", "stopped"), of("data", "ready")];
        kernels[2].info.spec.labels = vec![("project".into(), "Web".into())];
        let mut list = List::default();
        for (filter, shown) in [
            ("", "data web-1 web-2"),
            ("web", "data web-1 web-2"),
            ("WEB ready", "data web-1"),
            ("project=web", "data"),
            ("kaish -2", "web-2"),
            ("nothing", ""),
        ] {
            list.filter = filter.into();
            list.arrange(kernels.iter(), 10);
            assert_eq!(names(&list, &kernels).join(" "), shown, "{filter:?}");
        }
    }

    #[test]
    fn selection_moves_to_same_line() {
        let mut kernels: Vec<Kernel> = ["a", "b", "c"].map(|name| of(name, "ready")).into();
        let mut list = List::default();
        list.arrange(kernels.iter(), 10);
        list.select(1, 10);
        assert_eq!(list.selected(), Some(kernels[1].info.id));
        kernels.insert(0, of("0", "ready"));
        list.arrange(kernels.iter(), 10);
        assert_eq!((list.selected(), list.line()), (Some(kernels[2].info.id), 2));
        kernels.remove(2);
        list.arrange(kernels.iter(), 10);
        assert_eq!(list.selected(), Some(kernels[2].info.id));
        kernels.clear();
        list.arrange(kernels.iter(), 10);
        assert_eq!((list.selected(), list.on_screen(10).len()), (None, 0));
        list.select(5, 10);
        assert_eq!(list.selected(), None);
    }

    proptest! {
        /// After any sequence of changes and resizes, the selection is a shown and visible kernel,
        /// and stays on its kernel while that is shown.
        #[test]
        fn selection_follows_kernel(
            steps in prop::collection::vec((prop::collection::btree_set(0u8..30, 0..30), -40isize..40, 0usize..12, 0usize..9, any::<bool>()), 1..30)
        ) {
            let mut list = List::default();
            for (present, by, lines, column, reversed) in steps {
                let kernels: Vec<Kernel> = present.iter().map(|n| {
                    let mut kernel = of(&format!("k{n}"), ["ready", "busy", "stopped"][usize::from(n % 3)]);
                    kernel.info.executions = u64::from(n % 5);
                    kernel
                }).collect();
                let before = list.selected();
                (list.column, list.reversed) = (Column::ALL[column], reversed);
                list.arrange(kernels.iter(), lines);
                prop_assert_eq!(list.shown().len(), kernels.len());
                if let Some(id) = before.filter(|id| list.shown().contains(id)) {
                    prop_assert_eq!(list.selected(), Some(id));
                }
                list.select(by, lines);
                prop_assert_eq!(list.selected().is_some(), !kernels.is_empty());
                let screen = list.on_screen(lines.max(1));
                prop_assert!(screen.len() == kernels.len().min(lines.max(1)));
                prop_assert!(kernels.is_empty() || screen.contains(&list.selected().unwrap_or(KernelId::from_bytes([0; 16]))));
            }
        }
    }
}
