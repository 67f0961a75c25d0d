//! The only place that knows Cap'n Proto: generated code, conversions to and from `core`'s types, client and server sides.

mod arrival;
pub mod client;
pub mod convert;
pub mod lane;
pub mod schema;
pub mod server;
mod wire;
pub mod worker_link;
pub mod worker_proof;
pub mod worker_service;
pub mod worker_socket;
