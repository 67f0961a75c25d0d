//! Writes a tree into an empty, private folder: for forks and imports.
//!
//! A few threads create folders and write each file in place: there are no readers before the end, and after a crash
//! the folder is removed as a whole. The stamp of each entry is kept, so that the created tree can be compared with the
//! requested one, and the first capture reads nothing.

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, Permissions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::PathBuf;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::{FileStat, Mode, UtimensatFlags, fchmod, futimens, mkdirat, utimensat};
use nix::unistd::{Gid, Uid, fchown, fchownat, linkat, mkfifoat, symlinkat};

use super::beneath::{self, proc_path};
use super::branch::{Branched, Donor, DonorCopy, DonorFolder};
use super::capture_stats::{CaptureStats, FullScanReason};
use super::encode::encode;
use super::error::WorkspaceError;
use super::index::{FolderId, Index, Known, NodeState, ROOT, Stamp};
use super::objects::{HashOnly, Objects};
use super::paths::WorkspacePaths;
use super::restore::{Restored, differences};
use super::stage::{Owner, times};
use super::tracker::Tracker;
use super::tree::TreeId;
use super::tree::entry::{Attributes, Content, Entry, Group, Meta, Name, Node, path_of};
use super::tree::format::Folder;
use super::tree::read;
use crate::core::durability::Durability;
use crate::core::ids::Digest;
use crate::core::limits;
use crate::sys::{fault, inode};

type Result<T> = std::result::Result<T, WorkspaceError>;
/// The names from the workspace to a folder.
type Path = Vec<Name>;

/// Writes a tree into an empty folder, which must be private until this returns.
///
/// # Errors
/// The folder is not empty; the tree cannot be read or is too large; file operations fail. The caller removes what was
/// created.
pub fn checkout(
    target: TreeId,
    paths: WorkspacePaths,
    objects: &dyn Objects,
    durability: Durability,
) -> Result<(Tracker, Restored)> {
    let tracker = Tracker::open(paths)?;
    checkout_with(tracker, None, target, objects, durability).map(|(tracker, restored, _)| (tracker, restored))
}

/// As [`checkout`], with files of a donor where they match the tree.
pub(super) fn checkout_with(
    mut tracker: Tracker,
    donor: Option<&Donor>,
    target: TreeId,
    objects: &dyn Objects,
    durability: Durability,
) -> Result<(Tracker, Restored, Branched)> {
    let path = tracker.workspace().to_owned();
    if !beneath::list(tracker.root.as_fd()).map_err(WorkspaceError::of("list", &path))?.is_empty() {
        return Err(WorkspaceError::NotEmpty { path });
    }
    let wanted = read::root(objects, target)?;
    let owner = Owner { own: tracker.owner, privileged: Uid::effective().is_root() };
    let made = Checkout::new(tracker.root.as_fd(), objects, owner, donor).run(&wanted)?;
    if durability == Durability::Power {
        let sync = fault::point("workspace.checkout.sync").and_then(|()| Ok(nix::unistd::syncfs(&tracker.root)?));
        sync.map_err(|e| WorkspaceError::io("sync", &path, e))?;
    }
    let (bytes, count) = (made.bytes, made.count);
    let branched = Branched { snapshot: false, cloned: made.cloned, copied: made.copied };
    tracker.index = made.into_index(tracker.settled_before());
    let exact = encode(&mut tracker.index, &mut HashOnly)? == target;
    let left = if exact { Vec::new() } else { differences(&tracker.index, objects, &wanted, owner)? };
    tracker.adopt_index(exact.then_some(target))?;
    let stats = CaptureStats { full_scan: Some(FullScanReason::First), ..CaptureStats::default() };
    Ok((tracker, Restored { left, changed: count, bytes, stats }, branched))
}

/// A folder, or a page of one, to create.
struct FolderJob {
    names: Path,
    digest: Digest,
}

/// The jobs, and the number of busy threads.
#[derive(Default)]
struct JobQueue {
    jobs: Vec<FolderJob>,
    busy: usize,
    failed: Option<WorkspaceError>,
}

