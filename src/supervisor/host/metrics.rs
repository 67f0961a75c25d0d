//! The daemon's counters and timings, as OpenMetrics text for Prometheus (by `prometheus-client`).
//!
//! Labels are engines, states and stages, never a kernel or a user: the number of series is bounded, and metrics do not
//! reveal who works on what.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use crate::core::engine::EngineName;
use crate::core::exec::ExecEnd;
use crate::core::info::PoolInfo;
use crate::core::pool::Counters;
use crate::core::usage::DiskFigures;

/// One label and its value.
type Label = (&'static str, String);

/// A timed stage of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// A kernel's creation: its files and its rows.
    Create,
    /// From the request for a worker to a bound worker, where a warm one was ready.
    WorkerTaken,
    /// The same where no warm worker was ready.
    WorkerStarted,
    /// Binding a warm worker: the catalog records the owner.
    BindRecord,
    /// Binding a warm worker: the kernel's folder and mounts are handed over.
    BindSources,
    /// Binding a warm worker: it enters the folder and mounts, and its engine loads the kernel's state.
    BindWorker,
    /// The start of a warm worker for the pool.
    PoolRefill,
    /// An execution's wait for earlier executions and for a worker.
    ExecutionQueued,
    /// A checkpoint, from the request to its seal.
    Checkpoint,
    /// The part of a checkpoint during which the code inside is paused.
    CheckpointPause,
    /// A restore.
    Restore,
    /// A fork, for all its children.
    Fork,
}

impl Stage {
    /// Its label value.
    pub const fn name(self) -> &'static str {
        match self {
            Stage::Create => "create",
            Stage::WorkerTaken => "worker_taken",
            Stage::WorkerStarted => "worker_started",
            Stage::BindRecord => "bind_record",
            Stage::BindSources => "bind_sources",
            Stage::BindWorker => "bind_worker",
            Stage::PoolRefill => "pool_refill",
            Stage::ExecutionQueued => "execution_queued",
            Stage::Checkpoint => "checkpoint",
            Stage::CheckpointPause => "checkpoint_pause",
            Stage::Restore => "restore",
            Stage::Fork => "fork",
        }
    }
}

/// From 100 µs to 104 s, in factors of two.
#[derive(Clone)]
struct Buckets;

impl MetricConstructor<Histogram> for Buckets {
    fn new_metric(&self) -> Histogram {
        Histogram::new(exponential_buckets(0.000_1, 2.0, 21))
    }
}

type Histograms<const N: usize> = Family<[Label; N], Histogram, Buckets>;

fn histograms<const N: usize>() -> Histograms<N> {
    Family::new_with_constructor(Buckets)
}

