//! The state as entries: their keys and bytes.
//!
//! | key | body after the format byte |
//! |---|---|
//! | `var/NAME` | attributes, then the value: `u` none, `s` text, `i` numbers and texts, `n` names and texts |
//! | `fn/NAME` | attributes, then the text as bash prints it |
//! | `alias/NAME` | its replacement |
//! | `opt/set.NAME`, `opt/shopt.NAME` | `1` or `0` |
//! | `trap/SIGNAL` | its action; empty: the signal is ignored |
//! | `cwd`, `umask`, `status` | text |
//! | `dirs`, `positional` | texts |
//! | `hash/NAME` | a path other than the one found by `PATH` |
//! | `builtin/NAME` | empty: the builtin is disabled |
//! | `completions` | the output of `complete -p` |
//! | `unset/KEY` | empty: a fresh shell has it, this one does not |
//!
//! A list holds per item a length (four bytes, little-endian) and the bytes. Only differences from
//! a fresh shell are entries.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use super::printed::{Content, Variable};
use super::snapshot::{Function, Snapshot};
use crate::link::frames::{EntryMeta, Missed};

/// First byte of each body.
pub const FORMAT: u8 = 1;
/// Length limit of a summary, characters.
pub const SUMMARY_CHARS: usize = 200;

/// One state entry, without its key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Metadata for people.
    pub meta: EntryMeta,
    /// Format byte and content.
    pub body: Vec<u8>,
}

/// By key.
pub type Entries = BTreeMap<String, Entry>;

/// Variables derived from other state, or belonging to the shell itself.
const DERIVED: [&str; 28] = [
    "_",
    "BASH",
    "BASHOPTS",
    "BASHPID",
    "COMP_WORDBREAKS",
    "DIRSTACK",
    "EPOCHREALTIME",
    "EPOCHSECONDS",
    "EUID",
    "FUNCNAME",
    "GROUPS",
    "HISTCMD",
    "HOSTNAME",
    "HOSTTYPE",
    "LINENO",
    "MACHTYPE",
    "OSTYPE",
    "PIPESTATUS",
    "PPID",
    "PWD",
    "RANDOM",
    "SECONDS",
    "SHELL",
    "SHELLOPTS",
    "SHLVL",
    "SRANDOM",
    "UID",
    "COLUMNS",
];
/// Exceptions with bash's own prefix: settings.
const SETTINGS: [&str; 3] = ["BASH_COMPAT", "BASH_ENV", "BASH_XTRACEFD"];

/// Whether a variable is not part of the state.
pub fn is_derived(name: &str) -> bool {
    DERIVED.contains(&name) || name.starts_with("BASH_") && !SETTINGS.contains(&name)
}

/// Options that reflect how the shell was started.
const FIXED_OPTIONS: [&str; 5] =
    ["shopt.login_shell", "shopt.restricted_shell", "set.interactive", "set.monitor_terminal", "shopt.syslog_history"];

/// All state of the shell, not yet compared with a fresh one. State that cannot be saved is added
/// to `missed`.
pub fn of(snapshot: &Snapshot, functions: &BTreeMap<Vec<u8>, Function>, missed: &mut Vec<Missed>) -> Entries {
    let mut entries = Entries::new();
    for variable in snapshot.variables.values().filter(|variable| !is_derived(&variable.name)) {
        entries.insert(format!("var/{}", variable.name), variable_entry(variable));
    }
    let mut put = |kind: &str, name: &[u8], type_name: &str, shown: &[u8], body: Vec<u8>| {
        let Ok(name) = std::str::from_utf8(name) else {
            let key = format!("{kind}/{}", String::from_utf8_lossy(name));
            missed.push(missed_entry(&key, type_name, "its name is not UTF-8"));
            return;
        };
        let key = if name.is_empty() { kind.to_owned() } else { format!("{kind}/{name}") };
        entries.insert(key, entry(type_name, one_line(shown), body));
    };
    for (name, function) in functions {
        put("fn", name, "function", &function.text, function_body(function));
    }
    for (name, value) in &snapshot.aliases {
        put("alias", name, "alias", value, body(value));
    }
    for option in snapshot.options.iter().filter(|option| !FIXED_OPTIONS.contains(&option.as_str())) {
        put("opt", option.as_bytes(), "option", b"on", body(b"1"));
    }
    for (signal, action) in &snapshot.traps {
        put("trap", signal.as_bytes(), "trap", action, body(action));
    }
    for name in &snapshot.disabled {
        put("builtin", name.as_bytes(), "disabled builtin", b"off", body(b""));
    }
    let path = snapshot.variables.get("PATH").and_then(|path| scalar(&path.content)).unwrap_or_default();
    for (name, place) in &snapshot.commands {
        if found_in_path(name, path).as_deref() != Some(place) {
            put("hash", name, "path of a command", place, body(place));
        }
    }
    put("cwd", b"", "path", &snapshot.cwd, body(&snapshot.cwd));
    put("umask", b"", "mode", &snapshot.umask, body(&snapshot.umask));
    if snapshot.status != 0 {
        let text = snapshot.status.to_string();
        put("status", b"", "exit status", text.as_bytes(), body(text.as_bytes()));
    }
    if !snapshot.directories.is_empty() {
        put("dirs", b"", "directories", &snapshot.directories.join(&b' '), body(&list(&snapshot.directories)));
    }
    if !snapshot.positional.is_empty() {
        put("positional", b"", "parameters", &snapshot.positional.join(&b' '), body(&list(&snapshot.positional)));
    }
    if !snapshot.completions.is_empty() {
        put("completions", b"", "completion rules", &snapshot.completions, body(&snapshot.completions));
    }
    entries
}

