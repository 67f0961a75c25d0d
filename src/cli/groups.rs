//! Groups: group, freeze, lock; log, restore and undo of a group.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};

use super::checkpoints::parse_message;
use super::context::Context;
use super::failure::Failure;
use super::names::{GroupArg, KernelArg, KernelOrGroupArg};
use super::{exit, failure, json, render};
use crate::core::error::Error;
use crate::core::freeze::drain::{Drain, InFlight};
use crate::core::freeze::on_failure::OnFailure;
use crate::core::freeze::{FreezeInfo, GroupRestored};

/// The reason of the daemon's error if a name is a group's and not a kernel's.
const IS_GROUP: &str = "group";

/// `ryokan group`
#[derive(Debug, Args)]
pub struct GroupArgs {
    /// What to do.
    #[command(subcommand)]
    pub action: GroupCommand,
}

/// The actions of `ryokan group`.
#[derive(Debug, Subcommand)]
pub enum GroupCommand {
    /// Create a group
    New {
        /// Name of the new group
        name: String,
    },
    /// Add a kernel, a git repository or a data source
    Add(AddArgs),
    /// Remove a member, a freeze, or the group with its freezes
    Rm {
        /// Name of the group
        name: GroupArg,
        /// Name of the member; without it, the whole group
        member: Option<String>,
        /// Remove the group although a freeze or a restore of it was interrupted; its members stay as they are, and
        /// repositories of an import that are not in their places stay beside them
        #[arg(long, conflicts_with = "member")]
        abandon: bool,
        /// Remove this freeze only, as `ryokan log` names it; what code and data need stays known
        #[arg(long, value_name = "REF", conflicts_with_all = ["member", "abandon"])]
        freeze: Option<String>,
    },
    /// Change a group
    Set {
        /// Name of the group
        name: GroupArg,
        /// What a failed freeze does with its kernels, unless the freeze says so itself: `resume` or `pause`
        #[arg(long, value_name = "WHAT", value_parser = on_failure())]
        on_failure: OnFailure,
    },
    /// Show a group, or list all
    Show {
        /// Name of the group
        name: Option<GroupArg>,
        /// Print names only
        #[arg(short, long, conflicts_with = "name")]
        quiet: bool,
    },
}

/// `ryokan group add`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan group add shop --kernel agent
  ryokan group add shop --repository ~/src/shop
  ryokan group add shop --database ~/src/shop/shop.db --name data
  ryokan group add shop --directory ~/src/shop/uploads
  ryokan group add shop --command queue
  ryokan group add shop --postgres 'dbname=shop host=/run/postgresql'
  ryokan group add shop --server main")]
pub struct AddArgs {
    /// Name of the group
    pub group: GroupArg,
    /// A kernel, by name or id
    #[arg(long, value_name = "KERNEL", group = "what")]
    pub kernel: Option<KernelArg>,
    /// The work tree of a git repository of yours, also a linked one
    #[arg(long, value_name = "PATH", group = "what")]
    pub repository: Option<PathBuf>,
    /// An SQLite database; a repository around it leaves its files alone, and git must not track them
    #[arg(long, value_name = "PATH", group = "what")]
    pub database: Option<PathBuf>,
    /// A directory; a restore exchanges it as a whole
    #[arg(long, value_name = "PATH", group = "what")]
    pub directory: Option<PathBuf>,
    /// A data source of the daemon's configuration: your own programs
    #[arg(long, value_name = "SOURCE", group = "what")]
    pub command: Option<String>,
    /// A PostgreSQL database: dbname, host, port, user; a restore ends its connections, and loses what was set for the
    /// database itself (`ALTER DATABASE … SET`, `GRANT … ON DATABASE`, connection limit, tablespace)
    #[arg(long, value_name = "CONNECTION", group = "what")]
    pub postgres: Option<String>,
    /// A PostgreSQL server of the daemon's configuration; a restore stops and starts it
    #[arg(long, value_name = "SERVER", group = "what")]
    pub server: Option<String>,
    /// Name of the member; the kernel's or the file's by default
    #[arg(long, value_name = "NAME", default_value = "")]
    pub name: String,
}

