//! Checks of the configuration that span more than one value.
//!
//! The daemon's start and `ryokan config check` share them, so a configuration accepted by one is
//! valid for the other.

use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use super::problem::Fault;
use super::sections::{Daemon, Defaults, Engines, Limits, Microvm, Python, Sandbox, Teleport, Upkeep};
use super::values::Span;
use super::{Config, pool, postgres, rebuild, servers, sources};
use crate::core::engine::EngineName;
use crate::core::limits;
use crate::core::name::KernelName;
use crate::core::spec::{KernelLimits, KernelSpec, Net, check_inside_path};
use crate::sandbox::Layer;

/// Longest duration of any setting.
const LONGEST: Duration = Duration::from_secs(7 * 86_400);
/// Maximum entries of any list.
const LIST: usize = 256;
/// Values of `log_level` that name no module.
const LOG_LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// The faults found so far.
#[derive(Default)]
pub(super) struct Faults(pub(super) Vec<Fault>);

impl Faults {
    pub(super) fn add(&mut self, fault: Fault) {
        self.0.push(fault);
    }

    fn unless(&mut self, good: bool, fault: impl FnOnce() -> Fault) {
        if !good {
            self.add(fault());
        }
    }

    fn range(&mut self, section: &str, key: &str, value: u64, range: RangeInclusive<u64>) {
        self.unless(range.contains(&value), || {
            let allowed = format!("possible: {} to {}", range.start(), range.end());
            Fault::new(&[section, key], format!("{value} is out of range")).hint(allowed)
        });
    }
}

/// Checks everything and resolves the pool's rules. Reports all faults, not just the first.
pub(super) fn check(mut config: Config) -> Result<Config, Vec<Fault>> {
    let mut faults = Faults::default();
    defaults(&config.defaults, config.sandbox.net_host_allowed, &mut faults);
    limits(&config.limits, &mut faults);
    sandbox(&config.sandbox, &mut faults);
    daemon(&config.daemon, &mut faults);
    upkeep(&config.upkeep, &mut faults);
    teleport(&config.teleport, &mut faults);
    pool::check(&mut config.pool, &mut faults);
    engines(&config.engines, &mut faults);
    microvm(&config.microvm, &mut faults);
    servers::check(&config.mcp, &mut faults);
    sources::check(&config.sources, &mut faults);
    postgres::check(&config.postgres, &mut faults);
    rebuild::check(&config.rebuild, &mut faults);
    if faults.0.is_empty() { Ok(config) } else { Err(faults.0) }
}

fn defaults(defaults: &Defaults, net_host_allowed: bool, faults: &mut Faults) {
    // Tests one limit at a time with the check of a new kernel's specification.
    let (limits, usual) = (defaults.limits(), KernelLimits::default());
    for (key, alone) in [
        ("memory", KernelLimits { memory_bytes: limits.memory_bytes, ..usual }),
        ("cpus", KernelLimits { cpu_milli: limits.cpu_milli, ..usual }),
        ("pids", KernelLimits { pids: limits.pids, ..usual }),
        ("open_files", KernelLimits { open_files: limits.open_files, ..usual }),
        ("workspace_size", KernelLimits { workspace_bytes: limits.workspace_bytes, ..usual }),
    ] {
        if let Err(e) = check_limits(alone) {
            faults.add(Fault::new(&["defaults", key], e));
        }
    }
    faults.unless(defaults.idle_timeout.is_none_or(|timeout| timeout <= LONGEST), || {
        too_long("defaults", "idle_timeout")
    });
    faults.unless(defaults.output_kept <= 1 << 30, || {
        Fault::new(&["defaults", "output_kept"], "more than 1G of one execution's output cannot be kept")
    });
    faults.unless(net_host_allowed || defaults.net == Net::None, || {
        Fault::new(&["defaults", "net"], "\"host\" is forbidden by sandbox.net_host_allowed")
    });
    if let Err(error) = defaults.retention().check() {
        faults.add(Fault::new(&["defaults", "keep_checkpoints_for"], error.to_string()));
    }
}

