//! `ryokan mcp serve`: kernels as tools of a Model Context Protocol client, on the standard streams.
//!
//! ```text
//!  client ── JSON-RPC on stdin, stdout ──▶ Handler (rmcp) ── Call ──▶ tools, resources ── Cap'n Proto ──▶ daemon
//! ```
//! The SDK's tasks may change threads, capabilities may not: a channel separates them. Each call opens its own
//! connection, so that a daemon that was restarted serves the next call.

mod access;
mod parameters;
mod resources;
mod tools;

use std::rc::Rc;
use std::sync::Arc;

use clap::Args;
use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, CustomRequest, CustomResult, ErrorData, Implementation,
    ListResourceTemplatesResult, ListResourcesResult, ListToolsResult, PaginatedRequestParams,
    ReadResourceRequestParams, ReadResourceResponse, ReadResourceResult, Resource, ServerCapabilities, ServerConfig,
};
use rmcp::service::RequestContext;
use rmcp::{RoleServer, ServerHandler, ServiceExt as _};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::context::Context;
use super::failure::Failure;
use crate::cli::names::KernelArg;
use crate::core::error::{Error, ErrorCode};
use crate::core::quantity::parse_size;
use crate::core::rights::{Right, Rights};
use access::Access;

/// Calls served at once; more wait.
const CONCURRENT_CALLS: usize = 32;
/// Calls that wait.
const WAITING_CALLS: usize = 256;

const INSTRUCTIONS: &str = "Each kernel is a durable, sandboxed session with files in /workspace and variables that \
     survive restarts. Take a checkpoint before risky work; `diff` shows what changed since, `restore` goes back, \
     `undo` takes the last restore back, `fork` tries something in a copy.";

/// `ryokan mcp serve`
#[derive(Debug, Args)]
#[command(after_help = "Configuration of a client:
  {\"mcpServers\": {\"ryokan\": {\"command\": \"ryokan\", \"args\": [\"mcp\", \"serve\"]}}}

Examples:
  ryokan mcp serve --kernel demo --rights read,execute,checkpoint,restore
  ryokan mcp serve --output-limit 16K")]
pub struct ServeArgs {
    /// Serve only this kernel and its forks; repeatable. Without it: all kernels, and new ones
    #[arg(long = "kernel", value_name = "NAME")]
    pub kernels: Vec<KernelArg>,
    /// Only these rights: read, execute, write, checkpoint, restore, fork, admin
    #[arg(long, value_name = "RIGHTS", value_delimiter = ',', value_parser = parse_right)]
    pub rights: Vec<Right>,
    /// Most text that one call returns
    #[arg(long, value_name = "SIZE", default_value = "64K", value_parser = parse_size)]
    pub output_limit: u64,
}

fn parse_right(text: &str) -> Result<Right, String> {
    Right::from_name(text).ok_or_else(|| {
        let names: Vec<&str> = Right::ALL.into_iter().map(Right::name).collect();
        format!("the rights are {}", names.join(", "))
    })
}

/// What a client asks for.
enum Request {
    /// A tool call.
    Tool(CallToolRequestParams),
    /// The list of resources.
    Resources,
    /// The content of a resource.
    Resource(String),
}

/// The answer to a request.
enum Answer {
    /// Of a tool.
    Tool(CallToolResult),
    /// The list of resources.
    Resources(Vec<Resource>),
    /// The content of a resource.
    Resource(ReadResourceResult),
}

/// A request on its way to the thread with the capabilities.
struct Call {
    request: Request,
    cancelled: CancellationToken,
    answer: oneshot::Sender<Result<Answer, ErrorData>>,
}

/// The SDK's side.
struct Handler {
    calls: mpsc::Sender<Call>,
    rights: Rights,
    is_restricted: bool,
}

impl Handler {
    async fn ask(&self, request: Request, cancelled: CancellationToken) -> Result<Answer, ErrorData> {
        let (answer, answered) = oneshot::channel();
        let gone = || ErrorData::internal_error("the server ends", None);
        self.calls.send(Call { request, cancelled, answer }).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())?
    }
}

