//! Groups: kernels, repositories and data sources that are frozen and restored as one.
//!
//! ```text
//! groups ─▶ run_freeze, run_restore (drive core::freeze's machines) ─▶ members ─▶ held kernels, git, sources
//! export, import ─▶ bundle, kernels of the registry, git: a freeze in a file
//! moving, arriving: a group that moves, with its kernels, by the registry's handovers
//!           pauses: what a failed freeze leaves paused, until a client resumes it
//!           recover: at start, before the next operation of an unfinished group, and each minute (retry)
//! ```
//! One operation of a group runs at a time, and one on a member that several groups share (`operation_turn`); none while a
//! restore of another group that shares one has not ended. Each runs in a task of its own, to its end, even if its client
//! disconnects.

mod access;
mod arriving;
mod compare;
mod export;
mod gate;
mod groups;
mod import;
mod import_end;
mod import_repositories;
mod kept_commits;
mod locks;
mod member_places;
mod members;
mod moving;
mod no_cow;
mod objects;
mod operation_turn;
mod pairings;
mod pauses;
mod provenance;
mod recover;
mod removal;
mod retry;
mod run_freeze;
mod run_restore;
mod sources;
mod storage;
mod submodules;

pub(crate) use arriving::Arrivals;
pub use compare::diff;
pub use export::export;
pub use groups::{abandon, add, create, exists, find, list, remove};
pub use import::{Arrived, ArrivingGroup, arriving, import};
pub use locks::{check, lock, lock_of};
pub use moving::teleport;
pub use no_cow::no_cow;
use operation_turn::turn;
pub use pauses::{configure, resume};
pub use provenance::provenance;
pub use recover::recover;
pub use removal::remove_freeze;
pub use retry::retry;
pub use run_freeze::{Taken, freeze};
pub use run_restore::{restore, undo};

use std::path::PathBuf;

use crate::core::checkpoint::AMBIGUOUS;
use crate::core::error::{Error, Result};
use crate::core::freeze::{Freeze, FreezeManifest, Group};
use crate::core::ids::{FreezeId, GroupId};
use crate::core::limits;
use crate::supervisor::host::Host;

/// The result of a group's restore.
#[derive(Debug, Clone)]
pub struct Restored {
    /// The restored freeze.
    pub freeze: Freeze,
    /// The freeze taken just before.
    pub safety: FreezeId,
    /// What could not be checked.
    pub notes: Vec<String>,
}

/// Files of an operation on a group.
fn scratch(host: &Host, group: GroupId) -> PathBuf {
    host.environment.data.join("groups").join(group.to_string())
}

/// Finds a freeze of a group by number, id, message, `latest` or `~N`.
async fn find_freeze(host: &Host, group: &Group, reference: &str) -> Result<Freeze> {
    let all = host.catalog.freezes(group.id).await?;
    let none = || {
        Error::not_found(format!("group {} has no freeze {reference:?}", group.name))
            .hint(format!("`ryokan log {}` lists what there is", group.name))
    };
    let back = match reference.strip_prefix('~') {
        _ if reference == "latest" => Some(0),
        Some(text) => Some(text.parse::<usize>().map_err(|_| none())?),
        None => None,
    };
    if let Some(back) = back {
        return all.into_iter().nth(back).ok_or_else(none);
    }
    let fits = |freeze: &&Freeze| {
        freeze.number.to_string() == reference
            || freeze.message == reference
            || (reference.len() >= 4 && freeze.id.to_string().starts_with(&reference.to_ascii_lowercase()))
    };
    let found: Vec<&Freeze> = all.iter().filter(fits).collect();
    match found.as_slice() {
        [] => Err(none()),
        [one] => Ok((*one).clone()),
        several => {
            let numbers: Vec<String> = several.iter().map(|freeze| freeze.number.to_string()).collect();
            Err(Error::conflict(format!("{reference:?} could be freeze {}", numbers.join(", ")))
                .reason(AMBIGUOUS)
                .hint(format!("give its number: `ryokan log {}` shows it", group.name)))
        }
    }
}

/// Reads a freeze's manifest.
///
/// # Errors
/// `corrupt`, `unsupported`.
async fn manifest(host: &Host, freeze: &Freeze) -> Result<FreezeManifest> {
    use crate::core::freeze::FreezeManifestError as Wrong;
    let bytes = host.store.get(freeze.manifest, limits::FREEZE_MANIFEST_BYTES as u64).await?;
    FreezeManifest::decode(&bytes).map_err(|error| match error {
        Wrong::UnknownFormat(_) => Error::unsupported(error.to_string()).reason("manifest_format"),
        Wrong::Malformed(_) | Wrong::TooLarge => Error::corrupt(error.to_string()),
    })
}
