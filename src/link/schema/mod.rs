//! Generated from `schema/worker.capnp` by capnpc; `tests/generated` proves that it is fresh.
#![allow(missing_docs, clippy::all, clippy::unwrap_used, clippy::unimplemented, reason = "generated code")]

#[rustfmt::skip]
pub mod worker_capnp;
