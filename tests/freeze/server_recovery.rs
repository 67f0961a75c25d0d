//! What no failure, no crash and no other program may do to the data directory of a PostgreSQL server.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use ryokan::sys::fault;

use super::Shop;
use super::crash_safety::{killed, killed_at_start};
use super::postgres::programs;
use super::postgres_server::{Cluster, RESTORE, UNDO, plant, refused};
use crate::support::{User, until};

/// Switched, and the former data directory is removed.
const BEFORE_COMMIT: &str = "catalog.group.restored.before_commit=kill";

fn reconfigure(shop: &mut Shop, text: &str) {
    shop.host.kill();
    shop.host.configure(text);
    shop.host.launch();
}

/// Everything of it is another program's work: the daemon made no copy of it.
fn kept(cluster: &Cluster) -> Vec<PathBuf> {
    let beside = fs::read_dir(&cluster.place).unwrap().flatten().map(|entry| entry.path());
    beside.filter(|path| path.display().to_string().contains("data.kept-")).collect()
}

#[test]
fn incomplete_copies_are_never_exchanged() {
    let Some((_mounted, mut shop, cluster)) = plant(User::Own) else { return };
    shop.host.ok(&["freeze", "plant"]);
    cluster.change();
    let changed = cluster.state();
    killed(&mut shop, BEFORE_COMMIT, &RESTORE);
    killed_at_start(&mut shop, "source.server.checkout=kill");
    shop.host.launch();
    assert_eq!(cluster.state(), changed);
    // An attempt that fails is repeated.
    killed(&mut shop, BEFORE_COMMIT, &RESTORE);
    shop.host.env(fault::VARIABLE, "source.server.checkout=eio");
    shop.host.launch();
    assert_eq!(cluster.state(), changed, "{}", shop.host.log());
    shop.host.kill();
    shop.host.env(fault::VARIABLE, "source.server.checkout=enospc");
    shop.host.launch();
    refused(&shop, &RESTORE, "as it was");
    assert_eq!(cluster.state(), changed);
}

#[test]
fn half_removed_copies_are_never_exchanged() {
    let Some((_mounted, mut shop, cluster)) = plant(User::Unprivileged) else { return };
    shop.host.ok(&["freeze", "plant"]);
    cluster.change();
    let changed = cluster.state();
    killed(&mut shop, "source.server.discard=kill", &RESTORE);
    // What a removal file by file would have come to.
    let beside = cluster.place.join(".data.ryokan");
    let removed = ["new", "gone"].map(|name| fs::remove_dir_all(beside.join(name).join("base")).is_ok());
    assert!(removed.contains(&true));
    shop.host.launch();
    assert_eq!(cluster.state(), changed, "{}", shop.host.log());
}

#[test]
fn used_data_directories_are_kept() {
    let Some((_mounted, mut shop, cluster)) = plant(User::Own) else { return };
    shop.host.ok(&["freeze", "plant"]);
    cluster.change();
    let changed = cluster.state();
    // Its server runs until the recovery stops it, or was stopped before.
    for (fault, stops) in [("freeze.member.revert=kill", false), ("source.server.keep=eio", true)] {
        killed(&mut shop, BEFORE_COMMIT, &RESTORE);
        cluster.control_as_user("start");
        cluster.sql("shop", "CREATE TABLE foreign_work (x int)");
        if stops {
            cluster.control_as_user("stop");
        }
        if fault.ends_with("kill") {
            killed_at_start(&mut shop, fault);
        } else {
            shop.host.env(fault::VARIABLE, fault);
        }
        shop.host.launch();
        assert_eq!((cluster.state(), kept(&cluster).len()), (changed.clone(), 1), "{fault}\n{}", shop.host.log());
        let kept = kept(&cluster).remove(0);
        assert!(kept.join("PG_VERSION").exists() && !kept.join("ryokan.restored").exists(), "{fault}");
        assert!(!kept.join("ryokan.used").exists(), "{fault}");
        assert!(Command::new("btrfs").args(["subvolume", "delete"]).arg(kept).output().unwrap().status.success());
        shop.host.env(fault::VARIABLE, "");
    }
}

