//! A child process runs a script over all three kinds of database, and is killed or gets an error
//! at each labelled operation.
//!
//! Afterwards every acknowledged change exists, the interrupted step is complete or absent, nothing
//! is damaged, and a restart leaves no leftover files.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::path::Path;

use super::state::{
    Arrival, Beginning, Begun, Direction, EntryKind, ExecBegin, ExecClose, FirstCheckpoint, Lease, NewCheckpoint,
    NewConsent, NewEntry, OutputRecord, Restored, Together,
};
use super::*;
use crate::core::checkpoint::{CheckpointType, Span};
use crate::core::engine::EngineName;
use crate::core::exec::{ExecEnd, ExecRequest};
use crate::core::handover::Side;
use crate::core::ids::{CheckpointId, Digest, Epoch, ExecId, HandoverId, HostId, KernelId, WorkerId};
use crate::core::info::{GivenMount, JournalView, McpTransport, MountInfo};
use crate::core::kernel::transition::{Record, Transition};
use crate::core::origin::{ForkPoint, Origin};
use crate::core::spec::KernelSpec;
use crate::core::workflow::{Change, Content, Options, Request, WorkflowPart};
use crate::sys::fault::tests::{crash_dir, run_child};
use crate::sys::fault::{Steps, points};

const FIRST: KernelId = KernelId::from_bytes([1; 16]);
const SECOND: KernelId = KernelId::from_bytes([2; 16]);
/// Target and safety checkpoint of the script's restores.
const RESTORED: [CheckpointId; 2] = [CheckpointId::from_bytes([1; 16]), CheckpointId::from_bytes([2; 16])];
const CHILD: &str = "catalog::crash_tests::catalog_script_child";

pub(super) fn config(dir: &Path) -> CatalogConfig {
    let power = std::env::var_os("RYOKAN_CRASH_POWER").is_some();
    CatalogConfig {
        data: dir.to_owned(),
        durability: if power { Durability::Power } else { Durability::Process },
        fresh_host_id: HostId::from_bytes([9; 16]),
        now_ms: 1,
    }
}

pub(super) fn kernel(id: KernelId, name: &str) -> KernelRow {
    KernelRow {
        id,
        uid: 1000,
        spec: KernelSpec::new(name.parse().expect("a name"), EngineName::Kaish),
        state_json: r#"{"state":"created"}"#.into(),
        version: 1,
        epoch: Epoch(1),
        generation: 0,
        thread_of: None,
        created_at_ms: 10,
        last_used_at_ms: 10,
    }
}

fn key(key: &str) -> IdempotencyKey {
    IdempotencyKey { scope: "create/1000".into(), key: key.into(), expires_at_ms: 1_000 }
}

pub(super) fn audit(action: &str) -> NewAudit {
    NewAudit {
        at_ms: 1,
        uid: 1000,
        client: "test".into(),
        action: action.into(),
        kernel: FIRST.to_string(),
        version_before: None,
        version_after: Some(1),
        outcome: "done".into(),
        ..NewAudit::default()
    }
}

fn notes(what: &str) -> Notes {
    let event = NewEvent { at_ms: 1, kernel: "k".into(), kind: what.into(), detail_json: "{}".into() };
    Notes { events: vec![event], audit: vec![audit(what)] }
}

fn worker() -> WorkerRow {
    WorkerRow {
        id: WorkerId::from_bytes([3; 16]),
        kernel: FIRST,
        epoch: Epoch(1),
        build: "test".into(),
        secret: vec![1, 2, 3],
        isolation: crate::core::spec::Isolation::Process,
        record: "{}".into(),
    }
}

fn entry(key: &str, body: Vec<u8>) -> Entry {
    Entry { key: key.into(), meta_json: "{}".into(), body }
}

