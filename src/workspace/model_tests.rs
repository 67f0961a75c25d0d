//! Random trees and operations: a restore or checkout of a capture yields the tree that existed at
//! the capture, as observed without this module's code.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions, Permissions};
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::testing::{Mounted, Observed, World, as_nobody, given_place, observe, same};
use super::tree::TreeId;
use super::{DriverKind, Durability, Tracker, branch, checkout, diff};
use crate::sys::inode;

/// An operation on a workspace or its tracker.
///
/// Numbers select among the existing entries.
#[derive(Debug, Clone)]
enum Op {
    Write(usize, usize, Vec<u8>),
    Large(usize, usize, usize),
    Sparse(usize, usize, u64),
    Overwrite(usize, u64, Vec<u8>),
    SneakyOverwrite(usize, u8),
    Truncate(usize, u64),
    Folder(usize, usize),
    Symlink(usize, usize, usize),
    Fifo(usize, usize),
    Link(usize, usize, usize),
    Rename(usize, usize, usize),
    Remove(usize),
    Mode(usize, u32),
    Time(usize, u32, u32),
    Attribute(usize, u8, Option<Vec<u8>>),
    Prepare,
    Capture,
    /// A capture with operations between collection and end, which are in no tree.
    CaptureBehind(Vec<Op>),
    Restore(usize),
    Reopen(bool),
}

fn deed() -> impl Strategy<Value = Op> {
    let n = || any::<usize>();
    let bytes = || prop::collection::vec(any::<u8>(), 0..600);
    prop_oneof![
        6 => (n(), n(), bytes()).prop_map(|(f, name, b)| Op::Write(f, name, b)),
        1 => (n(), n(), 1usize..2_500_000).prop_map(|(f, name, size)| Op::Large(f, name, size)),
        1 => (n(), n(), 1u64..4_000_000).prop_map(|(f, name, size)| Op::Sparse(f, name, size)),
        3 => (n(), 0u64..2000, bytes()).prop_map(|(f, at, b)| Op::Overwrite(f, at, b)),
        2 => (n(), any::<u8>()).prop_map(|(f, b)| Op::SneakyOverwrite(f, b)),
        1 => (n(), 0u64..3000).prop_map(|(f, size)| Op::Truncate(f, size)),
        4 => (n(), n()).prop_map(|(f, name)| Op::Folder(f, name)),
        1 => (n(), n(), n()).prop_map(|(f, name, to)| Op::Symlink(f, name, to)),
        1 => (n(), n()).prop_map(|(f, name)| Op::Fifo(f, name)),
        2 => (n(), n(), n()).prop_map(|(from, f, name)| Op::Link(from, f, name)),
        4 => (n(), n(), n()).prop_map(|(from, f, name)| Op::Rename(from, f, name)),
        3 => n().prop_map(Op::Remove),
        2 => (n(), any::<u32>()).prop_map(|(f, mode)| Op::Mode(f, mode)),
        2 => (n(), any::<u32>(), 0u32..1_000_000_000).prop_map(|(f, s, ns)| Op::Time(f, s, ns)),
        2 => (n(), 0u8..3, prop::option::of(bytes())).prop_map(|(f, name, b)| Op::Attribute(f, name, b)),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        35 => deed(),
        2 => Just(Op::Prepare),
        3 => Just(Op::Capture),
        2 => prop::collection::vec(deed(), 1..6).prop_map(Op::CaptureBehind),
        3 => any::<usize>().prop_map(Op::Restore),
        1 => any::<bool>().prop_map(Op::Reopen),
    ]
}

fn name(n: usize) -> PathBuf {
    // Includes a name that is not UTF-8; few enough names that some repeat.
    let names: [&[u8]; 8] = [b"a", b"b", b"c", b"\xff\xfe", b"with space", b"e\ntwo", b"f", b"\xc3\xbc"];
    PathBuf::from(std::ffi::OsString::from_vec(names[n % names.len()].to_vec()))
}

/// All existing entries: folders, files, everything.
struct There {
    folders: Vec<PathBuf>,
    files: Vec<PathBuf>,
    all: Vec<PathBuf>,
}

fn there(root: &Path) -> There {
    let mut there = There { folders: vec![root.to_owned()], files: Vec::new(), all: Vec::new() };
    let mut at = 0;
    while at < there.folders.len() {
        let mut entries: Vec<_> =
            there.folders[at].read_dir().expect("readable").map(|e| e.expect("readable")).collect();
        entries.sort_by_key(std::fs::DirEntry::file_name);
        for entry in entries {
            let kind = entry.file_type().expect("known");
            if kind.is_dir() {
                there.folders.push(entry.path());
            } else if kind.is_file() {
                there.files.push(entry.path());
            }
            there.all.push(entry.path());
        }
        at += 1;
    }
    there
}

