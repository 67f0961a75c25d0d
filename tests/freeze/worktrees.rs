//! Linked work trees as members: captured and restored, and their repository stays as it is.

use std::path::PathBuf;

use super::Shop;
use super::crash_safety::armed;
use crate::support::{User, users};

/// A shop with a member `side`, a linked work tree of its repository, and without the repository itself.
struct Linked {
    shop: Shop,
}

impl Linked {
    fn new(user: User) -> Linked {
        let linked = Linked { shop: Shop::new(user) };
        let side = linked.side().display().to_string();
        linked.shop.write("app.py", "stashed");
        linked.shop.git(&["stash", "-q"]);
        linked.shop.git(&["worktree", "add", "-q", "-b", "side", &side]);
        linked.shop.host.ok(&["group", "rm", "shop", "code"]);
        linked.shop.host.ok(&["group", "add", "shop", "--repository", &side]);
        // Staged work in the repository itself.
        linked.shop.work();
        linked
    }

    fn side(&self) -> PathBuf {
        self.shop.host.path("home").join("side")
    }

    fn git(&self, args: &[&str]) -> String {
        self.shop.git(&[&["-C", "../side"], args].concat())
    }

    fn write(&self, name: &str, text: &str) {
        self.shop.write(&format!("../side/{name}"), text);
    }

    /// Everything of the linked work tree that a freeze captures.
    fn state(&self) -> [String; 4] {
        let read = |name: &str| std::fs::read_to_string(self.side().join(name)).unwrap_or_default();
        let status = self.git(&["--no-optional-locks", "status", "--porcelain"]);
        [self.git(&["rev-parse", "HEAD"]), status, read("app.py"), read("new")]
    }

    /// Index, references, stash and work of the repository. Branches that a test moves are apart.
    fn repository(&self) -> (Vec<u8>, Vec<String>) {
        let index = std::fs::read(self.shop.code().join(".git/index")).expect("there");
        let show = |args: &[&str]| self.shop.git(args);
        let facts = [
            show(&["for-each-ref", "refs/heads", "refs/tags", "refs/remotes", "refs/stash"]),
            show(&["stash", "list", "--format=%H"]),
            show(&["reflog", "--format=%H %gs"]),
            show(&["symbolic-ref", "HEAD"]),
            show(&["--no-optional-locks", "status", "--porcelain"]),
        ];
        (index, facts.to_vec())
    }

    fn refused(&self, args: &[&str], part: &str) {
        let output = self.shop.host.cli(args);
        let reported = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && reported.contains(part), "{part}: {reported}");
    }

    /// Work of each sort.
    fn work(&self) {
        self.write("app.py", "side, changed");
        self.write("new", "untracked");
        self.git(&["add", "app.py"]);
    }

    fn wreck(&self) {
        std::fs::remove_file(self.side().join("new")).expect("removed");
        self.write("app.py", "wrecked");
        self.git(&["commit", "-q", "-a", "-m", "wrecked"]);
    }
}

#[test]
fn linked_worktree_is_restored() {
    users().into_iter().for_each(restored);
}

fn restored(user: User) {
    let linked = Linked::new(user);
    let host = &linked.shop.host;
    linked.work();
    let (good, before) = (linked.state(), linked.repository());
    host.ok(&["freeze", "shop", "-m", "good"]);
    assert_eq!((linked.state(), linked.repository()), (good.clone(), before));
    let lock: toml::Table = host.ok(&["lock", "shop"]).parse().expect("TOML");
    let of = |one: &&toml::Value| one["name"].as_str() == Some("side");
    let locked = lock["repository"].as_array().expect("an array").iter().find(of).expect("it is listed");
    let shared = linked.shop.code().join(".git");
    assert_eq!((locked["kind"].as_str(), locked["of"].as_str()), (Some("worktree"), shared.to_str()));
    assert_eq!((locked["commit"].as_str(), locked["branch"].as_str()), (Some(&*good[0]), Some("side")));
    assert!(host.ok(&["lock", "shop", "--check"]).contains("as at"));
    linked.wreck();
    let (wrecked, before) = (linked.state(), linked.repository());
    let checked = host.cli(&["lock", "shop", "--check"]);
    assert!(String::from_utf8_lossy(&checked.stdout).contains("repository side is at"));
    assert!(host.ok(&["diff", "shop", "good"]).contains("app.py"));
    host.ok(&["--yes", "restore", "shop", "good"]);
    assert_eq!((linked.state(), linked.repository()), (good, before.clone()));
    host.ok(&["--yes", "undo", "shop"]);
    assert_eq!((linked.state(), linked.repository()), (wrecked, before));
    assert_eq!(linked.git(&["symbolic-ref", "--short", "HEAD"]), "side");
}

/// One branch in two work trees would move under one of them.
#[test]
fn branch_of_another_worktree_is_left() {
    let linked = Linked::new(*users().last().unwrap());
    let host = &linked.shop.host;
    host.ok(&["freeze", "shop", "-m", "good"]);
    let at = linked.git(&["rev-parse", "HEAD"]);
    host.ok(&["--yes", "restore", "shop", "good"]);
    linked.shop.git(&["checkout", "-q", "-f", "side"]);
    host.ok(&["--yes", "undo", "shop"]);
    assert_eq!((linked.git(&["rev-parse", "HEAD"]), linked.git(&["branch", "--show-current"])), (at, String::new()));
    assert_eq!(linked.shop.git(&["branch", "--show-current"]), "side");
}