/// One step of the script; `false` beyond its end.
async fn step(n: usize, h: &CatalogHandle) -> Result<bool, CatalogError> {
    let state = h.state(FIRST);
    match n {
        0 => h.create_kernel_files(FIRST).await.map(drop)?,
        1 => h.insert_kernel(kernel(FIRST, "one"), Some(key("a")), notes("kernel_created")).await.map(drop)?,
        2 => {
            let change = KernelChange { new_version: true, state_json: Some("{}".into()), ..KernelChange::default() };
            h.update_kernel(FIRST, change, notes("kernel_changed")).await.map(drop)?;
        }
        3 => h.touch_kernel(FIRST, 99).await?,
        4 => h.put_worker(worker()).await?,
        5 => h.remember_key(key("b"), "result".into()).await?,
        6 => h.append_events(notes("x").events).await.map(drop)?,
        7 => h.append_audit(vec![audit("tried")]).await?,
        8 => {
            let request = ExecRequest { key: "k".into(), ..ExecRequest::code("1 + 1") };
            let begun = state.begin_exec(ExecBegin { request, actor: "me".into(), at_ms: 20 }).await?;
            assert_eq!(begun, Begun::New { exec: ExecId(1), journal: 1 });
        }
        9 => {
            let close = ExecClose { end: ExecEnd::lost("why"), output: OutputRecord::default(), at_ms: 30 };
            state.end_exec(ExecId(1), close).await?;
        }
        10 => state.append_journal(vec![mark("one"), mark("two")]).await.map(drop)?,
        11 => {
            let mount = MountInfo { path: "/data".into(), source: "/srv".into(), writable: true };
            state.put_mount(GivenMount { mount, real: Some("/srv".into()) }, 0, mark("m")).await?;
        }
        12 => state.remove_mount("/data".into(), mark("m")).await.map(drop)?,
        13 => {
            let transport = McpTransport::Http { url: "http://x".into(), headers: Vec::new() };
            state.put_mcp("m".into(), transport, mark("m")).await?;
        }
        14 => state.remove_mcp("m".into(), mark("m")).await.map(drop)?,
        15 => state.grant_blobs(vec![Digest::from_bytes([5; 32]), Digest::from_bytes([6; 32])], 1).await?,
        16 => state.take_lease(Lease { holder: "h".into(), epoch: Epoch(1), expires_at_ms: 500 }, 1).await?,
        17 => state.release_lease("h".into()).await.map(drop)?,
        18 => {
            let (actor, subject) = ("me".into(), "net".into());
            let consent = NewConsent { at_ms: 1, actor, subject, granted: true, detail: String::new() };
            state.add_consent(consent).await.map(drop)?;
        }
        19..=21 => engine_step(n, &h.kernel_files(FIRST).engine_db)?,
        22 => h.remove_worker(worker().id).await.map(drop)?,
        23 => h.forget_expired_keys(2_000).await.map(drop)?,
        24 => h.create_kernel_files(SECOND).await.map(drop)?,
        25 => h.insert_kernel(kernel(SECOND, "two"), None, Notes::default()).await.map(drop)?,
        26 => h.remove_kernel(SECOND, notes("kernel_removed")).await.map(drop)?,
        27 => {
            h.clear_kernel_files(SECOND).await?;
            h.remove_kernel_files(SECOND).await?;
        }
        28 => old_format(&h.kernel_files(FIRST).dir)?,
        29 => state.add_checkpoint(new_checkpoint(1), mark("checkpoint")).await.map(drop)?,
        30 => state.add_checkpoint(new_checkpoint(2), mark("checkpoint")).await.map(drop)?,
        31 => state.pin_checkpoint(CheckpointId::from_bytes([1; 16]), true).await.map(drop)?,
        32 => state.begin_transition(restore_record()).await?,
        33 => {
            state.finish_restore(restored(Options::default())).await.map(drop)?;
        }
        54 => h.recreate_engine_db(FIRST).await?,
        34..=53 => return work_step(n, &state).await,
        55.. => return move_step(n, h, &state).await,
    }
    Ok(true)
}

