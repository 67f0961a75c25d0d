//! Fills an empty workspace with a tree: by several threads, each file made in its place, its bytes taken from a donor that has
//! the same file, else from the store. Nobody else is in the workspace; a folder that was begun and not ended is removed by who
//! asked for it.
//!
//! What was made is noted in an index at once: nothing is looked at twice, and the first capture of the new workspace reads
//! nothing. In the end that index is encoded, and must be the tree.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::{Mode, UtimensatFlags, fchmod, fchmodat, futimens, mkdirat, utimensat};
use nix::unistd::{Gid, Uid, fchownat, linkat, mkfifoat, symlinkat};

use super::beneath;
use super::branch::{Donor, Given};
use super::error::WorkspaceError;
use super::index::{FolderId, Index, Known, ROOT, What};
use super::objects::Objects;
use super::stage::{Owner, times};
use super::tree::entry::{Content, Entry, Group, Meta, Name, Node, path_of};
use super::tree::format::Folder;
use super::tree::read;
use crate::core::ids::Digest;
use crate::core::limits;
use crate::sys::{fault, inode};

type Result<T> = std::result::Result<T, WorkspaceError>;

/// Entries that a thread takes at once.
const SLICE: usize = 128;

/// What was made.
pub(super) struct Filled {
    pub index: Index,
    /// What only the tree's own workspace had: sockets and the like.
    pub left: Vec<PathBuf>,
    pub made: u64,
    /// Bytes that were written, and files that were cloned and copied from the donor.
    pub bytes: u64,
    pub cloned: u64,
    pub copied: u64,
}

/// A folder that is filled.
#[derive(Clone)]
struct At {
    folder: FolderId,
    names: Arc<[Name]>,
    /// The same folder of the donor.
    donor: Option<FolderId>,
}

/// Entries of one folder, for one thread.
struct Slice {
    at: At,
    entries: Vec<Entry>,
}

/// What threads made.
#[derive(Default)]
struct Made {
    known: Vec<(FolderId, Name, Known)>,
    bytes: u64,
    cloned: u64,
    copied: u64,
}

/// All folders, with what they are to be, and what is to be put into them.
#[derive(Default)]
struct Plan {
    /// Those above before those within; each with the folder that it is in.
    folders: Vec<(FolderId, At, Meta)>,
    slices: Vec<Slice>,
    /// All names of files that have several.
    linked: HashMap<Group, Vec<(At, Entry)>>,
    left: Vec<PathBuf>,
}

struct Fill<'a> {
    root: BorrowedFd<'a>,
    owner: Owner,
    objects: &'a dyn Objects,
    donor: Option<&'a Donor>,
}

/// Fills a folder, which must be empty.
pub(super) fn fill(
    root: BorrowedFd<'_>,
    owner: Owner,
    objects: &dyn Objects,
    wanted: &Entry,
    donor: Option<&Donor>,
) -> Result<Filled> {
    let fill = Fill { root, owner, objects, donor };
    let mut index = Index::new();
    let plan = fill.folders(&mut index, wanted)?;
    let mut made = fill.files(&plan.slices)?;
    for names in plan.linked.values() {
        fill.linked(names, &mut made)?;
    }
    let count = (made.known.len() + plan.folders.len()) as u64;
    for (folder, name, known) in made.known {
        index.set(folder, &name, known);
    }
    // The deepest first: what is made in a folder changes its time.
    for (parent, at, meta) in plan.folders.iter().rev() {
        let known = Known { what: What::Folder(at.folder), ..fill.furnish_folder(&at.names, meta)? };
        index.set(*parent, at.names.last().map_or(&[][..], |name| &**name), known);
    }
    let Known { meta, stamp, .. } = fill.furnish_folder(&[], &wanted.meta)?;
    (index.root, index.root_stamp) = (meta, stamp);
    let Made { bytes, cloned, copied, .. } = made;
    Ok(Filled { index, left: plan.left, made: count, bytes, cloned, copied })
}