fn pick(list: &[PathBuf], n: usize) -> Option<&Path> {
    list.get(n % list.len().max(1)).map(PathBuf::as_path)
}

struct Run<'a> {
    world: &'a World,
    tracker: Option<Tracker>,
    trees: Vec<(TreeId, Observed)>,
}

impl Run<'_> {
    fn tracker(&mut self) -> &mut Tracker {
        self.tracker.as_mut().expect("it is open but for a moment")
    }

    /// XFS overstates the data of files that are not yet on the device.
    fn settle_holes(&mut self) {
        if self.tracker().driver().kind == DriverKind::Reflink {
            nix::unistd::syncfs(File::open(self.world.workspace()).expect("opened")).expect("synced");
        }
    }

    fn capture(&mut self) {
        self.settle_holes();
        let world = self.world;
        let captured = self.tracker().capture(&world.store).expect("captured");
        self.trees.push((captured.tree, world.observe()));
    }

    fn step(&mut self, op: &Op) {
        let world = self.world;
        match op {
            Op::Prepare => {
                self.settle_holes();
                self.tracker().prepare(&world.store).expect("prepared");
            }
            Op::Capture => self.capture(),
            Op::CaptureBehind(deeds) => {
                self.settle_holes();
                let collected = self.tracker().collect(&world.store).expect("collected");
                let there = world.observe();
                for deed in deeds {
                    change(&world.workspace(), deed);
                }
                let captured = self.tracker().finish(collected).expect("finished");
                self.trees.push((captured.tree, there));
            }
            Op::Restore(n) => {
                let Some((tree, wanted)) = self.trees.get(n % self.trees.len().max(1)).cloned() else { return };
                let restored = self.tracker().restore(tree, &world.store, Durability::Process).expect("restored");
                assert_eq!(restored.left, Vec::<PathBuf>::new());
                same(&world.observe(), &wanted);
                world.nothing_is_staged();
            }
            Op::Reopen(saved) => {
                if *saved {
                    self.tracker().save().expect("saved");
                }
                self.tracker = None;
                self.tracker = Some(world.tracker());
            }
            other => drop(change(&world.workspace(), other)),
        }
    }
}