/// The differences of `present` from a fresh shell.
pub fn since(present: Entries, fresh: &Entries) -> Entries {
    let gone = fresh.keys().filter(|key| !present.contains_key(*key));
    let mut kept: Entries = gone
        .map(|key| match key.strip_prefix("opt/") {
            Some(_) => (key.clone(), entry("option", "off".into(), body(b"0"))),
            None => (format!("unset/{key}"), entry("unset", String::new(), body(b""))),
        })
        .collect();
    kept.extend(present.into_iter().filter(|(key, entry)| fresh.get(key).is_none_or(|at| at.body != entry.body)));
    kept
}

/// An entry that was not captured or could not be restored.
pub fn missed_entry(key: &str, type_name: &str, reason: &str) -> Missed {
    Missed { key: key.to_owned(), type_name: type_name.to_owned(), reason: reason.to_owned() }
}

fn entry(type_name: &str, summary: String, body: Vec<u8>) -> Entry {
    Entry { meta: EntryMeta { type_name: type_name.into(), summary, ..EntryMeta::default() }, body }
}

fn body(content: &[u8]) -> Vec<u8> {
    [&[FORMAT], content].concat()
}

fn list(items: &[Vec<u8>]) -> Vec<u8> {
    let mut out = Vec::new();
    items.iter().for_each(|item| push(item, &mut out));
    out
}

fn push(item: &[u8], out: &mut Vec<u8>) {
    out.extend(u32::try_from(item.len()).unwrap_or(u32::MAX).to_le_bytes());
    out.extend_from_slice(item);
}

/// Reads a list; `None` if malformed.
pub fn items(mut bytes: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let (length, rest) = bytes.split_first_chunk::<4>()?;
        let (item, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        found.push(item.to_vec());
        bytes = rest;
    }
    Some(found)
}

fn function_body(function: &Function) -> Vec<u8> {
    let mut out = vec![FORMAT];
    push(function.attributes.as_bytes(), &mut out);
    out.extend_from_slice(&function.text);
    out
}

/// Reads a function's body; `None` if malformed.
pub fn function_of(content: &[u8]) -> Option<Function> {
    let (attributes, text) = attributes_of(content)?;
    Some(Function { text: text.to_vec(), attributes })
}

