//! There and back, what travels, and refusals.

use std::process::Stdio;
use std::time::Instant;

use ryokan::core::handover::MoveOptions;

use super::*;
use crate::support::{until, users};

/// What code reads of its moves.
const MOVED: &str = "echo $RYOKAN_ORIGIN $RYOKAN_EPOCH";

#[test]
fn teleport_no_faults() {
    for user in users() {
        let (here, there) = pair(user);
        set_up(&here, "demo");
        assert_eq!(here.ok(&["exec", "demo", MOVED]), "original 1\n", "{user:?}");
        let before = show(&here, "demo");
        let report = moved(&here, "demo", &there, &[]);
        assert_eq!((&report["epoch"], &report["acknowledged"]), (&2.into(), &true.into()), "{user:?} {report}");
        // Code inside can read that it moved.
        assert_eq!(there.ok(&["exec", "demo", MOVED]), "restored 2\n", "{user:?}");
        assert_eq!(there.ok(&["spawn", "demo", "--", "printenv", "RYOKAN_EPOCH"]), "2\n", "{user:?}");
        // Exactly one copy lives, and it is the same kernel.
        let (left, arrived) = (show(&here, "demo"), show(&there, "demo"));
        assert_eq!((left["state"].as_str(), arrived["id"].as_str()), (Some("departed"), before["id"].as_str()));
        assert_eq!((arrived["epoch"].as_u64(), arrived["origin"]["kind"].as_str()), (Some(2), Some("restored")));
        assert_eq!(there.ok(&["exec", "demo", VIEW]), "2 two deep\n", "{user:?}");
        let journal = there.ok(&["journal", "demo"]);
        assert!(journal.contains("echo hello") && journal.contains("arrived from host"), "{journal}");
        let file = here.path("file");
        std::fs::write(&file, "late").expect("written");
        let granted = ["blob", "put", "demo", file.to_str().expect("a path")];
        for args in
            [&["exec", "demo", "echo"][..], &["restore", "demo", "one", "--yes"], &["checkpoint", "demo"], &granted]
        {
            let refused = here.cli(args);
            assert!(!refused.status.success(), "{args:?}");
            let said = String::from_utf8_lossy(&refused.stderr);
            assert!(said.contains("moved to host"), "{args:?}: {said}");
        }
        assert!(here.ok(&["journal", "demo"]).contains("moved to host"), "the history stays readable");
        until("its worker has ended", || here.workers().is_empty());
        assert_eq!(handovers(&here), Vec::<Value>::new());
        // Back with a change: the rest is still here.
        there.ok(&["exec", "demo", "x=3; echo three > f"]);
        let report = moved(&there, "demo", &here, &[]);
        assert_eq!(report["epoch"], 3, "{report}");
        assert_eq!(here.ok(&["exec", "demo", VIEW]), "3 three deep\n");
        assert_eq!(here.ok(&["exec", "demo", MOVED]), "restored 3\n", "{user:?}");
        assert_eq!(
            (state(&there, "demo").as_deref(), show(&here, "demo")["id"] == before["id"]),
            (Some("departed"), true)
        );
        // Its checkpoints have moved with it.
        here.ok(&["restore", "demo", "one", "--yes"]);
        assert_eq!(here.ok(&["exec", "demo", "echo $x $(cat f)"]), "1 one\n");
        there.ok(&["rm", "demo", "--yes"]);
        assert_eq!(state(&there, "demo"), None);
        assert!(moved(&here, "demo", &there, &[])["epoch"] == 4);
        assert_eq!(there.ok(&["exec", "demo", "echo $x $(cat f)"]), "1 one\n", "{user:?}");
    }
}

