//! Restores that are killed at any point and repeated, attacked while they run, or run by an
//! ordinary user.

use std::collections::BTreeMap;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::testing::{Observed, World, becomes_empty, observe, same};
use super::{CountingObjects, Durability, Tracker, TreeId, WorkspaceError, WorkspacePaths, needs};
use crate::store::Store;
use crate::sys::fault::points;
use crate::sys::fault::tests::{crash_dir, run_child, with_fault};

fn mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("set");
}

/// Creates a tree with every kind of entry, in one of two entirely different states.
fn fill(root: &Path, second: bool) {
    let write = |name: &str, text: &str| std::fs::write(root.join(name), text.repeat(300)).expect("written");
    std::fs::create_dir_all(root.join("both/inner")).expect("made");
    write("both/same", "same");
    write("both/inner/differs", if second { "second" } else { "first" });
    write("linked", if second { "b" } else { "a" });
    std::fs::hard_link(root.join("linked"), root.join(if second { "both/two" } else { "both/one" })).expect("linked");
    write("mode", "mode");
    mode(&root.join("mode"), if second { 0o600 } else { 0o444 });
    if second {
        write("was-folder", "a file now");
        std::fs::create_dir(root.join("was-file")).expect("made");
        write("was-file/x", "x");
        symlink("elsewhere", root.join("link")).expect("made");
    } else {
        write("was-file", "a file");
        std::fs::create_dir_all(root.join("was-folder/deep/deeper")).expect("made");
        write("was-folder/deep/deeper/x", "x");
        mode(&root.join("was-folder/deep"), 0o555);
        symlink("somewhere", root.join("link")).expect("made");
        nix::unistd::mkfifo(&root.join("pipe"), nix::sys::stat::Mode::S_IRUSR).expect("made");
        std::fs::File::create(root.join("sparse")).and_then(|file| file.set_len(3 << 20)).expect("made");
    }
    for name in ["both/same", "mode"] {
        let file = std::fs::File::open(root.join(name)).expect("opened");
        file.set_modified(std::time::UNIX_EPOCH + std::time::Duration::new(1000, 7)).expect("set");
    }
}

fn paths(dir: &Path) -> WorkspacePaths {
    WorkspacePaths { workspace: dir.join("workspace"), staging: dir.join("staging"), index: dir.join("index") }
}

/// Creates a folder with both trees in its store and the second one in its workspace.
fn prepared(dir: &Path) -> [(TreeId, Observed); 2] {
    let paths = paths(dir);
    let store = Store::open(&dir.join("store")).expect("opened");
    std::fs::create_dir(&paths.workspace).expect("made");
    fill(&paths.workspace, false);
    let mut tracker = Tracker::open(paths.clone()).expect("opened");
    let first = (tracker.capture(&store).expect("captured").tree, observe(&paths.workspace));
    mode(&paths.workspace.join("was-folder/deep"), 0o755);
    std::fs::remove_dir_all(&paths.workspace).expect("removed");
    std::fs::create_dir(&paths.workspace).expect("made");
    fill(&paths.workspace, true);
    let mut tracker = Tracker::open(paths.clone()).expect("opened");
    let second = (tracker.capture(&store).expect("captured").tree, observe(&paths.workspace));
    tracker.save().expect("saved");
    [first, second]
}

#[test]
fn restore_script_child() {
    let Some(dir) = std::env::var_os("RYOKAN_CRASH_DIR") else { return };
    let tree: TreeId = TreeId(std::env::var("RYOKAN_TREE").expect("set").parse().expect("an address"));
    println!();
    let store = Store::open(&Path::new(&dir).join("store")).expect("opened");
    let mut tracker = Tracker::open(paths(Path::new(&dir))).expect("opened");
    match tracker.restore(tree, &store, Durability::Power).and_then(|_| tracker.save()) {
        Ok(()) => println!("ack restored"),
        Err(error) => println!("fail {error}"),
    }
}

