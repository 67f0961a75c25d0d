//! `exec` and `run`: code in, output and exit code out.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

use super::code::CodeArgs;
use super::context::Context;
use super::drive::{Driven, Runs, Signals, Streams, UNWRITTEN, drive};
use super::exit;
use super::failure::Failure;
use super::missing_module::missing_module;
use super::names::KernelArg;
use super::paint::Paint;
use super::spec::{SpecArgs, parse_millis, parse_pair};
use super::{displays, failure, json, render, terminal, waiting};
use crate::core::engine::EngineName;
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::exec::{ExecRequest, ExecResult, ExecStatus, Work};
use crate::core::ids::ExecId;
use crate::core::limits;
use crate::core::name::KernelName;
use crate::rpc::client::{ExecutionClient, HostClient, KernelClient};
use crate::rpc::convert::spec::SpecRequest;

/// Deadline for the list of jobs that end with an ephemeral kernel.
const JOBS_DEADLINE: Duration = Duration::from_secs(1);
/// Characters of a job's command in that warning.
const JOB_CHARS: usize = 60;

/// Options of an execution, shared by `exec` and `run`.
#[derive(Debug, Clone, Default, Args)]
pub struct HowArgs {
    /// Time limit of the code from its start, such as 90s; 0s for none. The wait for earlier work does not count
    #[arg(long, value_name = "TIME", value_parser = parse_millis)]
    pub timeout: Option<u64>,
    /// Pass standard input to the code
    #[arg(long)]
    pub stdin: bool,
    /// Environment variable for this execution; repeatable
    #[arg(long = "env", value_name = "K=V", value_parser = parse_pair)]
    pub env: Vec<(String, String)>,
    /// Write the rich forms of results (images, pages) into this folder
    #[arg(long, value_name = "DIR")]
    pub save_display: Option<PathBuf>,
}

/// `ryokan exec`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan exec demo 'echo hello > greeting.txt'
  ryokan exec demo -f analysis.py --timeout 90s
  git log --oneline | ryokan exec demo --stdin 'wc -l'
  ryokan exec demo --json '1 + 1'
  ryokan exec demo --attach 7

Ctrl-C interrupts the execution; a second Ctrl-C exits without waiting for its end. Programs beside the engine: ryokan spawn. With --attach to one of them, Ctrl-C leaves it running; on its terminal, Ctrl-P Ctrl-Q does, and every other key goes to the program.")]
pub struct ExecArgs {
    /// Name or id of the kernel
    pub name: KernelArg,
    /// The code.
    #[command(flatten)]
    pub code: CodeArgs,
    /// Options of the execution.
    #[command(flatten)]
    pub how: HowArgs,
    /// Idempotency key, valid for 24 hours
    #[arg(long, value_name = "KEY")]
    pub key: Option<String>,
    /// Attach to an existing execution or process, by its number
    #[arg(long, value_name = "EXECUTION", conflicts_with_all = ["code", "file", "timeout", "stdin", "env", "key"])]
    pub attach: Option<u64>,
    /// Show the output from this byte on, counted over both streams
    #[arg(long, value_name = "BYTES", default_value_t = 0, requires = "attach")]
    pub offset: u64,
}

/// `ryokan run`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan run 'echo $((6 * 7))'
  ryokan run --engine python 'sum(range(10))'
  ryokan run -f script.py --allow-path ./data:ro
  cat data.csv | ryokan run --engine python --stdin 'import sys; len(sys.stdin.readlines())'

The engine follows the file's extension (.py; .js, .mjs; .bash; .sh, .kai, .kaish) or #! line, unless --engine names it. Background processes, threads and timers end with the kernel when the code ends; a warning lists them.")]
pub struct RunArgs {
    /// The code.
    #[command(flatten)]
    pub code: CodeArgs,
    /// Options of the execution.
    #[command(flatten)]
    pub how: HowArgs,
    /// The specification of the kernel.
    #[command(flatten)]
    pub spec: SpecArgs,
}

impl HowArgs {
    fn request(&self, what: Work) -> ExecRequest {
        // Names only: some values are secrets.
        let variables: Vec<&str> = self.env.iter().map(|(name, _)| name.as_str()).collect();
        tracing::debug!(stdin = self.stdin, timeout_ms = self.timeout.unwrap_or(0), ?variables, "request");
        ExecRequest {
            what,
            stdin_open: self.stdin,
            env: self.env.clone(),
            timeout_ms: self.timeout.unwrap_or(0),
            ..ExecRequest::default()
        }
    }