/// What was created.
#[derive(Default)]
struct Created {
    /// Files, links and pipes, by folder.
    entries: Vec<(Path, Vec<(Name, Known)>)>,
    folders: Vec<(Path, Meta)>,
    /// Names of hard-linked files.
    groups: HashMap<Group, Vec<(Path, Entry)>>,
    bytes: u64,
    count: u64,
    /// Files that share blocks with a donor's, and files copied from it.
    cloned: u64,
    copied: u64,
    /// Finished folders, by their names.
    done: BTreeMap<Path, Known>,
    root: (Meta, Stamp),
}

impl Created {
    fn add(&mut self, more: Created) -> Result<()> {
        self.entries.extend(more.entries);
        self.folders.extend(more.folders);
        for (group, names) in more.groups {
            self.groups.entry(group).or_default().extend(names);
        }
        self.bytes += more.bytes;
        self.count += more.count;
        self.cloned += more.cloned;
        self.copied += more.copied;
        match self.count > limits::WORKSPACE_ENTRIES {
            true => Err(WorkspaceError::TooMany { what: "entries", limit: limits::WORKSPACE_ENTRIES }),
            false => Ok(()),
        }
    }

    fn into_index(self, settled_before: super::tree::entry::Moment) -> Index {
        let mut index = Index::new();
        let mut ids: HashMap<Path, FolderId> = HashMap::from([(Vec::new(), ROOT)]);
        let settle = |known: Known| Known { settled: known.stamp.changed < settled_before, ..known };
        (index.root, index.root_stamp) = self.root;
        let mut folders: Vec<(Path, Known)> = self.done.into_iter().collect();
        folders.sort_by_key(|(names, _)| names.len());
        for (names, known) in folders {
            let Some((name, above)) = names.split_last() else { continue };
            let Some(parent) = ids.get(above).copied() else { continue };
            let id = index.make_folder(parent, name);
            index.set(parent, name, settle(Known { what: NodeState::Folder(id), ..known }));
            ids.insert(names, id);
        }
        for (folder, entries) in self.entries {
            let Some(id) = ids.get(&folder).copied() else { continue };
            for (name, known) in entries {
                index.set(id, &name, settle(known));
            }
        }
        index.regroup();
        index
    }
}

struct Checkout<'a> {
    root: BorrowedFd<'a>,
    objects: &'a dyn Objects,
    owner: Owner,
    /// Mode bits that this process's umask clears.
    umask: u32,
    /// Whether created files belong to the workspace's owner anyway.
    owns: bool,
    donor: Option<&'a Donor>,
    queue: Mutex<JobQueue>,
    more: Condvar,
}

impl<'a> Checkout<'a> {
    fn new(root: BorrowedFd<'a>, objects: &'a dyn Objects, owner: Owner, donor: Option<&'a Donor>) -> Checkout<'a> {
        let own = (Uid::effective().as_raw(), Gid::effective().as_raw());
        let owns = own == owner.own;
        Checkout { root, objects, owner, umask: umask(), owns, donor, queue: Mutex::default(), more: Condvar::new() }
    }

    fn queue(&self) -> MutexGuard<'_, JobQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(self, wanted: &Entry) -> Result<Created> {
        if let Some(digest) = read::root_folder(wanted) {
            self.queue().jobs.push(FolderJob { names: Vec::new(), digest });
        }
        let threads = thread::available_parallelism().map_or(1, usize::from).min(limits::STORE_THREADS);
        let mut made = Created::default();
        thread::scope(|scope| -> Result<()> {
            let helpers: Vec<_> = (1..threads)
                .filter_map(|_| thread::Builder::new().name("checkout".into()).spawn_scoped(scope, || self.work()).ok())
                .collect();
            // The calling thread works too: it suffices if no other can be started.
            let own = self.work();
            let others: Vec<Created> = helpers.into_iter().filter_map(|helper| helper.join().ok()).collect();
            others.into_iter().chain([own]).try_for_each(|part| made.add(part))
        })?;
        if let Some(failed) = self.queue().failed.take() {
            return Err(failed);
        }
        self.link(&mut made)?;
        self.finish_folders(wanted, &mut made)?;
        Ok(made)
    }

