//! Groups and freezes as clients see them.

use serde::Serialize;

use super::on_failure::OnFailure;
use super::{SchemaRevision, cost};
use crate::core::checkpoint::CheckpointType;

/// A group as clients see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GroupInfo {
    /// Its name.
    pub name: String,
    /// Its members.
    pub members: Vec<MemberInfo>,
    /// Number of freezes.
    pub freezes: u64,
    /// Milliseconds since 1970.
    pub created_at_ms: i64,
    /// Whether a restore was interrupted and awaits recovery.
    pub unfinished: bool,
    /// What a failed freeze does with its kernels.
    pub on_failure: OnFailure,
    /// Why its kernels are paused; empty: they are not.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub paused: String,
}

/// A member as clients see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemberInfo {
    /// Its name within the group.
    pub name: String,
    /// `kernel`, `repository`, `database`, `directory`, `command`, `postgres` or `server`.
    pub kind: String,
    /// A kernel's name, a path, the name of a configured source, or a connection.
    pub target: String,
}

/// A freeze as clients see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FreezeInfo {
    /// Its identity.
    pub id: String,
    /// Number of the freeze within its group.
    pub number: u64,
    /// The client's message.
    pub message: String,
    /// Why it was taken.
    #[serde(rename = "type")]
    pub kind: CheckpointType,
    /// The client that took it.
    pub creator: String,
    /// Milliseconds since 1970.
    pub at_ms: i64,
    /// When it was last restored; 0: never.
    pub restored_at_ms: i64,
    /// Whether it is the freeze taken or restored last.
    pub is_head: bool,
    /// Its lock, as text.
    pub lock: String,
    /// What it cost, if it was just taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost: Option<cost::FreezeCost>,
    /// If it was just taken: members that do not work again, and what is not captured.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// A group's restore as clients see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GroupRestored {
    /// The restored freeze.
    pub freeze: FreezeInfo,
    /// The freeze taken just before.
    pub safety: String,
    /// What could not be checked.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

impl std::fmt::Display for SchemaRevision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let start: String = self.schema.chars().take(10).collect();
        match start.is_empty() {
            true => write!(f, "{}", self.user_version),
            false => write!(f, "{} ({start})", self.user_version),
        }
    }
}
