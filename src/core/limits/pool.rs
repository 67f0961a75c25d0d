//! Limits of the warm pool and of its reaction to memory pressure.

use std::time::Duration;

/// Pools of one host, one per requested shape of worker.
pub const POOLS: usize = 64;
/// Pools used more recently than this are not evicted.
pub const POOL_EVICTION_AGE: Duration = Duration::from_secs(60);
/// Time for which a warm worker stays reserved for the first use of its new kernel.
pub const POOL_RESERVATION: Duration = Duration::from_secs(10);
/// Deadline for a warm worker's health check; then it is replaced.
pub const POOL_HEALTH_CHECK: Duration = Duration::from_secs(5);
/// Delay between the use of a warm worker and the creation of its replacement.
pub const POOL_REFILL_DELAY: Duration = Duration::from_millis(40);
/// Longest total delay while warm workers are used in quick succession.
pub const POOL_REFILL_DELAY_MAX: Duration = Duration::from_millis(250);
/// Warm workers of one pool, idle and in creation.
pub const POOL_SLOTS: u32 = 256;
/// The same for a virtual machine, which takes longer to replace, and no processor while it is stopped.
pub const VM_RESERVATION: Duration = Duration::from_secs(120);
/// Concurrent creations of one pool.
pub const POOL_CREATIONS: u32 = 4;
/// Deadline for the creation of a warm worker.
pub const POOL_CREATION: Duration = Duration::from_secs(30);
/// The same for a virtual machine, which may have to boot.
pub const VM_CREATION: Duration = Duration::from_secs(180);
/// Idle warm workers under demand in a pool that its first kernel opened.
pub const POOL_ON_DEMAND: u32 = 1;
/// The same for virtual machines.
pub const VM_POOL_ON_DEMAND: u32 = 2;
/// Time after which a stopping daemon leaves its warm workers to exit by themselves.
pub const POOL_CLOSE: Duration = Duration::from_secs(5);
/// Window in which requests for warm workers are counted as demand.
pub const POOL_BURST: Duration = Duration::from_secs(2);
/// Shortest time in a pool's rules.
pub const POOL_TIME_MIN: Duration = Duration::from_secs(1);
/// Consecutive failures that open a pool's circuit breaker.
pub const POOL_FAILURES: u32 = 3;
/// First pause of an open breaker; doubles with each further failure.
pub const POOL_BACKOFF_FIRST: Duration = Duration::from_millis(200);
/// Longest such pause.
pub const POOL_BACKOFF_MAX: Duration = Duration::from_secs(60);
/// Time after a failure in which the death of an idle warm worker continues the count of failures,
/// despite creations in between.
pub const POOL_FAILURE_WINDOW: Duration = Duration::from_secs(60);
/// Failure reason that a breaker keeps, bytes.
pub const POOL_REASON_BYTES: usize = 500;
/// Default number of idle warm workers under demand.
pub const DEFAULT_POOL_SIZE: u32 = 3;
/// Default maximum of idle warm workers and creations.
pub const DEFAULT_MAX_POOL_SIZE: u32 = 10;
/// Default number of idle warm workers without demand.
pub const DEFAULT_MIN_IDLE: u32 = 2;
/// Default time without demand after which only those are kept.
pub const DEFAULT_MAX_IDLE_TIME: Duration = Duration::from_secs(300);
/// Default number of executions after which an idle warm worker is replaced.
pub const DEFAULT_MAX_EXEC_COUNT: u32 = 100;
/// Default age at which an idle warm worker is replaced.
pub const DEFAULT_MAX_UPTIME: Duration = Duration::from_secs(1800);
/// Default interval of the pool's maintenance.
pub const DEFAULT_MAINTENANCE_INTERVAL: Duration = Duration::from_secs(30);
/// Memory stall time within [`PRESSURE_WINDOW`] that counts as pressure.
pub const PRESSURE_STALL: Duration = Duration::from_millis(150);
/// See [`PRESSURE_STALL`].
pub const PRESSURE_WINDOW: Duration = Duration::from_secs(2);
/// Time for which pressure is assumed after its last report.
pub const PRESSURE_HOLD: Duration = Duration::from_secs(10);
/// Available share of the host's memory above which a host-wide stall is no shortage of the host: a control group has
/// reached its own limit.
pub const PRESSURE_AMPLE: f64 = 0.25;
/// Interval at which free memory is polled on hosts without pressure information ...
pub const PRESSURE_POLL: Duration = Duration::from_secs(5);
/// ... and the available part of memory below which it is short.
pub const PRESSURE_MIN_FREE: f64 = 0.05;
/// Idle time after which a kernel may be stopped under pressure.
pub const PRESSURE_IDLE: Duration = Duration::from_secs(5);
/// Kernels stopped concurrently each time that pressure is found.
pub const PRESSURE_STOPS: usize = 16;
