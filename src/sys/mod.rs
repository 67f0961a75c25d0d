//! What ryokan asks of the operating system. The only place with unsafe code.

pub mod fault;
pub mod fs;
pub mod sqlite_vfs;
