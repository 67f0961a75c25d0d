//! The engines' interpreters, as a kernel sees them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::core::engine::EngineName;
use crate::core::error::{Error, Result};
use crate::core::venv::is_in_workspace;
use crate::sandbox::{Unfound, find_program};

/// Finds interpreters. Caches those visible to every kernel, since a search follows links.
pub(super) struct Interpreters {
    commands: BTreeMap<EngineName, PathBuf>,
    system_paths: Vec<PathBuf>,
    found: RefCell<BTreeMap<EngineName, PathBuf>>,
}

impl Interpreters {
    pub(super) fn new(commands: BTreeMap<EngineName, PathBuf>, system_paths: Vec<PathBuf>) -> Self {
        Interpreters { commands, system_paths, found: RefCell::default() }
    }

    /// An engine's interpreter inside a kernel with these additional paths; `None` for an engine built into the worker.
    ///
    /// # Errors
    /// `unsupported` if the interpreter is absent or hidden.
    pub(super) fn find<'a>(&self, engine: EngineName, paths: impl Iterator<Item = &'a Path>) -> Result<Option<String>> {
        let Some(command) = self.commands.get(&engine) else { return Ok(None) };
        if let Some(known) = self.found.borrow().get(&engine).filter(|path| path.exists()) {
            return Ok(Some(known.display().to_string()));
        }
        let found = match find_program(command, &self.system_paths) {
            Ok(path) => {
                self.found.borrow_mut().insert(engine, path.clone());
                Ok(path)
            }
            Err(Unfound::Hidden) => {
                let seen: Vec<_> = self.system_paths.iter().cloned().chain(paths.map(Path::to_owned)).collect();
                find_program(command, &seen)
            }
            Err(Unfound::Absent) => Err(Unfound::Absent),
        };
        let found = found.map_err(|why| {
            let (command, hidden) = (command.display(), why == Unfound::Hidden);
            let what = if hidden { "a kernel cannot see the" } else { "there is no" };
            let hint = format!(
                "install {engine} below /usr, name another interpreter in engines.{engine}.command, or its folder in sandbox.system_paths"
            );
            Error::unsupported(format!("{what} interpreter {command} for {engine}")).reason(engine.name()).hint(hint)
        })?;
        Ok(Some(found.display().to_string()))
    }

    /// Checks that a kernel of this user with these additional paths can run the Python of a virtual environment.
    ///
    /// One in the workspace is checked where it is chosen, and with each start; so is another user's, whose files the
    /// daemon must not reveal.
    ///
    /// # Errors
    /// `notFound`, `invalidArgument`, `unsupported`.
    pub(super) fn check_venv<'a>(&self, venv: &Path, paths: impl Iterator<Item = &'a Path>, uid: u32) -> Result<()> {
        if is_in_workspace(venv) || uid != nix::unistd::geteuid().as_raw() {
            return Ok(());
        }
        let seen: Vec<_> = self.system_paths.iter().cloned().chain(paths.map(Path::to_owned)).collect();
        super::venv::check(venv, &seen)
    }
}
