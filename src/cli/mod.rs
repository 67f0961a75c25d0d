//! The command line `ryokan`: a client of the public interface only.
//!
//! ```text
//! args ─▶ context (options, terminal, connection; starts the daemon) ─▶ one file per command family ─▶ render ─▶ stdout
//! ```
//! Pure functions make the output: `render` for people, `json` for programs (described in `docs/cli-json.md`). A command
//! that fails returns a [`failure::Failure`]; only `exit` knows the exit codes.

pub mod args;
mod autostart;
mod blobs;
mod checkpoints;
mod code;
mod completions;
mod confirm;
mod context;
mod copy;
mod daemon;
mod displays;
mod doctor;
mod drive;
mod edit;
mod exec;
pub mod exit;
pub mod failure;
mod forks;
mod forward;
mod groups;
mod images;
mod journal;
pub mod json;
mod jupyter;
mod kernels;
mod manual;
mod mcp;
mod mcp_serve;
mod missing_module;
mod mounts;
mod names;
mod pager;
pub mod paint;
mod paths;
mod pool;
mod portable;
mod preview;
mod processes;
pub mod render;
mod repl;
pub mod spec;
mod suspend;
mod take;
mod teleport;
mod terminal;
mod tools;
mod top;
mod tour;
mod trust;
mod update;
mod upkeep;
mod usage;
mod vars;
mod waiting;
mod watch;
mod workflow;

use std::io::Write;
use std::process::ExitCode;

use args::{Cli, Command, Options};
use context::Context;
use failure::Failure;
use pager::Pager;
use paint::Paint;

/// Runs this process's command line and returns its exit code.
pub fn main() -> ExitCode {
    let cli = match Cli::from_command_line(std::env::args_os()) {
        Ok(cli) => cli,
        Err(help_or_error) => {
            // An error repeats the arguments, which may hold anything.
            let text = help_or_error.render().to_string();
            let plain = render::plain(&text);
            let wants_json = std::env::args_os().take_while(|arg| arg != "--").any(|arg| arg == "--json");
            // `--help | head` closes the pipe: the failure cannot be reported.
            let _ = match help_or_error.use_stderr() && plain != text {
                _ if help_or_error.use_stderr() && wants_json => {
                    let line = Failure::of_parser(&plain).report(true, Paint::OFF).unwrap_or_default();
                    std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes())
                }
                true => std::io::Write::write_all(&mut std::io::stderr(), plain.as_bytes()),
                false => help_or_error.print(),
            };
            return exit::of_parser(&help_or_error).into();
        }
    };
    trace(&cli.options);
    let wants_json = cli.options.json;
    let context = Context::new(cli.options);
    let waits_for = cli.command.waits_for().map(str::to_owned);
    let takes_over_status = cli.command.takes_over_status();
    let pager = Pager::start(&context, &cli.command);
    let is_paged = pager.is_some();
    let command = waiting::with_notice(&context, waits_for.as_deref(), None, dispatch(&context, cli.command));
    let command = async {
        tokio::select! {
            done = command => done,
            // The pager has the terminal until its end.
            Ok(()) = tokio::signal::ctrl_c(), if is_paged => Err(Failure::Quiet(exit::INTERRUPTED)),
        }
    };
    let done = match crate::rpc::client::run_local(command) {
        Ok(done) => done,
        Err(e) => Err(crate::core::error::Error::internal(format!("no runtime: {e}")).into()),
    };
    if let Some(pager) = pager {
        pager.finish();
    }
    let code = match done {
        Ok(()) => exit::OK,
        // The user has read enough.
        Err(Failure::Quiet(exit::READER_GONE)) if is_paged => exit::OK,
        Err(failure) => {
            if let Some(text) = failure.report(wants_json, context.terminal.paint_stderr) {
                let _ = std::io::stderr().write_all(text.as_bytes());
            }
            match failure {
                Failure::Error(_) if takes_over_status => exit::OWN_FAILURE,
                Failure::Error(_) | Failure::Quiet(_) => failure.exit_code(),
            }
        }
    };
    code.into()
}