/// `ryokan freeze`
#[derive(Debug, Args)]
pub struct FreezeArgs {
    /// Name of the group
    pub group: GroupArg,
    /// Message of the freeze; one that another freeze has gets a warning, because it is ambiguous
    #[arg(short, long, value_name = "TEXT", value_parser = parse_message)]
    pub message: Option<String>,
    /// Interrupt running code of the kernels, do not wait for it
    #[arg(long)]
    pub interrupt: bool,
    /// Let running code go on after the pause: the freeze holds the variables from before it and the files of the moment
    #[arg(long, conflicts_with_all = ["interrupt", "wait"])]
    pub park: bool,
    /// How long to wait for running code, at most an hour
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = humantime::parse_duration)]
    pub wait: Duration,
    /// What a failure does with the kernels: `resume`, or `pause` until `ryokan resume GROUP`; the group's by default
    #[arg(long, value_name = "WHAT", value_parser = on_failure())]
    pub on_failure: Option<OnFailure>,
}

fn on_failure() -> impl TypedValueParser<Value = OnFailure> {
    PossibleValuesParser::new(OnFailure::ALL.map(OnFailure::name)).try_map(|text| text.parse::<OnFailure>())
}

/// `ryokan lock`
#[derive(Debug, Args)]
pub struct LockArgs {
    /// Name of a kernel or a group
    pub name: KernelOrGroupArg,
    /// Compare with a checkpoint or a freeze, the newest by default; exit 1 if something differs
    #[arg(long, value_name = "REF", num_args = 0..=1, default_missing_value = "")]
    pub check: Option<String>,
}

/// Whether the daemon says that the name is a group's.
pub fn is_group(failure: &Failure) -> bool {
    matches!(failure, Failure::Error(error) if error.reason == IS_GROUP && error.code == crate::core::error::ErrorCode::Unsupported)
}

/// Creates, changes and shows groups.
pub async fn group(context: &Context, args: GroupArgs) -> Result<(), Failure> {
    match args.action {
        GroupCommand::New { name } => {
            context.host().await?.create_group(&name).await?;
            context.show(|| serde_json::json!({ "name": name }), || format!("created group {name}\n"))
        }
        GroupCommand::Add(args) => add(context, args).await,
        GroupCommand::Rm { name, member: Some(member), .. } => {
            context.host().await?.remove_member(&name, &member, false).await?;
            context.show(|| serde_json::json!({ "removed": member }), || format!("removed {member} from {name}\n"))
        }
        GroupCommand::Rm { name, freeze: Some(freeze), .. } => {
            context.confirm(&format!("remove freeze {} of group {name}", render::plain(&freeze)))?;
            context.host().await?.remove_freeze(&name, &freeze).await?;
            let text = || format!("removed freeze {} of {name}\n", render::plain(&freeze));
            context.show(|| serde_json::json!({ "removed": freeze }), text)
        }
        GroupCommand::Rm { name, member: None, abandon, freeze: None } => {
            let host = context.host().await?;
            host.group(&name).await?;
            let what = if abandon { "; its members stay as they are, perhaps at different states" } else { "" };
            context.confirm(&format!("remove group {name} with its freezes{what}"))?;
            for left in host.remove_member(&name, "", abandon).await? {
                context.say(&format!("an imported repository stays in {}", render::plain(&left)));
            }
            context.show(|| serde_json::json!({ "removed": name }), || format!("removed group {name}\n"))
        }
        GroupCommand::Set { name, on_failure } => {
            context.host().await?.configure_group(&name, on_failure).await?;
            let shown = on_failure.name();
            context.show(
                || serde_json::json!({ "name": name, "on_failure": shown }),
                || format!("a failed freeze of {name}: {shown}\n"),
            )
        }
        GroupCommand::Show { name: None, quiet } => {
            let all = context.host().await?.groups().await?;
            if quiet && !context.options.json {
                return context.print(&all.iter().map(|group| format!("{}\n", group.name)).collect::<String>());
            }
            context.show(|| json::list(&all), || render::groups(&all, context.terminal.paint))
        }
        GroupCommand::Show { name: Some(name), .. } => {
            let group = context.host().await?.group(&name).await?;
            context.show(|| json::of(&group), || render::group(&group, context.terminal.paint))
        }
    }
}