fn unexpected() -> ErrorData {
    ErrorData::internal_error("an answer to another request", None)
}

impl ServerHandler for Handler {
    fn get_info(&self) -> ServerConfig {
        let capabilities = ServerCapabilities::builder().enable_tools().enable_resources().build();
        let mut info = ServerConfig::new(capabilities);
        info.server_info = Implementation::new("ryokan", env!("CARGO_PKG_VERSION"));
        info.instructions = Some(INSTRUCTIONS.into());
        info
    }

    async fn list_tools(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::with_all_items(tools::list(self.rights, self.is_restricted)))
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        match self.ask(Request::Tool(request), context.ct).await? {
            Answer::Tool(result) => Ok(result.into()),
            Answer::Resources(_) | Answer::Resource(_) => Err(unexpected()),
        }
    }

    async fn list_resources(
        &self,
        _: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListResourcesResult, ErrorData> {
        match self.ask(Request::Resources, context.ct).await? {
            Answer::Resources(list) => Ok(ListResourcesResult::with_all_items(list)),
            Answer::Tool(_) | Answer::Resource(_) => Err(unexpected()),
        }
    }

    async fn list_resource_templates(
        &self,
        _: Option<PaginatedRequestParams>,
        _: RequestContext<RoleServer>,
    ) -> Result<ListResourceTemplatesResult, ErrorData> {
        Ok(ListResourceTemplatesResult::with_all_items(resources::templates()))
    }

    async fn on_custom_request(
        &self,
        request: CustomRequest,
        _: RequestContext<RoleServer>,
    ) -> Result<CustomResult, ErrorData> {
        let name: String = request.method.chars().take(80).collect();
        Err(ErrorData::new(rmcp::model::ErrorCode::METHOD_NOT_FOUND, format!("there is no method {name:?}"), None))
    }

    async fn read_resource(
        &self,
        request: ReadResourceRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        match self.ask(Request::Resource(request.uri), context.ct).await? {
            Answer::Resource(result) => Ok(result.into()),
            Answer::Tool(_) | Answer::Resources(_) => Err(unexpected()),
        }
    }
}

/// Serves until the client closes standard input.
pub async fn serve(context: &Context, args: ServeArgs) -> Result<(), Failure> {
    let rights = if args.rights.is_empty() { Rights::ALL } else { args.rights.iter().copied().collect() };
    // A daemon that does not answer, or a kernel that is not there, is reported before the first call.
    let access = Access::open(Context::new(context.options.clone()), &args.kernels, rights, args.output_limit).await?;
    let (access, is_restricted) = (Rc::new(access), !args.kernels.is_empty());
    let (calls, mut waiting) = mpsc::channel::<Call>(WAITING_CALLS);
    let answering = tokio::task::spawn_local(async move {
        let room = Arc::new(Semaphore::new(CONCURRENT_CALLS));
        while let Some(call) = waiting.recv().await {
            let Ok(permit) = Arc::clone(&room).acquire_owned().await else { return };
            let access = Rc::clone(&access);
            tokio::task::spawn_local(async move {
                let answered = answer(&access, call.request, &call.cancelled).await;
                // A client that is gone needs no answer.
                let _ = call.answer.send(answered);
                drop(permit);
            });
        }
    });
    let failed = |what: String| Failure::from(Error::new(ErrorCode::InvalidArgument, what));
    let handler = Handler { calls, rights, is_restricted };
    let running = handler.serve((tokio::io::stdin(), tokio::io::stdout())).await;
    let running = running
        .map_err(|error| failed(format!("no client of the Model Context Protocol on standard input: {error}")))?;
    let ended = running.waiting().await.map_err(|error| failed(error.to_string()));
    answering.abort();
    ended.map(drop)
}

async fn answer(access: &Access, request: Request, cancelled: &CancellationToken) -> Result<Answer, ErrorData> {
    match request {
        Request::Tool(request) => tools::call(access, request, cancelled).await.map(Answer::Tool),
        Request::Resources => resources::list(access).await.map(Answer::Resources),
        Request::Resource(uri) => resources::read(access, &uri).await.map(Answer::Resource),
    }
}
