//! Concurrent changes during a capture, or between two captures without a notification for a
//! remaining name.

use std::fs::{File, OpenOptions, Permissions};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use super::testing::World;
use super::tracker_tests::changes;
use super::{ObjectBatch, Objects, Tracker, WorkspacePaths};
use crate::core::ids::Digest;
use crate::store::StoreError;
use crate::sys::inode::tests::Mapping;

type Act = std::sync::Arc<dyn Fn(&[u8]) + Send + Sync>;

/// Content for which the store reports a failure.
const FAILS: [u8; 1000] = [255; 1000];

/// A store that runs an action when it receives a file's content, that is, during a pass.
struct Meanwhile<'a> {
    store: &'a crate::store::Store,
    act: Act,
}

struct MeanwhileBatch {
    batch: Box<dyn ObjectBatch>,
    act: Act,
}

impl Objects for Meanwhile<'_> {
    fn get(&self, digest: Digest, limit: u64) -> Result<Vec<u8>, StoreError> {
        self.store.get(digest, limit)
    }

    fn contains(&self, digest: Digest) -> bool {
        Objects::contains(self.store, digest)
    }

    fn batch(&self) -> Box<dyn ObjectBatch> {
        Box::new(MeanwhileBatch { batch: Objects::batch(self.store), act: self.act.clone() })
    }
}

impl ObjectBatch for MeanwhileBatch {
    fn put(&mut self, bytes: &[u8]) -> Result<Digest, StoreError> {
        (self.act)(bytes);
        let digest = self.batch.put(bytes)?;
        if bytes == FAILS { Err(StoreError::NotFound(digest)) } else { Ok(digest) }
    }

    fn commit(self: Box<Self>) -> Result<(), StoreError> {
        self.batch.commit()
    }
}

/// Overwrites a file with bytes of the same length and resets its modification time.
pub(super) fn forge(path: &Path, byte: u8) -> File {
    let file = OpenOptions::new().write(true).open(path).expect("opened");
    forge_open(&file, byte);
    file
}

fn forge_open(file: &File, byte: u8) {
    let modified = file.metadata().expect("there").modified().expect("known");
    file.write_all_at(&[byte; 1000], 0).expect("written");
    file.set_modified(modified).expect("set");
}

/// Writes to a file by a second, temporary link.
pub(super) fn pass_by(file: &Path, name: &Path, byte: u8) {
    std::fs::hard_link(file, name).expect("linked");
    forge(name, byte);
    std::fs::remove_file(name).expect("removed");
}

/// An action that runs once in the workspace.
pub(super) type Once = Box<dyn Fn(&Path) + Send + Sync>;

/// Prepares a capture and runs an action during it, when a recently written file is read.
fn prepare_while(world: &World, tracker: &mut Tracker, act: impl Fn(&Path) + Send + Sync + 'static) {
    prepare_while_each(world, tracker, [("g", Box::new(act))]);
}

/// Does the same with several files and actions.
pub(super) fn prepare_while_each<const N: usize>(world: &World, tracker: &mut Tracker, acts: [(&str, Once); N]) {
    const READ: [u8; 1000] = [254; 1000];
    let names = acts.each_ref().map(|(name, _)| *name);
    let root = world.path("");
    let acts: Vec<_> = (0_u8..)
        .zip(acts)
        .map(|(n, (name, act))| {
            let bytes = READ.map(|byte| byte - n);
            world.write(name, bytes);
            (bytes, act, AtomicBool::new(false))
        })
        .collect();
    let act = move |content: &[u8]| {
        for (bytes, act, done) in &acts {
            if content == bytes && !done.swap(true, Ordering::Relaxed) {
                act(&root);
            }
        }
    };
    tracker.prepare(&Meanwhile { store: &world.store, act: std::sync::Arc::new(act) }).expect("prepared");
    // The next call writes them again.
    names.iter().for_each(|name| world.write(name, ""));
}

/// Renames all existing folders of a numbered series.
pub(super) fn all(root: &Path, from: &str, to: &str, folders: usize) {
    for n in 0..folders {
        let _ = std::fs::rename(root.join(format!("{from}{n}")), root.join(format!("{to}{n}")));
    }
}

/// Waits until the time stamps are trusted.
pub(super) fn settle() {
    std::thread::sleep(std::time::Duration::from_millis(100));
}

