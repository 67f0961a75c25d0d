//! `exec` and `run`: code in, output and exit code out.

use std::time::Duration;

use clap::Args;

use super::code::CodeArgs;
use super::context::Context;
use super::drive::{Driven, Signals, Streams, UNWRITTEN, drive};
use super::exit;
use super::failure::Failure;
use super::paint::Paint;
use super::spec::{SpecArgs, parse_millis, parse_pair};
use super::{failure, json, render, waiting};
use crate::core::engine::EngineName;
use crate::core::error::{Error, ErrorCode, Result};
use crate::core::exec::{ExecRequest, ExecResult, ExecStatus, Work};
use crate::core::ids::ExecId;
use crate::core::limits;
use crate::core::name::KernelName;
use crate::rpc::client::{ExecutionClient, HostClient, KernelClient};
use crate::rpc::convert::spec::SpecRequest;

/// What still ran is told, if it can be known so soon.
const JOBS_TOLD: Duration = Duration::from_secs(1);
/// Characters of it.
const JOB_TOLD: usize = 60;

/// How code is executed, wherever.
#[derive(Debug, Clone, Default, Args)]
pub struct HowArgs {
    /// End it after so much time, such as 90s; 0s: however long it takes
    #[arg(long, value_name = "TIME", value_parser = parse_millis)]
    pub timeout: Option<u64>,
    /// Pass standard input on to the code
    #[arg(long)]
    pub stdin: bool,
    /// Environment variable for this execution; repeatable
    #[arg(long = "env", value_name = "K=V", value_parser = parse_pair)]
    pub env: Vec<(String, String)>,
}

/// `ryokan exec`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan exec demo 'echo hello > greeting.txt'
  ryokan exec demo -f analysis.py --timeout 90s
  git log --oneline | ryokan exec demo --stdin 'wc -l'
  ryokan exec demo --json '1 + 1'
  ryokan exec demo --attach 7

Ctrl-C interrupts the execution; a second one leaves without waiting for its end.")]
pub struct ExecArgs {
    /// Name or id of the kernel
    pub name: String,
    /// The code.
    #[command(flatten)]
    pub code: CodeArgs,
    /// How to execute it.
    #[command(flatten)]
    pub how: HowArgs,
    /// The same key again within 24 hours gives the same execution
    #[arg(long, value_name = "KEY")]
    pub key: Option<String>,
    /// Show an execution that runs or ran already, by its number
    #[arg(long, value_name = "EXECUTION", conflicts_with_all = ["code", "file", "timeout", "stdin", "env", "key"])]
    pub attach: Option<u64>,
}

/// `ryokan run`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan run 'echo $((6 * 7))'
  ryokan run --engine python 'sum(range(10))'
  ryokan run -f script.py --allow-path ./data:ro
  cat data.csv | ryokan run --engine python --stdin 'import sys; len(sys.stdin.readlines())'

The engine follows the file's extension (.py; .js, .mjs; .bash; .sh, .kai, .kaish) or #! line, unless --engine names it. What still runs when the end of the code is reached (background processes, threads, timers) ends with the kernel; a warning says so.")]
pub struct RunArgs {
    /// The code.
    #[command(flatten)]
    pub code: CodeArgs,
    /// How to execute it.
    #[command(flatten)]
    pub how: HowArgs,
    /// The kernel that it runs in.
    #[command(flatten)]
    pub spec: SpecArgs,
}

