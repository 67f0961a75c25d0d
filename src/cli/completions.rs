//! Shell completions: commands and options from the grammar.
//!
//! For bash, fish and zsh also names of kernels, of their checkpoints and variables, numbers of their processes, names
//! of groups and of images, which a running daemon provides.

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
const KERNEL_ARGUMENTS: [&str; 4] = [
    "Name or id of the kernel",
    "Names or ids of the kernels",
    "Only events of this kernel",
    "Name of a kernel or a group",
];

/// Help texts of the arguments that are groups.
const GROUP_ARGUMENTS: [&str; 1] = ["Name of the group"];

/// Help texts of the arguments that are images.
const IMAGE_ARGUMENTS: [&str; 2] =
    ["Its version, or the first digits", "Its version, or the first digits; the newest by default"];

/// Options that are images.
const IMAGE_OPTION: &str = "image";

/// Commands whose second argument is a process of the kernel.
const PROCESS_COMMANDS: [&str; 2] = ["interrupt", "kill"];

/// Value names of arguments that are checkpoints.
const CHECKPOINT_VALUES: [&str; 3] = ["REF", "A", "B"];

fn is_checkpoint(arg: &clap::Arg) -> bool {
    let names = arg.get_value_names().unwrap_or_default();
    names.iter().any(|name| CHECKPOINT_VALUES.contains(&name.as_str()))
}

/// Commands with a kernel and then a checkpoint as arguments.
fn checkpoint_commands() -> Vec<String> {
    let takes_one = |command: &&clap::Command| command.get_positionals().nth(1).is_some_and(is_checkpoint);
    args::command().get_subcommands().filter(takes_one).map(|command| command.get_name().to_owned()).collect()
}

/// Commands with a kernel as argument and options that are checkpoints: each command with these options.
fn checkpoint_options() -> Vec<(String, Vec<String>)> {
    let options = |command: &clap::Command| {
        let named = command.get_opts().filter(|arg| is_checkpoint(arg));
        named.filter_map(|arg| arg.get_long().map(|long| format!("--{long}"))).collect::<Vec<_>>()
    };
    let all = args::command();
    let found = all.get_subcommands().map(|command| (command.get_name().to_owned(), options(command)));
    found.filter(|(_, options)| !options.is_empty()).collect()
}

/// Commands whose first argument has one of these help texts, each as its path of subcommands.
fn commands_with(helps: &[&str]) -> Vec<Vec<String>> {
    fn collect(command: &clap::Command, helps: &[&str], path: &[String], found: &mut Vec<Vec<String>>) {
        for below in command.get_subcommands() {
            let path = [path, &[below.get_name().to_owned()]].concat();
            let first = below.get_positionals().next().and_then(clap::Arg::get_help).map(ToString::to_string);
            if first.is_some_and(|help| helps.contains(&help.as_str())) {
                found.push(path.clone());
            }
            collect(below, helps, &path, found);
        }
    }
    let mut found = Vec::new();
    collect(&args::command(), helps, &[], &mut found);
    found
}