/// The record of its arrival stays, and is no move in progress.
#[test]
fn arrived_kernels_can_change() {
    let (here, mut there) = pair(User::Own);
    set_up(&here, "demo");
    moved(&here, "demo", &there, &[]);
    there.ok(&["update", "demo", "--memory", "256M"]);
    there.ok(&["rename", "demo", "other"]);
    assert_eq!(show(&there, "other")["limits"]["memory_bytes"], 256 << 20);
    assert_eq!(there.ok(&["exec", "other", VIEW]), "2 two deep\n");
    there.restart();
    assert_eq!(there.ok(&["exec", "other", VIEW]), "2 two deep\n");
}

#[test]
fn only_missing_objects_travel() {
    let (here, there) = pair(User::Own);
    here.ok(&["new", "k"]);
    here.ok(&["exec", "k", "/bin/sh -c 'dd if=/dev/urandom of=large bs=1M count=12 2>/dev/null'; x=1"]);
    let first = moved(&here, "k", &there, &[]);
    let sent = |report: &Value| report["sent_bytes"].as_u64().expect("a number");
    assert!(sent(&first) > 12 << 20, "{first}");
    there.ok(&["exec", "k", "echo more > small"]);
    let back = moved(&there, "k", &here, &[]);
    assert!(sent(&back) < 1 << 20, "only the change travels: {back}");
    assert!(back["bytes"].as_u64() > Some(12 << 20), "{back}");
    let report = moved(&here, "k", &there, &[]);
    assert!(sent(&report) < 1 << 20, "{report}");
    assert_eq!(there.ok(&["exec", "k", "/bin/sh -c 'stat -c %s large; cat small'; echo $x"]), "12582912\nmore\n1\n");
}

#[test]
fn progress_names_what_was_there() {
    let (here, there) = pair(User::Own);
    here.ok(&["new", "k"]);
    here.ok(&["exec", "k", "/bin/sh -c 'dd if=/dev/urandom of=large bs=1M count=12 2>/dev/null'"]);
    moved(&here, "k", &there, &[]);
    there.ok(&["exec", "k", "/bin/sh -c 'dd if=/dev/urandom of=more bs=1M count=2 2>/dev/null'"]);
    let target = to(&here);
    let seen = there.with(async move |client| {
        let seen = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
        let all = std::rc::Rc::clone(&seen);
        let note = move |phase: &str, sent: u64, reused: u64| all.borrow_mut().push((phase.to_owned(), sent, reused));
        client.teleport("k", &target, MoveOptions::default(), note).await.expect("it moves");
        seen.take()
    });
    let is_known = |(phase, ..): &(String, u64, u64)| ["copying", "sealing"].contains(&phase.as_str());
    assert!(!seen.is_empty() && seen.iter().all(is_known), "{seen:?}");
    assert!(seen.iter().any(|(_, sent, reused)| *reused > 12 << 20 && *sent < 12 << 20), "{seen:?}");
}

#[test]
fn wire_is_compressed() {
    let (here, there) = pair(User::Own);
    here.ok(&["new", "k"]);
    here.ok(&["exec", "k", "/bin/sh -c 'seq 1000000 > numbers'"]);
    let report = moved(&here, "k", &there, &[]);
    let bytes = |name: &str| report[name].as_u64().expect("a number");
    assert!(bytes("sent_bytes") > 6 << 20 && bytes("wire_bytes") < bytes("sent_bytes") / 2, "{report}");
    assert_eq!(there.ok(&["exec", "k", "/bin/sh -c 'seq 1000000 | cmp - numbers && echo same'"]), "same\n");
}

