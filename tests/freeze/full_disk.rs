//! A disk that is full during a freeze, and during a restore.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};

use super::Shop;
use super::pause::{Held, checkpoints};
use crate::support::{Host, User, until};

/// A small file system in the place of a directory. Needs root.
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    pub fn of(directory: PathBuf) -> Option<SmallDisk> {
        let made = mount(Some("tmpfs"), &directory, Some("tmpfs"), MsFlags::empty(), Some("size=24m,mode=700"));
        match made {
            Ok(()) => Some(SmallDisk(directory)),
            Err(error) => {
                eprintln!("ignored, because this host cannot mount tmpfs: {error}");
                None
            }
        }
    }

    /// Takes all free space but this.
    pub fn fill(&self, but: u64) {
        let mut filler = File::create(self.0.join("filler")).unwrap();
        while filler.write_all(&[0; 4096]).is_ok() {}
        let taken = filler.metadata().unwrap().len();
        filler.set_len(taken.saturating_sub(but)).unwrap();
    }

    pub fn free(&self) {
        fs::remove_file(self.0.join("filler")).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

#[test]
fn full_disk_fails_freeze() {
    let host = Host::prepare(User::Own);
    let Some(disk) = SmallDisk::of(host.path("data")) else { return };
    let mut shop = Shop::of(host, User::Own);
    shop.sql("CREATE TABLE large (x); INSERT INTO large VALUES (randomblob(4000000))");
    let before = checkpoints(&shop);
    let mut held = Held::begin(&mut shop, "shop", 3);
    until("the kernel's checkpoint", || checkpoints(&shop) > before);
    assert!(held.is_under_way());
    disk.fill(0);
    assert!(!held.end(), "the database cannot be stored");
    assert_eq!(shop.freezes(), 0);
    disk.free();
    until("room", || shop.host.cli(&["freeze", "shop", "-m", "good"]).status.success());
    assert_eq!(shop.freezes(), 1);
    assert_eq!(checkpoints(&shop), before + 1, "the failed freeze leaves no checkpoint");
    assert_eq!(shop.kernel_state(), "1 1");
    shop.wreck_data();
    shop.host.ok(&["--yes", "restore", "shop", "good"]);
    assert_eq!(shop.amounts(), (500, 500));
}

#[test]
fn full_disk_reverts_restore() {
    let shop = Shop::new(User::Own);
    let place = shop.host.path("home").join("place");
    fs::create_dir(&place).unwrap();
    let Some(disk) = SmallDisk::of(place.clone()) else { return };
    let uploads = place.join("uploads");
    fs::create_dir(&uploads).unwrap();
    let random = |seed: u32| -> Vec<u8> {
        let next = |state: &mut u32| {
            *state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            Some((*state >> 24) as u8)
        };
        std::iter::repeat_n((), 6 << 20).scan(seed, |state, ()| next(state)).collect()
    };
    fs::write(uploads.join("large"), random(1)).unwrap();
    shop.host.ok(&["group", "new", "plant"]);
    shop.host.ok(&["group", "add", "plant", "--kernel", "agent"]);
    shop.host.ok(&["group", "add", "plant", "--directory", &uploads.display().to_string()]);
    shop.host.ok(&["freeze", "plant", "-m", "good"]);
    fs::write(uploads.join("large"), "small").unwrap();
    shop.host.ok(&["exec", "agent", "x=2"]);
    // Enough for the present state, not for the copy.
    disk.fill(2 << 20);
    let restore = ["--yes", "restore", "plant", "good"];
    let output = shop.host.cli(&restore);
    let reported = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && reported.contains("as it was"), "{reported}");
    let names = |folder: &Path| -> Vec<_> {
        let mut names: Vec<_> = fs::read_dir(folder).unwrap().flatten().map(|entry| entry.file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&place), ["filler", "uploads"], "no copy is left");
    assert_eq!(fs::read(uploads.join("large")).unwrap(), b"small");
    assert_eq!(shop.kernel_state(), "2 1");
    disk.free();
    shop.host.ok(&restore);
    assert!(fs::read(uploads.join("large")).unwrap() == random(1));
    assert_eq!(shop.kernel_state(), "1 1");
}
