//! Workers: warm, reserved, started, admitted.

pub mod admission;
pub(crate) mod memory_pressure;
pub mod pool;
pub(crate) mod reserved;
pub(crate) mod start;
pub(crate) mod start_queue;
pub(crate) mod warm_worker;
pub mod worker;
