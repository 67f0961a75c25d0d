//! Guarantees of each driver beyond a correct tree: how files are held, that the pause does not
//! read them, and that nothing is left behind.

use std::fs::{File, FileTimes, OpenOptions};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::time::Duration;

use super::testing::{Mounted, World, as_nobody, given_place, observe, same};
use super::{DriverKind, Durability, PreparedWorkspace, Tracker, WorkspaceError, branch, checkout};
use crate::sys::btrfs;
use crate::sys::fault::tests::with_fault;
use crate::sys::inode::tests::Mapping;

fn mounted(kind: &str, options: &str) -> Option<Mounted> {
    Mounted::with(kind, &["-q"], options)
        .map_err(|why| eprintln!("ignored, because this host cannot mount {kind}: {why}"))
        .ok()
}

/// Runs a check in a workspace of each driver.
fn in_each(check: impl Fn(&World, DriverKind)) {
    check(&World::new(), DriverKind::Tracked);
    if let Some(mounted) = mounted("xfs", "loop") {
        check(&World::at(&mounted.path()), DriverKind::Reflink);
    }
    if let Some(mounted) = mounted("btrfs", "loop") {
        check(&World::at(&mounted.path()), DriverKind::Reflink);
        check(&World::in_subvolume(&mounted.path()), DriverKind::Btrfs);
        check(&World::in_subvolume(&mounted.path()).holding_all(1), DriverKind::Btrfs);
    }
}

/// The tree is the state at collection, whatever is written, truncated, replaced or removed before
/// the capture ends.
#[test]
fn later_writes_are_not_captured() {
    in_each(|world, kind| {
        let mut tracker = world.tracker();
        assert_eq!(tracker.driver().kind, kind);
        for (name, size) in [("small", 3_000), ("middle", 300_000), ("large", 3_000_000), ("gone", 400_000)] {
            world.write(name, vec![b'1'; size]);
        }
        File::create(world.path("holes")).and_then(|file| file.set_len(5 << 20)).expect("made");
        OpenOptions::new()
            .write(true)
            .open(world.path("holes"))
            .expect("opened")
            .write_all_at(b"x", 2 << 20)
            .expect("written");
        std::fs::hard_link(world.path("middle"), world.path("again")).expect("linked");
        let there = world.observe();
        let collected = tracker.collect(&world.store).expect("collected");
        let stats = collected.stats().clone();
        assert!(stats.read <= 1, "{kind:?}: without writers at most the sparse file is read: {stats:?}");
        assert_eq!(stats.cloned > 0, kind != DriverKind::Tracked, "{kind:?}: {stats:?}");
        for name in ["small", "middle", "large", "holes"] {
            OpenOptions::new()
                .write(true)
                .open(world.path(name))
                .expect("opened")
                .write_all_at(b"2", 1000)
                .expect("written");
        }
        std::fs::remove_file(world.path("gone")).expect("removed");
        File::options().write(true).open(world.path("large")).and_then(|f| f.set_len(10)).expect("cut");
        let captured = tracker.finish(collected).expect("finished");
        let paths = world.places_of("elsewhere");
        std::fs::create_dir(&paths.workspace).expect("made");
        checkout(captured.tree, paths.clone(), &world.store, Durability::Process).expect("checked out");
        same(&observe(&paths.workspace), &there);
        // The next capture holds the later changes.
        let next = tracker.capture(&world.store).expect("captured");
        assert_eq!(next.stats.full_scan, None);
        let later = world.observe();
        tracker.restore(captured.tree, &world.store, Durability::Process).expect("restored");
        same(&world.observe(), &there);
        tracker.restore(next.tree, &world.store, Durability::Process).expect("restored");
        same(&world.observe(), &later);
        world.nothing_is_staged();
    });
}

