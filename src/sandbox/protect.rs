//! The hidden parts of a mount: ryokan's own folders, whatever path a kernel's owner chooses. Pure.

use std::path::{Path, PathBuf};

use super::layer::{Layer, SandboxError};
use crate::core::spec::NEVER_SHOWN;

/// The places inside to cover when `source` (without symbolic links) is mounted at `inside`.
///
/// # Errors
/// If the source itself is in a protected folder.
pub(super) fn covers(inside: &Path, source: &Path, protected: &[PathBuf]) -> Result<Vec<PathBuf>, SandboxError> {
    let mut covers = Vec::new();
    for folder in protected.iter().map(PathBuf::as_path).chain(NEVER_SHOWN.iter().map(Path::new)) {
        if source.starts_with(folder) {
            return Err(SandboxError::new(
                Layer::PivotRoot,
                format!("{source:?} cannot be given to a kernel: it lies in {folder:?}, which is ryokan's or the system's own"),
            )
            .hint("give a path outside of it"));
        }
        if let Ok(below) = folder.strip_prefix(source) {
            covers.push(inside.join(below));
        }
    }
    Ok(covers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protected_folders_are_covered_or_refused() {
        let protected = [PathBuf::from("/home/amy/.local/share/ryokan"), PathBuf::from("/run/user/1000/ryokan")];
        let covers = |inside: &str, source: &str| covers(Path::new(inside), Path::new(source), &protected);
        assert_eq!(covers("/home/amy", "/home/amy"), Ok(vec!["/home/amy/.local/share/ryokan".into()]));
        assert_eq!(covers("/x", "/home/amy/.local"), Ok(vec!["/x/share/ryokan".into()]));
        assert_eq!(covers("/home/amy/src", "/home/amy/src"), Ok(vec![]));
        assert_eq!(covers("/srv", "/srv"), Ok(vec![]));
        assert_eq!(covers("/host", "/").map(|c| c.len()), Ok(5));
        for inside in
            ["/home/amy/.local/share/ryokan", "/home/amy/.local/share/ryokan/kernels/x", "/proc/1", "/dev/shm"]
        {
            assert!(covers("/x", inside).is_err(), "{inside}");
        }
        assert_eq!(covers("/x", "/home/amy/.local/share/ryokan2"), Ok(vec![]));
    }
}
