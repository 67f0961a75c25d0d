//! Detection of the host's environment for the supervisor.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use anyhow::Context as _;

use super::paths::{Mode, Paths};
use crate::config::{self, Config};
use crate::core::durability::Durability;
use crate::core::engine::EngineName;
use crate::core::ids::HostId;
use crate::core::info::Ability;
use crate::isolation::microvm::{self, MicrovmDriver, MicrovmSettings};
use crate::isolation::process::program::WorkerProgram;
use crate::isolation::process::{ProcessDriver, ProcessSettings};
use crate::isolation::{Drivers, IsolationDriver};
use crate::mcp::{Account, Launch};
use crate::supervisor::host::environment::Environment;

/// The folder of images, in the data directory.
const IMAGES: &str = "images";
/// What is kept about images.
const IMAGE_LIST: &str = "images.json";

/// Detects the environment.
///
/// # Errors
/// If the worker's executable is missing or the configured account does not exist.
pub(super) fn environment(config: &Config, paths: &Paths, host: HostId) -> anyhow::Result<(Environment, Drivers)> {
    let worker_account = worker_account(config)?;
    let mut mcp_launch = Launch::of_process(paths.runtime_dir().display().to_string());
    mcp_launch.account = worker_account.map(|(uid, gid)| Account { uid, gid });
    let cgroup_base = crate::sandbox::delegated_cgroup();
    let protected: Vec<PathBuf> = paths.own_dirs().iter().map(|dir| dir.to_path_buf()).collect();
    let process: Rc<dyn IsolationDriver> = Rc::new(ProcessDriver::new(ProcessSettings {
        host,
        program: worker()?,
        account: worker_account,
        cgroup_base: cgroup_base.clone(),
        sockets: paths.workers_runtime(),
        protected: protected.clone(),
        cache: paths.data_dir().join("cache"),
        system_paths: config.sandbox.system_paths.clone(),
        mapped_paths: config.sandbox.map_owner.clone(),
        interpreters: config.engines.interpreters(),
        python_preload: config.engines.python.preload.clone(),
        snapshot_bytes: config.engines.python.rollback_memory,
        power_safe: config.daemon.durability == Durability::Power,
    }));
    let settings = MicrovmSettings {
        host,
        images: paths.data_dir().join(IMAGES),
        image_list: paths.data_dir().join(IMAGE_LIST),
        templates: paths.data_dir().join("templates"),
        sockets: paths.workers_runtime(),
        account: worker_account,
        cgroup_base,
        durability: config.daemon.durability,
        accelerator: config.microvm.accelerator,
        vmm: config.microvm.vmm,
        firecracker: config.microvm.firecracker.clone(),
        refresh: config.microvm.refresh(),
        worker: worker_binary()?,
    };
    let microvm = MicrovmDriver::new(settings, Rc::clone(&process));
    let environment = Environment {
        pid: std::process::id(),
        system_wide: paths.mode() == Mode::System,
        host_name: nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok()).unwrap_or_default(),
        home: std::env::var_os("HOME").map(PathBuf::from),
        engines: engines(config),
        mcp_allowed: Arc::new(config.allow_list(paths.config_file())),
        mcp_launch,
        data: paths.data_dir().to_owned(),
        kernel_sockets: paths.kernels_runtime(),
        protected,
    };
    Ok((environment, Drivers::new(vec![process, Rc::new(microvm)])))
}

/// The account of workers. Only a daemon that runs as root needs another one.
fn worker_account(config: &Config) -> anyhow::Result<Option<(u32, u32)>> {
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

/// Path of the worker's executable, beside the daemon's.
pub(super) fn worker_binary() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("where this program is")?;
    let worker = own.with_file_name("ryokan-worker");
    anyhow::ensure!(worker.is_file(), "{} is not there: install ryokan-worker beside ryokand", worker.display());
    Ok(worker)
}

/// The engines that this host can run.
fn engines(config: &Config) -> Vec<EngineName> {
    let can_run = |engine: &EngineName| {
        let found = |command| crate::sandbox::find_program(command, &config.sandbox.system_paths).is_ok();
        config.engines.interpreter(*engine).is_none_or(found)
    };
    EngineName::ALL.into_iter().filter(can_run).collect()
}

/// The abilities of the host and of the file system of the data directory. Blocks.
///
/// If the directory does not exist, its nearest existing parent counts.
pub(super) fn abilities(worker: &Path, config: &Config, data: &Path) -> Vec<Ability> {
    let interpreters = config.engines.interpreters();
    let mut found = crate::sandbox::abilities::abilities(worker, &interpreters, &config.sandbox.system_paths);
    let (vmm, firecracker) = (config.microvm.vmm, config.microvm.firecracker.as_deref());
    found.extend(microvm::abilities(&data.join(IMAGES), &data.join(IMAGE_LIST), vmm, firecracker));
    found.extend(crate::workspace::doctor(data));
    found
}
