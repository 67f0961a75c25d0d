//! Property tests of the databases against simple models, and of concurrent requests.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::crash_tests::{audit, config, kernel};
use super::state::{Begun, Direction, EntryKind, ExecBegin, ExecClose, Kept, Lease, NewEntry, OutputRecord};
use super::*;
use crate::core::exec::{ExecEnd, ExecRequest, ExecStatus, OutputData, Stream, Work};
use crate::core::ids::{Digest, Epoch, ExecId, KernelId};
use crate::core::limits;
use crate::core::missed::MissedEntry;
use crate::core::value::Value;

const ID: KernelId = KernelId::from_bytes([1; 16]);

fn with_catalog<T>(work: impl AsyncFnOnce(CatalogHandle, &std::path::Path) -> T) -> T {
    let dir = crate::sys::fault::tests::crash_dir();
    let catalog = Catalog::open(&config(dir.path())).expect("opened");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a run time");
    runtime.block_on(work(catalog.handle(), dir.path()))
}

fn begin(request: ExecRequest, at_ms: i64) -> ExecBegin {
    ExecBegin { request, actor: "me".into(), at_ms }
}

fn close(status: ExecStatus) -> ExecClose {
    ExecClose { end: ExecEnd { status, ..ExecEnd::lost("why") }, output: OutputRecord::default(), at_ms: 9 }
}

#[derive(Debug, Clone)]
enum Op {
    Begin(u8),
    End(u64, usize),
    Append(usize),
    Reopen,
}

fn any_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (0u8..4).prop_map(Op::Begin),
        3 => (0u64..12, 0usize..6).prop_map(|(exec, status)| Op::End(exec, status)),
        2 => (0usize..3).prop_map(Op::Append),
        1 => Just(Op::Reopen),
    ]
}

