//! Confirmation before something is destroyed.

use std::io::{BufRead, Write};

use super::context::Context;
use super::exit;
use super::failure::Failure;

impl Context {
    /// Succeeds with `--yes`, or if the user agrees to `what` on the terminal.
    pub fn confirm(&self, what: &str) -> Result<(), Failure> {
        if self.options.yes {
            return Ok(());
        }
        if !self.terminal.can_ask {
            return Err(Failure::usage(
                format!("refusing to {what} without confirmation"),
                "add --yes: there is no terminal to ask on",
            ));
        }
        let mut stderr = std::io::stderr();
        let mut answer = String::new();
        let asked = write!(stderr, "{what}? [y/N] ").and_then(|()| stderr.flush());
        asked.and_then(|()| std::io::stdin().lock().read_line(&mut answer)).map_err(Failure::of_output)?;
        match answer.trim().to_ascii_lowercase().as_str() {
            "y" | "yes" => Ok(()),
            _ => {
                self.say("nothing was done");
                Err(Failure::Quiet(exit::FAILED))
            }
        }
    }
}
