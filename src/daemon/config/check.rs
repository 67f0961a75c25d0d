//! From [`RawConfig`] to [`Config`]: every rule that one value alone does not show. The daemon's start and
//! `ryokan config check` both come through here, so that what the one accepts the other runs.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::path_rules::PathRules;
use super::problem::Fault;
use super::raw::{RawConfig, RawDaemon, RawDefaults, RawEngines, RawLimits, RawPython, RawSandbox, RawUpkeep};
use super::values::Span;
use super::{Config, Daemon, Defaults, Engines, Limits, Python, Sandbox, Upkeep, pool, servers};
use crate::core::engine::EngineName;
use crate::core::limits;
use crate::core::name::KernelName;
use crate::core::retention::Retention;
use crate::core::spec::{KernelLimits, KernelSpec, check_inside_path};
use crate::sandbox::Layer;

/// Longest duration of any setting.
const LONGEST: Duration = Duration::from_secs(7 * 86_400);
/// Entries of any list.
const LIST: usize = 256;
/// What `log_level` may be without naming a module.
const LOG_LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// What is wrong so far.
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

/// Checks everything; all that is wrong is reported, not just the first.
pub(super) fn check(raw: &RawConfig) -> Result<Config, Vec<Fault>> {
    let mut faults = Faults::default();
    let config = Config {
        defaults: defaults(&raw.defaults, raw.sandbox.net_host_allowed, &mut faults),
        limits: limits(&raw.limits, &mut faults),
        sandbox: sandbox(&raw.sandbox, &mut faults),
        daemon: daemon(&raw.daemon, &mut faults),
        upkeep: upkeep(&raw.upkeep, &mut faults),
        pools: pool::check(&raw.pool, &mut faults),
        engines: engines(&raw.engines, &mut faults),
        mcp_servers: servers::check(&raw.mcp, &mut faults),
    };
    if faults.0.is_empty() { Ok(config) } else { Err(faults.0) }
}

fn defaults(raw: &RawDefaults, net_host_allowed: bool, faults: &mut Faults) -> Defaults {
    let limits = KernelLimits {
        memory_bytes: raw.memory.0,
        cpu_milli: raw.cpus.0,
        pids: raw.pids,
        open_files: raw.open_files,
        workspace_bytes: raw.workspace_size.0,
    };
    // One limit at a time through the very check that a new kernel's specification passes.
    let usual = KernelLimits::default();
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
    faults.unless(raw.idle_timeout.0.is_none_or(|timeout| timeout <= LONGEST), || too_long("defaults", "idle_timeout"));
    faults.unless(raw.output_kept.0 <= 1 << 30, || {
        Fault::new(&["defaults", "output_kept"], "more than 1G of one execution's output cannot be kept")
    });
    faults.unless(net_host_allowed || raw.net == crate::core::spec::Net::None, || {
        Fault::new(&["defaults", "net"], "\"host\" is forbidden by sandbox.net_host_allowed")
    });
    Defaults {
        engine: raw.engine,
        limits,
        idle_timeout: raw.idle_timeout.0,
        output_kept_bytes: raw.output_kept.0,
        net: raw.net,
        retention: retention(raw, faults),
    }
}

fn retention(raw: &RawDefaults, faults: &mut Faults) -> Retention {
    let keep_for_ms = raw.keep_checkpoints_for.0.map(|span| u64::try_from(span.as_millis()).unwrap_or(u64::MAX));
    let retention = Retention { newest: (raw.keep_checkpoints > 0).then_some(raw.keep_checkpoints), keep_for_ms };
    if let Err(error) = retention.check() {
        faults.add(Fault::new(&["defaults", "keep_checkpoints_for"], error.to_string()));
    }
    retention
}

fn upkeep(raw: &RawUpkeep, faults: &mut Faults) -> Upkeep {
    faults.unless(raw.interval.0.is_none_or(|interval| interval <= LONGEST), || too_long("upkeep", "interval"));
    faults.unless(raw.copied.0 >= limits::STORE_PACK_BYTES, || {
        Fault::new(&["upkeep", "copied"], "less than one pack: no turn could copy anything").hint("at least 64M")
    });
    faults.unless(raw.grace.0 <= limits::STORE_GRACE_MOST, || {
        Fault::new(&["upkeep", "grace"], format!("longer than {}", Span(limits::STORE_GRACE_MOST)))
    });
    faults.unless(raw.spares <= limits::SPARES_MOST, || {
        Fault::new(&["upkeep", "spares"], format!("more than {}", limits::SPARES_MOST))
    });
    Upkeep { interval: raw.interval.0, copied_bytes: raw.copied.0, spares: raw.spares, grace: raw.grace.0 }
}

