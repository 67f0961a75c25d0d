//! Engines that break the contract: each costs a bounded amount of memory and ends as a crash of its own worker.

use std::time::Duration;

use ryokan::core::error::ErrorCode;
use ryokan::core::exec::ExecStatus;
use ryokan::core::ids::ExecId;
use ryokan::core::kernel::CrashCause;
use ryokan::core::value::Value;

use super::code;
use super::fake::{Fake, Plan};
use super::listener::{Recorder, local};

/// Memory is measured for the whole process, so tests that fill it are serialised.
fn alone() -> std::sync::MutexGuard<'static, ()> {
    static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
    TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn resident_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() / 1024
}

/// As [`breaks_the_contract`], with a small bound of state.
fn exceeds_state_bound(program: &str) -> String {
    contract_broken_by(Plan { state_bytes: 4 << 20, ..Plan::default() }, program)
}

fn breaks_the_contract(program: &str) -> String {
    contract_broken_by(Plan::default(), program)
}

/// Runs hostile code and expects the worker to end with cause `protocol`; returns the detail.
fn contract_broken_by(plan: Plan, program: &str) -> String {
    let said = std::rc::Rc::new(std::cell::RefCell::new(String::new()));
    let (program, got) = (program.to_owned(), said.clone());
    local(async move {
        let mut fake = Fake::with(plan).await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        link.start(code(1, &program)).await.unwrap();
        let cause = seen.cause().await;
        let CrashCause::Protocol(why) = cause else { panic!("{program}: {cause:?}") };
        assert_eq!(seen.end(1).await.status, ExecStatus::Lost);
        link.acknowledge(ExecId(1)).await.unwrap();
        assert_eq!(fake.status().await, 1);
        *got.borrow_mut() = why;
    });
    said.take()
}

#[test]
fn broken_frames_end_worker() {
    for program in [
        "raw(b'\\xff' * 100)\ntime.sleep(30)",
        "raw(struct.pack('<II', 17 << 20, 0))\ntime.sleep(30)",
        "raw(struct.pack('<II', 2, 2 << 20) + b'{}')\ntime.sleep(30)",
        "raw(struct.pack('<II', 4, 0) + b'nope')\ntime.sleep(30)",
        "send({'ev': 'nonsense'})\ntime.sleep(30)",
        "send({'ev': 'ready', 'engine': 'python', 'version': '1', 'interrupt': 'signal'})\ntime.sleep(30)",
        "send({'ev': 'end', 'id': 999, 'exec': 1, 'status': 'done', 'code': 0})\ntime.sleep(30)",
        "send({'ev': 'end', 'id': frame['id'], 'exec': 2, 'status': 'done', 'code': 0})\ntime.sleep(30)",
        "send({'ev': 'reply', 'id': 999, 'ok': True})\ntime.sleep(30)",
        "send({'ev': 'put', 'key': '', 'meta': {}})\ntime.sleep(30)",
        "send({'ev': 'put', 'key': 'k' * 5000, 'meta': {}})\ntime.sleep(30)",
        "send({'ev': 'put', 'key': 'a', 'more': True}, b'x'); send({'ev': 'put', 'key': 'b'}, b'x')\ntime.sleep(30)",
        "send({'ev': 'jobs', 'jobs': [{'id': 'x' * 5_000_000}]})\ntime.sleep(30)",
        "send({'ev': 'missed', 'entries': [{'key': 'x' * 5_000_000}]})\ntime.sleep(30)",
    ] {
        let why = breaks_the_contract(program);
        assert!(!why.is_empty() && why.len() < 500, "{program}: {why}");
    }
}

#[test]
fn closed_control_socket_ends_worker() {
    let why = breaks_the_contract("ctl.close(); os.closerange(3, 64); time.sleep(30)");
    assert!(why.contains("closed its control socket"), "{why}");
}

#[test]
fn closed_output_pipes_allowed() {
    local(async {
        let fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        link.start(code(1, "out(b'bye'); os.close(1); os.close(2)")).await.unwrap();
        assert_eq!(seen.end(1).await.status, ExecStatus::Done);
        assert_eq!(seen.out(1), "bye");
        link.start(code(2, "1")).await.unwrap();
        seen.end(2).await;
    });
}

