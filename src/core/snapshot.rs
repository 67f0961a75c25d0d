//! Kinds of snapshots: what each holds, where it is valid, how large it may be.
//!
//! | kind | holds | valid | process | microvm |
//! |---|---|---|---|---|
//! | suspend | memory, processor | on the same host | paused processes | paused, or in a file |
//! | teleport | memory, processor, disk | same architecture, image and VMM version | – | – |
//! | checkpoint | engine state, workspace | anywhere | yes | yes |
//!
//! Memory of processes is valid in the same boot only. The file of a machine has checks of its own
//! (`isolation/microvm/saved.rs`). No isolation takes a snapshot of kind teleport yet.
//!
//! Inside, each kind is a type with only the operations that are valid for it. Where a kind is data, as in a request or a
//! message, [`choose_for_move`] and [`choose_for_checkpoint`] refuse an invalid one with its rule.
//!
//! A suspended kernel cannot be moved; this does not compile:
//!
//! ```compile_fail,E0599
//! use ryokan::core::snapshot::{KindError, Site, Snapshot, Suspend};
//! fn check(snapshot: &Snapshot<Suspend>, target: &Site) -> Result<(), KindError> {
//!     snapshot.check_arrival(target)
//! }
//! ```
//!
//! A checkpoint can:
//!
//! ```
//! use ryokan::core::snapshot::{Checkpoint, KindError, Site, Snapshot};
//! fn check(snapshot: &Snapshot<Checkpoint>, target: &Site) -> Result<(), KindError> {
//!     snapshot.check_arrival(target)
//! }
//! ```

use serde::{Deserialize, Serialize};

use super::error::{Error, ErrorCode};
use super::ids::HostId;
use super::limits;
use super::spec::Isolation;

/// A kind as data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SnapshotKind {
    /// See [`Suspend`].
    Suspend,
    /// See [`Teleport`].
    Teleport,
    /// See [`Checkpoint`].
    Checkpoint,
}

impl SnapshotKind {
    /// Every kind.
    pub const ALL: [SnapshotKind; 3] = [SnapshotKind::Suspend, SnapshotKind::Teleport, SnapshotKind::Checkpoint];

    /// The name.
    pub const fn name(self) -> &'static str {
        match self {
            SnapshotKind::Suspend => "suspend",
            SnapshotKind::Teleport => "teleport",
            SnapshotKind::Checkpoint => "checkpoint",
        }
    }

    /// The kind with this name.
    pub fn from_name(name: &str) -> Option<SnapshotKind> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// The kind that a client asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum KindRequest {
    /// The most complete kind that is possible.
    #[default]
    Auto,
    /// This kind.
    Only(SnapshotKind),
}

impl KindRequest {
    /// The name; `auto` for [`KindRequest::Auto`].
    pub const fn name(self) -> &'static str {
        match self {
            KindRequest::Auto => "auto",
            KindRequest::Only(kind) => kind.name(),
        }
    }

    /// The request with this name; an empty one is `auto`.
    pub fn from_name(name: &str) -> Option<KindRequest> {
        match name {
            "" | "auto" => Some(KindRequest::Auto),
            _ => SnapshotKind::from_name(name).map(KindRequest::Only),
        }
    }
}

/// Memory of paused processes, on the host that they run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Suspend {
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// The boot in which the memory is resident.
    pub boot: [u8; 16],
}

/// A whole virtual machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Teleport {
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Bytes of its disk.
    pub disk_bytes: u64,
}

/// Engine state and workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checkpoint {
    /// Bytes of engine state.
    pub state_bytes: u64,
}

/// A snapshot of one kind: where it was taken, and its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot<Content> {
    /// The host's architecture.
    pub architecture: String,
    /// Version of the image below the workspace; empty: none.
    pub base_image_version: String,
    /// The host.
    pub host: HostId,
    /// What it holds.
    pub content: Content,
}