async fn add(context: &Context, args: AddArgs) -> Result<(), Failure> {
    let absolute = |path: &PathBuf| {
        let path = std::path::absolute(path).map_err(|error| Failure::of_file("find", path, &error))?;
        path.to_str().map(str::to_owned).ok_or_else(|| Failure::from(Error::invalid("the path is not UTF-8")))
    };
    let paths = [("repository", &args.repository), ("database", &args.database), ("directory", &args.directory)];
    let path = paths.into_iter().find_map(|(kind, path)| path.as_ref().map(|path| (kind, path)));
    let (kind, target) = match (&args.kernel, path, &args.command) {
        (Some(kernel), _, _) => ("kernel", kernel.to_string()),
        (_, Some((kind, path)), _) => (kind, absolute(path)?),
        (_, _, Some(source)) => ("command", source.clone()),
        (None, None, None) => match (&args.postgres, &args.server) {
            (Some(connection), _) => ("postgres", connection.clone()),
            (None, Some(server)) => ("server", server.clone()),
            (None, None) => {
                let hint = "give --kernel, --repository, --database, --directory, --command, --postgres or --server";
                return Err(Failure::usage("nothing to add", hint));
            }
        },
    };
    let member = context.host().await?.add_member(&args.group, kind, &target, &args.name).await?;
    let text = || format!("added {} {} to {}\n", member.kind, render::plain(&member.name), args.group);
    context.show(|| json::of(&member), text)
}

/// Freezes a group.
pub async fn freeze(context: &Context, args: FreezeArgs) -> Result<(), Failure> {
    let running = InFlight::asked(args.interrupt, args.park).unwrap_or_default();
    let drain = Drain { running, wait: args.wait };
    let message = args.message.unwrap_or_default();
    let host = context.host().await?;
    let taken = host.freeze(&args.group, &message, drain, args.on_failure).await?;
    for note in &taken.notes {
        context.say(&render::plain(note));
    }
    let is_other = |other: &FreezeInfo| other.message == message && other.id != taken.id;
    if !message.is_empty() && host.freezes(&args.group, 0).await.is_ok_and(|all| all.iter().any(is_other)) {
        let text = format!(
            "{} has other freezes with the message {message:?}: give the number of this one, {}, where one is named",
            &*args.group, taken.number
        );
        context.say(failure::warning(&text, context.terminal.paint_stderr).trim_end());
    }
    let paint = context.terminal.paint;
    let cost = || taken.cost.as_ref().map(|cost| render::freeze_cost(cost, paint)).unwrap_or_default();
    context.show(|| json::of(&taken), || format!("{}{}", render::freeze_line(&taken, paint), cost()))
}

/// Prints or checks a lock.
pub async fn lock(context: &Context, args: LockArgs) -> Result<(), Failure> {
    let host = context.host().await?;
    let Some(reference) = &args.check else {
        let text = host.lock(&args.name).await?;
        return context.show(|| serde_json::json!({ "lock": text }), || text.clone());
    };
    let reported = host.check_lock(&args.name, reference).await?;
    let text = || match (reported.as_slice(), reference.as_str()) {
        ([], "") => "as at the newest\n".to_owned(),
        ([], reference) => format!("as at {}\n", render::plain(reference)),
        (reported, _) => reported.iter().map(|line| format!("{}\n", render::plain(line))).collect(),
    };
    context.show(|| serde_json::json!({ "differences": reported }), text)?;
    if reported.is_empty() { Ok(()) } else { Err(Failure::Quiet(exit::FAILED)) }
}

