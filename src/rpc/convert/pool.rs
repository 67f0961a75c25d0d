//! The pools of warm workers.

use super::text::{bounded, malformed};
use super::{read_name, read_text};
use crate::core::error::Result;
use crate::core::info::PoolInfo;
use crate::core::limits;
use crate::rpc::schema::ryokan_capnp as wire;

/// Reads the pools of a host.
///
/// # Errors
/// `invalidArgument` for malformed data and for more than [`limits::VALUE_ITEMS`].
pub fn read_pools(
    reader: capnp::Result<capnp::struct_list::Reader<'_, wire::pool_info::Owned>>,
) -> Result<Vec<PoolInfo>> {
    let list = reader.map_err(|e| malformed("pools", e))?;
    bounded(list.len(), "pools", limits::VALUE_ITEMS)?;
    list.iter().map(read_pool).collect()
}

fn read_pool(reader: wire::pool_info::Reader<'_>) -> Result<PoolInfo> {
    Ok(PoolInfo {
        engine: read_name(reader.get_engine(), "engine")?,
        net: read_name(reader.get_net(), "network")?,
        trouble: read_text(reader.get_trouble(), "trouble")?,
        memory_bytes: reader.get_memory_bytes(),
        uid: reader.get_uid(),
        pool_size: reader.get_pool_size(),
        max_pool_size: reader.get_max_pool_size(),
        min_idle: reader.get_min_idle(),
        target: reader.get_target(),
        total: reader.get_total(),
        idle: reader.get_idle(),
        creating: reader.get_creating(),
        active: reader.get_active(),
        total_created: reader.get_total_created(),
        total_destroyed: reader.get_total_destroyed(),
        total_executions: reader.get_total_executions(),
        creation_errors: reader.get_creation_errors(),
        taken: reader.get_taken(),
        missed: reader.get_missed(),
        refused: reader.get_refused(),
        cpu_milli: reader.get_cpu_milli(),
        pids: reader.get_pids(),
        tries_again_in_ms: reader.get_tries_again_in_ms(),
    })
}

/// Writes a pool.
pub fn write_pool(mut builder: wire::pool_info::Builder<'_>, pool: &PoolInfo) {
    builder.set_engine(pool.engine.as_str());
    builder.set_net(pool.net.as_str());
    builder.set_trouble(pool.trouble.as_str());
    builder.set_memory_bytes(pool.memory_bytes);
    builder.set_uid(pool.uid);
    builder.set_pool_size(pool.pool_size);
    builder.set_max_pool_size(pool.max_pool_size);
    builder.set_min_idle(pool.min_idle);
    builder.set_target(pool.target);
    builder.set_total(pool.total);
    builder.set_idle(pool.idle);
    builder.set_creating(pool.creating);
    builder.set_active(pool.active);
    builder.set_total_created(pool.total_created);
    builder.set_total_destroyed(pool.total_destroyed);
    builder.set_total_executions(pool.total_executions);
    builder.set_creation_errors(pool.creation_errors);
    builder.set_taken(pool.taken);
    builder.set_missed(pool.missed);
    builder.set_refused(pool.refused);
    builder.set_cpu_milli(pool.cpu_milli);
    builder.set_pids(pool.pids);
    builder.set_tries_again_in_ms(pool.tries_again_in_ms);
}