#[test]
fn older_checkpoints_stay_behind() {
    let (here, there) = pair(User::Own);
    here.ok(&["new", "k"]);
    for name in ["first", "kept", "second", "third"] {
        let write = format!("/bin/sh -c 'dd if=/dev/urandom of=large bs=1M count=3 2>/dev/null'; echo {name} > f");
        here.ok(&["exec", "k", &write]);
        let pin: &[&str] = if name == "kept" { &["--pin"] } else { &[] };
        here.ok(&[&["checkpoint", "k", "-m", name][..], pin].concat());
    }
    assert_eq!(teleport(&here, "k", &there, &["--since", "other"]).status.code(), Some(3));
    let report = moved(&here, "k", &there, &["--since", "third"]);
    assert_eq!(report["missing"], serde_json::json!(["2 older checkpoints"]), "{report}");
    // The files of two checkpoints, not of four.
    assert!(report["bytes"].as_u64().is_some_and(|bytes| (6 << 20..9 << 20).contains(&bytes)), "{report}");
    let log = there.ok(&["--json", "log", "k"]);
    let has = |name: &str| log.contains(&format!("\"{name}\""));
    assert_eq!(["first", "kept", "second", "third"].map(has), [false, true, false, true], "{log}");
    there.ok(&["restore", "k", "kept", "--yes"]);
    assert_eq!(there.ok(&["exec", "k", "cat f"]), "kept\n");
    there.ok(&["diff", "k", "kept", "third"]);
    there.ok(&["verify"]);
    // The one that undo goes back to moves, whatever its age.
    let back = moved(&there, "k", &here, &["--since", "third"]);
    assert_eq!(back["missing"], serde_json::json!([]), "{back}");
    let audit = here.ok(&["audit"]);
    assert!(audit.contains("2 older checkpoints ended here"), "{audit}");
    here.ok(&["--yes", "undo", "k"]);
    assert_eq!(here.ok(&["exec", "k", "cat f"]), "third\n");
}

/// Older checkpoints count as the files do, and so does what a refused move has sent.
#[test]
fn arrivals_have_a_limit() {
    let here = Host::start();
    let mut there = Host::prepare(User::Own);
    there.configure("[teleport]\narrivals = \"12MiB\"\n");
    there.launch();
    here.ok(&["new", "k"]);
    for name in ["first", "second", "third"] {
        here.ok(&["exec", "k", "/bin/sh -c 'dd if=/dev/urandom of=large bs=1M count=3 2>/dev/null'"]);
        here.ok(&["checkpoint", "k", "-m", name]);
    }
    let refused = teleport(&here, "k", &there, &[]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(4) && said.contains("handover_size"), "{said}");
    assert!(said.contains("of the 12 MiB for kernels that arrive"), "{said}");
    until("the abort arrives", || handovers(&here).is_empty() && handovers(&there).is_empty());
    assert!(is_live(&here, "k") && state(&there, "k").is_none());
    // Without older checkpoints there is room beside what the refused move left.
    moved(&here, "k", &there, &["--since", "third"]);
    assert_eq!(there.ok(&["exec", "k", "/bin/sh -c 'stat -c %s large'"]), "3145728\n");
}