/// A mapping of a closed file causes no notification; every capture sees its writes in every
/// driver, at the cost of one file.
#[test]
fn drivers_capture_mapped_writes() {
    in_each(|world, _| {
        for n in 0..100 {
            world.write(&format!("f{n}"), vec![b'a'; 300_000]);
        }
        let mut tracker = world.tracker();
        tracker.capture(&world.store).expect("captured");
        let mut mapping = Mapping::of(&world.path("f7"));
        for byte in *b"bcd" {
            mapping.write(byte);
            tracker.prepare(&world.store).expect("prepared");
            mapping.write(byte.to_ascii_uppercase());
            let collected = tracker.collect(&world.store).expect("collected");
            mapping.write(b'?');
            let captured = tracker.finish(collected).expect("finished");
            assert_eq!((captured.stats.full_scan, captured.stats.read), (None, 1));
            let paths = world.places_of(&format!("as-of-{byte}"));
            std::fs::create_dir(&paths.workspace).expect("made");
            checkout(captured.tree, paths.clone(), &world.store, Durability::Process).expect("checked out");
            assert_eq!(std::fs::read(paths.workspace.join("f7")).expect("there")[0], byte.to_ascii_uppercase());
        }
        drop(mapping);
        tracker.capture(&world.store).expect("captured");
        assert_eq!(tracker.capture(&world.store).expect("captured").stats.read, 0);
    });
}

/// A writer that is not frozen, for example another process with a writable mount, is detected with
/// every driver.
#[test]
fn drivers_report_unstopped_writer() {
    in_each(|world, _| {
        world.write("f", vec![1; 1 << 20]);
        let path = world.path("f");
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let writer = std::thread::spawn({
            let stop = stop.clone();
            move || {
                let file = OpenOptions::new().write(true).open(path).expect("opened");
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    file.write_all_at(b"more", 1 << 19).expect("written");
                }
            }
        });
        let mut tracker = world.tracker();
        let error = (0..200).find_map(|_| tracker.capture(&world.store).err());
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        writer.join().expect("ended");
        let error = error.expect("the file changes");
        assert!(matches!(&error, WorkspaceError::Changing { path } if path == Path::new("f")), "{error}");
        let captured = tracker.capture(&world.store).expect("captured");
        let there = world.observe();
        world.write("f", "");
        tracker.restore(captured.tree, &world.store, Durability::Process).expect("restored");
        same(&world.observe(), &there);
    });
}

#[test]
fn capture_survives_clone_error() {
    let Some(mounted) = mounted("btrfs", "loop") else { return };
    let world = World::in_subvolume(&mounted.path()).holding_all(1);
    let mut tracker = world.tracker();
    for fault in [
        "workspace.clone.make=enospc",
        "workspace.snapshot.make=eio",
        "workspace.snapshot.remove=eio",
        "workspace.file.read=eio",
    ] {
        for n in 0..5 {
            world.write(&format!("f{n}"), format!("{fault} {n}").repeat(100));
        }
        with_fault(fault, || tracker.capture(&world.store).expect_err("armed"));
        let captured = tracker.capture(&world.store).expect("captured");
        let there = world.observe();
        world.write("f1", "");
        tracker.restore(captured.tree, &world.store, Durability::Process).expect("restored");
        same(&world.observe(), &there);
        world.nothing_is_staged();
    }
}

/// Opening a workspace removes the snapshot that a killed process left.
#[test]
fn leftover_snapshot_is_removed() {
    for options in ["loop", "loop,user_subvol_rm_allowed"] {
        let Some(mounted) = mounted("btrfs", options) else { return };
        leave_and_open(&mounted.path());
        let theirs = mounted.path().join("theirs");
        std::fs::create_dir(&theirs).expect("made");
        as_nobody("workspace::driver_tests::leftover_snapshot_as_user", &theirs);
    }
}

#[test]
#[ignore = "run by a test that makes the file system"]
fn leftover_snapshot_as_user() {
    leave_and_open(&given_place());
}

