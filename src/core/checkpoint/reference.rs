//! References to checkpoints: `latest`, `~N`, a name, an id or a prefix of an id.

use super::Checkpoint;
use crate::core::ids::CheckpointId;

/// A parsed reference to a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reference {
    /// Number of checkpoints before the newest; 0 is `latest`.
    Back(usize),
    /// A name, or a prefix of an id.
    Text(String),
}

/// Why a reference does not identify a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RefError {
    /// The reference is malformed.
    #[error("{0:?} names no checkpoint: give a name, an id or its beginning, latest, or ~N")]
    Malformed(String),
    /// No checkpoint matches.
    #[error("there is no checkpoint {0:?}")]
    Unknown(String),
    /// There are too few checkpoints.
    #[error("{}", too_far(*.there, *.back))]
    TooFar {
        /// Number of checkpoints.
        there: usize,
        /// The requested distance.
        back: usize,
    },
    /// Several checkpoints match.
    #[error("{text:?} could be {}", .candidates.join(", "))]
    Ambiguous {
        /// The reference.
        text: String,
        /// The matching checkpoints: id and name.
        candidates: Vec<String>,
    },
}

/// The parts of a [`Checkpoint`] that a reference can name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Named {
    /// The identity.
    pub id: CheckpointId,
    /// The name; empty: none.
    pub name: String,
}

impl From<&Checkpoint> for Named {
    fn from(checkpoint: &Checkpoint) -> Named {
        Named { id: checkpoint.id, name: checkpoint.name.clone() }
    }
}

/// Maximum number of candidates that an error lists.
const CANDIDATES: usize = 8;

impl std::str::FromStr for Reference {
    type Err = RefError;

    fn from_str(text: &str) -> Result<Reference, RefError> {
        let malformed = || RefError::Malformed(text.chars().take(80).collect());
        match text.strip_prefix('~') {
            _ if text == "latest" => Ok(Reference::Back(0)),
            Some("") => Ok(Reference::Back(1)),
            Some(back) if back.bytes().all(|b| b.is_ascii_digit()) => {
                back.parse().map(Reference::Back).map_err(|_| malformed())
            }
            _ if text.trim().is_empty() => Err(malformed()),
            _ => Ok(Reference::Text(text.to_owned())),
        }
    }
}

impl Reference {
    /// Finds the checkpoint among all of a kernel's, oldest first.
    ///
    /// A name takes precedence over a prefix of an id. Several checkpoints with the same name are
    /// ambiguous, even if one is newer.
    ///
    /// # Errors
    /// Each of [`RefError`] but `Malformed`.
    pub fn find(&self, all: &[Named]) -> Result<CheckpointId, RefError> {
        match self {
            Reference::Back(back) => {
                let at = all.len().checked_sub(back + 1);
                at.map(|at| all[at].id).ok_or(RefError::TooFar { there: all.len(), back: *back })
            }
            Reference::Text(text) => {
                let named: Vec<&Named> = all.iter().filter(|one| one.name == *text).collect();
                let lower = text.to_ascii_lowercase();
                let fits = |one: &&Named| one.id.to_string().starts_with(&lower);
                let found = if named.is_empty() { all.iter().filter(fits).collect() } else { named };
                match found[..] {
                    [one] => Ok(one.id),
                    [] => Err(RefError::Unknown(text.chars().take(80).collect())),
                    [..] => Err(RefError::Ambiguous { text: text.clone(), candidates: shown(&found) }),
                }
            }
        }
    }
}

fn shown(found: &[&Named]) -> Vec<String> {
    let show = |one: &&Named| match one.name.as_str() {
        "" => one.id.to_string(),
        name => format!("{} ({name})", one.id),
    };
    let mut shown: Vec<String> = found.iter().rev().take(CANDIDATES).map(show).collect();
    if found.len() > CANDIDATES {
        shown.push(format!("and {} more", found.len() - CANDIDATES));
    }
    shown
}

fn too_far(there: usize, back: usize) -> String {
    match there {
        0 => "there are no checkpoints".into(),
        1 => format!("there is one checkpoint, so there is no ~{back}"),
        _ => format!("there are {there} checkpoints, so there is no ~{back}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Named> {
        let one = |first: u8, second: u8, name: &str| {
            let mut bytes = [0; 16];
            (bytes[0], bytes[1]) = (first, second);
            Named { id: CheckpointId::from_bytes(bytes), name: name.into() }
        };
        vec![one(0xab, 1, "first"), one(0xab, 2, ""), one(0xcd, 3, "twice"), one(0xce, 4, "twice"), one(0xef, 5, "ab")]
    }

    fn find(text: &str) -> Result<usize, RefError> {
        let all = all();
        let id = text.parse::<Reference>()?.find(&all)?;
        Ok(all.iter().position(|one| one.id == id).expect("`id` is from `all`"))
    }

    #[test]
    fn checkpoint_references_resolve() {
        for (text, at) in [
            ("latest", 4),
            ("~0", 4),
            ("~", 3),
            ("~4", 0),
            ("first", 0),
            ("ab02", 1),
            ("AB02", 1),
            ("cd", 2),
            ("ab", 4),
        ] {
            assert_eq!(find(text), Ok(at), "{text}");
        }
    }

    #[test]
    fn unresolved_reference_fails() {
        assert_eq!(find("~5"), Err(RefError::TooFar { there: 5, back: 5 }));
        assert_eq!(find("nothing"), Err(RefError::Unknown("nothing".into())));
        for text in ["", "  ", "~99999999999999999999999"] {
            assert!(matches!(find(text), Err(RefError::Malformed(_))), "{text:?}");
        }
        let Err(RefError::Ambiguous { candidates, .. }) = find("twice") else { panic!("two have this name") };
        assert!(candidates[0].starts_with("ce04") && candidates[0].ends_with("(twice)"), "{candidates:?}");
        assert!(matches!(find("c"), Err(RefError::Ambiguous { .. })));
        assert_eq!(
            "latest".parse::<Reference>().expect("parses").find(&[]),
            Err(RefError::TooFar { there: 0, back: 0 })
        );
    }
}
