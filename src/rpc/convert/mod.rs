//! Conversions between Cap'n Proto and `core`'s types: `read_x` and `write_x` for every struct of
//! the schema.
//!
//! Reading turns outside data into checked types: text is UTF-8, names contain no NUL, lists and
//! nesting are bounded. A violation is
//! [`ErrorCode::InvalidArgument`](crate::core::error::ErrorCode::InvalidArgument) and names the
//! field. Never does I/O and never holds a capability.

pub mod checkpoint;
pub mod error;
pub mod exec;
pub mod files;
pub mod fork;
pub mod groups;
pub mod image;
pub mod info;
pub mod listing;
pub mod mcp;
pub mod output;
pub mod pool;
pub mod process;
pub mod provenance;
pub mod rights;
pub mod spec;
pub mod teleport;
mod text;
pub mod upkeep;
pub mod usage;
pub mod value;
pub mod workflow;

pub(in crate::rpc) use error::AFTER_A_LOSS;
pub use error::{from_capnp, to_capnp};
pub use text::{read_data, read_name, read_pairs, read_text, read_text_list, write_pairs, write_text_list};

use crate::core::limits;

#[cfg(test)]
mod testing;

/// Limits for readers of the public interface's messages: size, and nesting for the deepest value.
pub fn reader_options() -> capnp::message::ReaderOptions {
    let mut options = capnp::message::ReaderOptions::new();
    options.traversal_limit_in_words(Some(limits::MESSAGE_WORDS));
    // A level of a value is a list, its element and the element's own value.
    options.nesting_limit(limits::VALUE_DEPTH as i32 * 4);
    options
}
