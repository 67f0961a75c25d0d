//! How the Python engine is started: the host's CPython with the driver's sources, which never touch a disk.
//!
//! `python3 -I -c BOOTSTRAP` reads the driver's modules, one JSON object `{"name": "source"}`, from descriptor 4.

use std::fs::File;
use std::io::{Seek, Write};
use std::os::fd::OwnedFd;

use nix::sys::memfd::{MFdFlags, memfd_create};

use super::EngineSettings;
use crate::core::error::{Error, Result};
use crate::sandbox::EngineProgram;

/// The text after `-c`.
const BOOTSTRAP: &str = include_str!("python/driver/bootstrap.py");
/// Every other module of the driver.
const DRIVER: &str = include_str!(concat!(env!("OUT_DIR"), "/python_driver.json"));

/// The program of the engine.
///
/// # Errors
/// `InvalidArgument` without an interpreter in the settings.
pub fn program(settings: &EngineSettings, env: Vec<(String, String)>) -> Result<EngineProgram> {
    if settings.python.is_empty() {
        return Err(Error::invalid("no Python interpreter is set").hint("set `python` in the configuration"));
    }
    let argv = settings.python.iter().cloned().chain(["-I", "-c", BOOTSTRAP].map(str::to_owned)).collect();
    let driver = driver().map_err(|e| Error::internal(format!("cannot hold the Python driver in memory: {e}")))?;
    Ok(EngineProgram::Exec { argv, env, extra_fd: Some(driver) })
}

/// The driver as an unnamed file, to be read from its beginning.
fn driver() -> std::io::Result<OwnedFd> {
    let mut file = File::from(memfd_create(c"ryokan-driver", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(DRIVER.as_bytes())?;
    file.rewind()?;
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_is_whole() {
        let modules: serde_json::Map<String, serde_json::Value> = serde_json::from_str(DRIVER).expect("one object");
        assert!(modules.contains_key("main") && !modules.contains_key("bootstrap"));
        let mut text = String::new();
        std::io::Read::read_to_string(&mut File::from(driver().expect("a file")), &mut text).expect("readable");
        assert_eq!(text, DRIVER);
    }
}
