//! Repositories in unusual states: large files by pointers, a rebase under way, no commit, a long history.

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};

use super::Shop;
use crate::support::{Host, User, users};

/// What git-lfs does to one file: the content goes to `.git/lfs`, git has its address.
const LARGE_FILES: &str = r#"#!/bin/sh
store=$(git rev-parse --git-dir)/lfs/objects; mkdir -p "$store"
case $1 in
clean) cat > "$store/part.$$"; id=$(sha256sum < "$store/part.$$" | cut -c1-64); size=$(wc -c < "$store/part.$$")
  mv "$store/part.$$" "$store/$id"; printf 'version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %s\n' "$id" "$size" ;;
smudge) id=$(sed -n 's/^oid sha256://p'); cat "$store/$id" ;;
esac
"#;

fn refused(shop: &Shop, part: &str) {
    let output = shop.host.cli(&["freeze", "shop"]);
    let reported = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && reported.contains(part), "{reported}");
}

#[test]
fn large_files_stay_pointers() {
    let mut host = Host::prepare(users()[0]);
    let bin = host.path("home").join("bin");
    std::fs::create_dir(&bin).unwrap();
    std::fs::write(bin.join("git-lfs"), LARGE_FILES).unwrap();
    std::fs::set_permissions(bin.join("git-lfs"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    host.env("PATH", &path);
    let shop = Shop::of(host, users()[0]);
    let git = |args: &[&str]| {
        let mut command = Command::new("git");
        command.arg("-C").arg(shop.code()).args(["-c", "user.name=t", "-c", "user.email=t@t"]).args(args);
        let output = command.env("HOME", shop.host.path("home")).env("PATH", &path).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    for (key, value) in [("clean", "git-lfs clean -- %f"), ("smudge", "git-lfs smudge -- %f"), ("required", "true")] {
        git(&["config", &format!("filter.lfs.{key}"), value]);
    }
    shop.write(".gitattributes", "*.bin filter=lfs -text\n");
    shop.write("a.bin", &"one".repeat(100_000));
    git(&["add", "-A"]);
    git(&["commit", "-q", "-m", "large"]);
    // Another large file, not committed.
    shop.write("b.bin", &"two".repeat(100_000));
    shop.write("a.bin", &"changed".repeat(100_000));
    shop.host.ok(&["freeze", "shop", "-m", "good"]);
    shop.write("a.bin", "other");
    std::fs::remove_file(shop.code().join("b.bin")).unwrap();
    git(&["add", "-A"]);
    git(&["commit", "-q", "-m", "later"]);
    shop.host.ok(&["--yes", "restore", "shop", "good"]);
    assert_eq!(shop.read("a.bin"), Some("changed".repeat(100_000)));
    assert_eq!(shop.read("b.bin"), Some("two".repeat(100_000)));
    assert!(git(&["show", "HEAD:a.bin"]).starts_with("version https://git-lfs"), "git has a pointer");
    shop.host.ok(&["--yes", "undo", "shop"]);
    assert_eq!(shop.read("a.bin").as_deref(), Some("other"));
}

#[test]
fn rebase_stays_under_way() {
    let shop = Shop::new(users()[0]);
    shop.write("app.py", "two");
    let second = shop.commit("second");
    let begin = ["-c", "sequence.editor=sed -i 1s/pick/edit/", "rebase", "-q", "-i", "HEAD~1"];
    shop.git(&begin);
    shop.write("app.py", "edited");
    let frozen = (shop.git(&["rev-parse", "HEAD"]), shop.git(&["status", "--porcelain"]), shop.read("app.py"));
    let done = shop.host.cli(&["freeze", "shop", "-m", "rebase"]);
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success() && said.contains("its progress is not captured"), "{said}");
    // Other commits under it would be what it goes on with.
    let output = shop.host.cli(&["--yes", "restore", "shop", "rebase"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(4) && said.contains("git rebase --abort"), "{said}");
    shop.host.ok(&["--yes", "restore", "shop", "rebase", "--member", "data"]);
    assert!(shop.code().join(".git/rebase-merge").exists(), "a freeze ends no rebase");
    shop.git(&["add", "-A"]);
    shop.git(&["-c", "core.editor=true", "rebase", "--continue"]);
    assert_eq!(shop.git(&["symbolic-ref", "--short", "HEAD"]), "main");
    shop.host.ok(&["--yes", "restore", "shop", "rebase"]);
    let now = (shop.git(&["rev-parse", "HEAD"]), shop.git(&["status", "--porcelain"]), shop.read("app.py"));
    assert_eq!((now, frozen.0.as_str()), (frozen.clone(), second.as_str()));
    shop.host.ok(&["--yes", "undo", "shop"]);
    assert_eq!(shop.git(&["symbolic-ref", "--short", "HEAD"]), "main");
    // An index with a conflict is no tree.
    shop.git(&["checkout", "-q", "-b", "side", "HEAD~1"]);
    shop.write("app.py", "side");
    shop.commit("side");
    let merged = Command::new("git").arg("-C").arg(shop.code()).args(["merge", "-q", "main"]).output().unwrap();
    assert!(!merged.status.success());
    refused(&shop, "end the merge, rebase");
    shop.git(&["merge", "--abort"]);
    shop.host.ok(&["freeze", "shop"]);
    // Without a conflict, before their commits.
    shop.git(&["checkout", "-q", "main"]);
    shop.write("other.txt", "one");
    shop.commit("other");
    shop.git(&["checkout", "-q", "-b", "third", "HEAD~1"]);
    shop.write("third.txt", "three");
    shop.commit("third");
    for (begin, what) in [
        (&["merge", "-q", "--no-ff", "--no-commit", "main"][..], "merge"),
        (&["revert", "--no-commit", "HEAD"], "revert"),
        (&["bisect", "start"], "bisect"),
    ] {
        let mut command = Command::new("git");
        command.arg("-C").arg(shop.code()).args(["-c", "user.name=t", "-c", "user.email=t@t"]).args(begin);
        drop(command.output().unwrap());
        shop.give();
        let refused = shop.host.cli(&["--yes", "restore", "shop", "rebase"]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(refused.status.code() == Some(4) && said.contains(&format!("a {what} is under way")), "{said}");
        shop.git(&[what, if what == "bisect" { "reset" } else { "--abort" }]);
    }
    shop.host.ok(&["--yes", "restore", "shop", "rebase"]);
}

#[test]
fn history_does_not_grow_freezes() {
    let shop = Shop::new(users()[0]);
    let mut commits = String::new();
    for n in 0..3000 {
        commits.push_str(&format!("commit refs/heads/main\ncommitter t <t@t> {n} +0000\ndata 1\nx\n"));
        if n == 0 {
            commits.push_str(&format!("from {}\n", shop.git(&["rev-parse", "HEAD"])));
        }
        commits.push_str(&format!("M 100644 inline f{}\ndata <<E\n{n}\nE\n\n", n % 50));
    }
    let mut import = Command::new("git");
    import.arg("-C").arg(shop.code()).args(["-c", "safe.directory=*", "fast-import", "--quiet"]);
    let mut import = import.stdin(Stdio::piped()).spawn().unwrap();
    import.stdin.take().unwrap().write_all(commits.as_bytes()).unwrap();
    assert!(import.wait().unwrap().success());
    shop.give();
    shop.git(&["reset", "-q", "--hard"]);
    shop.work();
    let frozen = shop.state();
    shop.host.ok(&["freeze", "shop", "-m", "deep"]);
    shop.git(&["checkout", "-q", "-f", "--detach", "HEAD~2999"]);
    shop.host.ok(&["--yes", "restore", "shop", "deep"]);
    assert_eq!(shop.state(), frozen);
    // The history is the repository's own: a freeze holds what the commit does not have.
    let folder = shop.host.data().join("store");
    let kept = Command::new("du").args(["-sb"]).arg(folder).output().unwrap();
    let kept: u64 = String::from_utf8(kept.stdout).unwrap().split_whitespace().next().unwrap().parse().unwrap();
    assert!(kept < 1 << 20, "{kept} bytes");
}

#[test]
fn empty_repository_is_refused() {
    let shop = Shop::new(users()[0]);
    let empty = shop.host.path("home").join("empty");
    let made = Command::new("git").args(["init", "-q"]).arg(&empty).status().unwrap();
    assert!(made.success());
    shop.host.ok(&["group", "add", "shop", "--repository", empty.to_str().unwrap()]);
    refused(&shop, "has no commit yet");
}

/// A file of the user may have a name like that of a part that a restore leaves out.
#[test]
fn tracked_parts_are_captured() {
    let shop = Shop::new(users()[0]);
    shop.write(".notes.ryokan", "one");
    shop.write(".gone.ryokan", "one");
    shop.commit("notes");
    shop.write(".notes.ryokan", "two");
    std::fs::remove_file(shop.code().join(".gone.ryokan")).unwrap();
    shop.write(".part.ryokan", "untracked");
    shop.host.ok(&["freeze", "shop", "-m", "good"]);
    shop.write(".notes.ryokan", "three");
    shop.write(".gone.ryokan", "three");
    shop.host.ok(&["--yes", "restore", "shop", "good", "--member", "code"]);
    assert_eq!((shop.read(".notes.ryokan").as_deref(), shop.read(".gone.ryokan")), (Some("two"), None));
    assert_eq!(shop.read(".part.ryokan").as_deref(), Some("untracked"));
}

/// A program writes to the repository after it was changed, and before the restore fails.
#[test]
fn replaced_work_is_kept() {
    let host = Host::prepare(User::Own);
    let home = host.path("home").display().to_string();
    let restore = format!("cat > {home}/queue; if rm {home}/armed; then echo theirs > {home}/code/app.py; exit 3; fi");
    let argv = |verb: &str, code: &str| format!("{verb} = [\"/bin/sh\", \"-c\", {code:?}]\n");
    host.configure(&format!(
        "[sources.queue]\n{}{}{}{}",
        argv("freeze", "true"),
        argv("thaw", "true"),
        argv("capture", &format!("cat {home}/queue")),
        argv("restore", &restore),
    ));
    let shop = Shop::of(host, User::Own);
    std::fs::write(shop.host.path("home").join("queue"), "one").unwrap();
    shop.host.ok(&["group", "add", "shop", "--command", "queue"]);
    shop.host.ok(&["freeze", "shop", "-m", "good"]);
    shop.write("app.py", "two");
    shop.commit("second");
    shop.write("app.py", "two, changed");
    std::fs::write(shop.host.path("home").join("armed"), "").unwrap();
    let failed = shop.host.cli(&["--yes", "restore", "shop", "good"]);
    let said = String::from_utf8_lossy(&failed.stderr).into_owned();
    let reference = said.split_whitespace().find(|word| word.starts_with("refs/ryokan/kept/shop-")).expect(&said);
    assert_eq!(shop.read("app.py").as_deref(), Some("two, changed"), "{said}");
    assert_eq!(shop.git(&["show", &format!("{reference}:app.py")]), "theirs");
    // Without such work nothing is kept.
    shop.host.ok(&["--yes", "restore", "shop", "good"]);
    assert_eq!(shop.git(&["for-each-ref", "refs/ryokan/kept"]).lines().count(), 1);
}
