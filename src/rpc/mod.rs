//! The public interface: generated code, conversions to and from `core`'s types, client and server sides.

pub mod client;
pub mod convert;
pub mod schema;
pub mod server;
