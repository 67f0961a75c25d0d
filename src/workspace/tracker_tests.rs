//! Captures: their cost, and the changes that they must detect despite misleading metadata.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::PathBuf;

use super::testing::{Mounted, World, observe, same};
use super::{
    Change, ChangeKind, Changed, Durability, FullScanReason, Reason, Restored, Tracker, WorkspaceError, checkout, diff,
    reach,
};
use crate::sys::fault::tests::with_fault;
use crate::sys::inode::tests::Mapping;

pub(super) fn changes(world: &World, a: super::TreeId, b: super::TreeId) -> Vec<(String, ChangeKind)> {
    let shown = diff(&world.store, a, b).expect("compared");
    shown
        .map(|change| change.map(|Change { path, kind }| (path.display().to_string(), kind)).expect("compared"))
        .collect()
}

#[test]
fn capture_cost_follows_changes() {
    let world = World::new();
    for folder in 0..30 {
        std::fs::create_dir(world.path(&format!("d{folder}"))).expect("made");
        for file in 0..30 {
            world.write(&format!("d{folder}/f{file}"), format!("{folder} {file}").repeat(100));
        }
    }
    let mut tracker = world.tracker();
    let first = tracker.capture(&world.store).expect("captured");
    assert_eq!((first.stats.full_scan, first.stats.read, first.entries), (Some(FullScanReason::First), 900, 930));
    assert_eq!(tracker.watched(), 31);
    let second = tracker.capture(&world.store).expect("captured");
    assert_eq!((second.stats.full_scan, second.stats.read, second.tree), (None, 0, first.tree));
    for folder in 0..5 {
        world.write(&format!("d{folder}/f7"), "new");
    }
    let third = tracker.capture(&world.store).expect("captured");
    assert_eq!((third.stats.full_scan, third.stats.read), (None, 5));
    assert!(third.stats.examined < 20, "{:?}", third.stats);
    // A restore has the same cost.
    let back = tracker.restore(first.tree, &world.store, Durability::Process).expect("restored");
    assert_eq!(back.changed, 5 + 5, "five files and their folders");
    assert_eq!(back.stats.full_scan, None);
    let again = tracker.capture(&world.store).expect("captured");
    assert_eq!((again.tree, again.stats.full_scan, again.stats.read), (first.tree, None, 0));
}

#[test]
fn large_folder_is_paged() {
    let world = World::at(std::path::Path::new("/dev/shm"));
    for file in 0..100_000 {
        File::create(world.path(&format!("f{file:06}"))).expect("made");
    }
    let mut tracker = world.tracker();
    let first = tracker.capture(&world.store).expect("captured");
    let count = |tree| {
        let mut seen = std::collections::HashSet::new();
        let mut note = |digest| {
            seen.insert(digest);
            Ok(())
        };
        reach(&world.store, tree, &mut super::Seen::default(), &mut note).expect("whole");
        seen
    };
    let before = count(first.tree);
    assert!(before.len() > 200, "{} objects", before.len());
    world.write("f050000", "changed");
    std::fs::remove_file(world.path("f020000")).expect("removed");
    std::fs::write(world.path("f0300005"), "").expect("written");
    let second = tracker.capture(&world.store).expect("captured");
    let new = count(second.tree).difference(&before).count();
    assert!(new <= 3 + 2 + 2, "{new} new objects");
    let shown = changes(&world, first.tree, second.tree);
    assert_eq!(shown.len(), 4, "{shown:?}");
    tracker.restore(first.tree, &world.store, Durability::Process).expect("restored");
    assert_eq!(tracker.capture(&world.store).expect("captured").tree, first.tree);
    // Pages do not depend on the order of the changes.
    std::fs::remove_file(world.path("f050000")).expect("removed");
    let third = tracker.capture(&world.store).expect("captured");
    let mut fresh =
        Tracker::open(super::WorkspacePaths { index: world.path("../none"), ..world.paths() }).expect("opened");
    assert_eq!(fresh.capture(&world.store).expect("captured").tree, third.tree);
}

