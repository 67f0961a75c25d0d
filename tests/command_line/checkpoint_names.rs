//! Names of checkpoints on the command line, and the question before an undo.

use crate::support::{Host, Terminal};

#[test]
fn ambiguous_names_are_reported() {
    let host = Host::start();
    host.ok(&["new", "k"]);
    let said = |args: &[&str]| {
        let done = host.cli(args);
        (done.status.code(), String::from_utf8_lossy(&done.stderr).into_owned())
    };
    for empty in ["", " "] {
        let (code, text) = said(&["checkpoint", "k", "-m", empty]);
        assert!(code == Some(2) && text.contains("leave out -m"), "{text}");
    }
    assert_eq!(said(&["checkpoint", "k", "-m", "same"]), (Some(0), String::new()));
    host.ok(&["exec", "k", "echo 1 > f"]);
    let (code, text) = said(&["checkpoint", "k", "-m", "same"]);
    assert!(code == Some(0) && text.contains("k has other checkpoints named \"same\""), "{text}");
    let (code, text) = said(&["restore", "k", "same", "--yes"]);
    assert!(code == Some(4) && text.matches("(same)").count() == 2 && text.contains("ryokan log k"), "{text}");
}

#[test]
fn undo_question_names_target() {
    let host = Host::start();
    host.ok(&["new", "k"]);
    host.ok(&["checkpoint", "k", "-m", "first"]);
    let mut asks = Terminal::start(&host, &["undo", "k"]);
    asks.wait_for("nothing was restored in kernel k");
    host.ok(&["exec", "k", "echo 1 > f; x=1"]);
    host.ok(&["restore", "k", "first", "--yes"]);
    let mut asks = Terminal::start(&host, &["undo", "k"]);
    asks.wait_for("undo the last restore of k: go back to checkpoint");
    asks.wait_for("(before restore of first), taken");
    asks.wait_for("1 file or directory, 1 variable or setting change? [y/N]");
    asks.press("y\r");
    asks.wait_for("k is at");
    assert_eq!(host.ok(&["exec", "k", "cat f"]), "1\n");
}