async fn dispatch(context: &Context, command: Command) -> Result<(), Failure> {
    match command {
        Command::Run(args) => exec::run(context, args).await,
        Command::New(args) => kernels::new(context, args).await,
        Command::Exec(args) => exec::exec(context, args).await,
        Command::Spawn(args) => processes::spawn(context, args).await,
        Command::Shell(args) => processes::shell(context, args).await,
        Command::Forward(args) => forward::forward(context, args).await,
        Command::Ps(args) => processes::ps(context, args).await,
        Command::Interrupt(args) => processes::interrupt(context, args).await,
        Command::Kill(args) => processes::kill(context, args).await,
        Command::Repl(args) => repl::repl(context, args).await,
        Command::Ls(args) => kernels::ls(context, args).await,
        Command::Show(args) => kernels::show(context, args).await,
        Command::Start(args) => kernels::start(context, args).await,
        Command::Stop(args) => kernels::stop(context, args).await,
        Command::Suspend(args) => suspend::suspend(context, args).await,
        Command::Resume(args) => suspend::resume(context, args).await,
        Command::Update(args) => update::update(context, args).await,
        Command::Rename(args) => kernels::rename(context, args).await,
        Command::Rm(args) => kernels::rm(context, args).await,
        Command::Vars(args) => vars::vars(context, args).await,
        Command::Mount(args) => mounts::mount(context, args).await,
        Command::Unmount(args) => mounts::unmount(context, args).await,
        Command::Mounts(args) => mounts::mounts(context, args).await,
        Command::Tools(args) => tools::tools(context, args).await,
        Command::Mcp(args) => mcp::mcp(context, args).await,
        Command::Jupyter(args) => jupyter::jupyter(context, args).await,
        Command::Cp(args) => copy::copy(context, args).await,
        Command::Edit(args) => edit::edit(context, args).await,
        Command::Blob(args) => blobs::blob(context, args).await,
        Command::Checkpoint(args) => checkpoints::checkpoint(context, args).await,
        Command::Log(args) => checkpoints::log(context, args).await,
        Command::Diff(args) => checkpoints::diff(context, args).await,
        Command::Restore(args) => checkpoints::restore(context, args).await,
        Command::Archive(args) => kernels::archive(context, args).await,
        Command::Unarchive(args) => kernels::unarchive(context, args).await,
        Command::Images(args) => images::images(context, args).await,
        Command::Group(args) => groups::group(context, args).await,
        Command::Freeze(args) => groups::freeze(context, args).await,
        Command::Lock(args) => groups::lock(context, args).await,
        Command::Undo(args) => checkpoints::undo(context, &args.name, &args.drain).await,
        Command::Fork(args) => forks::fork(context, args).await,
        Command::Take(args) => take::take(context, args).await,
        Command::Watch(args) => watch::watch(context, args).await,
        Command::Retention(args) => upkeep::retention(context, args).await,
        Command::Export(args) => portable::export(context, args).await,
        Command::Import(args) => portable::import(context, args).await,
        Command::Teleport(args) => teleport::teleport(context, args).await,
        Command::Pipe => teleport::pipe(context).await,
        Command::Work(args) => workflow::work(context, args).await,
        Command::Journal(args) => journal::journal(context, args).await,
        Command::Message(args) => journal::message(context, args).await,
        Command::Events(args) => journal::events(context, args).await,
        Command::Du(args) => usage::usage(context, args).await,
        Command::Gc(args) => upkeep::gc(context, args).await,
        Command::Verify(args) => match args.provenance {
            true => trust::provenance(context, &args.name, &args.reference).await,
            false => upkeep::verify(context).await,
        },
        Command::Trust(args) => trust::trust(context, args).await,
        Command::Audit(args) => upkeep::audit(context, args).await,
        Command::Pool(args) => pool::pool(context, args).await,
        Command::Top(args) => top::top(context, args).await,
        Command::Daemon(args) => daemon::daemon(context, args).await,
        Command::Config(args) => doctor::config(context, args).await,
        Command::Doctor => doctor::doctor(context).await,
        Command::Man(args) => manual::man(context, &args),
        Command::Schema => manual::schema(context),
        Command::Completions(args) => completions::completions(context, args),
        Command::Tour(args) => tour::tour(context, args).await,
    }
}

/// Sets up diagnostics on stderr: by `RUST_LOG` if set, else by the number of `-v`.
fn trace(options: &Options) {
    use tracing_subscriber::EnvFilter;
    let level = match options.verbose {
        0 => "error",
        1 => "ryokan=info",
        2 => "ryokan=debug",
        _ => "trace",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).without_time();
    let painted = Paint::choose(options.color, &std::io::stderr()).is_on();
    // A report of an unwritable log line would panic if stderr is closed.
    lines.with_ansi(painted).log_internal_errors(false).init();
}
