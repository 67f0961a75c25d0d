//! Variables: vars, get, set.

use std::io::Read;

use clap::Args;

use super::args::NameArgs;
use super::context::Context;
use super::failure::Failure;
use super::{json, render};
use crate::core::limits;
use crate::core::value::Value;

/// `ryokan get`
#[derive(Debug, Args)]
pub struct GetArgs {
    /// Name or id of the kernel
    pub name: String,
    /// Name of the variable
    pub var: String,
}

/// `ryokan set`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan set demo limit 42
  ryokan set demo title '\"a text has quotes\"'
  ryokan set demo point '{\"x\": 1, \"y\": 2.5}'
  ryokan set demo rows - < rows.json")]
pub struct SetArgs {
    /// Name or id of the kernel
    pub name: String,
    /// Name of the variable
    pub var: String,
    /// Its value as JSON; - reads it from standard input
    #[arg(value_name = "JSON", allow_negative_numbers = true)]
    pub value: String,
}

/// Lists variables.
pub async fn vars(context: &Context, args: NameArgs) -> Result<(), Failure> {
    let (kernel, _) = context.kernel(&args.name).await?;
    let vars = kernel.vars().await?;
    context.show(|| json::list(&vars), || render::vars(&vars, context.terminal.paint))
}

/// Prints a variable: text as it is, everything else as JSON.
pub async fn get(context: &Context, args: GetArgs) -> Result<(), Failure> {
    let (kernel, _) = context.kernel(&args.name).await?;
    let value = kernel.var(&args.var).await?;
    context.show(
        || json::var(&args.var, &value),
        || match &value {
            Value::String(text) | Value::BigInt(text) => format!("{text}\n"),
            other => format!("{:#}\n", other.to_plain_json()),
        },
    )
}

/// Sets a variable.
pub async fn set(context: &Context, args: SetArgs) -> Result<(), Failure> {
    let value = value(&args.value)?;
    let (kernel, _) = context.kernel(&args.name).await?;
    kernel.put_var(&args.var, &value, 0).await?;
    if context.options.json {
        context.print_json(&json::var(&args.var, &value))?;
    }
    Ok(())
}

/// Reads a value as JSON from an argument, or from standard input for `-`.
pub fn value(text: &str) -> Result<Value, Failure> {
    let mut read = String::new();
    let text = match text {
        "-" => {
            let stdin = std::io::stdin().lock().take(limits::VALUE_BYTES as u64 + 1).read_to_string(&mut read);
            stdin.map_err(|e| Failure::usage(format!("standard input: {e}"), "a value is JSON"))?;
            read.as_str()
        }
        text => text,
    };
    Value::from_plain_text(text)
        .map_err(|e| Failure::usage(format!("the value is not JSON: {e}"), "a text has quotes: '\"text\"'"))
}
