//! Errors of guests. A guest is untrusted: of its errors only a code that it may report, and a few printable words remain.

use crate::core::error::{Error, ErrorCode};

/// Characters of a guest's own words in an error.
const WORDS: usize = 200;

/// The error for a guest's. Without reason and hint: callers act on the first, and clients on the second.
pub(super) fn of_guest(error: &Error) -> Error {
    let code = match error.code {
        ErrorCode::Busy
        | ErrorCode::Corrupt
        | ErrorCode::InvalidArgument
        | ErrorCode::Refused
        | ErrorCode::Internal => error.code,
        // These say something of this host, its daemon or another kernel, which a guest does not know.
        ErrorCode::NotFound
        | ErrorCode::AlreadyExists
        | ErrorCode::Conflict
        | ErrorCode::Unsupported
        | ErrorCode::Departed
        | ErrorCode::Lost
        | ErrorCode::Deadline
        | ErrorCode::Unavailable => ErrorCode::Internal,
    };
    Error::new(code, words(&error.message))
}

/// A guest's own words, bounded and printable.
pub(super) fn words(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(WORDS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_errors_are_sanitised() {
        for code in ErrorCode::ALL {
            let message = format!("\u{1b}[2J\n{}", "x".repeat(1 << 20));
            let error = of_guest(&Error::new(code, message).reason("disk_full").hint("run this"));
            assert!(error.code == code || error.code == ErrorCode::Internal, "{error:?}");
            assert!(error.reason.is_empty() && error.hint.is_empty(), "{error:?}");
            assert_eq!((error.message.len(), error.message.starts_with("[2Jx")), (WORDS, true));
        }
    }
}
