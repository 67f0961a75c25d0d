//! The command line's grammar: global options and the list of commands. Each command's own arguments are with the command.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use super::blobs::BlobArgs;
use super::checkpoints::{CheckpointArgs, DiffArgs, LogArgs, RestoreArgs};
use super::completions::CompletionsArgs;
use super::doctor::ConfigArgs;
use super::exec::{ExecArgs, RunArgs};
use super::forks::{ForkArgs, ThreadArgs};
use super::journal::{EventsArgs, JournalArgs, MessageArgs};
use super::kernels::{LsArgs, NewArgs, RmArgs, StopArgs};
use super::mcp::McpArgs;
use super::mounts::{MountArgs, UnmountArgs};
use super::paint::ColorChoice;
use super::pool::PoolArgs;
use super::portable::{ExportArgs, ImportArgs};
use super::repl::ReplArgs;
use super::tools::ToolsArgs;
use super::top::TopArgs;
use super::tour::TourArgs;
use super::upkeep::{AuditArgs, GcArgs, RetentionArgs};
use super::vars::{GetArgs, SetArgs};
use super::workflow::{ArtifactArgs, DecisionArgs, HandoffArgs, StepArgs};

/// Git for running computers: durable, sandboxed sessions that execute code.
#[derive(Debug, Parser)]
#[command(name = "ryokan", version, max_term_width = 100, arg_required_else_help = true)]
#[command(after_help = "Exit codes: 0 ok, 1 failure of the thing asked, 2 usage, 3 not found, 4 conflict or refused, \
                        5 unsupported here, 69 daemon unavailable. `exec` and `run` exit with the code's own status.")]
pub struct Cli {
    /// Options of every command.
    #[command(flatten)]
    pub options: Options,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Options of every command.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Global options")]
pub struct Options {
    /// Socket of the daemon
    #[arg(long, global = true, value_name = "PATH", env = "RYOKAN_SOCKET", hide_env_values = true)]
    pub socket: Option<PathBuf>,
    /// Use the system-wide daemon in place of your own
    #[arg(long, global = true, conflicts_with = "socket")]
    pub system: bool,
    /// Do not start a daemon when none answers
    #[arg(long, global = true)]
    pub no_autostart: bool,
    /// Print JSON, in the shapes of docs/cli-json.md
    #[arg(long, global = true)]
    pub json: bool,
    /// Colours: auto, always or never
    #[arg(long, global = true, value_name = "WHEN", value_enum, default_value_t, hide_possible_values = true)]
    pub color: ColorChoice,
    /// Answer yes to every question
    #[arg(short = 'y', long, global = true)]
    pub yes: bool,
    /// Say more on stderr; twice for still more
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

/// A kernel by name.
#[derive(Debug, Args)]
pub struct NameArgs {
    /// Name or id of the kernel
    pub name: String,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Execute code in a throw-away kernel
    Run(RunArgs),
    /// Make a kernel
    New(NewArgs),
    /// Execute code in a kernel
    Exec(ExecArgs),
    /// Work in a kernel interactively
    Repl(ReplArgs),
    /// List kernels
    Ls(LsArgs),
    /// Show all there is to know of a kernel
    Show(NameArgs),
    /// Start a kernel's worker now
    Start(NameArgs),
    /// End a kernel's worker; its state is kept
    Stop(StopArgs),
    /// Remove a kernel with its files and its journal
    Rm(RmArgs),
    /// Put a kernel away: its files and state go into the store, packed, until unarchive
    Archive(NameArgs),
    /// Take a kernel out of the archive: its files and state are back, and it can be used
    Unarchive(NameArgs),
    /// List a kernel's variables
    Vars(NameArgs),
    /// Print a variable
    Get(GetArgs),
    /// Set a variable
    Set(SetArgs),
    /// Make a folder or file of the host visible in a kernel
    Mount(MountArgs),
    /// Take a mount away
    Unmount(UnmountArgs),
    /// List a kernel's mounts
    Mounts(NameArgs),
    /// List a kernel's tools, or call one
    Tools(ToolsArgs),
    /// Add, list and remove a kernel's MCP servers
    Mcp(McpArgs),
    /// Store and read a kernel's blobs
    Blob(BlobArgs),
    /// Take a checkpoint of a kernel
    Checkpoint(CheckpointArgs),
    /// List a kernel's checkpoints, newest first
    Log(LogArgs),
    /// Show what differs between two checkpoints, or between one and now
    Diff(DiffArgs),
    /// Bring a kernel back to a checkpoint
    Restore(RestoreArgs),
    /// Go back to where a kernel was before its last restore
    Undo(NameArgs),
    /// Make kernels that begin as one is, or was at a checkpoint
    Fork(ForkArgs),
    /// Make a kernel that works in the workspace of another
    Thread(ThreadArgs),
    /// Show or change how long a kernel's automatic checkpoints are kept
    Retention(RetentionArgs),
    /// Write a kernel and its checkpoints to a file
    Export(ExportArgs),
    /// Make a kernel of a file that export wrote
    Import(ImportArgs),
    /// Begin, complete and list the steps of the work in a kernel
    Step(StepArgs),
    /// Hand the work in a kernel over to another agent, with a checkpoint
    Handoff(HandoffArgs),
    /// Open, lock, supersede and list decisions
    Decision(DecisionArgs),
    /// Put, get, list and revert artifacts: named, versioned results
    Artifact(ArtifactArgs),
    /// Show a kernel's journal
    Journal(JournalArgs),
    /// Add a message to a kernel's journal
    Message(MessageArgs),
    /// Show what happened on the host or to a kernel
    Events(EventsArgs),
    /// Remove checkpoints that are too old, and what nothing names any more
    Gc(GcArgs),
    /// Read everything that is stored and name what is damaged
    Verify,
    /// Show who did what, or prove that the log of it is whole
    Audit(AuditArgs),
    /// Show the workers that are kept ready for new kernels
    Pool(PoolArgs),
    /// Watch kernels and pools on the whole screen, and act on them
    Top(TopArgs),
    /// Check or show the daemon's configuration
    Config(ConfigArgs),
    /// Show what this host can do, and what to do about the rest
    Doctor,
    /// Print completions for a shell
    Completions(CompletionsArgs),
    /// Take a guided tour with a daemon of its own
    Tour(TourArgs),
}