fn teleport(teleport: &Teleport, faults: &mut Faults) {
    let is_text = |text: &str| text.len() <= limits::HANDOVER_TRANSPORT_BYTES && !text.contains(['\0', '\n']);
    let ssh = &teleport.ssh;
    faults.unless(
        ssh.len() <= LIST && ssh.first().is_some_and(|program| !program.is_empty()) && ssh.iter().all(|a| is_text(a)),
        || Fault::new(&["teleport", "ssh"], "is no program with its arguments").hint("for example [\"ssh\"]"),
    );
    faults.unless(!teleport.command.trim().is_empty() && is_text(&teleport.command), || {
        Fault::new(&["teleport", "command"], "is no command on one line").hint("for example \"ryokan pipe\"")
    });
    let (least, most) = (limits::HANDOVER_STALL_MIN, limits::HANDOVER_HELD);
    faults.unless((least..=most).contains(&teleport.stall_timeout), || {
        Fault::new(&["teleport", "stall_timeout"], format!("not between {} and {}", Span(least), Span(most)))
    });
    faults.unless((least..=LONGEST).contains(&teleport.pause_limit), || {
        Fault::new(&["teleport", "pause_limit"], format!("not between {} and {}", Span(least), Span(LONGEST)))
    });
}

fn upkeep(upkeep: &Upkeep, faults: &mut Faults) {
    faults.unless(upkeep.interval.is_none_or(|interval| interval <= LONGEST), || too_long("upkeep", "interval"));
    faults.unless(upkeep.copy_limit >= limits::STORE_PACK_BYTES, || {
        Fault::new(&["upkeep", "copy_limit"], "less than one pack: no turn could copy anything").hint("at least 64M")
    });
    faults.unless(upkeep.grace <= limits::STORE_GRACE_MAX, || {
        Fault::new(&["upkeep", "grace"], format!("longer than {}", Span(limits::STORE_GRACE_MAX)))
    });
    faults.unless(upkeep.prepared_copies <= limits::PREPARED_COPIES_MAX, || {
        Fault::new(&["upkeep", "prepared_copies"], format!("more than {}", limits::PREPARED_COPIES_MAX))
    });
}

fn check_limits(limits: KernelLimits) -> Result<(), String> {
    let name: KernelName = "x".parse().map_err(|e: crate::core::name::NameError| e.to_string())?;
    let spec = KernelSpec { limits, ..KernelSpec::new(name, EngineName::Kaish) };
    spec.check().map_err(|e| e.to_string())
}

fn limits(own: &Limits, faults: &mut Faults) {
    for (key, value, most) in [
        ("kernels", own.kernels, limits::KERNELS),
        ("kernels_per_user", own.kernels_per_user, limits::KERNELS),
        ("workers", own.workers, limits::KERNELS),
        ("workers_per_user", own.workers_per_user, limits::KERNELS),
        ("worker_starts", own.worker_starts, limits::WORKER_STARTS_MAX),
        ("clients", own.clients, limits::CLIENTS),
        ("clients_per_user", own.clients_per_user, limits::CLIENTS),
        ("executions_in_flight", own.executions_in_flight, limits::KERNELS),
        ("executions_in_flight_per_user", own.executions_in_flight_per_user, limits::KERNELS),
        ("executions_queued", own.executions_queued, limits::EXECUTIONS_QUEUED),
    ] {
        faults.range("limits", key, value as u64, 1..=most as u64);
    }
}

fn sandbox(sandbox: &Sandbox, faults: &mut Faults) {
    for (key, length) in [
        ("system_paths", sandbox.system_paths.len()),
        ("allow_degraded", sandbox.allow_degraded.len()),
        ("deny_paths", sandbox.deny_paths.texts().count()),
        ("root_deny_paths", sandbox.root_deny_paths.texts().count()),
        ("map_owner", sandbox.map_owner.len()),
    ] {
        faults.range("sandbox", key, length as u64, 0..=LIST as u64);
    }
    for path in &sandbox.system_paths {
        if let Err(e) = check_inside_path(path) {
            faults.add(Fault::new(&["sandbox", "system_paths"], e.to_string()));
        }
    }
    for path in &sandbox.map_owner {
        let is_plain = path.components().skip(1).all(|part| matches!(part, std::path::Component::Normal(_)));
        faults.unless(path.is_absolute() && is_plain && path.components().count() > 1, || {
            let what = format!("path {path:?} must be absolute, without '..', and not the root");
            Fault::new(&["sandbox", "map_owner"], what)
        });
    }
    let user = sandbox.worker_user.as_str();
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    faults.unless(!user.is_empty() && user.len() <= 32 && user.chars().all(plain), || {
        Fault::new(&["sandbox", "worker_user"], format!("{user:?} cannot be the name of an account"))
    });
    faults.unless(!matches!(user, "root" | "0"), || {
        Fault::new(&["sandbox", "worker_user"], "root cannot run workers").hint("name an unprivileged account")
    });
    for layer in &sandbox.allow_degraded {
        if let Err(unknown) = layer.parse::<Layer>() {
            faults.add(Fault::new(&["sandbox", "allow_degraded"], unknown.to_string()));
        }
    }
}

