//! Folders that a capture cannot read, and mounts: all of their content is reported as missing.

use std::fs::{File, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::changes::Changes;
use super::meanwhile_tests::{Once, all, is_what_is_there, pass_by, prepare_while_each, settle};
use super::testing::{World, as_nobody, given_place};
use super::{Captured, Reason, Tracker};

/// Root is never refused access: as root, this runs the ignored test of this name as an ordinary
/// user.
fn unprivileged(name: &str, check: fn(&World)) {
    if nix::unistd::Uid::effective().is_root() {
        let place = tempfile::tempdir().expect("a temporary directory");
        as_nobody(&format!("workspace::refused_tests::{name}"), place.path());
    } else {
        check(&World::new());
    }
}

fn mode(world: &World, name: &str, mode: u32) {
    std::fs::set_permissions(world.path(name), Permissions::from_mode(mode)).expect("set");
}

fn missing(captured: &Captured) -> Vec<(String, Reason)> {
    captured.not_captured.iter().map(|n| (n.path.display().to_string(), n.reason)).collect()
}

#[test]
fn reopened_folder_is_captured() {
    unprivileged("reopened_folder_as_user", reopened_folder_in);
}

#[test]
#[ignore = "run by a test as an ordinary user"]
fn reopened_folder_as_user() {
    reopened_folder_in(&World::at(&given_place()));
}

fn reopened_folder_in(world: &World) {
    world.write("a", [b'a'; 1000]);
    std::fs::create_dir_all(world.path("n/inner")).expect("made");
    let mut tracker = world.tracker();
    let closed = |name: &str, tracker: &mut Tracker| {
        mode(world, name, 0);
        settle();
        let captured = tracker.capture(&world.store).expect("captured");
        assert_eq!(missing(&captured), [(name.to_owned(), Reason::Unreadable)]);
    };
    // The order of the names is random.
    for round in 0..8_u8 {
        closed("n", &mut tracker);
        mode(world, "n", 0o700);
        pass_by(&world.path("a"), &world.path("n/t"), 10 + round);
        // A notification for the file does not make its state fully known.
        mode(world, "a", 0o640 + u32::from(round % 2));
        settle();
        is_what_is_there(world, &mut tracker);
        // Under another name.
        closed("n", &mut tracker);
        std::fs::rename(world.path("n"), world.path("m")).expect("renamed");
        mode(world, "m", 0o700);
        pass_by(&world.path("a"), &world.path("m/t"), 100 + round);
        is_what_is_there(world, &mut tracker);
        std::fs::rename(world.path("m"), world.path("n")).expect("renamed");
    }
}

#[test]
fn opened_folder_is_captured() {
    unprivileged("opened_folder_as_user", opened_folder_in);
}

#[test]
#[ignore = "run by a test as an ordinary user"]
fn opened_folder_as_user() {
    opened_folder_in(&World::at(&given_place()));
}

fn opened_folder_in(world: &World) {
    std::fs::create_dir_all(world.path("d0/n")).expect("made");
    std::fs::create_dir(world.path("h")).expect("made");
    world.write("a", [b'a'; 1000]);
    let mut tracker = world.tracker();
    // The order of the folders is random.
    for round in 0..40_u8 {
        mode(world, "d0/n", 0);
        tracker.capture(&world.store).expect("captured");
        world.write("d0/shown", [round; 1000]);
        // The folder is away when it is scanned, and is looked up by name after a change in it.
        let away: Once = Box::new(|root| all(root, "d", "away", 1));
        let back: Once = Box::new(move |root| {
            all(root, "d", "away", 1);
            let inner = root.join("away0/n");
            std::fs::set_permissions(&inner, Permissions::from_mode(0o700)).expect("set");
            pass_by(&root.join("a"), &inner.join("t"), round);
            all(root, "away", "d", 1);
        });
        prepare_while_each(world, &mut tracker, [("g", away), ("h/g", back)]);
        all(&world.path(""), "away", "d", 1);
        is_what_is_there(world, &mut tracker);
    }
}

#[test]
fn unsearchable_folder_is_reported() {
    unprivileged("unsearchable_folder_as_user", unsearchable_folder_in);
}

#[test]
#[ignore = "run by a test as an ordinary user"]
fn unsearchable_folder_as_user() {
    unsearchable_folder_in(&World::at(&given_place()));
}

fn unsearchable_folder_in(world: &World) {
    std::fs::create_dir_all(world.path("a/b/c/e")).expect("made");
    world.write("a/b/c/e/f", [0; 1000]);
    world.write("a/g", [0; 1000]);
    let mut tracker = world.tracker();
    tracker.capture(&world.store).expect("captured");
    let open = |name: &str| OpenOptions::new().write(true).open(world.path(name)).expect("opened");
    let (deep, shallow) = (open("a/b/c/e/f"), open("a/g"));
    let write = |file: &File, byte: u8| file.write_all_at(&[byte; 1000], 0).expect("written");
    for round in 1..9_u8 {
        // The folder's names can be listed, but its files cannot be examined.
        mode(world, "a", 0o400);
        write(&deep, round);
        if round % 2 == 0 {
            tracker.prepare(&world.store).expect("prepared");
            write(&deep, round + 100);
        }
        if round % 4 < 2 {
            write(&shallow, round);
        }
        let captured = tracker.capture(&world.store).expect("captured");
        let unreadable = |name: &str| (name.to_owned(), Reason::Unreadable);
        assert_eq!(missing(&captured), [unreadable("a/b"), unreadable("a/g")]);
        is_what_is_there(world, &mut tracker);
        mode(world, "a", 0o755);
        let captured = tracker.capture(&world.store).expect("captured");
        assert_eq!(missing(&captured), []);
        is_what_is_there(world, &mut tracker);
    }
    // An unreadable workspace is an error, not an empty capture.
    drop((deep, shallow));
    tracker.capture(&world.store).expect("captured");
    mode(world, "", 0);
    tracker.prepare(&world.store).expect("prepared");
    tracker.capture(&world.store).expect_err("it cannot be looked at");
    mode(world, "", 0o755);
    is_what_is_there(world, &mut tracker);
    let shallow = open("a/g");
    mode(world, "", 0);
    write(&shallow, 100);
    tracker.capture(&world.store).expect_err("it cannot be looked at");
    mode(world, "", 0o755);
    is_what_is_there(world, &mut tracker);
}

#[test]
fn unreadable_file_adds_no_cost() {
    unprivileged("unreadable_file_as_user", unreadable_file_in);
}

#[test]
#[ignore = "run by a test as an ordinary user"]
fn unreadable_file_as_user() {
    unreadable_file_in(&World::at(&given_place()));
}

fn unreadable_file_in(world: &World) {
    (0..50).for_each(|n| world.write(&format!("f{n}"), [b'a'; 1000]));
    mode(world, "f7", 0);
    settle();
    let mut tracker = world.tracker();
    tracker.capture(&world.store).expect("captured");
    world.write("f8", "");
    tracker.capture(&world.store).expect("captured");
    let calm = tracker.capture(&world.store).expect("captured");
    assert_eq!((calm.stats.full_scan, calm.stats.examined), (None, 0), "{:?}", calm.stats);
}

#[test]
fn hidden_link_is_captured() {
    unprivileged("hidden_link_as_user", hidden_link_in);
}

#[test]
#[ignore = "run by a test as an ordinary user"]
fn hidden_link_as_user() {
    hidden_link_in(&World::at(&given_place()));
}

/// A user may create a link to a known file in a folder that it can enter and write, but not read;
/// neither the link nor writes through it are reported.
fn hidden_link_in(world: &World) {
    world.write("f", [b'a'; 1000]);
    std::fs::create_dir(world.path("n")).expect("made");
    mode(world, "n", 0o300);
    settle();
    let mut tracker = world.tracker();
    for byte in 1..4 {
        tracker.capture(&world.store).expect("captured");
        pass_by(&world.path("f"), &world.path("n/t"), byte);
        is_what_is_there(world, &mut tracker);
    }
    // Notifications are kept.
    let calm = tracker.capture(&world.store).expect("captured");
    assert_eq!((calm.stats.full_scan, calm.stats.unwatched), (None, None), "{:?}", calm.stats);
}

#[test]
fn unreadable_folder_keeps_watches() {
    unprivileged("unreadable_folder_as_user", unreadable_folder_in);
}

#[test]
#[ignore = "run by a test as an ordinary user"]
fn unreadable_folder_as_user() {
    unreadable_folder_in(&World::at(&given_place()));
}

fn unreadable_folder_in(world: &World) {
    std::fs::create_dir(world.path("e")).expect("made");
    world.write("e/f", [b'a'; 1000]);
    let mut tracker = world.tracker();
    tracker.capture(&world.store).expect("captured");
    // A tracker that starts now, as in a fork, cannot watch the folder.
    mode(world, "e", 0o300);
    let index = tracker.index.clone().unwatched();
    let mut again = Tracker::seeded(world.paths(), index, Some(Changes::default())).expect("followed");
    again.is_private = false;
    let captured = again.capture(&world.store).expect("captured");
    assert_eq!((captured.stats.unwatched, missing(&captured)), (None, vec![("e".to_owned(), Reason::Unreadable)]));
    mode(world, "e", 0o700);
    is_what_is_there(world, &mut again);
}

/// A bind mount that is removed on drop.
struct Bound(PathBuf);

impl Bound {
    fn new(from: &Path, to: &Path) -> Option<Bound> {
        let output = Command::new("mount").arg("--bind").args([from, to]).output().expect("mount runs");
        if !output.status.success() {
            let why = String::from_utf8_lossy(&output.stderr);
            eprintln!("ignored, because this host mounts nothing: {why}");
            return None;
        }
        Some(Bound(to.to_owned()))
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

#[test]
fn bind_mounts_are_reported() {
    let world = World::new();
    let source = world.dir.path().join("source");
    for folder in [&source, &world.path("m"), &world.path("d")] {
        std::fs::create_dir(folder).expect("made");
    }
    std::fs::write(source.join("f"), [0; 1000]).expect("written");
    world.write("d/x", [0; 1000]);
    world.write("file", [0; 1000]);
    let Some(_folder) = Bound::new(&source, &world.path("m")) else { return };
    let Some(_file) = Bound::new(&source.join("f"), &world.path("file")) else { return };
    let mut tracker = world.tracker();
    let mount = |name: &str| (name.to_owned(), Reason::Mount);
    for round in 1..3 {
        world.write("m/f", [round; 1000]);
        let captured = tracker.capture(&world.store).expect("captured");
        assert_eq!((missing(&captured), captured.entries), (vec![mount("file"), mount("m")], 4));
    }
    // A mount on a known folder: only writes inside are reported.
    let bound = Bound::new(&world.path("d"), &world.path("d"));
    world.write("d/x", [1; 1000]);
    let captured = tracker.capture(&world.store).expect("captured");
    assert_eq!(missing(&captured), [mount("d"), mount("file"), mount("m")]);
    drop(bound);
    mode(&world, "d", 0o755);
    is_what_is_there(&world, &mut tracker);
    tracker.capture(&world.store).expect("captured");
    // The same without notifications, when all files are examined.
    let bound = Bound::new(&world.path("d"), &world.path("d"));
    world.write("passing", "");
    std::fs::remove_file(world.path("passing")).expect("removed");
    let captured = tracker.capture(&world.store).expect("captured");
    assert_eq!(missing(&captured), [mount("d"), mount("file"), mount("m")]);
    drop(bound);
    world.write("d/x", [2; 1000]);
    mode(&world, "d", 0o750);
    is_what_is_there(&world, &mut tracker);
}
