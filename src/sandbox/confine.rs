//! Drops the rights of the engine's process inside its tree: limits, keyring, capabilities, file
//! access, system calls. The order leaves each step the rights it needs. Runs in the engine's
//! process.

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr,
    RulesetStatus, Scope,
};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::unistd::Pid;

use super::layer::{Layer, LayerStatus, SandboxError, SandboxReport, failed};
use super::plan::SandboxPlan;
use super::seccomp::{self, Conditions};
use crate::core::spec::Net;
use crate::sys::caps;

/// Processes of init that count as the same user's: init and one fork.
const INIT_TASKS: u64 = 2;
const MIB: u64 = 1 << 20;

/// The limits set by the cgroup, so that the others need not be.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ByCgroup {
    /// Memory.
    pub memory: bool,
    /// Processes.
    pub pids: bool,
    /// Processors.
    pub cpu: bool,
}

impl ByCgroup {
    /// The facts that the system call filter depends on.
    pub(super) fn conditions(self) -> Conditions {
        Conditions { memory_cgroup: self.memory, affinity_is_limit: !self.cpu }
    }
}

type Step = Result<(), SandboxError>;

/// Applies every layer except the system call filter.
///
/// # Errors
/// The first layer that the host refuses and the plan does not waive.
pub(super) fn confine(plan: &SandboxPlan, by: ByCgroup, report: &mut SandboxReport) -> Step {
    settle(plan, report, Layer::Rlimits, rlimits(plan, by))?;
    report.enforced(Layer::Memory, memory_words(plan, by));
    report.enforced(Layer::Pids, pids_words(plan, by));
    let keyring = caps::new_session_keyring().map(|()| String::from("own session keyring, empty"));
    settle(plan, report, Layer::Keyring, keyring_unless_absent(keyring))?;
    capabilities().map_err(failed(Layer::Capabilities, "cannot drop capabilities"))?;
    report.enforced(Layer::Capabilities, "none, none to gain");
    crate::sys::process::set_no_new_privileges().map_err(failed(Layer::NoNewPrivs, "cannot set no_new_privs"))?;
    report.enforced(Layer::NoNewPrivs, "on");
    landlock(plan, report)
}

/// Installs the system call filter, the last step.
///
/// # Errors
/// If the host does not support it and the plan does not waive it.
pub(super) fn filter(plan: &SandboxPlan, by: ByCgroup, report: &mut SandboxReport) -> Step {
    let program = seccomp::program(by.conditions());
    let outcome = seccomp::install(program).map(|()| format!("allow-list, {} instructions", program.len()));
    settle(plan, report, Layer::Seccomp, outcome)
}

/// Records the outcome of a layer; a failure is an error unless the plan waives the layer.
fn settle<E: std::fmt::Display>(
    plan: &SandboxPlan,
    report: &mut SandboxReport,
    layer: Layer,
    outcome: Result<String, E>,
) -> Step {
    match outcome {
        Ok(detail) => report.enforced(layer, detail),
        Err(error) if plan.may_lack(layer) => report.note(layer, LayerStatus::Degraded { why: error.to_string() }),
        Err(error) => return Err(SandboxError::new(layer, error.to_string())),
    }
    Ok(())
}

fn rlimits(plan: &SandboxPlan, by: ByCgroup) -> Result<String, String> {
    use Resource::*;
    let limits = &plan.limits;
    let mut wanted = vec![
        // 1, not 0: no file is that small, and only at 1 does the host kernel not start a core
        // handler, which would run as root on data of the code inside.
        (RLIMIT_CORE, 1),
        (RLIMIT_NOFILE, u64::from(limits.open_files)),
        (RLIMIT_NPROC, u64::from(limits.pids) + INIT_TASKS),
        (RLIMIT_FSIZE, limits.workspace_bytes),
        (RLIMIT_MEMLOCK, 8 * MIB),
        (RLIMIT_MSGQUEUE, MIB),
        (RLIMIT_SIGPENDING, 1024),
        (RLIMIT_NICE, 0),
        (RLIMIT_RTPRIO, 0),
        (RLIMIT_RTTIME, 0),
        (RLIMIT_STACK, limits.memory_bytes),
    ];
    if !by.memory {
        wanted.push((RLIMIT_DATA, limits.memory_bytes));
    }
    for (resource, most) in wanted {
        let (soft, hard) = getrlimit(resource).map_err(|error| format!("cannot read {resource:?}: {error}"))?;
        // A silently lower limit would break the code inside in confusing ways.
        let asked = match resource {
            RLIMIT_NOFILE => Some("open files"),
            RLIMIT_NPROC if !by.pids => Some("processes and threads"),
            _ => None,
        };
        if let Some(what) = asked.filter(|_| hard < most) {
            return Err(format!("{most} {what} were asked for, but the host allows {hard}"));
        }
        let most = most.min(hard);
        let start = if resource == RLIMIT_STACK { soft.min(most) } else { most };
        setrlimit(resource, start, most).map_err(|error| format!("cannot set {resource:?}: {error}"))?;
    }
    Ok(format!("{} open files, files of {} MiB, no core files", limits.open_files, limits.workspace_bytes / MIB))
}

