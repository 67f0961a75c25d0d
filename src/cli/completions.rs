//! Completions for shells.

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use super::args::Cli;
use super::context::Context;
use super::failure::Failure;

/// `ryokan completions`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan completions bash > ~/.local/share/bash-completion/completions/ryokan
  ryokan completions fish > ~/.config/fish/completions/ryokan.fish
  ryokan completions zsh > ~/.zfunc/_ryokan")]
pub struct CompletionsArgs {
    /// The shell: bash, elvish, fish, powershell or zsh
    #[arg(hide_possible_values = true)]
    pub shell: Shell,
}

/// Prints a completion script.
pub fn completions(context: &Context, args: CompletionsArgs) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "ryokan", &mut script);
    context.print(&String::from_utf8_lossy(&script))
}
