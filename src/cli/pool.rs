//! `ryokan pool`: the pools of warm workers.

use std::time::Duration;

use clap::Args;

use super::context::Context;
use super::failure::Failure;
use super::render;

/// Interval of `--watch`.
const INTERVAL: Duration = Duration::from_secs(1);
/// Moves the cursor to the upper left corner and clears the screen.
const CLEAR_SCREEN: &str = "\u{1b}[H\u{1b}[J";

/// `ryokan pool`
#[derive(Debug, Args)]
pub struct PoolArgs {
    /// Refresh every second until Ctrl-C
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
        let clear = if args.watch && context.terminal.stdout { CLEAR_SCREEN } else { "" };
        context.print(&format!("{clear}{text}"))?;
        if !args.watch {
            return Ok(());
        }
        tokio::time::sleep(INTERVAL).await;
    }
}
