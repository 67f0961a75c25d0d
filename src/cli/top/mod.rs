//! `ryokan top`: the activity of a daemon on one screen.
//!
//! ```text
//! keyboard ─┐
//! asker ────┼─▶ shell ─▶ Model::step(now, input) ─▶ actions ─▶ asker, screen
//! signals ──┘                     └─▶ view::draw(model) ─▶ cells ─▶ screen
//! ```
//! Model and view are pure. The shell owns the clock, the terminal and the connection, and makes no
//! decisions.

mod asker;
mod exchange;
#[cfg(test)]
mod fixtures;
mod key;
mod keyboard;
mod layout;
mod list;
mod meter;
mod mode;
mod model;
#[cfg(test)]
mod model_tests;
mod news;
mod screen;
mod shell;
mod snapshot;
mod view;

use clap::Args;

use super::context::Context;
use super::failure::Failure;

/// `ryokan top`
#[derive(Debug, Args)]
#[command(
    after_help = "Keys: arrows move and sort, / filters, Enter inspects, s starts, x stops, c takes a checkpoint,
i interrupts, ? lists all keys, q leaves. --json prints one snapshot as JSON."
)]
pub struct TopArgs {
    /// Print one snapshot as text and leave
    #[arg(long)]
    pub once: bool,
}

/// Shows kernels and pools until the user quits.
pub async fn top(context: &Context, args: TopArgs) -> Result<(), Failure> {
    if args.once || context.options.json {
        let snapshot = snapshot::take(&context.host().await?).await?;
        return context.show(|| snapshot.json(), || snapshot.text(context.terminal.paint));
    }
    let is_dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
    if !context.terminal.stdout || is_dumb {
        return Err(Failure::usage(
            "top needs a terminal to draw on",
            "for a list: ryokan ls, ryokan pool, or ryokan top --once",
        ));
    }
    shell::run(context).await
}