fn attributes_of(content: &[u8]) -> Option<(String, &[u8])> {
    let (length, rest) = content.split_first_chunk::<4>()?;
    let (attributes, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
    let attributes = std::str::from_utf8(attributes).ok()?;
    attributes.bytes().all(|b| b.is_ascii_alphabetic()).then(|| (attributes.to_owned(), rest))
}

fn variable_entry(variable: &Variable) -> Entry {
    let mut out = vec![FORMAT];
    push(variable.attributes.as_bytes(), &mut out);
    match &variable.content {
        Content::Unset => out.push(b'u'),
        Content::Scalar(text) => {
            out.push(b's');
            out.extend_from_slice(text);
        }
        Content::Indexed(elements) => {
            out.push(b'i');
            for (index, text) in elements {
                push(index.to_string().as_bytes(), &mut out);
                push(text, &mut out);
            }
        }
        Content::Associative(elements) => {
            out.push(b'n');
            for (name, text) in elements {
                push(name, &mut out);
                push(text, &mut out);
            }
        }
    }
    entry(&type_name(variable), summary(variable), out)
}

/// Reads a variable's body; `None` if malformed.
pub fn variable_of(name: &str, content: &[u8]) -> Option<Variable> {
    let (attributes, rest) = attributes_of(content)?;
    let (kind, rest) = rest.split_first()?;
    let pairs = |bytes| {
        let items = items(bytes)?;
        items.len().is_multiple_of(2).then(|| items.chunks(2).map(|p| (p[0].clone(), p[1].clone())).collect::<Vec<_>>())
    };
    let content = match kind {
        b'u' => Content::Unset,
        b's' => Content::Scalar(rest.to_vec()),
        b'i' => {
            let numbered = |(index, text): (Vec<u8>, _)| Some((std::str::from_utf8(&index).ok()?.parse().ok()?, text));
            Content::Indexed(pairs(rest)?.into_iter().map(numbered).collect::<Option<_>>()?)
        }
        b'n' => Content::Associative(pairs(rest)?),
        _ => return None,
    };
    let no_zero = match &content {
        Content::Unset => true,
        Content::Scalar(text) => !text.contains(&0),
        Content::Indexed(elements) => elements.iter().all(|(_, text)| !text.contains(&0)),
        Content::Associative(elements) => elements.iter().all(|(name, text)| !name.contains(&0) && !text.contains(&0)),
    };
    no_zero.then(|| Variable { name: name.to_owned(), attributes, content })
}

/// The text of a scalar, or of the first element as `$name` has it.
pub fn scalar(content: &Content) -> Option<&[u8]> {
    match content {
        Content::Scalar(text) => Some(text),
        Content::Indexed(elements) => elements.first().filter(|(index, _)| *index == 0).map(|(_, text)| &text[..]),
        Content::Associative(_) | Content::Unset => None,
    }
}

/// A variable's type in bash's terms.
pub fn type_name(variable: &Variable) -> String {
    let words = [('r', "readonly"), ('x', "exported"), ('l', "lowercase"), ('u', "uppercase"), ('t', "traced")];
    let mut said: Vec<&str> = words.iter().filter(|(letter, _)| variable.is(*letter)).map(|(_, word)| *word).collect();
    said.push(match (&variable.content, variable.is('n'), variable.is('i')) {
        (_, true, _) => "reference",
        (Content::Indexed(_), ..) => "array",
        (Content::Associative(_), ..) => "associative array",
        (Content::Unset, ..) if variable.is('a') => "array",
        (Content::Unset, ..) if variable.is('A') => "associative array",
        (_, _, true) => "integer",
        (..) => "string",
    });
    said.join(" ")
}

/// A one-line summary. The work is bounded, however large the value.
pub fn summary(variable: &Variable) -> String {
    let mut text = Vec::new();
    let mut add = |name: &[u8], value: &[u8]| {
        let clipped = |bytes: &[u8]| bytes[..bytes.len().min(SUMMARY_CHARS * 4)].to_vec();
        text.extend([&b"["[..], &clipped(name), b"]=", &clipped(value), b" "].concat());
        text.len() <= SUMMARY_CHARS * 4
    };
    match &variable.content {
        Content::Unset => return String::new(),
        Content::Scalar(text) => return one_line(text),
        Content::Indexed(elements) => {
            let _ = elements.iter().all(|(index, value)| add(index.to_string().as_bytes(), value));
            text = [format!("{} elements: ", elements.len()).as_bytes(), &text].concat();
        }
        Content::Associative(elements) => {
            let _ = elements.iter().all(|(name, value)| add(name, value));
            text = [format!("{} elements: ", elements.len()).as_bytes(), &text].concat();
        }
    }
    one_line(text.trim_ascii_end())
}

/// Text for people: one line, no control characters, not too long.
pub fn one_line(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(&text[..text.len().min(SUMMARY_CHARS * 4)]);
    let mut line: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(SUMMARY_CHARS).collect();
    if text.chars().count() > SUMMARY_CHARS {
        line.pop();
        line.push('…');
    }
    line
}

/// The program of that name found by `PATH`.
pub fn found_in_path(name: &[u8], path: &[u8]) -> Option<Vec<u8>> {
    path.split(|b| *b == b':').find_map(|folder| {
        let place = [folder, b"/", name].concat();
        let meta = std::fs::metadata(Path::new(std::ffi::OsStr::from_bytes(&place))).ok()?;
        (meta.is_file() && meta.permissions().mode() & 0o111 != 0).then_some(place)
    })
}
