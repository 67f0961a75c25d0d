//! Kinds of snapshots: what each holds, where it is valid, how large it may be.
//!
//! | kind | holds | valid | process | microvm |
//! |---|---|---|---|---|
//! | suspend | memory, processor | on the same host | paused processes | paused, or in a file |
//! | teleport | memory, processor, disk | same architecture, image and machine | – | parts of a checkpoint |
//! | checkpoint | engine state, workspace | anywhere | yes | yes |
//!
//! Memory of processes ends with them. A machine's file is checked with [`Snapshot::check_resume`]; the file itself belongs
//! to `isolation/microvm/saved.rs`. A snapshot of kind teleport is a checkpoint with further parts, so it is valid as kind
//! checkpoint, too: `supervisor/checkpoint/machine.rs`.
//!
//! Inside, each kind is a type with only the operations that are valid for it, and a kind that leaves its host is a
//! [`PortableKind`]. Where a kind is data, as in a request or a message, it is refused with its rule when it is read.
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

mod choice;
mod portable;
mod texts;

use serde::{Deserialize, Serialize};

use super::engine::EngineName;
use super::error::{Error, ErrorCode};
use super::ids::HostId;
use super::limits;
use super::spec::Isolation;

pub use choice::{Choice, Continuing, choose_for_checkpoint, choose_for_move, choose_for_restore};
pub use portable::{Architecture, KindRequest, PortableKind};
pub use texts::image_version;

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

/// Memory of a suspended kernel, on the host that it runs on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Suspend {
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// The virtual machine; `None`: paused processes.
    pub machine: Option<Machine>,
}

/// A whole virtual machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Teleport {
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Bytes of its disk.
    pub disk_bytes: u64,
    /// The virtual machine.
    pub machine: Machine,
}

/// What virtual machines have in common if one continues the memory of the other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Name and version of the VMM.
    #[serde(deserialize_with = "texts::machine")]
    pub vmm: String,
    /// Version of the programs in the guest.
    #[serde(deserialize_with = "texts::machine")]
    pub build: String,
    /// The VMM's machine type with its options.
    #[serde(deserialize_with = "texts::machine")]
    pub machine_type: String,
    /// The processor model with its features.
    #[serde(deserialize_with = "texts::machine")]
    pub cpu_model: String,
    /// Bytes of its memory.
    pub ram_bytes: u64,
    /// Number of processors.
    pub processors: u32,
}

/// Engine state and workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checkpoint {
    /// Bytes of engine state.
    pub state_bytes: u64,
}

/// A snapshot of one kind: where it was taken, and its content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot<Content> {
    /// The host's architecture.
    pub architecture: Architecture,
    /// Version of the image below the workspace; empty: none.
    #[serde(deserialize_with = "image_version")]
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
    pub architecture: Architecture,
    /// Version of its image; empty: none.
    pub base_image_version: String,
    /// Its id.
    pub host: HostId,
    /// The virtual machine that is to continue; `None`: no machine.
    pub machine: Option<Machine>,
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
    /// It is more or less than a name.
    #[error("an architecture is a name of 1 to 16 of a-z, 0-9 and _")]
    NoArchitecture,
    /// The version of the image is no version.
    #[error("base_image_version has at most {} characters", limits::IMAGE_VERSION_CHARS)]
    LongImageVersion,
    /// A text of the machine is too long.
    #[error("each text of a machine has at most {} characters", limits::MACHINE_TEXT_CHARS)]
    LongMachineText,
    /// The kind is that of another release.
    #[error("this build knows no snapshots of kind {0:?}")]
    Unknown(String),
    /// The image differs.
    #[error("the snapshot needs image {snapshot:?} exactly, this host has {host:?}")]
    BaseImageMismatch {
        /// Of the snapshot.
        snapshot: String,
        /// Of the host.
        host: String,
    },
    /// The memory is on another host.
    #[error("a snapshot of kind suspend is valid only on the host that took it")]
    OtherHost,
    /// One of both is no virtual machine.
    #[error("memory of a virtual machine continues in a virtual machine only")]
    NoMachine,
    /// The virtual machine differs.
    #[error("the snapshot's {} is {snapshot:?}, this host's is {host:?}", property.name())]
    MachineMismatch {
        /// What differs.
        property: MachineProperty,
        /// Of the snapshot.
        snapshot: String,
        /// Of the host.
        host: String,
    },
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
    #[error("the memory of a kernel of isolation {} stays on its host: only that of a virtual machine can move", .0.name())]
    MemoryStays(Isolation),
    /// A suspended kernel is no file.
    #[error("kind suspend keeps a kernel's memory on this host, and is no checkpoint")]
    SuspendIsNoCheckpoint,
    /// The engine cannot seed its random generators anew.
    #[error("kind teleport is not for engine {}: it cannot seed its random generators anew when its memory continues", .0.name())]
    NotReseeded(EngineName),
    /// The worker would end with its daemon.
    #[error("kind teleport is not for ephemeral kernels: their memory ends with their client's connection")]
    Ephemeral,
    /// The checkpoint is of another kind.
    #[error("the checkpoint is of kind checkpoint: it holds no memory")]
    NoMemory,
}

