//! Converts entries to commands that restore them in a fresh shell. Each command stands alone, so a
//! failure does not affect the others.

use super::entries::{self, Entries, Entry, FORMAT};
use super::printed::{Content, Variable};
use super::quote::{quote, quoted};

/// Traps that the machinery's own commands would trigger: set just before the code runs.
pub const DEFERRED_TRAPS: [&str; 5] = ["DEBUG", "ERR", "EXIT", "INT", "RETURN"];
/// Options that would break the machinery: set just before the code runs.
pub const DEFERRED_OPTIONS: [&str; 6] =
    ["set.allexport", "set.errexit", "set.keyword", "set.nounset", "set.verbose", "set.xtrace"];

/// The kinds of entries that are commands, in order: options affect how functions are parsed,
/// aliases how everything after them is; directories and variables may need both.
const KINDS: [&str; 13] = [
    "unset",
    "opt",
    "fn",
    "cwd",
    "var",
    "umask",
    "dirs",
    "hash",
    "completions",
    "positional",
    "trap",
    "builtin",
    "alias",
];
/// The entry without a command: the last status, with which the code starts.
const STATUS: &str = "status";

/// The commands, and the keys of malformed entries.
pub fn commands(entries: &Entries) -> (Vec<u8>, Vec<String>) {
    let (mut out, mut bad) = (Vec::new(), Vec::new());
    for kind in KINDS {
        for (key, entry) in entries {
            let (of, name) = key.split_once('/').unwrap_or((key, ""));
            if of == kind && command(of, name, entry, &mut out).is_none() {
                bad.push(key.clone());
            }
        }
    }
    let is_known = |key: &&String| {
        let kind = key.split('/').next().unwrap_or_default();
        kind == STATUS || KINDS.contains(&kind)
    };
    bad.extend(entries.keys().filter(|key| !is_known(key)).cloned());
    (out, bad)
}

/// Appends the command of one entry; `None` for a malformed entry.
fn command(kind: &str, name: &str, entry: &Entry, out: &mut Vec<u8>) -> Option<()> {
    let content = entry.body.strip_prefix(&[FORMAT])?;
    let mut line = |words: &[&[u8]]| {
        out.extend_from_slice(&words.join(&b' '));
        out.push(b'\n');
    };
    let word = |text: &[u8]| quoted(text);
    if name.contains('\0')
        || kind != "var" && kind != "dirs" && kind != "positional" && kind != "fn" && content.contains(&0)
    {
        return None;
    }
    match kind {
        "var" => {
            let variable = entries::variable_of(name, content).filter(|_| is_name(name))?;
            declare(&variable, &[], out);
        }
        "fn" => {
            let function = entries::function_of(content).filter(|function| !function.text.contains(&0))?;
            // A separate text: if malformed, the others are still read.
            line(&[b"\\builtin eval", &word(&function.text)]);
            for attribute in function.attributes.chars() {
                line(&[format!("\\builtin declare -f{attribute} --").as_bytes(), &word(name.as_bytes())]);
            }
        }
        "alias" => line(&[b"\\builtin alias --", &word(&[name.as_bytes(), b"=", content].concat())]),
        "opt" if DEFERRED_OPTIONS.contains(&name) => {}
        "opt" => {
            let on = content == b"1";
            match name.split_once('.')? {
                ("set", name) => {
                    line(&[if on { b"\\builtin set -o" } else { b"\\builtin set +o" }, &word(name.as_bytes())])
                }
                ("shopt", name) => {
                    line(&[if on { b"\\builtin shopt -s" } else { b"\\builtin shopt -u" }, &word(name.as_bytes())])
                }
                _ => return None,
            }
        }
        "trap" if DEFERRED_TRAPS.contains(&name) => {}
        "trap" => line(&[b"\\builtin trap --", &word(content), &word(name.as_bytes())]),
        "unset" => match name.split_once('/') {
            Some(("var", name)) => line(&[b"\\builtin unset -v --", &word(name.as_bytes())]),
            Some(("fn", name)) => line(&[b"\\builtin unset -f --", &word(name.as_bytes())]),
            Some(("alias", name)) => line(&[b"\\builtin unalias --", &word(name.as_bytes())]),
            Some(("trap", name)) => line(&[b"\\builtin trap -", &word(name.as_bytes())]),
            _ => {}
        },
        "cwd" => {
            line(&[b"\\builtin cd --", &word(content), b"&& \\builtin unset -v OLDPWD && \\builtin declare -x OLDPWD"])
        }
        "umask" => line(&[b"\\builtin umask --", &word(content)]),
        "hash" => line(&[b"\\builtin hash -p", &word(content), b"--", &word(name.as_bytes())]),
        "builtin" => {}
        "completions" => line(&[b"\\builtin eval", &word(content)]),
        "positional" => {
            let items = entries::items(content).filter(|items| items.iter().all(|item| !item.contains(&0)))?;
            let words: Vec<Vec<u8>> = items.iter().map(|item| quoted(item)).collect();
            line(&[b"\\builtin set --", &words.join(&b' ')]);
        }
        "dirs" => {
            let items = entries::items(content).filter(|items| items.iter().all(|item| !item.contains(&0)))?;
            for item in items.iter().rev() {
                // Pushed below the current one.
                line(&[b"\\builtin pushd -n --", &word(item), b">/dev/null"]);
            }
        }
        _ => return None,
    }
    Some(())
}

/// Whether the text is a valid variable name.
pub fn is_name(name: &str) -> bool {
    let mut letters = name.bytes();
    letters.next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_')
        && letters.all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// Appends the commands that declare the variable; `more`: options for `declare`.
pub fn declare(variable: &Variable, more: &[u8], out: &mut Vec<u8>) {
    let name = variable.name.as_bytes();
    let mut attributed = |attributes: &str, value: Option<&[u8]>| {
        out.extend_from_slice(b"\\builtin declare ");
        if !more.is_empty() {
            out.extend_from_slice(&[more, b" "].concat());
        }
        if !attributes.is_empty() {
            out.extend_from_slice(format!("-{attributes} ").as_bytes());
        }
        out.extend_from_slice(&[b"-- ", name].concat());
        if let Some(text) = value {
            out.push(b'=');
            quote(text, out);
        }
        out.push(b'\n');
    };
    let elements: Vec<(Vec<u8>, &Vec<u8>)> = match &variable.content {
        Content::Unset => return attributed(&variable.attributes, None),
        Content::Scalar(text) => return attributed(&variable.attributes, Some(text)),
        Content::Indexed(elements) => {
            elements.iter().map(|(index, text)| (index.to_string().into_bytes(), text)).collect()
        }
        Content::Associative(elements) => elements.iter().map(|(name, text)| (quoted(name), text)).collect(),
    };
    // An element list behind a quoted word is not parsed as one, so it is a separate assignment.
    let free: String = variable.attributes.chars().filter(|letter| *letter != 'r').collect();
    attributed(&free, None);
    out.extend_from_slice(&[name, b"=("].concat());
    for (index, text) in elements {
        out.extend_from_slice(&[b"[", &index[..], b"]="].concat());
        quote(text, out);
        out.push(b' ');
    }
    out.extend_from_slice(b")\n");
    if variable.is('r') {
        out.extend_from_slice(&[b"\\builtin declare -r -- ", name, b"\n"].concat());
    }
}
