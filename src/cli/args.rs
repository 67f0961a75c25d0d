//! The command line's grammar: global options and the commands.
//!
//! Each command's own arguments are in its command's file.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};

use super::blobs::BlobArgs;
use super::checkpoints::{CheckpointArgs, DiffArgs, LogArgs, RestoreArgs};
use super::completions::CompletionsArgs;
use super::copy::CopyArgs;
use super::daemon::DaemonArgs;
use super::doctor::ConfigArgs;
use super::edit::EditArgs;
use super::exec::{ExecArgs, RunArgs};
use super::forks::ForkArgs;
use super::forward::ForwardArgs;
use super::groups::{DrainArgs, FreezeArgs, GroupArgs, LockArgs};
use super::images::ImagesArgs;
use super::journal::{EventsArgs, JournalArgs, MessageArgs};
use super::jupyter::JupyterArgs;
use super::kernels::{LsArgs, NewArgs, RenameArgs, RmArgs, StopArgs};
use super::manual::ManArgs;
use super::mcp::McpArgs;
use super::mounts::{MountArgs, UnmountArgs};
use super::names::{KernelArg, KernelOrGroupArg};
use super::paint::ColorChoice;
use super::pool::PoolArgs;
use super::portable::{ExportArgs, ImportArgs};
use super::processes::{InterruptArgs, KillArgs, PsArgs, ShellArgs, SpawnArgs};
use super::repl::ReplArgs;
use super::suspend::{ResumeArgs, SuspendArgs};
use super::take::TakeArgs;
use super::teleport::TeleportArgs;
use super::tools::ToolsArgs;
use super::top::TopArgs;
use super::tour::TourArgs;
use super::trust::TrustArgs;
use super::update::UpdateArgs;
use super::upkeep::{AuditArgs, GcArgs, RetentionArgs, VerifyArgs};
use super::usage::UsageArgs;
use super::vars::VarsArgs;
use super::watch::WatchArgs;
use super::workflow::WorkArgs;

/// Git for running computers: durable, sandboxed sessions that execute code.
#[derive(Debug, Parser)]
#[command(name = "ryokan", version, max_term_width = 100, arg_required_else_help = true)]
#[command(after_help = "Exit codes: 0 ok, 1 failed, 2 usage, 3 not found, 4 conflict or refused, \
                        5 unsupported here, 69 daemon unavailable. `exec`, `run`, `spawn` and `shell` exit with the code's own status, \
                        or 125 if ryokan itself failed after the command line was parsed.")]
