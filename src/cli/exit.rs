//! Exit codes, documented in `ryokan --help` except the shell's own (128 and the number of a signal).

use clap::error::ErrorKind;

use crate::core::error::ErrorCode;

/// Done.
pub const OK: u8 = 0;
/// The command failed.
pub const FAILED: u8 = 1;
/// The command line or an argument of the call is invalid.
pub const USAGE: u8 = 2;
/// The named object does not exist.
pub const NOT_FOUND: u8 = 3;
/// A conflict, or refused.
pub const REFUSED: u8 = 4;
/// Not supported on this host.
pub const UNSUPPORTED: u8 = 5;
/// No daemon (`EX_UNAVAILABLE` of sysexits.h).
pub const UNAVAILABLE: u8 = 69;
/// The reader of the output exited: 128 + SIGPIPE, as in a shell.
pub const READER_GONE: u8 = 141;
/// Ended by Ctrl-C: 128 + SIGINT.
pub const INTERRUPTED: u8 = 130;
/// The terminal was closed: 128 + SIGHUP.
pub const HUNG_UP: u8 = 129;
/// Ended by `kill`: 128 + SIGTERM.
pub const TERMINATED: u8 = 143;

/// A command that takes over its code's status failed itself (as `env`, `timeout` and `docker run` report it).
pub const OWN_FAILURE: u8 = 125;

/// The exit code of an error.
pub const fn of(code: ErrorCode) -> u8 {
    match code {
        ErrorCode::InvalidArgument => USAGE,
        ErrorCode::NotFound => NOT_FOUND,
        ErrorCode::AlreadyExists | ErrorCode::Conflict | ErrorCode::Refused | ErrorCode::Busy | ErrorCode::Departed => {
            REFUSED
        }
        ErrorCode::Unsupported => UNSUPPORTED,
        ErrorCode::Unavailable => UNAVAILABLE,
        ErrorCode::Lost | ErrorCode::Corrupt | ErrorCode::Deadline | ErrorCode::Internal => FAILED,
    }
}

/// The exit code of an execution: the code's own status modulo 256, and never 0 for a failure.
pub fn of_execution(code: i32) -> u8 {
    match (code, (code & 0xff) as u8) {
        (0, _) => OK,
        (_, 0) => FAILED,
        (_, low) => low,
    }
}

/// The exit code of a parser error.
pub fn of_parser(error: &clap::Error) -> u8 {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => OK,
        // clap's ErrorKind is not exhaustive: the rest are invalid command lines.
        _ => USAGE,
    }
}
