//! Processes beside the engine: spawn, ps, kill.

use clap::Args;

use super::context::Context;
use super::drive::{Runs, Signals};
use super::exec::Shown;
use super::failure::Failure;
use super::names::KernelArg;
use super::spec::{parse_millis, parse_pair};
use super::{json, render, terminal};
use crate::core::error::Error;
use crate::core::exec::{ExecRequest, ExecStatus, Program, Work};
use crate::core::ids::ExecId;
use crate::core::kernel::State;
use crate::core::limits;
use crate::core::quantity::{format_size, parse_size};
use crate::core::spec::WORKSPACE;

/// `ryokan spawn`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan spawn demo -- ls -la
  ryokan spawn demo --cwd /workspace/app --env CI=1 --timeout 10m -- make test
  tar c src | ryokan spawn demo --stdin -- tar x
  ryokan spawn demo -d -- python3 -m http.server
  ryokan spawn demo -t -- vim notes.txt
  ryokan spawn demo -t -d -- bash
  ryokan exec demo --attach 7

The program runs in the kernel's sandbox and limits, also during an execution. Without a slash it is found in PATH. The exit code is the program's, or 128 and the number of the signal that ended it; 124 after the time limit, 126 if it cannot be run, 127 if it was not found. Ctrl-C sends SIGINT; a second Ctrl-C, or the end of this command, ends the program with everything that it started. What the program leaves running when it exits stays in the kernel, without output. A detached program continues without this command: attach to it with exec --attach, also on its terminal, and leave it with Ctrl-C or, on its terminal, Ctrl-P Ctrl-Q. A later attach shows the beginning of the output, up to --output-limit, its newest part, up to a quarter of that and 64 KiB, and what is written from then on; what was written between is lost: let a server that logs much log to a file.")]
pub struct SpawnArgs {
    /// Name or id of the kernel
    pub name: KernelArg,
    /// Program and arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "PROGRAM")]
    pub argv: Vec<String>,
    /// Working directory, relative to /workspace
    #[arg(long, value_name = "DIR", default_value = WORKSPACE)]
    pub cwd: String,
    /// Environment variable; repeatable. The journal keeps the name only
    #[arg(long = "env", value_name = "K=V", value_parser = parse_pair)]
    pub env: Vec<(String, String)>,
    /// Time limit, such as 90s; then everything that the program started is killed, too
    #[arg(long, value_name = "TIME", value_parser = parse_millis)]
    pub timeout: Option<u64>,
    /// Pass standard input to the program
    #[arg(long, conflicts_with = "detach")]
    pub stdin: bool,
    /// Run it on this terminal: shells, editors, full-screen programs
    #[arg(short, long, conflicts_with = "stdin")]
    pub tty: bool,
    /// Print the process's number and exit; it continues until it, its worker or its daemon ends
    #[arg(short, long)]
    pub detach: bool,
    /// Output that is kept for attaching later and for the journal, at most 48M: the first 4M by default
    #[arg(long, value_name = "SIZE", value_parser = parse_output_limit)]
    pub output_limit: Option<u64>,
}

/// `ryokan shell`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan shell demo
  ryokan shell demo --cwd /workspace/app

The same as spawn -t with bash or, if the kernel has none, sh. The shell is a program beside the kernel's engine: it sees the files, not the variables of the engine. It ends with this terminal. Jobs that it leaves in the background stay in the kernel.")]
pub struct ShellArgs {
    /// Name or id of the kernel
    pub name: KernelArg,
    /// Working directory, relative to /workspace
    #[arg(long, value_name = "DIR", default_value = WORKSPACE)]
    pub cwd: String,
}

/// `ryokan ps`
#[derive(Debug, Args)]
pub struct PsArgs {
    /// Name or id of the kernel
    pub name: KernelArg,
    /// Print numbers only
    #[arg(short, long)]
    pub quiet: bool,
}

/// `ryokan kill`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan kill demo 7
  ryokan kill demo 7 -s TERM

A signal is a name, with or without SIG, or a number.")]
pub struct KillArgs {
    /// Name or id of the kernel
    pub name: KernelArg,
    /// Number of the process
    pub process: u64,
    /// Send this signal to the program instead, such as TERM or 15
    #[arg(short, long, value_parser = parse_signal)]
    pub signal: Option<i32>,
}

fn parse_output_limit(text: &str) -> Result<u64, String> {
    match parse_size(text) {
        Ok(0) => Err("at least 1 byte is kept".into()),
        Ok(bytes) if bytes <= limits::OUTPUT_KEPT_MAX_BYTES => Ok(bytes),
        Ok(_) => Err(format!("at most {} are kept", format_size(limits::OUTPUT_KEPT_MAX_BYTES))),
        Err(error) => Err(error.to_string()),
    }
}

fn parse_signal(text: &str) -> Result<i32, String> {
    use nix::sys::signal::Signal;
    let known = |number: i32| Signal::try_from(number).ok();
    let name = text.to_ascii_uppercase();
    let named = || [name.clone(), format!("SIG{name}")].iter().find_map(|name| name.parse::<Signal>().ok());
    let signal = text.parse().map_or_else(|_| named(), known);
    signal.map(|signal| signal as i32).ok_or_else(|| {
        let names: Vec<&str> = Signal::iterator().map(|signal| &signal.as_str()["SIG".len()..]).collect();
        format!("it is no signal: give a name, with or without SIG, or a number (names: {})", names.join(", "))
    })
}