impl Fill<'_> {
    fn open(&self, names: &[Name]) -> Result<OwnedFd> {
        beneath::folder(self.root, names).map_err(WorkspaceError::of("open", &path(names)))
    }

    /// Makes all folders and lists what is to be in them.
    fn folders(&self, index: &mut Index, wanted: &Entry) -> Result<Plan> {
        let mut plan = Plan::default();
        let donor = self.donor.map(|_| ROOT);
        let mut rest: Vec<(At, Digest)> = Vec::new();
        rest.extend(read::root_folder(wanted).map(|digest| (At { folder: ROOT, names: [].into(), donor }, digest)));
        while let Some((at, digest)) = rest.pop() {
            let dir = self.open(&at.names)?;
            let mut slice = Vec::new();
            for entry in entries(self.objects, digest)? {
                let inner = || at.names.iter().cloned().chain([entry.name.clone()]).collect::<Arc<[Name]>>();
                match &entry.node {
                    Node::Missing { .. } => plan.left.push(path(&inner())),
                    Node::Folder { digest } => {
                        let names = inner();
                        fault::point("workspace.fill.folder")
                            .and_then(|()| Ok(mkdirat(&dir, &*entry.name, Mode::S_IRWXU)?))
                            .map_err(|error| WorkspaceError::io("make", &path(&names), error))?;
                        let donor = self.donor.zip(at.donor).and_then(|(donor, id)| donor.folder(id, &entry.name));
                        let inner = At { folder: index.make_folder(at.folder, &entry.name), names, donor };
                        plan.folders.push((at.folder, inner.clone(), entry.meta.clone()));
                        rest.push((inner, *digest));
                    }
                    Node::File { group: Some(group), .. } => {
                        plan.linked.entry(*group).or_default().push((at.clone(), entry));
                    }
                    Node::File { .. } | Node::Symlink { .. } | Node::Fifo => slice.push(entry),
                }
                if slice.len() == SLICE {
                    plan.slices.push(Slice { at: at.clone(), entries: std::mem::take(&mut slice) });
                }
            }
            if !slice.is_empty() {
                plan.slices.push(Slice { at, entries: slice });
            }
        }
        Ok(plan)
    }

    /// Makes everything but folders and files with several names.
    fn files(&self, slices: &[Slice]) -> Result<Made> {
        let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        let work = || -> Result<Made> {
            let mut made = Made::default();
            while let Some(slice) = slices.get(next.fetch_add(1, Ordering::Relaxed)) {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                if let Err(error) = self.slice(slice, &mut made) {
                    stop.store(true, Ordering::Relaxed);
                    return Err(error);
                }
            }
            Ok(made)
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(limits::WORKSPACE_FILLERS);
        let mut all = work_on_threads(threads.min(slices.len()), &work)?;
        let mut made = all.pop().unwrap_or_default();
        for other in all {
            made.known.extend(other.known);
            made.bytes += other.bytes;
            made.cloned += other.cloned;
            made.copied += other.copied;
        }
        Ok(made)
    }

    fn slice(&self, slice: &Slice, made: &mut Made) -> Result<()> {
        let dir = self.open(&slice.at.names)?;
        let donor = self.donor.zip(slice.at.donor).and_then(|(donor, id)| donor.open(id).map(|dir| (donor, id, dir)));
        for entry in &slice.entries {
            let failed =
                |error| WorkspaceError::io("make", &path(&slice.at.names).join(path(&[entry.name.clone()])), error);
            let known = match &entry.node {
                Node::File { size, content, .. } => {
                    let from =
                        donor.as_ref().and_then(|(donor, id, dir)| donor.file(*id, dir.as_fd(), &entry.name, content));
                    let file = create(dir.as_fd(), &entry.name).map_err(failed)?;
                    let done = from.map(|from| from.give(&file, *size)).transpose().map_err(failed)?;
                    match done {
                        Some(Given::Cloned) => made.cloned += 1,
                        Some(Given::Copied(bytes)) => {
                            made.copied += 1;
                            made.bytes += bytes;
                        }
                        Some(Given::Changed) | None => made.bytes += self.from_store(&file, *size, content, failed)?,
                    }
                    furnish(file.as_fd(), &entry.meta, self.owner).map_err(failed)?;
                    let what = What::File { content: content.clone(), names: 1, group: None };
                    self.note(file.as_fd(), &entry.meta, what).map_err(failed)?
                }
                Node::Symlink { target } => {
                    let target: &[u8] = target;
                    symlinkat(target, &dir, &*entry.name).map_err(|e| failed(e.into()))?;
                    self.dress(dir.as_fd(), entry, What::Symlink(target.into())).map_err(failed)?
                }
                Node::Fifo => {
                    mkfifoat(&dir, &*entry.name, Mode::S_IRUSR | Mode::S_IWUSR).map_err(|e| failed(e.into()))?;
                    let mode = Mode::from_bits_truncate(entry.meta.mode);
                    fchmodat(&dir, &*entry.name, mode, nix::sys::stat::FchmodatFlags::FollowSymlink)
                        .map_err(|e| failed(e.into()))?;
                    self.dress(dir.as_fd(), entry, What::Fifo).map_err(failed)?
                }
                Node::Folder { .. } | Node::Missing { .. } => continue,
            };
            made.known.push((slice.at.folder, entry.name.clone(), known));
        }
        Ok(())
    }

    /// Makes one file with all its names.
    fn linked(&self, names: &[(At, Entry)], made: &mut Made) -> Result<()> {
        let Some((first, entry)) = names.first() else { return Ok(()) };
        let slice = Slice { at: first.clone(), entries: vec![entry.clone()] };
        self.slice(&slice, made)?;
        let Some((_, _, Known { what: What::File { content, .. }, .. })) = made.known.pop() else { return Ok(()) };
        let home = self.open(&first.names)?;
        for (at, other) in &names[1..] {
            let link = fault::point("workspace.fill.link").and_then(|()| {
                let dir = beneath::folder(self.root, at.names.iter())?;
                Ok(linkat(&home, &*entry.name, &dir, &*other.name, AtFlags::empty())?)
            });
            link.map_err(|error| WorkspaceError::io("link", &path(&at.names), error))?;
        }
        let file = beneath::file(home.as_fd(), &entry.name);
        let file = file.map_err(WorkspaceError::of("open", &path(&first.names)))?;
        for (at, other) in names {
            let what = What::File { content: content.clone(), names: names.len() as u64, group: None };
            let known = self.note(file.as_fd(), &other.meta, what);
            let known = known.map_err(|error| WorkspaceError::io("look at", &path(&at.names), error))?;
            made.known.push((at.folder, other.name.clone(), known));
        }
        Ok(())
    }

    fn from_store(
        &self,
        file: &File,
        size: u64,
        content: &Content,
        failed: impl Fn(io::Error) -> WorkspaceError + Copy,
    ) -> Result<u64> {
        // What a donor may have begun with.
        file.set_len(0).map_err(failed)?;
        let mut written = 0;
        let mut write = |offset: u64, bytes: &[u8]| {
            written += bytes.len() as u64;
            fault::point("workspace.fill.write").and_then(|()| file.write_all_at(bytes, offset)).map_err(failed)
        };
        match content {
            Content::Inline(bytes) => write(0, bytes.as_ref())?,
            Content::Whole(digest) => write(0, &self.objects.get(*digest, limits::TREE_PIECE_BYTES as u64)?)?,
            Content::Map(digest) => {
                for piece in read::map(self.objects, *digest)?.pieces {
                    write(piece.offset, &self.objects.get(piece.digest, limits::TREE_PIECE_BYTES as u64)?)?;
                }
                file.set_len(size).map_err(failed)?;
            }
        }
        Ok(written)
    }

    /// What is known of something that was just made, as the file system has it.
    fn note(&self, file: BorrowedFd<'_>, wanted: &Meta, what: What) -> io::Result<Known> {
        let stat = beneath::look_at(file)?;
        let meta = beneath::meta(&stat, self.owner.own, wanted.attributes.clone());
        Ok(Known { stamp: beneath::stamp(&stat), settled: false, meta, what })
    }

    /// Owner and time of something that cannot be opened.
    fn dress(&self, dir: BorrowedFd<'_>, entry: &Entry, what: What) -> io::Result<Known> {
        let (name, meta) = (&*entry.name, &entry.meta);
        if self.owner.privileged {
            let (user, group) = meta.owner.unwrap_or(self.owner.own);
            let (user, group) = (Some(Uid::from_raw(user)), Some(Gid::from_raw(group)));
            fchownat(dir, name, user, group, AtFlags::AT_SYMLINK_NOFOLLOW)?;
        }
        let (access, modified) = times(meta.modified);
        utimensat(dir, name, &access, &modified, UtimensatFlags::NoFollowSymlink)?;
        let stat = beneath::look(dir, name)?;
        let meta = beneath::meta(&stat, self.owner.own, None);
        Ok(Known { stamp: beneath::stamp(&stat), settled: true, meta, what })
    }

    fn furnish_folder(&self, names: &[Name], meta: &Meta) -> Result<Known> {
        let dir = self.open(names)?;
        let furnish = fault::point("workspace.fill.furnish").and_then(|()| {
            furnish(dir.as_fd(), meta, self.owner)?;
            self.note(dir.as_fd(), meta, What::Fifo)
        });
        let known = furnish.map_err(|error| WorkspaceError::io("furnish", &path(names), error))?;
        Ok(Known { settled: true, ..known })
    }
}

