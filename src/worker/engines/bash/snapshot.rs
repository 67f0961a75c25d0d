//! Parses and checks the report that bash writes after an execution.
//!
//! ```text
//!  trap -p \0 MARK KIND \0 status \0 flags \0 … \0 functions \0 MARK E \0      KIND: R the shell continues, X it exits
//! ```
//!
//! bash's texts contain no zero byte, so the parts cannot merge. Code may write into the same pipe;
//! other data is skipped or refused, never trusted.

use std::collections::BTreeMap;

use super::printed::{self, Variable};
use super::quote::ReadError;

/// Why a report is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReportError {
    /// A missing or malformed part.
    #[error("the part {0:?} is not as expected")]
    Part(&'static str),
    /// Unparsable output of bash.
    #[error("cannot read what bash says of its {0}: {1}")]
    Read(&'static str, ReadError),
}

/// A function's text and attribute letters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    /// As `declare -f` prints it.
    pub text: Vec<u8>,
    /// `r`, `t`, `x`.
    pub attributes: String,
}

/// The functions of a report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Functions {
    /// All texts concatenated, and the names.
    Together(Vec<u8>, Vec<(Vec<u8>, String)>),
    /// Each function with its text.
    Each(BTreeMap<Vec<u8>, Function>),
}

/// The exit trap, which is missing from the list of traps while it runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExitTrap {
    /// Unknown.
    Listed,
    /// Removed.
    Removed,
    /// Set to this action.
    Set(Vec<u8>),
}

/// The shell's state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// `$?`.
    pub status: i32,
    /// Whether the shell was exiting, and at which function depth.
    pub leaving: Option<u32>,
    /// Whether the program was not run because it is invalid.
    pub refused: bool,
    /// The last argument of the last command, if known.
    pub last: Vec<u8>,
    /// The code's settings.
    pub exit_trap: ExitTrap,
    /// Working directory.
    pub cwd: Vec<u8>,
    /// The stack of directories below it.
    pub directories: Vec<Vec<u8>>,
    /// `$1` and on.
    pub positional: Vec<Vec<u8>>,
    /// The output of `umask`.
    pub umask: Vec<u8>,
    /// Disabled builtins.
    pub disabled: Vec<String>,
    /// `set -o` and `shopt` options that are on.
    pub options: Vec<String>,
    /// By name, including the shell's own.
    pub variables: BTreeMap<String, Variable>,
    /// By name.
    pub functions: Functions,
    /// By name.
    pub aliases: BTreeMap<Vec<u8>, Vec<u8>>,
    /// By signal, without `SIG`.
    pub traps: BTreeMap<String, Vec<u8>>,
    /// Remembered paths of programs.
    pub commands: BTreeMap<Vec<u8>, Vec<u8>>,
    /// `complete -p`.
    pub completions: Vec<u8>,
    /// Process ids and commands.
    pub jobs: Vec<(i32, String)>,
}

/// Prefix of the machinery's names.
pub const RESERVED: &str = "__ryokan";

/// Options with a letter in `$-`; they are disabled before bash lists the others.
const LETTERS: [(char, &str); 6] =
    [('a', "allexport"), ('e', "errexit"), ('k', "keyword"), ('u', "nounset"), ('v', "verbose"), ('x', "xtrace")];

struct Parts<'a> {
    parts: std::slice::Split<'a, u8, fn(&u8) -> bool>,
}

impl<'a> Parts<'a> {
    fn next(&mut self, name: &'static str) -> Result<&'a [u8], ReportError> {
        self.parts.next().ok_or(ReportError::Part(name))
    }

    fn number(&mut self, name: &'static str) -> Result<usize, ReportError> {
        let text = self.next(name)?;
        std::str::from_utf8(text).ok().and_then(|text| text.parse().ok()).ok_or(ReportError::Part(name))
    }

    fn list(&mut self, name: &'static str) -> Result<Vec<Vec<u8>>, ReportError> {
        let count = self.number(name)?;
        // Each item takes at least its zero byte, so a wrong count soon reaches the end.
        (0..count).map(|_| self.next(name).map(<[u8]>::to_vec)).collect()
    }
}

fn is_zero(byte: &u8) -> bool {
    *byte == 0
}

/// Start and end of the last whole report in `bytes`.
pub fn find(bytes: &[u8], mark: &str) -> Option<(usize, usize)> {
    let end = format!("\0{mark}E\0");
    if !bytes.ends_with(end.as_bytes()) {
        return None;
    }
    let starts = [format!("\0{mark}R\0"), format!("\0{mark}X\0")];
    let start = starts.iter().filter_map(|start| rfind(bytes, start.as_bytes())).max()?;
    let before = bytes[..start].iter().rposition(|b| *b == 0).map_or(0, |at| at + 1);
    Some((before, bytes.len()))
}

fn rfind(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).rposition(|window| window == wanted)
}

