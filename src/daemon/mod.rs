//! The host daemon: arguments, configuration, paths, and the order of start and shutdown.

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

/// Exit status of a daemon that finds its data in use by another daemon: try again (`EX_TEMPFAIL`).
pub const EXIT_ANOTHER_RUNS: u8 = 75;

/// The daemon's main function.
pub fn main() -> ExitCode {
    let args = args::Args::parse();
    // The parent process may have blocked the termination signals, and a child inherits its mask.
    if let Err(error) = nix::sys::signal::SigSet::empty().thread_set_mask() {
        complain(format_args!("ryokand: signals cannot be unblocked: {error}"));
    }
    match run::run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The log may not be configured yet; the parent process reads stderr.
            complain(format_args!("ryokand: {error:#}"));
            match error.is::<run::AnotherRuns>() {
                true => ExitCode::from(EXIT_ANOTHER_RUNS),
                false => ExitCode::FAILURE,
            }
        }
    }
}

/// Writes a line to stderr. A closed stderr must not cause a panic.
fn complain(what: impl Display) {
    let _ = writeln!(std::io::stderr(), "{what}");
}
