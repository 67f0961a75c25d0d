//! The engine's state: stored before an end is reported, restored at start, replaced as a whole or
//! not at all.

use std::rc::Rc;
use std::time::Duration;

use ryokan::catalog::{Changes, Durability, EngineDb, Entry, JobRecord};
use ryokan::core::error::{Error, ErrorCode};
use ryokan::core::ids::ExecId;
use ryokan::core::kernel::CrashCause;
use ryokan::core::value::Value;
use ryokan::link::host::CodeCheck;
use ryokan::link::types::StateChunk;

use super::code;
use super::fake::{Fake, Plan};
use super::listener::{Recorder, local};

fn chunk(key: &str, data: &[u8]) -> StateChunk {
    StateChunk { key: key.into(), meta_json: b"{\"type\":\"t\"}".to_vec(), data: data.to_vec(), more: false }
}

#[test]
fn state_survives_kill_after_end() {
    local(async {
        let mut fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        let program = "put('var/x', b'1', type='int'); put('var/gone', b'2'); put('var/big', b'z' * 3_000_000)";
        link.start(code(1, program)).await.unwrap();
        seen.end(1).await;
        link.start(code(2, "send({'ev': 'del', 'key': 'var/gone'}); put('var/x', b'3')")).await.unwrap();
        seen.end(2).await;
        // The third does not end: nothing of it is stored.
        link.start(code(3, "put('var/x', b'never'); send({'ev': 'del', 'key': 'var/big'}); os._exit(1)"))
            .await
            .unwrap();
        seen.end(3).await;
        assert_eq!(seen.cause().await, CrashCause::Exited(1));
        drop(link);
        fake.status().await;
        let expected = [("var/big".to_owned(), vec![b'z'; 3_000_000]), ("var/x".to_owned(), b"3".to_vec())];
        assert_eq!(fake.state(), expected);

        let folder = fake.folder.clone();
        drop(fake);
        let fake = Fake::within(folder, Plan::default()).await.unwrap();
        let seen = Recorder::new();
        let (link, report) = fake.attach(&seen).await.unwrap();
        assert_eq!((report.restored_entries, report.not_restored.len()), (2, 0));
        link.start(code(1, "out(entries['var/x'][1]); out(str(len(entries['var/big'][1])).encode())")).await.unwrap();
        seen.end(1).await;
        assert_eq!(seen.out(1), "33000000");
    });
}

#[test]
fn unrestorable_entries_reported() {
    local(async {
        let folder = Rc::new(tempfile::tempdir().unwrap());
        let db = EngineDb::open(&folder.path().join("engine.db"), Durability::Process).unwrap();
        let entry = |key: &str| Entry { key: key.into(), meta_json: "{}".into(), body: b"b".to_vec() };
        let jobs = vec![JobRecord { id: "4".into(), command: "sleep 9".into() }];
        let puts = vec![entry("odd/y"), entry("var/x")];
        db.apply(&Changes { puts, jobs: Some(jobs), ..Changes::default() }).unwrap();
        db.close().unwrap();
        let fake = Fake::within(folder, Plan::default()).await.unwrap();
        let seen = Recorder::new();
        let (_link, report) = fake.attach(&seen).await.unwrap();
        let named: Vec<_> = report.not_restored.iter().map(|m| m.key.as_str()).collect();
        assert_eq!(named, ["job/4", "odd/y"]);
        assert!(report.not_restored[0].reason.contains("sleep 9"));
    });
}

#[test]
fn damaged_state_stops_engine() {
    local(async {
        let folder = Rc::new(tempfile::tempdir().unwrap());
        std::fs::write(folder.path().join("engine.db"), vec![7; 8192]).unwrap();
        let error = Fake::within(folder, Plan::default()).await.map(drop).unwrap_err();
        assert_eq!(error.code, ErrorCode::Corrupt);
        assert!(error.message.contains("engine.db"), "{error}");
    });
}

#[test]
fn state_of_another_engine_is_refused() {
    local(async {
        let folder = Rc::new(tempfile::tempdir().unwrap());
        let db = EngineDb::open(&folder.path().join("engine.db"), Durability::Process).unwrap();
        db.set_info(&ryokan::catalog::EngineInfo { name: "kaish".into(), version: "1".into(), format: 1 }).unwrap();
        db.close().unwrap();
        let error = Fake::within(folder, Plan::default()).await.map(drop).unwrap_err();
        assert_eq!(error.code, ErrorCode::Conflict);
    });
}

