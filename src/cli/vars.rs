//! Variables: `ryokan vars NAME`, with `get` and `set`.

use std::io::Read;

use clap::{Args, Subcommand};

use super::context::Context;
use super::failure::Failure;
use super::names::KernelArg;
use super::{json, render};
use crate::core::limits;
use crate::core::value::Value;

/// `ryokan vars`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan vars demo
  ryokan vars demo get rows
  ryokan vars demo set limit 42
  ryokan vars demo set title '\"a text has quotes\"'
  ryokan vars demo set rows - < rows.json")]
pub struct VarsArgs {
    /// Name or id of the kernel
    pub name: KernelArg,
    /// Print names only
    #[arg(short, long)]
    pub quiet: bool,
    /// The action; without one, the variables are listed.
    #[command(subcommand)]
    pub action: Option<VarAction>,
}

/// Actions on one variable.
#[derive(Debug, Subcommand)]
pub enum VarAction {
    /// Print a variable
    Get {
        /// Name of the variable
        var: String,
    },
    /// Set a variable
    Set {
        /// Name of the variable
        var: String,
        /// Its value as JSON; - reads standard input
        #[arg(value_name = "JSON", allow_negative_numbers = true)]
        value: String,
    },
}

/// Lists variables, or prints or sets one.
pub async fn vars(context: &Context, args: VarsArgs) -> Result<(), Failure> {
    match args.action {
        None => list(context, &args.name, args.quiet).await,
        Some(VarAction::Get { var }) => get(context, &args.name, &var).await,
        Some(VarAction::Set { var, value }) => set(context, &args.name, &var, &value).await,
    }
}

async fn list(context: &Context, name: &str, quiet: bool) -> Result<(), Failure> {
    let (kernel, _) = context.kernel(name).await?;
    let vars = kernel.vars().await?;
    if quiet && !context.options.json {
        return context.print(&vars.iter().map(|var| format!("{}\n", render::plain(&var.name))).collect::<String>());
    }
    context.show(|| json::list(&vars), || render::vars(&vars, context.terminal.paint))
}

/// Prints a variable: text unquoted, everything else as JSON.
async fn get(context: &Context, name: &str, var: &str) -> Result<(), Failure> {
    let (kernel, _) = context.kernel(name).await?;
    let value = kernel.var(var).await?;
    context.show(
        || json::var(var, &value),
        || match &value {
            Value::String(text) | Value::BigInt(text) => format!("{text}\n"),
            other => format!("{:#}\n", other.to_plain_json()),
        },
    )
}

async fn set(context: &Context, name: &str, var: &str, text: &str) -> Result<(), Failure> {
    let value = value(text)?;
    let (kernel, _) = context.kernel(name).await?;
    kernel.put_var(var, &value, 0).await?;
    if context.options.json {
        context.print_json(&json::var(var, &value))?;
    }
    Ok(())
}

/// Reads a value as JSON from an argument, or from standard input for `-`.
pub fn value(text: &str) -> Result<Value, Failure> {
    let mut read = String::new();
    let text = match text {
        "-" => {
            let stdin = std::io::stdin().lock().take(limits::VALUE_BYTES as u64 + 1).read_to_string(&mut read);
            stdin.map_err(|e| Failure::usage(format!("standard input: {e}"), "pass the value as JSON"))?;
            read.as_str()
        }
        text => text,
    };
    Value::from_plain_text(text)
        .map_err(|e| Failure::usage(format!("the value is not JSON: {e}"), "put text in quotes: '\"text\"'"))
}
