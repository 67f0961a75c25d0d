//! Chooses the kind of a checkpoint, a restore and a move, or refuses a requested one with its rule.

use super::{KindError, KindRequest, PortableKind};
use crate::core::engine::EngineName;
use crate::core::error::Error;
use crate::core::spec::{Isolation, KernelSpec};

/// The chosen kind, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The kind.
    pub kind: PortableKind,
    /// The reason, for people.
    pub why: String,
}

/// The reason for a kind that was asked for.
const AS_REQUESTED: &str = "as requested";

/// What decides whether a kernel's memory can be a snapshot of kind teleport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Continuing {
    /// Its isolation.
    pub isolation: Isolation,
    /// Its engine.
    pub engine: EngineName,
    /// Whether it ends with its client.
    pub ephemeral: bool,
}

impl Continuing {
    /// The kernel with this specification.
    pub fn of(spec: &KernelSpec) -> Continuing {
        Continuing { isolation: spec.isolation, engine: spec.engine, ephemeral: spec.ephemeral }
    }

    /// Whether its memory can continue elsewhere.
    ///
    /// # Errors
    /// The rule against it.
    pub fn check(self) -> Result<(), KindError> {
        match (self.isolation, self.engine) {
            (Isolation::Process, _) => Err(KindError::MemoryStays(self.isolation)),
            (Isolation::Microvm, _) if self.ephemeral => Err(KindError::Ephemeral),
            (Isolation::Microvm, engine) if engine.seeds_anew() => Ok(()),
            (Isolation::Microvm, engine) => Err(KindError::NotReseeded(engine)),
        }
    }
}

/// Chooses the kind in which a kernel moves to another host, where it is of isolation `there`. The target has the last
/// word on kind teleport.
///
/// # Errors
/// The rule that the requested kind breaks.
pub fn choose_for_move(request: KindRequest, kernel: Continuing, there: Isolation) -> Result<Choice, KindError> {
    let memory = match there {
        Isolation::Process => Err(KindError::MemoryStays(there)),
        Isolation::Microvm => kernel.check(),
    };
    match request {
        KindRequest::Auto => Ok(match memory {
            Ok(()) => Choice {
                kind: PortableKind::Teleport,
                why: "the other host can continue the virtual machine's memory".into(),
            },
            Err(rule) => Choice { kind: PortableKind::Checkpoint, why: rule.to_string() },
        }),
        KindRequest::Only(kind @ PortableKind::Checkpoint) => Ok(Choice { kind, why: AS_REQUESTED.into() }),
        KindRequest::Only(kind @ PortableKind::Teleport) => memory.map(|()| Choice { kind, why: AS_REQUESTED.into() }),
    }
}

/// Chooses the kind of a checkpoint.
///
/// # Errors
/// The rule that the requested kind breaks.
pub fn choose_for_checkpoint(request: KindRequest, kernel: Continuing) -> Result<PortableKind, KindError> {
    match request {
        KindRequest::Auto | KindRequest::Only(PortableKind::Checkpoint) => Ok(PortableKind::Checkpoint),
        KindRequest::Only(PortableKind::Teleport) => kernel.check().map(|()| PortableKind::Teleport),
    }
}

