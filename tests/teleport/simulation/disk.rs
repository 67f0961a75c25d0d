//! What a simulated host stores, and what of it a loss of power leaves.

use std::collections::{BTreeMap, BTreeSet};

use ryokan::core::kernel::transition::{Decision, Transition};

/// A kernel's number.
pub type Kernel = u8;
/// A handover's number.
pub type Handover = u32;
/// Checkpoints that are kept of a kernel.
pub const KEPT: u64 = 4;

/// Where a kernel is, as the catalog says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Here { epoch: u64 },
    Departed { epoch: u64, by: Handover },
}

/// A handover's row in the catalog.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Row {
    Out { kernel: Kernel, to: usize, epoch: u64 },
    In { kernel: Kernel, epoch: u64, live: bool },
}

/// What a new daemon finishes or withdraws of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Intent {
    Freeze { id: u32 },
    Restore { members: Vec<Kernel>, safety: Vec<Image>, reached: usize },
}

/// `catalog.db`.
#[derive(Debug, Clone, Default)]
pub struct Catalog {
    pub kernels: BTreeMap<Kernel, Place>,
    pub rows: BTreeMap<Handover, Row>,
    /// Granted workers: the kernel and its epoch.
    pub leases: BTreeMap<u64, (Kernel, u64)>,
    /// Members of this host's group.
    pub group: BTreeSet<Kernel>,
    /// Stored parts of freezes: work and content of a member.
    pub parts: BTreeMap<(u32, Kernel), (u64, Image)>,
    /// Visible freezes, with their members.
    pub freezes: BTreeMap<u32, Vec<Kernel>>,
    pub intent: Option<Intent>,
}

/// What a kernel is made of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Image {
    /// Files and engine state belong together if both are of the same moment.
    pub files: u64,
    pub engine: u64,
    /// The moments of its newest checkpoints.
    pub checkpoints: [u64; KEPT as usize],
    /// Checkpoints that were taken.
    pub taken: u64,
}

impl Image {
    pub fn take_checkpoint(&mut self) {
        self.checkpoints[(self.taken % KEPT) as usize] = self.files;
        self.taken += 1;
    }

    /// The address of this content after that work.
    pub fn digest(&self, work: u64) -> u64 {
        let parts = [self.files, self.engine, self.taken, work].into_iter().chain(self.checkpoints);
        parts.fold(0xCBF2_9CE4_8422_2325, |sum, part| (sum ^ part).wrapping_mul(0x0100_0000_01B3).rotate_left(23))
    }
}

/// The content of a kernel's directory: `state.db` and files.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Content {
    /// Acknowledged work.
    pub work: u64,
    pub image: Image,
    /// The transition's record.
    pub record: Option<(Transition, Decision)>,
    pub is_suspended: bool,
    /// The handover whose departure is committed.
    pub departed_by: Option<Handover>,
}

/// The directory of a kernel, or of a received one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Name {
    Kernel(Kernel),
    Received(Handover),
}

/// A directory: its content, and whether its files are there.
#[derive(Debug, Clone, Copy)]
pub struct Directory {
    pub content: u32,
    pub has_files: bool,
}

/// A directory as a start would find it.
#[derive(Debug, Clone, Copy)]
pub struct Copy {
    pub content: Content,
    pub has_files: bool,
}

/// Every state of a part of the disk since the last sync; the last one is what programs see.
#[derive(Debug, Clone)]
struct Versions<T>(Vec<T>);

impl<T: Clone + Default> Versions<T> {
    fn new() -> Versions<T> {
        Versions(vec![T::default()])
    }

    fn now(&self) -> &T {
        self.0.last().expect("never empty")
    }

    fn change(&mut self, change: impl FnOnce(&mut T)) {
        let mut next = self.now().clone();
        change(&mut next);
        self.0.push(next);
    }

    /// Keeps the first state and the last.
    fn keep_ends(&mut self) {
        let last = self.0.len() - 1;
        if last > 1 {
            self.0.swap(1, last);
            self.0.truncate(2);
        }
    }

