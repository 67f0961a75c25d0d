//! Repositories with submodules and linked work trees.

use std::path::PathBuf;
use std::process::Command;

use super::Shop;
use super::crash_safety::armed;
use crate::support::{User, users};

/// A shop whose repository has the submodules `lib`, with `inner` inside it, and `spare`, which is not initialised.
pub struct Nested {
    pub shop: Shop,
}

impl Nested {
    pub fn new(user: User) -> Nested {
        let nested = Nested { shop: Shop::new(user) };
        let home = nested.shop.host.path("home");
        for name in ["up-inner", "up-lib", "up-spare"] {
            let made = Command::new("git").args(["init", "-q", "-b", "main"]).arg(home.join(name)).status().unwrap();
            assert!(made.success());
            std::fs::write(home.join(name).join("f"), "one").unwrap();
            if name == "up-lib" {
                nested.git_in("../up-lib", &["submodule", "add", "-q", "../up-inner", "inner"]);
            }
            nested.git_in(&format!("../{name}"), &["add", "-A"]);
            nested.git_in(&format!("../{name}"), &["commit", "-q", "-m", "first"]);
        }
        nested.git_in(".", &["submodule", "add", "-q", "../up-lib", "lib"]);
        nested.git_in(".", &["submodule", "add", "-q", "../up-spare", "spare"]);
        nested.git_in(".", &["submodule", "update", "-q", "--init", "--recursive"]);
        nested.git_in(".", &["submodule", "deinit", "-q", "-f", "spare"]);
        nested.git_in(".", &["commit", "-q", "-a", "-m", "submodules"]);
        nested
    }

    pub fn at(&self, path: &str) -> PathBuf {
        self.shop.code().join(path)
    }