#[test]
fn copies_of_root_are_closed() {
    let Some((_mounted, mut shop, cluster)) = plant(User::Own) else { return };
    let frozen = cluster.state();
    killed(&mut shop, "source.server.snapshot=kill", &["freeze", "plant"]);
    let beside = cluster.place.join(".data.ryokan");
    let mode = || fs::metadata(&beside).unwrap().permissions().mode() & 0o777;
    assert!(mode() == 0o700 && beside.join("copy").exists());
    // As a daemon leaves it that ends while a private server runs.
    fs::set_permissions(&beside, fs::Permissions::from_mode(0o711)).unwrap();
    shop.host.launch();
    assert_eq!(cluster.state(), frozen);
    shop.host.ok(&["freeze", "plant"]);
    assert_eq!(cluster.state(), frozen);
    // A private server ran in the folder before the switch.
    killed(&mut shop, "source.server.switched=kill", &RESTORE);
    assert!(mode() == 0o700 && beside.join("new").exists());
    shop.host.launch();
    assert_eq!(cluster.state(), frozen);
}

#[test]
fn foreign_folders_are_left_alone() {
    let Some((mounted, shop, cluster)) = plant(User::Own) else { return };
    let frozen = cluster.state();
    let (victim, link) = (mounted.path().join("victim"), cluster.place.join(".data.ryokan"));
    fs::create_dir_all(victim.join("run/inner")).unwrap();
    std::os::unix::fs::symlink(&victim, &link).unwrap();
    refused(&shop, &["freeze", "plant"], "is not a folder of ryokan");
    fs::remove_file(link).unwrap();
    assert!(victim.join("run/inner").exists());
    // Its user could replace the folder of the data directory.
    let give = |user| std::os::unix::fs::chown(mounted.path(), Some(user), None).unwrap();
    give(crate::support::UNPRIVILEGED);
    refused(&shop, &["freeze", "plant"], "others than root can write");
    give(0);
    shop.host.ok(&["freeze", "plant"]);
    assert_eq!(cluster.state(), frozen);
}

#[test]
fn late_stops_are_followed_by_start() {
    let Some((_mounted, mut shop, cluster)) = plant(User::Own) else { return };
    shop.host.ok(&["freeze", "plant"]);
    cluster.change();
    let changed = cluster.state();
    reconfigure(&mut shop, &cluster.configuration("12s", ""));
    // The stop waits for this session, and is killed before.
    let mut session = Command::new(programs().join("psql"));
    session.args(["-X", "-q", "-w", "-U", "shop", "-d", "shop", "-h"]).arg(cluster.socket());
    let mut session = session.args(["-c", "SELECT pg_sleep(18)"]).stdout(Stdio::null()).spawn().unwrap();
    until("the session", || {
        cluster.sql("shop", "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'") == "1"
    });
    let late = cluster.place.join("late-stop");
    fs::write(&late, "").unwrap();
    refused(&shop, &RESTORE, "did not end within");
    fs::remove_file(late).unwrap();
    session.wait().unwrap();
    // It was started again, without a further operation.
    assert_eq!(cluster.state(), changed, "{}", shop.host.log());
}

