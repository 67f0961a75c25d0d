//! Fork requests: the number of children, their source and their names.

use std::time::Duration;

use super::error::{Error, Result};
use super::limits;
use super::spec::{Isolation, KernelSpec};

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
        }
    }

    /// Changes a source's specification to that of the children.
    ///
    /// State and files hold nothing of the isolation. A waived layer of a process is not one of a virtual machine.
    pub fn adapt(&self, spec: &mut KernelSpec) {
        let isolation = self.isolation.unwrap_or(spec.isolation);
        if isolation != spec.isolation {
            spec.isolation = isolation;
            spec.image.clear();
            spec.degraded.clear();
        }
        if let Some(image) = &self.image {
            spec.image.clone_from(image);
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

    #[test]
    fn fork_changes_isolation() {
        let name = "a".parse().expect("a name");
        let mut source = KernelSpec::new(name, crate::core::engine::EngineName::Python);
        (source.image, source.degraded) = ("v1".into(), vec!["landlock".into()]);
        let adapted = |forking: Forking| {
            let mut spec = source.clone();
            forking.adapt(&mut spec);
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
    fn fork_children_are_numbered() {
        assert_eq!(Forking::of("a").names(), ["a"]);
        assert_eq!(Forking { count: 3, ..Forking::of("a") }.names(), ["a-1", "a-2", "a-3"]);
        for (count, fits) in [(0, false), (1, true), (limits::FORK_CHILDREN as u32, true), (u32::MAX, false)] {
            assert_eq!(Forking { count, ..Forking::of("a") }.check().is_ok(), fits, "{count}");
        }
    }
}