    pub fn git_in(&self, path: &str, args: &[&str]) -> String {
        let mut command = Command::new("git");
        command.arg("-C").arg(self.at(path)).args(["-c", "protocol.file.allow=always"]);
        command.args(["-c", "user.name=t", "-c", "user.email=t@t"]).args(args);
        // A clone's other side gets no options of the command line.
        let trusting = self.shop.host.path("trusting.gitconfig");
        std::fs::write(&trusting, "[safe]\n\tdirectory = *\n").unwrap();
        command.env("GIT_ALLOW_PROTOCOL", "file").env("GIT_CONFIG_GLOBAL", trusting);
        let output = command.env("HOME", self.shop.host.path("home")).output().unwrap();
        assert!(output.status.success(), "{path} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
        self.shop.give();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    /// Commits, staged and other work of all repositories, without what git keeps for itself.
    pub fn state(&self) -> Vec<String> {
        let one = |path| {
            let head = self.git_in(path, &["rev-parse", "HEAD"]);
            let status = self.git_in(path, &["--no-optional-locks", "status", "--porcelain"]);
            let files = ["f", "new"].map(|name| std::fs::read_to_string(self.at(path).join(name)).unwrap_or_default());
            format!("{path} {head} {status} {files:?} {}", self.git_in(path, &["stash", "list"]))
        };
        [".", "lib", "lib/inner"].map(one).to_vec()
    }

    pub fn commit_in(&self, path: &str, text: &str) -> String {
        self.shop.write(&format!("{path}/f"), text);
        self.git_in(path, &["commit", "-q", "-a", "-m", text]);
        self.git_in(path, &["rev-parse", "HEAD"])
    }

    fn refused(&self, args: &[&str], part: &str) {
        let output = self.shop.host.cli(args);
        let reported = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && reported.contains(part), "{part}: {reported}");
    }
}

#[test]
fn submodules_are_restored() {
    users().into_iter().for_each(restored);
}

fn restored(user: User) {
    let nested = Nested::new(user);
    let host = &nested.shop.host;
    let inner = nested.commit_in("lib/inner", "two");
    nested.shop.write("lib/f", "changed");
    nested.shop.write("lib/new", "untracked");
    nested.shop.write("lib/inner/new", "staged");
    nested.git_in("lib/inner", &["add", "new"]);
    let index = |path: &str| std::fs::read(nested.shop.code().join(path)).unwrap();
    let (before, indexes) = (nested.state(), [index(".git/index"), index(".git/modules/lib/index")]);
    host.ok(&["freeze", "shop", "-m", "good"]);
    assert_eq!([index(".git/index"), index(".git/modules/lib/index")], indexes);
    assert_eq!(nested.state(), before);
    assert_eq!(nested.git_in("lib", &["branch", "--show-current"]), "main");
    let lock: toml::Table = host.ok(&["lock", "shop"]).parse().expect("TOML");
    let locked: Vec<_> = lock["repository"][0]["submodule"].as_array().unwrap().iter().collect();
    let facts: Vec<_> =
        locked.iter().map(|one| (one["path"].as_str().unwrap(), one["state"].as_str().unwrap())).collect();
    assert_eq!(facts, [("lib", "changed"), ("lib/inner", "changed"), ("spare", "uninitialised")]);
    assert_eq!(locked[1]["commit"].as_str(), Some(inner.as_str()));
    assert!(host.ok(&["lock", "shop", "--check"]).contains("as at"));

    nested.git_in("lib/inner", &["reset", "-q", "--hard", "HEAD~1"]);
    std::fs::remove_file(nested.at("lib/new")).unwrap();
    let lib = nested.commit_in("lib", "three");
    let wrecked = nested.state();
    let checked = host.cli(&["lock", "shop", "--check"]);
    let reported = String::from_utf8_lossy(&checked.stdout).into_owned();
    let expected = [format!("submodule lib of code is at {}", &lib[..10]), "submodule lib/inner of code".into()];
    assert!(checked.status.code() == Some(1) && expected.iter().all(|one| reported.contains(one)), "{reported}");
    let differs = host.ok(&["diff", "shop", "good"]);
    assert!(differs.contains("lib/inner") && differs.contains(&inner[..10]), "{differs}");
    host.ok(&["--yes", "restore", "shop", "good"]);
    assert_eq!(nested.state(), before);
    // Commits are checked out without their branches.
    let checked = String::from_utf8(host.cli(&["lock", "shop", "--check", "good"]).stdout).expect("text");
    let differs: Vec<&str> = checked.lines().filter(|line| !line.is_empty()).collect();
    assert_eq!(differs, ["repository code is on another branch", "submodule lib of code is on another branch"]);
    host.ok(&["--yes", "undo", "shop"]);
    assert_eq!(nested.state(), wrecked);
}

#[test]
fn missing_submodule_refuses_restore() {
    let nested = Nested::new(*users().last().unwrap());
    let host = &nested.shop.host;
    host.ok(&["freeze", "shop", "-m", "good"]);
    let restore = ["--yes", "restore", "shop", "good"];
    nested.shop.write("app.py", "later");
    nested.git_in(".", &["submodule", "deinit", "-q", "-f", "lib"]);
    nested.refused(&restore, "submodule lib of");
    assert_eq!(nested.shop.read("app.py").as_deref(), Some("later"), "nothing was touched");
    nested.git_in(".", &["submodule", "update", "-q", "--init", "--recursive", "lib"]);
    // One that the freeze does not know would stay behind.
    nested.git_in(".", &["submodule", "add", "-q", "../up-inner", "more"]);
    nested.refused(&restore, "had no submodule more");
    assert_eq!(nested.shop.read("more/f").as_deref(), Some("one"), "nothing was touched");
    nested.git_in(".", &["rm", "-q", "-f", "more"]);
    host.ok(&restore);
    assert_eq!(nested.shop.read("app.py").as_deref(), Some("one"));
}

#[test]
fn submodule_programs_do_not_run() {
    let nested = Nested::new(*users().last().unwrap());
    let ran = nested.shop.host.path("home").join("ran");
    let command = format!("touch {}", ran.display());
    std::fs::write(nested.at("lib/.gitattributes"), "* filter=x\n").unwrap();
    let config = nested.at(".git/modules/lib/config");
    let plain = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, format!("{plain}[filter \"x\"]\n\tclean = {command}\n")).unwrap();
    nested.shop.give();
    nested.refused(&["freeze", "shop"], "may run programs: filter.x.clean");
    std::fs::write(&config, plain).unwrap();
    // A submodule may not lead to another repository.
    let link = std::fs::read_to_string(nested.at("lib/.git")).unwrap();
    std::fs::write(nested.at("lib/.git"), "gitdir: ../../up-lib/.git\n").unwrap();
    nested.shop.give();
    nested.refused(&["freeze", "shop"], "is not within that of the outer repository");
    std::fs::write(nested.at("lib/.git"), link).unwrap();
    nested.shop.give();
    nested.shop.host.ok(&["freeze", "shop"]);
    assert!(!ran.exists());
}

