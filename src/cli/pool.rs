//! `ryokan pool`: the workers that are kept ready.

use std::time::Duration;

use clap::Args;

use super::context::Context;
use super::failure::Failure;
use super::render;

/// How often `--watch` looks.
const EVERY: Duration = Duration::from_secs(1);
/// Takes the cursor to the upper left corner and clears what is below.
const FROM_THE_TOP: &str = "\u{1b}[H\u{1b}[J";

/// `ryokan pool`
#[derive(Debug, Args)]
pub struct PoolArgs {
    /// Show it anew every second, until Ctrl-C
    #[arg(long, short)]
    pub watch: bool,
}

/// Shows the pools.
pub async fn pool(context: &Context, args: PoolArgs) -> Result<(), Failure> {
    let host = context.host().await?;
    loop {
        let pools = host.pools().await?;
        let text = match context.options.json {
            true => format!("{}\n", serde_json::json!(pools)),
            false => render::pools(&pools, context.terminal.paint),
        };
        let clear = if args.watch && context.terminal.stdout { FROM_THE_TOP } else { "" };
        context.print(&format!("{clear}{text}"))?;
        if !args.watch {
            return Ok(());
        }
        tokio::time::sleep(EVERY).await;
    }
}