/// Checks that the capture equals that of a new tracker.
pub(super) fn is_what_is_there(world: &World, tracker: &mut Tracker) {
    let captured = tracker.capture(&world.store).expect("captured");
    let paths = world.places_of("fresh");
    let mut fresh = Tracker::open(WorkspacePaths { workspace: world.path(""), ..paths }).expect("opened");
    let walked = fresh.capture(&world.store).expect("captured");
    assert_eq!(changes(world, captured.tree, walked.tree), []);
}

#[test]
fn mapping_opened_during_pass() {
    let world = World::new();
    let mut tracker = world.tracker();
    for round in 0..4 {
        (0..9).for_each(|n| world.write(&format!("f{n}"), [n + 10 * round; 4096]));
        let (kept, root) = (std::sync::Arc::new(std::sync::Mutex::new(Vec::new())), world.path(""));
        let keep = kept.clone();
        // The check for writers is over and found none.
        let act = move |content: &[u8]| {
            if content.len() == 4096 {
                keep.lock().expect("sound").push(Mapping::of(&root.join(format!("f{}", content[0] % 10))));
            }
        };
        let meanwhile = Meanwhile { store: &world.store, act: std::sync::Arc::new(act) };
        tracker.prepare(&meanwhile).expect("prepared");
        let mut kept = kept.lock().expect("sound");
        assert!(kept.len() >= 9);
        kept.iter_mut().for_each(|mapping| mapping.write(200 + round));
        is_what_is_there(&world, &mut tracker);
    }
}

#[test]
fn folder_replaced_during_pass() {
    let world = World::new();
    std::fs::create_dir(world.path("d")).expect("made");
    let mut tracker = world.tracker();
    // The order of the folders is random.
    for round in 0..16_u8 {
        world.write("d/x", [100 + round; 4096]);
        world.write("d/stays", [200; 4096]);
        tracker.capture(&world.store).expect("captured");
        world.write("d/x", "reported");
        prepare_while(&world, &mut tracker, |root| {
            std::fs::rename(root.join("d"), root.join("e")).expect("renamed");
            std::fs::create_dir(root.join("d")).expect("made");
            std::fs::write(root.join("d/x"), "another").expect("written");
        });
        world.write("d/x", "later");
        world.write("e/stays", "elsewhere");
        is_what_is_there(&world, &mut tracker);
        std::fs::remove_dir_all(world.path("e")).expect("removed");
    }
}

#[test]
fn transient_link_during_pass() {
    let world = World::new();
    (0..20).for_each(|n| world.write(&format!("f{n}"), [b'a'; 1000]));
    let mut tracker = world.tracker();
    settle();
    tracker.capture(&world.store).expect("captured");
    for round in 0..6_u8 {
        // A link and a folder that exist when the pass begins, and are gone when it ends.
        std::fs::hard_link(world.path("f1"), world.path("passing")).expect("linked");
        std::fs::create_dir(world.path("new")).expect("made");
        world.write("f0", [round + 1; 1000]);
        let root = world.path("");
        let act = move |content: &[u8]| {
            if content.first() != Some(&(round + 1)) || !root.join("passing").exists() {
                return;
            }
            std::fs::write(root.join("passing"), [round + 100; 1000]).expect("written");
            std::fs::remove_file(root.join("passing")).expect("removed");
            std::fs::hard_link(root.join("f2"), root.join("new/passing")).expect("linked");
            std::fs::write(root.join("new/passing"), [round + 100; 1000]).expect("written");
            std::fs::remove_dir_all(root.join("new")).expect("removed");
        };
        let meanwhile = Meanwhile { store: &world.store, act: std::sync::Arc::new(act) };
        tracker.prepare(&meanwhile).expect("prepared");
        assert!(!world.path("passing").exists() && !world.path("new").exists());
        is_what_is_there(&world, &mut tracker);
    }
}

#[test]
fn folder_absent_during_pass() {
    let world = World::new();
    std::fs::create_dir(world.path("d")).expect("made");
    let mut tracker = world.tracker();
    for round in 0..8_u8 {
        world.write("d/x", [100 + round; 1000]);
        world.write("d/stays", [200; 1000]);
        tracker.capture(&world.store).expect("captured");
        world.write("d/x", [50 + round; 1000]);
        // The folder is away from the middle of one pass until the next pass.
        prepare_while(&world, &mut tracker, |root| {
            std::fs::rename(root.join("d"), root.join("away")).expect("renamed");
        });
        std::fs::rename(world.path("away"), world.path("d")).expect("renamed");
        is_what_is_there(&world, &mut tracker);
    }
}