#[test]
fn linked_worktrees_are_named() {
    let shop = Shop::new(*users().last().unwrap());
    let side = shop.host.path("home").join("side");
    shop.git(&["worktree", "add", "-q", side.to_str().unwrap()]);
    shop.host.ok(&["freeze", "shop", "-m", "good"]);
    let lock: toml::Table = shop.host.ok(&["lock", "shop"]).parse().expect("TOML");
    let named = lock["repository"][0]["worktrees"].as_array().unwrap();
    assert_eq!(named.iter().map(|one| one.as_str()).collect::<Vec<_>>(), [side.to_str()]);
    std::fs::write(side.join("app.py"), "side").unwrap();
    shop.git(&["worktree", "remove", "--force", side.to_str().unwrap()]);
    let checked = shop.host.cli(&["lock", "shop", "--check"]);
    assert!(String::from_utf8_lossy(&checked.stdout).contains("other linked work trees"));
}

#[test]
fn killed_switch_of_submodule_is_undone() {
    let mut nested = Nested::new(*users().last().unwrap());
    nested.shop.write("lib/f", "changed");
    nested.commit_in("lib/inner", "two");
    let good = nested.state();
    nested.shop.host.ok(&["freeze", "shop", "-m", "good"]);
    nested.shop.write("lib/inner/f", "wrecked");
    nested.commit_in("lib", "three");
    nested.git_in(".", &["commit", "-q", "-a", "-m", "later"]);
    let wrecked = nested.state();
    let restore = ["--yes", "restore", "shop", "good"];
    // In the submodule, and in the one inside it.
    let steps = ["files.switch:2", "index.switch:2", "head.switch:2", "files.switch:3", "head.switch:3"];
    for step in steps {
        assert!(!armed(&mut nested.shop, &format!("repository.{step}=kill"), &restore), "{step}");
        nested.shop.give();
        assert_eq!(nested.state(), wrecked, "{step}\n{}", nested.shop.host.log());
    }
    nested.shop.host.ok(&restore);
    assert_eq!(nested.state(), good);
}

/// Work inside of a submodule alone is a difference.
#[test]
fn submodule_work_is_compared() {
    let nested = Nested::new(*users().last().unwrap());
    let host = &nested.shop.host;
    host.ok(&["freeze", "shop", "-m", "good"]);
    nested.shop.write("lib/inner/f", "changed");
    let differs = host.ok(&["diff", "shop", "good"]);
    assert!(differs.contains("lib/inner") && differs.contains("changed, index"), "{differs}");
}

/// A file in the place of a submodule that is not initialised would remove what someone put there.
#[test]
fn uninitialised_directory_is_kept() {
    let nested = Nested::new(*users().last().unwrap());
    let host = &nested.shop.host;
    nested.git_in(".", &["rm", "-q", "spare"]);
    nested.shop.write("spare", "a file");
    nested.git_in(".", &["add", "-A"]);
    nested.git_in(".", &["commit", "-q", "-m", "a file"]);
    host.ok(&["freeze", "shop", "-m", "file"]);
    nested.git_in(".", &["checkout", "-q", "HEAD~1"]);
    nested.shop.write("spare/precious", "unpacked here");
    nested.refused(&["--yes", "restore", "shop", "file"], "spare/precious");
    assert_eq!(nested.shop.read("spare/precious").as_deref(), Some("unpacked here"));
}

