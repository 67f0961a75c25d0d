//! Generated from `schema/*.capnp` by capnpc; `tests/generated` checks that it is up to date.
//!
//! A crate of its own, because it is compiled once for the programs and all their tests.
#![allow(missing_docs, clippy::all, reason = "generated code")]

#[rustfmt::skip]
pub mod ryokan_capnp;
#[rustfmt::skip]
pub mod worker_capnp;
