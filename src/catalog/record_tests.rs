//! Tests of records that need no daemon.

use super::crash_tests::{config, kernel};
use super::state::{Begun, Direction, EntryKind, ExecBegin, NewCheckpoint, NewEntry, WORK_CHANGED};
use super::*;
use crate::core::checkpoint::{CheckpointType, Span};
use crate::core::freeze::{Member, Target};
use crate::core::handover::Side;
use crate::core::ids::{CheckpointId, Digest, GroupId, HandoverId, KernelId};
use crate::core::info::JournalView;
use crate::core::kernel::transition::{Record, Transition};
use crate::core::limits;
use crate::core::missed::MissedEntry;
use crate::core::workflow::{Change, Outcome, Request, WorkflowPart};

const ID: KernelId = KernelId::from_bytes([1; 16]);

fn with_state<T>(work: impl AsyncFnOnce(StateHandle, &std::path::Path) -> T) -> T {
    let dir = crate::sys::fault::tests::crash_dir();
    let catalog = Catalog::open(&config(dir.path())).expect("opened");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a run time");
    runtime.block_on(async {
        let handle = catalog.handle();
        let files = handle.create_kernel_files(ID).await.expect("made");
        handle.insert_kernel(kernel(ID, "k"), None, Notes::default()).await.expect("known");
        work(handle.state(ID), &files.state_db).await
    })
}

/// Closing any descriptor of a file releases the process's POSIX locks on it, so syncing a new
/// kernel's files must not open the database itself.
#[test]
fn sync_keeps_database_lock() {
    use std::os::unix::fs::MetadataExt as _;
    with_state(async |state, path| {
        state.append_journal(vec![said("once")]).await.expect("written");
        let inode = format!(":{} ", path.metadata().expect("there").ino());
        let listed = || std::fs::read_to_string("/proc/locks").expect("readable").contains(&inode);
        // /proc/locks is read in parts, by position: a lock released by another test meanwhile
        // hides another entry. A lost lock is in none of the reads.
        let is_locked = || (0..20).any(|_| listed());
        assert!(is_locked(), "at first");
        // Longer than the delay before new kernels' files are synced.
        for _ in 0..12 {
            std::thread::sleep(std::time::Duration::from_millis(50));
            assert!(is_locked(), "later");
        }
    });
}

/// Writes whose replies are not awaited.
#[test]
fn queued_writes_keep_their_order() {
    let dir = crate::sys::fault::tests::crash_dir();
    let catalog = Catalog::open(&config(dir.path())).expect("opened");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a run time");
    runtime.block_on(async {
        let handle = catalog.handle();
        let event = |kind: &str| NewEvent { at_ms: 1, kernel: "k".into(), kind: kind.into(), detail_json: "{}".into() };
        let insert = |id, name| handle.insert_kernel(kernel(id, name), None, Notes::default());
        let pending = [handle.append_events(vec![event("first")]), handle.append_events(vec![event("second")])];
        // Neither write is awaited; a read finds both, and the kernel queued behind them.
        let made = insert(ID, "k");
        let found = handle.kernel(ID).await.expect("read").expect("there");
        assert_eq!(found.spec.name.as_str(), "k");
        let kinds: Vec<_> =
            handle.events_after(0, 10).await.expect("read").events.into_iter().map(|event| event.kind).collect();
        assert_eq!(kinds, ["first", "second"]);
        made.await.expect("made");
        for pending in pending {
            pending.await.expect("written");
        }
        // A failed insertion does not fail other writes of the same transaction.
        let (other, event) = (insert(KernelId::from_bytes([2; 16]), "k"), handle.append_events(vec![event("third")]));
        assert!(matches!(other.await, Err(CatalogError::Exists(_))), "the name is taken");
        assert_eq!(event.await.expect("written")[0].kind, "third");
    });
}