/// The expected journal: (kind, execution, status) of each entry.
#[derive(Default)]
struct Model {
    journal: Vec<(&'static str, u64)>,
    status: BTreeMap<u64, Option<ExecStatus>>,
    keys: BTreeMap<u8, u64>,
}

async fn perform(op: &Op, state: &StateHandle, model: &mut Model) -> Result<(), CatalogError> {
    match op {
        // Key 0 stands for no key.
        Op::Begin(key) => {
            let text = if *key == 0 { String::new() } else { format!("key {key}") };
            let begun = state.begin_exec(begin(ExecRequest { key: text, ..ExecRequest::code("x") }, 5)).await?;
            match model.keys.get(key) {
                Some(before) if *key > 0 => assert_eq!(begun, Begun::Before(ExecId(*before))),
                _ => {
                    let number = model.status.len() as u64 + 1;
                    assert!(matches!(begun, Begun::New { exec, .. } if exec == ExecId(number)), "{begun:?}");
                    model.status.insert(number, None);
                    model.keys.insert(*key, number);
                    model.journal.push(("execution", number));
                }
            }
        }
        Op::End(exec, status) => {
            let status = ExecStatus::ALL[*status];
            match (state.end_exec(ExecId(*exec), close(status)).await, model.status.get_mut(exec)) {
                (Ok(()), Some(open @ None)) => *open = Some(status),
                (Err(CatalogError::Conflict(_)), Some(Some(_))) | (Err(CatalogError::NotFound(_)), None) => {}
                (result, known) => panic!("{result:?} for {known:?}"),
            }
        }
        Op::Append(count) => {
            let entry = |_| NewEntry {
                kind: EntryKind::Message,
                at_ms: 1,
                actor: "me".into(),
                text: "hi".into(),
                detail_json: String::new(),
            };
            let numbers = state.append_journal((0..*count).map(entry).collect()).await?;
            let first = model.journal.len() as u64 + 1;
            assert_eq!(numbers, (first..first + *count as u64).collect::<Vec<_>>());
            model.journal.extend((0..*count).map(|_| ("message", 0)));
        }
        Op::Reopen => state.close().await?,
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]
    #[test]
    fn journal_matches_model(ops in prop::collection::vec(any_op(), 1..40)) {
        with_catalog(async |handle, _| {
            handle.create_kernel_files(ID).await.expect("made");
            let state = handle.state(ID);
            let mut model = Model::default();
            for op in &ops {
                perform(op, &state, &mut model).await.expect("no fault");
            }
            let journal = state.journal(Direction::After(0), 1000).await.expect("readable");
            let seen: Vec<_> = journal.iter().map(|entry| (entry.sequence, entry.kind.as_str(), entry.exec)).collect();
            let due: Vec<_> = (1..).zip(&model.journal).map(|(n, (kind, exec))| (n, *kind, *exec)).collect();
            assert_eq!(seen, due);
            for entry in journal.iter().filter(|entry| entry.exec > 0) {
                assert_eq!(entry.status, model.status[&entry.exec].map_or("running", ExecStatus::name));
            }
            let mut back = state.journal(Direction::Before(u64::MAX), 1000).await.expect("readable");
            back.reverse();
            assert_eq!(back, journal);
            let running: Vec<_> = state.running_execs().await.expect("readable").into_iter().map(|exec| exec.0).collect();
            let open: Vec<_> = model.status.iter().filter(|(_, s)| s.is_none()).map(|(n, _)| *n).collect();
            assert_eq!(running, open);
        });
    }

    #[test]
    fn engine_state_matches_model(
        runs in prop::collection::vec((prop::collection::vec((0u8..6, 0usize..4), 0..5), prop::collection::vec(0u8..6, 0..3)), 1..12),
    ) {
        let dir = crate::sys::fault::tests::crash_dir();
        let path = dir.path().join("engine.db");
        let mut db = EngineDb::open(&path, Durability::Process).expect("made");
        let mut model: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        let sizes = [0, 5, limits::FRAME_TAIL_BYTES, 2 * limits::FRAME_TAIL_BYTES + 1];
        for (n, (puts, dels)) in runs.into_iter().enumerate() {
            let put = |(key, size): (u8, usize)| Entry {
                key: format!("var/{key}"),
                meta_json: "{}".into(),
                body: vec![(n % 2) as u8; sizes[size]],
            };
            let changes = Changes {
                puts: puts.into_iter().map(put).collect(),
                dels: dels.iter().map(|key| format!("var/{key}")).collect(),
                exec: n as u64,
                ..Changes::default()
            };
            let before = model.clone();
            changes.dels.iter().for_each(|key| drop(model.remove(key)));
            changes.puts.iter().for_each(|entry| drop(model.insert(entry.key.clone(), entry.body.clone())));
            let applied = db.apply(&changes).expect("stored");
            // A removed and re-added entry counts as a write, though the content is equal.
            prop_assert!(applied != Applied::default() || before == model);
            prop_assert_eq!(db.apply(&Changes { dels: Vec::new(), ..changes }).expect("stored"), Applied::default());
            if n % 3 == 0 {
                db.close().expect("closed");
                db = EngineDb::open(&path, Durability::Process).expect("opened");
            }
        }
        let mut seen: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        db.entries::<CatalogError>(|head, piece, more| {
            let body = seen.entry(head.key.clone()).or_default();
            body.extend_from_slice(piece);
            assert_eq!(more, (body.len() as u64) < head.size);
            Ok(())
        }).expect("readable");
        prop_assert_eq!(&seen, &model);
        for (key, body) in model {
            let entry = db.entry(&key).expect("readable");
            prop_assert_eq!(entry.map(|entry| entry.body), Some(body));
        }
        db.check().expect("sound");
    }
}

#[test]
fn equal_lists_are_not_rewritten() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let db = EngineDb::open(&dir.path().join("engine.db"), Durability::Process).expect("made");
    let missed = |key: &str| MissedEntry { key: key.into(), type_name: "t".into(), reason: "r".into() };
    let job = JobRecord { id: "1".into(), command: "sleep 60".into() };
    let changes =
        Changes { missed: Some(vec![missed("b"), missed("a")]), jobs: Some(vec![job.clone()]), ..Changes::default() };
    assert!(db.apply(&changes).expect("stored").lists);
    assert!(!db.apply(&changes).expect("stored").lists);
    assert_eq!(db.missed().expect("readable"), [missed("a"), missed("b")]);
    assert_eq!(db.jobs().expect("readable"), [job]);
    assert!(db.apply(&Changes { jobs: Some(Vec::new()), ..Changes::default() }).expect("stored").lists);
    assert!(db.jobs().expect("readable").is_empty());
}

