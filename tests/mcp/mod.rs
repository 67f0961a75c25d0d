//! Real MCP servers: small Python programs that are honest, slow, broken and hostile.

mod fixture;
mod http;
mod lifecycle;
mod serve;
mod stdio;
