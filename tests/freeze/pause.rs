//! The pause of a freeze ends before anything is stored.

use std::fs;
use std::process::{Child, Stdio};

use futures::future::{Either, select};
use ryokan::core::error::ErrorCode;
use ryokan::core::files::WhileHeld;
use ryokan::sys::fault;

use super::Shop;
use super::crash_safety::{killed, points};
use crate::support::{User, WAITS, eventually, out, until, users};

/// A freeze of a group that waits before it stores member `n`, counted from 1, kernels first.
pub struct Held {
    freeze: Child,
    file: std::path::PathBuf,
}

impl Held {
    pub fn begin(shop: &mut Shop, group: &str, n: usize) -> Held {
        let file = shop.host.path("hold");
        fs::write(&file, "").unwrap();
        shop.host.kill();
        shop.host.env(fault::VARIABLE, &format!("freeze.member.store:{n}=hold"));
        shop.host.env(fault::HOLD, &file.display().to_string());
        shop.host.launch();
        let mut command = shop.host.command("ryokan");
        command.args(["--no-autostart", "freeze", group, "-m", "held"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let freeze = command.spawn().unwrap();
        Held { freeze, file }
    }

    pub fn is_under_way(&mut self) -> bool {
        self.freeze.try_wait().unwrap().is_none()
    }

    pub fn end(mut self) -> bool {
        fs::remove_file(&self.file).unwrap();
        self.freeze.wait().unwrap().success()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.file);
        let _ = self.freeze.wait();
    }
}

fn run(shop: &Shop, code: &str) -> String {
    shop.host.with(async |client| out(&client.open_kernel("agent").await.expect("it is there").0, code).await)
}

pub fn checkpoints(shop: &Shop) -> usize {
    shop.host.ok(&["log", "agent", "--json"]).lines().count()
}

#[test]
fn running_code_is_awaited_or_interrupted() {
    let shop = Shop::new(User::Own);
    shop.work();
    let run = || {
        let mut command = shop.host.command("ryokan");
        command.args(["--no-autostart", "exec", "agent", "x=8; sleep 600"]);
        let running = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        until("an execution", || shop.host.ok(&["show", "agent", "--json"]).contains("busy"));
        running
    };
    let mut running = run();
    let refused = shop.host.cli(&["freeze", "shop", "--wait", "200ms"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && said.contains("--interrupt"), "{said}");
    assert!(running.try_wait().unwrap().is_none(), "it runs on");
    assert!(shop.host.ok(&["freeze", "shop", "--interrupt"]).contains("interrupted: execution "), "{said}");
    assert!(!running.wait().unwrap().success());
    let journal = shop.host.ok(&["journal", "agent", "--json"]);
    assert!(journal.contains("interrupted"), "{journal}");
    let cost: serde_json::Value = serde_json::from_str(&shop.host.ok(&["freeze", "shop", "--json"])).unwrap();
    let members = cost["cost"]["members"].as_array().unwrap();
    assert!(members.iter().all(|member| member["interrupted"] == 0), "{cost}");
    // So do a restore and its undo.
    for command in [&["--yes", "restore", "shop", "1"][..], &["--yes", "undo", "shop"]] {
        let mut running = run();
        let refused = shop.host.cli(&[command, &["--wait", "200ms"]].concat());
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(refused.status.code() == Some(1) && said.contains("--interrupt"), "{said}");
        assert!(running.try_wait().unwrap().is_none(), "it runs on");
        let done = shop.host.cli(&[command, &["--interrupt"]].concat());
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(done.status.success() && said.contains("member agent: execution "), "{said}");
        assert!(!running.wait().unwrap().success());
    }
    assert_eq!(shop.host.cli(&["--yes", "undo", "agent", "--interrupt"]).status.code(), Some(2));
}

#[test]
fn files_ignored_meanwhile_are_left_out() {
    let shop = Shop::new(User::Own);
    shop.work();
    shop.write("secret.env", "password");
    let begin = |args: &[&str]| {
        let mut command = shop.host.command("ryokan");
        command.arg("--no-autostart").args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().unwrap()
    };
    let mut running = begin(&["exec", "agent", WAITS]);
    until("an execution", || shop.host.ok(&["show", "agent", "--json"]).contains("busy"));
    // It reads the repository, and then waits for the kernel.
    let mut freeze = begin(&["freeze", "shop", "-m", "good"]);
    std::thread::sleep(std::time::Duration::from_secs(2));
    shop.write(".git/info/exclude", "secret.env\n");
    shop.host.with(async |client| shop.host.release(&client.open_kernel("agent").await.expect("there").0).await);
    assert!(freeze.wait().unwrap().success() && running.wait().unwrap().success());
    for name in ["secret.env", "new.txt"] {
        fs::remove_file(shop.code().join(name)).unwrap();
    }
    shop.host.ok(&["--yes", "restore", "shop", "good"]);
    assert_eq!((shop.read("new.txt").as_deref(), shop.read("secret.env")), (Some("untracked"), None));
}

#[test]
fn work_goes_on_while_storing() {
    for user in users() {
        let mut shop = Shop::new(user);
        shop.work();
        let frozen = shop.state();
        let before = checkpoints(&shop);
        let other = shop.host.path("home").join("other.db");
        fs::copy(shop.data(), &other).unwrap();
        shop.give();
        shop.host.ok(&["group", "new", "other"]);
        shop.host.ok(&["group", "add", "other", "--database", other.to_str().unwrap(), "--name", "data"]);
        let mut held = Held::begin(&mut shop, "shop", 3);
        // Its checkpoint is made: the kernel is free, and everything is pinned.
        until("the kernel's checkpoint", || checkpoints(&shop) > before);
        assert_eq!(run(&shop, "x=7; echo 7 > f; echo $x").trim(), "7");
        shop.sql("UPDATE accounts SET amount = 600 WHERE id = 1; UPDATE accounts SET amount = 400 WHERE id = 2;");
        shop.write("app.py", "later");
        shop.host.ok(&["checkpoint", "agent", "-m", "later"]);
        // Another group does not wait for it.
        shop.host.ok(&["freeze", "other", "-m", "one"]);
        shop.host.ok(&["--yes", "restore", "other", "one"]);
        assert!(held.is_under_way() && shop.freezes() == 0, "nothing is visible before the seal");
        let later = shop.state();
        assert!(held.end());
        shop.host.ok(&["--yes", "restore", "shop", "held"]);
        assert_eq!(shop.state(), frozen);
        shop.host.ok(&["--yes", "undo", "shop"]);
        assert_eq!(shop.state(), later);
    }
}

/// Writers that wait for the copy of their database wait for nothing else.
#[test]
fn waiting_writers_come_first() {
    use nix::sys::statfs::{BTRFS_SUPER_MAGIC, XFS_SUPER_MAGIC, statfs};
    let mut shop = Shop::new(User::Own);
    let kind = statfs(&shop.data()).unwrap().filesystem_type();
    if kind == BTRFS_SUPER_MAGIC || kind == XFS_SUPER_MAGIC {
        eprintln!("ignored, because no writer waits on this file system");
        return;
    }
    shop.sql("PRAGMA journal_mode = delete");
    let before = checkpoints(&shop);
    let mut held = Held::begin(&mut shop, "shop", 1);
    let copy = || {
        let groups = fs::read_dir(shop.host.data().join("groups")).into_iter().flatten().flatten();
        groups.map(|group| group.path().join("data/copy")).any(|copy| copy.exists())
    };
    until("the copy", copy);
    let database = rusqlite::Connection::open(shop.data()).unwrap();
    let change = "UPDATE accounts SET amount = 600 WHERE id = 1; UPDATE accounts SET amount = 400 WHERE id = 2;";
    until("a commit", || {
        let done = database.execute_batch(&format!("BEGIN IMMEDIATE; {change} COMMIT;"));
        done.inspect_err(|_| drop(database.execute_batch("ROLLBACK"))).is_ok()
    });
    assert!(held.is_under_way() && checkpoints(&shop) == before, "no kernel is stored");
    assert!(held.end());
    let freeze: serde_json::Value = serde_json::from_str(&shop.host.ok(&["log", "shop", "--json"])).unwrap();
    assert!(freeze["lock"].as_str().is_some_and(|lock| lock.contains("shared-lock")), "{freeze}");
    shop.host.ok(&["--yes", "restore", "shop", "held", "--member", "data"]);
    assert_eq!(shop.amounts(), (500, 500));
}

/// File operations wait for the end of the pause, or say that it is a freeze.
#[test]
fn file_calls_name_freezes() {
    let mut shop = Shop::new(User::Own);
    let mut held = Held::begin(&mut shop, "shop", 1);
    shop.host.with(async |client| {
        let (kernel, _) = client.open_kernel("agent").await.expect("there");
        let hasty = kernel.files_with(WhileHeld::Refuse).await.expect("its files");
        eventually("the freeze has the kernel", || async {
            let refused = hasty.write(b"late", b"x").await;
            refused.is_err_and(|error| error.code == ErrorCode::Busy && error.reason == "freezing")
        })
        .await;
        let refused = hasty.stat(b".", true).await.expect_err("a read, too");
        assert_eq!((refused.message.as_str(), refused.reason.as_str()), ("kernel agent is being frozen", "freezing"));
        let cp = shop.host.cli(&["cp", "--no-wait", "agent:f", "-"]);
        let said = String::from_utf8_lossy(&cp.stderr).into_owned();
        assert!(cp.status.code() == Some(4) && said.contains("kernel agent is being frozen"), "{said}");
        assert!(held.is_under_way());
        let files = kernel.files().await.expect("its files");
        let (waiting, asked) = (Box::pin(files.write(b"late", b"later")), Box::pin(hasty.stat(b".", true)));
        // The daemon answers in order: it has the call that waits.
        let Either::Right((asked, waiting)) = select(waiting, asked).await else { panic!("it did not wait") };
        assert_eq!(asked.expect_err("it is frozen").reason, "freezing");
        assert!(held.end());
        waiting.await.expect("it waits");
        assert_eq!(files.read(b"late").await.expect("read"), b"later");
    });
}

/// What was done between the pause and the failure stays.
#[test]
fn failed_store_fails_freeze() {
    for (n, kill) in [(1, false), (2, false), (3, false), (2, true), (3, true)] {
        let mut shop = Shop::new(*users().last().unwrap());
        let before = checkpoints(&shop);
        let deed = if kill { "kill" } else { "eio" };
        assert!(!killed_or_failed(&mut shop, &format!("freeze.member.store:{n}={deed}"), kill));
        assert_eq!((shop.freezes(), checkpoints(&shop)), (0, before), "{n} {deed}");
        assert_eq!(run(&shop, "x=8; echo $x").trim(), "8");
        shop.host.ok(&["freeze", "shop"]);
        let groups: Vec<_> = fs::read_dir(shop.host.data().join("groups")).unwrap().flatten().collect();
        let dumps = groups.iter().filter(|entry| entry.path().join("data/copy").exists()).count();
        assert!(dumps <= 1, "{n} {deed}: only the last operation keeps files");
    }
}

fn killed_or_failed(shop: &mut Shop, fault: &str, kill: bool) -> bool {
    if kill {
        let done = killed(shop, fault, &["freeze", "shop"]);
        shop.host.launch();
        return done;
    }
    shop.host.kill();
    shop.host.env(fault::VARIABLE, fault);
    shop.host.launch();
    let done = shop.host.cli(&["freeze", "shop"]).status.success();
    shop.host.env(fault::VARIABLE, "");
    done
}

/// The daemon ends between the resumption and the seal, after the kernel went on.
#[test]
fn later_work_survives_withdrawal() {
    let mut shop = Shop::new(User::Own);
    let before = checkpoints(&shop);
    let mut held = Held::begin(&mut shop, "shop", 3);
    until("the kernel's checkpoint", || checkpoints(&shop) > before);
    run(&shop, "x=9; echo 9 > f");
    assert!(held.is_under_way());
    shop.host.kill();
    shop.host.env(fault::VARIABLE, "");
    shop.host.launch();
    assert_eq!(shop.kernel_state().trim(), "9 9");
    assert_eq!((shop.freezes(), checkpoints(&shop)), (0, before));
    assert!(!points(&["freeze.member.store"]).is_empty() && !held.end());
    shop.host.ok(&["freeze", "shop", "-m", "again"]);
    run(&shop, "x=1");
    shop.host.ok(&["--yes", "restore", "shop", "again"]);
    assert_eq!(shop.kernel_state().trim(), "9 9");
}

#[test]
fn freeze_reports_its_cost() {
    let shop = Shop::new(User::Own);
    let text = shop.host.ok(&["freeze", "shop"]);
    for part in ["pause ", "PAUSE GROWS WITH", "transaction", "git"] {
        assert!(text.contains(part), "{text}");
    }
    let taken: serde_json::Value = serde_json::from_str(&shop.host.ok(&["freeze", "shop", "--json"])).unwrap();
    let cost = &taken["cost"];
    let us = |name: &str| cost[name].as_u64().unwrap();
    assert!(0 < us("pause_us") && us("pause_us") <= us("admission_us") && us("admission_us") <= us("total_us"));
    assert_eq!(cost["members"].as_array().unwrap().len(), 3, "{cost}");
}
