//! The daemon's client side of the Model Context Protocol.
//!
//! MCP servers run outside every sandbox, under the daemon, and only as the configuration allows
//! ([`allow`]). A kernel reaches their tools through its control channel, never a server itself.
//!
//! ```text
//! servers.rs   one kernel's servers: register, call, list
//!    └ server.rs    one server's life: connect, serve, back off, connect again
//!        ├ connect.rs    stdio or HTTP, by rmcp
//!        │   ├ process.rs    the child, its process group, its last output
//!        │   └ wire.rs       what a hostile server may not do to us
//!        ├ tools.rs      the bounded list of its tools
//!        └ convert.rs    values there and back
//! ```
//! Servers are untrusted: every message, list, queue and wait has a bound (`limits.rs`), and a
//! server can at most make its own calls fail.

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