pub struct Cli {
    /// Options of every command.
    #[command(flatten)]
    pub options: Options,
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// Options of every command.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Options of every command")]
pub struct Options {
    /// Socket of the daemon
    #[arg(long, global = true, value_name = "PATH", env = "RYOKAN_SOCKET", hide_env_values = true)]
    pub socket: Option<PathBuf>,
    /// Use the system-wide daemon
    #[arg(long, global = true, conflicts_with = "socket")]
    pub system: bool,
    /// Do not start a daemon if none answers
    #[arg(long, global = true)]
    pub no_autostart: bool,
    /// Print JSON, in the shapes of docs/cli-json.md
    #[arg(long, global = true)]
    pub json: bool,
    /// Colours: auto, always or never
    #[arg(long, global = true, value_name = "WHEN", value_enum, default_value_t, hide_possible_values = true)]
    pub color: ColorChoice,
    /// Do not ask for confirmation
    #[arg(short = 'y', long, global = true)]
    pub yes: bool,
    /// Log more to stderr; repeatable
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
}

/// A kernel by name.
#[derive(Debug, Args)]
pub struct NameArgs {
    /// Name or id of the kernel
    pub name: KernelArg,
}

/// `ryokan start`
#[derive(Debug, Args)]
pub struct StartArgs {
    /// Name or id of the kernel
    pub name: KernelArg,
    /// Discard a virtual machine's memory that is kept for this start; start from the saved state
    #[arg(long)]
    pub without_memory: bool,
}

/// `ryokan undo`
#[derive(Debug, Args)]
pub struct UndoArgs {
    /// Name or id of the kernel, or name of the group
    pub name: KernelOrGroupArg,
    /// Running code of a group.
    #[command(flatten)]
    pub drain: DrainArgs,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Execute code in an ephemeral kernel
    Run(RunArgs),
    /// Create a kernel
    New(NewArgs),
    /// Execute code in a kernel
    Exec(ExecArgs),
    /// Run a program in a kernel, beside its engine
    Spawn(SpawnArgs),
    /// Open a shell in a kernel, on this terminal
    Shell(ShellArgs),
    /// Reach a port of a kernel without network from this host
    Forward(ForwardArgs),
    /// List a kernel's processes
    Ps(PsArgs),
    /// Interrupt the execution that runs, or one by number
    Interrupt(InterruptArgs),
    /// End a process with everything that it started, or send it a signal
    Kill(KillArgs),
    /// Work in a kernel interactively
    Repl(ReplArgs),
    /// List kernels
    Ls(LsArgs),
    /// Show a kernel in detail
    Show(NameArgs),
    /// Start a kernel's worker
    Start(StartArgs),
    /// Stop a kernel's worker; its state is kept
    Stop(StopArgs),
    /// Pause a kernel and keep its memory while the host is up
    Suspend(SuspendArgs),
    /// Resume a suspended kernel, or the kernels of a group that a failed freeze paused
    Resume(ResumeArgs),
    /// Change a kernel's network, limits and host paths
    Update(UpdateArgs),
    /// Change a kernel's name
    Rename(RenameArgs),
    /// Remove kernels with their files and journals
    Rm(RmArgs),
    /// List, print or set a kernel's variables
    Vars(VarsArgs),
    /// Copy files and directories between this host and a kernel, or two kernels
    Cp(CopyArgs),
    /// Edit a file of a kernel in your editor
    Edit(EditArgs),
    /// Mount a host directory or file in a kernel
    Mount(MountArgs),
    /// Remove a mount
    Unmount(UnmountArgs),
    /// List a kernel's mounts
    Mounts(NameArgs),
    /// List a kernel's tools, or call one
    Tools(ToolsArgs),
    /// Manage a kernel's MCP servers; serve kernels as one
    Mcp(McpArgs),
    /// Use kernels in Jupyter notebooks
    Jupyter(JupyterArgs),
    /// Store and read a kernel's blobs
    Blob(BlobArgs),
    /// Print what happens to the files of a directory
    Watch(WatchArgs),
    /// Take a checkpoint of a kernel
    Checkpoint(CheckpointArgs),
    /// List a kernel's checkpoints, or a group's freezes, newest first
    Log(LogArgs),
    /// Compare two checkpoints of a kernel or freezes of a group, or one with the present; the last one by default
    Diff(DiffArgs),
    /// Restore a kernel to a checkpoint, or a group to a freeze
    Restore(RestoreArgs),
    /// Undo the last restore of a kernel or a group
    Undo(UndoArgs),
    /// Create kernels from a kernel or from one of its checkpoints
    Fork(ForkArgs),
    /// Take over the files that a fork has changed
    Take(TakeArgs),
    /// Show or change how long a kernel's automatic checkpoints are kept
    Retention(RetentionArgs),
    /// Manage groups: kernels, repositories and data that are frozen as one
    Group(GroupArgs),
    /// Freeze a group: capture all of its members within one pause
    Freeze(FreezeArgs),
    /// Print the revisions of a kernel's repositories or of a group, or check them
    Lock(LockArgs),
    /// Archive a kernel: its files and state move into the store, packed
    Archive(NameArgs),
    /// Bring an archived kernel back, ready for use
    Unarchive(NameArgs),
    /// Write a kernel with its checkpoints, or a group, to a file
    Export(ExportArgs),
    /// Create a kernel or a group from an exported file
    Import(ImportArgs),
    /// Move a kernel to another host while it lives
    Teleport(TeleportArgs),
    /// Receive kernels on the standard streams: the far end of teleport
    Pipe,
    /// Record steps, hand-offs, decisions and artifacts of a kernel's work
    Work(WorkArgs),
    /// Show a kernel's journal
    Journal(JournalArgs),
    /// Add a message to a kernel's journal
    Message(MessageArgs),
    /// Show events of the host or of a kernel
    Events(EventsArgs),
    /// Show the audit log, or verify it
    Audit(AuditArgs),
    /// Watch kernels and pools on the whole screen, and control them
    Top(TopArgs),
    /// Show the pools of warm workers
    Pool(PoolArgs),
    /// Show what takes room on the disk
    Du(UsageArgs),
    /// List, build, pin, rotate and remove images of virtual machines
    Images(ImagesArgs),
    /// Remove expired checkpoints and unreferenced objects
    Gc(GcArgs),
    /// Read all stored data and report damage, or show who signed what
    Verify(VerifyArgs),
    /// Manage the keys of hosts whose signatures you trust
    Trust(TrustArgs),
    /// Show the daemon's status or log, or stop it
    Daemon(DaemonArgs),
    /// Check or show the daemon's configuration
    Config(ConfigArgs),
    /// Show what this host supports, and how to get the rest
    Doctor,
    /// Print completions for a shell
    Completions(CompletionsArgs),
    /// Write man pages
    Man(ManArgs),
    /// Print the schema of the interface, for clients in other languages
    Schema,
    /// Take a guided tour with a separate daemon
    Tour(TourArgs),
}

/// The commands as `ryokan --help` groups them. Every command is in one group.
const GROUPS: &[(&str, &[&str])] = &[
    (
        "Kernels",
        &[
            "run",
            "new",
            "exec",
            "spawn",
            "shell",
            "forward",
            "interrupt",
            "ps",
            "kill",
            "repl",
            "ls",
            "show",
            "start",
            "stop",
            "suspend",
            "resume",
            "update",
            "rename",
            "rm",
        ],
    ),
    (
        "Contents of a kernel",
        &["vars", "cp", "edit", "watch", "mount", "unmount", "mounts", "tools", "mcp", "jupyter", "blob"],
    ),
    ("Checkpoints", &["checkpoint", "log", "diff", "restore", "undo", "fork", "take", "retention"]),
    ("Groups", &["group", "freeze", "lock"]),
    ("Archives and transfer", &["archive", "unarchive", "export", "import", "teleport", "pipe"]),
    ("Records", &["work", "journal", "message", "events", "audit"]),
    ("Host", &["top", "pool", "images", "du", "gc", "verify", "trust", "daemon", "config", "doctor"]),
    ("Shell", &["completions", "man", "schema", "tour", "help"]),
];

/// The grammar, with the commands grouped in its help.
///
/// clap has no headings for subcommands, so the help's template holds them.
pub fn command() -> clap::Command {
    let mut built = Cli::command();
    built.build();
    let mut groups = String::new();
    for (heading, names) in GROUPS {
        groups.push_str(&format!("{heading}:\n"));
        for name in *names {
            let about = built.find_subcommand(name).and_then(clap::Command::get_about);
            let about = about.map(ToString::to_string).unwrap_or_default();
            groups.push_str(&format!("  {name:<12} {about}\n"));
        }
        groups.push('\n');
    }
    let template = format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{groups}Options of every command:\n{{options}}{{after-help}}"
    );
    Cli::command().help_template(template)
}

impl Command {
    /// Whether the exit code is the status of what ran in the kernel.
    pub fn takes_over_status(&self) -> bool {
        matches!(self, Command::Run(_) | Command::Exec(_) | Command::Spawn(_) | Command::Shell(_))
    }
}

impl Cli {
    /// Parses a command line.
    ///
    /// # Errors
    /// For a wrong command line, and for a request for help or the version.
    pub fn from_command_line(words: impl IntoIterator<Item = OsString>) -> Result<Cli, clap::Error> {
        let mut grammar = command();
        let matches = grammar.try_get_matches_from_mut(words)?;
        Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut grammar))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn help_groups_every_command() {
        let grouped: Vec<&str> = GROUPS.iter().flat_map(|(_, names)| names.iter().copied()).collect();
        let distinct: BTreeSet<&str> = grouped.iter().copied().collect();
        assert_eq!(grouped.len(), distinct.len(), "a command is in two groups");
        let mut cli = Cli::command();
        cli.build();
        assert_eq!(distinct, cli.get_subcommands().map(clap::Command::get_name).collect());
    }
}