#[test]
fn execution_record_round_trips() {
    with_catalog(async |handle, _| {
        handle.create_kernel_files(ID).await.expect("made");
        let state = handle.state(ID);
        let request = ExecRequest {
            what: Work::Call {
                name: "tool".into(),
                args: Value::Array(vec![Value::Int(1), Value::Float(f64::INFINITY)]),
            },
            stdin: vec![0, 1, 2],
            stdin_open: true,
            env: vec![("A".into(), "b".into())],
            timeout_ms: 5,
            output_limit_bytes: 6,
            key: "k".into(),
            expected_version: 7,
        };
        let begun = state.begin_exec(begin(request.clone(), 1)).await.expect("begun");
        assert_eq!(begun, Begun::New { exec: ExecId(1), journal: 1 });
        let mut output = OutputRecord {
            stdout: Kept::Inline(b"onetwo".to_vec()),
            stderr: Kept::Object { digest: Digest::from_bytes([4; 32]), bytes: 100_000 },
            truncated_bytes: 3,
            tail: b"end".to_vec(),
            ..OutputRecord::default()
        };
        output.runs.push(Stream::Stdout, 3);
        output.runs.push(Stream::Stderr, 100_000);
        output.tail_runs.push(Stream::Stderr, 3);
        let wrong = ExecClose { end: ExecEnd::lost(""), output: output.clone(), at_ms: 2 };
        assert!(matches!(state.end_exec(ExecId(1), wrong).await, Err(CatalogError::Conflict(_))), "runs must cover");
        output.runs.push(Stream::Stdout, 3);
        let data = OutputData { headers: vec!["h".into()], root: Vec::new() };
        let end = ExecEnd {
            status: ExecStatus::Failed,
            code: 3,
            err: "bad".into(),
            value: Some(Value::Null),
            output: Some(data),
            duration_us: 12,
        };
        state
            .end_exec(ExecId(1), ExecClose { end: end.clone(), output: output.clone(), at_ms: 2 })
            .await
            .expect("ended");
        let record = state.exec(ExecId(1)).await.expect("readable").expect("there");
        assert_eq!((record.request, record.ended), (request, Some((end, 2))));
        assert_eq!((record.output_bytes, record.truncated_bytes), (100_006, 3));
        let back = state.exec_output(ExecId(1)).await.expect("readable").expect("there");
        assert_eq!((&back.stdout, &back.stderr), (&output.stdout, &output.stderr));
        assert_eq!(back.runs.iter().collect::<Vec<_>>(), output.runs.iter().collect::<Vec<_>>());
        let tail = (back.tail, back.tail_runs.iter().collect::<Vec<_>>());
        assert_eq!(tail, (b"end".to_vec(), vec![(Stream::Stderr, 3)]));
        let roots: Vec<_> = state.roots().await.expect("readable").iter().map(|root| root.digest).collect();
        assert_eq!(roots, [Digest::from_bytes([4; 32])]);
        let too_much =
            OutputRecord { stdout: Kept::Inline(vec![0; limits::OUTPUT_INLINE_BYTES + 1]), ..OutputRecord::default() };
        let close = ExecClose { end: ExecEnd::lost(""), output: too_much, at_ms: 2 };
        assert!(matches!(state.end_exec(ExecId(1), close).await, Err(CatalogError::Limit { .. })));
        // The key expires after a day.
        let later = begin(ExecRequest { key: "k".into(), ..ExecRequest::code("x") }, 24 * 3600 * 1000 + 1);
        assert_eq!(state.begin_exec(later).await.expect("begun"), Begun::New { exec: ExecId(2), journal: 2 });
    });
}

#[test]
fn batched_requests_fail_alone() {
    with_catalog(async |handle, _| {
        // Queued before the thread can have completed the first; usually they share a transaction,
        // and the test also holds if they do not.
        let row = |n: u8| kernel(KernelId::from_bytes([n; 16]), &format!("k{}", n / 2));
        let pending: Vec<_> = (0..40).map(|n| handle.insert_kernel(row(n), None, Notes::default())).collect();
        let mut kept = 0;
        for (n, pending) in pending.into_iter().enumerate() {
            match (n % 2, pending.await) {
                (0, Ok(_)) => kept += 1,
                (1, Err(CatalogError::Exists(_))) => {}
                (_, other) => panic!("{n}: {other:?}"),
            }
        }
        assert_eq!((kept, handle.kernels(None).await.expect("readable").len()), (20, 20));
    });
}