/// A host on which a snapshot is to continue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    /// Its architecture.
    pub architecture: String,
    /// Version of its image; empty: none.
    pub base_image_version: String,
    /// Its id.
    pub host: HostId,
}

/// A rule that a snapshot or a request breaks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KindError {
    /// The processor differs.
    #[error("the snapshot is of architecture {snapshot}, this host of {host}")]
    ArchitectureMismatch {
        /// Of the snapshot.
        snapshot: String,
        /// Of the host.
        host: String,
    },
    /// The image differs.
    #[error("the snapshot needs image {snapshot:?} exactly, this host has {host:?}")]
    BaseImageMismatch {
        /// Of the snapshot.
        snapshot: String,
        /// Of the host.
        host: String,
    },
    /// The memory is on another host.
    #[error("a snapshot of kind suspend is valid only on the host and in the boot that took it")]
    OtherHost,
    /// It is larger than its kind allows.
    #[error("a snapshot of kind {} with {bytes} bytes: at most {most} are allowed", kind.name())]
    SizeTooLarge {
        /// The kind.
        kind: SnapshotKind,
        /// Its size.
        bytes: u64,
        /// The limit.
        most: u64,
    },
    /// The memory of a kernel of this isolation stays on its host.
    #[error("memory of a kernel of isolation {} stays on its host: kind teleport holds memory, processor and disk", .0.name())]
    MemoryStays(Isolation),
    /// A suspended kernel is no file.
    #[error("kind suspend keeps a kernel's memory on this host, and is no checkpoint")]
    SuspendIsNoCheckpoint,
    /// Memory, processor and disk are captured only to move.
    #[error("kind teleport holds memory, processor and disk, which no isolation here can capture")]
    NoMachineState,
}

impl From<KindError> for Error {
    fn from(error: KindError) -> Error {
        let (code, reason, hint) = match &error {
            KindError::ArchitectureMismatch { .. } => {
                (ErrorCode::Refused, "architecture_mismatch", "use --kind checkpoint, which is valid anywhere")
            }
            KindError::BaseImageMismatch { .. } => {
                (ErrorCode::Refused, "base_image_mismatch", "install that image, or use --kind checkpoint")
            }
            KindError::OtherHost => {
                (ErrorCode::Refused, "other_host", "use --kind checkpoint, which is valid anywhere")
            }
            KindError::SizeTooLarge { .. } => (ErrorCode::Refused, "size_too_large", "make it smaller"),
            KindError::MemoryStays(_) => (
                ErrorCode::Unsupported,
                "snapshot_kind",
                "use --kind checkpoint, which moves engine state and workspace",
            ),
            KindError::SuspendIsNoCheckpoint => {
                (ErrorCode::Unsupported, "snapshot_kind", "use `ryokan suspend`, or --kind checkpoint")
            }
            KindError::NoMachineState => (
                ErrorCode::Unsupported,
                "snapshot_kind",
                "use --kind checkpoint, which holds engine state and workspace",
            ),
        };
        Error::new(code, error.to_string()).reason(reason).hint(hint)
    }
}

fn within(kind: SnapshotKind, bytes: u64, most: u64) -> Result<(), KindError> {
    if bytes > most { Err(KindError::SizeTooLarge { kind, bytes, most }) } else { Ok(()) }
}

/// The same name for each architecture.
fn architecture(name: &str) -> &str {
    match name {
        "arm64" => "aarch64",
        "amd64" => "x86_64",
        other => other,
    }
}

impl Snapshot<Suspend> {
    /// Whether the memory can continue here, in this boot.
    ///
    /// # Errors
    /// [`KindError::OtherHost`], [`KindError::SizeTooLarge`].
    pub fn check_resume(&self, here: &Site, boot: [u8; 16]) -> Result<(), KindError> {
        if self.host != here.host || self.content.boot != boot {
            return Err(KindError::OtherHost);
        }
        within(SnapshotKind::Suspend, self.content.memory_bytes, limits::SNAPSHOT_SUSPEND_BYTES)
    }
}

