//! Measurements, run by hand: `cargo test --release --lib --no-default-features speed -- --ignored --nocapture
//! --test-threads 1`.

use std::time::Instant;

use super::state::{ExecBegin, ExecClose, OutputRecord};
use super::*;
use crate::core::exec::{ExecEnd, ExecRequest, ExecStatus, Stream};
use crate::core::ids::{HostId, KernelId};

fn config(dir: &std::path::Path) -> CatalogConfig {
    CatalogConfig {
        data: dir.to_owned(),
        durability: Durability::Process,
        fresh_host_id: HostId::from_bytes([1; 16]),
        now_ms: 1,
    }
}

fn report(what: &str, mut micros: Vec<f64>) {
    micros.sort_by(f64::total_cmp);
    let at = |share: f64| micros[((micros.len() - 1) as f64 * share) as usize];
    println!("{what:48} p50 {:9.1} µs  p99 {:9.1} µs  max {:9.1} µs", at(0.5), at(0.99), at(1.0));
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a run time")
}

fn output(bytes: usize) -> OutputRecord {
    let mut output = OutputRecord::default();
    output.runs.push(Stream::Stdout, bytes as u64);
    output.stdout = super::state::Kept::Inline(vec![b'x'; bytes]);
    output
}

fn done() -> ExecEnd {
    ExecEnd { status: ExecStatus::Done, code: 0, err: String::new(), value: None, output: None, duration_us: 1 }
}

#[test]
#[ignore = "a measurement"]
fn speed_of_executions() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let catalog = Catalog::open(&config(dir.path())).expect("opened");
    let handle = catalog.handle();
    runtime().block_on(async {
        let id = KernelId::from_bytes([7; 16]);
        handle.create_kernel_files(id).await.expect("made");
        let state = handle.state(id);
        let (mut both, mut first, mut reads) = (Vec::new(), Vec::new(), Vec::new());
        for n in 0..20_000 {
            let start = Instant::now();
            let begin =
                ExecBegin { request: ExecRequest::code("x = x + 1"), actor: "ryokan-cli uid 1000".into(), at_ms: n };
            let exec = match state.begin_exec(begin).await.expect("begun") {
                state::Begun::New { exec, .. } | state::Begun::Before(exec) => exec,
            };
            first.push(start.elapsed().as_secs_f64() * 1e6);
            let close = ExecClose { end: done(), output: output(20), at_ms: n };
            state.end_exec(exec, close).await.expect("ended");
            both.push(start.elapsed().as_secs_f64() * 1e6);
            let start = Instant::now();
            state.exec_count().await.expect("read");
            reads.push(start.elapsed().as_secs_f64() * 1e6);
        }
        report("begin", first);
        report("begin + end", both);
        report("hand-off + read", reads);
        let start = Instant::now();
        let many: Vec<_> = (0..1000)
            .map(|n| state.begin_exec(ExecBegin { request: ExecRequest::code("x"), actor: String::new(), at_ms: n }))
            .collect();
        for pending in many {
            pending.await.expect("begun");
        }
        println!("1000 begins at once: {:.1} µs each", start.elapsed().as_secs_f64() * 1e3);
    });
}

#[test]
#[ignore = "a measurement"]
fn speed_of_new_kernels() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let catalog = Catalog::open(&config(dir.path())).expect("opened");
    let handle = catalog.handle();
    runtime().block_on(async {
        let (mut files, mut first, mut close, mut again) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for n in 0..200u8 {
            let id = KernelId::from_bytes([n; 16]);
            let start = Instant::now();
            let made = handle.create_kernel_files(id).await.expect("made");
            files.push(start.elapsed().as_secs_f64() * 1e6);
            let state = handle.state(id);
            state.close().await.expect("waited for the sync that came between");
            let start = Instant::now();
            state.exec_count().await.expect("opened");
            first.push(start.elapsed().as_secs_f64() * 1e6);
            let entry = state::NewEntry {
                kind: state::EntryKind::Mark,
                at_ms: 1,
                actor: String::new(),
                text: "x".into(),
                detail_json: String::new(),
            };
            state.append_journal(vec![entry]).await.expect("written");
            let start = Instant::now();
            state.close().await.expect("closed");
            close.push(start.elapsed().as_secs_f64() * 1e6);
            let start = Instant::now();
            let engine = EngineDb::open(&made.engine_db, Durability::Process).expect("opened");
            again.push(start.elapsed().as_secs_f64() * 1e6);
            drop(engine);
        }
        report("both databases made", files);
        report("state.db opened", first);
        report("state.db closed after a write", close);
        report("engine.db opened", again);
    });
}

#[test]
#[ignore = "a measurement"]
fn speed_of_engine_state() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let db = EngineDb::open(&dir.path().join("engine.db"), Durability::Process).expect("made");
    let put = |key: &str, body: Vec<u8>| Changes {
        puts: vec![Entry { key: key.into(), meta_json: r#"{"type":"int","summary":"42"}"#.into(), body }],
        ..Changes::default()
    };
    for n in 0..1000 {
        db.apply(&put(&format!("var/v{n}"), vec![1; 100])).expect("stored");
    }
    let (mut one, mut none, mut big) = (Vec::new(), Vec::new(), Vec::new());
    for n in 0..20_000u64 {
        let changes = put("var/v500", n.to_le_bytes().to_vec());
        let start = Instant::now();
        db.apply(&changes).expect("stored");
        one.push(start.elapsed().as_secs_f64() * 1e6);
        let start = Instant::now();
        db.apply(&changes).expect("stored");
        none.push(start.elapsed().as_secs_f64() * 1e6);
        db.checkpoint_wal();
    }
    for n in 0..100u8 {
        let changes = put("var/big", vec![n; 1 << 20]);
        let start = Instant::now();
        db.apply(&changes).expect("stored");
        big.push(start.elapsed().as_secs_f64() * 1e6);
        db.checkpoint_wal();
    }
    report("one changed variable of 1000", one);
    report("the same again: nothing changed", none);
    report("one of 1 MiB", big);
}