#[test]
fn tree_diff_reports_change_kinds() {
    let world = World::new();
    for name in ["content", "mode", "time", "kind", "gone", "moved", "same"] {
        world.write(name, name.repeat(200));
    }
    let mut tracker = world.tracker();
    let a = tracker.capture(&world.store).expect("captured").tree;
    let touch = |name: &str, secs| {
        let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(secs);
        File::options().write(true).open(world.path(name)).and_then(|f| f.set_modified(time)).expect("set");
    };
    world.write("content", "other");
    std::fs::set_permissions(world.path("mode"), std::os::unix::fs::PermissionsExt::from_mode(0o711)).expect("set");
    touch("time", 5);
    std::fs::remove_file(world.path("kind")).expect("removed");
    std::fs::create_dir(world.path("kind")).expect("made");
    std::fs::remove_file(world.path("gone")).expect("removed");
    std::fs::rename(world.path("moved"), world.path("kind/here")).expect("renamed");
    world.write("new", "new");
    let b = tracker.capture(&world.store).expect("captured").tree;
    let shown: std::collections::BTreeMap<_, _> = changes(&world, a, b).into_iter().collect();
    let changed = |path: &str| match &shown[path] {
        ChangeKind::Changed(changed) => *changed,
        other => panic!("{path}: {other:?}"),
    };
    assert_eq!(changed("content"), Changed { content: true, modified: true, ..Changed::default() });
    assert_eq!(changed("mode"), Changed { mode: true, ..Changed::default() });
    assert_eq!(changed("time"), Changed { modified: true, ..Changed::default() });
    assert_eq!(shown["kind"], ChangeKind::Kind);
    assert_eq!(shown["gone"], ChangeKind::Removed);
    assert_eq!(shown["kind/here"], ChangeKind::Renamed { from: "moved".into() });
    assert_eq!(shown["new"], ChangeKind::Added);
    assert!(!shown.contains_key("same") && !shown.contains_key("moved"));
}

#[test]
fn uncaptured_files_are_reported() {
    let world = World::new();
    let _socket = std::os::unix::net::UnixListener::bind(world.path("socket")).expect("bound");
    world.write("set-id", "x");
    std::fs::set_permissions(world.path("set-id"), std::os::unix::fs::PermissionsExt::from_mode(0o4755)).expect("set");
    let mut tracker = world.tracker();
    let captured = tracker.capture(&world.store).expect("captured");
    let named: Vec<_> = captured.not_captured.iter().map(|n| (n.path.display().to_string(), n.reason)).collect();
    assert_eq!(named, [("set-id".to_owned(), Reason::SetId), ("socket".to_owned(), Reason::Socket)]);
    assert_eq!(captured.not_captured_count, 2);
    // An existing socket stays; the set-uid bit is not restored.
    world.write("set-id", "y");
    let Restored { left, .. } = tracker.restore(captured.tree, &world.store, Durability::Power).expect("restored");
    assert_eq!(left, Vec::<PathBuf>::new());
    assert!(world.path("socket").exists());
    assert_eq!(world.path("set-id").metadata().expect("there").mode() & 0o7777, 0o755);
    // A checkout cannot create the socket and reports it.
    let paths = world.places_of("elsewhere");
    std::fs::create_dir(&paths.workspace).expect("made");
    let (_, restored) = checkout(captured.tree, paths.clone(), &world.store, Durability::Process).expect("checked out");
    assert_eq!(restored.left, [PathBuf::from("socket")]);
    let again = checkout(captured.tree, paths, &world.store, Durability::Process).expect_err("it is not empty");
    assert!(matches!(again, WorkspaceError::NotEmpty { .. }));
}