fn leave_and_open(place: &Path) {
    let world = World::in_subvolume(place);
    world.write("f", vec![1; 500_000]);
    std::fs::create_dir(world.path("d")).expect("made");
    world.write("d/g", "x");
    let home = File::open(world.dir.path()).expect("opened");
    let files = File::open(world.dir.path().join("files")).expect("opened");
    btrfs::snapshot(files.as_fd(), home.as_fd(), "files.moment").expect("taken");
    let left = world.dir.path().join("files.moment");
    assert_eq!(left.metadata().expect("there").ino(), btrfs::SUBVOLUME_INODE);
    let mut tracker = world.tracker();
    assert_eq!(tracker.driver().kind, DriverKind::Btrfs);
    assert!(!left.exists());
    tracker.capture(&world.store).expect("captured");
}

/// The driver depends on the file system, and its description says why it is not a better one.
#[test]
fn driver_matches_filesystem() {
    let of = |world: &World| world.tracker().driver().to_string();
    assert!(of(&World::at(Path::new("/dev/shm"))).starts_with("tracked (tmpfs shares no blocks"));
    if let Some(mounted) = mounted("xfs", "loop") {
        assert_eq!(of(&World::at(&mounted.path())), "reflink (XFS has no subvolumes)");
    }
    if let Ok(mounted) = Mounted::new("xfs", &["-q", "-m", "reflink=0"]) {
        assert!(of(&World::at(&mounted.path())).starts_with("tracked (XFS shares no blocks between files"));
    }
    if let Some(mounted) = mounted("btrfs", "loop") {
        assert_eq!(of(&World::in_subvolume(&mounted.path())), "btrfs");
        let folder = of(&World::at(&mounted.path()));
        assert_eq!(folder, "reflink (the workspace was made as a folder, not in a subvolume)");
        let theirs = mounted.path().join("theirs");
        std::fs::create_dir(&theirs).expect("made");
        as_nobody("workspace::driver_tests::btrfs_clones_only_as_user", &theirs);
    }
}

#[test]
#[ignore = "run by a test that makes the file system"]
fn btrfs_clones_only_as_user() {
    let world = World::in_subvolume(&given_place()).holding_all(0);
    let mut tracker = world.tracker();
    let said = tracker.driver().to_string();
    assert!(said.starts_with("btrfs (captures by clones only: ") && said.contains("user_subvol_rm_allowed"), "{said}");
    world.write("f", vec![1; 500_000]);
    let captured = tracker.capture(&world.store).expect("captured");
    assert_eq!(captured.stats.cloned, 1);
    assert!(!world.dir.path().join("files.moment").exists());
}

/// The pause does not depend on file size: large files are cloned, and the necessary flush to the
/// device precedes the pause.
#[test]
fn pause_ignores_file_size() {
    let pause = |world: &World, size: usize| {
        let file = File::create(world.path("f")).expect("made");
        file.write_all_at(&vec![7; size], 0).expect("written");
        let mut tracker = world.tracker();
        tracker.prepare(&world.store).expect("prepared");
        let mut pauses: Vec<Duration> = (0..5u8)
            .map(|round| {
                file.write_all_at(&[round], size as u64 / 2).expect("written");
                tracker.prepare(&world.store).expect("prepared");
                file.write_all_at(&[round + 100], size as u64 / 2).expect("written");
                let captured = tracker.capture(&world.store).expect("captured");
                assert_eq!((captured.stats.cloned, captured.stats.read), (1, 1));
                captured.stats.pause
            })
            .collect();
        pauses.sort();
        pauses[0]
    };
    for kind in ["xfs", "btrfs"] {
        let Some(mounted) = mounted(kind, "loop") else { continue };
        let small = pause(&World::at(&mounted.path()), 1 << 20);
        let large = pause(&World::at(&mounted.path()), 100 << 20);
        // Reading the file takes more than 100 ms even from memory in this build.
        assert!(large < small * 8 + Duration::from_millis(10), "{kind}: {small:?} for 1 MiB, {large:?} for 100 MiB");
    }
}

