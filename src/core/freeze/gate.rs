//! The rehydration gate: data may not be newer than the code that uses it.
//!
//! Each freeze records which schema revision lived with which commit. Data with a recorded revision may live with code at
//! one of these commits or at a descendant of one. A revision that was never recorded is judged by those of the highest
//! recorded `user_version` that is not above its own; without one, it is not judged.
//!
//! A freeze that a client takes records whatever is there: the client says that it belongs together. A safety freeze
//! records only pairs that the gate admits, or a state that came about by hand would be legal ever after because
//! something else was restored. A restore is not judged by pairs that the restored freeze itself holds, so an undo always
//! goes back.
//!
//! Git does not run in the workspace of a kernel, so there the order of the freezes decides: code is older than data if
//! none recorded both, and the first one with the code's commit is before the first one with the data's revision.

use super::SchemaRevision;
use super::refs::CommitId;

/// A schema revision that was seen with a commit.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Pairing {
    /// The database's name in its group.
    pub database: String,
    /// Its schema revision.
    pub revision: SchemaRevision,
    /// The repository's name in its group.
    pub repository: String,
    /// Its commit.
    pub commit: CommitId,
}

impl Pairing {
    /// The name of a repository or a database in the workspace of a member.
    pub fn inside(member: &str, path: &str) -> String {
        format!("{member}:{path}")
    }

    /// Whether the repository is in the workspace of a member.
    pub fn is_inside(&self) -> bool {
        // No name of a member has a colon.
        self.repository.contains(':')
    }

    fn is_of(&self, other: &Pairing) -> bool {
        (&self.database, &self.repository) == (&other.database, &other.repository)
    }
}

/// What the data of a pair was recorded with, oldest first; of a revision that was never recorded, what the newest older
/// schema version was.
pub fn judged_by<'a>(pair: &Pairing, recorded: &'a [Pairing]) -> Vec<&'a Pairing> {
    let of = || recorded.iter().filter(|seen| seen.is_of(pair));
    let same: Vec<&Pairing> = of().filter(|seen| seen.revision == pair.revision).collect();
    if !same.is_empty() {
        return same;
    }
    // 0: the database counts no versions.
    let versions = of().map(|seen| seen.revision.user_version).filter(|version| *version > 0);
    let newest = versions.filter(|version| *version <= pair.revision.user_version).max();
    of().filter(|seen| Some(seen.revision.user_version) == newest).collect()
}

/// The newest commit that the data of a pair was recorded with, if the code of the pair is known to be older.
fn outgrown<'a>(pair: &Pairing, recorded: &'a [Pairing]) -> Option<&'a Pairing> {
    let of = || recorded.iter().enumerate().filter(move |(_, seen)| seen.is_of(pair));
    let judged_by = judged_by(pair, recorded);
    let (first, needs) = (judged_by.first()?, judged_by.last()?);
    let (data, _) = of().find(|(_, seen)| std::ptr::eq(*seen, *first))?;
    let (code, _) = of().find(|(_, seen)| seen.commit == pair.commit)?;
    let is_known = of().any(|(_, seen)| (&seen.revision, &seen.commit) == (&pair.revision, &pair.commit));
    (!is_known && code < data).then_some(*needs)
}

/// How code lies to the commit that its data needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// It is older.
    Older,
    /// Neither follows the other: another branch, or a history that was rewritten.
    Apart,
    /// The repository no longer has the commit.
    Gone,
}

/// Data under code that is older.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The database.
    pub database: String,
    /// The recorded schema revision by which it is judged.
    pub revision: SchemaRevision,
    /// The repository.
    pub repository: String,
    /// The commit that its code would be at.
    pub commit: CommitId,
    /// A commit that the data was seen with.
    pub needs: CommitId,
    /// How the two lie to each other.
    pub order: Order,
}

