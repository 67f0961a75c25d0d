//! Exported freezes of repositories with submodules.

use std::path::{Path, PathBuf};
use std::process::Command;

use ryokan::sys::fault;

use super::Shop;
use super::portable::{exported, import, is_untouched, put, trusting};
use super::submodules::Nested;
use crate::support::{Host, User, users};

fn places(host: &Host) -> Vec<String> {
    let place = |member: &str, at: PathBuf| ["--place".to_owned(), format!("{member}={}", at.display())];
    let home = host.path("home");
    [place("code", home.join("code")), place("data", home.join("shop.db"))].concat()
}

/// A freeze with unpublished commits of the submodules, and work in each repository.
fn frozen(user: User) -> Nested {
    let nested = Nested::new(user);
    nested.commit_in("lib/inner", "two");
    nested.shop.write("lib/f", "changed");
    nested.shop.write("lib/inner/new", "staged");
    nested.git_in("lib/inner", &["add", "new"]);
    nested.shop.write("app.py", "changed");
    nested.shop.host.ok(&["freeze", "shop", "-m", "one"]);
    nested
}

fn copy(from: &Path, to: &Path) {
    let done = Command::new("cp").arg("-a").args([from, to]).status().unwrap();
    assert!(done.success());
}

#[test]
fn submodules_live_elsewhere() {
    for user in users() {
        let nested = frozen(user);
        let state = nested.state();
        let there = trusting(user, &nested.shop.host);
        let file = put(&there, &exported(&nested.shop.host, &["shop", "-"]));
        let (code, said) = import(&there, &file, &places(&there));
        assert_eq!(code, Some(0), "{user:?}: {said}");
        let there = Nested { shop: Shop { host: there, user } };
        there.shop.host.ok(&["--yes", "restore", "shop", "1"]);
        assert_eq!(there.state(), state, "{user:?}");
        assert_eq!(there.git_in("lib/inner", &["log", "--format=%s"]), "two\nfirst");
        assert_eq!(there.git_in("lib", &["rev-parse", "--git-dir"]), there.at(".git/modules/lib").to_str().unwrap());
        // Their remotes are those of `.gitmodules`, once the user asks for that.
        there.git_in(".", &["submodule", "init", "-q"]);
        assert_eq!(there.git_in("lib", &["remote"]), "", "{user:?}: init alone names none in the submodule");
        there.git_in(".", &["submodule", "sync", "-q", "--recursive"]);
        copy(&nested.shop.host.path("home").join("up-lib"), &there.shop.host.path("home"));
        there.git_in("../up-lib", &["commit", "-q", "--allow-empty", "-m", "upstream"]);
        there.git_in("lib", &["fetch", "-q", "origin"]);
        let fetched = there.git_in("lib", &["log", "-1", "--format=%s", "FETCH_HEAD"]);
        assert_eq!(fetched, "upstream", "{user:?}");
        // Life goes on.
        there.shop.host.ok(&["freeze", "shop", "-m", "two"]);
        there.commit_in("lib", "three");
        let later = there.state();
        there.shop.host.ok(&["--yes", "restore", "shop", "two"]);
        assert_eq!(there.state(), state, "{user:?}");
        there.shop.host.ok(&["--yes", "undo", "shop"]);
        assert_eq!(there.state(), later, "{user:?}");
    }
}

/// A repository that was there gets the histories that it lacks, and its submodules theirs.
#[test]
fn submodules_are_completed() {
    let user = *users().last().unwrap();
    let nested = Nested::new(user);
    let there = trusting(user, &nested.shop.host);
    copy(&nested.shop.code(), &there.path("home").join("code"));
    nested.commit_in("lib/inner", "two");
    nested.shop.write("lib/new", "untracked");
    nested.shop.host.ok(&["freeze", "shop", "-m", "one"]);
    let state = nested.state();
    let file = put(&there, &exported(&nested.shop.host, &["shop", "-"]));
    let there = Nested { shop: Shop { host: there, user } };
    let host = &there.shop.host;
    there.git_in(".", &["submodule", "deinit", "-q", "-f", "lib"]);
    let (code, said) = import(host, &file, &places(host));
    assert!(code == Some(4) && said.contains("submodule lib of"), "{said}");
    there.git_in(".", &["submodule", "update", "-q", "--init", "--recursive", "--no-fetch", "lib"]);
    let (code, said) = import(host, &file, &places(host));
    assert_eq!(code, Some(0), "{said}");
    assert!(there.git_in("lib/inner", &["for-each-ref"]).contains("refs/ryokan/"));
    host.ok(&["--yes", "restore", "shop", "1"]);
    assert_eq!(there.state(), state);
    // With the group goes what kept its histories.
    host.ok(&["--yes", "group", "rm", "shop"]);
    for path in [".", "lib", "lib/inner"] {
        assert!(!there.git_in(path, &["for-each-ref"]).contains("refs/ryokan/"), "{path}");
    }
}

#[test]
fn killed_import_of_submodule_leaves_nothing() {
    let user = *users().last().unwrap();
    let nested = frozen(user);
    let mut there = trusting(user, &nested.shop.host);
    let file = put(&there, &exported(&nested.shop.host, &["shop", "-"]));
    for n in [2, 3] {
        there.kill();
        there.env(fault::VARIABLE, &format!("repository.history.checkout:{n}=kill"));
        there.launch();
        assert_ne!(import(&there, &file, &places(&there)).0, Some(0));
        assert!(there.ends_soon(), "{}", there.log());
        there.kill();
        there.env(fault::VARIABLE, "");
        there.launch();
        assert!(is_untouched(&there), "{n}");
    }
    let (code, said) = import(&there, &file, &places(&there));
    assert_eq!(code, Some(0), "{said}");
}

/// The history has a link where the freeze has a submodule.
#[test]
fn link_replacing_submodule_is_refused() {
    let user = *users().last().unwrap();
    let nested = Nested::new(user);
    std::os::unix::fs::symlink("../elsewhere", nested.at("later")).unwrap();
    nested.git_in(".", &["add", "later"]);
    nested.git_in(".", &["commit", "-q", "-m", "a link"]);
    nested.git_in(".", &["rm", "-q", "later"]);
    nested.git_in(".", &["submodule", "add", "-q", "../up-inner", "later"]);
    nested.shop.host.ok(&["freeze", "shop", "-m", "one"]);
    let there = trusting(user, &nested.shop.host);
    let elsewhere = there.path("home").join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    let file = put(&there, &exported(&nested.shop.host, &["shop", "-"]));
    let (code, said) = import(&there, &file, &places(&there));
    assert!(code != Some(0) && said.contains("is no directory"), "{said}");
    assert!(is_untouched(&there) && std::fs::read_dir(&elsewhere).unwrap().count() == 0);
}
