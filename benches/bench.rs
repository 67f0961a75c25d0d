//! Measures a daemon of its own beside alternatives on the same machine in the same run.
//!
//! ```text
//! bench.rs     benchmarks and their order
//!  ├ latency.rs   round trips, new kernel to first result, variables
//!  ├ pool.rs      kernels with a warm worker, cost of warm workers, many idle kernels
//!  ├ stream.rs    throughput, a slow client
//!  ├ scale.rs     memory, idle cost, many clients, restart, many kernels
//!  ├ hostile.rs    a kernel beside one that attacks
//!  ├ checkpoint.rs checkpoints, restores, history: files.rs (the data), keepers.rs (other tools)
//!  ├ workspace.rs captures and restores of a directory, beside cp, restic, borg, rsync
//!  ├ freeze.rs    freezes and restores of a group, beside pg_dump, git bundle and tar
//!  ├ rollback.rs  restores of a Python kernel, from memory and from saved state
//!  ├ teleport.rs  moves between two daemons, beside rsync
//!  ├ surface.rs   files, listings, programs and whole commands, beside plain files and bwrap
//!  ├ python_client.rs the Python package beside the Rust client
//!  ├ trace.rs     time of one execution by step
//!  ├ daemon.rs    the daemon under test     peers.rs   bubblewrap, runc, ipykernel
//!  └ process.rs   /proc                     report.rs  the table
//! ```
//! `scripts/bench` builds it and installs its requirements.

mod checkpoint;
mod daemon;
mod freeze;
mod hostile;
mod latency;
mod microvm;
mod peers;
mod pool;
mod process;
mod python_client;
mod report;
mod rollback;
mod scale;
mod stream;
mod surface;
mod teleport;
mod trace;
mod workspace;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Parser;
use nix::sys::signal::{SigSet, Signal};
use ryokan::core::engine::EngineName;

use crate::daemon::Daemon;
use crate::report::Report;

/// Measures ryokan on this machine
#[derive(Debug, Parser)]
struct Args {
    /// Fewer repetitions: seconds in place of minutes, and coarse figures
    #[arg(long)]
    quick: bool,
    /// Size of the data of `files`, `freeze` and `teleport`, such as 1G
    #[arg(long, value_name = "SIZE", value_parser = ryokan::core::quantity::parse_size)]
    size: Option<u64>,
    /// Instead of measuring, trace the time of one execution into this folder
    #[arg(long, value_name = "FOLDER")]
    trace: Option<PathBuf>,
    /// Also write the results as JSON to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Without the other programs that checkpoints and new kernels are compared with
    #[arg(long)]
    alone: bool,
    /// Run benchmarks of all engines for this engine only
    #[arg(long)]
    engine: Option<EngineName>,
    /// List the names of the benchmarks
    #[arg(long)]
    list: bool,
    /// The interpreter of the python engine and of the peers
    #[arg(long, default_value = "/usr/bin/python3")]
    python: PathBuf,
    /// An interpreter with ipykernel and jupyter_client; without it those peers are left out
    #[arg(long)]
    ipykernel: Option<PathBuf>,
    /// An interpreter with pycapnp, for `python-client`
    #[arg(long, value_name = "PYTHON")]
    python_client: Option<PathBuf>,
    /// Another build of the daemon, with its worker beside it
    #[arg(long, value_name = "RYOKAND", default_value = env!("CARGO_BIN_EXE_ryokand"))]
    daemon: PathBuf,
    /// Instead of measuring, run this code in kaish, for the sandboxes that kaish is measured in
    #[arg(long, hide = true, value_name = "CODE")]
    kaish: Option<String>,
    /// `cargo bench` passes this to every benchmark
    #[arg(long, hide = true)]
    bench: bool,
    /// Benchmarks to run, or a common prefix of several; all by default
    names: Vec<String>,
}

/// Parameters of a benchmark.
struct World {
    quick: bool,
    /// Bytes of the data, if they are chosen.
    size: Option<u64>,
    alone: bool,
    engine: Option<EngineName>,
    daemon: PathBuf,
    python: PathBuf,
    ipykernel: Option<PathBuf>,
    python_client: Option<PathBuf>,
}

