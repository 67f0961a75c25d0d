//! Shell completions: commands and options from the grammar.
//!
//! For bash, fish and zsh also kernel names, which a running daemon provides.

use clap::Args;
use clap_complete::Shell;

use super::args;
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
pub fn completions(context: &Context, given: CompletionsArgs) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(given.shell, &mut args::command(), "ryokan", &mut script);
    let script = String::from_utf8_lossy(&script).into_owned();
    context.print(&match given.shell {
        Shell::Bash => with_kernels_in_bash(&script),
        Shell::Fish => with_kernels_in_fish(&script),
        Shell::Zsh => with_kernels_in_zsh(&script),
        // clap_complete's Shell is not exhaustive: the others complete the grammar only.
        _ => script,
    })
}

/// Help texts of the arguments that are kernels.
const KERNEL_ARGUMENTS: [&str; 3] =
    ["Name or id of the kernel", "Names or ids of the kernels", "Only events of this kernel"];

/// Commands whose first argument is a kernel, each as its path of subcommands.
fn kernel_commands() -> Vec<Vec<String>> {
    fn collect(command: &clap::Command, path: &[String], found: &mut Vec<Vec<String>>) {
        for below in command.get_subcommands() {
            let path = [path, &[below.get_name().to_owned()]].concat();
            let first = below.get_positionals().next().and_then(clap::Arg::get_help).map(ToString::to_string);
            if first.is_some_and(|help| KERNEL_ARGUMENTS.contains(&help.as_str())) {
                found.push(path.clone());
            }
            collect(below, &path, found);
        }
    }
    let mut found = Vec::new();
    collect(&args::command(), &[], &mut found);
    found
}

fn with_kernels_in_bash(script: &str) -> String {
    let mut names: Vec<String> = kernel_commands().into_iter().filter_map(|mut path| path.pop()).collect();
    names.sort();
    names.dedup();
    let function = format!(
        r#"
_ryokan_with_kernels() {{
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
    script.replace("complete -F _ryokan ", "complete -F _ryokan_with_kernels ") + &function
}

fn with_kernels_in_fish(script: &str) -> String {
    let mut script = script.to_owned();
    for path in kernel_commands() {
        let mut seen = format!("__fish_ryokan_using_subcommand {}", path[0]);
        for below in &path[1..] {
            seen.push_str(&format!("; and __fish_seen_subcommand_from {below}"));
        }
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
    let named = KERNEL_ARGUMENTS.iter().fold(script.to_owned(), |script, help| {
        script.replace(&format!("{help}:_default"), &format!("{help}:_ryokan_kernels"))
    });
    named.replacen("if [ \"$funcstack[1]\"", function, 1)
}
