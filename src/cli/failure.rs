//! How a command fails: with an error to be shown, or with an exit code after everything was said.

use std::io;
use std::path::Path;

use super::exit;
use super::paint::Paint;
use crate::core::error::{Error, ErrorCode};

/// Why a command did not end well.
#[derive(Debug)]
pub enum Failure {
    /// To be shown.
    Error(Error),
    /// Everything was said already, or nothing is to be said.
    Quiet(u8),
}

impl Failure {
    /// A command line that cannot be right.
    pub fn usage(message: impl Into<String>, hint: impl Into<String>) -> Failure {
        Failure::Error(Error::new(ErrorCode::InvalidArgument, message).hint(hint))
    }

    /// A file or folder of this host that could not be used: `done` is what was to be done with it.
    pub fn of_file(done: &str, path: &Path, error: &io::Error) -> Failure {
        let code = match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => ErrorCode::NotFound,
            io::ErrorKind::PermissionDenied => ErrorCode::Refused,
            // Closed by std, not by us: a folder in place of a file, say.
            _ => ErrorCode::InvalidArgument,
        };
        let error = Error::new(code, format!("could not {done} {}: {error}", path.display()));
        Failure::Error(error.hint("name a file or folder of this host that you may use"))
    }

    /// The process's exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Failure::Error(error) => exit::of(error.code),
            Failure::Quiet(code) => *code,
        }
    }

    /// What is to be shown on stderr.
    pub fn text(&self, paint: Paint) -> Option<String> {
        match self {
            Failure::Error(error) => Some(render(error, paint)),
            Failure::Quiet(_) => None,
        }
    }

    /// The failure of writing the output: a reader that left is no error.
    pub fn of_output(error: io::Error) -> Failure {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Failure::Quiet(exit::READER_GONE),
            _ => Failure::Error(Error::new(ErrorCode::Internal, format!("could not write the output: {error}"))),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Error(error)
    }
}

/// `warning: what`: something is not as it should be, although what was asked for was done.
pub fn warning(text: &str, paint: Paint) -> String {
    format!("{} {}\n", paint.warn("warning:"), super::render::plain(text))
}

/// `error: what, to what, why`, the rule that refused, and `hint: what next`. Control characters of what came from
/// elsewhere are shown, never sent to the terminal.
pub fn render(error: &Error, paint: Paint) -> String {
    let mut text = format!("{} {}", paint.bad("error:"), super::render::plain(&error.message));
    if !error.reason.is_empty() {
        text.push_str(&format!(" ({})", super::render::plain(&error.reason)));
    }
    text.push('\n');
    if !error.hint.is_empty() {
        text.push_str(&format!("{} {}\n", paint.note("hint:"), super::render::plain(&error.hint)));
    }
    text
}
