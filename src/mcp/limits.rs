//! Limits of MCP servers. `MCP_SERVERS`, `MCP_CALL` and `MCP_START` are in `core::limits`.

use std::time::Duration;

use crate::core::limits;

/// One message of a server, bytes: a value of full size plus its envelope.
pub const MESSAGE_BYTES: usize = limits::VALUE_BYTES + (64 << 10);
/// Tools of one server. Further ones are left out, which its `McpInfo` reports.
pub const TOOLS: usize = 512;
/// Pages of a server's tool list.
pub const TOOL_PAGES: usize = 64;
/// JSON schema of one tool, bytes. A tool with a larger schema is left out.
pub const SCHEMA_BYTES: usize = 64 << 10;
/// JSON schemas of all tools of one server, bytes.
pub const SCHEMAS_BYTES: usize = 4 << 20;
/// Description of one tool, bytes; longer ones are cut.
pub const DESCRIPTION_BYTES: usize = 4 << 10;
/// Simultaneous calls of one kernel to one server; further calls wait within their own time limit.
pub const CALLS_IN_FLIGHT: usize = 16;
/// Messages in flight to one server; more mean that the server does not read.
pub const SENDS_IN_FLIGHT: usize = 64;
/// Time for a stdio server to read a message.
pub const SEND: Duration = Duration::from_secs(30);
/// Time for an HTTP server to accept a connection.
pub const CONNECT: Duration = Duration::from_secs(10);
/// Redirects per request.
pub const REDIRECTS: usize = 5;
/// Stored end of a server's standard error, bytes.
pub const STDERR_TAIL_BYTES: usize = 4 << 10;
/// Longest server text in our error messages, bytes.
pub const ERROR_BYTES: usize = 2 << 10;
/// Consecutive timed-out calls after which the server counts as dead.
pub const TIMEOUTS_IN_A_ROW: u32 = 3;
/// First delay before restarting a dead server; doubles each time.
pub const BACKOFF_FIRST: Duration = Duration::from_millis(100);
/// Longest such delay.
pub const BACKOFF_MAX: Duration = Duration::from_secs(60);
/// After this uptime a server restarts with the first delay again.
pub const STABLE: Duration = Duration::from_secs(60);
/// Time between closing a server's input and killing its process group.
pub const STOP_GRACE: Duration = Duration::from_secs(2);
/// Shortest interval between reads of the tool list.
pub const REFRESH_PAUSE: Duration = Duration::from_millis(250);