/// The script's part about workflow records: alone, with a checkpoint, and reverted by a restore.
async fn work_step(n: usize, state: &StateHandle) -> Result<bool, CatalogError> {
    let asked = |change| Request { change, actor: "me".into(), at_ms: 20, key: format!("k{n}") };
    let (title, text, name) = ("t".to_owned(), "why".to_owned(), "n".to_owned());
    let content = Content { hash: Digest::from_bytes([7; 32]), bytes: 3, content_type: "text/plain".into() };
    match n {
        34 => state.change_workflow(asked(Change::BeginStep { name })).await.map(drop)?,
        35 => state.change_workflow(asked(Change::OpenDecision { title, text })).await.map(drop)?,
        36 => state.change_workflow(asked(Change::PutArtifact { name, content })).await.map(drop)?,
        37 => {
            let with = Some(Together::Before(asked(Change::CompleteStep)));
            state.add_checkpoint(NewCheckpoint { with, ..new_checkpoint(3) }, mark("with a step")).await.map(drop)?;
        }
        38 => {
            let said = NewEntry { kind: EntryKind::Message, ..mark("user: hello") };
            state.add_message(said, "said".into()).await.map(drop)?;
        }
        39 => {
            let with = Some(Together::After(asked(Change::LockDecision { id: 1 })));
            let (summary, compact) = ("in short".to_owned(), vec![Span { first: 1, last: 1000 }]);
            let new = NewCheckpoint { with, summary, compact, ..new_checkpoint(4) };
            state.add_checkpoint(new, mark("before a decision")).await.map(drop)?;
        }
        40 => {
            let options = Options { supersede_decisions: true, with_artifacts: true, with_memory: false };
            let [target, safety] = RESTORED;
            let transition = Transition::Restore { target, safety, options };
            state.begin_transition(Record { transition, ..restore_record() }).await?;
        }
        41 => {
            let options = Options { supersede_decisions: true, with_artifacts: true, with_memory: false };
            state.finish_restore(restored(options)).await.map(drop)?;
        }
        42 => state.begin(beginning()).await?,
        43 => state.add_checkpoint(new_checkpoint(13), mark("checkpoint")).await.map(drop)?,
        44 => state.add_checkpoint(new_checkpoint(14), mark("checkpoint")).await.map(drop)?,
        45 => state.prune_checkpoints(Box::new(|_| vec![CheckpointId::from_bytes([13; 16])])).await.map(drop)?,
        46 => state.add_checkpoint(new_checkpoint(15), mark("checkpoint")).await.map(drop)?,
        47 => state.remove_checkpoint(CheckpointId::from_bytes([14; 16]), mark("removed")).await.map(drop)?,
        48 => state.begin_transition(restore_record()).await?,
        49 => state.abort_transition().await?,
        50 => state.clear_transition().await?,
        51 => {
            let transition = Transition::Archive { checkpoint: RESTORED[0] };
            state.begin_transition(Record::open(transition, "me".into(), 7)).await?;
        }
        52 => state.commit_transition(mark("archived")).await.map(drop)?,
        53 => state.clear_transition().await?,
        _ => return Ok(false),
    }
    Ok(true)
}

