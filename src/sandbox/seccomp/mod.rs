//! The system call filter: the calls that code inside may make. Pure, apart from [`install`].
//!
//! ```text
//!  rules (a table, each with its reason) ──▶ ranges over call numbers ──▶ binary search in BPF ──▶ installed
//! ```
//!
//! An allow-list: calls without a rule fail with `ENOSYS`, so programs fall back as on an older
//! host kernel. Known dangerous calls fail with `EPERM`. Calls of a foreign architecture or of the
//! x32 interface kill the process: no legitimate program makes them.

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
        /// The argument's index, from 0.
        argument: u8,
        /// The compared bits.
        mask: u32,
        /// The values to compare with.
        values: &'static [u32],
        /// The decision if they equal one of the values.
        then: &'static Decision,
        /// The decision otherwise.
        otherwise: &'static Decision,
    },
}

/// The decision on one call, with its reason.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rule {
    /// Number on this architecture.
    pub number: u32,
    /// Name.
    pub name: &'static str,
    /// The decision.
    pub decision: Decision,
    /// The reason.
    #[cfg_attr(not(test), allow(dead_code, reason = "for readers of the table; a test insists on it"))]
    pub why: &'static str,
}

/// The host's properties that the filter depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Conditions {
    /// A memory cgroup accounts for all memory, including anonymous files and System V objects.
    pub memory_cgroup: bool,
    /// The processor limit is an affinity, so the code must not change the affinity.
    pub affinity_is_limit: bool,
}

/// The filter as a program.
///
/// Compiled once per process; forked processes inherit it.
pub(super) fn program(conditions: Conditions) -> &'static BpfProgram {
    static MADE: [OnceLock<BpfProgram>; 4] = [const { OnceLock::new() }; 4];
    let at = usize::from(conditions.memory_cgroup) * 2 + usize::from(conditions.affinity_is_limit);
    MADE[at].get_or_init(|| compile::compile(&rules::rules(conditions)))
}

/// The filter of a virtual machine monitor: it opens no socket and signals no other process. One that `listens` makes
/// Unix sockets, and connects to none.
pub(super) fn monitor_program(listens: bool) -> &'static BpfProgram {
    static MADE: [OnceLock<BpfProgram>; 2] = [const { OnceLock::new() }; 2];
    MADE[usize::from(listens)].get_or_init(|| compile::compile(&rules::monitor_rules(listens)))
}

/// Compiles all variants in advance, for processes that this one forks.
pub fn prepare() {
    for conditions in [false, true].into_iter().flat_map(|memory_cgroup| {
        [false, true].map(|affinity_is_limit| Conditions { memory_cgroup, affinity_is_limit })
    }) {
        program(conditions);
    }
}

/// Permanently installs the filter on the calling process, which must have one thread.
///
/// # Errors
/// The host kernel's errors.
pub(super) fn install(program: &BpfProgram) -> Result<(), seccompiler::Error> {
    seccompiler::apply_filter(program)
}