impl World {
    /// The number of repetitions, full or quick.
    fn times(&self, full: usize, quick: usize) -> usize {
        if self.quick { quick } else { full }
    }
}

type Bench = fn(&World, &mut Report) -> anyhow::Result<()>;

const BENCHES: &[(&str, Bench)] = &[
    ("roundtrip", latency::roundtrip),
    ("start", latency::start),
    ("pool-first-result", pool::first_result),
    ("pool-burst", pool::burst),
    ("pool-refill", pool::refill),
    ("pool-many-idle", pool::many_idle),
    ("pool-fork-bomb", pool::fork_bomb),
    ("pool-soak", pool::soak),
    ("vars", latency::vars),
    ("files", surface::files),
    ("cli", surface::cli),
    ("python-client", python_client::python_client),
    ("stream", stream::throughput),
    ("slow-client", stream::slow_client),
    ("worker-memory", scale::worker_memory),
    ("clients", scale::clients),
    ("restart", scale::restart),
    ("idle", scale::idle),
    ("kernels", scale::kernels),
    ("hostile", hostile::hostile),
    ("workspace", workspace::workspace),
    ("microvm", microvm::microvm),
    ("rollback", rollback::rollback),
    ("teleport", teleport::teleport),
    ("teleport-state", teleport::state),
    ("teleport-machine", teleport::machine),
    ("freeze", freeze::freeze),
    ("checkpoint-10k", checkpoint::ten_thousand),
    ("checkpoint-100k", checkpoint::hundred_thousand),
    ("checkpoint-history", checkpoint::history),
];

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Fails after an interruption, so that temporary files are removed.
fn go_on() -> anyhow::Result<()> {
    anyhow::ensure!(!INTERRUPTED.load(Ordering::Relaxed), "interrupted");
    Ok(())
}

/// Records interruptions for [`go_on`].
fn note_interruptions() -> anyhow::Result<()> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGINT);
    signals.add(Signal::SIGTERM);
    // Before any other thread exists: threads inherit the mask.
    signals.thread_block()?;
    std::thread::spawn(move || {
        while signals.wait().is_ok() {
            eprintln!("interrupted: removing what was made");
            INTERRUPTED.store(true, Ordering::Relaxed);
        }
    });
    Ok(())
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(code) = &args.kaish {
        return match peers::run_kaish(code) {
            Ok(code) => ExitCode::from(code as u8),
            Err(error) => {
                eprintln!("kaish: {error:#}");
                ExitCode::FAILURE
            }
        };
    }
    if let Err(error) = note_interruptions() {
        eprintln!("bench: {error:#}");
        return ExitCode::FAILURE;
    }
    match run(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> anyhow::Result<bool> {
    if args.list {
        BENCHES.iter().for_each(|(name, _)| println!("{name}"));
        return Ok(true);
    }
    let is_meant = |name: &str, wanted: &String| {
        name.strip_prefix(wanted.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    };
    for wanted in &args.names {
        anyhow::ensure!(BENCHES.iter().any(|(name, _)| is_meant(name, wanted)), "no benchmark {wanted:?}: see --list");
    }
    let world = World {
        quick: args.quick,
        size: args.size,
        alone: args.alone,
        engine: args.engine,
        daemon: args.daemon.clone(),
        python: args.python.clone(),
        ipykernel: args.ipykernel.clone(),
        python_client: args.python_client.clone(),
    };
    if let Some(folder) = &args.trace {
        return trace::trace(&world, folder).map(|()| true);
    }
    let mut report = Report::new(&world);
    let mut all_ran = true;
    for (name, bench) in BENCHES {
        if !args.names.is_empty() && !args.names.iter().any(|wanted| is_meant(name, wanted)) {
            continue;
        }
        if INTERRUPTED.load(Ordering::Relaxed) {
            return Ok(false);
        }
        eprintln!("{name} …");
        report.section(name);
        if let Err(error) = bench(&world, &mut report) {
            eprintln!("{name} failed: {error:#}");
            report.failed(&format!("{error:#}"));
            all_ran = false;
        }
    }
    print!("{}", report.table());
    if let Some(file) = &args.json {
        std::fs::write(file, report.json())?;
    }
    Ok(all_ran)
}
