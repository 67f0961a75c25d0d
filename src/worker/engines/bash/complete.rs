//! Completion: the word at the cursor and its candidates.

use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use super::entries::scalar;
use super::session::Session;
use super::snapshot::RESERVED;
use crate::worker::engines::paths::{beginning_with, executables};

/// Limit of returned matches.
const MATCHES: usize = 200;
/// Keywords that may precede a command.
const KEYWORDS: [&str; 19] = [
    "case", "coproc", "do", "done", "elif", "else", "esac", "fi", "for", "function", "if", "in", "select", "then",
    "time", "until", "while", "[[", "{",
];
/// Commands that are part of bash.
pub const BUILTINS: [&str; 60] = [
    ".",
    ":",
    "[",
    "alias",
    "bg",
    "bind",
    "break",
    "builtin",
    "caller",
    "cd",
    "command",
    "compgen",
    "complete",
    "compopt",
    "continue",
    "declare",
    "dirs",
    "disown",
    "echo",
    "enable",
    "eval",
    "exec",
    "exit",
    "export",
    "false",
    "fc",
    "fg",
    "getopts",
    "hash",
    "help",
    "history",
    "jobs",
    "kill",
    "let",
    "local",
    "logout",
    "mapfile",
    "popd",
    "printf",
    "pushd",
    "pwd",
    "read",
    "readarray",
    "readonly",
    "return",
    "set",
    "shift",
    "shopt",
    "source",
    "suspend",
    "test",
    "times",
    "trap",
    "true",
    "type",
    "typeset",
    "ulimit",
    "umask",
    "unalias",
    "unset",
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Command,
    Variable,
    Path,
}

fn word_at(code: &str, cursor: usize) -> (usize, &str, Kind) {
    let mut cursor = cursor.min(code.len());
    while !code.is_char_boundary(cursor) {
        cursor -= 1;
    }
    let before = &code[..cursor];
    let after = |at: usize| at + before[at..].chars().next().map_or(1, char::len_utf8);
    let name = before.rfind(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).map_or(0, after);
    if ["$", "${", "${#", "${!"].iter().any(|lead| before[..name].ends_with(lead)) {
        return (name, &before[name..], Kind::Variable);
    }
    let start = before.rfind(|c: char| c.is_whitespace() || "|&;(){}<>\"'=`".contains(c)).map_or(0, after);
    let word = &before[start..];
    let lead = before[..start].trim_end_matches([' ', '\t']);
    let opens = ["then", "do", "else", "elif", "if", "while", "until", "time", "!"].iter().any(|keyword| {
        lead.strip_suffix(keyword)
            .is_some_and(|rest| rest.is_empty() || rest.ends_with(|c: char| c.is_whitespace() || ";|&({".contains(c)))
    });
    let begins = lead.is_empty() || lead.ends_with(['|', '&', ';', '(', '{', '\n', '`']) || opens;
    // A redirection's target is a file.
    (start, word, if begins && !word.contains('/') { Kind::Command } else { Kind::Path })
}

/// Start of the word before the cursor, and its kind.
pub fn complete(session: &Session, code: &str, cursor: usize) -> (usize, Vec<String>) {
    let (start, word, kind) = word_at(code, cursor);
    let snapshot = &session.snapshot;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut found: Vec<String> = match kind {
        Kind::Variable => snapshot.variables.keys().filter(|name| name.starts_with(word)).cloned().collect(),
        Kind::Command => {
            let own = session.functions.keys().chain(snapshot.aliases.keys()).map(|name| text(name));
            let known = KEYWORDS.iter().chain(&BUILTINS).map(|name| (*name).to_owned());
            let tools = session.tools.iter().map(|tool| tool.name.clone());
            let path = snapshot.variables.get("PATH").and_then(|path| scalar(&path.content)).unwrap_or_default();
            let mut all: Vec<String> = own.chain(known).chain(tools).filter(|name| name.starts_with(word)).collect();
            all.extend(executables(&text(path), word));
            all.extend(paths(session, word).into_iter().filter(|path| path.ends_with('/')));
            all
        }
        Kind::Path => paths(session, word),
    };
    found.retain(|name| !name.starts_with(RESERVED));
    found.sort();
    found.dedup();
    found.truncate(MATCHES);
    (start, found)
}

fn paths(session: &Session, prefix: &str) -> Vec<String> {
    let home = session.snapshot.variables.get("HOME").and_then(|home| scalar(&home.content));
    let cwd = Path::new(std::ffi::OsStr::from_bytes(&session.snapshot.cwd));
    beginning_with(cwd, home.and_then(|home| std::str::from_utf8(home).ok()), prefix)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bash_completion_word_kinds() {
        use Kind::{Command, Path, Variable};
        for (code, start, word, kind) in [
            ("", 0, "", Command),
            ("ec", 0, "ec", Command),
            ("echo he", 5, "he", Path),
            ("ls | gr", 5, "gr", Command),
            ("if true; then ec", 14, "ec", Command),
            ("echo $HO", 6, "HO", Variable),
            ("echo ${#HO", 8, "HO", Variable),
            ("x=$(da", 4, "da", Command),
            ("cat < fi", 6, "fi", Path),
            ("./ru", 0, "./ru", Path),
            ("é ü", 3, "ü", Path),
        ] {
            assert_eq!(word_at(code, code.len()), (start, word, kind), "{code:?}");
        }
        for cursor in 0..20 {
            word_at("echo é $x/ü", cursor);
        }
    }
}