#[test]
fn transient_link_is_captured() {
    let world = World::new();
    (0..300).for_each(|n| world.write(&format!("f{n}"), [b'a'; 1000]));
    let mut tracker = world.tracker();
    settle();
    tracker.capture(&world.store).expect("captured");
    let at = |name: &str| world.path(name);
    let link = |of: &str, name: &str, byte: u8| {
        std::fs::hard_link(at(of), at(name)).expect("linked");
        forge(&at(name), byte)
    };
    // A link in the same folder.
    link("f1", "passing", b'b');
    std::fs::remove_file(at("passing")).expect("removed");
    is_what_is_there(&world, &mut tracker);
    // A link in a folder without a watch.
    std::fs::create_dir(at("new")).expect("made");
    link("f2", "new/passing", b'c');
    std::fs::remove_dir_all(at("new")).expect("removed");
    is_what_is_there(&world, &mut tracker);
    // A link renamed to a third name, and a link moved into such a folder.
    link("f3", "passing", b'd');
    std::fs::rename(at("passing"), at("third")).expect("renamed");
    std::fs::remove_file(at("third")).expect("removed");
    is_what_is_there(&world, &mut tracker);
    link("f4", "passing", b'e');
    std::fs::create_dir(at("new")).expect("made");
    std::fs::rename(at("passing"), at("new/passing")).expect("renamed");
    std::fs::remove_file(at("new/passing")).expect("removed");
    is_what_is_there(&world, &mut tracker);
    // A descriptor that is still open.
    let file = link("f5", "passing", b'f');
    std::fs::remove_file(at("passing")).expect("removed");
    for byte in [b'g', b'h'] {
        is_what_is_there(&world, &mut tracker);
        forge_open(&file, byte);
    }
    is_what_is_there(&world, &mut tracker);
    drop(file);
    tracker.capture(&world.store).expect("captured");
    // A name that another file replaced, and a name that was exchanged with another.
    link("f7", "passing", b'i');
    world.write("other", "other");
    std::fs::rename(at("other"), at("passing")).expect("renamed");
    is_what_is_there(&world, &mut tracker);
    link("f8", "third", b'j');
    let exchange = nix::fcntl::RenameFlags::RENAME_EXCHANGE;
    let here = nix::fcntl::AT_FDCWD;
    nix::fcntl::renameat2(here, &at("third"), here, &at("passing"), exchange).expect("exchanged");
    std::fs::remove_file(at("passing")).expect("removed");
    is_what_is_there(&world, &mut tracker);
    // A change of the mode alone.
    std::fs::hard_link(at("f9"), at("passing")).expect("linked");
    std::fs::set_permissions(at("passing"), Permissions::from_mode(0o751)).expect("set");
    std::fs::remove_file(at("passing")).expect("removed");
    is_what_is_there(&world, &mut tracker);
    tracker.capture(&world.store).expect("captured");
    // Replacing a file by rename requires no full scan.
    world.write("temporary", "whole");
    std::fs::rename(at("temporary"), at("f6")).expect("renamed");
    let captured = tracker.capture(&world.store).expect("captured");
    assert!(captured.stats.full_scan.is_none() && captured.stats.examined < 10, "{:?}", captured.stats);
}

#[test]
fn failed_pass_hides_no_changes() {
    let world = World::new();
    (0..20).for_each(|n| world.write(&format!("f{n}"), [n; 1000]));
    let mut tracker = world.tracker();
    tracker.capture(&world.store).expect("captured");
    let nothing: Act = std::sync::Arc::new(|_| {});
    for round in 0..4_u8 {
        // The failed pass placed marks whose reader is gone.
        (0..20).for_each(|n| world.write(&format!("f{n}"), [n + 20 * (round + 1); 1000]));
        world.write("fails", FAILS);
        let failing = Meanwhile { store: &world.store, act: nothing.clone() };
        tracker.prepare(&failing).expect_err("the store fails");
        world.write("fails", "no more");
        let (kept, root) = (std::sync::Arc::new(std::sync::Mutex::new(Vec::new())), world.path(""));
        let keep = kept.clone();
        let act = move |content: &[u8]| {
            if content.len() == 1000 {
                keep.lock().expect("sound").push(Mapping::of(&root.join(format!("f{}", content[0] % 20))));
            }
        };
        tracker.prepare(&Meanwhile { store: &world.store, act: std::sync::Arc::new(act) }).expect("prepared");
        kept.lock().expect("sound").iter_mut().for_each(|mapping| mapping.write(250));
        is_what_is_there(&world, &mut tracker);
    }
}