/// A property of a virtual machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MachineProperty {
    /// See [`Machine::vmm`].
    Vmm,
    /// See [`Machine::build`].
    Build,
    /// See [`Machine::machine_type`].
    MachineType,
    /// See [`Machine::cpu_model`].
    CpuModel,
    /// See [`Machine::ram_bytes`] and [`Machine::processors`].
    Size,
}

impl MachineProperty {
    /// The name, for people.
    pub const fn name(self) -> &'static str {
        match self {
            MachineProperty::Vmm => "VMM",
            MachineProperty::Build => "ryokan build",
            MachineProperty::MachineType => "machine type",
            MachineProperty::CpuModel => "processor model",
            MachineProperty::Size => "machine size",
        }
    }

    const fn reason(self) -> &'static str {
        match self {
            MachineProperty::Vmm => "vmm_mismatch",
            MachineProperty::Build => "build_mismatch",
            MachineProperty::MachineType => "machine_type_mismatch",
            MachineProperty::CpuModel => "cpu_model_mismatch",
            MachineProperty::Size => "machine_size_mismatch",
        }
    }
}

impl From<KindError> for Error {
    fn from(error: KindError) -> Error {
        let (code, reason, hint) = match &error {
            KindError::ArchitectureMismatch { .. } => {
                (ErrorCode::Refused, "architecture_mismatch", "use --kind checkpoint, which is valid anywhere")
            }
            KindError::NoArchitecture => (ErrorCode::InvalidArgument, "architecture", ""),
            KindError::LongImageVersion => (ErrorCode::InvalidArgument, "base_image_version", ""),
            KindError::LongMachineText => (ErrorCode::InvalidArgument, "machine_text", ""),
            KindError::BaseImageMismatch { .. } => {
                (ErrorCode::Refused, "base_image_mismatch", "install that image, or use --kind checkpoint")
            }
            KindError::OtherHost => {
                (ErrorCode::Refused, "other_host", "use --kind checkpoint, which is valid anywhere")
            }
            KindError::NoMachine => {
                (ErrorCode::Refused, "no_machine", "use --kind checkpoint, which is valid anywhere")
            }
            KindError::MachineMismatch { property, .. } => {
                (ErrorCode::Refused, property.reason(), "use --kind checkpoint, which is valid anywhere")
            }
            KindError::SizeTooLarge { kind: SnapshotKind::Suspend, .. } => (
                ErrorCode::Refused,
                "size_too_large",
                "`ryokan stop` saves the state; `[limits] suspended_memory` in the configuration raises the limit",
            ),
            KindError::SizeTooLarge { kind: SnapshotKind::Teleport, .. } => (
                ErrorCode::Refused,
                "size_too_large",
                "use --kind checkpoint; `[limits] teleport_snapshot` in the configuration raises the limit",
            ),
            KindError::SizeTooLarge { .. } => (ErrorCode::Refused, "size_too_large", "make it smaller"),
            KindError::MemoryStays(_) => (
                ErrorCode::Unsupported,
                "snapshot_kind",
                "use --kind checkpoint, which holds engine state and workspace",
            ),
            KindError::SuspendIsNoCheckpoint => {
                (ErrorCode::Unsupported, "snapshot_kind", "use `ryokan suspend`, or --kind checkpoint")
            }
            KindError::NotReseeded(_) | KindError::Ephemeral | KindError::Unknown(_) => (
                ErrorCode::Unsupported,
                "snapshot_kind",
                "use --kind checkpoint, which holds engine state and workspace",
            ),
            KindError::NoMemory => {
                (ErrorCode::Refused, "no_memory", "leave --kind out, or take the checkpoint with --kind teleport")
            }
        };
        Error::new(code, error.to_string()).reason(reason).hint(hint)
    }
}

