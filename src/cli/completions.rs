//! Shell completions: commands and options from the grammar.
//!
//! For bash, fish and zsh also names of kernels, of their checkpoints and variables, numbers of their processes, names
//! of groups and of images, which a running daemon provides. What an argument names follows from its type or, for
//! parts of a kernel, from its value's name.

use std::any::TypeId;
use std::ffi::OsStr;

use clap::Args;
use clap::builder::{PossibleValue, TypedValueParser};
use clap_complete::Shell;

use super::args;
use super::context::Context;
use super::failure::Failure;
use super::names::{GroupArg, ImageArg, KernelArg, KernelOrGroupArg};

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
    // clap_complete's Shell is not exhaustive: the others complete the grammar only.
    let grammar = if matches!(given.shell, Shell::Fish | Shell::Zsh) { marked() } else { args::command() };
    let mut script = Vec::new();
    clap_complete::generate(given.shell, &mut { grammar }, "ryokan", &mut script);
    let script = String::from_utf8_lossy(&script).into_owned();
    context.print(&match given.shell {
        Shell::Bash => with_names_in_bash(&script),
        Shell::Fish => with_names_in_fish(&script),
        Shell::Zsh => with_names_in_zsh(&script),
        _ => script,
    })
}

/// What an argument names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Kernel,
    Group,
    KernelOrGroup,
    /// A path of a kernel or of this host.
    Place,
    Image,
    Checkpoint,
    Variable,
    Process,
}

impl Kind {
    const ALL: [Kind; 8] = [
        Kind::Kernel,
        Kind::Group,
        Kind::KernelOrGroup,
        Kind::Place,
        Kind::Image,
        Kind::Checkpoint,
        Kind::Variable,
        Kind::Process,
    ];

    fn of(arg: &clap::Arg) -> Option<Kind> {
        let own = arg.get_value_parser().type_id();
        let types = [
            (TypeId::of::<KernelArg>(), Kind::Kernel),
            (TypeId::of::<GroupArg>(), Kind::Group),
            (TypeId::of::<KernelOrGroupArg>(), Kind::KernelOrGroup),
            (TypeId::of::<ImageArg>(), Kind::Image),
        ];
        if let Some((_, kind)) = types.into_iter().find(|(known, _)| own == *known) {
            return Some(kind);
        }
        match arg.get_value_names()?.first()?.as_str() {
            "SRC" | "DST" | "NAME:PATH" | "NAME[:PATH]" => Some(Kind::Place),
            "IMG" | "IMG[@VERSION]" => Some(Kind::Image),
            "REF" | "A" | "B" | "CHECKPOINT" => Some(Kind::Checkpoint),
            "VAR" => Some(Kind::Variable),
            "PROCESS" | "EXEC" | "EXECUTION" => Some(Kind::Process),
            _ => None,
        }
    }

    /// What stands for its candidates in a marked grammar.
    fn marker(self) -> &'static str {
        match self {
            Kind::Kernel => "@kernel",
            Kind::Group => "@group",
            Kind::KernelOrGroup => "@kernel_or_group",
            Kind::Place => "@place",
            Kind::Image => "@image",
            Kind::Checkpoint => "@checkpoint",
            Kind::Variable => "@variable",
            Kind::Process => "@process",
        }
    }

    /// The word for it in scripts.
    fn word(self) -> &'static str {
        &self.marker()[1..]
    }

    /// Commands that list the candidates with `--quiet`.
    fn lists(self) -> &'static [&'static str] {
        match self {
            Kind::Kernel | Kind::Place => &["ls"],
            Kind::Group => &["group show"],
            Kind::KernelOrGroup => &["ls", "group show"],
            Kind::Image => &["images list"],
            Kind::Checkpoint => &["log"],
            Kind::Variable => &["vars"],
            Kind::Process => &["ps"],
        }
    }

    /// Whether a kernel has it: the list needs the kernel's name.
    fn is_of_kernel(self) -> bool {
        matches!(self, Kind::Checkpoint | Kind::Variable | Kind::Process)
    }
}