/// Opening a database in advance rehearses an execution and leaves no trace.
#[test]
fn preopened_database_is_unchanged() {
    with_state(async |state, path| {
        let before = std::fs::read(path).expect("readable");
        state.open_ahead().await.expect("opened");
        let wal = std::fs::metadata(path.with_file_name("state.db-wal")).map_or(0, |found| found.len());
        assert_eq!((std::fs::read(path).expect("readable"), wal), (before, 0));
        assert!(state.journal(Direction::Before(u64::MAX), 10).await.expect("read").is_empty());
        let begin = ExecBegin { request: crate::core::exec::ExecRequest::code("echo"), actor: "me".into(), at_ms: 1 };
        let begun = state.begin_exec(begin).await.expect("begun");
        assert_eq!(begun, Begun::New { exec: crate::core::ids::ExecId(1), journal: 1 });
        assert_eq!(state.exec_count().await.expect("counted"), 1);
    });
}

/// Preparing a warm worker rehearses in its kernel's future database and leaves no trace.
#[test]
fn rehearsal_changes_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("engine.db");
    let db = EngineDb::open(&path, Durability::Process).expect("opened");
    let before = std::fs::read(&path).expect("readable");
    db.rehearse().expect("rehearsed");
    let wal = std::fs::metadata(path.with_file_name("engine.db-wal")).map_or(0, |found| found.len());
    assert_eq!((std::fs::read(&path).expect("readable"), wal), (before, 0));
    assert!(db.heads().expect("read").is_empty());
    // Nor is anything removed.
    let entry = Entry { key: "var/x".into(), meta_json: "{}".into(), body: b"1".to_vec() };
    let missed = vec![MissedEntry { key: "job/1".into(), type_name: "job".into(), reason: "it runs".into() }];
    let jobs = vec![JobRecord { id: "1".into(), command: "sleep 1".into() }];
    let changes = Changes {
        puts: vec![entry.clone()],
        missed: Some(missed.clone()),
        jobs: Some(jobs.clone()),
        ..Changes::default()
    };
    db.apply(&changes).expect("stored");
    db.rehearse().expect("rehearsed");
    assert_eq!(db.entry("var/x").expect("read"), Some(entry));
    assert_eq!((db.missed().expect("read"), db.jobs().expect("read")), (missed, jobs));
}

fn said(text: &str) -> NewEntry {
    let (actor, detail_json) = ("me".into(), String::new());
    NewEntry { kind: EntryKind::Message, at_ms: 1, actor, text: text.into(), detail_json }
}

fn compacting(id: u8, summary: &str, first: u64, last: u64) -> NewCheckpoint {
    NewCheckpoint {
        id: CheckpointId::from_bytes([id; 16]),
        name: String::new(),
        description: String::new(),
        kind: CheckpointType::Manual,
        creator: "me".into(),
        at_ms: 5,
        pinned: false,
        manifest: Digest::from_bytes([id; 32]),
        files: 0,
        state_bytes: 0,
        machine_bytes: 0,
        summary: summary.into(),
        compact: vec![Span { first, last }],
        work: WorkflowPart::default(),
        work_seen: None,
        with: None,
        under_way: None,
    }
}

fn mark(text: &str) -> NewEntry {
    NewEntry { kind: EntryKind::Mark, ..said(text) }
}

async fn shown(state: &StateHandle) -> Vec<String> {
    let page = state.journal_as(JournalView::Compacted, 0, limits::PAGE_ROWS).await.expect("readable");
    page.into_iter().map(|entry| entry.text).collect()
}

#[test]
fn removal_uncompacts_messages() {
    with_state(async |state, path| {
        for text in ["one", "two", "three"] {
            state.append_journal(vec![said(text)]).await.expect("said");
        }
        let added = state.add_checkpoint(compacting(1, "early", 1, 2), mark("c1")).await.expect("taken");
        assert_eq!((added.checkpoint.compacted, added.checkpoint.summary.as_str()), (2, "early"));
        state.add_checkpoint(compacting(2, "late", 2, 3), mark("c2")).await.expect("taken");
        assert_eq!(shown(&state).await, ["[checkpoint] early", "[checkpoint] late", "c1", "c2"]);
        let drop_checkpoint = async |id: u8| {
            state.close().await.expect("closed");
            let db = rusqlite::Connection::open(path).expect("opened");
            crate::catalog::sums::define(&db).expect("defined");
            db.execute("DELETE FROM checkpoints WHERE id = ?", [[id; 16]]).expect("removed");
            let left: i64 = db
                .query_row(
                    "SELECT count(*) FROM compacted WHERE checkpoint NOT IN (SELECT number FROM checkpoints)",
                    [],
                    |row| row.get(0),
                )
                .expect("readable");
            assert_eq!(left, 0, "nothing is left of its compaction");
        };
        drop_checkpoint(2).await;
        assert_eq!(
            shown(&state).await,
            ["[checkpoint] early", "three", "c1", "c2"],
            "what it took over is the other's again"
        );
        drop_checkpoint(1).await;
        assert_eq!(shown(&state).await, ["one", "two", "three", "c1", "c2"]);
        let whole = state.journal(Direction::After(0), limits::PAGE_ROWS).await.expect("readable");
        assert_eq!(whole.len(), 5);
    });
}

