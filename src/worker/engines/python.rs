//! How the Python engine is started: the host's CPython with the driver's sources, which never touch a disk.
//!
//! `python3 -I -c BOOTSTRAP` reads the driver's modules from descriptor 4: compiled ones where there are, and their sources.

mod compiled;

use std::fs::File;
use std::io::{Seek, Write};
use std::os::fd::OwnedFd;

use nix::sys::memfd::{MFdFlags, memfd_create};

use super::EngineSettings;
use crate::core::error::{Error, Result};
use crate::sandbox::EngineProgram;

pub use compiled::{compiled, read as read_compiled};

/// The text after `-c`.
const BOOTSTRAP: &str = include_str!("python/driver/bootstrap.py");
/// Every other module of the driver.
const DRIVER: &str = include_str!(concat!(env!("OUT_DIR"), "/python_driver.json"));

/// The program of the engine; `compiled` is its compiled driver, or empty.
///
/// # Errors
/// `InvalidArgument` without an interpreter in the settings.
pub fn program(settings: &EngineSettings, compiled: &[u8], env: Vec<(String, String)>) -> Result<EngineProgram> {
    if settings.python.is_empty() {
        return Err(Error::invalid("no Python interpreter is set").hint("set `python` in the configuration"));
    }
    let argv = settings.python.iter().cloned().chain(["-I", "-c", BOOTSTRAP].map(str::to_owned)).collect();
    let driver =
        driver(compiled).map_err(|e| Error::internal(format!("cannot hold the Python driver in memory: {e}")))?;
    Ok(EngineProgram::Exec { argv, env, extra_fd: Some(driver) })
}

/// The driver as an unnamed file, to be read from its beginning.
fn driver(compiled: &[u8]) -> std::io::Result<OwnedFd> {
    let mut file = File::from(memfd_create(c"ryokan-driver", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(&(compiled.len() as u64).to_le_bytes())?;
    file.write_all(compiled)?;
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
        let mut bytes = Vec::new();
        let mut file = File::from(driver(b"code").expect("a file"));
        std::io::Read::read_to_end(&mut file, &mut bytes).expect("readable");
        assert_eq!(bytes, [&4u64.to_le_bytes(), &b"code"[..], DRIVER.as_bytes()].concat());
    }
}