fn memory_words(plan: &SandboxPlan, by: ByCgroup) -> String {
    let mib = plan.limits.memory_bytes / MIB;
    if by.memory { format!("{mib} MiB, by cgroup") } else { format!("{mib} MiB, by rlimit and watchdog") }
}

fn pids_words(plan: &SandboxPlan, by: ByCgroup) -> String {
    format!("{}, by {}", plan.limits.pids, if by.pids { "cgroup" } else { "rlimit" })
}

/// Without a cgroup: as many whole processors as the limit needs, chosen at random. Init sets the
/// affinity just before untrusted code runs, since the sandbox is built faster on all processors.
///
/// # Errors
/// If the host refuses and the plan does not waive it.
pub(super) fn limit_processors(plan: &SandboxPlan, by: ByCgroup, engine: Pid, report: &mut SandboxReport) -> Step {
    settle(plan, report, Layer::Cpu, processors(plan, by, engine))
}

fn processors(plan: &SandboxPlan, by: ByCgroup, engine: Pid) -> Result<String, String> {
    if by.cpu {
        return Ok(format!("{}.{:03}, by cgroup", plan.limits.cpu_milli / 1000, plan.limits.cpu_milli % 1000));
    }
    let allowed = sched_getaffinity(engine).map_err(|error| format!("cannot read the affinity: {error}"))?;
    let all: Vec<usize> = (0..CpuSet::count()).filter(|cpu| allowed.is_set(*cpu).unwrap_or(false)).collect();
    let count = plan.whole_cpus().min(all.len());
    let first = usize::from(crate::sys::random::bytes::<1>()[0]);
    let mut chosen = CpuSet::new();
    for i in 0..count {
        chosen.set(all[(first + i) % all.len()]).map_err(|error| error.to_string())?;
    }
    sched_setaffinity(engine, &chosen).map_err(|error| format!("cannot set the affinity: {error}"))?;
    if sched_getaffinity(engine) != Ok(chosen) {
        return Err("the affinity was not applied".into());
    }
    let given = format!("{count} of {} processors, by affinity", all.len());
    if plan.limits.cpu_milli.is_multiple_of(1000) {
        return Ok(given);
    }
    // More than requested: this is the result for a waived limit.
    Err(format!("parts of a processor need the cpu controller of a cgroup; without it {given}"))
}

/// A host kernel without keyrings needs no isolation of them.
fn keyring_unless_absent(outcome: std::io::Result<String>) -> std::io::Result<String> {
    match outcome {
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => Ok(String::from("the host kernel has no keyrings")),
        other => other,
    }
}

fn capabilities() -> std::io::Result<()> {
    caps::clear_ambient()?;
    caps::lock_securebits()?;
    caps::drop_bounding()?;
    caps::drop_all()
}

/// The newest ABI known to both the host kernel and the `landlock` crate.
pub(super) fn known_abi(abi: u32) -> ABI {
    match abi {
        0 => ABI::Unsupported,
        1 => ABI::V1,
        2 => ABI::V2,
        3 => ABI::V3,
        4 => ABI::V4,
        5 => ABI::V5,
        6 => ABI::V6,
        _ => ABI::V7,
    }
}

/// One rule: full access below our own root. Every right outside the rule (mounting, foreign
/// sockets and signals) is denied.
fn landlock(plan: &SandboxPlan, report: &mut SandboxReport) -> Step {
    let number = match crate::sys::landlock::abi() {
        Ok(number) => number,
        Err(error) => {
            settle(
                plan,
                report,
                Layer::Landlock,
                Err::<String, _>(format!("the host kernel has no Landlock: {error}")),
            )?;
            return settle(plan, report, Layer::LandlockScope, Err::<String, _>("there is no Landlock"));
        }
    };
    let (abi, scoped) = (known_abi(number), number >= 6);
    settle(plan, report, Layer::Landlock, restrict(abi, scoped).map(|()| format!("abi {number}, own tree only")))?;
    match (scoped, plan.net) {
        (true, _) => report.enforced(Layer::LandlockScope, "abstract sockets and signals"),
        (false, Net::None) => {
            report.enforced(Layer::LandlockScope, "by namespaces (network, PID): the host kernel cannot scope");
        }
        (false, Net::Host) => {
            let why = "the host kernel cannot scope abstract sockets, and the network is the host's";
            return settle(plan, report, Layer::LandlockScope, Err::<String, _>(why));
        }
    }
    Ok(())
}

fn restrict(abi: ABI, scoped: bool) -> Result<(), String> {
    let all = AccessFs::from_all(abi);
    let words = |error: &dyn std::fmt::Display| format!("cannot restrict: {error}");
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::HardRequirement)
        .handle_access(all)
        .map_err(|error| words(&error))?;
    if scoped {
        rules = rules.scope(Scope::from_all(abi)).map_err(|error| words(&error))?;
    }
    let root = PathFd::new("/").map_err(|error| words(&error))?;
    let status = rules
        .create()
        .and_then(|created| created.add_rule(PathBeneath::new(root, all)))
        .and_then(|created| created.restrict_self())
        .map_err(|error| words(&error))?;
    match status.ruleset {
        RulesetStatus::FullyEnforced => Ok(()),
        other => Err(format!("the rules are {other:?}")),
    }
}
