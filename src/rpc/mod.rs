//! The public interface: generated code, conversions to and from `core`'s types, client and server sides.

pub mod client;
pub mod convert;
pub mod server;

/// Generated from `schema/ryokan.capnp`.
pub mod schema {
    pub use ryokan_schema::ryokan_capnp;
}