async fn move_step(n: usize, h: &CatalogHandle, state: &StateHandle) -> Result<bool, CatalogError> {
    match n {
        55 => h.put_handover(handover(1, Side::In)).await?,
        56 => h.put_handover(handover(2, Side::Out)).await?,
        57 => h.forget_handover(HandoverId::from_bytes([2; 16])).await?,
        58 => state.import_history(br#"{"table":0,"rows":[[5000,1,3,"me",null,"far",null,null]]}"#.to_vec()).await?,
        59 => {
            let origin = Origin { generation: 9, ..Origin::default() };
            let rows = state.checkpoint_manifests().await?.into_iter();
            // The first one stays behind.
            let checkpoints = rows.skip(1).map(|(id, _)| id).collect();
            state
                .begin_moved(Arrival {
                    checkpoints,
                    manifests: Vec::new(),
                    origin,
                    blobs: Vec::new(),
                    entry: mark("arrived"),
                })
                .await?;
        }
        60 => h.create_kernel_files(RECEIVED).await.map(drop)?,
        61 => {
            let id = HandoverId::from_bytes([1; 16]);
            h.activate_handover(id, None, kernel(MOVED, "moved"), notes("arrived")).await.map(drop)?;
        }
        62 => h.adopt_kernel_files(RECEIVED, MOVED).await?,
        63 => {
            let names = (String::from("one"), String::from("renamed"));
            h.rename_kernel(FIRST, kernel(FIRST, "renamed").spec, names, notes("kernel_renamed")).await.map(drop)?;
        }
        64 => h.name_handover(HandoverId::from_bytes([1; 16]), r#"{"host":1}"#.into()).await?,
        65 => h.rewrite_handovers().await?,
        66 => state.rewrite_transition().await?,
        67 => engine_step(n, &h.kernel_files(FIRST).engine_db)?,
        68 => {
            let files = h.kernel_files(FIRST);
            let ahead = files.dir.join("ahead.db");
            std::fs::copy(&files.engine_db, &ahead).expect("copied");
            engine_step(n, &ahead)?;
            h.adopt_engine_db(FIRST, ahead).await?;
        }
        _ => return Ok(false),
    }
    Ok(true)
}

/// A kernel that moves here, and its files before it is activated: one thread owns both databases.
const MOVED: KernelId = KernelId::from_bytes([0x77; 16]);
const RECEIVED: KernelId = {
    let mut id = [0x66; 16];
    id[15] = 0x77;
    KernelId::from_bytes(id)
};

fn handover(id: u8, side: Side) -> HandoverRow {
    let record = "{}".into();
    HandoverRow { id: HandoverId::from_bytes([id; 16]), side, kernel: MOVED, uid: 1000, live: false, record, at_ms: 1 }
}

fn new_checkpoint(id: u8) -> NewCheckpoint {
    NewCheckpoint {
        id: CheckpointId::from_bytes([id; 16]),
        name: format!("c{id}"),
        description: String::new(),
        kind: CheckpointType::Manual,
        creator: "me".into(),
        at_ms: 5,
        pinned: false,
        manifest: Digest::from_bytes([id; 32]),
        files: 1,
        state_bytes: 2,
        machine_bytes: 0,
        summary: String::new(),
        compact: Vec::new(),
        work: WorkflowPart::default(),
        work_seen: None,
        with: None,
        under_way: None,
    }
}

fn beginning() -> Beginning {
    let from = ForkPoint { kernel: FIRST, name: "one".into(), checkpoint: CheckpointId::from_bytes([1; 16]) };
    let parent = Some(from.checkpoint);
    Beginning {
        origin: Origin::of_fork(0, from),
        work: WorkflowPart::default(),
        decisions: Vec::new(),
        checkpoints: vec![FirstCheckpoint { new: new_checkpoint(7), parent, entry: mark("forked") }],
        mounts: Vec::new(),
        mcp: Vec::new(),
        blobs: vec![Digest::from_bytes([5; 32])],
        entry: None,
        at_ms: 1,
    }
}

fn restore_record() -> Record {
    let [target, safety] = RESTORED;
    Record::open(Transition::Restore { target, safety, options: Options::default() }, "me".into(), 6)
}

fn restored(options: Options) -> Restored {
    let [target, safety] = RESTORED;
    Restored {
        target,
        safety,
        actor: "me".into(),
        options,
        mounts: Vec::new(),
        mcp: Vec::new(),
        work: WorkflowPart::default(),
        entry: mark("restored"),
        at_ms: 9,
    }
}

fn mark(text: &str) -> NewEntry {
    let (actor, detail_json) = ("me".into(), String::new());
    NewEntry { kind: EntryKind::Mark, at_ms: 1, actor, text: text.into(), detail_json }
}

fn engine_step(n: usize, path: &Path) -> Result<(), CatalogError> {
    let info = EngineInfo { name: "kaish".into(), version: "1".into(), format: 1 };
    let db = EngineDb::open(path, Durability::Process)?;
    match n {
        19 => db.set_info(&info)?,
        20 => {
            let puts = vec![entry("var/x", vec![1]), entry("var/big", vec![7; (2 << 20) + 1])];
            db.apply(&Changes { puts, exec: 1, ..Changes::default() }).map(drop)?;
        }
        21 => db.replace_all(&info, [Ok(entry("var/y", vec![2]))], &[])?,
        _ => {
            let body = n.to_le_bytes().repeat(n * 20_000);
            let digest = Digest::from_bytes(*blake3::hash(&body).as_bytes());
            let (key, meta_json, size) = ("var/z".to_owned(), "{}".to_owned(), body.len() as u64);
            let head = EntryHead { key, meta_json, digest, size, exec: 0 };
            db.revise(&info, &[head], |_| Ok(body.clone())).map(drop)?;
        }
    }
    db.close()
}

/// Migrates a database of "format 0", without tables, to the present format.
fn old_format(dir: &Path) -> Result<(), CatalogError> {
    let path = dir.join("old.db");
    if !path.exists() {
        let conn = rusqlite::Connection::open(&path).expect("made");
        let application = i32::from_be_bytes(*b"RyE\x01");
        conn.pragma_update(None, "application_id", application).expect("set");
    }
    Db::open(Kind::Engine, &path, Durability::Process)?.close()
}

/// The content of all databases, as text.
async fn observe(h: &CatalogHandle, dir: &Path) -> String {
    let mut seen = String::new();
    let mut note =
        |what: &str, value: &dyn std::fmt::Debug| writeln!(seen, "{what}: {value:?}").expect("into a string");
    let kernels = h.kernels(None).await.expect("readable");
    let known: HashSet<_> = kernels.iter().map(|row| row.id).collect();
    note("kernels", &kernels);
    note("workers", &h.workers().await.expect("readable"));
    note("handovers", &h.handovers().await.expect("readable"));
    for k in ["a", "b"] {
        note("key", &h.recall_key("create/1000".into(), k.into(), 5).await.expect("readable"));
    }
    note("events", &h.events_after(0, 100).await.expect("readable"));
    note("audit", &h.audit_after(0, AuditFilter::default(), 100).await.expect("readable"));
    h.verify_audit(Vec::new()).await.expect("readable").expect("the chain is whole");
    h.check().await.expect("sound");
    // A directory counts only once its kernel is known.
    if known.contains(&FIRST) {
        let state = h.state(FIRST);
        note("journal", &state.journal(Direction::After(0), 100).await.expect("readable"));
        note("exec", &state.exec(ExecId(1)).await.expect("readable"));
        note("running", &state.running_execs().await.expect("readable"));
        note("mounts", &state.mounts().await.expect("readable"));
        note("mcp", &state.mcp_servers().await.expect("readable"));
        note("checkpoints", &state.checkpoints(u64::MAX, 100).await.expect("readable"));
        note("head", &state.head().await.expect("readable"));
        note("objects", &state.roots().await.expect("readable"));
        note("transition", &state.transition().await.expect("readable"));
        note("compacted", &state.journal_as(JournalView::Compacted, 0, 100).await.expect("readable"));
        note("workflow", &state.workflow().await.expect("readable"));
        note("decisions", &state.decisions(0).await.expect("readable"));
        note("artifacts", &state.artifact_versions("n".into(), 100).await.expect("readable"));
        note("origin", &state.origin().await.expect("readable"));
        note("lease", &state.lease().await.expect("readable"));
        note("consents", &state.consents(0).await.expect("readable"));
        state.check().await.expect("sound");
        let engine = EngineDb::open(&h.kernel_files(FIRST).engine_db, Durability::Process).expect("opens");
        note("engine", &engine.info().expect("readable"));
        note("entries", &engine.heads().expect("readable"));
        engine.check().expect("sound");
        engine.close().expect("closed");
        if dir.join("kernels").join(FIRST.to_string()).join("old.db").exists() {
            old_format(&h.kernel_files(FIRST).dir).expect("opens again");
        }
    }
    note("second", &known.contains(&SECOND));
    seen
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a run time")
}

/// The expected content after each step of the script.
fn expected() -> Vec<String> {
    let dir = crash_dir();
    let catalog = Catalog::open(&config(dir.path())).expect("opened");
    let handle = catalog.handle();
    runtime().block_on(async {
        let mut seen = vec![observe(&handle, dir.path()).await];
        for n in 0.. {
            if !step(n, &handle).await.expect("no fault is armed") {
                break;
            }
            seen.push(observe(&handle, dir.path()).await);
        }
        seen
    })
}

#[test]
fn catalog_script_child() {
    let Some(dir) = std::env::var_os("RYOKAN_CRASH_DIR") else { return };
    let catalog = match Catalog::open(&config(Path::new(&dir))) {
        Ok(catalog) => catalog,
        Err(error) => return println!("fail {error}"),
    };
    println!("\nack open");
    let handle = catalog.handle();
    runtime().block_on(async {
        for n in 0.. {
            match step(n, &handle).await {
                Ok(true) => println!("ack {n}"),
                Ok(false) => break,
                Err(error) => return println!("fail {n} {error}"),
            }
        }
    });
}

fn check_after(fault: &str, label: &str, steps: Steps, seen: &[String]) {
    let dir = crash_dir();
    let power: &[_] = if label.starts_with("kernel.files") { &[("RYOKAN_CRASH_POWER", "1")] } else { &[] };
    let ran = run_child(CHILD, dir.path(), Some(fault), power);
    let kill = fault.ends_with("=kill");
    let harmless = !kill && fault.contains(".after_commit=");
    assert_eq!(ran.killed, kill, "{fault}: {}", ran.all);
    assert_eq!(ran.failed.is_some(), !kill && !harmless, "{fault}: {}", ran.all);
    let catalog = Catalog::open(&config(dir.path())).expect("opens after the crash");
    let handle = catalog.handle();
    let now = runtime().block_on(async {
        let known = handle.kernels(None).await.expect("readable").into_iter().map(|row| row.id).collect();
        let (_, stuck) = sweep_kernels(&dir.path().join("kernels"), &known).expect("swept");
        assert!(stuck.is_empty(), "{stuck:?}");
        observe(&handle, dir.path()).await
    });
    // Acknowledged steps, not counting the opening.
    let acked = ran.acks.len().saturating_sub(1);
    let committed = kill && fault.contains(".after_commit=") && !ran.acks.is_empty();
    let due: &[String] = match steps {
        Steps::Commit if committed => &seen[acked + 1..=acked + 1],
        Steps::Commit => &seen[acked..=acked],
        _ => &seen[acked..seen.len().min(acked + 2)],
    };
    assert!(due.contains(&now), "{fault} after {acked} steps:\n{now}\nexpected:\n{due:#?}");
    drop(catalog);
    let litter: Vec<_> =
        dir.path().read_dir().expect("readable").filter_map(Result::ok).map(|e| e.file_name()).collect();
    assert!(litter.iter().all(|name| name == "catalog.db" || name == "kernels"), "{fault}: {litter:?}");
}

#[test]
fn catalog_steps_are_atomic() {
    let seen = expected();
    // Groups have crash tests of whole freezes and restores, moves of both hosts, suspended kernels of live workers, copied
    // machines of running ones: `tests/freeze`, `tests/teleport`, `tests/suspend`, `tests/microvm`.
    let elsewhere = [
        "store.",
        "workspace.",
        "host.",
        "freeze.",
        "catalog.freeze.",
        "catalog.group.",
        "catalog.groupmove.",
        "catalog.host.key",
        "catalog.trust.",
        "database.",
        "handover.",
        "repository.",
        "source.",
        "kernel.worker.",
        "machine.",
        "state.checkpoints.withdraw",
    ];
    for (label, point) in points().filter(|(label, _)| !elsewhere.iter().any(|of| label.name.starts_with(of))) {
        for deed in ["kill", "eio", "enospc"] {
            check_after(&format!("{point}={deed}"), label.name, label.steps, &seen);
        }
    }
}