fn within(kind: SnapshotKind, bytes: u64, most: u64) -> Result<(), KindError> {
    if bytes > most { Err(KindError::SizeTooLarge { kind, bytes, most }) } else { Ok(()) }
}

impl<Content> Snapshot<Content> {
    /// Whether processor, image and machine are those of the snapshot.
    fn check_machine(&self, was: Option<&Machine>, site: &Site) -> Result<(), KindError> {
        if self.architecture != site.architecture {
            let (snapshot, host) = (self.architecture.to_string(), site.architecture.to_string());
            return Err(KindError::ArchitectureMismatch { snapshot, host });
        }
        if self.base_image_version != site.base_image_version {
            let (snapshot, host) = (self.base_image_version.clone(), site.base_image_version.clone());
            return Err(KindError::BaseImageMismatch { snapshot, host });
        }
        match (was, &site.machine) {
            (Some(was), Some(now)) => was.check_same(now),
            (None, None) => Ok(()),
            (Some(_), None) | (None, Some(_)) => Err(KindError::NoMachine),
        }
    }
}

impl Machine {
    fn check_same(&self, now: &Machine) -> Result<(), KindError> {
        let size = |machine: &Machine| format!("{} bytes, {} processors", machine.ram_bytes, machine.processors);
        let properties = [
            (MachineProperty::Vmm, self.vmm.clone(), now.vmm.clone()),
            (MachineProperty::Build, self.build.clone(), now.build.clone()),
            (MachineProperty::MachineType, self.machine_type.clone(), now.machine_type.clone()),
            (MachineProperty::CpuModel, self.cpu_model.clone(), now.cpu_model.clone()),
            (MachineProperty::Size, size(self), size(now)),
        ];
        match properties.into_iter().find(|(_, snapshot, host)| snapshot != host) {
            Some((property, snapshot, host)) => Err(KindError::MachineMismatch { property, snapshot, host }),
            None => Ok(()),
        }
    }
}

impl Snapshot<Suspend> {
    /// Whether the memory may be kept: processes have at most `most` bytes, a machine its own memory and the state of its
    /// devices.
    ///
    /// # Errors
    /// [`KindError::SizeTooLarge`].
    pub fn check_size(&self, most: u64) -> Result<(), KindError> {
        let most = match &self.content.machine {
            Some(machine) => machine.ram_bytes.saturating_add(limits::VM_DEVICE_STATE_BYTES),
            None => most,
        };
        within(SnapshotKind::Suspend, self.content.memory_bytes, most)
    }

    /// Whether the memory of a machine can continue here.
    ///
    /// # Errors
    /// [`KindError::OtherHost`], mismatches, [`KindError::SizeTooLarge`].
    pub fn check_resume(&self, here: &Site) -> Result<(), KindError> {
        if self.host != here.host {
            return Err(KindError::OtherHost);
        }
        self.check_machine(self.content.machine.as_ref(), here)?;
        self.check_size(limits::SNAPSHOT_SUSPEND_BYTES)
    }
}