    fn check(&self, code: &CodeArgs) -> Result<(), Failure> {
        match self.stdin && code.reads_stdin() {
            true => {
                Err(Failure::usage("standard input is the code already", "put the code into a file: -f FILE --stdin"))
            }
            false => Ok(()),
        }
    }
}

/// Executes code in a kernel and shows its output.
pub async fn exec(context: &Context, args: ExecArgs) -> Result<(), Failure> {
    args.how.check(&args.code)?;
    let source = if args.attach.is_none() { Some(args.code.read()?) } else { None };
    let mut signals = Signals::catch()?;
    let (kernel, info) = context.kernel(&args.name).await?;
    let shown = |runs| Shown {
        context,
        kernel: &kernel,
        name: &args.name,
        engine: info.spec.engine,
        ephemeral: false,
        runs,
        offset: args.offset,
        save_display: args.how.save_display.as_deref(),
    };
    let mut runs = Runs::Code;
    let execution = match source {
        Some(source) => {
            let request = args.how.request(Work::Code(source.code));
            let asked = kernel.run(&ExecRequest { key: args.key.clone().unwrap_or_default(), ..request }).await;
            asked.map_err(|error| {
                with_reattach_hint(error, &format!("check whether it started: ryokan journal {} --tail 1", args.name))
            })?
        }
        None => {
            let exec = ExecId(args.attach.unwrap_or_default());
            let execution = kernel.execution(exec).await?;
            if let Some(process) = kernel.processes().await?.into_iter().find(|process| process.exec == exec) {
                if process.terminal && !context.options.json && terminal::is_usable(context) {
                    let from = terminal::From { size: None, offset: args.offset, detaches: true };
                    let driven = terminal::attach(&kernel, &execution, from, &mut signals).await;
                    return shown(Runs::Attached).driven(exec, driven).await;
                }
                runs = Runs::Attached;
            }
            execution
        }
    };
    shown(runs).execution(&execution, args.how.stdin, &mut signals).await
}

/// An execution whose output is shown.
pub struct Shown<'a> {
    /// Options and terminal.
    pub context: &'a Context,
    /// Its kernel.
    pub kernel: &'a KernelClient,
    /// The kernel's name or id as the user gave it.
    pub name: &'a str,
    /// The kernel's engine.
    pub engine: EngineName,
    /// Whether the kernel is removed when the command line exits.
    pub ephemeral: bool,
    /// What runs.
    pub runs: Runs,
    /// The byte of the output at which showing begins.
    pub offset: u64,
    /// Folder for the rich forms.
    pub save_display: Option<&'a Path>,
}