#[test]
fn walk_sees_same_tick_changes() {
    let world = World::new();
    for round in 0..20 {
        world.write("f", "one");
        let before = world.path("f").metadata().expect("there");
        let mut tracker = world.tracker();
        let first = tracker.capture(&world.store).expect("captured").tree;
        tracker.save().expect("saved");
        drop(tracker);
        // The same length and inode, immediately, and often the same time stamp.
        OpenOptions::new().write(true).open(world.path("f")).expect("opened").write_all(b"two").expect("written");
        File::options()
            .write(true)
            .open(world.path("f"))
            .and_then(|f| f.set_modified(before.modified().expect("known")))
            .expect("set");
        let captured = world.tracker().capture(&world.store).expect("captured");
        assert_eq!(captured.stats.full_scan, Some(FullScanReason::Reopened));
        assert_ne!(captured.tree, first, "round {round}");
        let there = world.observe();
        let mut tracker = world.tracker();
        tracker.restore(captured.tree, &world.store, Durability::Process).expect("restored");
        same(&world.observe(), &there);
    }
}

/// Stamps that were too young at the parent's capture and have aged since need no wait in the
/// child.
#[test]
fn saved_index_trusts_aged_stamps() {
    let world = World::new();
    for file in 0..20 {
        world.write(&format!("f{file}"), "x".repeat(5000));
    }
    let mut tracker = world.tracker();
    assert_eq!(tracker.capture(&world.store).expect("captured").stats.read, 20);
    std::thread::sleep(std::time::Duration::from_millis(120));
    tracker.save_made().expect("saved");
    drop(tracker);
    assert_eq!(world.tracker().capture(&world.store).expect("captured").stats.read, 0);
}

#[test]
fn tracker_index_survives_restart() {
    let world = World::new();
    for file in 0..50 {
        world.write(&format!("f{file}"), format!("{file}").repeat(1000));
    }
    // The modification time does not matter, even if it lies in the future.
    let ahead = std::time::SystemTime::now() + std::time::Duration::from_hours(24);
    File::options().write(true).open(world.path("f8")).and_then(|f| f.set_modified(ahead)).expect("set");
    // Old enough to be trusted.
    std::thread::sleep(std::time::Duration::from_millis(120));
    let mut tracker = world.tracker();
    tracker.capture(&world.store).expect("captured");
    tracker.save().expect("saved");
    drop(tracker);
    world.write("f7", "changed");
    let mut tracker = world.tracker();
    let second = tracker.capture(&world.store).expect("captured");
    assert_eq!((second.stats.full_scan, second.stats.read), (Some(FullScanReason::Reopened), 1));
    world.write("f7", "7".repeat(1000));
    // Files whose content is missing in the store are read again.
    let folder = tempfile::tempdir().expect("a folder");
    let empty = crate::store::Store::open(&folder.path().join("store")).expect("a store");
    drop(tracker);
    let third = world.tracker().capture(&empty).expect("captured");
    reach(&empty, third.tree, &mut crate::workspace::Seen::default(), &mut |digest| {
        assert!(empty.contains(digest));
        Ok(())
    })
    .expect("whole");
    let index = world.paths().index;
    let good = std::fs::read(&index).expect("there");
    for at in [0, 5, good.len() / 2, good.len() - 1] {
        let mut bad = good.clone();
        bad[at] ^= 1;
        std::fs::write(&index, bad).expect("written");
        let captured = world.tracker().capture(&empty).expect("captured");
        assert_eq!((captured.stats.full_scan, captured.tree), (Some(FullScanReason::Unusable), third.tree));
    }
}

/// Renames a file until the notification queue overflows: each rename queues two notifications.
///
/// Returns the last number of the file's name.
fn storm(world: &World) -> usize {
    let most = std::fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").expect("there");
    let most = most.trim().parse().expect("a number");
    world.write("storm0", "storm");
    for n in 0..most {
        std::fs::rename(world.path(&format!("storm{n}")), world.path(&format!("storm{}", n + 1))).expect("renamed");
    }
    most
}