/// What a kernel left in the repository leads git nowhere else.
#[test]
fn planted_places_are_refused() {
    let nested = Nested::new(*users().last().unwrap());
    let host = &nested.shop.host;
    let freeze = ["freeze", "shop"];
    let (modules, elsewhere) = (nested.at(".git/modules"), host.path("home").join("elsewhere"));
    std::fs::rename(&modules, &elsewhere).expect("moved");
    std::os::unix::fs::symlink(&elsewhere, &modules).expect("linked");
    nested.refused(&freeze, "not within that of the outer repository");
    std::fs::remove_file(&modules).expect("removed");
    std::fs::rename(&elsewhere, &modules).expect("back");
    // Git itself adds no absolute path: the first byte of a plain one becomes a slash.
    let other = host.path("home").join("up-lib");
    let plain = format!(".{}", &other.to_str().expect("a path")[1..]);
    let commit = nested.git_in("../up-lib", &["rev-parse", "HEAD"]);
    nested.git_in(".", &["update-index", "--add", "--cacheinfo", &format!("160000,{commit},{plain}")]);
    let index = nested.at(".git/index");
    let mut bytes = std::fs::read(&index).expect("read");
    let at = bytes.windows(plain.len()).position(|part| part == plain.as_bytes()).expect("it is there");
    bytes[at] = b'/';
    std::fs::write(&index, bytes).expect("written");
    nested.refused(&freeze, "a submodule cannot be read");
}

/// What a kernel has in its workspace: read from the captured tree, and git does not run.
#[test]
fn workspace_lock_names_linked_repositories() {
    let shop = Shop::new(*users().last().unwrap());
    let commit = |digit: char| digit.to_string().repeat(40);
    let script = format!(
        "mkdir -p a/.git/refs/heads a/.git/modules/lib/refs/heads a/.git/worktrees/side a/lib side gone out
         echo 'ref: refs/heads/main' > a/.git/HEAD; echo {main} > a/.git/refs/heads/main
         echo {side} > a/.git/refs/heads/side
         echo 'gitdir: ../.git/modules/lib' > a/lib/.git; echo {lib} > a/.git/modules/lib/HEAD
         echo 'gitdir: /workspace/a/.git/worktrees/side' > side/.git
         echo 'ref: refs/heads/side' > a/.git/worktrees/side/HEAD; echo ../.. > a/.git/worktrees/side/commondir
         echo staged > a/.git/worktrees/side/index
         echo 'gitdir: ../nowhere' > gone/.git; echo 'gitdir: ../../../../etc' > out/.git
         ln -s /etc a/.git/modules/link; mkdir linked; echo 'gitdir: ../a/.git/modules/link' > linked/.git",
        main = commit('a'),
        side = commit('b'),
        lib = commit('c'),
    );
    shop.host.ok(&["spawn", "agent", "--", "sh", "-ec", &script]);
    shop.host.ok(&["checkpoint", "agent", "-m", "linked"]);
    shop.host.ok(&["freeze", "shop"]);
    let freeze: serde_json::Value = serde_json::from_str(&shop.host.ok(&["log", "shop", "--json"])).expect("JSON");
    for text in [shop.host.ok(&["lock", "agent"]), freeze["lock"].as_str().expect("a lock").to_owned()] {
        let lock: toml::Table = text.parse().expect("TOML");
        let facts = |path: &str| {
            let of = |one: &&toml::Value| one["path"].as_str() == Some(path);
            let one = lock["repository"].as_array().expect("an array").iter().find(of).expect("it is listed");
            ["commit", "branch", "kind", "of"].map(|key| one.get(key).map_or("", |value| value.as_str().expect("text")))
        };
        let (main, side, lib) = (commit('a'), commit('b'), commit('c'));
        assert_eq!(facts("a"), [&*main, "main", "", ""]);
        assert_eq!(facts("a/lib"), [&*lib, "", "submodule", "a"]);
        assert_eq!(facts("side"), [&*side, "side", "worktree", "a"]);
        for path in ["gone", "out", "linked"] {
            assert_eq!(facts(path), ["", "", "elsewhere", ""], "{path}");
        }
    }
    shop.host.ok(&["spawn", "agent", "--", "sh", "-c", &format!("echo {} > a/.git/refs/heads/side", commit('d'))]);
    let checked = shop.host.cli(&["lock", "agent", "--check", "linked"]);
    let reported = String::from_utf8_lossy(&checked.stdout).into_owned();
    assert!(checked.status.code() == Some(1) && reported.contains("is at dddddddddd"), "{reported}");
}
