//! The daemon's client side of the Model Context Protocol.
//!
//! MCP servers run outside every kernel's sandbox, under the daemon, and only those that the configuration allows
//! ([`allow`]). A kernel reaches their tools through its control channel; it never reaches a server itself.

pub mod allow;
