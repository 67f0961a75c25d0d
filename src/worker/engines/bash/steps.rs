//! The lines that bash runs, with their payloads.
//!
//! ```text
//!  source 250        enter: environment, options, traps, the code as a text
//!  eval the code     with the execution's standard input, its lines counted from 1
//!  source 248        leave: disturbing state is set aside, the report is written
//! ```
//!
//! Everything uses `\builtin`, so no alias or function replaces it.

use std::collections::BTreeMap;

use super::printed::Variable;
use super::quote::{quote, quoted};
use super::restore::{self, DEFERRED_OPTIONS};
use super::syntax;
use crate::link::frames::DynamicTool;

const BOOT: &str = include_str!("boot.bash");
const TRAP: &str = include_str!("trap.bash");
const TOOL: &str = include_str!("tool.bash");

/// The parts of an execution.
pub struct Entering<'a> {
    /// The program.
    pub code: &'a str,
    /// The text to parse first, to check that it is a program.
    pub read_first: bool,
    /// The execution's own environment.
    pub env: &'a [(String, String)],
    /// The values of those variables otherwise.
    pub otherwise: &'a BTreeMap<String, Variable>,
    /// `$?` and `$_` of the last execution.
    pub status: i32,
    /// See above.
    pub last: &'a [u8],
    /// Options that are on.
    pub options: &'a [String],
    /// Traps.
    pub traps: &'a BTreeMap<String, Vec<u8>>,
    /// Builtins that are switched off.
    pub disabled: &'a [String],
    /// Tools that need a function, and names of removed tools.
    pub tools: &'a [DynamicTool],
    /// See above.
    pub gone_tools: &'a [String],
    /// Whether standard input is given.
    pub stdin: bool,
    /// Whether the shell has a function `trap` of its own.
    pub has_trap_function: bool,
}

/// Code around the code's own exit trap.
const EXIT_BEFORE: &str = "{ __ryokan_s=$? __ryokan_o=$-; \\builtin set +u; __ryokan_f=${#FUNCNAME[@]}; \\builtin trap -p >&251; \\builtin trap - DEBUG RETURN ERR; \
     \\builtin . /proc/self/fd/247; } 2>/dev/null\n";
const EXIT_AFTER: &str = "\n{ \\builtin set +xv; } 2>/dev/null; \\builtin . /proc/self/fd/246";

/// The exit trap including the code's action.
pub fn exit_trap(wanted: Option<&[u8]>) -> Vec<u8> {
    [EXIT_BEFORE.as_bytes(), wanted.unwrap_or_default(), EXIT_AFTER.as_bytes()].concat()
}

/// The code's action in the current exit trap; `None` if it is the machinery's alone.
pub fn wanted_at_exit(action: &[u8]) -> Option<Vec<u8>> {
    let inner = action.strip_prefix(EXIT_BEFORE.as_bytes()).and_then(|rest| rest.strip_suffix(EXIT_AFTER.as_bytes()));
    Some(inner.unwrap_or(action)).filter(|wanted| !wanted.is_empty()).map(<[u8]>::to_vec)
}

/// Builtins that run the code and leave it.
const NEEDED: [&str; 9] = ["builtin", "command", "enable", "eval", "exec", "return", "set", "source", "trap"];
const LEAVE: &str = "{ __ryokan_s=${__ryokan_r-$?}; \\builtin trap -p >&251; \\builtin trap - DEBUG RETURN ERR EXIT; \
                     \\builtin . /proc/self/fd/248; } 2>/dev/null; \\command exec <&253";
/// Makes the next line number 1, so the code's lines count from 1.
const COUNT_ANEW: &str = "{ \\builtin :; } <&\"$((LINENO=-1,253))\"";