    fn keep(&mut self, at: usize) {
        let kept = self.0.swap_remove(at);
        self.0 = vec![kept];
    }
}

/// A host's disk. Catalog, contents of files, and directories reach the device independently of each other.
///
/// What a failed sync has not written is taken for written: programs still see it, and no further sync writes it, nor what
/// follows it in the same WAL. Changes of directories are the file system's own, which writes them again.
#[derive(Debug, Clone)]
pub struct Disk {
    catalog: Versions<Catalog>,
    contents: Versions<BTreeMap<u32, Content>>,
    directories: Versions<BTreeMap<Name, Directory>>,
    last_content: u32,
    /// Whether a failed sync has lost a part of the catalog.
    lost_catalog: bool,
    /// The contents of which a failed sync has lost a part.
    lost_contents: BTreeSet<u32>,
}

impl Disk {
    pub fn new() -> Disk {
        Disk {
            catalog: Versions::new(),
            contents: Versions::new(),
            directories: Versions::new(),
            last_content: 0,
            lost_catalog: false,
            lost_contents: BTreeSet::new(),
        }
    }

    pub fn catalog(&self) -> &Catalog {
        self.catalog.now()
    }

    pub fn change_catalog(&mut self, change: impl FnOnce(&mut Catalog)) {
        self.catalog.change(change);
    }

    /// Makes everything durable that no earlier sync has lost.
    pub fn sync(&mut self) {
        match self.lost_catalog {
            true => self.catalog.keep_ends(),
            false => self.catalog.keep(self.catalog.0.len() - 1),
        }
        if self.lost_contents.is_empty() {
            self.contents.keep(self.contents.0.len() - 1);
        } else {
            self.contents.keep_ends();
            let (mut left, now) = (self.contents.0[0].clone(), self.contents.now().clone());
            left.retain(|content, _| self.lost_contents.contains(content));
            let written = now.iter().filter(|(content, _)| !self.lost_contents.contains(content));
            left.extend(written.map(|(content, value)| (*content, *value)));
            self.contents.0[0] = left;
        }
        self.directories.keep(self.directories.0.len() - 1);
    }

    /// A sync fails: what was not durable counts as written.
    pub fn fail_sync(&mut self) {
        self.lost_catalog |= self.catalog.0.len() > 1;
        let now = self.contents.now();
        let changed = |content: &u32| self.contents.0.iter().any(|then| then.get(content) != now.get(content));
        self.lost_contents.extend(now.keys().filter(|content| changed(content)));
    }

    /// Writes the catalog, and the record of a kernel, anew: the next sync makes them durable.
    pub fn write_anew(&mut self, kernel: Option<Kernel>) {
        self.lost_catalog = false;
        if let Some(directory) = kernel.and_then(|kernel| self.directories.now().get(&Name::Kernel(kernel))) {
            self.lost_contents.remove(&directory.content);
        }
    }

    /// Makes everything durable, with syncs of its own.
    pub fn sync_whole(&mut self) {
        self.lost_catalog = false;
        self.lost_contents.clear();
        self.sync();
    }

    /// Whether a part of a kernel's content is lost.
    pub fn has_lost(&self, kernel: Kernel) -> bool {
        let directory = self.directories.now().get(&Name::Kernel(kernel));
        directory.is_some_and(|directory| self.lost_contents.contains(&directory.content))
    }

    /// Leaves of each part any state since the last sync.
    pub fn lose_power(&mut self, mut any: impl FnMut(usize) -> usize) {
        self.lost_catalog = false;
        self.lost_contents.clear();
        self.catalog.keep(any(self.catalog.0.len()));
        self.contents.keep(any(self.contents.0.len()));
        self.directories.keep(any(self.directories.0.len()));
    }

    pub fn create(&mut self, name: Name, work: u64, image: Image) {
        self.last_content += 1;
        let content = self.last_content;
        self.contents.change(|all| {
            all.insert(content, Content { work, image, ..Content::default() });
        });
        self.directories.change(|all| {
            all.insert(name, Directory { content, has_files: true });
        });
    }

