//! References to checkpoints, and their listing.

use super::{checkpoint, log};
use crate::support::Host;

fn code(host: &Host, args: &[&str]) -> (Option<i32>, String) {
    let output = host.cli(args);
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn ambiguous_reference_refused() {
    let host = Host::start();
    for kernel in ["k", "other"] {
        host.ok(&["new", kernel]);
    }
    assert!(code(&host, &["log", "k"]).1.contains("no checkpoints; take one"));
    assert_eq!(code(&host, &["restore", "k", "latest", "--yes"]).0, Some(3));
    assert_eq!(code(&host, &["undo", "k", "--yes"]).0, Some(3));
    let first = checkpoint(&host, "k", "first");
    for _ in 0..2 {
        checkpoint(&host, "k", "twice");
    }
    let (exit, said) = code(&host, &["restore", "k", "twice", "--yes"]);
    assert_eq!(exit, Some(4), "{said}");
    for one in log(&host, "k").iter().filter(|one| one["name"] == "twice") {
        assert!(said.contains(one["id"].as_str().unwrap()), "{said}");
    }
    assert_eq!(code(&host, &["restore", "k", "~9", "--yes"]).0, Some(3));
    assert_eq!(code(&host, &["restore", "k", "nothing", "--yes"]).0, Some(3));
    assert_eq!(code(&host, &["restore", "k", "", "--yes"]).0, Some(2));
    // Another kernel's checkpoint is not found.
    assert_eq!(code(&host, &["restore", "other", &first, "--yes"]).0, Some(3));
    // Without a terminal, a restore requires explicit confirmation.
    assert_eq!(code(&host, &["restore", "k", "first"]).0, Some(2));
    for wrong in ["latest", "~1", "two\nlines", &"x".repeat(300)] {
        assert_eq!(code(&host, &["checkpoint", "k", "-m", wrong]).0, Some(2), "{wrong:?}");
    }
    assert_eq!(code(&host, &["checkpoint", "k", "--kind", "teleport"]).0, Some(5));
    assert_eq!(log(&host, "k").len(), 3, "a refused request has no effect");
    for reference in [&first[..8], "first", "~2"] {
        host.ok(&["restore", "k", reference, "--yes"]);
        assert!(log(&host, "k").iter().any(|one| one["id"] == first.as_str() && one["is_head"] == true), "{reference}");
        // The safety checkpoint is the newest now.
        if reference != "~2" {
            host.ok(&["undo", "k", "--yes"]);
        }
        if reference == "first" {
            break;
        }
    }
}

#[test]
fn checkpoint_log_is_a_tree() {
    let host = Host::start();
    host.ok(&["new", "k"]);
    let first = checkpoint(&host, "k", "first");
    let second = checkpoint(&host, "k", "second");
    host.ok(&["restore", "k", "first", "--yes"]);
    let third = checkpoint(&host, "k", "third");
    let all = log(&host, "k");
    let parent = |id: &str| all.iter().find(|one| one["id"] == id).unwrap()["parent"].clone();
    assert_eq!(parent(&first), serde_json::Value::Null);
    assert_eq!((parent(&second), parent(&third)), (first.as_str().into(), first.as_str().into()));
    let numbers: Vec<u64> = all.iter().map(|one| one["number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, [4, 3, 2, 1], "newest first");
    let drawn = host.ok(&["log", "k", "--graph"]);
    let lines: Vec<&str> = drawn.lines().collect();
    assert!(lines[0].starts_with("* ") && lines[0].contains("third") && lines[0].contains("(here)"), "{drawn}");
    assert!(lines[1].starts_with("| *"), "{drawn}");
    assert!(drawn.contains("|/"), "{drawn}");
    assert_eq!(host.ok(&["log", "k", "-n", "1"]).lines().count(), 1);
}
