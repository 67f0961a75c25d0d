//! How a daemon reaches a worker's init: a byte stream, and descriptors where the channel can pass them.

pub mod halves;
pub mod unix;