#[test]
fn killed_restore_is_completed() {
    let mut passed = 0;
    let ours = |name: &str| name.starts_with("workspace.");
    for (_, point) in points().filter(|(label, _)| ours(label.name)) {
        for (deed, pass) in [("kill", 1), ("kill", 2), ("kill", 4), ("enospc", 1)] {
            let dir = crash_dir();
            let [first, second] = prepared(dir.path());
            let tree = first.0.to_string();
            let fault = format!("{point}:{pass}={deed}");
            let ran = run_child(
                "workspace::restore_tests::restore_script_child",
                dir.path(),
                Some(&fault),
                &[("RYOKAN_TREE", &tree)],
            );
            let hit = ran.killed || ran.failed.is_some();
            assert_eq!(ran.killed, hit && deed == "kill", "{fault}: {}", ran.all);
            passed += usize::from(hit);
            let paths = paths(dir.path());
            let store = Store::open(&dir.path().join("store")).expect("opened");
            // The next restore may go forward to the requested tree, or back.
            for (tree, wanted) in if pass == 2 { [&second, &first] } else { [&first, &second] } {
                let mut tracker = Tracker::open(paths.clone()).expect("opened");
                tracker.restore(*tree, &store, Durability::Process).unwrap_or_else(|e| panic!("{fault}: {e}"));
                same(&observe(&paths.workspace), wanted);
                becomes_empty(&paths.staging);
                tracker.save().expect("saved");
            }
        }
    }
    assert!(passed >= 25, "only {passed} faults occurred");
}

#[test]
fn failed_restore_is_completed() {
    let dir = crash_dir();
    let [first, second] = prepared(dir.path());
    let store = Store::open(&dir.path().join("store")).expect("opened");
    let mut tracker = Tracker::open(paths(dir.path())).expect("opened");
    for label in ["place.rename", "place.remove", "place.folder", "staging.write", "place.folder_meta", "staging.clear"]
    {
        for (tree, wanted) in [&first, &second] {
            let fault = format!("workspace.{label}:2=enospc");
            let failed = with_fault(&fault, || tracker.restore(*tree, &store, Durability::Process));
            if let Err(error) = failed {
                assert!(matches!(error, WorkspaceError::Full { .. }), "{error}");
            }
            tracker.restore(*tree, &store, Durability::Process).expect("restored");
            same(&observe(&dir.path().join("workspace")), wanted);
            assert_eq!(tracker.capture(&store).expect("captured").tree, *tree);
        }
    }
}

/// The workspace's owner places links in the way while the daemon restores. Nothing outside the
/// workspace may change.
#[test]
fn restore_resists_symlink_attacks() {
    let world = World::new();
    let outside = world.dir.path().join("outside");
    let deep = outside.join("d0/d1/d2");
    std::fs::create_dir_all(&deep).expect("made");
    for name in ["f0", "f1", "f2"] {
        std::fs::write(deep.join(name), "precious").expect("written");
    }
    let precious = observe(&outside);
    let build = |text: &str| {
        std::fs::create_dir_all(world.path("d0/d1/d2")).expect("made");
        (0..40).for_each(|n| world.write(&format!("d0/d1/d2/f{n}"), format!("{text}{n}").repeat(100)));
    };
    build("one");
    let mut tracker = world.tracker();
    let first = tracker.capture(&world.store).expect("captured").tree;
    build("two");
    let second = tracker.capture(&world.store).expect("captured").tree;
    // Static links first: their targets are not restored.
    std::fs::rename(world.path("d0/d1"), world.path("d0/away")).expect("renamed");
    symlink(outside.join("d0/d1"), world.path("d0/d1")).expect("made");
    tracker.restore(first, &world.store, Durability::Process).expect("restored");
    same(&observe(&outside), &precious);
    assert!(!world.path("d0/d1").is_symlink());

    let stop = Arc::new(AtomicBool::new(false));
    let attacker = std::thread::spawn({
        let (stop, at, to) = (stop.clone(), world.workspace(), outside.clone());
        move || {
            while !stop.load(Ordering::Relaxed) {
                for (path, target) in [("d0", "d0"), ("d0/d1", "d0/d1"), ("d0/d1/d2", "d0/d1/d2")] {
                    let (path, away, link) = (at.join(path), at.join("away"), at.join("link"));
                    let _ = symlink(to.join(target), &link);
                    if std::fs::rename(&path, &away).is_ok() {
                        let _ = std::fs::rename(&link, &path);
                        std::thread::yield_now();
                        let _ = std::fs::remove_file(&path);
                        let _ = std::fs::rename(&away, &path);
                    }
                    let _ = std::fs::remove_file(&link);
                }
            }
        }
    });
    let (mut ended, mut refused) = (0, 0);
    for round in 0..60 {
        let tree = if round % 2 == 0 { second } else { first };
        match tracker.restore(tree, &world.store, Durability::Process) {
            Ok(_) => ended += 1,
            Err(_) => refused += 1,
        }
        same(&observe(&outside), &precious);
    }
    stop.store(true, Ordering::Relaxed);
    attacker.join().expect("ended");
    eprintln!("{ended} restores came to an end under attack, {refused} were refused");
    tracker.restore(first, &world.store, Durability::Process).expect("restored");
    let captured = tracker.capture(&world.store).expect("captured");
    assert_eq!(captured.tree, first);
    same(&observe(&outside), &precious);
}

