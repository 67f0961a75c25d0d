//! Interrupts end running code promptly and keep the session; background jobs survive both.

use std::time::{Duration, Instant};

use super::kit::Engine;
use crate::link::frames::{EndStatus, Event, Request};

/// Limit from interrupt to end; the design target is about one second.
const SOON: Duration = Duration::from_millis(2500);

fn interrupted(engine: &mut Engine, code: &str) {
    let id = engine.begin(code);
    engine.until_out("begun");
    std::thread::sleep(Duration::from_millis(30));
    let begun = Instant::now();
    engine.interrupt(id);
    let ran = engine.end(id);
    assert_eq!((ran.status, ran.code), (Some(EndStatus::Interrupted), 130), "{code}: {ran:?}");
    assert!(begun.elapsed() < SOON, "{code}: {:?}", begun.elapsed());
    assert!(!ran.out.contains("never"), "{code}: {ran:?}");
}

#[test]
fn interrupt_ends_every_wait() {
    let mut engine = Engine::start();
    engine.out("kept=1; k() { echo k; }; mkfifo fifo; readonly ro=3");
    for (number, code) in [
        "sleep 30; echo never",
        "while :; do :; done; echo never",
        "sleep 30 | cat | cat; echo never",
        "( sleep 30; echo never ); echo never",
        "read x < fifo; echo never",
        "x=$(sleep 30); echo never",
        "f() { local kept=2; sleep 30; echo never; }; f; echo never",
        "for i in 1 2 3; do sleep 30 || echo never; done",
        "( trap '' INT; sleep 30 ); echo never",
        "trap '' INT; sleep 30; echo never",
        "trap 'echo caught' INT; while :; do sleep 30; done",
        "sh -c 'trap \"\" INT TERM; while :; do sleep 1; done'; echo never",
        "trap '' INT TERM; while :; do :; done",
        "sleep 30 & wait; echo never",
        "exec sleep 30",
        "( while :; do :; done ) | cat",
    ]
    .into_iter()
    .enumerate()
    {
        engine.run(&format!("mark={number}"));
        interrupted(&mut engine, &format!("echo begun; {code}"));
        assert_eq!(engine.run("echo $kept $mark $ro; k; trap - INT TERM").out, format!("1 {number} 3\nk\n"), "{code}");
    }
}

#[test]
fn interrupt_sets_status_130() {
    let mut engine = Engine::start();
    interrupted(&mut engine, "echo begun; sleep 30");
    assert_eq!(engine.out("echo $?"), "130\n");
    assert_eq!(engine.out("echo $?"), "0\n");
}

#[test]
fn interrupt_keeps_state() {
    let mut engine = Engine::start();
    interrupted(&mut engine, "x=new; a=(1 2); cd /; echo begun; sleep 30; x=never");
    assert_eq!(engine.out("echo $x ${a[1]} $PWD"), "new 2 /\n");
}

#[test]
fn interrupt_undoes_redirections() {
    let mut engine = Engine::start();
    for code in [
        "echo begun; { sleep 30; } >file 2>&1",
        "echo begun; f() { sleep 30; } >/dev/null 2>&1; f",
        "echo begun; while sleep 30; do :; done <file >file",
    ] {
        interrupted(&mut engine, code);
        assert!(!engine.has_missed("descriptor/1") && !engine.has_missed("descriptor/2"), "{:?}", engine.missed);
        let ran = engine.run("echo out; echo err >&2");
        assert_eq!((ran.out.as_str(), ran.stderr.as_str()), ("out\n", "err\n"), "{code}");
    }
    let ran = engine.run("{ exit 4; } >file");
    assert_eq!(ran.code, 4);
    assert_eq!(engine.out("echo out"), "out\n");
    // Permanent redirections persist.
    engine.out("exec 2>errors");
    interrupted(&mut engine, "echo begun; sleep 30");
    assert_eq!(engine.run("echo err >&2; cat errors").out, "err\n");
}