/// Applies an operation; `None` if the host refuses it, for example a move of a folder into itself.
fn change(root: &Path, op: &Op) -> Option<()> {
    let there = there(root);
    let place = |folder: usize, n: usize| pick(&there.folders, folder).map(|folder| folder.join(name(n)));
    // Opening a pipe for writing blocks until there is a reader.
    let free = |folder: usize, n: usize| {
        place(folder, n).filter(|path| path.symlink_metadata().is_err() || path.is_file() && !path.is_symlink())
    };
    match op {
        Op::Write(folder, n, bytes) => std::fs::write(free(*folder, *n)?, bytes).ok(),
        Op::Large(folder, n, size) => {
            let bytes: Vec<u8> = (0..*size).map(|at| (at / 977 + size) as u8).collect();
            std::fs::write(free(*folder, *n)?, bytes).ok()
        }
        Op::Sparse(folder, n, size) => {
            let file = File::create_new(place(*folder, *n)?).ok()?;
            file.set_len(*size).ok()?;
            file.write_all_at(b"in the middle", size / 2).ok()
        }
        Op::Overwrite(n, at, bytes) => {
            OpenOptions::new().write(true).open(pick(&there.files, *n)?).ok()?.write_all_at(bytes, *at).ok()
        }
        Op::SneakyOverwrite(n, byte) => {
            // The same length, with the time reset.
            let file = OpenOptions::new().write(true).open(pick(&there.files, *n)?).ok()?;
            let meta = file.metadata().ok()?;
            if meta.len() > 0 {
                file.write_all_at(&[*byte], meta.len() / 2).ok()?;
            }
            file.set_modified(meta.modified().ok()?).ok()
        }
        Op::Truncate(n, size) => OpenOptions::new().write(true).open(pick(&there.files, *n)?).ok()?.set_len(*size).ok(),
        Op::Folder(folder, n) => std::fs::create_dir(place(*folder, *n)?).ok(),
        Op::Symlink(folder, n, to) => std::os::unix::fs::symlink(pick(&there.all, *to)?, place(*folder, *n)?).ok(),
        Op::Fifo(folder, n) => nix::unistd::mkfifo(&place(*folder, *n)?, nix::sys::stat::Mode::S_IRUSR).ok(),
        Op::Link(from, folder, n) => std::fs::hard_link(pick(&there.files, *from)?, place(*folder, *n)?).ok(),
        Op::Rename(from, folder, n) => std::fs::rename(pick(&there.all, *from)?, place(*folder, *n)?).ok(),
        Op::Remove(n) => {
            let path = pick(&there.all, *n)?;
            if path.is_dir() && !path.is_symlink() {
                std::fs::remove_dir_all(path).ok()
            } else {
                std::fs::remove_file(path).ok()
            }
        }
        Op::Mode(n, mode) => {
            let path = pick(&there.all, *n)?;
            if path.is_symlink() {
                return None;
            }
            // An ordinary user keeps the permissions that the test itself needs.
            let least =
                if nix::unistd::Uid::effective().is_root() { 0 } else { 0o400 | if path.is_dir() { 0o300 } else { 0 } };
            std::fs::set_permissions(path, Permissions::from_mode(mode & 0o777 | least)).ok()
        }
        Op::Time(n, secs, nanos) => {
            let path = pick(&there.all, *n)?;
            if path.is_file() || path.is_dir() {
                let time = UNIX_EPOCH + Duration::new(u64::from(*secs), *nanos);
                File::open(path).ok()?.set_modified(time).ok()?;
            }
            Some(())
        }
        Op::Attribute(n, attribute, value) => {
            let path = pick(&there.all, *n)?;
            if path.is_file() || path.is_dir() {
                let (file, key) = (File::open(path).ok()?, [b"user.", [b'a' + attribute].as_slice()].concat());
                let done = match value {
                    Some(value) => inode::set_attribute(file.as_fd(), &key, value),
                    None => inode::remove_attribute(file.as_fd(), &key),
                };
                done.ok()?;
            }
            Some(())
        }
        Op::Prepare | Op::Capture | Op::CaptureBehind(_) | Op::Restore(_) | Op::Reopen(_) => None,
    }
}

/// Runs the operations, then restores every captured tree, in place and elsewhere.
fn run(world: &World, ops: &[Op]) {
    let mut run = Run { world, tracker: Some(world.tracker()), trees: Vec::new() };
    for op in ops {
        run.step(op);
    }
    run.capture();
    let trees = std::mem::take(&mut run.trees);
    for (n, (tree, wanted)) in trees.iter().enumerate().rev() {
        run.tracker().restore(*tree, &world.store, Durability::Process).expect("restored");
        same(&world.observe(), wanted);
        let again = run.tracker().capture(&world.store).expect("captured");
        assert_eq!(again.tree, *tree, "the restored tree differs");
        if n % 3 == 0 {
            let paths = world.places_of(&format!("elsewhere{n}"));
            std::fs::create_dir(&paths.workspace).expect("made");
            checkout(*tree, paths.clone(), &world.store, Durability::Process).expect("checked out");
            same(&observe(&paths.workspace), wanted);
        }
    }
    branches(world, &mut run, &trees);
    // A full walk without prior knowledge finds the same.
    let (last, _) = trees.first().expect("at least one");
    drop(run);
    let mut fresh = world.tracker_of(super::WorkspacePaths { index: world.dir.path().join("none"), ..world.paths() });
    let walked = fresh.capture(&world.store).expect("captured");
    assert_eq!(walked.tree, *last, "the tracked changes match a full walk");
    world.nothing_is_staged();
    for pair in trees.windows(2) {
        differences_are_told(world, &pair[0], &pair[1]);
    }
}

/// A workspace made from a donor is the requested tree, either the donor's own or another.
fn branches(world: &World, run: &mut Run<'_>, trees: &[(TreeId, Observed)]) {
    let kind = run.tracker().driver().kind;
    let donor = run.tracker().donor().expect("a donor").expect("a donor without unknown changes");
    for (n, (tree, wanted)) in [&trees[0], &trees[trees.len() - 1]].into_iter().enumerate() {
        let paths = world.another(&format!("branch{n}"));
        let mut snapshot = donor.snapshot(&paths).expect("taken");
        if let Some(snapshot) = &mut snapshot {
            run.tracker().record_changes(&donor, snapshot);
        }
        let donor = Some((&donor, snapshot));
        let (mut child, restored, branched) =
            branch(donor, *tree, paths.clone(), &world.store, Durability::Process).expect("branched");
        assert_eq!((restored.left, branched.snapshot), (Vec::new(), kind == DriverKind::Btrfs));
        same(&observe(&paths.workspace), wanted);
        // `observe` opened every file, so each is checked for writers, but none is read.
        let first = child.capture(&world.store).expect("captured");
        assert_eq!((first.tree, first.stats.full_scan, first.stats.read), (*tree, None, 0), "{:?}", first.stats);
        std::fs::write(paths.workspace.join("only here"), "x").expect("written");
        assert_ne!(child.capture(&world.store).expect("captured").tree, *tree);
        assert!(!world.path("only here").exists());
    }
}