fn with_kernels_in_bash(script: &str) -> String {
    let mut names: Vec<String> =
        commands_with(&KERNEL_ARGUMENTS).into_iter().filter_map(|mut path| path.pop()).collect();
    names.sort();
    names.dedup();
    let function = format!(
        r#"
# Lines of a command that begin with the present word. They are data: `compgen -W` would expand them.
_ryokan_lines() {{
    local line cur="${{COMP_WORDS[COMP_CWORD]}}"
    COMPREPLY=()
    while IFS= read -r line; do
        [[ $line == "$cur"* ]] && COMPREPLY+=("$line")
    done < <("${{COMP_WORDS[0]}}" --no-autostart "$@" --quiet 2>/dev/null)
}}

_ryokan_with_kernels() {{
    _ryokan "$@"
    local cur="${{COMP_WORDS[COMP_CWORD]}}" last="${{COMP_WORDS[COMP_CWORD-1]}}"
    [[ $cur == -* ]] && return
    # The command so far, without the present word.
    case "${{COMP_WORDS[*]:1:COMP_CWORD-1}}" in
        {})
            _ryokan_lines group show
            return
            ;;
        {})
            _ryokan_lines images list
            return
            ;;
    esac
    # Other commands named get have a kernel next.
    case "${{COMP_WORDS[1]}} $COMP_CWORD $last" in
        "vars 4 get"|"vars 4 set")
            _ryokan_lines vars "${{COMP_WORDS[2]}}"
            return
            ;;
    esac
    case "$last" in
        {})
            _ryokan_lines ls
            return
            ;;
    esac
    # ryokan COMMAND NAME REF, and ryokan COMMAND NAME … --option REF
    case "${{COMP_WORDS[1]}} $COMP_CWORD $last" in
        {})
            _ryokan_lines log "${{COMP_WORDS[2]}}"
            ;;
        {}|"exec "*" --attach")
            _ryokan_lines ps "${{COMP_WORDS[2]}}"
            ;;
    esac
}}
"#,
        whole_commands(&GROUP_ARGUMENTS).join("|"),
        whole_commands(&IMAGE_ARGUMENTS)
            .into_iter()
            .chain([format!("*\" --{IMAGE_OPTION}\"")])
            .collect::<Vec<_>>()
            .join("|"),
        names.join("|"),
        checkpoint_patterns().join("|"),
        PROCESS_COMMANDS.map(|command| format!("\"{command} 3 \"*")).join("|")
    );
    script.replace("complete -F _ryokan ", "complete -F _ryokan_with_kernels ") + &function
}

/// Commands whose first argument has one of these help texts, as bash's patterns.
fn whole_commands(helps: &[&str]) -> Vec<String> {
    commands_with(helps).into_iter().map(|path| format!("\"{}\"", path.join(" "))).collect()
}

/// Patterns of bash for a command, the place of the present word, and the word before it.
fn checkpoint_patterns() -> Vec<String> {
    let places = checkpoint_commands().into_iter().map(|command| format!("\"{command} 3 \"*"));
    let options = checkpoint_options().into_iter();
    let options = options
        .flat_map(|(command, options)| options.into_iter().map(move |option| format!("\"{command} \"*\" {option}\"")));
    places.chain(options).collect()
}

fn with_kernels_in_fish(script: &str) -> String {
    let mut script = script.to_owned();
    let lists = [
        (&KERNEL_ARGUMENTS[..], "ls", "Kernel"),
        (&GROUP_ARGUMENTS, "group show", "Group"),
        (&IMAGE_ARGUMENTS, "images list", "Image"),
    ];
    for (helps, list, what) in lists {
        for path in commands_with(helps) {
            let mut seen = format!("__fish_ryokan_using_subcommand {}", path[0]);
            for below in &path[1..] {
                seen.push_str(&format!("; and __fish_seen_subcommand_from {below}"));
            }
            let names = format!("(ryokan --no-autostart {list} --quiet 2>/dev/null)");
            script.push_str(&format!("complete -c ryokan -n \"{seen}\" -a \"{names}\" -d '{what}'\n"));
        }
    }
    let images = "(ryokan --no-autostart images list --quiet 2>/dev/null)";
    let all = args::command();
    let has_image = |command: &&clap::Command| command.get_opts().any(|arg| arg.get_long() == Some(IMAGE_OPTION));
    for command in all.get_subcommands().filter(has_image) {
        let seen = format!("__fish_ryokan_using_subcommand {}", command.get_name());
        script.push_str(&format!("complete -c ryokan -n \"{seen}\" -l {IMAGE_OPTION} -x -a \"{images}\"\n"));
    }
    let checkpoints = "(ryokan --no-autostart log (commandline -opc)[3] --quiet 2>/dev/null)";
    for command in checkpoint_commands() {
        let seen = format!("__fish_ryokan_using_subcommand {command}; and test (count (commandline -opc)) -eq 3");
        script.push_str(&format!("complete -c ryokan -n \"{seen}\" -a \"{checkpoints}\" -d 'Checkpoint'\n"));
    }
    let of_kernel = |list: &str| format!("(ryokan --no-autostart {list} (commandline -opc)[3] --quiet 2>/dev/null)");
    for command in PROCESS_COMMANDS {
        let seen = format!("__fish_ryokan_using_subcommand {command}; and test (count (commandline -opc)) -eq 3");
        script.push_str(&format!("complete -c ryokan -n \"{seen}\" -a \"{}\" -d 'Process'\n", of_kernel("ps")));
    }
    let seen = "__fish_ryokan_using_subcommand exec";
    script.push_str(&format!("complete -c ryokan -n \"{seen}\" -l attach -x -a \"{}\"\n", of_kernel("ps")));
    let seen = "__fish_ryokan_using_subcommand vars; and __fish_seen_subcommand_from get set; \
                and test (count (commandline -opc)) -eq 4";
    script.push_str(&format!("complete -c ryokan -n \"{seen}\" -a \"{}\" -d 'Variable'\n", of_kernel("vars")));
    for (command, options) in checkpoint_options() {
        for option in options {
            let (seen, long) = (format!("__fish_ryokan_using_subcommand {command}"), &option[2..]);
            script.push_str(&format!("complete -c ryokan -n \"{seen}\" -l {long} -x -a \"{checkpoints}\"\n"));
        }
    }
    script
}

