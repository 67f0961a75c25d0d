//! The error of the public interface: a code, a message, a hint and, for refusals, the reason.
//!
//! Each module of the daemon has its own small error type, which is converted to this one before it
//! is returned to a client. Cap'n Proto carries exceptions as text, so the error is transferred as
//! one parseable line ([`Error::to_line`], [`Error::from_line`]).

use std::fmt;

/// The kind of a failure, for programs.
///
/// Closed: a new code needs a new wire version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ErrorCode {
    /// The request is invalid in every state.
    InvalidArgument,
    /// The named thing does not exist, or is not visible to the client.
    NotFound,
    /// The name or key is in use.
    AlreadyExists,
    /// The kernel's version differs from the expected one.
    Conflict,
    /// A right, a policy or a rule forbids the request.
    Refused,
    /// A limit is reached; the same call may succeed later.
    Busy,
    /// This host lacks a required feature; the hint names it.
    Unsupported,
    /// The kernel moved to another host.
    Departed,
    /// The worker ended during the call.
    Lost,
    /// Stored data failed its verification.
    Corrupt,
    /// The deadline expired.
    Deadline,
    /// The daemon or a part of it is not available, or is stopping.
    Unavailable,
    /// A fault of ryokan itself.
    Internal,
}

impl ErrorCode {
    /// Every code, in wire order.
    pub const ALL: [ErrorCode; 13] = [
        ErrorCode::InvalidArgument,
        ErrorCode::NotFound,
        ErrorCode::AlreadyExists,
        ErrorCode::Conflict,
        ErrorCode::Refused,
        ErrorCode::Busy,
        ErrorCode::Unsupported,
        ErrorCode::Departed,
        ErrorCode::Lost,
        ErrorCode::Corrupt,
        ErrorCode::Deadline,
        ErrorCode::Unavailable,
        ErrorCode::Internal,
    ];

    /// The code's name on the wire.
    pub const fn name(self) -> &'static str {
        match self {
            ErrorCode::InvalidArgument => "invalidArgument",
            ErrorCode::NotFound => "notFound",
            ErrorCode::AlreadyExists => "alreadyExists",
            ErrorCode::Conflict => "conflict",
            ErrorCode::Refused => "refused",
            ErrorCode::Busy => "busy",
            ErrorCode::Unsupported => "unsupported",
            ErrorCode::Departed => "departed",
            ErrorCode::Lost => "lost",
            ErrorCode::Corrupt => "corrupt",
            ErrorCode::Deadline => "deadline",
            ErrorCode::Unavailable => "unavailable",
            ErrorCode::Internal => "internal",
        }
    }

    /// The code with this wire name.
    pub fn from_name(name: &str) -> Option<ErrorCode> {
        Self::ALL.into_iter().find(|code| code.name() == name)
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A failure as a client sees it.
///
/// `message` says what happened to what and why, `hint` what to do next, `reason` the rule that
/// refused the request.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Error {
    /// The code, for programs.
    pub code: ErrorCode,
    /// The message, for people. Lower case, no full stop.
    pub message: String,
    /// What to do next; may be empty.
    #[serde(default)]
    pub hint: String,
    /// For refusals: the name of the rule.
    #[serde(default)]
    pub reason: String,
    /// What a program wrote to its standard error, which may hold credentials: for the client that asked, never for a
    /// record.
    #[serde(skip)]
    pub said: String,
}

/// Result of a client request.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Reason of an error when the disk or a quota is full.
pub const DISK_FULL: &str = "disk_full";

impl Error {
    /// Creates an error without hint and reason.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), hint: String::new(), reason: String::new(), said: String::new() }
    }

    /// Adds what a program wrote to its standard error.
    #[must_use]
    pub fn said(mut self, said: impl Into<String>) -> Self {
        self.said = said.into();
        self
    }

    /// The message for records, which everyone who reads them may see.
    pub fn recorded(&self) -> String {
        match self.said.as_str() {
            "" => self.message.clone(),
            _ => format!("{}; what it wrote is in the daemon's log of programs", self.message),
        }
    }

    /// The error for the client that asked.
    #[must_use]
    pub fn for_client(mut self) -> Self {
        let said = std::mem::take(&mut self.said);
        if !said.is_empty() {
            self.message = format!("{}: {said}", self.message);
        }
        self
    }

    /// Adds a hint.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = hint.into();
        self
    }

    /// Adds the reason of a refusal.
    #[must_use]
    pub fn reason(mut self, reason: impl Into<String>) -> Self {
        self.reason = reason.into();
        self
    }

    /// Returns the wire form: `ryokan:` and one JSON object on one line.
    pub fn to_line(&self) -> String {
        let json = serde_json::to_string(self).unwrap_or_else(|_| String::from("{}"));
        format!("{LINE_PREFIX}{json}")
    }

    /// Finds the wire form in the text of an exception, to which the transport may have added
    /// words.
    pub fn from_line(text: &str) -> Option<Error> {
        let start = text.find(LINE_PREFIX)? + LINE_PREFIX.len();
        serde_json::Deserializer::from_str(&text[start..]).into_iter::<Error>().next()?.ok()
    }
}

const LINE_PREFIX: &str = "ryokan:";

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

macro_rules! constructors {
    ($($name:ident => $code:ident),* $(,)?) => {
        impl Error {
            $(
                #[doc = concat!("An error with code `", stringify!($code), "`.")]
                pub fn $name(message: impl Into<String>) -> Self {
                    Self::new(ErrorCode::$code, message)
                }
            )*
        }
    };
}

constructors! {
    invalid => InvalidArgument,
    not_found => NotFound,
    already_exists => AlreadyExists,
    conflict => Conflict,
    refused => Refused,
    busy => Busy,
    unsupported => Unsupported,
    lost => Lost,
    corrupt => Corrupt,
    deadline => Deadline,
    unavailable => Unavailable,
    internal => Internal,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_line_survives_wrapping() {
        let error = Error::refused("no \"quotes\" lost\nnor lines").hint("try {this}").reason("rule");
        let line = error.to_line();
        assert!(!line.contains('\n'));
        assert_eq!(Error::from_line(&line), Some(error.clone()));
        assert_eq!(Error::from_line(&format!("remote exception: Failed: {line} (at x)")), Some(error));
    }

    #[test]
    fn foreign_text_is_not_parsed() {
        for text in ["", "ryokan:", "ryokan:{}", "ryokan:{\"code\":\"nope\",\"message\":\"\"}", "other"] {
            assert_eq!(Error::from_line(text), None, "{text:?}");
        }
    }

    #[test]
    fn error_code_names_round_trip() {
        for code in ErrorCode::ALL {
            assert_eq!(ErrorCode::from_name(code.name()), Some(code));
            assert_eq!(serde_json::to_string(&code).unwrap_or_default(), format!("\"{}\"", code.name()));
        }
    }
}
