//! Starts the node engine: the host's Node.js with the driver's sources, which never touch a disk.
//!
//! `node -e BOOTSTRAP` reads the driver's modules from descriptor 4.

use super::sources;
use crate::core::error::{Error, Result};
use crate::link::bootstrap::EngineSettings;
use crate::sandbox::EngineProgram;

/// The text after `-e`.
const BOOTSTRAP: &str = include_str!("node/driver/bootstrap.js");
/// Every other module of the driver.
const DRIVER: &str = include_str!(concat!(env!("OUT_DIR"), "/node_driver.json"));
/// Node.js flags.
const FLAGS: [&str; 3] = ["--no-force-async-hooks-checks", "--expose-internals", "--v8-pool-size=1"];

/// The engine's program.
///
/// # Errors
/// `InvalidArgument` without an interpreter in the settings.
pub fn program(settings: &EngineSettings, env: Vec<(String, String)>) -> Result<EngineProgram> {
    if settings.interpreter.is_empty() {
        return Err(Error::invalid("no Node.js is set").hint("set engines.node.command in the configuration"));
    }
    let own = FLAGS.into_iter().chain(["-e", BOOTSTRAP]).map(str::to_owned);
    let argv = settings.interpreter.iter().cloned().chain(own).collect();
    Ok(EngineProgram::Exec { argv, env, extra_fd: Some(sources::held(&[], DRIVER)?) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_driver_has_main_module() {
        let modules: serde_json::Map<String, serde_json::Value> = serde_json::from_str(DRIVER).expect("one object");
        assert!(modules.contains_key("main") && !modules.contains_key("bootstrap"));
    }
}
