//! How the Python engine is started.

use super::EngineSettings;
use crate::core::error::{Error, Result};
use crate::sandbox::EngineProgram;

/// The interpreter with the driver's first file; the rest comes through descriptor 4.
///
/// # Errors
/// `Unsupported` if there is no interpreter.
pub fn program(settings: &EngineSettings, env: Vec<(String, String)>) -> Result<EngineProgram> {
    let _ = (settings, env);
    Err(Error::unsupported("this build has no Python engine"))
}
