//! Fork requests: the number of children, their source and their names.

use std::time::Duration;

use super::error::{Error, Result};
use super::limits;
use super::spec::{Isolation, KernelSpec};
use super::spec_update::SpecUpdate;

/// A request to fork a kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forking {
    /// The child's name; for several children, the prefix of their names.
    pub name: String,
    /// The checkpoint to fork, as the client named it; empty: the present state.
    pub from: String,
    /// Number of children.
    pub count: u32,
    /// Interrupt running code instead of waiting for it.
    pub interrupt: bool,
    /// How long to wait for the safe point.
    pub wait: Duration,
    /// The kernel version that the client expects; 0: any.
    pub expected_version: u64,
    /// Idempotency key: the same key within a day returns the same children; empty: none.
    pub key: String,
    /// The children's isolation; `None`: the source's.
    pub isolation: Option<Isolation>,
    /// The children's image; `None`: the source's, or the current one of another isolation.
    pub image: Option<String>,
    /// Changes of the source's network, limits and host paths for the children.
    pub update: SpecUpdate,
}

/// How the children of a fork began.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ForkWay {
    /// As copies of the running virtual machine, with all of its memory.
    Machine {
        /// How long it stood still.
        pause: Duration,
    },
    /// From a checkpoint.
    Checkpoint {
        /// Why the running machine was not copied; empty if there is none, or something else was asked for.
        reason: String,
    },
}

impl ForkWay {
    /// From a checkpoint, as asked for.
    pub fn checkpoint() -> ForkWay {
        ForkWay::Checkpoint { reason: String::new() }
    }

    /// Its name.
    pub fn name(&self) -> &'static str {
        match self {
            ForkWay::Machine { .. } => "machine",
            ForkWay::Checkpoint { .. } => "checkpoint",
        }
    }
}

impl Forking {
    /// Creates a request for one child of the present state.
    pub fn of(name: impl Into<String>) -> Forking {
        Forking {
            name: name.into(),
            from: String::new(),
            count: 1,
            interrupt: false,
            wait: limits::CHECKPOINT_WAIT,
            expected_version: 0,
            key: String::new(),
            isolation: None,
            image: None,
            update: SpecUpdate::default(),
        }
    }

    /// Changes a source's specification to that of the children.
    ///
    /// State and files hold nothing of the isolation. A waived layer of a process is not one of a virtual machine.
    ///
    /// # Errors
    /// `notFound` for a path to remove that the source lacks.
    pub fn adapt(&self, spec: &mut KernelSpec) -> Result<()> {
        *spec = self.update.apply(spec).map_err(|path| {
            Error::not_found(format!("{} is no path of the specification of {}", path.display(), spec.name))
                .hint(format!("ryokan show {} lists them", spec.name))
        })?;
        let isolation = self.isolation.unwrap_or(spec.isolation);
        if isolation != spec.isolation {
            spec.isolation = isolation;
            spec.image.clear();
            spec.degraded.clear();
        }
        if let Some(image) = &self.image {
            spec.image.clone_from(image);
        }
        Ok(())
    }