impl Shown<'_> {
    /// Shows `execution` to its end and takes over its exit code.
    pub async fn execution(
        &self,
        execution: &ExecutionClient,
        feed_stdin: bool,
        signals: &mut Signals,
    ) -> Result<(), Failure> {
        let explanation = match self.ephemeral {
            _ if self.runs == Runs::Program => {
                "sent SIGINT; press Ctrl-C again to end the program and all that it started"
            }
            true => "interrupting; press Ctrl-C again to remove the kernel at once",
            false => "interrupting; press Ctrl-C again to exit without waiting for its end",
        };
        let explain = self.context.terminal.stderr.then_some(explanation);
        let streams =
            Streams { show: !self.context.options.json, offset: self.offset, feed_stdin, runs: self.runs, explain };
        let exec = execution.exec();
        let driven = drive(self.kernel, execution, streams, signals);
        let driven = waiting::with_notice(self.context, Some(self.name), Some(exec), driven).await;
        self.driven(exec, driven).await
    }

    /// Shows how driving an execution ended and takes over its exit code.
    pub async fn driven(&self, exec: ExecId, driven: Result<Driven, Failure>) -> Result<(), Failure> {
        let again = format!("attach to it again: ryokan exec {} --attach {exec}", self.name);
        match driven.map_err(|failure| match failure {
            Failure::Error(error) if self.ephemeral => ephemeral_kernel_lost(error).into(),
            Failure::Error(error) => with_reattach_hint(error, &again).into(),
            quiet @ Failure::Quiet(_) => quiet,
        })? {
            Driven::Ended { result, wrote_stderr } => {
                let ended = self.end(&result, wrote_stderr);
                if self.ephemeral && matches!(result.end.status, ExecStatus::Done | ExecStatus::Failed) {
                    self.warn_of_jobs().await;
                }
                ended
            }
            Driven::Detached(_) if self.ephemeral || self.runs == Runs::Program => {
                Err(Failure::Quiet(exit::INTERRUPTED))
            }
            Driven::Detached(exec) => {
                let name = self.name;
                self.context.say(&format!(
                    "execution {exec} was interrupted; {}; attach to it: ryokan exec {name} --attach {exec}",
                    interrupt_note()
                ));
                Err(Failure::Quiet(exit::INTERRUPTED))
            }
            Driven::ReaderGone => Err(Failure::Quiet(exit::READER_GONE)),
            Driven::Terminated(code) => Err(Failure::Quiet(code)),
            Driven::Left(code) => {
                let name = self.name;
                self.context.say(&format!(
                    "process {exec} continues; attach to it: ryokan exec {name} --attach {exec}; end it: ryokan kill {name} {exec}"
                ));
                if code == exit::OK { Ok(()) } else { Err(Failure::Quiet(code)) }
            }
        }
    }

    /// Warns of background jobs that end with the kernel.
    async fn warn_of_jobs(&self) {
        let jobs = tokio::time::timeout(JOBS_DEADLINE, self.kernel.jobs()).await;
        let Ok(Ok(jobs)) = jobs else { return };
        let Some((first, others)) = jobs.split_first() else { return };
        let more = if others.is_empty() { String::new() } else { format!(" and {} more", others.len()) };
        let text = format!(
            "background jobs end with the kernel: {}{more}; wait for them in the code, or use a durable kernel: ryokan new",
            render::first_line(&first.command, JOB_CHARS)
        );
        self.context.say(failure::warning(&text, self.context.terminal.paint_stderr).trim_end());
    }

    fn end(&self, result: &ExecResult, wrote_stderr: bool) -> Result<(), Failure> {
        if let Some(folder) = self.save_display {
            displays::save(folder, result.exec, &result.displays)?;
        }
        if self.context.options.json {
            self.context.print_json(&json::exec_result(result))?;
            if let Some(text) = unsaved_text(result, self.context.terminal.paint_stderr) {
                self.context.say(text.trim_end());
            }
        } else {
            if let Some(text) = render::value_of(result, self.engine) {
                self.context.print(&text)?;
            }
            displays::tell(self.context, &result.displays);
            let paint = self.context.terminal.paint_stderr;
            let text = match result.end.status {
                ExecStatus::Lost if self.ephemeral => end_error(self.name, result, wrote_stderr).map(|error| {
                    failure::render(&error.hint("a durable kernel (`ryokan new`) outlives its worker"), paint)
                }),
                _ => end_text(self.name, result, wrote_stderr, paint),
            };
            if let Some(text) = text {
                self.context.say(text.trim_end());
            }
            let name = (!self.ephemeral).then_some(self.name);
            if let Some(hint) = missing_module(name, self.engine, &result.end.err) {
                self.context.say(&hint);
            }
        }
        match exit::of_execution(result.end.code) {
            exit::OK => Ok(()),
            code => Err(Failure::Quiet(code)),
        }
    }
}

/// Adds how to attach again: the execution continues after a lost connection or failed output.
fn with_reattach_hint(error: Error, command: &str) -> Error {
    let hint = match (error.code, error.hint.as_str()) {
        _ if error.reason == UNWRITTEN => format!("the execution continues; {command}"),
        (ErrorCode::Unavailable, "") => command.to_owned(),
        (ErrorCode::Unavailable, hint) => format!("{hint}; {command}"),
        _ => return error,
    };
    Error { hint, ..error }
}

/// Says that a lost connection removed the ephemeral kernel.
fn ephemeral_kernel_lost(error: Error) -> Error {
    match error.code == ErrorCode::Unavailable && !error.hint.is_empty() {
        true => error.hint("the daemon stopped or restarted and removed the ephemeral kernel: run the command again"),
        false => error,
    }
}

/// Describes what happens to an interrupted execution that does not end.
pub fn interrupt_note() -> String {
    format!("if it does not stop, its worker is killed {} s after the interrupt", limits::INTERRUPT_GRACE.as_secs())
}

/// The error or warning for an execution's end, unless the code's own stderr shows it, and a warning of unsaved state.
pub fn end_text(name: &str, result: &ExecResult, wrote_stderr: bool, paint: Paint) -> Option<String> {
    let own = match result.end.status {
        ExecStatus::Done => {
            Some(result.end.own_err()).filter(|err| !err.is_empty()).map(|err| failure::warning(err, paint))
        }
        ExecStatus::Failed | ExecStatus::Refused | ExecStatus::Interrupted | ExecStatus::Timeout | ExecStatus::Lost => {
            end_error(name, result, wrote_stderr).map(|error| failure::render(&error, paint))
        }
    };
    let unsaved = unsaved_text(result, paint);
    (own.is_some() || unsaved.is_some()).then(|| own.into_iter().chain(unsaved).collect())
}

