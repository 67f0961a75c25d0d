//! Joins lines to programs: the engine decides whether a program is complete.

use super::editor::{Editor, Entered};
use crate::cli::drive::Signals;
use crate::cli::failure::Failure;
use crate::core::engine::EngineName;
use crate::core::error::Error;
use crate::core::info::{CodeStatus, KernelInfo};
use crate::rpc::client::KernelClient;

/// One input.
#[derive(Debug, PartialEq, Eq)]
pub enum Program {
    /// An empty or cleared line.
    Nothing,
    /// Code to execute.
    Code(String),
    /// A command of the loop, without its colon.
    Command(String),
    /// The end of the input.
    End,
    /// A signal during the wait; its exit code.
    Signal(u8),
}

/// Reads lines until they form a program.
pub async fn read_program(
    editor: &mut Editor,
    kernel: &KernelClient,
    info: &KernelInfo,
    signals: &mut Signals,
) -> Result<Program, Failure> {
    let first_prompt = format!("{}:{}> ", info.spec.name, info.spec.engine);
    let next_prompt = format!("{:.>width$} ", "", width = first_prompt.chars().count() - 1);
    let mut code = String::new();
    let mut indent = String::new();
    loop {
        let prompt = if code.is_empty() { &first_prompt } else { &next_prompt };
        let entered = tokio::select! {
            entered = editor.read(prompt, &indent, &code, kernel) => entered,
            signal = signals.any() => return Ok(Program::Signal(signal)),
        };
        let line = match entered {
            Entered::Line(line) => line,
            Entered::Cleared => return Ok(Program::Nothing),
            Entered::End if code.trim().is_empty() => return Ok(Program::End),
            // The last program of a pipe may lack its last line end.
            Entered::End => return Ok(Program::Code(code)),
            Entered::Failed(why) => return Err(Error::internal(format!("could not read a line: {why}")).into()),
        };
        if code.is_empty() {
            if line.trim().is_empty() {
                return Ok(Program::Nothing);
            }
            if let Some(words) = line.trim().strip_prefix(':').filter(|words| is_command(words)) {
                editor.remember(line.trim());
                return Ok(Program::Command(words.to_owned()));
            }
        }
        code.push_str(&line);
        code.push('\n');
        // An engine without this check accepts every line as a program.
        let checked = kernel.check(&code).await;
        match checked {
            // The indent is inserted before any key is pressed, so only where leading blanks mean nothing else.
            Ok(checked) if checked.status == CodeStatus::Incomplete => indent = checked.indent,
            Ok(_) | Err(_) if block_is_open(&code, &line, info.spec.engine) => indent = leading_space(&line),
            Ok(_) | Err(_) => {
                editor.remember(code.trim_end());
                return Ok(Program::Code(code));
            }
        }
    }
}

/// `:x` and `:=` are code in some language; a command is a colon and a letter.
fn is_command(words: &str) -> bool {
    words.starts_with(|c: char| c.is_ascii_alphabetic() || c == '?')
}

/// Whether a block of several lines continues although it is complete: until an empty line, as in the
/// language's own prompt.
fn block_is_open(code: &str, line: &str, engine: EngineName) -> bool {
    match engine {
        EngineName::Kaish | EngineName::Bash | EngineName::Node => false,
        EngineName::Python => code.lines().nth(1).is_some() && line.starts_with([' ', '\t']) && !line.trim().is_empty(),
    }
}

fn leading_space(line: &str) -> String {
    line.chars().take_while(|c| matches!(c, ' ' | '\t')).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_line_closes_block() {
        let open = |code: &str, line: &str| block_is_open(code, line, EngineName::Python);
        assert!(open("if x:\n  y\n", "  y"));
        assert!(!open("if x:\n  y\n\n", ""));
        assert!(!open("  y\n", "  y"));
        assert!(!open("if x:\n  y\nz\n", "z"));
        assert!(!block_is_open("if x; then\n  y\n", "  y", EngineName::Kaish));
    }

    #[test]
    fn repl_command_is_recognized() {
        assert!(is_command("vars") && is_command("?"));
        assert!(!is_command("=3") && !is_command("") && !is_command(" x"));
    }
}