#[test]
fn write_in_renamed_folder() {
    let world = World::new();
    world.write("a", [b'a'; 1000]);
    std::fs::create_dir(world.path("d")).expect("made");
    let mut tracker = world.tracker();
    for round in 0..16_u8 {
        world.write("d/x", [round; 1000]);
        settle();
        tracker.capture(&world.store).expect("captured");
        // The rename precedes the pass: its start removes the old watch, and the scan of the folder
        // adds a new one.
        std::fs::rename(world.path("d"), world.path("e")).expect("renamed");
        prepare_while(&world, &mut tracker, move |root| pass_by(&root.join("a"), &root.join("e/t"), 50 + round));
        is_what_is_there(&world, &mut tracker);
        tracker.capture(&world.store).expect("captured");
        // A rename during the pass may hide the folder; the next pass then adds the watch.
        world.write("e/x", [100 + round; 1000]);
        prepare_while(&world, &mut tracker, |root| {
            std::fs::rename(root.join("e"), root.join("d")).expect("renamed");
        });
        pass_by(&world.path("a"), &world.path("d/t"), 100 + round);
        is_what_is_there(&world, &mut tracker);
    }
}

#[test]
fn folder_renamed_before_scan() {
    let world = World::new();
    world.write("a", [b'a'; 1000]);
    // More folders than a pass keeps open, so the last one is opened by name.
    (0..70).for_each(|n| std::fs::create_dir(world.path(&format!("d{n}"))).expect("made"));
    std::fs::create_dir(world.path("e")).expect("made");
    settle();
    let mut tracker = world.tracker();
    prepare_while(&world, &mut tracker, |root| {
        std::fs::rename(root.join("e"), root.join("renamed")).expect("renamed");
    });
    pass_by(&world.path("a"), &world.path("renamed/t"), b'b');
    is_what_is_there(&world, &mut tracker);
}

#[test]
fn name_reused_during_pass() {
    let world = World::new();
    world.write("a", [b'a'; 1000]);
    let mut tracker = world.tracker();
    // The order of the names is random.
    for round in 0..24_u8 {
        world.write("other", "other");
        settle();
        tracker.capture(&world.store).expect("captured");
        std::fs::hard_link(world.path("a"), world.path("t")).expect("linked");
        prepare_while(&world, &mut tracker, move |root| {
            forge(&root.join("t"), round);
            if round % 2 == 0 {
                std::fs::remove_file(root.join("t")).expect("removed");
                std::fs::write(root.join("t"), "new").expect("written");
            } else {
                std::fs::rename(root.join("other"), root.join("t")).expect("renamed");
            }
        });
        is_what_is_there(&world, &mut tracker);
        std::fs::remove_file(world.path("t")).expect("removed");
    }
}

#[test]
fn unseen_name_hides_nothing() {
    const FOLDERS: usize = 6;
    let world = World::new();
    for n in 0..FOLDERS {
        std::fs::create_dir(world.path(&format!("d{n}"))).expect("made");
        world.write(&format!("a{n}"), [b'a'; 1000]);
    }
    std::fs::create_dir(world.path("h")).expect("made");
    let mut tracker = world.tracker();
    // The order of the folders is random.
    for round in 0..12_u8 {
        (0..FOLDERS).for_each(|n| world.write(&format!("d{n}/other"), "other"));
        settle();
        tracker.capture(&world.store).expect("captured");
        for n in 0..FOLDERS {
            std::fs::hard_link(world.path(&format!("a{n}")), world.path(&format!("d{n}/t"))).expect("linked");
        }
        // The folder is away when it is scanned, and back when it is looked up by name.
        let away: Once = Box::new(|root| all(root, "d", "away", FOLDERS));
        let back: Once = Box::new(|root| all(root, "away", "d", FOLDERS));
        prepare_while_each(&world, &mut tracker, [("g", away), ("h/g", back)]);
        all(&world.path(""), "away", "d", FOLDERS);
        for n in 0..FOLDERS {
            let t = world.path(&format!("d{n}/t"));
            forge(&t, round);
            std::fs::rename(world.path(&format!("d{n}/other")), &t).expect("renamed");
        }
        is_what_is_there(&world, &mut tracker);
        (0..FOLDERS).for_each(|n| std::fs::remove_file(world.path(&format!("d{n}/t"))).expect("removed"));
    }
}

