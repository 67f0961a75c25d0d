//! Links that code of a kernel can put beside a member, or in the place of a folder above it, if it can write there.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::PathBuf;

use rusqlite::Connection;

use super::Shop;
use crate::support::users;

/// A file of the user that no operation of a group concerns.
fn bystander(shop: &Shop) -> PathBuf {
    let file = shop.host.path("home").join("bystander");
    fs::write(&file, "untouched").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
    file
}

#[test]
fn planted_link_is_not_followed() {
    for user in users() {
        let shop = Shop::new(user);
        shop.host.ok(&["freeze", "shop", "-m", "good"]);
        let file = bystander(&shop);
        let link = shop.data().with_file_name(".shop.db.ryokan");
        for is_symbolic in [true, false] {
            // The restore of a missing database writes its files beside its place first.
            for suffix in ["", "-wal", "-shm"] {
                let _ = fs::remove_file(format!("{}{suffix}", shop.data().display()));
            }
            let planted = if is_symbolic { symlink(&file, &link) } else { fs::hard_link(&file, &link) };
            planted.unwrap();
            shop.give();
            shop.host.ok(&["--yes", "restore", "shop", "good", "--member", "data"]);
            assert_eq!(fs::read_to_string(&file).unwrap(), "untouched");
            assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);
            assert!(fs::symlink_metadata(shop.data()).unwrap().is_file());
            assert_eq!(shop.amounts(), (500, 500));
        }
    }
}

#[test]
fn moved_folder_is_refused() {
    let shop = Shop::new(users()[0]);
    let home = shop.host.path("home");
    let (folder, elsewhere) = (home.join("shared/members"), home.join("elsewhere"));
    let (database, directory) = (folder.join("notes.db"), folder.join("uploads"));
    fs::create_dir_all(&directory).unwrap();
    fs::create_dir(&elsewhere).unwrap();
    fs::write(directory.join("a"), "a1").unwrap();
    Connection::open(&database).unwrap().execute_batch("CREATE TABLE notes (x)").unwrap();
    shop.give();
    let host = &shop.host;
    host.ok(&["group", "new", "store"]);
    host.ok(&["group", "add", "store", "--database", &database.display().to_string(), "--name", "notes"]);
    host.ok(&["group", "add", "store", "--directory", &directory.display().to_string(), "--name", "uploads"]);
    host.ok(&["freeze", "store", "-m", "good"]);
    // Both members are missing now, at a place that leads elsewhere.
    fs::rename(&folder, home.join("away")).unwrap();
    symlink(&elsewhere, &folder).unwrap();
    for member in ["notes", "uploads"] {
        let output = host.cli(&["--yes", "restore", "store", "good", "--member", member]);
        let reported = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && reported.contains("leads elsewhere"), "{member}: {reported}");
        assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0, "{member} was written elsewhere");
    }
    fs::remove_file(&folder).unwrap();
    fs::create_dir(&folder).unwrap();
    shop.give();
    host.ok(&["--yes", "restore", "store", "good"]);
    assert_eq!(fs::read_to_string(directory.join("a")).unwrap(), "a1");
    Connection::open(&database).unwrap().execute_batch("SELECT x FROM notes").unwrap();
}
