//! A listener that notes everything, and can be made slow.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::rc::Rc;
use std::time::Duration;

use ryokan::core::error::{Error, Result};
use ryokan::core::exec::{ExecEnd, OutputEvent, Stream};
use ryokan::core::ids::ExecId;
use ryokan::core::kernel::CrashCause;
use ryokan::core::missed::MissedEntry;
use ryokan::core::value::Value;
use ryokan::link::host::{Job, WorkerListener};
use tokio::sync::Notify;

#[derive(Debug, Default)]
pub struct Seen {
    pub out: BTreeMap<ExecId, [Vec<u8>; 2]>,
    pub offsets: BTreeMap<ExecId, u64>,
    pub chunks: usize,
    pub events: Vec<(ExecId, OutputEvent)>,
    pub ends: BTreeMap<ExecId, (ExecEnd, u64)>,
    pub jobs: Vec<Vec<Job>>,
    pub missed: Vec<Vec<MissedEntry>>,
    pub background: Vec<u8>,
    pub causes: Vec<CrashCause>,
    pub disconnected: bool,
    pub tool_calls: Vec<(ExecId, String, Value)>,
    pub tool_calls_dropped: usize,
}

#[derive(Default)]
pub struct Recorder {
    pub seen: RefCell<Seen>,
    changed: Notify,
    /// Output waits while set.
    pub stalled: Cell<bool>,
    pub resumed: Notify,
    /// Output is counted only.
    pub counting: Cell<bool>,
    pub counted: Cell<u64>,
    /// Tools never answer while set.
    pub tools_hang: Cell<bool>,
}

impl Recorder {
    pub fn new() -> Rc<Recorder> {
        Rc::new(Recorder::default())
    }

    /// Waits until `look` finds something.
    pub async fn until<T>(&self, what: &str, look: impl Fn(&Seen) -> Option<T>) -> T {
        let found = async {
            loop {
                let changed = self.changed.notified();
                if let Some(found) = look(&self.seen.borrow()) {
                    return found;
                }
                changed.await;
            }
        };
        let found = tokio::time::timeout(Duration::from_secs(180), found).await;
        found.unwrap_or_else(|_| panic!("waited in vain for {what}: {:?}", self.seen.borrow()))
    }

    pub async fn end(&self, exec: u64) -> ExecEnd {
        self.until("an end", |seen| seen.ends.get(&ExecId(exec)).map(|(end, _)| end.clone())).await
    }

    pub async fn cause(&self) -> CrashCause {
        self.until("the cause", |seen| seen.causes.first().cloned()).await
    }

    pub async fn gone(&self) {
        self.until("the disconnection", |seen| seen.disconnected.then_some(())).await;
    }

    pub fn out(&self, exec: u64) -> String {
        self.stream(exec, Stream::Stdout)
    }

    pub fn err(&self, exec: u64) -> String {
        self.stream(exec, Stream::Stderr)
    }

    fn stream(&self, exec: u64, stream: Stream) -> String {
        let seen = self.seen.borrow();
        let bytes = seen.out.get(&ExecId(exec)).map(|both| both[stream as usize].clone()).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    pub fn resume(&self) {
        self.stalled.set(false);
        self.resumed.notify_waiters();
    }

    fn note(&self, change: impl FnOnce(&mut Seen)) {
        change(&mut self.seen.borrow_mut());
        self.changed.notify_waiters();
    }

    async fn wait_while_stalled(&self) {
        while self.stalled.get() {
            self.resumed.notified().await;
        }
    }
}

#[async_trait::async_trait(?Send)]
impl WorkerListener for Recorder {
    async fn output(&self, exec: ExecId, offset: u64, stream: Stream, data: Vec<u8>) {
        self.wait_while_stalled().await;
        if self.counting.get() {
            self.counted.set(self.counted.get() + data.len() as u64);
            return;
        }
        self.note(|seen| {
            assert!(!seen.ends.contains_key(&exec), "output of {exec} after its end");
            let expected = seen.offsets.entry(exec).or_default();
            assert_eq!(*expected, offset, "output of {exec} in order");
            *expected += data.len() as u64;
            seen.chunks += 1;
            seen.out.entry(exec).or_default()[stream as usize].extend(data);
        });
    }

    async fn event(&self, exec: ExecId, event: OutputEvent) {
        self.wait_while_stalled().await;
        self.note(|seen| seen.events.push((exec, event)));
    }

    fn ended(&self, exec: ExecId, end: ExecEnd, output_bytes: u64) {
        self.note(|seen| {
            assert!(seen.ends.insert(exec, (end, output_bytes)).is_none(), "{exec} ends twice");
        });
    }

    async fn tool_call(&self, exec: ExecId, name: String, args: Value) -> Result<(Value, String)> {
        struct Dropped<'a>(&'a Recorder, bool);
        impl Drop for Dropped<'_> {
            fn drop(&mut self) {
                if !self.1 {
                    self.0.note(|seen| seen.tool_calls_dropped += 1);
                }
            }
        }
        let mut dropped = Dropped(self, false);
        self.note(|seen| seen.tool_calls.push((exec, name.clone(), args.clone())));
        if self.tools_hang.get() {
            std::future::pending::<()>().await;
        }
        dropped.1 = true;
        match name.as_str() {
            "bad" => Err(Error::refused("not today")),
            _ => Ok((args, format!("{name} called"))),
        }
    }

    fn jobs(&self, jobs: Vec<Job>) {
        self.note(|seen| seen.jobs.push(jobs));
    }

    fn missed(&self, missed: Vec<MissedEntry>) {
        self.note(|seen| seen.missed.push(missed));
    }

    fn background(&self, _: Stream, data: Vec<u8>) {
        self.note(|seen| seen.background.extend(data));
    }

    fn dying(&self, cause: CrashCause) {
        self.note(|seen| seen.causes.push(cause));
    }

    fn disconnected(&self) {
        self.note(|seen| seen.disconnected = true);
    }
}

/// Runs a test inside a local task set.
pub fn local<F: Future<Output = ()>>(test: F) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    tokio::task::LocalSet::new().block_on(&runtime, test);
}
