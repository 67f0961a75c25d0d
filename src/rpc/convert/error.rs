//! Errors over Cap'n Proto: an exception is a kind and a text; ours contains one parseable line.

use capnp::ErrorKind;

use crate::core::error::{Error, ErrorCode};

/// The exception that carries `error`.
pub fn to_capnp(error: Error) -> capnp::Error {
    let error = error.for_client();
    let line = error.to_line();
    match error.code {
        // Generic clients read the kind alone: `overloaded` means "retry later".
        ErrorCode::Busy | ErrorCode::Deadline => capnp::Error::overloaded(line),
        // `disconnected` would make generic clients drop a healthy connection.
        ErrorCode::Unavailable => capnp::Error::overloaded(line),
        ErrorCode::Unsupported => capnp::Error::unimplemented(line),
        ErrorCode::InvalidArgument
        | ErrorCode::NotFound
        | ErrorCode::AlreadyExists
        | ErrorCode::Conflict
        | ErrorCode::Refused
        | ErrorCode::Departed
        | ErrorCode::Lost
        | ErrorCode::Corrupt
        | ErrorCode::Internal => capnp::Error::failed(line),
    }
}

/// The hint of a lost connection: what happens to kernels, and what to do.
pub(in crate::rpc) const AFTER_A_LOSS: &str =
    "the daemon stopped or restarted; durable kernels continue, ephemeral ones are removed: reconnect";

/// The error that an exception carries. For foreign exceptions the kind determines the code.
pub fn from_capnp(exception: capnp::Error) -> Error {
    if let Some(error) = Error::from_line(&exception.extra) {
        return error;
    }
    let text = words(&exception);
    match exception.kind {
        ErrorKind::Disconnected | ErrorKind::PrematureEndOfFile => {
            Error::unavailable(format!("the connection to ryokand was lost: {text}")).hint(AFTER_A_LOSS)
        }
        ErrorKind::Overloaded => Error::busy(text),
        ErrorKind::Unimplemented => {
            Error::unsupported(format!("the daemon does not know this call: {text}")).hint("update ryokand")
        }
        // A `non_exhaustive` enum of capnp: other kinds are malformed messages or internal faults.
        _ => Error::internal(text),
    }
}

fn words(exception: &capnp::Error) -> String {
    let text = exception.extra.trim_start_matches("remote exception: ").trim();
    match text.is_empty() {
        true => exception.kind.to_string(),
        false => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capnp_error_round_trips() {
        for code in ErrorCode::ALL {
            let error = Error::new(code, "what \"it\" was\n{odd}").hint("do this").reason("rule");
            let mut exception = to_capnp(error.clone());
            exception.extra = format!("remote exception: Failed: {}", exception.extra);
            assert_eq!(from_capnp(exception), error);
        }
    }

    #[test]
    fn exception_kinds_map_to_codes() {
        for (exception, code) in [
            (capnp::Error::disconnected("Peer disconnected".into()), ErrorCode::Unavailable),
            (capnp::Error::from_kind(ErrorKind::PrematureEndOfFile), ErrorCode::Unavailable),
            (capnp::Error::overloaded("later".into()), ErrorCode::Busy),
            (capnp::Error::unimplemented("no".into()), ErrorCode::Unsupported),
            (capnp::Error::failed("oh".into()), ErrorCode::Internal),
        ] {
            assert_eq!(from_capnp(exception).code, code);
        }
    }

    #[test]
    fn lost_connection_has_hint() {
        assert!(!from_capnp(capnp::Error::disconnected(String::new())).hint.is_empty());
    }
}