fn daemon(daemon: &Daemon, faults: &mut Faults) {
    let durations =
        [("orphan_grace", Some(daemon.orphan_grace)), ("drain", Some(daemon.drain)), ("idle_exit", daemon.idle_exit)];
    for (key, duration) in durations {
        faults.unless(duration.is_none_or(|duration| duration <= LONGEST), || too_long("daemon", key));
    }
    if let Err(why) = check_log_level(&daemon.log_level) {
        let hint = "error, warn, info, debug, trace, off, or one per module, for example \"info,ryokan::rpc=debug\"";
        faults.add(Fault::new(&["daemon", "log_level"], why).hint(hint));
    }
    // A missing file is not a fault here: the daemon reports it and detects one itself.
    if let Some(path) = daemon.pressure_file.as_ref().filter(|path| !path.is_absolute()) {
        let fault = Fault::new(&["daemon", "pressure_file"], format!("{path:?} is no absolute path"));
        faults.add(fault.hint("/proc/pressure/memory, or memory.pressure of a cgroup"));
    }
}

/// Checks a filter of `tracing`.
///
/// A single word that is no level is refused, although `tracing` would accept it as the name of a
/// module and log all lines of that module.
fn check_log_level(text: &str) -> Result<(), String> {
    let is_word = |part: &&str| !part.is_empty() && !part.contains(['=', '[', ']', '{', '}']);
    let mut words = text.split(',').map(str::trim).filter(is_word);
    let is_level = |word: &str| LOG_LEVELS.iter().any(|level| level.eq_ignore_ascii_case(word));
    if let Some(word) = words.find(|word| !is_level(word)) {
        let short: String = word.chars().take(80).collect();
        return Err(format!("{short:?} is no level"));
    }
    tracing_subscriber::EnvFilter::try_new(text).map(drop).map_err(|error| error.to_string())
}

fn microvm(microvm: &Microvm, faults: &mut Faults) {
    if let Some(path) = microvm.firecracker.as_ref().filter(|path| !path.is_absolute()) {
        let fault = Fault::new(&["microvm", "firecracker"], format!("{path:?} is no absolute path"));
        faults.add(fault.hint("the path of the program; without one it is searched in PATH"));
    }
    let times = [
        ("template_max_age", microvm.template_max_age),
        ("template_refresh_interval", Some(microvm.template_refresh_interval)),
    ];
    for (key, time) in times.into_iter().filter_map(|(key, time)| Some((key, time?))) {
        faults.unless(time <= LONGEST, || too_long("microvm", key));
        faults.unless(time >= limits::POOL_TIME_MIN, || Fault::new(&["microvm", key], "at least a second is required"));
    }
}

fn engines(engines: &Engines, faults: &mut Faults) {
    for (engine, command) in engines.interpreters() {
        if let Err(why) = check_command(&command) {
            faults.add(Fault::new(&["engines", engine.name(), "command"], why));
        }
    }
    python(&engines.python, faults);
}

fn python(python: &Python, faults: &mut Faults) {
    let preload = &python.preload;
    let at = ["engines", "python", "preload"];
    if preload.len() > limits::PRELOADED_MODULES {
        faults.add(Fault::new(&at, format!("{} modules are more than {}", preload.len(), limits::PRELOADED_MODULES)));
    }
    for module in preload.iter().filter(|module| !is_module(module)) {
        let short: String = module.chars().take(80).collect();
        faults.add(Fault::new(&at, format!("{short:?} is no module's name: letters, digits, _ and dots")));
    }
}

fn is_module(name: &str) -> bool {
    let is_word = |word: &str| {
        let first = word.chars().next().is_some_and(|c| c == '_' || c.is_ascii_alphabetic());
        first && word.chars().all(|c| c == '_' || c.is_ascii_alphanumeric())
    };
    name.len() <= limits::IDENTIFIER_BYTES && name.split('.').all(is_word)
}

/// Checks a program: a name searched in `PATH`, or an absolute path.
pub(super) fn check_command(command: &Path) -> Result<(), String> {
    let text = command.to_string_lossy();
    if text.is_empty() || text.len() > limits::PATH_BYTES || text.contains('\0') {
        return Err("a program's name or absolute path is needed".into());
    }
    if text.contains('/') && !text.starts_with('/') {
        return Err(format!("{text:?} depends on the working directory: give a bare name or an absolute path"));
    }
    Ok(())
}

/// A fault for a duration beyond [`LONGEST`].
fn too_long(section: &str, key: &str) -> Fault {
    Fault::new(&[section, key], format!("longer than {}", Span(LONGEST)))
}