fn with_kernels_in_zsh(script: &str) -> String {
    let function = r#"_ryokan_kernels() {
    local -a kernels
    kernels=(${(f)"$(ryokan --no-autostart ls --quiet 2>/dev/null)"})
    compadd -a kernels
}

_ryokan_groups() {
    local -a groups
    groups=(${(f)"$(ryokan --no-autostart group show --quiet 2>/dev/null)"})
    compadd -a groups
}

_ryokan_images() {
    local -a images
    images=(${(f)"$(ryokan --no-autostart images list --quiet 2>/dev/null)"})
    compadd -a images
}

_ryokan_checkpoints() {
    local -a checkpoints
    checkpoints=(${(f)"$(ryokan --no-autostart log ${line[1]:-$words[2]} --quiet 2>/dev/null)"})
    compadd -a checkpoints
}

# The third word of the line is the kernel, also in a subcommand, whose words are fewer.
_ryokan_variables() {
    local -a variables
    variables=(${(f)"$(ryokan --no-autostart vars ${(Q)${(z)BUFFER}[3]} --quiet 2>/dev/null)"})
    compadd -a variables
}

_ryokan_processes() {
    local -a processes
    processes=(${(f)"$(ryokan --no-autostart ps ${(Q)${(z)BUFFER}[3]} --quiet 2>/dev/null)"})
    compadd -a processes
}

if [ "$funcstack[1]""#;
    let lists = [
        (&KERNEL_ARGUMENTS[..], "_ryokan_kernels"),
        (&GROUP_ARGUMENTS, "_ryokan_groups"),
        (&IMAGE_ARGUMENTS, "_ryokan_images"),
    ];
    let helps = lists.into_iter().flat_map(|(helps, list)| helps.iter().map(move |help| (help, list)));
    let named = helps.fold(script.to_owned(), |script, (help, list)| {
        script.replace(&format!("{help}:_default"), &format!("{help}:{list}"))
    });
    let named = named
        .replace(":IMG:_default", ":IMG:_ryokan_images")
        .replace(":IMG[@VERSION]:_default", ":IMG[@VERSION]:_ryokan_images");
    let named = named.replace("Name of the variable:_default", "Name of the variable:_ryokan_variables");
    let named =
        ["Number of the process:_default", "Number of the execution or process:_default", ":EXECUTION:_default"]
            .into_iter()
            .fold(named, |script, found| script.replace(found, &found.replace("_default", "_ryokan_processes")));
    let named = named.replace(":REF:_default", ":REF:_ryokan_checkpoints");
    let all = args::command();
    let positionals = all.get_subcommands().flat_map(|command| command.get_positionals().skip(1));
    let helps = positionals.filter(|arg| is_checkpoint(arg)).filter_map(|arg| arg.get_help().map(ToString::to_string));
    let named = helps.fold(named, |script, help| {
        // As clap_complete quotes it.
        let quoted = help.replace(':', "\\:").replace('\'', r"'\''");
        script.replace(&format!("{quoted}:_default"), &format!("{quoted}:_ryokan_checkpoints"))
    });
    named.replacen("if [ \"$funcstack[1]\"", function, 1)
}
