//! A real jj beside git: a freeze captures its repository through git, and jj goes on after a restore.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{Host, User};

/// A host with the group `all` of a repository that jj works in.
struct Colocated {
    host: Host,
    code: PathBuf,
}

impl Colocated {
    fn new() -> Colocated {
        let host = Host::prepare(User::Own);
        let code = host.path("home").join("code");
        std::fs::create_dir_all(&code).unwrap();
        let mut made = Colocated { host, code };
        made.host.launch();
        made.jj(&["git", "init", "--colocate", "."]);
        made
    }

    fn jj(&self, args: &[&str]) -> String {
        let jj = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/jj/bin/jj");
        assert!(jj.exists(), "{} is missing: scripts/check builds it", jj.display());
        let mut command = Command::new(jj);
        command.args(["--no-pager", "--color", "never"]).args(args).current_dir(&self.code);
        command.env("HOME", self.host.path("home")).env("JJ_USER", "t").env("JJ_EMAIL", "t@t");
        let ran = command.output().unwrap();
        assert!(ran.status.success(), "jj {args:?}: {}", String::from_utf8_lossy(&ran.stderr));
        String::from_utf8(ran.stdout).unwrap()
    }

    /// Something of one commit.
    fn of(&self, revision: &str, template: &str) -> String {
        self.jj(&["log", "--no-graph", "-r", revision, "-T", template])
    }

    /// The newest operation, without one that reads the files.
    fn operation(&self) -> String {
        self.jj(&["--ignore-working-copy", "op", "log", "--no-graph", "--limit", "1", "-T", "id"])
    }

    fn write(&self, name: &str, text: &str) {
        std::fs::write(self.code.join(name), text).unwrap();
    }

    fn read(&self, name: &str) -> Option<String> {
        std::fs::read_to_string(self.code.join(name)).ok()
    }
}

#[test]
fn jj_continues_after_restore() {
    let repo = Colocated::new();
    repo.write("app", "one\n");
    repo.jj(&["describe", "-m", "first"]);
    repo.jj(&["new", "-m", "second"]);
    repo.write("app", "two\n");
    repo.write("new", "added\n");
    repo.jj(&["status"]);
    let (parent, change) = (repo.of("@-", "commit_id"), repo.of("@", "change_id"));
    // Not yet in any commit of jj.
    repo.write("app", "two, more\n");
    repo.host.ok(&["group", "new", "all"]);
    repo.host.ok(&["group", "add", "all", "--repository", &repo.code.display().to_string()]);
    let before = repo.operation();
    repo.host.ok(&["freeze", "all", "-m", "frozen"]);
    assert_eq!(repo.operation(), before, "a freeze leaves no operation in jj");
    assert!(repo.host.ok(&["lock", "all"]).contains(&parent), "the lock has the Commit ID of the parent");

    // The frozen commit is rewritten, so that no change has it any more.
    repo.jj(&["squash", "-m", "both"]);
    repo.jj(&["new", "-m", "third"]);
    repo.write("app", "three\n");
    std::fs::remove_file(repo.code.join("new")).unwrap();
    repo.jj(&["status"]);
    let rewritten = repo.of("@-", "commit_id");
    assert_ne!(rewritten, parent);

    repo.host.ok(&["--yes", "restore", "all", "frozen"]);
    assert_eq!((repo.read("app").as_deref(), repo.read("new").as_deref()), (Some("two, more\n"), Some("added\n")));
    // Its next command starts a working-copy commit on the restored one.
    assert_eq!(repo.jj(&["diff", "--summary"]), "M app\nA new\n");
    assert_eq!(repo.of("@-", "commit_id"), parent);
    assert_ne!(repo.of("@", "change_id"), change);
    assert_eq!(repo.of("description(substring:'third')", "description"), "third\n", "what jj had is still there");
    repo.jj(&["describe", "-m", "again"]);
    repo.jj(&["new"]);

    repo.host.ok(&["--yes", "undo", "all"]);
    assert_eq!((repo.read("app").as_deref(), repo.read("new")), (Some("three\n"), None));
    assert_eq!(repo.jj(&["diff", "--summary"]), "M app\nD new\n");
    assert_eq!(repo.of("@-", "commit_id"), rewritten);
}
