//! The `repl` without a terminal: lines from a pipe.

use std::io::Write;
use std::process::Stdio;

use super::command_line::{parts, ryokan};
use super::fake::Fake;

fn repl(fake: &Fake, input: &str) -> (i32, String, String) {
    let mut child = ryokan(fake, &["repl", "demo"]).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    parts(child.wait_with_output().unwrap())
}

#[test]
fn repl_executes_each_line() {
    let fake = Fake::start();
    assert_eq!(repl(&fake, "say one\n\nvalue\nsay last"), (0, "one\n42\nlast\n".into(), String::new()));
    assert!(fake.log.has("exec say one") && fake.log.has("exec say last"));
}

#[test]
fn multi_line_code_runs_once() {
    let fake = Fake::start();
    repl(&fake, "say a\\\nb\n");
    assert!(fake.log.has("exec say a\\\nb"), "{:?}", fake.log.lines());
    repl(&fake, "if x:\\\n  say y\n  say z\n\nsay end\n");
    assert!(fake.log.has("exec if x:\\\n  say y\n  say z"), "{:?}", fake.log.lines());
}

#[test]
fn repl_commands_not_executed() {
    let fake = Fake::start();
    let (exit, stdout, stderr) = repl(&fake, ":help\n:vars\n:nonsense\n:restart\nsay on\n:quit\nsay never\n");
    assert!(stdout.contains(":restart") && stdout.contains("no variables") && stdout.ends_with("on\n"), "{stdout}");
    assert!(stderr.contains("there is no command :nonsense"), "{stderr}");
    assert_eq!(exit, 0);
    assert!(fake.log.has("stop true") && fake.log.has("start") && !fake.log.has("exec say never"));
}

#[test]
fn repl_exits_with_last_status() {
    let fake = Fake::start();
    assert_eq!(repl(&fake, "say ok\nfail 4\n").0, 4);
    assert_eq!(repl(&fake, "fail 4\nsay ok\n").0, 0);
    assert_eq!(repl(&fake, "unsaved\n").2, "warning: it is not stored\n");
}

#[test]
fn repl_reconnects() {
    let fake = Fake::start();
    let (exit, stdout, stderr) = repl(&fake, "hang up\nsay again\n");
    assert!(stderr.contains("reconnected"), "{stderr}");
    assert_eq!((exit, stdout.as_str()), (0, "again\n"));
}