#[test]
fn reused_inode_is_watched() {
    // A file system of its own, on which no other process takes the inode number.
    let mounted = match Mounted::new("ext4", &["-q"]) {
        Ok(mounted) => mounted,
        Err(why) => return eprintln!("ignored, because this host cannot mount ext4: {why}"),
    };
    let world = World::at(&mounted.path());
    std::fs::create_dir(world.path("d")).expect("made");
    let mut tracker = world.tracker();
    tracker.capture(&world.store).expect("captured");
    storm(&world);
    let number = || world.path("d").metadata().expect("there").ino();
    let before = number();
    // The queue is full, so the end of this watch is not reported.
    std::fs::remove_dir(world.path("d")).expect("removed");
    std::fs::create_dir(world.path("d")).expect("made");
    assert_eq!(number(), before, "ext4 reuses the inode number");
    let captured = tracker.capture(&world.store).expect("captured");
    assert_eq!((captured.stats.full_scan, captured.entries), (Some(FullScanReason::Overflow), 2));
    world.write("d/f", "shown");
    let captured = tracker.capture(&world.store).expect("captured");
    assert_eq!((captured.stats.full_scan, captured.entries), (None, 3));
}

#[test]
fn stat_pass_cost_ignores_depth() {
    const FOLDERS: usize = 3000;
    let cost = |world: &World| {
        let mut tracker = world.tracker();
        tracker.capture(&world.store).expect("captured");
        let once = |_| {
            // A short-lived file.
            world.write("passing", "");
            std::fs::remove_file(world.path("passing")).expect("removed");
            let captured = tracker.capture(&world.store).expect("captured");
            assert_eq!((captured.stats.full_scan, captured.entries), (None, 2 * FOLDERS as u64));
            captured.stats.pause
        };
        (0..3).map(once).min().expect("three")
    };
    let make = |at: &std::os::fd::OwnedFd, name: &str| {
        nix::sys::stat::mkdirat(at, name, nix::sys::stat::Mode::S_IRWXU).expect("made");
        let folder = super::beneath::child(at.as_fd(), name.as_bytes()).expect("opened");
        let flags = nix::fcntl::OFlag::O_CREAT | nix::fcntl::OFlag::O_RDWR;
        drop(nix::fcntl::openat(&folder, "f", flags, nix::sys::stat::Mode::S_IRWXU).expect("made"));
        folder
    };
    let (flat, deep) = (World::new(), World::new());
    let root = |world: &World| std::os::fd::OwnedFd::from(File::open(world.workspace()).expect("opened"));
    (0..FOLDERS).for_each(|n| drop(make(&root(&flat), &format!("d{n}"))));
    (0..FOLDERS).fold(root(&deep), |at, _| make(&at, "d"));
    std::thread::sleep(std::time::Duration::from_millis(120));
    let (flat, within) = (cost(&flat), cost(&deep));
    // The recursive removal of the standard library would keep too many directories open.
    std::process::Command::new("rm").arg("-rf").arg(deep.workspace()).status().expect("removed");
    assert!(within < 4 * flat, "{flat:?} flat, {within:?} deep");
}

#[test]
fn overflow_forces_walk() {
    let world = World::new();
    world.write("kept", "x");
    let mut tracker = world.tracker();
    tracker.capture(&world.store).expect("captured");
    let most = storm(&world);
    let captured = tracker.capture(&world.store).expect("captured");
    assert_eq!((captured.stats.full_scan, captured.entries), (Some(FullScanReason::Overflow), 2));
    let calm = tracker.capture(&world.store).expect("captured");
    assert_eq!((calm.stats.full_scan, calm.tree), (None, captured.tree));
    // Notifications that are read in time do not overflow.
    for n in (1..=most).rev() {
        std::fs::rename(world.path(&format!("storm{n}")), world.path(&format!("storm{}", n - 1))).expect("renamed");
        if n % 1000 == 0 {
            tracker.drain();
        }
    }
    let captured = tracker.capture(&world.store).expect("captured");
    assert_eq!((captured.stats.full_scan, captured.entries), (None, 2));
    assert!(world.path("storm0").exists());
}

