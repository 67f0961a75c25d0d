//! The rehydration gate on this host: git answers what follows what, and a configured program may rebuild code.

use std::collections::HashSet;

use super::access;
use super::members::Live;
use crate::config::Rebuild;
use crate::core::error::{Error, Result};
use crate::core::freeze::gate::{self, Pairing};
use crate::core::freeze::refs::CommitId;
use crate::programs::{Output, Program};
use crate::supervisor::host::Host;

pub(super) use crate::core::freeze::gate::Refusal;

/// Why code and data may not live together.
#[derive(Debug)]
pub(super) enum Judged {
    /// The data is newer than the code.
    Newer(Box<Refusal>),
    /// It could not be judged.
    Failed(Error),
}

impl From<Error> for Judged {
    fn from(error: Error) -> Judged {
        Judged::Failed(error)
    }
}

impl From<Judged> for Error {
    fn from(judged: Judged) -> Error {
        let refusal = match judged {
            Judged::Newer(refusal) => refusal,
            Judged::Failed(error) => return error,
        };
        let Refusal { database, revision, repository, commit, needs } = *refusal;
        Error::refused(format!(
            "schema {revision} of {database} was recorded with commit {} of {repository}; its code would be at {}, which is older",
            needs.short(),
            commit.short()
        ))
        .reason("data_newer")
        .hint(format!("check out {} or later in {repository}, or restore the whole group", needs.short()))
    }
}

/// Applies the gate; git answers which commits are ancestors.
pub(super) async fn judge(
    would_be: &[Pairing],
    recorded: &[Pairing],
    live: impl Iterator<Item = &Live> + Clone,
) -> std::result::Result<(), Judged> {
    let mut ancestors: HashSet<(String, CommitId, CommitId)> = HashSet::new();
    for pair in would_be {
        let of = |seen: &&Pairing| {
            (&seen.database, &seen.revision, &seen.repository) == (&pair.database, &pair.revision, &pair.repository)
        };
        let repository = live.clone().filter(|live| live.name == pair.repository).find_map(Live::repository);
        let Some(repository) = repository else { continue };
        let mut asked = HashSet::new();
        // The newest first: most often it is an ancestor.
        for seen in recorded.iter().rev().filter(of) {
            if asked.insert(&seen.commit) && repository.is_ancestor(&seen.commit, &pair.commit).await? {
                ancestors.insert((pair.repository.clone(), seen.commit.clone(), pair.commit.clone()));
                break;
            }
        }
    }
    let is_ancestor = |repository: &str, a: &CommitId, b: &CommitId| {
        ancestors.contains(&(repository.to_owned(), a.clone(), b.clone()))
    };
    gate::check(would_be, recorded, is_ancestor).map_err(Judged::Newer)
}

/// Runs the program of the configuration that brings a repository to a commit, or to one that follows it.
///
/// # Errors
/// Errors of the program.
pub(super) async fn rebuild(host: &Host, rebuild: &Rebuild, (path, commit): (&str, &str)) -> Result<()> {
    let program = Program {
        argv: &rebuild.run,
        kept: &[],
        env: &[("RYOKAN_REPOSITORY", path), ("RYOKAN_COMMIT", commit)],
        input: None,
        output: Output::Ignored,
        timeout: rebuild.timeout,
        user: None,
    };
    let done = access::programs(host).await?.run(&program).await.map(drop);
    done.map_err(|error| Error { message: format!("{path} was not rebuilt: {}", error.message), ..error })
}