impl Teleport {
    /// Whether memory and disk of those sizes have at most `most` bytes.
    ///
    /// # Errors
    /// [`KindError::SizeTooLarge`].
    pub fn check_bytes(memory_bytes: u64, disk_bytes: u64, most: u64) -> Result<(), KindError> {
        within(SnapshotKind::Teleport, memory_bytes.saturating_add(disk_bytes), most)
    }
}

impl Snapshot<Teleport> {
    /// Whether memory and disk have at most `most` bytes.
    ///
    /// # Errors
    /// [`KindError::SizeTooLarge`].
    pub fn check_size(&self, most: u64) -> Result<(), KindError> {
        Teleport::check_bytes(self.content.memory_bytes, self.content.disk_bytes, most)
    }

    /// Whether the machine can continue there.
    ///
    /// # Errors
    /// Mismatches, [`KindError::SizeTooLarge`].
    pub fn check_arrival(&self, target: &Site, most: u64) -> Result<(), KindError> {
        self.check_machine(Some(&self.content.machine), target)?;
        self.check_size(most)
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

#[cfg(test)]
mod tests {
    use super::*;

    const MOST: u64 = limits::SNAPSHOT_TELEPORT_BYTES;

    fn machine() -> Machine {
        Machine {
            vmm: "QEMU 10".into(),
            build: "a".into(),
            machine_type: "q35".into(),
            cpu_model: "qemu64".into(),
            ram_bytes: 1 << 30,
            processors: 1,
        }
    }

    fn site(architecture: &str, image: &str, host: u8) -> Site {
        let host = HostId::from_bytes([host; 16]);
        let architecture = architecture.parse().expect("a name");
        Site { architecture, base_image_version: image.into(), host, machine: Some(machine()) }
    }

    fn snapshot<Content>(content: Content) -> Snapshot<Content> {
        let host = HostId::from_bytes([1; 16]);
        let architecture = "x86_64".parse().expect("a name");
        Snapshot { architecture, base_image_version: "1.2.3".into(), host, content }
    }

    fn teleport(memory_bytes: u64, disk_bytes: u64) -> Snapshot<Teleport> {
        snapshot(Teleport { memory_bytes, disk_bytes, machine: machine() })
    }

    fn suspend(memory_bytes: u64) -> Snapshot<Suspend> {
        snapshot(Suspend { memory_bytes, machine: Some(machine()) })
    }

    #[test]
    fn architecture_validation() {
        for (name, fits) in [("x86_64", true), ("amd64", true), ("aarch64", false), ("arm64", false), ("vax", false)] {
            let arrived = teleport(1, 1).check_arrival(&site(name, "1.2.3", 2), MOST);
            let resumed = suspend(1).check_resume(&site(name, "1.2.3", 1));
            for found in [arrived, resumed] {
                assert_eq!(found.is_ok(), fits, "{name}");
                assert!(fits || matches!(found, Err(KindError::ArchitectureMismatch { .. })), "{name}");
            }
        }
        let state = snapshot(Checkpoint { state_bytes: 1 });
        assert_eq!(state.check_arrival(&site("aarch64", "", 2)), Ok(()));
    }

    #[test]
    fn base_image_version_validation() {
        for (image, fits) in [("1.2.3", true), ("1.2.4", false), ("1.2", false), ("", false)] {
            let arrived = teleport(1, 1).check_arrival(&site("x86_64", image, 2), MOST);
            let resumed = suspend(1).check_resume(&site("x86_64", image, 1));
            for found in [arrived, resumed] {
                assert_eq!(found.is_ok(), fits, "{image}");
                assert!(fits || matches!(found, Err(KindError::BaseImageMismatch { .. })), "{image}");
            }
        }
    }

    /// Each text that may be a stranger's has a bound, in characters.
    #[test]
    fn long_texts_name_their_rule() {
        let whole = serde_json::to_value(teleport(1, 1)).expect("JSON");
        let image = ("/base_image_version", limits::IMAGE_VERSION_CHARS, KindError::LongImageVersion);
        let texts = ["vmm", "build", "machine_type", "cpu_model"]
            .map(|name| (format!("/content/machine/{name}"), limits::MACHINE_TEXT_CHARS, KindError::LongMachineText));
        for (at, most, rule) in texts.into_iter().chain([(image.0.to_owned(), image.1, image.2)]) {
            for (chars, fits) in [(most, true), (most + 1, false)] {
                let mut json = whole.clone();
                *json.pointer_mut(&at).expect("a text") = "é".repeat(chars).into();
                let read = serde_json::from_value::<Snapshot<Teleport>>(json).map_err(|error| error.to_string());
                assert_eq!(read.is_ok(), fits, "{at}: {chars}");
                assert!(read.err().is_none_or(|said| said.contains(&rule.to_string())), "{at}");
            }
        }
    }

    #[test]
    fn suspend_stays_on_its_host() {
        assert_eq!(suspend(1).check_resume(&site("x86_64", "1.2.3", 1)), Ok(()));
        assert_eq!(suspend(1).check_resume(&site("x86_64", "1.2.3", 2)), Err(KindError::OtherHost));
    }

    #[test]
    fn machine_mismatches_are_distinct() {
        let others = [
            ("vmm_mismatch", Machine { vmm: "QEMU 11".into(), ..machine() }),
            ("build_mismatch", Machine { build: "b".into(), ..machine() }),
            ("machine_type_mismatch", Machine { machine_type: "pc".into(), ..machine() }),
            ("cpu_model_mismatch", Machine { cpu_model: "max".into(), ..machine() }),
            ("machine_size_mismatch", Machine { ram_bytes: 1 << 29, ..machine() }),
            ("machine_size_mismatch", Machine { processors: 2, ..machine() }),
        ];
        for (reason, other) in others {
            let here = Site { machine: Some(other), ..site("x86_64", "1.2.3", 1) };
            for found in [suspend(1).check_resume(&here), teleport(1, 1).check_arrival(&here, MOST)] {
                assert_eq!(found.map_err(|error| Error::from(error).reason), Err(reason.into()));
            }
        }
        let none = Site { machine: None, ..site("x86_64", "1.2.3", 1) };
        assert_eq!(suspend(1).check_resume(&none), Err(KindError::NoMachine));
    }

    #[test]
    fn each_kind_has_a_size_limit() {
        let here = site("x86_64", "1.2.3", 1);
        for (past, fits) in [(0, true), (1, false)] {
            let processes = snapshot(Suspend { memory_bytes: 7 + past, machine: None });
            assert_eq!(processes.check_size(7).is_ok(), fits, "suspend {past}");
            let machine = suspend(machine().ram_bytes + limits::VM_DEVICE_STATE_BYTES + past);
            assert_eq!(machine.check_resume(&here).is_ok(), fits, "machine {past}");
            let whole = teleport(limits::SNAPSHOT_TELEPORT_BYTES - 7, 7 + past);
            assert_eq!(whole.check_arrival(&here, MOST).is_ok(), fits, "teleport {past}");
            assert!(whole.check_arrival(&here, MOST - 1).is_err(), "teleport {past}");
            let state_bytes = limits::SNAPSHOT_CHECKPOINT_BYTES + past;
            assert_eq!(snapshot(Checkpoint { state_bytes }).check_arrival(&here).is_ok(), fits, "checkpoint {past}");
        }
        let whole = teleport(u64::MAX, u64::MAX);
        assert!(matches!(whole.check_arrival(&here, MOST), Err(KindError::SizeTooLarge { .. })));
    }
}