impl Snapshot<Teleport> {
    /// Whether the machine can continue there.
    ///
    /// # Errors
    /// Mismatches, [`KindError::SizeTooLarge`].
    pub fn check_arrival(&self, target: &Site) -> Result<(), KindError> {
        if architecture(&self.architecture) != architecture(&target.architecture) {
            let (snapshot, host) = (self.architecture.clone(), target.architecture.clone());
            return Err(KindError::ArchitectureMismatch { snapshot, host });
        }
        if self.base_image_version != target.base_image_version {
            let (snapshot, host) = (self.base_image_version.clone(), target.base_image_version.clone());
            return Err(KindError::BaseImageMismatch { snapshot, host });
        }
        let Teleport { memory_bytes, disk_bytes } = self.content;
        let bytes = memory_bytes.saturating_add(disk_bytes);
        within(SnapshotKind::Teleport, bytes, limits::SNAPSHOT_TELEPORT_BYTES)
    }
}

impl Snapshot<Checkpoint> {
    /// Whether the state can continue there: it holds nothing of a machine.
    ///
    /// # Errors
    /// [`KindError::SizeTooLarge`].
    pub fn check_arrival(&self, _target: &Site) -> Result<(), KindError> {
        within(SnapshotKind::Checkpoint, self.content.state_bytes, limits::SNAPSHOT_CHECKPOINT_BYTES)
    }
}

/// The chosen kind, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// The kind.
    pub kind: SnapshotKind,
    /// The reason, for people.
    pub why: &'static str,
}

/// Chooses the kind in which a kernel moves to another host.
///
/// # Errors
/// The rule that the requested kind breaks.
pub fn choose_for_move(request: KindRequest, isolation: Isolation) -> Result<Choice, KindError> {
    match request {
        KindRequest::Auto => {
            let why = match isolation {
                Isolation::Process => "the memory of processes stays on its host",
                Isolation::Microvm => "no host can capture the memory of its virtual machines for another one",
            };
            Ok(Choice { kind: SnapshotKind::Checkpoint, why })
        }
        KindRequest::Only(kind @ SnapshotKind::Checkpoint) => Ok(Choice { kind, why: "as requested" }),
        KindRequest::Only(SnapshotKind::Teleport) => Err(KindError::MemoryStays(isolation)),
        KindRequest::Only(SnapshotKind::Suspend) => Err(KindError::OtherHost),
    }
}

