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
    found.truncate(limits::FREEZE_PAIRINGS);
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
