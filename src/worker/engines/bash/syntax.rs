//! Whether a text is a complete program, asked of bash itself in two ways.
//!
//! The shell parses the text as the body of a function that never runs: this needs no process and
//! respects its options and aliases, but only answers yes or no. After a no, a second bash in parse
//! mode (`-n`) gives the reason.

use std::io::{Read as _, Seek as _};
use std::process::{Command, Stdio};

use super::shell::Program;
use super::unnamed::unnamed;
use crate::sys::process;

/// The kind of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Syntax {
    /// A complete program.
    Whole,
    /// The beginning of a program.
    Begun,
    /// Invalid, with bash's message.
    Wrong(String),
}

/// Surrounds the text, so that it cannot leave the function by accident.
pub const BEFORE: &str = "__ryokan_p() { until if case x in x) {\n";
/// See [`BEFORE`].
pub const AFTER: &str = "\n} ;; esac; then :; fi; do :; done; }";

/// Whether the shell may parse the text: a text that closes the function would run its rest. To do
/// so it must close four constructs in order.
pub fn may_ask(code: &str) -> bool {
    // A continued line is one line.
    let code = code.replace("\\\n", "");
    let mut rest = code.as_str();
    for closing in ["}", "esac", "fi", "done", "}"] {
        let Some(at) = rest.find(closing) else { return !blank(&code) };
        rest = &rest[at + closing.len()..];
    }
    false
}

/// Whether the text is certainly a program: lines of plain words without syntax.
pub fn is_plain(code: &str) -> bool {
    const MEANING: [&str; 20] = [
        "if", "then", "elif", "else", "fi", "time", "for", "in", "until", "while", "do", "done", "case", "esac",
        "coproc", "select", "function", "!", "[[", "]]",
    ];
    code.bytes().all(|b| b.is_ascii_alphanumeric() || b" \n_./:=,@%+-".contains(&b))
        && code.split_ascii_whitespace().all(|word| !MEANING.contains(&word))
}

/// Whether there is nothing to run.
fn blank(code: &str) -> bool {
    code.lines().map(str::trim_start).all(|line| line.is_empty() || line.starts_with('#'))
}

/// Whether running the text may change the parsing of its later lines; then only bash can tell, by
/// running it.
pub fn changes_reading(code: &str) -> bool {
    ["alias", "shopt", "set ", "source", ". ", "eval", "POSIXLY_CORRECT"].iter().any(|word| code.contains(word))
}

/// Asks a second bash with these options.
///
/// # Errors
/// If it cannot be started.
pub fn ask(program: &Program, options: &[String], code: &str) -> std::io::Result<Syntax> {
    let (path, arguments) = program.argv.split_first().ok_or(std::io::ErrorKind::InvalidInput)?;
    let mut text = unnamed(code.as_bytes())?;
    text.rewind()?;
    let mut command = Command::new(path);
    command.args(arguments).args(["--noprofile", "--norc", "-n"]);
    for option in options {
        match option.split_once('.') {
            Some(("shopt", "extglob")) => drop(command.args(["-O", "extglob"])),
            Some(("set", "posix")) => drop(command.args(["-o", "posix"])),
            _ => {}
        }
    }
    command.arg("-s").env_clear().env("LANG", "C.UTF-8").current_dir("/").stdin(Stdio::from(text));
    command.stdout(Stdio::null()).stderr(Stdio::piped()).process_group_of_its_own();
    process::end_with_parent(&mut command);
    let mut child = process::unblocked(&mut command).spawn()?;
    let mut said = Vec::new();
    if let Some(stderr) = child.stderr.take() {
        stderr.take(SAID_BYTES).read_to_end(&mut said)?;
    }
    let status = child.wait()?;
    Ok(judge(status.success(), &String::from_utf8_lossy(&said)))
}

/// Limit of bash's message, bytes.
const SAID_BYTES: u64 = 8 << 10;

fn judge(ended_well: bool, said: &str) -> Syntax {
    if said.contains("unexpected end of file") || said.contains("unexpected EOF") {
        return Syntax::Begun;
    }
    if said.contains("delimited by end-of-file") {
        return Syntax::Begun;
    }
    if ended_well {
        return Syntax::Whole;
    }
    let first = said.lines().next().unwrap_or("syntax error");
    let words = first.find("line ").map_or(first, |at| &first[at..]);
    Syntax::Wrong(words.to_owned())
}

trait OwnGroup {
    fn process_group_of_its_own(&mut self) -> &mut Self;
}

impl OwnGroup for Command {
    /// Keeps it out of the shell's process group and its signals.
    fn process_group_of_its_own(&mut self) -> &mut Self {
        std::os::unix::process::CommandExt::process_group(self, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(code: &str) -> Syntax {
        let program = Program { argv: vec!["/bin/bash".into()], cwd: "/".into() };
        ask(&program, &["shopt.extglob".into()], code).expect("bash starts")
    }

    #[test]
    fn bash_classifies_syntax() {
        for whole in ["", "# nothing", "echo hi", "f() { echo; }", "case x in a) ;; esac", "cat <<E\nx\nE\n", "ls !(a)"]
        {
            assert_eq!(asked(whole), Syntax::Whole, "{whole:?}");
        }
        for begun in ["if true; then", "f() {", "echo 'a", "echo \"$(ls", "cat <<E\nx", "while :; do\n echo", "a |"] {
            assert_eq!(asked(begun), Syntax::Begun, "{begun:?}");
        }
        for wrong in ["fi", "echo )", "if then", "}", "case x in )"] {
            assert!(matches!(asked(wrong), Syntax::Wrong(words) if words.contains("syntax error")), "{wrong:?}");
        }
    }

    #[test]
    fn plain_commands_are_recognized() {
        for plain in ["", ":", "echo hi", "x=1 y=2 make -j4 all", "cd /tmp\nls"] {
            assert!(is_plain(plain), "{plain:?}");
            assert_eq!(asked(plain), Syntax::Whole);
        }
        for other in ["if true", "echo 'x", "fi", "a | b", "f()", "{", "echo $x", "[[ a", "a;;b", "!"] {
            assert!(!is_plain(other), "{other:?}");
        }
    }

    #[test]
    fn function_escapes_not_probed() {
        assert!(may_ask("f() { echo; }; if a; then b; fi"));
        assert!(!may_ask("} ;; esac; then :; fi; do :; done; }; evil; x() { until if case x in x) {"));
        assert!(!may_ask("} ;; es\\\nac; then :; fi; do :; done; }"));
        assert!(!may_ask("  # only\n\n"));
    }
}
