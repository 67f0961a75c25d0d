//! The only place that knows Cap'n Proto: generated code, conversions to and from `core`'s types, client and server sides.

pub mod client;
pub mod convert;
pub mod schema;