#[test]
fn file_moved_during_pass() {
    let world = World::new();
    let mut tracker = world.tracker();
    // The order of the names is random.
    for round in 0..8_u8 {
        for n in 0..20 {
            world.write(&format!("from{n}"), [round; 1000]);
            world.write(&format!("to{n}"), [round + 100; 1000]);
        }
        settle();
        tracker.capture(&world.store).expect("captured");
        for n in 0..20 {
            forge(&world.path(&format!("from{n}")), round + 200);
            File::open(world.path(&format!("to{n}"))).expect("opened");
        }
        prepare_while(&world, &mut tracker, |root| {
            for n in 0..20 {
                std::fs::rename(root.join(format!("from{n}")), root.join(format!("to{n}"))).expect("renamed");
            }
        });
        is_what_is_there(&world, &mut tracker);
    }
}

#[test]
fn returning_file_is_reread() {
    let world = World::new();
    let outside = world.dir.path().join("outside");
    world.write("f", [b'a'; 1000]);
    settle();
    let mut tracker = world.tracker();
    tracker.capture(&world.store).expect("captured");
    std::fs::rename(world.path("f"), &outside).expect("renamed");
    forge(&outside, b'b');
    std::fs::rename(&outside, world.path("f")).expect("renamed");
    is_what_is_there(&world, &mut tracker);
}

#[test]
fn write_by_outside_link() {
    // Writes through a mapping change no time stamp.
    for world in [World::new(), World::at(Path::new("/dev/shm"))] {
        let outside = world.dir.path().join("outside");
        world.write("f", [b'a'; 4096]);
        std::fs::hard_link(world.path("f"), &outside).expect("linked");
        settle();
        let mut tracker = world.tracker();
        for byte in [b'b', b'c'] {
            tracker.capture(&world.store).expect("captured");
            forge(&outside, byte);
            is_what_is_there(&world, &mut tracker);
            // A notification for one name says nothing about the other.
            settle();
            tracker.capture(&world.store).expect("captured");
            forge(&outside, byte + 10);
            std::fs::set_permissions(world.path("f"), Permissions::from_mode(0o600 + u32::from(byte % 8)))
                .expect("set");
            is_what_is_there(&world, &mut tracker);
            settle();
            tracker.capture(&world.store).expect("captured");
        }
        let mut mapping = Mapping::of(&outside);
        for byte in [b'd', b'e'] {
            mapping.write(byte);
            tracker.prepare(&world.store).expect("prepared");
            mapping.write(byte + 10);
            is_what_is_there(&world, &mut tracker);
        }
    }
}

/// A linked temporary file may have the inode number, length and times of its predecessor, without
/// a notification of its writes.
#[test]
fn linked_tmpfile_is_read() {
    use nix::fcntl::{AtFlags, OFlag};
    let world = World::new();
    world.write("a", [1; 1000]);
    settle();
    let mut tracker = world.tracker();
    tracker.capture(&world.store).expect("captured");
    let mut same_number = 0;
    for byte in 2..12 {
        let before = world.path("a").metadata().expect("there");
        std::fs::remove_file(world.path("a")).expect("removed");
        let flags = OFlag::O_TMPFILE | OFlag::O_RDWR;
        let file = File::from(nix::fcntl::open(&world.path(""), flags, nix::sys::stat::Mode::S_IRWXU).expect("made"));
        file.write_all_at(&[byte; 1000], 0).expect("written");
        file.set_modified(before.modified().expect("known")).expect("set");
        let own = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        let (here, to) = (nix::fcntl::AT_FDCWD, world.path("a"));
        nix::unistd::linkat(here, own.as_str(), here, &to, AtFlags::AT_SYMLINK_FOLLOW).expect("linked");
        drop(file);
        same_number += u32::from(to.metadata().expect("there").ino() == before.ino());
        is_what_is_there(&world, &mut tracker);
    }
    // Other file systems may never reuse inode numbers, which leaves this test without effect.
    let is_ext =
        crate::sys::inode::file_system(File::open(world.path("")).expect("opened").as_fd()).expect("known") == 0xef53;
    assert!(same_number > 0 || !is_ext, "no inode number was reused");
}