#[test]
fn rate_of_a_move_is_limited() {
    let (here, there) = pair(User::Own);
    here.ok(&["new", "k"]);
    here.ok(&["exec", "k", "/bin/sh -c 'dd if=/dev/urandom of=large bs=64K count=24 2>/dev/null'"]);
    let refused = teleport(&here, "k", &there, &["--limit-rate", "1K"]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    let report = moved(&here, "k", &there, &["--limit-rate", "1M"]);
    let number = |name: &str| report[name].as_u64().expect("a number");
    assert!(number("wire_bytes") > 1 << 20 && number("elapsed_ms") >= 1_400, "{report}");
    // Without a limit, and with nothing left to send.
    let back = moved(&there, "k", &here, &[]);
    assert!(back["wire_bytes"].as_u64() < Some(number("wire_bytes")), "{back}");
}

#[test]
fn kind_of_a_move_is_checked() {
    let (here, there) = pair(User::Own);
    set_up(&here, "demo");
    let refused = teleport(&here, "demo", &there, &["--kind", "teleport"]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(5), "{said}");
    assert!(said.contains("stays on its host") && said.contains("--kind checkpoint"), "{said}");
    assert_eq!((is_live(&here, "demo"), state(&there, "demo")), (true, None));
    let report = moved(&here, "demo", &there, &[]);
    assert_eq!(report["kind"], "checkpoint", "{report}");
    assert!(report["kind_reason"].as_str().is_some_and(|why| why.contains("memory")), "{report}");
    moved(&there, "demo", &here, &["--kind", "checkpoint"]);
    assert_eq!(here.ok(&["exec", "demo", VIEW]), "2 two deep\n");
}

#[test]
fn background_code_survives_refusal() {
    let (here, mut there) = pair(User::Own);
    here.ok(&["new", "k", "--engine", "python"]);
    here.ok(&["new", "taken"]);
    there.ok(&["new", "k"]);
    // A generator is in no checkpoint: it lives only while the worker does.
    here.ok(&["exec", "k", "g = (i for i in range(9)); next(g)"]);
    let refused = teleport(&here, "k", &there, &[]);
    assert_eq!(refused.status.code(), Some(4), "{refused:?}");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("there is a kernel k already"), "{refused:?}");
    assert_eq!(here.ok(&["exec", "k", "print(next(g))"]), "1\n", "the same worker continues");
    assert_eq!(handovers(&here), Vec::<Value>::new());
    there.ok(&["rm", "k", "--yes"]);
    // The target fails after everything was sent: the frozen worker resumes.
    there.kill();
    there.env(ryokan::sys::fault::VARIABLE, "catalog.handover.put.before_commit=eio");
    there.launch();
    let failed = teleport(&here, "k", &there, &[]);
    assert!(!failed.status.success(), "{failed:?}");
    assert_eq!(here.ok(&["exec", "k", "print(next(g))"]), "2\n", "the same worker continues");
    until("the abort is delivered", || handovers(&here).is_empty() && handovers(&there).is_empty());
    assert_eq!(state(&there, "k"), None);
    moved(&here, "k", &there, &[]);
    assert!(is_live(&there, "k") && !is_live(&here, "k"));
}

/// What begins while the kernel is copied is named as what ran before.
#[test]
fn later_processes_are_named() {
    let (here, there) = pair(User::Own);
    here.ok(&["new", "k"]);
    here.ok(&["exec", "k", "/bin/sh -c 'dd if=/dev/urandom of=large bs=1M count=12 2>/dev/null'"]);
    let slow = |more: &[&str]| {
        let way = to(&there);
        let mut moving = here.command("ryokan");
        moving.args(["--no-autostart", "teleport", "k", "--to", &way, "--limit-rate", "1M", "--json"]).args(more);
        let moving = moving.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
        until("the move begins", || !handovers(&here).is_empty());
        // It takes 12 s at that rate, and the offer is accepted long before.
        std::thread::sleep(std::time::Duration::from_secs(3));
        here.ok(&["spawn", "k", "--detach", "--", "sleep", "1000"]);
        moving.wait_with_output().expect("it ends")
    };
    let refused = slow(&[]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("began these during its move") && said.contains("sleep 1000"), "{said}");
    assert!(is_live(&here, "k") && here.ok(&["ps", "k"]).contains("sleep 1000"), "it goes on");
    until("the abort is delivered", || handovers(&here).is_empty() && handovers(&there).is_empty());
    here.ok(&["exec", "k", "/bin/sh -c 'dd if=/dev/urandom of=large bs=1M count=12 2>/dev/null'"]);
    let report: Value = serde_json::from_slice(&slow(&["--allow-missing=processes"]).stdout).expect("a report");
    assert_eq!(report["missing"].to_string().matches("sleep 1000").count(), 2, "{report}");
}

#[test]
fn host_resources_do_not_move() {
    let (here, there) = pair(User::Own);
    let given = here.given(User::Own);
    here.ok(&["new", "k"]);
    here.ok(&["exec", "k", "x=1"]);
    here.ok(&["mount", "k", "/given", given.to_str().unwrap()]);
    here.ok(&["checkpoint", "k", "-m", "mounted"]);
    let refused = teleport(&here, "k", &there, &[]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(4) && said.contains("mount /given"), "{said}");
    assert_eq!(here.ok(&["exec", "k", "cat /given/file"]), "of the host");
    let report = moved(&here, "k", &there, &["--allow-missing"]);
    assert!(report["missing"][0].as_str().is_some_and(|one| one.contains("/given")), "{report}");
    assert_eq!(there.ok(&["mounts", "k", "--json"]).trim(), "[]");
    // The path exists there, and an old checkpoint names it: it is not granted.
    there.ok(&["restore", "k", "mounted", "--yes"]);
    assert_eq!(there.ok(&["mounts", "k", "--json"]).trim(), "[]");
    assert_eq!(there.ok(&["exec", "k", "echo $x"]), "1\n");
}