#[test]
fn insert_deletes_expired_keys() {
    with_catalog(async |handle, _| {
        let key = |key: &str, expires_at_ms| IdempotencyKey { scope: "s".into(), key: key.into(), expires_at_ms };
        for (n, used, created_at_ms) in [(1, key("old", 10), 1), (2, key("new", 100), 10)] {
            let row = kernel(KernelId::from_bytes([n; 16]), used.key.as_str());
            let row = KernelRow { created_at_ms, ..row };
            handle.insert_kernel(row, Some(used), Notes::default()).await.expect("inserted");
        }
        assert_eq!(
            handle.forget_expired_keys(50).await.expect("deleted"),
            0,
            "the second insert deleted the first key"
        );
        assert!(handle.recall_key("s".into(), "new".into(), 50).await.expect("readable").is_some());
    });
}

#[test]
fn stale_kernel_update_conflicts() {
    with_catalog(async |handle, _| {
        let key = |expires_at_ms| IdempotencyKey { scope: "s".into(), key: "k".into(), expires_at_ms };
        let made = handle.insert_kernel(kernel(ID, "a"), Some(key(1000)), Notes::default()).await.expect("inserted");
        assert_eq!(made.value, Created::New);
        let again = kernel(KernelId::from_bytes([2; 16]), "b");
        let made = handle.insert_kernel(again, Some(key(1000)), Notes::default()).await.expect("answered");
        assert_eq!(made.value, Created::Before(ID));
        let change = |expected_version, epoch| KernelChange {
            expected_version,
            epoch: Some(Epoch(epoch)),
            new_version: true,
            ..KernelChange::default()
        };
        let update = async |change| handle.update_kernel(ID, change, Notes::default()).await;
        assert_eq!(update(change(1, 5)).await.expect("changed").value.version, 2);
        assert!(matches!(update(change(1, 5)).await, Err(CatalogError::Conflict(_))), "stale version");
        assert!(matches!(update(change(2, 4)).await, Err(CatalogError::Conflict(_))), "old epoch");
        let row = handle.kernel(ID).await.expect("readable").expect("there");
        assert_eq!((row.version, row.epoch), (2, Epoch(5)));
        let other = kernel(KernelId::from_bytes([3; 16]), "c");
        handle.insert_kernel(other, None, Notes::default()).await.expect("inserted");
        let rename = KernelChange { spec: Some(kernel(ID, "c").spec), ..KernelChange::default() };
        assert!(matches!(update(rename).await, Err(CatalogError::Exists(_))));
        let gone = handle.remove_kernel(KernelId::from_bytes([9; 16]), Notes::default()).await;
        assert!(matches!(gone, Err(CatalogError::NotFound(_))));
    });
}

#[test]
fn lease_has_single_holder() {
    with_catalog(async |handle, _| {
        handle.create_kernel_files(ID).await.expect("made");
        let state = handle.state(ID);
        let lease =
            |holder: &str, epoch, expires_at_ms| Lease { holder: holder.into(), epoch: Epoch(epoch), expires_at_ms };
        state.take_lease(lease("a", 2, 100), 0).await.expect("free");
        state.take_lease(lease("a", 2, 200), 50).await.expect("one's own");
        assert!(matches!(state.take_lease(lease("b", 2, 300), 199).await, Err(CatalogError::Conflict(_))));
        state.take_lease(lease("b", 2, 300), 200).await.expect("expired");
        state.take_lease(lease("c", 3, 400), 250).await.expect("a later owner");
        assert!(matches!(state.take_lease(lease("b", 2, 900), 800).await, Err(CatalogError::Conflict(_))), "old epoch");
        assert!(!state.release_lease("b".into()).await.expect("answered"));
        assert!(state.release_lease("c".into()).await.expect("released"));
        assert!(matches!(state.take_lease(lease("b", 2, 900), 800).await, Err(CatalogError::Conflict(_))), "still old");
    });
}