#[test]
fn tool_call_flood_ends_worker() {
    let _turn = alone();
    let program = "for i in range(1000): send({'ev': 'tool_call', 'call': i, 'exec': 1, 'name': 'x', 'args': None})\ntime.sleep(30)";
    local(async move {
        let fake = Fake::start().await;
        let seen = Recorder::new();
        seen.tools_hang.set(true);
        let (link, _) = fake.attach(&seen).await.unwrap();
        link.start(code(1, program)).await.unwrap();
        assert!(matches!(seen.cause().await, CrashCause::Protocol(why) if why.contains("tool calls")));
        assert!(seen.seen.borrow().tool_calls.len() <= 64);
    });
}

#[test]
fn list_flood_is_merged() {
    let _turn = alone();
    local(async {
        let fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        let before = resident_mib();
        let program = "for i in range(60): send({'ev': 'jobs', 'jobs': [{'id': str(i), 'command': 'x' * 500_000}]})";
        link.start(code(1, program)).await.unwrap();
        seen.end(1).await;
        seen.until("the last list", |s| s.jobs.last().filter(|jobs| jobs[0].id == "59").map(drop)).await;
        assert!(seen.seen.borrow().jobs.len() <= 60);
        let after = resident_mib();
        // The recorder itself keeps the received data.
        assert!(after.saturating_sub(before) < 400, "{before} MiB before, {after} MiB after");
    });
}

#[test]
fn display_flood_waits_for_reader() {
    let _turn = alone();
    local(async {
        let fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        seen.stalled.set(true);
        let before = resident_mib();
        let program = "for i in range(400): send({'ev': 'display', 'exec': current, 'mime': 'x/y'}, b'x' * (1 << 20))";
        link.start(code(1, program)).await.unwrap();
        tokio::time::sleep(Duration::from_secs(1)).await;
        let during = resident_mib();
        assert!(during.saturating_sub(before) < 100, "{before} MiB before, {during} MiB during");
        link.interrupt(ExecId(1)).await.unwrap();
        seen.resume();
        seen.end(1).await;
    });
}

#[test]
fn state_flood_is_bounded() {
    let _turn = alone();
    local(async {
        let mut fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        let before = resident_mib();
        // The same key again and again replaces itself; 700 MiB in one entry are named as missed.
        let program = r#"
for i in range(200): send({'ev': 'put', 'key': 'var/same', 'meta': {}, 'more': False}, b'x' * (1 << 20))
for i in range(700): send({'ev': 'put', 'key': 'var/huge', 'meta': {}, 'more': i < 699}, b'x' * (1 << 20))
"#;
        link.start(code(1, program)).await.unwrap();
        let end = seen.until("the end", |s| s.ends.get(&ExecId(1)).map(|e| e.0.clone())).await;
        assert_eq!((end.status, end.err.as_str()), (ExecStatus::Done, ""));
        let after = resident_mib();
        assert!(after.saturating_sub(before) < 600, "{before} MiB before, {after} MiB after");
        link.acknowledge(ExecId(1)).await.unwrap();
        link.stop(Duration::from_secs(60)).await.unwrap();
        fake.status().await;
        let state = fake.state();
        assert_eq!(
            state.iter().map(|(key, body)| (key.as_str(), body.len())).collect::<Vec<_>>(),
            [("var/same", 1 << 20)]
        );
    });
}

#[test]
fn excess_state_entries_end_worker() {
    let why = breaks_the_contract("for i in range(101_000): send({'ev': 'put', 'key': str(i)})\ntime.sleep(30)");
    assert!(why.contains("state entries"), "{why}");
}

#[test]
fn state_heads_share_one_bound() {
    let _turn = alone();
    for program in [
        "for i in range(1000): send({'ev': 'put', 'key': str(i), 'meta': {'m': 'x' * 60_000}})\ntime.sleep(30)",
        "for i in range(50_000): send({'ev': 'put', 'key': 'k' * 900 + str(i)})\ntime.sleep(30)",
        "for i in range(50_000): send({'ev': 'del', 'key': 'k' * 900 + str(i)})\ntime.sleep(30)",
        "send({'ev': 'missed', 'entries': [{'key': str(i)} for i in range(100_000)]})\ntime.sleep(30)",
        "send({'ev': 'jobs', 'jobs': [{'id': str(i), 'command': ''} for i in range(100_000)]})\ntime.sleep(30)",
    ] {
        let why = exceeds_state_bound(program);
        assert!(why.contains("quarter of the kernel's memory limit"), "{program}: {why}");
    }
    let why = breaks_the_contract("send({'ev': 'put', 'key': 'a', 'meta': {'m': 'x' * 300_000}})\ntime.sleep(30)");
    assert!(why.contains("frame"), "{why}");
}