#[test]
fn unusable_transports_are_refused() {
    let (here, there) = pair(User::Own);
    set_up(&here, "demo");
    let own = to(&here);
    for (to, code) in
        [("exec:false", 1), ("exec:cat", 1), ("exec:head -c 99 /dev/zero", 1), ("ssh://-x", 2), ("x", 2), (&own, 4)]
    {
        let refused = here.cli(&["teleport", "demo", "--to", to]);
        assert_ne!(refused.status.code(), Some(0), "{to}: {refused:?}");
        if code > 1 && code != 2 {
            assert_eq!(refused.status.code(), Some(code), "{to}: {refused:?}");
        }
        assert_eq!(here.ok(&["exec", "demo", VIEW]), "2 two deep\n", "{to}");
    }
    let said = here.cli(&["teleport", "demo", "--to", "exec:echo no such host >&2; exit 3"]);
    assert!(String::from_utf8_lossy(&said.stderr).contains("no such host"), "{said:?}");
    assert_eq!((handovers(&here), state(&there, "demo")), (Vec::new(), None));
}

/// A client that goes away, or asks for it, cancels a move before its commit.
#[test]
fn move_is_cancelled() {
    let here = Host::start();
    set_up(&here, "demo");
    let mut command = here.command("ryokan");
    let mut waiting = command.args(["--no-autostart", "teleport", "demo", "--to", "exec:sleep 600"]).spawn().unwrap();
    until("the move begins", || !handovers(&here).is_empty());
    assert_eq!(handovers(&here)[0]["state"], "moving");
    let begun = Instant::now();
    here.ok(&["teleport", "demo", "--abort"]);
    assert!(!waiting.wait().unwrap().success());
    // The target's silence would end it then.
    assert!(begun.elapsed() < ryokan::core::limits::HANDOVER_HELLO, "{:?}", begun.elapsed());
    assert_eq!(here.ok(&["exec", "demo", VIEW]), "2 two deep\n");
    let mut waiting = command.spawn().unwrap();
    until("the move begins", || handovers(&here).iter().any(|one| one["state"] == "moving"));
    waiting.kill().unwrap();
    waiting.wait().unwrap();
    until("the move ends", || handovers(&here).is_empty());
    assert_eq!(here.ok(&["exec", "demo", VIEW]), "2 two deep\n");
}

/// A target that does not acknowledge the abort of one move is no end of the next one.
#[test]
fn unacknowledged_abort_spares_next_move() {
    let (here, there) = pair(User::Own);
    here.ok(&["new", "demo", "--engine", "bash"]);
    // Longer than the wait for an acknowledgement.
    here.ok(&["exec", "demo", "dd if=/dev/urandom of=large bs=1M count=14 2>/dev/null; x=1"]);
    let (flag, address) = (here.path("home").join("flag"), to(&there));
    let pipe = address.strip_prefix("exec:").expect("a command");
    let once = format!("exec:if mkdir {} 2>/dev/null; then {pipe}; else exec sleep 600; fi", flag.display());
    let mut command = here.command("ryokan");
    command.args(["--no-autostart", "teleport", "demo", "--to", &once, "--limit-rate", "1M"]);
    let mut first = command.spawn().unwrap();
    until("the first files are captured", || here.ok(&["log", "demo"]).contains("teleport"));
    here.ok(&["teleport", "demo", "--abort"]);
    moved(&here, "demo", &there, &["--limit-rate", "1M"]);
    assert!(!first.wait().unwrap().success());
    assert_eq!(there.ok(&["exec", "demo", "stat -c %s large; echo $x"]), "14680064\n1\n");
}

