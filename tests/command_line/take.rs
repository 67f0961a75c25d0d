//! `ryokan take` and `diff --with`: forks compared and their files taken over.

use crate::support::Host;

fn forked() -> Host {
    let host = Host::start();
    host.ok(&["new", "k", "--engine", "bash"]);
    host.ok(&["exec", "k", "mkdir -p src old; echo 1 > src/a; echo keep > mine; echo gone > old/file; echo x > 'a b'"]);
    host.ok(&["fork", "k", "try", "--count", "2"]);
    let work = "echo 2 > src/a; mkdir -p new/deep; echo n > new/deep/f; rm -r old; mv 'a b' moved; \
                ln -s src/a link; chmod 600 src/a; y=5";
    host.ok(&["exec", "try-2", work]);
    host
}

const LOOK: &str = "cat src/a new/deep/f moved; readlink link; ls -d old 'a b' 2>/dev/null; stat -c %a src/a; cat mine";

#[test]
fn take_copies_changes_of_fork() {
    let host = forked();
    host.ok(&["exec", "k", "echo changed > mine; z=7"]);
    let said = host.ok(&["take", "k", "--from", "try-2"]);
    assert!(said.contains("src/a") && said.contains("to undo: ryokan restore k"), "{said}");
    assert_eq!(host.ok(&["exec", "k", LOOK]), "2\nn\nx\nsrc/a\n600\nchanged\n");
    assert_eq!(host.ok(&["exec", "k", "echo $y$z"]), "7\n", "variables stay");
    assert!(host.ok(&["take", "k", "--from", "try-2"]).contains("or k has them"), "all is taken");
    let undo = said.lines().last().and_then(|line| line.rsplit(' ').next()).unwrap().to_owned();
    host.ok(&["restore", "k", &undo, "--yes"]);
    assert_eq!(
        host.ok(&["exec", "k", "cat src/a mine old/file 'a b'; ls"]),
        "1\nchanged\ngone\nx\na b\nmine\nold\nsrc\n"
    );
}

#[test]
fn take_selects_paths() {
    let host = forked();
    host.ok(&["take", "k", "--from", "try-2", "new", "./src/"]);
    assert_eq!(host.ok(&["exec", "k", "cat src/a new/deep/f old/file 'a b'"]), "2\nn\ngone\nx\n");
    assert!(host.ok(&["take", "k", "--from", "try-2", "mine"]).contains("changed no such files"));
    // Half of a rename: the other name is not one of the paths.
    host.ok(&["take", "k", "--from", "try-2", "moved"]);
    assert_eq!(host.ok(&["exec", "k", "cat moved 'a b'"]), "x\nx\n");
    assert_eq!(host.cli(&["take", "k", "--from", "try-2", "src/../new"]).status.code(), Some(2));
    let misspelt = host.cli(&["take", "k", "--from", "try-2", "mine", "absent"]);
    assert_eq!(misspelt.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&misspelt.stderr).contains("neither kernel has absent"), "{misspelt:?}");
    assert!(host.ok(&["take", "k", "--from", "try-2", "--force", "./"]).contains("moved"));
    assert!(host.ok(&["take", "k", "--from", "try-1"]).contains("changed no such files"));
}

#[test]
fn changes_on_both_sides_are_refused() {
    let host = forked();
    host.ok(&["exec", "k", "echo 3 > src/a; echo new > old/other"]);
    let refused = host.cli(&["take", "k", "--from", "try-2"]);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(4), "{said}");
    assert!(said.contains("src/a") && said.contains("old/other"), "{said}");
    assert_eq!(host.ok(&["exec", "k", "cat src/a old/other; ls"]), "3\nnew\na b\nmine\nold\nsrc\n");
    host.ok(&["take", "k", "--from", "try-2", "--force"]);
    assert_eq!(host.ok(&["exec", "k", "cat src/a; ls -d old 2>/dev/null || echo none"]), "2\nnone\n");
    // A mode alone does not bring the former content back.
    host.ok(&["exec", "k", "echo edited > src/a"]);
    host.ok(&["exec", "try-1", "chmod 755 src/a; ln mine linked"]);
    let refused = host.cli(&["take", "k", "--from", "try-1"]);
    assert_eq!(refused.status.code(), Some(4), "{refused:?}");
    host.ok(&["exec", "k", "echo own > mine"]);
    host.ok(&["take", "k", "--from", "try-1", "linked", "mine"]);
    assert_eq!(host.ok(&["exec", "k", "cat src/a mine linked"]), "edited\nown\nkeep\n");
    let foreign = host.cli(&["take", "try-1", "--from", "try-2"]);
    assert_eq!(foreign.status.code(), Some(2), "they are siblings");
}

#[test]
fn diff_compares_two_kernels() {
    let host = forked();
    host.ok(&["exec", "k", "only=1; both=1"]);
    host.ok(&["exec", "try-2", "both=2; f() { echo f; }"]);
    let changes = host.ok(&["diff", "k", "--with", "try-2"]);
    let state = ["~ var/both", "+ var/y", "- var/only", "+ fn/f"];
    for wanted in ["~ src/a", "+ new/deep/f", "- old/file"].into_iter().chain(state) {
        assert!(changes.contains(wanted), "{wanted}: {changes}");
    }
    assert!(!changes.contains("journal"), "{changes}");
    let json = host.ok(&["diff", "k", "--with", "try-2", "--json"]);
    let found = json.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"));
    let areas: std::collections::BTreeSet<String> = found.map(|one| one["area"].to_string()).collect();
    assert!(areas.contains("\"state\"") && areas.contains("\"file\""), "{areas:?}");
    let text = host.ok(&["diff", "k", "--with", "try-2", "-p", "--", "src"]);
    assert!(text.contains("-1\n+2"), "{text}");
    let same = host.ok(&["diff", "k", "--with", "try-1"]);
    assert!(!same.contains("src/a"), "{same}");
    host.ok(&["checkpoint", "try-2", "-m", "done"]);
    let at = host.ok(&["diff", "k", "fork to try", "done", "--with", "try-2", "--stat"]);
    assert!(at.contains("file"), "{at}");
    assert_eq!(host.cli(&["diff", "k", "--with", "absent"]).status.code(), Some(3));
}
