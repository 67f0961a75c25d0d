//! How the Python engine is started: the host's CPython, in isolated mode, with the driver's modules in a sealed memory file.

use std::fs::File;
use std::io::{Seek, Write};
use std::os::fd::OwnedFd;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

use super::EngineSettings;
use crate::core::error::{Error, Result};
use crate::sandbox::EngineProgram;

/// Reads the modules from descriptor 4 and starts the driver.
const BOOTSTRAP: &str = include_str!("python/driver/bootstrap.py");

macro_rules! modules {
    ($($name:literal),* $(,)?) => {
        /// The driver's modules by name.
        const MODULES: &[(&str, &str)] = &[$(($name, include_str!(concat!("python/driver/", $name, ".py")))),*];
    };
}

modules![
    "answers", "brief", "complete", "definitions", "dynamic", "effects", "entries", "execute", "functions", "gate", "groups",
    "jobs", "main", "privacy", "restore", "rich", "run", "schema", "settings", "shell", "state", "streams", "trace", "values",
    "wire",
];

/// The interpreter with the driver's first file; the rest comes through descriptor 4.
///
/// # Errors
/// `Unsupported` if there is no interpreter.
pub fn program(settings: &EngineSettings, env: Vec<(String, String)>) -> Result<EngineProgram> {
    let (interpreter, arguments) = settings
        .python
        .split_first()
        .ok_or_else(|| Error::invalid("engines.python.command is empty").hint("name the interpreter in the configuration"))?;
    let interpreter = crate::sandbox::find_program(interpreter.as_ref()).ok_or_else(|| {
        Error::unsupported(format!("there is no Python interpreter {interpreter:?} that kernels could see"))
            .reason("python")
            .hint("install python3 below /usr, or name another interpreter in engines.python.command")
    })?;
    let mut argv = vec![interpreter.display().to_string()];
    argv.extend(arguments.iter().cloned());
    argv.extend(["-I", "-c", BOOTSTRAP].map(str::to_owned));
    let modules = modules_file().map_err(|error| Error::internal(format!("the Python driver's file: {error}")))?;
    Ok(EngineProgram::Exec { argv, env, extra_fd: Some(modules) })
}

/// All modules as one JSON object in a file that nobody can change.
fn modules_file() -> std::io::Result<OwnedFd> {
    let sources: std::collections::BTreeMap<&str, &str> = MODULES.iter().copied().collect();
    let mut file = File::from(memfd_create(c"ryokan-python", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?);
    file.write_all(&serde_json::to_vec(&sources)?)?;
    file.rewind()?;
    let seals = SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_module_of_the_driver_is_shipped() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/worker/engines/python/driver");
        let mut there: Vec<String> = std::fs::read_dir(folder)
            .expect("the driver's folder")
            .filter_map(|entry| Some(entry.ok()?.path().file_stem()?.to_str()?.to_owned()))
            .filter(|name| name != "bootstrap" && !name.starts_with("__"))
            .collect();
        there.sort();
        let listed: Vec<&str> = MODULES.iter().map(|(name, _)| *name).collect();
        assert_eq!(there, listed);
    }
}
