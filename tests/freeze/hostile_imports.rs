//! Files of groups that a trusted host sealed and that hold what should not reach this host; and hosts where another user or
//! a kernel reaches the place.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use ryokan::core::engine::EngineName;

use super::Shop;
use super::portable::{exported, import, is_untouched, put, trusting};
use crate::support::{Host, kernel, out, users};

fn place(member: &str, at: &Path) -> [String; 2] {
    ["--place".to_owned(), format!("{member}={}", at.display())]
}

/// A shop, and a host that trusts it with its file.
fn moved(prepare: impl FnOnce(&Shop)) -> (Shop, Host, PathBuf) {
    let shop = Shop::new(users()[0]);
    prepare(&shop);
    shop.host.ok(&["freeze", "shop"]);
    let there = trusting(users()[0], &shop.host);
    let path = put(&there, &exported(&shop.host, &["shop", "-"]));
    (shop, there, path)
}

#[test]
fn tracked_links_are_not_followed() {
    let (_shop, there, path) = moved(|shop| {
        symlink("../bystander", shop.code().join(".shop.db.ryokan")).unwrap();
        symlink("../elsewhere", shop.code().join("out")).unwrap();
        shop.give();
        shop.git(&["add", "-f", ".shop.db.ryokan", "out"]);
        shop.git(&["commit", "-q", "-m", "links"]);
    });
    let (home, code) = (there.path("home"), there.path("home").join("code"));
    fs::write(home.join("bystander"), "untouched").unwrap();
    fs::create_dir(home.join("elsewhere")).unwrap();
    let (status, said) =
        import(&there, &path, &[place("code", &code), place("data", &code.join("out/shop.db"))].concat());
    assert!(status == Some(4) && said.contains("leads elsewhere"), "{said}");
    assert!(is_untouched(&there));
    let (status, said) = import(&there, &path, &[place("code", &code), place("data", &code.join("shop.db"))].concat());
    assert_eq!(status, Some(0), "{said}");
    assert!(fs::symlink_metadata(code.join(".shop.db.ryokan")).unwrap().is_symlink(), "it came along");
    there.ok(&["--yes", "restore", "shop", "1", "--member", "data"]);
    assert_eq!(super::amounts(&code.join("shop.db")).unwrap(), (500, 500));
    assert_eq!(fs::read_to_string(home.join("bystander")).unwrap(), "untouched");
    assert_eq!(fs::read_dir(home.join("elsewhere")).unwrap().count(), 0);
}

/// Git would run in a directory that others can exchange before it can be checked.
#[test]
fn shared_places_are_refused() {
    let (_shop, there, path) = moved(|_| {});
    let folder = there.path("home").join("srv");
    fs::create_dir(&folder).unwrap();
    let args = [place("code", &folder.join("code")), place("data", &there.path("home").join("shop.db"))].concat();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
    let (status, said) = import(&there, &path, &args);
    assert!(status == Some(4) && said.contains("another user can replace"), "{said}");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
    there.with(async |client| {
        out(&kernel(&client, "guest", EngineName::Kaish).await, "echo 1").await;
    });
    there.ok(&["mount", "guest", "/srv", folder.to_str().unwrap(), "--rw"]);
    let (status, said) = import(&there, &path, &args);
    assert!(status == Some(4) && said.contains("kernel guest can write"), "{said}");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
    there.ok(&["unmount", "guest", "/srv"]);
    let (status, said) = import(&there, &path, &args);
    assert_eq!(status, Some(0), "{said}");
}

/// The attributes of the file name a filter of the user.
#[test]
fn user_filters_see_no_import() {
    let (_shop, there, path) = moved(|shop| {
        shop.write(".gitattributes", "*.py filter=mark\n");
        shop.commit("attributes");
    });
    let (home, proof) = (there.path("home"), there.path("home").join("proof"));
    let filter = format!("[filter \"mark\"]\n\tsmudge = \"touch {}; cat\"\n", proof.display());
    fs::write(home.join(".gitconfig"), filter).unwrap();
    let args = [place("code", &home.join("code")), place("data", &home.join("shop.db"))].concat();
    let (status, said) = import(&there, &path, &args);
    assert_eq!(status, Some(0), "{said}");
    assert!(home.join("code/app.py").exists() && !proof.exists());
}

/// Something has come into the place by the time that the group is visible: it stays, and the group goes on later.
#[test]
fn taken_place_is_kept() {
    let (_shop, mut there, path) = moved(|_| {});
    let home = there.path("home");
    let args = [place("code", &home.join("code")), place("data", &home.join("shop.db"))].concat();
    there.kill();
    there.env(ryokan::sys::fault::VARIABLE, "freeze.import.place.rename=kill");
    there.launch();
    assert_ne!(import(&there, &path, &args).0, Some(0));
    there.kill();
    there.env(ryokan::sys::fault::VARIABLE, "");
    fs::create_dir(home.join("code")).unwrap();
    fs::write(home.join("code/work"), "of the user").unwrap();
    there.launch();
    assert!(there.ok(&["group", "show", "shop"]).contains("interrupted"));
    let refused = there.cli(&["freeze", "shop"]);
    assert!(String::from_utf8_lossy(&refused.stderr).contains("by now"), "{refused:?}");
    assert_eq!(fs::read_to_string(home.join("code/work")).unwrap(), "of the user");
    fs::rename(home.join("code"), home.join("away")).unwrap();
    there.ok(&["--yes", "restore", "shop", "1"]);
    assert_eq!(fs::read_to_string(home.join("code/app.py")).unwrap(), "one");
    assert_eq!(super::amounts(&home.join("shop.db")).unwrap(), (500, 500));
}

/// Kernels of an interrupted import refuse every operation.
#[test]
fn unfinished_import_is_withdrawn() {
    for is_abandoned in [false, true] {
        let (_shop, mut there, path) = moved(|_| {});
        let home = there.path("home");
        let args = [place("code", &home.join("code")), place("data", &home.join("shop.db"))].concat();
        there.kill();
        there.env(ryokan::sys::fault::VARIABLE, "freeze.import.seal=kill");
        there.launch();
        assert_ne!(import(&there, &path, &args).0, Some(0));
        there.kill();
        // The next daemon cannot withdraw it.
        there.env(ryokan::sys::fault::VARIABLE, "catalog.kernel.remove.before_commit=eio");
        there.launch();
        for command in [&["--yes", "rm", "agent"][..], &["fork", "agent", "copy"], &["rename", "agent", "copy"]] {
            let refused = there.cli(command);
            let said = String::from_utf8_lossy(&refused.stderr).into_owned();
            assert!(!refused.status.success() && said.contains("has not ended"), "{command:?}: {said}");
        }
        there.with(async |client| {
            let agent = client.open_kernel("agent").await.expect("it is there").0;
            let refused = agent.lease("me", std::time::Duration::from_secs(60), &[]).await.err().expect("refused");
            assert_eq!(refused.reason, "group_unfinished");
        });
        if is_abandoned {
            there.ok(&["--yes", "group", "rm", "shop", "--abandon"]);
        } else {
            let output = there.cli(&["freeze", "shop"]);
            assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
        }
        assert!(is_untouched(&there), "{}", there.log());
    }
}