/// The warning that the state after an execution is not saved.
fn unsaved_text(result: &ExecResult, paint: Paint) -> Option<String> {
    result.end.unsaved().map(|unsaved| failure::warning(unsaved, paint))
}

fn end_error(name: &str, result: &ExecResult, wrote_stderr: bool) -> Option<Error> {
    let exec = result.exec;
    let err = result.end.own_err();
    let why = |text: &str| if err.is_empty() { text.to_owned() } else { format!("{text}: {err}") };
    match result.end.status {
        ExecStatus::Done => None,
        ExecStatus::Failed | ExecStatus::Refused if wrote_stderr || err.is_empty() => None,
        ExecStatus::Failed | ExecStatus::Refused => Some(Error::internal(err)),
        ExecStatus::Interrupted if err.is_empty() => None,
        ExecStatus::Interrupted => Some(Error::lost(format!("execution {exec}: {err}"))),
        ExecStatus::Timeout => Some(
            Error::deadline(why(&format!("execution {exec} exceeded its time limit")))
                .hint("set a longer limit with --timeout"),
        ),
        ExecStatus::Lost => {
            Some(Error::lost(why(&format!("the worker exited during execution {exec}"))).hint(format!(
                "the kernel continues from its last saved state; see what happened: ryokan journal {name}"
            )))
        }
    }
}

/// Executes code in an ephemeral kernel and removes the kernel.
pub async fn run(context: &Context, args: RunArgs) -> Result<(), Failure> {
    args.how.check(&args.code)?;
    let source = args.code.read()?;
    let mut spec = args.spec.request(random_name()?)?;
    if spec.engine.is_none() {
        spec.engine = source.language.engine()?;
    }
    spec.labels.push(("ryokan".into(), "run".into()));
    // The daemon removes the kernel if this process is killed.
    spec.ephemeral = true;
    let mut signals = Signals::catch()?;
    let host = context.host().await?;
    let request = args.how.request(Work::Code(source.code));
    let save_display = args.how.save_display.as_deref();
    let shown = create_and_show(context, &host, &spec, request, save_display, &mut signals).await;
    // The kernel may exist even after a failure. A further signal skips the wait for its removal.
    tokio::select! {
        () = remove(context, host, spec.name.as_str()) => {}
        _ = signals.any() => context.say(&format!("kernel {} may remain; remove it with: ryokan rm {0}", spec.name)),
    }
    shown
}

async fn create_and_show(
    context: &Context,
    host: &HostClient,
    spec: &SpecRequest,
    request: ExecRequest,
    save_display: Option<&Path>,
    signals: &mut Signals,
) -> Result<(), Failure> {
    let start = async {
        let (kernel, info) = host.create_kernel(spec, "").await?;
        tracing::info!(kernel = %info.spec.name, id = %info.id, engine = info.spec.engine.name(), "kernel created");
        let execution = kernel.run(&request).await?;
        Ok::<_, Failure>((kernel, info, execution))
    };
    let (kernel, info, execution) = tokio::select! {
        started = start => started?,
        code = signals.any() => return Err(Failure::Quiet(code)),
    };
    let name = spec.name.as_str();
    let engine = info.spec.engine;
    let shown =
        Shown { context, kernel: &kernel, name, engine, ephemeral: true, runs: Runs::Code, offset: 0, save_display };
    shown.execution(&execution, request.stdin_open, signals).await
}

/// Removes the ephemeral kernel, over a new connection if this one is lost.
async fn remove(context: &Context, host: HostClient, name: &str) {
    let removed = match host.remove_kernel(name, 0).await {
        Err(error) if error.code == ErrorCode::Unavailable => match context.host().await {
            Ok(again) => again.remove_kernel(name, 0).await,
            Err(_) => Err(error),
        },
        removed => removed,
    };
    match removed {
        Ok(()) => {}
        // It was never created.
        Err(error) if error.code == ErrorCode::NotFound => {}
        Err(error) => {
            context.say(&format!("could not remove kernel {name}: {error}; remove it with: ryokan rm {name}"))
        }
    }
}

fn random_name() -> Result<KernelName> {
    let mut bytes = [0; 6];
    getrandom::fill(&mut bytes).map_err(|e| Error::internal(format!("no randomness: {e}")))?;
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("run-{digits}").parse().map_err(|e| Error::internal(format!("{e}")))
}