/// A parser that takes anything; its only possible value is the marker of a kind.
#[derive(Clone)]
struct Marker(Kind);

impl TypedValueParser for Marker {
    type Value = String;

    fn parse_ref(&self, _: &clap::Command, _: Option<&clap::Arg>, value: &OsStr) -> Result<String, clap::Error> {
        Ok(value.to_string_lossy().into_owned())
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(std::iter::once(PossibleValue::new(self.0.marker()))))
    }
}

/// The grammar, in which arguments of a kind have its marker as their possible value.
fn marked() -> clap::Command {
    fn mark(command: clap::Command) -> clap::Command {
        let marked = command.mut_args(|arg| match Kind::of(&arg) {
            Some(kind) => arg.value_parser(Marker(kind)),
            None => arg,
        });
        marked.mut_subcommands(mark)
    }
    mark(args::command())
}

/// A positional argument of a kind.
struct Slot {
    /// The words before it, without options; `None`: any word.
    before: Vec<Option<String>>,
    kind: Kind,
    /// Whether any number of them follows.
    repeats: bool,
}

fn slots() -> Vec<Slot> {
    fn collect(command: &clap::Command, before: &[Option<String>], found: &mut Vec<Slot>) {
        let mut before = before.to_vec();
        for arg in command.get_positionals() {
            if let Some(kind) = Kind::of(arg) {
                let repeats = matches!(arg.get_action(), clap::ArgAction::Append);
                found.push(Slot { before: before.clone(), kind, repeats });
            }
            before.push(None);
        }
        for below in command.get_subcommands() {
            collect(below, &[&before[..], &[Some(below.get_name().to_owned())]].concat(), found);
        }
    }
    let mut found = Vec::new();
    collect(&args::command(), &[], &mut found);
    found
}

/// Options with a value: the command of the first level, the option, and what it names.
fn options() -> Vec<(Option<String>, String, Option<Kind>)> {
    fn collect(command: &clap::Command, first: Option<&str>, found: &mut Vec<(Option<String>, String, Option<Kind>)>) {
        for arg in command.get_opts().filter(|arg| arg.get_action().takes_values()) {
            let longs = arg.get_long().map(|long| format!("--{long}"));
            let names = longs.into_iter().chain(arg.get_short().map(|short| format!("-{short}")));
            found.extend(names.map(|name| (first.map(str::to_owned), name, Kind::of(arg))));
        }
        for below in command.get_subcommands() {
            collect(below, Some(first.unwrap_or(below.get_name())), found);
        }
    }
    let mut found = Vec::new();
    collect(&args::command(), None, &mut found);
    found
}

/// A pattern of bash for a command and one of its options; options of the program fit every command.
fn option_pattern((command, option, _): &(Option<String>, String, Option<Kind>)) -> String {
    match command {
        Some(command) => format!("\"{command} {option}\""),
        None => format!("*\" {option}\""),
    }
}

/// A pattern of bash for the number of words, and the words, before an argument.
fn slot_pattern(slot: &Slot) -> String {
    let words: String =
        slot.before.iter().map(|word| word.as_ref().map_or(" \"*\"".to_owned(), |w| format!(" {w}"))).collect();
    match slot.repeats {
        true => format!("[0-9]\"{words}\"|[0-9]\"{words} \"*"),
        false => format!("\"{}{words}\"", slot.before.len()),
    }
}