#[test]
fn changes_stored_before_reply() {
    local(async {
        let mut fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        assert_eq!(link.get_var("x").await.unwrap_err().code, ErrorCode::NotFound);
        link.set_var("x", &Value::String("v".into())).await.unwrap();
        assert_eq!(link.get_var("x").await.unwrap(), Value::String("\"v\"".into()));
        assert_eq!(link.vars().await.unwrap()[0].name, "x");
        let tools = link.tools().await.unwrap();
        assert_eq!((tools[0].name.as_str(), tools[0].schema_json.as_str()), ("t", r#"{"a":1}"#));
        assert_eq!(link.complete("ab", 1).await.unwrap().matches, ["a", "b"]);
        assert_eq!(link.check("if").await.unwrap(), CodeCheck::Incomplete { indent: "  ".into() });
        assert_eq!(link.usage().await.unwrap().cpu_us, 3);
        let heads = link.state_heads().await.unwrap();
        assert_eq!(heads.iter().map(|head| head.key.as_str()).collect::<Vec<_>>(), ["var/x"]);
        assert_eq!(link.state_entry("var/x").await.unwrap().body, b"\"v\"");
        assert_eq!(link.state_entry("var/y").await.unwrap_err().code, ErrorCode::NotFound);
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(fake.notes.borrow().pid), nix::sys::signal::SIGKILL).unwrap();
        assert_eq!(seen.cause().await, CrashCause::Signalled(9));
        drop(link);
        fake.status().await;
        assert_eq!(fake.state(), [("var/x".to_owned(), b"\"v\"".to_vec())]);
    });
}

#[test]
fn stop_saves_state_first() {
    local(async {
        let mut fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        link.start(code(1, "entries['var/quiet'] = ({}, b'q')\nout(b'on')\ntime.sleep(30)")).await.unwrap();
        // Else the stop may come before the code's first step.
        seen.until("output", |s| (s.chunks > 0).then_some(())).await;
        link.stop(Duration::from_secs(60)).await.unwrap();
        // Unless it has gone already.
        let refused = link.start(code(2, "1")).await.unwrap_err().code;
        assert!([ErrorCode::Unavailable, ErrorCode::Lost].contains(&refused), "{refused:?}");
        let _ = link.acknowledge(ExecId(1)).await;
        assert_eq!(fake.status().await, 0);
        seen.gone().await;
        assert!(seen.seen.borrow().causes.is_empty());
        assert_eq!(fake.state(), [("var/quiet".to_owned(), b"q".to_vec())]);
    });
}

#[test]
fn load_replaces_state() {
    local(async {
        let mut fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        link.start(code(1, "put('var/old', b'old')")).await.unwrap();
        seen.end(1).await;
        link.acknowledge(ExecId(1)).await.unwrap();
        let mut chunks = vec![Ok(chunk("var/new", b"new")), Ok(chunk("odd/z", b""))];
        // One entry in many pieces, more than all buffers on the way hold.
        for i in 0..40 {
            chunks.push(Ok(StateChunk { more: i < 39, ..chunk("var/large", &vec![b'a' + (i % 26) as u8; 1 << 20]) }));
        }
        let missed = link.load(futures::stream::iter(chunks)).await.unwrap();
        assert_eq!(missed.iter().map(|m| m.key.as_str()).collect::<Vec<_>>(), ["odd/z"]);
        link.start(code(2, "out(json.dumps([[k, len(b)] for k, (m, b) in sorted(entries.items())]).encode())"))
            .await
            .unwrap();
        seen.end(2).await;
        assert_eq!(seen.out(2), r#"[["odd/z", 0], ["var/large", 41943040], ["var/new", 3]]"#);
        let body = link.state_entry("var/large").await.unwrap().body;
        assert!(body.len() == 40 << 20 && body[1 << 20] == b'b');
        link.acknowledge(ExecId(2)).await.unwrap();
        link.stop(Duration::from_secs(60)).await.unwrap();
        fake.status().await;
        assert_eq!(fake.state().len(), 3);
    });
}

#[test]
fn failed_load_keeps_state() {
    let attempts: [(&str, Vec<Result<StateChunk, Error>>); 4] = [
        ("corrupt", vec![Ok(chunk("var/new", b"n")), Ok(chunk("var/poison", b"p"))]),
        ("lost", vec![Ok(chunk("var/new", b"n")), Ok(chunk("var/deadly", b"d"))]),
        ("invalidArgument", vec![Ok(StateChunk { more: true, ..chunk("var/a", b"1") }), Ok(chunk("var/b", b"2"))]),
        ("notFound", vec![Ok(chunk("var/new", b"n")), Err(Error::not_found("an object is missing"))]),
    ];
    for (expected, chunks) in attempts {
        local(async move {
            let mut fake = Fake::start().await;
            let seen = Recorder::new();
            let (link, _) = fake.attach(&seen).await.unwrap();
            link.start(code(1, "put('var/old', b'old')")).await.unwrap();
            seen.end(1).await;
            link.acknowledge(ExecId(1)).await.unwrap();
            let error = link.load(futures::stream::iter(chunks)).await.unwrap_err();
            assert_eq!(error.code.name(), expected, "{error}");
            // A load abandoned by its daemon ends the worker when the link closes.
            drop(link);
            assert_eq!(fake.status().await, 1);
            assert_eq!(fake.state(), [("var/old".to_owned(), b"old".to_vec())], "{expected}");
        });
    }
}

#[test]
fn mounts_by_path_or_descriptor() {
    local(async {
        use std::io::{Seek, Write};
        let fake = Fake::start().await;
        let seen = Recorder::new();
        let (link, _) = fake.attach(&seen).await.unwrap();
        link.bind("/data".as_ref(), "/host/data".as_ref(), true, None).await.unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"detached").unwrap();
        file.rewind().unwrap();
        link.bind("/more".as_ref(), "/host/more".as_ref(), false, Some(file.into())).await.unwrap();
        let binds = fake.notes.borrow().binds.clone();
        assert_eq!(binds[0], ("/data".into(), "/host/data".into(), true));
        assert_eq!(binds[1], ("/more".into(), "/host/more: detached".into(), false));
        link.unbind("/data".as_ref()).await.unwrap();
        assert_eq!(link.unbind("/data".as_ref()).await.unwrap_err().code, ErrorCode::NotFound);
    });
}
