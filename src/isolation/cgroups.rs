//! The cgroups of a daemon's workers.

use std::path::{Path, PathBuf};

use crate::core::ids::{HostId, WorkerId};

/// Number of attempts to remove a cgroup that is still in use.
const CGROUP_TRIES: u32 = 25;
/// The pause between attempts.
const CGROUP_PAUSE: std::time::Duration = std::time::Duration::from_millis(20);

/// The cgroups of a daemon's workers. Daemons may share the folder; the prefix of a name identifies the daemon.
#[derive(Debug, Clone)]
pub(in crate::isolation) struct Cgroups {
    pub base: PathBuf,
    pub prefix: String,
}

impl Cgroups {
    /// The cgroups of a host's workers in the delegated folder.
    pub(in crate::isolation) fn new(base: PathBuf, host: HostId) -> Cgroups {
        Cgroups { base, prefix: format!("worker-{host}-") }
    }

    pub(in crate::isolation) fn of(&self, worker: WorkerId) -> PathBuf {
        self.base.join(format!("{}{worker}", self.prefix))
    }

    /// The cgroups of this daemon's workers that are not in `known`.
    pub(in crate::isolation) fn stale(&self, known: &[WorkerId]) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.base).into_iter().flatten().flatten();
        let is_stale = |entry: &std::fs::DirEntry| {
            let name = entry.file_name().to_string_lossy().into_owned();
            let worker = name.strip_prefix(&self.prefix).and_then(|id| id.parse::<WorkerId>().ok());
            worker.is_some_and(|worker| !known.contains(&worker))
        };
        entries.filter(is_stale).map(|entry| entry.path()).collect()
    }
}

/// Removes a cgroup, with retries: the host kernel may need a moment to release the last process.
pub(in crate::isolation) async fn remove_cgroup(path: &Path) {
    for _ in 0..CGROUP_TRIES {
        match crate::sandbox::cgroup::remove(path) {
            Ok(()) => return,
            Err(error) => tracing::debug!(path = %path.display(), %error, "a cgroup is still in use"),
        }
        tokio::time::sleep(CGROUP_PAUSE).await;
    }
    tracing::warn!(path = %path.display(), "a worker's cgroup could not be removed; the next start of the daemon tries again");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plain folders suffice here: only names matter.
    #[test]
    fn known_cgroups_are_not_stale() {
        let base = tempfile::tempdir().expect("a folder");
        let of = |host: &str| Cgroups { base: base.path().to_owned(), prefix: format!("worker-{host}-") };
        let (own, other) = (of("aa"), of("bb"));
        let [known, unknown] = [WorkerId::from_bytes([1; 16]), WorkerId::from_bytes([2; 16])];
        let stay = [own.of(known), other.of(unknown), base.path().join("worker-aa-no-id"), base.path().join("else")];
        for folder in stay.iter().chain([&own.of(unknown)]) {
            std::fs::create_dir_all(folder.join("engine")).expect("made");
        }
        assert_eq!(own.stale(&[known]), [own.of(unknown)]);
    }
}
