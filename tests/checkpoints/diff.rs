//! Output of `diff`, between two checkpoints and between a checkpoint and the present.

use std::collections::BTreeSet;

use serde_json::Value;

use super::checkpoint;
use crate::support::{Host, users};

fn differences(host: &Host, args: &[&str]) -> BTreeSet<(String, String, String)> {
    let text = host.ok(&[&["diff", "--json", "k"], args].concat());
    let of = |line: &str| {
        let one: Value = serde_json::from_str(line).unwrap();
        let field = |name: &str| one[name].as_str().unwrap().to_owned();
        (field("area"), field("deed"), field("name"))
    };
    text.lines().map(of).collect()
}

fn shown(area: &str, deed: &str, name: &str) -> (String, String, String) {
    (area.into(), deed.into(), name.into())
}

#[test]
fn diff_reports_each_kind_of_change() {
    for user in users() {
        let host = Host::start_as(user);
        std::fs::create_dir(host.path("given")).unwrap();
        host.ok(&["new", "k", "--engine", "python"]);
        let body = "unlike any other ".repeat(50);
        host.ok(&["exec", "k", "import os\nsame = 1; changed = 1; gone = 1\ndef f(): return 1"]);
        host.ok(&["exec", "k", &format!("for n in ['same', 'changed', 'gone', 'mode']: open(n, 'w').write(n)\nopen('old name', 'w').write({body:?})")]);
        checkpoint(&host, "k", "a");
        assert!(differences(&host, &["a", "a"]).is_empty());
        host.ok(&["exec", "k", "changed = 2; new = 3; del gone\ndef f(): return 2"]);
        host.ok(&["exec", "k", "open('changed', 'w').write('other'); os.remove('gone'); open('new', 'w').write('new')\nos.rename('old name', 'new name'); os.chmod('mode', 0o700); None"]);
        host.ok(&["mount", "k", "/given", host.path("given").to_str().unwrap()]);
        let now = differences(&host, &["a"]);
        for expected in [
            shown("state", "changed", "var/changed"),
            shown("state", "added", "var/new"),
            shown("state", "removed", "var/gone"),
            shown("file", "changed", "changed"),
            shown("file", "changed", "mode"),
            shown("file", "removed", "gone"),
            shown("file", "added", "new"),
            shown("file", "renamed", "new name"),
            shown("mount", "added", "/given"),
            shown("journal", "added", "journal"),
        ] {
            assert!(now.contains(&expected), "{user:?}: {expected:?} is not in {now:?}");
        }
        for same in [shown("state", "changed", "var/same"), shown("file", "changed", "same")] {
            assert!(!now.contains(&same), "{user:?}: {same:?}");
        }
        checkpoint(&host, "k", "b");
        assert_eq!(differences(&host, &["a", "b"]), now, "{user:?}: to a checkpoint as to now");
        let back = differences(&host, &["b", "a"]);
        assert!(back.contains(&shown("state", "removed", "var/new")), "{user:?}: {back:?}");
        assert!(back.contains(&shown("file", "renamed", "old name")), "{user:?}: {back:?}");
        let text = host.ok(&["diff", "k", "a", "b"]);
        assert!(text.contains("~ var/changed  int 1 → int 2") && text.contains("~ old name → new name"), "{text}");
        let stat: Value = serde_json::from_str(&host.ok(&["diff", "k", "a", "b", "--stat", "--json"])).unwrap();
        assert_eq!((stat["file"]["renamed"].as_u64(), stat["mount"]["added"].as_u64()), (Some(1), Some(1)), "{stat}");
        assert!(host.ok(&["diff", "k", "b", "b", "--stat"]).contains("no differences"));
        assert_eq!(host.cli(&["diff", "k", "nothing"]).status.code(), Some(3));
    }
}

/// A value whose pickle differs each time is not reported as certainly changed.
#[test]
fn unsteady_pickles_are_perhaps_changed() {
    let host = Host::start();
    host.ok(&["new", "k", "--engine", "python"]);
    let code = "
class Unsteady:
    def __getstate__(self):
        import os
        return {'noise': os.urandom(8)}
u = Unsteady(); steady = [1]
";
    host.ok(&["exec", "k", code]);
    checkpoint(&host, "k", "a");
    let what = |name: &str| {
        let text = host.ok(&["diff", "--json", "k", "a"]);
        let all: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        all.into_iter().find(|one| one["name"] == name).map(|one| one["what"].to_string())
    };
    assert!(what("var/u").is_none_or(|what| what.contains("perhaps")), "{:?}", what("var/u"));
    host.ok(&["exec", "k", "steady.append(2); u.other = 1"]);
    assert!(what("var/steady").is_some_and(|what| !what.contains("perhaps")), "{:?}", what("var/steady"));
    assert!(host.ok(&["diff", "k", "a"]).contains("perhaps"), "{}", host.ok(&["diff", "k", "a"]));
}

#[test]
fn preview_names_changes_of_restore() {
    for user in users() {
        let host = Host::start_as(user);
        host.ok(&["new", "k", "--engine", "python"]);
        host.ok(&["exec", "k", "kept = 1; gone = 1; open('old', 'w').write('old'); None"]);
        checkpoint(&host, "k", "a");
        assert!(host.ok(&["restore", "k", "a", "--preview"]).contains("would change nothing"), "{user:?}");
        host.ok(&[
            "exec",
            "k",
            "import os; kept = 2; del gone; new = 3; os.rename('old', 'other'); open('more', 'w'); None",
        ]);
        host.ok(&["exec", "k", "handle = open('more')"]);
        let process = host.ok(&["spawn", "k", "-d", "--", "sleep", "6767"]);
        let before = differences(&host, &[]);
        let preview: Value = serde_json::from_str(&host.ok(&["restore", "k", "a", "--preview", "--json"])).unwrap();
        let has = |area: &str, deed: &str, name: &str| {
            let changes = preview["changes"].as_array().unwrap();
            changes.iter().any(|one| one["area"] == area && one["deed"] == deed && one["name"] == name)
        };
        assert!(has("state", "added", "var/gone") && has("state", "removed", "var/new"), "{preview}");
        assert!(has("state", "changed", "var/kept") && has("file", "removed", "more"), "{preview}");
        assert!(has("file", "renamed", "old") && !has("journal", "removed", "journal"), "{preview}");
        assert!(preview["ends"][0]["command"].as_str().unwrap().contains("sleep 6767"), "{preview}");
        assert!(preview["lost"].to_string().contains("var/handle"), "{preview}");
        let text = host.ok(&["restore", "k", "a", "--preview"]);
        assert!(text.contains("+ var/gone  int 1") && text.contains("would end:"), "{text}");
        // Nothing has changed, and the last checkpoint is the default of `diff`.
        assert_eq!((differences(&host, &["a"]), host.ok(&["exec", "k", "kept"])), (before, "2\n".to_owned()));
        assert!(host.ok(&["ps", "k"]).contains(process.trim()), "{user:?}");
        host.ok(&["restore", "k", "a", "--yes"]);
        assert_eq!(host.ok(&["exec", "k", "(kept, gone)"]), "(1, 1)\n");
    }
}
