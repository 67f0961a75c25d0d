//! Starts the engine: the driver is part of the worker, a fork of init; bash is the host's.

use super::serve::EXIT_SETUP;
use super::{Setup, serve};
use crate::core::error::{Error, Result};
use crate::link::bootstrap::EngineSettings;
use crate::sandbox::EngineProgram;
use crate::sys::process::{adopt, exit_now, let_large_writes_fail};

/// The engine's program.
///
/// # Errors
/// `InvalidArgument` without a shell in the settings.
pub fn program(settings: &EngineSettings, env: Vec<(String, String)>) -> Result<EngineProgram> {
    if settings.interpreter.first().is_none_or(String::is_empty) {
        return Err(Error::invalid("no bash is set").hint("set engines.bash.command in the configuration"));
    }
    Ok(EngineProgram::Call { entry: run, arguments: settings.interpreter.clone(), env })
}

/// Becomes the engine, with descriptors 1, 2 and 3 and the variables of the environment.
fn run(argv: Vec<String>) -> ! {
    if let Err(error) = let_large_writes_fail() {
        tracing::warn!(%error, "a file that grows too large ends the shell");
    }
    let setup = Setup { argv, vars: std::env::vars().collect(), ..Setup::default() };
    exit_now(match (adopt(3), adopt(1), adopt(2)) {
        (Ok(control), Ok(stdout), Ok(stderr)) => serve(control, stdout, stderr, setup),
        _ => EXIT_SETUP,
    })
}
