//! The kinds whose snapshots may leave their host. What is exported, sent or received has one of them, so memory that is
//! valid on its own host only cannot be named there; this does not compile:
//!
//! ```compile_fail,E0308
//! use ryokan::core::snapshot::{KindRequest, SnapshotKind};
//! let request = KindRequest::Only(SnapshotKind::Suspend);
//! ```
//!
//! A kind that can leave is one of these:
//!
//! ```
//! use ryokan::core::snapshot::{KindRequest, PortableKind};
//! let request = KindRequest::Only(PortableKind::Teleport);
//! ```

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{KindError, SnapshotKind};

/// Longest name of an architecture, bytes.
const NAME_BYTES: usize = 16;

/// A kind that is valid on other hosts: that of each checkpoint, export and move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "SnapshotKind", into = "SnapshotKind")]
pub enum PortableKind {
    /// See [`super::Teleport`].
    Teleport,
    /// See [`super::Checkpoint`].
    Checkpoint,
}

impl PortableKind {
    /// Every kind.
    pub const ALL: [PortableKind; 2] = [PortableKind::Teleport, PortableKind::Checkpoint];

    /// The same as a kind of any snapshot.
    pub const fn kind(self) -> SnapshotKind {
        match self {
            PortableKind::Teleport => SnapshotKind::Teleport,
            PortableKind::Checkpoint => SnapshotKind::Checkpoint,
        }
    }

    /// The name.
    pub const fn name(self) -> &'static str {
        self.kind().name()
    }

    /// The kind with this name; `None` also for kind suspend.
    pub fn from_name(name: &str) -> Option<PortableKind> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

impl From<PortableKind> for SnapshotKind {
    fn from(kind: PortableKind) -> SnapshotKind {
        kind.kind()
    }
}

impl TryFrom<SnapshotKind> for PortableKind {
    type Error = KindError;

    fn try_from(kind: SnapshotKind) -> Result<PortableKind, KindError> {
        match kind {
            SnapshotKind::Teleport => Ok(PortableKind::Teleport),
            SnapshotKind::Checkpoint => Ok(PortableKind::Checkpoint),
            SnapshotKind::Suspend => Err(KindError::OtherHost),
        }
    }
}

/// The kind that a client asks for, of a checkpoint, a restore or a move.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum KindRequest {
    /// Of a move, the most complete kind that the target takes; of a checkpoint, files and engine state.
    #[default]
    Auto,
    /// This kind.
    Only(PortableKind),
}

impl KindRequest {
    /// The name; `auto` for [`KindRequest::Auto`].
    pub const fn name(self) -> &'static str {
        match self {
            KindRequest::Auto => "auto",
            KindRequest::Only(kind) => kind.name(),
        }
    }

    /// The request of a move with this name; an empty one is `auto`.
    ///
    /// # Errors
    /// [`KindError::OtherHost`] for kind suspend, [`KindError::Unknown`].
    pub fn for_move(name: &str) -> Result<KindRequest, KindError> {
        KindRequest::named(name, KindError::OtherHost)
    }

    /// The request of a checkpoint or a restore with this name; an empty one is `auto`.
    ///
    /// # Errors
    /// [`KindError::SuspendIsNoCheckpoint`] for kind suspend, [`KindError::Unknown`].
    pub fn for_checkpoint(name: &str) -> Result<KindRequest, KindError> {
        KindRequest::named(name, KindError::SuspendIsNoCheckpoint)
    }

    fn named(name: &str, suspended: KindError) -> Result<KindRequest, KindError> {
        if name.is_empty() || name == KindRequest::Auto.name() {
            return Ok(KindRequest::Auto);
        }
        let kind = SnapshotKind::from_name(name).ok_or_else(|| KindError::Unknown(name.chars().take(64).collect()))?;
        PortableKind::try_from(kind).map(KindRequest::Only).map_err(|_| suspended)
    }
}

/// The name of an architecture, and nothing else of a machine: 1 to 16 of `a-z 0-9 _`. `arm64` and `amd64` are read as
/// `aarch64` and `x86_64`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Architecture(String);

impl Architecture {
    /// That of this program, and so of its host.
    pub fn here() -> Architecture {
        let name = if cfg!(target_arch = "x86_64") {
            "x86_64"
        } else if cfg!(target_arch = "aarch64") {
            "aarch64"
        } else if cfg!(target_arch = "riscv64") {
            "riscv64"
        } else {
            // The sandbox has no filter for it: no kernel runs.
            "other"
        };
        Architecture(name.to_owned())
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Architecture {
    type Err = KindError;

    fn from_str(text: &str) -> Result<Architecture, KindError> {
        let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        match text {
            "arm64" => Ok(Architecture("aarch64".into())),
            "amd64" => Ok(Architecture("x86_64".into())),
            "" => Err(KindError::NoArchitecture),
            _ if text.len() > NAME_BYTES || !text.chars().all(is_plain) => Err(KindError::NoArchitecture),
            _ => Ok(Architecture(text.to_owned())),
        }
    }
}

impl TryFrom<String> for Architecture {
    type Error = KindError;

    fn try_from(text: String) -> Result<Architecture, KindError> {
        text.parse()
    }
}

impl From<Architecture> for String {
    fn from(architecture: Architecture) -> String {
        architecture.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::error::Error;

    #[test]
    fn suspended_memory_never_leaves() {
        for kind in SnapshotKind::ALL {
            let [json, name] = [serde_json::to_string(&kind).expect("JSON"), kind.name().to_owned()];
            let read = serde_json::from_str::<PortableKind>(&json);
            let asked = (KindRequest::for_move(&name), KindRequest::for_checkpoint(&name));
            match PortableKind::from_name(&name) {
                Some(portable) => {
                    assert_eq!((read.expect("portable"), portable.kind()), (portable, kind));
                    assert_eq!(serde_json::to_string(&portable).expect("JSON"), json);
                    let only = KindRequest::Only(portable);
                    assert_eq!((asked, only.name()), ((Ok(only), Ok(only)), kind.name()));
                }
                None => {
                    assert_eq!(kind, SnapshotKind::Suspend);
                    let said = read.expect_err("it stays").to_string();
                    assert!(said.contains(&KindError::OtherHost.to_string()), "{said}");
                    assert_eq!(asked, (Err(KindError::OtherHost), Err(KindError::SuspendIsNoCheckpoint)));
                }
            }
        }
        for auto in ["", "auto"] {
            assert_eq!(KindRequest::for_move(auto), Ok(KindRequest::Auto));
            assert_eq!(KindRequest::for_checkpoint(auto), Ok(KindRequest::Auto));
        }
        let unknown = KindRequest::for_move("later").expect_err("unknown");
        assert_eq!(Error::from(unknown).reason, "snapshot_kind");
    }

    #[test]
    fn architectures_are_names() {
        for (text, name) in [("x86_64", "x86_64"), ("amd64", "x86_64"), ("arm64", "aarch64"), ("riscv64", "riscv64")] {
            assert_eq!(text.parse::<Architecture>().expect("a name").as_str(), name);
        }
        let here = Architecture::here();
        assert_eq!(here.as_str().parse(), Ok(here));
        for text in ["", "X86_64", "x86_64 avx2", "../x", "x86-64", "{\"cpu\":1}", &"a".repeat(NAME_BYTES + 1)] {
            assert_eq!(text.parse::<Architecture>(), Err(KindError::NoArchitecture), "{text}");
            let json = serde_json::to_string(text).expect("JSON");
            assert!(serde_json::from_str::<Architecture>(&json).is_err(), "{text}");
        }
    }
}
