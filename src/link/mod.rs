//! The protocol between the daemon and a worker's init.
//!
//! ```text
//!  daemon                                                    worker
//!  host::WorkerLink ── connector ── handshake ── Cap'n Proto ── guest::serve_connection ── init ── frames ── engine
//!                      └─ exec_channel (only where a connector can pass descriptors) ─┘
//! ```
//!
//! Both sides prove that they know the worker's secret ([`handshake`]); then the daemon calls
//! `Worker`, and init calls `Supervisor` (`schema/worker.capnp`). The link knows nothing of
//! kernels' lifecycles, processes or sandboxes: the isolation driver starts workers, and the
//! worker's program defines their behaviour.

pub mod binding;
pub mod bootstrap;
pub mod connector;
pub mod exec_channel;
pub mod frames;
pub mod guest;
pub mod handshake;
pub mod host;
pub mod machine;
pub mod message_limit;
pub mod mirror;
pub mod types;

/// Generated from `schema/worker.capnp`.
pub mod schema {
    pub use ryokan_schema::worker_capnp;
}
