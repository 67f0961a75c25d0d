//! Bounds that concern MCP servers only. The others (`MCP_SERVERS`, `MCP_CALL`, `MCP_START`) are in `core::limits`.

use std::time::Duration;

use crate::core::limits;

/// One message of a server, bytes: a value of full size and what is around it.
pub const MESSAGE_BYTES: usize = limits::VALUE_BYTES + (64 << 10);
/// Tools of one server; more are left out, and its `McpInfo` says so.
pub const TOOLS: usize = 512;
/// Pages in which a server may list its tools.
pub const TOOL_PAGES: usize = 64;
/// JSON schema of one tool, bytes; a tool with a larger one is left out.
pub const SCHEMA_BYTES: usize = 64 << 10;
/// JSON schemas of all tools of one server, bytes.
pub const SCHEMAS_BYTES: usize = 4 << 20;
/// Description of one tool, bytes; more is cut.
pub const DESCRIPTION_BYTES: usize = 4 << 10;
/// Calls of one kernel to one server at once; more wait within their own time.
pub const CALLS_IN_FLIGHT: usize = 16;
/// Messages on their way to one server; more means that it does not read.
pub const SENDS_IN_FLIGHT: usize = 64;
/// A stdio server must have read a message within this.
pub const SEND: Duration = Duration::from_secs(30);
/// An HTTP server must have accepted a connection within this.
pub const CONNECT: Duration = Duration::from_secs(10);
/// Redirects of one request.
pub const REDIRECTS: usize = 5;
/// What is kept of a server's standard error, bytes.
pub const STDERR_TAIL_BYTES: usize = 4 << 10;
/// Longest text of a server inside one of our error messages, bytes.
pub const ERROR_BYTES: usize = 2 << 10;
/// Calls in a row that may run out of time before the server is taken for dead.
pub const TIMEOUTS_IN_A_ROW: u32 = 3;
/// First pause before a dead server is started again; doubles each time.
pub const BACKOFF_FIRST: Duration = Duration::from_millis(100);
/// Longest such pause.
pub const BACKOFF_MAX: Duration = Duration::from_secs(60);
/// A server that lived this long starts again with the first pause.
pub const STABLE: Duration = Duration::from_secs(60);
/// A server that is to end has this long after its input is closed, then its process group is killed.
pub const STOP_GRACE: Duration = Duration::from_secs(2);
/// The list of tools is read again at most this often.
pub const REFRESH_PAUSE: Duration = Duration::from_millis(250);