impl HowArgs {
    fn request(&self, what: Work) -> ExecRequest {
        // Not their values: some are secrets.
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

/// Executes code in a kernel and shows what comes of it.
pub async fn exec(context: &Context, args: ExecArgs) -> Result<(), Failure> {
    args.how.check(&args.code)?;
    let source = if args.attach.is_none() { Some(args.code.read()?) } else { None };
    let mut signals = Signals::catch()?;
    let (kernel, info) = context.kernel(&args.name).await?;
    let execution = match source {
        Some(source) => {
            let request = args.how.request(Work::Code(source.code));
            let asked = kernel.run(&ExecRequest { key: args.key.unwrap_or_default(), ..request }).await;
            asked.map_err(|error| {
                with_the_way_back(error, &format!("whether it began: ryokan journal {} --tail 1", args.name))
            })?
        }
        None => kernel.execution(ExecId(args.attach.unwrap_or_default())).await?,
    };
    let shown = Shown { context, kernel: &kernel, name: &args.name, engine: info.spec.engine, throw_away: false };
    shown.execution(&execution, args.how.stdin, &mut signals).await
}

/// An execution that is shown as `exec` shows it.
pub struct Shown<'a> {
    /// Where to show it.
    pub context: &'a Context,
    /// Its kernel.
    pub kernel: &'a KernelClient,
    /// What the user called the kernel.
    pub name: &'a str,
    /// The kernel's engine.
    pub engine: EngineName,
    /// Whether the kernel goes when the command line does.
    pub throw_away: bool,
}

impl Shown<'_> {
    /// Shows `execution` to its end; its code becomes ours.
    pub async fn execution(
        &self,
        execution: &ExecutionClient,
        feed_stdin: bool,
        signals: &mut Signals,
    ) -> Result<(), Failure> {
        let explanation = match self.throw_away {
            true => "interrupting; Ctrl-C once more removes the kernel at once",
            false => "interrupting; Ctrl-C once more leaves without waiting for its end",
        };
        let explain = self.context.terminal.stderr.then_some(explanation);
        let streams = Streams { show: !self.context.options.json, feed_stdin, explain };
        let exec = execution.exec();
        let driven = drive(self.kernel, execution, streams, signals);
        let driven = waiting::told(self.context, Some(self.name), Some(exec), driven).await;
        let again = format!("see execution {exec} again: ryokan exec {} --attach {exec}", self.name);
        match driven.map_err(|failure| match failure {
            Failure::Error(error) if self.throw_away => gone_with_the_connection(error).into(),
            Failure::Error(error) => with_the_way_back(error, &again).into(),
            quiet @ Failure::Quiet(_) => quiet,
        })? {
            Driven::Ended { result, wrote_stderr } => {
                let ended = self.end(&result, wrote_stderr);
                if self.throw_away && matches!(result.end.status, ExecStatus::Done | ExecStatus::Failed) {
                    self.tell_what_goes_too().await;
                }
                ended
            }
            Driven::Detached(_) if self.throw_away => Err(Failure::Quiet(exit::INTERRUPTED)),
            Driven::Detached(exec) => {
                let name = self.name;
                self.context.say(&format!(
                    "execution {exec} was interrupted; {}; see its end: ryokan exec {name} --attach {exec}",
                    if_it_does_not_react()
                ));
                Err(Failure::Quiet(exit::INTERRUPTED))
            }
            Driven::ReaderGone => Err(Failure::Quiet(exit::READER_GONE)),
            Driven::Terminated(code) => Err(Failure::Quiet(code)),
        }
    }

    /// What still runs in a kernel that goes now.
    async fn tell_what_goes_too(&self) {
        let jobs = tokio::time::timeout(JOBS_TOLD, self.kernel.jobs()).await;
        let Ok(Ok(jobs)) = jobs else { return };
        let Some((first, others)) = jobs.split_first() else { return };
        let more = if others.is_empty() { String::new() } else { format!(" and {} more", others.len()) };
        let text = format!(
            "what still ran ends with the kernel: {}{more}; wait for it in the code, or have a kernel that stays: ryokan new",
            render::first_line(&first.command, JOB_TOLD)
        );
        self.context.say(failure::warning(&text, self.context.terminal.paint_stderr).trim_end());
    }

    fn end(&self, result: &ExecResult, wrote_stderr: bool) -> Result<(), Failure> {
        if self.context.options.json {
            self.context.print_json(&json::exec_result(result))?;
        } else {
            if let Some(text) = render::value_of(result, self.engine) {
                self.context.print(&text)?;
            }
            let paint = self.context.terminal.paint_stderr;
            let text = match result.end.status {
                ExecStatus::Lost if self.throw_away => end_error(result, wrote_stderr).map(|error| {
                    failure::render(&error.hint("`ryokan new` makes a kernel that outlives its worker"), paint)
                }),
                _ => end_text(result, wrote_stderr, paint),
            };
            if let Some(text) = text {
                self.context.say(text.trim_end());
            }
        }
        match exit::of_execution(result.end.code) {
            exit::OK => Ok(()),
            code => Err(Failure::Quiet(code)),
        }
    }
}

/// A connection that is lost, or output that cannot be written, takes nothing with it: what was begun goes on, and can be seen again.
fn with_the_way_back(error: Error, way: &str) -> Error {
    let hint = match (error.code, error.hint.as_str()) {
        _ if error.reason == UNWRITTEN => format!("the execution goes on; {way}"),
        (ErrorCode::Unavailable, "") => way.to_owned(),
        (ErrorCode::Unavailable, hint) => format!("{hint}; {way}"),
        _ => return error,
    };
    Error { hint, ..error }
}

