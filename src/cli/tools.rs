//! Tools: listing them, and calling one as an execution.

use clap::{Args, Subcommand};

use super::context::Context;
use super::drive::Signals;
use super::exec::Shown;
use super::failure::Failure;
use super::names::KernelArg;
use super::spec::parse_millis;
use super::{json, render, vars};
use crate::core::exec::{ExecRequest, Work};
use crate::core::value::Value;

/// `ryokan tools`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan tools demo
  ryokan tools demo call wc '[\"-l\", \"data.csv\"]'
  ryokan tools demo call weather__forecast '{\"city\": \"Kyoto\"}'")]
pub struct ToolsArgs {
    /// Name or id of the kernel
    pub name: KernelArg,
    /// The action; without one, the tools are listed.
    #[command(subcommand)]
    pub action: Option<ToolAction>,
}

/// Actions on tools.
#[derive(Debug, Subcommand)]
pub enum ToolAction {
    /// Call a tool and exit with its exit code
    Call {
        /// Name of the tool
        tool: String,
        /// Arguments as an object (named) or array (positional); - reads standard input
        #[arg(value_name = "JSON", default_value = "{}")]
        args: String,
        /// Time limit, such as 90s; 0s for none
        #[arg(long, value_name = "TIME", value_parser = parse_millis)]
        timeout: Option<u64>,
    },
}

/// Lists tools or calls one.
pub async fn tools(context: &Context, args: ToolsArgs) -> Result<(), Failure> {
    match args.action {
        None => {
            let (kernel, _) = context.kernel(&args.name).await?;
            let tools = kernel.tools().await?;
            context.show(|| json::tools(&tools), || render::tools(&tools, context.terminal.paint))
        }
        Some(ToolAction::Call { tool, args: given, timeout }) => {
            let given = vars::value(&given)?;
            if !matches!(given, Value::Object(_) | Value::Array(_)) {
                return Err(Failure::usage(
                    "the arguments must be an object or an array",
                    "for example '{\"city\": \"Kyoto\"}'",
                ));
            }
            let request = ExecRequest {
                what: Work::Call { name: tool, args: given },
                timeout_ms: timeout.unwrap_or(0),
                ..ExecRequest::default()
            };
            let mut signals = Signals::catch()?;
            let (kernel, info) = context.kernel(&args.name).await?;
            let execution = kernel.run(&request).await?;
            let shown = Shown {
                context,
                kernel: &kernel,
                name: &args.name,
                engine: info.spec.engine,
                ephemeral: false,
                runs: super::drive::Runs::Code,
                offset: 0,
                save_display: None,
            };
            shown.execution(&execution, false, &mut signals).await
        }
    }
}