#[test]
fn restore_keeps_file_owners() {
    if !nix::unistd::Uid::effective().is_root() {
        return eprintln!("ignored, because only root has files of several owners");
    }
    let world = World::new();
    let give = |name: &str, id: u32| std::os::unix::fs::lchown(world.path(name), Some(id), Some(id)).expect("given");
    std::os::unix::fs::lchown(world.workspace(), Some(1500), Some(1500)).expect("given");
    std::fs::create_dir(world.path("d")).expect("made");
    for (name, id) in [("own", 1500), ("other", 1600), ("d/own", 1500)] {
        world.write(name, "x");
        give(name, id);
    }
    symlink("x", world.path("link")).expect("made");
    give("link", 1600);
    give("d", 1600);
    let mut tracker = world.tracker();
    let tree = tracker.capture(&world.store).expect("captured").tree;
    let wanted = world.observe();
    for name in ["own", "other", "d/own", "link"] {
        std::fs::remove_file(world.path(name)).expect("removed");
    }
    std::fs::remove_dir(world.path("d")).expect("removed");
    tracker.restore(tree, &world.store, Durability::Process).expect("restored");
    same(&world.observe(), &wanted);
    // The owner of a workspace is not part of the tree: elsewhere it differs.
    let paths = world.places_of("elsewhere");
    std::fs::create_dir(&paths.workspace).expect("made");
    super::checkout(tree, paths.clone(), &world.store, Durability::Process).expect("checked out");
    let owners: BTreeMap<PathBuf, u32> =
        observe(&paths.workspace).into_iter().map(|(path, seen)| (path, seen.owner.0)).collect();
    let expected = [("", 0), ("d", 1600), ("d/own", 0), ("link", 1600), ("other", 1600), ("own", 0)];
    assert_eq!(owners, expected.map(|(path, id)| (PathBuf::from(path), id)).into());
}

