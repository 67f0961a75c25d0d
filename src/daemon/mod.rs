//! The host daemon: arguments, configuration, paths, and the order in which everything starts and ends.

mod args;
mod environment;
mod logging;
mod metrics;
pub mod paths;
mod run;
mod service;

use std::fmt::Display;
use std::io::Write as _;
use std::process::ExitCode;

use clap::Parser as _;

/// Status with which a daemon ends that finds another one with the same data: try again (`EX_TEMPFAIL`).
pub const EXIT_ANOTHER_RUNS: u8 = 75;

/// The daemon's main function.
pub fn main() -> ExitCode {
    let args = args::Args::parse();
    // Whoever starts it may block what it is told to end with, and hand that on.
    if let Err(error) = nix::sys::signal::SigSet::empty().thread_set_mask() {
        complain(format_args!("ryokand: signals cannot be unblocked: {error}"));
    }
    match run::run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The log may not be set up yet: whoever started the daemon reads this.
            complain(format_args!("ryokand: {error:#}"));
            match error.is::<run::AnotherRuns>() {
                true => ExitCode::from(EXIT_ANOTHER_RUNS),
                false => ExitCode::FAILURE,
            }
        }
    }
}

/// Writes a line to stderr; nobody who reads it is no reason to panic.
fn complain(what: impl Display) {
    let _ = writeln!(std::io::stderr(), "{what}");
}