/// All counters and timings.
pub struct Metrics {
    registry: RefCell<Registry>,
    executions: Family<[Label; 2], Counter>,
    executing: Histograms<1>,
    stages: Histograms<2>,
    kernels: Family<[Label; 2], Gauge>,
    remembered: Gauge,
    workers: Gauge,
    clients: Gauge,
    warm_workers: Family<[Label; 2], Gauge>,
    pool_events: Family<[Label; 2], Counter>,
    pool_failing: Family<[Label; 1], Gauge>,
    launch_events: Family<[Label; 2], Counter>,
    memory_pressure: Gauge,
    kernels_disk: Family<[Label; 1], Gauge>,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let metrics = Metrics {
            registry: RefCell::new(Registry::with_prefix("ryokan")),
            executions: Family::default(),
            executing: histograms(),
            stages: histograms(),
            kernels: Family::default(),
            remembered: Gauge::default(),
            workers: Gauge::default(),
            clients: Gauge::default(),
            warm_workers: Family::default(),
            pool_events: Family::default(),
            pool_failing: Family::default(),
            launch_events: Family::default(),
            memory_pressure: Gauge::default(),
            kernels_disk: Family::default(),
        };
        metrics.register();
        metrics
    }

    fn register(&self) {
        let registry = &mut *self.registry.borrow_mut();
        registry.register("executions", "Ended executions, by engine and status", self.executions.clone());
        let help = "Time of an execution in the engine";
        registry.register_with_unit("execution", help, Unit::Seconds, self.executing.clone());
        let help = "Time of a stage, by stage and engine";
        registry.register_with_unit("stage", help, Unit::Seconds, self.stages.clone());
        registry.register("kernels", "Kernels, by engine and state", self.kernels.clone());
        let help = "Kernels in the daemon's memory, including removed ones that clients still hold";
        registry.register("kernels_in_memory", help, self.remembered.clone());
        registry.register("workers", "Workers, including warm ones", self.workers.clone());
        registry.register("clients", "Connected clients", self.clients.clone());
        registry.register("warm_workers", "Warm workers, by engine and state", self.warm_workers.clone());
        registry.register("pool_events", "Events of the warm pool, by engine", self.pool_events.clone());
        let help = "1 while warm workers of the engine fail to start";
        registry.register("pool_failing", help, self.pool_failing.clone());
        let help = "Boots in place of a template, and what happened to templates, by engine";
        registry.register("launch_events", help, self.launch_events.clone());
        let help = "What kernels take on the disk, as last measured, by part";
        registry.register_with_unit("kernels_disk", help, Unit::Bytes, self.kernels_disk.clone());
        registry.register("memory_pressure", "1 under memory pressure on the host", self.memory_pressure.clone());
    }

    /// Times a stage.
    pub fn took(&self, stage: Stage, engine: EngineName, time: Duration) {
        self.stages.get_or_create(&[stage.label(), of(engine)]).observe(time.as_secs_f64());
    }

    /// Times a stage that ends now.
    pub fn since(&self, stage: Stage, engine: EngineName, begun: Instant) {
        self.took(stage, engine, begun.elapsed());
    }

    /// Counts a note of a launch; without an engine, of all.
    pub(crate) fn noted(&self, engine: Option<EngineName>, kind: &'static str) {
        let engine = engine.map_or_else(|| ("engine", String::from("all")), of);
        self.launch_events.get_or_create(&[engine, ("event", kind.to_owned())]).inc();
    }

    /// Counts a finished execution.
    pub(crate) fn executed(&self, engine: EngineName, end: &ExecEnd) {
        self.executions.get_or_create(&[of(engine), ("status", end.status.name().to_owned())]).inc();
        self.executing.get_or_create(&[of(engine)]).observe(end.duration_us as f64 / 1e6);
    }

    /// Returns all metrics as OpenMetrics text; gauges are read now.
    pub(crate) fn text(&self, now: &Gauges) -> String {
        self.set(now);
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = encode(&mut text, &self.registry.borrow());
        text
    }

    fn set(&self, now: &Gauges) {
        self.kernels.clear();
        for (engine, state) in &now.kernels {
            self.kernels.get_or_create(&[of(*engine), ("state", state.clone())]).inc();
        }
        let count = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.remembered.set(count(now.remembered));
        self.workers.set(count(now.workers));
        self.clients.set(count(now.clients));
        self.memory_pressure.set(now.is_memory_short.into());
        let DiskFigures { workspace_bytes, history_bytes, saved_memory_bytes, other_bytes, .. } = now.disk;
        let parts = [
            ("workspace", workspace_bytes),
            ("history", history_bytes),
            ("saved_memory", saved_memory_bytes),
            ("other", other_bytes),
        ];
        for (part, bytes) in parts {
            let gauge = self.kernels_disk.get_or_create(&[("part", part.to_owned())]);
            gauge.set(i64::try_from(bytes).unwrap_or(i64::MAX));
        }
        self.warm_workers.clear();
        self.pool_failing.clear();
        self.pool_events.clear();
        for pool in &now.pools {
            let engine = || ("engine", pool.engine.clone());
            for (state, count) in [("idle", pool.idle), ("creating", pool.creating), ("wanted", pool.target)] {
                self.warm_workers.get_or_create(&[engine(), ("state", state.to_owned())]).inc_by(count.into());
            }
            self.pool_failing.get_or_create(&[engine()]).inc_by((!pool.trouble.is_empty()).into());
        }
        for (engine, total) in &now.pool_totals {
            let events = [
                ("created", total.total_created),
                ("destroyed", total.total_destroyed),
                ("failed", total.creation_errors),
                ("taken", total.taken),
                ("missed", total.missed),
                ("refused", total.refused),
            ];
            for (event, count) in events {
                self.pool_events.get_or_create(&[of(*engine), ("event", event.to_owned())]).inc_by(count);
            }
        }
    }
}

/// Gauges, computed when metrics are requested rather than counted up and down.
pub(crate) struct Gauges {
    /// Engine and state of each kernel.
    pub kernels: Vec<(EngineName, String)>,
    /// Kernels in memory.
    pub remembered: usize,
    pub workers: usize,
    pub clients: usize,
    pub is_memory_short: bool,
    /// The sum of the measured kernels.
    pub disk: DiskFigures,
    pub pools: Vec<PoolInfo>,
    pub pool_totals: Vec<(EngineName, Counters)>,
}

impl Stage {
    fn label(self) -> Label {
        ("stage", self.name().to_owned())
    }
}

fn of(engine: EngineName) -> Label {
    ("engine", engine.name().to_owned())
}
