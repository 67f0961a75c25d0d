//! The virtual environment of a Python kernel. Pure.

use std::path::Path;

use super::engine::EngineName;
use super::limits;
use super::spec::{AllowedPath, KernelSpec, SpecError, WORKSPACE};

/// Host folders that every kernel sees.
const ALWAYS_SEEN: [&str; 3] = ["/usr", "/opt", "/nix"];

/// Whether a virtual environment is in the workspace: part of the kernel, not of its host.
pub fn is_in_workspace(venv: &Path) -> bool {
    venv.starts_with(WORKSPACE)
}

impl KernelSpec {
    /// Allows the path of the virtual environment, read-only, unless the kernel sees it already.
    pub fn allow_venv(&mut self) {
        if let Some(venv) = self.venv.clone().filter(|venv| !self.sees(venv)) {
            self.paths.push(AllowedPath::new(venv, false));
        }
    }

    /// Removes a virtual environment that neither the workspace nor a path of the specification holds.
    pub fn drop_unseen_venv(&mut self) {
        let paths = &self.paths;
        let is_held = |venv: &std::path::PathBuf| {
            is_in_workspace(venv) || paths.iter().any(|allowed| venv.starts_with(&allowed.path))
        };
        self.venv = self.venv.take().filter(is_held);
    }

    fn sees(&self, venv: &Path) -> bool {
        let always = ALWAYS_SEEN.iter().any(|folder| venv.starts_with(folder));
        always || is_in_workspace(venv) || self.paths.iter().any(|allowed| venv.starts_with(&allowed.path))
    }

    /// Checks the virtual environment.
    pub(super) fn check_venv(&self) -> Result<(), SpecError> {
        let Some(venv) = &self.venv else { return Ok(()) };
        // The rules of paths that can be given, but for the reserved folders.
        let is_plain = venv.components().all(|part| !matches!(part, std::path::Component::ParentDir));
        let is_text = venv.to_str().is_some_and(|text| !text.contains('\0') && text.len() < limits::PATH_BYTES);
        if self.engine != EngineName::Python {
            return Err(SpecError::VenvEngine(self.engine));
        }
        if !venv.is_absolute() || !is_plain || !is_text {
            return Err(SpecError::Path(venv.clone()));
        }
        if venv == Path::new(WORKSPACE) || !self.sees(venv) {
            return Err(SpecError::VenvUnseen(venv.clone()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(venv: &str, paths: &[&str]) -> KernelSpec {
        let mut spec = KernelSpec::new("k".parse().expect("name"), EngineName::Python);
        spec.venv = Some(venv.into());
        spec.paths = paths.iter().map(|path| AllowedPath::new(path, true)).collect();
        spec
    }

    #[test]
    fn unseen_venv_adds_path() {
        for (venv, paths, added) in [
            ("/home/amy/venv", &[][..], true),
            ("/home/amy/venv", &["/home/amy/ven"], true),
            ("/home/amy/venv", &["/home/amy"], false),
            ("/home/amy/venv", &["/home/amy/venv"], false),
            ("/workspace/.venv", &[], false),
            ("/opt/venv", &[], false),
        ] {
            let mut spec = with(venv, paths);
            spec.allow_venv();
            assert_eq!(spec.paths.len(), paths.len() + usize::from(added), "{venv} {paths:?}");
            assert_eq!(spec.check(), Ok(()), "{venv}");
            assert!(!added || spec.paths.last().is_some_and(|path| !path.writable));
        }
    }

    #[test]
    fn wrong_venv_is_refused() {
        assert!(matches!(with("/home/venv", &[]).check(), Err(SpecError::VenvUnseen(_))));
        assert!(matches!(with("/workspace", &[]).check(), Err(SpecError::VenvUnseen(_))));
        assert!(matches!(with("/opt/../home", &[]).check(), Err(SpecError::Path(_))));
        assert!(matches!(with("venv", &[]).check(), Err(SpecError::Path(_))));
        let bash = KernelSpec { engine: EngineName::Bash, ..with("/opt/venv", &[]) };
        assert_eq!(bash.check(), Err(SpecError::VenvEngine(EngineName::Bash)));
    }

    #[test]
    fn unseen_venv_is_dropped() {
        for (venv, paths, stays) in [
            ("/home/venv", &[][..], false),
            ("/home/venv", &["/home"], true),
            ("/workspace/v", &[], true),
            ("/opt/v", &[], false),
        ] {
            let mut spec = with(venv, paths);
            spec.drop_unseen_venv();
            assert_eq!(spec.venv.is_some(), stays, "{venv} {paths:?}");
        }
    }
}