/// Line and payload of an execution.
pub fn execution(entering: &Entering<'_>) -> (String, Vec<u8>) {
    let mut out = Vec::new();
    tools(entering.tools, entering.gone_tools, &mut out);
    environment(entering, &mut out);
    let code = [&prefix(entering), entering.code.as_bytes(), &suffix(entering)].concat();
    line(&mut out, &[b"__ryokan_code=", &quoted(&code)]);
    if entering.read_first {
        let text = [syntax::BEFORE.as_bytes(), entering.code.as_bytes(), syntax::AFTER.as_bytes()].concat();
        line(&mut out, &[b"\\builtin eval ", &quoted(&text), b" 2>/dev/null || { __ryokan_bad=1 __ryokan_code=; }"]);
        out.extend_from_slice(b"\\builtin unset -f __ryokan_p\n");
    }
    if sets_exit_trap(entering) {
        let text = TRAP
            .replace("@BEFORE@", &String::from_utf8_lossy(&quoted(EXIT_BEFORE.as_bytes())))
            .replace("@AFTER@", &String::from_utf8_lossy(&quoted(EXIT_AFTER.as_bytes())));
        out.extend_from_slice(text.as_bytes());
    }
    line(
        &mut out,
        &[b"\\builtin trap -- ", &quoted(&exit_trap(entering.traps.get("EXIT").map(Vec::as_slice))), b" EXIT"],
    );
    match entering.traps.get("INT") {
        Some(action) => line(&mut out, &[b"\\builtin trap -- ", &quoted(action), b" INT"]),
        None => line(&mut out, &[b"\\builtin trap - INT"]),
    }
    // Disabled builtins that the machinery itself needs stay enabled here.
    for name in entering.disabled.iter().filter(|name| !NEEDED.contains(&name.as_str())) {
        line(&mut out, &[b"\\builtin enable -n ", &quoted(name.as_bytes())]);
    }
    line(&mut out, &[b"\\builtin return ", entering.status.to_string().as_bytes()]);
    let input = if entering.stdin { 252 } else { 249 };
    let mut last = Vec::new();
    quote(entering.last, &mut last);
    let last = String::from_utf8_lossy(&last).into_owned();
    let line = format!(
        "\\builtin . /proc/self/fd/250 {last}; {{ \\builtin eval \"$__ryokan_code\"; }} <&{input}; {LEAVE}; {COUNT_ANEW}"
    );
    (line, out)
}

/// State for the first line of the code, which would be visible, or see something, earlier.
fn prefix(entering: &Entering<'_>) -> Vec<u8> {
    let mut first = Vec::new();
    for name in DEFERRED_OPTIONS.iter().filter(|name| entering.options.iter().any(|on| on == *name)) {
        let name = name.trim_start_matches("set.");
        first.extend_from_slice(format!("\\builtin set -o {name}; ").as_bytes());
    }
    for name in ["ERR", "RETURN", "DEBUG"] {
        if let Some(action) = entering.traps.get(name) {
            first.extend([b"\\builtin trap -- ", &quoted(action)[..], format!(" {name}; ").as_bytes()].concat());
        }
    }
    if first.is_empty() {
        return Vec::new();
    }
    let status = match entering.status {
        0 => String::new(),
        status => format!("(\\builtin exit {status}); "),
    };
    // A failing status would end a shell with `errexit`.
    let status = if entering.options.iter().any(|on| on == "set.errexit") { String::new() } else { status };
    [b"{ ", &first[..], status.as_bytes(), b"} 2>/dev/null; "].concat()
}

/// Whether the code may set an exit trap: then a function of that name keeps the machinery's own.
fn sets_exit_trap(entering: &Entering<'_>) -> bool {
    let code = entering.code;
    code.contains("trap")
        && ["EXIT", "exit", " 0"].iter().any(|word| code.contains(word))
        && !entering.has_trap_function
}

/// Records `$_` and `$?` invisibly: not in a text that the code could access, nor where commands
/// are traced.
fn suffix(entering: &Entering<'_>) -> Vec<u8> {
    let watched = entering.traps.keys().any(|name| ["DEBUG", "ERR"].contains(&name.as_str()))
        || entering.options.iter().any(|on| DEFERRED_OPTIONS.contains(&on.as_str()));
    let words = ["<<", "set", "trap", "shopt", "\\\n", "alias"];
    if watched || entering.code.ends_with('\\') || words.iter().any(|word| entering.code.contains(word)) {
        return Vec::new();
    }
    b"\n__ryokan_r=$? __ryokan_l=$_".to_vec()
}

