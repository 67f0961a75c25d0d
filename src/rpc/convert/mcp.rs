//! MCP servers: transports and states.

use super::text::{bounded, count, malformed, read_name, read_pairs, read_text, read_text_list, unknown};
use super::text::{write_pairs, write_text_list};
use crate::core::error::{Error, Result};
use crate::core::info::{McpInfo, McpTransport};
use crate::core::limits;
use crate::rpc::schema::ryokan_capnp as wire;

/// Reads the transport of an MCP server.
///
/// # Errors
/// `invalidArgument` for malformed, oversized or empty data.
pub fn read_mcp_transport(reader: wire::mcp_transport::Reader<'_>) -> Result<McpTransport> {
    use wire::mcp_transport::Which;
    let wrong = |e| malformed("transport", e);
    match reader.which().map_err(|n| unknown("MCP transport", n))? {
        Which::Stdio(stdio) => {
            let stdio = stdio.map_err(wrong)?;
            let args = read_text_list(stdio.get_args(), "arguments", limits::MCP_ITEMS)?;
            if args.iter().any(|arg| arg.contains('\0')) {
                return Err(Error::invalid("argument of an MCP server holds a NUL byte"));
            }
            // An empty command selects the configured server of that name.
            let command = read_name(stdio.get_command(), "command of an MCP server")?;
            Ok(McpTransport::Stdio {
                command,
                args,
                env: read_pairs(stdio.get_env(), "environment", limits::MCP_ITEMS)?,
            })
        }
        Which::Http(http) => {
            let http = http.map_err(wrong)?;
            let url = read_name(http.get_base_url(), "URL of an MCP server")?;
            if url.is_empty() {
                return Err(Error::invalid("MCP server without a URL"));
            }
            Ok(McpTransport::Http { url, headers: read_pairs(http.get_headers(), "headers", limits::MCP_ITEMS)? })
        }
    }
}

/// Writes the transport of an MCP server.
pub fn write_mcp_transport(builder: wire::mcp_transport::Builder<'_>, transport: &McpTransport) {
    match transport {
        McpTransport::Stdio { command, args, env } => {
            let mut stdio = builder.init_stdio();
            stdio.set_command(command.as_str());
            write_text_list(stdio.reborrow().init_args(count(args.len())), args);
            write_pairs(stdio.init_env(count(env.len())), env);
        }
        McpTransport::Http { url, headers } => {
            let mut http = builder.init_http();
            http.set_base_url(url.as_str());
            write_pairs(http.init_headers(count(headers.len())), headers);
        }
    }
}

/// Reads a kernel's MCP servers.
///
/// # Errors
/// `invalidArgument` for malformed data and for more than [`limits::MCP_ITEMS`].
pub fn read_mcp_servers(
    reader: capnp::Result<capnp::struct_list::Reader<'_, wire::mcp_info::Owned>>,
) -> Result<Vec<McpInfo>> {
    let list = reader.map_err(|e| malformed("MCP servers", e))?;
    bounded(list.len(), "MCP servers", limits::MCP_ITEMS)?;
    list.iter().map(read_mcp_info).collect()
}

/// Reads the state of an MCP server.
///
/// # Errors
/// `invalidArgument` for malformed data.
pub fn read_mcp_info(reader: wire::mcp_info::Reader<'_>) -> Result<McpInfo> {
    Ok(McpInfo {
        name: read_name(reader.get_name(), "name of an MCP server")?,
        state: read_name(reader.get_state(), "state of an MCP server")?,
        tools: reader.get_tools(),
        error: read_text(reader.get_error(), "error of an MCP server")?,
    })
}

/// Writes the state of an MCP server.
pub fn write_mcp_info(mut builder: wire::mcp_info::Builder<'_>, server: &McpInfo) {
    builder.set_name(server.name.as_str());
    builder.set_state(server.state.as_str());
    builder.set_tools(server.tools);
    builder.set_error(server.error.as_str());
}

#[cfg(test)]
#[expect(clippy::unit_arg, reason = "`infallible` turns a writer that cannot fail into one that the checks take")]
mod tests {
    use super::*;
    use crate::rpc::convert::testing::{any_transport, check_round_trip, infallible};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn mcp_transport_round_trips(transport in any_transport()) {
            check_round_trip::<wire::mcp_transport::Owned, _>(
                &transport, |b, t| infallible(write_mcp_transport(b, t)), read_mcp_transport)?;
        }

        #[test]
        fn mcp_info_round_trips((name, state, tools, error) in ("[^\0]{0,20}", "[a-z]{0,9}", any::<u32>(), ".*")) {
            let server = McpInfo { name, state, tools, error };
            check_round_trip::<wire::mcp_info::Owned, _>(
                &server, |b, s| infallible(write_mcp_info(b, s)), read_mcp_info)?;
        }
    }

    #[test]
    fn empty_mcp_url_is_refused() {
        let mut message = capnp::message::Builder::new_default();
        let mut transport = message.init_root::<wire::mcp_transport::Builder<'_>>();
        transport.reborrow().init_stdio();
        let by_name = read_mcp_transport(transport.reborrow().into_reader());
        assert!(
            matches!(by_name, Ok(McpTransport::Stdio { ref command, .. }) if command.is_empty()),
            "no command asks for the configured server: {by_name:?}"
        );
        transport.reborrow().init_http();
        assert!(read_mcp_transport(transport.into_reader()).is_err());
    }
}
