//! What a freeze that fails does with the kernels of its group.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What becomes of the kernels of a group whose freeze fails.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnFailure {
    /// They go on.
    #[default]
    Resume,
    /// They are paused until a client resumes the group.
    Pause,
}

impl OnFailure {
    /// All of them, in the order in which the catalog numbers them.
    pub const ALL: [OnFailure; 2] = [OnFailure::Resume, OnFailure::Pause];

    /// By name.
    pub const fn name(self) -> &'static str {
        match self {
            OnFailure::Resume => "resume",
            OnFailure::Pause => "pause",
        }
    }
}

/// A name of none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is neither resume nor pause")]
pub struct NoOnFailure(String);

impl FromStr for OnFailure {
    type Err = NoOnFailure;

    fn from_str(text: &str) -> Result<OnFailure, NoOnFailure> {
        let found = OnFailure::ALL.into_iter().find(|one| one.name() == text);
        found.ok_or_else(|| NoOnFailure(text.chars().take(20).collect()))
    }
}
