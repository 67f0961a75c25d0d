//! Submodules in `ryokan.lock`.

use serde::{Deserialize, Serialize};

use super::RepositoryPart;

/// A submodule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LockedSubmodule {
    /// Its directory within the member's.
    pub path: String,
    /// The commit that is checked out; of one that is not initialised, the recorded one.
    pub commit: String,
    /// `clean`, `changed` (it has uncommitted work, which is captured) or `uninitialised`.
    pub state: String,
    /// Its branch; empty: detached.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub branch: String,
    /// Git's tree of the index.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub index: String,
    /// Git's tree of all files that are not ignored.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub files: String,
}

/// The submodules of a repository, outer ones first.
pub fn of(part: &RepositoryPart) -> Vec<LockedSubmodule> {
    let mut found = Vec::new();
    for one in &part.submodules {
        let (path, commit) = (one.path.clone(), one.commit.to_string());
        let Some(part) = &one.part else {
            let (branch, index, files) = Default::default();
            found.push(LockedSubmodule { path, commit, state: "uninitialised".into(), branch, index, files });
            continue;
        };
        // A staged change that the files take back is work too.
        let is_clean = part.changed == 0 && part.index_tree == part.work_tree;
        found.push(LockedSubmodule {
            path,
            commit,
            state: if is_clean { "clean" } else { "changed" }.into(),
            branch: part.head.branch.clone().unwrap_or_default(),
            index: part.index_tree.to_string(),
            files: part.work_tree.to_string(),
        });
        let inner = of(part).into_iter();
        found.extend(inner.map(|inner| LockedSubmodule { path: format!("{}/{}", one.path, inner.path), ..inner }));
    }
    found
}

/// How submodules of a repository differ from earlier ones, for people.
pub(super) fn differences(name: &str, now: &[LockedSubmodule], before: &[LockedSubmodule], reported: &mut Vec<String>) {
    for then in before {
        let what = format!("submodule {} of {name}", then.path);
        match now.iter().find(|now| now.path == then.path) {
            None => reported.push(format!("{what} is gone")),
            Some(now) if now.state != then.state && [&now.state, &then.state].iter().any(|s| *s == "uninitialised") => {
                reported.push(format!("{what} is {}, not {}", now.state, then.state));
            }
            Some(now) if now.commit != then.commit => {
                let short = |commit: &str| commit.get(..10).unwrap_or(commit).to_owned();
                reported.push(format!("{what} is at {}, not at {}", short(&now.commit), short(&then.commit)));
            }
            Some(now) if (&now.files, &now.index) != (&then.files, &then.index) => {
                reported.push(format!("{what} has other files"));
            }
            Some(now) if now.branch != then.branch => reported.push(format!("{what} is on another branch")),
            Some(_) => {}
        }
    }
    let new = now.iter().filter(|now| before.iter().all(|then| then.path != now.path));
    reported.extend(new.map(|now| format!("submodule {} of {name} is new", now.path)));
}