fn with_names_in_bash(script: &str) -> String {
    let all = options();
    // Of an option that some command has without a value, the next word may be the kernel.
    let with_value: Vec<String> = all.iter().map(option_pattern).collect();
    let offers = |patterns: &[String], kind: Kind| {
        let kernel = if kind.is_of_kernel() { " \"${words[1]}\"" } else { "" };
        format!(
            "        {})\n            _ryokan_offer {}{kernel}\n            return\n            ;;\n",
            patterns.join("|"),
            kind.word()
        )
    };
    let (mut of_options, mut of_slots, mut lists) = (String::new(), String::new(), String::new());
    for kind in Kind::ALL {
        let patterns: Vec<String> = all.iter().filter(|option| option.2 == Some(kind)).map(option_pattern).collect();
        if !patterns.is_empty() {
            of_options += &offers(&patterns, kind);
        }
        let patterns: Vec<String> = slots().iter().filter(|slot| slot.kind == kind).map(slot_pattern).collect();
        if !patterns.is_empty() {
            of_slots += &offers(&patterns, kind);
        }
        lists += &format!("        {})\n", kind.word());
        let (end, kernel) =
            (if kind == Kind::Place { ":" } else { "" }, if kind.is_of_kernel() { " \"$2\"" } else { "" });
        for list in kind.lists() {
            lists += &format!("            _ryokan_lines \"{end}\" {list}{kernel}\n");
        }
        if kind == Kind::Place {
            lists += "            compopt -o nospace 2>/dev/null\n";
        }
        lists += "            ;;\n";
    }
    let function = format!(
        r#"
# Adds the lines of a command that begin with the present word, each with an end. They are data: `compgen -W` would
# expand them.
_ryokan_lines() {{
    local line cur="${{COMP_WORDS[COMP_CWORD]}}" end="$1"
    shift
    while IFS= read -r line; do
        [[ $line == "$cur"* ]] && COMPREPLY+=("$line$end")
    done < <("${{COMP_WORDS[0]}}" --no-autostart "$@" --quiet 2>/dev/null)
}}

# Offers what a word of the grammar names; the kernel that has it is the second argument.
_ryokan_offer() {{
    COMPREPLY=()
    case "$1" in
{lists}    esac
}}

_ryokan_with_names() {{
    _ryokan "$@"
    local cur="${{COMP_WORDS[COMP_CWORD]}}" word option="" skip="" i words=()
    [[ $cur == -* ]] && return
    # The words so far, without options, their values, and paths after a colon.
    for ((i = 1; i < COMP_CWORD; i++)); do
        word="${{COMP_WORDS[i]}}"
        if [[ -n $skip ]]; then
            [[ $word == = ]] || skip="" option=""
            continue
        fi
        option=""
        case "$word" in
            :)
                skip=path
                ;;
            -*)
                option="$word"
                case "${{words[0]}} $word" in
                    {})
                        skip=value
                        ;;
                esac
                ;;
            *)
                words+=("$word")
                ;;
        esac
    done
    if [[ $skip == path && -n $cur ]]; then
        COMPREPLY=()
        return
    fi
    case "${{words[0]}} $option" in
{of_options}    esac
    [[ $skip == value ]] && return
    case "${{#words[@]}} ${{words[*]}}" in
{of_slots}    esac
}}
"#,
        with_value.join("|"),
    );
    script.replace("complete -F _ryokan ", "complete -F _ryokan_with_names ") + &function
}

/// A command of fish or zsh that lists candidates; `kernel` is the shell's expression for the kernel that has them.
fn listing(list: &str, kind: Kind, kernel: &str) -> String {
    let kernel = if kind.is_of_kernel() { format!(" {kernel}") } else { String::new() };
    format!("ryokan --no-autostart {list}{kernel} --quiet 2>/dev/null")
}