fn environment(entering: &Entering<'_>, out: &mut Vec<u8>) {
    let mut undo = Vec::new();
    if sets_exit_trap(entering) {
        undo.extend_from_slice(b"\\builtin unset -f trap\n");
    }
    for (name, value) in entering.env.iter().filter(|(name, value)| restore::is_name(name) && !value.contains('\0')) {
        let value = quoted(value.as_bytes());
        line(out, &[b"\\builtin unset -v ", name.as_bytes()]);
        line(out, &[b"\\builtin export ", name.as_bytes(), b"=", &value]);
        // Values set by the code itself stay.
        undo.extend(
            [b"[[ ${", name.as_bytes(), b"+x} && $", name.as_bytes(), b" == ", &value, b" ]] && { \\builtin unset -v "]
                .concat(),
        );
        undo.extend([name.as_bytes(), b"; "].concat());
        if let Some(former) = entering.otherwise.get(name) {
            restore::declare(former, b"-g", &mut undo);
        }
        undo.extend_from_slice(b"}\n");
    }
    line(out, &[b"__ryokan_undo=", &quoted(&undo)]);
}

fn tools(tools: &[DynamicTool], gone: &[String], out: &mut Vec<u8>) {
    for name in gone {
        line(out, &[b"\\builtin unset -f -- ", &quoted(name.as_bytes())]);
    }
    for tool in tools {
        out.extend_from_slice(TOOL.replace("@NAME@", &tool.name).as_bytes());
    }
}

/// Whether a function's text is the machinery's wrapper of a tool.
pub fn is_tool(text: &[u8]) -> bool {
    text.windows(14).any(|window| window == b"__ryokan_asked")
}

/// Line and payload that make a fresh bash the session. `outputs`: commands for its descriptors;
/// `restoring`: for everything else.
pub fn boot(
    vars: &[(String, String)],
    outputs: &str,
    restoring: &[u8],
    tools_now: &[DynamicTool],
    status: i32,
) -> (String, Vec<u8>) {
    let mut out = BOOT.as_bytes().to_vec();
    for (name, value) in vars.iter().filter(|(name, _)| restore::is_name(name)) {
        line(&mut out, &[b"\\builtin export ", name.as_bytes(), b"=", &quoted(value.as_bytes())]);
    }
    tools(tools_now, &[], &mut out);
    out.extend_from_slice(restoring);
    let run = format!(
        "{{ \\builtin . /proc/self/fd/230; __ryokan_s={status}; \\builtin trap -p >&251; \
         \\builtin . /proc/self/fd/248; }} 2>/dev/null; {outputs}\\command exec <&253; {COUNT_ANEW}"
    );
    (run, out)
}

/// Line and payload that run commands of the machinery and report.
pub fn commands(commands: &[u8], status: i32) -> (String, Vec<u8>) {
    let line = format!(
        "{{ \\builtin . /proc/self/fd/250; __ryokan_s={status}; \\builtin trap -p >&251; \
         \\builtin . /proc/self/fd/248; }} 2>/dev/null; \\command exec <&253; {COUNT_ANEW}"
    );
    (line, commands.to_vec())
}

/// Line and payload that print each function separately.
pub fn functions(names: &[&[u8]], mark: &str) -> (String, Vec<u8>) {
    let mut out = Vec::new();
    line(&mut out, &[b"{ \\builtin printf '\\0", mark.as_bytes(), b"Q\\0'"]);
    for name in names {
        line(&mut out, &[b"\\builtin declare -f -- ", &quoted(name), b"; \\builtin printf '\\0'"]);
    }
    line(&mut out, &[b"\\builtin printf '", mark.as_bytes(), b"E\\0'; } >&251; \\builtin printf . >&241"]);
    (format!("{{ \\builtin . /proc/self/fd/250; }} 2>/dev/null; {COUNT_ANEW}"), out)
}

fn line(out: &mut Vec<u8>, words: &[&[u8]]) {
    words.iter().for_each(|word| out.extend_from_slice(word));
    out.push(b'\n');
}