/// Parses a report found by [`find`].
///
/// # Errors
/// See [`ReportError`].
pub fn read(bytes: &[u8], mark: &str) -> Result<Snapshot, ReportError> {
    let split: fn(&u8) -> bool = is_zero;
    let mut parts = Parts { parts: bytes.split(split) };
    let (traps, disabled) = printed::traps(parts.next("traps")?).map_err(|error| ReportError::Read("traps", error))?;
    let kind = parts.next("kind")?;
    let leaving = kind.strip_prefix(mark.as_bytes()).ok_or(ReportError::Part("kind"))? == b"X";
    let status = parts.number("status")? as i32;
    let letters = parts.next("flags")?;
    let shopts = parts.next("options")?;
    let setopts = parts.next("options")?;
    let cwd = parts.next("directory")?.to_vec();
    let refused = !parts.next("refusal")?.is_empty();
    let last = parts.next("last argument")?.to_vec();
    let exit_trap = match parts.next("exit trap")? {
        [b'+', action @ ..] => ExitTrap::Set(action.to_vec()),
        [b'-'] => ExitTrap::Removed,
        _ => ExitTrap::Listed,
    };
    let depth = parts.number("depth")? as u32;
    let mut directories = parts.list("directories")?;
    if !directories.is_empty() {
        directories.remove(0);
    }
    let positional = parts.list("positional parameters")?;
    let umask = parts.next("umask")?.trim_ascii().to_vec();
    let reading = |what| move |error| ReportError::Read(what, error);
    let variables = printed::variables(parts.next("variables")?).map_err(reading("variables"))?;
    let mut names = printed::functions(parts.next("names of functions")?);
    names.retain(|(name, _)| !name.starts_with(RESERVED.as_bytes()));
    let aliases = printed::aliases(parts.next("aliases")?).map_err(reading("aliases"))?;
    let commands = printed::commands(parts.next("commands")?);
    let completions = parts.next("completions")?.to_vec();
    let jobs = printed::jobs(parts.next("jobs")?);
    let functions = if leaving {
        Functions::Each(each_function(&mut parts, names, mark)?)
    } else {
        Functions::Together(parts.next("functions")?.to_vec(), names)
    };
    Ok(Snapshot {
        status,
        leaving: leaving.then_some(depth),
        refused,
        last,
        exit_trap,
        cwd,
        directories,
        positional,
        umask,
        disabled,
        options: options(letters, shopts, setopts),
        variables: variables
            .into_iter()
            .filter(|variable| !variable.name.starts_with(RESERVED))
            .map(|variable| (variable.name.clone(), variable))
            .collect(),
        functions,
        aliases: aliases.into_iter().collect(),
        traps: traps.into_iter().collect(),
        commands: commands.into_iter().collect(),
        completions,
        jobs,
    })
}

fn each_function(
    parts: &mut Parts<'_>,
    names: Vec<(Vec<u8>, String)>,
    mark: &str,
) -> Result<BTreeMap<Vec<u8>, Function>, ReportError> {
    let attributes: BTreeMap<Vec<u8>, String> = names.into_iter().collect();
    let end = format!("{mark}E");
    let mut found = BTreeMap::new();
    loop {
        let name = parts.next("a function")?;
        if name == end.as_bytes() {
            return Ok(found);
        }
        let text = parts.next("a function")?.to_vec();
        if let Some(attributes) = attributes.get(name) {
            found.insert(name.to_vec(), Function { text, attributes: attributes.clone() });
        }
    }
}

fn options(letters: &[u8], shopts: &[u8], setopts: &[u8]) -> Vec<String> {
    let listed = |list: &[u8]| -> Vec<String> {
        String::from_utf8_lossy(list).split(':').filter(|name| !name.is_empty()).map(str::to_owned).collect()
    };
    let mut all: Vec<String> = listed(setopts).into_iter().map(|name| format!("set.{name}")).collect();
    for (letter, name) in LETTERS {
        if letters.contains(&(letter as u8)) {
            all.push(format!("set.{name}"));
        }
    }
    all.extend(listed(shopts).into_iter().map(|name| format!("shopt.{name}")));
    all.sort();
    all.dedup();
    all
}
