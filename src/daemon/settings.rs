//! From configuration and paths to what the supervisor wants to know.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;

use super::config::{self, Config, Durability};
use super::paths::{Mode, Paths};
use crate::core::engine::EngineName;
use crate::core::name::KernelName;
use crate::core::spec::KernelSpec;
use crate::isolation::process::program::WorkerProgram;
use crate::mcp::{Account, Launch};
use crate::supervisor::host::settings::Settings;
use crate::supervisor::workers::admission::Bounds;

/// Fills the supervisor's settings.
///
/// # Errors
/// If the worker's executable is not there or the configured account does not exist.
pub(super) fn settings(config: &Config, paths: &Paths) -> anyhow::Result<Settings> {
    let worker_user = worker_user(config)?;
    let rules = config.sandbox.path_rules.clone();
    let own_uid = nix::unistd::geteuid().as_raw();
    let own_home = std::env::var_os("HOME").map(PathBuf::from);
    let forbids = move |path: &Path, uid: u32| {
        let home = if uid == own_uid { own_home.clone() } else { home_of(uid) };
        rules.refusal(path, home.as_deref())
    };
    let mut mcp_launch = Launch::of_process(paths.runtime_dir().display().to_string());
    if let Some((uid, gid)) = worker_user {
        mcp_launch.account = Some(Account { uid, gid });
    }
    Ok(Settings {
        defaults: defaults(config),
        output_kept_bytes: config.defaults.output_kept_bytes,
        kernels: config.limits.kernels,
        // Of a daemon that serves one user, he may have all.
        kernels_per_user: match paths.mode() {
            Mode::System => config.limits.kernels_per_user,
            Mode::User => config.limits.kernels,
        },
        clients: config.limits.clients,
        // Of a daemon that serves one user, he may have all.
        clients_per_user: match paths.mode() {
            Mode::System => config.limits.clients_per_user,
            Mode::User => config.limits.clients,
        },
        bounds: Bounds {
            workers: config.limits.workers,
            memory_bytes: config.limits.memory_bytes,
            executions: config.limits.executions_in_flight,
        },
        // Of a daemon that serves one user, he may have all.
        bounds_per_user: match paths.mode() {
            Mode::System => Bounds {
                workers: config.limits.workers_per_user,
                memory_bytes: config.limits.memory_per_user_bytes,
                executions: config.limits.executions_in_flight_per_user,
            },
            Mode::User => {
                Bounds { workers: usize::MAX, memory_bytes: None, executions: config.limits.executions_in_flight }
            }
        },
        executions_queued: config.limits.executions_queued,
        worker_starts: config.limits.worker_starts,
        worker_wait: config.limits.worker_wait,
        allow_degraded: config.sandbox.allow_degraded.clone(),
        net_host_allowed: config.sandbox.net_host_allowed,
        forbids: Box::new(forbids),
        system_paths: config.sandbox.system_paths.clone(),
        worker_user,
        audit_head: paths.data_dir().join("audit.head"),
        upkeep_interval: config.upkeep.interval,
        upkeep_turn_bytes: config.upkeep.copied_bytes,
        fork_spares: config.upkeep.spares,
        spares_folder: paths.data_dir().join("spares"),
        gc_grace: config.upkeep.grace,
        orphan_grace: config.daemon.orphan_grace,
        drain: config.daemon.drain,
        power_safe: config.daemon.durability == Durability::Power,
        interpreters: config.engines.interpreters(),
        rollback_bytes: config.engines.python.rollback_bytes,
        python_preload: config.engines.python.preload.clone(),
        pressure_file: config.daemon.pressure_file.clone(),
        cache: paths.data_dir().join("cache"),
        reserve: paths.data_dir().join("reserve"),
        pools: engines(config).into_iter().map(|engine| (engine, config.pools.of(engine))).collect(),
        standing_pools: EngineName::ALL.into_iter().filter(|engine| config.pools.stands(*engine)).collect(),
        worker: worker()?,
        worker_sockets: paths.workers_runtime(),
        protected: paths.own_dirs().iter().map(|dir| dir.to_path_buf()).collect(),
        cgroup_base: crate::sandbox::delegated_cgroup(),
        mcp_allowed: Arc::new(config.allow_list(paths.config_file())),
        mcp_launch,
        system_wide: paths.mode() == Mode::System,
    })
}

fn defaults(config: &Config) -> KernelSpec {
    let name: KernelName = "default".parse().expect("it is a valid name");
    let mut spec = KernelSpec::new(name, config.defaults.engine);
    spec.limits = config.defaults.limits;
    spec.net = config.defaults.net;
    spec.retention = config.defaults.retention;
    spec.idle_timeout_ms = config.defaults.idle_timeout.map_or(0, |timeout| timeout.as_millis() as u64);
    spec
}

fn home_of(uid: u32) -> Option<PathBuf> {
    nix::unistd::User::from_uid(uid.into()).ok().flatten().map(|user| user.dir)
}

/// Only a daemon that is root needs another account for its workers.
fn worker_user(config: &Config) -> anyhow::Result<Option<(u32, u32)>> {
    if !nix::unistd::geteuid().is_root() {
        return Ok(None);
    }
    let found = config::account(&config.sandbox.worker_user);
    let account = found.map_err(|why| anyhow::anyhow!("{why}: name another one in sandbox.worker_user"))?;
    Ok(Some(account))
}

/// The worker's program, held open.
fn worker() -> anyhow::Result<WorkerProgram> {
    let path = worker_binary()?;
    WorkerProgram::open(path.clone()).with_context(|| format!("open {}", path.display()))
}

/// The worker's executable: beside the daemon's own.
pub(super) fn worker_binary() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("where this program is")?;
    let worker = own.with_file_name("ryokan-worker");
    anyhow::ensure!(worker.is_file(), "{} is not there: install ryokan-worker beside ryokand", worker.display());
    Ok(worker)
}

/// The engines that can run here.
pub(super) fn engines(config: &Config) -> Vec<EngineName> {
    let interpreters = config.engines.interpreters();
    EngineName::ALL
        .into_iter()
        .filter(|engine| {
            let interpreter = interpreters.get(engine);
            interpreter
                .is_none_or(|command| crate::sandbox::find_program(command, &config.sandbox.system_paths).is_ok())
        })
        .collect()
}