/// Chooses the kind in which a checkpoint is restored: by default its own. `arrival`: whether its memory can continue
/// here; `None` if it holds none.
///
/// # Errors
/// The rule that the requested kind breaks.
pub fn choose_for_restore(request: Option<KindRequest>, arrival: Option<Result<(), Error>>) -> Result<Choice, Error> {
    let files = |why: String| Choice { kind: PortableKind::Checkpoint, why };
    let memory = |why: &str| Choice { kind: PortableKind::Teleport, why: why.into() };
    match (request, arrival) {
        (Some(KindRequest::Only(PortableKind::Teleport)), None) => Err(KindError::NoMemory.into()),
        (Some(KindRequest::Only(PortableKind::Checkpoint)), _) => Ok(files(AS_REQUESTED.into())),
        (None | Some(KindRequest::Auto), None) => Ok(files("the checkpoint holds no memory".into())),
        (Some(KindRequest::Auto), Some(Ok(()))) => Ok(memory("this host can continue the virtual machine's memory")),
        (Some(KindRequest::Auto), Some(Err(rule))) => Ok(files(rule.message)),
        (Some(KindRequest::Only(PortableKind::Teleport)), Some(arrival)) => arrival.map(|()| memory(AS_REQUESTED)),
        (None, Some(arrival)) => arrival.map(|()| memory("it is the checkpoint's kind")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::error::ErrorCode;

    fn kernel(isolation: Isolation, engine: EngineName) -> Continuing {
        Continuing { isolation, engine, ephemeral: false }
    }

    #[test]
    fn kind_is_chosen_or_refused() {
        let (process, python) = (kernel(Isolation::Process, EngineName::Python), EngineName::Python);
        let machine = kernel(Isolation::Microvm, python);
        let others = [
            (process, Isolation::Process, KindError::MemoryStays(Isolation::Process)),
            (process, Isolation::Microvm, KindError::MemoryStays(Isolation::Process)),
            (machine, Isolation::Process, KindError::MemoryStays(Isolation::Process)),
            (
                kernel(Isolation::Microvm, EngineName::Node),
                Isolation::Microvm,
                KindError::NotReseeded(EngineName::Node),
            ),
            (Continuing { ephemeral: true, ..machine }, Isolation::Microvm, KindError::Ephemeral),
        ];
        for (kernel, there, rule) in others {
            let moved = |request| choose_for_move(request, kernel, there);
            let auto = moved(KindRequest::Auto).expect("chosen");
            assert_eq!((auto.kind, auto.why), (PortableKind::Checkpoint, rule.to_string()));
            assert_eq!(moved(KindRequest::Only(PortableKind::Teleport)), Err(rule.clone()));
            assert!(moved(KindRequest::Only(PortableKind::Checkpoint)).is_ok());
            if kernel.isolation == there {
                let taken = choose_for_checkpoint(KindRequest::Only(PortableKind::Teleport), kernel);
                assert_eq!(taken, Err(rule.clone()));
            }
            let refused = Error::from(rule);
            assert_eq!((refused.code, refused.reason.as_str()), (ErrorCode::Unsupported, "snapshot_kind"));
            assert!(refused.hint.contains("--kind checkpoint"));
        }
        for request in [KindRequest::Auto, KindRequest::Only(PortableKind::Teleport)] {
            let moved = choose_for_move(request, machine, Isolation::Microvm);
            assert_eq!(moved.map(|choice| choice.kind), Ok(PortableKind::Teleport));
        }
        assert_eq!(choose_for_checkpoint(KindRequest::Auto, machine), Ok(PortableKind::Checkpoint));
        for kind in PortableKind::ALL {
            assert_eq!(choose_for_checkpoint(KindRequest::Only(kind), machine), Ok(kind));
        }
    }

    #[test]
    fn restore_says_its_kind() {
        use PortableKind::{Checkpoint, Teleport};

        let only = |kind| Some(KindRequest::Only(kind));
        let rule = || Error::from(KindError::NoMachine);
        let chosen = |request, arrival| choose_for_restore(request, arrival).map(|choice| (choice.kind, choice.why));
        let files = |why: &str| Ok((Checkpoint, why.to_owned()));
        for request in [None, Some(KindRequest::Auto)] {
            assert_eq!(chosen(request, None), files("the checkpoint holds no memory"));
            assert!(chosen(request, Some(Ok(()))).is_ok_and(|(kind, _)| kind == Teleport));
        }
        assert_eq!(chosen(None, Some(Err(rule()))).map_err(|error| error.reason), Err("no_machine".into()));
        assert_eq!(chosen(Some(KindRequest::Auto), Some(Err(rule()))), files(&rule().message));
        assert_eq!(chosen(only(Checkpoint), Some(Err(rule()))), files(AS_REQUESTED));
        assert_eq!(chosen(only(Teleport), None).map_err(|error| error.reason), Err("no_memory".into()));
        assert_eq!(chosen(only(Teleport), Some(Err(rule()))).map_err(|error| error.reason), Err("no_machine".into()));
    }
}
