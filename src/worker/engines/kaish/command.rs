//! The hidden tool that runs external commands, and running a command with literal words in kaish's
//! own way.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use kaish_kernel::ast::{Arg, Command, Expr, Value as Kv};
use kaish_kernel::dispatch::PipelinePosition;
use kaish_kernel::interpreter::{ControlFlow, ExecResult, Scope, structured_boundary_error, value_to_text_sink};
use kaish_kernel::tools::{ExecContext, Tool, ToolArgs, ToolCtx, ToolSchema, resolve_in_path};
use kaish_types::ToolFlow;

use super::external::{self, Run, Target};
use super::tools::{EXTERNAL, SESSION, Shared, session_stderr, session_stdout};

/// Runs external commands. Hidden aliases lead here: `ls` is an alias of `__ryokan-external ls`.
pub struct External {
    /// The output destinations.
    pub shared: Arc<Shared>,
}

impl External {
    async fn run(&self, args: &ToolArgs, ctx: &mut ExecContext) -> ToolFlow {
        let Some(name) = args.positional_text(0) else {
            return ToolFlow::Normal(ExecResult::failure(2, "no command"));
        };
        let argv = match argv(args) {
            Ok(argv) => argv,
            Err(message) => return ToolFlow::Normal(ExecResult::failure(1, format!("{name}: {message}"))),
        };
        let hidden = ctx.aliases.remove(&name);
        let flow = self.run_named(&name, argv, args, ctx).await;
        if let Some(hidden) = hidden {
            ctx.aliases.entry(name).or_insert(hidden);
        }
        flow
    }

    async fn run_named(&self, name: &str, argv: Vec<String>, args: &ToolArgs, ctx: &mut ExecContext) -> ToolFlow {
        // A function of that name was defined after the alias.
        let is_function = match &ctx.dispatcher {
            Some(dispatcher) => dispatcher.has_function(name).await,
            None => false,
        };
        let path = ctx.scope.get("PATH").map(kaish_kernel::interpreter::value_to_string).unwrap_or_default();
        let executable = if is_function { None } else { find(name, &path, ctx) };
        let cwd = ctx.backend.resolve_real_path(&ctx.cwd);
        let ours = ctx.background_job == Some(SESSION);
        let (Some(executable), Some(cwd), true) = (executable.clone(), cwd, ours) else {
            // kaish's own path: functions, background jobs, and its message for unknown commands.
            return delegate(&executable.filter(|_| !name.contains('/')), name, args, ctx).await;
        };
        let env = match environment(&ctx.scope) {
            Ok(env) => env,
            Err(message) => return ToolFlow::Normal(ExecResult::failure(1, format!("{name}: {message}"))),
        };
        self.shared.flush(ctx).await;
        let stdout = if staged(ctx) {
            Target::Stage
        } else if !session_stdout(ctx) {
            Target::Kept
        } else {
            match self.shared.stdout.stdio() {
                Ok(stdio) => Target::Session(stdio),
                Err(error) => return ToolFlow::Normal(ExecResult::failure(126, format!("{name}: {error}"))),
            }
        };
        let stderr = match self.stderr_target(ctx) {
            Ok(target) => target,
            Err(error) => return ToolFlow::Normal(ExecResult::failure(126, format!("{name}: {error}"))),
        };
        self.shared.forget_output();
        let run = Run {
            name: name.to_owned(),
            executable,
            argv,
            cwd,
            env,
            stdin_prefix: ctx.stdin.take(),
            stdin_pipe: ctx.pipe_stdin.take(),
            stdout,
            stderr,
            stage: if staged(ctx) { ctx.pipe_stdout.take() } else { None },
            cancel: ctx.cancel.clone(),
            kill_grace: ctx.kill_grace,
        };
        let mut result = external::run(run).await;
        if session_stderr(ctx) && !result.err.is_empty() {
            // An own message: the child's output bypassed us.
            self.shared.publish(&mut result, ctx).await;
        }
        ToolFlow::Normal(result)
    }

    fn stderr_target(&self, ctx: &ExecContext) -> std::io::Result<Target> {
        if session_stderr(ctx) {
            return Ok(Target::Session(self.shared.stderr.stdio()?));
        }
        // A redirect to a file, or to the session's standard output? kaish does not say; the
        // program text does.
        if !self.shared.only_merges() {
            return Ok(Target::Kept);
        }
        Ok(if staged(ctx) {
            Target::Stage
        } else if session_stdout(ctx) {
            Target::Session(self.shared.stdout.stdio()?)
        } else {
            Target::Kept
        })
    }
}

/// Whether this command itself, not something around it, writes into a pipeline.
fn staged(ctx: &ExecContext) -> bool {
    ctx.pipe_stdout.is_some()
        && ctx.background_job == Some(SESSION)
        && matches!(ctx.pipeline_position, PipelinePosition::First | PipelinePosition::Middle)
}

