//! MCP servers, real ones: small Python programs that are honest, slow, broken and hostile in turn.

mod fixture;
mod http;
mod lifecycle;
mod stdio;