fn differences_are_told(world: &World, (a, before): &(TreeId, Observed), (b, after): &(TreeId, Observed)) {
    let mut shown = BTreeSet::new();
    for change in diff(&world.store, *a, *b).expect("compared") {
        let change = change.expect("compared");
        shown.insert(change.path.clone());
        if let super::ChangeKind::Renamed { from } = change.kind {
            shown.insert(from);
        }
    }
    let really: BTreeSet<PathBuf> =
        before.keys().chain(after.keys()).filter(|path| before.get(*path) != after.get(*path)).cloned().collect();
    let unsaid: Vec<_> = really.difference(&shown).collect();
    // A chmod of one name changes all hard links, so more changes may be reported than each name
    // shows.
    assert!(unsaid.is_empty(), "{unsaid:?}");
}

/// A constructor for a workspace, and its expected driver.
type Making<'a> = (&'a dyn Fn() -> World, DriverKind);

fn check((make, kind): Making<'_>, cases: u32) {
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new(config).run(&prop::collection::vec(op(), 1..60), |ops| {
        let world = make();
        assert_eq!(world.tracker().driver().kind, kind);
        run(&world, &ops);
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn tree_round_trips_on_disk() {
    check((&World::new, DriverKind::Tracked), 24);
}

#[test]
fn tree_round_trips_on_tmpfs() {
    check((&|| World::at(Path::new("/dev/shm")), DriverKind::Tracked), 24);
}

/// A file system in an image, with a directory for an unprivileged user.
fn mounted(kind: &str, options: &str) -> Option<(Mounted, PathBuf)> {
    match Mounted::with(kind, &["-q"], options) {
        Ok(mounted) => {
            let theirs = mounted.path().join("theirs");
            std::fs::create_dir(&theirs).expect("made");
            Some((mounted, theirs))
        }
        Err(why) => {
            eprintln!("ignored, because this host cannot mount {kind}: {why}");
            None
        }
    }
}

#[test]
fn clones_round_trip_on_xfs() {
    let Some((mounted, theirs)) = mounted("xfs", "loop") else { return };
    check((&|| World::at(&mounted.path()), DriverKind::Reflink), 6);
    check((&|| World::at(&mounted.path()).holding_all(0), DriverKind::Reflink), 8);
    as_nobody("workspace::model_tests::clones_round_trip_as_user", &theirs);
}

#[test]
fn clones_round_trip_on_btrfs() {
    let Some((mounted, theirs)) = mounted("btrfs", "loop") else { return };
    check((&|| World::at(&mounted.path()).holding_all(0), DriverKind::Reflink), 8);
    as_nobody("workspace::model_tests::clones_round_trip_as_user", &theirs);
}

#[test]
fn snapshots_round_trip_on_btrfs() {
    let Some((mounted, theirs)) = mounted("btrfs", "loop,user_subvol_rm_allowed") else { return };
    check((&|| World::in_subvolume(&mounted.path()), DriverKind::Btrfs), 6);
    check((&|| World::in_subvolume(&mounted.path()).holding_all(1), DriverKind::Btrfs), 8);
    as_nobody("workspace::model_tests::snapshots_round_trip_as_user", &theirs);
}

/// Runs as an ordinary user, for whom Btrfs does not remove a snapshot at once.
#[test]
fn btrfs_without_removal_right() {
    let Some((_mounted, theirs)) = mounted("btrfs", "loop") else { return };
    as_nobody("workspace::model_tests::snapshots_round_trip_as_user", &theirs);
}

#[test]
#[ignore = "run by tests that make the file system"]
fn clones_round_trip_as_user() {
    check((&|| World::at(&given_place()).holding_all(0), DriverKind::Reflink), 6);
}

#[test]
#[ignore = "run by tests that make the file system"]
fn snapshots_round_trip_as_user() {
    check((&|| World::in_subvolume(&given_place()).holding_all(1), DriverKind::Btrfs), 6);
}