    /// Whether a running virtual machine with this specification is copied: `Ok(false)` if something else is asked for.
    ///
    /// # Errors
    /// Why it cannot be copied.
    pub fn copies_machine(&self, spec: &KernelSpec) -> std::result::Result<bool, &'static str> {
        let mut child = spec.clone();
        let is_possible = self.adapt(&mut child).is_ok();
        if spec.isolation != Isolation::Microvm || !self.from.is_empty() || !is_possible || child != *spec {
            return Ok(false);
        }
        if !spec.engine.seeds_anew() {
            return Err("this engine cannot seed its random generators anew: a copy would draw the same numbers");
        }
        match spec.ephemeral {
            true => Err("the worker of an ephemeral kernel ends without its daemon"),
            false => Ok(true),
        }
    }

    /// Checks the fields that do not depend on the host.
    ///
    /// # Errors
    /// `invalidArgument`.
    pub fn check(&self) -> Result<()> {
        if self.count == 0 || self.count as usize > limits::FORK_CHILDREN {
            let most = limits::FORK_CHILDREN;
            return Err(Error::invalid(format!("{} children at once: from 1 to {most} can be", self.count)));
        }
        if self.key.len() > limits::KEY_BYTES {
            return Err(Error::invalid(format!("the key has more than {} bytes", limits::KEY_BYTES)));
        }
        Ok(())
    }

    /// Returns the children's names.
    pub fn names(&self) -> Vec<String> {
        match self.count {
            0 | 1 => vec![self.name.clone()],
            count => (1..=count).map(|n| format!("{}-{n}", self.name)).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::engine::EngineName;

    #[test]
    fn fork_changes_isolation() {
        let name = "a".parse().expect("a name");
        let mut source = KernelSpec::new(name, EngineName::Python);
        (source.image, source.degraded) = ("v1".into(), vec!["landlock".into()]);
        let adapted = |forking: Forking| {
            let mut spec = source.clone();
            forking.adapt(&mut spec).expect("it is possible");
            (spec.isolation, spec.image, spec.degraded.len())
        };
        let of = Forking::of("b");
        assert_eq!(adapted(of.clone()), (Isolation::Process, "v1".into(), 1));
        let same = Forking { isolation: Some(Isolation::Process), ..of.clone() };
        assert_eq!(adapted(same), (Isolation::Process, "v1".into(), 1));
        let machine = Forking { isolation: Some(Isolation::Microvm), ..of.clone() };
        assert_eq!(adapted(machine.clone()), (Isolation::Microvm, String::new(), 0));
        assert_eq!(adapted(Forking { image: Some("v2".into()), ..machine }), (Isolation::Microvm, "v2".into(), 0));
    }

    #[test]
    fn fork_changes_limits_and_paths() {
        let mut spec = KernelSpec::new("a".parse().expect("a name"), EngineName::Python);
        let remove_paths = vec!["/none".into()];
        let absent = Forking { update: SpecUpdate { remove_paths, ..SpecUpdate::default() }, ..Forking::of("b") };
        assert_eq!(absent.adapt(&mut spec).map_err(|error| error.code.name()), Err("notFound"));
        let update = SpecUpdate { pids: Some(7), ..SpecUpdate::default() };
        Forking { update, ..Forking::of("b") }.adapt(&mut spec).expect("it is possible");
        assert_eq!(spec.limits.pids, 7);
    }

    #[test]
    fn only_equal_machines_are_copied() {
        let mut spec = KernelSpec::new("a".parse().expect("a name"), EngineName::Python);
        assert_eq!(Forking::of("b").copies_machine(&spec), Ok(false));
        spec.isolation = Isolation::Microvm;
        assert_eq!(Forking::of("b").copies_machine(&spec), Ok(true));
        let others = [
            Forking { from: "~1".into(), ..Forking::of("b") },
            Forking { isolation: Some(Isolation::Process), ..Forking::of("b") },
            Forking { image: Some("v2".into()), ..Forking::of("b") },
            Forking { update: SpecUpdate { cpu_milli: Some(500), ..SpecUpdate::default() }, ..Forking::of("b") },
        ];
        for other in others {
            assert_eq!(other.copies_machine(&spec), Ok(false), "{other:?}");
        }
        spec.ephemeral = true;
        assert!(Forking::of("b").copies_machine(&spec).is_err());
        assert!(Forking::of("b").copies_machine(&KernelSpec { engine: EngineName::Node, ..spec }).is_err());
    }

    #[test]
    fn fork_children_are_numbered() {
        assert_eq!(Forking::of("a").names(), ["a"]);
        assert_eq!(Forking { count: 3, ..Forking::of("a") }.names(), ["a-1", "a-2", "a-3"]);
        for (count, fits) in [(0, false), (1, true), (limits::FORK_CHILDREN as u32, true), (u32::MAX, false)] {
            assert_eq!(Forking { count, ..Forking::of("a") }.check().is_ok(), fits, "{count}");
        }
    }
}