/// Without watches every capture is a full scan and says so.
///
/// Runs in a user namespace, which has its own limits.
#[test]
fn missing_watches_force_walk() {
    let limited = "echo 4 > /proc/sys/user/max_inotify_watches && exec \"$0\" \"$@\"";
    let mut command = std::process::Command::new("unshare");
    command
        .args(["--user", "--map-root-user", "sh", "-c", limited])
        .arg(std::env::current_exe().expect("this program"));
    command.args(["workspace::driver_tests::more_folders_than_watches", "--exact", "--ignored"]);
    let output = command.args(["--nocapture", "--test-threads", "1"]).output().expect("unshare runs");
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    if errors.contains("unshare failed") {
        return eprintln!("ignored, because this host gives no user namespaces: {errors}");
    }
    assert!(output.status.success() && said.contains("1 passed"), "{said}\n{errors}");
}

#[test]
#[ignore = "run by a test that lowers the limit"]
fn more_folders_than_watches() {
    use super::{FullScanReason, Unwatched};
    let world = World::new();
    for n in 0..10 {
        std::fs::create_dir(world.path(&format!("d{n}"))).expect("made");
        world.write(&format!("d{n}/f"), "1".repeat(1000));
    }
    let mut tracker: Tracker = world.tracker();
    let first = tracker.capture(&world.store).expect("captured");
    assert_eq!((first.stats.full_scan, first.stats.unwatched), (Some(FullScanReason::First), Some(Unwatched::Watches)));
    assert_eq!(tracker.unwatched(), Some(Unwatched::Watches));
    world.write("d7/f", "2".repeat(1000));
    let second = tracker.capture(&world.store).expect("captured");
    assert_eq!(
        (second.stats.full_scan, second.stats.unwatched),
        (Some(FullScanReason::Unwatched), Some(Unwatched::Watches))
    );
    let there = world.observe();
    tracker.restore(first.tree, &world.store, Durability::Process).expect("restored");
    tracker.restore(second.tree, &world.store, Durability::Process).expect("restored");
    same(&world.observe(), &there);
}