#[test]
fn tests_pass_unprivileged() {
    if !nix::unistd::Uid::effective().is_root() {
        return eprintln!("ignored, because these tests are an ordinary user's already");
    }
    for test in [
        "model_tests::tree_round_trips_on_tmpfs",
        "restore_tests::failed_restore_is_completed",
        "restore_tests::unreadable_entries_are_reported",
    ] {
        let mut command = std::process::Command::new("setpriv");
        command.args(["--reuid", "1500", "--regid", "1500", "--clear-groups", "--inh-caps=-all", "--"]);
        command.arg(std::env::current_exe().expect("this binary"));
        command.args(["--exact", &format!("workspace::{test}"), "--test-threads=1"]).current_dir("/");
        let output = command.output().expect("setpriv runs");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && text.contains("1 passed"),
            "{text}{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

#[test]
fn unreadable_entries_are_reported() {
    if nix::unistd::Uid::effective().is_root() {
        return eprintln!("ignored, because root reads everything; an ordinary user runs it too");
    }
    let world = World::new();
    world.write("secret", "x");
    world.write("open", "x");
    std::fs::create_dir(world.path("closed")).expect("made");
    world.write("closed/x", "x");
    mode(&world.path("secret"), 0o000);
    mode(&world.path("closed"), 0o000);
    let mut tracker = world.tracker();
    let captured = tracker.capture(&world.store).expect("captured");
    let named: Vec<_> = captured.not_captured.iter().map(|missing| missing.path.display().to_string()).collect();
    assert_eq!(named, ["closed", "secret"]);
    world.write("open", "changed");
    let restored = tracker.restore(captured.tree, &world.store, Durability::Process).expect("restored");
    assert_eq!(restored.left, Vec::<PathBuf>::new());
    assert_eq!(std::fs::read(world.path("open")).expect("there"), b"x");
    mode(&world.path("closed"), 0o700);
    assert!(world.path("closed/x").exists(), "entries that could not be captured are unchanged");
}

#[test]
fn restore_reads_needed_only() {
    let world = World::new();
    for folder in 0..20 {
        std::fs::create_dir(world.path(&format!("d{folder}"))).expect("made");
        for file in 0..20 {
            world.write(&format!("d{folder}/f{file}"), format!("{folder} {file}").repeat(100));
        }
    }
    let mut tracker = world.tracker();
    let first = tracker.capture(&world.store).expect("captured").tree;
    world.write("d3/f1", "changed".repeat(100));
    std::fs::remove_file(world.path("d4/f2")).expect("removed");
    world.write("d5/new", "new".repeat(200));
    std::fs::rename(world.path("d6/f1"), world.path("d6/renamed")).expect("renamed");
    std::fs::remove_dir_all(world.path("d7")).expect("removed");
    mode(&world.path("d8/f1"), 0o600);
    let second = tracker.capture(&world.store).expect("captured").tree;
    let needed = |from, to| {
        let (counted, mut contents) = (CountingObjects::new(&world.store), 0);
        needs(&counted, from, to, &mut |_| {
            contents += 1;
            Ok(())
        })
        .expect("whole");
        (contents, counted.read())
    };
    // Everything of the removed folder, but nothing of the one whose mode changed.
    assert_eq!(needed(second, first).0, 1 + 1 + 1 + 20);
    assert_eq!(needed(first, second).0, 1 + 1 + 1);
    assert_eq!(needed(first, first), (0, 0));
    let counted = CountingObjects::new(&world.store);
    let restored = tracker.restore(first, &counted, Durability::Process).expect("restored");
    assert_eq!(restored.stats.full_scan, None);
    let (contents, read) = needed(second, first);
    assert!(counted.read() <= contents + read, "{} objects were read", counted.read());
}

#[test]
fn restore_examines_changed_only() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (paths, store) = (paths(dir.path()), Store::open(&dir.path().join("store")).expect("opened"));
    let file = |n: usize| paths.workspace.join(format!("d/e{}/f{}", n / 50, n % 50));
    for n in 0..1000 {
        std::fs::create_dir_all(file(n).parent().expect("it has one")).expect("made");
        std::fs::write(file(n), format!("{n}")).expect("written");
    }
    let mut tracker = Tracker::open(paths.clone()).expect("opened");
    let first = tracker.capture(&store).expect("captured").tree;
    for round in 0..3 {
        for n in [1, 77, 500] {
            std::fs::write(file(n), format!("{n} in round {round}")).expect("written");
        }
        tracker.capture(&store).expect("captured");
        let restored = tracker.restore(first, &store, Durability::Process).expect("restored");
        assert!(restored.stats.full_scan.is_none() && restored.stats.examined < 200, "{round}: {:?}", restored.stats);
        assert_eq!(std::fs::read_to_string(file(77)).expect("there"), "77");
    }
}
