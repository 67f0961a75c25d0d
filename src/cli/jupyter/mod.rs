//! `ryokan jupyter`: notebooks whose code runs in ryokan kernels.
//!
//! ```text
//!  Jupyter ── ZeroMQ: shell, control, iopub, stdin, heartbeat ──▶ bridge (this command) ── Cap'n Proto ──▶ daemon ─▶ kernel
//! ```
//! The bridge is a client as any other: it holds no state of the kernel. A kernel outlives the bridge, and a running
//! cell outlives the daemon.

mod bridge;
mod cell;
mod input;
mod install;
mod message;
mod session;
mod zmtp;

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::context::Context;
use super::failure::Failure;
use crate::cli::names::KernelArg;
use crate::core::engine::EngineName;

/// `ryokan jupyter`
#[derive(Debug, Args)]
pub struct JupyterArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: JupyterCommand,
}

/// The commands on Jupyter.
#[derive(Debug, Subcommand)]
pub enum JupyterCommand {
    /// Offer ryokan kernels in Jupyter
    Install(InstallArgs),
    /// Remove what install wrote
    Uninstall(UninstallArgs),
    /// Run a kernel for Jupyter, which starts this command
    Run(RunArgs),
}

/// `ryokan jupyter install`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan jupyter install
  ryokan jupyter install --engine node
  ryokan jupyter install --kernel demo

Each notebook gets a kernel of its own, named after it, which outlives Jupyter: its variables are there when the notebook is opened again, and ryokan's commands work on it (checkpoint, log, restore, undo, fork). Restarting in Jupyter clears the variables, ends the programs in the kernel, also detached ones, and keeps the files.

Results that a browser could run (HTML, SVG, scripts) are withheld unless --html is given: in Jupyter's page they have the rights of the page, which can start kernels outside of any sandbox. Other local users can read what a kernel publishes on a TCP port; jupyter lab --KernelManager.transport=ipc uses Unix sockets instead.")]
pub struct InstallArgs {
    /// The kernels.
    #[command(flatten)]
    pub kernels: NotebookArgs,
    /// Install below this directory, such as a virtual environment, and not for the user
    #[arg(long, value_name = "DIR")]
    pub prefix: Option<PathBuf>,
}

/// `ryokan jupyter uninstall`
#[derive(Debug, Args)]
pub struct UninstallArgs {
    /// The directory given to install
    #[arg(long, value_name = "DIR")]
    pub prefix: Option<PathBuf>,
}

/// `ryokan jupyter run`
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Connection file
    #[arg(short = 'f', long, value_name = "FILE")]
    pub connection_file: PathBuf,
    /// The kernel.
    #[command(flatten)]
    pub kernels: NotebookArgs,
}

/// The kernels of notebooks: what `install` writes for `run`.
#[derive(Debug, Args)]
pub struct NotebookArgs {
    /// Engine of new kernels: python, node, bash or kaish
    #[arg(long, default_value = "python")]
    pub engine: EngineName,
    /// Always use this kernel, and create it if there is none
    #[arg(long, value_name = "NAME")]
    pub kernel: Option<KernelArg>,
    /// Pass on results that a browser could run
    #[arg(long)]
    pub html: bool,
}

/// Installs, removes or runs kernels for Jupyter.
pub async fn jupyter(context: &Context, args: JupyterArgs) -> Result<(), Failure> {
    match args.command {
        JupyterCommand::Install(args) => install::install(context, &args),
        JupyterCommand::Uninstall(args) => install::uninstall(context, &args),
        JupyterCommand::Run(args) => bridge::run(context, &args).await,
    }
}
