//! The daemon's run: lock, databases, recovery, sockets, signals, drain.

use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use anyhow::Context as _;
use nix::fcntl::{Flock, FlockArg};
use sd_notify::NotifyState;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::LocalSet;

use super::args::Args;
use super::paths::{Mode, Paths};
use super::{environment, logging, metrics, service};
use crate::catalog::{Catalog, CatalogConfig};
use crate::config::{self, Config};
use crate::core::ids::HostId;
use crate::core::limits;
use crate::rpc::server::{Published, raise_open_files, serve};
use crate::store::{Store, StoreHandle};
use crate::supervisor::registry::Supervisor;
use crate::sys;

/// Executes the request of the arguments.
pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let mode = if args.system { Mode::System } else { Mode::User };
    if args.abilities {
        let data = Paths::of_process(mode).map(|paths| paths.data_dir().to_owned()).unwrap_or_default();
        // With an invalid configuration, the abilities of the default one.
        let paths = Paths::of_process(mode).ok();
        let config = paths.and_then(|paths| Config::load(&paths.config_file()).ok()).unwrap_or_default();
        let found = environment::abilities(&environment::worker_binary()?, &config, &data);
        return print(&format!("{}\n", serde_json::to_string_pretty(&found)?));
    }
    let paths = Paths::of_process(mode)?;
    if let Some(file) = &args.check_config {
        return check_config(file.clone(), &paths, args.json);
    }
    let mut config = Config::load(&paths.config_file())?;
    if args.show_config {
        return print(&if args.json { format!("{:#}\n", config.to_json()) } else { config.to_toml() });
    }
    anyhow::ensure!(mode == Mode::User || nix::unistd::geteuid().is_root(), "--system needs root");
    if mode == Mode::User {
        config.limits = config.limits.of_single_user();
    }
    logging::start(&config)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("the event loop")?;
    LocalSet::new().block_on(&runtime, daemon(args, config, paths))
}

/// Checks the named file, or the daemon's own. If that does not exist, the defaults apply.
fn check_config(named: Option<PathBuf>, paths: &Paths, json: bool) -> anyhow::Result<()> {
    let file = named.clone().unwrap_or_else(|| paths.config_file());
    let defaults = named.is_none() && !file.try_exists().unwrap_or(true);
    let problems = if defaults { Vec::new() } else { config::check(&file) };
    if json {
        let report = serde_json::json!({ "file": file, "defaults": defaults, "problems": problems });
        print(&format!("{report:#}\n"))?;
    } else if defaults {
        print(&format!("there is no {}: the defaults are in force\n", file.display()))?;
    } else if problems.is_empty() {
        print(&format!("{}: ok\n", file.display()))?;
    } else {
        problems.iter().for_each(super::complain);
    }
    anyhow::ensure!(problems.is_empty(), "{} has {} problem(s)", file.display(), problems.len());
    Ok(())
}

/// Writes to stdout. A closed stdout is not an error.
fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.context("write the output"),
    }
}

/// How the daemon ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// A requested stop: workers end too.
    Stop,
    /// A new daemon follows: workers survive.
    Restart,
}

async fn daemon(args: &Args, config: Config, paths: Paths) -> anyhow::Result<()> {
    let uid = nix::unistd::geteuid().as_raw();
    paths.prepare(uid)?;
    let _lock = lock(&paths)?;
    let open_files = raise_open_files().context("limit on open files")?;
    tracing::info!(version = env!("CARGO_PKG_VERSION"), data = %paths.data_dir().display(), open_files, "starting");
    let mark = paths.runtime_dir().display().to_string();
    let ended = tokio::task::spawn_blocking(move || crate::mcp::orphans::end(&mark)).await?;
    if ended > 0 {
        tracing::info!(processes = ended, "ended MCP servers of a former daemon");
    }
    let catalog = open_catalog(&config, &paths)?;
    let store = Store::open(&paths.store()).context("store")?;
    let catalog_handle = catalog.handle();
    let (environment, drivers) = environment::environment(&config, &paths, catalog_handle.host_id())?;
    let supervisor = Supervisor::new(config.clone(), environment, drivers, catalog_handle, StoreHandle::new(store));
    supervisor.set_group_arrivals(Rc::new(crate::supervisor::freeze::Arrivals));
    let published = Published::start(&supervisor);
    let recovered = supervisor.recover().await.map_err(anyhow::Error::new)?;
    crate::supervisor::freeze::recover(&supervisor).await;
    crate::supervisor::maintenance::run(&supervisor);
    crate::supervisor::freeze::retry(&supervisor);
    republish(&supervisor, &published).await;
    tracing::info!(?recovered, "recovered");
    let socket = service::control_socket(&paths.control_socket(), paths.socket_mode())?;
    metrics::serve(&supervisor, paths.metrics_socket(), config.daemon.metrics_address).await?;
    let serving = serve(socket.listener, supervisor.clone(), published);
    service::notify(&[NotifyState::Ready]);
    supervisor.resume_kernels();
    let ending = tokio::select! {
        () = serving => unreachable!("serving never ends"),
        () = service::watchdog() => unreachable!("the watchdog never ends"),
        ending = signals(args.system) => ending?,
        () = idle(&supervisor, if args.on_demand { config.daemon.idle_exit } else { None }) => Ending::Stop,
    };
    tracing::info!(?ending, "ending");
    service::extend(config.daemon.drain);
    let drained = tokio::time::timeout(config.daemon.drain, supervisor.shut_down(ending == Ending::Restart)).await;
    if drained.is_err() {
        tracing::warn!(drain = ?config.daemon.drain, "some workers did not end in time; the next daemon takes them over");
    }
    let _ = std::fs::remove_file(paths.metrics_socket());
    if ending == Ending::Stop && socket.own {
        // A daemon that starts right now creates its own.
        let _ = std::fs::remove_file(paths.control_socket());
    }
    tokio::task::spawn_blocking(move || catalog.stop()).await?;
    Ok(())
}