#[test]
fn silent_mapped_write_is_captured() {
    let world = World::new();
    world.write("f", [b'a'; 4096]);
    let mut tracker = world.tracker();
    tracker.capture(&world.store).expect("captured");
    let mut mapping = Mapping::of(&world.path("f"));
    for byte in [b'b', b'c', b'd'] {
        mapping.write(byte);
        let captured = tracker.capture(&world.store).expect("captured");
        let paths = world.places_of(&format!("as-of-{byte}"));
        std::fs::create_dir(&paths.workspace).expect("made");
        checkout(captured.tree, paths.clone(), &world.store, Durability::Process).expect("checked out");
        assert_eq!(std::fs::read(paths.workspace.join("f")).expect("there")[0], byte);
    }
    drop(mapping);
    tracker.capture(&world.store).expect("captured");
    let quiet = tracker.capture(&world.store).expect("captured");
    assert_eq!(quiet.stats.read, 0, "the file has no writers");
}

#[test]
fn own_opens_need_no_examination() {
    let world = World::new();
    (0..50).for_each(|n| std::fs::create_dir(world.path(&format!("d{n}"))).expect("made"));
    (0..2_500).for_each(|n| world.write(&format!("d{}/f{n}", n % 50), n.to_string()));
    let mut tracker = world.tracker();
    let prepared = tracker.prepare(&world.store).expect("prepared");
    assert!(prepared.read >= 2_500, "{prepared:?}");
    let captured = tracker.capture(&world.store).expect("captured");
    assert_eq!((captured.stats.full_scan, captured.stats.examined), (None, 0), "{:?}", captured.stats);
    // An open by another process is not ignored.
    std::fs::File::open(world.path("d7/f7")).expect("opened");
    tracker.prepare(&world.store).expect("prepared");
    std::fs::File::open(world.path("d8/f8")).expect("opened");
    let captured = tracker.capture(&world.store).expect("captured");
    assert_eq!(captured.stats.examined, 1, "{:?}", captured.stats);
}

#[test]
fn changing_file_is_reported() {
    let world = World::new();
    world.write("f", vec![1; 8 << 20]);
    let path = world.path("f");
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let writer = std::thread::spawn({
        let stop = stop.clone();
        move || {
            let mut file = OpenOptions::new().append(true).open(path).expect("opened");
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                file.write_all(b"more").expect("written");
            }
        }
    });
    let mut tracker = world.tracker();
    // A running kernel may write; a frozen one must not.
    tracker.prepare(&world.store).expect("prepared");
    // The scheduler may suspend the writer during one of the attempts.
    let error = (0..100).find_map(|_| tracker.capture(&world.store).err()).expect("a file that changes");
    assert!(matches!(&error, WorkspaceError::Changing { path } if path == std::path::Path::new("f")), "{error}");
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    writer.join().expect("ended");
    let captured = tracker.capture(&world.store).expect("captured");
    assert_eq!(captured.stats.full_scan, Some(FullScanReason::Unfinished));
    let there = world.observe();
    world.write("f", "");
    tracker.restore(captured.tree, &world.store, Durability::Process).expect("restored");
    same(&world.observe(), &there);
}

#[test]
fn next_capture_is_whole() {
    let world = World::new();
    world.write("f", vec![1; 5000]);
    let mut tracker = world.tracker();
    for fault in ["workspace.file.keep=eio", "store.pack.write=enospc", "store.pack.sync=eio"] {
        world.write("f", format!("{fault} {}", "x".repeat(5000)));
        with_fault(fault, || tracker.capture(&world.store).expect_err("armed"));
        let captured = tracker.capture(&world.store).expect("captured");
        reach(&world.store, captured.tree, &mut crate::workspace::Seen::default(), &mut |digest| {
            assert!(world.store.contains(digest), "{fault}");
            Ok(())
        })
        .expect("whole");
    }
    // A capture that was collected but not finished.
    world.write("f", vec![3; 5000]);
    drop(tracker.collect(&world.store).expect("collected"));
    let captured = tracker.capture(&world.store).expect("captured");
    assert_eq!(captured.stats.full_scan, Some(FullScanReason::Unfinished));
    let there = world.observe();
    world.write("f", "");
    tracker.restore(captured.tree, &world.store, Durability::Process).expect("restored");
    same(&world.observe(), &there);
}

