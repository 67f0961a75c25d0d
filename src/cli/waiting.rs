//! Notice on a terminal while a command waits for a busy kernel.

use std::time::Duration;

use super::args::Command;
use super::context::Context;
use crate::core::ids::ExecId;
use crate::core::kernel::State;
use crate::rpc::client::HostClient;

/// Wait after which the notice appears.
const NOTICE_DELAY: Duration = Duration::from_secs(1);

impl Command {
    /// The kernel whose worker the command may have to wait for.
    pub fn waits_for(&self) -> Option<&str> {
        match self {
            Command::Start(args) => Some(&args.name),
            Command::Archive(args) | Command::Unarchive(args) => Some(&args.name),
            Command::Undo(args) => Some(&args.name),
            Command::Stop(args) if !args.force => Some(&args.name),
            Command::Suspend(args) => args.name.as_deref(),
            Command::Vars(args) => Some(&args.name),
            Command::Mount(args) => Some(&args.name),
            Command::Unmount(args) => Some(&args.name),
            Command::Checkpoint(args) => Some(&args.name),
            Command::Restore(args) => Some(&args.name),
            Command::Diff(args) => Some(&args.name),
            Command::Fork(args) => Some(&args.name),
            Command::Export(args) => Some(&args.name),
            _ => None,
        }
    }
}

/// Awaits `done`, and once says what a slow command waits for. `own`: the command's own execution, if any.
pub async fn with_notice<T>(
    context: &Context,
    name: Option<&str>,
    own: Option<ExecId>,
    done: impl Future<Output = T>,
) -> T {
    let mut done = std::pin::pin!(done);
    let shows = context.terminal.stderr && !context.options.json;
    let (Some(name), true) = (name, shows) else { return done.await };
    tokio::select! {
        done = &mut done => return done,
        exec = first_execution_met(context, name) => if own != Some(exec) {
            context.say(&format!(
                "waiting for execution {exec} of {name} (interrupt it: ryokan interrupt {name}; see it: ryokan exec {name} --attach {exec})"
            ));
        }
    }
    done.await
}

/// The execution that a kernel runs. Asks until there is one: the daemon may be slow, the kernel may be starting.
async fn first_execution_met(context: &Context, name: &str) -> ExecId {
    loop {
        tokio::time::sleep(NOTICE_DELAY).await;
        if let Some(exec) = running_execution(context, name).await {
            return exec;
        }
    }
}

/// The number of a kernel's running execution, over a second connection: the first one is waiting.
async fn running_execution(context: &Context, name: &str) -> Option<ExecId> {
    let (socket, _) = context.socket().ok()?;
    let host = HostClient::connect(&socket, super::context::CLIENT).await.ok()?;
    let (_, info) = host.open_kernel(name).await.ok()?;
    State::execution_in(&info.state, &info.state_reason)
}
