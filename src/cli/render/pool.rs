//! Pools of warm workers.

use super::table::Table;
use super::{counted, plain};
use crate::cli::paint::Paint;
use crate::core::info::PoolInfo;
use crate::core::quantity::{format_cpus, format_duration, format_size};

/// Index of the column IDLE.
const IDLE: usize = 6;

/// One line for each pool, followed by the failures.
pub fn pools(pools: &[PoolInfo], paint: Paint) -> String {
    let mut table = Table::new(&[
        "ENGINE", "MEMORY", "CPUS", "PIDS", "NET", "UID", "IDLE", "WANTED", "CREATING", "KERNELS", "TAKEN", "MISSED",
        "REFUSED", "MADE", "ENDED", "FAILED",
    ]);
    for pool in pools {
        table.row(&[
            pool.engine.clone(),
            format_size(pool.memory_bytes),
            format_cpus(pool.cpu_milli),
            pool.pids.to_string(),
            pool.net.clone(),
            pool.uid.to_string(),
            pool.idle.to_string(),
            pool.target.to_string(),
            pool.creating.to_string(),
            pool.active.to_string(),
            pool.taken.to_string(),
            pool.missed.to_string(),
            pool.refused.to_string(),
            pool.total_created.to_string(),
            pool.total_destroyed.to_string(),
            pool.creation_errors.to_string(),
        ]);
        match (pool.idle >= pool.target, pool.trouble.is_empty()) {
            (true, true) => table.paint(IDLE, Paint::good),
            (_, false) => table.paint(IDLE, Paint::bad),
            (false, true) => table.paint(IDLE, Paint::warn),
        }
    }
    let mut text =
        table.text("no warm workers: pool_size or max_pool_size is 0; otherwise see the daemon's log", paint);
    for pool in pools.iter().filter(|pool| !pool.trouble.is_empty()) {
        let again = match pool.tries_again_in_ms {
            0 => String::from("the next attempt follows when one is needed"),
            ms => format!("the next attempt follows in {}", format_duration(ms)),
        };
        let what = match pool.creation_errors {
            // Ready workers exited.
            0 => String::new(),
            failed => format!("{} failed to start, last with: ", counted(failed, "worker")),
        };
        let (engine, trouble) = (plain(&pool.engine), plain(&pool.trouble));
        text.push_str(&format!("{} {engine}: {what}{trouble}; {again}\n", paint.bad("trouble")));
    }
    text
}
