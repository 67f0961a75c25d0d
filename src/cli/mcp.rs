//! MCP servers of a kernel: add, ls, rm. Kernels as a server: serve.

use clap::{Args, Subcommand};

use super::args::NameArgs;
use super::context::Context;
use super::failure::Failure;
use super::mcp_serve::{ServeArgs, serve};
use super::names::KernelArg;
use super::spec::parse_pair;
use super::{json, render};
use crate::core::info::McpTransport;
use crate::rpc::client::KernelClient;

/// `ryokan mcp`
#[derive(Debug, Args)]
pub struct McpArgs {
    /// The action.
    #[command(subcommand)]
    pub action: McpAction,
}

/// Actions on MCP servers.
#[derive(Debug, Subcommand)]
pub enum McpAction {
    /// Add a server of the configuration's allow-list
    Add(AddArgs),
    /// Serve kernels to a client of the Model Context Protocol, on the standard streams
    Serve(ServeArgs),
    /// List a kernel's servers
    Ls(NameArgs),
    /// Remove a server
    Rm {
        /// Name or id of the kernel
        name: KernelArg,
        /// Name of the server
        server: String,
    },
}

/// `ryokan mcp add`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan mcp add demo files -- mcp-server-filesystem /data
  ryokan mcp add demo weather --url https://weather.example/mcp --header 'Authorization=Bearer …'")]
pub struct AddArgs {
    /// Name or id of the kernel
    pub name: KernelArg,
    /// Name of the server: the prefix of its tools
    pub server: String,
    /// URL of a streamable HTTP server
    #[arg(long, value_name = "URL", conflicts_with_all = ["command", "env"])]
    pub url: Option<String>,
    /// Header of every request; repeatable
    #[arg(long = "header", value_name = "K=V", value_parser = parse_pair, conflicts_with = "command")]
    pub headers: Vec<(String, String)>,
    /// Environment variable of the program; repeatable
    #[arg(long = "env", value_name = "K=V", value_parser = parse_pair)]
    pub env: Vec<(String, String)>,
    /// The program and its arguments; without them and --url, the configured server of that name
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

impl AddArgs {
    fn transport(&self) -> Result<McpTransport, Failure> {
        match (&self.url, self.command.split_first()) {
            (Some(url), _) => Ok(McpTransport::Http { url: url.clone(), headers: self.headers.clone() }),
            (None, Some((command, args))) => {
                Ok(McpTransport::Stdio { command: command.clone(), args: args.to_vec(), env: self.env.clone() })
            }
            (None, None) => Ok(McpTransport::Stdio { command: String::new(), args: Vec::new(), env: Vec::new() }),
        }
    }
}

/// Changes a kernel's MCP servers, and shows the resulting list.
pub async fn mcp(context: &Context, args: McpArgs) -> Result<(), Failure> {
    match args.action {
        McpAction::Serve(args) => serve(context, args).await,
        McpAction::Add(add) => {
            let transport = add.transport()?;
            let (kernel, _) = context.kernel(&add.name).await?;
            kernel.register_mcp(&add.server, &transport, 0).await?;
            list(context, kernel).await
        }
        McpAction::Ls(NameArgs { name }) => list(context, context.kernel(&name).await?.0).await,
        McpAction::Rm { name, server } => {
            let (kernel, _) = context.kernel(&name).await?;
            kernel.unregister_mcp(&server, 0).await?;
            list(context, kernel).await
        }
    }
}

async fn list(context: &Context, kernel: KernelClient) -> Result<(), Failure> {
    let servers = kernel.mcp_servers().await?;
    context.show(|| json::list(&servers), || render::mcp_servers(&servers, context.terminal.paint))
}