fn with_names_in_fish(script: &str) -> String {
    let kernel = "(__ryokan_words)[3]";
    let candidates = |kind: Kind| {
        let end = if kind == Kind::Place { " | string replace -r '\\$' ':'" } else { "" };
        kind.lists().iter().map(|list| format!("({}{end})", listing(list, kind, kernel))).collect::<Vec<_>>().join(" ")
    };
    let mut script = Kind::ALL.into_iter().fold(script.to_owned(), |script, kind| {
        script.replace(&format!("\"{}\\t''\"", kind.marker()), &format!("\"{}\"", candidates(kind)))
    });
    script.push_str("# The words so far, without options.\nfunction __ryokan_words\n    string match -v -- '-*' (commandline -opc)\nend\n");
    for slot in slots() {
        let mut names = slot.before.iter().flatten();
        let mut seen = format!("__fish_ryokan_using_subcommand {}", names.next().map_or("", String::as_str));
        for below in names {
            seen.push_str(&format!("; and __fish_seen_subcommand_from {below}"));
        }
        // The value of an option counts as a word: names of kernels are offered anywhere.
        if slot.kind.is_of_kernel() {
            seen.push_str(&format!("; and test (count (__ryokan_words)) -eq {}", slot.before.len() + 1));
        }
        let (what, names) = (slot.kind.word().replace('_', " "), candidates(slot.kind));
        let files = if slot.kind == Kind::Place { "" } else { " -f" };
        script.push_str(&format!("complete -c ryokan -n \"{seen}\"{files} -a \"{names}\" -d '{what}'\n"));
    }
    script
}

fn with_names_in_zsh(script: &str) -> String {
    let mut functions = String::from(
        "# The kernel: the second word without options; in a subcommand, whose words are fewer, that of the whole line.\n\
         _ryokan_kernel_named() {\n    local -a named\n    named=(${${(Q)${(z)BUFFER}}:#-*})\n    print -r -- $named[3]\n}\n\n",
    );
    for kind in Kind::ALL {
        let word = kind.word();
        let names = kind
            .lists()
            .iter()
            .map(|list| format!("${{(f)\"$({})\"}}", listing(list, kind, "\"$(_ryokan_kernel_named)\"")));
        let names = names.collect::<Vec<_>>().join(" ");
        // Files of this host are places, too.
        let add = match kind {
            Kind::Place => "compadd -S : -q -a names\n    _files",
            _ => "compadd -a names",
        };
        functions += &format!("_ryokan_{word}() {{\n    local -a names\n    names=({names})\n    {add}\n}}\n\n");
    }
    let script = Kind::ALL.into_iter().fold(script.to_owned(), |script, kind| {
        script.replace(&format!(":({})", kind.marker()), &format!(":_ryokan_{}", kind.word()))
    });
    let begin = "if [ \"$funcstack[1]\"";
    script.replacen(begin, &(functions + begin), 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_from_types() {
        let offered = |path: &str| {
            let before: Vec<&str> = path.split(' ').collect();
            let fits = |slot: &&Slot| {
                let words = slot.before.iter().zip(&before);
                slot.before.len() == before.len()
                    && words.clone().all(|(word, given)| word.as_deref().is_none_or(|word| word == *given))
            };
            slots().iter().find(fits).map(|slot| slot.kind)
        };
        for (path, kind) in [
            ("show", Some(Kind::Kernel)),
            ("undo", Some(Kind::KernelOrGroup)),
            ("diff", Some(Kind::KernelOrGroup)),
            ("diff k", Some(Kind::Checkpoint)),
            ("diff k a", Some(Kind::Checkpoint)),
            ("export", Some(Kind::KernelOrGroup)),
            ("du", Some(Kind::Kernel)),
            ("cp", Some(Kind::Place)),
            ("cp a", Some(Kind::Place)),
            ("edit", Some(Kind::Place)),
            ("watch", Some(Kind::Place)),
            ("group rm", Some(Kind::Group)),
            ("group new", None),
            ("new", None),
            ("images rm", Some(Kind::Image)),
            ("vars k get", Some(Kind::Variable)),
            ("kill k", Some(Kind::Process)),
            ("trust rm", None),
        ] {
            assert_eq!(offered(path), kind, "{path}");
        }
        let all = options();
        for (command, option, kind) in [
            ("diff", "--with", Kind::Kernel),
            ("take", "--from", Kind::Kernel),
            ("new", "--share", Kind::Kernel),
            ("fork", "--from", Kind::Checkpoint),
        ] {
            let found = all.iter().find(|one| one.0.as_deref() == Some(command) && one.1 == option);
            assert_eq!(found.and_then(|one| one.2), Some(kind), "{command} {option}");
        }
    }
}