fn find(name: &str, path: &str, ctx: &ExecContext) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    if !name.contains('/') {
        return resolve_in_path(name, path).map(PathBuf::from);
    }
    let real = if Path::new(name).is_absolute() {
        PathBuf::from(name)
    } else {
        ctx.backend.resolve_real_path(&ctx.cwd)?.join(name)
    };
    let meta = std::fs::metadata(&real).ok()?;
    (meta.is_file() && meta.permissions().mode() & 0o111 != 0).then_some(real)
}

fn argv(args: &ToolArgs) -> Result<Vec<String>, String> {
    let mut argv = Vec::with_capacity(args.positional.len());
    for (i, value) in args.positional.iter().enumerate().skip(1) {
        if let Some(raw) = args.positional_raw.get(&i) {
            argv.push(raw.clone());
            continue;
        }
        if let Some(message) = structured_boundary_error("a command argument", value) {
            return Err(message);
        }
        argv.push(value_to_text_sink(value).map_err(|error| error.to_string())?);
    }
    Ok(argv)
}

fn environment(scope: &Scope) -> Result<Vec<(String, String)>, String> {
    let exported = scope.exported_vars();
    if let Some(message) = kaish_kernel::interpreter::structured_export_error(&exported) {
        return Err(message);
    }
    exported
        .into_iter()
        .map(|(name, value)| match value_to_text_sink(&value) {
            Ok(text) => Ok((name, text)),
            Err(error) => Err(error.to_string()),
        })
        .collect()
}

/// Runs the command in kaish's own way; by its path if known, so that no alias leads back here.
pub async fn delegate(executable: &Option<PathBuf>, name: &str, args: &ToolArgs, ctx: &mut ExecContext) -> ToolFlow {
    let Some(dispatcher) = ctx.dispatcher.clone() else {
        return ToolFlow::Normal(ExecResult::failure(1, format!("{name}: no dispatcher")));
    };
    let words = args.positional.iter().enumerate().skip(1);
    let command = Command {
        name: executable.as_ref().and_then(|path| path.to_str()).unwrap_or(name).to_owned(),
        args: words.map(|(i, value)| word(value, args.positional_raw.get(&i), executable.is_some())).collect(),
        redirects: Vec::new(),
    };
    match dispatcher.dispatch_flow(&command, ctx).await {
        Ok(ControlFlow::Exit { code, mut result }) => {
            result.code = code;
            ToolFlow::Exit(result)
        }
        Ok(flow) => ToolFlow::Normal(flow.into_absorbed_result()),
        Err(error) => ToolFlow::Normal(ExecResult::failure(1, format!("{name}: {error:#}"))),
    }
}

/// A word as an argument: literal for a program, classified as by the parser for a function.
fn word(value: &Kv, raw: Option<&String>, literal: bool) -> Arg {
    let Kv::String(text) = value else {
        return Arg::Positional(match raw {
            Some(raw) => Expr::NumericLiteral { value: value.clone(), raw: raw.clone() },
            None => Expr::Literal(value.clone()),
        });
    };
    let positional = || Arg::Positional(Expr::Literal(value.clone()));
    if literal {
        return positional();
    }
    if text == "--" {
        return Arg::DoubleDash;
    }
    if let Some(long) = text.strip_prefix("--") {
        return match long.split_once('=') {
            Some((key, text)) => Arg::Named { key: key.to_owned(), value: Expr::Literal(Kv::String(text.to_owned())) },
            None => Arg::LongFlag(long.to_owned()),
        };
    }
    match text.strip_prefix('-') {
        Some(short) if short.starts_with(|c: char| c.is_ascii_alphabetic()) => Arg::ShortFlag(short.to_owned()),
        _ => positional(),
    }
}

#[async_trait]
impl Tool for External {
    fn name(&self) -> &str {
        EXTERNAL
    }

    fn schema(&self) -> ToolSchema {
        ToolSchema::new(EXTERNAL, "Runs an external command").with_raw_argv().with_owned_output()
    }

    fn validate(&self, _args: &ToolArgs) -> Vec<kaish_kernel::validator::ValidationIssue> {
        Vec::new()
    }

    async fn execute(&self, args: ToolArgs, ctx: &mut dyn ToolCtx) -> ExecResult {
        self.execute_flow(args, ctx).await.into_result()
    }

    async fn execute_flow(&self, args: ToolArgs, ctx: &mut dyn ToolCtx) -> ToolFlow {
        let Some(ctx) = ctx.as_any_mut().downcast_mut::<ExecContext>() else {
            return ToolFlow::Normal(ExecResult::failure(1, "no execution context"));
        };
        // `--json` among the words belongs to the command.
        ctx.output_format = None;
        self.run(&args, ctx).await
    }
}