/// Runs the same work on several threads, this one among them.
fn work_on_threads(threads: usize, work: &(dyn Fn() -> Result<Made> + Sync)) -> Result<Vec<Made>> {
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut all = vec![work()];
        all.extend(others.into_iter().map(|other| other.join().expect("a thread that fills does not panic")));
        all.into_iter().collect()
    })
}

fn path(names: &[Name]) -> PathBuf {
    path_of(names.iter().map(|name| &**name))
}

/// All entries of a folder.
fn entries(objects: &dyn Objects, digest: Digest) -> Result<Vec<Entry>> {
    let pages = match read::folder(objects, digest)? {
        Folder::Page(entries) => return Ok(entries),
        Folder::Pages(pages) => pages,
    };
    let mut all = Vec::new();
    for page in pages {
        if let Folder::Page(entries) = read::folder(objects, page.digest)? {
            all.extend(entries);
        }
    }
    Ok(all)
}

fn create(dir: BorrowedFd<'_>, name: &[u8]) -> io::Result<File> {
    fault::point("workspace.fill.file")?;
    let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    Ok(openat(dir, name, flags, Mode::S_IRUSR | Mode::S_IWUSR)?.into())
}

/// Gives something new its owner, attributes, mode and time, in the order in which none undoes another.
fn furnish(file: BorrowedFd<'_>, meta: &Meta, owner: Owner) -> io::Result<()> {
    if owner.privileged {
        let (user, group) = meta.owner.unwrap_or(owner.own);
        let (user, group) = (Some(Uid::from_raw(user)), Some(Gid::from_raw(group)));
        fchownat(file, "", user, group, AtFlags::AT_EMPTY_PATH)?;
    }
    for (name, value) in meta.attributes.iter().flat_map(|list| list.iter()) {
        inode::set_attribute(file, name, value)?;
    }
    fchmod(file, Mode::from_bits_truncate(meta.mode))?;
    let (access, modified) = times(meta.modified);
    Ok(futimens(file, &access, &modified)?)
}
