//! Shows long output of reading commands in the user's pager, as git does.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::process::{Child, Command, Stdio};

use super::args;
use super::context::Context;

/// Options of `less`, unless the user has some: short output is printed as it is, colours are shown, the screen stays.
const LESS: &str = "FRX";

/// Characters for which a shell must read the variable.
const SHELL_CHARACTERS: &str = "|&;<>()$`\\\"'*?[#~=%!";

impl args::Command {
    /// Whether the command's output is read from its beginning, and may be long.
    fn is_paged(&self) -> bool {
        match self {
            args::Command::Log(_) | args::Command::Diff(_) | args::Command::Audit(_) => true,
            args::Command::Journal(args) => !args.follow,
            args::Command::Events(args) => !args.follow,
            _ => false,
        }
    }
}

/// A pager that reads this process's standard output.
pub struct Pager {
    child: Child,
    /// The former standard output.
    terminal: OwnedFd,
}

impl Pager {
    /// Starts the pager for a command whose output goes to a terminal. None if there is none or it cannot be started.
    pub fn start(context: &Context, command: &args::Command) -> Option<Pager> {
        if !context.terminal.stdout || context.options.json || !command.is_paged() {
            return None;
        }
        let chosen = ["RYOKAN_PAGER", "PAGER"].iter().find_map(std::env::var_os);
        let program = chosen.unwrap_or_else(|| "less".into());
        if program.is_empty() || program == "cat" {
            return None;
        }
        Pager::run(&program).inspect_err(|error| tracing::info!(%error, "no pager")).ok()
    }

    fn run(program: &std::ffi::OsStr) -> io::Result<Pager> {
        // As git does it: a shell would not wait for its pager after Ctrl-C, so it is used only where it must be.
        let line = program.to_string_lossy();
        let mut words = line.split_ascii_whitespace();
        let mut pager = match words.next() {
            Some(first) if !line.contains(|c| SHELL_CHARACTERS.contains(c)) => {
                let mut pager = Command::new(first);
                pager.args(words);
                pager
            }
            _ => {
                let mut pager = Command::new("/bin/sh");
                pager.arg("-c").arg(program);
                pager
            }
        };
        pager.stdin(Stdio::piped());
        if std::env::var_os("LESS").is_none() {
            pager.env("LESS", LESS);
        }
        let terminal = io::stdout().as_fd().try_clone_to_owned()?;
        let mut child = pager.spawn()?;
        if let Some(input) = child.stdin.take() {
            nix::unistd::dup2_stdout(input)?;
        }
        Ok(Pager { child, terminal })
    }

    /// Ends the output, and waits until the user has read it. A caller that catches Ctrl-C leaves it to the pager.
    pub fn finish(mut self) {
        // The pager reads the end of its input.
        let _ = nix::unistd::dup2_stdout(&self.terminal);
        let _ = self.child.wait();
    }
}