fn check_limits(limits: KernelLimits) -> Result<(), String> {
    let name: KernelName = "x".parse().map_err(|e: crate::core::name::NameError| e.to_string())?;
    let spec = KernelSpec { limits, ..KernelSpec::new(name, EngineName::Kaish) };
    spec.check().map_err(|e| e.to_string())
}

fn limits(raw: &RawLimits, faults: &mut Faults) -> Limits {
    for (key, value, most) in [
        ("kernels", raw.kernels, limits::KERNELS),
        ("kernels_per_user", raw.kernels_per_user, limits::KERNELS),
        ("workers", raw.workers, limits::KERNELS),
        ("workers_per_user", raw.workers_per_user, limits::KERNELS),
        ("worker_starts", raw.worker_starts, limits::WORKER_STARTS_MOST),
        ("clients", raw.clients, limits::CLIENTS),
        ("clients_per_user", raw.clients_per_user, limits::CLIENTS),
        ("executions_in_flight", raw.executions_in_flight, limits::KERNELS),
        ("executions_in_flight_per_user", raw.executions_in_flight_per_user, limits::KERNELS),
        ("executions_queued", raw.executions_queued, limits::EXECUTIONS_QUEUED),
    ] {
        faults.range("limits", key, value as u64, 1..=most as u64);
    }
    // None at all would be no bound worth having.
    let bound = |bytes: u64| (bytes > 0).then_some(bytes);
    Limits {
        kernels: raw.kernels,
        kernels_per_user: raw.kernels_per_user,
        workers: raw.workers,
        workers_per_user: raw.workers_per_user,
        memory_bytes: bound(raw.memory.0),
        memory_per_user_bytes: bound(raw.memory_per_user.0),
        worker_starts: raw.worker_starts,
        worker_wait: raw.worker_wait.0,
        clients: raw.clients,
        clients_per_user: raw.clients_per_user,
        executions_in_flight: raw.executions_in_flight,
        executions_in_flight_per_user: raw.executions_in_flight_per_user,
        executions_queued: raw.executions_queued,
    }
}

fn sandbox(raw: &RawSandbox, faults: &mut Faults) -> Sandbox {
    for (key, length) in [
        ("system_paths", raw.system_paths.len()),
        ("allow_degraded", raw.allow_degraded.len()),
        ("deny_paths", raw.deny_paths.len()),
    ] {
        faults.range("sandbox", key, length as u64, 0..=LIST as u64);
    }
    for path in &raw.system_paths {
        if let Err(e) = check_inside_path(path) {
            faults.add(Fault::new(&["sandbox", "system_paths"], e.to_string()));
        }
    }
    let user = raw.worker_user.as_str();
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    faults.unless(!user.is_empty() && user.len() <= 32 && user.chars().all(plain), || {
        Fault::new(&["sandbox", "worker_user"], format!("{user:?} cannot be the name of an account"))
    });
    faults.unless(!matches!(user, "root" | "0"), || {
        Fault::new(&["sandbox", "worker_user"], "root cannot run workers").hint("name an unprivileged account")
    });
    for layer in &raw.allow_degraded {
        if let Err(unknown) = layer.parse::<Layer>() {
            faults.add(Fault::new(&["sandbox", "allow_degraded"], unknown.to_string()));
        }
    }
    let path_rules = PathRules::parse(&raw.deny_paths).unwrap_or_else(|(_, why)| {
        faults.add(Fault::new(&["sandbox", "deny_paths"], why));
        PathRules::default()
    });
    Sandbox {
        system_paths: raw.system_paths.clone(),
        worker_user: raw.worker_user.clone(),
        allow_degraded: raw.allow_degraded.clone(),
        net_host_allowed: raw.net_host_allowed,
        path_rules,
    }
}

