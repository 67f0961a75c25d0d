//! Sources of lines: a terminal with editing, history and completion, or a pipe. Both block, so
//! each has a thread.

use std::io::BufRead;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::termios::{SetArg, Termios, tcgetattr, tcsetattr};
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::history::FileHistory;
use rustyline::{CompletionType, Config, EditMode};
use rustyline::{Helper, Highlighter, Hinter, Validator};
use tokio::sync::mpsc;

use crate::core::error::{Error, Result};
use crate::rpc::client::{Completions, KernelClient};

/// Entries kept in one kernel's history.
const HISTORY: usize = 10_000;
/// Time limit of a completion, during which the prompt is blocked.
const COMPLETION: Duration = Duration::from_secs(2);

/// The result of reading a line.
#[derive(Debug)]
pub enum Entered {
    /// A line, without its end.
    Line(String),
    /// Ctrl-C: the input is discarded.
    Cleared,
    /// Ctrl-D, or the end of the pipe.
    End,
    /// The terminal failed.
    Failed(String),
}

/// A request to the thread.
enum Ask {
    /// Read a line. `before`: the earlier lines of the same program.
    Line { prompt: String, initial: String, before: String },
    /// Add to the history.
    Remember(String),
}

/// A message from the thread.
enum Say {
    Entered(Entered),
    Complete { code: String, cursor: usize, reply: std::sync::mpsc::SyncSender<Completions> },
}

/// The source of lines. Dropping it restores the terminal, even during a prompt.
pub struct Editor {
    ask: std::sync::mpsc::Sender<Ask>,
    said: mpsc::Receiver<Say>,
    waiting: bool,
    before: Option<Termios>,
}

impl Drop for Editor {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // The terminal may be gone; nothing can be done then.
            let _ = tcsetattr(std::io::stdin(), SetArg::TCSANOW, before);
        }
    }
}

impl Editor {
    /// Reads from the terminal, with the history of `kernel` in `folder`.
    pub fn terminal(folder: &Path, kernel: &str) -> Result<Editor> {
        let unusable = |e: &dyn std::fmt::Display| Error::internal(format!("the terminal cannot be used: {e}"));
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder).map_err(|e| unusable(&e))?;
        let history = folder.join(kernel);
        let before = tcgetattr(std::io::stdin()).map_err(|e| unusable(&e))?;
        let mut editor = Editor::start(move |asked, say| terminal(&history, &asked, &say));
        editor.before = Some(before);
        Ok(editor)
    }

    /// Reads standard input without editing.
    pub fn lines() -> Editor {
        Editor::start(|asked, say| lines(&asked, &say))
    }

    fn start(read: impl FnOnce(std::sync::mpsc::Receiver<Ask>, mpsc::Sender<Say>) + Send + 'static) -> Editor {
        let (ask, asked) = std::sync::mpsc::channel();
        let (say, said) = mpsc::channel(1);
        std::thread::spawn(move || read(asked, say));
        Editor { ask, said, waiting: false, before: None }
    }

    /// Reads a line and answers completions meanwhile.
    ///
    /// Cancel safe: the next call returns the line requested by the cancelled one.
    pub async fn read(&mut self, prompt: &str, initial: &str, before: &str, kernel: &KernelClient) -> Entered {
        if !self.waiting {
            let line = Ask::Line { prompt: prompt.into(), initial: initial.into(), before: before.into() };
            if self.ask.send(line).is_err() {
                return Entered::End;
            }
            self.waiting = true;
        }
        loop {
            match self.said.recv().await {
                Some(Say::Entered(entered)) => {
                    self.waiting = false;
                    return entered;
                }
                Some(Say::Complete { code, cursor, reply }) => {
                    let none = Completions { start: cursor, matches: Vec::new() };
                    let found = tokio::time::timeout(COMPLETION, kernel.complete(&code, cursor)).await;
                    // A prompt whose completion timed out accepts no answer.
                    let _ = reply.try_send(found.ok().and_then(Result::ok).unwrap_or(none));
                }
                None => return Entered::End,
            }
        }
    }

    /// Adds a whole program to the history.
    pub fn remember(&self, program: &str) {
        // If the thread has ended, no lines follow either.
        let _ = self.ask.send(Ask::Remember(program.into()));
    }
}

fn lines(asked: &std::sync::mpsc::Receiver<Ask>, say: &mpsc::Sender<Say>) {
    let mut stdin = std::io::stdin().lock();
    for ask in asked {
        match ask {
            Ask::Remember(_) => {}
            Ask::Line { .. } => {
                let mut line = String::new();
                let entered = match stdin.read_line(&mut line) {
                    Ok(0) => Entered::End,
                    Ok(_) => Entered::Line(line.trim_end_matches(['\n', '\r']).to_owned()),
                    Err(e) => Entered::Failed(e.to_string()),
                };
                if say.blocking_send(Say::Entered(entered)).is_err() {
                    return;
                }
            }
        }
    }
}

fn terminal(history: &PathBuf, asked: &std::sync::mpsc::Receiver<Ask>, say: &mpsc::Sender<Say>) {
    let config = Config::builder()
        .max_history_size(HISTORY)
        .map(|config| config.completion_type(CompletionType::List).edit_mode(EditMode::Emacs).build());
    let failed = |e: ReadlineError| say.blocking_send(Say::Entered(Entered::Failed(e.to_string())));
    let mut editor = match config.and_then(rustyline::Editor::<Prompt, FileHistory>::with_config) {
        Ok(editor) => editor,
        Err(e) => {
            let _ = failed(e);
            return;
        }
    };
    editor.set_helper(Some(Prompt { say: say.clone(), before: String::new() }));
    // A first session has no history yet.
    let _ = editor.load_history(history);
    for ask in asked {
        match ask {
            Ask::Remember(program) => {
                let _ = editor.add_history_entry(program);
                if let Err(error) = editor.append_history(history) {
                    tracing::info!(%error, "history not kept");
                }
            }
            Ask::Line { prompt, initial, before } => {
                if let Some(helper) = editor.helper_mut() {
                    helper.before = before;
                }
                let entered = match editor.readline_with_initial(&prompt, (&initial, "")) {
                    Ok(line) => Entered::Line(line),
                    Err(ReadlineError::Interrupted) => Entered::Cleared,
                    Err(ReadlineError::Eof) => Entered::End,
                    // rustyline's error enum is open; all other errors mean an unusable terminal.
                    Err(e) => Entered::Failed(e.to_string()),
                };
                if say.blocking_send(Say::Entered(entered)).is_err() {
                    return;
                }
            }
        }
    }
}

/// The callbacks of rustyline during editing.
#[derive(Helper, Hinter, Highlighter, Validator)]
struct Prompt {
    say: mpsc::Sender<Say>,
    before: String,
}

impl Completer for Prompt {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        cursor: usize,
        _: &rustyline::Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        let none = Ok((cursor, Vec::new()));
        let offset = self.before.len();
        let (reply, replied) = std::sync::mpsc::sync_channel(1);
        let question = Say::Complete { code: format!("{}{line}", self.before), cursor: offset + cursor, reply };
        if self.say.blocking_send(question).is_err() {
            return none;
        }
        let Ok(found) = replied.recv_timeout(COMPLETION) else { return none };
        match found.start.checked_sub(offset) {
            // rustyline splits the line there, so it must be a character boundary.
            Some(start) if start <= cursor && line.is_char_boundary(start) => Ok((start, found.matches)),
            Some(_) | None => none,
        }
    }
}
