//! Which schema revisions are with which commits in the parts of a freeze.

use crate::core::freeze::gate::Pairing;
use crate::core::freeze::refs::CommitId;
use crate::core::freeze::{Captured, DatabasePart, Part, SchemaRevision};
use crate::core::limits;

/// A database or a repository of a member: its name, and the member if it is in a workspace.
type Of<'a, T> = (String, Option<&'a str>, T);

/// The pairs of a freeze: those of members first, then those in workspaces, at most [`limits::FREEZE_PAIRINGS`]. What is in
/// one workspace is always restored together.
pub(super) fn pairings(parts: &[Part]) -> Vec<Pairing> {
    let mut found = all(parts);
    found.truncate(limits::FREEZE_PAIRINGS);
    found
}

/// What a client must know of the pairs beyond that number.
pub(super) fn omitted(parts: &[Part]) -> Option<String> {
    let omitted = all(parts).len().saturating_sub(limits::FREEZE_PAIRINGS);
    let most = limits::FREEZE_PAIRINGS;
    (omitted > 0).then(|| {
        format!("{omitted} pairs of databases and repositories in workspaces, of more than {most}, are not compared")
    })
}

fn all(parts: &[Part]) -> Vec<Pairing> {
    let (databases, commits) = (databases(parts), commits(parts));
    let mut found = Vec::new();
    for (database, place, revision) in &databases {
        for (repository, other, commit) in &commits {
            if place.is_none() || place != other {
                let (database, repository) = (database.clone(), repository.clone());
                found.push(Pairing { database, revision: revision.clone(), repository, commit: (*commit).clone() });
            }
        }
    }
    found.sort_by_key(|pair| (pair.is_inside(), pair.database.contains(':')));
    found
}

fn databases(parts: &[Part]) -> Vec<Of<'_, SchemaRevision>> {
    let mut found = Vec::new();
    for part in parts {
        let own = match &part.captured {
            Captured::Database { part: DatabasePart::Whole { revision, .. }, .. } => Some(revision),
            Captured::Postgres { part, .. } => part.revision.as_ref(),
            Captured::Server { part, .. } => part.revision.as_ref(),
            Captured::Kernel { revision, .. } => {
                // 0: the application does not count.
                for one in revision.databases.iter().filter(|one| one.user_version != 0) {
                    let revision = SchemaRevision { user_version: one.user_version, schema: String::new() };
                    found.push((Pairing::inside(&part.name, &one.path), Some(&*part.name), revision));
                }
                None
            }
            Captured::Database { .. }
            | Captured::Repository { .. }
            | Captured::Directory { .. }
            | Captured::Command { .. } => None,
        };
        found.extend(own.map(|revision| (part.name.clone(), None, revision.clone())));
    }
    found
}

fn commits(parts: &[Part]) -> Vec<Of<'_, &CommitId>> {
    let mut found = Vec::new();
    for part in parts {
        match &part.captured {
            Captured::Repository { part: captured, .. } => {
                found.push((part.name.clone(), None, &captured.head.commit));
            }
            Captured::Kernel { repositories, .. } => {
                for one in repositories {
                    let Some(head) = &one.head else { continue };
                    found.push((Pairing::inside(&part.name, &one.path), Some(&*part.name), &head.commit));
                }
            }
            Captured::Database { .. }
            | Captured::Directory { .. }
            | Captured::Command { .. }
            | Captured::Postgres { .. }
            | Captured::Server { .. } => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::freeze::KernelRevision;
    use crate::core::freeze::refs::{Head, RepositoryLock};
    use crate::core::freeze::workspace_database::WorkspaceDatabase;
    use crate::core::ids::{CheckpointId, Digest, KernelId};

    #[test]
    fn omitted_pairs_are_named() {
        let kernel = |name: &str, databases: usize, repositories: usize| {
            let commit: CommitId = "00112233445566778899aabbccddeeff00112233".parse().expect("a commit");
            let head = Some(Head { commit, branch: None });
            let repository = |n| RepositoryLock {
                path: format!("r{n}"),
                head: head.clone(),
                note: String::new(),
                index: None,
                files: Digest::from_bytes([0; 32]),
                linked: None,
            };
            let database = |n| WorkspaceDatabase { path: format!("d{n}"), user_version: 1 };
            let revision =
                KernelRevision { databases: (0..databases).map(database).collect(), ..KernelRevision::default() };
            let captured = Captured::Kernel {
                kernel: KernelId::from_bytes([0; 16]),
                kernel_name: name.into(),
                checkpoint: CheckpointId::from_bytes([0; 16]),
                manifest: None,
                repositories: (0..repositories).map(repository).collect(),
                under_way: 0,
                revision,
            };
            Part { name: name.into(), captured, driver: String::new(), storage: Default::default() }
        };
        let parts = [kernel("a", 70, 0), kernel("b", 0, 60)];
        assert_eq!(pairings(&parts).len(), limits::FREEZE_PAIRINGS);
        assert!(omitted(&parts).is_some_and(|note| note.starts_with("104 pairs")));
        assert_eq!(omitted(&[kernel("a", 64, 0), kernel("b", 0, 64)]), None);
    }
}
