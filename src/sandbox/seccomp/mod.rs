//! The system call filter: the calls that code inside may make. Pure, apart from [`install`].
//!
//! ```text
//!  rules (a table, each with its reason) ──▶ ranges over call numbers ──▶ binary search in BPF ──▶ installed
//! ```
//!
//! An allow-list: what no rule names does not exist (`ENOSYS`), so programs fall back as on an older host kernel. Calls
//! that are known and dangerous are refused (`EPERM`). Calls of a foreign architecture or of the x32 interface end the
//! process: nothing honest makes them.

mod arguments;
mod compile;
#[cfg(test)]
mod interpret;
mod rules;
#[cfg(target_arch = "x86_64")]
mod rules_x86_64;
#[cfg(test)]
mod tests;

use std::sync::OnceLock;

use seccompiler::BpfProgram;

/// Decision on a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Decision {
    /// Allowed.
    Allow,
    /// Fails with this error number.
    Fail(i32),
    /// Kills the process.
    Kill,
    /// Depends on the low 32 bits of an argument; the host kernel reads no more of the arguments
    /// checked here.
    If {
        /// Which, from 0.
        argument: u8,
        /// The bits that matter.
        mask: u32,
        /// What they are compared with.
        values: &'static [u32],
        /// If they equal one of the values.
        then: &'static Decision,
        /// If not.
        otherwise: &'static Decision,
    },
}

/// One call, what becomes of it, and why.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rule {
    /// Number on this architecture.
    pub number: u32,
    /// Name.
    pub name: &'static str,
    /// What becomes of it.
    pub decision: Decision,
    /// Why.
    #[cfg_attr(not(test), allow(dead_code, reason = "for readers of the table; a test insists on it"))]
    pub why: &'static str,
}

/// What the filter depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Conditions {
    /// A memory cgroup counts all memory, that of anonymous files and System V objects included.
    pub memory_cgroup: bool,
    /// The processor limit is an affinity, which the code must not change then.
    pub affinity_is_limit: bool,
}

/// The filter as a program.
///
/// Made once: a process that has made it gives it to all that it forks.
pub(super) fn program(conditions: Conditions) -> &'static BpfProgram {
    static MADE: [OnceLock<BpfProgram>; 4] = [const { OnceLock::new() }; 4];
    let at = usize::from(conditions.memory_cgroup) * 2 + usize::from(conditions.affinity_is_limit);
    MADE[at].get_or_init(|| compile::compile(&rules::rules(conditions)))
}

/// Makes all of them ahead, for what this process forks.
pub fn prepare() {
    for conditions in [false, true].into_iter().flat_map(|memory_cgroup| {
        [false, true].map(|affinity_is_limit| Conditions { memory_cgroup, affinity_is_limit })
    }) {
        program(conditions);
    }
}

/// Installs the filter on the calling process, which has one thread, for good.
///
/// # Errors
/// What the host kernel says.
pub(super) fn install(program: &BpfProgram) -> Result<(), seccompiler::Error> {
    seccompiler::apply_filter(program)
}