#[test]
fn stray_interrupt_is_ignored() {
    let mut engine = Engine::start();
    engine.interrupt(77);
    assert_eq!(engine.out("echo on"), "on\n");
    let id = engine.begin("echo begun; sleep 0.3; echo done");
    engine.until_out("begun");
    engine.interrupt(id + 5);
    assert_eq!(engine.end(id).good(), "begun\ndone\n");
    // Many interrupts, at the worst moments.
    for i in 0..30 {
        let id = engine.begin("y=2");
        if i % 3 == 0 {
            std::thread::sleep(Duration::from_micros(300 * i));
        }
        engine.interrupt(id);
        let ran = engine.end(id);
        assert!(matches!(ran.status, Some(EndStatus::Interrupted | EndStatus::Done)), "{ran:?}");
    }
    assert_eq!(engine.out("echo on"), "on\n");
}

#[test]
fn changed_ulimits_are_reported() {
    let mut engine = Engine::start();
    engine.run("x=1");
    assert!(engine.missed.is_empty(), "{:?}", engine.missed);
    engine.run("ulimit -S -n 400");
    assert!(engine.has_missed("ulimit/max-open-files"), "{:?}", engine.missed);
}

#[test]
fn jobs_outlive_interrupts() {
    let mut engine = Engine::start();
    let ran = engine.run("sleep 31 & sleep 0.4 & echo $!");
    let jobs = ran.jobs.expect("reported");
    let commands: Vec<&str> = jobs.iter().map(|job| job.command.as_str()).collect();
    assert_eq!(commands, ["sleep 31", "sleep 0.4"]);
    assert!(engine.missed.iter().any(|missed| missed.key.starts_with("job/")), "{:?}", engine.missed);
    // A job that ends by itself, between executions.
    let reported = engine.event_within(Duration::from_secs(5)).expect("reported");
    assert!(matches!(reported, Event::Jobs { ref jobs } if jobs.len() == 1), "{reported:?}");
    interrupted(&mut engine, "sleep 32 & echo begun; sleep 30");
    assert_eq!(engine.jobs.iter().map(|job| job.command.as_str()).collect::<Vec<_>>(), ["sleep 31", "sleep 32"]);
    engine.run("exit 1");
    engine.run("kill -9 $$");
    assert_eq!(engine.jobs.len(), 2, "{:?}", engine.jobs);
    for job in engine.jobs.clone() {
        engine.out(&format!("kill {}", job.id));
    }
    while !engine.jobs.is_empty() {
        engine.event_within(Duration::from_secs(5)).expect("reported");
    }
}

#[test]
fn jobs_persist_in_shell() {
    let mut engine = Engine::start();
    engine.out("(sleep 0.2; exit 6) & p=$!");
    assert_eq!(engine.out("wait $p; echo $?"), "6\n");
    engine.out("sleep 30 &");
    assert!(engine.out("jobs").contains("sleep 30"));
    assert_eq!(engine.out("kill %1; wait %1 2>/dev/null; echo $?"), "143\n");
}

#[test]
fn shutdown_ends_jobs_within_two_seconds() {
    let mut engine = Engine::start();
    engine.out("sleep 33 & (trap '' TERM; sleep 34) & echo ok");
    let pids: Vec<i32> = engine.jobs.iter().map(|job| job.id.parse().expect("a number")).collect();
    assert_eq!(pids.len(), 2);
    let begun = Instant::now();
    engine.send(&Request::Shutdown, &[]);
    assert_eq!(engine.joined(), 0);
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    std::thread::sleep(Duration::from_millis(100));
    for pid in pids {
        let state = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        assert!(state.is_empty() || state.contains(") Z "), "{state}");
    }
}

#[test]
fn shutdown_interrupts_code() {
    let mut engine = Engine::start();
    let id = engine.begin("echo begun; sleep 35");
    engine.until_out("begun");
    engine.send(&Request::Shutdown, &[]);
    assert_eq!(engine.end(id).status, Some(EndStatus::Interrupted));
    assert_eq!(engine.joined(), 0);
}
