//! `repl`: an interactive session with a kernel, which outlives the session.
//!
//! ```text
//! editor thread (blocking: rustyline, or lines of a pipe) ⇄ channels ⇄ this task ⇄ daemon
//! ```

mod commands;
mod editor;
mod program;

use clap::Args;

use self::commands::{Next, command};
use self::editor::Editor;
use self::program::{Program, read_program};
use super::context::Context;
use super::drive::{Driven, Runs, Signals, Streams, drive};
use super::exec::{end_text, interrupt_note};
use super::failure::Failure;
use super::missing_module::missing_module;
use super::{displays, exit, failure, paths, render};
use crate::cli::names::KernelArg;
use crate::core::error::{Error, ErrorCode};
use crate::core::exec::ExecRequest;
use crate::core::info::KernelInfo;
use crate::rpc::client::KernelClient;

/// `ryokan repl`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan repl demo
  ryokan repl demo < commands.txt

Ctrl-C clears the line or interrupts the execution, Ctrl-D exits; the kernel continues. :help lists the commands.")]
pub struct ReplArgs {
    /// Name or id of the kernel
    pub name: KernelArg,
}

/// A session of the read-eval-print loop.
struct Session<'a> {
    context: &'a Context,
    /// The name or id that the user gave, used to reconnect.
    name: String,
    kernel: KernelClient,
    info: KernelInfo,
    /// Whether input and output are a terminal.
    interactive: bool,
    /// The last execution's exit code.
    last: u8,
}

/// Runs an interactive session, or the lines of standard input if that is no terminal.
pub async fn repl(context: &Context, args: ReplArgs) -> Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let (kernel, info) = context.kernel(&args.name).await?;
    let interactive = context.terminal.stdin && context.terminal.stdout;
    let mut editor = match interactive {
        true => Editor::terminal(&paths::state_dir()?.join("history"), info.spec.name.as_str())?,
        false => Editor::lines(),
    };
    let mut session = Session { context, name: args.name.to_string(), kernel, info, interactive, last: exit::OK };
    if interactive {
        let (name, engine) = (&session.info.spec.name, session.info.spec.engine);
        context.say(&format!("{name} ({engine}); :help lists the commands, Ctrl-D exits, the kernel continues"));
    }
    loop {
        let program = read_program(&mut editor, &session.kernel, &session.info, &mut signals).await?;
        let done = match program {
            Program::Nothing => continue,
            Program::End => break,
            Program::Signal(exit::INTERRUPTED) if interactive => continue,
            Program::Signal(code) => return Err(Failure::Quiet(code)),
            Program::Command(words) => match command(context, &session.kernel, &words).await {
                Ok(Next::Continue) => Ok(()),
                Ok(Next::Exit) => break,
                Err(failure) => Err(failure),
            },
            Program::Code(code) => session.execute(&code, &mut signals).await,
        };
        if let Err(failure) = done {
            session.recover(failure).await?;
        }
    }
    match interactive || session.last == exit::OK {
        true => Ok(()),
        false => Err(Failure::Quiet(session.last)),
    }
}

/// Whether output ends within a line.
fn is_unfinished(output: &[u8]) -> bool {
    output.last().is_some_and(|last| *last != b'\n')
}

impl Session<'_> {
    async fn execute(&mut self, code: &str, signals: &mut Signals) -> Result<(), Failure> {
        let execution = self.kernel.run(&ExecRequest::code(code)).await?;
        let explain = self.interactive.then_some("interrupting; press Ctrl-C again to return to the prompt");
        let streams = Streams { show: true, offset: 0, feed_stdin: false, runs: Runs::Code, explain };
        match drive(&self.kernel, &execution, streams, signals).await? {
            Driven::Ended { result, wrote_stderr } => {
                self.last = exit::of_execution(result.end.code);
                // The prompt would wipe the line.
                if self.interactive && (is_unfinished(&result.stdout) || is_unfinished(&result.stderr)) {
                    self.context.print("\n")?;
                }
                if let Some(text) = render::value_of(&result, self.info.spec.engine) {
                    self.context.print(&text)?;
                }
                displays::tell(self.context, &result.displays);
                if let Some(text) = end_text(&self.name, &result, wrote_stderr, self.context.terminal.paint_stderr) {
                    self.context.say(text.trim_end());
                }
                if let Some(hint) = missing_module(Some(&self.name), self.info.spec.engine, &result.end.err) {
                    self.context.say(&hint);
                }
                Ok(())
            }
            Driven::Detached(exec) => {
                let note = interrupt_note();
                self.context
                    .say(&format!("execution {exec} was interrupted; {note}; further code is queued behind it"));
                Ok(())
            }
            Driven::ReaderGone => Err(Failure::Quiet(exit::READER_GONE)),
            Driven::Terminated(code) | Driven::Left(code) => Err(Failure::Quiet(code)),
        }
    }

    fn show_error(&self, error: &Error) {
        self.context.say(failure::render(error, self.context.terminal.paint_stderr).trim_end());
    }

    /// Shows a failure and continues, after a reconnection if the connection is lost.
    async fn recover(&mut self, failure: Failure) -> Result<(), Failure> {
        let error = match failure {
            Failure::Error(error) => error,
            Failure::Quiet(_) => return Err(failure),
        };
        self.last = exit::of(error.code);
        self.show_error(&error);
        if error.code == ErrorCode::Unavailable && error.reason.is_empty() {
            (self.kernel, self.info) = self.context.kernel(&self.name).await?;
            self.context.say("reconnected");
        }
        Ok(())
    }
}