#[test]
fn dropped_entries_count_across_executions() {
    let _turn = alone();
    local(async {
        let fake = Fake::with(Plan { state_bytes: 4 << 20, ..Plan::default() }).await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        let program = |exec: u64| {
            format!(
                "for i in range(200):\n for p in range(5): send({{'ev': 'put', 'key': 'k' * 900 + '{exec}.%d' % i, 'more': p < 4}}, b'x' * 900_000)"
            )
        };
        link.start(code(1, &program(1))).await.unwrap();
        assert_eq!(seen.end(1).await.status, ExecStatus::Done);
        link.acknowledge(ExecId(1)).await.unwrap();
        for exec in 2..100 {
            if link.start(code(exec, &program(exec))).await.is_err() {
                break;
            }
            if seen.end(exec).await.status == ExecStatus::Lost {
                break;
            }
            link.acknowledge(ExecId(exec)).await.unwrap();
        }
        assert!(matches!(seen.cause().await, CrashCause::Protocol(why) if why.contains("memory limit")));
    });
}

#[test]
fn stored_state_is_bounded() {
    let _turn = alone();
    local(async {
        let mut fake = Fake::with(Plan { stored_bytes: 8 << 20, ..Plan::default() }).await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        for exec in 1..=9 {
            let program = format!("send({{'ev': 'put', 'key': 'var/{exec}', 'meta': {{}}}}, b'x' * (1 << 20))");
            link.start(code(exec, &program)).await.unwrap();
            let err = seen.end(exec).await.err;
            assert_eq!(err.contains("size of the engine state"), exec == 9, "{exec}: {err}");
            link.acknowledge(ExecId(exec)).await.unwrap();
        }
        // A state within the bound is stored, with what did not fit before.
        link.start(code(10, "send({'ev': 'del', 'key': 'var/1'})")).await.unwrap();
        assert_eq!(seen.end(10).await.err, "");
        link.acknowledge(ExecId(10)).await.unwrap();
        link.stop(Duration::from_secs(60)).await.unwrap();
        fake.status().await;
        let keys: Vec<String> = fake.state().into_iter().map(|(key, _)| key).collect();
        assert_eq!(keys, (2..=9).map(|exec| format!("var/{exec}")).collect::<Vec<_>>());
    });
}

#[test]
fn non_reading_engine_bounded() {
    local(async {
        let fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        link.start(code(1, "signal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(60)")).await.unwrap();
        let schema = serde_json::json!("x".repeat(1 << 20));
        let tool = ryokan::link::host::DynamicTool { name: "t".into(), description: String::new(), schema };
        let mut refused = None;
        for _ in 0..100 {
            if let Err(error) = link.dynamic_tools(std::slice::from_ref(&tool)).await {
                refused = Some(error);
                break;
            }
        }
        assert!(refused.is_some(), "100 MiB were queued for an engine that does not read");
    });
}

#[test]
fn deeply_nested_value_contained() {
    local(async {
        let fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        let deep = r#"
body = ('{"ev":"end","id":%d,"exec":%d,"status":"done","code":0,"value":%s}' % (frame['id'], current, '[' * 200_000 + ']' * 200_000)).encode()
raw(struct.pack('<II', len(body), 0) + body)
raise Silent
"#;
        link.start(code(1, deep)).await.unwrap();
        let end = seen.end(1).await;
        assert_eq!((end.status, end.value), (ExecStatus::Done, None));
        assert!(end.err.contains("cannot be decoded"), "{}", end.err);
        link.start(code(2, "value = None")).await.unwrap();
        assert_eq!(seen.end(2).await.value, Some(Value::Null));
    });
}

#[test]
fn engine_start_failure_reason() {
    for (prelude, expected) in [
        ("err(b'no such module: spam'); os._exit(3)", "exited with status 3"),
        ("raw(b'\\xff' * 100); time.sleep(30)", "broke its contract"),
        ("send({'ev': 'ready', 'engine': 'kaish', 'version': '1', 'interrupt': 'signal'}); time.sleep(30)", "kaish"),
    ] {
        local(async move {
            let folder = std::rc::Rc::new(tempfile::tempdir().unwrap());
            let plan = Plan { prelude: prelude.into(), ..Plan::default() };
            let error = Fake::within(folder, plan).await.map(drop).unwrap_err();
            assert_eq!(error.code, ErrorCode::Lost);
            assert!(error.message.contains(expected), "{error}");
            if prelude.contains("spam") {
                assert!(error.hint.contains("no such module: spam"), "{}", error.hint);
            }
        });
    }
}
