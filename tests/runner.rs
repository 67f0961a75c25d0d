//! The one runner of every test that needs more than the library: one folder per behaviour.

mod mcp;
