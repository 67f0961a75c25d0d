//! `ryokan repl` on a real terminal, with key-by-key input.

use std::time::{Duration, Instant};

use crate::support::{Host, Terminal};

const UP: &str = "\x1b[A";
const CTRL_C: &str = "\x03";
const CTRL_D: &str = "\x04";

/// The newest execution's code, from the journal.
fn newest(host: &Host, kernel: &str) -> String {
    let line = host.ok(&["journal", kernel, "--json", "-n", "1"]);
    serde_json::from_str::<serde_json::Value>(&line).unwrap()["text"].as_str().unwrap().to_owned()
}

#[test]
fn repl_runs_typed_input() {
    let host = Host::start();
    host.ok(&["new", "k"]);
    let mut terminal = Terminal::start(&host, &["repl", "k"]);
    for (lines, shown) in [
        (&["cat <<END", "none", "  two", "none again", "END"][..], "  two\r\nnone again\r\n"),
        (&["text=\"a", "b", "   c\"; echo \"$text\""], "a\r\nb\r\n   c\r\n"),
        (&["if true; then", "echo inside", "fi"], "inside\r\n"),
    ] {
        for (at, line) in lines.iter().enumerate() {
            terminal.enter(if at == 0 { "k:kaish> " } else { "........ " }, line);
        }
        terminal.wait_for(shown);
        assert_eq!(newest(&host, "k"), lines.join("\n") + "\n");
    }
    terminal.leave("k:kaish> ", CTRL_D);
}

/// Lines that arrive while an earlier one is read or runs: pasted text, type-ahead.
#[test]
fn repl_keeps_input_of_burst() {
    let host = Host::start();
    host.ok(&["new", "p", "--engine", "python"]);
    let mut terminal = Terminal::start(&host, &["repl", "p"]);
    terminal.wait_for("p:python> ");
    terminal.press("print(1 + 1)\rprint(2 + 2)\rprint(40 + 2)\r");
    for shown in ["\n2\r\n", "\n4\r\n", "\n42\r\n"] {
        terminal.wait_for(shown);
    }
    terminal.leave("p:python> ", CTRL_D);
}

#[test]
fn repl_indents_only_blocks() {
    let host = Host::start();
    host.ok(&["new", "p", "--engine", "python"]);
    let mut terminal = Terminal::start(&host, &["repl", "p"]);
    terminal.enter("p:python> ", "def six(a):");
    terminal.enter("......... ", "return 6 * a");
    terminal.enter("......... ", "");
    terminal.enter("p:python> ", "six(7)");
    terminal.wait_for("42");
    terminal.enter("p:python> ", "text = '''a:");
    terminal.enter("......... ", "  b:");
    terminal.enter("......... ", "c'''");
    terminal.enter("p:python> ", "text");
    terminal.wait_for("'a:\\n  b:\\nc'");
    terminal.leave("p:python> ", CTRL_D);
    assert!(host.ok(&["journal", "p", "--full"]).contains("    return 6 * a"), "the block was indented");
}

#[test]
fn repl_history_persists() {
    let host = Host::start();
    host.ok(&["new", "k"]);
    let mut terminal = Terminal::start(&host, &["repl", "k"]);
    terminal.enter("k:kaish> ", "echo first");
    terminal.wait_for("\nfirst\r\n");
    terminal.enter("k:kaish> ", UP);
    terminal.wait_for("\nfirst\r\n");
    terminal.leave("k:kaish> ", CTRL_D);
    let mut again = Terminal::start(&host, &["repl", "k"]);
    again.enter("k:kaish> ", UP);
    again.wait_for("\nfirst\r\n");
    again.leave("k:kaish> ", CTRL_D);
    assert!(host.ok(&["journal", "k"]).contains("#3 done"));
}

#[test]
fn repl_ctrl_c() {
    let host = Host::start();
    host.ok(&["new", "k"]);
    let mut terminal = Terminal::start(&host, &["repl", "k"]);
    terminal.wait_for("k:kaish> ");
    terminal.press(&format!("never{CTRL_C}"));
    terminal.enter("k:kaish> ", "x=kept; echo begun; sleep 600");
    terminal.wait_for("\nbegun\r\n");
    let began = Instant::now();
    terminal.press(CTRL_C);
    terminal.wait_for("interrupting; press Ctrl-C again to return to the prompt");
    terminal.enter("k:kaish> ", "echo $x");
    terminal.wait_for("\nkept\r\n");
    assert!(began.elapsed() < Duration::from_secs(300));
    terminal.leave("k:kaish> ", CTRL_D);
    let journal = host.ok(&["journal", "k"]);
    assert!(journal.contains("#1 interrupted") && !journal.contains("never"), "{journal}");
    assert_eq!(host.ok(&["exec", "k", "echo $x"]), "kept\n", "the kernel survives");
}
