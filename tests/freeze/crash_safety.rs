//! `kill -9` at each labelled step of a freeze and of a restore: all or nothing after the next start.

use std::path::PathBuf;

use ryokan::sys::fault;

use super::{Shop, amounts};
use crate::support::{Host, until, users};

const FREEZE: [&str; 5] = [
    "freeze.member.snapshot",
    "freeze.member.store",
    "catalog.group.intent",
    "catalog.freeze.seal",
    "state.checkpoints.add",
];
const COMMANDS: [&str; 4] = ["catalog.group.create", "catalog.group.add", "catalog.group.drop", "catalog.group.remove"];
const RECOVERY: [&str; 3] = ["freeze.member.revert", "catalog.group.clear", "freeze.kept.dir"];
const RESTORE: [&str; 7] = [
    "freeze.member.prepare",
    "freeze.member.switch",
    "catalog.group.progress",
    "catalog.group.restored",
    "repository.files.switch",
    "repository.index.switch",
    "repository.head.switch",
];

pub fn points(labels: &[&str]) -> Vec<String> {
    fault::points().filter(|(label, _)| labels.contains(&label.name)).map(|(_, point)| point).collect()
}

pub fn armed(shop: &mut Shop, fault: &str, args: &[&str]) -> bool {
    let done = killed(shop, fault, args);
    shop.host.launch();
    done
}

/// Runs a command whose daemon ends at the fault; the next one is not started yet.
pub fn killed(shop: &mut Shop, fault: &str, args: &[&str]) -> bool {
    shop.host.kill();
    shop.host.env(fault::VARIABLE, fault);
    shop.host.launch();
    let done = shop.host.cli(args).status.success();
    // The answer may precede the step.
    assert!(shop.host.ends_soon(), "{fault} was not reached\n{}", shop.host.log());
    shop.host.kill();
    shop.host.env(fault::VARIABLE, "");
    done
}

/// A daemon that ends at the fault before it serves.
pub fn killed_at_start(shop: &mut Shop, fault: &str) {
    shop.host.env(fault::VARIABLE, fault);
    shop.host.spawn();
    until(&format!("death at {fault}"), || !Host::is_alive(shop.host.pid() as u32));
    shop.host.wait();
    shop.host.env(fault::VARIABLE, "");
}

/// The copies of databases that a recovery kept.
fn kept(shop: &Shop) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(shop.host.data().join("groups/kept")) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    found.sort();
    found
}

#[test]
fn killed_freeze_leaves_nothing() {
    let mut shop = Shop::new(*users().last().unwrap());
    for point in points(&FREEZE) {
        let (state, freezes) = (shop.state(), shop.freezes());
        let checkpoints = shop.host.ok(&["log", "agent", "--json"]).lines().count();
        armed(&mut shop, &format!("{point}=kill"), &["freeze", "shop", "-m", "x"]);
        let now = shop.host.ok(&["log", "agent", "--json"]).lines().count();
        match shop.freezes() == freezes {
            true => assert_eq!(now, checkpoints, "{point}: a checkpoint is left"),
            // Sealed just before the end.
            false => assert_eq!(
                (shop.freezes(), now, point.as_str()),
                (freezes + 1, checkpoints + 1, "catalog.freeze.seal.after_commit")
            ),
        }
        assert_eq!(shop.state(), state, "{point}");
    }
    shop.host.ok(&["freeze", "shop"]);
}

#[test]
fn killed_restore_is_all_or_nothing() {
    let mut shop = Shop::new(*users().last().unwrap());
    shop.work();
    let frozen = shop.state();
    shop.host.ok(&["freeze", "shop", "-m", "good"]);
    shop.wreck();
    let wrecked = shop.state();
    let mut faults: Vec<String> = points(&RESTORE).iter().map(|point| format!("{point}=kill")).collect();
    faults.extend([2, 3].map(|n| format!("freeze.member.switch:{n}=kill")));
    for fault in faults {
        armed(&mut shop, &fault, &["--yes", "restore", "shop", "good"]);
        let now = shop.state();
        let is_committed = fault == "catalog.group.restored.after_commit=kill";
        assert_eq!(now, if is_committed { frozen.clone() } else { wrecked.clone() }, "{fault}");
        assert!(!shop.host.ok(&["group", "show", "shop"]).contains("interrupted"), "{fault}");
        if is_committed {
            shop.host.ok(&["--yes", "undo", "shop"]);
            assert_eq!(shop.state(), wrecked);
        }
    }
    shop.host.ok(&["--yes", "restore", "shop", "good"]);
    assert_eq!(shop.state(), frozen);
}

#[test]
fn failed_restore_goes_back() {
    for fault in
        ["freeze.member.switch:3=eio", "repository.head.switch=eio", "catalog.group.restored.before_commit=eio"]
    {
        let mut shop = Shop::new(users()[0]);
        shop.host.ok(&["freeze", "shop", "-m", "good"]);
        shop.work();
        shop.wreck();
        let wrecked = shop.state();
        shop.host.kill();
        shop.host.env(fault::VARIABLE, fault);
        shop.host.launch();
        let failed = shop.host.cli(&["--yes", "restore", "shop", "good"]);
        let reported = String::from_utf8_lossy(&failed.stderr).into_owned();
        assert!(!failed.status.success() && reported.contains("as it was"), "{fault}: {reported}");
        assert_eq!(shop.state(), wrecked, "{fault}");
        shop.host.ok(&["--yes", "restore", "shop", "good"]);
        assert_ne!(shop.state(), wrecked, "{fault}");
    }
}

