//! What a freeze holds of submodules.

use serde::{Deserialize, Serialize};

use super::RepositoryPart;
use super::refs::CommitId;
use crate::core::ids::Digest;
use crate::core::limits;

/// A submodule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SubmodulePart {
    /// Its directory within the repository.
    pub path: String,
    /// The commit that is checked out; of one that is not initialised, the one that the index records.
    pub commit: CommitId,
    /// Its content; `None`: not initialised.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<RepositoryPart>,
}

impl RepositoryPart {
    /// The stored objects of the repository and its submodules.
    pub fn packs(&self) -> Vec<Digest> {
        let inner = self.submodules.iter().filter_map(|one| one.part.as_ref()).flat_map(RepositoryPart::packs);
        self.pack.into_iter().chain(inner).collect()
    }

    /// The repository, with an empty path, and its initialised submodules, those inside of others too: outer ones first.
    pub fn with_submodules(&self) -> Vec<(String, &RepositoryPart)> {
        let mut found = vec![(String::new(), self)];
        for one in &self.submodules {
            let Some(part) = &one.part else { continue };
            let below = part.with_submodules().into_iter();
            found.extend(below.map(|(path, part)| (join(&one.path, &path), part)));
        }
        found
    }

    /// Checks that the paths of submodules stay in the repository, and that there are not too many; `depth` of the
    /// repository itself is 0.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check_submodules(&self, depth: usize) -> Result<(), String> {
        if self.submodules.len() > limits::GIT_SUBMODULES
            || (!self.submodules.is_empty() && depth >= limits::GIT_SUBMODULE_DEPTH)
        {
            return Err("too many submodules".into());
        }
        for (at, one) in self.submodules.iter().enumerate() {
            let is_plain = |part: &str| {
                !matches!(part, "" | "." | "..")
                    && !part.eq_ignore_ascii_case(".git")
                    && !part.chars().any(char::is_control)
            };
            if one.path.len() > limits::PATH_BYTES || !one.path.split('/').all(is_plain) {
                return Err("the path of a submodule leads out of its repository".into());
            }
            let overlaps = |other: &SubmodulePart| {
                let below = |outer: &str, inner: &str| {
                    inner.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
                };
                below(&one.path, &other.path) || below(&other.path, &one.path)
            };
            if self.submodules[..at].iter().any(overlaps) {
                return Err("the paths of two submodules overlap".into());
            }
            if let Some(part) = &one.part {
                if part.head.commit != one.commit {
                    return Err(format!("submodule {} is at two commits", one.path));
                }
                part.check_submodules(depth + 1)?;
            }
        }
        Ok(())
    }
}

/// The path of a submodule in another one; empty: the other one.
pub fn join(outer: &str, inner: &str) -> String {
    match (outer, inner) {
        ("", path) | (path, "") => path.to_owned(),
        (outer, inner) => format!("{outer}/{inner}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::freeze::refs::Head;

    fn repository(submodules: Vec<SubmodulePart>) -> RepositoryPart {
        let commit: CommitId = "a".repeat(40).parse().expect("a commit");
        RepositoryPart {
            head: Head { commit: commit.clone(), branch: None },
            index_tree: commit.clone(),
            work_tree: commit,
            changed: 0,
            untracked: 0,
            pack: None,
            dependencies: Vec::new(),
            submodules,
            worktrees: Vec::new(),
            linked_to: None,
            left_out: Vec::new(),
            marks: Default::default(),
        }
    }

    fn submodule(path: &str, inner: Vec<SubmodulePart>) -> SubmodulePart {
        let part = repository(inner);
        SubmodulePart { path: path.into(), commit: part.head.commit.clone(), part: Some(part) }
    }

    #[test]
    fn hostile_paths_are_refused() {
        let inner = vec![submodule("inner", Vec::new())];
        let good = repository(vec![submodule("lib", inner), submodule("vendor/x", Vec::new())]);
        assert_eq!(good.check_submodules(0), Ok(()));
        let paths: Vec<String> = good.with_submodules().into_iter().map(|(path, _)| path).collect();
        assert_eq!(paths, ["", "lib", "lib/inner", "vendor/x"]);
        for path in ["", "/etc", "..", "a/../b", ".git/hooks", "a/.GIT", "a//b", "a/.", "a\nb", &"a".repeat(5000)] {
            let nested = repository(vec![submodule("lib", vec![submodule(path, Vec::new())])]);
            assert!(nested.check_submodules(0).is_err(), "{path:?}");
        }
        for (one, other) in [("lib", "lib"), ("lib", "lib/x"), ("lib/x", "lib")] {
            let both = repository(vec![submodule(one, Vec::new()), submodule(other, Vec::new())]);
            assert!(both.check_submodules(0).is_err(), "{one} {other}");
        }
        let many = (0..=limits::GIT_SUBMODULES).map(|n| submodule(&n.to_string(), Vec::new())).collect();
        assert!(repository(many).check_submodules(0).is_err());
        let deep = (0..=limits::GIT_SUBMODULE_DEPTH).fold(Vec::new(), |inner, _| vec![submodule("a", inner)]);
        assert!(repository(deep).check_submodules(0).is_err());
    }
}
