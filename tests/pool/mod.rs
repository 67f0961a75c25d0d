//! The warm pool with real daemons, whose workers are ready before the first request.

mod binding;
mod ephemeral;
mod kernel_isolation;
mod load;
mod pressure;
mod recycling;
mod reserved_workers;
mod worker_failures;

use std::time::{Duration, Instant};

use ryokan::core::info::PoolInfo;
use ryokan::rpc::client::HostClient;

use crate::support::{Host, User};

/// Warm workers per engine.
const READY: u32 = 2;

/// A daemon with a pool.
fn pooled(user: User) -> Host {
    pooled_with(user, "")
}

fn pooled_with(user: User, more: &str) -> Host {
    let mut host = Host::prepare(user);
    host.configure(&format!("[pool]\npool_size = {READY}\nmin_idle = 1\nmax_pool_size = 6\n{more}"));
    host.launch();
    host
}

async fn pool_of(client: &HostClient, engine: &str) -> PoolInfo {
    let pools = client.pools().await.expect("the pools");
    pools.into_iter().find(|pool| pool.engine == engine).unwrap_or_else(|| panic!("no pool of {engine}"))
}

/// Waits until a pool satisfies a condition.
async fn until(client: &HostClient, engine: &str, is_so: impl Fn(&PoolInfo) -> bool) -> PoolInfo {
    let deadline = Instant::now() + Duration::from_secs(180);
    loop {
        let pool = pool_of(client, engine).await;
        if is_so(&pool) {
            return pool;
        }
        assert!(Instant::now() < deadline, "the pool stays as it is: {pool:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The worker of a kernel, according to its newest event that names one.
pub fn worker_of(host: &Host, kernel: &str) -> u32 {
    let events = host.ok(&["events", kernel, "--json"]);
    let newest = events.lines().rev().find_map(|line| {
        let event: serde_json::Value = serde_json::from_str(line).expect("an event");
        event["detail"]["worker_pid"].as_u64()
    });
    u32::try_from(newest.expect("a worker")).expect("a process")
}

/// Waits until the pool is full and no worker is being made.
async fn ready(client: &HostClient, engine: &str) -> PoolInfo {
    until(client, engine, |pool| pool.idle == pool.target && pool.creating == 0).await
}

/// Waits until the pools of kaish and Python are full; returns the workers.
async fn both_ready(host: &Host, client: &HostClient) -> Vec<u32> {
    ready(client, "kaish").await;
    ready(client, "python").await;
    worker_failures::inits(host)
}

/// Runs a test on a daemon with full pools of kaish and Python, with the workers.
fn with_full_pools(user: User, test: impl AsyncFnOnce(&Host, HostClient, Vec<u32>)) {
    let host = pooled(user);
    host.with(async |client| {
        let workers = both_ready(&host, &client).await;
        test(&host, client, workers).await;
    });
}