const RESTORE_GOOD: [&str; 4] = ["--yes", "restore", "shop", "good"];

#[test]
fn foreign_writes_are_kept() {
    let mut shop = Shop::new(*users().last().unwrap());
    shop.work();
    shop.host.ok(&["freeze", "shop", "-m", "good"]);
    shop.wreck();
    let wrecked = shop.state();
    let write = "UPDATE accounts SET amount = 600 WHERE id = 1; UPDATE accounts SET amount = 400 WHERE id = 2;";
    // The restored database is not another program's.
    killed(&mut shop, "catalog.group.restored.before_commit=kill", &RESTORE_GOOD);
    assert_eq!(shop.amounts(), (500, 500));
    shop.host.launch();
    assert_eq!((shop.state(), kept(&shop)), (wrecked.clone(), Vec::new()));
    killed(&mut shop, "catalog.group.restored.before_commit=kill", &RESTORE_GOOD);
    shop.sql(write);
    shop.host.launch();
    assert_eq!(shop.state(), wrecked);
    assert_eq!(kept(&shop).iter().map(|path| amounts(path)).collect::<Vec<_>>(), [Ok((600, 400))]);
    let log = shop.host.log();
    assert!(log.contains(&kept(&shop)[0].display().to_string()), "{log}");
    // There was no database before the restore: it is removed again, with a copy.
    for suffix in ["", "-wal", "-shm"] {
        let _ = std::fs::remove_file(format!("{}{suffix}", shop.data().display()));
    }
    killed(&mut shop, "catalog.group.restored.before_commit=kill", &RESTORE_GOOD);
    shop.sql(write);
    shop.host.launch();
    assert!(!shop.data().exists());
    assert_eq!(kept(&shop).iter().map(|path| amounts(path)).collect::<Vec<_>>(), [Ok((600, 400)), Ok((600, 400))]);
}

#[test]
fn killed_commands_are_whole() {
    let mut shop = Shop::new(*users().last().unwrap());
    let data = shop.data().display().to_string();
    let add = ["group", "add", "other", "--database", &data, "--name", "data"];
    // The command, the one that takes it back, and what the command adds or removes.
    type Undoable<'a> = (&'a [&'a str], Option<&'a [&'a str]>, &'a str);
    let commands: [Undoable<'_>; 4] = [
        (&["group", "new", "other"], Some(&["--yes", "group", "rm", "other"]), "other"),
        (&add, Some(&["group", "rm", "other", "data"]), "data"),
        (&["group", "rm", "other", "data"], Some(&add), "data"),
        (&["--yes", "group", "rm", "other"], None, "other"),
    ];
    for (label, (command, back, name)) in COMMANDS.into_iter().zip(commands) {
        let removes = command.contains(&"rm");
        for point in points(&[label]) {
            armed(&mut shop, &format!("{point}=kill"), command);
            let shown =
                shop.host.cli(if name == "data" { &["group", "show", "other"][..] } else { &["group", "show"] });
            let there = String::from_utf8_lossy(&shown.stdout).lines().any(|line| line.starts_with(name));
            let done = there != removes;
            assert_eq!(done, point.ends_with("after_commit"), "{point}");
            if let (true, Some(back)) = (done, back) {
                shop.host.ok(back);
            }
        }
        if back.is_some() {
            shop.host.ok(command);
        }
    }
}

#[test]
fn killed_recovery_is_repeated() {
    let mut shop = Shop::new(*users().last().unwrap());
    shop.work();
    shop.host.ok(&["freeze", "shop", "-m", "good"]);
    shop.wreck();
    let wrecked = shop.state();
    for point in points(&RECOVERY) {
        killed(&mut shop, "catalog.group.restored.before_commit=kill", &RESTORE_GOOD);
        if point.starts_with("freeze.kept") {
            shop.sql("UPDATE accounts SET amount = 600 WHERE id = 1; UPDATE accounts SET amount = 400 WHERE id = 2;");
        }
        killed_at_start(&mut shop, &format!("{point}=kill"));
        shop.host.launch();
        assert_eq!(shop.state(), wrecked, "{point}");
        assert!(!shop.host.ok(&["group", "show", "shop"]).contains("interrupted"), "{point}");
    }
}

#[test]
fn killed_withdrawal_is_repeated() {
    let mut shop = Shop::new(*users().last().unwrap());
    let checkpoints = |shop: &Shop| shop.host.ok(&["log", "agent", "--json"]).lines().count();
    for point in points(&["state.checkpoints.withdraw"]) {
        let before = (shop.freezes(), checkpoints(&shop));
        killed(&mut shop, "catalog.freeze.seal.before_commit=kill", &["freeze", "shop"]);
        killed_at_start(&mut shop, &format!("{point}=kill"));
        shop.host.launch();
        assert_eq!((shop.freezes(), checkpoints(&shop)), before, "{point}");
    }
    for point in points(&["freeze.groups.dir"]) {
        let before = (shop.freezes(), checkpoints(&shop));
        armed(&mut shop, &format!("{point}=kill"), &["freeze", "shop"]);
        assert_eq!((shop.freezes(), checkpoints(&shop)), before, "{point}");
    }
}

#[test]
fn killed_replacement_goes_back() {
    let mut shop = Shop::new(*users().last().unwrap());
    shop.host.ok(&["freeze", "shop", "-m", "good"]);
    std::fs::remove_file(shop.data()).unwrap();
    armed(&mut shop, "database.files.replace=kill", &RESTORE_GOOD);
    assert!(!shop.data().exists());
    shop.host.ok(&RESTORE_GOOD);
    assert_eq!(shop.amounts(), (500, 500));
}