#[test]
fn pruned_events_report_gap() {
    with_catalog(async |handle, _| {
        let event = |_| NewEvent { at_ms: 1, kernel: String::new(), kind: "x".into(), detail_json: "{}".into() };
        let total = limits::EVENTS_KEPT + 512;
        for _ in 0..total / 512 {
            handle.append_events((0..512).map(event).collect()).await.expect("written");
        }
        let newest = total / 512 * 512;
        let page = handle.events_after(0, 10).await.expect("readable");
        assert_eq!((page.newest, page.events.len()), (newest, 10));
        assert_eq!(page.lost, page.events[0].sequence - 1);
        assert!(newest - page.lost <= limits::EVENTS_KEPT + 256, "{page:?}");
        let page = handle.events_after(newest - 3, 10).await.expect("readable");
        assert_eq!((page.lost, page.events.len()), (0, 3));
        let page = handle.events_after(newest + 5, 10).await.expect("readable");
        assert_eq!((page.lost, page.events.len(), page.newest), (0, 0, newest));
    });
}

#[test]
fn tampered_audit_line_is_located() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a run time");
    let path = dir.path().join("catalog.db");
    let catalog = Catalog::open(&config(dir.path())).expect("opened");
    let lines = (0..20).map(|n| audit(&format!("a{n}"))).collect();
    let head = runtime.block_on(async {
        catalog.handle().append_audit(lines).await.expect("written");
        catalog.handle().verify_audit(Vec::new()).await.expect("readable").expect("whole")
    });
    catalog.stop();
    assert_eq!(head.sequence, 20);
    let whole = std::fs::read(&path).expect("readable");
    let broken_at = |sql: &str, known: Option<AuditHead>| {
        std::fs::write(&path, &whole).expect("written");
        let conn = rusqlite::Connection::open(&path).expect("opened");
        assert!(conn.execute(sql, []).is_err(), "the log is append-only: {sql}");
        conn.execute_batch("DROP TRIGGER audit_is_not_deleted; DROP TRIGGER audit_is_not_changed").expect("dropped");
        conn.execute(sql, []).expect("tampered");
        drop(conn);
        let catalog = Catalog::open(&config(dir.path())).expect("opened");
        let verified = {
            let known = known.into_iter().map(|head| (head, "the test".to_owned())).collect();
            runtime.block_on(catalog.handle().verify_audit(known)).expect("readable")
        };
        catalog.stop();
        verified.err().map(|broken| broken.sequence)
    };
    for (sql, line) in [
        ("UPDATE audit SET outcome = 'refused' WHERE sequence = 7", 7),
        ("UPDATE audit SET uid = 0 WHERE sequence = 1", 1),
        ("UPDATE audit SET version_before = 0 WHERE sequence = 3", 3),
        ("UPDATE audit SET client = 'testa', action = '4' WHERE sequence = 5", 5),
        ("UPDATE audit SET hash = zeroblob(32) WHERE sequence = 20", 20),
        ("DELETE FROM audit WHERE sequence = 9", 9),
        ("UPDATE audit SET sequence = sequence + 100 WHERE sequence > 15", 16),
    ] {
        assert_eq!(broken_at(sql, None), Some(line), "{sql}");
    }
    let cut = "DELETE FROM audit WHERE sequence > 18";
    assert_eq!(broken_at(cut, None), None, "a shorter chain is whole");
    assert_eq!(broken_at(cut, Some(head)), Some(19), "unless its end was kept");
}

#[test]
fn open_files_and_queue_bounds() {
    with_catalog(async |handle, dir| {
        let open_files = || {
            std::fs::read_dir("/proc/self/fd")
                .expect("readable")
                .filter_map(Result::ok)
                .filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|path| path.starts_with(dir.join("kernels"))))
                .count()
        };
        for n in 0..200u8 {
            let id = KernelId::from_bytes([n; 16]);
            handle.create_kernel_files(id).await.expect("made");
            handle.state(id).exec_count().await.expect("readable");
            handle.state(id).close().await.expect("closed");
        }
        // The last kernel's files are synced when the thread is idle.
        for _ in 0..1000 {
            if open_files() > 0 {
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
        }
        assert_eq!(open_files(), 0);
        let state = handle.state(ID);
        let many: Vec<_> = (0..3 * limits::DATABASE_REQUESTS).map(|_| state.check()).collect();
        let mut busy = 0;
        for pending in many {
            match pending.await {
                Ok(()) => {}
                Err(CatalogError::Busy) => busy += 1,
                Err(other) => panic!("{other}"),
            }
        }
        assert!(busy > 0);
        assert_eq!(state.exec_count().await.expect("readable"), 0);
    });
}
