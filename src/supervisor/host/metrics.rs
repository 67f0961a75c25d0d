//! Counters and timings of the daemon, as OpenMetrics text for Prometheus.
//!
//! Labels are engines, states and stages, never kernels or users. The number of series is therefore bounded, and metrics
//! reveal no user's work.

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
use crate::supervisor::host::Host;

/// One label and its value.
type Label = (&'static str, String);

/// A timed stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Creation of a kernel: its files and rows.
    Create,
    /// From the request for a worker to a bound warm worker.
    WorkerTaken,
    /// From the request for a worker to a newly started one.
    WorkerStarted,
    /// Binding of a warm worker: the record of its kernel.
    BindRecord,
    /// Binding: the transfer of the kernel's directory and mounts.
    BindSources,
    /// Binding: the worker enters them, and its engine loads the state.
    BindWorker,
    /// Creation of a warm worker.
    PoolRefill,
    /// An execution's wait for earlier ones and for a worker.
    ExecutionQueued,
    /// A checkpoint, from the request to its seal.
    Checkpoint,
    /// The part of a checkpoint in which the kernel is quiesced.
    CheckpointPause,
    /// A restore.
    Restore,
    /// A fork, for all its children.
    Fork,
}

impl Stage {
    /// Its label.
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

/// Buckets from 100 µs to 104 s, by powers of two.
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

/// All metrics of the daemon.
pub struct Metrics {
    registry: RefCell<Registry>,
    executions: Family<[Label; 2], Counter>,
    executing: Histograms<1>,
    stages: Histograms<2>,
    kernels: Family<[Label; 2], Gauge>,
    kernels_in_memory: Gauge,
    workers: Gauge,
    clients: Gauge,
    warm_workers: Family<[Label; 2], Gauge>,
    pool_events: Family<[Label; 2], Counter>,
    pool_failing: Family<[Label; 1], Gauge>,
    memory_pressure: Gauge,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let metrics = Metrics {
            registry: RefCell::new(Registry::with_prefix("ryokan")),
            executions: Family::default(),
            executing: histograms(),
            stages: histograms(),
            kernels: Family::default(),
            kernels_in_memory: Gauge::default(),
            workers: Gauge::default(),
            clients: Gauge::default(),
            warm_workers: Family::default(),
            pool_events: Family::default(),
            pool_failing: Family::default(),
            memory_pressure: Gauge::default(),
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
        registry.register("kernels_in_memory", help, self.kernels_in_memory.clone());
        registry.register("workers", "Workers, including warm ones", self.workers.clone());
        registry.register("clients", "Connected clients", self.clients.clone());
        registry.register("warm_workers", "Warm workers, by engine and state", self.warm_workers.clone());
        registry.register("pool_events", "Events of the warm pool, by engine", self.pool_events.clone());
        let help = "1 while warm workers of the engine fail to start";
        registry.register("pool_failing", help, self.pool_failing.clone());
        registry.register("memory_pressure", "1 under memory pressure on the host", self.memory_pressure.clone());
    }

    /// Records the time of a stage.
    pub fn took(&self, stage: Stage, engine: EngineName, time: Duration) {
        self.stages.get_or_create(&[stage.label(), of(engine)]).observe(time.as_secs_f64());
    }

    /// Records the time of a stage that ends now.
    pub fn since(&self, stage: Stage, engine: EngineName, begun: Instant) {
        self.took(stage, engine, begun.elapsed());
    }

    /// Records the end of an execution.
    pub(crate) fn executed(&self, engine: EngineName, end: &ExecEnd) {
        self.executions.get_or_create(&[of(engine), ("status", end.status.name().to_owned())]).inc();
        self.executing.get_or_create(&[of(engine)]).observe(end.duration_us as f64 / 1e6);
    }

    /// All metrics as OpenMetrics text.
    pub fn text(&self, host: &Host) -> String {
        self.set_gauges(host);
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = encode(&mut text, &self.registry.borrow());
        text
    }

    /// Sets the gauges from the present state, at each request.
    fn set_gauges(&self, host: &Host) {
        self.kernels.clear();
        for kernel in host.kernels() {
            let state = kernel.view().state.name().to_owned();
            self.kernels.get_or_create(&[of(kernel.spec.engine), ("state", state)]).inc();
        }
        self.kernels_in_memory.set(i64::try_from(host.remembered()).unwrap_or(i64::MAX));
        self.workers.set(i64::try_from(host.workers.live()).unwrap_or(i64::MAX));
        self.clients.set(i64::try_from(host.clients()).unwrap_or(i64::MAX));
        self.memory_pressure.set(host.pressure.is_on().into());
        self.warm_workers.clear();
        self.pool_failing.clear();
        self.pool_events.clear();
        for pool in host.pool.infos(host.pressure.is_on()) {
            let engine = || ("engine", pool.engine.clone());
            for (state, count) in [("idle", pool.idle), ("creating", pool.creating), ("wanted", pool.target)] {
                self.warm_workers.get_or_create(&[engine(), ("state", state.to_owned())]).inc_by(count.into());
            }
            self.pool_failing.get_or_create(&[engine()]).inc_by((!pool.trouble.is_empty()).into());
        }
        for (engine, total) in host.pool.totals() {
            let events = [
                ("created", total.total_created),
                ("destroyed", total.total_destroyed),
                ("failed", total.creation_errors),
                ("taken", total.taken),
                ("missed", total.missed),
                ("refused", total.refused),
            ];
            for (event, count) in events {
                self.pool_events.get_or_create(&[of(engine), ("event", event.to_owned())]).inc_by(count);
            }
        }
    }
}

impl Stage {
    fn label(self) -> Label {
        ("stage", self.name().to_owned())
    }
}

fn of(engine: EngineName) -> Label {
    ("engine", engine.name().to_owned())
}
