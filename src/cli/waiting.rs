//! What somebody at a terminal is told while a command waits for a kernel that is at work for somebody else.

use std::time::Duration;

use super::args::Command;
use super::context::Context;
use crate::core::ids::ExecId;
use crate::core::kernel::State;
use crate::rpc::client::HostClient;

/// Whoever waits for less than this sees by the answer that there was nothing to be told.
const PATIENCE: Duration = Duration::from_secs(2);

impl Command {
    /// The kernel for whose worker the command may have to wait.
    pub fn waits_for(&self) -> Option<&str> {
        match self {
            Command::Start(args)
            | Command::Vars(args)
            | Command::Archive(args)
            | Command::Unarchive(args)
            | Command::Undo(args) => Some(&args.name),
            Command::Stop(args) if !args.force => Some(&args.name),
            Command::Get(args) => Some(&args.name),
            Command::Set(args) => Some(&args.name),
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

/// Does something that may have to wait for a kernel, and says for what, once, if it takes long. `own` is the execution that it is about,
/// if it is about one.
pub async fn told<T>(context: &Context, name: Option<&str>, own: Option<ExecId>, done: impl Future<Output = T>) -> T {
    let mut done = std::pin::pin!(done);
    let (Some(name), true) = (name, context.terminal.stderr) else { return done.await };
    tokio::select! {
        done = &mut done => return done,
        () = tokio::time::sleep(PATIENCE) => {}
    }
    tokio::select! {
        done = &mut done => return done,
        busy = busy_with(context, name) => {
            if let Some(exec) = busy.filter(|busy| own.is_none_or(|own| own.to_string() != *busy)) {
                context.say(&format!(
                    "waiting: kernel {name} is busy with execution {exec}; see it: ryokan exec {name} --attach {exec} (Ctrl-C there interrupts it)"
                ));
            }
        }
    }
    done.await
}

/// The number of the execution that a kernel is at work on, over a connection of its own: the other one waits.
async fn busy_with(context: &Context, name: &str) -> Option<String> {
    let (socket, _) = context.socket().ok()?;
    let host = HostClient::connect(&socket, super::context::CLIENT).await.ok()?;
    let (_, info) = host.open_kernel(name).await.ok()?;
    let exec = info.state_reason.strip_prefix("execution ")?.to_owned();
    (info.state == State::Busy { exec: ExecId(0) }.name()).then_some(exec)
}