/// Lets the kernels of a paused group go on.
pub async fn resume(context: &Context, name: &str) -> Result<(), Failure> {
    context.host().await?.resume_group(name).await?;
    context.show(|| serde_json::json!({ "name": name }), || format!("the kernels of {name} go on\n"))
}

/// Lists the freezes of a group, newest first.
pub async fn log(context: &Context, name: &str, limit: u32, quiet: bool) -> Result<(), Failure> {
    let all = context.host().await?.freezes(name, limit).await?;
    if context.options.json {
        let lines = all.iter().map(|freeze| format!("{}\n", json::of(freeze)));
        return context.print(&lines.collect::<String>());
    }
    if quiet {
        let short = |id: &str| id.chars().take(10).collect::<String>();
        let names = all.iter().map(|freeze| render::reference_names(&short(&freeze.id), &freeze.message));
        return context.print(&names.collect::<String>());
    }
    if all.is_empty() {
        context.say(&format!("no freezes; take one: ryokan freeze {name} -m TEXT"));
        return Ok(());
    }
    context.print(&all.iter().map(|freeze| render::freeze_line(freeze, context.terminal.paint)).collect::<String>())
}

/// Shows the differences between two states of a group.
pub async fn diff(context: &Context, name: &str, from: &str, to: &str) -> Result<(), Failure> {
    let diff = context.host().await?.diff_group(name, from, to).await?;
    if diff.omitted > 0 {
        context.say(&format!("{} further differences are not listed", diff.omitted));
    }
    if context.options.json {
        let lines = diff.differences.iter().map(|one| format!("{}\n", json::of(one)));
        return context.print(&lines.collect::<String>());
    }
    context.print(&render::group_differences(&diff.differences, context.terminal.paint))
}

/// What happens to running code of a group's kernels.
#[derive(Debug, Args)]
pub struct DrainArgs {
    /// Of a group: interrupt running code of the kernels, do not wait for it
    #[arg(long)]
    pub interrupt: bool,
    /// Of a group: how long to wait for running code, at most an hour; 1m by default
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    pub wait: Option<Duration>,
}

impl DrainArgs {
    fn drain(&self) -> Drain {
        let running = if self.interrupt { InFlight::Abandon } else { InFlight::Drain };
        Drain { running, wait: self.wait.unwrap_or(Drain::default().wait) }
    }

    /// Refuses them for a kernel.
    ///
    /// # Errors
    /// A usage error.
    pub fn refuse(&self) -> Result<(), Failure> {
        match self.interrupt || self.wait.is_some() {
            true => Err(Failure::usage("--interrupt and --wait are for groups", "leave them out for a kernel")),
            false => Ok(()),
        }
    }
}

/// Restores a group.
pub async fn restore(
    context: &Context,
    name: &str,
    reference: &str,
    members: &[String],
    drain: &DrainArgs,
) -> Result<(), Failure> {
    let what = if members.is_empty() { String::new() } else { format!("{} of ", members.join(", ")) };
    context.confirm(&format!("restore {what}group {name} to freeze {reference}"))?;
    show_restored(context, name, &context.host().await?.restore_group(name, reference, members, drain.drain()).await?)
}

/// Undoes a group's last restore.
pub async fn undo(context: &Context, name: &str, drain: &DrainArgs) -> Result<(), Failure> {
    context.confirm(&format!("undo the last restore of group {name}"))?;
    show_restored(context, name, &context.host().await?.undo_group(name, drain.drain()).await?)
}

fn show_restored(context: &Context, name: &str, restored: &GroupRestored) -> Result<(), Failure> {
    for note in &restored.notes {
        context.say(&render::plain(note));
    }
    let text = || {
        let line = render::freeze_line(&restored.freeze, context.terminal.paint);
        format!("{line}group {name} is at this freeze; `ryokan undo {name}` goes back\n")
    };
    context.show(|| json::of(restored), text)
}
