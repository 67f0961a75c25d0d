//! The failure of a command: an error to show, or only an exit code.

use std::io;
use std::path::Path;

use super::exit;
use super::paint::Paint;
use crate::core::error::{Error, ErrorCode};

/// The failure of a command.
#[derive(Debug)]
pub enum Failure {
    /// An error to show.
    Error(Error),
    /// An exit code without a message.
    Quiet(u8),
}

impl Failure {
    /// An invalid command line.
    pub fn usage(message: impl Into<String>, hint: impl Into<String>) -> Failure {
        Failure::Error(Error::new(ErrorCode::InvalidArgument, message).hint(hint))
    }

    /// An invalid command line, from the parser's text.
    pub fn of_parser(text: &str) -> Failure {
        let text = text.trim();
        let (message, rest) = text.split_once("\n\n").unwrap_or((text, ""));
        let message = message.strip_prefix("error: ").unwrap_or(message);
        Failure::usage(message, rest.split_whitespace().collect::<Vec<_>>().join(" "))
    }

    /// A file or directory of this host that could not be used; `done` is the attempted operation.
    pub fn of_file(done: &str, path: &Path, error: &io::Error) -> Failure {
        let code = match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => ErrorCode::NotFound,
            io::ErrorKind::PermissionDenied => ErrorCode::Refused,
            // io::ErrorKind is not exhaustive; for example, a directory in place of a file.
            _ => ErrorCode::InvalidArgument,
        };
        let error = Error::new(code, format!("could not {done} {}: {error}", path.display()));
        Failure::Error(error.hint("name a file or directory of this host that you may use"))
    }

    /// The error that it shows, for callers other than a person.
    pub fn into_error(self) -> Error {
        match self {
            Failure::Error(error) => error,
            Failure::Quiet(code) => Error::unavailable(format!("the connection failed with code {code}")),
        }
    }

    /// The process's exit code.
    pub fn exit_code(&self) -> u8 {
        match self {
            Failure::Error(error) => exit::of(error.code),
            Failure::Quiet(code) => *code,
        }
    }

    /// The text for stderr.
    pub fn text(&self, paint: Paint) -> Option<String> {
        match self {
            Failure::Error(error) => Some(render(error, paint)),
            Failure::Quiet(_) => None,
        }
    }

    /// For stderr: the text, or one line of JSON.
    pub fn report(&self, json: bool, paint: Paint) -> Option<String> {
        match self {
            Failure::Error(error) if json => Some(format!("{}\n", super::json::of(error))),
            Failure::Error(_) | Failure::Quiet(_) => self.text(paint),
        }
    }

    /// Failed output; a closed pipe is no error.
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

/// `warning: what`, for a command that succeeded with a limitation.
pub fn warning(text: &str, paint: Paint) -> String {
    format!("{} {}\n", paint.warn("warning:"), super::render::plain(text))
}

/// `error: what, to what, why (rule)` and `hint: what next`.
///
/// Control characters in foreign text are escaped.
pub fn render(error: &Error, paint: Paint) -> String {
    let mut text = format!("{} {}", paint.bad("error:"), super::render::plain(&error.message));
    if !error.reason.is_empty() && error.code != ErrorCode::Departed {
        text.push_str(&format!(" ({})", super::render::plain(&error.reason)));
    }
    text.push('\n');
    if !error.hint.is_empty() {
        text.push_str(&format!("{} {}\n", paint.note("hint:"), super::render::plain(&error.hint)));
    }
    text
}