    /// Processes jobs until none is left or one failed.
    fn work(&self) -> Created {
        let mut made = Created::default();
        let mut queue = self.queue();
        loop {
            if queue.failed.is_some() {
                return made;
            }
            let Some(job) = queue.jobs.pop() else {
                if queue.busy == 0 {
                    self.more.notify_all();
                    return made;
                }
                queue = self.more.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            queue.busy += 1;
            drop(queue);
            let done = self.folder(job, &mut made);
            queue = self.queue();
            queue.busy -= 1;
            match done {
                Ok(inner) => queue.jobs.extend(inner),
                Err(error) => drop(queue.failed.get_or_insert(error)),
            }
            self.more.notify_all();
        }
    }

    fn open(&self, names: &[Name]) -> Result<OwnedFd> {
        beneath::folder(self.root, names)
            .map_err(|e| WorkspaceError::io("open", &path_of(names.iter().map(|name| &**name)), e.into()))
    }

    fn folder(&self, job: FolderJob, made: &mut Created) -> Result<Vec<FolderJob>> {
        let FolderJob { names, digest } = job;
        if names.len() as u64 > u64::from(limits::WORKSPACE_DEPTH) {
            let limit = u64::from(limits::WORKSPACE_DEPTH);
            return Err(WorkspaceError::TooMany { what: "folders within folders", limit });
        }
        if self.donor.is_some_and(Donor::is_cancelled) {
            let path = path_of(names.iter().map(|name| &**name));
            return Err(WorkspaceError::io("go on to copy", &path, io::ErrorKind::Interrupted.into()));
        }
        let page = match read::folder(self.objects, digest)? {
            Folder::Page(entries) => entries,
            Folder::Pages(pages) => {
                return Ok(pages
                    .into_iter()
                    .map(|page| FolderJob { names: names.clone(), digest: page.digest })
                    .collect());
            }
        };
        let dir = self.open(&names)?;
        let donor_folder = self.donor.and_then(|donor| donor.folder(&names));
        let (mut inner, mut entries) = (Vec::new(), Vec::with_capacity(page.len()));
        made.count += page.len() as u64;
        for entry in page {
            let path = || {
                let mut names = names.clone();
                names.push(entry.name.clone());
                names
            };
            let shown = || path_of(path().iter().map(|name| &**name));
            match &entry.node {
                Node::Folder { digest } => {
                    let make = fault::point("workspace.checkout.folder")
                        .and_then(|()| Ok(mkdirat(&dir, &*entry.name, Mode::S_IRWXU)?));
                    make.map_err(|e| WorkspaceError::io("make", &shown(), e))?;
                    made.folders.push((path(), entry.meta.clone()));
                    inner.push(FolderJob { names: path(), digest: *digest });
                }
                Node::File { group: Some(group), .. } => {
                    made.groups.entry(*group).or_default().push((names.clone(), entry.clone()));
                }
                Node::File { .. } => {
                    let stat = self.file(dir.as_fd(), &entry, donor_folder.as_ref(), made)?;
                    entries.push((entry.name.clone(), self.known(&entry, &stat)));
                }
                Node::Symlink { target } => {
                    let stat = self.symlink(dir.as_fd(), &entry, target);
                    let stat = stat.map_err(|e| WorkspaceError::io("make", &shown(), e))?;
                    entries.push((entry.name.clone(), self.known(&entry, &stat)));
                }
                Node::Fifo => {
                    let stat = self.fifo(dir.as_fd(), &entry);
                    let stat = stat.map_err(|e| WorkspaceError::io("make", &shown(), e))?;
                    entries.push((entry.name.clone(), self.known(&entry, &stat)));
                }
                Node::Missing { .. } => made.count -= 1,
            }
        }
        made.entries.push((names, entries));
        Ok(inner)
    }

    /// The index entry of a created entry.
    fn known(&self, entry: &Entry, stat: &FileStat) -> Known {
        let what = match &entry.node {
            Node::File { content, .. } => {
                NodeState::File { content: content.clone(), names: stat.st_nlink, group: None }
            }
            Node::Symlink { target } => NodeState::Symlink(target.clone()),
            Node::Fifo => NodeState::Fifo,
            // The index assigns the number.
            Node::Folder { .. } => NodeState::Folder(ROOT),
            Node::Missing { reason } => NodeState::Missing(*reason),
        };
        let meta = beneath::meta(stat, self.owner.own, entry.meta.attributes.clone());
        Known { stamp: beneath::stamp(stat), settled: false, meta, what }
    }

    /// Creates a file in place, with all metadata.
    fn file(
        &self,
        dir: BorrowedFd<'_>,
        entry: &Entry,
        donor_folder: Option<&DonorFolder<'_>>,
        made: &mut Created,
    ) -> Result<FileStat> {
        let path = || path_of([&*entry.name]);
        let Node::File { size, content, .. } = &entry.node else {
            return Err(WorkspaceError::NotRestored { path: path() });
        };
        let failed = |error: io::Error| WorkspaceError::io("make", &path(), error);
        // Setting attributes needs write permission: the final mode comes after them.
        let plain = entry.meta.attributes.is_none();
        let mode = if plain { entry.meta.mode & 0o777 } else { 0o600 };
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let open = fault::point("workspace.checkout.file")
            .and_then(|()| Ok(openat(dir, &*entry.name, flags, Mode::from_bits_truncate(mode))?));
        let file: File = open.map_err(failed)?.into();
        let donor_file = donor_folder.and_then(|donor_folder| donor_folder.file(&entry.name, content));
        let donor_copy = match donor_file {
            Some(donor_file) => fault::point("workspace.checkout.give")
                .and_then(|()| donor_file.copy_to(&file, *size))
                .map_err(failed)?,
            None => DonorCopy::Nothing,
        };
        let apply = || -> io::Result<FileStat> {
            self.apply_meta(file.as_fd(), &entry.meta, mode & !self.umask)?;
            Ok(beneath::look_at(&file)?)
        };
        match donor_copy {
            DonorCopy::Cloned => {
                made.cloned += 1;
                return apply().map_err(failed);
            }
            DonorCopy::Copied(bytes) => {
                (made.copied, made.bytes) = (made.copied + 1, made.bytes + bytes);
                return apply().map_err(failed);
            }
            DonorCopy::Changed => file.set_len(0).map_err(failed)?,
            DonorCopy::Nothing => {}
        }
        let mut write = |bytes: &[u8], offset| -> io::Result<()> {
            made.bytes += bytes.len() as u64;
            file.write_all_at(bytes, offset)
        };
        match content {
            Content::Inline(bytes) => write(bytes, 0).map_err(failed)?,
            Content::Whole(digest) => {
                let bytes = self.objects.get(*digest, limits::TREE_PIECE_BYTES as u64)?;
                write(&bytes, 0).map_err(failed)?;
            }
            Content::Map(digest) => {
                file.set_len(*size).map_err(failed)?;
                for piece in read::map(self.objects, *digest)?.pieces {
                    let bytes = self.objects.get(piece.digest, limits::TREE_PIECE_BYTES as u64)?;
                    write(&bytes, piece.offset).map_err(failed)?;
                }
            }
        }
        apply().map_err(failed)
    }

    /// Sets owner, attributes, mode and time of an open file or folder, in an order in which none undoes another.
    /// `mode`: the present mode.
    fn apply_meta(&self, file: BorrowedFd<'_>, meta: &Meta, mode: u32) -> io::Result<()> {
        if let Some((user, group)) = self.owner_of(meta) {
            fchown(file, Some(Uid::from_raw(user)), Some(Gid::from_raw(group)))?;
        }
        let attributes: &Attributes = &meta.attributes;
        for (name, value) in attributes.iter().flat_map(|list| list.iter()) {
            inode::set_attribute(file, name, value)?;
        }
        if mode != meta.mode || attributes.is_some() {
            fchmod(file, Mode::from_bits_truncate(meta.mode))?;
        }
        let (access, modified) = times(meta.modified);
        Ok(futimens(file, &access, &modified)?)
    }

    /// The owner to set, if it differs and can be set.
    fn owner_of(&self, meta: &Meta) -> Option<(u32, u32)> {
        if !self.owner.privileged || (meta.owner.is_none() && self.owns) {
            return None;
        }
        Some(meta.owner.unwrap_or(self.owner.own))
    }

    fn symlink(&self, dir: BorrowedFd<'_>, entry: &Entry, target: &[u8]) -> io::Result<FileStat> {
        symlinkat(target, dir, &*entry.name)?;
        self.apply_meta_by_name(dir, entry)
    }

    fn fifo(&self, dir: BorrowedFd<'_>, entry: &Entry) -> io::Result<FileStat> {
        mkfifoat(dir, &*entry.name, Mode::S_IRUSR | Mode::S_IWUSR)?;
        let opened = openat(dir, &*entry.name, OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC, Mode::empty())?;
        self.apply_meta_by_name(dir, entry)?;
        std::fs::set_permissions(proc_path(opened.as_fd()), Permissions::from_mode(entry.meta.mode))?;
        Ok(beneath::look(dir, &entry.name)?)
    }

    /// Sets the metadata of an entry that cannot be opened.
    fn apply_meta_by_name(&self, dir: BorrowedFd<'_>, entry: &Entry) -> io::Result<FileStat> {
        if let Some((user, group)) = self.owner_of(&entry.meta) {
            let (user, group) = (Some(Uid::from_raw(user)), Some(Gid::from_raw(group)));
            fchownat(dir, &*entry.name, user, group, AtFlags::AT_SYMLINK_NOFOLLOW)?;
        }
        let (access, modified) = times(entry.meta.modified);
        utimensat(dir, &*entry.name, &access, &modified, UtimensatFlags::NoFollowSymlink)?;
        Ok(beneath::look(dir, &entry.name)?)
    }

    /// Creates hard-linked files: once, then the further names.
    fn link(&self, made: &mut Created) -> Result<()> {
        for (_, places) in std::mem::take(&mut made.groups) {
            let Some(((first, entry), others)) = places.split_first() else { continue };
            let home = self.open(first)?;
            let donor_folder = self.donor.and_then(|donor| donor.folder(first));
            self.file(home.as_fd(), entry, donor_folder.as_ref(), made)?;
            for (names, other) in others {
                let dir = self.open(names)?;
                let linked = linkat(&home, &*entry.name, &dir, &*other.name, AtFlags::empty());
                linked.map_err(|e| WorkspaceError::io("link", &path_of([&*other.name]), e.into()))?;
            }
            for (names, entry) in &places {
                let stat = beneath::look(self.open(names)?.as_fd(), &entry.name);
                let stat = stat.map_err(|e| WorkspaceError::io("look at", &path_of([&*entry.name]), e.into()))?;
                made.entries.push((names.clone(), vec![(entry.name.clone(), self.known(entry, &stat))]));
            }
        }
        Ok(())
    }

    /// Sets mode and time of folders, the deepest first: nothing more is created in them.
    fn finish_folders(&self, wanted: &Entry, made: &mut Created) -> Result<()> {
        let mut folders = std::mem::take(&mut made.folders);
        folders.push((Vec::new(), wanted.meta.clone()));
        folders.sort_by_key(|(names, _)| std::cmp::Reverse(names.len()));
        for (names, meta) in folders {
            let path = || -> PathBuf { path_of(names.iter().map(|name| &**name)) };
            let dir = self.open(&names)?;
            let apply = || -> io::Result<FileStat> {
                let present = if names.is_empty() { u32::MAX } else { 0o700 & !self.umask };
                self.apply_meta(dir.as_fd(), &meta, present)?;
                Ok(beneath::look_at(&dir)?)
            };
            let stat = apply().map_err(|e| WorkspaceError::io("change", &path(), e))?;
            let now = beneath::meta(&stat, self.owner.own, meta.attributes);
            if names.is_empty() {
                made.root = (now, beneath::stamp(&stat));
            } else {
                let what = NodeState::Folder(ROOT);
                made.done.insert(names, Known { stamp: beneath::stamp(&stat), settled: false, meta: now, what });
            }
        }
        Ok(())
    }
}

/// This process's umask; all bits if it is unknown.
fn umask() -> u32 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    line.and_then(|mask| u32::from_str_radix(mask.trim(), 8).ok()).unwrap_or(0o777)
}