/// A throw-away kernel goes with the connection.
fn gone_with_the_connection(error: Error) -> Error {
    match error.code == ErrorCode::Unavailable && !error.hint.is_empty() {
        true => error.hint("the daemon stopped or restarted, and the throw-away kernel is gone with it: run it again"),
        false => error,
    }
}

/// What becomes of an execution that was interrupted and is not waited for.
pub fn if_it_does_not_react() -> String {
    format!("if it does not react, its worker is ended {} s after the interrupt", limits::INTERRUPT_GRACE.as_secs())
}

/// What is to be said of an end that the code's own stderr does not tell: an error, or a warning where the code itself ended well.
pub fn end_text(result: &ExecResult, wrote_stderr: bool, paint: Paint) -> Option<String> {
    match result.end.status {
        ExecStatus::Done => (!result.end.err.is_empty()).then(|| failure::warning(&result.end.err, paint)),
        ExecStatus::Failed | ExecStatus::Refused | ExecStatus::Interrupted | ExecStatus::Timeout | ExecStatus::Lost => {
            end_error(result, wrote_stderr).map(|error| failure::render(&error, paint))
        }
    }
}

fn end_error(result: &ExecResult, wrote_stderr: bool) -> Option<Error> {
    let exec = result.exec;
    let err = &result.end.err;
    let why = |text: &str| if err.is_empty() { text.to_owned() } else { format!("{text}: {err}") };
    match result.end.status {
        ExecStatus::Done => None,
        ExecStatus::Failed | ExecStatus::Refused if wrote_stderr || err.is_empty() => None,
        ExecStatus::Failed | ExecStatus::Refused => Some(Error::internal(err.clone())),
        ExecStatus::Interrupted if err.is_empty() => None,
        ExecStatus::Interrupted => Some(Error::lost(format!("execution {exec}: {err}"))),
        ExecStatus::Timeout => {
            Some(Error::deadline(why(&format!("execution {exec} ran out of time"))).hint("give it more with --timeout"))
        }
        ExecStatus::Lost => Some(
            Error::lost(why(&format!("the worker ended under execution {exec}")))
                .hint("the kernel goes on from its last saved state; `ryokan journal NAME` tells what happened"),
        ),
    }
}

/// Executes code in a kernel that is made for it and removed after it, however it ends.
pub async fn run(context: &Context, args: RunArgs) -> Result<(), Failure> {
    args.how.check(&args.code)?;
    let source = args.code.read()?;
    let mut spec = args.spec.request(random_name()?)?;
    if spec.engine.is_none() {
        spec.engine = source.language.engine()?;
    }
    spec.labels.push(("ryokan".into(), "run".into()));
    // Should this process be killed, the daemon removes it.
    spec.ephemeral = true;
    let mut signals = Signals::catch()?;
    let host = context.host().await?;
    let request = args.how.request(Work::Code(source.code));
    let shown = create_and_show(context, &host, &spec, request, &mut signals).await;
    // The kernel may exist: whatever happened, it is removed. Whoever does not want to wait for that says so once more.
    tokio::select! {
        () = remove(context, host, spec.name.as_str()) => {}
        _ = signals.any() => context.say(&format!("kernel {} may be left; later: ryokan rm {0}", spec.name)),
    }
    shown
}

async fn create_and_show(
    context: &Context,
    host: &HostClient,
    spec: &SpecRequest,
    request: ExecRequest,
    signals: &mut Signals,
) -> Result<(), Failure> {
    let start = async {
        let (kernel, info) = host.create_kernel(spec, "").await?;
        tracing::info!(kernel = %info.spec.name, id = %info.id, engine = info.spec.engine.name(), "kernel made");
        let execution = kernel.run(&request).await?;
        Ok::<_, Failure>((kernel, info, execution))
    };
    let (kernel, info, execution) = tokio::select! {
        started = start => started?,
        code = signals.any() => return Err(Failure::Quiet(code)),
    };
    let name = spec.name.as_str();
    let shown = Shown { context, kernel: &kernel, name, engine: info.spec.engine, throw_away: true };
    shown.execution(&execution, request.stdin_open, signals).await
}

/// Removes the throw-away kernel, over a new connection if this one is lost.
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
        // It was never made.
        Err(error) if error.code == ErrorCode::NotFound => {}
        Err(error) => context.say(&format!("kernel {name} could not be removed: {error}; later: ryokan rm {name}")),
    }
}

fn random_name() -> Result<KernelName> {
    let mut bytes = [0; 6];
    getrandom::fill(&mut bytes).map_err(|e| Error::internal(format!("no randomness: {e}")))?;
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("run-{digits}").parse().map_err(|e| Error::internal(format!("{e}")))
}