#[test]
fn unseen_servers_are_never_exchanged() {
    let Some((_mounted, mut shop, cluster)) = plant(User::Own) else { return };
    shop.host.ok(&["freeze", "plant"]);
    cluster.change();
    let changed = cluster.state();
    reconfigure(&mut shop, &cluster.configuration("6s", ""));
    let (file, socket) = (cluster.data().join("postmaster.pid"), cluster.socket().join(".s.PGSQL.5432"));
    let (text, place) = (fs::read_to_string(&file).unwrap(), fs::metadata(cluster.data()).unwrap().ino());
    let device = fs::metadata(cluster.data()).unwrap().dev();
    // As of a server in a container: its number is that of another process here, and it does not answer.
    fs::write(&file, format!("1\n{}", text.split_once('\n').unwrap().1)).unwrap();
    fs::rename(&socket, cluster.place.join("away")).unwrap();
    refused(&shop, &RESTORE, "exit code 1");
    let now = fs::metadata(cluster.data()).unwrap();
    assert_eq!((now.dev(), now.ino()), (device, place));
    fs::write(&file, text).unwrap();
    fs::rename(cluster.place.join("away"), &socket).unwrap();
    reconfigure(&mut shop, &cluster.configuration("120s", ""));
    shop.host.ok(&["freeze", "plant"]);
    assert_eq!(cluster.state(), changed);
    shop.host.ok(&RESTORE);
    shop.host.ok(&UNDO);
    assert_eq!(cluster.state(), changed);
}

#[test]
fn refused_addition_removes_nothing() {
    let Some((_mounted, mut shop, cluster)) = plant(User::Own) else { return };
    shop.host.ok(&["freeze", "plant"]);
    cluster.change();
    let changed = cluster.state();
    killed(&mut shop, "source.server.switched=kill", &RESTORE);
    // The recovery fails as long as the server of the restored directory cannot be stopped.
    cluster.control_as_user("start");
    let broken = cluster.place.join("broken-stop");
    fs::write(&broken, "").unwrap();
    shop.host.launch();
    let former = cluster.place.join(".data.ryokan/new/PG_VERSION");
    assert!(former.exists());
    refused(&shop, &["group", "add", "shop", "--server", "main"], "group plant has");
    refused(&shop, &["group", "add", "plant", "--server", "main"], "has it already");
    assert!(former.exists());
    // The data directory may not be another one until the end.
    let other = cluster.place.join("other");
    let text = cluster.configuration("120s", "");
    let moved = text.replace(&format!("{:?}", cluster.data()), &format!("{other:?}"));
    reconfigure(&mut shop, &moved);
    refused(&shop, &["freeze", "plant"], "is configured with");
    assert!(former.exists());
    fs::remove_file(broken).unwrap();
    reconfigure(&mut shop, &text);
    shop.host.ok(&["freeze", "plant"]);
    assert_eq!((cluster.state(), kept(&cluster).len()), (changed, 1));
}

#[test]
fn files_of_servers_are_no_members() {
    let Some((mounted, mut shop, cluster)) = plant(User::Unprivileged) else { return };
    let folder = mounted.path().join("folder");
    fs::create_dir_all(folder.join("inner")).unwrap();
    for path in [&folder, &folder.join("inner")] {
        std::os::unix::fs::chown(path, Some(crate::support::UNPRIVILEGED), None).unwrap();
    }
    fs::set_permissions(mounted.path(), fs::Permissions::from_mode(0o777)).unwrap();
    for path in [cluster.data(), cluster.data().join("base"), cluster.place.clone()] {
        refused(&shop, &["group", "add", "plant", "--directory", &path.display().to_string()], "overlap");
    }
    shop.host.ok(&["group", "new", "late"]);
    shop.host.ok(&["group", "add", "late", "--directory", &folder.display().to_string()]);
    shop.host.ok(&["freeze", "late"]);
    // A server that is configured later.
    let server = cluster.configuration("120s", "").replace("[postgres.main]", "[postgres.second]");
    let second = server.replace(&format!("{:?}", cluster.data()), &format!("{:?}", folder.join("inner")));
    reconfigure(&mut shop, &cluster.configuration("120s", &second));
    for command in [&["freeze", "late"][..], &["--yes", "restore", "late", "1"]] {
        refused(&shop, command, "PostgreSQL server second overlap");
    }
    shop.host.ok(&["freeze", "plant"]);
}