#[test]
fn paths_beyond_path_max_work() {
    let world = World::new();
    let name = "d".repeat(200);
    let mut at = std::os::fd::OwnedFd::from(File::open(world.workspace()).expect("opened"));
    for _ in 0..60 {
        nix::sys::stat::mkdirat(&at, name.as_str(), nix::sys::stat::Mode::S_IRWXU).expect("made");
        at = super::beneath::child(at.as_fd(), name.as_bytes()).expect("opened");
    }
    let flags = nix::fcntl::OFlag::O_CREAT | nix::fcntl::OFlag::O_RDWR;
    let deep = nix::fcntl::openat(&at, "f", flags, nix::sys::stat::Mode::S_IRWXU).expect("made");
    File::from(deep).write_all_at(b"deep", 0).expect("written");
    let mut tracker = world.tracker();
    // Old enough to be trusted.
    std::thread::sleep(std::time::Duration::from_millis(120));
    let first = tracker.capture(&world.store).expect("captured");
    assert_eq!((first.entries, first.not_captured_count), (61, 0));
    std::fs::rename(world.path(&name), world.path("moved")).expect("renamed");
    let second = tracker.capture(&world.store).expect("captured");
    assert_eq!((second.entries, second.stats.read), (61, 0), "moved files are not read again");
    tracker.restore(first.tree, &world.store, Durability::Process).expect("restored");
    assert_eq!(tracker.capture(&world.store).expect("captured").tree, first.tree);
    world.nothing_is_staged();
    assert_eq!(observe(world.dir.path().join("workspace.staging").as_path()).len(), 1);
}

#[test]
fn open_clears_stale_staging() {
    let world = World::new();
    world.write("kept", "here");
    let staging = world.paths().staging;
    std::fs::create_dir_all(staging.join("d-left/deeper")).expect("made");
    std::fs::write(staging.join("d-left/deeper/f"), "left").expect("written");
    std::fs::hard_link(world.path("kept"), staging.join("g-left")).expect("linked");
    let mut tracker = world.tracker();
    world.nothing_is_staged();
    let captured = tracker.capture(&world.store).expect("captured");
    assert_eq!((captured.entries, captured.not_captured_count), (1, 0));
}

/// A write by either name, with the same length and a reset time, is captured for both, although
/// the tracker did not know the second link.
#[test]
fn second_name_write_is_captured() {
    for (written, settled, prepared) in [("a", true, false), ("b", true, false), ("a", false, true), ("b", false, true)]
    {
        let world = World::new();
        world.write("a", "1".repeat(3000));
        if settled {
            std::thread::sleep(std::time::Duration::from_millis(120));
        }
        let mut tracker = world.tracker();
        match prepared {
            true => drop(tracker.prepare(&world.store).expect("prepared")),
            false => drop(tracker.capture(&world.store).expect("captured")),
        }
        std::fs::hard_link(world.path("a"), world.path("b")).expect("linked");
        let file = std::fs::OpenOptions::new().write(true).open(world.path(written)).expect("opened");
        let before = file.metadata().expect("there").modified().expect("a time");
        std::os::unix::fs::FileExt::write_all_at(&file, b"2", 1500).expect("written");
        file.set_modified(before).expect("set back");
        drop(file);
        let captured = tracker.capture(&world.store).expect("captured");
        let paths = world.places_of("elsewhere");
        std::fs::create_dir(&paths.workspace).expect("made");
        checkout(captured.tree, paths.clone(), &world.store, Durability::Process).expect("checked out");
        same(&observe(&paths.workspace), &world.observe());
    }
}