#[test]
fn killed_switch_of_worktree_is_undone() {
    let mut linked = Linked::new(*users().last().unwrap());
    linked.work();
    let good = linked.state();
    linked.shop.host.ok(&["freeze", "shop", "-m", "good"]);
    linked.wreck();
    let (wrecked, before) = (linked.state(), linked.repository());
    let restore = ["--yes", "restore", "shop", "good"];
    for step in ["files", "index", "head"] {
        assert!(!armed(&mut linked.shop, &format!("repository.{step}.switch=kill"), &restore), "{step}");
        assert_eq!((linked.state(), linked.repository()), (wrecked.clone(), before.clone()), "{step}");
    }
    linked.shop.host.ok(&restore);
    assert_eq!((linked.state(), linked.repository()), (good, before));
}

/// A `.git` file leads where the repository itself says so, and nowhere else.
#[test]
fn planted_git_files_are_refused() {
    let linked = Linked::new(*users().last().unwrap());
    let home = linked.shop.host.path("home");
    let freeze = ["freeze", "shop"];
    let (file, own) = (linked.side().join(".git"), linked.shop.code().join(".git/worktrees/side"));
    let plain = std::fs::read_to_string(&file).expect("there");
    let ran = home.join("ran");
    // Settings of another repository, also one with the look of a work tree's.
    let evil = home.join("evil/.git");
    let made =
        std::process::Command::new("git").args(["init", "-q"]).arg(home.join("evil")).status().expect("git runs");
    assert!(made.success());
    std::fs::write(evil.join("config"), format!("[filter \"x\"]\n\tclean = touch {}\n", ran.display()))
        .expect("written");
    std::fs::write(linked.side().join(".gitattributes"), "* filter=x\n").expect("written");
    let copy = evil.join("worktrees/side");
    std::fs::create_dir_all(&copy).expect("made");
    for name in ["HEAD", "commondir", "index"] {
        std::fs::copy(own.join(name), copy.join(name)).expect("copied");
    }
    std::fs::write(copy.join("gitdir"), "/elsewhere/.git\n").expect("written");
    for (named, part) in [
        (format!("gitdir: {}\n", evil.display()), "it is no work tree's"),
        (format!("gitdir: {}\n", copy.display()), "the repository does not name it"),
        (format!("gitdir: {}/none\n", evil.display()), "No such file"),
        ("nonsense\n".into(), "it names no directory"),
        ("x".repeat(5000), "it cannot be read"),
    ] {
        std::fs::write(&file, named).expect("written");
        linked.shop.give();
        linked.refused(&freeze, part);
    }
    // It even names the work tree: then its settings are judged as any.
    std::fs::write(copy.join("gitdir"), format!("{}\n", file.display())).expect("written");
    std::fs::write(&file, format!("gitdir: {}\n", copy.display())).expect("written");
    linked.shop.give();
    linked.refused(&freeze, "may run programs: filter.x.clean");
    std::fs::write(&file, &plain).expect("written");
    std::fs::remove_file(linked.side().join(".gitattributes")).expect("removed");
    // The shared directory is another one.
    let shared = std::fs::read_to_string(own.join("commondir")).expect("there");
    std::fs::write(own.join("commondir"), format!("{}\n", evil.display())).expect("written");
    linked.shop.give();
    linked.refused(&freeze, "shares another directory");
    std::fs::write(own.join("commondir"), shared).expect("written");
    // Settings of the work tree alone.
    std::fs::write(own.join("config.worktree"), format!("[core]\n\tsshCommand = touch {}\n", ran.display()))
        .expect("written");
    linked.shop.give();
    linked.refused(&freeze, "may run programs: core.sshcommand");
    std::fs::remove_file(own.join("config.worktree")).expect("removed");
    // What a kernel can write is not used.
    let code = linked.shop.code().display().to_string();
    linked.shop.host.ok(&["mount", "agent", "/code", &code, "--rw"]);
    linked.refused(&freeze, "agent can write");
    linked.shop.host.ok(&["unmount", "agent", "/code"]);
    linked.shop.host.ok(&freeze);
    assert!(!ran.exists());
}

#[test]
fn submodule_is_no_member() {
    let shop = Shop::new(*users().last().unwrap());
    let (lib, modules) = (shop.code().join("lib"), shop.code().join(".git/modules/lib"));
    std::fs::create_dir_all(&lib).expect("made");
    std::fs::create_dir_all(&modules).expect("made");
    std::fs::write(lib.join(".git"), "gitdir: ../.git/modules/lib\n").expect("written");
    shop.give();
    let output = shop.host.cli(&["group", "add", "shop", "--repository", lib.to_str().expect("text")]);
    let reported = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(5) && reported.contains("outer repository"), "{reported}");
}
