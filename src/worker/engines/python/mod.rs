//! Starts the Python engine: the host's CPython with the driver's sources, which never touch a
//! disk.
//!
//! `python3 -I -c BOOTSTRAP` reads the driver's modules from descriptor 4: compiled if available,
//! and their sources.

mod compiled;

use super::sources;
use crate::core::error::{Error, Result};
use crate::link::bootstrap::EngineSettings;
use crate::sandbox::EngineProgram;

pub use compiled::{compiled, read as read_compiled};

/// The text after `-c`.
const BOOTSTRAP: &str = include_str!("driver/bootstrap.py");
/// Every other module of the driver.
const DRIVER: &str = include_str!(concat!(env!("OUT_DIR"), "/python_driver.json"));

/// The engine's program; `compiled` is its compiled driver, or empty.
///
/// # Errors
/// `InvalidArgument` without an interpreter in the settings.
pub fn program(settings: &EngineSettings, compiled: &[u8], env: Vec<(String, String)>) -> Result<EngineProgram> {
    if settings.interpreter.is_empty() {
        return Err(Error::invalid("no Python interpreter is set").hint("set `python` in the configuration"));
    }
    let argv = settings.interpreter.iter().cloned().chain(["-I", "-c", BOOTSTRAP].map(str::to_owned)).collect();
    Ok(EngineProgram::Exec { argv, env, extra_fd: Some(sources::held(compiled, DRIVER)?) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn python_driver_has_main_module() {
        let modules: serde_json::Map<String, serde_json::Value> = serde_json::from_str(DRIVER).expect("one object");
        assert!(modules.contains_key("main") && !modules.contains_key("bootstrap"));
    }
}
