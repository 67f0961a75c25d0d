//! A member that fails, hangs or changes fails the whole freeze.

use std::time::{Duration, Instant};

use super::{Shop, Writer};
use crate::support::{Host, User, until, users};

fn fails(shop: &Shop, what: &str) -> String {
    let freezes = shop.freezes();
    let checkpoints = shop.host.ok(&["log", "agent", "--json"]);
    let output = shop.host.cli(&["freeze", "shop"]);
    let reported = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{what}");
    assert_eq!(shop.freezes(), freezes, "{what}: {reported}");
    assert_eq!(shop.host.ok(&["log", "agent", "--json"]), checkpoints, "{what}: no checkpoint is left: {reported}");
    assert_eq!(shop.kernel_state(), "1 1", "{what}: the kernel goes on");
    reported
}

#[test]
fn failing_member_fails_freeze() {
    let shop = Shop::new(users()[0]);
    let kept = std::fs::read(shop.data()).unwrap();
    std::fs::write(shop.data(), "this is no database".repeat(100)).unwrap();
    assert!(fails(&shop, "a damaged database").contains("data"));
    std::fs::write(shop.data(), kept).unwrap();
    shop.host.ok(&["freeze", "shop"]);
}

#[test]
fn hanging_member_fails_freeze() {
    let host = Host::prepare(User::Own);
    host.configure("[limits]\nfreeze_step = \"5s\"\n");
    let mut shop = Shop::of(host, User::Own);
    // A filter of the user's own configuration that does not end.
    shop.git(&["config", "--global", "filter.slow.clean", "sleep 600"]);
    shop.write(".gitattributes", "*.slow filter=slow\n");
    shop.write("a.slow", "text");
    let begun = Instant::now();
    let reported = fails(&shop, "a hanging filter");
    assert!(reported.contains("did not answer") && begun.elapsed() < Duration::from_secs(300), "{reported}");
    std::fs::remove_file(shop.code().join("a.slow")).unwrap();
    // A slow host may need longer for a step.
    shop.host.kill();
    shop.host.configure("");
    shop.host.launch();
    shop.host.ok(&["freeze", "shop"]);
}

/// A file changes all the time, and keeps its size.
#[test]
fn moving_repository_fails_freeze() {
    let shop = Shop::new(users()[0]);
    let (file, next) = (shop.code().join("moving"), shop.host.path("home").join("next"));
    shop.write("moving", "");
    let mut number = 0u64;
    let writer = Writer::run(move || {
        number += 1;
        // Never half written: git would fail itself.
        std::fs::write(&next, format!("{number:020}")).unwrap();
        std::fs::rename(&next, &file).unwrap();
    });
    let mut taken = 0;
    // A loaded host may delay the writer for the whole of a freeze, but not for each.
    until("a refusal", || {
        let output = shop.host.cli(&["freeze", "shop"]);
        taken += usize::from(output.status.success());
        String::from_utf8_lossy(&output.stderr).contains("changed during the freeze")
    });
    writer.end();
    assert_eq!(shop.freezes(), taken, "nothing of it is visible");
}

#[test]
fn kernel_cannot_make_git_run_code() {
    let shop = Shop::new(users()[0]);
    let (code, proof) = (shop.code().display().to_string(), shop.host.path("home").join("proof"));
    // Hooks and monitors never run.
    shop.git(&["config", "core.fsmonitor", &format!("touch {}", proof.display())]);
    shop.host.ok(&["freeze", "shop"]);
    assert!(!proof.exists());
    // And a repository that a kernel can write is not used at all.
    shop.host.ok(&["mount", "agent", "/code", &code, "--rw"]);
    let reported = fails(&shop, "a writable mount");
    assert!(reported.contains("agent can write"), "{reported}");
    shop.host.ok(&["unmount", "agent", "/code"]);
    // What its code left in the configuration is not run either.
    shop.git(&["config", "filter.planted.clean", &format!("touch {}; cat", proof.display())]);
    shop.write(".gitattributes", "*.py filter=planted\n");
    let reported = fails(&shop, "a planted filter");
    assert!(reported.contains("filter.planted.clean") && !proof.exists(), "{reported}");
    shop.git(&["config", "--remove-section", "filter.planted"]);
    shop.host.ok(&["freeze", "shop"]);
}

#[test]
fn kernel_cannot_use_submodules() {
    let shop = Shop::new(users()[0]);
    let proof = shop.host.path("home").join("proof");
    let inner = |args: &[&str]| shop.git(&[&["-C", "sub"], args].concat());
    std::fs::create_dir(shop.code().join("sub")).unwrap();
    inner(&["init", "-q"]);
    shop.write("sub/file", "one");
    inner(&["add", "-A"]);
    inner(&["commit", "-q", "-m", "inner"]);
    shop.commit("with a repository inside");
    let sub = shop.code().join("sub").display().to_string();
    shop.host.ok(&["mount", "agent", "/sub", &sub, "--rw"]);
    let reported = fails(&shop, "a writable mount below the work tree");
    assert!(reported.contains("agent can write"), "{reported}");
    shop.host.ok(&["unmount", "agent", "/sub"]);
    inner(&["config", "filter.planted.clean", &format!("touch {}; cat", proof.display())]);
    shop.write("sub/.gitattributes", "* filter=planted\n");
    shop.write("sub/file", "two");
    let reported = fails(&shop, "a repository inside");
    assert!(reported.contains("not within that of the outer repository") && !proof.exists(), "{reported}");
}
