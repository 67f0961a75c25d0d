//! The examples of `docs/kaish.md` in a real kernel.

use ryokan::core::engine::EngineName;
use ryokan::core::exec::ExecStatus;

use crate::support::{Host, kernel, run};

/// A command after `$ ` with its continuation lines after `> `, and its documented output.
struct Example {
    code: String,
    prints: String,
}

fn examples(document: &str) -> Vec<Example> {
    let mut found: Vec<Example> = Vec::new();
    for block in document.split("```console\n").skip(1) {
        let (block, _) = block.split_once("```").expect("a block has an end");
        for line in block.lines() {
            if let Some(code) = line.strip_prefix("$ ") {
                found.push(Example { code: code.to_owned(), prints: String::new() });
                continue;
            }
            let example = found.last_mut().expect("a block begins with a command");
            match line.strip_prefix("> ") {
                Some(more) => example.code.push_str(&format!("\n{more}")),
                None => example.prints.push_str(&format!("{line}\n")),
            }
        }
    }
    found
}

/// Exact equality; with an ellipsis (`…`), every part must occur.
fn is_shown(printed: &str, shown: &str) -> bool {
    match shown.contains('…') {
        true => shown.trim_end().split('…').all(|part| printed.contains(part)),
        // Some built-in commands end their output without a line end.
        false => printed.trim_end() == shown.trim_end(),
    }
}

#[test]
fn kaish_doc_examples_run() {
    let examples = examples(include_str!("../../docs/kaish.md"));
    assert!(examples.len() > 25, "there are examples");
    let host = Host::start();
    host.with(async |client| {
        let shell = kernel(&client, "k", EngineName::Kaish).await;
        for Example { code, prints } in examples {
            let result = run(&shell, &code).await;
            let streams = [result.stdout.as_slice(), result.stderr.as_slice()].concat();
            let printed = String::from_utf8(streams).expect("text");
            assert!(is_shown(&printed, &prints), "{code}\nprints\n{printed}\nand not\n{prints}");
            if code.contains("never") {
                assert_eq!(result.end.status, ExecStatus::Refused, "{code}: nothing of it runs");
                assert!(!printed.starts_with("never"), "{printed}");
            }
        }
    });
}

#[test]
fn kaish_state_survives_restart() {
    let host = Host::start();
    host.ok(&["new", "k"]);
    host.ok(&["exec", "k", "f() { echo \"f $1\"; }; xs=[1 2]; export E=e; cd /tmp; set -e"]);
    host.ok(&["stop", "k"]);
    let script = "f x; echo \"$xs $PWD\"; bash -c 'echo $E'; false; echo never";
    let kept = host.cli(&["exec", "k", script]);
    assert_eq!((kept.status.code(), String::from_utf8_lossy(&kept.stdout)), (Some(1), "f x\n[1,2] /tmp\ne\n".into()));
}