/// Files that change in the donor during a branch are taken from the store, so the new workspace
/// matches the tree.
#[test]
fn branch_is_immune_to_live_writes() {
    in_each(|world, kind| {
        for n in 0..200 {
            world.write(&format!("f{n:03}"), format!("{n}").repeat(9_000));
        }
        std::fs::hard_link(world.path("f000"), world.path("linked")).expect("linked");
        std::thread::sleep(Duration::from_millis(120));
        let mut tracker = world.tracker();
        let captured = tracker.capture(&world.store).expect("captured");
        let there = world.observe();
        let donor = tracker.donor().expect("a donor").expect("sure");
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let writer = std::thread::spawn({
            let (stop, at) = (stop.clone(), world.workspace());
            move || {
                for n in (0..200).cycle() {
                    let path = at.join(format!("f{n:03}"));
                    match n % 4 {
                        0 => std::fs::write(path, "other").expect("written"),
                        1 => OpenOptions::new()
                            .write(true)
                            .open(path)
                            .and_then(|f| f.write_all_at(b"?", 77))
                            .expect("written"),
                        2 => drop(
                            std::fs::remove_file(path).and_then(|()| std::fs::create_dir(at.join(format!("f{n:03}")))),
                        ),
                        _ => drop(std::fs::rename(&path, at.join("moved"))),
                    }
                    if stop.load(std::sync::atomic::Ordering::Relaxed) {
                        return;
                    }
                    if n % 4 == 3 {
                        drop(std::fs::rename(at.join("moved"), path_of(&at, n)));
                    }
                    if n % 4 == 2 {
                        let _ = std::fs::remove_dir(path_of(&at, n));
                        std::fs::write(path_of(&at, n), "again").expect("written");
                    }
                }
            }
        });
        for n in 0..3 {
            let paths = world.another(&format!("child{n}"));
            // A snapshot without a report of changes: everything is examined.
            let snapshot = donor.snapshot(&paths).expect("taken");
            let made =
                branch(Some((&donor, snapshot)), captured.tree, paths.clone(), &world.store, Durability::Process);
            let (_, restored, branched) = made.expect("branched");
            assert_eq!((restored.left, branched.snapshot), (Vec::new(), kind == DriverKind::Btrfs));
            same(&observe(&paths.workspace), &there);
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        writer.join().expect("ended");
    });
}

fn path_of(at: &Path, n: usize) -> std::path::PathBuf {
    at.join(format!("f{n:03}"))
}

/// A failed branch reports its error, and shared files are shared.
#[test]
fn failed_branch_is_reported() {
    in_each(|world, kind| {
        world.write("f", vec![5; 400_000]);
        std::fs::create_dir(world.path("d")).expect("made");
        std::thread::sleep(Duration::from_millis(120));
        let mut tracker = world.tracker();
        let tree = tracker.capture(&world.store).expect("captured").tree;
        let donor = tracker.donor().expect("a donor").expect("sure");
        let faults: &[&str] = match kind {
            DriverKind::Btrfs => &["workspace.branch.empty=eio", "workspace.branch.snapshot=eio"],
            DriverKind::Reflink | DriverKind::Tracked => &["workspace.checkout.sync=eio"],
        };
        for (n, fault) in faults.iter().enumerate() {
            let paths = world.another(&format!("failed{n}"));
            with_fault(fault, || {
                let snapshot = donor.snapshot(&paths);
                let made =
                    snapshot.and_then(|s| branch(Some((&donor, s)), tree, paths, &world.store, Durability::Power));
                made.expect_err("armed")
            });
        }
        let paths = world.another("child");
        let snapshot = donor.snapshot(&paths).expect("taken");
        let made = branch(Some((&donor, snapshot)), tree, paths, &world.store, Durability::Power).expect("branched").2;
        let (cloned, copied) = if kind == DriverKind::Tracked { (0, 1) } else { (1, 0) };
        if kind != DriverKind::Btrfs {
            assert_eq!((made.cloned, made.copied), (cloned, copied), "{kind:?}");
        }
        // Without a donor everything comes from the store.
        let paths = world.another("from-store");
        let made = branch(None, tree, paths.clone(), &world.store, Durability::Process).expect("branched").2;
        assert_eq!((made.snapshot, made.cloned, made.copied), (false, 0, 0));
        same(&observe(&paths.workspace), &world.observe());
        let again = branch(None, tree, paths, &world.store, Durability::Process).expect_err("it is not empty");
        assert!(matches!(again, WorkspaceError::NotEmpty { .. }));
    });
}

/// A snapshot with a report of the changes is examined only there, and still matches the tree.
#[test]
fn snapshot_examines_changes_only() {
    in_each(|world, kind| {
        if kind != DriverKind::Btrfs {
            return;
        }
        for n in 0..10 {
            std::fs::create_dir(world.path(&format!("d{n}"))).expect("made");
        }
        for n in 0..300 {
            world.write(&format!("d{}/f{n:03}", n % 10), format!("{n}").repeat(3_000));
        }
        world.write("mapped", vec![7; 8192]);
        std::fs::hard_link(world.path("d1/f001"), world.path("linked")).expect("linked");
        let mut mapping = Mapping::of(&world.path("mapped"));
        world.write("later", vec![7; 8192]);
        std::thread::sleep(Duration::from_millis(120));
        let mut tracker = world.tracker();
        let there = world.observe();
        let captured = tracker.capture(&world.store).expect("captured");
        let donor = tracker.donor().expect("a donor").expect("sure");
        world.write("d0/f000", "less");
        std::fs::create_dir_all(world.path("new/folder")).expect("made");
        world.write("new/folder/file", "new");
        let file = OpenOptions::new().write(true).open(world.path("d0/f010")).expect("opened");
        file.write_all_at(b"?", 77).expect("written");
        std::fs::remove_file(world.path("d0/f020")).expect("removed");
        std::fs::create_dir(world.path("d0/f020")).expect("made");
        std::fs::rename(world.path("d1"), world.path("moved")).expect("renamed");
        std::fs::remove_dir_all(world.path("d2")).expect("removed");
        std::os::unix::fs::symlink("d3", world.path("d2")).expect("linked");
        std::fs::set_permissions(world.path("d3"), std::os::unix::fs::PermissionsExt::from_mode(0o711)).expect("set");
        std::fs::rename(world.path("d4/f004"), world.path("d5/f005")).expect("renamed");
        mapping.write(b'!');
        // Writes through a mapping cause no notification, and the time is reset.
        let time = world.path("later").metadata().and_then(|found| found.modified()).expect("there");
        let mut later = Mapping::of(&world.path("later"));
        later.write(b'!');
        // Through a read-only descriptor and for both times: otherwise the change would be reported
        // as a write.
        let times = FileTimes::new().set_accessed(time).set_modified(time);
        File::open(world.path("later")).and_then(|file| file.set_times(times)).expect("set back");
        let paths = world.another("shown");
        let mut snapshot = donor.snapshot(&paths).expect("taken").expect("there are such");
        tracker.record_changes(&donor, &mut snapshot);
        let made =
            branch(Some((&donor, Some(snapshot))), captured.tree, paths.clone(), &world.store, Durability::Process);
        let (mut child, restored, _) = made.expect("branched");
        assert_eq!((restored.left, restored.stats.full_scan), (Vec::new(), None));
        // New folders may hide changes to any file, so all files are examined, and only those that
        // differ are read.
        assert!(restored.stats.read < 20, "{:?}", restored.stats);
        same(&observe(&paths.workspace), &there);
        assert_eq!(child.capture(&world.store).expect("captured").tree, captured.tree);
        // Reports from before another pass are not repeated.
        tracker.capture(&world.store).expect("captured");
        let paths = world.another("untold");
        let mut snapshot = donor.snapshot(&paths).expect("taken").expect("there are such");
        tracker.record_changes(&donor, &mut snapshot);
        let made =
            branch(Some((&donor, Some(snapshot))), captured.tree, paths.clone(), &world.store, Durability::Process);
        assert_eq!(made.expect("branched").1.stats.full_scan, Some(super::FullScanReason::Reopened));
        same(&observe(&paths.workspace), &there);
        // Without such files nothing else is examined.
        drop((mapping, later));
        tracker.capture(&world.store).expect("captured");
        let captured = tracker.capture(&world.store).expect("captured");
        let donor = tracker.donor().expect("a donor").expect("sure");
        world.write("d5/f055", "less");
        let paths = world.another("quiet");
        let mut snapshot = donor.snapshot(&paths).expect("taken").expect("there are such");
        tracker.record_changes(&donor, &mut snapshot);
        let made =
            branch(Some((&donor, Some(snapshot))), captured.tree, paths.clone(), &world.store, Durability::Process);
        let restored = made.expect("branched").1;
        assert_eq!((restored.left, restored.stats.full_scan), (Vec::new(), None));
        assert!(restored.stats.examined < 20, "{:?}", restored.stats);
    });
}

/// A spare becomes the requested tree, its own or another, despite concurrent changes of the live
/// workspace.
#[test]
fn spare_becomes_requested_tree() {
    in_each(|world, kind| {
        if kind == DriverKind::Btrfs {
            return;
        }
        std::fs::create_dir(world.path("d")).expect("made");
        for n in 0..200 {
            world.write(&format!("d/f{n:03}"), format!("{n}").repeat(9_000));
        }
        world.write("large", vec![7; 1 << 20]);
        std::fs::hard_link(world.path("d/f000"), world.path("linked")).expect("linked");
        std::os::unix::fs::symlink("d/f001", world.path("link")).expect("linked");
        // Moving such a folder is refused to its owner.
        std::fs::set_permissions(world.workspace(), std::os::unix::fs::PermissionsExt::from_mode(0o555)).expect("set");
        std::thread::sleep(Duration::from_millis(120));
        let mut tracker = world.tracker();
        let first = tracker.capture(&world.store).expect("captured").tree;
        let at_first = world.observe();
        let donor = tracker.donor().expect("a donor").expect("sure");
        let spare =
            |name: &str| PreparedWorkspace::make(&world.dir.path().join(name), Some(&donor), first, &world.store);
        let spares = ["one", "two", "three", "six", "seven", "eight"].map(|name| spare(name).expect("made"));
        std::fs::set_permissions(world.workspace(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("set");
        world.write("d/f010", "other");
        std::fs::remove_file(world.path("d/f020")).expect("removed");
        std::fs::rename(world.path("d"), world.path("e")).expect("renamed");
        world.write("new", vec![9; 300_000]);
        let second = tracker.capture(&world.store).expect("captured").tree;
        let at_second = world.observe();
        let [one, two, three, six, seven, eight] = spares;
        // The folder was deleted to free space; its files come from the store.
        std::fs::remove_dir_all(world.dir.path().join("two/workspace/d")).expect("removed");
        std::fs::write(world.dir.path().join("six/workspace/large"), "").expect("emptied");
        // In a remaining folder one file is missing and another is replaced.
        std::fs::remove_file(world.dir.path().join("seven/workspace/d/f100")).expect("removed");
        let of_eight = |name: &str| world.dir.path().join("eight/workspace/d").join(name);
        std::fs::write(of_eight("new"), "other").expect("written");
        std::fs::rename(of_eight("new"), of_eight("f101")).expect("renamed");
        let spares = [
            (one, first, &at_first, true),
            (two, second, &at_second, false),
            (six, first, &at_first, false),
            (seven, first, &at_first, false),
            (eight, first, &at_first, false),
        ];
        for (n, (spare, tree, wanted, whole)) in spares.into_iter().enumerate() {
            let paths = world.another(&format!("of-{n}"));
            let made = spare.become_workspace(tree, paths.clone(), &world.store, Durability::Process);
            let (mut child, restored) = made.expect("made");
            // An intact spare needs no examination of entries; in others every entry is examined,
            // and only differing files are read.
            assert!(restored.left.is_empty() && restored.stats.read <= 2, "{kind:?}: {restored:?}");
            assert_eq!(restored.stats.full_scan.is_none(), whole, "{kind:?}: {restored:?}");
            assert!(!whole || restored.stats.examined <= 4, "{kind:?}: {restored:?}");
            assert_eq!(restored.changed == 0, whole, "{kind:?}: only what differs is touched");
            same(&observe(&paths.workspace), wanted);
            let captured = child.capture(&world.store).expect("captured");
            assert_eq!((captured.tree, captured.stats.full_scan), (tree, None));
            world.nothing_is_staged();
        }
        for left in ["one", "two"] {
            assert!(!world.dir.path().join(left).exists(), "{left}");
        }
        drop(three);
        assert!(!world.dir.path().join("three").exists());
        donor.cancel();
        let cancelled = spare("given up").expect_err("nobody wants it");
        assert!(matches!(cancelled, WorkspaceError::Io { .. }), "{cancelled:?}");
        assert!(!world.dir.path().join("given up").exists(), "an abandoned spare is removed");
        let donor = tracker.donor().expect("a donor").expect("sure");
        let spare =
            |name: &str| PreparedWorkspace::make(&world.dir.path().join(name), Some(&donor), first, &world.store);
        with_fault("workspace.spare.make=enospc", || spare("four").expect_err("armed"));
        with_fault("workspace.checkout.file=enospc", || spare("four").expect_err("armed"));
        assert!(!world.dir.path().join("four").exists(), "a failed spare is removed");
        let (five, paths) = (spare("five").expect("made"), world.another("full"));
        std::fs::write(paths.workspace.join("there"), "x").expect("written");
        let refused = five.become_workspace(first, paths.clone(), &world.store, Durability::Process);
        assert!(matches!(refused, Err(WorkspaceError::Io { .. })), "{refused:?}");
        assert!(paths.workspace.join("there").exists());
    });
}