/// Runs a program beside the engine.
pub async fn spawn(context: &Context, args: SpawnArgs) -> Result<(), Failure> {
    if args.tty && !args.detach && context.options.json {
        return Err(Failure::usage("a program on a terminal has no result as JSON", "leave out --json or -t"));
    }
    let terminal = match (args.tty, args.detach) {
        (false, _) => None,
        (true, false) => Some(terminal::size()?),
        (true, true) => Some(terminal::size().unwrap_or(terminal::USUAL_SIZE)),
    };
    if args.tty && !args.detach && !context.terminal.stdout {
        return Err(Error::unsupported("standard output is no terminal").hint("leave out -t").into());
    }
    let program = Program { argv: args.argv, cwd: args.cwd, detached: args.detach, terminal };
    let request = ExecRequest {
        what: Work::Process(program),
        stdin_open: args.stdin || args.tty,
        env: args.tty.then(terminal_type).flatten().into_iter().chain(args.env).collect(),
        timeout_ms: args.timeout.unwrap_or(0),
        output_limit_bytes: args.output_limit.unwrap_or(0),
        ..ExecRequest::default()
    };
    let mut signals = Signals::catch()?;
    let (kernel, info) = context.kernel(&args.name).await?;
    let process = kernel.spawn(&request).await?;
    if args.detach {
        let exec = process.execution.exec();
        return context.show(|| json::spawned(exec), || format!("{exec}\n"));
    }
    let shown = Shown {
        context,
        kernel: &kernel,
        name: &args.name,
        engine: info.spec.engine,
        ephemeral: false,
        runs: Runs::Program,
        offset: 0,
        save_display: None,
    };
    let Some(size) = terminal else {
        return shown.execution(&process.execution, args.stdin, &mut signals).await;
    };
    let from = terminal::From { size: Some(size), offset: 0, detaches: false };
    let driven = terminal::attach(&kernel, &process.execution, from, &mut signals).await;
    shown.driven(process.execution.exec(), driven).await
}

/// What this command line's terminal understands, for programs inside.
fn terminal_type() -> Option<(String, String)> {
    let plain = |name: &String| {
        !name.is_empty() && name.len() < 64 && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.+".contains(&b))
    };
    Some(("TERM".to_owned(), std::env::var("TERM").ok().filter(plain)?))
}

/// Runs a shell on the terminal.
pub async fn shell(context: &Context, args: ShellArgs) -> Result<(), Failure> {
    const FIRST_SHELL: &str = "if command -v bash >/dev/null; then exec bash; else exec sh; fi";
    let argv = ["sh", "-c", FIRST_SHELL].map(String::from).to_vec();
    let ShellArgs { name, cwd } = args;
    let (env, timeout, stdin, tty, detach, output_limit) = (Vec::new(), None, false, true, false, None);
    spawn(context, SpawnArgs { name, argv, cwd, env, timeout, stdin, tty, detach, output_limit }).await
}

/// `ryokan interrupt`
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ryokan interrupt demo
  ryokan interrupt demo 12

Without a number: the execution that runs, if any. A queued execution ends without having run; of one that has ended already, the command only prints how. The kernel keeps its state.")]
pub struct InterruptArgs {
    /// Name or id of the kernel
    pub name: KernelArg,
    /// Number of the execution or process
    #[arg(value_name = "EXEC")]
    pub execution: Option<u64>,
}

/// Interrupts an execution.
pub async fn interrupt(context: &Context, args: InterruptArgs) -> Result<(), Failure> {
    let (kernel, info) = context.kernel(&args.name).await?;
    let running = args.execution.map(ExecId).or_else(|| State::execution_in(&info.state, &info.state_reason));
    let Some(exec) = running else {
        return Err(Error::not_found(format!("kernel {} runs no execution", info.spec.name))
            .hint(format!("its programs: ryokan ps {}", info.spec.name))
            .into());
    };
    let ended = kernel.interrupt_execution(exec).await?;
    let name = &info.spec.name;
    context.show(
        || serde_json::json!({ "execution": exec.0, "ended": ended.map(ExecStatus::name) }),
        || match ended {
            Some(status) => format!("execution {exec} of {name} had ended already: {}\n", status.name()),
            None => format!("interrupted execution {exec} of {name}\n"),
        },
    )
}

/// Lists the running processes.
pub async fn ps(context: &Context, args: PsArgs) -> Result<(), Failure> {
    let (kernel, _) = context.kernel(&args.name).await?;
    let processes = kernel.processes().await?;
    if args.quiet && !context.options.json {
        return context.print(&processes.iter().map(|process| format!("{}\n", process.exec)).collect::<String>());
    }
    context.show(
        || json::processes(&processes),
        || render::processes(&processes, render::now_ms(), context.terminal.paint),
    )
}

/// Ends a process with its tree, or sends its program a signal.
pub async fn kill(context: &Context, args: KillArgs) -> Result<(), Failure> {
    let (kernel, _) = context.kernel(&args.name).await?;
    let exec = ExecId(args.process);
    if let Some(signal) = args.signal {
        return Ok(kernel.signal_process(exec, signal).await?);
    }
    if !kernel.processes().await?.iter().any(|process| process.exec == exec) {
        let none = Error::not_found(format!("kernel {} runs no process {exec}", args.name));
        return Err(none.hint(format!("list them: ryokan ps {}", args.name)).into());
    }
    kernel.interrupt_execution(exec).await?;
    // A failed program is not a failure of this command.
    kernel.execution(exec).await?.result().await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signal_names_parse() {
        for (text, number) in [("TERM", 15), ("sigterm", 15), ("9", 9), ("HUP", 1)] {
            assert_eq!(parse_signal(text), Ok(number), "{text}");
        }
        for text in ["", "0", "99", "-1", "TERMS", "SIG", "SIGSIGTERM"] {
            let said = parse_signal(text).expect_err(text);
            assert!(said.contains("names: HUP, INT, ") && said.contains(" TERM, "), "{said}");
        }
    }
}