#[test]
fn compacted_journal_is_paged() {
    with_state(async |state, _| {
        let many = 3 * limits::PAGE_ROWS as u64;
        state.append_journal((0..many).map(|n| said(&n.to_string())).collect()).await.expect("said");
        state.add_checkpoint(compacting(1, "all of it", 1, many - 5), mark("c")).await.expect("taken");
        let shown = shown(&state).await;
        assert_eq!((shown.len(), shown[0].as_str()), (7, "[checkpoint] all of it"), "{shown:?}");
        let (mut after, mut held) = (0, 0);
        loop {
            let page = state.journal_as(JournalView::Of(1), after, limits::PAGE_ROWS).await.expect("readable");
            let Some(last) = page.last() else { break };
            (after, held) = (last.sequence, held + page.len() as u64);
        }
        assert_eq!(held, many - 5);
    });
}

#[test]
fn keys_expire_records_stay() {
    with_state(async |state, path| {
        let open = |at_ms: i64| {
            let (title, text) = ("t".to_owned(), String::new());
            let change = Change::OpenDecision { title, text };
            Request { change, actor: "me".into(), at_ms, key: "k".into() }
        };
        let id = |outcome: &Outcome| if let Outcome::Decision(decision) = outcome { decision.id } else { 0 };
        let life = i64::try_from(limits::KEY_LIFETIME.as_millis()).expect("small");
        for (at_ms, expected) in [(1, 1), (life, 1), (life + 1, 2), (life + 2, 2)] {
            let done = state.change_workflow(open(at_ms)).await.expect("opened");
            assert_eq!(id(&done.outcome), expected, "at {at_ms}");
        }
        let key = "x".repeat(limits::KEY_BYTES + 1);
        assert!(matches!(state.change_workflow(Request { key, ..open(1) }).await, Err(CatalogError::Limit { .. })));
        state.close().await.expect("closed");
        let db = rusqlite::Connection::open(path).expect("opened");
        crate::catalog::sums::define(&db).expect("defined");
        db.execute("INSERT INTO artifacts VALUES ('a', 1, NULL, 0, '', 'me', 1, 0, NULL)", []).expect("written");
        for sql in ["DELETE FROM decisions", "DELETE FROM artifacts", "UPDATE artifacts SET bytes = 1"] {
            assert!(db.execute(sql, []).is_err(), "{sql}");
        }
    });
}

/// A decision opened while a checkpoint is taken is either in the checkpoint or after it.
#[test]
fn stale_work_refuses_checkpoint() {
    with_state(async |state, _| {
        let seen = state.workflow_part().await.expect("readable");
        let change = Change::OpenDecision { title: "t".into(), text: String::new() };
        let opened = Request { change, actor: "me".into(), at_ms: 1, key: String::new() };
        state.change_workflow(opened).await.expect("opened");
        let new = NewCheckpoint { work_seen: Some(seen), compact: Vec::new(), ..compacting(1, "", 1, 1) };
        let refused = state.add_checkpoint(new.clone(), mark("c")).await.expect_err("not what is there");
        assert!(matches!(&refused, CatalogError::Refused(error) if error.reason == WORK_CHANGED), "{refused:?}");
        assert_eq!(shown(&state).await.len(), 1, "nothing of it is written");
        let seen = state.workflow_part().await.expect("readable");
        state.add_checkpoint(NewCheckpoint { work_seen: Some(seen), ..new }, mark("c")).await.expect("taken");
    });
}