    pub fn change_content(&mut self, name: Name, change: impl FnOnce(&mut Content)) {
        let Some(directory) = self.directories.now().get(&name).copied() else { return };
        self.contents.change(|all| {
            if let Some(content) = all.get_mut(&directory.content) {
                change(content);
            }
        });
    }

    pub fn clear_files(&mut self, name: Name) {
        self.directories.change(|all| {
            if let Some(directory) = all.get_mut(&name) {
                directory.has_files = false;
            }
        });
    }

    pub fn remove(&mut self, name: Name) {
        self.directories.change(|all| {
            all.remove(&name);
        });
    }

    /// Renames a received kernel's directory; one that is not there was renamed before.
    pub fn adopt(&mut self, handover: Handover, kernel: Kernel) {
        if self.directories.now().contains_key(&Name::Received(handover)) {
            self.directories.change(|all| {
                if let Some(directory) = all.remove(&Name::Received(handover)) {
                    all.insert(Name::Kernel(kernel), directory);
                }
            });
        }
    }

    pub fn names(&self) -> Vec<Name> {
        self.directories.now().keys().copied().collect()
    }

    pub fn copy(&self, name: Name) -> Option<Copy> {
        self.now().copy(name)
    }

    /// What is in the directory of a kernel; nothing is as a new one.
    pub fn content(&self, kernel: Kernel) -> Content {
        self.copy(Name::Kernel(kernel)).map_or_else(Content::default, |copy| copy.content)
    }

    /// What programs see.
    pub fn now(&self) -> View<'_> {
        View { catalog: self.catalog.now(), contents: self.contents.now(), directories: self.directories.now() }
    }

    /// The state that programs see last; before it, combinations that a loss of power may leave.
    pub fn views(&self) -> Vec<View<'_>> {
        let ends = |count: usize| if count == 1 { vec![0] } else { vec![0, count - 1] };
        let mut views = Vec::new();
        for catalog in ends(self.catalog.0.len()) {
            for contents in ends(self.contents.0.len()) {
                for directories in ends(self.directories.0.len()) {
                    views.push(View {
                        catalog: &self.catalog.0[catalog],
                        contents: &self.contents.0[contents],
                        directories: &self.directories.0[directories],
                    });
                }
            }
        }
        views
    }
}

/// One state of a disk.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    pub catalog: &'a Catalog,
    contents: &'a BTreeMap<u32, Content>,
    directories: &'a BTreeMap<Name, Directory>,
}

impl View<'_> {
    pub fn copy(&self, name: Name) -> Option<Copy> {
        let directory = self.directories.get(&name)?;
        // A file that was created and not synced is empty.
        let content = self.contents.get(&directory.content).copied().unwrap_or_default();
        Some(Copy { content, has_files: directory.has_files })
    }

    /// The kernel's directory after a start, which adopts what was activated.
    pub fn own(&self, kernel: Kernel) -> Option<Copy> {
        let mut received = self.catalog.rows.iter().filter_map(|(handover, row)| match row {
            Row::In { kernel: of, live: true, .. } if *of == kernel => self.copy(Name::Received(*handover)),
            Row::In { .. } | Row::Out { .. } => None,
        });
        received.next_back().or_else(|| self.copy(Name::Kernel(kernel)))
    }

    /// Whether the kernel has departed by this handover.
    pub fn has_departed(&self, kernel: Kernel, by: Handover) -> bool {
        match self.catalog.kernels.get(&kernel) {
            Some(Place::Departed { by: found, .. }) => *found == by,
            Some(Place::Here { .. }) => self.own(kernel).is_some_and(|copy| copy.content.departed_by == Some(by)),
            None => false,
        }
    }

    /// The live copy of a kernel.
    pub fn live(&self, kernel: Kernel) -> Option<Copy> {
        match self.catalog.kernels.get(&kernel) {
            Some(Place::Here { .. }) => self.own(kernel).filter(|copy| copy.content.departed_by.is_none()),
            Some(Place::Departed { .. }) | None => None,
        }
    }
}
