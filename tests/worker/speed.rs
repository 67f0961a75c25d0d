//! How fast the way from daemon to engine and back is. Ignored: figures mean something on an idle machine only.
//! `cargo test --release --test runner worker::speed -- --ignored --nocapture --test-threads 1`

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use ryokan::core::engine::EngineName;
use ryokan::core::error::Result;
use ryokan::core::exec::{ExecEnd, OutputEvent, Stream};
use ryokan::core::ids::ExecId;
use ryokan::core::missed::MissedEntry;
use ryokan::core::value::Value;
use ryokan::link::connector::unix::UnixConnector;
use ryokan::link::host::{Job, WorkerLink, WorkerListener};
use ryokan::link::types::WorkerCause;
use tokio::sync::oneshot;

use super::code;
use super::listener::local;
use super::sandboxed::Kernel;

/// Does nothing but count and tell of ends.
#[derive(Default)]
struct Counter {
    bytes: Cell<u64>,
    first: Cell<Option<Instant>>,
    end: RefCell<Option<oneshot::Sender<ExecEnd>>>,
}

#[async_trait::async_trait(?Send)]
impl WorkerListener for Counter {
    async fn output(&self, _: ExecId, _: u64, _: Stream, data: Vec<u8>) {
        if self.first.get().is_none() {
            self.first.set(Some(Instant::now()));
        }
        self.bytes.set(self.bytes.get() + data.len() as u64);
    }
    async fn event(&self, _: ExecId, _: OutputEvent) {}
    fn ended(&self, _: ExecId, end: ExecEnd, _: u64) {
        self.end.take().unwrap().send(end).unwrap();
    }
    async fn tool_call(&self, _: ExecId, _: String, args: Value) -> Result<(Value, String)> {
        Ok((args, String::new()))
    }
    fn jobs(&self, _: Vec<Job>) {}
    fn missed(&self, _: Vec<MissedEntry>) {}
    fn background(&self, _: Stream, _: Vec<u8>) {}
    fn dying(&self, _: WorkerCause) {}
    fn disconnected(&self) {}
}

async fn run(link: &WorkerLink, counter: &Counter, number: u64, text: &str) -> Duration {
    let (tell, ended) = oneshot::channel();
    *counter.end.borrow_mut() = Some(tell);
    let began = Instant::now();
    let started = link.start(code(number, text));
    ended.await.unwrap();
    let took = began.elapsed();
    started.await.unwrap();
    link.acknowledge(ExecId(number)).await.unwrap();
    took
}

fn print(what: &str, mut all: Vec<Duration>) {
    all.sort();
    let at = |share: f64| all[((all.len() - 1) as f64 * share) as usize];
    println!("{what}: p10 {:?} p50 {:?} p99 {:?} (n {})", at(0.1), at(0.5), at(0.99), all.len());
}

#[test]
#[ignore = "a measurement, not a test"]
fn worker_round_trip_latency() {
    local(async {
        let mut launches = Vec::new();
        for _ in 0..20 {
            let kernel = Kernel::new(EngineName::Kaish);
            let began = Instant::now();
            let running = kernel.launch().await.unwrap();
            launches.push(began.elapsed());
            drop(running);
        }
        print("launch to ready", launches);
        let kernel = Kernel::new(EngineName::Kaish);
        let _running = kernel.launch().await.unwrap();
        let counter = Rc::new(Counter::default());
        let (link, _) =
            WorkerLink::attach(Rc::new(UnixConnector::new(&kernel.document.socket)), &kernel.identity, counter.clone())
                .await
                .unwrap();
        let mut number = 0;
        let mut usages = Vec::new();
        for _ in 0..300 {
            let began = Instant::now();
            link.state_heads().await.unwrap();
            usages.push(began.elapsed());
        }
        print("round trip to init", usages);
        for text in ["true", "echo hi", "x=1", "/bin/true"] {
            let mut all = Vec::new();
            for _ in 0..500 {
                number += 1;
                all.push(run(&link, &counter, number, text).await);
            }
            print(&format!("execute {text:?}"), all);
        }
        counter.bytes.set(0);
        number += 1;
        let took = run(&link, &counter, number, "head -c 1073741824 /dev/zero").await;
        let mib = counter.bytes.get() as f64 / f64::from(1 << 20);
        println!("output: {mib:.0} MiB in {took:?}: {:.0} MB/s", mib * 1.048_576 / took.as_secs_f64());
    });
}