#[test]
fn journal_pages_are_byte_bounded() {
    with_state(async |state, _| {
        let long = "x".repeat(limits::JOURNAL_PAGE_BYTES / 2);
        state.append_journal((0..6).map(|_| said(&long)).collect()).await.expect("said");
        state.add_checkpoint(compacting(1, "all of it", 1, 3), mark("c")).await.expect("taken");
        for view in [JournalView::Whole, JournalView::Compacted, JournalView::Of(1)] {
            let page = state.journal_as(view, 0, limits::PAGE_ROWS).await.expect("readable");
            let bytes: usize = page.iter().map(|entry| entry.text.len()).sum();
            assert!(!page.is_empty() && bytes <= limits::JOURNAL_PAGE_BYTES + long.len(), "{view:?}: {bytes}");
        }
    });
}

/// Whichever of the two comes first.
#[test]
fn members_do_not_move() {
    let dir = crate::sys::fault::tests::crash_dir();
    let catalog = Catalog::open(&config(dir.path())).expect("opened");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a run time");
    runtime.block_on(async {
        let (handle, group) = (catalog.handle(), GroupId::from_bytes([3; 16]));
        handle.insert_kernel(kernel(ID, "k"), None, Notes::default()).await.expect("known");
        handle.create_group(group, 1000, "shop".into(), 1, Notes::default()).await.expect("made");
        let member = || Member { name: "k".into(), target: Target::Kernel { id: ID } };
        let handover = |side, live| {
            let (id, record) = (HandoverId::from_bytes([4; 16]), String::from("{}"));
            HandoverRow { id, side, kernel: ID, uid: 1000, live, record, at_ms: 1 }
        };
        let is_conflict = |refused: Result<(), CatalogError>| matches!(refused, Err(CatalogError::Conflict(_)));
        for side in [Side::Out, Side::In] {
            handle.put_handover(handover(side, false)).await.expect("recorded");
            let added = handle.add_member(group, member(), Notes::default()).await.map(drop);
            assert!(is_conflict(added), "{side:?}");
            handle.forget_handover(HandoverId::from_bytes([4; 16])).await.expect("removed");
        }
        // The record of an arrival stays.
        handle.put_handover(handover(Side::In, true)).await.expect("recorded");
        handle.add_member(group, member(), Notes::default()).await.expect("added");
        handle.forget_handover(HandoverId::from_bytes([4; 16])).await.expect("removed");
        assert!(is_conflict(handle.put_handover(handover(Side::Out, false)).await));
        assert_eq!(handle.handovers().await.expect("readable"), []);
    });
}

/// What is written anew is in the database's own file, which was synced: a WAL that lost a write is not needed.
#[test]
fn rewritten_decisions_need_no_wal() {
    let (dir, copied) = (crate::sys::fault::tests::crash_dir(), crate::sys::fault::tests::crash_dir());
    let catalog = Catalog::open(&config(dir.path())).expect("opened");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a run time");
    let copy = |name: &str| std::fs::copy(dir.path().join(name), copied.path().join(name)).map(drop);
    let (record, transition) =
        (String::from("{}"), Transition::Archive { checkpoint: CheckpointId::from_bytes([1; 16]) });
    let handover = HandoverRow {
        id: HandoverId::from_bytes([4; 16]),
        side: Side::Out,
        kernel: ID,
        uid: 1000,
        live: false,
        record,
        at_ms: 1,
    };
    let state_db = format!("kernels/{ID}/state.db");
    runtime.block_on(async {
        let (handle, state) = (catalog.handle(), catalog.handle().state(ID));
        handle.create_kernel_files(ID).await.expect("made");
        handle.insert_kernel(kernel(ID, "k"), None, Notes::default()).await.expect("known");
        handle.put_handover(handover.clone()).await.expect("recorded");
        state.begin_transition(Record::open(transition, "me".into(), 7)).await.expect("recorded");
        handle.rewrite_handovers().await.expect("written");
        state.rewrite_transition().await.expect("written");
    });
    std::fs::create_dir_all(copied.path().join(&state_db).parent().expect("a folder")).expect("made");
    copy("catalog.db").and_then(|()| copy(&state_db)).expect("copied");
    drop(catalog);
    let alone = Catalog::open(&config(copied.path())).expect("opened");
    runtime.block_on(async {
        assert_eq!(alone.handle().handovers().await.expect("readable"), [handover]);
        let found = alone.handle().state(ID).transition().await.expect("readable");
        assert_eq!(found.map(|record| record.transition), Some(transition));
    });
}
