//! Completions for shells: commands and options from the grammar, and for bash, fish and zsh the names of kernels, which the
//! daemon is asked for, if one runs.

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
    let script = String::from_utf8_lossy(&script).into_owned();
    context.print(&match args.shell {
        Shell::Bash => with_kernels_in_bash(&script),
        Shell::Fish => with_kernels_in_fish(&script),
        Shell::Zsh => with_kernels_in_zsh(&script),
        // Closed by clap_complete, not by us: what there is of the grammar alone.
        _ => script,
    })
}

/// Commands whose first argument is a kernel, with the command that they belong to, if any.
fn of_kernels() -> Vec<(Option<String>, String)> {
    let asks = |command: &clap::Command| {
        command.get_positionals().next().is_some_and(|first| {
            let help = first.get_help().map(ToString::to_string).unwrap_or_default();
            ["Name or id of the kernel", "Names or ids of the kernels", "Only of this kernel"].contains(&help.as_str())
        })
    };
    let mut found = Vec::new();
    for command in Cli::command().get_subcommands() {
        if asks(command) {
            found.push((None, command.get_name().to_owned()));
        }
        let below = command.get_subcommands().filter(|below| asks(below));
        found.extend(below.map(|below| (Some(command.get_name().to_owned()), below.get_name().to_owned())));
    }
    found
}

fn with_kernels_in_bash(script: &str) -> String {
    let mut names: Vec<String> = of_kernels().into_iter().map(|(_, name)| name).collect();
    names.sort();
    names.dedup();
    let function = format!(
        r#"
_ryokan_or_kernels() {{
    _ryokan "$@"
    local cur="${{COMP_WORDS[COMP_CWORD]}}"
    case "${{COMP_WORDS[COMP_CWORD-1]}}" in
        {})
            [[ $cur == -* ]] ||
                COMPREPLY=( $(compgen -W "$("${{COMP_WORDS[0]}}" --no-autostart ls --quiet 2>/dev/null)" -- "$cur") )
            ;;
    esac
}}
"#,
        names.join("|")
    );
    script.replace("complete -F _ryokan ", "complete -F _ryokan_or_kernels ") + &function
}

fn with_kernels_in_fish(script: &str) -> String {
    let mut script = script.to_owned();
    for (above, name) in of_kernels() {
        let seen = match above {
            None => format!("__fish_ryokan_using_subcommand {name}"),
            Some(above) => format!("__fish_ryokan_using_subcommand {above}; and __fish_seen_subcommand_from {name}"),
        };
        let kernels = "(ryokan --no-autostart ls --quiet 2>/dev/null)";
        script.push_str(&format!("complete -c ryokan -n \"{seen}\" -a \"{kernels}\" -d 'Kernel'\n"));
    }
    script
}

fn with_kernels_in_zsh(script: &str) -> String {
    let function = r#"_ryokan_kernels() {
    local -a kernels
    kernels=(${(f)"$(ryokan --no-autostart ls --quiet 2>/dev/null)"})
    compadd -a kernels
}

if [ "$funcstack[1]""#;
    let asked = ["of the kernel", "of the kernels", "Only of this kernel"];
    let named = asked.iter().fold(script.to_owned(), |script, help| {
        script.replace(&format!("{help}:_default"), &format!("{help}:_ryokan_kernels"))
    });
    named.replacen("if [ \"$funcstack[1]\"", function, 1)
}
