//! MCP servers, real ones: small Python programs that are honest, slow, broken and hostile in turn.

mod http;
mod kit;
mod life;
mod stdio;
