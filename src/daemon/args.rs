//! The daemon's command line.

use std::path::PathBuf;

use clap::Parser;

/// Runs kernels: durable, sandboxed code sessions, served over a Unix socket
#[derive(Debug, Parser)]
#[command(name = "ryokand", version, about)]
pub(super) struct Args {
    /// Serve every user of this host, each with kernels of its own (needs root)
    #[arg(long)]
    pub system: bool,
    /// End after the configured idle_exit without work: for a daemon that a client started
    #[arg(long)]
    pub on_demand: bool,
    /// Print what this host can do as JSON, and end
    #[arg(long, exclusive = true)]
    pub abilities: bool,
    /// Check a configuration file (default: the one in use), and end
    #[arg(long, value_name = "FILE")]
    pub check_config: Option<Option<PathBuf>>,
    /// Print the configuration in effect, every key, and end
    #[arg(long)]
    pub show_config: bool,
    /// With --check-config or --show-config: as JSON
    #[arg(long)]
    pub json: bool,
}
