//! The daemon's client side of the Model Context Protocol.
//!
//! MCP servers run outside every kernel's sandbox, under the daemon, and only those that the configuration allows
//! ([`allow`]). A kernel reaches their tools through its control channel; it never reaches a server itself.
//!
//! ```text
//! servers.rs   one kernel's servers: register, call, list
//!    └ server.rs    one server's life: connect, serve, back off, connect again
//!        ├ connect.rs    stdio or HTTP, by rmcp
//!        │   ├ process.rs    the child, its process group, its last words
//!        │   └ wire.rs       what a hostile server may not do to us
//!        ├ tools.rs      the bounded list of its tools
//!        └ convert.rs    values there and back
//! ```
//! A server is not trusted: every message, list, queue and wait has a bound (`limits.rs`), and nothing that it sends is
//! worth more than an error of the call that asked for it.

pub mod allow;
mod connect;
mod convert;
pub mod limits;
pub mod orphans;
mod process;
mod server;
mod servers;
mod tools;
mod wire;

pub use self::convert::ToolOutput;
pub use self::process::{Account, Environment, Launch, Timing};
pub use self::server::CallError;
pub use self::servers::McpServers;