/// Checks the pairs that would live together. `is_ancestor(repository, a, b)`: whether `b` is `a` or a descendant of it.
///
/// # Errors
/// The first pair of data under older code.
pub fn check(
    would_be: &[Pairing],
    recorded: &[Pairing],
    mut is_ancestor: impl FnMut(&str, &CommitId, &CommitId) -> bool,
) -> Result<(), Box<Refusal>> {
    let refusal = |pair: &Pairing, seen: &Pairing| {
        let (revision, needs) = (seen.revision.clone(), seen.commit.clone());
        let Pairing { database, repository, commit, .. } = pair.clone();
        Box::new(Refusal { database, revision, repository, commit, needs, order: Order::Older })
    };
    for pair in would_be {
        if pair.is_inside() {
            match outgrown(pair, recorded) {
                Some(needs) => return Err(refusal(pair, needs)),
                None => continue,
            }
        }
        let seen = judged_by(pair, recorded);
        let Some(needs) = seen.last() else { continue };
        if !seen.iter().any(|seen| is_ancestor(&pair.repository, &seen.commit, &pair.commit)) {
            return Err(refusal(pair, needs));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(version: i64, commit: u8) -> Pairing {
        Pairing {
            database: "db".into(),
            revision: SchemaRevision { user_version: version, schema: "s".into() },
            repository: "code".into(),
            commit: commit_id(commit),
        }
    }

    fn commit_id(n: u8) -> CommitId {
        format!("{n:040x}").parse().expect("a commit id")
    }

    /// History is a line: a smaller number is an ancestor.
    fn line(_: &str, a: &CommitId, b: &CommitId) -> bool {
        a.as_str() <= b.as_str()
    }

    #[test]
    fn newer_data_is_refused() {
        let recorded = [pair(1, 10), pair(1, 12), pair(2, 20)];
        for (version, commit, fits) in [
            (1, 10, true),
            (1, 11, true),
            (1, 25, true),
            (1, 9, false),
            (2, 20, true),
            (2, 19, false),
            (3, 1, false),
            (3, 21, true),
            (0, 1, true),
        ] {
            let done = check(&[pair(version, commit)], &recorded, line);
            assert_eq!(done.is_ok(), fits, "{version} at {commit}: {done:?}");
        }
        // Another schema with a version that was recorded, as an index that was added makes it.
        let mut other = pair(2, 12);
        other.revision.schema = "other".into();
        assert_eq!(check(&[other], &recorded, line).expect_err("too old").revision.schema, "s");
        // Without versions nothing is known of the order.
        assert_eq!(check(&[pair(5, 1)], &[pair(0, 10)], line), Ok(()));
        let refused = check(&[pair(2, 12)], &recorded, line).expect_err("too old");
        assert_eq!((refused.commit, refused.needs), (commit_id(12), commit_id(20)));
    }

    /// In a workspace the freezes say what is older.
    #[test]
    fn order_decides_in_workspaces() {
        let inside = |version, commit| Pairing { repository: Pairing::inside("agent", "lib"), ..pair(version, commit) };
        let recorded = [inside(1, 10), inside(1, 30), inside(2, 20), inside(2, 40), inside(1, 50), inside(1, 10)];
        let never = |_: &str, _: &CommitId, _: &CommitId| -> bool { panic!("git does not run there") };
        for (version, commit, fits) in [
            (2, 10, false),
            (2, 30, false),
            (2, 20, true),
            (2, 50, true),
            (1, 40, true),
            // Never recorded.
            (2, 60, true),
            (3, 10, false),
        ] {
            let done = check(&[inside(version, commit)], &recorded, never);
            assert_eq!(done.is_ok(), fits, "{version} at {commit}: {done:?}");
        }
        let refused = check(&[inside(2, 10)], &recorded, never).expect_err("too old");
        assert_eq!((refused.needs, refused.repository), (commit_id(40), "agent:lib".into()));
    }

    #[test]
    fn unrelated_members_are_ignored() {
        let other = Pairing { repository: "docs".into(), ..pair(2, 20) };
        assert_eq!(check(&[pair(2, 1)], &[other], line), Ok(()));
    }
}