#[test]
fn repeated_key_moves_once() {
    let (mut here, there) = pair(User::Own);
    set_up(&here, "demo");
    set_up(&here, "other");
    let key = ["--key", "k1"];
    // A failed move is not remembered.
    let failed = here.cli(&["teleport", "demo", "--to", "exec:false", "--key", "k1"]);
    assert!(!failed.status.success() && is_live(&here, "demo"));
    let first = moved(&here, "demo", &there, &key);
    assert_eq!(moved(&here, "demo", &there, &key), first);
    let used = teleport(&here, "other", &there, &key);
    assert!(String::from_utf8_lossy(&used.stderr).contains("another move"), "{used:?}");
    // The kernel comes back: the first request is done all the same.
    moved(&there, "demo", &here, &[]);
    here.restart();
    assert_eq!(moved(&here, "demo", &there, &key), first);
    assert!(is_live(&here, "demo"));
    let without = teleport(&there, "demo", &here, &[]);
    assert!(String::from_utf8_lossy(&without.stderr).contains("moved to host"), "{without:?}");
    // The daemon dies after the departure, before its report.
    arm(&mut here, "kernel.files.clear=kill");
    assert!(!teleport(&here, "demo", &there, &["--key", "k2"]).status.success());
    assert!(here.ends_soon());
    arm(&mut here, "");
    let again = moved(&here, "demo", &there, &["--key", "k2"]);
    assert_ne!(again["handover"], first["handover"]);
    one_is_left(&here, &there, "killed after the departure");
    assert_eq!(there.ok(&["exec", "demo", VIEW]), "2 two deep\n");
}

#[test]
fn move_checks_expected_version() {
    let (here, there) = pair(User::Own);
    set_up(&here, "demo");
    let version = show(&here, "demo")["version"].as_u64().expect("a number");
    for (expected_version, succeeds) in [(version + 1, false), (version, true)] {
        let options = MoveOptions { expected_version, ..MoveOptions::default() };
        let target = to(&there);
        let done = here.with(async move |client| client.teleport("demo", &target, options, |_, _, _| {}).await);
        assert_eq!(done.is_ok(), succeeds, "{done:?}");
        assert!(succeeds || done.is_err_and(|error| error.message.contains("is at version")));
    }
}

/// Such a group could never be frozen.
#[test]
fn groups_refuse_departed_kernels() {
    let (here, there) = pair(User::Own);
    set_up(&here, "demo");
    here.ok(&["group", "new", "shop"]);
    let refused = |code: i32, words: &[&str]| {
        let output = here.cli(&["group", "add", "shop", "--kernel", "demo"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{said}");
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
        let shown: Value = serde_json::from_str(&here.ok(&["group", "show", "shop", "--json"])).expect("JSON");
        assert_eq!(shown["members"], serde_json::json!([]));
    };
    let mut command = here.command("ryokan");
    let mut waiting = command.args(["--no-autostart", "teleport", "demo", "--to", "exec:sleep 600"]).spawn().unwrap();
    until("the move begins", || !handovers(&here).is_empty());
    refused(
        4,
        &["kernel demo has an unfinished handover", "cannot be a member", "teleport --status", "teleport demo --abort"],
    );
    here.ok(&["teleport", "demo", "--abort"]);
    assert!(!waiting.wait().unwrap().success());
    until("the move ends", || handovers(&here).is_empty());
    moved(&here, "demo", &there, &[]);
    refused(4, &["kernel demo moved to host", "cannot be a member", "on that host", "ryokan rm demo"]);
    // What arrived is a kernel like others.
    there.ok(&["group", "new", "shop"]);
    there.ok(&["group", "add", "shop", "--kernel", "demo"]);
    there.ok(&["freeze", "shop"]);
}
