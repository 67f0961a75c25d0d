//! The commits of freezes outlive amends and git's own collection, and go with the last freeze that has them.

use ryokan::sys::fault;

use super::Shop;
use super::crash_safety::{armed, points};
use super::submodules::Nested;
use crate::support::users;

/// What the user has of references, and the stash.
fn own(nested: &Nested) -> [String; 2] {
    [
        nested.git_in(".", &["for-each-ref", "refs/heads", "refs/tags", "refs/stash"]),
        nested.git_in(".", &["stash", "list"]),
    ]
}

/// Removes everything that nothing refers to.
fn collect(nested: &Nested) {
    for path in ["lib/inner", "lib", "."] {
        nested.git_in(path, &["reflog", "expire", "--expire=now", "HEAD", "refs/heads/main"]);
        nested.git_in(path, &["gc", "-q", "--prune=now"]);
    }
}

fn commit(nested: &Nested, text: &str, further: &[&str]) -> String {
    nested.shop.write("app.py", text);
    nested.git_in(".", &[&["commit", "-q", "-a", "-m", text][..], further].concat());
    nested.git_in(".", &["rev-parse", "HEAD"])
}

/// How many freezes keep their commit in a repository.
fn kept(nested: &Nested, path: &str) -> usize {
    nested.git_in(path, &["for-each-ref", "--format=%(refname)", "refs/ryokan/freezes"]).lines().count()
}

fn is_there(nested: &Nested, path: &str, commit: &str) -> bool {
    nested.git_in(path, &["cat-file", "--batch-all-objects", "--batch-check=%(objectname)"]).contains(commit)
}

#[test]
fn collected_commits_are_restored() {
    let nested = Nested::new(users()[0]);
    let host = &nested.shop.host;
    nested.shop.write("app.py", "stashed");
    nested.git_in(".", &["stash", "push", "-q"]);
    let (lib, outer) = (nested.commit_in("lib", "two"), commit(&nested, "two", &[]));
    nested.shop.write("lib/new", "untracked");
    nested.shop.write("new", "untracked");
    let (frozen, mine) = (nested.state(), own(&nested));
    host.ok(&["freeze", "shop", "-m", "good"]);
    assert_eq!((nested.state(), own(&nested)), (frozen.clone(), mine));
    nested.git_in("lib", &["commit", "-q", "--amend", "-m", "amended"]);
    commit(&nested, "amended", &["--amend"]);
    // On no branch.
    nested.git_in(".", &["checkout", "-q", "--detach"]);
    let apart = commit(&nested, "apart", &[]);
    collect(&nested);
    host.ok(&["--yes", "restore", "shop", "good"]);
    collect(&nested);
    assert_eq!(nested.state(), frozen);
    assert_eq!(
        (nested.git_in(".", &["rev-parse", "HEAD"]), nested.git_in("lib", &["rev-parse", "HEAD"])),
        (outer.clone(), lib)
    );
    host.ok(&["--yes", "undo", "shop"]);
    assert_eq!(nested.git_in(".", &["rev-parse", "HEAD"]), apart);
    assert_eq!(["lib/inner", "lib", "."].map(|path| kept(&nested, path)), [3; 3]);
    // With its freezes, the commit is garbage.
    for freeze in ["good", "3"] {
        assert!(is_there(&nested, ".", &outer), "{freeze}");
        host.ok(&["--yes", "group", "rm", "shop", "--freeze", freeze]);
        collect(&nested);
    }
    assert_eq!((is_there(&nested, ".", &outer), kept(&nested, "lib")), (false, 1));
    host.ok(&["--yes", "group", "rm", "shop"]);
    assert_eq!(["lib/inner", "lib", "."].map(|path| kept(&nested, path)), [0; 3]);
}

/// What a freeze keeps of a repository is in it. One that is gone is cloned again, and then restored.
#[test]
fn removed_repository_is_cloned_again() {
    let shop = Shop::new(users()[0]);
    shop.work();
    let frozen = shop.state();
    shop.host.ok(&["freeze", "shop", "-m", "good"]);
    let (remote, code) = (shop.host.path("home").join("remote.git"), shop.code());
    shop.git(&["clone", "-q", "--mirror", ".", remote.to_str().unwrap()]);
    std::fs::remove_dir_all(&code).unwrap();
    let refused = shop.host.cli(&["--yes", "restore", "shop", "good"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("clone it to that place"), "{said}");
    std::fs::create_dir(&code).unwrap();
    shop.git(&["clone", "-q", remote.to_str().unwrap(), "."]);
    shop.host.ok(&["--yes", "restore", "shop", "good"]);
    assert_eq!(shop.state(), frozen);
}

#[test]
fn failed_freeze_keeps_no_commits() {
    let mut nested = Nested::new(*users().last().unwrap());
    for point in points(&["catalog.freeze.seal"]) {
        armed(&mut nested.shop, &format!("{point}=kill"), &["freeze", "shop"]);
        let freezes = nested.shop.freezes();
        assert_eq!(["lib", "."].map(|path| kept(&nested, path)), [freezes; 2], "{point}");
    }
    nested.shop.host.kill();
    nested.shop.host.env(fault::VARIABLE, "catalog.freeze.seal.before_commit=eio");
    nested.shop.host.launch();
    assert!(!nested.shop.host.cli(&["freeze", "shop"]).status.success());
    let freezes = nested.shop.freezes();
    assert_eq!(["lib", "."].map(|path| kept(&nested, path)), [freezes; 2]);
    // What a killed removal leaves, the next one removes.
    let latest = ["--yes", "group", "rm", "shop", "--freeze", "latest"];
    nested.shop.host.kill();
    nested.shop.host.env(fault::VARIABLE, "");
    nested.shop.host.launch();
    for _ in 0..2 {
        nested.shop.host.ok(&["freeze", "shop"]);
    }
    armed(&mut nested.shop, "catalog.freeze.remove.after_commit=kill", &latest);
    assert_eq!(["lib", "."].map(|path| kept(&nested, path)), [freezes + 2; 2]);
    nested.shop.host.ok(&latest);
    assert_eq!((nested.shop.freezes(), kept(&nested, "lib"), kept(&nested, ".")), (freezes, freezes, freezes));
}
