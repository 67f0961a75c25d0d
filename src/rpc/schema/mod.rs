//! Generated from `schema/ryokan.capnp` by capnpc; `tests/generated` checks that it is up to date.
#![allow(missing_docs, clippy::all, clippy::unwrap_used, clippy::unimplemented, reason = "generated code")]

#[rustfmt::skip]
pub mod ryokan_capnp;