/// Locks the data directory: only one daemon may own it.
///
/// The lock is released when the process ends, however it ends. A child process that was just about
/// to start may hold it a moment longer, so a held lock is retried briefly.
fn lock(paths: &Paths) -> anyhow::Result<Flock<File>> {
    let path = paths.data_dir().join("lock");
    let file = File::options().create(true).truncate(false).read(true).write(true).open(&path);
    let mut file = file.with_context(|| path.display().to_string())?;
    let until = std::time::Instant::now() + limits::LOCK_WAIT;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(mut locked) => {
                // Names the holder for other daemons. On a full disk the file stays empty.
                let _ = locked.set_len(0).and_then(|()| writeln!(locked, "{}", std::process::id()));
                return Ok(locked);
            }
            Err((unlocked, nix::errno::Errno::EWOULDBLOCK)) if std::time::Instant::now() < until => {
                file = unlocked;
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            Err((mut held, nix::errno::Errno::EWOULDBLOCK)) => {
                let mut text = String::new();
                let _ = held.read_to_string(&mut text);
                let holder = text.trim().parse().map_or_else(|_| String::new(), |pid: u32| format!(" (process {pid})"));
                return Err(anyhow::Error::new(AnotherRuns { path, holder }));
            }
            Err((_, error)) => return Err(anyhow::Error::new(error).context(path.display().to_string())),
        }
    }
}

/// The start failed because another daemon is running or about to end.
#[derive(Debug, thiserror::Error)]
#[error("another ryokand runs with this data{holder}: it holds {}", .path.display())]
pub struct AnotherRuns {
    path: PathBuf,
    /// The holder's process id, in parentheses; empty if unknown.
    holder: String,
}

fn open_catalog(config: &Config, paths: &Paths) -> anyhow::Result<Catalog> {
    let catalog = Catalog::open(&CatalogConfig {
        data: paths.data_dir().to_owned(),
        durability: config.daemon.durability,
        fresh_host_id: HostId::from_bytes(sys::random::bytes()),
        now_ms: sys::clock::now_ms(),
    });
    catalog.with_context(|| format!("catalog {}", paths.catalog().display()))
}

async fn republish(supervisor: &Supervisor, published: &Rc<Published>) {
    for kernel in supervisor.kernels() {
        match kernel.records.published().await {
            Ok(sockets) => published.republish(&kernel, &sockets),
            Err(error) => tracing::warn!(kernel = %kernel.spec().name, %error, "published sockets are not known"),
        }
        if kernel.view().worker_pid.is_none() {
            kernel.records.close().await;
        }
    }
}

async fn signals(system: bool) -> anyhow::Result<Ending> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    tokio::select! {
        _ = interrupt.recv() => Ok(Ending::Stop),
        _ = hangup.recv() => Ok(Ending::Restart),
        _ = terminate.recv() => {
            let restart = tokio::task::spawn_blocking(move || service::is_restart(system)).await.unwrap_or(false);
            Ok(if restart { Ending::Restart } else { Ending::Stop })
        }
    }
}

/// Ends an on-demand daemon after a period without use.
async fn idle(supervisor: &Supervisor, most: Option<Duration>) {
    let Some(most) = most else {
        return std::future::pending().await;
    };
    let mut ticks = tokio::time::interval((most / 4).clamp(Duration::from_millis(250), Duration::from_secs(30)));
    loop {
        ticks.tick().await;
        if supervisor.idle_ms() > most.as_millis() as i64 {
            return;
        }
    }
}