fn daemon(raw: &RawDaemon, faults: &mut Faults) -> Daemon {
    let durations =
        [("orphan_grace", Some(raw.orphan_grace.0)), ("drain", Some(raw.drain.0)), ("idle_exit", raw.idle_exit.0)];
    for (key, duration) in durations {
        faults.unless(duration.is_none_or(|duration| duration <= LONGEST), || too_long("daemon", key));
    }
    if let Err(why) = check_log_level(&raw.log_level) {
        let hint = "error, warn, info, debug, trace, off, or one per module, for example \"info,ryokan::rpc=debug\"";
        faults.add(Fault::new(&["daemon", "log_level"], why).hint(hint));
    }
    Daemon {
        orphan_grace: raw.orphan_grace.0,
        drain: raw.drain.0,
        durability: raw.durability,
        log_format: raw.log_format,
        log_level: raw.log_level.clone(),
        idle_exit: raw.idle_exit.0,
        metrics_address: metrics_address(&raw.metrics_address, faults),
        pressure_file: pressure_file(&raw.pressure_file, faults),
    }
}

/// A filter of `tracing`, less what is one only by the letter: a word that is no level would be a module of that name, with all of its lines.
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

/// Whether there is such a file is the host's matter: where there is none, the daemon says so and looks itself.
fn pressure_file(path: &Path, faults: &mut Faults) -> Option<PathBuf> {
    let named = !path.as_os_str().is_empty();
    let at = ["daemon", "pressure_file"];
    faults.unless(!named || path.is_absolute(), || {
        Fault::new(&at, format!("{path:?} is no absolute path"))
            .hint("/proc/pressure/memory, or memory.pressure of a cgroup")
    });
    named.then(|| path.to_owned())
}

/// Of the loopback only: what is served there is served to anybody who can connect.
fn metrics_address(text: &str, faults: &mut Faults) -> Option<SocketAddr> {
    if text.is_empty() {
        return None;
    }
    let short: String = text.chars().take(80).collect();
    let why = match text.parse::<SocketAddr>() {
        Ok(address) if address.ip().is_loopback() => return Some(address),
        Ok(_) => format!("{short:?} is no address of the loopback: take 127.0.0.1 or [::1]"),
        Err(_) => format!("{short:?} is no address with a port, such as \"127.0.0.1:9464\""),
    };
    faults.add(Fault::new(&["daemon", "metrics_address"], why));
    None
}

fn engines(raw: &RawEngines, faults: &mut Faults) -> Engines {
    let mut command = |engine: &str, command: &str| {
        if let Err(why) = check_command(command) {
            faults.add(Fault::new(&["engines", engine, "command"], why));
        }
        PathBuf::from(command)
    };
    let interpreter = command("python", &raw.python.command);
    let (bash, node) = (command("bash", &raw.bash.command), command("node", &raw.node.command));
    Engines { python: python(&raw.python, interpreter, faults), bash, node }
}

fn python(raw: &RawPython, command: PathBuf, faults: &mut Faults) -> Python {
    let preload = &raw.preload;
    let at = ["engines", "python", "preload"];
    if preload.len() > limits::PRELOADED_MODULES {
        faults.add(Fault::new(&at, format!("{} modules are more than {}", preload.len(), limits::PRELOADED_MODULES)));
    }
    for module in preload.iter().filter(|module| !is_module(module)) {
        let short: String = module.chars().take(80).collect();
        faults.add(Fault::new(&at, format!("{short:?} is no module's name: letters, digits, _ and dots")));
    }
    Python { command, rollback_bytes: raw.rollback_memory.0, preload: preload.clone() }
}

fn is_module(name: &str) -> bool {
    let is_word = |word: &str| {
        let first = word.chars().next().is_some_and(|c| c == '_' || c.is_ascii_alphabetic());
        first && word.chars().all(|c| c == '_' || c.is_ascii_alphanumeric())
    };
    name.len() <= limits::IDENTIFIER_BYTES && name.split('.').all(is_word)
}

/// A program: a name to be found on `PATH`, or an absolute path.
pub(super) fn check_command(command: &str) -> Result<(), String> {
    if command.is_empty() || command.len() > limits::PATH_BYTES || command.contains('\0') {
        return Err("a program's name or absolute path is needed".into());
    }
    if command.contains('/') && !command.starts_with('/') {
        return Err(format!("{command:?} depends on the working directory: give a bare name or an absolute path"));
    }
    Ok(())
}

/// A fault for a duration beyond [`LONGEST`].
fn too_long(section: &str, key: &str) -> Fault {
    Fault::new(&[section, key], format!("longer than {}", Span(LONGEST)))
}