/// Chooses the kind of a checkpoint.
///
/// # Errors
/// The rule that the requested kind breaks.
pub fn choose_for_checkpoint(request: KindRequest) -> Result<SnapshotKind, KindError> {
    match request {
        KindRequest::Auto | KindRequest::Only(SnapshotKind::Checkpoint) => Ok(SnapshotKind::Checkpoint),
        KindRequest::Only(SnapshotKind::Suspend) => Err(KindError::SuspendIsNoCheckpoint),
        KindRequest::Only(SnapshotKind::Teleport) => Err(KindError::NoMachineState),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn site(architecture: &str, image: &str, host: u8) -> Site {
        let host = HostId::from_bytes([host; 16]);
        Site { architecture: architecture.into(), base_image_version: image.into(), host }
    }

    fn snapshot<Content>(content: Content) -> Snapshot<Content> {
        let host = HostId::from_bytes([1; 16]);
        Snapshot { architecture: "x86_64".into(), base_image_version: "1.2.3".into(), host, content }
    }

    #[test]
    fn architecture_validation() {
        let machine = snapshot(Teleport { memory_bytes: 1, disk_bytes: 1 });
        for (name, fits) in [("x86_64", true), ("amd64", true), ("aarch64", false), ("arm64", false), ("", false)] {
            let arrived = machine.check_arrival(&site(name, "1.2.3", 2));
            assert_eq!(arrived.is_ok(), fits, "{name}");
            assert!(fits || matches!(arrived, Err(KindError::ArchitectureMismatch { .. })), "{name}");
        }
        let state = snapshot(Checkpoint { state_bytes: 1 });
        assert_eq!(state.check_arrival(&site("aarch64", "", 2)), Ok(()));
    }

    #[test]
    fn base_image_version_validation() {
        let machine = snapshot(Teleport { memory_bytes: 1, disk_bytes: 1 });
        for (image, fits) in [("1.2.3", true), ("1.2.4", false), ("1.2", false), ("", false)] {
            let arrived = machine.check_arrival(&site("x86_64", image, 2));
            assert_eq!(arrived.is_ok(), fits, "{image}");
            assert!(fits || matches!(arrived, Err(KindError::BaseImageMismatch { .. })), "{image}");
        }
    }

    #[test]
    fn suspend_stays_on_its_host() {
        let memory = snapshot(Suspend { memory_bytes: 1, boot: [3; 16] });
        assert_eq!(memory.check_resume(&site("x86_64", "1.2.3", 1), [3; 16]), Ok(()));
        for (host, boot) in [(2, 3), (1, 4)] {
            assert_eq!(memory.check_resume(&site("x86_64", "1.2.3", host), [boot; 16]), Err(KindError::OtherHost));
        }
    }

    #[test]
    fn each_kind_has_a_size_limit() {
        let here = site("x86_64", "1.2.3", 1);
        for (past, fits) in [(0, true), (1, false)] {
            let memory_bytes = limits::SNAPSHOT_SUSPEND_BYTES + past;
            let found = snapshot(Suspend { memory_bytes, boot: [3; 16] }).check_resume(&here, [3; 16]);
            assert_eq!(found.is_ok(), fits, "suspend {past}");
            let content = Teleport { memory_bytes: limits::SNAPSHOT_TELEPORT_BYTES - 7, disk_bytes: 7 + past };
            assert_eq!(snapshot(content).check_arrival(&here).is_ok(), fits, "teleport {past}");
            let state_bytes = limits::SNAPSHOT_CHECKPOINT_BYTES + past;
            assert_eq!(snapshot(Checkpoint { state_bytes }).check_arrival(&here).is_ok(), fits, "checkpoint {past}");
        }
        let whole = Teleport { memory_bytes: u64::MAX, disk_bytes: u64::MAX };
        assert!(matches!(snapshot(whole).check_arrival(&here), Err(KindError::SizeTooLarge { .. })));
    }

    #[test]
    fn kind_is_chosen_or_refused() {
        for isolation in [Isolation::Process, Isolation::Microvm] {
            let moved = |request| choose_for_move(request, isolation).map(|choice| choice.kind);
            assert_eq!(moved(KindRequest::Auto), Ok(SnapshotKind::Checkpoint));
            assert_eq!(moved(KindRequest::Only(SnapshotKind::Checkpoint)), Ok(SnapshotKind::Checkpoint));
            assert_eq!(moved(KindRequest::Only(SnapshotKind::Teleport)), Err(KindError::MemoryStays(isolation)));
            assert_eq!(moved(KindRequest::Only(SnapshotKind::Suspend)), Err(KindError::OtherHost));
        }
        let refused = Error::from(KindError::MemoryStays(Isolation::Process));
        assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Unsupported, "snapshot_kind"));
        assert!(refused.hint.contains("--kind checkpoint"));
        for kind in SnapshotKind::ALL {
            assert_eq!(KindRequest::from_name(kind.name()), Some(KindRequest::Only(kind)));
            let fits = kind == SnapshotKind::Checkpoint;
            assert_eq!(choose_for_checkpoint(KindRequest::Only(kind)).is_ok(), fits);
        }
        assert_eq!((KindRequest::from_name("auto"), KindRequest::from_name("x")), (Some(KindRequest::Auto), None));
    }
}
